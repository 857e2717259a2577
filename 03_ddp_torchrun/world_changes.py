"""Ranks leave a training run and others come; no sample is lost or counted twice.

Run: python 03_ddp_torchrun/world_changes.py
Needs: this folder and requirements.txt; Linux or macOS.
Expect: two agents of torchrun train together, each with one rank, as two machines would
    do; a third joins; one of the first is killed; the other two finish an epoch. Then a
    `check:` that the batch was the same throughout and each sample was seen once.
Before: 03_ddp_torchrun/crashes.py
Next: 03_ddp_torchrun/lab.py, hosts that only a network joins.
"""

import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from options import OneLineParser, fail

PATIENCE = 180.0  # seconds for the next thing to happen


def agent_command(port: int, is_host: bool, words: list[str]) -> list[str]:
    """Return what is typed on each machine; one of them holds the meeting point."""
    script = Path(__file__).with_name("train_elastic.py")
    # last_call_timeout: seconds to wait for more once there are enough (30 by default).
    conf = f"is_host={int(is_host)},last_call_timeout=3,keep_alive_interval=1"
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=world", "--local-addr=127.0.0.1", f"--rdzv-conf={conf}"),
        *(str(script), *words),
    ]


def end_with_me(kind: str) -> list[str]:
    """Return words in front of a command that end it if this process is killed."""
    return ["setpriv", f"--pdeathsig={kind}"] if shutil.which("setpriv") else []


class Agents:
    """Some agents, and what their ranks say."""

    def __init__(self, words: list[str], log: Path) -> None:
        """Take what follows the script's name, and a file for torchrun's messages."""
        self.words, self.log = words, log
        self.heard: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.lines: queue.Queue[str] = queue.Queue()

    def start(self, name: str) -> None:
        """Start one agent; the first one holds the meeting point."""
        with open(self.log, "a") as log:
            agent = subprocess.Popen(
                [
                    *end_with_me("KILL"),
                    *agent_command(self.port, not self.running, self.words),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.log.parent,
            )
        self.running[name] = agent

        def listen() -> None:
            assert agent.stdout is not None
            for line in agent.stdout:
                self.lines.put(line.rstrip())

        threading.Thread(target=listen, daemon=True).start()

    def wait_for(self, pattern: str) -> None:
        """Wait for a line, and print what matters on the way.

        Raises:
            RuntimeError: it does not come.
        """
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                last = self.log.read_text().strip().splitlines()[-1:]
                raise RuntimeError(f"waited in vain for {pattern!r}; {last}") from None
            self.heard.append(line)
            if re.match(r"ranks|snapshot: going|epoch \d+ \| \d+ steps", line):
                print(f"  {line}", flush=True)
            if re.match(pattern, line):
                return

    def wait_for_file(self, path: Path) -> None:
        """Wait until the run has written its next snapshot."""
        before, end = path.stat().st_mtime_ns if path.exists() else 0, time.monotonic()
        while not path.exists() or path.stat().st_mtime_ns == before:
            if time.monotonic() > end + PATIENCE:
                raise RuntimeError("waited in vain for the next snapshot")
            time.sleep(0.02)

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for agent in self.running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(agent.pid).children(recursive=True):
                    process.kill()
            agent.kill()
            agent.wait()


def judge_worlds(lines: list[str]) -> str:
    """Check all that the ranks have said.

    Raises:
        RuntimeError: the batch changed, or an epoch ended without a report.
    """
    text = "\n".join(lines)
    worlds = re.findall(r"^ranks: (\d)", text, re.M)
    batches = set(re.findall(r"(\d+) samples(?: a step$| =)", text, re.M))
    # A rank that finds a sample lost or seen twice ends with an error instead.
    pattern = r"^epoch (\d+) \| \d+ steps x \d+ samples = 4096 different samples$"
    epochs = {int(number) for number in re.findall(pattern, text, re.M)}
    result = (
        f"worlds of {', '.join(worlds)} ranks, {' or '.join(batches)} samples a step, "
        f"{len(epochs)} epoch(s) of 4096 different samples"
    )
    # In between there may have been smaller worlds, until the last had arrived.
    if "3" not in worlds or worlds[-1] != "2" or len(batches) != 1:
        raise RuntimeError(f"not what was expected: {result}")
    if not epochs or epochs != set(range(max(epochs) + 1)):
        raise RuntimeError(f"only epochs {sorted(epochs)} were whole: {result}")
    return result


def main() -> None:
    """Two ranks, then three, then two again."""
    OneLineParser(description="Let ranks join and leave a run.").parse_args()
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    # Ctrl-C becomes an exit, so that what was started is ended first.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # By default torch 2.13's agents let their ranks use a store that they keep from one
    # meeting to the next. Those who met before do not announce it again: an agent that
    # is new waits for that for a minute, and all fail. And it still holds the addresses
    # of ranks that are no more.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        log, path = Path(folder, "log"), Path(folder, "run.pt")
        words = ["--snapshot=run.pt", "--snapshot-every=8", "--batch-size=32"]
        agents = Agents([*words, "--max-epochs=1000"], log)
        try:
            print("agents A and B start", flush=True)
            agents.start("A")
            agents.start("B")
            agents.wait_for("ranks: 2")
            agents.wait_for_file(path)
            print("C joins", flush=True)
            agents.start("C")
            agents.wait_for("ranks: 3")
            agents.wait_for("snapshot: going on")
            agents.wait_for_file(path)
            print("B is killed", flush=True)
            agents.running["B"].kill()
            agents.wait_for("ranks: 2")
            agents.wait_for("snapshot: going on")
            agents.wait_for("epoch .* different samples")
        finally:
            agents.kill_all()
    print(f"check: {judge_worlds(agents.heard)}")


if __name__ == "__main__":
    main()
