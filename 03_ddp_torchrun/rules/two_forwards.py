"""Let one backward belong to the forwards of DDP, also where a GAN's step has two.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/two_forwards.py
Expect: four ways to arrange forwards and backwards, and how far the gradients of each
    are from one process's; one way is wrong, without an error.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from ranks import check, gather, join, leave, say

Way = Callable[[Any, Tensor, Tensor], None]


def two_backwards(model: Any, real: Tensor, fake: Tensor) -> None:
    """Wrong: the first backward all-reduces, the second adds local gradients."""
    real_loss = softplus(-model(real)).mean()
    fake_loss = softplus(model(fake)).mean()
    real_loss.backward()
    fake_loss.backward()


def one_backward(model: Any, real: Tensor, fake: Tensor) -> None:
    """Right: one backward of the sum."""
    real_loss = softplus(-model(real)).mean()
    fake_loss = softplus(model(fake)).mean()
    (real_loss + fake_loss).backward()


def in_turn(model: Any, real: Tensor, fake: Tensor) -> None:
    """Right, at the price of two all-reduces."""
    softplus(-model(real)).mean().backward()
    softplus(model(fake)).mean().backward()


def one_forward(model: Any, real: Tensor, fake: Tensor) -> None:
    """Right: all samples in one batch."""
    real_logits, fake_logits = model(torch.cat([real, fake])).chunk(2)
    (softplus(-real_logits).mean() + softplus(fake_logits).mean()).backward()


def build_discriminator() -> nn.Module:
    """Draw the same weights on every call; samples are (B, 4), logits (B, 1)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def gradients(model: nn.Module, way: Way, rank: int) -> Tensor:
    """Compute the gradients on a rank's real and generated samples, joined."""
    samples = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(rank))
    way(model, *samples.to(next(model.parameters()).device))
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads)


def try_way(way: Way, build: Callable[[], nn.Module], **settings: Any) -> float:
    """Take two steps; return how far the gradients are from one process's."""
    ranks, errors = range(dist.get_world_size()), []
    due = torch.stack([gradients(build(), way, rank) for rank in ranks]).mean(dim=0)
    ddp_model = DistributedDataParallel(build(), **settings)
    for _ in range(2):
        ddp_model.module.load_state_dict(build().state_dict())  # also the buffers
        ddp_model.zero_grad()
        found = gradients(ddp_model, way, dist.get_rank())
        errors.append((found - due).abs().max() / due.abs().max())
    return torch.stack(errors).max().item()


def main() -> None:
    """Try each way on all ranks."""
    device, are_right = join(at_least=2), []
    for way in (two_backwards, one_backward, in_turn, one_forward):
        errors = gather(try_way(way, lambda: build_discriminator().to(device)))
        error = torch.tensor(errors).max()  # max() would drop a NaN
        say(f"{way.__name__:13} | gradients off by {error:.0%}")
        are_right.append((error < 1e-5) == (way != two_backwards))
    check(all(are_right), "3 of 4 ways give one process's gradients, on all ranks")
    leave()


if __name__ == "__main__":
    main()
