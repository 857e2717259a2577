"""Drop other elements of one and the same activation on each rank.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/dropout_differs.py
Expect: no error; what should be one activation is another one on each rank.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import dropout


def main() -> None:
    """Sum a product that was cut by rows, then drop some of it."""
    dist.init_process_group("gloo")
    # WRONG: that is data parallelism's rule. What is whole on every rank (the residual
    # stream, an embedding's output) has to stay equal, so all draw the same mask.
    # Write: torch.manual_seed(0)
    torch.manual_seed(dist.get_rank())
    y = torch.arange(1.0, 9.0) / 2  # this rank's term
    dist.all_reduce(y)
    print(f"after dropout {dropout(y, 0.5).tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
