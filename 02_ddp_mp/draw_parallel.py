"""Draw the two ways to share out training: by data, or by parts of the model.

Run: python 02_ddp_mp/draw_parallel.py
Needs: matplotlib.
Expect: assets/02_parallel.png, which the front page shows, and a `check:` that each
    sample meets each layer once in either way.
Before: 02_ddp_mp/one_process.py
Next: 02_ddp_mp/train.py
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00")  # one for each rank
INK = "#222222"
LAYERS, SAMPLES = 4, 4
# For each rank: the layers that it holds, and the samples that it sees.
WAYS = {
    "data parallel": [((0, 1, 2, 3), (0, 1)), ((0, 1, 2, 3), (2, 3))],
    "model parallel": [((0, 1), (0, 1, 2, 3)), ((2, 3), (0, 1, 2, 3))],
}


def layer_box(
    axes: Axes, x: float, y: float, width: float, text: str, colour: str
) -> None:
    """Draw one box with a text in it; (x, y) is its lower left corner."""
    axes.add_patch(
        plt.Rectangle((x, y), width, 0.62, facecolor=colour + "40", ec=colour)
    )
    axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", color=INK)


def travel(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw what travels between ranks, both ways."""
    style = {"arrowstyle": "<->", "color": INK, "lw": 1.4}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def draw_way(axes: Axes, name: str) -> None:
    """Draw the ranks of one way: layers above, the samples that go through below."""
    axes.set_xlim(0, 6.4)
    axes.set_ylim(-0.4, 4.9)
    axes.axis("off")
    axes.set_title(name, weight="bold")
    for rank, (layers, samples) in enumerate(WAYS[name]):
        left, colour = 0.2 + 3.7 * rank, COLOURS[rank]
        axes.text(left + 1.15, 4.5, f"rank {rank}", ha="center", color=INK)
        for layer in range(LAYERS):
            y = 3.6 - 0.8 * layer
            if layer in layers:
                layer_box(axes, left, y, 2.3, f"layer {layer}", colour)
            else:
                outline = plt.Rectangle((left, y), 2.3, 0.62, fc="none", ls=":")
                outline.set_edgecolor("#AAAAAA")
                axes.add_patch(outline)
        numbers = "samples " + ", ".join(map(str, samples))
        axes.text(left + 1.15, 0.7, numbers, ha="center", va="center", color=INK)
    if name == "data parallel":
        for layer in range(LAYERS):
            y = 3.91 - 0.8 * layer
            travel(axes, (2.55, y), (3.85, y))
        note = "gradients of all layers, once a step"
    else:
        travel(axes, (2.55, 3.11), (3.85, 2.31))
        note = "activations forward, their gradients back"
    axes.text(3.2, -0.2, note, ha="center", color=INK)


def check_ways() -> str:
    """Count how often each sample meets each layer.

    Raises:
        RuntimeError: one of them does so never, or twice.
    """
    meetings = 0
    for name, ranks in WAYS.items():
        for layer in range(LAYERS):
            for sample in range(SAMPLES):
                times = sum(layer in held and sample in seen for held, seen in ranks)
                if times != 1:
                    raise RuntimeError(f"{name}: {sample} meets {layer} {times} times")
                meetings += 1
    return f"{meetings} meetings of a sample and a layer, each on one rank"


def main() -> None:
    """Check what is to be drawn, and draw it."""
    out = picture_parser("Draw how training can be shared out.").parse_args().out
    result = check_ways()
    figure, both = new_picture(3.7, columns=2)
    for axes, name in zip(both, WAYS, strict=True):
        draw_way(axes, name)
    figure.tight_layout()
    save_picture(figure, out, "02_parallel.png")
    print(f"check: {result}; wrote 02_parallel.png")


if __name__ == "__main__":
    main()
