"""Check a training loop on two ranks: one process, all batches, must end the same."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from ask_ranks import ask_ranks, in_words
from ranks import read_options
from terrain import TerrainModel, load_terrain, sample_points

WORLD_SIZE, STEPS, BATCH_SIZE = 2, 32, 32
# Of a weight, in float64. Sums in another order differ by about 1e-15 after 32 steps.
LIMIT = 1e-9
Train = Callable[[nn.Module, list[Any]], list[float]]


def check_loop(answer: Train) -> None:
    """Start the ranks, and let each of them train."""
    read_options()
    claim = f"after {STEPS} steps {WORLD_SIZE} ranks hold the weights of one process"
    ask_ranks(try_loop, answer, WORLD_SIZE, claim)


def try_loop(answer: Train) -> str:
    """Train with the answer; say what is wrong on this rank, or nothing."""
    torch.set_default_dtype(torch.float64)  # rounding shall not hide a mistake
    rank = dist.get_rank()
    points, _ = sample_points(load_terrain(), STEPS * BATCH_SIZE * WORLD_SIZE)
    places, heights = (t.split(BATCH_SIZE * WORLD_SIZE) for t in points.tensors)
    batches = list(zip(places, heights, strict=True))
    mine = [tuple(t.chunk(WORLD_SIZE)[rank] for t in batch) for batch in batches]
    torch.manual_seed(0)  # the same first weights on every rank
    model = TerrainModel()
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside, losses, error = dist.new_group(timeout=timedelta(minutes=1)), [], ""
    # DDP in a group that reports mismatched calls crashes on torch 2.13.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp = dist.new_group(timeout=timedelta(seconds=10))
    name = "torch.nn.parallel.distributed._get_default_group"
    try:
        with mock.patch(name, lambda: for_ddp):
            losses = answer(model, mine)
    except Exception as failure:
        error = in_words(failure)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    by_rank: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(by_rank, (error, weights), group=aside)
    errors, (weights_0, weights_1) = zip(*by_rank, strict=True)
    if any(errors):
        return error or f"trained, while rank {1 - rank} could not"
    if not isinstance(losses, list) or len(losses) != STEPS:
        return f"it returned {losses!r:.40}, not a list of {STEPS} losses"
    if weights.isnan().any():
        return (
            "its weights are nan: is each gradient cleared, and no weight overwritten?"
        )
    first, last = sum(losses[:8]) / 8, sum(losses[-8:]) / 8
    falls = f"the loss fell from {first:.2f} to {last:.2f}"
    if differing := int((weights_0 != weights_1).sum()):
        return f"{falls}, but {differing:,} weights differ from rank {1 - rank}'s"
    if is_near(weights, train_one_process(batches)):
        return ""
    far = f"{falls}, but the weights, equal on both ranks, are not one process's"
    if is_near(weights, train_one_process(batches, length=WORLD_SIZE)):
        far += f": each gradient was {WORLD_SIZE} times the mean"
    return far


def is_near(weights: torch.Tensor, due: torch.Tensor) -> bool:
    """Tell whether two models are the same, but for rounding."""
    return bool((weights - due).abs().max() < LIMIT)


def train_one_process(batches: list[Any], length: float = 1.0) -> torch.Tensor:
    """Train on whole batches, with gradients of this length; return the weights."""
    torch.manual_seed(0)
    model = TerrainModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for places, heights in batches:
        optimizer.zero_grad()
        (length * mse_loss(model(places), heights)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()
