"""A model of how long a step of data-parallel training takes: what scaling.py fits.

Computing is measured. What the exchange adds follows from two numbers of the link, the
latency of a message and the bandwidth, and from when backward hands over its buckets.
All times are in milliseconds.
"""

from collections.abc import Iterable, Mapping

import numpy as np


def fit_link(times: Mapping[int, float]) -> tuple[float, float]:
    """Fit latency and bandwidth to all-reduces of two ranks.

    A ring over n ranks takes 2 (n - 1) messages, one after the other, of 1 / n of the
    bytes each (Thakur, Rabenseifner and Gropp, 2005, section 4.4). For two ranks that
    is t = 2 latency + bytes / bandwidth.

    Args:
        times: milliseconds by bytes.

    Returns:
        Milliseconds for a message, and bytes in a millisecond.
    """
    slope, start = np.polyfit(list(times), list(times.values()), 1)
    return max(0.0, float(start)) / 2, 1 / max(float(slope), 1e-12)


def exchange_ms(ranks: int, count: int, latency: float, bandwidth: float) -> float:
    """Return what a ring all-reduce of `count` bytes takes."""
    return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * count / bandwidth


def step_ms(
    computing: float,
    buckets: Iterable[tuple[float, int]],
    ranks: int,
    latency: float,
    bandwidth: float,
) -> float:
    """Return what a step takes in which the exchange overlaps with backward.

    A bucket leaves when it is ready and the one before it is through; meanwhile
    backward goes on. The step goes on when both have ended. With a single bucket, which
    is ready at the end of backward, that is computing plus the whole exchange.

    Args:
        computing: the step without any exchange.
        buckets: for each, when it is ready, counted from the start of such a step, and
            how many bytes it holds; in the order in which they leave.
        ranks: how many exchange.
        latency: of one message.
        bandwidth: in bytes per millisecond.
    """
    free = ready = 0.0
    for ready, count in buckets:
        free = max(free, ready) + exchange_ms(ranks, count, latency, bandwidth)
    return computing + max(0.0, free - ready)
