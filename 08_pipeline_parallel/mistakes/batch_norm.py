"""Put a batch norm into a pipeline: it normalises each micro-batch by itself.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/mistakes/batch_norm.py
Expect: no error; outputs and running means that are not one process's. A layer norm
    gives the same.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Send a batch of 8 in micro-batches of 2 to a stage with a batch norm."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    batch = torch.randn(8, 3)
    if dist.get_rank() == 0:
        for x in batch.split(2):
            dist.send(x, 1)
    else:
        # WRONG: it takes mean and variance from 2 samples, not 8. What normalises each
        # sample by itself, as nn.LayerNorm(3), does not know how the batch was cut.
        stage: Any = nn.BatchNorm1d(3)
        layer_norm, alone = nn.LayerNorm(3), copy.deepcopy(stage)
        received = [torch.empty(2, 3) for _ in range(4)]
        for x in received:
            dist.recv(x, 0)
        error = (torch.cat([stage(x) for x in received]) - alone(batch)).abs().max()
        means = stage.running_mean.norm() / alone.running_mean.norm()
        print(f"BatchNorm: {error:.2f} off, running mean {means:.1f} times as long")
        both = torch.cat([layer_norm(x) for x in received]), layer_norm(batch)
        print(f"LayerNorm: {torch.dist(*both):.2f} off")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
