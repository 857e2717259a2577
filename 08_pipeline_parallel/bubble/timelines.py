"""What can be read off the spans that the ranks have recorded in a step."""

from typing import Any

from timed_stages import UNITS, Span


def idle_share(ranks: list[list[Span]]) -> float:
    """Return which part of a step's time a rank waits, on average."""
    calls = [span for spans in ranks for span in spans]
    total = max(end for *_, end in calls) - min(start for *_, start, _ in calls)
    return 1 - sum(end - start for *_, start, end in calls) / (total * len(ranks))


def most_in_flight(spans: list[Span], stages_on_a_rank: int) -> float:
    """Count the micro-batches whose activations a rank keeps at the same time.

    A micro-batch counts for the part of the rank's layers that it is kept for. What a
    backward pass in two halves needs is kept until the second, W, is over.
    """
    now, most = 0, 0
    for kind, *_ in spans:
        now += {"F": 1, "I": 0}.get(kind, -1)
        most = max(most, now)
    return most / stages_on_a_rank


def what_it_needs(kind: str, stage: int, i: int, last: int) -> Any:
    """Return (is forward, stage, micro-batch) of the call that must be over before."""
    if kind == "W" or (kind == "F" and stage == 0):
        return None  # its rank has done what it needs
    if kind == "F":
        return True, stage - 1, i
    return (True, stage, i) if stage == last else (False, stage + 1, i)


def replay(ranks: list[list[Span]]) -> list[list[Span]]:
    """Return the same calls in the same order, as if messages took no time.

    The times are units. Raises ValueError if the ranks would wait for each other.
    """
    last = max(stage for spans in ranks for _, stage, *_ in spans)
    ends: dict[Any, float] = {None: 0.0}
    rows: list[list[Span]] = [[] for _ in ranks]
    left = sum(map(len, ranks))
    while left:
        before = left
        for spans, row in zip(ranks, rows, strict=True):
            while len(row) < len(spans):
                kind, stage, i, *_ = spans[len(row)]
                needed = what_it_needs(kind, stage, i, last)
                if needed not in ends:
                    break
                start = max(ends[needed], row[-1][4] if row else 0.0)
                row.append((kind, stage, i, start, start + UNITS[kind]))
                left -= 1
                if kind != "W":
                    ends[kind == "F", stage, i] = row[-1][4]
        if left == before:
            raise ValueError("the ranks wait for each other for good")
    return rows
