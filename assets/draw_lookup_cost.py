"""Draw what lookup_cost.py measured: bytes and time of a step, by batch size.

Run: python assets/draw_lookup_cost.py
Expect: 04_lookup_cost.png from 04_lookup_cost.json and, with --latency=5,
    04_lookup_cost_5ms.json, both as `lookup_cost.py --json` writes them.
"""

import matplotlib.pyplot as plt

from pictures import (
    ASSETS,
    new_picture,
    numbers_from,
    picture_parser,
    read_json,
    save_picture,
)

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
    figure, axes = new_picture(4.2, columns=3)
    impossible = 0
    sizes = [one["batch_size"] for one in near["sizes"]]
    for way, (colour, marker) in LOOKS.items():
        costs = [one["ways"][way] for one in near["sizes"]]
        wire = [cost["wire_bytes"] for cost in costs]
        tensors = [cost["tensor_bytes"] for cost in costs]
        impossible += sum(w < t for w, t in zip(wire, tensors, strict=True))
        if way not in ("one call", "ahead"):  # as many bytes as "sums"
            axes[0].plot(sizes, tensors, color=colour, lw=1.5)
            axes[0].plot(sizes, wire, marker, color=colour, ms=6)
    for panel, run in ((axes[1], near), (axes[2], far)):
        for way, (colour, marker) in LOOKS.items():
            ms = [one["ways"][way]["ms"] for one in run["sizes"]]
            panel.plot(sizes, ms, marker=marker, color=colour, ms=5, lw=1.5, label=way)
        alone = [one["alone_ms"] for one in run["sizes"]]
        panel.plot(sizes, alone, "--", color="#222222", lw=1.2, label="one process")
        panel.set_ylabel("ms in a step")
        panel.set_ylim(bottom=0)
    axes[0].set_title("tensors (lines), wire (marks)")
    axes[0].set_ylabel("bytes in a step")
    axes[0].set_yscale("log")
    axes[1].set_title("time, on one machine")
    axes[2].set_title(f"each answer held back {far['latency_ms']:g} ms")
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size_of_batch) for size_of_batch in sizes])
        panel.set_xlabel("bags in a batch")
        panel.grid(alpha=0.3)
    names = axes[2].get_legend_handles_labels()
    figure.legend(*names, loc="upper center", ncols=len(names[0]), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    return figure, impossible


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw what lookup_cost.py measured.", "04_lookup_cost.json")
    far = str(ASSETS / "04_lookup_cost_5ms.json")
    parser.add_argument("--far", type=read_json, default=far, help="and with a delay")
    args = parser.parse_args()
    with numbers_from("lookup_cost.py"):
        figure, impossible = draw_costs(args.numbers, args.far)
    if impossible:
        raise RuntimeError(f"{impossible} counts on the wire are less than the tensors")
    save_picture(figure, args.out, "04_lookup_cost.png")
    marks = len(LOOKS) * len(args.numbers["sizes"])
    print(f"check: {marks} counts hold their tensors; wrote 04_lookup_cost.png")


if __name__ == "__main__":
    main()
