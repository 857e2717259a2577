"""Drop the same columns of two different shards of an activation.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/dropout_equal.py
Expect: no error; the masks of both ranks are one, so the noise of their sum is 1.41
    times as large as that of one process.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import dropout


def main() -> None:
    """Drop some of this rank's columns 10,000 times, and add up all that is left."""
    dist.init_process_group("gloo")
    rank, columns = dist.get_rank(), torch.ones(10_000, 8)
    mine = columns.chunk(dist.get_world_size(), dim=1)[rank]
    # WRONG: equal seeds and equal shapes give equal masks. Column 0 of rank 0 and
    # column 0 of rank 1 are different columns; here they always fall together.
    # Write: torch.manual_seed(1 + rank)
    torch.manual_seed(0)
    left = dropout(mine, 0.5)
    y = left.sum(dim=1)
    dist.all_reduce(y)
    print(f"mask {(left[0] > 0).int().tolist()}")
    print(f"the sum of {columns.shape[1]} columns: {y.mean():.1f} +- {y.std():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
