"""Check an Adam whose state is sharded, and say in words what is wrong."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ask_ranks import ask_ranks, in_words
from ranks import read_options

WORLD_SIZE = 3
CASES = {36: 0.1, 35: 0.1, 4: 0.05}  # so many weights, and the learning rate
STEPS = 4
Answer = Callable[[torch.Tensor, float], Any]


def check_sharded_adam(answer: Answer) -> None:
    """Start the ranks, and let each of them try the answer."""
    read_options()
    claim = f"{STEPS} steps on {WORLD_SIZE} ranks are those of one process, with a "
    ask_ranks(try_lengths, answer, WORLD_SIZE, f"{claim}third of the state")


def try_lengths(answer: Answer) -> str:
    """Try all lengths; say what is wrong on this rank with the first that is wrong."""
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside, rank = dist.new_group(timeout=timedelta(minutes=1)), dist.get_rank()
    for length, lr in CASES.items():
        told = [""] * WORLD_SIZE
        dist.all_gather_object(told, try_length(answer, length, lr), group=aside)
        if any(told):
            return f"{length} weights: {told[rank] or 'this rank is right'}"
    return ""


def gradient_at(step: int, length: int) -> torch.Tensor:
    """Return the gradient of a step; no two entries and no two steps are alike."""
    numbers = torch.arange(1, length + 1, dtype=torch.float32)
    return torch.sin(numbers * (step + 1)) + numbers / length


def first_moments(adam: torch.optim.Optimizer) -> torch.Tensor:
    """Return the first moments that the optimizer keeps, in one tensor."""
    kept = [state["exp_avg"] for state in adam.state.values()]
    local = [getattr(moment, "to_local", moment.detach)() for moment in kept]
    return torch.cat([torch.empty(0), *(moment.flatten() for moment in local)])


def explain_weights(
    found: torch.Tensor, right: torch.Tensor, before: torch.Tensor, step: int
) -> str:
    """Say in words what is wrong with the weights after a step, or nothing."""
    if torch.allclose(found, right, atol=1e-5):
        return ""
    name = f"step {step + 1}"
    if torch.equal(found, before):
        return f"{name} does not change the tensor that was given: is it a copy?"
    if not found.isfinite().all():
        return f"{name} makes weights that are not finite"
    if torch.allclose(found.sort().values, right.sort().values, atol=1e-5):
        return f"{name} puts the right weights in the wrong places"
    same, still = found.isclose(right, atol=1e-5), found == before
    if (same | still).all():
        changed = (~still).nonzero().flatten().tolist()
        return (
            f"{name} changes {len(changed)} of {len(found)} weights, from number "
            f"{changed[0]} to {changed[-1]}: who sends the others?"
        )
    text = f"{int((~same).sum())} of {len(found)} weights are wrong"
    if step > 0:
        return f"step {step} is right; after {name} {text}: is Adam's state kept?"
    return f"after {name} {text}"


def try_length(answer: Answer, length: int, lr: float) -> str:
    """Take some steps with weights of one length; say what is wrong, or nothing."""
    weights = torch.linspace(-1, 1, length)
    alone = torch.nn.Parameter(weights.clone())
    reference = torch.optim.Adam([alone], lr)
    try:
        sharded = answer(weights, lr)
        for step in range(STEPS):
            before = weights.clone()
            alone.grad = gradient_at(step, length)
            reference.step()
            gradient = gradient_at(step, length)
            sharded.step(gradient)
            text = explain_weights(weights, alone.detach(), before, step)
            if text:
                return text
            if not torch.allclose(gradient, gradient_at(step, length)):
                return f"step {step + 1} changes the gradient that it was given"
        moments = first_moments(sharded.adam)
    except Exception as error:
        return in_words(error)
    kept, shard = len(moments), -(-length // WORLD_SIZE)
    if kept > shard:
        return (
            f"right, but this rank keeps state for {kept} weights; a shard is {shard}"
        )
    # Adam's step is the same by n times the gradients. Padding has a moment of 0.
    due = torch.cat([torch.zeros(1), first_moments(reference)])
    if not torch.isclose(moments[:, None], due, atol=1e-5).any(1).all():
        return "the weights are right, but exp_avg is not: summed or divided twice?"
    return ""
