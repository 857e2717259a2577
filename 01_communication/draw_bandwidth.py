"""Draw what bandwidth.py measured: bandwidth and time against the message's size.

Run: python 01_communication/draw_bandwidth.py
Needs: matplotlib, and the numbers of a run: bandwidth.py --json writes them.
Expect: assets/01_bandwidth.png, and a `check:` that its lines belong to its points.
Before: 01_communication/bandwidth.py
Next: 01_communication/README.md, which shows the picture.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from bandwidth import fit_line

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, numbers_from, picture_parser, save_picture

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
    styles = zip(COLOURS, MARKERS, strict=True)
    for (name, one), (colour, marker) in zip(
        measured["collectives"].items(), styles, strict=True
    ):
        y = torch.tensor(one["seconds"], dtype=torch.float64)
        look = {"marker": marker, "ms": 4, "color": colour, "label": name}
        left.plot(x, one["factor"] * x / y / 1e9, lw=1.5, **look)
        right.plot(x, y * 1e3, ls="", **look)
        line = one["latency"] + x / one["bandwidth"]
        right.plot(x, line * 1e3, lw=1, color=colour)
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
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw what bandwidth.py measured.", "01_bandwidth.json")
    args = parser.parse_args()
    with numbers_from("bandwidth.py"):
        lines = args.numbers["collectives"]
        figure = draw_lines(args.numbers)
    for name, one in lines.items():
        again = fit_line(args.numbers["bytes"], one["seconds"])
        if abs(again.bandwidth / one["bandwidth"] - 1) > 1e-6:
            raise RuntimeError(f"the line of {name} does not belong to its points")
    save_picture(figure, args.out, "01_bandwidth.png")
    print(f"check: {len(lines)} lines fit their points best; wrote 01_bandwidth.png")


if __name__ == "__main__":
    main()
