"""Draw what slow_link.py measured: the time of a micro-batch, by the rate of the link.

Run: python assets/draw_slow_link.py
Expect: 03_slow_link.png from 03_slow_link.json, which `slow_link.py --json` has
    written, and a `check:` of the drawn times against computation + bytes / rate.
"""

import statistics

from matplotlib.axes import Axes

from pictures import (
    chapter_module,
    new_picture,
    numbers_from,
    picture_parser,
    save_picture,
)

slow_link = chapter_module("03_ddp_torchrun/scaling/slow_link.py")
# Okabe and Ito's colours, which people with any colour vision tell apart.
LOOKS = {
    "float32": ("#D55E00", "o", "float32"),
    "bfloat16": ("#0072B2", "s", "bfloat16"),
    "accumulation": ("#009E73", "^", "float32, accumulated over 4 micro-batches"),
}


def draw_times(axes: Axes, numbers: dict) -> list[float]:
    """Plot measured times as marks, predictions as lines; return the errors."""
    of_ways = [of_way for of_rate in numbers.values() for of_way in of_rate.values()]
    compute = statistics.median(of_way[0] for of_way in of_ways)
    rates = [10 ** (exponent / 50) for exponent in range(70, 161)]  # in Mbit/s
    errors = []
    for way, (colour, marker, label) in LOOKS.items():
        micro_batches, _ = slow_link.WAYS[way]

        def predict(rate: str, nbytes: float, count: int = micro_batches) -> float:
            return 1e3 * (compute + slow_link.link_seconds(nbytes, rate) / count)

        expected = max(of_rate[way][3] for of_rate in numbers.values())
        line = [predict(f"{rate}mbit", expected) for rate in rates]
        axes.plot(rates, line, color=colour, lw=1.2)
        times = {rate: 1e3 * of_rate[way][1] for rate, of_rate in numbers.items()}
        at = [
            8e-6 / slow_link.link_seconds(1, rate) * slow_link.FRAME for rate in times
        ]
        axes.plot(at, list(times.values()), marker, color=colour, ms=7, label=label)
        errors += [abs(t / predict(rate, expected) - 1) for rate, t in times.items()]
    axes.axhline(1e3 * compute, ls="--", lw=1, color="#222222")
    axes.text(rates[-1], 930 * compute, "computation alone", ha="right", va="top")
    axes.set_ylim(700 * compute, None)
    return errors


def main() -> None:
    """Read the numbers, draw them, check them."""
    parser = picture_parser("Draw what slow_link.py measured.", "03_slow_link.json")
    args = parser.parse_args()
    figure, axes = new_picture(4.8)
    with numbers_from("slow_link.py"):
        errors = draw_times(axes, args.numbers)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([30, 100, 300, 1000], ["30", "100", "300", "1000"])
    axes.set_yticks([30, 100, 300, 600], ["30", "100", "300", "600"])
    axes.minorticks_off()
    axes.set_xlabel("rate of the link, Mbit/s")
    axes.set_ylabel("ms of a micro-batch")
    axes.set_title("measured (marks), computation + bytes / rate (lines)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    if max(errors) > slow_link.TIME_LIMIT:
        raise RuntimeError(f"a drawn time is {max(errors):.0%} away from its line")
    save_picture(figure, args.out, "03_slow_link.png")
    within = f"within {max(errors):.0%} of their lines"
    print(f"check: {len(errors)} times are {within}; wrote 03_slow_link.png")


if __name__ == "__main__":
    main()
