"""An exercise: write the reduce-scatter, which is the first half of the ring.

Run: python 01_communication/exercise_reduce_scatter.py
Needs: ask_ranks.py beside it, and an editor. Fill in `reduce_scatter`; it must do for
    any number of ranks.
Expect: a line for every rank that says what is still wrong with what it returns; at
    last a `check:`. Until then the script exits with status 1.
Before: 01_communication/ring_all_reduce.py
Next: 01_communication/bandwidth.py
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ask_ranks import ask_every_rank, in_words

Send = Callable[[torch.Tensor, int], dist.Work | None]


def reduce_scatter(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    """Return chunk number `rank` of the sum over all ranks; yours to write.

    Args:
        tensor: (chunks, columns), as many chunks as ranks; it may be overwritten.
        isend: starts to send a tensor to a rank and returns a handle to wait for. Use
            it rather than `dist.isend`: it counts. To receive, use `dist.recv`.
    """
    return tensor[dist.get_rank()]


# What follows checks it. Rank r starts with 10**r times the number of the chunk, from 1
# on: each digit of a result says how often one rank's part is in it.
COLUMNS = 4  # numbers in a chunk


def verdict(result: object, sent: int, rank: int, world_size: int) -> str:
    """Say in words what is wrong with a rank's result, or nothing.

    Args:
        result: what `reduce_scatter` returned on `rank`.
        sent: numbers that this rank has sent.
        rank: whose result it is.
        world_size: ranks, and so chunks.
    """
    if not isinstance(result, torch.Tensor):
        return f"it returned {type(result).__name__}, not a tensor"
    if result.numel() != COLUMNS:
        return f"it returned {result.numel()} numbers; a chunk has {COLUMNS}"
    values = set(result.flatten().tolist())
    if len(values) > 1:
        return "its numbers do not belong to one chunk; wait for what you receive"
    everyone = sum(10**other for other in range(world_size))
    [value] = values
    for chunk in range(world_size):
        if value == (chunk + 1) * everyone and chunk != rank:
            return (
                f"it holds the whole sum of chunk {chunk}, and should hold chunk "
                f"{rank}: let every rank start with another chunk"
            )
    if value != (rank + 1) * everyone:
        digits = [int(value) // 10**other % 10 for other in range(world_size)]
        missing = [str(other) for other, digit in enumerate(digits) if digit == 0]
        if missing:
            return f"the part of rank {', '.join(missing)} is missing: too few steps?"
        return f"its sum is {value:g}: some part is in it more than once"
    if sent != (world_size - 1) * COLUMNS:
        return (
            f"the sum is right, but {sent} numbers were sent; "
            f"{world_size - 1} chunks of {COLUMNS} are enough"
        )
    return ""


def judge_reduce_scatter(rank: int) -> str:
    """Try `reduce_scatter` once; say in words what is wrong on this rank."""
    sent, world_size = 0, dist.get_world_size()
    handles = []

    def isend(tensor: torch.Tensor, to: int) -> dist.Work | None:
        nonlocal sent
        sent += tensor.numel()
        handles.append(dist.isend(tensor, to))
        return handles[-1]

    # float64 holds eight digits exactly, one for each rank; float32 does not.
    chunks = torch.arange(1, world_size + 1, dtype=torch.float64)
    chunks = chunks.repeat_interleave(COLUMNS)
    tensor = (chunks * 10**rank).reshape(world_size, COLUMNS)
    try:
        result = reduce_scatter(tensor, isend)
    except RuntimeError as error:
        return in_words(error)
    found = verdict(result, sent, rank, world_size)
    if not found and not all(handle.is_completed() for handle in handles):
        found = "the sum is right, but a send was not waited for: it could get lost"
    # A rank that left now would break off messages that others still wait for.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    return found


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Run the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your reduce-scatter.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--nprocs", type=int, default=3, help="processes to start")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if not 2 <= args.nprocs <= 8:
        refuse(f"--nprocs must be 2 to 8, not {args.nprocs}")
    ask_every_rank(judge_reduce_scatter, args.nprocs)
    print(f"check: {args.nprocs} ranks hold their chunk of the sum")


if __name__ == "__main__":
    main()
