"""Rank zero may print and save alone; it must not communicate alone.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/rank_zero.py
Expect: a validation that rank zero alone enters is added to the gradients of the other
    ranks, without an error; both right ways find the loss of one process.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import check, gather, join, leave, say

INPUTS = torch.linspace(-1, 1, 12)[:, None]
LABELS = 3 * INPUTS + 1


@torch.no_grad()
def sum_of_losses(model: nn.Module, shard: slice) -> torch.Tensor:
    """Sum up a shard's losses; leave each module in train() or eval() as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()  # no dropout, and nothing is added to BatchNorm's statistics
    loss = F.mse_loss(model(INPUTS[shard]), LABELS[shard], reduction="sum")
    for module in training:  # a frozen part may have been in eval() before
        module.training = True
    return loss


def validate(model: nn.Module) -> float:
    """Return the mean loss; each rank takes its shard, so all ranks must call this."""
    shard = slice(dist.get_rank(), None, dist.get_world_size())
    loss = sum_of_losses(model, shard)
    total = torch.stack([loss, torch.tensor(float(len(INPUTS[shard])))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def on_rank_zero(ddp_model: DDP) -> float | None:
    """Wrong: the other ranks do not call the all-reduce that is in `validate`."""
    return validate(ddp_model.module) if dist.get_rank() == 0 else None


def on_all_ranks(ddp_model: DDP) -> float | None:
    """Right, if buffers are equal: all validate, and one rank prints."""
    loss = validate(ddp_model.module)
    return loss if dist.get_rank() == 0 else None


def on_rank_zero_alone(ddp_model: DDP) -> float | None:
    """Right: the plain model and all samples, with no communication."""
    if dist.get_rank() != 0:
        return None  # this rank then waits for rank 0 in the next step's all-reduce
    return sum_of_losses(ddp_model.module, slice(None)).item() / len(INPUTS)


def two_weights() -> DDP:
    """Wrap a layer with two weights; its gradient has two numbers, as `total` has."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return DDP(model)


def gradient_of_a_step(ddp_model: DDP) -> list[float]:
    """Go forward and backward; return the gradient, which should be [1, 1]."""
    ddp_model(torch.ones(1, 1)).sum().backward()
    gradients = [p.grad for p in ddp_model.parameters() if p.grad is not None]
    return [round(gradient.item(), 2) for gradient in gradients]


def main() -> None:
    """Validate in three ways and train a step; compare loss and gradient."""
    join(at_least=2, only_cpu=True)
    # Rank 0's validation meets the training step of the other ranks.
    call = on_rank_zero if dist.get_rank() == 0 else gradient_of_a_step
    crossed = gather(call(two_weights()))
    say(f"on_rank_zero       | loss {crossed[0]:.2f}, gradient {crossed[1]}")
    right, is_right = F.mse_loss(INPUTS, LABELS).item(), True
    for way in (on_all_ranks, on_rank_zero_alone):
        ddp_model = two_weights()
        loss = gather(way(ddp_model))[0]
        gradient = gather(gradient_of_a_step(ddp_model))[1]
        say(f"{way.__name__:18} | loss {loss:.2f}, gradient {gradient}")
        is_right &= abs(loss - right) < 1e-5 and gradient == [1, 1]
    check(is_right, f"in one process the loss is {right:.2f}, the gradient [1, 1]")
    leave()


if __name__ == "__main__":
    main()
