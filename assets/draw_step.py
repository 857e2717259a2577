"""Draw one step of data-parallel training on two ranks, for the chapter's README.

Run: python assets/draw_step.py
Expect: 03_step.png, and a `check:` that the arithmetic in it is right.
"""

from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch.utils.data import DistributedSampler

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
    shards: list[list[int]], gradients: list[float], mean: float
) -> plt.Figure:
    """Lay out both ranks in a row each; the mean stands between them.

    Args:
        shards: the samples that each rank gets.
        gradients: the local gradient that each rank computes.
        mean: what both hold after the all-reduce.
    """
    figure, axes = new_drawing(3.4, (-0.1, 12.2), (-0.4, 3.6))
    headings = [
        "the sampler assigns samples",
        "same weights,\nown gradient",
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
            f"rank {rank}: " + ", ".join(map(str, shards[rank])),
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

    samples: Any = list(range(8))
    shards = [list(DistributedSampler(samples, 2, rank, seed=1)) for rank in range(2)]
    gradients = [gradient(shard) for shard in shards]
    mean = sum(gradients) / 2
    error = abs(mean - gradient(samples))
    if sorted(shards[0] + shards[1]) != samples or error > 1e-6:
        raise RuntimeError(f"the picture would lie: {shards}, {error}")
    save_picture(draw_step(shards, gradients, mean), out, "03_step.png")
    print(
        "check: the mean of both gradients is that of all 8 samples; wrote 03_step.png"
    )


if __name__ == "__main__":
    main()
