"""Run scripts of this room, all at once; show what each rank printed and how it ended.

Run: python 06_fsdp/mistakes/show.py optimizer_first tied_weights
Expect: the lines of each rank, wrapped, and its exit code.
"""

import functools
import importlib
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import textwrap
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO

RANKS = 2


def be_forked_rank(script: Path, rank: int, port: int, output: IO[str]) -> None:
    """Be one rank of a script; what it prints goes to a file of its own."""
    # The C++ part of torch writes past Python, so the streams themselves are turned.
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    signal.alarm(60)  # seconds, after which SIGALRM kills a rank that hangs
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent holds the store
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)


def in_short(text: str) -> list[str]:
    """Return what a rank printed, wrapped to the width of a page."""
    wrapper = textwrap.TextWrapper(79, break_long_words=False, break_on_hyphens=False)
    return [part for line in text.splitlines() for part in wrapper.wrap(line)]


def main() -> None:
    """Run the named scripts; those that can be shown have a line marked as wrong."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    files = sorted(Path(__file__).parent.glob("*.py"))
    known = {f.stem: f for f in files if re.search("^ +# WRONG:", f.read_text(), re.M)}
    names = list(dict.fromkeys(sys.argv[1:]))
    wrong = "".join(f"there is no {name}; " for name in names if name not in known)
    if wrong or not names:
        print(f"show.py: {wrong}choose from {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    # Only once: each rank is a fork of this process. FSDP would import the third later.
    for module in ("fsdp", "checkpoint.state_dict"):
        importlib.import_module(f"torch.distributed.{module}")
    importlib.import_module("torch._dynamo")
    import torch.distributed as dist

    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ranks: dict[str, list[tuple[ForkProcess, IO[str]]]] = {name: [] for name in names}
    for name in names:
        for rank in range(RANKS):
            output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read at the end)
            job = (known[name], rank, sockets[name].getsockname()[1], output)
            process = ForkProcess(target=be_forked_rank, args=job, daemon=True)
            process.start()
            ranks[name].append((process, output))
    # Calls wait in these sockets for the stores, whose threads must not be forked.
    hold = functools.partial(dist.TCPStore, is_master=True, wait_for_workers=False)
    _held = [
        hold(*one.getsockname(), master_listen_fd=one.detach())
        for one in sockets.values()
    ]
    for name in names:
        print(f"--- {name}", flush=True)
        for rank, (process, output) in enumerate(ranks[name]):
            process.join()
            output.seek(0)
            for line in in_short(output.read()):
                print(f"rank {rank} | {line}")
            print(f"rank {rank}: exit code {process.exitcode}", flush=True)


if __name__ == "__main__":
    main()
