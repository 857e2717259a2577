"""Chapter 04: who dies, who is told, and that nothing is left running."""

import multiprocessing
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from launch import ROOT, clean_environment, free_port
from pages import words_of
from scripts import load_chapter

CHAPTER = "04_rpc_parameter_server"
TRAIN = ROOT / CHAPTER / "train.py"
SUPERVISED = load_chapter(CHAPTER)["supervised_roles"]
NAMES = ["master", "parameter server", "trainer 0", "trainer 1"]
PATIENCE = 60  # seconds; generous, because other tests may hold the cores


class Run:
    """Processes that this test started, found by a mark in their environment."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, script: Path = TRAIN) -> subprocess.Popen[str]:
        """Start train.py, or another script; both streams go to one pipe."""
        process = subprocess.Popen(
            [sys.executable, str(script), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The README says to set the second one in each terminal.
            env=clean_environment(RPC_TEST_MARK=self.mark, TORCH_CPP_LOG_LEVEL="ERROR"),
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def alive(self) -> list[psutil.Process]:
        """Return all that still runs, in the order in which it was started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if (
                    process.environ().get("RPC_TEST_MARK") == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return sorted(found, key=lambda process: (process.create_time(), process.pid))

    def wait_until_empty(self, seconds: float) -> list[str]:
        """Wait until nothing runs any more; name what does after so many seconds."""
        deadline = time.monotonic() + seconds
        while (alive := self.alive()) and time.monotonic() < deadline:
            for process in self.started:
                process.poll()
            time.sleep(0.1)
        return [str(process) for process in alive]


@pytest.fixture
def run() -> Iterator[Run]:
    """Give a test its processes, and end them after it."""
    processes = Run()
    yield processes
    for one in processes.alive():
        with suppress(psutil.Error):
            one.kill()
    for process in processes.started:
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read a process's lines up to one that holds the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"ended without {text!r}: {lines}")


def roles_of(run: Run, launcher: int) -> dict[str, psutil.Process]:
    """Tell which process has which role: they are started in the order of NAMES."""
    servers = [p for p in run.alive() if p.ppid() == launcher and p.children()]
    (fork_server,) = [p for p in servers if len(p.children()) == len(NAMES)]
    children = sorted(fork_server.children(), key=lambda p: (p.create_time(), p.pid))
    return dict(zip(NAMES, children, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 1", "parameter server"])
def test_a_killed_role_is_named_once_and_nobody_is_left(
    run: Run, victim: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.pt"
    process = run.start("--epochs=1000", f"--table={path}")
    read_until(process, "untrained")
    time.sleep(random.random())
    roles_of(run, process.pid)[victim].kill()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    named = [line for line in output.splitlines() if "killed by SIGKILL" in line]
    assert named == [f"{victim} was killed by SIGKILL; ending all others"]
    assert "Traceback" not in output
    assert run.wait_until_empty(3) == []
    # The server is told to end, and saves; if it was the victim, it could not.
    assert path.exists() == (victim != "parameter server")


def check_saved_table(path: Path, rows: int = 2**15) -> None:
    """Assert that a table was saved whole, by a server whose trainers had stepped."""
    modules = load_chapter(CHAPTER)
    saved = modules["table_file"].load_table(path)
    start = modules["classifier"].Table(rows, 32, 0).weight.detach()
    assert saved.shape == start.shape
    assert 1000 < int((saved != start).any(dim=1).sum()) < 10_000
    assert bool(torch.isfinite(saved).all())
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_roles_end_when_their_launcher_is_killed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "table.pt"
    process = run.start("--epochs=1000", f"--table={path}")
    read_until(process, "epoch 0")
    roles = roles_of(run, process.pid)
    assert len(roles) == 4
    # Its store, RPC and gloo: none of them can be reached from another machine.
    for one in (psutil.Process(process.pid), *roles.values()):
        connections = one.net_connections(kind="inet")
        at = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
        assert at and set(at) == {"127.0.0.1"}, one
        # A thread that polls shared memory would take a core from all others (Linux).
        threads = Path(f"/proc/{one.pid}/task").glob("*/comm")
        assert "TP_SHM_reactor" not in {name.read_text().strip() for name in threads}
    process.kill()
    assert run.wait_until_empty(PATIENCE) == []
    check_saved_table(path)


# With three processes there is the fork server, which imports torch; with more
# it has begun to start the roles.
@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_ctrl_c_while_they_start_leaves_nobody(run: Run, processes: int) -> None:
    process = run.start("--epochs=1000")
    while len(run.alive()) < processes:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert run.wait_until_empty(3) == []


@pytest.mark.slow
def test_a_signal_saves_the_table_whole(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "table.pt"
    process = run.start("--epochs=1000", f"--table={path}")
    read_until(process, "epoch 0")
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"parameter server: table saved to {path}\n" in output
    assert "Traceback" not in output
    check_saved_table(path)
    assert run.wait_until_empty(3) == []


# A server whose disk takes two seconds, where all others are given a fifth of one.
SLOW_DISK = """
import os
import sys
import time

sys.path.insert(0, {chapter!r})
import supervised_roles
import table_file
import train

fsync = os.fsync


def slow_fsync(descriptor):
    time.sleep(2)
    fsync(descriptor)


table_file.os.fsync = slow_fsync
supervised_roles.TIME_TO_END = 0.2

if __name__ == "__main__":
    train.main()
"""


@pytest.mark.slow
def test_a_signal_leaves_the_server_time_to_save(run: Run, tmp_path: Path) -> None:
    (script := tmp_path / "slow_disk.py").write_text(
        SLOW_DISK.format(chapter=str(ROOT / CHAPTER))
    )
    (folder := tmp_path / "table").mkdir()
    path = folder / "table.pt"
    process = run.start("--epochs=1000", f"--table={path}", script=script)
    read_until(process, "epoch 0")
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE)
    assert f"parameter server: table saved to {path}\n" in output
    assert "has not ended" not in output and "Traceback" not in output
    check_saved_table(path)
    assert run.wait_until_empty(3) == []


def save_after_a_signal(seconds: float, ready: Path, saved: Path) -> None:
    """Be a role that takes so long to save once it is told to end."""

    def save(*_: object) -> None:
        time.sleep(seconds)
        saved.touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    ready.touch()
    time.sleep(PATIENCE)


def saved_at_an_end(folder: Path, seconds: float, **limits: Any) -> list[str]:
    """End four roles that take so long to save; return the names of those who do."""
    supervised, context = SUPERVISED, multiprocessing.get_context("fork")
    names = supervised.names_of_roles(2)
    files = [(folder / f"{name} ready", folder / name) for name in names]
    processes = [
        context.Process(target=save_after_a_signal, args=(seconds, *two), name=name)
        for name, two in zip(names, files, strict=True)
    ]
    for process in processes:
        process.start()
    while not all(ready.exists() for ready, _ in files):
        time.sleep(0.01)
    with mock.patch.multiple(supervised, **limits):
        supervised.end([*processes, context.Process(name="never started")])
    assert not any(process.is_alive() for process in processes)
    return [
        name for name, (_, saved) in zip(names, files, strict=True) if saved.exists()
    ]


def test_the_server_has_longer_to_end_than_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first := tmp_path / "1").mkdir()
    limits = {"TIME_TO_END": 0.2, "TIME_TO_SAVE": 30.0}
    assert saved_at_an_end(first, 2.0, **limits) == [SUPERVISED.SERVER]
    assert capsys.readouterr().err == ""
    (second := tmp_path / "2").mkdir()
    limits = {"TIME_TO_END": 0.2, "TIME_TO_SAVE": 0.5}
    assert saved_at_an_end(second, PATIENCE, **limits) == []
    line = "parameter server has not ended within 0.5 s: killed, what it had not saved"
    assert capsys.readouterr().err == f"{line} is lost\n"


@pytest.mark.slow
def test_the_commands_for_four_terminals_train_together(run: Run) -> None:
    page = (ROOT / CHAPTER / "README.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.S)
    block = block.replace("--master-port=29604", f"--master-port={free_port()}")
    processes = []
    for command in block.split("\n\n"):
        program, script, *words = shlex.split(command.replace("\\\n", " "))
        assert (program, script) == ("python", f"{CHAPTER}/train.py")
        processes.append(run.start(*words))
    output = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, output
    checks = [line for line in output[3].splitlines() if "check: " in line]
    assert len(checks) == 3
    assert checks[0] == "master: check: the dense weights of 2 trainer(s) are equal"
    assert checks[2].endswith("rows have moved; all of these had been looked up")
    assert run.wait_until_empty(3) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parameter server", "trainer 1"])
def test_in_separate_terminals_everyone_names_the_one_who_died(
    run: Run, victim: str, tmp_path: Path
) -> None:
    words = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    path = tmp_path / "table.pt"
    # How many rows the table has is decided at the master, and the file agrees with it.
    modules = load_chapter(CHAPTER)
    weights = modules["classifier"].Table(2**16, 32, 0).weight.detach()
    modules["table_file"].save_table(path, weights)
    before = path.read_bytes()
    roles = {
        "master": run.start("--role=master", "--epochs=1000", "--rows=65536", *words),
        "parameter server": run.start(
            "--role=parameter_server", f"--table={path}", *words
        ),
    }
    for rank in range(2):
        name = f"trainer {rank}"
        roles[name] = run.start("--role=trainer", f"--rank={rank}", *words)
    read_until(roles["trainer 0"], "epoch 0")
    time.sleep(random.random())
    roles.pop(victim).kill()
    for name, process in roles.items():
        output, _ = process.communicate(timeout=PATIENCE)
        line = f"{name}: {victim} has died or cannot be reached; ending\n"
        assert output.count(line) == 1, output
        assert "Traceback" not in output
        assert process.returncode == 3
        saves = name == "parameter server"
        assert output.count(f"{name}: table saved to {path}\n") == saves
    assert len(roles) == 3
    assert run.wait_until_empty(3) == []
    if victim == "parameter server":
        assert path.read_bytes() == before
    else:
        check_saved_table(path, rows=2**16)


@pytest.mark.slow
def test_who_does_not_come_is_named_by_those_who_did(run: Run) -> None:
    words = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    master = run.start("--role=master", "--patience=6", *words)
    trainer = run.start("--role=trainer", "--rank=0", "--patience=6", *words)
    output = [process.communicate(timeout=PATIENCE)[0] for process in (master, trainer)]
    missing = "parameter server, trainer 1 did not come within 6 s; ending"
    assert output[0] == f"master: {missing}\n"
    # The trainer may find that the master has given up already.
    gone = "trainer 0: master has died or cannot be reached; ending\n"
    assert output[1] in (f"trainer 0: {missing}\n", gone)
    assert run.wait_until_empty(3) == []


@pytest.mark.slow
def test_a_port_in_use_and_an_absent_master_are_one_line_each(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        output, _ = run.start("--role=master", *words).communicate(timeout=PATIENCE)
    assert output == (
        f"train.py: cannot listen at 127.0.0.1:{port}: Address already in use; "
        "check --master-addr, or choose another --master-port\n"
    )
    process = run.start("--role=parameter_server", "--patience=0.5", *words)
    output, _ = process.communicate(timeout=PATIENCE)
    assert output == f"train.py: no master at 127.0.0.1:{port} after 0.5 s\n"
    assert process.returncode == 2


def test_a_death_is_told_within_15_seconds() -> None:
    beats = load_chapter(CHAPTER)["heartbeats"]
    assert beats.DEAD_AFTER == 10  # the supervision page's
    assert beats.DEAD_AFTER + beats.FAREWELL + 4 * beats.BEAT <= 15  # the chapter's
    assert beats.TIME_TO_SAVE == SUPERVISED.TIME_TO_SAVE == 30
    page = words_of(f"{CHAPTER}/supervision")
    assert "server ends: within 30 seconds, if a role dies or `train.py` is" in page


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_store_listens_where_the_socket_does_that_it_is_given() -> None:
    trust: Any = load_chapter("04_rpc_parameter_server/supervision")["trust"]
    before, own = Counter(trust.listening()), socket.create_server(("127.0.0.1", 0))
    port = own.getsockname()[1]
    words: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    given = dist.TCPStore("127.0.0.1", port, master_listen_fd=own.detach(), **words)
    assert Counter(trust.listening()) - before == {"127.0.0.1": 1}
    plain = dist.TCPStore("127.0.0.1", 0, **words)
    assert Counter(trust.listening()) - before == {"127.0.0.1": 1, "::": 1}
    for store in (given, plain):
        dist.TCPStore("127.0.0.1", store.port, is_master=False).set("word", "here")
        assert store.get("word") == b"here"
