"""Kill one rank in mid-run: the others lose their connection to it.

Run: torchrun --nproc-per-node=2 01_communication/failures/killed_rank.py
Expect: rank 0 reports a lost connection, rank 1 nothing; torchrun names the SIGKILL.
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Sum over ranks of which one is gone."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    dist.barrier()  # so far, all is well
    if dist.get_rank() == 1:
        # WRONG: this is what the kernel does to a rank when memory runs out. Look for
        # what this rank needed, not at rank 0's error.
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
