"""Check the orders of all stages, draw their timeline, and say what is wrong."""

import sys
from collections.abc import Callable

from call_timeline import drawn, most_at_once, timeline
from ranks import read_options

DRAWN = (4, 6)  # stages and micro-batches
CASES = [DRAWN, (2, 5), (3, 8), (4, 2), (5, 5), (1, 3)]
Answer = Callable[[int, int, int], list[str]]


def check_stage_order(order_of: Answer) -> None:
    """Draw the answer's timeline and end the process if anything is wrong with it."""
    read_options()
    try:
        print(drawn([order_of(stage, *DRAWN) for stage in range(DRAWN[0])]))
    except Exception:
        print("no timeline can be drawn of this")
    for stages, micro_batches in CASES:
        if wrong := explain_orders(order_of, stages, micro_batches):
            print(f"{stages} stages, {micro_batches} micro-batches: {wrong}")
            sys.exit(1)
    print(f"check: {len(CASES)} pipelines run by 1F1B, as few in flight as it can")


def explain_orders(order_of: Answer, stages: int, micro_batches: int) -> str:
    """Say in words what is wrong with the orders of a pipeline, or nothing."""
    orders = []
    for stage in range(stages):
        try:
            calls = order_of(stage, stages, micro_batches)
        except Exception as error:
            return f"stage {stage} ends with {error!r}"
        if wrong := explain_calls(calls, micro_batches):
            return f"stage {stage} {wrong}"
        orders.append(calls)
    try:
        rows = timeline(orders)
    except ValueError as error:
        return str(error)
    for stage, calls in enumerate(orders):
        most, allowed = most_at_once(calls), min(stages - stage, micro_batches)
        if most > allowed:  # fewer would take longer
            return f"stage {stage} has {most} in flight, where {allowed} are needed"
    if len(rows[0]) > 2 * (micro_batches + stages - 1):
        return f"{len(rows[0])} units of time, not {2 * (micro_batches + stages - 1)}"
    return ""


def explain_calls(calls: list[str], micro_batches: int) -> str:
    """Say what is wrong with the calls of one stage by themselves, or nothing."""
    if not isinstance(calls, list):
        return f"returns a {type(calls).__name__}, not a list"
    for letter in "FB":
        wanted = [f"{letter}{i}" for i in range(micro_batches)]
        found = [call for call in calls if call[:1] == letter]
        if sorted(found) != sorted(wanted):
            return f"makes the calls {' '.join(found)}, not {' '.join(wanted)}"
        if found != wanted:
            return f"makes {' '.join(found)}: messages arrive in the order 0, 1, 2"
    if len(calls) != 2 * micro_batches:
        return f"makes {len(calls)} calls, not {2 * micro_batches}"
    for i in range(micro_batches):
        if calls.index(f"B{i}") < calls.index(f"F{i}"):
            return f"makes B{i} before F{i}"
    return ""
