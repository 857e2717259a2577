"""Draw what a rank keeps at each stage of ZeRO, for the chapter's README.

Run: python 05_deepspeed_zero/draw_stages.py
Needs: matplotlib.
Expect: assets/05_stages.png, and a `check:` that the ranks together keep everything.
Before: 05_deepspeed_zero/README.md
Next: 05_deepspeed_zero/stage_0.py
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draw into a file; no window, no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"weights": "#0072B2", "gradients": "#E69F00", "Adam's states": "#009E73"}
# Float32 values for each parameter; Adam keeps two running means.
VALUES = {"weights": 1, "gradients": 1, "Adam's states": 2}
# From which stage on each kind is divided among the ranks.
DIVIDED_FROM = {"weights": 3, "gradients": 2, "Adam's states": 1}
RANKS = 2
INK = "#222222"
PICTURE = Path(__file__).resolve().parent.parent / "assets" / "05_stages.png"


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
    figure, axes = plt.subplots(figsize=(10, 3.8), dpi=110)
    figure.patch.set_facecolor("white")
    axes.set_xlim(0, 12.6)
    axes.set_ylim(-0.9, 4.3)
    axes.axis("off")
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
    parser = argparse.ArgumentParser(description="Draw the chapter's picture.")
    parser.add_argument("--out", type=Path, default=PICTURE, help="PNG file to write")
    out = parser.parse_args().out
    if not out.parent.is_dir():
        sys.exit(f"draw_stages.py: there is no folder {out.parent}")
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
    draw_stages().savefig(out, bbox_inches="tight", metadata={})
    print(
        f"check: {', '.join(bytes_kept)} bytes a parameter on each of {RANKS} ranks in "
        f"stages 0 to 3; wrote {out.name}"
    )


if __name__ == "__main__":
    main()
