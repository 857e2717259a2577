"""Sum tensors of one shape that lie differently in memory: no tool complains.

Run: torchrun --nproc-per-node=2 01_communication/failures/strides_differ.py
Expect: no error, not even with TORCH_DISTRIBUTED_DEBUG=DETAIL; both ranks hold
    [[0, 1, 2], [3, 4, 5]] and get another sum than [[0, 2, 4], [6, 8, 10]].
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Sum two equal tables, one stored row by row, the other column by column."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rows = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    columns = torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
    # WRONG: columns.t() equals rows, but its strides are (1, 2) and not (3, 1).
    # Write columns.t().contiguous().
    x = rows if dist.get_rank() == 0 else columns.t()
    dist.all_reduce(x)
    print(f"strides {x.stride()}: {x.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
