"""Sum 1000 numbers on one rank with 2000 numbers on the other.

Run: torchrun --nproc-per-node=2 01_communication/failures/longer_message.py
Expect: gloo aborts rank 0, which has less room; rank 1 loses its connection.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Sum as many numbers as this rank happens to have."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    elements = 1000 if dist.get_rank() == 0 else 2000
    # WRONG: every rank has to bring equally many. Pad to the longest, whose length an
    # all_reduce with ReduceOp.MAX tells to all ranks.
    dist.all_reduce(torch.ones(elements))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
