"""Two schedules: the order in which a stage computes its micro-batches.

Run: python 08_pipeline_parallel/schedules.py --schedule=gpipe --micro-batches=8
Expect: who is idle when, if each call takes a unit of time. By gpipe a stage has all
    micro-batches in flight, by one_f_one_b at most one more than stages follow. No
    rank is started: train_stages.py makes these calls.
"""

import sys
from typing import Any

from call_timeline import calls_of, drawn, most_at_once, timeline
from ranks import number, read_options


def gpipe(stage: Any, micro_batches: int) -> None:
    """Run all forward passes, then all backward passes."""
    for i in range(micro_batches):
        stage.forward(i)
    for i in range(micro_batches):
        stage.backward(i)


def one_f_one_b(stage: Any, micro_batches: int) -> None:
    """Run as many forward passes ahead as stages follow; then one backward for each."""
    ahead = min(stage.stages - 1 - stage.index, micro_batches)
    for i in range(ahead):  # warm-up
        stage.forward(i)
    for i in range(micro_batches - ahead):  # steady state: one forward, one backward
        stage.forward(ahead + i)
        stage.backward(i)
    for i in range(micro_batches - ahead, micro_batches):  # cool-down
        stage.backward(i)


SCHEDULES = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}


def main() -> None:
    """Draw the calls of all stages, compare the waiting with its formula."""
    options = read_options(
        schedule={"choices": [*SCHEDULES], "default": "gpipe"},
        stages={"type": number(1, 16), "default": 4},
        micro_batches={"type": number(1, 64), "default": 8},
    )
    p, m = options.stages, options.micro_batches
    calls = calls_of(SCHEDULES[options.schedule], p, m)
    print(drawn(calls))
    in_flight = [most_at_once(of_stage) for of_stage in calls]
    print(f"micro-batches in flight, at most, by stage: {in_flight}")

    rows = timeline(calls)
    idle = [row.count("") / len(row) for row in rows]
    formula = (p - 1) / (m + p - 1)
    most, told = {
        "gpipe": ([m] * p, "m in flight, on each stage"),
        "one_f_one_b": (
            [min(p - s, m) for s in range(p)],
            "min(p - s, m) in flight on stage s",
        ),
    }[options.schedule]
    claim = f"(p - 1) / (m + p - 1) = {formula:.1%} idle, {told}"
    if idle != [formula] * p or in_flight != most:
        sys.exit(f"not so: {claim}")
    print(f"check: {claim}")


if __name__ == "__main__":
    main()
