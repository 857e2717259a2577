"""What communication adds to a step: the alpha-beta model of a ring all-reduce.

A message takes a latency (alpha), however short it is, and its bytes over the bandwidth
(1 / beta): Hockney, 1994. Times are in seconds, sizes in bytes, bandwidths in bytes per
second.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Link(NamedTuple):
    """What two numbers say of the way from a rank to the next one in the ring."""

    latency: float
    bandwidth: float


def latency_of_line(times: Mapping[int, float]) -> float:
    """Do it wrongly: take where the line through the large messages begins.

    Whatever makes large messages a little faster or slower than a line ends up in it.
    """
    *_, large, larger = sorted(times)
    per_byte = (times[larger] - times[large]) / (larger - large)
    return (times[large] - large * per_byte) / 2


def fit_link(times: Mapping[int, float]) -> Link:
    """Compute latency and bandwidth from all-reduces of two ranks, seconds by bytes.

    Each comes from messages that know nothing of the other: the latency from one whose
    bytes do not count, the bandwidth from the difference of the two largest, in which
    all that does not grow with the bytes cancels.
    """
    smallest, *_, large, larger = sorted(times)
    per_byte = (times[larger] - times[large]) / (larger - large)
    if per_byte <= 0:
        raise ValueError(f"{larger} bytes took no longer than {large}: measure again")
    # An all-reduce of two ranks takes two messages, one after the other.
    return Link(times[smallest] / 2, 1 / per_byte)


def all_reduce_time(world_size: int, nbytes: float, link: Link) -> float:
    """Return what a ring takes: 2 (n - 1) messages in a row, each 1 / n of the bytes.

    Thakur, Rabenseifner and Gropp, 2005, section 4.4: reduce-scatter, then all-gather.
    """
    messages = 2 * (world_size - 1)
    return messages * (link.latency + nbytes / world_size / link.bandwidth)


def step_time(
    world_size: int,
    compute: float,
    buckets: Iterable[tuple[float, int]],
    link: Link,
    overlap: bool,
) -> float:
    """Return the time of a step: computation plus exposed communication.

    `buckets` are all-reduced in their order: for each, when its gradients are ready,
    counted from the start of the step, and its bytes. With `overlap` its all-reduce
    begins when it is ready and the one before is done, and costs the computation that
    goes on meanwhile nothing; otherwise all of them follow backward.
    """
    ready = done = 0.0
    for ready, nbytes in buckets:
        begin = max(done, ready) if overlap else done
        done = begin + all_reduce_time(world_size, nbytes, link)
    # The last bucket is ready when backward ends.
    return compute + (done - ready if overlap else done)
