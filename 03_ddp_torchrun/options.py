"""What a user can type after `train.py`, and what they are told if it cannot work."""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch


def fail(message: str) -> NoReturn:
    """Say in one line, once per machine, what is wrong; exit with status 2."""
    # Rank 0 of a machine speaks. Its exit makes the launcher stop the other ranks while
    # they sleep; only a rank whose trouble is its own lives on to say so.
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


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, not with its whole usage text."""

    def error(self, message: str) -> NoReturn:
        """Report through `fail`, so that several ranks say it once."""
        fail(f"{message}; see --help")


def parse_args(
    words: Sequence[str] | None = None,
    add_more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Read the command line; `--max_epochs` and `--max-epochs` are the same option.

    Args:
        words: what was typed; None for the words after the script's name.
        add_more: adds options that only one script has.
    """
    parser = OneLineParser(
        description="Train a small GPT on several ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=positive_int, default=2, help="transformer blocks")
    add("--width", type=positive_int, default=128, help="size of a token's vector")
    add("--heads", type=positive_int, default=4, help="attention heads; divides width")
    add("--block-size", type=positive_int, default=128, help="bytes in a sample")
    add("--batch-size", type=positive_int, default=32, help="samples per rank")
    add("--grad-accum-steps", type=positive_int, default=1, help="batches per step")
    add("--samples", type=positive_int, default=4096, help="samples in an epoch")
    add("--max-epochs", type=positive_int, default=4, help="passes over the samples")
    add("--max-steps", type=positive_int, default=None, help="stop after so many steps")
    add("--lr", type=positive_float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="of the weights, the order, the sample")
    add("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--text", type=Path, default=None, help="a file or folder of your own")
    add("--snapshot", type=Path, default=None, help="file for the trained weights")
    # Only torch.distributed.launch passes this. The environment's LOCAL_RANK says the
    # same, under every launcher, so the script accepts the option and reads the other.
    add("--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    if add_more:
        add_more(parser)
    hyphenated = []
    for word in sys.argv[1:] if words is None else words:
        name, equals, value = word.partition("=")
        is_option = name.startswith("--")
        hyphenated.append(
            (name.replace("_", "-") if is_option else name) + equals + value
        )
    return parser.parse_args(hyphenated)


def try_out(args: argparse.Namespace, device: torch.device) -> None:
    """Use --amp and --compile on four numbers: a failure here is one clear line."""
    four_ones = torch.ones(2, 2, device=device)
    option = "--amp"
    try:
        if args.amp:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                torch.mm(four_ones, four_ones)
        option = "--compile"
        if args.compile:
            torch.compile(lambda x: (x + 1).sum())(four_ones)
    except Exception as error:
        # The compiler's own words: which exception it raises is no public promise.
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        fail(f"{option} does not work here ({reason}); leave it out")
