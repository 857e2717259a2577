"""An exercise: a DeepSpeed run with three mistakes, of which it reports only one.

Run: python 05_deepspeed_zero/exercise_broken_engine.py
Needs: this folder and an editor. Repair `CONFIG` and `train_with_engine`. Runs on
    the CPU, by gloo.
Expect: for every rank the first thing that is wrong with the run; at last a `check:`.
    Until then the script exits with status 1.
Before: 05_deepspeed_zero/stage_1.py
Next: 05_deepspeed_zero/held.py
"""

import argparse
import logging
import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from ask_ranks import ask_every_rank, in_words
from config_keys import unknown_key
from start import choose_parts, refuse

WORLD_SIZE = 2
Batches = list[tuple[torch.Tensor, torch.Tensor]]  # (4, 8) and (4, 1)

# A step is to be taken from 16 samples: two batches of 4 on each of two ranks.
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def train_with_engine(model: Any, batches: Batches) -> Any:
    """Train on this rank's batches, in steps of 16 samples; return the engine."""
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    accumulated = CONFIG["gradient_accumulation_steps"]
    for number, (inputs, labels) in enumerate(batches, start=1):
        loss = mse_loss(engine(inputs), labels) / accumulated
        engine.backward(loss)
        if number % accumulated == 0:
            engine.step()
    return engine


# What follows checks it.
BATCHES, ACCUMULATED = 8, 2
NEEDED_STEPS = BATCHES // ACCUMULATED


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * factor)
    ranks = range(WORLD_SIZE) if rank is None else [rank]
    dealt = [draw_for(one) for one in ranks]
    for start in range(0, BATCHES, ACCUMULATED):
        batches = [pair for own in dealt for pair in own[start : start + ACCUMULATED]]
        inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        optimizer.zero_grad()
        mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def explain_engine(engine: Any, rank: int) -> str:
    """Say what is wrong with an engine that has trained, or nothing."""
    samples = engine.train_batch_size()
    if samples != 4 * ACCUMULATED * WORLD_SIZE:
        return f"a step takes {samples} samples, and is to take 16"
    if engine.train_micro_batch_size_per_gpu() != 4:
        said = engine.train_micro_batch_size_per_gpu()
        return f"the config says {said} samples at a time, but the batches hold 4"
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


def judge_engine(rank: int) -> str:
    """Train; say what is wrong on this rank, or nothing."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(WORLD_SIZE), "DS_ACCELERATOR": "cpu"}
    # Nothing is to be compiled; this config is thrown away. It imports DeepSpeed, and
    # for that nobody shall be told to have been waited for.
    aside = dist.new_group(timeout=timedelta(minutes=1))
    choose_parts({"optimizer": {"params": {}}}, torch.device("cpu"), fused=False)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dist.all_gather_object([None] * WORLD_SIZE, None, group=aside)
    if problem := unknown_key(CONFIG):
        return f"config: {problem}"
    try:
        engine = train_with_engine(small_net(), draw_for(rank))
    except RuntimeError as error:
        return in_words(error)
    except (AssertionError, TypeError, ValueError) as error:
        return f"DeepSpeed refuses: {' '.join(str(error).split())}"
    return explain_engine(engine, rank)


def main() -> None:
    """Try the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your DeepSpeed run.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    ask_every_rank(judge_engine, WORLD_SIZE)
    print(f"check: {NEEDED_STEPS} steps on {WORLD_SIZE} ranks are those of one process")


if __name__ == "__main__":
    main()
