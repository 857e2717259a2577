"""Nothing asks who you are: where a run listens, and what a stranger can do there.

Run: GLOO_SOCKET_IFNAME=lo torchrun --nproc-per-node=2 03_ddp_torchrun/listening.py
Needs: Linux with ss (iproute2). It looks at its own processes only.
Expect: where the launcher and each rank listen; then a process that is no part of the
    run lets the launcher run a line of its code; then a `check:` of both.
Before: 03_ddp_torchrun/with_etcd.py
Next: 03_ddp_torchrun/scaling.py
"""

import argparse
import base64
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

# Under this word and the name of the job, torchrun keeps the list of its agents.
MEETING = "torch.rendezvous."
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
    """Be a process that knows some port numbers and nothing else."""
    lists = 0
    for port in ports:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        names = [name for name in store.list_keys() if "/" not in name]
        keys = [name for name in names if name.startswith(MEETING)]
        lists += len(keys)
        for key in keys:
            state = store.get(key)
            line = f"open({evidence!r}, 'w').write(str(__import__('os').getpid()))"
            smuggled = pickle.dumps(Smuggled(line, base64.b64decode(state)))
            store.set(key, base64.b64encode(smuggled).decode())
            time.sleep(2)  # the agent looks at it several times in a second
            store.set(key, state.decode())
    print(f"stranger: {lists} list of agents in {len(ports)} stores", flush=True)


def listeners() -> dict[int, list[tuple[str, int]]]:
    """Ask the system for the address and port of each listener, by process."""
    found: dict[int, list[tuple[str, int]]] = {}
    command = ["ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in lines.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        for pid in set(re.findall(r"pid=(\d+)", line)):
            found.setdefault(int(pid), []).append((address.split("%")[0], int(port)))
    return found


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def show_listeners(pids: list[int], agent: int) -> tuple[list[int], int]:
    """Print who listens where.

    Returns:
        The agent's ports, and how many listeners are not open to everybody.
    """
    found, closed = listeners(), 0
    for name, pid in [
        ("agent", agent),
        *((f"rank {rank}", pid) for rank, pid in enumerate(pids)),
    ]:
        for address in sorted({address for address, _ in found.get(pid, [])}):
            count = sum(own == address for own, _ in found[pid])
            where = "every interface" if address in EVERYWHERE else f"{address} only"
            closed += address not in EVERYWHERE
            print(f"{name} listens at {count} port(s) of {where}", flush=True)
    return [port for _, port in found.get(agent, [])], closed


def main() -> None:
    """Join a group, look around, let a stranger in."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Show where a run listens.")
    parser.add_argument("--stranger", nargs="+", help=argparse.SUPPRESS)
    parser.error = refuse  # type: ignore[method-assign]
    stranger = parser.parse_args().stranger
    if stranger:
        be_stranger([int(port) for port in stranger[1:]], stranger[0])
        return
    if "RANK" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=2")
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        refuse("looks at the processes of one host: leave out --nnodes")
    if not shutil.which("ss"):
        refuse("there is no ss here; on Debian or Ubuntu: apt install iproute2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    right: list[bool] = []
    if dist.get_rank() == 0:
        agent = os.getppid()
        ports, closed = show_listeners(pids, agent)
        with tempfile.TemporaryDirectory() as folder:
            evidence = Path(folder, "evidence")
            # It gets no environment: nothing tells it about this run but the ports.
            words = [sys.executable, __file__, "--stranger", str(evidence)]
            subprocess.run([*words, *map(str, ports)], env={}, check=True)
            ran = evidence.read_text() if evidence.exists() else ""
        print(f"agent: has run {'the line' if ran else 'no line'} of the stranger")
        right = [ran == str(agent), bool(ports), closed >= len(pids)]
    verdict = [right]
    dist.broadcast_object_list(verdict, src=0)
    if not all(verdict[0]):
        raise RuntimeError(f"this run listens in another way than described: {verdict}")
    if dist.get_rank() == 0:
        print("check: the agent ran a line of a process that only knew its ports")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
