"""Time calls that all ranks make together, and fit latency + size / bandwidth."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist


class Call(NamedTuple):
    """What all ranks do together: `function(tensor)` turns `start` into `expected`."""

    function: Callable[[torch.Tensor], object]
    expected: torch.Tensor
    start: torch.Tensor = torch.zeros(())


class Timing(NamedTuple):
    """The seconds of every round, and whether each of them gave the right values."""

    seconds: list[float]
    is_right: bool


class Line(NamedTuple):
    """A call takes `latency` seconds + bytes / `bandwidth`."""

    latency: float
    bandwidth: float
    worst: float  # the largest relative distance of a measured time from the line


def time_in_turn(calls: dict[str, Call], rounds: int) -> dict[str, Timing]:
    """Time the calls, each once in every round; all ranks must call this.

    A call takes as long as on its slowest rank. `is_right` is about this rank alone.
    """
    names = list(calls)
    results = {name: torch.empty_like(call.expected) for name, call in calls.items()}
    right = dict.fromkeys(names, True)
    seconds = torch.zeros(len(names), rounds, dtype=torch.float64)
    for turn in range(-2, rounds):  # two rounds to warm up
        for step in range(len(names)):
            # Which call comes first changes: each leaves the caches in another state.
            column = (turn + step) % len(names)
            name = names[column]
            results[name].copy_(calls[name].start)
            # Without the barrier, a rank's clock would count its wait for the others.
            dist.barrier()
            started = time.perf_counter()
            calls[name].function(results[name])
            elapsed = time.perf_counter() - started
            if turn >= 0:
                seconds[column, turn] = elapsed
                right[name] &= torch.equal(results[name], calls[name].expected)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {
        name: Timing(row, right[name])
        for name, row in zip(names, seconds.tolist(), strict=True)
    }


def copy_bandwidth(numel: int) -> float:
    """Return the bytes per second that a rank copies while all ranks copy."""
    ones = torch.ones(numel)
    timings = time_in_turn({"copy": Call(lambda out: out.copy_(ones), ones)}, rounds=9)
    return ones.nbytes / statistics.median(timings["copy"].seconds)


def fit_line(message_bytes: list[int], seconds: list[float]) -> Line:
    """Fit a line by least squares on the relative errors.

    On absolute errors the largest message would outweigh all the others, and the
    latency could come out as anything.
    """
    x = torch.tensor(message_bytes, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    # Both columns scaled to about 1, or the solver would take the smaller for noise.
    scale = torch.stack([y.min(), y.max() / x.max()])
    matrix = torch.stack([torch.ones_like(x), x], dim=1) * scale / y[:, None]
    solution = torch.linalg.lstsq(matrix, torch.ones(len(x), 1).double()).solution
    latency, per_byte = (solution[:, 0] * scale).tolist()
    worst = (latency + per_byte * x - y).abs().div(y).max().item()
    return Line(latency, 1 / per_byte, worst)
