"""The answer to 01_communication/exercises/reduce_scatter.py."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def reduce_scatter(
    tensor: torch.Tensor, isend: Callable[[torch.Tensor, int], dist.Work]
) -> torch.Tensor:
    """Send every chunk round the ring to the rank of its number, adding on the way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    received = torch.empty_like(tensor[0])
    # A chunk needs n-1 hops to end on the rank of its number, so it starts on the rank
    # to the right of that one. The ring all-reduce starts chunk r on rank r itself.
    for hop in range(1, world_size):
        sending = isend(tensor[(rank - hop) % world_size], right)
        dist.recv(received, left)
        tensor[(rank - hop - 1) % world_size] += received
        sending.wait()
    return tensor[rank]
