"""Find the mistakes: a step of two stages with three, of which one is reported.

Run: python 08_pipeline_parallel/exercises/broken_pipeline.py
Expect: for each of two ranks the first thing that is wrong, and status 1; once the step
    is right, a `check:`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from check_broken_pipeline import check_pipeline

MAX_NORM = 0.1


def train_step(
    part: nn.Module,
    micro_batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Step once for the mean loss of a batch, clipped by the whole model's norm.

    Rank 0 has the first layers, which return (samples, 8), and rank 1 the last. Both
    get the same micro-batches, which are not all of one size.
    """
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
            mse_loss(part(x), labels).backward()
            dist.send(x.grad, 0)  # type: ignore[arg-type]
    nn.utils.clip_grad_norm_(part.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    check_pipeline(train_step)
