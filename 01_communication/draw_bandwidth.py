"""Draw what bandwidth.py measured: bandwidth and time against the message's size.

Run: python 01_communication/draw_bandwidth.py
Needs: matplotlib, and the numbers of a run: bandwidth.py --json writes them.
Expect: assets/01_bandwidth.png, and a `check:` that its lines belong to its points.
Before: 01_communication/bandwidth.py
Next: 01_communication/README.md, which shows the picture.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draw into a file; no window, no display needed

import matplotlib.pyplot as plt
import torch

from bandwidth import fit_line

ASSETS = Path(__file__).resolve().parent.parent / "assets"
# Okabe and Ito's colours, which people with any colour vision tell apart, and ink.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#222222"]
MARKERS = "os^vDx"


def readable(count: float) -> str:
    """Write a number of bytes in KB or MB of 2**10 and 2**20."""
    return f"{count / 2**20:.0f} MB" if count >= 2**20 else f"{count / 2**10:.0f} KB"


def draw_lines(measured: dict) -> plt.Figure:
    """Plot the numbers of a run; `measured` is what bandwidth.py writes as JSON."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), dpi=110)
    figure.patch.set_facecolor("white")
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
    left.text(x[0], copy * 1.02, "a plain memory copy", fontsize=9, va="bottom")
    left.set_title("bus bandwidth", fontsize=11)
    left.set_ylabel("GB/s")
    left.set_ylim(0, 1.15 * left.get_ylim()[1])
    right.set_title("time, and the line latency + size / bandwidth", fontsize=11)
    right.set_ylabel("ms")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        marks = x.tolist()[::2]
        axes.set_xticks(marks, [readable(mark) for mark in marks])
        axes.set_xlabel(f"message size, {measured['ranks']} ranks")
        axes.grid(alpha=0.3)
    right.legend(fontsize=9)
    figure.tight_layout()
    return figure


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = argparse.ArgumentParser(description="Draw what bandwidth.py measured.")
    add = parser.add_argument
    add(
        "--numbers", type=Path, default=ASSETS / "01_bandwidth.json", help="a JSON file"
    )
    add("--out", type=Path, default=ASSETS, help="folder to write to")
    args = parser.parse_args()
    if not args.out.is_dir():
        sys.exit(f"draw_bandwidth.py: there is no folder {args.out}")
    if not args.numbers.is_file():
        sys.exit(f"draw_bandwidth.py: there is no file {args.numbers}")
    measured = json.loads(args.numbers.read_text())
    lines = measured["collectives"]
    for name, one in lines.items():
        again = fit_line(measured["bytes"], one["seconds"])
        if abs(again.bandwidth / one["bandwidth"] - 1) > 1e-6:
            raise RuntimeError(f"the line of {name} does not belong to its points")
    draw_lines(measured).savefig(args.out / "01_bandwidth.png", metadata={})
    print(f"check: {len(lines)} lines fit their points best; wrote 01_bandwidth.png")


if __name__ == "__main__":
    main()
