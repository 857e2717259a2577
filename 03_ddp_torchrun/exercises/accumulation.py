"""Write it: accumulate gradients, and let the last, shorter step be right as well.

Run: python 03_ddp_torchrun/exercises/accumulation.py
Expect: for each rank what is still wrong with its steps, and status 1; once they are
    right, a `check:`.
"""

import contextlib  # noqa: F401 (for your answer)

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from check_accumulation import Batches, check_accumulation


def train_epoch(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    grad_accum_steps: int,
) -> None:
    """Train on all batches, `grad_accum_steps` of them in a step; yours to rewrite.

    The gradient of a step is that of the mean loss over its batches, on all ranks, and
    is all-reduced once. What is left at the end makes a last step, of fewer batches.
    Now each batch is a step of its own.
    """
    for inputs, labels in batches:
        optimizer.zero_grad()
        mse_loss(ddp_model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    check_accumulation(train_epoch)
