"""Call `model.forward(x)`, and not `model(x)`.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/calls_forward.py
Expect: `got mixed torch.Tensor and DTensor` on every rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Compute an output, or rather try to."""
    dist.init_process_group("gloo")
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # WRONG: a hook of the module gathers its parameters, and forward() runs no hooks.
    # Write model(...). For another method that uses weights itself, say encode(), there
    # is register_fsdp_forward_method(model, "encode").
    model.forward(torch.ones(1, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
