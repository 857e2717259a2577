"""Let `nn.Linear` draw a shard that was cut by rows, as if it were a layer.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/fan_in_of_a_shard.py
Expect: no error; the output starts 1.41 times as large as that of one process.
"""

import torch
import torch.distributed as dist
from torch import nn

IN, OUT = 512, 256


def main() -> None:
    """Draw weights, and look at the standard deviation of what comes out."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, IN)
    alone = nn.Linear(IN, OUT, bias=False)(x).std().item()
    torch.manual_seed(1 + rank)
    # WRONG: the scale is 1 / sqrt(fan_in), and this layer believes that its fan-in is
    # IN / world_size. Draw the whole matrix and keep a part of it.
    # Write: rows = nn.Linear(IN, OUT, bias=False).weight.chunk(world_size, 1)[rank]
    rows = nn.Linear(IN // world_size, OUT, bias=False).weight
    y = (x.chunk(world_size, dim=1)[rank] @ rows.T).detach()
    dist.all_reduce(y)
    print(f"standard deviation {y.std():.2f}, of one process {alone:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
