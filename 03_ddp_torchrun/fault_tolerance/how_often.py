"""How often should a run save? Neither saving nor repeating lost steps is free.

Run: python 03_ddp_torchrun/fault_tolerance/how_often.py
Expect: the interval that loses least, for a save of one minute and for a measured one.
    Runs whose failures are drawn at random lose more where it is 4 times off.
"""

import random
import sys
import tempfile
import time
from math import sqrt
from pathlib import Path

import torch

from checkpoint import write_whole
from model import GPT, GPTConfig
from ranks import read_options


# Saving every t seconds costs save / t of the time. A failure, on average after
# `between` seconds, costs the half of an interval: t / 2 / between. The sum is smallest
# where both are equal (Young, 1974; for a save much shorter than `between`). Below, a
# save takes 60 s, then as long as measured here. In the "simulated" lines runs fail at
# random moments, to check the formula.
def best_interval(save: float, between: float) -> float:
    """Return after how many seconds to save again.

    Args:
        save: seconds for which all ranks wait until a checkpoint is written.
        between: mean time between failures of the whole job, in seconds. Of n machines
            that is a machine's own, divided by n.
    """
    return sqrt(2 * save * between)


def share_lost(interval: float, save: float, between: float) -> float:
    """Return the share of the time that goes to saving and to repeating steps."""
    return save / interval + interval / 2 / between


def simulate(interval: float, save: float, between: float, seed: int = 0) -> float:
    """Return the share that a run loses which fails 2,000 times, at random moments."""
    draw, kept, total = random.Random(seed), 0.0, 0.0
    for _ in range(2000):
        lasted = draw.expovariate(1 / between)
        kept += lasted // (interval + save) * interval  # up to the last checkpoint
        total += lasted
    return 1 - kept / total


def seconds_to_save() -> float:
    """Save this chapter's GPT and Adam's moments; return the median of five times."""
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    model(*torch.ones(2, 1, 8, dtype=torch.long)).backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            start = time.perf_counter()
            write_whole(Path(folder, "run.pt"), content)
            times.append(time.perf_counter() - start)
    return sorted(times)[2]


def main() -> None:
    """Compute the interval for a long save and a measured one; simulate the first."""
    read_options()  # none: another number goes into this file
    # 3 h: Llama 3's training on 16,384 GPUs stopped 419 times unplanned in 54 days.
    print("a save takes | a failure every | save every | lost")
    for save in (60.0, seconds_to_save()):
        for hours in (3, 24):
            interval = best_interval(save, hours * 3600)
            lost = share_lost(interval, save, hours * 3600)
            row = f"{save:10.3f} s | {hours:13} h | {interval / 60:6.1f} min"
            print(f"{row} | {lost:.1%}")
    save, between = 60.0, 3 * 3600.0
    tried = [best_interval(save, between) * factor for factor in (0.25, 1, 4)]
    lost = [simulate(interval, save, between) for interval in tried]
    for interval, share in zip(tried, lost, strict=True):
        print(f"simulated, 60 s, 3 h, every {interval / 60:5.1f} min: lost {share:.1%}")
    if not (
        lost[1] < min(lost[0], lost[2])
        and abs(lost[1] - share_lost(tried[1], save, between)) < 0.02
    ):
        sys.exit(f"check failed: the simulated runs lost {lost}")
    print("check: 4 times as often, or as seldom, loses more")


if __name__ == "__main__":
    main()
