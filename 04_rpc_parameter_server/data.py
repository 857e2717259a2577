"""A few lines of Python, as a bag of hashed words, and which package they are from."""

import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# Packages of the standard library, of like size and in every installation of Python.
PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
LINES_PER_SAMPLE = 5
ROWS = 2**15  # of the table: a word's hash is a row number below this
HELD_OUT_EVERY = 4  # one file in four is never trained on

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def row_of(word: str, rows: int) -> int:
    """Hash a word to a row number.

    Two words may share a row. Python's own `hash` will not do: it differs between
    processes, and here they must all mean the same row.
    """
    return zlib.crc32(word.encode()) % rows


@dataclass(frozen=True)
class Samples:
    """Bags of row numbers, one after another, and a label for each bag.

    Attributes:
        indices: the row numbers of all bags, shape (tokens,), int64.
        starts: where each bag begins in `indices`, and the end, shape (samples + 1,).
        labels: positions in `PACKAGES`, shape (samples,), int64.
        files: how many files the samples were cut from.
    """

    indices: torch.Tensor
    starts: torch.Tensor
    labels: torch.Tensor
    files: int

    def __len__(self) -> int:
        """Count the bags."""
        return len(self.labels)

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Put some bags together as `EmbeddingBag` takes them.

        Returns:
            Row numbers (tokens,); where each bag begins in them (B,); labels (B,).
        """
        bags = [
            self.indices[self.starts[n] : self.starts[n + 1]] for n in numbers.tolist()
        ]
        lengths = torch.tensor([len(bag) for bag in bags])
        return torch.cat(bags), lengths.cumsum(0) - lengths, self.labels[numbers]

    def batches(
        self, epoch: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Yield one trainer's batches of an epoch, the same ones in every run.

        All trainers shuffle alike and each takes other samples; those that do not
        fill a batch for everyone are left out of this epoch.
        """
        order = torch.randperm(
            len(self), generator=torch.Generator().manual_seed(epoch)
        )
        own = order[rank::world_size]
        for step in range(len(self) // (batch_size * world_size)):
            yield self.batch(own[step * batch_size : (step + 1) * batch_size])


def bag_of_each(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Tell for each row number of a batch which bag it is in: (tokens,), from 0."""
    ends = torch.cat([offsets[1:], offsets.new_tensor([len(indices)])])
    return torch.repeat_interleave(ends - offsets)


def find_sources(package: str) -> tuple[list[Path], list[Path]]:
    """List a package's files, for training and held out, in the same order anywhere.

    From the largest file on, each fourth is held out: so both parts hold large files
    and small ones, and no file has lines in both.

    Raises:
        FileNotFoundError: this Python has come without the package's source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"], package)
    files = [
        path
        for path in folder.rglob("*.py")
        if not any(part.startswith("test") for part in path.relative_to(folder).parts)
    ]
    if len(files) < HELD_OUT_EVERY:
        raise FileNotFoundError(f"this Python lacks the source text of {folder}")
    files.sort(key=lambda path: (-path.stat().st_size, path.as_posix()))
    held_out = files[2::HELD_OUT_EVERY]
    return [path for path in files if path not in held_out], held_out


def cut(files: list[Path], rows: int) -> list[list[int]]:
    """Cut files into samples of `LINES_PER_SAMPLE` lines, as lists of row numbers."""
    samples = []
    for path in files:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        for start in range(0, len(lines) - LINES_PER_SAMPLE + 1, LINES_PER_SAMPLE):
            text = "\n".join(lines[start : start + LINES_PER_SAMPLE])
            words = re.findall(r"[^\W\d]\w*|[^\w\s]", text)
            if words:
                samples.append([row_of(word, rows) for word in words])
    return samples


def balance(samples_by_label: list[list[list[int]]], files: int) -> Samples:
    """Take equally many samples for each label, spread evenly over its files."""
    count = min(map(len, samples_by_label))
    bags, labels = [], []
    for label, samples in enumerate(samples_by_label):
        bags += [samples[i * len(samples) // count] for i in range(count)]
        labels += [label] * count
    lengths = torch.tensor([0, *map(len, bags)])
    indices = torch.tensor([row for bag in bags for row in bag])
    return Samples(indices, lengths.cumsum(0), torch.tensor(labels), files)


def load_samples(rows: int = ROWS) -> tuple[Samples, Samples]:
    """Read the packages; return samples to train on, and samples of other files.

    Every label is equally frequent in both, so a guess is right once in
    `len(PACKAGES)` times.

    Raises:
        OSError: a package's source is missing or cannot be read.
    """
    sources = [find_sources(package) for package in PACKAGES]
    training, held_out = (
        balance(
            [cut(parts[which], rows) for parts in sources],
            sum(len(parts[which]) for parts in sources),
        )
        for which in (0, 1)
    )
    return training, held_out
