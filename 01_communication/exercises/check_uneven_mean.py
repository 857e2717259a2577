"""Check a mean and a deviation over all ranks, and say in words what is wrong."""

import math
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ask_ranks import ask_ranks, in_words
from ranks import read_options

WORLD_SIZE = 3
# For each case: how many numbers each rank has, and what is added to all of them.
CASES = [((4, 4, 4), 0.0), ((2, 3, 7), 0.0), ((0, 5, 7), 0.0), ((2, 3, 0), 0.0)]
CASES += [((2, 3, 7), 1e4)]
MeanAndStd = Callable[[torch.Tensor], tuple[float, float]]


def check_uneven_mean(answer: MeanAndStd) -> None:
    """Start the ranks, and let each of them try the answer."""
    read_options()
    claim = f"{WORLD_SIZE} ranks agree with one process in {len(CASES)} cases"
    ask_ranks(try_cases, answer, WORLD_SIZE, claim)


def try_cases(answer: MeanAndStd) -> str:
    """Try all cases; say what is wrong on this rank with the first that is wrong."""
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside = dist.new_group(timeout=timedelta(minutes=1))
    rank = dist.get_rank()
    for counts, offset in CASES:
        by_rank = numbers_of_ranks(counts, offset)
        told = [""] * WORLD_SIZE
        mine = try_case(answer, by_rank[rank], by_rank)
        dist.all_gather_object(told, mine, group=aside)
        if any(told):
            near = f" near {offset:g}" if offset else ""
            numbers = ", ".join(map(str, counts)) + " numbers" + near
            if mine and not told[0] and "waited" not in mine:
                mine += "; rank 0 has the right ones: do all ranks get them?"
            return f"of {numbers}: {mine or 'this rank is right'}"
    return ""


def numbers_of_ranks(counts: tuple[int, ...], offset: float) -> list[torch.Tensor]:
    """Return the numbers of every rank: those of rank r are r + 1 apart."""
    return [
        offset + rank + (rank + 1) * torch.arange(count, dtype=torch.float32)
        for rank, count in enumerate(counts)
    ]


def try_case(answer: MeanAndStd, own: torch.Tensor, by_rank: list[torch.Tensor]) -> str:
    """Call the answer once; say in words what is wrong on this rank, or nothing."""
    everything, before = torch.cat(by_rank), own.clone()
    try:
        mean, std = map(float, answer(own))
    except (TypeError, ValueError):
        return "it does not return two numbers"
    except Exception as error:
        return in_words(error)
    if not torch.equal(own, before):
        return "it has changed the numbers that it was given"
    if not math.isclose(mean, everything.mean().item(), rel_tol=1e-5):
        return explain_mean(mean, own, by_rank)
    if not math.isclose(std, deviation(everything), rel_tol=1e-3):
        return explain_std(std, by_rank)
    return ""


def deviation(numbers: torch.Tensor) -> float:
    """Return the standard deviation of some numbers, divided by n."""
    return numbers.std(correction=0).item() if len(numbers) else 0.0


def explain_mean(found: float, own: torch.Tensor, by_rank: list[torch.Tensor]) -> str:
    """Say in words where a wrong mean comes from."""
    if math.isnan(found):
        return "your mean is nan: the mean of no numbers is 0 / 0, and nan stays nan"
    means = [one.mean().item() for one in by_rank if len(one)]
    guesses = {
        "the mean of the ranks' means": sum(means) / WORLD_SIZE,
        "this rank's own": own.mean().item(),
        "the sum of all numbers": torch.cat(by_rank).sum().item(),
    }
    text = f"your mean is {found:.2f}, not {torch.cat(by_rank).mean():.2f}"
    return with_guess(text, found, guesses)


def explain_std(found: float, by_rank: list[torch.Tensor]) -> str:
    """Say in words where a wrong standard deviation comes from."""
    if math.isnan(found):
        return "your deviation is nan: the root of less than 0, or that of no numbers"
    everything = torch.cat(by_rank)
    mean, n, right = everything.mean(), len(everything), deviation(everything)
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
    text = with_guess(f"your deviation is {found:.2f}, not {right:.2f}", found, guesses)
    if ": " not in text and mean.abs() > 100 * right:
        text += ": the mean of squares less the squared mean has no digits left"
    return text


def with_guess(text: str, found: float, guesses: dict[str, float]) -> str:
    """Add to a text what a wrong value means, if it is one of the guesses."""
    for meaning, value in guesses.items():
        if math.isclose(found, value, rel_tol=1e-4):
            return f"{text}: {meaning}"
    return text
