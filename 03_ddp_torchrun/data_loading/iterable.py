"""Shard an iterable data set by rank and by worker, or each sample is seen many times.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/data_loading/iterable.py
Expect: how many samples each rank sees, and how often each of them is seen: once, if
    all workers of all ranks take turns.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch.distributed as dist
import torch.utils.data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ranks import check, gather, join, leave, say
from workers import WORKERS, new_loader

SAMPLES = 11


class Stream(IterableDataset):
    """Yields the numbers from 0 on, as a file or a connection would its records."""

    def __init__(self, by_rank: bool, by_worker: bool) -> None:
        """Say what to shard by."""
        # A worker is in no process group, unless it is a fork of its rank.
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.by_rank, self.by_worker = by_rank, by_worker

    def __iter__(self) -> Iterator[int]:
        """Yield the shard of this worker of this rank: every so many-th sample."""
        # None in the rank itself: that is where it runs if there are no workers.
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world_size = self.rank, self.world_size
        if not self.by_worker:
            worker, workers = 0, 1
        if not self.by_rank:
            rank, world_size = 0, 1
        first, shards = rank * workers + worker, world_size * workers
        return islice(range(SAMPLES), first, None, shards)


def seen(loader: DataLoader) -> tuple[list[int], list[int]]:
    """Return how many samples each rank sees, and how often each sample is seen."""
    by_rank = gather([int(sample) for batch in loader for sample in batch])
    times = Counter(sample for samples in by_rank for sample in samples)
    return [len(samples) for samples in by_rank], [times[n] for n in range(SAMPLES)]


def main() -> None:
    """Load in each way, and count what is seen."""
    join(only_cpu=True)
    world_size = dist.get_world_size()
    numbers: Any = list(range(SAMPLES))
    ways = {
        "iterable, no shards": (Stream(False, False), {}, world_size * WORKERS),
        "iterable, by rank": (Stream(True, False), {}, WORKERS),
        "iterable, by worker": (Stream(False, True), {}, world_size),
        "iterable, by both": (Stream(True, True), {}, 1),
        "map-style, sampler": (numbers, {"sampler": DistributedSampler(numbers)}, 1),
    }
    is_right = []
    say(f"{SAMPLES} samples, {WORKERS} workers  on each rank  each is seen")
    for name, (dataset, told, expected) in ways.items():
        loader = new_loader(dataset, batch_size=2, **told)
        lengths, times = seen(loader)
        shown = " or ".join(map(str, sorted(set(times))))
        say(f"{name:24}{lengths!s:>13}{shown:>9} times")
        # The sampler repeats some samples, until all ranks have equally many.
        padded = -len(numbers) % world_size if told else 0
        is_right.append(sum(times) == expected * SAMPLES + padded)
        is_right.append(min(times) == expected)
    check(all(is_right), f"{len(ways)} ways show each sample as often as computed")
    leave()


if __name__ == "__main__":
    main()
