"""Send Python objects instead of tensors: handy, larger, and a matter of security.

Run: torchrun --nproc-per-node=2 01_communication/objects.py
Expect: what each of the four object collectives delivers, what an object costs next to
    a tensor, and a function that runs on ranks that never called it.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ranks import check, gather, join, leave, say


def report(rank: int) -> dict[str, Any]:
    """Make an object, of another length on every rank."""
    return {"rank": rank, "losses": [0.5] * (rank + 1)}


def exchange_objects() -> dict[str, Any]:
    """Make each object collective once; return what this rank received, by name."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Lists are filled in place. This one has the same length on every rank.
    settings = ["settings", {"lr": 0.1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(settings, src=0)
    reports = [report(other) for other in range(world_size)]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, reports if rank == 0 else None, src=0)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(report(rank), gathered, dst=0)
    everybodys: list[Any] = [None] * world_size
    dist.all_gather_object(everybodys, report(rank))
    return {
        "broadcast_object_list": settings,
        "scatter_object_list": scattered,
        "gather_object": gathered,
        "all_gather_object": everybodys,
    }


def expected(rank: int, world_size: int) -> dict[str, Any]:
    """Return what a rank must have received."""
    reports = [report(other) for other in range(world_size)]
    return {
        "broadcast_object_list": ["settings", {"lr": 0.1}],
        "scatter_object_list": [report(rank)],
        "gather_object": reports if rank == 0 else None,
        "all_gather_object": reports,
    }


HAS_RUN: list[str] = []


def run_me(text: str) -> None:
    """Stand for any function that a sender might like to run on your machine."""
    HAS_RUN.append(text)


class Surprise:
    """An object that, wherever it is unpickled, makes a call."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        """Tell pickle how to rebuild this object: by any call that the sender likes."""
        return run_me, ("chosen by rank 0",)


def main() -> None:
    """Exchange objects, compare their length with a tensor's, receive a surprise."""
    join(at_least=2, only_cpu=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = exchange_objects()
    for name, objects in received.items():
        say(name)
        for other, of_rank in enumerate(gather(objects)):
            say(f"  rank {other} | {of_rank}")
    numbers = torch.linspace(0, 1, 50_000)
    pickled = pickle.dumps(numbers.tolist())
    say(f"50,000 numbers: tensor {numbers.nbytes:,} bytes, pickled {len(pickled):,}")

    dist.broadcast_object_list([Surprise() if rank == 0 else None], src=0)
    say(f"run_me() has run, by rank: {gather(HAS_RUN)}")
    expected_run = ["chosen by rank 0"] if rank > 0 else []
    is_right = received == expected(rank, world_size) and expected_run == HAS_RUN
    claim = f"4 object collectives on {world_size} ranks; run_me() on all but rank 0"
    check(is_right, claim)
    leave()


if __name__ == "__main__":
    main()
