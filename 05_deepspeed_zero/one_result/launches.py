"""Start the ranks of each way, and collect what they hand in."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from each_rank import FOLDER, launched_rank, load_job, spawned_rank, write_job
from verdict import MISTAKES, WAYS, row
from ways import EPS, Run, fresh_gpt

__all__ = ["FOLDER", "LAUNCHES", "fresh_gpt", "handed_in", "launched_rank", "load_job"]
__all__ += ["start_by_launcher", "start_by_spawn", "train_all"]
SCRIPT = str(Path(__file__).with_name("same_result.py"))
PATIENCE = 300  # seconds for one launch
# What follows `python -m`; a reader would type `torchrun` and `deepspeed`.
LAUNCHES = {
    "spawn": [],
    "torchrun": [
        ["torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"],
        ["torch.distributed.run", "--nproc-per-node=4"],
    ],
    "deepspeed": [["deepspeed.launcher.runner", "--num_gpus=2"]],
}


def start_by_spawn(folder: Path) -> str:
    """Start two ranks by `mp.spawn`, wait, and return what went wrong or ''."""
    # The ranks rendezvous here. With port 0 the system chooses one that is free.
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
    """Start same_result.py by a launcher; wait, return what went wrong or ''."""
    env = {**os.environ, FOLDER: str(folder)}
    # Else ranks that torchrun starts anew would find the addresses of the dead.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(folder / "log", "w+") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *words, SCRIPT],
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
        said = log.read().splitlines()
    lines = [one for one in said if "Error: " in one or one.startswith("same_result")]
    # The death of a rank makes gloo complain in the others; that is no cause.
    causes = [line for line in lines if "/gloo/" not in line]
    cause = (causes or lines or ["without a word"])[0]
    return f"{' '.join(words)} ended with {code}: {cause}" if code else ""


def handed_in(folder: Path) -> dict[str, list[Run]]:
    """Return what all ranks have handed in so far, in the order of the table."""
    found: dict[str, list[Run]] = {}
    for name in [*WAYS, *MISTAKES]:
        files = sorted(folder.glob(f"{name}.?"))
        if files:
            found[name] = [Run(**torch.load(f, weights_only=True)) for f in files]
    return found


def train_all(folder: Path, device: torch.device, by: list[str]) -> str:
    """Train in all ways, print a row for each; return what went wrong or ''.

    Args:
        folder: where all hand in their runs.
        device: where all ways compute.
        by: those of STARTED_BY that are to start ranks.
    """
    reference = write_job(folder, device)[EPS]
    starts = [lambda: ""]
    for one in by:
        launches = [
            partial(start_by_launcher, words, folder) for words in LAUNCHES[one]
        ]
        starts += launches or [partial(start_by_spawn, folder)]
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
