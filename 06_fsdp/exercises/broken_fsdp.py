"""Find the mistakes: a loop under FSDP2 that reports none of its three.

Run: python 06_fsdp/exercises/broken_fsdp.py
Expect: for each of two ranks the first thing that is wrong with the loop, and status 1;
    once nothing is, a `check:`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from check_broken_fsdp import check_training

# For each step its micro-batches, each of inputs (8, 16) and labels (8, 16).
Steps = list[list[tuple[Tensor, Tensor]]]


def train_in_fsdp(model: Any, mesh: DeviceMesh, steps: Steps) -> list[float]:
    """Train on this rank's samples; return the mean loss of each step over all ranks.

    A rank gathers `model.blocks` one by one, and frees each after its forward and its
    backward pass. It sends gradients once a step, not once a micro-batch.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    losses = []
    for micro_batches in steps:
        total = torch.zeros(())
        for inputs, labels in micro_batches:
            loss = mse_loss(model(inputs), labels) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    check_training(train_in_fsdp)
