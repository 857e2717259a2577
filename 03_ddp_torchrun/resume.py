"""What a run must remember to go on later as if nothing had happened."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig
from snapshot import load_snapshot, write_whole


class ElasticBatches(torch.utils.data.Sampler[list[int]]):
    """Deal steps of one fixed size to however many ranks there are today.

    Where the ranks divide a step evenly, a rank gets the samples that it would get from
    `DistributedSampler`, in the same order.
    """

    def __init__(
        self, samples: int, samples_per_step: int, batch_size: int, seed: int
    ) -> None:
        """Cut a rank's share of each step into batches of at most `batch_size`."""
        self.samples, self.samples_per_step, self.seed = samples, samples_per_step, seed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # The ranks may differ by one sample, so even in how many batches they make.
        self.share = len(range(self.rank, samples_per_step, self.world_size))
        self.batches_per_step = -(-self.share // batch_size)
        self.epoch = self.first_step = 0

    def set_position(self, epoch: int, first_step: int) -> None:
        """Choose where to begin: at this step of this epoch."""
        self.epoch, self.first_step = epoch, first_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other, `batches_per_step` a step."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        for step in range(self.first_step, self.samples // self.samples_per_step):
            start = step * self.samples_per_step
            everyones = order[start : start + self.samples_per_step]
            own = everyones[self.rank :: self.world_size]
            for number in range(self.batches_per_step):
                first = number * self.share // self.batches_per_step
                end = (number + 1) * self.share // self.batches_per_step
                yield own[first:end]


def lasting_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return by option what must stay the same when a run goes on."""
    names = ("--seed", "--lr", "--samples", "--max-epochs", "--max-steps", "--text")
    values = {name: getattr(args, name[2:].replace("-", "_")) for name in names}
    return {**values, "--text": str(args.text)}


class Found(NamedTuple):
    """A snapshot from which a run can go on."""

    path: Path  # the newest, or the one before it
    model: GPT
    training: dict[str, Any]


def previous(path: Path) -> Path:
    """Name the snapshot before the newest."""
    return path.with_name(path.name + ".previous")


def find_snapshot(
    path: Path | None, config: GPTConfig, settings: dict[str, Any]
) -> Found | None:
    """Load the newest snapshot that is whole; every rank does so by itself.

    Args:
        path: where the newest should stand, with the one before it beside it; or None.
        config: of the model to be trained.
        settings: by option, what must be the same before and after.

    Returns:
        None if there is no snapshot at all.

    Raises:
        ValueError: the folder cannot be used, or what is there cannot be gone on from.
    """
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ValueError(f"--snapshot {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--snapshot {path}: no permission to write in {path.parent}")
    present = [one for one in (path, previous(path)) if one.exists()]
    for one in present:
        try:
            model, snapshot = load_snapshot(one)
        except ValueError:
            continue
        if "training" not in snapshot:
            raise ValueError(f"{one} holds weights alone: nothing to go on from")
        if model.config != config:
            raise ValueError(f"{one} belongs to a model of {model.config}")
        for option, value in snapshot["training"]["settings"].items():
            if value != settings[option]:
                raise ValueError(
                    f"{one} comes from a run with {option}={value}, this one has "
                    f"{settings[option]}; move it away to train from the beginning"
                )
        return Found(one, model, snapshot["training"])
    if present:
        raise ValueError(
            f"{' and '.join(map(str, present))}: damaged, or no snapshot; move it away "
            "to train from the beginning"
        )
    return None


def agree_on_step(step: int, device: torch.device) -> str | None:
    """Say what is wrong if the ranks would begin at different steps; all call this."""
    steps = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    steps[dist.get_rank()] = step
    dist.all_reduce(steps)
    if len(set(steps.tolist())) == 1:
        return None
    return (
        f"the ranks find snapshots of steps {steps.tolist()}: --snapshot must name a "
        "file that all machines share"
    )


@dataclass
class Progress:
    """All that changes in a run, and what it must have in common with the next."""

    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    seen: torch.Tensor  # how often this rank saw each sample of the epoch, (samples,)
    samples_per_step: int
    settings: dict[str, Any]
    text: Path | None
    step: int = 0

    def save(self, path: Path, validation_loss: float | None = None) -> None:
        """Write the newest snapshot, keep the one before; every rank must call this."""
        device = self.seen.device
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, states)
        seen = self.seen.clone()
        dist.all_reduce(seen)
        if dist.get_rank() > 0:
            return
        if path.exists():
            os.replace(path, previous(path))
        # The first four are what generate.py expects.
        content = {
            "config": asdict(self.model.config),
            "model": self.model.state_dict(),
            "validation_loss": validation_loss,
            "text": None if self.text is None else str(self.text.resolve()),
            "training": {
                "step": self.step,
                "samples_per_step": self.samples_per_step,
                "settings": self.settings,
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "seen": seen.cpu(),
                "random": by_rank,
            },
        }
        write_whole(path, content)

    def restore(self, found: Found, newest: Path) -> str:
        """Take over all but the model's weights from a snapshot; every rank does so.

        Returns:
            What to say about it. A damaged newest snapshot is moved out of the way.
        """
        training = found.training
        self.step = training["step"]
        self.optimizer.load_state_dict(training["optimizer"])
        self.schedule.load_state_dict(training["schedule"])
        rank, device = dist.get_rank(), self.seen.device
        if rank == 0:  # the others' counts are added to it whenever they are needed
            self.seen += training["seen"].to(device)
        # With another number of ranks nobody is the rank that it was: all go on with
        # the new random numbers that they have begun.
        if len(training["random"]) == dist.get_world_size():
            states = training["random"][rank]
            torch.set_rng_state(states[0])
            if device.type != "cpu":
                torch.get_device_module(device).set_rng_state(states[1], device)
        note = (
            f"snapshot: going on from {found.path}, step {self.step}, "
            f"{self.samples_per_step} samples a step"
        )
        if found.path == newest or not newest.exists():
            return note
        if rank == 0:
            os.replace(newest, f"{newest}.damaged")
        return f"snapshot: {newest} is damaged and now called {newest}.damaged\n{note}"


def settle_buckets(
    ddp_model: DistributedDataParallel, inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    """Let DDP arrange its messages now, not after the first step; all call this.

    DDP lays out the gradients in one order for the first backward, and from the second
    on in the order in which they came. Where a value stands in a message decides in
    which order the ranks' values are added, so with more than two ranks it decides the
    last bit of the sum. A run that goes on must not make a first step of its own.
    """
    ddp_model(inputs, labels).backward()
    ddp_model.zero_grad()


def samples_report(seen: torch.Tensor, steps: int, samples_per_step: int) -> str:
    """Check that no sample of an epoch was lost or counted twice; all call this.

    Args:
        seen: how often this rank saw each sample, shape (samples,).
        steps: taken in this epoch, by this run and by those that it goes on from.
        samples_per_step: of all ranks together.

    Raises:
        RuntimeError: a sample was lost or counted twice.
    """
    total = seen.clone()
    dist.all_reduce(total)
    different, all_together = int((total > 0).sum()), int(total.sum())
    expected = steps * samples_per_step
    if not different == all_together == expected:
        raise RuntimeError(
            f"{steps} steps of {samples_per_step} saw {all_together} samples, "
            f"{different} of them different"
        )
    return f"{steps} steps x {samples_per_step} samples = {expected} different samples"
