"""A GPT's step by data, tensor and pipeline parallelism, each as short as it can be.

Each function takes a model and returns a step, which takes (samples, T + 1) tokens and
leaves the gradient of the mean loss; the ranks' return values add up to that loss.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import GPT, GPTConfig
from schedules import gpipe
from stage import Part, Stage, even_cut

__all__ = ["GPT", "MICRO_BATCHES", "WAYS", "GPTConfig"]
MICRO_BATCHES = 4


class SumForward(torch.autograd.Function):
    """Add up what the ranks have computed; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All-reduce."""
        dist.all_reduce(total := x.clone())
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Every rank has the whole gradient already."""
        return grad_outputs[0]


class SumBackward(torch.autograd.Function):
    """Hand on what all ranks have; add up the gradients that they return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Every rank has the whole x already."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """All-reduce."""
        dist.all_reduce(total := grad_outputs[0].contiguous().clone())
        return total


def split_blocks(model: Any) -> None:
    """Keep this rank's heads, and its part of each MLP; chapter 07 explains it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for block in model.blocks:
        for linear in (block.query, block.key, block.value, block.mlp_in):
            linear.weight = nn.Parameter(linear.weight.chunk(ranks, dim=0)[rank])
        for linear in (block.attention_out, block.mlp_out):
            linear.weight = nn.Parameter(linear.weight.chunk(ranks, dim=1)[rank])
            linear.register_forward_hook(lambda _, __, y: SumForward.apply(y))
        for norm in (block.attention_norm, block.mlp_norm):
            norm.register_forward_hook(lambda _, __, y: SumBackward.apply(y))


def data_parallel(model: Any) -> Callable:
    """Give each rank all layers and a part of the samples."""

    def step(tokens: Tensor) -> Tensor:
        own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(own[:, :-1], own[:, 1:]) * len(own) / len(tokens)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        # In one message. DDP sends two for this GPT, from its second step on.
        bucket = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(bucket)
        parts = bucket.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        return loss.detach()

    return step


def tensor_parallel(model: Any) -> Callable:
    """Give each rank all samples and a part of each block's matrices."""
    split_blocks(model)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss.detach() / dist.get_world_size()

    return step


def pipeline_parallel(model: Any) -> Callable:
    """Give each rank all samples and a part of the blocks."""
    cut = even_cut(model.config.layers, dist.get_world_size())
    stage = Stage(Part(model, dist.get_rank(), cut))

    def step(tokens: Tensor) -> Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        return stage.run(gpipe, inputs, labels, len(tokens) // MICRO_BATCHES)

    return step


WAYS = {"data": data_parallel, "tensor": tensor_parallel, "pipeline": pipeline_parallel}
