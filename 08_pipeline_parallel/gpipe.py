"""GPipe: cut the batch into micro-batches, so that stages compute at the same time.

Run: python 08_pipeline_parallel/gpipe.py --stages=4 --micro-batches=8
Expect: who is idle when, if each call takes a unit of time; every stage has all
    micro-batches in flight. No rank is started: train_stages.py makes these calls.
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


def main() -> None:
    """Draw the calls of all stages, compare the waiting with its formula."""
    options = read_options(
        stages={"type": number(1, 16), "default": 4},
        micro_batches={"type": number(1, 64), "default": 8},
    )
    p, m = options.stages, options.micro_batches
    calls = calls_of(gpipe, p, m)
    print(drawn(calls))
    in_flight = [most_at_once(of_stage) for of_stage in calls]
    print(f"micro-batches in flight, at most, by stage: {in_flight}")

    rows = timeline(calls)
    idle = [row.count("") / len(row) for row in rows]
    formula = (p - 1) / (m + p - 1)
    claim = f"(p - 1) / (m + p - 1) = {formula:.1%} idle, m in flight, on each stage"
    if idle != [formula] * p or in_flight != [m] * p:
        sys.exit(f"not so: {claim}")
    print(f"check: {claim}")


if __name__ == "__main__":
    main()
