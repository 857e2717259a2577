"""What one process does alone in rounds of batches, also with stale lookups."""

import time

import torch
from torch.nn.functional import cross_entropy

from classifier import ROWS, WIDTH, Batch, HybridModel, Table, dense_part


def train_in_rounds(
    rounds: list[list[Batch]], lr: float, late: bool, sparse: bool = True
) -> tuple[torch.Tensor, float]:
    """Train in this process, and if `late`, with old numbers as in `lookups.ahead`.

    Then each lookup but the first of a round is made before the last update is. If not
    `sparse`, the gradient has a number for each one of the table, as in a plain
    `nn.EmbeddingBag`, and is added up in another order.

    Returns:
        All parameters, flattened, and the seconds of a step in the fastest round.
    """
    table = Table(ROWS, WIDTH, 0)
    table.sparse = sparse
    model = HybridModel(table, dense_part())
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
    """Return all parameters as one flat tensor."""
    dense_row = torch.nn.utils.parameters_to_vector(dense.parameters())
    return torch.cat([table.flatten(), dense_row]).detach()
