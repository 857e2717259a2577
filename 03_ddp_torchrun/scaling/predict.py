"""Predict steps from two numbers of a link; hold them against 3 and 4 ranks.

Run: python 03_ddp_torchrun/scaling/predict.py
Expect: for each link predictions with their uncertainty, beside what scaling.py has
    measured; the efficiency of 1024 ranks; a `check:` of the out-of-sample error.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cost_model import all_reduce_time, fit_link, latency_of_line, step_time
from ranks import fail, read_options

Cases = list[dict[str, Any]]  # of one link, as scaling.py writes them
FAR, FAR_WAYS = (8, 64, 1024), ("one bucket", "overlap")
LIMIT, DRAWS = 0.15, 300
MEASURED = Path(__file__).resolve().parents[2] / "assets" / "03_scaling.json"
# Not with overlap: for the model communication costs no computation, but it does.
CLAIMED = {"one bucket", "strong scaling", "small buckets"}


def predict(cases: Cases, rounds: Sequence[int]) -> dict[tuple[str, int], float]:
    """Fit the link to 2 ranks in some of the rounds; predict all cases' seconds.

    Computation is taken as it was measured, side by side on as many ranks. On FAR ranks
    it is that of one rank, as if each had a core, or a GPU, of its own.
    """

    def middle(times: Sequence[float]) -> float:
        return median(times[i] for i in rounds)

    pair = [case for case in cases if "nbytes" in case and case["ranks"] == 2]
    times = {case["nbytes"]: middle(case["measured"]) for case in pair}
    link, wrong = fit_link(times), latency_of_line(times)
    predicted = {("latency", 2): link.latency, ("bandwidth", 2): link.bandwidth}
    predicted["latency of the line", 2] = wrong
    for case in cases:
        name, ranks = case["way"], case["ranks"]
        if "nbytes" in case:
            predicted[name, ranks] = all_reduce_time(ranks, case["nbytes"], link)
            continue
        ready = [middle(times) for times in zip(*case["ready"], strict=True)]
        buckets = list(zip(ready, case["nbytes_of_buckets"], strict=True))
        compute, overlap = middle(case["compute"]), name == "overlap"
        predicted[name, ranks] = step_time(ranks, compute, buckets, link, overlap)
        for far in FAR if ranks == 1 and name in FAR_WAYS else ():
            step = step_time(far, compute, buckets, link, overlap)
            predicted[f"efficiency, {name}", far] = compute / step
    return predicted


def intervals(cases: Cases) -> dict[tuple[str, int], tuple[float, float]]:
    """Bootstrap: predict from drawn rounds, with replacement; 5th, 95th percentile."""
    draw, rounds = random.Random(0), range(len(cases[0]["measured"]))
    draws = [predict(cases, draw.choices(rounds, k=len(rounds))) for _ in range(DRAWS)]
    ordered = {key: sorted(one[key] for one in draws) for key in draws[0]}
    return {key: (of[DRAWS // 20], of[-DRAWS // 20]) for key, of in ordered.items()}


def show(link: str, cases: Cases) -> list[float]:
    """Print the predictions for one link; return the errors of what is claimed."""
    predicted = predict(cases, range(len(cases[0]["measured"])))
    ends, errors = intervals(cases), list[float]()

    def value(key: tuple[str, int], unit: float, digits: int) -> str:
        low, high = (f"{unit * end:.{digits}f}" for end in ends[key])
        return f"{unit * predicted[key]:.{digits}f} ({low} to {high})"

    latency, rate = value(("latency", 2), 1e3, 2), value(("bandwidth", 2), 8e-6, 1)
    print(f"{link}: latency {latency} ms, bandwidth {rate} Mbit/s")
    wrong = value(("latency of the line", 2), 1e3, 2)
    print(f"a line through the large messages says latency {wrong} ms")
    print("                  ranks  measured, ms  predicted             error")
    for case in cases:
        name, ranks = key = case["way"], case["ranks"]
        if ranks > 2:
            error = predicted[key] / (measured := median(case["measured"])) - 1
            errors += [error] if name in CLAIMED else []
            start = f"{name:16}{ranks:7}{1e3 * measured:14.1f}"
            print(f"{start}  {value(key, 1e3, 1):20}{error:+7.0%}")
    for way in FAR_WAYS:
        shares = ", ".join(value((f"efficiency, {way}", far), 100, 0) for far in FAR)
        print(f"{way}: efficiency {shares} % of {', '.join(map(str, FAR))} ranks")
    return errors


def main() -> None:
    """Predict for each link of a file; hold what is claimed against the limit."""
    options = read_options(json={"type": Path, "default": MEASURED, "help": "to read"})
    try:
        links = json.loads(options.json.read_text())
        errors = {link: show(link, cases) for link, cases in links.items()}
        worst = {link: max(of_link, key=abs) for link, of_link in errors.items()}
        largest, count = max(map(abs, worst.values())), sum(map(len, errors.values()))
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        fail(f"--json={options.json} is no file of 3 ranks by scaling.py: {error!r}")
    told = ", ".join(f"{link} {error:+.0%}" for link, error in worst.items())
    claim = f"{count} steps of more than 2 ranks, off by up to: {told}"
    if largest > LIMIT:
        sys.exit(f"check failed, not so: {claim} (limit {LIMIT:.0%})")
    print(f"check: {claim} (limit {LIMIT:.0%})")


if __name__ == "__main__":
    main()
