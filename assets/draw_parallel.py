"""Draw the two ways to split training: by the data, or by the parts of the model.

Run: python assets/draw_parallel.py
Expect: 02_parallel.png, and a `check:` that in either way each sample goes through each
    layer on exactly one rank.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from pictures import new_picture, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00")  # one for each rank
INK = "#222222"
LAYERS, SAMPLES = 4, 4
# For each rank: the layers in its memory, and the samples that go through them.
WAYS = {
    "data parallel": [((0, 1, 2, 3), (0, 1)), ((0, 1, 2, 3), (2, 3))],
    "model parallel, as a pipeline": [((0, 1), (0, 1, 2, 3)), ((2, 3), (0, 1, 2, 3))],
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
    """Draw what is communicated between ranks, both ways."""
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
                place = (left + 1.15, y + 0.31)
                axes.text(*place, "not here", ha="center", va="center", color="#777777")
        numbers = "samples " + ", ".join(map(str, samples))
        axes.text(left + 1.15, 0.7, numbers, ha="center", va="center", color=INK)
    if name == "data parallel":
        for layer in range(LAYERS):
            y = 3.91 - 0.8 * layer
            travel(axes, (2.55, y), (3.85, y))
        note = "all-reduce of all layers' gradients, once a step"
    else:
        travel(axes, (2.55, 3.11), (3.85, 2.31))
        note = "activations forward, their gradients backward"
    axes.text(3.2, -0.2, note, ha="center", color=INK)


def check_ways() -> str:
    """Count on how many ranks each sample goes through each layer.

    Raises RuntimeError if that is not exactly one.
    """
    pairs = 0
    for name, ranks in WAYS.items():
        for layer in range(LAYERS):
            for sample in range(SAMPLES):
                times = sum(layer in held and sample in seen for held, seen in ranks)
                if times != 1:
                    where = f"sample {sample}, layer {layer}"
                    raise RuntimeError(f"{name}: {where}: on {times} ranks")
                pairs += 1
    return f"{pairs} pairs of a sample and a layer, each on one rank"


def main() -> None:
    """Check what is to be drawn, and draw it."""
    out = picture_parser("Draw the two ways to split training.").parse_args().out
    result = check_ways()
    figure, both = new_picture(3.7, columns=2)
    for axes, name in zip(both, WAYS, strict=True):
        draw_way(axes, name)
    figure.tight_layout()
    save_picture(figure, out, "02_parallel.png")
    print(f"check: {result}; wrote 02_parallel.png")


if __name__ == "__main__":
    main()
