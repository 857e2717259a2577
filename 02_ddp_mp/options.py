"""What one can type after `one_process.py` and `train.py`, and what is refused."""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from terrain import load_terrain, sample_points


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def positive_int(text: str) -> int:
    """Parse a whole number of 1 or more, for argparse."""
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")


def positive_float(text: str) -> float:
    """Parse a finite number above 0, for argparse."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options of a training run on any number of processes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--max-epochs", type=positive_int, default=10, help="passes over the points")
    add("--batch-size", type=positive_int, default=32, help="points per process, step")
    add("--points", type=positive_int, default=4096, help="points in an epoch")
    add("--lr", type=positive_float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of the first weights and of the order")
    parser.error = refuse  # type: ignore[method-assign]
    return parser


def with_hyphens(words: Sequence[str]) -> list[str]:
    """Spell `--max_epochs` as `--max-epochs`, so that one may type either."""
    spelled = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        spelled.append(name + equals + value)
    return spelled


def refuse_impossible(args: argparse.Namespace, world_size: int) -> None:
    """Refuse numbers that are fine by themselves, but with which no epoch can be made.

    Args:
        args: what the options of `make_parser` were set to.
        world_size: how many processes take `args.batch_size` points each in a step.
    """
    if args.points < args.batch_size * world_size:
        refuse(
            f"{world_size} rank(s) x batch size {args.batch_size} is more than the "
            f"{args.points} points of an epoch"
        )
    if not 0 <= args.seed < 2**32:
        refuse(f"--seed must be 0 to {2**32 - 1}, not {args.seed}")
    try:
        sample_points(load_terrain(), args.points)
    except ValueError as error:
        refuse(f"--points {args.points}: {error}")
