"""Torchruns that a script starts, listens to, and kills."""

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

from ranks import fail

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
PATIENCE = 180.0  # seconds for the next thing to happen


def free_port() -> int:
    """Return a TCP port that was free a moment ago, for those that must be told one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Torchruns:
    """Some torchruns, by name, in a temporary folder that is theirs.

    No torchrun and no rank outlives the `with` statement in which this is used.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        if "RANK" in os.environ:
            fail("start it with python, not torchrun: it starts its own processes")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Otherwise ranks that are started again may meet the addresses of dead ones
        # (pytorch#135712), and an agent that joins later waits in vain.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # Ctrl-C becomes an exit, so that what was started is ended first.
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        self.folder = Path(tempfile.mkdtemp())
        os.environ["TMPDIR"] = str(self.folder)  # a killed torchrun leaves files there
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> "Torchruns":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        for name in self.running:
            self.kill(name)
        shutil.rmtree(self.folder)

    def start(self, name: str, torchrun: list[str], train: list[str]) -> None:
        """Start torchrun and train.py, each with its options."""
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        self.start_command(name, [*launcher, *torchrun, str(TRAIN), *train])

    def start_command(self, name: str, command: list[str]) -> None:
        """Start a command; its errors go to the file `name`.log of the folder."""
        if shutil.which("setpriv"):  # to end it if this script is killed
            command = ["setpriv", "--pdeathsig=KILL", *command]
        with open(self.folder / f"{name}.log", "a") as log:
            process = self.running[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

        def listen() -> None:
            for line in process.stdout or ():
                self.lines.put(line.rstrip())

        threading.Thread(target=listen, daemon=True).start()

    def start_etcd(self, port: int) -> None:
        """Start an etcd on this machine, and wait until it listens at the port."""
        peers = f"http://127.0.0.1:{free_port()}"
        words = [f"--listen-client-urls=http://127.0.0.1:{port}", "--enable-v2"]
        words += [f"--advertise-client-urls=http://127.0.0.1:{port}"]
        words += [f"--listen-peer-urls={peers}", f"--initial-cluster=default={peers}"]
        words += [f"--initial-advertise-peer-urls={peers}"]
        self.start_command(
            "etcd", ["etcd", f"--data-dir={self.folder / 'etcd'}", *words]
        )
        end = time.monotonic() + PATIENCE
        while self.running["etcd"].poll() is None and time.monotonic() < end:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.1)
        sys.exit(f"etcd does not come up; {self.errors('etcd')[-1:]}")

    def errors(self, name: str) -> list[str]:
        """Return the lines that a torchrun and its ranks have written as errors."""
        return (self.folder / f"{name}.log").read_text(errors="replace").splitlines()

    def last_error(self, names: list[str]) -> str:
        """Return what the last exception of these torchruns and their ranks says."""
        lines = "\n".join(line for name in names for line in self.errors(name))
        pattern = r"^(?:\[rank\d+\]: )?[\w.]+Error: (\S.*)"
        told = re.findall(pattern, lines, re.M) or [""]
        # The first sentence, without the place in gloo's source and the address.
        return re.sub(r"^\[/\S+\] | \[[\d.]+\]:\d+", "", told[-1]).partition(". ")[0]

    def wait_for(self, pattern: str) -> list[str]:
        """Wait for a line of any rank; return it, and those before it."""
        heard, end = [""], time.monotonic() + PATIENCE
        while not re.match(pattern, heard[-1]):
            try:
                heard.append(self.lines.get(timeout=1))
            except queue.Empty:
                all_ended = all(one.poll() is not None for one in self.running.values())
                if all_ended or time.monotonic() > end:
                    last = {name: self.errors(name)[-1:] for name in self.running}
                    sys.exit(f"waited in vain for {pattern!r}; {last}")
        return heard[1:]

    def wait_for_checkpoint(self, name: str) -> None:
        """Wait until the next checkpoint of this name is written."""
        path, end = self.folder / name, time.monotonic() + PATIENCE
        before = path.stat().st_mtime_ns if path.exists() else 0
        while True:
            # Between two renames there is no newest checkpoint.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns != before:
                    return
            if time.monotonic() > end:
                sys.exit(f"waited in vain for a checkpoint {name}")
            time.sleep(0.01)

    def kill(self, name: str, rank: int | None = None, at_once: bool = False) -> None:
        """Send SIGKILL to one rank, or to the torchrun.

        Without their torchrun the ranks end by themselves; with `at_once` they are
        killed too. (A host that loses its power would also close no connection.)
        """
        torchrun = self.running[name]
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            launcher = psutil.Process(torchrun.pid)
            if rank is not None:  # of its own children: workers inherit RANK
                by_rank = {
                    one.environ().get("RANK"): one for one in launcher.children()
                }
                return by_rank[str(rank)].kill()
            started = launcher.children(recursive=True)
            torchrun.kill()
            for late in psutil.wait_procs(started, timeout=0 if at_once else 10)[1]:
                late.kill()
        torchrun.wait()
