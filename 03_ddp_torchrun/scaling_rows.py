"""The table of scaling.py, and how far its predictions may be off."""

from typing import Any

from step_model import step_ms

FAR = (8, 64, 1024)  # ranks, for which there is a prediction alone
TOKENS = 128e3  # in a sample, times the milliseconds in a second


def far_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Predict steps of many ranks, each with a core, or a GPU, of its own.

    They compute as one rank does; what the exchange adds is the model's.
    """
    link = found["latency_ms"], found["bytes_per_ms"]
    alone = [row for row in found["rows"] if row["ranks"] == 1]
    rows = [
        row | {"kind": "far", "ranks": n, "ms": None}
        for row in alone
        if row["kind"] != "strong"
        for n in FAR
    ]
    for row in rows:
        computing, n = row["alone_ms"], row["ranks"]
        row["predicted_ms"] = step_ms(computing, row["buckets"], n, *link)
    return rows


def lines_of_teams(found: dict[str, Any]) -> list[str]:
    """Return the lines of measured teams, then those of teams that nobody has run."""
    lines = [
        f"link: {found['latency_ms']:.2f} ms a message, "
        f"{8 * found['bytes_per_ms'] / 1e3:,.0f} Mbit/s, from all-reduces of 2 ranks",
        "        ranks samples buckets  tokens/s efficient exchange  step ms predicted",
    ]
    first = {row["kind"]: row for row in found["rows"] if row["ranks"] == 1}
    for row in [*found["rows"], *far_rows(found)]:
        n, samples, computing = row["ranks"], row["samples"], row["alone_ms"]
        ms, shown = row["predicted_ms"], "not run"
        # What a rank brings, against one that is alone.
        one, one_ms = row, computing
        if row["ms"] is not None:
            ms, shown = row["ms"], f"{row['ms']:.1f}"
            one, one_ms = first[row["kind"]], first[row["kind"]]["ms"]
        efficiency = samples / ms / (one["samples"] / one_ms)
        lines.append(
            f"{row['kind']:8} {n:4} {samples:7} {len(row['buckets']):7} "
            f"{n * samples * TOKENS / ms:9,.0f} {efficiency:9.0%} "
            f"{max(0.0, 1 - computing / ms):8.0%} {shown:>8} "
            f"{row['predicted_ms']:9.1f}"
        )
    return lines


def errors_unseen(found: dict[str, Any]) -> list[float]:
    """Return how far the predictions are off for teams that the fit has not seen."""
    unseen = [row for row in found["rows"] if row["ranks"] > 2]
    return [row["predicted_ms"] / row["ms"] - 1 for row in unseen]


def judge_predictions(found: dict[str, Any], limit: float | None) -> str:
    """Hold the predictions against the teams that the fit has not seen.

    Raises:
        RuntimeError: one is further off than `limit`.
    """
    off = errors_unseen(found)
    if not off:
        return "no team of more than 2 ranks to hold the prediction against"
    worst = max(off, key=abs)
    result = f"{len(off)} steps of 3 ranks or more, predicted from 2, {worst:+.0%} off"
    if limit is None:
        return f"{result} at worst"
    if abs(worst) > limit:
        raise RuntimeError(f"{result} (limit {limit:.0%})")
    return f"{result} at worst (limit {limit:.0%})"
