"""An exercise: accumulate gradients over an epoch whose last step is shorter.

Run: python 03_ddp_torchrun/exercise_accumulation.py
Needs: this folder and an editor. Rewrite `train_epoch`. Runs on the CPU, by gloo.
Expect: a line for every rank that says what is still wrong with its steps; at last a
    `check:`. Until then the script exits with status 1.
Before: 03_ddp_torchrun/accumulation.py, which does this for a single step.
Next: 03_ddp_torchrun/uneven_inputs.py
"""

import os
import signal
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from all_ranks import apart, flat_copy
from ask_ranks import ask_every_rank, in_words
from options import OneLineParser, fail
from sent_bytes import note_exchanges

WORLD_SIZE = 2
Batches = list[tuple[torch.Tensor, torch.Tensor]]  # (samples, 8) and (samples, 1)


def train_epoch(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    grad_accum_steps: int,
) -> None:
    """Train on all batches, `grad_accum_steps` of them in a step; yours to rewrite.

    The gradient of a step is that of the mean loss over its batches, on all ranks, and
    is exchanged once. What is left at the end of the epoch makes a last, shorter step.
    Now each batch is a step of its own.
    """
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.mse_loss(ddp_model(inputs), labels).backward()
        optimizer.step()


# What follows checks it.
BATCHES, GRAD_ACCUM_STEPS = 10, 4
NEEDED_STEPS = -(-BATCHES // GRAD_ACCUM_STEPS)


def draw_batches(rank: int) -> Batches:
    """Draw a rank's batches of 4 samples; every rank can draw every rank's."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCHES, 4, 8, generator=generator)
    return list(zip(x, x.sum(-1, keepdim=True).sin() + rank, strict=True))


def gradient_alone(model: torch.nn.Module, batches: Batches) -> torch.Tensor:
    """Return the gradient of the mean loss over some batches, as one process does."""
    inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    loss = F.mse_loss(model(inputs), labels)
    return flat_copy(torch.autograd.grad(loss, list(model.parameters())))


class StepsWatched:
    """Looks at the gradients whenever the optimizer is about to step."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        """Take the model whose gradients are looked at."""
        self.model, self.rank = model, rank
        self.by_rank = [draw_batches(other) for other in range(WORLD_SIZE)]
        self.previous = torch.zeros(())
        self.steps = 0
        self.wrong = ""  # the first thing that is wrong with a gradient

    def look(self, *_: object) -> None:
        """Hold the gradient against those of one process, right and wrong ones."""
        k, step = GRAD_ACCUM_STEPS, self.steps
        self.steps += 1
        if step < NEEDED_STEPS and not self.wrong:
            self.wrong = self.explain(k * step, min(k * (step + 1), BATCHES))

    def explain(self, start: int, end: int) -> str:
        """Say what is wrong with the gradient of batches `start` to `end`."""
        found = flat_copy(p.grad for p in self.model.parameters())
        name, count = f"the gradient of step {self.steps}", end - start
        if not len(found):
            return f"{name} is missing"
        everyone = [pair for own in self.by_rank for pair in own[start:end]]
        last = [own[end - 1] for own in self.by_rank]
        own = self.by_rank[self.rank][start:end]
        right, mine = (gradient_alone(self.model, some) for some in (everyone, own))
        of_last = gradient_alone(self.model, last)
        guesses = {
            "": right,
            f" is {count} times too large: add up losses that are divided": right
            * count,
            f" is divided by {GRAD_ACCUM_STEPS}, but this step has {count} batches": (
                right * count / GRAD_ACCUM_STEPS
            ),
            " is this rank's own: it has not been exchanged": mine,
            " is this rank's own, and not divided": mine * count,
            f" is this rank's own, and divided by {GRAD_ACCUM_STEPS}": mine
            * (count / GRAD_ACCUM_STEPS),
            " is that of its last batch alone: cleared too often?": of_last,
            " is that of its last batch alone, divided": of_last / count,
            " still holds that of the step before it": right + self.previous,
        }
        self.previous = found
        for meaning, gradient in guesses.items():
            if apart(found, gradient) < 1e-4:
                return name + meaning if meaning else ""
        return f"{name} is {apart(found, right):.1f} off, by its largest entry"


def judge_accumulation(rank: int) -> str:
    """Train for an epoch; say what is wrong on this rank, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp = dist.new_group(timeout=timedelta(seconds=10))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)]
    model = torch.nn.Sequential(*layers)
    ddp_model = DistributedDataParallel(model, process_group=for_ddp)
    exchanged = note_exchanges(ddp_model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    watched = StepsWatched(model, rank)
    optimizer.register_step_pre_hook(watched.look)
    no_sync = mock.Mock(side_effect=ddp_model.no_sync)
    try:
        with mock.patch.object(ddp_model, "no_sync", no_sync):
            train_epoch(ddp_model, optimizer, draw_batches(rank), GRAD_ACCUM_STEPS)
    except RuntimeError as error:
        return in_words(error)
    if watched.steps > NEEDED_STEPS:
        return f"{watched.steps} steps, where {NEEDED_STEPS} are meant"
    if watched.wrong:
        return watched.wrong
    if watched.steps < NEEDED_STEPS:
        left = BATCHES - watched.steps * GRAD_ACCUM_STEPS
        return f"{watched.steps} steps, and the last {left} batches are left over"
    if len(exchanged) > NEEDED_STEPS:
        text = f"right, but with {len(exchanged)} exchanges, where {NEEDED_STEPS} do"
        if no_sync.called:
            return f"{text}: DDP must be in no_sync in the forward pass already"
        return f"{text}: only the last backward of a step has to exchange"
    return ""


def main() -> None:
    """Try the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    OneLineParser(description="Check your accumulation of gradients.").parse_args()
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    ask_every_rank(judge_accumulation, WORLD_SIZE)
    print(
        f"check: {NEEDED_STEPS} gradients on {WORLD_SIZE} ranks are those of one "
        f"process, each exchanged once"
    )


if __name__ == "__main__":
    main()
