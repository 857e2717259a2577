"""Where is tensor parallelism as fast as data parallelism, and as one rank alone?

Run: python 07_tensor_parallel/when_it_pays/crossing.py
Expect: for each rate the batch at which both take equally long, and for each batch the
    rates from which two ranks are faster than one, predicted and measured; a `check:`
    of the first, at the slowest link, where bytes decide.
"""

import json
import sys
from pathlib import Path
from statistics import median

from ranks import fail, read_options
from step_cost import break_even_rate, crossing

MEASURED = Path(__file__).resolve().parents[2] / "assets" / "07_when_it_pays.json"
NO_FILE_OF_TIMES = (ArithmeticError, AttributeError, LookupError, StopIteration)
LIMIT = 0.25
Times = dict[str, dict[str, list[float]]]  # by rate and way: alone, in all, bytes


def computation(times: Times, way: str) -> float:
    """Return the median over all rates of what a way takes without its messages."""
    return median(of_rate[way][0] for of_rate in times.values())


def equal_batch(found: dict[str, Times], rate: str) -> tuple[float, float | None]:
    """Return the samples for which both ways take equally long: predicted, measured."""
    samples, times = next(iter(found.items()))
    (_, _, data), (_, _, tensor) = (times[rate][way] for way in ("data", "tensor"))
    difference = {
        float(samples): of[rate]["tensor"][1] - of[rate]["data"][1]
        for samples, of in found.items()
    }
    # The bytes of the one are the same for any batch, those of the other grow with it.
    return data / (tensor / float(samples)), crossing(difference)


def equal_rate(times: Times, way: str) -> tuple[float, float | None]:
    """Return the rate at which a way is as fast as one rank, predicted and measured."""
    saved = computation(times, "alone") - computation(times, way)
    nbytes = next(iter(times.values()))[way][2]
    # The time of a message is linear in seconds per bit, and not in bits per second.
    difference = {1 / float(r): of[way][1] - of["alone"][1] for r, of in times.items()}
    inverse = crossing(difference)
    return break_even_rate(nbytes, saved), 1 / inverse if inverse else None


def show_crossings(found: dict[str, Times]) -> float:
    """Print both kinds of crossing; return how far off the first batch is."""
    rates = sorted(next(iter(found.values())), key=float)
    errors = []
    for rate in rates:
        predicted, measured = equal_batch(found, rate)
        told = f"{measured:.1f}" if measured else "none"
        start = f"data = tensor at {float(rate) / 1e6:5.0f} Mbit/s"
        print(f"{start} | predicted {predicted:.1f} samples | measured {told}")
        errors.append((measured or 0.0) / predicted - 1)
    for samples in sorted(found, key=int):
        for way in ("data", "tensor"):
            predicted, measured = equal_rate(found[samples], way)
            told = f"{measured / 1e6:.0f}" if measured else "none"
            start = f"{way:6} = one rank, {samples:>2} samples"
            print(f"{start} | predicted {predicted / 1e6:.0f} Mbit/s | measured {told}")
    return errors[0]


def main() -> None:
    """Show all crossings of a file; hold the batch at the slowest link to the limit."""
    options = read_options(json={"type": Path, "default": MEASURED, "help": "to read"})
    try:
        error = show_crossings(json.loads(options.json.read_text()))
    except (*NO_FILE_OF_TIMES, OSError, TypeError, ValueError) as reason:
        fail(f"--json={options.json} is no file by step_time.py: {reason!r}")
    claim = f"at the slowest link the batch is off by {error:+.0%} (limit {LIMIT:.0%})"
    if abs(error) > LIMIT:
        sys.exit(f"check failed, not so: {claim}")
    print(f"check: {claim}")


if __name__ == "__main__":
    main()
