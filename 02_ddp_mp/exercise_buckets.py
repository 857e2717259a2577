"""An exercise: average the gradients in a few messages, not in one for each.

Run: python 02_ddp_mp/exercise_buckets.py
Needs: this folder and an editor. Fill in `average_in_buckets`.
Expect: a line for every rank that says what is still wrong with its gradients or its
    messages; at last a `check:`. Until then the script exits with status 1.
Before: 02_ddp_mp/by_hand.py, which holds one answer for another set of rules.
Next: 02_ddp_mp/compare.py
"""

import argparse
import os
import signal
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ask_ranks import ask_every_rank, in_words
from options import refuse

WORLD_SIZE = 3


def average_in_buckets(parameters: list[torch.nn.Parameter], cap: int) -> None:
    """Replace each gradient by its mean over the ranks; yours to write.

    Put as many gradients into one message as fit, in the order of the list, and call
    `dist.all_reduce` once for each message.

    Args:
        parameters: of the same shapes on every rank. Where a rank has None for a
            gradient it counts as zeros, and afterwards the mean is there too.
        cap: how many numbers fit into a message. A gradient that is larger goes alone.
    """


# What follows checks it. Rank r's gradients are 4**r times a pattern that differs from
# entry to entry, so a wrong gradient tells whose numbers are in it.
SHAPES = [(4, 5), (5,), (30,), (2, 3), (7,), (40,), (3,)]
NEEDED = [25, 30, 13, 40, 3]
# For each case: the cap, the messages that are needed, whose gradient 3 is None.
CASES = [(32, NEEDED, None), (1000, [111], None), (32, NEEDED, 1)]


def pattern(number: int) -> torch.Tensor:
    """Return what the gradients of one parameter are multiples of."""
    entries = torch.arange(torch.Size(SHAPES[number]).numel(), dtype=torch.float32)
    return (number + 1 + entries / 100).reshape(SHAPES[number])


def make_parameters(rank: int, without: int | None) -> list[torch.nn.Parameter]:
    """Return parameters with this rank's gradients."""
    parameters = []
    for number, shape in enumerate(SHAPES):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        if (number, rank) != (3, without):
            parameter.grad = 4**rank * pattern(number)
        parameters.append(parameter)
    return parameters


def explain_gradient(
    number: int, gradient: torch.Tensor | None, rank: int, without: int | None
) -> str:
    """Say in words what is wrong with a gradient, or nothing."""
    name = f"gradient {number}"
    if gradient is None:
        return f"{name} is None"
    shares = [4**r for r in range(WORLD_SIZE) if (number, r) != (3, without)]
    mean, total = sum(shares) / WORLD_SIZE, sum(shares)
    if torch.allclose(gradient, mean * pattern(number)):
        return ""
    if torch.allclose(gradient, 4**rank * pattern(number)):
        return f"{name} still holds this rank's own numbers"
    if torch.allclose(gradient, total * pattern(number)):
        return f"{name} is {WORLD_SIZE} times the mean: it is the sum"
    if torch.allclose(gradient, total / len(shares) * pattern(number)):
        return f"{name} was divided by {len(shares)}: a rank without it counts as zeros"
    for other in range(len(SHAPES)):
        alike = torch.isclose(gradient.flatten()[0], mean * pattern(other).flatten())
        if alike.any() and (other, int(alike.nonzero()[0])) != (number, 0):
            place = f"number {int(alike.nonzero()[0])} of gradient {other}"
            return f"{name} begins with {place}: was it put back in its own place?"
    return f"{name} is not the mean over the ranks"


def explain_messages(sent: list[int], cap: int, needed: list[int]) -> str:
    """Say in words what is wrong with the sizes of the messages, or nothing."""
    largest = max(torch.Size(shape).numel() for shape in SHAPES)
    too_long = [count for count in sent if count > max(cap, largest)]
    if too_long:
        return f"one message has {too_long[0]} numbers, but only {cap} fit"
    if not sent:
        return "no message was seen: call it as dist.all_reduce"
    if len(sent) > len(needed):
        return f"{len(sent)} messages were sent, where {len(needed)} would do"
    if sent != needed:
        return f"the messages have {sent} numbers, not {needed}: go in the list's order"
    return ""


def try_buckets(rank: int, cap: int, needed: list[int], without: int | None) -> str:
    """Try `average_in_buckets` once; say what is wrong on this rank, or nothing."""
    parameters, sent = make_parameters(rank, without), []
    send = dist.all_reduce

    def note_and_send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return send(tensor, *args, **kwargs)

    try:
        with mock.patch.object(dist, "all_reduce", note_and_send):
            average_in_buckets(parameters, cap)
    except RuntimeError as error:
        return in_words(error)
    found = [
        explain_gradient(number, parameter.grad, rank, without)
        for number, parameter in enumerate(parameters)
    ]
    wrong = [text for text in found if text]
    if not wrong:
        return explain_messages(sent, cap, needed)
    if sent and "own numbers" in wrong[0] and len(wrong) == len(SHAPES):
        return f"{sum(sent)} numbers were sent, but {wrong[0]}: who reads the mean?"
    return f"{wrong[0]} (and {len(wrong) - 1} more)" if len(wrong) > 1 else wrong[0]


def judge_buckets(rank: int) -> str:
    """Try all cases; say what is wrong on this rank with the first that is wrong."""
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside = dist.new_group(timeout=timedelta(minutes=1))
    for cap, needed, without in CASES:
        told = [""] * WORLD_SIZE
        mine = try_buckets(rank, cap, needed, without)
        dist.all_gather_object(told, mine, group=aside)
        if any(told):
            case = f"room for {cap}"
            if without is not None:
                case += f", no gradient 3 on rank {without}"
            return f"{case}: {told[rank] or 'this rank is right'}"
    return ""


def main() -> None:
    """Try the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your buckets of gradients.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    ask_every_rank(judge_buckets, WORLD_SIZE)
    gradients, sent = len(SHAPES) * len(CASES), sum(len(case[1]) for case in CASES)
    print(
        f"check: {gradients} gradients on each of {WORLD_SIZE} ranks are means, "
        f"sent in {sent} messages"
    )


if __name__ == "__main__":
    main()
