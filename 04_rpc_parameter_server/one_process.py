"""What one process does alone; several together must end with the same numbers."""

import itertools
import time
from collections.abc import Iterable, Iterator

import torch
from torch.nn.functional import cross_entropy

from data import PACKAGES, ROWS, Batch, Samples
from model import WIDTH, HybridModel, Table, dense_part


def batches_without_end(
    samples: Samples, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Yield one trainer's batches of epoch 0, then of epoch 1, and so on.

    An epoch must hold a batch for everyone, or this looks for one for ever.
    """
    epochs = itertools.count()
    return itertools.chain.from_iterable(
        samples.batches(epoch, batch_size, rank, world_size) for epoch in epochs
    )


def join_batches(batches: Iterable[Batch]) -> Batch:
    """Put the batches of several trainers together, as one process would have them."""
    indices, offsets, labels = zip(*batches, strict=True)
    starts = torch.tensor([0, *map(len, indices)]).cumsum(0)
    shifted = [own + start for own, start in zip(offsets, starts, strict=False)]
    return torch.cat(indices), torch.cat(shifted), torch.cat(labels)


def train_in_one_process(batches: Iterable[Batch], rows: int, lr: float) -> HybridModel:
    """Train the whole model here, on batches as large as those of all trainers."""
    dense = dense_part(WIDTH, len(PACKAGES), seed=0)
    model = HybridModel(Table(rows, WIDTH, seed=0), dense)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for indices, offsets, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(indices, offsets), labels).backward()
        optimizer.step()
    return model


def train_in_rounds(
    rounds: list[list[Batch]], lr: float, late: bool, sparse: bool = True
) -> tuple[torch.Tensor, float]:
    """Train in this process, and if `late`, with old numbers as in `lookups.ahead`.

    Then each lookup but the first of a round is made before the last update is. If not
    `sparse`, the gradient has a number for each one of the table, as in a plain
    `nn.EmbeddingBag`, and is added up in another order.

    Returns:
        All parameters in one row, and the seconds of a step in the fastest round.
    """
    table = Table(ROWS, WIDTH, 0)
    table.sparse = sparse
    model = HybridModel(table, dense_part(WIDTH, len(PACKAGES), 0))
    optimizer, seconds = torch.optim.SGD(model.parameters(), lr), []
    for batches in rounds:
        started = time.perf_counter()
        early: torch.Tensor | None = None
        for following, (indices, offsets, labels) in enumerate(batches, start=1):
            optimizer.zero_grad()
            sums = model.table(indices, offsets)
            if early is not None:
                # The numbers are old; the gradients go to the rows of this batch.
                with torch.no_grad():
                    sums.copy_(early)
            cross_entropy(model.dense(sums), labels).backward()
            if late and following < len(batches):
                early = model.table(*batches[following][:2]).detach()
            optimizer.step()
        seconds.append((time.perf_counter() - started) / len(batches))
    return flat(model.get_parameter("table.weight"), model.dense), min(seconds)


def flat(table: torch.Tensor, dense: torch.nn.Module) -> torch.Tensor:
    """Return all parameters in one row."""
    dense_row = torch.nn.utils.parameters_to_vector(dense.parameters())
    return torch.cat([table.flatten(), dense_row]).detach()
