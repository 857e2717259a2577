"""Find the mistake: a loop that averages gradients, learns, and is still wrong.

Run: python 02_ddp_mp/exercises/broken_loop.py
Expect: a loss that falls on both ranks, what is wrong all the same, and status 1; once
    the loop is right, a `check:`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from check_broken_loop import check_loop

Batch = tuple[torch.Tensor, torch.Tensor]  # places (B, 2) and their heights (B, 1)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks; every rank calls this."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad / dist.get_world_size()
        dist.all_reduce(mean)


def train(model: nn.Module, batches: list[Batch]) -> list[float]:
    """Take a step on each of this rank's batches; return the local losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for places, heights in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(places), heights)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    check_loop(train)
