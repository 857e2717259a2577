"""Draw the memory of rank 0 over one training step, in each ZeRO stage on two ranks.

Run: python assets/draw_memory_over_time.py
Expect: 05_memory_over_time.png from 05_memory_over_time.json, which
    `memory_per_rank.py --json` has written, and a `check:` of the highest points.
"""

from typing import Any

import matplotlib.pyplot as plt

from pictures import new_picture, numbers_from, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#222222", "#E69F00", "#009E73", "#0072B2")
STYLES = ("-", "-", (0, (5, 1.5)), "-")
PHASES = ("forward", "backward", "step")
INK = "#222222"
NOTES = {
    (0.43, 16.4): "activations",
    (1.46, 18.3): "flat buffer to send",
    (2.04, 16.5): "Adam's fp32\ngradients, then\nits temporaries",
    (1.28, 11.6): "copy of the shard's gradients",
}


def curve_of(result: dict[str, Any]) -> list[float]:
    """Return the bytes for each parameter, all phases one after another."""
    parts = [result["history"][phase] for phase in PHASES]
    return [count / result["parameters"] for part in parts for count in part]


def draw_curves(results: list[dict[str, Any]]) -> tuple[plt.Figure, list[float]]:
    """Draw a line for each stage; return the figure and each line's highest point."""
    figure, axes = new_picture(4.4)
    curves = [curve_of(result) for result in results]
    bins = len(curves[0]) // len(PHASES)
    for stage, (curve, colour) in enumerate(zip(curves, COLOURS, strict=True)):
        x = [place / bins for place in range(len(curve) + 1)]
        look = {"color": colour, "lw": 2, "ls": STYLES[stage]}
        axes.stairs(curve, x, baseline=None, label=f"stage {stage}", **look)
    for place, phase in enumerate(PHASES):
        middle = place + 0.5
        axes.text(middle, 22.1, phase, ha="center", weight="bold", color=INK)
        if place:
            axes.axvline(place, color="#BBBBBB", lw=1)
    for (x, y), words in NOTES.items():
        axes.text(x, y, words, fontsize=10, color=INK)
    axes.set(xlim=(0, len(PHASES)), ylim=(0, 23.5))
    axes.set_xticks([])
    axes.set_xlabel("operations of each part, from its first to its last")
    axes.set_ylabel("bytes for each parameter, on rank 0")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4, loc="lower center")
    figure.tight_layout()
    return figure, [max(curve) for curve in curves]


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw one step's memory.", "05_memory_over_time.json")
    args = parser.parse_args()
    with numbers_from("memory_per_rank.py --json"):
        results = args.numbers["2"]
        figure, highest = draw_curves(results)
        # The highest point of all is in the step, or where activations are most.
        wrong = [
            one["stage"]
            for one, most in zip(results, highest, strict=True)
            if most * one["parameters"] < one["peak"] - 1
        ]
    if wrong:
        raise RuntimeError(f"stages {wrong} are drawn below their peak")
    save_picture(figure, args.out, "05_memory_over_time.png")
    told = ", ".join(f"{one:.1f}" for one in highest)
    print(f"check: highest {told} bytes a parameter; wrote 05_memory_over_time.png")


if __name__ == "__main__":
    main()
