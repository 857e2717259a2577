"""Check gradients that were averaged in buckets, and say in words what is wrong.

Rank r's gradients are 4**r times a pattern that differs from entry to entry, so a wrong
gradient tells whose numbers are in it.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ask_ranks import ask_ranks, in_words
from ranks import read_options

WORLD_SIZE = 3
SHAPES = [(4, 5), (5,), (30,), (2, 3), (7,), (40,), (3,)]
NEEDED = [25, 30, 13, 40, 3]
# For each case: the cap, the sizes of the messages, the rank whose gradient 3 is None.
CASES: list[tuple[int, list[int], int | None]] = [
    (32, NEEDED, None),
    (1000, [111], None),
    (36, [25, 36, 7, 40, 3], None),  # two fit exactly
    (19, [20, 5, 30, 13, 40, 3], None),  # the first is too large
    (32, NEEDED, 1),
]
Average = Callable[[list[torch.nn.Parameter], int], None]


def check_buckets(answer: Average) -> None:
    """Start the ranks, and let each of them try the answer."""
    read_options()
    gradients, sent = len(SHAPES) * len(CASES), sum(len(case[1]) for case in CASES)
    claim = f"{gradients} gradients on each of {WORLD_SIZE} ranks are means, "
    ask_ranks(try_cases, answer, WORLD_SIZE, f"{claim}sent in {sent} messages")


def try_cases(answer: Average) -> str:
    """Try all cases; say what is wrong on this rank with the first that is wrong."""
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside = dist.new_group(timeout=timedelta(minutes=1))
    for cap, needed, without in CASES:
        told = [""] * WORLD_SIZE
        mine = try_case(answer, cap, needed, without)
        dist.all_gather_object(told, mine, group=aside)
        if any(told):
            case = f"cap {cap}"
            if without is not None:
                case += f", no gradient 3 on rank {without}"
            return f"{case}: {mine or 'this rank is right'}"
    return ""


def try_case(answer: Average, cap: int, needed: list[int], without: int | None) -> str:
    """Call the answer once; say what is wrong on this rank, or nothing."""
    rank, sent = dist.get_rank(), []
    parameters = make_parameters(rank, without)
    all_reduce = dist.all_reduce

    def note_and_send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    try:
        with mock.patch.object(dist, "all_reduce", note_and_send):
            answer(parameters, cap)
    except Exception as error:
        return in_words(error)
    found = [
        explain_gradient(number, parameter.grad, rank, without)
        for number, parameter in enumerate(parameters)
    ]
    wrong = [text for text in found if text]
    if not wrong:
        for number, parameter in enumerate(parameters):
            if parameter.any():
                return f"right, but parameter {number} has changed, not only gradients"
        return explain_messages(sent, cap, needed)
    if sent and "local" in wrong[0] and len(wrong) == len(SHAPES):
        return f"{sum(sent)} numbers were sent, but {wrong[0]}: who reads the mean?"
    return f"{wrong[0]} (and {len(wrong) - 1} more)" if len(wrong) > 1 else wrong[0]


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
    factors = [4**r for r in range(WORLD_SIZE) if (number, r) != (3, without)]
    mean, total = sum(factors) / WORLD_SIZE, sum(factors)
    if torch.allclose(gradient, mean * pattern(number)):
        return ""
    if torch.allclose(gradient, 4**rank * pattern(number)):
        return f"{name} is still this rank's local gradient"
    if torch.allclose(gradient, total * pattern(number)):
        return f"{name} is {WORLD_SIZE} times the mean: it is the sum"
    if torch.allclose(gradient, total / len(factors) * pattern(number)):
        text = f"{name} was divided by {len(factors)}"
        return f"{text}: a rank without it counts as zeros"
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
        text = f"the messages have {sent} numbers, not {needed}"
        return f"{text}: go in the list's order, and fill each"
    return ""
