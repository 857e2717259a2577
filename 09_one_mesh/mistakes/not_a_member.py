"""Give all ranks the group of the first two for their tensor-parallel axis.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/not_a_member.py
Expect: a warning, and no error. Ranks 2 and 3 are not in the group: nothing is summed
    there, the group has -1 ranks, and each takes the last shard.
"""

from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Average a gradient, and cut a weight, over a group."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups: list[Any] = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    # WRONG: on ranks 2 and 3 this is a group of others. Take the one that this rank is
    # in; mesh.get_group("tensor") always is.
    # Write: tensor = groups[rank // 2]
    tensor = groups[0]
    gradient = torch.tensor(1.0 + rank)
    dist.all_reduce(gradient, group=tensor)
    gradient /= dist.get_world_size(tensor)
    shard = torch.arange(4).split(2)[dist.get_rank(tensor)]
    print(f"mean {gradient.item():g}, shard {shard.tolist()}")
    dist.barrier()  # nobody leaves while another rank still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
