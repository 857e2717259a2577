"""Draw what lookup_cost.py measured: bytes and time of a step, by batch size.

Run: python 04_rpc_parameter_server/draw_lookup_cost.py
Needs: matplotlib, and the numbers of two runs, as lookup_cost.py --json writes them:
    assets/04_lookup_cost.json and, with --latency=5, assets/04_lookup_cost_5ms.json.
Expect: assets/04_lookup_cost.png, and a `check:` of the drawn bytes.
Before: 04_rpc_parameter_server/lookup_cost.py
Next: 04_rpc_parameter_server/README.md, which shows the picture.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draw into a file; no window, no display needed

import matplotlib.pyplot as plt

ASSETS = Path(__file__).resolve().parent.parent / "assets"
# Okabe and Ito's colours, which people with any colour vision tell apart.
LOOKS = {
    "whole table": ("#D55E00", "s"),
    "rows": ("#E69F00", "^"),
    "sums": ("#0072B2", "o"),
    "one call": ("#009E73", "v"),
    "ahead": ("#CC79A7", "D"),
}


def draw_costs(near: dict, far: dict) -> tuple[plt.Figure, int]:
    """Plot the numbers of two runs, without and with a delay.

    Returns:
        The figure, and how many counts on the wire are below those in the tensors,
        which cannot be.
    """
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), dpi=100)
    figure.patch.set_facecolor("white")
    impossible = 0
    sizes = [one["batch_size"] for one in near["sizes"]]
    for way, (colour, marker) in LOOKS.items():
        costs = [one["ways"][way] for one in near["sizes"]]
        wire = [cost["wire_bytes"] for cost in costs]
        tensors = [cost["tensor_bytes"] for cost in costs]
        impossible += sum(w < t for w, t in zip(wire, tensors, strict=True))
        if way not in ("one call", "ahead"):  # as many bytes as "sums"
            axes[0].plot(sizes, tensors, color=colour, lw=1.5)
            axes[0].plot(sizes, wire, marker, color=colour, ms=6, label=way)
    for panel, run in ((axes[1], near), (axes[2], far)):
        for way, (colour, marker) in LOOKS.items():
            ms = [one["ways"][way]["ms"] for one in run["sizes"]]
            panel.plot(sizes, ms, marker=marker, color=colour, ms=5, lw=1.5, label=way)
        alone = [one["alone_ms"] for one in run["sizes"]]
        panel.plot(sizes, alone, "--", color="#222222", lw=1.2, label="one process")
        panel.set_ylabel("ms in a step")
        panel.set_ylim(bottom=0)
    axes[0].set_title("bytes: tensors (lines), on the wire (marks)", fontsize=10)
    axes[0].set_ylabel("bytes in a step")
    axes[0].set_yscale("log")
    axes[1].set_title("time, on one machine", fontsize=10)
    axes[2].set_title(f"each answer held back {far['latency_ms']:g} ms", fontsize=10)
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size_of_batch) for size_of_batch in sizes])
        panel.set_xlabel("bags in a batch")
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize=9)
    # Above the line of one process, below the others.
    axes[2].legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.03))
    figure.tight_layout()
    return figure, impossible


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = argparse.ArgumentParser(description="Draw what lookup_cost.py measured.")
    add = parser.add_argument
    add("--numbers", type=Path, default=ASSETS / "04_lookup_cost.json", help="JSON")
    add("--far", type=Path, default=ASSETS / "04_lookup_cost_5ms.json", help="JSON")
    add("--out", type=Path, default=ASSETS, help="folder to write to")
    args = parser.parse_args()
    if not args.out.is_dir():
        sys.exit(f"draw_lookup_cost.py: there is no folder {args.out}")
    for path in (args.numbers, args.far):
        if not path.is_file():
            sys.exit(f"draw_lookup_cost.py: there is no file {path}")
    near, far = (json.loads(path.read_text()) for path in (args.numbers, args.far))
    figure, impossible = draw_costs(near, far)
    if impossible:
        raise RuntimeError(f"{impossible} counts on the wire are less than the tensors")
    figure.savefig(args.out / "04_lookup_cost.png", metadata={})
    marks = len(LOOKS) * len(near["sizes"])
    print(f"check: {marks} counts hold their tensors; wrote 04_lookup_cost.png")


if __name__ == "__main__":
    main()
