"""Let torchrun's agents meet in etcd, a store that lives on when a host dies.

Run: python 03_ddp_torchrun/with_etcd.py 03_ddp_torchrun/train.py --max-steps=4
Needs: etcd, and its client for Python: apt install etcd-server; pip install
    python-etcd. It starts an etcd of its own, which ends with it; no root.
Expect: the command of each agent, what the ranks print, and a `check:` that the agents
    did meet in etcd.
Before: 03_ddp_torchrun/slow_link.py
Next: 03_ddp_torchrun/listening.py, about who else can get at all this.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import NoReturn

SECONDS_TO_START = 20
MOST_NODES = 4
# Where torchrun keeps the list of agents that take part in a job of the name "job".
MEETING = "/torch/elastic/rendezvous/job"


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def ask(endpoint: str, path: str) -> dict:
    """Ask etcd over HTTP, by its second protocol, the one that torchrun speaks.

    Raises:
        OSError: it does not answer, or there is nothing at `path`.
    """
    with urllib.request.urlopen(f"http://{endpoint}/{path}", timeout=5) as answer:
        return json.load(answer)


def end_with_me(kind: str) -> list[str]:
    """Return words in front of a command that end it if this process is killed."""
    return ["setpriv", f"--pdeathsig={kind}"] if shutil.which("setpriv") else []


def start_etcd(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start etcd on this machine's loopback, on ports that are free.

    Returns:
        The process, and the HOST:PORT where clients reach it.

    Raises:
        OSError: it does not come up.
    """
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        clients, peers = (f"127.0.0.1:{s.getsockname()[1]}" for s in (one, two))
    log = Path(folder, "log")
    words = [*end_with_me("KILL"), "etcd", f"--data-dir={folder}/data", "--enable-v2"]
    words += [
        f"--{who}-client-urls=http://{clients}" for who in ("listen", "advertise")
    ]
    words += [f"--listen-peer-urls=http://{peers}"]
    words += [f"--initial-advertise-peer-urls=http://{peers}"]
    words += [f"--initial-cluster=default=http://{peers}"]
    with open(log, "wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            ask(clients, "v2/keys")
            return process, clients
        except (OSError, ValueError):
            time.sleep(0.1)
    process.kill()
    process.wait()
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise OSError(f"etcd does not come up; it says: {' '.join(last)[:200]}")


def stop(number: int, _: FrameType | None) -> NoReturn:
    """Turn a signal into an exit, so that etcd and the agents are ended first."""
    sys.exit(128 + number)


def run_agents(endpoint: str, args: argparse.Namespace) -> list[int]:
    """Start some agents, which meet in etcd; return how each of them ended."""
    words = [
        "torchrun",
        f"--nnodes={args.agents}:{MOST_NODES}",
        "--nproc-per-node=1",
        "--rdzv-backend=etcd-v2",
        "--rdzv-id=job",
        f"--rdzv-endpoint={endpoint}",
        # Once the smallest number is there, others have so many seconds to come.
        "--rdzv-conf=last_call_timeout=1",
        *args.command,
    ]
    shown = shlex.join(words).replace(endpoint, "$ETCD")
    lines = textwrap.wrap(shown, 76, break_long_words=False, break_on_hyphens=False)
    print(f"{args.agents} agents:\n  " + " \\\n      ".join(lines), flush=True)
    words = [
        *end_with_me("TERM"),
        sys.executable,
        "-m",
        "torch.distributed.run",
        *words[1:],
    ]
    agents = [subprocess.Popen(words) for _ in range(args.agents)]
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
    add = parser.add_argument
    add("--agents", type=int, default=2, help="how many torchruns to start (2)")
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT.py ...",
        help="for torchrun",
    )
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if not args.command or not Path(args.command[0]).is_file():
        refuse(
            f"expected a script to run, not {' '.join(args.command[:1]) or 'nothing'}"
        )
    if not 1 <= args.agents <= MOST_NODES:
        refuse(f"--agents must be 1 to {MOST_NODES}, not {args.agents}")
    if not shutil.which("etcd"):
        refuse("there is no etcd here; on Debian or Ubuntu: apt install etcd-server")
    if importlib.util.find_spec("etcd") is None:
        refuse("torchrun needs a client for etcd: pip install python-etcd")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix="etcd") as folder:
        try:
            process, endpoint = start_etcd(folder)
        except OSError as error:
            refuse(str(error))
        try:
            statuses = run_agents(endpoint, args)
            try:
                left = ask(endpoint, f"v2/keys{MEETING}")["node"]
            except urllib.error.HTTPError:
                left = None
        finally:
            process.kill()
            process.wait()
    if any(statuses):
        sys.exit(1)
    if left is None:
        raise RuntimeError(f"the agents have left nothing in etcd at {MEETING}")
    print(f"check: {len(statuses)} agents have met in etcd at {MEETING}")


if __name__ == "__main__":
    main()
