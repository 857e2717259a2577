"""Do the counts of held.py agree with the formulas? Every rank comes to the same."""

from collections.abc import Iterable
from typing import Any

from live_tensors import LIVE_KINDS
from paper import KINDS, bytes_for_each

HELD_LIMIT = 0.01  # how far from the formula, once what explains it is taken off
MOST_LIMIT = 0.02  # how far the most in a step may be from what was worked out
PROCESS_LIMIT = 0.05  # how far the size of the process may be from what was counted
SLACK = 5_000_000  # bytes that a process may differ by whatever is counted
DEFAULT_BUCKET = 500_000_000  # values, DeepSpeed's default reduce_bucket_size


def distance(result: dict[str, Any], kinds: Iterable[str]) -> float:
    """Return how far, in parts of the whole, a count is from formula plus additions."""
    each = bytes_for_each(result["precision"], result["stage"])
    worst = 0.0
    for kind, number in zip(KINDS, each, strict=True):
        expected = result["paper"][kind] + number * result["extra"][kind]
        if kind in kinds:
            worst = max(worst, abs(result["held"][kind] / expected - 1))
    return worst


def distance_of_most(result: dict[str, Any]) -> float:
    """Return how far, in parts of it, the most is from what was worked out."""
    off = result["most"] / result["worked_out"] - 1
    # In stage 1 the other ranks let go of more before they copy (peak.py).
    return max(off, 0.0) if result["stage"] == 1 and result["rank"] else abs(off)


def conclusion(results: list[dict[str, Any]], exact: bool) -> str:
    """Hold all ranks' counts against formula and process; every rank does the same.

    Raises:
        RuntimeError: something is further off than its limit.
    """
    far = max(distance(result, KINDS) for result in results)
    far_most = max(map(distance_of_most, results))
    other = process = 0.0
    for result in results:
        held, whole = result["held"], sum(result["held"][kind] for kind in LIVE_KINDS)
        other = max(other, (held["other"] - SLACK / 10) / whole)
        process = max(process, (abs(held["process"] - whole) - SLACK) / whole)
    text = (
        f"{len(results)} counts are the formula's and what DeepSpeed adds to it, "
        f"{far:.1%} apart (limit {HELD_LIMIT:.0%}), the most in a step {far_most:.1%} "
        f"(limit {MOST_LIMIT:.0%})"
    )
    if exact:
        text += f"; the process agrees within {PROCESS_LIMIT:.0%}, give or take 5 MB"
    wrong = max(far, other) > HELD_LIMIT or far_most > MOST_LIMIT
    if wrong or (exact and process > PROCESS_LIMIT):
        raise RuntimeError(
            f"of {len(results)} counts one is {far:.1%} from the formula, the most "
            f"{far_most:.1%}, {other:.1%} unnamed or {process:.1%} from the process"
        )
    return text


def conclusion_for_defaults(results: list[dict[str, Any]]) -> str:
    """Check that the default buckets are there and outweigh all that ZeRO saves.

    Raises:
        RuntimeError: they are not, or do not.
    """
    wrong, whole = 0, []
    for result in results:
        held, stage = result["held"], result["stage"]
        each = bytes_for_each(result["precision"], stage).gradient
        # The gradients are still in the bucket: so large a bucket is never full.
        wrong += distance_of_most(result) > MOST_LIMIT
        wrong += distance(result, ("parameters", "optimizer")) > HELD_LIMIT
        wrong += held["buckets"] != (each * DEFAULT_BUCKET if stage else 0)
        whole.append(sum(held[kind] for kind in LIVE_KINDS))
    larger = [count for count, r in zip(whole, results, strict=True) if r["stage"]]
    text = (
        f"{len(larger)} of {len(results)} counts hold a bucket of {DEFAULT_BUCKET:,} "
        f"values; {sum(count > max(whole[::4]) for count in larger)} are above stage 0"
    )
    if wrong or len(larger) != len(results) * 3 // 4:
        raise RuntimeError(f"not what was expected: {text}, {wrong} wrong")
    return text
