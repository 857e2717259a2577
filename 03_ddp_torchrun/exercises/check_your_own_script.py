"""Check a loop that was turned into DDP: its samples, its weights, what it reports."""

import contextlib
import io
import math
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, TensorDataset

from ask_ranks import ask_ranks, in_words
from noted_samples import (
    NotedDataset,
    by_epoch,
    explain_order,
    explain_samples,
    explain_state,
)
from ranks import read_options
from same_as_one_process import same_as_one_process

WORLD_SIZE, EPOCHS, SAMPLES, BATCH_SIZE = 2, 2, 128, 32
STEPS = EPOCHS * SAMPLES // BATCH_SIZE
PATIENCE = timedelta(seconds=10)  # how long DDP waits for another rank's gradients
BuildModel = Callable[[], nn.Module]
Fit = Callable[[nn.Module, Dataset, int], Any]


def check_script(build_model: BuildModel, fit: Fit) -> None:
    """Start the ranks, and let each of them run the loop."""
    read_options()
    claim = f"{WORLD_SIZE} ranks train as one process does, and report as one"
    ask_ranks(try_script, (build_model, fit), WORLD_SIZE, claim)


def draw_throws() -> TensorDataset:
    """Draw throws of 5 to 25 m/s, and how far they go, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    speeds, angles = torch.rand(2, SAMPLES, generator=generator)
    throws = torch.stack([0.5 + 2 * speeds, 0.1 + 1.3 * angles], dim=1)
    return TensorDataset(throws, length_of(throws))


def length_of(throws: torch.Tensor) -> torch.Tensor:
    """Return the lengths, (B, 1), of throws without air, (B, 2), in tens of metres."""
    speeds, angles = throws.split(1, dim=1)
    return 10 / 9.81 * speeds.square() * (2 * angles).sin()


def try_script(answer: tuple[BuildModel, Fit]) -> str:
    """Run the loop; say what is wrong on this rank, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13. So it gets a
    # group of its own, and so does the checker's own talk.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp: Any = dist.new_group(timeout=PATIENCE)
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    rank, build = dist.get_rank(), partial(build_alike, answer[0])
    by_rank: list[Any] = [None] * WORLD_SIZE
    model = build()
    with ddp_in(for_ddp):
        dist.all_gather_object(by_rank, note_run(model, answer[1]), group=aside)
        errors, seen, steps, losses, told, printed = zip(*by_rank, strict=True)
        if any(errors):
            return errors[rank] or "this rank went on; another waited for it"
        text = explain_samples(seen, SAMPLES, EPOCHS) or explain_steps(steps[0])
        shapes = [text or explain_shape(losses) for losses in told]
        if any(shapes):
            return shapes[rank] or "this rank is right"
        try:
            text = explain_training(build, answer[1])
        except Exception as failure:
            return in_words(failure)
    return (
        text
        or explain_order(seen[rank], EPOCHS)
        or explain_run(model.state_dict(), build(), seen)
        or explain_losses(rank, told[rank], losses)
        or explain_output(told[rank], printed)
    )


def build_alike(build_model: BuildModel) -> nn.Module:
    """Make the model with the same weights on every rank."""
    torch.manual_seed(0)
    return build_model()


def ddp_in(group: Any) -> contextlib.AbstractContextManager[Any]:
    """Let DDP use a group, unless it is told which."""
    # A wrapper around DDP's `__init__` would do as well, but DDP's warnings would name
    # its line, in this file, and not that of the answer.
    name = "torch.nn.parallel.distributed._get_default_group"
    return mock.patch(name, lambda: group)


def note_run(model: nn.Module, fit: Fit) -> tuple[Any, ...]:
    """Run the loop; return its error, samples, steps, losses, answer and output."""
    dataset, losses, steps = NotedDataset(draw_throws()), [], []
    error, told, output = "", None, io.StringIO()

    def note_loss(_: nn.Module, inputs: tuple[torch.Tensor], lengths: Any) -> None:
        losses.append(mse_loss(lengths, length_of(inputs[0])).item())

    model.register_forward_hook(note_loss)
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        with contextlib.redirect_stdout(output):
            told = fit(model, dataset, EPOCHS)
    except Exception as failure:
        error = in_words(failure)
    finally:
        handle.remove()
    return error, dataset.seen, len(steps), losses, told, output.getvalue()


