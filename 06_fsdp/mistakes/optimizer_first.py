"""Build the optimizer, and shard the model after that.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/optimizer_first.py
Expect: no error, and the weight that was 1 is 1 after ten steps.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # an optimizer would import it later, and keep the group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train for ten steps, or rather not."""
    dist.init_process_group("gloo")
    model: Any = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    # WRONG: fully_shard puts new parameters, DTensors, into the model. The optimizer
    # has the old ones, which never get a gradient. Build it after fully_shard.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loss = torch.zeros(())
    for _ in range(10):
        loss = model(torch.ones(1, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item()}, a weight {model.weight.full_tensor()[0, 0].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
