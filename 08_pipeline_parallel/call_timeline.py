"""Who is idle when: the calls of each stage, in units of time.

A schedule calls `forward(i)` and `backward(i)` of a stage for each micro-batch i. Here
"F0" and "B0" stand for such calls.
"""

from collections.abc import Callable
from typing import Any


class Calls:
    """Stands where a schedule expects a stage, and notes its calls: "F0", "B0"."""

    def __init__(self, index: int, stages: int) -> None:
        """Be stage `index` of so many."""
        self.index, self.stages, self.made = index, stages, list[str]()

    def forward(self, i: int) -> None:
        """Note a forward pass."""
        self.made.append(f"F{i}")

    def backward(self, i: int) -> None:
        """Note a backward pass."""
        self.made.append(f"B{i}")


def calls_of(schedule: Callable, stages: int, micro_batches: int) -> list[list[str]]:
    """Return the calls of each stage, in the schedule's order."""
    noted = [Calls(index, stages) for index in range(stages)]
    for stage in noted:
        schedule(stage, micro_batches)
    return [stage.made for stage in noted]


def timeline(calls: list[list[str]]) -> list[list[str]]:
    """Return what each stage does in each unit of time, "" where it waits.

    As if every call took one unit and a message no time. `calls` are those of each
    stage, in its order. Raises ValueError if stages would wait for each other for good.
    """
    left, rows = [list(of_stage) for of_stage in calls], [[] for _ in calls]
    done: set[Any] = {None}
    while any(left):
        now = [
            row[0] if row and needed(row[0], stage, len(calls)) in done else ""
            for stage, row in enumerate(left)
        ]
        if not any(now):
            raise ValueError(f"the stages wait for each other; left to do: {left}")
        for stage, call in enumerate(now):
            rows[stage].append(call)
            if call:
                done.add((left[stage].pop(0), stage))
    return rows


def drawn(calls: list[list[str]]) -> str:
    """Draw the timeline of each stage in a line, and count the units that it waits."""
    rows = timeline(calls)
    lines = [
        f"stage {stage} | " + " ".join(f"{call or '.':2}" for call in row).rstrip()
        for stage, row in enumerate(rows)
    ]
    waits = ", ".join(str(row.count("")) for row in rows)
    return "\n".join([*lines, f"of {len(rows[0])} units of time they wait: {waits}"])


def needed(call: str, stage: int, stages: int) -> tuple[str, int] | None:
    """Return the call, and its stage, that must be over before this one begins."""
    if call[0] == "F":
        return (call, stage - 1) if stage > 0 else None
    return (call, stage + 1) if stage < stages - 1 else (f"F{call[1:]}", stage)


def most_at_once(calls: list[str]) -> int:
    """Count the micro-batches between their forward and their backward pass."""
    running, most = 0, 0
    for call in calls:
        running += 1 if call[0] == "F" else -1
        most = max(most, running)
    return most