def explain_steps(steps: int) -> str:
    """Say what is wrong with the number of steps, or nothing."""
    if steps == STEPS:
        return ""
    samples = EPOCHS * SAMPLES / steps if steps else 0
    return (
        f"{steps} steps of {samples:g} samples, where one process takes {STEPS} of "
        f"{BATCH_SIZE}: whose samples does the loader count?"
    )


def explain_training(build: BuildModel, fit: Fit) -> str:
    """Compare the training with that of one process; say what differs, or nothing."""

    def train_step(model: Any, _: Any, __: Any, batch: Any) -> torch.Tensor:
        # A dataset of one batch, so an epoch is a step.
        return torch.tensor(fit(model, TensorDataset(*batch), 1)[0])

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse_loss(model(batch[0]), batch[1])

    parts = zip(*(t.split(BATCH_SIZE) for t in draw_throws().tensors), strict=True)
    batches = list(parts)[:3]
    with contextlib.redirect_stdout(io.StringIO()):
        is_same, line = same_as_one_process(
            build, loss_of, lambda model: model, batches, train_step, shards=batches
        )
    if is_same:
        return ""
    line = line.removeprefix("differs ")
    name, times = re.findall(r"(\S+) moved \{(.*)\}", line)[0]
    by_rank = re.findall(r": ([\d.]+|inf|nan)", times)
    if name == "loss":
        return f"{line}: it is not the mean over all ranks' samples"
    if name == "mean":
        return f"{line}: DDP copies rank 0's buffers, and averages none"
    if len(by_rank) < WORLD_SIZE or len(set(by_rank)) > 1:
        return f"{line}: the ranks' weights differ, nothing averages the gradients"
    if float(by_rank[0]) == WORLD_SIZE:
        return f"{line}: is it a sum over the ranks, or the learning rate?"
    return f"{line}: the ranks agree, but not with one process"


def explain_run(ours: Any, model: nn.Module, seen: tuple[list[int], ...]) -> str:
    """Compare what a run of several steps an epoch ended with; say what differs."""
    text = explain_state(ours, model, draw_throws(), seen, BATCH_SIZE // WORLD_SIZE)
    epoch = f"epochs of {STEPS // EPOCHS} steps"
    text = text and f"a step is right, but after {epoch} {text}"
    return text and f"{text}: what is done only once an epoch?"


def explain_shape(told: Any) -> str:
    """Say whether something else than a list of losses was returned, or nothing."""
    if isinstance(told, list) and len(told) == EPOCHS:
        return ""
    return f"it returned {told!r:.40}, not a list of {EPOCHS} losses"


def explain_losses(rank: int, told: list[Any], noted: tuple[list[float], ...]) -> str:
    """Say what is wrong with the losses that were returned, or nothing."""
    local = [[sum(part) / len(part) for part in by_epoch(own, EPOCHS)] for own in noted]
    for epoch, found in enumerate(map(float, told)):
        mean = sum(losses[epoch] for losses in local) / WORLD_SIZE
        if not math.isclose(found, mean, rel_tol=1e-4):
            is_local = math.isclose(found, local[rank][epoch], rel_tol=1e-4)
            what = (
                "this rank's local loss" if is_local else "neither local nor the mean"
            )
            return (
                f"the loss of epoch {epoch} is {found:.3f}, over all ranks "
                f"{mean:.3f}: it is {what}"
            )
    return ""


def explain_output(told: list[Any], printed: tuple[str, ...]) -> str:
    """Say what is wrong with what the ranks have printed, or nothing."""
    counts = [len(output.splitlines()) for output in printed]
    if sorted(counts) != [0] * (WORLD_SIZE - 1) + [EPOCHS]:
        return f"the ranks print {counts} lines: one prints, a line for each epoch"
    for line, loss in zip("".join(printed).splitlines(), told, strict=True):
        numbers = map(float, re.findall(r"\d+\.\d+", line))
        if not any(abs(number - loss) < 0.0051 for number in numbers):
            return f"{line!r} does not tell the loss over all ranks, {loss:.3f}"
    return ""
