"""What a user can type after `train.py`, and what they are told if it cannot work."""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from data import ROWS, load_samples
from model import WIDTH
from table import load_table

ROLES = ("master", "parameter_server", "trainer")


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


def with_hyphens(words: Sequence[str]) -> list[str]:
    """Spell `--max_epochs` as `--max-epochs`, so that one may type either."""
    spelled = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        spelled.append(name + equals + value)
    return spelled


def parse_args() -> argparse.Namespace:
    """Read the command line and refuse what cannot work, before anything starts."""
    parser = argparse.ArgumentParser(
        description="Train a model whose table lives on a parameter server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--trainers", type=positive_int, default=2, help="trainers in the run")
    add("--batch-size", type=positive_int, default=16, help="samples per trainer")
    # The other chapters' name for it will do as well.
    add("--epochs", "--max-epochs", type=positive_int, default=3, help="passes")
    add("--max-steps", type=positive_int, default=None, help="stop after so many steps")
    add("--lr", type=positive_float, default=0.1, help="learning rate")
    add("--rows", type=positive_int, default=ROWS, help="rows of the table")
    add("--seed", type=int, default=0, help="of the initial weights")
    add("--table", type=Path, default=None, help="file to resume from and to save to")
    role = parser.add_argument_group(
        "one role in each terminal", "--trainers must be the same in all of them"
    )
    add = role.add_argument
    add("--role", choices=ROLES, default=None, help="be this one only")
    add("--master-addr", default=None, help="where the master listens")
    add("--master-port", type=positive_int, default=None, help="and its port")
    add("--rank", type=int, default=None, help="which trainer, from 0")
    add("--patience", type=positive_float, default=60.0, help="seconds to wait for all")
    args = parser.parse_args(with_hyphens(sys.argv[1:]))
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    check_role(args)
    # In a terminal of its own, a server or a trainer does not know the master's --rows
    # and --batch-size. What depends on them is refused by the master.
    decides = args.role in (None, "master")
    if args.table:
        check_table(args.table, args.rows if decides else None)
    if args.role != "parameter_server":  # which needs no samples
        wanted = args.trainers if decides else 0
        check_samples("--trainers", wanted, args.batch_size, args.rows)
    return args


def check_role(args: argparse.Namespace) -> None:
    """Refuse a role without what it needs, or with what it cannot have."""
    given = {
        "--master-addr": args.master_addr,
        "--master-port": args.master_port,
        "--rank": args.rank,
    }
    if args.role is None:
        for option, value in given.items():
            if value is not None:
                refuse(f"{option} goes with --role; alone, train.py finds its own")
        return
    for option in ("--master-addr", "--master-port"):
        if given[option] is None:
            refuse(f"--role {args.role} needs {option}, the same in each terminal")
    if args.master_port > 65535:
        refuse(f"--master-port must be 1 to 65535, not {args.master_port}")
    if (args.role == "trainer") != (args.rank is not None):
        refuse("--role trainer needs --rank, and no other role takes it")
    if args.rank is not None and not 0 <= args.rank < args.trainers:
        refuse(
            f"--rank must be 0 to {args.trainers - 1} with --trainers "
            f"{args.trainers}, not {args.rank}"
        )
    if args.table and args.role != "parameter_server":
        refuse("--table belongs to --role parameter_server, which holds the table")


def check_samples(option: str, count: int, batch_size: int, rows: int = ROWS) -> None:
    """Refuse a step in which `count` processes take more samples than there are."""
    try:
        samples = len(load_samples(rows)[0])
    except OSError as error:
        refuse(str(error))
    if count * batch_size > samples:
        refuse(f"{option} times --batch-size is at most {samples}, the samples")


def check_table(path: Path, rows: int | None) -> None:
    """Find out before the run whether the table can be read, and written after it.

    Args:
        path: of the file, which need not exist.
        rows: that the table must have; None for any number.
    """
    if not path.parent.is_dir():
        refuse(f"--table {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        refuse(f"--table {path}: no permission to write in {path.parent}")
    if path.exists():
        try:
            shape = tuple(load_table(path).shape)
        except ValueError as error:
            refuse(f"{error}; delete it or name another")
        if rows is not None and shape != (rows, WIDTH):
            refuse(f"--table {path} holds a table of {shape}, not {(rows, WIDTH)}")
