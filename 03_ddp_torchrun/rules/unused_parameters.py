"""Tell DDP that a step may leave layers out, or gradients are wrong without an error.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/unused_parameters.py
Expect: for each setting of DDP, step by step, whether the gradients are the mean over
    ranks or only local, or which error comes.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import check, gather, join, leave, say

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},  # wrong where a loss leaves a parameter out
    # Right in every step, if one backward takes all losses of one forward, which come
    # from what it returns (also a tuple, list or dict); no `use_reentrant=True`.
    "find_unused_parameters": {"find_unused_parameters": True},
    # For equal steps whose loss takes all that `forward` returns, and without
    # `autograd.grad`; the first not in no_sync.
    "static_graph": {"static_graph": True},
}
SCENARIOS = [["all", "nobody", "all"], ["rank 0", "rank 0"]]  # users, step by step


class Detour(nn.ModuleList):
    """Three layers, of which a step may leave out the middle one."""

    def forward(self, inputs: torch.Tensor, uses_middle: bool) -> torch.Tensor:
        """Map (B, 4) to a loss."""
        for layer in self if uses_middle else [self[0], self[2]]:
            inputs = layer(inputs).tanh()
        return inputs.square().mean()


def build_detour() -> Detour:
    """Draw the same weights on every call."""
    torch.manual_seed(0)
    return Detour([nn.Linear(4, 4) for _ in range(3)])


def local_loss(model: nn.Module, rank: int, users: str) -> torch.Tensor:
    """Return the loss of a rank's samples, with the layer if it is one of `users`."""
    torch.manual_seed(rank)
    return model(torch.randn(8, 4), users in ("all", f"rank {rank}"))


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """Join all gradients; NaN stands for those of a parameter that has none."""
    grads = [p * torch.nan if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads]).detach()


def kind_of_gradients(model: nn.Module, users: str) -> str:
    """Tell whether they are one process's on all samples, or on this rank's alone."""
    kinds = {"mean": range(dist.get_world_size()), "local": [dist.get_rank()]}
    for kind, ranks in kinds.items():
        alone = build_detour()
        torch.stack([local_loss(alone, r, users) for r in ranks]).mean().backward()
        found, due = flat_gradients(model), flat_gradients(alone)
        if torch.allclose(found, due, rtol=1e-5, atol=1e-7, equal_nan=True):
            return kind
    return "neither"


def take_steps(settings: dict[str, Any], users_by_step: list[str]) -> list[str]:
    """Return what came of each step on this rank; an error is the last."""
    group = dist.new_group(timeout=timedelta(seconds=3))  # to wait in vain no longer
    ddp_model = DistributedDataParallel(build_detour(), process_group=group, **settings)
    outcomes = []
    for users in users_by_step:
        ddp_model.zero_grad()
        try:
            local_loss(ddp_model, dist.get_rank(), users).backward()
            outcomes.append(kind_of_gradients(ddp_model, users))
        except RuntimeError as error:
            outcomes.append(str(error))
            break
    dist.barrier()  # of the default group, which waits longer
    return outcomes


def main() -> None:
    """Take the steps of each scenario with each setting, on all ranks."""
    join(at_least=2, only_cpu=True)  # NCCL would end a process that waits in vain
    kinds: dict[str, list[str]] = {name: [] for name in SETTINGS}
    for users_by_step in SCENARIOS:
        say(f"middle layer used by {', then by '.join(users_by_step)}")
        for name, settings in SETTINGS.items():
            kinds[name] += (outcomes := take_steps(settings, users_by_step))
            for rank, texts in enumerate(gather(outcomes)):
                short = ", ".join(text.split("] ")[-1][:35] for text in texts)
                say(f"  {name:22} | rank {rank} | {short}")
    is_right = {"mean"} == set(kinds["find_unused_parameters"]) != set(kinds["default"])
    check(is_right, "find_unused_parameters: 5 steps' gradients are one process's")
    leave()


if __name__ == "__main__":
    main()
