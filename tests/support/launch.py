"""Start real process groups as a reader would, and leave no process behind.

`run` starts any command, `torchrun`, `python` and `deepspeed` start a script.
Each call gets its own session, a time-out and a mark in the environment that
every descendant inherits. The mark is what finds the processes that killing a
process group would miss: torchrun gives each rank a session of its own.

A process that clears its environment and outlives its parent cannot be found by
the mark; if it still holds an output stream it is reported all the same.
"""

import atexit
import functools
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent

# Seconds that descendants may outlive the command before they count as leaked.
GRACE = 3.0

MARK = "TEST_LAUNCH_MARK"
# A launch inside a launch extends the outer mark, so that the outer one finds it.
SESSION = f"{os.environ.get(MARK, '')}{uuid.uuid4().hex}/"
_numbers = itertools.count()

_LAUNCHER_PREFIXES = ("MASTER_", "LOCAL_", "TORCHELASTIC_", "PET_", "PYTEST_")
_LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "CROSS_RANK", "CROSS_SIZE"),
}
# These change what a command prints: Python's switches, the width of help texts,
# the language of messages, PyTorch's own debugging, and DeepSpeed's device, which a
# test may have set.
_OUTPUT_PREFIXES = ("PYTHON", "LC_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_")
_OUTPUT_NAMES = {"LANGUAGE", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
_OUTPUT_NAMES |= {"DS_ACCELERATOR"}


@dataclass(frozen=True)
class Result:
    """What a finished command returned, printed and took.

    `output` holds both streams, whole lines in order of arrival. Within a stream
    the order is exact; between the two it is as close as two pipes allow.
    """

    returncode: int
    stdout: str
    stderr: str
    output: str
    seconds: float


class LaunchError(Exception):
    """A launch that did not end cleanly; `output` is what it printed."""

    def __init__(self, message: str, output: str) -> None:
        """Put the end of `output` below `message`."""
        super().__init__(f"{message}\n--- last output ---\n{_tail(output)}")
        self.output = output


class LaunchTimeout(LaunchError):
    """The command did not end in time; the message says which ranks still ran."""


class LaunchLeak(LaunchError):
    """The command ended but left processes behind; the message names them."""


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment of a fresh shell in which this venv is active.

    Nothing of an outer launcher or of pytest is left in it, and no setting that
    changes what a command prints. `extra` is added last.
    """
    prefixes = _LAUNCHER_PREFIXES + _OUTPUT_PREFIXES
    names = _LAUNCHER_NAMES | _OUTPUT_NAMES
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) and name not in names
    }
    # The path is not resolved: in a venv `python` is a link to the base Python.
    own_bin = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath).split(os.pathsep)
    rest = [folder for folder in path if folder != own_bin]
    environment["PATH"] = os.pathsep.join([own_bin, *rest])
    environment.setdefault("HOME", str(Path.home()))
    environment["LANG"] = "C.UTF-8"
    environment["OMP_NUM_THREADS"] = "1"
    # Where a command has two threads, the one that waits sleeps. By default it would
    # spin, and take the cores from what is tested beside it.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return environment | extra


def free_port() -> int:
    """Return a TCP port that was free a moment ago, for tools that must be told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(script: str | Path, *args: Any, nproc: int = 2, **options: Any) -> Result:
    """Run `script` on `nproc` ranks; `options` go to `run`.

    On one node torchrun chooses a free port if it is told neither a port nor a
    rendezvous, so this is the command that a reader types.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return run([*launcher, f"--nproc-per-node={nproc}", script, *args], **options)


def python(script: str | Path, *args: Any, **options: Any) -> Result:
    """Run `script` in one Python process; `options` go to `run`."""
    return run([sys.executable, script, *args], **options)


def deepspeed(
    script: str | Path, *args: Any, num_ranks: int = 2, **options: Any
) -> Result:
    """Run `script` under the DeepSpeed launcher; `options` go to `run`.

    Without a port the launcher takes 29500, which another job may hold.
    """
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    settings = [f"--num_gpus={num_ranks}", f"--master_port={free_port()}"]
    return run([*launcher, *settings, script, *args], **options)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float = 300,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
) -> Result:
    """Run `command` to its end and return what it printed.

    Args:
        command: Program and arguments; the program is looked up on `env`'s PATH.
        timeout: Seconds after which every process of the command is killed.
        cwd: Working directory; the repository root if None.
        env: The whole environment; `clean_environment()` if None.
            `PYTHONFAULTHANDLER` is switched on unless it is set, so that a hung
            or crashed Python process prints where it was.
        input: Text for standard input, which is empty if None.

    Raises:
        LaunchTimeout: The command ran longer than `timeout` seconds.
        LaunchLeak: The command ended and left processes behind.
    """
    _guard()
    words = [str(word) for word in command]
    mark = f"{SESSION}{next(_numbers)}/"
    environment = dict(clean_environment() if env is None else env)
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    environment[MARK] = mark
    # Input comes from a file: a pipe could fill up before the command reads it.
    with tempfile.TemporaryFile() as stdin:
        stdin.write((input or "").encode())
        stdin.seek(0)
        start = time.monotonic()
        process = subprocess.Popen(
            words,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT if cwd is None else cwd,
            env=environment,
            start_new_session=True,
        )
    capture = _Capture(process)
    try:
        while process.poll() is None:
            if time.monotonic() - start > timeout:
                capture.drain()
                printed = capture.text()
                report = _stop_and_report(process, mark, capture)
                reason = f"no end after {timeout:g} s: {' '.join(words)}\n{report}"
                raise LaunchTimeout(reason, printed)
            capture.pump(0.05)
        seconds = time.monotonic() - start
        leaked = _wait_for_descendants(mark, capture)
        if leaked:
            reason = f"left behind by {' '.join(words)}, exit code "
            reason += f"{process.returncode}:\n{leaked}"
            raise LaunchLeak(reason, capture.text())
    finally:
        # This also runs on an interrupt or on a time-out of the test itself.
        _kill(mark, process)
        process.wait()
        capture.close()
    out, err = capture.text("stdout"), capture.text("stderr")
    return Result(process.returncode, out, err, capture.text(), seconds)


class _Capture:
    """Both output streams of a process, read without threads."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        self._lines: list[tuple[str, bytes]] = []
        self._unfinished = {"stdout": b"", "stderr": b""}
        self._streams = [getattr(process, name) for name in self._unfinished]
        for name, stream in zip(self._unfinished, self._streams, strict=True):
            self._selector.register(stream, selectors.EVENT_READ, name)

    @property
    def is_open(self) -> bool:
        return bool(self._selector.get_map())

    def pump(self, seconds: float) -> bool:
        """Read what arrives within `seconds` and return after the first data.

        Returns:
            Whether anything arrived.
        """
        if not self.is_open:
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            chunk = os.read(key.fd, 1 << 16)
            # Only whole lines enter the record, so that one stream never cuts
            # through a line of the other.
            text = self._unfinished[key.data] + chunk
            end = text.rfind(b"\n") + 1 if chunk else len(text)
            self._lines.append((key.data, text[:end]))
            self._unfinished[key.data] = text[end:]
            if not chunk:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def drain(self) -> None:
        """Read until nothing more arrives, but for a second at most."""
        deadline = time.monotonic() + 1
        while self.is_open and self.pump(0.05) and time.monotonic() < deadline:
            pass

    def text(self, stream: str | None = None) -> str:
        parts = [*self._lines, *self._unfinished.items()]
        wanted = (part for name, part in parts if stream in (None, name))
        return b"".join(wanted).decode(errors="replace")

    def close(self) -> None:
        self._selector.close()
        for stream in self._streams:
            stream.close()


def _find(mark: str, process: subprocess.Popen[bytes] | None = None) -> set[Any]:
    """Return the living processes that carry `mark`, and those below `process`."""
    found = set()
    for candidate in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if candidate.environ().get(MARK, "").startswith(mark):
                found.add(candidate)
    if process is not None and process.poll() is None:
        with suppress(psutil.Error):
            parent = psutil.Process(process.pid)
            found |= {parent, *parent.children(recursive=True)}
    return {one for one in found if _is_alive(one)}


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _kill(mark: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Kill until none is found: a process may fork while it is being killed."""
    deadline = time.monotonic() + 10
    while (alive := _find(mark, process)) and time.monotonic() < deadline:
        for one in alive:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(alive, timeout=0.2)


def _wait_for_descendants(mark: str, capture: _Capture) -> str:
    """Read to the end of both streams; describe what outlives the grace, if any."""
    deadline = time.monotonic() + GRACE
    while True:
        capture.pump(0.02 if capture.is_open else 0)
        alive = set() if capture.is_open else _find(mark)
        if not capture.is_open and not alive:
            return ""
        if time.monotonic() > deadline:
            break
        if alive:
            time.sleep(0.05)
    described = [_describe(one) for one in sorted(_find(mark), key=lambda p: p.pid)]
    return "; ".join(described) or "an unknown process holds the output open"


def _stop_and_report(
    process: subprocess.Popen[bytes], mark: str, capture: _Capture
) -> str:
    """Kill everything; say who still ran, and where by each rank's own stack."""
    alive = sorted(_find(mark, process), key=lambda p: p.pid)
    ranks = {one: rank for one in alive if (rank := _rank(one)) is not None}
    suspects = list(ranks or alive)
    lines = [_describe(one) for one in suspects]
    started = max((_world_size(one) for one in ranks), default=0)
    ended = sorted(set(range(started)) - set(ranks.values()))
    if ended:
        words = "rank" if len(ended) == 1 else "ranks"
        lines.append(f"{words} {', '.join(map(str, ended))} exited")
    report = "; ".join(lines)
    # The launchers go first: they would report or restart the ranks that die now.
    for one in alive:
        if one not in suspects:
            with suppress(psutil.Error):
                one.kill()
    # One at a time, so that the stacks do not mix.
    for one in suspects:
        stack = _stack(one, capture)
        if stack:
            report += f"\n--- stack of {_name(one, ranks.get(one))} ---\n{stack}"
    _kill(mark, process)
    return report


def _stack(process: psutil.Process, capture: _Capture) -> str:
    """Abort `process` and return the stacks that faulthandler then prints."""
    capture.drain()
    before = len(capture.text("stderr"))
    with suppress(psutil.Error):
        if hasattr(process, "rlimit"):
            process.rlimit(psutil.RLIMIT_CORE, (0, 0))
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + 2
    while _is_alive(process) and time.monotonic() < deadline:
        capture.pump(0.05)
    capture.drain()
    printed = capture.text("stderr")[before:]
    lines = printed.partition("\nExtension modules: ")[0].splitlines()
    return "\n".join(line[:300] for line in lines[:60])


def _variable(process: psutil.Process, name: str) -> int | None:
    with suppress(psutil.Error, OSError, ValueError, KeyError):
        return int(process.environ()[name])
    return None


def _rank(process: psutil.Process) -> int | None:
    return _variable(process, "RANK")


def _world_size(process: psutil.Process) -> int:
    return _variable(process, "WORLD_SIZE") or 0


def _describe(process: psutil.Process) -> str:
    rank = _rank(process)
    command = "(gone)"
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())[:200]
    return f"{_name(process, rank)} still running: {command}"


def _name(process: psutil.Process, rank: int | None) -> str:
    return f"pid {process.pid}" if rank is None else f"rank {rank} (pid {process.pid})"


def _tail(text: str) -> str:
    return "\n".join(line[:300] for line in text.splitlines()[-50:])


@functools.cache
def _guard() -> None:
    """Start a process that kills this session's launches when this process dies.

    It outlives a killed test run just long enough for that: its standard input
    ends with the one process that holds the other end. It starts in a session of
    its own because Ctrl-C must not reach it.
    """
    guard = subprocess.Popen(
        [sys.executable, __file__, SESSION],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(guard.communicate)


if __name__ == "__main__":
    sys.stdin.read()
    _kill(sys.argv[1])
