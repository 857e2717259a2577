"""Kill a training run again and again: it ends with the bits of an uninterrupted one.

Run: python 03_ddp_torchrun/fault_tolerance/crashes.py
Expect: SIGKILL at random moments, now to a rank and now to torchrun itself; each time
    the run resumes from its last checkpoint. A `check:` that no bit differs in the end.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ranks import fail, number, read_options
from torchruns import Torchruns

EVERY = 5  # steps between two checkpoints


def tensors_in(content: Any) -> list[torch.Tensor]:
    """Return all tensors of a checkpoint: weights, moments, random numbers, counts."""
    if isinstance(content, torch.Tensor):
        return [content]
    parts = list(content.values()) if isinstance(content, dict) else content
    return [t for p in parts for t in tensors_in(p)] if isinstance(parts, list) else []


def different_values(one: Path, other: Path) -> tuple[int, int]:
    """Return how many values of two checkpoints differ, if by one bit, and of all."""
    both = [tensors_in(torch.load(path, weights_only=True)) for path in (one, other)]
    different = 0
    for tensors in zip(*both, strict=True):
        bits, others = (t.reshape(-1, 1).view(torch.uint8) for t in tensors)
        different += int((bits != others).any(dim=1).sum())
    return different, sum(tensor.numel() for tensor in both[0])


def main() -> None:
    """Train uninterrupted, train and be killed, compare."""
    options = read_options(
        kills={"type": number(1, 1000), "default": 3, "help": "how often to kill"},
        ranks={"type": number(1, 64), "default": 2, "help": "of each run"},
        steps={"type": number(1, 10**6), "default": 60, "help": "of the training"},
        seed={"type": int, "default": 0, "help": "of the moments and victims"},
    )
    if options.steps < (needed := 3 * EVERY * (options.kills + 1)):
        fail(f"{options.kills} kills take {needed} steps or more; give more --steps")
    random.seed(options.seed)
    victims = list(range(-1, options.ranks))  # the ranks, and -1 for torchrun
    random.shuffle(victims)
    train = [f"--max-steps={options.steps}", f"--checkpoint-every={EVERY}"]
    train += ["--batch-size=16", "--block-size=64", "--width=64", "--dropout=0.1"]
    # Torchrun starts all ranks again when one has died. It does so 0 times by default.
    torchrun = [f"--nproc-per-node={options.ranks}", f"--max-restarts={options.kills}"]

    with Torchruns() as runs:
        runs.start("A", torchrun, [*train, "--checkpoint=uninterrupted.pt"])
        runs.wait_for("checkpoint: none yet")
        began = time.monotonic()
        runs.wait_for("check: ")
        interval = (time.monotonic() - began) / options.steps * EVERY
        print(f"uninterrupted: {options.steps} steps", flush=True)
        train.append("--checkpoint=killed.pt")
        runs.start("B", torchrun, train)
        for kill in range(options.kills):
            runs.wait_for_checkpoint("killed.pt")
            time.sleep(random.uniform(0, interval))  # in a step, or in the next write
            victim = victims[kill % len(victims)]
            if victim < 0:
                runs.kill("B")
                runs.start("B", torchrun, train)
            else:
                runs.kill("B", victim)
            resuming = runs.wait_for("checkpoint: resuming")[-1]
            name = "torchrun" if victim < 0 else f"rank {victim}"
            print(f"killed {name} | {resuming}", flush=True)
        runs.wait_for("check: ")
        names = ("uninterrupted.pt", "killed.pt")
        different, values = different_values(*(runs.folder / name for name in names))
    result = f"killed {options.kills} times, {different} of {values:,} values differ"
    if different:
        sys.exit(result)
    print(f"check: {result} from the uninterrupted run's")


if __name__ == "__main__":
    main()
