"""Give each rank a seed of its own, as DDP allows, and shard the model.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/seeded_by_rank.py
Expect: no error; each row of the weight comes from another rank.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Make a weight of ones on rank 0 and of twos on rank 1, and shard it."""
    dist.init_process_group("gloo")
    model: Any = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model.weight, 1.0 + dist.get_rank())
    # WRONG: DDP would broadcast rank 0's weights. fully_shard sends nothing: each rank
    # keeps its shard of what it has. Seed all ranks alike, or broadcast first:
    # for p in model.parameters(): dist.broadcast(p.detach(), src=0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    print(f"weight {model.weight.full_tensor().tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
