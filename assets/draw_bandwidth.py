"""Draw what bandwidth.py measured: bandwidth and time against the message's size.

Run: python assets/draw_bandwidth.py
Expect: 01_bandwidth.png from 01_bandwidth.json, written by `bandwidth.py --json`.
"""

import matplotlib.pyplot as plt
import torch

from pictures import (
    chapter_module,
    new_picture,
    numbers_from,
    picture_parser,
    save_picture,
)

fit_line = chapter_module("01_communication/bandwidth/timing.py").fit_line
# Okabe and Ito's colours, which people with any colour vision tell apart, and ink.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#222222"]
MARKERS = "os^vDx"


def readable(count: float) -> str:
    """Write a number of bytes in KB or MB of 2**10 and 2**20."""
    return f"{count / 2**20:.0f} MB" if count >= 2**20 else f"{count / 2**10:.0f} KB"


def draw_lines(measured: dict) -> plt.Figure:
    """Plot the numbers of a run; `measured` is what bandwidth.py writes as JSON."""
    figure, (left, right) = new_picture(4.4, columns=2)
    x = torch.tensor(measured["bytes"], dtype=torch.float64)
    columns = zip(measured["seconds"].items(), COLOURS, MARKERS, strict=True)
    for (name, seconds), colour, marker in columns:
        y = torch.tensor(seconds, dtype=torch.float64)
        look = {"marker": marker, "ms": 4, "color": colour, "label": name}
        left.plot(x, measured["factors"][name] * x / y / 1e9, lw=1.5, **look)
        right.plot(x, y * 1e3, ls="", **look)
        line = fit_line(measured["bytes"], seconds)
        right.plot(x, (line.latency + x / line.bandwidth) * 1e3, lw=1, color=colour)
    copy = measured["copy_bytes_per_second"] / 1e9
    left.axhline(copy, color="#222222", ls="--", lw=1)
    left.text(x[0], copy * 1.02, "a plain memory copy", fontsize=10, va="bottom")
    left.set_title("bus bandwidth")
    left.set_ylabel("GB/s")
    left.set_ylim(0, 1.15 * left.get_ylim()[1])
    right.set_title("time, and the line latency + size / bandwidth")
    right.set_ylabel("ms")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        marks = x.tolist()[::2]
        axes.set_xticks(marks, [readable(mark) for mark in marks])
        axes.set_xlabel(f"message size, {measured['ranks']} ranks")
        axes.grid(alpha=0.3)
    right.legend()
    figure.tight_layout()
    return figure


def main() -> None:
    """Read the numbers, draw them."""
    parser = picture_parser("Draw what bandwidth.py measured.", "01_bandwidth.json")
    args = parser.parse_args()
    with numbers_from("bandwidth.py"):
        figure = draw_lines(args.numbers)
    save_picture(figure, args.out, "01_bandwidth.png")
    columns, sizes = len(args.numbers["seconds"]), len(args.numbers["bytes"])
    print(f"check: {columns} collectives of {sizes} sizes; wrote 01_bandwidth.png")


if __name__ == "__main__":
    main()
