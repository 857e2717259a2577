"""The answer to 06_fsdp/exercises/broken_fsdp.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss


def train_in_fsdp(model: Any, mesh: DeviceMesh, steps: list[Any]) -> list[float]:
    """Shard block by block, then build the optimizer; reduce with the last."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for micro_batches in steps:
        total = torch.zeros(())
        for number, (inputs, labels) in enumerate(micro_batches, start=1):
            model.set_requires_gradient_sync(number == len(micro_batches))
            loss = mse_loss(model(inputs), labels) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses
