"""Check a reduce-scatter, and say in words what is wrong with it.

Rank r starts with 10**r times the number of the chunk, from 1 on: each digit of a
result says how often one rank's part is in it.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ask_ranks import ask_ranks, in_words
from ranks import number, read_options

COLUMNS = 4  # numbers in a chunk
Send = Callable[[torch.Tensor, int], Any]
ReduceScatter = Callable[[torch.Tensor, Send], torch.Tensor]


def check_reduce_scatter(answer: ReduceScatter) -> None:
    """Start the ranks, and let each of them try the answer."""
    options = read_options(nprocs={"type": number(2, 8), "default": 3})
    claim = f"{options.nprocs} ranks hold their chunk of the sum"
    ask_ranks(try_reduce_scatter, answer, options.nprocs, claim)


class Sending:
    """A handle that also notes whether what is sent has changed before the wait."""

    def __init__(self, tensor: torch.Tensor, to: int) -> None:
        """Start to send."""
        self.tensor, self.before, self.has_changed = tensor, tensor.clone(), False
        self.handle: Any = dist.isend(tensor, to)

    def __getattr__(self, name: str) -> Any:
        """Be the handle, in all but `wait`."""
        return getattr(self.handle, name)

    def wait(self, *arguments: Any) -> bool:
        """Wait until the tensor may be overwritten."""
        self.has_changed |= not torch.equal(self.tensor, self.before)
        return self.handle.wait(*arguments)


def try_reduce_scatter(answer: ReduceScatter) -> str:
    """Call the answer once; say in words what is wrong on this rank, or nothing."""
    sent, sendings = Counter(), []
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def isend(tensor: torch.Tensor, to: int) -> Sending:
        if to not in range(world_size):
            raise ValueError(f"there is no rank {to}")
        sent[to] += tensor.numel()
        sendings.append(Sending(tensor, to))
        return sendings[-1]

    # float64 holds eight digits exactly, one for each rank; float32 does not.
    chunks = torch.arange(1, world_size + 1, dtype=torch.float64)
    chunks = chunks.repeat_interleave(COLUMNS)
    tensor = (chunks * 10**rank).reshape(world_size, COLUMNS)
    group: Any = dist.group.WORLD
    # How many messages and collectives this rank has begun in the group.
    before = group._get_sequence_number_for_group()
    try:
        result = answer(tensor, isend)
    except Exception as error:
        return in_words(error)
    calls = group._get_sequence_number_for_group() - before
    found = wrong_chunk(result, sent, rank, world_size)
    # In a ring a rank receives as often as it sends.
    if not found and calls > 2 * len(sendings):
        found = (
            "the sum is right, but not by the ring: it called more than isend and recv"
        )
    if any(sending.has_changed for sending in sendings):
        found = "a chunk changed before its send was waited for: is what arrives in it?"
    if not found and not all(sending.handle.is_completed() for sending in sendings):
        found = "the sum is right, but a send was not waited for: it could get lost"
    # A rank that left now would break off messages that others still wait for.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    return found


def wrong_chunk(result: object, sent: Counter, rank: int, world_size: int) -> str:
    """Say in words what is wrong with a rank's result, or nothing.

    Args:
        result: what `reduce_scatter` returned on `rank`.
        sent: how many numbers this rank has sent to each other rank.
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
    right, needed = (rank + 1) % world_size, (world_size - 1) * COLUMNS
    to_each = [f"{count} numbers to rank {to}" for to, count in sorted(sent.items())]
    seen = ", ".join(to_each) or "nothing by isend"
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
        missing = ", ".join(str(r) for r, digit in enumerate(digits) if digit == 0)
        if missing:
            hint = "is what arrives waited for and added, and the first chunk right?"
            if sent.total() < needed:
                hint = "too few steps?"
            return f"the part of rank {missing} is missing; it sent {seen}: {hint}"
        return f"its sum is {value:g}: some part is in it more than once"
    if sent != {right: needed}:
        return (
            f"the sum is right, but not by the ring: it sent {seen}, and should send "
            f"{world_size - 1} chunks of {COLUMNS}, to rank {right} only"
        )
    return ""
