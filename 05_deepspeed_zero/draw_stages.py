"""Draw what a rank keeps at each stage of ZeRO, for the chapter's README.

Run: python 05_deepspeed_zero/draw_stages.py
Needs: matplotlib.
Expect: assets/05_stages.png, and a `check:` that the ranks together keep everything.
Before: 05_deepspeed_zero/README.md
Next: 05_deepspeed_zero/stage_0.py
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_drawing, picture_parser, save_picture

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"weights": "#0072B2", "gradients": "#E69F00", "Adam's states": "#009E73"}
# Float32 values for each parameter; Adam keeps two running means.
VALUES = {"weights": 1, "gradients": 1, "Adam's states": 2}
# From which stage on each kind is divided among the ranks.
DIVIDED_FROM = {"weights": 3, "gradients": 2, "Adam's states": 1}
RANKS = 2
INK = "#222222"


def kept(kind: str, stage: int, rank: int) -> tuple[float, float]:
    """Return the part of a kind that a rank keeps: its begin and end, from 0 to 1."""
    if stage < DIVIDED_FROM[kind]:
        return 0.0, 1.0
    return rank / RANKS, (rank + 1) / RANKS


def draw_kept(axes: Axes, left: float, y: float, stage: int, rank: int) -> None:
    """Draw one rank's three bars side by side; what it does not keep is an outline."""
    for kind, colour in COLOURS.items():
        width = VALUES[kind] * 1.1
        begin, end = kept(kind, stage, rank)
        axes.add_patch(
            plt.Rectangle(
                (left, y - 0.3), width, 0.6, facecolor="none", ec="#AAAAAA", ls=":"
            )
        )
        axes.add_patch(
            plt.Rectangle(
                (left + begin * width, y - 0.3),
                (end - begin) * width,
                0.6,
                facecolor=colour + "50",
                ec=colour,
            )
        )
        left += width + 0.12


def draw_stages() -> plt.Figure:
    """Lay out a row for each stage and a column for each rank."""
    figure, axes = new_drawing(3.8, (-0.1, 11.9), (-0.9, 4.4))
    for rank in range(RANKS):
        left = 1.4 + 5.6 * rank
        axes.text(
            left + 2.3, 3.95, f"rank {rank}", ha="center", weight="bold", color=INK
        )
        for stage in range(4):
            draw_kept(axes, left, 3.3 - stage, stage, rank)
    for stage in range(4):
        text = f"stage {stage}"
        axes.text(0, 3.3 - stage, text, va="center", weight="bold", color=INK)
    left = 1.4
    for kind, colour in COLOURS.items():
        axes.add_patch(
            plt.Rectangle((left, -0.7), 0.3, 0.3, facecolor=colour + "50", ec=colour)
        )
        axes.text(left + 0.4, -0.55, kind, va="center", color=INK)
        left += 2.3
    axes.add_patch(
        plt.Rectangle((left, -0.7), 0.3, 0.3, facecolor="none", ec="#AAAAAA", ls=":")
    )
    axes.text(left + 0.4, -0.55, "on the other rank", va="center", color=INK)
    return figure


def main() -> None:
    """Draw, and check that no part is lost and none is kept twice where divided."""
    out = picture_parser("Draw the chapter's picture.").parse_args().out
    bytes_kept = []
    for stage in range(4):
        total = 0.0
        for kind, values in VALUES.items():
            parts = [kept(kind, stage, rank) for rank in range(RANKS)]
            copies = sum(end - begin for begin, end in parts)
            if copies != (RANKS if stage < DIVIDED_FROM[kind] else 1):
                raise RuntimeError(f"the picture would lie: {kind}, stage {stage}")
            total += 4 * values * copies / RANKS
        bytes_kept.append(f"{total:g}")
    save_picture(draw_stages(), out, "05_stages.png")
    told = f"{', '.join(bytes_kept)} bytes a parameter on {RANKS} ranks"
    print(f"check: {told}, stages 0 to 3; wrote 05_stages.png")


if __name__ == "__main__":
    main()
