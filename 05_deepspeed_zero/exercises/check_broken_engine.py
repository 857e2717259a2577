"""Check a DeepSpeed run on two ranks, and say in words what is wrong."""

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from ask_ranks import ask_ranks, in_words
from check_config import unknown_key
from deepspeed_setup import prepare
from ranks import read_options

WORLD_SIZE, BATCHES, ACCUMULATED, LR = 2, 8, 2, 0.1
NEEDED_STEPS = BATCHES // ACCUMULATED
Batches = list[tuple[torch.Tensor, torch.Tensor]]  # inputs (4, 8) and labels (4, 1)
Config = dict[str, Any]
Train = Callable[[torch.nn.Module, Batches, Config], Any]


def check_engine(config: Config, train: Train) -> None:
    """Start the ranks, and let each of them train by the answer."""
    read_options()
    claim = f"{NEEDED_STEPS} steps on {WORLD_SIZE} ranks are those of one process"
    ask_ranks(try_engine, (config, train), WORLD_SIZE, claim)


def try_engine(answer: tuple[Config, Train]) -> str:
    """Train with a config and a loop; say what is wrong on this rank, or nothing."""
    (config, train), rank = answer, dist.get_rank()
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed is imported here, and nobody shall be told to have been waited for.
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    prepare({})
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dist.barrier(group=aside)
    if problem := unknown_key(config):
        return f"config: {problem}"
    try:
        engine = train(small_net(), draw_for(rank), config)
    except RuntimeError as error:
        return in_words(error)
    except (AssertionError, TypeError, ValueError) as error:
        return f"DeepSpeed refuses: {' '.join(str(error).split())}"
    return explain_engine(engine, rank)


def draw_for(rank: int) -> Batches:
    """Draw a rank's batches of 4 samples; every rank can draw every rank's."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCHES, 4, 8, generator=generator)
    return list(zip(x, x.sum(-1, keepdim=True).sin() + rank, strict=True))


def small_net() -> torch.nn.Module:
    """Make the same small model on every rank."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)]
    return torch.nn.Sequential(*layers)


def weights_alone(rank: int | None, factor: float) -> torch.Tensor:
    """Train in one process; return the weights.

    Args:
        rank: whose batches to take; None for those of all ranks.
        factor: what to multiply each gradient by.
    """
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * factor)
    ranks = range(WORLD_SIZE) if rank is None else [rank]
    sharded = [draw_for(one) for one in ranks]
    for start in range(0, BATCHES, ACCUMULATED):
        batches = [pair for own in sharded for pair in own[start : start + ACCUMULATED]]
        inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        optimizer.zero_grad()
        mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def explain_engine(engine: Any, rank: int) -> str:
    """Say what is wrong with an engine that has trained, or nothing."""
    if not hasattr(engine, "train_batch_size"):
        return f"train_with_engine returned {type(engine).__name__}, not the engine"
    samples = engine.train_batch_size()
    if samples != 4 * ACCUMULATED * WORLD_SIZE:
        return f"a step takes {samples} samples, and is to take 16"
    if engine.train_micro_batch_size_per_gpu() != 4:
        said = engine.train_micro_batch_size_per_gpu()
        return f"the config says {said} samples at a time, but the batches hold 4"
    if (rates := engine.get_lr()) != [LR]:
        return f"the learning rate is {rates[0]}, and is to stay {LR}"
    if limit := engine.gradient_clipping():
        return f"it clips gradients at a norm of {limit}: what does the config say?"
    if engine.global_steps != NEEDED_STEPS:
        text = (
            f"{engine.global_steps} steps of 16 samples, where {NEEDED_STEPS} are due"
        )
        if engine.micro_steps < BATCHES:
            text += f": it has been told of {engine.micro_steps} batches, not {BATCHES}"
        return text
    found = torch.nn.utils.parameters_to_vector(engine.module.parameters()).detach()
    guesses = {
        "": (None, 1.0),
        f"all gradients were {ACCUMULATED} times too small: divided twice?": (
            None,
            1 / ACCUMULATED,
        ),
        f"all gradients were {ACCUMULATED} times too large": (None, ACCUMULATED),
        "this rank has gone its own way, with its own gradients": (rank, 1.0),
    }
    for meaning, (whose, factor) in guesses.items():
        if torch.allclose(found, weights_alone(whose, factor), atol=1e-5):
            return meaning
    return "its weights are not those that one process comes to"
