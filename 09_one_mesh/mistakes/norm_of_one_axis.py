"""Clip by a norm that is summed over the tensor axis, and not over the pipeline's.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/norm_of_one_axis.py
Expect: no error; each stage is scaled by another factor, so the gradient points
    elsewhere, and is longer than what was asked for.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

# By stage and tensor-parallel rank: the gradient of a shard. By stage: that of a norm's
# weight, which both ranks have whole.
SHARDS = torch.tensor([[6.0, 3.0], [16.0, 16.0]])
WHOLE = torch.tensor([2.0, 8.0])


def main() -> None:
    """Clip a gradient of norm 25 to norm 1."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    stage, place = mesh.get_local_rank("pipeline"), mesh.get_local_rank("tensor")
    squares = SHARDS[stage, place] ** 2
    if place == 0:
        squares += WHOLE[stage] ** 2  # what is on several ranks counts once
    # WRONG: the other stage's parameters are a part of the gradient, too. Sum over all
    # axes along which the parameters are sharded.
    # Write: axes = ["tensor", "pipeline"]
    axes = ["tensor"]
    for axis in axes:
        dist.all_reduce(squares, group=mesh.get_group(axis))
    factor = (1 / squares.sqrt()).clamp(max=1)
    print(f"stage {stage}: norm {squares.sqrt():.0f}, times {factor:.4f}")

    found = [torch.empty(()) for _ in range(4)]
    dist.all_gather(found, factor)
    unclipped = torch.cat([SHARDS.flatten(), WHOLE])
    # The factor of each shard's rank; of each stage's first rank for what is whole.
    clipped = unclipped * torch.stack([*found, found[0], found[2]])
    cosine = torch.cosine_similarity(unclipped, clipped, dim=0)
    print(f"clipped to norm {clipped.norm():.2f}, direction: cosine {cosine:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
