"""Fit the planner's constants to every second published row, beginning with the first.

Run: python 09_one_mesh/plan/fit_constants.py
Expect: three constants of the step time and one of the memory, those in computation.py
    and memory.py, and how much worse the fit is with a constant moved.
"""

import math
import sys

from memory import ALLOCATOR
from published_runs import (
    FITTED,
    SXM,
    Constants,
    Run,
    megatron,
    predicted_gib,
    predicted_rate,
    torchtitan,
)

# No more than the peak, the link's rate, and twice the rate of bf16.
LOW, HIGH = Constants(0.3, 0.3, 1.0), Constants(1.0, 1.0, 2.0)


def fit_half() -> list[Run]:
    """Return the rows that are fitted: the first, the third and so on of each table."""
    return torchtitan()[::2] + megatron()[::2]


def error(constants: Constants, runs: list[Run]) -> float:
    """Return the root mean square of the logarithms of predicted / measured."""
    squares = [
        math.log(predicted_rate(run, constants) / run.tokens_per_second) ** 2
        for run in runs
    ]
    return math.sqrt(sum(squares) / len(squares))


def moved(constants: Constants, by: float) -> list[Constants]:
    """Return the constants with each of them moved, within its limits."""
    found = []
    for i, (value, low, high) in enumerate(zip(constants, LOW, HIGH, strict=True)):
        new = list(constants)
        new[i] = round(min(high, max(low, value + by)), 3)
        found.append(Constants(*new))
    return found


def fit_constants(runs: list[Run]) -> Constants:
    """Go down the error along one constant at a time, in ever smaller steps."""
    best = Constants(0.5, 0.7, 1.5)
    for by in (0.1, 0.03, 0.01, 0.003, 0.001):
        while True:
            near = moved(best, by) + moved(best, -by)
            new = min(near, key=lambda constants: error(constants, runs))
            if error(new, runs) >= error(best, runs):
                break
            best = new
    return best


def refitted(**changes: float) -> list[str]:
    """Return the errors on torchtitan's rows with another assumption, fitted again.

    `flops` changes the device's peak; `balanced` the work of context-parallel ranks.
    """
    other = []
    for run in torchtitan():
        flops = changes.get("flops", run.job.cluster.flops)
        cluster, even = run.job.cluster._replace(flops=flops), "balanced" in changes
        job = run.job._replace(cluster=cluster, balanced=even)
        other.append(run._replace(job=job))
    constants = fit_constants(other[::2] + megatron()[::2])
    rates = [(predicted_rate(run, constants), run.tokens_per_second) for run in other]
    return [f"{rate / published - 1:+.0%}" for rate, published in rates]


def main() -> None:
    """Fit, show, and compare with the constants that the planner has."""
    runs = fit_half()
    found = fit_constants(runs)
    print(f"{len(runs)} rows fitted, error {error(found, runs):.1%}")
    for i, name in enumerate(Constants._fields):
        near = {"less": moved(found, -0.1)[i], "more": moved(found, 0.1)[i]}
        text = ", ".join(
            f"with 0.1 {word} {error(other, runs):.1%}"
            for word, other in near.items()
            if other != found  # its limit
        )
        print(f"{name:9}| {found[i]:.3f} | error {text}")
    with_memory = [run for run in runs if run.gib]
    ratios = [math.log(run.gib / predicted_gib(run)) for run in with_memory if run.gib]
    allocator = ALLOCATOR * math.exp(sum(ratios) / len(ratios))
    print(f"allocator| {allocator:.3f} | of {len(ratios)} rows")
    print("torchtitan's rows, if another assumption is made and fitted:")
    print(f"  700 W: {' '.join(refitted(flops=SXM))}")
    print(f"  context balanced: {' '.join(refitted(balanced=True))}")
    is_same = all(abs(a - b) < 0.002 for a, b in zip(found, FITTED, strict=True))
    if not is_same or abs(allocator - ALLOCATOR) > 0.002:
        sys.exit("fit_constants.py: the planner's constants are others")
    print("check: the planner has these four constants")


if __name__ == "__main__":
    main()
