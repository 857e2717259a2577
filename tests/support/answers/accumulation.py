"""The answer to 03_ddp_torchrun/exercises/accumulation.py."""

import contextlib

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def train_epoch(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    grad_accum_steps: int,
) -> None:
    """Take the batches in groups; only the last of a group is synchronised."""
    for start in range(0, len(batches), grad_accum_steps):
        group = batches[start : start + grad_accum_steps]
        for number, (inputs, labels) in enumerate(group, start=1):
            is_last = number == len(group)
            with contextlib.nullcontext() if is_last else ddp_model.no_sync():
                # The last group may be shorter, so it is divided by its own length.
                loss = mse_loss(ddp_model(inputs), labels) / len(group)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
