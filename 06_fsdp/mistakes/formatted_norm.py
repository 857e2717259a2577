"""Format the norm that `clip_grad_norm_` returns as if it were a plain tensor.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/formatted_norm.py
Expect: `unsupported format string passed to DTensor.__format__` on every rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Clip a gradient, and print its norm."""
    dist.init_process_group("gloo")
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.eye(2)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    # WRONG: of sharded gradients the norm is a DTensor, too. Write
    # norm.full_tensor().item() above the print, on all ranks.
    print(f"norm {norm:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
