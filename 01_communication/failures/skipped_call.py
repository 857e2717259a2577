"""Let only rank 0 make a call that needs all ranks, as in `if rank == 0: evaluate()`.

Run: torchrun --nproc-per-node=2 01_communication/failures/skipped_call.py
Expect: rank 0 times out after two seconds, with an error that names nobody.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Compute a mean loss on rank 0, or rather wait for the others to take part."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    loss = torch.ones(1)
    if dist.get_rank() == 0:
        # WRONG: the other ranks are not here. Write this line above the `if`, so that
        # all ranks make the call, and leave only the print behind the `if`.
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        print(f"mean loss {loss.item()}")
    else:
        time.sleep(3)  # rank 1 is busy with the next step of the training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
