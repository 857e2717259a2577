"""Put a barrier that names the missing ranks before the call that hangs.

Run: torchrun --nproc-per-node=2 01_communication/failures/monitored_barrier.py
Expect: rank 0 fails after one second, with an error that names rank 1.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Compute a mean loss on rank 0, or rather ask who takes part in it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    loss = torch.ones(1)
    if dist.get_rank() == 0:
        # WRONG: the other ranks are not here. Write this line above the `if`, so that
        # all ranks make the call, and leave only the print behind the `if`.
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        print(f"mean loss {loss.item()}")
    else:
        time.sleep(3)  # rank 1 is busy with the next step of the training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
