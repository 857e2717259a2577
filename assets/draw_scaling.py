"""Draw what scaling.py measured, and what predict.py says of it and of 1024 ranks.

Run: python assets/draw_scaling.py
Expect: 03_scaling.png from 03_scaling.json, which `scaling.py --json` has written, and
    a `check:` of how far off the drawn predictions are.
"""

import statistics
from typing import Any

from matplotlib.axes import Axes

from pictures import (
    chapter_module,
    new_picture,
    numbers_from,
    picture_parser,
    save_picture,
)

predict: Any = chapter_module("03_ddp_torchrun/scaling/predict.py")
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73")
WAY = "one bucket"
LIMIT = 0.25  # how far off a drawn prediction may be
# The ranks whose efficiency is drawn.
FAR = [2**power for power in range(11)]


def draw_steps(axes: Axes, cases: list[dict[str, Any]], colour: str) -> float:
    """Plot steps against ranks; return the largest error of the predictions."""
    predicted = predict.predict(cases, range(len(cases[0]["measured"])))
    ends = predict.intervals(cases)
    steps = {case["ranks"]: case for case in cases if case["way"] == WAY}
    measured = [1e3 * statistics.median(step["measured"]) for step in steps.values()]
    axes.plot(list(steps), measured, "o", color=colour, ms=6)
    line = [1e3 * predicted[WAY, ranks] for ranks in steps]
    axes.plot(list(steps), line, color=colour, lw=1.2)
    low, high = zip(*(ends[WAY, ranks] for ranks in steps), strict=True)
    low, high = ([1e3 * value for value in values] for values in (low, high))
    axes.fill_between(list(steps), low, high, color=colour, alpha=0.25, lw=0)
    of_ranks = zip(steps, line, measured, strict=True)
    return max(abs(p / m - 1) for ranks, p, m in of_ranks if ranks > 2)


def draw_far(axes: Axes, cases: list[dict[str, Any]], colour: str, link: str) -> None:
    """Plot the efficiency of ranks that nobody has run, with its uncertainty."""
    predicted = predict.predict(cases, range(len(cases[0]["measured"])))
    ends, key = predict.intervals(cases), f"efficiency, {WAY}"
    shares = [100 * predicted[key, ranks] for ranks in FAR]
    axes.plot(FAR, shares, color=colour, lw=1.5, label=link)
    low, high = zip(*(ends[key, ranks] for ranks in FAR), strict=True)
    low, high = ([100 * value for value in values] for values in (low, high))
    axes.fill_between(FAR, low, high, color=colour, alpha=0.25, lw=0)


def main() -> None:
    """Read the numbers, draw them, check them."""
    parser = picture_parser("Draw what scaling.py measured.", "03_scaling.json")
    args = parser.parse_args()
    figure, (left, right) = new_picture(4.6, columns=2)
    predict.FAR = FAR
    with numbers_from("scaling.py"):
        errors, samples = [], 0
        for (link, cases), colour in zip(args.numbers.items(), COLOURS, strict=False):
            errors.append(draw_steps(left, cases, colour))
            draw_far(right, cases, colour, link)
            samples = next(c.get("samples", 0) for c in cases if c["way"] == WAY)
    left.plot([], [], "o", color="#555555", label="measured")
    left.plot([], [], color="#555555", label="predicted from 2 ranks")
    left.set(xlabel="ranks on 2 cores", ylabel="ms of a step", xticks=[1, 2, 3, 4])
    left.set_ylim(0, None)
    left.set_title(f"a step with {samples} samples a rank, {WAY}")
    right.set_xscale("log", base=2)
    right.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1024"])
    right.set(xlabel="ranks, each with a core of its own", ylim=(0, 105))
    right.set_ylabel("efficiency, %")
    right.set_title("predicted, and run by nobody")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    if not max(errors) <= LIMIT:
        raise RuntimeError(f"a drawn prediction is {max(errors):.0%} off")
    save_picture(figure, args.out, "03_scaling.png")
    told = f"{len(errors)} links, steps within {max(errors):.0%} (limit {LIMIT:.0%})"
    print(f"check: {told}; wrote 03_scaling.png")


if __name__ == "__main__":
    main()
