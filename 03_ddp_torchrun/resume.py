"""What a run must remember to go on later as if nothing had happened."""

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig
from snapshot import check_writable, load_snapshot, write_whole


def check_restarts() -> None:
    """Refuse to be started again by torchrun where that cannot be relied on.

    By default torch 2.13's agent holds the store in which its ranks meet, and keeps it
    when it starts them again. A rank that is first to arrive finds the addresses of
    those that have died there, and fails or waits for them.

    Raises:
        ValueError: torchrun is to start ranks again, and uses such a store.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ValueError(
            "ranks that are started again would find the addresses of dead ones; first "
            "type: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def lasting_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return by option what must stay the same when a run goes on."""
    names = ("--seed", "--lr", "--amp", "--samples", "--max-epochs", "--max-steps")
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
        ValueError: `path` cannot be written, or what is there cannot be gone on from.
    """
    if path is None:
        return None
    check_writable(path)
    present = [one for one in (path, previous(path)) if one.exists()]
    for one in present:
        try:
            model, snapshot = load_snapshot(one)
        except ValueError:
            continue
        if "training" not in snapshot:
            raise ValueError(
                f"{one} holds weights alone: nothing to go on from; give --snapshot "
                "another name"
            )
        if model.config != config:
            raise ValueError(
                f"{one} belongs to a model of {model.config}; give --snapshot another "
                "name"
            )
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
