"""Draw 8 ranks as a cube: three axes, the ranks of each group, and what they send.

Run: python assets/draw_09_mesh.py
Expect: 09_mesh.png, and a `check:` that its lines are the groups that mesh.py tells.
"""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from pictures import chapter_module, new_drawing, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart; what goes
# along a line of each colour.
AXES = {
    "tensor": ("#D55E00", "activations all-reduced,\n4 times in each block"),
    "pipeline": ("#009E73", "activations down,\ntheir gradients up"),
    "data": ("#0072B2", "gradients reduced,\nweights gathered"),
}
INK, HOST = "#222222", "#EFEFEF"
SIZES = {"data": 2, "pipeline": 2, "context": 1, "tensor": 2}
WIDE, HIGH = 2.35, 1.05
# How far apart neighbours on each axis stand, to the right and upwards.
STEPS = {"tensor": (2.85, 0.0), "pipeline": (0.0, -2.3), "data": (7.2, 0.0)}


def place(rank: int) -> dict[str, int]:
    """Return where a rank of 2 x 2 x 2 stands on each axis."""
    return {"data": rank // 4, "pipeline": rank // 2 % 2, "tensor": rank % 2}


def corner(rank: int) -> tuple[float, float]:
    """Return the middle of a rank's box."""
    at = place(rank)
    x = sum(at[axis] * STEPS[axis][0] for axis in STEPS)
    y = sum(at[axis] * STEPS[axis][1] for axis in STEPS)
    return x, y


def draw_rank(axes: Axes, rank: int) -> None:
    """Draw a box with what a rank has."""
    (x, y), at = corner(rank), place(rank)
    shape = FancyBboxPatch(
        (x - WIDE / 2, y - HIGH / 2),
        WIDE,
        HIGH,
        boxstyle="round,pad=0.02,rounding_size=0.12",
        facecolor="white",
        edgecolor=INK,
        linewidth=1.2,
        zorder=3,
    )
    axes.add_patch(shape)
    centred = {"ha": "center", "va": "center", "color": INK, "zorder": 4}
    axes.text(x, y + 0.27, f"rank {rank}", weight="bold", **centred)
    layers = ("blocks 0, 1", "blocks 2, 3")[at["pipeline"]]
    half = ("left", "right")[at["tensor"]]
    text = f"{layers}, {half} half\nsamples {'AB'[at['data']]}"
    axes.text(x, y - 0.2, text, fontsize=9, linespacing=1.15, **centred)


def draw_line(
    axes: Axes, axis: str, start: tuple[float, float], end: tuple[float, float], colour
) -> None:
    """Join two ranks; on the data axis around the boxes that stand between them."""
    bend = 0.0
    if axis == "data":
        is_above = start[1] == 0
        rim = (HIGH / 2 + 0.04) * (1 if is_above else -1)
        start, end = (start[0], start[1] + rim), (end[0], end[1] + rim)
        bend = -0.16 if is_above else 0.16
    style = {"connectionstyle": f"arc3,rad={bend}", "arrowstyle": "-", "lw": 3.2}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, zorder=1, **style))


def main() -> None:
    """Compare the lines with the lesson's groups, and draw."""
    out = picture_parser("Draw a mesh of 8 ranks.").parse_args().out
    members = chapter_module("09_one_mesh/groups_of_a_rank.py").members
    figure, axes = new_drawing(4.5, (-1.55, 11.6), (-4.75, 1.3))
    lines = set()
    for host in range(0, 8, 2):
        x, y = corner(host)
        left, low = x - WIDE / 2 - 0.2, y - HIGH / 2 - 0.2
        extent = (STEPS["tensor"][0] + WIDE + 0.4, HIGH + 0.4)
        axes.add_patch(plt.Rectangle((left, low), *extent, color=HOST, zorder=0))
    for rank in range(8):
        draw_rank(axes, rank)
        for axis, (colour, _) in AXES.items():
            other = max(members(rank, SIZES, axis))
            if other > rank:
                draw_line(axes, axis, corner(rank), corner(other), colour)
                lines.add((axis, rank, other))
    handles: list[Any] = [plt.Line2D([], [], color=AXES[a][0], lw=3.2) for a in AXES]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=HOST))
    labels = [f"{axis}: {AXES[axis][1]}" for axis in AXES]
    labels.append("one host, with the\nfastest links")
    look = {"ncols": 4, "frameon": False, "fontsize": 9, "columnspacing": 1.4}
    axes.legend(handles, labels, loc="lower center", **look)
    if len(lines) != 12:
        raise RuntimeError(f"the picture would lie: {lines}")
    save_picture(figure, out, "09_mesh.png")
    print(f"check: {len(lines)} lines between 8 ranks; wrote 09_mesh.png")


if __name__ == "__main__":
    main()
