"""An exercise: make stage 1 of ZeRO out of Adam and one collective.

Run: python 05_deepspeed_zero/exercise_sharded_adam.py
Needs: this folder and an editor. Rewrite `ShardedAdam`. It knows nothing of DeepSpeed.
Expect: a line for every rank that says what is still wrong with its weights, or with
    what it keeps; at last a `check:`. Until then the script exits with status 1.
Before: 05_deepspeed_zero/stage_1.py
Next: 05_deepspeed_zero/stage_2.py
"""

import argparse
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from ask_ranks import ask_every_rank, in_words
from start import refuse

WORLD_SIZE = 3


class ShardedAdam:
    """Adam whose states are divided among the ranks; yours to rewrite.

    Each rank keeps states for its share of the weights, steps for that share alone, and
    sends it to the others. Now every rank keeps all states and steps for all weights.
    """

    def __init__(self, weights: torch.Tensor, lr: float) -> None:
        """Make the optimizer, in `self.adam`, where its states are counted.

        Args:
            weights: (N,), the same on every rank; `step` is to change them in place.
                N need not be a multiple of the ranks.
            lr: the learning rate.
        """
        self.parameter = torch.nn.Parameter(weights)  # shares the memory of `weights`
        self.adam = torch.optim.Adam([self.parameter], lr)

    def step(self, gradient: torch.Tensor) -> None:
        """Change the weights by one step; every rank calls this.

        Args:
            gradient: (N,), the mean over the ranks already.
        """
        self.parameter.grad = gradient
        self.adam.step()


# What follows checks it.
LENGTHS = (36, 35)
STEPS, LR = 4, 0.1


def gradient_at(step: int, length: int) -> torch.Tensor:
    """Return the gradient of a step; no two entries and no two steps are alike."""
    numbers = torch.arange(1, length + 1, dtype=torch.float32)
    return torch.sin(numbers * (step + 1)) + numbers / length


def count_states(adam: torch.optim.Optimizer) -> int:
    """Count the numbers whose running mean the optimizer keeps."""
    return sum(state["exp_avg"].numel() for state in adam.state.values())


def explain_weights(
    found: torch.Tensor, right: torch.Tensor, before: torch.Tensor, step: int, rank: int
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
        return f"step {step} is right; after {name} {text}: are Adam's states kept?"
    return f"after {name} {text}"


def try_length(rank: int, length: int) -> str:
    """Take some steps with weights of one length; say what is wrong, or nothing."""
    weights = torch.linspace(-1, 1, length)
    alone = torch.nn.Parameter(weights.clone())
    reference = torch.optim.Adam([alone], LR)
    try:
        sharded = ShardedAdam(weights, LR)
        for step in range(STEPS):
            before = weights.clone()
            alone.grad = gradient_at(step, length)
            reference.step()
            sharded.step(gradient_at(step, length))
            text = explain_weights(weights, alone.detach(), before, step, rank)
            if text:
                return text
        kept, share = count_states(sharded.adam), -(-length // WORLD_SIZE)
    except RuntimeError as error:
        return in_words(error)
    except AttributeError as error:
        return f"it ended with: {error}"
    if kept > share:
        return (
            f"right, but this rank keeps states for {kept} weights; a share is {share}"
        )
    return ""


def judge_adam(rank: int) -> str:
    """Try all lengths; say what is wrong on this rank with the first that is wrong."""
    # The checker's own talk goes through a group of its own: a wrong answer may leave
    # the other one unusable.
    aside = dist.new_group(timeout=timedelta(minutes=1))
    for length in LENGTHS:
        told = [""] * WORLD_SIZE
        dist.all_gather_object(told, try_length(rank, length), group=aside)
        if any(told):
            return f"{length} weights: {told[rank] or 'this rank is right'}"
    return ""


def main() -> None:
    """Try the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your sharded Adam.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    ask_every_rank(judge_adam, WORLD_SIZE)
    print(
        f"check: {STEPS} steps on {WORLD_SIZE} ranks are those of one process, with a "
        "third of the states"
    )


if __name__ == "__main__":
    main()
