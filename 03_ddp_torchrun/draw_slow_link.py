"""Draw what slow_link.py measured: the time of a batch, by the rate of the link.

Run: python 03_ddp_torchrun/draw_slow_link.py
Needs: matplotlib, and assets/03_slow_link.json, as slow_link.py --json writes it.
Expect: assets/03_slow_link.png, and a `check:` of the drawn times against bytes / rate.
Before: 03_ddp_torchrun/slow_link.py
Next: 03_ddp_torchrun/MACHINES.md, which shows the picture.
"""

import statistics
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from link_rows import ON_THE_WIRE, TIME_LIMIT, WAYS, Row
from network import bits_per_second

sys.path.append(str(Path(__file__).resolve().parent.parent / "assets"))
from pictures import new_picture, numbers_from, picture_parser, save_picture

# Okabe and Ito's colours, which people with any colour vision tell apart.
LOOKS = {
    "float32": ("#D55E00", "o", "float32, one batch a step"),
    "bfloat16": ("#0072B2", "s", "bfloat16, one batch a step"),
    "4 batches": ("#009E73", "^", "float32, 4 batches a step"),
}


def draw_times(rows: list[Row]) -> plt.Figure:
    """Plot the measured times as marks, and bytes / rate + computing as lines."""
    figure, axes = new_picture(4.8)
    compute = statistics.median(row.compute_ms for row in rows)
    rates = [10 ** (exponent / 50) for exponent in range(70, 161)]  # in Mbit/s
    for way, (colour, marker, label) in LOOKS.items():
        mine = [row for row in rows if row.way == way and row.rate != "unlimited"]
        bits = mine[0].expected * ON_THE_WIRE * 8 / WAYS[way][0]
        line = [compute + bits / (rate * 1e3) for rate in rates]
        axes.plot(rates, line, color=colour, lw=1.2)
        at = [bits_per_second(row.rate) / 1e6 for row in mine]
        times = [row.measured_ms for row in mine]
        axes.plot(at, times, marker, color=colour, ms=7, label=label)
    axes.axhline(compute, ls="--", lw=1, color="#222222")
    axes.text(rates[-1], compute * 0.93, "computing alone", ha="right", va="top")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [30, 100, 300, 1000]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([30, 100, 300], ["30", "100", "300"])
    axes.set_xlabel("rate of the link, Mbit/s")
    axes.set_ylabel("ms for a batch")
    axes.set_ylim(compute * 0.7, None)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title("measured (marks), computing + bytes / rate (lines)")
    axes.legend()
    figure.tight_layout()
    return figure


def main() -> None:
    """Read the numbers, check them, draw them."""
    parser = picture_parser("Draw what slow_link.py measured.", "03_slow_link.json")
    args = parser.parse_args()
    with numbers_from("slow_link.py"):
        rows = [Row(**row) for row in args.numbers]
        off = [abs(row.measured_ms / row.predicted_ms - 1) for row in rows]
        figure = draw_times(rows)
    if max(off) > TIME_LIMIT:
        raise RuntimeError(f"a drawn time is {max(off):.0%} away from its line")
    save_picture(figure, args.out, "03_slow_link.png")
    print(
        f"check: {len(rows)} times are within {max(off):.0%} of their lines "
        f"(limit {TIME_LIMIT:.0%}); wrote 03_slow_link.png"
    )


if __name__ == "__main__":
    main()
