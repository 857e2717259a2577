"""Send Python objects instead of tensors: handy, slower, and a matter of trust.

Run: torchrun --nproc-per-node=2 01_communication/objects.py
Needs: requirements.txt. Uses the CPU and gloo: an object is pickled on the CPU anyway.
Expect: what each of the four object collectives delivers; what an object costs next to
    a tensor; and a function that runs on ranks that never called it.
Before: 01_communication/collectives.py, the same movements with tensors.
Next: 01_communication/groups.py, where only some of the ranks take part.
"""

import argparse
import os
import pickle
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

NUMBERS = 50_000


def report(rank: int) -> dict[str, Any]:
    """Make an object of this rank's own, of another length on every rank."""
    return {"rank": rank, "losses": [0.5] * (rank + 1)}


def exchange_objects() -> dict[str, tuple[Any, Any]]:
    """Make each object collective once; every rank must call this.

    Returns:
        By name: what this rank received, and what it should have received.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everything = [report(r) for r in range(world_size)]
    # The lists are filled in place. Their length must be the same on every rank; what
    # the receivers put in is overwritten.
    broadcast = ["settings", {"lr": 0.1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(broadcast, src=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, everything if rank == 0 else None, src=0)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(report(rank), gathered, dst=0)
    all_gathered: list[Any] = [None] * world_size
    dist.all_gather_object(all_gathered, report(rank))
    return {
        "broadcast_object_list": (broadcast, ["settings", {"lr": 0.1}]),
        "scatter_object_list": (scattered, [report(rank)]),
        "gather_object": (gathered, everything if rank == 0 else None),
        "all_gather_object": (all_gathered, everything),
    }


# What has run in this process. Only `note` writes here.
NOTES: list[str] = []


def note(text: str) -> str:
    """Stand for any function that a sender might like to run on your machine."""
    NOTES.append(text)
    return text


class Surprise:
    """An object that, wherever it is unpickled, makes a call instead."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        """Tell pickle how to rebuild this object: by any call the sender likes."""
        return note, ("chosen by rank 0",)


def median_wall_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Time a call that all ranks make; each repetition starts together."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Exchange objects, weigh them against tensors, receive a surprise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Send objects, and see what runs.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        refuse("needs 2 ranks or more; start it with torchrun --nproc-per-node=2")
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = exchange_objects()
    wrong = [name for name, (found, expected) in received.items() if found != expected]
    # Both hold the same numbers. A tensor travels as its bare bytes; a list is pickled,
    # a type mark and eight bytes for each number, sent as bytes, and rebuilt.
    numbers = torch.linspace(0, 1, NUMBERS)
    as_list = numbers.tolist()
    into = [torch.empty_like(numbers) for _ in range(world_size)]
    into_list: list[Any] = [None] * world_size
    tensor_seconds = median_wall_seconds(lambda: dist.all_gather(into, numbers))
    list_seconds = median_wall_seconds(
        lambda: dist.all_gather_object(into_list, as_list)
    )
    if any(x.tolist() != y for x, y in zip(into, into_list, strict=True)):
        wrong.append("the numbers")
    parcel = [Surprise() if rank == 0 else None]
    dist.broadcast_object_list(parcel, src=0)
    # Rank 0 keeps its own object. On all others `note` has run, and nobody called it.
    has_run = NOTES == ["chosen by rank 0"] and parcel == NOTES
    if has_run != (rank > 0) or (rank == 0 and NOTES):
        wrong.append("the surprise")
    by_rank: list[Any] = [None] * world_size
    mine = ({name: found for name, (found, _) in received.items()}, NOTES, wrong)
    dist.all_gather_object(by_rank, mine)
    if rank == 0:
        for name in received:
            print(name)
            for r, (found, _, _) in enumerate(by_rank):
                print(f"  rank {r} | {found[name]}")
        print(f"cost of {NUMBERS:,} numbers")
        pickled = len(pickle.dumps(as_list))
        print(f"  as a tensor of float32 | {numbers.nbytes:,} bytes")
        print(f"  as a pickled list      | {pickled:,} bytes")
        print(f"  one number as a tensor | {numbers[:1].nbytes} bytes")
        print(f"  that tensor, pickled   | {len(pickle.dumps(torch.ones(1)))} bytes")
        ratio = list_seconds / tensor_seconds
        print(f"time: the list took {ratio:.0f} times as long as the tensor")
        print("functions that ran because an object arrived")
        for r, (_, notes, _) in enumerate(by_rank):
            print(f"  rank {r} | {notes}")
    dist.destroy_process_group()
    failures = [(r, names) for r, (_, _, names) in enumerate(by_rank) if names]
    if failures:
        sys.exit(f"wrong, by rank: {failures}" if rank == 0 else 1)
    if rank == 0:
        print(
            f"check: 4 object collectives deliver what was sent, on {world_size} ranks;"
            f" {world_size - 1} ran note()"
        )


if __name__ == "__main__":
    main()
