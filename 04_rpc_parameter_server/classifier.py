"""From which package are these lines of Python? The samples, and the model.

A sample is a bag: the row numbers of the words in five lines. The model is an embedding
table of `ROWS` x `WIDTH` numbers and a small dense part. B: bags in a batch; D: WIDTH.
"""

import logging
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ranks import fail

# Packages of the standard library of similar size, which Python rarely comes without.
PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
ROWS, WIDTH = 2**15, 32
BLOCK = 1024  # rows of the table that are drawn at once
LINES_PER_SAMPLE = 5
HELD_OUT_EVERY = 4  # one file in four is never trained on
# Row numbers of all bags, (words,); where each bag begins in them, (B,); labels, (B,).
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# It would warn in each process that `EagerSGD` may be slow.
logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)


class EagerSGD(torch.optim.SGD):
    """A subclass of SGD: of these `DistributedOptimizer` has no compiled copy."""

    def step(self, closure: Any = None) -> Any:
        """Step, and forget: a weight that the next batch misses would step again.

        It still may with two such optimizers in a process, unless both have the same
        parameters: each sets all `.grad`.
        """
        loss = super().step(closure)
        self.zero_grad()
        return loss


class Table(nn.EmbeddingBag):
    """The sparse part: sum up the rows of each bag. A gradient holds only these."""

    def __init__(self, rows: int, width: int, seed: int) -> None:
        """Fill the table with small numbers that depend on nothing but `seed`."""
        generator = torch.Generator().manual_seed(seed)
        weights = 0.1 * torch.randn(rows, width, generator=generator)
        super().__init__(rows, width, mode="sum", sparse=True, _weight=weights)


def draw_shard(rows: int, shard: int, n: int) -> torch.Tensor:
    """Draw the rows of a `Table` with seed 0; keep every n-th, beginning with `shard`.

    They are drawn block by block: the whole table is never in memory.
    """
    generator, filled = torch.Generator().manual_seed(0), 0
    own = torch.empty(len(range(shard, rows, n)), WIDTH)
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        block = 0.1 * torch.randn(count, WIDTH, generator=generator)
        kept = block[(shard - start) % n :: n]
        own[filled : filled + len(kept)] = kept
        filled += len(kept)
    return own


def dense_part(seed: int = 0) -> nn.Sequential:
    """Make the small network: from the sum of a bag's rows to a score per package."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, len(PACKAGES))
        return nn.Sequential(nn.LayerNorm(WIDTH), *layers)


class HybridModel(nn.Module):
    """The whole model, wherever its parts may live: here, remote, or under DDP."""

    def __init__(self, table: nn.Module, dense: nn.Module) -> None:
        """Take both parts as they come."""
        super().__init__()
        self.table, self.dense = table, dense
        self.device = next(dense.parameters()).device

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Score each bag for each package: (words,), (B,) to (B, packages)."""
        # `.forward`: a `RemoteModule` that has travelled by RPC has lost what a plain
        # call needs, and would raise AttributeError.
        return self.dense(self.table.forward(indices, offsets).to(self.device))


@dataclass(frozen=True)
class Samples:
    """Bags, each a tensor of row numbers, and their labels: positions in PACKAGES."""

    bags: list[torch.Tensor]
    labels: torch.Tensor

    def __len__(self) -> int:
        """Count the bags."""
        return len(self.bags)

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Put some bags together as `EmbeddingBag` takes them."""
        bags = [self.bags[number] for number in numbers.tolist()]
        lengths = torch.tensor([len(bag) for bag in bags])
        return torch.cat(bags), lengths.cumsum(0) - lengths, self.labels[numbers]

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Yield one trainer's batches, epoch by epoch, the same ones in every run."""
        for epoch in count():
            generator = torch.Generator().manual_seed(epoch)
            # All trainers shuffle alike, and each takes other samples.
            own = torch.randperm(len(self), generator=generator)[rank::world_size]
            for step in range(len(self) // (batch_size * world_size)):
                yield self.batch(own[step * batch_size : (step + 1) * batch_size])


def find_sources(package: str) -> tuple[list[Path], list[Path]]:
    """List a package's files, for training and held out, in the same order anywhere."""
    root = Path(sysconfig.get_paths()["stdlib"], package)
    files = [f for f in root.rglob("*.py") if "/test" not in f"/{f.relative_to(root)}"]
    if len(files) < HELD_OUT_EVERY:
        fail(f"this Python lacks the source text of {root}")
    # By size, so that both parts hold large files and small ones.
    files.sort(key=lambda path: (-path.stat().st_size, path.as_posix()))
    held_out = files[2::HELD_OUT_EVERY]
    return [path for path in files if path not in held_out], held_out


def cut(files: list[Path], rows: int) -> list[torch.Tensor]:
    """Cut files into bags: the row numbers of the words in `LINES_PER_SAMPLE` lines."""
    bags = []
    for path in files:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        for start in range(0, len(lines) - LINES_PER_SAMPLE + 1, LINES_PER_SAMPLE):
            text = "\n".join(lines[start : start + LINES_PER_SAMPLE])
            # Python's own `hash` differs between processes; two words may share a row.
            words = re.findall(r"[^\W\d]\w*|[^\w\s]", text)
            bags.append(torch.tensor([zlib.crc32(w.encode()) % rows for w in words]))
    return [bag for bag in bags if len(bag)]


def load_samples(rows: int = ROWS) -> tuple[Samples, Samples]:
    """Return samples to train on and of other files, with all labels as frequent."""
    found = []
    for part in zip(*map(find_sources, PACKAGES), strict=True):
        by_label = [cut(files, rows) for files in part]
        each = min(map(len, by_label))
        # Spread evenly over the package's files.
        bags = [s[i * len(s) // each] for s in by_label for i in range(each)]
        labels = torch.arange(len(PACKAGES)).repeat_interleave(each)
        found.append(Samples(bags, labels))
    return found[0], found[1]


def train_in_one_process(
    model: HybridModel, steps: Iterable[Sequence[Batch]], lr: float, table_lr: float
) -> list[float]:
    """Take alone the steps of several trainers, a batch of each; return the losses."""
    dense = {"params": model.dense.parameters(), "lr": lr}
    table = {"params": model.table.parameters(), "lr": table_lr}
    optimizer, losses = torch.optim.SGD([dense, table]), []
    for batches in steps:
        each = [cross_entropy(model(i, offsets), y) for i, offsets, y in batches]
        loss = torch.stack(each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
