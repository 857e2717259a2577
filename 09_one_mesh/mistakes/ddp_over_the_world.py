"""Wrap a tensor-parallel model in DDP, and do not tell it over which ranks to average.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/ddp_over_the_world.py
Expect: no error; every rank has rank 0's shard, and the mean of different columns'
    gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Average the gradient of a weight whose two columns are on two ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    column: Any = nn.Linear(1, 1, bias=False)
    nn.init.constant_(column.weight, 10.0 * (1 + tensor))
    # WRONG: without a group it is the world. DDP sends rank 0's weights to all of it,
    # and averages all gradients in it, those of other columns with them.
    # Write: group = mesh.get_group("data")
    group = None
    ddp_model = DistributedDataParallel(column, process_group=group)
    x, weight_of_column = torch.ones(1, 1) + 2 * data, 1 + 4 * tensor
    (ddp_model(x) * weight_of_column).sum().backward()
    weight, gradient = column.weight.item(), column.weight.grad.item()
    print(f"column {tensor}: weight {weight:g}, gradient {gradient:g}")
    del ddp_model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
