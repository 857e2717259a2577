"""A dataset that notes what it is asked for, and what that says about the training."""

from io import BytesIO
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset


class NotedDataset(Dataset):
    """Samples that note which of them were asked for, and in which order."""

    def __init__(self, samples: TensorDataset) -> None:
        """Take samples that are the same on every rank."""
        self.samples = samples
        self.seen: list[int] = []

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return a sample."""
        self.seen.append(index)
        return self.samples[index]


def files_written(save: mock.Mock) -> set[str]:
    """Name the files given to `torch.save`; pickle makes calls too, in memory.

    A file may be given by its path, or open, or in a wrapper, as DCP gives it.
    """
    given = [
        words["f"] if "f" in words else args[1] for args, words in save.call_args_list
    ]
    files = [getattr(one, "raw", one) for one in given if not isinstance(one, BytesIO)]
    return {str(getattr(file, "name", file)) for file in files}


def by_epoch(noted: list[Any], epochs: int) -> list[list[Any]]:
    """Cut what was noted during a run into one part for each epoch."""
    length = len(noted) // epochs
    return [noted[length * epoch : length * (epoch + 1)] for epoch in range(epochs)]


def explain_state(
    ours: dict[str, torch.Tensor],
    model: nn.Module,
    samples: TensorDataset,
    seen: tuple[list[int], ...],
    batch_size: int,
) -> str:
    """Say what one process, trained from `model` on what the ranks saw, has other.

    Args:
        ours: the weights and buffers that the ranks have trained, by name.
        model: as it was before the training; it is trained here.
        samples: of which the ranks have seen those with the numbers `seen`, by rank.
        batch_size: how many samples each rank takes in a step.
    """
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_rank = (torch.tensor(own).split(batch_size) for own in seen)
    for parts in zip(*by_rank, strict=False):
        inputs, labels = samples[torch.cat(parts)]
        optimizer.zero_grad()
        mse_loss(model(inputs), labels).backward()
        optimizer.step()
    for name, due in model.state_dict().items():
        if not torch.allclose(ours[name], due, 1e-4, 1e-5):
            off = 100 * torch.dist(ours[name], due) / torch.dist(due, first[name])
            return f"one process has another {name}: {off:.3g} % of its way off"
    return ""


def explain_samples(seen: tuple[list[int], ...], samples: int, epochs: int) -> str:
    """Say what is wrong with the samples that the ranks have seen, or nothing."""
    parts = [by_epoch(indices, epochs) for indices in seen]
    for epoch, orders in enumerate(zip(*parts, strict=True)):
        together = sorted(index for order in orders for index in order)
        if together != list(range(samples)):
            twice = len(together) - len(set(together))
            return (
                f"in epoch {epoch} the ranks saw {len(together)} samples, {twice} of "
                "them again: who shards the dataset?"
            )
    return ""


def explain_order(seen: list[int], epochs: int) -> str:
    """Say which epoch had the order of another on this rank, or nothing."""
    orders = by_epoch(seen, epochs)
    for epoch in range(1, epochs):
        if orders[epoch] in orders[:epoch]:
            return (
                f"epoch {epoch} has the order of an epoch before: what does the "
                "sampler know of epochs?"
            )
    return ""
