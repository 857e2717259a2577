"""Draw the loss curves that losses.py measured, and how far apart they are.

Run: python 05_deepspeed_zero/draw_losses.py
Needs: matplotlib, and assets/05_losses.json, which `losses.py --save` writes.
Expect: assets/05_losses.png, and a `check:` of the largest difference in the file.
Before: 05_deepspeed_zero/losses.py
Next: 05_deepspeed_zero/checkpoints.py
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, numbers_from, picture_parser, save_picture

# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = ["#222222", "#0072B2", "#E69F00", "#009E73", "#CC79A7"]


def differences(losses: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return how far every curve is from the first, at each step."""
    first = next(iter(losses.values()))
    return {
        name: [abs(one - other) for one, other in zip(curve, first, strict=True)]
        for name, curve in losses.items()
    }


def draw_curves(losses: dict[str, list[float]], ranks: int) -> plt.Figure:
    """Draw the curves on the left, and their distance from the first on the right."""
    figure, (left, right) = new_picture(4.8, columns=2)
    apart = differences(losses)
    for number, (name, curve) in enumerate(losses.items()):
        steps = range(1, len(curve) + 1)
        # Each line is thinner than the one below it, so that all can be seen.
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": "-" if number < len(COLOURS) else ":",
        }
        left.plot(steps, curve, linewidth=11 - number, label=name, **style)
        if number > 0:
            right.plot(steps, [max(x, 1e-8) for x in apart[name]], **style)
    left.set_title(f"{len(losses)} curves, {ranks} ranks")
    left.set_ylabel("mean loss over the ranks, nats per byte")
    for line in left.legend().get_lines():
        line.set_linewidth(2)  # and not as wide as the curve
    right.set_yscale("log")
    right.set_ylim(5e-9, 1e1)
    right.axhline(1.2e-7 * 4, color="#888888", linestyle="--", linewidth=1)
    right.text(1, 6e-7, "spacing of float32 near 4", fontsize=10, color="#555555")
    right.set_title("the same, as the distance from the first")
    right.set_ylabel("nats per byte; equal is drawn as 1e-8")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    return figure


def main() -> None:
    """Read the file, draw it, and say how far apart the curves are."""
    args = picture_parser("Draw the measured losses.", "05_losses.json").parse_args()
    with numbers_from("losses.py --save"):
        losses = args.numbers["losses"]
        largest = max(max(curve) for curve in differences(losses).values())
        figure = draw_curves(losses, args.numbers["ranks"])
    save_picture(figure, args.out, "05_losses.png")
    if not largest < 1e-5:
        raise RuntimeError(f"the curves are {largest} apart")
    told = f"{len(losses)} curves, at most {largest:.0e} apart"
    print(f"check: {told}; wrote 05_losses.png")


if __name__ == "__main__":
    main()
