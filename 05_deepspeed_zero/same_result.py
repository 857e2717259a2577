"""One model, one seed, one batch, trained in eleven ways: the result is always one.

Run: python 05_deepspeed_zero/same_result.py
Needs: requirements.txt. It takes an accelerator for each of four ranks, else the CPU.
Expect: a row for each way as soon as it is there: the last loss, the largest difference
    of a loss and of a weight from one process, the seconds, the bytes that a rank sends
    in a step and those it holds. Then a mistake that is found, a picture, a `check:`.
Before: 05_deepspeed_zero/checkpoints.py
Next: 05_deepspeed_zero/draw_same_result.py
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from each_rank import FOLDER, launched_rank, load_job, spawned_rank, write_job
from start import choose_device, refuse
from verdict import (
    HEAD,
    MISTAKES,
    SUMMED,
    WAYS,
    all_faults,
    closing_lines,
    mistake_lines,
    record_of,
    row,
)
from ways import EPS, Run, fresh_gpt

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PATIENCE = 300  # seconds for one launch
# What follows `python -m`; a reader would type `torchrun` and `deepspeed`.
LAUNCHES = [
    ["torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"],
    ["torch.distributed.run", "--nproc-per-node=4"],
    ["deepspeed.launcher.runner", "--num_gpus=2"],
]


def start_by_spawn(folder: Path) -> str:
    """Start two ranks by `mp.spawn`, wait, and return what went wrong or ''."""
    # The ranks meet at this store. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Ranks are born deaf to Ctrl-C; otherwise it would make each say where it was.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = (store.port, folder)
    ranks = mp.spawn(spawned_rank, job, nprocs=2, join=False, daemon=True)
    signal.signal(signal.SIGINT, handler)
    assert ranks is not None
    try:
        while not ranks.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return f"mp.spawn: {str(error).strip().splitlines()[-1]}"
    finally:
        for rank in filter(None, ranks.processes):
            rank.kill()
    return ""


def start_by_launcher(words: list[str], folder: Path) -> str:
    """Start this file by a launcher, wait, and return what went wrong or ''."""
    env = {**os.environ, FOLDER: str(folder)}
    # Else ranks that torchrun starts anew would find the addresses of the dead.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(folder / "log", "w+") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *words, __file__],
            stdin=subprocess.PIPE,  # ends with this process, which all ranks notice
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,  # Ctrl-C comes to this process, which ends the rest
        )
        code: int | str = f"no end after {PATIENCE} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = launcher.wait(PATIENCE)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    process.kill()
            launcher.kill()
            launcher.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if "Error: " in line]
    # The death of a rank makes gloo complain in the others; that is no cause.
    causes = [line for line in lines if "/gloo/" not in line]
    said = (causes or lines or ["without a word"])[0]
    return f"{' '.join(words)} ended with {code}: {said}" if code else ""


def handed_in(folder: Path) -> dict[str, list[Run]]:
    """Return what all ranks have handed in so far, in the order of the table."""
    found: dict[str, list[Run]] = {}
    for name in [*WAYS, *MISTAKES]:
        files = sorted(folder.glob(f"{name}.?"))
        if files:
            found[name] = [Run(**torch.load(f, weights_only=True)) for f in files]
    return found


def train_all(folder: Path, device: torch.device) -> str:
    """Train in all ways and print a row for each; return what went wrong or ''."""
    reference = write_job(folder, device)[EPS]
    starts = [lambda: "", partial(start_by_spawn, folder)]
    starts += [partial(start_by_launcher, words, folder) for words in LAUNCHES]
    shown = set(MISTAKES)
    for start in starts:
        failure = start()
        for name, runs in handed_in(folder).items():
            if name not in shown:
                print(row(name, runs, reference), flush=True)
                shown.add(name)
        if failure:
            return failure
    return ""


def main() -> None:
    """Train, judge, draw."""
    parser = argparse.ArgumentParser(description="Train one model in eleven ways.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--out", type=Path, default=ASSETS, help="folder for picture and numbers")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # what deepspeed passes
    out = parser.parse_args().out
    if FOLDER in os.environ:
        launched_rank(Path(os.environ[FOLDER]))
        return
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if not (out.is_dir() and os.access(out, os.W_OK)):
        refuse(f"--out {out}: there is no folder that one can write to")
    # Ended politely, this process still ends its ranks and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"  # all ways compute alike, also the first
    torch.set_num_threads(1)
    device, reason = choose_device(0, max(WAYS.values()))
    backend = dist.get_default_backend_for_device(device)
    sizes = [p.numel() for p in fresh_gpt(device).parameters()]
    print(f"device: {device.type} with {backend} ({reason})")
    print(f"{sum(sizes):,} parameters; apart: the largest difference from one process")
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failure = train_all(folder, device)
        runs, references = handed_in(folder), load_job(folder)[1]
    mistakes = {name: runs.pop(name)[0] for name in MISTAKES if name in runs}
    faults = all_faults(runs, sizes, device.type == "cpu") + [failure] * bool(failure)
    if faults:
        sys.exit("\n  ".join(["same_result.py: not the same result:", *faults]))
    print("\n".join(mistake_lines(mistakes, references)))
    record = record_of(runs, mistakes[SUMMED[EPS]], sum(sizes))
    numbers = out / "05_same_result.json"
    numbers.write_text(json.dumps(record, indent=1) + "\n")

    # Only now, and only here: no rank draws anything.
    from draw_same_result import draw_all_ways, save_picture

    save_picture(draw_all_ways(record), out, "05_same_result.png")
    print(closing_lines(runs))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
