"""The other collectives: reduce, all-to-all, barrier, other operations than the sum.

Run: torchrun --nproc-per-node=3 01_communication/other_collectives.py
Expect: what every rank has before and after each call, as in `collectives.py`.
"""

import time
from functools import partial

import torch
import torch.distributed as dist

from collectives import Calls, all_gather, main, reduce


def all_to_all(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Send one element to each rank, receive one from each: rows become columns."""
    received = torch.empty_like(mine)
    dist.all_to_all(list(received.split(1)), list(mine.split(1)))
    return received


def barrier(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Wait for all ranks; count those that had called before this one went on."""
    # The processes of one machine read the same monotonic clock.
    called = mine.new_full((1,), time.monotonic())
    dist.barrier()
    went_on = time.monotonic()
    return (all_gather(called) <= went_on).sum(dim=0, keepdim=True)


def all_reduce(mine: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType):
    """Combine all tensors element by element by another operation than the sum."""
    dist.all_reduce(mine, op=op)
    return mine


# These take one tensor in place of a list. Before torch 2.13 the first two were called
# all_gather_into_tensor and reduce_scatter_tensor: those names print a FutureWarning.


def all_gather_single(mine: torch.Tensor, root: int) -> torch.Tensor:
    """All-gather into one tensor."""
    received = torch.empty_like(mine)
    dist.all_gather_single(received, mine[:1])
    return received


def reduce_scatter_single(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Reduce-scatter from one tensor."""
    received = torch.empty_like(mine[:1])
    dist.reduce_scatter_single(received, mine)
    return received


def all_to_all_single(mine: torch.Tensor, root: int) -> torch.Tensor:
    """All-to-all from one tensor into another."""
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    return received


OTHERS: Calls = {
    "reduce": reduce,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "all_reduce AVG": partial(all_reduce, op=dist.ReduceOp.AVG),
    "all_reduce PRODUCT": partial(all_reduce, op=dist.ReduceOp.PRODUCT),
    "all_reduce MIN": partial(all_reduce, op=dist.ReduceOp.MIN),
    "all_reduce MAX": partial(all_reduce, op=dist.ReduceOp.MAX),
    "all_gather_single": all_gather_single,
    "reduce_scatter_single": reduce_scatter_single,
    "all_to_all_single": all_to_all_single,
}

if __name__ == "__main__":
    main(OTHERS)
