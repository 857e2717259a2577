"""Arrange ranks in a mesh: which ranks share what, and what they send each other.

Run: python 09_one_mesh/mesh.py --rank=5
Expect: rank 5 of 2 x 2 x 2 ranks, and its groups. The options take other sizes: those
    of a report on thousands of GPUs. Under torchrun the ranks are real.
"""

import math
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from groups_of_a_rank import BATCH, groups_are_right, members, report
from ranks import check, fail, join, leave, number, read_options

AXES = ("data", "pipeline", "context", "tensor")  # the last one varies fastest


def make_mesh(device: str, sizes: dict[str, int]) -> tuple[DeviceMesh, dict[str, Any]]:
    """Return PyTorch's mesh, and this rank's groups; every rank calls this."""
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = {axis: mesh[axis].get_group() for axis in sizes}
    # Two axes as one: gradients are summed over both, as all these ranks see different
    # tokens. Keep what _flatten returns: mesh["batch"] is deprecated.
    batch = mesh["data", "context"]._flatten("batch")
    return mesh, {**groups, BATCH: batch.get_group()}


def main() -> None:
    """Make the mesh, compare its groups with arithmetic, tell one rank's."""
    usual = {"data": 2, "pipeline": 2, "context": 1, "tensor": 2, "expert": 1}
    length = number(1, 2**16)
    options = {name: {"type": length, "default": usual[name]} for name in usual}
    given = read_options(**options, rank={"type": number(0, 2**20), "default": 0})
    sizes = {axis: vars(given)[axis] for axis in AXES}
    world_size, is_real = math.prod(sizes.values()), "RANK" in os.environ
    if world_size > 2**17:
        fail(f"{world_size:,} ranks are too many; try {2**17:,} or fewer")
    if given.rank >= world_size:
        fail(f"no rank {given.rank} of {world_size:,}; try --rank={world_size - 1}")
    if sizes["data"] * sizes["context"] % given.expert:
        fail(f"{BATCH} does not divide into groups of {given.expert} ranks")
    device = join(world_size, world_size).type if is_real else "cpu"
    if not is_real:  # be one of the ranks: the others are not there, nothing is sent
        dist.init_process_group("fake", rank=given.rank, world_size=world_size)
    rank = dist.get_rank()
    mesh, groups = make_mesh(device, sizes)
    is_right = groups_are_right(groups, sizes, is_real)
    if rank == given.rank:
        places = ", ".join(f"{axis} {mesh.get_local_rank(axis)}" for axis in sizes)
        shown = {name: members(rank, sizes, *name.split(" x ")) for name in groups}
        lines = [f"rank {rank} of {world_size:,}: {places}"]
        print("\n".join(lines + report(rank, shown, given.expert)), flush=True)
    claim = "an axis's groups hold each rank once; those of two share at most one rank"
    if is_real:
        check(is_right, claim)
    elif not is_right:
        fail(f"not so: {claim}")
    else:
        print(f"check: {claim}")
    leave()


if __name__ == "__main__":
    main()
