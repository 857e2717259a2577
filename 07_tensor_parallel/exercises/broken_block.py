"""Find the mistakes: a tensor-parallel block with three, of which none is reported.

Run: python 07_tensor_parallel/exercises/broken_block.py
Expect: for each of two ranks the first thing that is wrong with the block or with the
    loop, and status 1; once nothing is, a `check:`.
"""

from typing import Any  # noqa: F401 (for your answer)

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from check_broken_block import WholeBlock, check_block
from parallel_layers import (
    CopyToRanks,
    SumOverRanks,
    all_reduced,  # noqa: F401 (for your answer)
    shard_of,
)


class SplitBlock(nn.Module):
    """This rank's part of a block `x + rows(gelu(columns(norm(x))))`."""

    def __init__(self, whole: WholeBlock) -> None:
        """Keep the norm and the last bias whole, and a part of all else."""
        super().__init__()
        self.norm, self.bias = whole.norm, whole.rows.bias
        self.columns = nn.Parameter(shard_of(whole.columns.weight, 0))
        self.columns_bias = nn.Parameter(shard_of(whole.columns.bias, 0))
        self.rows = nn.Parameter(shard_of(whole.rows.weight, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to (B, D), both the same on every rank."""
        y = self.norm(CopyToRanks.apply(x))
        y = F.gelu(F.linear(y, self.columns, self.columns_bias))
        return x + SumOverRanks.apply(F.linear(y, self.rows, self.bias))


def train_block(block: SplitBlock, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take a step on each batch, (B, D) and (B, D), the same on every rank."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.mse_loss(block(inputs), labels).backward()
        clip_grad_norm_(block.parameters(), max_norm=0.1)
        optimizer.step()


if __name__ == "__main__":
    check_block(SplitBlock, train_block)
