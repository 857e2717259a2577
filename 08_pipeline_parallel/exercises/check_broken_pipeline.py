"""Check a step of two stages on two ranks, and say in words what is wrong."""

import contextlib
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ask_ranks import ask_ranks, in_words
from ranks import read_options

# The samples of each step's micro-batches.
SIZES, MAX_NORM = [(3, 3, 1), (4, 4, 2), (4, 4, 2)], 0.1
# How a micro-batch's mean loss may count, and by which norm a stage may clip.
LOSSES = {
    "part": "",
    "equal": "every micro-batch counts alike, and the last has fewer samples",
    "ten": "a step is taken as if every batch had 10 samples",
    "sum": "each micro-batch's mean loss counts whole, as if it were the batch's",
}
NORMS = {
    "whole": "",
    "own": "this stage clips by the norm of its layers, not of all layers",
    "added": "the stages' norms are added up: the squares do that",
    "kept": "the gradients of earlier steps are still there: who clears them?",
    "none": "nothing is clipped",
    "always": "a norm below the limit is scaled up to it",
}


def check_pipeline(train_step: Callable) -> None:
    """Start the ranks, and let each of them train by the answer."""
    read_options()
    claim = f"{len(SIZES)} steps of two stages, two clipped, are those of one process"
    ask_ranks(try_pipeline, train_step, 2, claim)


def both_parts() -> list[nn.Module]:
    """Make the first and the last layers, the same on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1)]


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Draw a list of micro-batches for each step, the same on every rank.

    The first labels are close to the model's results: that step is not to be clipped.
    """
    generator, drawn = torch.Generator().manual_seed(1), []
    for step, samples in enumerate(SIZES):
        x = torch.randn(sum(samples), 6, generator=generator)
        y = x.sum(-1, keepdim=True).sin()
        if step == 0:
            y = nn.Sequential(*both_parts())(x).detach() + 0.01 * y
        drawn.append(list(zip(x.split(samples), y.split(samples), strict=True)))
    return drawn


def train_whole(loss: str, norm: str) -> list[nn.Module]:
    """Train all layers on one process, by the right step or by a wrong one."""
    parts = both_parts()
    whole = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
    clipped = {"own": parts, "none": [], "added": []}.get(norm, [whole])
    for micro_batches in batches():
        samples = sum(len(x) for x, _ in micro_batches)
        for x, y in micro_batches:
            share = {"part": len(x) / samples, "sum": 1, "ten": len(x) / 10}
            share["equal"] = 1 / len(micro_batches)
            (mse_loss(whole(x), y) * share[loss]).backward()
        if norm == "always":
            for p in whole.parameters():
                torch.as_tensor(p.grad).mul_(1e6)  # no norm is below the limit now
        if norm == "added":
            each = [[torch.as_tensor(p.grad) for p in q.parameters()] for q in parts]
            total = torch.stack([*map(nn.utils.get_total_norm, each)]).sum()
            nn.utils.clip_grads_with_norm_(whole.parameters(), MAX_NORM, total)
        for module in clipped:
            nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        if norm != "kept":
            optimizer.zero_grad()
    return parts


def explain_part(part: nn.Module, rank: int) -> str:
    """Say what was done to this rank's layers, or nothing if it was right."""
    for loss, norm in itertools.product(LOSSES, NORMS):
        alone = train_whole(loss, norm)[rank].parameters()
        both = zip(part.parameters(), alone, strict=True)
        if all(torch.allclose(one, other, atol=1e-5) for one, other in both):
            return LOSSES[loss] or NORMS[norm]
    first = both_parts()[rank].parameters()
    if all(map(torch.equal, part.parameters(), first)):
        return "its weights have not moved"
    return f"after {len(SIZES)} steps its weights are not one process's"


def try_pipeline(train_step: Callable) -> str:
    """Take some steps; say what is wrong on this rank, or nothing."""
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    rank = dist.get_rank()
    part = both_parts()[rank]
    optimizer = torch.optim.SGD(part.parameters(), lr=1.0)
    try:
        for micro_batches in batches():
            train_step(part, micro_batches, optimizer)
    except RuntimeError as error:
        text = in_words(error)
        return "the other rank has ended" if "onnection" in text else text
    except (AttributeError, TypeError, ValueError) as error:
        return f"it ended with: {' '.join(str(error).split())}"
    found, told = explain_part(part, rank), ["", ""]
    with contextlib.suppress(RuntimeError):  # the other rank has ended with an error
        dist.all_gather_object(told, found, group=aside)
    return found or ("this rank is right" if any(told) else "")
