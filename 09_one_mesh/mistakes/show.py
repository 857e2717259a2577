"""Run scripts of this room on four ranks each, all at once, as they are and mended.

Run: python 09_one_mesh/mistakes/show.py norm_of_one_axis rank_zero_alone
Expect: the last lines of the ranks, with those together that say the same, and the exit
    codes that are not 0; first of the script, then with what its comment says to write.
"""

import importlib
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
import textwrap
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO

RANKS = 4
FILES = sorted(Path(__file__).parent.glob("*.py"))
SCRIPTS = {f.stem: f.read_text() for f in FILES if "\n    # WRONG:" in f.read_text()}
WRITE = re.compile(r"( *)# Write: (.*)\n.*\n")
NOISE = re.compile(r"^\[rank\d\]:\[.*\n|(^|\[)/\S*/| at 0x\w+", re.M)
WRAPPER = textwrap.TextWrapper(75, break_long_words=False, break_on_hyphens=False)


def be_rank_of_mesh(code: str, rank: int, port: int, output: IO[str]) -> None:
    """Be one of the ranks of a script; what it prints goes to a file of its own."""
    # The C++ part of torch writes past Python, so the streams themselves are turned.
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    signal.alarm(60)  # seconds, after which SIGALRM kills a rank that hangs
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent holds the store
    try:
        exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)


def wait_for_ranks(processes: list[ForkProcess]) -> None:
    """Wait until all have ended; like torchrun, end them soon after one has failed."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            time.sleep(2)
            for process in processes:
                process.terminate()
        time.sleep(0.05)


def lines_of(process: ForkProcess, output: IO[str]) -> list[str]:
    """Return what a rank printed, wrapped, and how it ended, if with an error."""
    output.seek(0)
    # Without folders, addresses of objects, and what the C++ part logs.
    text = re.sub(NOISE, r"\1", output.read())
    code = [f"exit code {process.exitcode}"] if process.exitcode else []
    return [part for x in text.splitlines() for part in WRAPPER.wrap(x)] + code


def main() -> None:
    """Run the named scripts; those that can be shown have a line marked as wrong."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    names = list(dict.fromkeys(sys.argv[1:]))
    wrong = "".join(f"there is no {name}; " for name in names if name not in SCRIPTS)
    if wrong or not names:
        print(f"show.py: {wrong}choose from {', '.join(SCRIPTS)}", file=sys.stderr)
        sys.exit(2)
    # Only once: each rank is a fork of this process.
    for module in ("_dynamo", "distributed.nn", "distributed.device_mesh"):
        importlib.import_module(f"torch.{module}")
    import torch.distributed as dist

    ways = {}
    for name in names:
        ways[name] = SCRIPTS[name]
        if WRITE.search(SCRIPTS[name]):
            ways[f"{name}, mended"] = WRITE.sub(r"\1\2\n", SCRIPTS[name])
    sockets = {way: socket.create_server(("127.0.0.1", 0)) for way in ways}
    started: dict[str, list[tuple[ForkProcess, IO[str]]]] = {way: [] for way in ways}
    for (way, code), rank in itertools.product(ways.items(), range(RANKS)):
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read at the end)
        job = (code, rank, sockets[way].getsockname()[1], output)
        process = ForkProcess(target=be_rank_of_mesh, args=job, daemon=True)
        process.start()
        started[way].append((process, output))
    # Calls wait in these sockets for the stores, whose threads must not be forked.
    held = {"is_master": True, "wait_for_workers": False}
    _held = [
        dist.TCPStore(*one.getsockname(), master_listen_fd=one.detach(), **held)
        for one in sockets.values()
    ]
    for way in ways:
        print(f"--- {way}", flush=True)
        wait_for_ranks([process for process, _ in started[way]])
        said = enumerate(lines_of(*rank) for rank in started[way])
        for lines, group in itertools.groupby(said, key=lambda pair: pair[1]):
            ranks = ", ".join(str(rank) for rank, _ in group)
            for line in lines:
                print(f"rank {ranks} | {line}", flush=True)


if __name__ == "__main__":
    main()
