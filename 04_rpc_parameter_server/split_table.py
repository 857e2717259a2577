"""A table cut up by rows: who has which row, and how to look up in all parts."""

import torch
from torch import nn
from torch.distributed.nn import RemoteModule

from data import bag_of_each

BLOCK = 1024  # rows of the table that are made at once


class TablePart(nn.EmbeddingBag):
    """The rows of a `Table` that one of n servers holds: r is its row r // n.

    The whole table is never in memory: it is made block by block, each time the same.
    """

    def __init__(self, rows: int, width: int, seed: int, owner: int, n: int) -> None:
        """Make all rows of the table and keep every n-th, beginning with `owner`."""
        generator = torch.Generator().manual_seed(seed)
        own = torch.empty(len(range(owner, rows, n)), width)
        for start in range(0, rows, BLOCK):
            count = min(BLOCK, rows - start)
            block = 0.1 * torch.randn(count, width, generator=generator)
            first = (owner - start) % n
            place = (start + first) // n
            kept = block[first::n]
            own[place : place + len(kept)] = kept
        super().__init__(len(own), width, mode="sum", sparse=True, _weight=own)


def split_bags(
    indices: torch.Tensor, offsets: torch.Tensor, owners: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sort a batch's row numbers by who owns the row: r is row r // n of owner r % n.

    Returns:
        For each owner the numbers of its rows as it counts them, (its tokens,), and how
        many of them each bag has, (B,).
    """
    bag_of = bag_of_each(indices, offsets)
    own = [indices % owners == owner for owner in range(owners)]
    return [
        (indices[mine] // owners, bag_of[mine].bincount(minlength=len(offsets)))
        for mine in own
    ]


class SplitTable(nn.Module):
    """A table whose rows are dealt out to several servers; called like any other."""

    def __init__(self, parts: list[RemoteModule]) -> None:
        """Take the parts in the order of their owners."""
        super().__init__()
        self.parts = parts

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sum up the rows of each bag, wherever they are: (tokens,), (B,) to (B, D)."""
        # All requests leave before the first answer is waited for. Each server answers
        # with a sum for every bag, which is zero where a bag has none of its rows.
        answers = [
            part.forward_async(numbers, counts.cumsum(0) - counts)  # type: ignore[operator]
            for part, (numbers, counts) in zip(
                self.parts, split_bags(indices, offsets, len(self.parts)), strict=True
            )
        ]
        return torch.stack([answer.wait() for answer in answers]).sum(0)
