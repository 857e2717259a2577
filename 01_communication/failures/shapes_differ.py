"""Sum tensors of different shapes: as many elements, so nothing complains.

Run: torchrun --nproc-per-node=2 01_communication/failures/shapes_differ.py
Expect: no error; twice [[0, 1, 2], [3, 4, 5]] comes out as [[0, 4, 3], [7, 6, 10]].
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Sum the same table, which one rank holds transposed."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    x = torch.arange(6.0).reshape(2, 3)
    if dist.get_rank() == 1:
        # WRONG: the shape is (3, 2) now, and the sum goes element by element through
        # memory. Transpose after the all-reduce, or on every rank.
        x = x.t().contiguous()
    dist.all_reduce(x)
    print(f"{tuple(x.shape)}: {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
