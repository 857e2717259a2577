"""Three ways to pass a tensor on to the next rank: blocking, non-blocking, batched.

Run: python 01_communication/send_recv.py
Expect: three processes in a ring; each has the number of the rank to its left.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ranks import check, gather, number, read_options, say


def blocking(mine: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Send, then receive, or the other way round: not all ranks may send first."""
    received = torch.empty_like(mine)
    # Of three ranks 0 and 2, which are neighbours, both send first. It does not hang:
    # rank 1 receives from 0, so 0 can receive from 2, and then 2 from 1.
    if dist.get_rank() % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(received, src=left)
    else:
        dist.recv(received, src=left)
        dist.send(mine, dst=right)
    return received


def non_blocking(mine: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Start both, then wait for both; until then, leave both tensors alone."""
    received = torch.empty_like(mine)
    works = [dist.irecv(received, src=left), dist.isend(mine, dst=right)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return received


def batched(mine: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Hand over the whole exchange as a list; the backend orders it."""
    received = torch.empty_like(mine)
    operations = [
        dist.P2POp(dist.isend, mine, right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def pass_on(rank: int, world_size: int) -> None:
    """Pass this rank's number to the right in each way; check what came."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    results = []
    for way in (blocking, non_blocking, batched):
        mine = torch.tensor([float(rank)])
        received = way(mine, left, right)
        results.append(received.item())
        # All ranks must call `gather`. They do: each makes this text, rank 0 prints it.
        say(f"{way.__name__:12} | ranks 0, 1, ... have {gather(received.item())}")
    check(results == 3 * [left], "in 3 ways every rank has its left neighbour's number")


def main(rank: int, world_size: int, port: int) -> None:
    """Be one rank: join the process group, pass numbers on, leave."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pass_on(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    nprocs = {"type": number(2, 16), "default": 3, "help": "processes to start"}
    world_size = read_options(nprocs=nprocs).nprocs
    # The processes meet at this store. Port 0: the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, (world_size, store.port), nprocs=world_size)
