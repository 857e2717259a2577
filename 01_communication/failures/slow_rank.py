"""Let one rank be late: no error, but time is lost, and not on the rank that is slow.

Run: torchrun --nproc-per-node=2 01_communication/failures/slow_rank.py
Expect: rank 0 waits more than 0.75 s in all_reduce; rank 1, the straggler, less.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Time an all-reduce on each rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        # WRONG: only this rank does so much between two collectives. Divide the work
        # evenly, or do it on every rank.
        time.sleep(1.5)
    start = time.perf_counter()
    dist.all_reduce(torch.ones(1))
    waited = time.perf_counter() - start
    print(f"all_reduce took {'more' if waited > 0.75 else 'less'} than 0.75 s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
