"""Start ranks by each launcher, let them train in their ways, collect their runs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ranks
from table_of_ways import ALL, Way, asked_for
from text import read_tokens
from training import Run, train_in_way
from ways_data_parallel import FOLDER
from ways_sharded import leave_deepspeed

__all__ = ["FOLDER", "asked_for", "handed_in", "launched_rank", "launches"]
SCRIPT = str(Path(__file__).with_name("one_result.py"))
PORT = "ONE_RESULT_PORT"
PATIENCE = 300  # seconds for one launch
# What follows `python -m`; a reader would type `torchrun` and `deepspeed`.
LAUNCHERS = {
    ("torchrun", 2): [
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ],
    ("torchrun", 4): ["torch.distributed.run", "--nproc-per-node=4"],
    ("torchrun", 8): ["torch.distributed.run", "--nproc-per-node=8"],
    ("deepspeed", 2): ["deepspeed.launcher.runner", "--num_gpus=2"],
}


# What each rank does.


def hand_in_runs(folder: Path, start: str) -> None:
    """Train in the ways that are asked of ranks so started; hand in what came of it."""
    is_alone = not dist.is_initialized()
    rank = 0 if is_alone else dist.get_rank()
    n = 1 if is_alone else dist.get_world_size()
    tokens = read_tokens()
    for name in (folder / "asked").read_text().splitlines():
        way, file = ALL[name], folder / f"{name}.{rank}"
        # Ranks that torchrun has started anew have handed in some already.
        if (way.start, way.ranks) == (start, n) and not file.exists():
            torch.save(train_in_way(way, tokens)._asdict(), file)


def spawned_rank(rank: int, port: int, folder: Path) -> None:
    """Be one of the two ranks that `mp.spawn` starts."""
    torch.set_num_threads(1)

    def main() -> None:
        ranks.join(only_cpu=True)
        hand_in_runs(folder, "spawn")
        ranks.leave()

    ranks.be_local_rank(rank, 2, port, main, ())


def launched_rank(folder: Path) -> None:
    """Be one of the ranks that `torchrun` or `deepspeed` starts."""

    def end_with_the_command() -> None:
        # Nothing comes from there, but the end if the process at the other end dies.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=end_with_the_command, daemon=True).start()
    torch.set_num_threads(1)
    if "CROSS_SIZE" not in os.environ:  # only deepspeed sets it
        ranks.join(only_cpu=True)
        hand_in_runs(folder, "torchrun")
        ranks.leave()
        return
    # It tells all jobs on a machine the same port.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ[PORT]}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # every rank is a client
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZE"]
    ranks.join(only_cpu=True)
    hand_in_runs(folder, "deepspeed")
    leave_deepspeed()


# What the command does.


def start_by_spawn(folder: Path) -> str:
    """Start two ranks by `mp.spawn`, wait, and return what went wrong or ''."""
    # The ranks rendezvous here. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Ranks are born deaf to Ctrl-C; otherwise it would make each say where it was.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = (store.port, folder)
    started = mp.spawn(spawned_rank, job, nprocs=2, join=False, daemon=True)
    signal.signal(signal.SIGINT, handler)
    assert started is not None
    try:
        while not started.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return f"mp.spawn: {str(error).strip().splitlines()[-1]}"
    finally:
        for rank in filter(None, started.processes):
            rank.kill()
    return ""


def start_by_launcher(words: list[str], folder: Path) -> str:
    """Start one_result.py by a launcher; wait, return what went wrong or ''."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, FOLDER: str(folder), PORT: str(store.port)}
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
    lines = [one for one in said if "Error: " in one or one.startswith("one_result")]
    # The death of a rank makes gloo complain in the others; that is no cause.
    causes = [line for line in lines if "/gloo/" not in line]
    cause = (causes or lines or ["without a word"])[0]
    return f"{' '.join(words)} ended with {code}: {cause}" if code else ""


def handed_in(folder: Path) -> dict[str, list[Run]]:
    """Return by way the runs of all ranks that have ended, in the table's order."""
    found: dict[str, list[Run]] = {}
    for name in ALL:
        if files := sorted(folder.glob(f"{name}.?")):
            found[name] = [Run(**torch.load(f, weights_only=True)) for f in files]
    return found


def launches(folder: Path, ways: dict[str, Way]) -> Iterator[str]:
    """Start the ranks of all ways, one launch after another; yield what went wrong."""
    (folder / "asked").write_text("\n".join(ways))
    wanted = {(way.start, way.ranks) for way in ways.values()}
    hand_in_runs(folder, "")  # of one process: this one
    yield ""
    if ("spawn", 2) in wanted:
        yield start_by_spawn(folder)
    for key, words in LAUNCHERS.items():
        if key in wanted:
            yield start_by_launcher(words, folder)
