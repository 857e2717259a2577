"""The answer to 09_one_mesh/exercises/decode.py."""

import torch
import torch.distributed as dist
from torch import Tensor


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Send a weighted sum of values and the weights' sum, (H, 1, D + 1), in one."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    largest = scores.logsumexp(-1, keepdim=True)  # of no keys: minus infinity
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # now no exponential overflows
    p = (scores - largest).exp()
    sums = torch.cat([p @ v, p.sum(-1, keepdim=True)], dim=-1)
    dist.all_reduce(sums)
    return sums[..., :-1] / sums[..., -1:]
