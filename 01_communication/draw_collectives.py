"""Draw each collective on three ranks: what they hold before it, and after it.

Run: python 01_communication/draw_collectives.py
Needs: matplotlib, and expected.py beside it.
Expect: one small picture for each collective, assets/01_scatter.png and so on; then a
    `check:` that they fit together: reduce-scatter and all-gather make an all-reduce.
Before: 01_communication/collectives.py
Next: 01_communication/README.md, which shows the pictures.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from expected import EXPECTED, Row, numbers_before

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_drawing, picture_parser, save_picture

WORLD_SIZE = 3
ROOT = WORLD_SIZE - 1
# One colour for each rank, which people with any colour vision tell apart (Okabe and
# Ito). What several ranks have a part in is green.
COLOURS = ["#0072B2", "#E69F00", "#CC79A7"]
MIXED = "#009E73"
INK = "#222222"
# How many numbers a rank brings (None: one for each rank), and a few words.
PICTURES: dict[str, tuple[int | None, str]] = {
    "scatter": (None, "the root (rank 2) deals, one to each"),
    "gather": (1, "the root (rank 2) collects"),
    "broadcast": (None, "all get what the root (rank 2) has"),
    "reduce": (None, "the root (rank 2) gets the sums"),
    "all_reduce SUM": (None, "all get the sums"),
    "all_gather": (1, "all collect"),
    "reduce_scatter": (None, "each gets the sum at its own place"),
    "all_to_all": (None, "each gets one from everybody"),
    "barrier": (0, "none goes on before all have come"),
}


def colour_of(number: float) -> str:
    """Tell the rank that a number comes from by its zeros; a sum has none."""
    zeros = len(f"{number:.0f}") - len(f"{number:.0f}".rstrip("0"))
    return COLOURS[zeros] if f"{number:.0f}"[1:] == "0" * zeros else MIXED


def write_middle(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text whose middle is at y."""
    style = {"fontsize": 14, "color": INK} | style
    axes.text(x, y, text, None, va="center", **style)


def draw_row(axes: Axes, x: float, y: float, row: Row | None) -> list[float]:
    """Draw a rank's numbers as boxes, from x to the right; return those drawn."""
    if not row:
        text = "nothing" if row == [] else "scrap: not to be used"
        write_middle(axes, x, y, text, style="italic")
        return []
    for place, number in enumerate(row):
        corner, colour = (x + place, y - 0.36), colour_of(number)
        axes.add_patch(plt.Rectangle(corner, 0.92, 0.72, fc=colour + "40", ec=colour))
        write_middle(axes, x + place + 0.46, y, f"{number:.0f}", ha="center")
    return row


def draw_waiting(axes: Axes, y: float, rank: int) -> None:
    """Draw a rank that comes to a barrier, waits there (dotted) and goes on."""
    comes, opens, ends = (2.2, 4.8, 3.5)[rank], 4.8, 9.4
    style = {"color": COLOURS[rank], "linewidth": 3}
    axes.plot([1.3, comes], [y, y], **style)
    axes.plot([comes, opens], [y, y], linestyle=":", **style)
    axes.annotate(
        "", (ends, y), (opens, y), arrowprops={"arrowstyle": "->", "lw": 3} | style
    )
    axes.plot(comes, y, "o", color=COLOURS[rank], markersize=9)


def draw_collective(name: str) -> tuple[plt.Figure, int]:
    """Draw one collective; return the picture and how many numbers are in it."""
    places, words = PICTURES[name]
    figure, axes = new_drawing(2.4, (-0.1, 9.6), (-0.7, 3.6))
    write_middle(axes, 0, 3.1, name.split()[0], weight="bold", fontsize=15)
    write_middle(axes, 2.6, 3.1, words)
    before = numbers_before(places, WORLD_SIZE)
    expected = EXPECTED[name]
    drawn = 0
    for rank in range(WORLD_SIZE):
        y = 2.0 - rank
        write_middle(axes, 0, y, f"rank {rank}")
        if name == "barrier":
            draw_waiting(axes, y, rank)
            continue
        drawn += len(draw_row(axes, 1.3, y, before[rank]))
        drawn += len(draw_row(axes, 6.4, y, expected(before, rank, ROOT)))
    if name == "barrier":
        axes.plot([4.8, 4.8], [-0.5, 2.5], color=INK, linewidth=2)
        write_middle(axes, 8.6, -0.45, "time", fontsize=12)
    else:
        style = {"arrowstyle": "->", "color": INK, "lw": 2}
        axes.annotate("", (5.9, 1.0), (4.7, 1.0), arrowprops=style)
    return figure, drawn


def after(name: str, rows: list[Row]) -> list[Row]:
    """Return what all ranks hold after a call; scrap counts as nothing."""
    return [EXPECTED[name](rows, rank, ROOT) or [] for rank in range(WORLD_SIZE)]


def main() -> None:
    """Draw all of them, and check that they fit together."""
    out = picture_parser("Draw the chapter's collectives.").parse_args().out
    rows = numbers_before(None, WORLD_SIZE)
    sums = after("all_reduce SUM", rows)
    fits = {
        "reduce-scatter, all-gather": after("all_gather", after("reduce_scatter", rows))
        == sums,
        "reduce, broadcast": after("broadcast", after("reduce", rows)) == sums,
        "scatter, gather": after("gather", after("scatter", rows))[ROOT] == rows[ROOT],
        "all-to-all twice": after("all_to_all", after("all_to_all", rows)) == rows,
    }
    if wrong := [pair for pair, is_right in fits.items() if not is_right]:
        raise RuntimeError(f"the pictures would lie about {'; '.join(wrong)}")
    numbers = 0
    for name in PICTURES:
        figure, drawn = draw_collective(name)
        save_picture(figure, out, f"01_{name.split()[0]}.png")
        plt.close(figure)
        numbers += drawn
    print(f"check: {len(PICTURES)} pictures, {numbers} numbers, which fit together")


if __name__ == "__main__":
    main()
