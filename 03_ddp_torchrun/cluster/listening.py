"""Nothing asks who you are: where a run listens, and what a stranger can do there.

Run: GLOO_SOCKET_IFNAME=lo torchrun --nproc-per-node=2
    03_ddp_torchrun/cluster/listening.py
Expect: where the launcher and each rank listen; then a process that is no part of the
    run has the launcher run a line of its code.
"""

import base64
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ranks import check, fail, gather, join, leave

# Under this word and the name of the job, torchrun keeps the list of its agents.
RENDEZVOUS = "torch.rendezvous."
EVERYWHERE = {"0.0.0.0", "*", "[::]"}


class Smuggled:
    """What runs a line of Python in whoever unpickles it, and gives what was there."""

    def __init__(self, line: str, original: bytes) -> None:
        """Keep the line, and the pickled object that is to come out."""
        self.line, self.original = line, original

    def __reduce__(self) -> tuple[Any, ...]:
        """Have pickle call eval, which is all that it takes."""
        both = f"({self.line}, __import__('pickle').loads({self.original!r}))[1]"
        return eval, (both,)


def be_stranger(ports: list[int], evidence: str) -> None:
    """Be a process that knows some port numbers and nothing else of the run."""
    os.environ.clear()
    line, lists = f"open({evidence!r}, 'w').write(str(__import__('os').getpid()))", 0
    for port in ports:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        for key in store.list_keys():
            if not key.startswith(RENDEZVOUS) or "/" in key:
                continue
            lists, state = lists + 1, store.get(key)
            smuggled = pickle.dumps(Smuggled(line, base64.b64decode(state)))
            store.set(key, base64.b64encode(smuggled).decode())
            time.sleep(2)  # the agent looks at it several times in a second
            store.set(key, state.decode())
    print(f"stranger: {lists} list of agents in {len(ports)} stores", flush=True)


def listeners() -> dict[int, list[tuple[str, int]]]:
    """Ask the system for the address and port of each listener, by process."""
    found: dict[int, list[tuple[str, int]]] = {}
    command = ["ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header"]
    for line in subprocess.check_output(command, text=True).splitlines():
        address, _, port = line.split()[3].rpartition(":")
        for pid in set(re.findall(r"pid=(\d+)", line)):
            found.setdefault(int(pid), []).append((address.split("%")[0], int(port)))
    return found


def look_around(pids: list[int], agent: int) -> bool:
    """Print who listens where, let a stranger in; tell whether the agent obeyed it."""
    found, closed = listeners(), 0
    names = {"agent": agent} | {f"rank {rank}": pid for rank, pid in enumerate(pids)}
    for name, pid in names.items():
        for address in sorted({address for address, _ in found.get(pid, [])}):
            count = sum(own == address for own, _ in found[pid])
            where = "every interface" if address in EVERYWHERE else f"{address} only"
            closed += address not in EVERYWHERE
            print(f"{name} listens at {count} port(s) of {where}", flush=True)
    ports = [port for _, port in found.get(agent, [])]
    with tempfile.TemporaryDirectory() as folder:
        evidence = Path(folder, "evidence")
        start = multiprocessing.get_context("spawn").Process
        stranger = start(target=be_stranger, args=(ports, str(evidence)))
        stranger.start()
        stranger.join()
        ran = evidence.read_text() if evidence.exists() else ""
    print(f"agent: has run {'the line' if ran else 'no line'} of the stranger")
    return ran == str(agent) and closed >= len(pids)


def main() -> None:
    """Join a group, look around on rank 0."""
    if not shutil.which("ss"):
        fail("there is no ss here; on Debian or Ubuntu: apt install iproute2")
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        fail("looks at the processes of one host: leave out --nnodes")
    join(only_cpu=True)
    pids = gather(os.getpid())
    is_right = dist.get_rank() > 0 or look_around(pids, os.getppid())
    check(is_right, "the agent ran a line of a process that only knew its ports")
    leave()


if __name__ == "__main__":
    main()
