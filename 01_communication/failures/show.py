"""Run scripts of this room, all at once; show what each rank printed and how it ended.

Run: python 01_communication/failures/show.py dtypes_differ shapes_differ
Expect: each rank's lines and how it ended. With TORCH_DISTRIBUTED_DEBUG=DETAIL in front
    also what DETAIL finds, with TORCH_FR_BUFFER_SIZE=100 the calls that were recorded;
    with --stacks behind it, where each rank is after a second.
"""

import faulthandler
import functools
import json
import os
import re
import resource
import runpy
import signal
import socket
import sys
import tempfile
import textwrap
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO


def run_as_rank(script: Path, output: IO[str]) -> None:
    """Be one rank of a script; what it prints goes to a file of its own."""
    # The C++ part of torch writes past Python, so the streams themselves are turned.
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort leaves no core file
    signal.alarm(30)  # seconds, after which SIGALRM kills a rank that hangs
    if "--stacks" in sys.argv:
        faulthandler.dump_traceback_later(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if "TORCH_FR_BUFFER_SIZE" in os.environ:
            from torch._C import _distributed_c10d

            # No public function reads gloo's recorder; the type stub lacks this one.
            trace = json.loads(_distributed_c10d._dump_fr_trace_json())  # pyright: ignore
            call = "{collective_seq_id} {profiling_name} {input_sizes}"
            print("recorded", [call.format(**c) for c in trace.get("entries", [])])


def fork_ranks(script: Path, store: socket.socket) -> list[tuple[ForkProcess, IO[str]]]:
    """Fork the ranks of a script, with what torchrun sets in their environment."""
    world_size = re.findall(r"--nproc-per-node=(\d+)", script.read_text())[0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["MASTER_PORT"] = str(store.getsockname()[1])
    os.environ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    ranks = []
    for rank in map(str, range(int(world_size))):
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the rank ends)
        process = ForkProcess(target=run_as_rank, args=(script, output), daemon=True)
        process.start()
        ranks.append((process, output))
    return ranks


def show_rank(rank: int, text: str, code: int) -> None:
    """Print what a rank printed, wrapped to the width of a page, and how it ended."""
    # Of a stack, the folders and the frames that led to the script are left out.
    text = re.sub(r"( in <module>\n)(  File .*\n)+", r"\1", text)
    text = re.sub(r'(?m)^  File ".*/', '  File "', text)
    wrapper = textwrap.TextWrapper(79, break_long_words=False, break_on_hyphens=False)
    for line in text.splitlines():
        for part in wrapper.wrap(line):
            print(f"rank {rank} | {part}")
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    print(f"rank {rank}: {end}", flush=True)


def main() -> None:
    """Run the named scripts; those that can be shown have a line marked as wrong."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    files = sorted(Path(__file__).parent.glob("*.py"))
    known = {f.stem: f for f in files if re.search("^ +# WRONG:", f.read_text(), re.M)}
    names = list(dict.fromkeys(word for word in sys.argv[1:] if word != "--stacks"))
    wrong = "".join(f"there is no {name}; " for name in names if name not in known)
    if wrong or not names:
        print(f"show.py: {wrong}choose from {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    # Ctrl-C waits until all have begun. The ranks inherit that, and end with this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    import torch.distributed as dist  # only once: each rank is a fork of this process

    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ranks = {name: fork_ranks(known[name], sockets[name]) for name in names}
    # Calls wait in these sockets for the stores, whose threads must not be forked.
    hold = functools.partial(dist.TCPStore, is_master=True, wait_for_workers=False)
    free = sockets.values()
    _held = [hold(*one.getsockname(), master_listen_fd=one.detach()) for one in free]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for name in names:
        print(f"--- {name}", flush=True)
        for rank, (process, output) in enumerate(ranks[name]):
            process.join()
            output.seek(0)
            show_rank(rank, output.read(), process.exitcode or 0)


if __name__ == "__main__":
    main()
