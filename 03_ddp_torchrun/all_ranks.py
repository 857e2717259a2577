"""What all ranks tell each other, and how near two results are.

Every rank must make the calls that ask all ranks.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


def from_all_ranks(mine: Value) -> list[Value]:
    """Return what each rank gave to this call, in rank order."""
    by_rank = [mine] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return by_rank


def flat_copy(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Copy tensors into one vector."""
    return torch.cat([one.detach().flatten() for one in tensors if one is not None])


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest entry of `other`."""
    return ((mine - other).abs().max() / other.abs().max()).item()


def count_models(model: torch.nn.Module) -> int:
    """Count the different sets of weights that the ranks hold; 1 if all agree."""
    weights = flat_copy(model.parameters()).tolist()
    return len(set(map(tuple, from_all_ranks(weights))))


def raise_on_all_ranks(faults: list[str]) -> None:
    """Raise on every rank if one of them found a fault."""
    by_rank = from_all_ranks(faults)
    found = [f"rank {rank}: {one}" for rank, own in enumerate(by_rank) for one in own]
    if found:
        raise RuntimeError("; ".join(found))
