"""Kill a rank, an agent, a host or the rendezvous itself: what becomes of the job?

Run: python 03_ddp_torchrun/fault_tolerance/who_may_die.py --rendezvous=c10d
Expect: two agents of torchrun train together, each with one rank, as two hosts would;
    one part is killed. What the others do, after how long, and a `check:` of that.
"""

import importlib.util
import queue
import shutil
import sys
import time

from ranks import read_options
from torchruns import Torchruns, free_port
from world_changes import TRAIN

LIMIT = 60.0  # seconds to wait for what the job does

# Who is killed: a rank of host 1; its agent, whose rank then ends by itself; the whole
# of host 1; host 0, which keeps the store of static and c10d; the server of etcd.
VICTIMS = ("rank", "agent", "host 1", "host 0", "etcd")
EXPECTED = {
    "static": ("ends", "ends", "ends", "ends"),
    "c10d": ("2 ranks resume", "1 rank resumes", "1 rank resumes", "ends"),
    "etcd": ("2 ranks resume", *["1 rank resumes"] * 3, "ends"),
}


def torchrun_options(rendezvous: str, host: int, port: int) -> list[str]:
    """Return the options of host 0 or 1, each with one rank."""
    if rendezvous == "static":  # train.py refuses to be restarted under it
        store = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        return ["--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1", *store]
    backend = "etcd-v2" if rendezvous == "etcd" else rendezvous
    # Seconds to wait for a second host, and between heartbeats (default: 30 and 5).
    # c10d is told who keeps the store; etcd asks for no host.
    conf = f"last_call_timeout=4,keep_alive_interval=1,is_host={int(host == 0)}"
    return [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job"),
        *(f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--local-addr=127.0.0.1", f"--rdzv-conf={conf}"),
    ]


def what_happens(runs: Torchruns, survivors: list[str]) -> tuple[str, str]:
    """Wait until ranks resume or all agents have ended; return which, and the text."""
    heard, end = [""], time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            heard.append(runs.lines.get(timeout=0.1))
        except queue.Empty:
            if all(runs.running[name].poll() is not None for name in survivors):
                return "ends", runs.last_error(survivors)
        if heard[-1].startswith("checkpoint: resuming"):
            ranks = [line[7] for line in heard if line.startswith("ranks: ")][-1]
            return "1 rank resumes" if ranks == "1" else f"{ranks} ranks resume", ""
    return f"neither within {LIMIT:.0f} s", ""


def kill_and_see(rendezvous: str, victim: str) -> tuple[str, float, str]:
    """Start a job, kill a part of it; return what happens, after how long, a text."""
    port = free_port()
    with Torchruns() as runs:
        if rendezvous == "etcd":
            runs.start_etcd(port)
        for host in (0, 1):
            runs.start(f"host {host}", torchrun_options(rendezvous, host, port), TRAIN)
        runs.wait_for("ranks: 2")
        runs.wait_for("checkpoint: ")
        runs.wait_for_checkpoint("run.pt")
        agents, killed = ["host 0", "host 1"], time.monotonic()
        if victim == "rank":
            runs.kill("host 1", rank=1)
        elif victim == "agent":
            runs.kill(agents.pop())
        else:
            runs.kill(victim, at_once=True)
            agents = [agent for agent in agents if agent != victim]
        happens, text = what_happens(runs, agents)
        return happens, time.monotonic() - killed, text


def main() -> None:
    """Kill each victim once; print what happens."""
    options = read_options(
        rendezvous={"choices": tuple(EXPECTED), "help": "only this one"},
        victim={"choices": VICTIMS, "help": "only this one"},
    )
    has_etcd = shutil.which("etcd") and importlib.util.find_spec("etcd")
    print("rendezvous  killed  what happens    after", flush=True)
    found = []
    for kind in [options.rendezvous] if options.rendezvous else EXPECTED:
        if kind == "etcd" and not has_etcd:
            print("etcd        skipped: etcd or python-etcd is not installed")
            continue
        for victim, expected in zip(VICTIMS, EXPECTED[kind], strict=False):
            if options.victim in (None, victim):
                happens, seconds, text = kill_and_see(kind, victim)
                line = f"{kind:12}{victim:8}{happens:15}{seconds:4.0f} s  {text}"
                print(line.rstrip(), flush=True)
                found.append(happens == expected)
    result = f"{found.count(True)} of {len(found)} kills ended as expected"
    if not found or not all(found):
        sys.exit(result)
    print(f"check: {result}")


if __name__ == "__main__":
    main()
