"""Compute a norm from sharded gradients, and take `.item()` of it.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/norm_by_hand.py
Expect: no error, and another norm on each rank; `clip_grad_norm_` returns the true one.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Compute the norm of the gradient [[3, 0], [0, 4]], which is 5."""
    dist.init_process_group("gloo")
    model: Any = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    (model(torch.eye(2)) * torch.tensor([[3.0, 0.0], [0.0, 4.0]])).sum().backward()
    squares = model.weight.grad.square().sum()
    # WRONG: each rank has summed up its rows, which makes the sum Partial, and item()
    # takes this rank's term. Write squares.full_tensor().item(), on all ranks.
    norm = math.sqrt(squares.item())
    returned: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=math.inf)
    print(f"by hand {norm}, by clip_grad_norm_ {returned.item()}")
    print(f"placed {squares.placements}, and {returned.placements}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
