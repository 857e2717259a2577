"""Average the weights over time, in copies made before they were sharded.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/plain_average.py
Expect: `got mixed torch.Tensor and DTensor` on every rank.
"""

import copy

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Update an exponential moving average (EMA) of the weights."""
    dist.init_process_group("gloo")
    model = nn.Linear(4, 2, bias=False)
    # WRONG: these copies are plain tensors, and the parameters will be DTensors.
    # Copy after fully_shard: [p.detach().clone() for p in model.parameters()].
    averages = [p.detach() for p in copy.deepcopy(model).parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for average, p in zip(averages, model.parameters(), strict=True):
        average.lerp_(p.detach(), 0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
