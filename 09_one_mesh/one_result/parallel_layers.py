"""Linear layers of which each of n ranks holds a shard: carry away this one file.

`group` holds the ranks that share a layer (None: all); they must see the same samples.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def shard_of(whole, dim, group=None):
    """Copy this rank's n-th of a tensor; n must divide its length in `dim`."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if whole.shape[dim] % n:
        raise ValueError(f"{whole.shape[dim]} is not divisible by {n} ranks")
    return whole.detach().chunk(n, dim)[rank].contiguous().clone()


def all_reduced(x, group=None, op=dist.ReduceOp.SUM):
    """Return the sum, or `op`, in a new tensor: autograd may need x as it is."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group)
    return total


class CopyToRanks(torch.autograd.Function):
    """Where all ranks read the same x. Megatron-LM calls it f."""

    @staticmethod
    def forward(ctx, x, group=None):
        """Send nothing."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        """All-reduce: each rank has computed a term of the gradient of x."""
        return SumOverRanks.apply(grad, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """Where each rank has a term of y. Megatron-LM calls it g."""

    @staticmethod
    def forward(ctx, term, group=None):
        """All-reduce."""
        ctx.group = group
        return all_reduced(term, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        """Send nothing: the gradient of a term is that of the sum."""
        return CopyToRanks.apply(grad, ctx.group), None


class ColumnParallelLinear(nn.Module):
    """`nn.Linear` of whose output each rank computes an n-th, or gathers all."""

    def __init__(
        self, in_features, out_features, bias=True, gather_output=False, group=None
    ):
        """Keep a shard of what `nn.Linear` draws; all ranks are seeded alike."""
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias)
        # It stores the transpose: a column of the matrix is a row of `weight`.
        self.weight = nn.Parameter(shard_of(whole.weight, 0, group))
        self.bias = nn.Parameter(shard_of(whole.bias, 0, group)) if bias else None
        self.gather_output, self.group = gather_output, group

    def forward(self, x):
        """Map (..., in_features) to this rank's n-th of (..., out_features), or all."""
        y = F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)
        if self.gather_output:
            # Padded with zeros, the ranks' columns add up to the whole. An all-gather
            # would send half as much, but needs a backward pass of its own.
            n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            zeros = rank * y.shape[-1], (n - 1 - rank) * y.shape[-1]
            y = SumOverRanks.apply(F.pad(y, zeros), self.group)
        return y


class RowParallelLinear(nn.Module):
    """`nn.Linear` of whose input each rank reads an n-th; all get the whole output."""

    def __init__(
        self, in_features, out_features, bias=True, input_is_parallel=True, group=None
    ):
        """Keep a shard of the weight that `nn.Linear` draws, and all of the bias."""
        super().__init__()
        # Drawn whole, so that in_features and not an n-th of them sets the scale.
        whole = nn.Linear(in_features, out_features, bias)
        self.weight = nn.Parameter(shard_of(whole.weight, 1, group))
        self.bias, self.group = whole.bias, group
        self.input_is_parallel = input_is_parallel

    def forward(self, x):
        """Map (..., in_features / n), or all of it, to (..., out_features)."""
        if not self.input_is_parallel:
            n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            x = CopyToRanks.apply(x, self.group).chunk(n, -1)[rank]
        y = SumOverRanks.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # after the sum


def square_of_norm(grad):
    """Square in at least float32: in float16 the square of 256 is infinite."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, dtype=dtype).square()


def clip_sharded(sharded, whole, max_norm, group=None):
    """Scale gradients by the norm of the whole model's; return it. All ranks call this.

    `sharded` are parameters of which each rank has a part, `whole` the others, whose
    gradients are equal on all ranks and count once. `clip_grad_norm_` would measure
    this rank's parts, and scale by another factor on each rank.
    """
    sharded, whole = ([p for p in ps if p.grad is not None] for ps in (sharded, whole))
    squares = all_reduced(sum(square_of_norm(p.grad) for p in sharded), group)
    norm = (squares + sum(square_of_norm(p.grad) for p in whole)).sqrt()
    nn.utils.clip_grads_with_norm_([*sharded, *whole], max_norm, norm)
    return norm
