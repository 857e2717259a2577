"""1F1B: run each backward pass as early as it can; fewer micro-batches in flight.

Run: python 08_pipeline_parallel/one_f_one_b.py --stages=4 --micro-batches=8
Expect: as much waiting as with gpipe.py, but 4, 3, 2 and 1 micro-batches in flight on
    the stages in place of 8. No rank is started: train_stages.py makes these calls.
"""

import sys
from typing import Any

from call_timeline import calls_of, drawn, most_at_once, timeline
from gpipe import gpipe
from ranks import number, read_options


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


SCHEDULES = {"gpipe.py": gpipe, "one_f_one_b.py": one_f_one_b}  # each by its script


def main() -> None:
    """Draw the calls of all stages, compare the waiting with its formula."""
    options = read_options(
        stages={"type": number(1, 16), "default": 4},
        micro_batches={"type": number(1, 64), "default": 8},
    )
    p, m = options.stages, options.micro_batches
    calls = calls_of(one_f_one_b, p, m)
    print(drawn(calls))
    in_flight = [most_at_once(of_stage) for of_stage in calls]
    print(f"micro-batches in flight, at most, by stage: {in_flight}")

    rows = timeline(calls)
    idle = [row.count("") / len(row) for row in rows]
    formula = (p - 1) / (m + p - 1)
    shown = f"(p - 1) / (m + p - 1) = {formula:.1%} idle"
    claim = f"{shown}, min(p - s, m) in flight on stage s"
    if idle != [formula] * p or in_flight != [min(p - s, m) for s in range(p)]:
        sys.exit(f"not so: {claim}")
    print(f"check: {claim}")


if __name__ == "__main__":
    main()
