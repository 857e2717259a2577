"""Draw each collective on three ranks: what they hold before it, and after it.

Run: python assets/draw_collectives.py
Expect: one small picture for each collective, 01_scatter.png and so on; then a `check:`
    that they fit together: reduce-scatter and all-gather make an all-reduce.
"""

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import new_drawing, picture_parser, save_picture

Row = list[float]
WORLD_SIZE = 3
ROOT = WORLD_SIZE - 1
# One colour for each rank, which people with any colour vision tell apart (Okabe and
# Ito). What several ranks have a part in is green.
COLOURS = ["#0072B2", "#E69F00", "#CC79A7"]
MIXED = "#009E73"
INK = "#222222"
# How many numbers a rank brings, and a few words.
PICTURES = {
    "scatter": (3, "the root (rank 2) sends a number to each rank"),
    "gather": (1, "the root (rank 2) gets a number from each rank"),
    "broadcast": (3, "all ranks get what the root (rank 2) has"),
    "reduce": (3, "the root (rank 2) gets the sums"),
    "all_reduce": (3, "all ranks get the sums"),
    "all_gather": (1, "all ranks get a number from each rank"),
    "reduce_scatter": (3, "each rank gets the sum at its own place"),
    "all_to_all": (3, "each rank gets a number from each rank"),
    "barrier": (0, "no rank continues before all have called it"),
}


def before(places: int) -> list[Row]:
    """Return 1, 2, 3 for rank 0, 10, 20, 30 for rank 1, 100, 200, 300 for rank 2."""
    numbers = range(1, places + 1)
    return [[10.0**rank * one for one in numbers] for rank in range(WORLD_SIZE)]


def sums(rows: list[Row]) -> Row:
    """Add up what all ranks hold at each place."""
    return [sum(column) for column in zip(*rows, strict=True)]


def joined(rows: list[Row]) -> Row:
    """Put the ranks' numbers one after the other."""
    return [number for row in rows for number in row]


# What a rank holds after a call, by what all ranks held; None is an undefined value.
AFTER: dict[str, Callable[[list[Row], int], Row | None]] = {
    "scatter": lambda rows, rank: [rows[ROOT][rank]],
    "gather": lambda rows, rank: joined(rows) if rank == ROOT else [],
    "broadcast": lambda rows, rank: rows[ROOT],
    "reduce": lambda rows, rank: sums(rows) if rank == ROOT else None,
    "all_reduce": lambda rows, rank: sums(rows),
    "all_gather": lambda rows, rank: joined(rows),
    "reduce_scatter": lambda rows, rank: [sums(rows)[rank]],
    "all_to_all": lambda rows, rank: [row[rank] for row in rows],
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
        text = "nothing" if row == [] else "undefined: not to be used"
        write_middle(axes, x, y, text, style="italic")
        return []
    for place, number in enumerate(row):
        corner, colour = (x + place, y - 0.36), colour_of(number)
        axes.add_patch(plt.Rectangle(corner, 0.92, 0.72, fc=colour + "40", ec=colour))
        write_middle(axes, x + place + 0.46, y, f"{number:.0f}", ha="center")
    return row


def draw_waiting(axes: Axes, y: float, rank: int) -> None:
    """Draw a rank that comes to a barrier, waits there (dotted) and continues."""
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
    write_middle(axes, 0, 3.1, name, weight="bold", fontsize=15)
    write_middle(axes, 2.6, 3.1, words)
    rows, drawn = before(places), 0
    for rank in range(WORLD_SIZE):
        y = 2.0 - rank
        write_middle(axes, 0, y, f"rank {rank}")
        if name == "barrier":
            draw_waiting(axes, y, rank)
            continue
        drawn += len(draw_row(axes, 1.3, y, rows[rank]))
        drawn += len(draw_row(axes, 6.4, y, AFTER[name](rows, rank)))
    if name == "barrier":
        axes.plot([4.8, 4.8], [-0.5, 2.5], color=INK, linewidth=2)
        write_middle(axes, 8.6, -0.45, "time", fontsize=12)
    else:
        style = {"arrowstyle": "->", "color": INK, "lw": 2}
        axes.annotate("", (5.9, 1.0), (4.7, 1.0), arrowprops=style)
    return figure, drawn


def after(name: str, rows: list[Row]) -> list[Row]:
    """Return what all ranks hold after a call; an undefined value counts as nothing."""
    return [AFTER[name](rows, rank) or [] for rank in range(WORLD_SIZE)]


def main() -> None:
    """Draw all of them, and check that they fit together."""
    out = picture_parser("Draw the chapter's collectives.").parse_args().out
    rows, ones = before(WORLD_SIZE), before(1)
    summed = after("all_reduce", rows)
    fits = {
        "reduce-scatter, all-gather": after("all_gather", after("reduce_scatter", rows))
        == summed,
        "reduce, broadcast": after("broadcast", after("reduce", rows)) == summed,
        "reduce, scatter": after("scatter", after("reduce", rows))
        == after("reduce_scatter", rows),
        "gather, broadcast": after("broadcast", after("gather", ones))
        == after("all_gather", ones),
        "scatter, gather": after("gather", after("scatter", rows))[ROOT] == rows[ROOT],
        "all-to-all twice": after("all_to_all", after("all_to_all", rows)) == rows,
    }
    if wrong := [pair for pair, is_right in fits.items() if not is_right]:
        raise RuntimeError(f"the pictures would lie about {'; '.join(wrong)}")
    numbers = 0
    for name in PICTURES:
        figure, drawn = draw_collective(name)
        save_picture(figure, out, f"01_{name}.png")
        plt.close(figure)
        numbers += drawn
    print(f"check: {len(PICTURES)} pictures, {numbers} numbers, which fit together")


if __name__ == "__main__":
    main()
