"""The answer to 07_tensor_parallel/exercises/broken_block.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_layers import (  # pyright: ignore[reportMissingImports]
    CopyToRanks,
    SumOverRanks,
    all_reduced,
    shard_of,
)


class SplitBlock(nn.Module):
    """This rank's part of a block `x + rows(gelu(columns(norm(x))))`."""

    def __init__(self, whole: Any) -> None:
        """Keep the norm and the last bias whole, and a part of all else."""
        super().__init__()
        self.norm, self.bias = whole.norm, whole.rows.bias
        self.columns = nn.Parameter(shard_of(whole.columns.weight, 0))
        self.columns_bias = nn.Parameter(shard_of(whole.columns.bias, 0))
        self.rows = nn.Parameter(shard_of(whole.rows.weight, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Copy to all ranks behind the norm; add the bias behind the sum."""
        y = CopyToRanks.apply(self.norm(x))
        y = F.gelu(F.linear(y, self.columns, self.columns_bias))
        return x + SumOverRanks.apply(F.linear(y, self.rows)) + self.bias


def clip(block: SplitBlock, max_norm: float) -> None:
    """Clip by the norm of the whole gradient: what is whole counts once."""
    parts = [block.columns, block.columns_bias, block.rows]
    whole = [block.bias, *block.norm.parameters()]
    of_parts, of_whole = (
        torch.stack([torch.as_tensor(p.grad).square().sum() for p in some]).sum()
        for some in (parts, whole)
    )
    norm = (all_reduced(of_parts) + of_whole).sqrt()
    for p in parts + whole:
        torch.as_tensor(p.grad).mul_((max_norm / norm).clamp(max=1))


def train_block(block: SplitBlock, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take a step on each batch, (B, D) and (B, D), the same on every rank."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.mse_loss(block(inputs), labels).backward()
        clip(block, max_norm=0.1)
        optimizer.step()
