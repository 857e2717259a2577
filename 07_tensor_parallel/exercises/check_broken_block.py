"""Check a tensor-parallel block and its loop on two ranks; say what is wrong."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ask_ranks import ask_ranks, in_words
from ranks import gather, read_options

WORLD_SIZE, STEPS, B, D, H = 2, 5, 8, 6, 12
FAULTS = (RuntimeError, AttributeError, AssertionError, ValueError, TypeError)
# Each parameter by its name in the answer: its name in WholeBlock, where it is cut.
PARAMETERS = {
    "norm.weight": ("norm.weight", None),
    "norm.bias": ("norm.bias", None),
    "bias": ("rows.bias", None),
    "columns": ("columns.weight", 0),
    "columns_bias": ("columns.bias", 0),
    "rows": ("rows.weight", 1),
}


class WholeBlock(nn.Module):
    """The block on one process."""

    def __init__(self) -> None:
        """Draw the weights, the same on every rank."""
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(D)
        self.columns, self.rows = nn.Linear(D, H), nn.Linear(H, D)
        nn.init.normal_(self.rows.bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to (B, D)."""
        return x + self.rows(F.gelu(self.columns(self.norm(x))))


def check_block(build: Callable, train: Callable) -> None:
    """Start the ranks, and let each of them try the block and the loop."""
    read_options()
    claim = f"result, gradients, and weights after {STEPS} steps are one process's"
    ask_ranks(try_block, (build, train), WORLD_SIZE, claim)


def draw_steps_of_block() -> list[tuple[Tensor, Tensor]]:
    """Draw inputs and labels of all steps, the same on every rank.

    The first labels are close to the block's results: that step is not to be clipped.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (2 * STEPS, B, D)
    drawn = list(torch.randn(shape, generator=generator, dtype=torch.float64))
    inputs, labels = drawn[::2], drawn[1::2]
    labels[0] = WholeBlock()(inputs[0]).detach() + 0.1 * labels[0]
    return list(zip(inputs, labels, strict=True))


def train_whole(batches: list[tuple[Tensor, Tensor]]) -> WholeBlock:
    """Train as one process does."""
    block = WholeBlock()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.mse_loss(block(inputs), labels).backward()
        nn.utils.clip_grad_norm_(block.parameters(), max_norm=0.1)
        optimizer.step()
    return block


def own_part(whole: Tensor, dim: int | None) -> Tensor:
    """Return what this rank should have of a tensor."""
    return whole if dim is None else whole.chunk(WORLD_SIZE, dim)[dist.get_rank()]


def try_block(answer: tuple[Callable, Callable]) -> str:
    """Try result, gradients and training; say what is wrong on this rank."""
    build, train = answer
    batches = draw_steps_of_block()
    try:
        text = explain_one_step(build(WholeBlock()), *batches[1])
        # All ranks come along or none, since the loop communicates.
        if any(told := gather(text)):
            return told[dist.get_rank()] or "right as yet, but another rank is not"
        block = build(WholeBlock())
        train(block, batches)
    except FAULTS as error:
        return in_words(error)
    return explain_training(block, train_whole(batches))


def explain_one_step(block: Any, inputs: Tensor, labels: Tensor) -> str:
    """Say what is wrong with a result and its gradients, or nothing."""
    whole = WholeBlock()
    # Each reads inputs of its own, which get a gradient.
    own, theirs = (inputs.clone().requires_grad_() for _ in range(2))
    right, found = whole(own), block(theirs)
    extra = (found - right).detach()
    bias = whole.rows.bias.detach()
    F.mse_loss(right, labels).backward()
    F.mse_loss(found, labels).backward()
    if not torch.allclose(found, right):
        times = (extra.mean(dim=0) / bias).mean().item()
        if torch.allclose(extra, times * bias.expand_as(extra)):
            return f"the result has the last bias {1 + times:g} times in it"
        return "the result is not that of one process"
    for name, (name_there, dim) in PARAMETERS.items():
        mine = block.get_parameter(name).grad
        due = own_part(torch.as_tensor(whole.get_parameter(name_there).grad), dim)
        if mine is None or not torch.allclose(mine, due):
            return (
                f"the gradient of {name} is not that of one process (as the block alone"
                " computes it, without the loop)"
            )
    if theirs.grad is None or not torch.allclose(
        theirs.grad, torch.as_tensor(own.grad)
    ):
        return "the gradient of the inputs is not that of one process"
    return ""


def explain_training(block: Any, whole: WholeBlock) -> str:
    """Say what is wrong with the weights after training, or nothing."""
    before, is_right, moved, should = WholeBlock(), True, 0.0, 0.0
    for name, (name_there, dim) in PARAMETERS.items():
        found = block.get_parameter(name).detach()
        start, due = (
            own_part(model.get_parameter(name_there).detach(), dim)
            for model in (before, whole)
        )
        # clip_grad_norm_ adds 1e-6 to the norm that it divides by.
        is_right &= torch.allclose(found, due, atol=1e-5)
        moved += (found - start).square().sum().item()
        should += (due - start).square().sum().item()
    if is_right:
        return ""
    times = (moved / should) ** 0.5
    return (
        f"one step's gradients are right, but after {STEPS} steps this rank's weights "
        f"have moved {times:.2f} times as far as they should: whose norm is clipped, "
        "and is a small one left as it is?"
    )
