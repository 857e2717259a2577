"""The answer to 08_pipeline_parallel/exercises/broken_pipeline.py."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

MAX_NORM = 0.1


def train_step(
    part: nn.Module,
    micro_batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Step once for the mean loss of a batch, clipped by the whole model's norm."""
    samples = sum(len(inputs) for inputs, _ in micro_batches)
    for inputs, labels in micro_batches:
        if dist.get_rank() == 0:
            y = part(inputs)
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            x = torch.empty(len(inputs), 8)
            dist.recv(x, 0)
            x.requires_grad_()  # a leaf, at which backward leaves the gradient
            loss = mse_loss(part(x), labels) * len(inputs) / samples
            loss.backward()
            dist.send(x.grad, 0)  # type: ignore[arg-type]
    gradients = [p.grad for p in part.parameters() if p.grad is not None]
    squares = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squares)  # the squares add up over the stages
    nn.utils.clip_grads_with_norm_(part.parameters(), MAX_NORM, squares.sqrt())
    optimizer.step()
    optimizer.zero_grad()
