"""Hang as runs do: one of three ranks stops taking part, and nobody says why.

Run: torchrun --nproc-per-node=3 03_ddp_torchrun/debugging/hangs.py
Expect: six steps, then silence. After 5 s each rank's watchdog writes two files into
    hang/, and a minute later it ends the run. Until then, ask the ranks where they are.
"""

import faulthandler
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefetch import LoudPrefetcher, Prefetcher
from ranks import join, leave, read_options, say
from watchdog import Watchdog


def main() -> None:
    """Train; in the shard of rank 1 a line is damaged."""
    options = read_options(
        barrier={
            "action": "store_true",
            "help": "a monitored barrier before each step",
        },
        loud={"action": "store_true", "help": "a prefetcher that raises its errors"},
    )
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the calls to be recorded
    join(at_least=3, at_most=3, only_cpu=True)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` prints this rank's stacks
    lines = ["1 2 3 4 5 6 7 8"] * 100
    if dist.get_rank() == 1:
        lines[6] = "1 2 3 n/a 5 6 7 8"
    samples = (LoudPrefetcher if options.loud else Prefetcher)(lines)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watchdog = Watchdog(seconds=5, folder=Path("hang"))
    for step in range(len(lines)):
        sample = samples.next_sample()
        if options.barrier:
            dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=True)
        optimizer.zero_grad()
        model(sample).square().mean().backward()
        optimizer.step()
        watchdog.step()
        say(f"step {step}")
    leave()


if __name__ == "__main__":
    main()
