"""Broadcast from rank 0 over an axis: each group of it has a first rank of its own.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/first_of_the_world.py
Expect: ranks 2 and 3 end with `Global rank 0 is not part of group`.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    """Send each group's first rank's number to the rest of it."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.barrier()  # nobody leaves while another rank still connects
    seed, tensor = torch.tensor(dist.get_rank()), mesh.get_group("tensor")
    # WRONG: src is a rank of the world, also with a group, and rank 0 is in one of the
    # two groups only. The number within the group is group_src.
    # Write: dist.broadcast(seed, group_src=0, group=tensor)
    dist.broadcast(seed, src=0, group=tensor)
    print(f"seed {seed.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
