"""All-reduce by hand: the sum travels round a ring of ranks, so that no rank is a hub.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 01_communication/ring_all_reduce.py
Needs: requirements.txt. Uses the CPU and gloo, with any number of ranks; times mean
    something only while an idle core is there for every rank.
Expect: the bytes that each rank sends, counted; then the times of three all-reduces,
    measured in turn, and a `check:` that all three give the sum.
Before: 01_communication/collectives.py, which shows what an all-reduce is.
Next: 01_communication/bandwidth.py, which measures all collectives.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# Elements in one message. Smaller pieces overlap better, larger ones cost fewer calls.
PIECE = 2**20
# While one piece is being added, the next ones are already on their way.
IN_FLIGHT = 3
Send = Callable[[torch.Tensor, int], dist.Work | None]


def ring_all_reduce(
    tensor: torch.Tensor,
    isend: Send = dist.isend,
    scratch: torch.Tensor | None = None,
) -> None:
    """Replace a contiguous tensor by its sum over all ranks; all ranks must call this.

    Reduce-scatter: the sum of each chunk grows from rank to rank until one rank holds
    it. All-gather: that sum travels on round the ring. Every rank sends to its right
    neighbour only and hears from its left one only (Patarasuk and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
        tensor: of one shape and dtype on all ranks.
        isend: starts to send a tensor to a rank and returns a handle to wait for.
        scratch: (IN_FLIGHT * PIECE,) of the same dtype, to be overwritten. A fresh one
            costs the time in which the system finds and clears the memory.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    flat = tensor.view(-1)
    scratch = tensor.new_empty(IN_FLIGHT * PIECE) if scratch is None else scratch
    chunks, slots = flat.tensor_split(world_size), scratch.split(PIECE)

    def pieces(hops: range) -> list[torch.Tensor]:
        """Cut up the chunks that started so many hops to the left of this rank."""
        cut = (chunks[(rank - hop) % world_size].split(PIECE) for hop in hops)
        return [piece for chunk in cut for piece in chunk if piece.numel()]

    # In the reduce-scatter, summands land beside the pieces they are added to.
    to_add = pieces(range(1, world_size))
    landings = [slots[i % IN_FLIGHT][: len(piece)] for i, piece in enumerate(to_add)]
    # In the all-gather, finished sums land in their places.
    landings += pieces(range(world_size - 1))
    to_forward = len(landings) - len(pieces(range(world_size - 2, world_size - 1)))
    # Receives come first: a sender waits for word that there is room, and that word
    # would have to queue behind whatever this rank is sending itself.
    receives = [dist.irecv(landing, left) for landing in landings[:IN_FLIGHT]]
    sends = [isend(piece, right) for piece in pieces(range(1))]
    for i, landing in enumerate(landings):
        receives[i].wait()  # type: ignore[union-attr]
        piece = to_add[i].add_(landing) if i < len(to_add) else landing
        if i + IN_FLIGHT < len(landings):
            receives.append(dist.irecv(landings[i + IN_FLIGHT], left))
        if i < to_forward:
            sends.append(isend(piece, right))
    # Until its `wait` returns, a send may still be reading from the tensor.
    for send in sends:
        send.wait()  # type: ignore[union-attr]


def naive_all_reduce(tensor: torch.Tensor, isend: Send = dist.isend) -> None:
    """Do the same with all ranks sending everything to rank 0, which sends it back."""
    if dist.get_rank() == 0:
        others = range(1, dist.get_world_size())
        received = torch.empty_like(tensor)
        for other in others:
            dist.recv(received, other)
            tensor += received
        for send in [isend(tensor, other) for other in others]:
            send.wait()  # type: ignore[union-attr]
    else:
        isend(tensor, 0).wait()  # type: ignore[union-attr]
        dist.recv(tensor, 0)


class CountingSend:
    """`dist.isend` that adds up the bytes which pass through it."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.sent = 0

    def __call__(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        """Count, then send."""
        self.sent += tensor.nbytes
        return dist.isend(tensor, to)


def ring_bytes(numel: int, itemsize: int, rank: int, world_size: int) -> int:
    """Return what a rank sends: everything twice, but for two chunks.

    It never sends the chunk that its right neighbour finishes, nor in the second round
    the one that its right neighbour holds first.
    """
    lengths = [
        len(c) for c in torch.empty(numel, device="meta").tensor_split(world_size)
    ]
    spared = lengths[(rank + 1) % world_size] + lengths[(rank + 2) % world_size]
    return (2 * numel - spared) * itemsize


def summand(numel: int, rank: int) -> torch.Tensor:
    """Return whole numbers, so that a sum is exact in any order; differ by rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-99, 100, (numel,), generator=generator).float()


