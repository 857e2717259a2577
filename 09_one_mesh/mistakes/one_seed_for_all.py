"""Seed all ranks alike, on a mesh of a pipeline and a data axis.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/one_seed_for_all.py
Expect: no error; of the 16 dropout masks that all ranks draw, only four are different.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import dropout


def main() -> None:
    """Drop four samples' activations in each replica's stage; count the masks."""
    dist.init_process_group("gloo")
    names = ("pipeline", "data", "tensor")
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)
    stage, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    torch.manual_seed(0)  # the weights, drawn whole, and sharded after that
    # WRONG: equal calls follow on all ranks, so all draw the same. Count the place on
    # all axes but the tensor axis.
    # Write: torch.manual_seed(1 + stage * mesh.size(1) + replica)
    torch.manual_seed(0)
    masks = dropout(torch.ones(4, 64), 0.5) > 0
    found = [torch.empty(4, 64) for _ in range(4)]
    dist.all_gather(found, masks.float())
    different = len(torch.cat(found).unique(dim=0))
    print(f"stage {stage}, replica {replica}: {different} different masks of 16")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
