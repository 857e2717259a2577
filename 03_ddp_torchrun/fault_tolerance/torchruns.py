"""Torchruns that a script starts, listens to, and kills."""

import contextlib
import os
import queue
import re
import shutil
import signal
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
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        if shutil.which("setpriv"):  # to end torchrun if this script is killed
            command = ["setpriv", "--pdeathsig=KILL", *command]
        with open(self.folder / "log", "a") as log:
            process = self.running[name] = subprocess.Popen(
                [*command, str(TRAIN), *train],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

        def listen() -> None:
            for line in process.stdout or ():
                self.lines.put(line.rstrip())

        threading.Thread(target=listen, daemon=True).start()

    def wait_for(self, pattern: str) -> list[str]:
        """Wait for a line of any rank; return it, and those before it."""
        heard, end = [""], time.monotonic() + PATIENCE
        while not re.match(pattern, heard[-1]):
            try:
                heard.append(self.lines.get(timeout=1))
            except queue.Empty:
                all_ended = all(one.poll() is not None for one in self.running.values())
                if all_ended or time.monotonic() > end:
                    last = (self.folder / "log").read_text().splitlines()[-1:]
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

    def kill(self, name: str, rank: int | None = None) -> None:
        """Send SIGKILL to one rank, or to the torchrun; then its ranks end, too."""
        torchrun = self.running[name]
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            ranks = psutil.Process(torchrun.pid).children(recursive=True)
            if rank is not None:
                by_rank = {one.environ().get("RANK"): one for one in ranks}
                return by_rank[str(rank)].kill()
            torchrun.kill()
            for late in psutil.wait_procs(ranks, timeout=10)[1]:
                late.kill()
        torchrun.wait()
