"""Let only rank 0 ask for the whole state dict, as under DDP.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/saved_by_rank_zero.py
Expect: rank 0 times out after three seconds, with an error that names nobody.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Gather the weights on rank 0, or rather wait for the others to take part."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    model = nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if dist.get_rank() == 0:
        # WRONG: every tensor is all-gathered, and the other ranks are not here. Write
        # this above the `if`, and leave only torch.save behind it.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        torch.save(weights, "model.pt")
    else:
        time.sleep(5)  # rank 1 is busy with the next step of the training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
