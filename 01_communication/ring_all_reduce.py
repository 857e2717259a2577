"""All-reduce by hand: partial sums travel round a ring, so that no rank is a root.

Run: torchrun --nproc-per-node=4 01_communication/ring_all_reduce.py
Expect: the same sums as gloo's all-reduce, and the bytes that each rank has sent: in
    the ring all send the same, through rank 0 it is rank 0 that sends most.
"""

import torch
import torch.distributed as dist

from ranks import check, gather, join, leave, say


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Replace a contiguous tensor by its sum over all ranks; return the bytes sent.

    In n - 1 steps of a reduce-scatter the sum of each chunk grows from rank to rank; in
    n - 1 steps of an all-gather the complete sums travel on. (Patarasuk and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002)
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = tensor.view(-1).tensor_split(n)
    sent = 0
    for step in range(2 * (n - 1)):
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(target)
        # Either order is right. Data can travel as soon as the receive is started.
        receive = dist.P2POp(dist.irecv, incoming, left)
        send = dist.P2POp(dist.isend, outgoing, right)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()
        sent += outgoing.nbytes
        target.copy_(target + incoming if step < n - 1 else incoming)  # add, or copy
    return sent


def naive_all_reduce(tensor: torch.Tensor) -> int:
    """Do the same through rank 0, which adds up and sends the sum back."""
    n = dist.get_world_size()
    if dist.get_rank() > 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return tensor.nbytes
    received = torch.empty_like(tensor)
    for other in range(1, n):
        dist.recv(received, src=other)
        tensor += received
    for other in range(1, n):
        dist.send(tensor, dst=other)
    return (n - 1) * tensor.nbytes


def numbers_of(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Return whole numbers, so that a sum is exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-99, 100, (count,), generator=generator).float().to(device)


def main() -> None:
    """All-reduce in three ways; count bytes; compare with the sum of one process."""
    device = join()
    rank, n = dist.get_rank(), dist.get_world_size()
    longest = 120_000 // n * n  # so that all chunks are of one length
    equal, sent, lengths = [], [], (0, 1, n + 1, longest)
    for count in lengths:
        of_all = torch.stack([numbers_of(r, count, device) for r in range(n)])
        by_ring, naive, built_in = (numbers_of(rank, count, device) for _ in range(3))
        sent = [ring_all_reduce(by_ring), naive_all_reduce(naive)]
        dist.all_reduce(built_in)
        results = (by_ring, naive, built_in)
        equal += [torch.equal(result, of_all.sum(dim=0)) for result in results]
    formula = 2 * 4 * longest * (n - 1) // n
    say(f"bytes sent for a message of {4 * longest:,}; 2 (n-1)/n of it is {formula:,}")
    for other, (ring, naive) in enumerate(gather(sent)):
        say(f"  rank {other} | ring {ring:9,} | through rank 0 {naive:9,}")
    claim = (
        f"{len(lengths)} lengths: ring = through rank 0 = built-in; bytes by formula"
    )
    is_right = all(equal) and len(equal) == 3 * len(lengths) and sent[0] == formula
    check(is_right, claim)
    leave()


if __name__ == "__main__":
    main()
