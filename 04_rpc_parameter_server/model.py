"""The model of this chapter: a large table of rows, and a small network behind it."""

import torch
from torch import nn

# B: bags in a batch. D: numbers in a row.
WIDTH = 32


class Table(nn.EmbeddingBag):
    """The sparse part: sum up the rows whose numbers are in a bag.

    A batch touches few of the rows. With `sparse=True` the gradient holds only these,
    so a step by SGD costs nothing for the rest of the table.
    """

    def __init__(self, rows: int, width: int, seed: int) -> None:
        """Fill the table with small numbers that depend on nothing but `seed`."""
        generator = torch.Generator().manual_seed(seed)
        weights = 0.1 * torch.randn(rows, width, generator=generator)
        super().__init__(rows, width, mode="sum", sparse=True, _weight=weights)


def dense_part(width: int, classes: int, seed: int) -> nn.Sequential:
    """Make the small network: from the sum of a bag's rows to a score per class."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


class HybridModel(nn.Module):
    """The whole model, wherever its parts may live.

    Both parts can be here, for a model like any other. Or `table` is a `RemoteModule`,
    and calling it sends the row numbers to the process that holds the table and waits
    for the sums; and `dense` is wrapped in DDP. This class cannot tell the difference.
    """

    def __init__(
        self, table: nn.Module, dense: nn.Module, device: torch.device | str = "cpu"
    ) -> None:
        """Take both parts as they come; `device` is where the dense one is."""
        super().__init__()
        self.table = table
        self.dense = dense
        self.device = device

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Score each bag for each class.

        Args:
            indices: row numbers of all bags, (tokens,).
            offsets: where in `indices` each bag begins, (B,).

        Returns:
            Scores, (B, classes).
        """
        # `.forward`: a `RemoteModule` that has travelled by RPC has lost what a plain
        # call needs, and would raise AttributeError.
        sums = self.table.forward(indices, offsets)
        return self.dense(sums.to(self.device))
