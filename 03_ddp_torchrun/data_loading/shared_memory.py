"""Count what batches take in /dev/shm, through which a worker hands them to its rank.

Run: python 03_ddp_torchrun/data_loading/shared_memory.py
Expect: workers x prefetch_factor x the bytes of a batch. Where /dev/shm has less, as in
    a container by default, the error that a worker ends with.
"""

import os
import time
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from ranks import fail, number, read_options

BATCH_SIZE, PREFETCH_FACTOR = 8, 2


class Images(Dataset):
    """Black images of 0.8 MB, in float32 as most transforms return them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return an image: channels, rows, columns."""
        return torch.zeros(3, 256, 256)

    def __len__(self) -> int:
        """Count the images."""
        return 1000


def shared_megabytes() -> tuple[float, float]:
    """Return how much of /dev/shm is in use, and how much is free."""
    state = os.statvfs("/dev/shm")
    used, free = state.f_blocks - state.f_bfree, state.f_bavail
    return used * state.f_frsize / 1e6, free * state.f_frsize / 1e6


def wait_for(megabytes: float) -> float:
    """Wait until /dev/shm holds so much, five seconds at most; return what it holds."""
    deadline = time.monotonic() + 5
    while shared_megabytes()[0] < megabytes - 0.1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return shared_megabytes()[0]


def main() -> None:
    """Let workers prefetch, take no batch yet, and look."""
    if not os.path.isdir("/dev/shm"):
        fail("needs Linux, where shared memory is in /dev/shm")
    workers = {"type": number(1, 16), "default": 2, "help": "of this rank"}
    workers = read_options(workers=workers).workers
    loader = DataLoader(
        Images(), BATCH_SIZE, num_workers=workers, prefetch_factor=PREFETCH_FACTOR
    )
    batch = BATCH_SIZE * Images()[0].nbytes / 1e6
    needed, (before, free) = workers * PREFETCH_FACTOR * batch, shared_megabytes()
    say = partial(print, flush=True)
    say(f"{workers} workers x {PREFETCH_FACTOR} batches x {batch:.1f} MB")
    batches = iter(loader)
    held = wait_for(before + needed) - before
    say(f"in /dev/shm: {held:.1f} MB")
    try:
        for _ in range(workers):
            next(batches)
    except RuntimeError as error:
        say(str(error).strip().splitlines()[-1])
        fail(f"{needed:.1f} MB are needed, and {free:.1f} MB were free")
    if abs(held - needed) > 0.1 * needed:
        fail(f"{needed:.1f} MB were expected")
    print("check: the batches that wait take workers x prefetch_factor x batch")


if __name__ == "__main__":
    main()
