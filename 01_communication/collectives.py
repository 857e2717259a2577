"""Six collectives, which all ranks call together, with the numbers before and after.

Run: torchrun --nproc-per-node=3 01_communication/collectives.py
Expect: what every rank has before and after each call, and four equalities: an
    all-reduce is a reduce-scatter and an all-gather, and so on.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from expected import agrees, numbers_before, table
from ranks import check, gather, join, leave, say

# Each function takes this rank's tensor, with an element for every rank, and the root:
# the one rank that a broadcast and a scatter come from, a gather and a reduce go to.


def broadcast(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Overwrite every rank's tensor with the root's."""
    dist.broadcast(mine, src=root)
    return mine


def scatter(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Give each rank one element of the root's tensor."""
    received = torch.empty_like(mine[:1])
    elements = list(mine.split(1)) if dist.get_rank() == root else None
    dist.scatter(received, elements, src=root)
    return received


def gather_first(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Collect every rank's first element on the root; the others keep NaN."""
    received = torch.full_like(mine, math.nan)
    places = list(received.split(1)) if dist.get_rank() == root else None
    dist.gather(mine[:1], places, dst=root)
    return received


def all_gather(mine: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Collect every rank's first element on every rank."""
    received = mine.new_empty(dist.get_world_size())
    dist.all_gather(list(received.split(1)), mine[:1])
    return received


def reduce_scatter(mine: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Sum all tensors element by element; each rank gets one element of the sum."""
    received = torch.empty_like(mine[:1])
    dist.reduce_scatter(received, list(mine.split(1)), op=dist.ReduceOp.SUM)
    return received


def all_reduce(mine: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Overwrite every rank's tensor with the sum of all."""
    dist.all_reduce(mine, op=dist.ReduceOp.SUM)
    return mine


def reduce(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Overwrite the root's tensor with the sum of all; the others' are undefined."""
    dist.reduce(mine, dst=root, op=dist.ReduceOp.SUM)
    return mine


def in_turn(one: Callable, two: Callable) -> Callable:
    """Make two calls, the second with what the first returns."""
    return lambda mine, root: two(one(mine, root), root)


Calls = dict[str, Callable[[torch.Tensor, int], torch.Tensor]]
CALLS: Calls = {
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather_first,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    # The same result in two calls.
    "all_reduce = reduce_scatter + all_gather": in_turn(reduce_scatter, all_gather),
    "all_reduce = reduce + broadcast": in_turn(reduce, broadcast),
    "all_gather = gather + broadcast": in_turn(gather_first, broadcast),
    "reduce_scatter = reduce + scatter": in_turn(reduce, scatter),
}


def main(calls: Calls = CALLS) -> None:
    """Make each call once, show it, and compare it with plain Python."""
    device = join(at_most=8)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    root, right = world_size - 1, []
    for name, call in calls.items():
        before = numbers_before(world_size)
        mine = torch.tensor(before[rank], dtype=torch.float64, device=device)
        after = call(mine, root).tolist()
        say(table(name, before, gather(after)))
        right.append(agrees(name, after, before, rank, root))
    claim = f"{len(calls)} calls on {world_size} ranks, root {root}: as in plain Python"
    check(all(right) and len(right) == len(calls), claim)
    leave()


if __name__ == "__main__":
    main()
