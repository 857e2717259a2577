"""What the profiler sees of one step: when each part began and ended, on every rank.

The profiler writes times of the system's clock, which all processes of a machine share,
so what two ranks have traced can be laid side by side. `trace` compares the profiler's
clock with the system's, `is_possible` the clocks of the ranks. A span is (start, end),
in nanoseconds.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

# The parts that a step has to mark by record_function("part: ...").
PARTS = ["forward", "backward", "finish", "optimizer"]
# The nanoseconds that two clocks may seem to be apart: a thousandth of a second.
SLACK = 1_000_000

Span = tuple[int, int]
Spans = dict[str, list[Span]]  # all spans of a name, in their order


def trace(step: Callable[..., object], *arguments: object) -> Spans:
    """Profile `step(*arguments)` on this rank; every rank calls this.

    Raises RuntimeError if the profiler's clock is not the system's.
    """
    # Otherwise the profiler's C++ part says on every start that it has started.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()  # both ranks begin together
        before = time.time_ns()
        step(*arguments)
        after = time.time_ns()
        time.sleep(0.05)  # a gloo thread writes its end down after others know of it
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        spans = read_spans(Path(folder, "trace.json"))
    first, last = spans["part: forward"][0][0], spans["part: optimizer"][0][1]
    if not before - SLACK < first < last < after + SLACK:
        raise RuntimeError("the profiler's clock is not the system's")
    return spans


def read_spans(path: Path) -> Spans:
    """Read what the profiler has written: microseconds since a time in nanoseconds."""
    written = json.loads(path.read_text())
    spans: Spans = {}
    for event in written["traceEvents"]:
        if event["ph"] == "X":  # a complete event, which has a start and a duration
            start = written["baseTimeNanoseconds"] + round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            spans.setdefault(event["name"], []).append((start, end))
    return {name: sorted(of_name) for name, of_name in spans.items()}


def summarise(spans: Spans) -> dict:
    """Pick out the parts of a step and its all-reduces, and count those that overlap.

    Returns the span of each part; `all_reduces`, the spans in which gloo works at one;
    `calls`, how many were started; `early`, how many before backward was over.
    """
    # The operations that compute gradients have names that end in Backward and a digit.
    # With the last of them backward is over; `loss.backward()` may return later, for
    # DDP waits in it.
    computed = [
        end
        for name, of_name in spans.items()
        if re.search(r"^\w+Backward\d$", name)
        for _, end in of_name
    ]
    backward = spans["part: backward"][0][0], max(computed)
    # A rank starts an all-reduce by this call. One of gloo's own threads carries it
    # out, as soon as it gets round to it.
    calls = [start for start, _ in spans.get("c10d::allreduce_", [])]
    return {
        "forward": spans["part: forward"][0],
        "backward": backward,
        "finish": (backward[1], spans["part: finish"][0][1]),
        "optimizer": spans["part: optimizer"][0],
        "all_reduces": spans.get("gloo:all_reduce", []),
        "calls": len(calls),
        "early": sum(call < backward[1] for call in calls),
    }


def is_possible(ranks: Sequence[dict]) -> bool:
    """Tell whether, by the clocks of all ranks, no effect comes before its cause.

    No rank can be done with n all-reduces before every other rank has begun n.
    """
    begun = [[start for start, _ in rank["all_reduces"]] for rank in ranks]
    ended = [sorted(end for _, end in rank["all_reduces"]) for rank in ranks]
    return all(
        len(ends) == len(starts)
        and all(end > start - SLACK for end, start in zip(ends, starts, strict=True))
        for ends in ended
        for starts in begun
    )


def whole_steps(ranks: list[list[dict]]) -> list[tuple[dict, ...]]:
    """Sort what each rank has traced by steps, and leave out those with gaps.

    An all-reduce is missing where a gloo thread was too late to write down its end.
    """
    return [
        step
        for step in zip(*ranks, strict=True)
        if all(len(rank["all_reduces"]) == rank["calls"] for rank in step)
    ]


def middle_step(steps: list[tuple[dict, ...]]) -> list[dict]:
    """Choose the step that took as long as the median of them; times in ms."""

    def began(step: tuple[dict, ...]) -> int:
        return min(rank["forward"][0] for rank in step)

    def took(step: tuple[dict, ...]) -> int:
        return max(rank["optimizer"][1] for rank in step) - began(step)

    step = sorted(steps, key=took)[len(steps) // 2]

    def in_ms(span: Span) -> list[float]:
        return [round((edge - began(step)) / 1e6, 3) for edge in span]

    return [
        {part: in_ms(rank[part]) for part in PARTS}
        | {"all_reduces": [in_ms(span) for span in rank["all_reduces"]]}
        for rank in step
    ]
