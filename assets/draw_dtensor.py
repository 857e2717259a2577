"""Draw the placements of a DTensor on two ranks, and the collectives between them.

Run: python assets/draw_dtensor.py
Expect: 06_dtensor.png, and a `check:` that its arrows are the changes that dtensor.py
    makes and counts.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import chapter_module, new_drawing, picture_parser, save_picture

Pair = tuple[float, float]
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00")  # of the tensor's upper rows and of its lower rows
INK, LINE = "#222222", "#999999"
RANKS, SIDE = 2, 1.15
# Where each placement stands: the lower left corner of rank 0's square.
PLACES = {
    "Shard(dim=1)": (0.1, 1.95),
    "Shard(dim=0)": (4.35, 1.95),
    "Replicate()": (8.95, 3.95),
    "Partial(sum)": (8.95, 0.15),
}
# From, to, what it takes, and what is done by it; then where its words stand.
ARROWS = [
    ("Shard(dim=0)", "Shard(dim=1)", "all-to-all", (3.53, 2.7)),
    ("Shard(dim=0)", "Replicate()", "all-gather\n(FSDP: weights)", (7.0, 4.65)),
    ("Replicate()", "Shard(dim=0)", "nothing\nis sent", (8.75, 3.0)),
    ("Partial(sum)", "Shard(dim=0)", "reduce-scatter\n(FSDP: gradients)", (6.8, 0.45)),
    ("Partial(sum)", "Replicate()", "all-reduce\n(DDP: gradients)", (11.15, 2.65)),
]
ENDS = [
    ((4.25, 2.5), (2.8, 2.5)),
    ((6.3, 3.65), (8.8, 4.75)),
    ((8.8, 4.3), (7.1, 3.0)),
    ((8.8, 0.75), (6.3, 1.8)),
    ((10.15, 2.1), (10.15, 3.75)),
]


def draw_box(axes: Axes, corner: Pair, sides: Pair, half: int, is_term: bool) -> None:
    """Draw rows of the upper half (0) or the lower half (1); pale for a term."""
    shade = COLOURS[half] + ("20" if is_term else "60")
    axes.add_patch(plt.Rectangle(corner, *sides, fc=shade, ec=COLOURS[half]))


def draw_placement(axes: Axes, name: str) -> None:
    """Draw what each rank holds of a tensor with this placement."""
    x, y = PLACES[name]
    axes.text(x, y + SIDE + 0.42, name, weight="bold", color=INK)
    for rank in range(RANKS):
        left = x + rank * (SIDE + 0.12)
        axes.add_patch(plt.Rectangle((left, y), SIDE, SIDE, fc="none", ec=LINE, ls=":"))
        axes.text(left, y + SIDE + 0.12, f"rank {rank}", color=INK)
        # Along dim 0 a rank holds one half; along dim 1 half the columns of both.
        wide, shift = (SIDE / 2, rank * SIDE / 2) if "1" in name else (SIDE, 0)
        for half in [rank] if "0" in name else range(RANKS):
            corner = (left + shift, y + (1 - half) * SIDE / 2)
            draw_box(axes, corner, (wide, SIDE / 2), half, name == "Partial(sum)")
        if name.startswith("Partial"):
            centre = (left + SIDE / 2, y + SIDE * 0.75)
            axes.text(*centre, f"term {rank}", ha="center", va="center", color=INK)


def draw_legend(axes: Axes) -> None:
    """Say what the two colours and their paler shades mean."""
    meanings = [
        (0, False, "the tensor's upper rows"),
        (1, False, "the tensor's lower rows"),
        (0, True, "pale: one term of a sum"),
    ]
    for number, (half, is_term, text) in enumerate(meanings):
        x, y = 0.1, 5.3 - 0.4 * number
        draw_box(axes, (x, y), (0.4, 0.22), half, is_term)
        axes.text(x + 0.55, y + 0.11, text, va="center", color=INK)


def main() -> None:
    """Compare the arrows with the lesson's changes, and draw."""
    out = picture_parser("Draw the placements of a DTensor.").parse_args().out
    lesson = chapter_module("06_fsdp/dtensor/dtensor.py")
    changes = {(repr(before), repr(after)) for before, after in lesson.CHANGES}
    if changes != {arrow[:2] for arrow in ARROWS}:
        raise RuntimeError(f"the picture would lie: the lesson has {changes}")
    figure, axes = new_drawing(4.6, (-0.1, 12.1), (0, 5.75))
    for name in PLACES:
        draw_placement(axes, name)
    draw_legend(axes)
    style = {"arrowstyle": "->", "color": INK, "lw": 1.4}
    for (*_, text, (x, y)), (start, end) in zip(ARROWS, ENDS, strict=True):
        axes.annotate("", xy=end, xytext=start, arrowprops=style)
        axes.text(x, y, text, ha="center", color=INK)
    save_picture(figure, out, "06_dtensor.png")
    print(f"check: {len(changes)} changes of placement; wrote 06_dtensor.png")


if __name__ == "__main__":
    main()
