"""Stages whose calls take the time that they are given, and note when they ran.

A span is (kind, stage, micro-batch, start, end) in seconds. The kinds: F forward,
B backward, and where backward is cut in two, I for the gradient of the input and W for
that of the weights.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model import GPT, GPTConfig
from schedules import SCHEDULES
from stage import Part, Stage, even_cut

BY_HAND = dict(SCHEDULES)
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long each kind takes
Span = tuple[str, int, int, float, float]
# One block for each of up to 8 stages; it computes for about a millisecond.
CONFIG = GPTConfig(block_size=4, width=8, layers=8, heads=1, tied=False)


class Clock:
    """Lets a call take its time, and notes when it began and ended."""

    def __init__(self) -> None:
        """Begin without waits; `unit` is the length of a forward pass in seconds."""
        self.unit, self.spans = 0.0, list[Span]()

    @contextlib.contextmanager
    def call(self, kind: str, stage: int, i: int) -> Iterator[None]:
        """Compute within this, then wait until the time of the call is over."""
        start = time.perf_counter()  # one clock for all processes of a machine
        yield
        end = start + self.unit * UNITS[kind]
        time.sleep(max(0.0, end - time.perf_counter()))
        self.spans.append((kind, stage, i, start, time.perf_counter()))


class TimedStage(Stage):
    """The chapter's stage: what computes takes its time, messages take theirs."""

    def __init__(self, part: Part, clock: Clock) -> None:
        """Note the calls on a clock."""
        super().__init__(part)
        self.clock = clock

    def compute_forward(self, i: int, x: Tensor, labels: Tensor) -> Tensor:
        """Be the forward pass of micro-batch i."""
        with self.clock.call("F", self.index, i):
            return super().compute_forward(i, x, labels)

    def compute_backward(self, i: int, y: Tensor, gradient: Tensor | None) -> None:
        """Be its backward pass."""
        with self.clock.call("B", self.index, i):
            super().compute_backward(i, y, gradient)


def run_twice(step: Callable[[], Any], clock: Clock, unit: float) -> list[Span]:
    """Run a step without waits, then one that is noted; every rank calls this."""
    step()  # the first step of PyTorch's schedules asks for shapes, and connects
    clock.spans.clear()
    clock.unit = unit
    dist.barrier()
    step()
    return clock.spans


def record_by_hand(schedule: Callable, micro_batches: int, unit: float) -> list[Span]:
    """Return this rank's spans by a schedule of this chapter; every rank calls this."""
    clock, stages = Clock(), dist.get_world_size()
    cut = even_cut(CONFIG.layers, stages)
    stage = TimedStage(Part(GPT(CONFIG), dist.get_rank(), cut), clock)
    tokens = torch.zeros(micro_batches, CONFIG.block_size, dtype=torch.int64)
    return run_twice(lambda: stage.run(schedule, tokens, tokens, 1), clock, unit)
