"""What a link costs: what is expected of each way at each rate, and what was found."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from network import bits_per_second

# Of 1514 bytes on an Ethernet cable, 1448 are data; the rest says where they belong.
ON_THE_WIRE = 1514 / 1448
BATCHES = 4  # of one step, where gradients are accumulated
# Each way: how many batches go into a step, and the bytes that a number takes.
WAYS = {"float32": (1, 4), f"{BATCHES} batches": (BATCHES, 4), "bfloat16": (1, 2)}
TIME_LIMIT, BYTES_LIMIT = 0.25, 0.10
GRADIENT_LIMIT = {2: 2e-2, 4: 1e-5}  # by bytes; of the largest entry


@dataclass
class Row:
    """What was found at one rate for one way; times are per batch, bytes per step."""

    rate: str
    way: str
    counted: float
    expected: float
    compute_ms: float
    measured_ms: float = 0.0

    @property
    def predicted_ms(self) -> float:
        """The time to compute, and that to send what crosses the link."""
        if self.rate == "unlimited" or not self.expected:
            return self.compute_ms
        seconds = self.expected * ON_THE_WIRE * 8 / bits_per_second(self.rate)
        return self.compute_ms + 1e3 * seconds / WAYS[self.way][0]


def check_rows(rows: list[Row], errors: dict[int, float]) -> str:
    """Hold all rows against what was expected; the same on every rank.

    Raises:
        RuntimeError: bytes, times or gradients are not what they should be.
    """
    linked = [row for row in rows if row.expected]
    # On one host nothing may cross the link but, now and then, a question or an answer.
    off_bytes = [
        abs(row.counted / (row.expected or 1e5) - bool(linked)) for row in rows
    ]
    # Where computing takes most of the time, the times say little about the link.
    slow = [row for row in linked if row.predicted_ms > 4 * row.compute_ms]
    off = [abs(row.measured_ms / row.predicted_ms - 1) for row in slow]
    worst = torch.tensor([max(off_bytes), max(off, default=0.0), *errors.values()])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    limits = [BYTES_LIMIT, TIME_LIMIT, *(GRADIENT_LIMIT[each] for each in errors)]
    found = worst.tolist()
    times = f"{len(slow)} slow time(s) within {found[1]:.0%}"
    if linked and not slow:
        times = "no time, because computing took too much of it"
    result = (
        f"{len(rows)} byte counts within {found[0]:.0%}, {times}, "
        f"rounding {found[2]:.0e} and {found[3]:.0e}"
    )
    if any(not value <= limit for value, limit in zip(found, limits, strict=True)):
        raise RuntimeError(f"the link does otherwise: {result}; the limits: {limits}")
    return result
