"""A table that other processes read and change by RPC, with no distributed autograd."""

import threading
import time
from typing import ClassVar

import torch
from torch.nn.functional import embedding_bag

from bags import bag_of_each
from classifier import Table


class RowServer:
    """The rows of a `Table`, and all that a trainer can ask of them."""

    # Of the process that serves: its tables by name. A call by name is the cheapest: an
    # RRef among the arguments costs further messages, which count who refers to it.
    by_name: ClassVar[dict[str, "RowServer"]] = {}
    one_at_a_time = threading.Lock()

    def __init__(self, rows: int, width: int, lr: float, latency: float) -> None:
        """Make the table; `latency` in seconds stands in for a slow network."""
        self.weight = Table(rows, width, seed=0).weight.detach()
        self.lr, self.latency = lr, latency
        # By step: several trainers must not give two of theirs the same number.
        self.bags: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sums(
        self, step: int, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Sum up the rows of each bag, (B, D), and remember the bags for the update."""
        self.bags[step] = indices, offsets
        return embedding_bag(indices, self.weight, offsets, mode="sum")

    def update_sums(self, step: int, gradient: torch.Tensor) -> None:
        """Take a step: each row of a bag gets the gradient of the bag's sum, (B, D)."""
        indices, offsets = self.bags.pop(step)
        self.update_rows(indices, gradient[bag_of_each(indices, offsets)])

    def update_then_sums(
        self,
        step: int,
        gradient: torch.Tensor | None,
        bags: tuple[int, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Take a step, if there is a gradient; then look up, if there are bags."""
        if gradient is not None:
            self.update_sums(step, gradient)
        return None if bags is None else self.sums(*bags)

    def some_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return some rows, (numbers, D)."""
        return self.weight[numbers]

    def all_rows(self) -> torch.Tensor:
        """Return the whole table, (rows, D)."""
        return self.weight

    def update_rows(self, numbers: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a step by SGD; a row that is named twice gets both gradients."""
        self.weight.index_add_(0, numbers, gradient, alpha=-self.lr)


def make(name: str, rows: int, width: int, lr: float, latency: float) -> None:
    """Make a table in this process, in place of an older one of this name."""
    RowServer.by_name[name] = RowServer(rows, width, lr, latency)


def call(name: str, method: str, *args: object) -> torch.Tensor | None:
    """Do what a trainer asks of a table in this process."""
    time.sleep(RowServer.by_name[name].latency)
    return getattr(RowServer.by_name[name], method)(*args)
