"""One model, one seed, one batch, trained in every way of the course: one result.

Run: python 09_one_mesh/one_result/one_result.py
Expect: a row for each way as soon as it is there: the last loss, the largest difference
    of a loss and of a weight from one process, the bytes that a rank sends, keeps and
    takes at the peak. Then three mistakes that are found, and a `check:`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import comparison
import launches
from ranks import fail, read_options

OPTIONS = {
    "only": {
        "nargs": "+",
        "default": [],
        "metavar": "NAME",
        "help": "part of a way's name, or spawn, torchrun or deepspeed",
    },
    "json": {"type": Path, "metavar": "FILE", "help": "write the numbers to this file"},
    "local_rank": {"type": int, "help": argparse.SUPPRESS},  # the deepspeed launcher's
}


def show_rows(folder: Path, ways: dict[str, Any]) -> str:
    """Train in these ways, print a row for each; return what went wrong or ''."""
    print(comparison.HEAD, flush=True)
    shown = set(comparison.ALL) - set(comparison.WAYS)
    for failure in launches.launches(folder, ways):
        runs = launches.handed_in(folder)
        for name in (name for name in runs if name not in shown):
            print(comparison.row(name, runs), flush=True)
            shown.add(name)
        if failure:
            return failure
    return ""


def main() -> None:
    """Train in all ways, compare them, and write down what was measured."""
    options = read_options(**OPTIONS)
    if launches.FOLDER in os.environ:
        launches.launched_rank(Path(os.environ[launches.FOLDER]))
        return
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    if options.json and not options.json.parent.is_dir():
        fail(f"--json {options.json}: there is no folder {options.json.parent}")
    if options.json and options.json.is_dir():
        fail(f"--json {options.json}: this is a folder")
    try:
        ways = launches.asked_for(options.only)
    except ValueError as error:
        fail(f"--only: {error}")
    # Ended politely, this process still ends its ranks and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # all ways compute alike, also the first
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        failure = show_rows(Path(name), ways)
        runs = launches.handed_in(Path(name))
    faults = comparison.all_faults(runs, ways) + [failure] * bool(failure)
    if faults:
        sys.exit("\n  ".join(["one_result.py: not the same result:", *faults]))
    print("\n".join(comparison.closing_lines(runs)))
    if options.json:
        record = comparison.record_of(runs)
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
