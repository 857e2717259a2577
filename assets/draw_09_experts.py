"""Draw the way of tokens to their experts on two ranks, and back, with one dropped.

Run: python assets/draw_09_experts.py
Expect: 09_experts.png, of the tokens of who_goes_where.py, and a `check:` of places.
"""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import chapter_module, new_drawing, picture_parser, save_picture

# One colour for each rank, as in the other pictures (Okabe and Ito).
RANKS, INK, DROPPED = ["#0072B2", "#E69F00"], "#222222", "#888888"
# An expert takes CAPACITY tokens from each rank.
EXPERTS, CAPACITY = 4, 1
example = chapter_module("09_one_mesh/experts/who_goes_where.py")
SIDE, GAP, BELOW = 0.56, 0.72, 1.44  # of tokens: beside each other, and below
WIDTH = 2.75  # of an expert


def routed() -> tuple[list[list[str]], list[str]]:
    """Return what each expert receives, in order, and the tokens that are dropped."""
    received: list[list[str]] = [[] for _ in range(EXPERTS)]
    dropped = []
    both = zip(example.NAMES, example.PROBABILITIES, strict=True)
    for names, probabilities in both:
        chosen, kept, _ = example.rows_of_rank(probabilities, CAPACITY)
        for token in kept:
            received[chosen[token]].append(names[token])
        dropped += [name for i, name in enumerate(names) if i not in kept]
    return received, dropped


def draw_cell(
    axes: Axes, x: float, y: float, text: str, colour: str, free=False
) -> None:
    """Draw a token, or a place that is free, with its left lower corner at (x, y)."""
    line: dict[str, Any] = {"ls": ":", "fc": "white"} if free else {"fc": colour + "40"}
    axes.add_patch(plt.Rectangle((x, y), SIDE, SIDE, ec=colour, zorder=3, **line))
    middle = {"ha": "center", "va": "center", "color": INK, "zorder": 4}
    axes.text(x + SIDE / 2, y + SIDE / 2 - 0.03, text, **middle)


def draw_line(axes: Axes, ends: list[tuple[float, float]], colour: str) -> None:
    """Draw an arrow from one point to another."""
    start, end = ends
    style = {"arrowstyle": "->", "color": colour, "lw": 1.1, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops=style)


def draw_experts(
    axes: Axes, received: list[list[str]], left: float
) -> dict[str, tuple[int, float]]:
    """Draw what each expert receives; return each token's expert and its height."""
    heights = {}
    for expert, names in enumerate(received):
        owner, y = RANKS[expert // 2], 6.45 - 1.9 * expert
        frame = (left - 0.15, y - 0.17)
        axes.add_patch(plt.Rectangle(frame, WIDTH, 1.25, fc="none", ec=owner))
        text = f"expert {expert}, on rank {expert // 2}"
        axes.text(left, y + 0.71, text, color=INK)
        for slot in range(2 * CAPACITY):
            sender, number = divmod(slot, CAPACITY)
            mine = [*(name for name in names if name in example.NAMES[sender]), ""]
            text, x = mine[number], left + slot * GAP
            draw_cell(axes, x, y, text, RANKS[sender], free=not text)
            heights[text] = expert, y + 0.7 - 0.5 * slot
    return heights


def draw_routes() -> tuple[plt.Figure, list[list[str]], list[str]]:
    """Lay out tokens on the left, experts in the middle, results on the right."""
    figure, axes = new_drawing(5.5, (0, 16), (-1.4, 8.4))
    (received, dropped), start, middle, end = routed(), 1.6, 6.9, 14.0
    heights = draw_experts(axes, received, middle)
    for x, text in (
        (start + SIDE / 2, "tokens"),
        ((start + middle) / 2 + 0.2, "all-to-all"),
        (middle + WIDTH / 2 - 0.15, "experts"),
        ((middle + WIDTH + end) / 2, "all-to-all back"),
        (end + SIDE / 2, "results"),
    ):
        axes.text(x, 7.9, text, color=INK, weight="bold", ha="center")
    for rank, names in enumerate(example.NAMES):
        axes.text(0.1, 5.4 - 3.95 * rank, f"rank {rank}", color=INK, weight="bold")
        for i, name in enumerate(names):
            y, colour = 6.68 - 3.95 * rank - i * BELOW, RANKS[rank]
            out, back = (start + SIDE, y + SIDE / 2), (end, y + SIDE / 2)
            if name in dropped:
                colour = DROPPED
                axes.plot(*zip(out, back, strict=True), ls="--", lw=1, color=colour)
            else:
                at = heights[name][1]
                draw_line(axes, [out, (middle - 0.15, at)], colour)
                draw_line(axes, [(middle - 0.15 + WIDTH, at), back], colour)
            for x in (start, end):
                draw_cell(axes, x, y, name, colour)
    for x, text, colour, free in (
        (start, "a place that rank 0 did not use", RANKS[0], True),
        (middle - 0.15, "... that rank 1 did not use", RANKS[1], True),
        (11.2, "dropped: only the residual", DROPPED, False),
    ):
        draw_cell(axes, x, -1.15, "", colour, free=free)
        axes.text(x + 0.75, -0.89, text, va="center", color=INK)
    return figure, received, dropped


def main() -> None:
    """Draw, and compare the places with those that were meant."""
    out = picture_parser("Draw tokens and their experts.").parse_args().out
    figure, received, dropped = draw_routes()
    if ["".join(names) for names in received] != ["bx", "z", "a", "y"]:
        raise RuntimeError(f"the picture would lie: {received}")
    save_picture(figure, out, "09_experts.png")
    count = sum(map(len, received))
    print(
        f"check: {count} tokens have a place, {dropped} has none; wrote 09_experts.png"
    )


if __name__ == "__main__":
    main()
