"""Model and optimizer as `torch.distributed.checkpoint` (DCP) saves and loads them.

Carry away this one file, then: `dcp.save({"run": Training(model, optimizer)}, ...)`.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class Training(Stateful):
    """A model and its optimizer, as DCP saves and loads them: by name, in shards."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Take them as they are, sharded or not."""
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return what to save, and where to load to; every rank calls this."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what has been loaded."""
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        states = {"model_state_dict": model, "optim_state_dict": optimizer}
        set_state_dict(self.model, self.optimizer, **states)
