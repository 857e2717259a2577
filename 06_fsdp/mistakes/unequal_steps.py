"""Take another number of steps on each rank.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/unequal_steps.py
Expect: rank 0 times out in its third step, as rank 1 has only two batches.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Run through this rank's batches, of which rank 0 has one more."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # WRONG: forward all-gathers what is not whole, and one rank takes fewer steps.
    # Agree before the loop: all-reduce the number by ReduceOp.MIN.
    batches = 3 - dist.get_rank()
    for _ in range(batches):
        model(torch.ones(1, 4)).sum().backward()
    print(f"took {batches} steps")
    time.sleep(5)  # rank 1 evaluates, or writes a checkpoint
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
