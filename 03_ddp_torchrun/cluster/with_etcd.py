"""Let torchrun's agents meet in etcd, a store that lives on when a host dies.

Run: python 03_ddp_torchrun/cluster/with_etcd.py 03_ddp_torchrun/train.py --max-steps=4
Expect: the command of the agents, what the ranks print, and a `check:` that the agents
    did meet in etcd. The etcd is started here, and ends with this process.
"""

import argparse
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Where torchrun keeps the list of agents that take part in a job of the name "job".
RENDEZVOUS = "/torch/elastic/rendezvous/job"


def ask(endpoint: str, key: str) -> dict:
    """Ask etcd by its second protocol, torchrun's; an OSError if it has no answer."""
    with urllib.request.urlopen(f"http://{endpoint}/v2/keys{key}", timeout=5) as answer:
        return json.load(answer)


def end_with_me(kind: str) -> list[str]:
    """Return words in front of a command that end it if this process is killed."""
    return ["setpriv", f"--pdeathsig={kind}"] if shutil.which("setpriv") else []


@contextmanager
def etcd(folder: str) -> Iterator[str]:
    """Run etcd at free loopback ports; yield its HOST:PORT, or raise an OSError."""
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        clients, peers = (f"127.0.0.1:{s.getsockname()[1]}" for s in (one, two))
    words = [*end_with_me("KILL"), "etcd", f"--data-dir={folder}/data", "--enable-v2"]
    words += [f"--{at}-client-urls=http://{clients}" for at in ("listen", "advertise")]
    for at in ("listen", "initial-advertise"):
        words += [f"--{at}-peer-urls=http://{peers}"]
    words += [f"--initial-cluster=default=http://{peers}"]
    log, deadline, is_up = Path(folder, "log"), time.monotonic() + 20, False
    with open(log, "wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        while not is_up and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            with suppress(OSError, ValueError):
                is_up = bool(ask(clients, "/"))
        if not is_up:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"etcd does not come up; it says: {' '.join(last)[:200]}")
        yield clients
    finally:
        process.kill()
        process.wait()


def run_agents(endpoint: str, command: list[str]) -> list[int]:
    """Start two agents, which meet in etcd; return how each of them ended."""
    words = ["--nnodes=2:4", "--nproc-per-node=1", "--rdzv-backend=etcd-v2"]
    # Once the smallest number is there, others have so many seconds to come.
    words += ["--rdzv-id=job", "--rdzv-conf=last_call_timeout=1"]
    words += [f"--rdzv-endpoint={endpoint}", *command]
    shown = "\n  ".join(["two agents: torchrun", *words])
    print(shown.replace(endpoint, "$ETCD"), flush=True)
    torchrun = [*end_with_me("TERM"), sys.executable, "-m", "torch.distributed.run"]
    agents = [subprocess.Popen(torchrun + words) for _ in range(2)]
    try:
        return [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
        for agent in agents:
            agent.wait()


def main() -> None:
    """Start etcd and the agents, look at what they left in etcd, stop it."""
    parser = argparse.ArgumentParser(description="Let torchrun's agents meet in etcd.")
    parser.add_argument("command", nargs="...", metavar="SCRIPT.py ...")
    command = parser.parse_args().command
    for number in (signal.SIGINT, signal.SIGTERM):  # an exit, so that all are ended
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if not command or not Path(command[0]).is_file():
            raise OSError(f"expected a script to run, not {command[:1]}")
        if not shutil.which("etcd"):
            raise OSError("there is no etcd here; on Debian: apt install etcd-server")
        if importlib.util.find_spec("etcd") is None:
            raise OSError("torchrun needs a client for etcd: pip install python-etcd")
        with tempfile.TemporaryDirectory() as folder, etcd(folder) as endpoint:
            if any(run_agents(endpoint, command)):
                sys.exit(1)
            path = ask(endpoint, RENDEZVOUS)["node"]["key"]
    except OSError as error:
        parser.exit(2, f"with_etcd.py: {error}\n")
    print(f"check: 2 agents have met in etcd at {path}")


if __name__ == "__main__":
    main()
