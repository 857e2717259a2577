"""Draw one step of data-parallel training on two ranks, for the chapter's README.

Run: python 03_ddp_torchrun/draw_step.py
Needs: matplotlib.
Expect: assets/03_step.png, and a `check:` that the arithmetic in it is right.
Before: 03_ddp_torchrun/train.py
Next: 03_ddp_torchrun/README.md, which shows the picture.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch.utils.data import DistributedSampler

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_drawing, picture_parser, save_picture

# Two colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = ["#0072B2", "#E69F00"]
INK = "#222222"


def box(axes: Axes, x: float, y: float, text: str, colour: str, width: float) -> None:
    """Draw a box with its left edge at x and its middle at y."""
    axes.text(x + width / 2, y, text, ha="center", va="center", color=INK)
    axes.add_patch(
        plt.Rectangle((x, y - 0.36), width, 0.72, facecolor=colour + "30", ec=colour)
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from start to end."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})


def draw_step(
    dealt: list[list[int]], gradients: list[float], mean: float
) -> plt.Figure:
    """Lay out both ranks in a row each; the mean stands between them.

    Args:
        dealt: the samples that each rank gets.
        gradients: the gradient that each rank finds.
        mean: what both hold after the all-reduce.
    """
    figure, axes = new_drawing(3.4, (-0.1, 12.2), (-0.4, 3.6))
    headings = [
        "shuffled samples, dealt in turn",
        "same weights",
        "all-reduce",
        "same step",
    ]
    for x, heading in zip([1.65, 5.15, 8.1, 11.0], headings, strict=True):
        axes.text(x, 3.15, heading, ha="center", color=INK, weight="bold")
    for rank, y in enumerate([2.3, 0.3]):
        colour = COLOURS[rank]
        box(
            axes,
            0.1,
            y,
            f"rank {rank}: " + ", ".join(map(str, dealt[rank])),
            colour,
            3.1,
        )
        box(axes, 3.9, y, f"gradient {gradients[rank]:+.2f}", colour, 2.5)
        box(axes, 9.8, y, f"step with {mean:+.2f}", colour, 2.2)
        arrow(axes, (3.2, y), (3.9, y))
        arrow(axes, (6.4, y), (7.0, 1.3 + 0.25 * (1 - 2 * rank)))
        arrow(axes, (9.2, 1.3 + 0.25 * (1 - 2 * rank)), (9.8, y))
    box(axes, 7.0, 1.3, f"mean {mean:+.2f}", "#009E73", 2.2)
    return figure


def main() -> None:
    """Take a real step of a model with one weight, draw it, check it."""
    out = picture_parser("Draw the chapter's picture.").parse_args().out
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, generator=generator)
    weight = torch.zeros((), requires_grad=True)

    def gradient(samples: list[int]) -> float:
        loss = (weight * x[samples] - y[samples]).square().mean()
        return torch.autograd.grad(loss, weight)[0].item()

    deck: list[int] = list(range(8))
    dealt = [list(DistributedSampler(deck, 2, rank, seed=1)) for rank in range(2)]  # type: ignore[arg-type]
    gradients = [gradient(samples) for samples in dealt]
    mean = sum(gradients) / 2
    error = abs(mean - gradient(deck))
    if sorted(dealt[0] + dealt[1]) != deck or error > 1e-6:
        raise RuntimeError(f"the picture would lie: {dealt}, {error}")
    save_picture(draw_step(dealt, gradients, mean), out, "03_step.png")
    print(
        "check: the mean of both gradients is that of all 8 samples; wrote 03_step.png"
    )


if __name__ == "__main__":
    main()
