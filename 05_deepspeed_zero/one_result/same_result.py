"""One model, one seed, one batch, trained in fourteen ways: the result is the same.

Run: python 05_deepspeed_zero/one_result/same_result.py
Expect: a row for each way as soon as it is there: the last loss, the largest difference
    of a loss and of a weight from one process, the seconds, the bytes that a rank sends
    in a step and those it holds. Then a mistake that is found, and a `check:`.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

from launches import (
    FOLDER,
    LAUNCHES,
    fresh_gpt,
    handed_in,
    launched_rank,
    load_job,
    train_all,
)
from ranks import choose_device, fail, read_options
from verdict import (
    EPS,
    HEAD,
    MISTAKES,
    STARTED_BY,
    SUMMED,
    WAYS,
    all_faults,
    closing_lines,
    mistake_lines,
    record_of,
)


def main() -> None:
    """Train in all ways, compare them, and write down what was measured."""
    by = {"choices": LAUNCHES, "nargs": "+", "default": list(LAUNCHES)}
    by["help"] = "who starts the ranks; one process is always there to compare with"
    numbers = {
        "type": Path,
        "metavar": "FILE",
        "help": "write the numbers to this file",
    }
    hidden = {"type": int, "help": "what the deepspeed launcher passes"}
    options = read_options(by=by, json=numbers, local_rank=hidden)
    if FOLDER in os.environ:
        launched_rank(Path(os.environ[FOLDER]))
        return
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    if options.json and not options.json.parent.is_dir():
        fail(f"--json {options.json}: there is no folder {options.json.parent}")
    # Ended politely, this process still ends its ranks and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # all ways compute alike, also the first
    torch.set_num_threads(1)
    device, reason = choose_device(0, max(WAYS.values()))
    sizes = [p.numel() for p in fresh_gpt(device).parameters()]
    print(f"device: {device.type} ({reason})")
    print(f"{sum(sizes):,} parameters; apart: the largest difference from one process")
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        failure = train_all(Path(name), device, options.by)
        runs, references = handed_in(Path(name)), load_job(Path(name))[1]
    mistakes = {name: runs.pop(name)[0] for name in MISTAKES if name in runs}
    ways = {
        name: n
        for one in ["nobody", *options.by]
        for name, n in STARTED_BY[one].items()
    }
    faults = all_faults(runs, sizes, device.type == "cpu", ways)
    if faults := faults + [failure] * bool(failure):
        sys.exit("\n  ".join(["same_result.py: not the same result:", *faults]))
    if mistakes:
        print("\n".join(mistake_lines(mistakes, references)))
    if options.json:
        record = record_of(runs, mistakes[SUMMED[EPS]], sum(sizes))
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(closing_lines(runs))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
