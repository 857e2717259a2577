"""The answer to 04_rpc_parameter_server/exercises/lost_steps.py."""

import torch
import torch.distributed.rpc as rpc

from check_lost_steps import (  # pyright: ignore[reportMissingImports]
    LR,
    TABLE,
    TABLE_LOCK,
)


def add_to_rows(numbers: torch.Tensor, amount: torch.Tensor) -> None:
    """Add to some rows, where they are; a row that is named twice gets both."""
    with TABLE_LOCK:
        TABLE.index_add_(0, numbers, amount)


def step_on_server(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    """Send what is to be added, and let nobody else's step come between."""
    rpc.rpc_sync("server", add_to_rows, args=(numbers, -LR * gradient))