def count_bytes(numel: int) -> list[tuple[int, int]]:
    """Check both all-reduces on tensors of a length; return (ring, naive) per rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = torch.zeros(numel)  # the sum as one process finds it, with no message
    for other in range(world_size):
        alone += summand(numel, other)
    built_in = summand(numel, rank)
    dist.all_reduce(built_in)
    sent = []
    for by_hand in (ring_all_reduce, naive_all_reduce):
        tensor, isend = summand(numel, rank), CountingSend()
        by_hand(tensor, isend)
        if not (torch.equal(tensor, alone) and torch.equal(built_in, alone)):
            raise RuntimeError(f"{by_hand.__name__} of {numel} elements: wrong sum")
        sent.append(isend.sent)
    if sent[0] != ring_bytes(numel, 4, rank, world_size):
        raise RuntimeError(f"the ring sent {sent[0]} bytes for {numel} elements")
    if sent[1] != 4 * numel * (1 if rank else world_size - 1):
        raise RuntimeError(f"the naive way sent {sent[1]} bytes for {numel} elements")
    everyone = [torch.zeros(2, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(everyone, torch.tensor(sent))
    return [(int(ring), int(naive)) for ring, naive in everyone]


def seconds(numel: int, rounds: int) -> dict[str, list[float]]:
    """Time each way `rounds` times, in turn; a time is that of the slowest rank."""
    scratch = torch.empty(IN_FLIGHT * PIECE)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "ring": lambda tensor: ring_all_reduce(tensor, scratch=scratch),
        "naive": naive_all_reduce,
        "built-in": dist.all_reduce,
    }
    names, tensor = list(ways), torch.zeros(numel)
    times = torch.zeros(rounds, len(ways))
    for number in range(-2, rounds):  # two rounds to warm up
        # Who goes first changes, for that one finds the machine in another state.
        for step in range(len(ways)):
            column = (number + step) % len(ways)
            dist.barrier()
            started = time.perf_counter()
            ways[names[column]](tensor)
            if number >= 0:
                times[number, column] = time.perf_counter() - started
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(names, times.T.tolist(), strict=True))


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Check and count, then time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="All-reduce by hand, and its price.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--sizes", nargs="*", type=float, default=[1, 4, 16], help="in MB of 2**20")
    add("--rounds", type=int, default=15, help="medians are over these")
    args = parser.parse_args()
    if args.rounds < 1 or not all(0 <= megabytes <= 1024 for megabytes in args.sizes):
        refuse("--rounds must be 1 or more, --sizes from 0 to 1024")
    if "RANK" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        """Print from rank 0 only, at once."""
        if rank == 0:
            print(text, flush=True)

    # Nothing, one element, one too few and one too many for equal chunks, two pieces.
    lengths = [0, 1, world_size - 1, world_size + 1, world_size * PIECE + 1]
    for numel in lengths:
        count_bytes(numel)
    message = 120_000 * 4
    share = 2 * (world_size - 1) / world_size
    say(
        f"bytes sent for a message of {message:,}, 2 (n-1)/n of which is "
        f"{share * message:,.0f}"
    )
    for sender, (ring, naive) in enumerate(count_bytes(message // 4)):
        say(f"  rank {sender}   ring {ring:9,}   naive {naive:9,}")
    for megabytes in args.sizes:
        numel = int(megabytes * 2**20) // 4
        count_bytes(numel)
        times = seconds(numel, args.rounds)
        best = statistics.median(times["built-in"])
        say(f"{megabytes:g} MB, median of {args.rounds} (middle half)")
        for name, measured in times.items():
            low, middle, high = statistics.quantiles([*measured, *measured], n=4)
            say(
                f"  {name:8} {1e3 * middle:8.2f} ms ({1e3 * low:.2f} to "
                f"{1e3 * high:.2f}), {best / middle:.2f} of the built-in's speed"
            )
    count = len(lengths) + 1 + len(args.sizes)
    say(f"check: ring = naive = built-in = the sum, {count} lengths; bytes as computed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
