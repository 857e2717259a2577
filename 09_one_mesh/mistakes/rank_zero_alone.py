"""Let rank 0 alone log a norm whose parts are on all ranks of the tensor axis.

Run: torchrun --nproc-per-node=4 09_one_mesh/mistakes/rank_zero_alone.py
Expect: rank 0 waits for rank 1, and times out after two seconds.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Sum the squares of two shards where a condition holds."""
    dist.init_process_group("gloo")
    data, tensor = divmod(dist.get_rank(), 2)
    # Groups of some ranks of a mesh wait 30 minutes, whatever the world was told.
    limit = timedelta(seconds=2)
    groups = [dist.new_group(ranks, timeout=limit) for ranks in ([0, 1], [2, 3])]
    # WRONG: rank 1, the partner of rank 0 on the tensor axis, does not call, and rank 0
    # waits for it. Ask for the place on the other axes only.
    # Write: is_logging = data == 0
    is_logging = data == 0 and tensor == 0
    if is_logging:
        squares = torch.tensor([9.0, 16.0])[tensor]
        dist.all_reduce(squares, group=groups[data])
        print(f"norm {squares.sqrt().item():g}")
    time.sleep(3)  # the next step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
