"""Draw what each of two ranks keeps in stages 0 to 3 of ZeRO, in mixed precision.

Run: python assets/draw_stages.py
Expect: 05_stages.png, and a `check:` that the bars are as long as the paper's formula
    says.
"""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import chapter_module, new_drawing, picture_parser, save_picture

paper = chapter_module("05_deepspeed_zero/memory/paper.py")
# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}
NAMES = ("weights, bf16", "gradients, bf16", "optimizer state, fp32")
RANKS, STAGES = 2, range(4)
INK, LINE = "#222222", "#999999"
INCH = 0.27  # as wide as a byte


def kept(kind: str, stage: int, rank: int) -> tuple[float, float]:
    """Return the part of a kind that a rank keeps: its begin and end, in bytes."""
    whole = paper.paper_bytes(1, 0, RANKS, "bf16")[kind]
    mine = paper.paper_bytes(1, stage, RANKS, "bf16")[kind]
    begin = 0.0 if mine == whole else rank * mine
    return begin, begin + mine


def look_of(colour: str) -> dict[str, Any]:
    """Return how a bar looks; one of no colour is what the other rank keeps."""
    if colour:
        return {"facecolor": colour + "50", "ec": colour}
    return {"facecolor": "none", "ec": LINE, "ls": ":"}


def draw_rank(axes: Axes, left: float, y: float, stage: int, rank: int) -> float:
    """Draw the three kinds end to end, and their sum; return it, in bytes."""
    total = 0.0
    for kind, colour in COLOURS.items():
        whole = paper.paper_bytes(1, 0, RANKS, "bf16")[kind] * INCH
        begin, end = kept(kind, stage, rank)
        mine = (left + begin * INCH, (end - begin) * INCH)
        for (x, width), look in {(left, whole): "", mine: colour}.items():
            axes.add_patch(plt.Rectangle((x, y - 0.3), width, 0.6, **look_of(look)))
        left, total = left + whole + 0.06, total + end - begin
    axes.text(left + 0.08, y, f"{total:g}", va="center", weight="bold", color=INK)
    return total


def draw_stages() -> tuple[plt.Figure, list[float]]:
    """Lay out a row for each stage and a column for each rank; return all sums."""
    figure, axes = new_drawing(3.6, (-0.1, 12.1), (-0.95, 4.3))
    sums = []
    for rank in range(RANKS):
        left = 1.2 + 5.6 * rank
        head = f"rank {rank}: bytes for each parameter"
        axes.text(left, 3.95, head, weight="bold", color=INK)
        sums += [draw_rank(axes, left, 3.3 - s, s, rank) for s in STAGES]
    for stage in STAGES:
        text = f"stage {stage}"
        axes.text(0, 3.3 - stage, text, va="center", weight="bold", color=INK)
    for left, name, colour in zip(
        (1.2, 3.6, 6.2, 9.4),
        (*NAMES, "on the other rank"),
        (*COLOURS.values(), ""),
        strict=True,
    ):
        axes.text(left + 0.45, -0.6, name, va="center", color=INK)
        axes.add_patch(plt.Rectangle((left, -0.75), 0.32, 0.3, **look_of(colour)))
    return figure, sums


def main() -> None:
    """Draw, and compare with 2 + 2 + 12 bytes, divided as the paper says."""
    out = picture_parser("Draw what each stage keeps.").parse_args().out
    figure, sums = draw_stages()
    expected = [16, 2 + 2 + 12 / RANKS, 2 + 14 / RANKS, 16 / RANKS]
    if sums != expected * RANKS:
        raise RuntimeError(f"the picture would lie: {sums}")
    save_picture(figure, out, "05_stages.png")
    told = ", ".join(f"{one:g}" for one in expected)
    print(f"check: {told} bytes a parameter on {RANKS} ranks; wrote 05_stages.png")


if __name__ == "__main__":
    main()
