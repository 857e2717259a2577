"""Draw what will_it_fit.py works out: bytes on one rank, for three models.

Run: python 05_deepspeed_zero/draw_will_it_fit.py
Needs: matplotlib. Nothing is measured here: the lines are the formula that held.py
    compares with what it counts.
Expect: assets/05_will_it_fit.png, and a `check:` that all lines begin at one point.
Before: 05_deepspeed_zero/will_it_fit.py
Next: 05_deepspeed_zero/README.md, which shows the picture.
"""

import sys
from pathlib import Path
from typing import Any

from paper import bytes_held
from will_it_fit import SHAPES, WORLDS, named_shape, tensor_sizes_of

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ["#222222", "#E69F00", "#009E73", "#0072B2"]
MARKERS = "so^D"
MEMORY = 80  # GB, of a common accelerator


def draw_shapes() -> tuple[Any, list[list[float]]]:
    """Plot all shapes; return the figure and for each shape its lines' first points."""
    figure, axes = new_picture(4.2, columns=3, sharey=True)
    starts = []
    for axis, (name, shape) in zip(axes, SHAPES.items(), strict=True):
        total = sum(tensor_sizes_of(named_shape(name)))
        starts.append([])
        for stage, (colour, marker) in enumerate(zip(COLOURS, MARKERS, strict=True)):
            held = [
                sum(bytes_held(total, stage, world, "bf16").values()) / 1e9
                for world in WORLDS
            ]
            starts[-1].append(held[0])
            axis.plot(WORLDS, held, color=colour, marker=marker, ms=4, lw=1.5)
            axis.text(1300, held[-1], f"stage {stage}", color=colour, va="center")
        axis.axhline(MEMORY, color="#CC79A7", ls="--", lw=1.5)
        axis.set_title(f"{shape[0]}, {total / 1e9:.2f} billion parameters", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlim(0.8, 16_000)
        axis.set_xticks([1, 4, 16, 64, 256, 1024], [1, 4, 16, 64, 256, 1024])
        marks = [0.01, 0.1, 1, 10, 100, 1000]
        axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB on one rank, before activations")
    axes[0].text(1, MEMORY * 1.12, f"{MEMORY} GB", color="#A0527D")
    figure.tight_layout()
    return figure, starts


def main() -> None:
    """Draw the lines and check where they begin."""
    out = picture_parser("Draw what will_it_fit.py works out.").parse_args().out
    figure, starts = draw_shapes()
    # On one rank nothing is divided, whatever the stage.
    apart = max(abs(one / first[0] - 1) for first in starts for one in first)
    if apart > 1e-9:
        raise RuntimeError(f"the lines begin {apart:.0%} apart")
    save_picture(figure, out, "05_will_it_fit.png")
    lines = sum(map(len, starts))
    print(f"check: {lines} lines, on one rank all stages equal; 05_will_it_fit.png")


if __name__ == "__main__":
    main()
