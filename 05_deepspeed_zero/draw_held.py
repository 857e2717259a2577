"""Draw what held.py counted: the bytes that one rank holds, and the most in a step.

Run: python 05_deepspeed_zero/draw_held.py
Needs: matplotlib, and the numbers of runs on 1 to 4 ranks: held.py --json adds them.
Expect: assets/05_held.png, and a `check:` that the bars have the paper's height.
Before: 05_deepspeed_zero/held.py
Next: 05_deepspeed_zero/sent.py
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from paper import KINDS, PRECISIONS, bytes_held

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, numbers_from, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}
COLOURS |= {"buckets, gathered": "#CC79A7"}
TITLES = {"fp32": "float32", "bf16": "bfloat16 with float32 states"}


def bar_heights(result: dict[str, Any]) -> dict[str, float]:
    """Return the parts of one bar, in bytes for each parameter of the model."""
    held = result["held"]
    parts = {kind: held[kind] for kind in KINDS}
    parts["buckets, gathered"] = held["buckets"] + held["gathered"] + held["other"]
    return {kind: count / result["parameters"] for kind, count in parts.items()}


def draw_bars(numbers: dict[str, Any]) -> tuple[Any, int, float]:
    """Plot rank 0's counts; return the figure, the bars, the largest distance."""
    figure, axes = new_picture(4.6, columns=2, sharey=True)
    worlds = sorted(numbers, key=int)
    bars, worst = 0, 0.0
    for axis, precision in zip(axes, PRECISIONS, strict=True):
        for place, world in enumerate(worlds):
            chosen = [r for r in numbers[world][0] if r["precision"] == precision]
            for result in chosen:
                stage, n = result["stage"], result["parameters"]
                x, bottom = stage + (place - (len(worlds) - 1) / 2) * 0.2, 0.0
                for kind, height in bar_heights(result).items():
                    axis.bar(x, height, 0.18, bottom, color=COLOURS[kind])
                    bottom += height
                most = result["most"] / n - bottom
                axis.bar(x, most, 0.18, bottom, color="none", ec="#999999", lw=1)
                axis.text(x, bottom + most + 0.4, world, ha="center", fontsize=10)
                paper = sum(bytes_held(n, stage, int(world), precision).values()) / n
                axis.plot([x - 0.09, x + 0.09], [paper] * 2, color="#222222", lw=1.5)
                bars, worst = bars + 1, max(worst, abs(bottom / paper - 1))
        axis.set_title(TITLES[precision])
        axis.set_xticks(range(4), [f"stage {stage}" for stage in range(4)])
        axis.set_xlabel("above each bar: the number of ranks")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("bytes on one rank, for each parameter")
    handles: list[Any] = [
        plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS.values()
    ]
    handles.append(plt.Line2D([], [], color="#222222", lw=1.5))
    handles.append(plt.Rectangle((0, 0), 1, 1, fc="none", ec="#999999"))
    axes[0].set_ylim(0, 39)
    names = [*COLOURS, "formula", "for a moment"]
    axes[1].legend(handles, names, ncols=2, loc="upper right")
    figure.tight_layout()
    return figure, bars, worst


def main() -> None:
    """Read the numbers, draw them, check them."""
    args = picture_parser("Draw what held.py counted.", "05_held.json").parse_args()
    with numbers_from("held.py --json"):
        figure, bars, worst = draw_bars(args.numbers)
    if worst > 0.05:
        raise RuntimeError(f"a bar is {worst:.0%} away from the formula")
    save_picture(figure, args.out, "05_held.png")
    print(f"check: {bars} bars are at most {worst:.1%} above the formula; 05_held.png")


if __name__ == "__main__":
    main()
