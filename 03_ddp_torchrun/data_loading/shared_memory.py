"""Count what batches take in /dev/shm, through which a worker hands them to its rank.

Run: python 03_ddp_torchrun/data_loading/shared_memory.py
Expect: workers x prefetch_factor x the bytes of a batch. Where /dev/shm has less, as in
    a container by default, the error that a worker ends with.
"""

import multiprocessing
import os
import time
from contextlib import suppress
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


def shared_megabytes() -> float:
    """Return how much of /dev/shm this process's workers hold, each file once.

    The files have lost their names, so that they end with the last process that has
    them open.
    """
    shared_disk, files = os.stat("/dev/shm").st_dev, dict[int, int]()
    for worker in multiprocessing.active_children():
        for opened in os.scandir(f"/proc/{worker.pid}/fd"):
            with suppress(FileNotFoundError):  # closed since then
                file = os.stat(opened.path)
                if file.st_dev == shared_disk:
                    files[file.st_ino] = file.st_blocks * 512
    return sum(files.values()) / 1e6


def wait_for(megabytes: float) -> float:
    """Wait until the workers hold so much, five seconds at most; return how much."""
    deadline = time.monotonic() + 5
    while shared_megabytes() < megabytes - 0.1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return shared_megabytes()


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
    needed, disk = workers * PREFETCH_FACTOR * batch, os.statvfs("/dev/shm")
    free = disk.f_bavail * disk.f_frsize / 1e6
    say = partial(print, flush=True)
    say(f"{workers} workers x {PREFETCH_FACTOR} batches x {batch:.1f} MB")
    batches = iter(loader)
    held = wait_for(needed)
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
