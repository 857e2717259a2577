"""Draw what scaling.py measured, and how far its model reaches beyond that.

Run: python 03_ddp_torchrun/draw_scaling.py
Needs: matplotlib, and assets/03_scaling.json, as scaling.py --json writes it.
Expect: assets/03_scaling.png, and a `check:` of how far the predictions are off.
Before: 03_ddp_torchrun/scaling.py
Next: 03_ddp_torchrun/MACHINES.md, which shows the picture.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from scaling_rows import TOKENS, errors_unseen
from step_model import step_ms

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, numbers_from, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
KINDS = {  # marker, line, label
    "weak": ("o", "-", "weak, one bucket"),
    "overlap": ("^", "--", "weak, four buckets"),
    "strong": ("s", ":", "strong, one bucket"),
}
LIMIT = 0.25  # how far off a drawn prediction may be


def rate(row: dict[str, Any], key: str) -> float:
    """Return thousands of tokens in a second."""
    return row["ranks"] * row["samples"] * TOKENS / row[key] / 1e3


def draw_measured(axes: plt.Axes, found: dict[str, dict[str, Any]]) -> None:
    """Plot tokens per second against ranks: marks measured, lines predicted."""
    for one, colour in zip(found.values(), COLOURS, strict=False):
        for kind, (marker, style, _) in KINDS.items():
            rows = [row for row in one["rows"] if row["kind"] == kind]
            ranks = [row["ranks"] for row in rows]
            measured = [rate(row, "ms") for row in rows]
            axes.plot(ranks, measured, marker, color=colour, ms=5.5)
            expected = [rate(row, "predicted_ms") for row in rows]
            axes.plot(ranks, expected, style, color=colour, lw=1.2)
    for marker, style, label in KINDS.values():
        axes.plot([], [], style, marker=marker, color="#555555", label=label)
    axes.set_xlabel("ranks")
    axes.set_ylabel("thousand tokens per second")
    axes.set_ylim(0, 95)  # room for the legend
    axes.set_xticks([1, 2, 3, 4])
    off = max(abs(error) for one in found.values() for error in errors_unseen(one))
    title = f"measured (marks), predicted (lines), up to {off:.0%} off"
    axes.set_title(title)
    axes.legend(loc="upper center")


def draw_far(axes: plt.Axes, found: dict[str, dict[str, Any]]) -> None:
    """Plot the efficiency of weak scaling up to 1024 ranks with a core each."""
    ranks = [2**power for power in range(11)]
    for (where, one), colour in zip(found.items(), COLOURS, strict=False):
        link = one["latency_ms"], one["bytes_per_ms"]
        for kind in ("weak", "overlap"):
            (row,) = (
                row for row in one["rows"] if row["kind"] == kind and row["ranks"] == 1
            )
            alone = row["alone_ms"]
            steps = [step_ms(alone, row["buckets"], n, *link) for n in ranks]
            label = where if kind == "weak" else None
            style = KINDS[kind][1]
            shares = [100 * alone / ms for ms in steps]
            axes.plot(ranks, shares, style, color=colour, lw=1.5, label=label)
    axes.axvspan(1, 4, color="#BBBBBB", alpha=0.3, lw=0)
    axes.text(1.1, 4, "run", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1024"])
    axes.set_ylim(0, 105)
    axes.set_xlabel("ranks, each with a core of its own")
    axes.set_ylabel("efficiency of weak scaling, %")
    axes.set_title("predicted, beyond what was run")
    axes.legend(loc="upper right")


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw what scaling.py measured.", "03_scaling.json")
    args = parser.parse_args()
    figure, (left, right) = new_picture(4.6, columns=2)
    with numbers_from("scaling.py"):
        draw_measured(left, args.numbers)
        draw_far(right, args.numbers)
        off = [one for each in args.numbers.values() for one in errors_unseen(each)]
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    worst = max(off, key=abs)
    if abs(worst) > LIMIT:
        raise RuntimeError(
            f"a drawn prediction is {worst:+.0%} off (limit {LIMIT:.0%})"
        )
    save_picture(figure, args.out, "03_scaling.png")
    print(
        f"check: {len(off)} steps of ranks that the fit has not seen are predicted "
        f"within {abs(worst):.0%} (limit {LIMIT:.0%}); wrote 03_scaling.png"
    )


if __name__ == "__main__":
    main()
