"""Let only its members make a group; the other ranks do not call `new_group`.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/made_by_members_only.py
Expect: the group works; the next one, which all ranks make, does not come about.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Make a group of ranks 0 and 1, then one of ranks 0 and 2."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # WRONG: each rank counts the groups that it has made, and the count is their name.
    # From here on ranks 0 and 1 are one ahead. All ranks make all groups, in one order.
    # Write: made_here = [[0, 1]]
    made_here = [[0, 1]] if rank in (0, 1) else []
    for members in made_here:
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(x := torch.ones(1), group=group)
            print(f"group {members}: a sum of {x.item():g}")
    dist.barrier()  # else it depends on who is first
    group = dist.new_group([0, 2], timeout=timedelta(seconds=2))
    if rank in (0, 2):
        dist.all_reduce(x := torch.ones(1), group=group)
        print(f"group [0, 2]: a sum of {x.item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
