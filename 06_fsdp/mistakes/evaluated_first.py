"""Build the optimizer before the first forward pass, or reshard after it.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/evaluated_first.py
Expect: no error. The block's weight, which was 1, has moved, and the root's has not.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # an optimizer would import it later, and keep the group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Evaluate, then train for three steps."""
    dist.init_process_group("gloo")
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    for weight in model.parameters():
        nn.init.ones_(weight)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    with torch.no_grad():
        model(torch.ones(1, 4))
    # WRONG: a forward pass leaves the root gathered, as backward mostly follows. So
    # the optimizer gets the root's whole weight, which is soon freed. Build it before,
    # or reshard each unit here.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(1, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    block, root = (weight.full_tensor() for weight in model.parameters())
    print(f"block {block[0, 0].item():.1f}, root {root[0, 0].item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
