"""Draw what step_time.py measured: a step of three ways, by the rate of the link.

Run: python assets/draw_when_it_pays.py
Expect: 07_when_it_pays.png from 07_when_it_pays.json, which `step_time.py --json` has
    written, and a `check:` of how many times were drawn.
"""

from typing import Any

from pictures import (
    chapter_module,
    new_picture,
    numbers_from,
    picture_parser,
    save_picture,
)

crossing = chapter_module("07_tensor_parallel/when_it_pays/crossing.py")
step_cost = chapter_module("07_tensor_parallel/when_it_pays/step_cost.py")
# Okabe and Ito's colours, which people with any colour vision tell apart.
LOOKS = {
    "alone": ("#222222", "D", "one rank"),
    "data": ("#0072B2", "s", "two, data-parallel"),
    "tensor": ("#D55E00", "o", "two, tensor-parallel"),
}


def draw_times(axes: Any, samples: str, times: dict) -> int:
    """Plot measured times as marks, predictions as lines; count the marks."""
    rates = [10 ** (exponent / 20) for exponent in range(157, 195)]  # in bits a second
    for way, (colour, marker, label) in LOOKS.items():
        compute = crossing.computation(times, way)
        nbytes = next(iter(times.values()))[way][2]
        line = [compute + step_cost.seconds_on_link(nbytes, rate) for rate in rates]
        axes.plot([r / 1e6 for r in rates], line, color=colour, lw=1.2)
        at = [float(rate) / 1e6 for rate in times]
        measured = [of_rate[way][1] for of_rate in times.values()]
        axes.plot(at, measured, marker, color=colour, ms=7, label=label)
    axes.set(xscale="log", yscale="log", xlabel="rate of the link, Mbit/s")
    axes.set_xticks([100, 300, 1000, 3000], ["100", "300", "1000", "3000"])
    axes.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.set_title(f"{samples} samples, {int(samples) * 128:,} tokens")
    axes.grid(alpha=0.3)
    return len(times) * len(LOOKS)


def main() -> None:
    """Read the numbers, draw them, count them."""
    parser = picture_parser("Draw what step_time.py measured.", "07_when_it_pays.json")
    args = parser.parse_args()
    figure, both = new_picture(4.6, columns=2, sharey=True)
    with numbers_from("step_time.py"):
        few, many = sorted(args.numbers, key=int)
        drawn = draw_times(both[0], few, args.numbers[few])
        drawn += draw_times(both[1], many, args.numbers[many])
    both[0].set_ylabel("seconds of a step")
    both[1].legend()
    figure.suptitle("measured (marks), computation + bytes / rate (lines)", fontsize=12)
    figure.tight_layout()
    save_picture(figure, args.out, "07_when_it_pays.png")
    print(f"check: {drawn} times of 3 ways; wrote 07_when_it_pays.png")


if __name__ == "__main__":
    main()
