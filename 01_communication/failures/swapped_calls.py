"""Make the same two calls on both ranks, but not in the same order.

Run: torchrun --nproc-per-node=2 01_communication/failures/swapped_calls.py
Expect: both ranks fail after two seconds at most, with errors that name no call.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """All-reduce and broadcast on one rank, broadcast and all-reduce on the other."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
    else:
        # WRONG: rank 0 is in all_reduce, rank 1 in broadcast. Calls are
        # matched by order (on gloo, most also by kind). Make them in rank 0's order.
        dist.broadcast(x, src=0)
        dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
