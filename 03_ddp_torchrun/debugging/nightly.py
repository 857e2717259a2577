"""A nightly training run, with what such a run does beside training.

The exercises start it. In each case something goes wrong on one rank: what, and on
which, depends on the number of the case. planted.py knows; this file does not.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import gather, say
from step_timer import StepTimer
from watchdog import Watchdog

STEPS, SHOWN = 500, 20  # how many steps there are, and after how many times are shown
ENTRIES = {"index": 500, "cache": 500, "metrics": 100, "weights": 30}
PARTS = ["load", "compute", "wait", "write"]


@dataclass
class Files:
    """The files of one rank: how much is in each, and a lock for who writes to it."""

    entries: dict[str, int] = field(default_factory=ENTRIES.copy)
    lock: dict[str, threading.Lock] = field(
        default_factory=lambda: {name: threading.Lock() for name in ENTRIES}
    )


def read_index(files: Files) -> torch.Tensor:
    """Choose the samples of a batch: (B, D)."""
    with files.lock["index"]:
        seed = sum(entry * entry for entry in range(files.entries["index"]))
        return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed % 1000))


def augment(files: Files, samples: torch.Tensor) -> torch.Tensor:
    """Shift the samples by what the cache says: (B, D)."""
    with files.lock["cache"]:
        shifts = sorted(entry % 7 for entry in range(files.entries["cache"]))
        return samples + shifts[len(shifts) // 2] / 100


def write_metrics(files: Files, loss: float) -> str:
    """Make a line for this rank's log."""
    with files.lock["metrics"]:
        words = [f"{entry}: {loss}" for entry in range(files.entries["metrics"])]
        return words[-1]


def save_weights(files: Files, model: nn.Module) -> int:
    """Sum up the weights, as a checksum for the next checkpoint."""
    total = sum(weight.sum().item() for weight in model.parameters())
    with files.lock["weights"]:
        digits = [ord(digit) for digit in str(total) * files.entries["weights"]]
        return sum(digits)


def train_overnight(files: Files, after_a_while: Callable[[], None]) -> None:
    """Train, and show from time to time what the parts of a step took on each rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watchdog, timer = Watchdog(seconds=5, folder=Path("hang")), StepTimer()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        with timer.part("load"):
            samples = augment(files, read_index(files))
        with timer.part("compute"):
            loss = model(samples).square().mean()
        with timer.part("wait"):
            dist.barrier()
        with timer.part("compute"):
            loss.backward()
            optimizer.step()
        with timer.part("write"):
            write_metrics(files, loss.item())
            save_weights(files, model)
        watchdog.step()
        if step % SHOWN == 0:
            ms = {part: 1000 * timer.seconds.pop(part) / SHOWN for part in PARTS}
            for rank, of_rank in enumerate(gather(ms)):
                times = ", ".join(f"{part} {of_rank[part]:.0f}" for part in PARTS)
                say(f"step {step}, rank {rank}, ms: {times}")
        if step == SHOWN:
            after_a_while()
