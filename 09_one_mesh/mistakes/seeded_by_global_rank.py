"""Seed each rank by its number in the world, on a mesh with a tensor axis.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/seeded_by_global_rank.py
Expect: no error; what tensor-parallel ranks each have whole, a weight and an
    activation after dropout, is another on every rank.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import dropout


def main() -> None:
    """Draw a weight and a dropout mask, both whole on each rank; who has the same?"""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rank = mesh.get_rank()  # of the world
    # WRONG: both differ between tensor-parallel ranks. Weights are the same everywhere,
    # and masks of whole activations differ along the data axis only.
    # Write: for_weights, for_dropout = 0, 1 + mesh.get_local_rank("data")
    for_weights, for_dropout = rank, 1 + rank
    weight = torch.randn(64, generator=torch.Generator().manual_seed(for_weights))
    torch.manual_seed(for_dropout)
    mask = dropout(torch.ones(64), 0.5) > 0
    for name, mine in [("weight", weight), ("mask", mask.float())]:
        found = [torch.empty(64) for _ in range(4)]
        dist.all_gather(found, mine)
        same = [other for other in range(4) if found[other].equal(mine)]
        print(f"{name}: the same on ranks {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
