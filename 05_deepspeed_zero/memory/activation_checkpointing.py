"""Activation checkpointing: fewer activations kept, for one more forward pass.

Run: python 05_deepspeed_zero/memory/activation_checkpointing.py
Expect: what forward keeps for backward, the peak of both passes and their time, with
    and without checkpointing, and the same gradients.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from peak_counter import PeakCounter
from ranks import check, join, leave, number, read_options, say, start_ranks
from sized_qwen import new_model

ROUNDS = 3  # in which both ways take turns


def count_bytes(model: Any, inputs: torch.Tensor) -> tuple[int, int]:
    """Go forward and backward; return the activations kept in between, and the peak.

    The weights are no part of either; the gradients are part of the peak.
    """
    with PeakCounter() as counter:
        counter.start(p.untyped_storage() for p in model.parameters())
        weights = counter.now
        loss = model(input_ids=inputs, labels=inputs).loss
        kept = counter.now
        loss.backward()
    return kept - weights, counter.peak - weights


def seconds_of(model: Any, inputs: torch.Tensor) -> float:
    """Return how long forward and backward take."""
    model.zero_grad()
    started = time.perf_counter()
    model(input_ids=inputs, labels=inputs).loss.backward()
    if inputs.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def main(options: argparse.Namespace) -> None:
    """Count and time both ways; compare their gradients."""
    device = join(at_most=1)
    models: list[Any] = [new_model(options.width, options.layers) for _ in range(2)]
    plain, saving = (model.to(device, torch.bfloat16).train() for model in models)
    # A layer keeps its input only; backward computes what is in it a second time.
    saving.activation_checkpointing_enable()
    saving.config.use_cache = False  # there are no keys and values to reuse
    inputs = torch.randint(256, (options.samples, 256), device=device)
    counts = [count_bytes(model, inputs) for model in (plain, saving)]
    pairs = zip(plain.parameters(), saving.parameters(), strict=True)
    different = [p for p, other in pairs if not torch.equal(p.grad, other.grad)]
    rounds = [[seconds_of(m, inputs) for m in (plain, saving)] for _ in range(ROUNDS)]
    seconds = [statistics.median(of_way) for of_way in zip(*rounds, strict=True)]
    parameters = sum(p.numel() for p in plain.parameters())
    say(f"{parameters:,} parameters in bf16, {inputs.numel():,} tokens; MB, ms")
    say(f"{'':20}activations    peak    time")
    for name, (kept, peak), time_taken in zip(
        ("all kept", "checkpointed"), counts, seconds, strict=True
    ):
        memory = f"{kept / 1e6:11.1f}{peak / 1e6:8.1f}"
        say(f"{name:20}{memory}{1000 * time_taken:8.0f}")
    (kept, peak), (kept_saving, peak_saving) = counts
    is_right = not different and kept_saving < kept / 3 and peak_saving < peak
    check(is_right, f"{kept / kept_saving:.1f} times fewer, and the same gradients")
    leave()


if __name__ == "__main__":
    start_ranks(
        main,
        1,
        read_options(
            width={"type": number(128, 8192), "default": 128},
            layers={"type": number(2, 99), "default": 4},
            samples={"type": number(1, 1024), "default": 1, "help": "of 256 tokens"},
        ),
    )
