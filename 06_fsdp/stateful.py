"""A training run as `torch.distributed.checkpoint` (DCP) saves and loads it.

Carry away this one file, then: `dcp.save({"run": Training(model, optimizer)}, ...)`.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class Training(Stateful):
    """What a run resumes from, as DCP saves and loads it: by name, and in shards."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, **others: Any
    ) -> None:
        """Take model and optimizer, sharded or not.

        `others`, such as `schedule=LambdaLR(...)`, have a `state_dict` that is the same
        on all ranks, and `load_state_dict`. Its keys are strings: DCP saves what
        another key has under its text, and loads only tensors under the key.

        Give the optimizer no parameter that never gets a gradient: the checkpoint is
        written, and cannot be loaded as long as the optimizer has it.
        """
        self.model, self.optimizer, self.others = model, optimizer, others

    def state_dict(self) -> dict[str, Any]:
        """Return what to save, and where to load to; every rank calls this.

        Raises `RuntimeError` if there are gradients, and no state of the optimizer,
        which SGD without momentum never has. Before the first step it makes one of
        zeros, with which NAdam, ASGD, Rprop (which steps no shards) and SGD with
        dampening do not begin: save those later.
        """
        groups, is_new = self.optimizer.param_groups, not self.optimizer.state
        if is_new and any(p.grad is not None for g in groups for p in g["params"]):
            # PyTorch would leave out the optimizer's state, and say nothing.
            raise RuntimeError("optimizer.zero_grad() first: it has no state yet")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if is_new:  # PyTorch has made a state by a step, which has left its traces
            for state in self.optimizer.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    value.zero_()
        others = {name: other.state_dict() for name, other in self.others.items()}
        return {"model": model, "optimizer": optimizer, **others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what has been loaded.

        Before `dcp.load` let `requires_grad` be as it was at the save: the optimizer's
        state of a frozen parameter is not loaded, without an error.
        """
        model, optimizer = state_dict["model"], state_dict["optimizer"]
        states = {"model_state_dict": model, "optim_state_dict": optimizer}
        set_state_dict(self.model, self.optimizer, **states)
        for name, other in self.others.items():
            other.load_state_dict(state_dict[name])
