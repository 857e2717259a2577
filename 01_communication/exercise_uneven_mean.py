"""An exercise: a mean over all ranks that is right, until one rank has more numbers.

Run: python 01_communication/exercise_uneven_mean.py
Needs: ask_ranks.py beside it, and an editor. Find what is wrong with `mean_and_std`,
    and repair it.
Expect: a line for every rank that says what is wrong with what it returns; at last a
    `check:`. Until then the script exits with status 1.
Before: 01_communication/groups.py
Next: 01_communication/exercise_reduce_scatter.py
"""

import argparse
import math
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ask_ranks import ask_every_rank, in_words

WORLD_SIZE = 3


def mean_and_std(own: torch.Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of all ranks' numbers; every rank calls this.

    The deviation is the root of the mean squared distance from the mean: divided by n.

    Args:
        own: this rank's numbers, (n,), float32. Every rank may have another n, or none.
    """
    mean = own.mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    variance = (own - mean).square().mean()
    dist.all_reduce(variance, op=dist.ReduceOp.AVG)
    return mean.item(), variance.sqrt().item()


# What follows checks it. For each case: how many numbers each rank has, and what is
# added to all of them.
CASES = [((4, 4, 4), 0.0), ((2, 3, 7), 0.0), ((0, 5, 7), 0.0), ((2, 3, 7), 1e4)]


def shares(counts: tuple[int, ...], offset: float) -> list[torch.Tensor]:
    """Return the numbers of every rank: those of rank r are r + 1 apart."""
    return [
        offset + rank + (rank + 1) * torch.arange(count, dtype=torch.float32)
        for rank, count in enumerate(counts)
    ]


def deviation(numbers: torch.Tensor) -> float:
    """Return the standard deviation of some numbers, divided by n."""
    return numbers.std(correction=0).item() if len(numbers) else 0.0


def explain_mean(found: float, own: torch.Tensor, by_rank: list[torch.Tensor]) -> str:
    """Say in words where a wrong mean comes from."""
    if math.isnan(found):
        return "its mean is nan: the mean of no numbers is 0 / 0, and nan stays nan"
    guesses = {
        "the mean of the ranks' means": sum(
            one.mean().item() for one in by_rank if len(one)
        )
        / WORLD_SIZE,
        "this rank's own": own.mean().item(),
        "the sum of all numbers": torch.cat(by_rank).sum().item(),
    }
    text = f"its mean is {found:.2f}, not {torch.cat(by_rank).mean():.2f}"
    for meaning, value in guesses.items():
        if math.isclose(found, value, rel_tol=1e-4):
            return f"{text}: {meaning}"
    return text


def explain_std(found: float, by_rank: list[torch.Tensor]) -> str:
    """Say in words where a wrong standard deviation comes from."""
    everything = torch.cat(by_rank)
    mean, n = everything.mean(), len(everything)
    right = deviation(everything)
    deviations = torch.tensor([deviation(one) for one in by_rank])
    counts = torch.tensor([len(one) for one in by_rank])
    within = ((counts * deviations**2).sum() / n).sqrt().item()
    around = [(one - mean).square().mean().item() for one in by_rank if len(one)]
    too_low = "that forgets how far apart the ranks' means are"
    guesses = {
        f"the mean of the ranks' deviations; {too_low}": deviations.mean().item(),
        f"measured from each rank's own mean; {too_low}": within,
        "the ranks' mean squared distances weigh the same, whatever their counts": (
            sum(around) / WORLD_SIZE
        )
        ** 0.5,
        "it is divided by n - 1, not by n": right * (n / (n - 1)) ** 0.5,
        "that is its square, the variance": right**2,
    }
    text = f"its deviation is {found:.2f}, not {right:.2f}"
    for meaning, value in guesses.items():
        if math.isclose(found, value, rel_tol=1e-4):
            return f"{text}: {meaning}"
    if mean.abs() > 100 * right:
        text += ": the mean of squares less the squared mean has no digits left"
    return text


def try_mean(own: torch.Tensor, by_rank: list[torch.Tensor]) -> str:
    """Try `mean_and_std` once; say in words what is wrong on this rank, or nothing."""
    everything = torch.cat(by_rank)
    before = own.clone()
    try:
        mean, std = map(float, mean_and_std(own))
    except (TypeError, ValueError):
        return "it does not return two numbers"
    except RuntimeError as error:
        return in_words(error)
    if not torch.equal(own, before):
        return "it has changed the numbers that it was given"
    if not math.isclose(mean, everything.mean().item(), rel_tol=1e-5):
        return explain_mean(mean, own, by_rank)
    if not math.isclose(std, deviation(everything), rel_tol=1e-3):
        return explain_std(std, by_rank)
    return ""


def judge_means(rank: int) -> str:
    """Try all cases; say what is wrong on this rank with the first that is wrong."""
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside = dist.new_group(timeout=timedelta(minutes=1))
    for counts, offset in CASES:
        by_rank = shares(counts, offset)
        told = [""] * WORLD_SIZE
        dist.all_gather_object(told, try_mean(by_rank[rank], by_rank), group=aside)
        if any(told):
            near = f" near {offset:g}" if offset else ""
            numbers = ", ".join(map(str, counts)) + " numbers" + near
            if told[rank] and not told[0] and "waited" not in told[rank]:
                told[rank] += "; rank 0 has the right ones: do all ranks get them?"
            return f"of {numbers}: {told[rank] or 'this rank is right'}"
    return ""


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Try the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your mean over all ranks.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    ask_every_rank(judge_means, WORLD_SIZE)
    print(f"check: {WORLD_SIZE} ranks agree with one process in {len(CASES)} cases")


if __name__ == "__main__":
    main()
