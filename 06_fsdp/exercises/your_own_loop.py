"""Turn it into FSDP2: a training loop that runs under DDP.

Run: python 06_fsdp/exercises/your_own_loop.py
Expect: for each of two ranks what is still wrong with the loop, and status 1; once
    nothing is, a `check:`.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,  # noqa: F401 (for your answer)
    get_model_state_dict,  # noqa: F401 (for your answer)
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: F401 (for your answer)
from torch.distributed.fsdp import fully_shard  # noqa: F401 (for your answer)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from check_your_own_loop import check_loop


class Curve(nn.Module):
    """A function of two numbers: three layers with weights."""

    def __init__(self) -> None:
        """Build the layers."""
        super().__init__()
        layers = [nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 2) to (B, 1)."""
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        return self.layers[-1](x)


def prepare(model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    """Return what is trained, and its optimizer; every rank calls this.

    `model` has other weights on every rank: those of rank 0 are to be trained.
    """
    ddp_model = DistributedDataParallel(model)
    return ddp_model, torch.optim.SGD(ddp_model.parameters(), lr=0.1)


def train_one_batch(
    model: Any, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor
) -> tuple[Tensor, float]:
    """Take a step; return this rank's loss, and the norm of the mean gradient."""
    optimizer.zero_grad()
    loss = mse_loss(model(inputs), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=math.inf)
    optimizer.step()
    return loss.detach(), norm.item()


def save_whole(model: Any, path: Path) -> None:
    """Write the weights for a plain `Curve()` to load; every rank calls this."""
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)


if __name__ == "__main__":
    check_loop((Curve, prepare, train_one_batch, save_whole))
