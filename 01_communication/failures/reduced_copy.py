"""Reduce what `.contiguous()` returns: of some tensors that is a copy, and is lost.

Run: torchrun --nproc-per-node=2 01_communication/failures/reduced_copy.py
Expect: no error; the contiguous tensor holds the sum, the transposed one does not.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Sum a contiguous tensor, then an equal one that is not contiguous."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rows = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    columns = torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
    for x in (rows, columns.t()):
        # WRONG: of a transposed tensor, contiguous() makes a copy. The sum is in the
        # copy, which nobody keeps. Write y = x.contiguous(), reduce y, and x.copy_(y).
        dist.all_reduce(x.contiguous())
        print(f"strides {x.stride()}: {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
