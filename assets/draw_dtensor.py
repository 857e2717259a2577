"""Draw the placements of a DTensor on two ranks, and the collectives between them.

Run: python assets/draw_dtensor.py
Expect: 06_dtensor.png, and a `check:` that its arrows are the changes that dtensor.py
    makes and counts.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import chapter_module, new_drawing, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00")  # one for each half of the tensor
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


def draw_half(axes: Axes, x: float, y: float, half: int, dim: int, alpha: str) -> None:
    """Draw the upper or lower half of a square, or along dim 1 its left or right."""
    wide, high = (SIDE, SIDE / 2) if dim == 0 else (SIDE / 2, SIDE)
    left = x + half * wide * dim
    low = y + (0 if dim else (1 - half) * high)
    colour = COLOURS[half]
    axes.add_patch(plt.Rectangle((left, low), wide, high, fc=colour + alpha, ec=colour))


def draw_placement(axes: Axes, name: str) -> None:
    """Draw what each rank holds of a tensor with this placement."""
    x, y = PLACES[name]
    axes.text(x, y + SIDE + 0.42, name, weight="bold", color=INK)
    for rank in range(RANKS):
        left = x + rank * (SIDE + 0.12)
        axes.add_patch(plt.Rectangle((left, y), SIDE, SIDE, fc="none", ec=LINE, ls=":"))
        axes.text(left, y + SIDE + 0.12, f"rank {rank}", color=INK)
        for half in range(RANKS):
            if name.startswith("Shard") and half == rank:
                draw_half(axes, left, y, half, "01".index(name[-2]), "60")
            elif not name.startswith("Shard"):
                draw_half(axes, left, y, half, 0, "60" if name[0] == "R" else "20")
        if name.startswith("Partial"):
            centre = (left + SIDE / 2, y + SIDE * 0.75)
            axes.text(*centre, f"term {rank}", ha="center", va="center", color=INK)


def main() -> None:
    """Compare the arrows with the lesson's changes, and draw."""
    out = picture_parser("Draw the placements of a DTensor.").parse_args().out
    lesson = chapter_module("06_fsdp/dtensor.py")
    changes = {(repr(before), repr(after)) for before, after in lesson.CHANGES}
    if changes != {arrow[:2] for arrow in ARROWS}:
        raise RuntimeError(f"the picture would lie: the lesson has {changes}")
    figure, axes = new_drawing(4.6, (-0.1, 12.1), (0, 5.75))
    for name in PLACES:
        draw_placement(axes, name)
    style = {"arrowstyle": "->", "color": INK, "lw": 1.4}
    for (*_, text, (x, y)), (start, end) in zip(ARROWS, ENDS, strict=True):
        axes.annotate("", xy=end, xytext=start, arrowprops=style)
        axes.text(x, y, text, ha="center", color=INK)
    save_picture(figure, out, "06_dtensor.png")
    print(f"check: {len(changes)} changes of placement; wrote 06_dtensor.png")


if __name__ == "__main__":
    main()
