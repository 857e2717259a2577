"""The failures that goes_wrong.py provokes, and what must come of each on each rank."""

import faulthandler
import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

# A real job allows minutes. Three seconds are enough for ranks that start together.
TIMEOUT = timedelta(seconds=3)


def skip(rank: int) -> None:
    """Only rank 0 calls the collective, as in `if is_rank_zero: evaluate()`."""
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(TIMEOUT.total_seconds() + 2)  # busy with something else


def skip_watched(rank: int) -> None:
    """The same, with a barrier before it that knows who has not come."""
    if rank == 0:
        # Its own default is half an hour, whatever the group's timeout is.
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    skip(rank)


def order(rank: int) -> None:
    """Both ranks call two collectives, but not in the same order."""
    x = torch.ones(2)
    if rank == 0:
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
    else:
        dist.broadcast(x, src=0)
        dist.all_reduce(x)


def order_recorded(rank: int) -> None:
    """The same, and each rank reads the list of calls that its flight recorder kept."""
    try:
        order(rank)
    finally:
        # No public function reads the recorder of gloo; the type stub lacks this one.
        dump = _distributed_c10d._dump_fr_trace_json  # pyright: ignore
        trace = json.loads(dump())
        names = [entry["profiling_name"] for entry in trace["entries"]]
        print(f"recorded {names}")


def shape(rank: int) -> None:
    """Rank 1 sends twice as many numbers as rank 0 has room for."""
    dist.all_reduce(torch.ones(1000 * (rank + 1)))


def layout(rank: int) -> None:
    """Equally many numbers in different shapes: added as they lie in memory."""
    x = torch.arange(6.0)
    # Rank 1 holds the transposed table, so that the sum should be twice rank 0's.
    x = x.reshape(2, 3) if rank == 0 else x.reshape(2, 3).T.contiguous()
    dist.all_reduce(x)
    print(f"sum {x.tolist()}")


def dtype(rank: int) -> None:
    """Equally many bytes of different types: bits arrive, their meaning does not."""
    x = torch.tensor([1.5, 2.5]) if rank == 0 else torch.tensor([0, 0]).int()
    dist.broadcast(x, src=0)
    print(f"received {x.tolist()}, {x.dtype}")


def peer(rank: int) -> None:
    """Each rank sends to its right neighbour and also receives from the right."""
    right = (rank + 1) % dist.get_world_size()
    work = dist.isend(torch.ones(1), dst=right)
    dist.recv(torch.empty(1), src=right)  # src should be the left neighbour
    assert work is not None
    work.wait()


def death(rank: int) -> None:
    """Rank 1 is killed, as by a machine that has run out of memory."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def slow(rank: int) -> None:
    """Rank 1 is late: no error, but the time is lost on the rank that is not slow."""
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
    start = time.perf_counter()
    dist.all_reduce(torch.ones(1))
    waited = time.perf_counter() - start
    print(f"all_reduce took {'more' if waited > 0.75 else 'less'} than 0.75 s")


def with_stacks(case: Callable[[int], None]) -> Callable[[int], None]:
    """Make every rank that is still in `case` after a second print where it is."""

    @functools.wraps(case)
    def watched(rank: int) -> None:
        faulthandler.dump_traceback_later(1)
        case(rank)
        faulthandler.cancel_dump_traceback_later()

    return watched


class Act(NamedTuple):
    """One run of a case, and what must come of it on each rank.

    `ends` maps a rank to the exit code it must have and to a pattern that its text
    must match: 0 is success, 1 an exception, a negative code a signal.
    """

    title: str
    run: Callable[[int], None]
    ends: dict[int, tuple[int, str]]
    debug: str = "OFF"


def mismatch(detail: str) -> dict[int, tuple[int, str]]:
    """Expect DETAIL to stop both ranks, to name both and to say what differs."""
    named = r"Rank {} is running .* but Rank {} is running .*differ.*"
    return {rank: (1, named.format(rank, 1 - rank) + detail) for rank in (0, 1)}


DETAIL = "with TORCH_DISTRIBUTED_DEBUG=DETAIL"
LOST = (
    r"RuntimeError: .*(Connection closed by peer|Connection reset by peer|Broken pipe)"
)
# The rank that first loses patience closes its connections: the others lose theirs.
HUNG = rf"RuntimeError: .*Timed out waiting 3000ms for (recv|send) operation|{LOST}"
NAMED = r"RuntimeError: \[Rank 0\]: Ranks 1 failed to pass monitoredBarrier"
CASES: dict[str, list[Act]] = {
    "skip": [
        Act("plain", skip, {0: (1, HUNG), 1: (0, "^$")}),
        Act(DETAIL, skip, {0: (1, NAMED), 1: (0, "^$")}, "DETAIL"),
        Act("with monitored_barrier", skip_watched, {0: (1, NAMED), 1: (0, "^$")}),
    ],
    "order": [
        Act("plain", order, {0: (1, HUNG), 1: (1, HUNG)}),
        Act(DETAIL, order, mismatch("Op type: "), "DETAIL"),
        Act(
            "with the flight recorder",
            order_recorded,
            {
                0: (1, re.escape("recorded ['gloo:all_reduce']")),
                1: (1, re.escape("recorded ['gloo:broadcast']")),
            },
        ),
    ],
    "shape": [
        Act("plain", shape, {0: (-signal.SIGABRT, "EnforceNotMet"), 1: (1, LOST)}),
        Act(DETAIL, shape, mismatch("Tensor shapes: "), "DETAIL"),
    ],
    "layout": [
        Act(
            "plain",
            layout,
            {
                0: (0, re.escape("sum [[0.0, 4.0, 3.0], [7.0, 6.0, 10.0]]")),
                1: (0, re.escape("sum [[0.0, 4.0], [3.0, 7.0], [6.0, 10.0]]")),
            },
        ),
        Act(DETAIL, layout, mismatch("Tensor shapes: "), "DETAIL"),
    ],
    "dtype": [
        Act(
            "plain",
            dtype,
            {
                0: (0, r"received \[1.5, 2.5\], torch.float32"),
                1: (0, r"received \[1069547520, 1075838976\], torch.int32"),
            },
        ),
        Act(DETAIL, dtype, mismatch("Tensor dtypes: "), "DETAIL"),
    ],
    "peer": [
        Act("plain", peer, dict.fromkeys(range(3), (1, HUNG))),
        # DETAIL compares collectives only.
        Act(DETAIL, peer, dict.fromkeys(range(3), (1, HUNG)), "DETAIL"),
        Act("with stacks", with_stacks(peer), dict.fromkeys(range(3), (1, "in recv"))),
    ],
    "death": [
        Act("plain", death, {0: (1, LOST), 1: (-signal.SIGKILL, "^$")}),
        # DETAIL names the missing rank unless it notices the lost connection first.
        Act(
            DETAIL,
            death,
            {0: (1, f"{NAMED}|{LOST}"), 1: (-signal.SIGKILL, "^$")},
            "DETAIL",
        ),
    ],
    "slow": [
        Act("plain", slow, {0: (0, "took more"), 1: (0, "took less")}),
        Act(
            "with stacks", with_stacks(slow), {0: (0, "in all_reduce"), 1: (0, "slow")}
        ),
    ],
}
