"""Run scripts of this room, all at once; show what each stage printed and how it ended.

Run: python 08_pipeline_parallel/mistakes/show.py both_send_first batch_norm
Expect: the last lines of both ranks, wrapped, and their exit codes.
"""

import importlib
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import textwrap
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO

WRAPPER = textwrap.TextWrapper(79, break_long_words=False, break_on_hyphens=False)


def be_stage(script: Path, rank: int, port: int, output: IO[str]) -> None:
    """Be one of two ranks of a script; what it prints goes to a file of its own."""
    # The C++ part of torch writes past Python, so the streams themselves are turned.
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    signal.alarm(60)  # seconds, after which SIGALRM kills a rank that hangs
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent holds the store
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        time.sleep(1)  # the other rank shall time out by itself, too
        sys.exit(1)


def show_stages(name: str, stages: list[tuple[ForkProcess, IO[str]]]) -> None:
    """Wait for both ranks of a script; print what they printed."""
    print(f"--- {name}", flush=True)
    for rank, (process, output) in enumerate(stages):
        process.join()
        output.seek(0)
        # Of where an error came up in the C++ part, the folders are left out.
        for line in re.sub(r"\[/\S*/", "[", output.read()).splitlines():
            for part in WRAPPER.wrap(line):
                print(f"rank {rank} | {part}")
        print(f"rank {rank}: exit code {process.exitcode}", flush=True)


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
    # Only once: each rank is a fork of this process, and an optimizer imports this.
    importlib.import_module("torch._dynamo")
    import torch.distributed as dist

    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    started: dict[str, list[tuple[ForkProcess, IO[str]]]] = {name: [] for name in names}
    for name, server in sockets.items():
        for rank in range(2):
            output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read at the end)
            job = (known[name], rank, server.getsockname()[1], output)
            process = ForkProcess(target=be_stage, args=job, daemon=True)
            process.start()
            started[name].append((process, output))
    # Calls wait in these sockets for the stores, whose threads must not be forked.
    _held = [
        dist.TCPStore(
            *server.getsockname(),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
        for server in sockets.values()
    ]
    for name in names:
        show_stages(name, started[name])


if __name__ == "__main__":
    main()
