"""Exercise: two trainers change one table, and some of their steps are lost.

Run: python 04_rpc_parameter_server/exercises/lost_steps.py
Expect: for each trainer, which steps are missing in the table; at last a `check:`.
"""

import torch
import torch.distributed.rpc as rpc

from check_lost_steps import LR, TABLE, TABLE_LOCK, check_lost_steps


def read_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Return some rows; runs on the server."""
    return TABLE[numbers]


def write_rows(numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite some rows; runs on the server."""
    with TABLE_LOCK:
        TABLE[numbers] = rows


def step_on_server(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    """Take a step by SGD with some rows of the server's table; runs on a trainer.

    Args:
        numbers: row numbers, (n,). A row that is named twice gets both gradients.
        gradient: for each of these numbers, (n, 4).
    """
    rows = rpc.rpc_sync("server", read_rows, args=(numbers,))
    rpc.rpc_sync("server", write_rows, args=(numbers, rows - LR * gradient))


if __name__ == "__main__":
    check_lost_steps(step_on_server)
