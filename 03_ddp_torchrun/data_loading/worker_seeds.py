"""Give the workers of all ranks different seeds: with equal ones all augment alike.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/data_loading/worker_seeds.py
Expect: ranks and workers; then what each worker draws first in two epochs, by five
    ways to seed it. Only what is drawn by epoch and index is what one process draws.
"""

import multiprocessing
import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from ranks import check, gather, join, leave, say
from workers import WORKERS, new_loader

SAMPLES, SEED = 8, 1


class Augmented(Dataset):
    """Samples that are "augmented" by a random number; `draws` says by which."""

    def __init__(self, draws: str) -> None:
        """Draw from the global generator, from one kept here, or by epoch and index."""
        self.draws, self.epoch = draws, 0
        self.kept = random.Random(SEED)  # each worker gets a copy

    def __getitem__(self, index: int) -> tuple[int, float]:
        """Return a sample's index, and its random number."""
        generator = None
        if self.draws == "kept":
            return index, self.kept.random()
        if self.draws == "by sample":
            key = SEED * 1_000_000 + self.epoch * SAMPLES + index
            generator = torch.Generator().manual_seed(key)
        return index, torch.rand((), generator=generator).item()

    def __len__(self) -> int:
        """Count the samples."""
        return SAMPLES


def own_generator() -> torch.Generator:
    """Return what a rank's loader draws a seed from in each epoch, for its workers."""
    return torch.Generator().manual_seed(SEED + dist.get_rank())


def by_sum(rank: int, worker: int) -> None:
    """Seed worker 1 of rank 0 like worker 0 of rank 1, and alike in each epoch."""
    torch.manual_seed(SEED + rank + worker)


# Unless it is a fork, a worker is in no process group, and is told its rank.
BY_SUM: dict[str, Any] = {"worker_init_fn": lambda: partial(by_sum, dist.get_rank())}
# Where a data set draws from, what makes its loader's settings, and how many distinct
# ones are among the 8 numbers that 4 workers of 2 ranks draw first in 2 epochs.
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "manual_seed on all ranks": ("global", {}, 4),
    "init_fn: rank + worker": ("global", BY_SUM, 3),
    "kept in the data set": ("kept", {}, 1),
    "a generator by rank": ("global", {"generator": own_generator}, 8),
    "by epoch and index": ("by sample", {}, 8),
}


def two_epochs(name: str) -> list[dict[int, float]]:
    """Return what each sample of this rank is augmented by, epoch by epoch."""
    draws, told, _ = WAYS[name]
    torch.manual_seed(SEED)  # as scripts do to get the same weights on all ranks
    dataset = Augmented(draws)
    sampler = DistributedSampler(dataset, shuffle=False)
    settings = {setting: make() for setting, make in told.items()}
    loader = new_loader(dataset, sampler=sampler, **settings)
    epochs = []
    for dataset.epoch in range(2):
        epochs.append({int(index): number.item() for index, number in loader})
    return epochs


def main() -> None:
    """Count ranks and workers; then draw in each way, and compare with one process."""
    join(only_cpu=True)
    world_size, is_right = dist.get_world_size(), []
    waiting = iter(new_loader(Augmented("global")))
    workers = sum(gather(len(multiprocessing.active_children())))
    say(f"{world_size} ranks + {workers} workers")
    del waiting
    say("first numbers of        rank 0's workers  rank 1's workers  in 2 epochs")
    for name, (draws, _, expected) in WAYS.items():
        epochs = two_epochs(name)
        # Batches come in turn: one of worker 0, one of worker 1, and so on.
        first = gather([list(numbers.values())[:WORKERS] for numbers in epochs])
        values = [number for of_rank in first for epoch in of_rank for number in epoch]
        shown = "".join(f"{a:10.2f}{b:8.2f}" for (a, b), _ in first)
        say(f"{name:24}{shown}{len(set(values)):6} of {len(values)} distinct")
        is_right.append(world_size != 2 or len(set(values)) == expected)
        if draws == "by sample":
            dataset = Augmented(draws)  # as in one process, without workers
            for dataset.epoch, numbers in enumerate(epochs):
                is_right += [dataset[i][1] == numbers[i] for i in numbers]
    claim = f"{SAMPLES} samples in 2 epochs are augmented as in one process"
    check(all(is_right), claim)
    leave()


if __name__ == "__main__":
    main()
