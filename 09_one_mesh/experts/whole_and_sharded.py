"""A small GPT with a mixture, twice: whole in one process, and sharded over ranks.

Shapes: a rank has B samples of T tokens. There are E experts.
"""

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expert_block import ExpertBlock
from mixture import Mixture, MixtureOfExperts
from model import GPT, GPTConfig

B, T, E = 4, 32, 4
CONFIG = GPTConfig(block_size=T, width=32, layers=1)
# A module of Python's library that versions 3.10 to 3.13 have alike.
SOURCE = Path(sysconfig.get_paths()["stdlib"]) / "xml/dom/domreg.py"
TEXT = torch.tensor(list(SOURCE.read_bytes()))


def both_models(device: torch.device, group: Any) -> list[Any]:
    """Build a GPT of one block, all experts here, and again, sharded over a group."""
    settings: Any = {Mixture: {"senders": dist.get_world_size()}}
    settings[MixtureOfExperts] = {"group": group}
    models = []
    for kind, setting in settings.items():
        torch.manual_seed(0)  # the same weights
        model = GPT(CONFIG)
        model.blocks[0] = ExpertBlock(CONFIG, kind(CONFIG.width, E, **setting))
        models.append(model.to(device, torch.float64))
    return models


def loss_on(samples: range, step: int, model: Any, alpha: float = 0.0) -> Tensor:
    """Return the loss of some samples of a step; all ranks' together are n * B."""
    starts = torch.tensor(samples)[:, None] * 331 + step * 173
    tokens = TEXT[(starts + torch.arange(T + 1)) % len(TEXT)]
    tokens = tokens.to(model.head.weight.device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    return loss + alpha * model.blocks[0].mixture.balance_loss


def add_gradients_of_both(step: int, alone: Any, ours: Any, alpha=0.0) -> None:
    """Run backward in one process, on all ranks' samples, and here on this rank's."""
    n, rank = dist.get_world_size(), dist.get_rank()
    loss_on(range(n * B), step, alone, alpha).backward()
    loss_on(range(rank * B, rank * B + B), step, ours, alpha).backward()


def largest_error(ours: Any, alone: Any, of: str) -> float:
    """Return the largest relative error in the `grad` or `data` that this rank has."""
    names = [name for name, _ in ours.named_parameters()]
    pairs = [[getattr(m.get_parameter(n), of) for m in (ours, alone)] for n in names]
    return torch.stack([torch.dist(p, q) / q.norm() for p, q in pairs]).max().item()
