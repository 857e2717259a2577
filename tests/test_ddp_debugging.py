"""Chapter 03, the room debugging/: what each tool says of a hang and of a slow rank."""

import contextlib
import faulthandler
import io
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace

from launch import ROOT, Result, clean_environment, torchrun
from lessons import in_the_pool
from pages import words_of
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

ROOM = "03_ddp_torchrun/debugging"
RANKS = 3


def room() -> dict[str, Any]:
    """Return the room's modules, loaded once."""
    return load_chapter(ROOM)


def line_of(module: str, text: str) -> int:
    """Return the number of the only line of a module that holds a text."""
    lines = (ROOT / ROOM / f"{module}.py").read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, start=1) if text in line)
    return number


# --- A run that hangs, and whom one can ask. ----------


@dataclass
class Hung:
    """A run in which no rank makes a step any more, and what it has printed so far."""

    pids: list[int]
    folder: Path
    log: Path

    def text(self) -> str:
        """Return what the run has printed up to now."""
        return self.log.read_text()


def can_trace() -> str:
    """Say why py-spy cannot look into another process here; "" if it can."""
    if shutil.which("py-spy", path=clean_environment()["PATH"]) is None:
        return "py-spy is not installed"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as other:
        result = spy(other.pid)
        other.communicate(b"\n")
    return "" if result.returncode == 0 else "py-spy may not trace processes"


def spy(pid: int) -> subprocess.CompletedProcess[str]:
    """Run `py-spy dump`; try again while the process has only begun."""
    command = ["py-spy", "dump", "--pid", str(pid)]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 20}
    result = subprocess.run(command, env=clean_environment(), **how)
    tries = 1
    while result.returncode and "ermission" not in result.stderr and tries < 20:
        time.sleep(0.2)
        result = subprocess.run(command, env=clean_environment(), **how)
        tries += 1
    return result


@contextlib.contextmanager
def running(script: str, folder: Path, *words: str) -> Iterator[Hung]:
    """Start a script of the room on three ranks; end it when it is no longer needed."""
    log = folder / "log"
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher.append(f"--nproc-per-node={RANKS}")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*launcher, str(ROOT / ROOM / script), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=clean_environment(),
        )
    everyone: list[psutil.Process] = []
    try:
        found: list[str] = []
        deadline = time.monotonic() + 60
        while len(found) < RANKS:
            assert process.poll() is None and time.monotonic() < deadline
            found = re.findall(r"^rank \d is process (\d+)", log.read_text(), re.M)
            time.sleep(0.1)
        said = re.findall(r"^rank (\d) is process (\d+) on ", log.read_text(), re.M)
        pids = [int(pid) for _, pid in sorted(said)]
        everyone = [psutil.Process(pid) for pid in pids]
        yield Hung(pids, folder / "hang", log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            left = psutil.wait_procs(everyone, timeout=45)[1]
            for one in left:
                one.kill()
    assert left == []


def until_silent(run: Hung) -> None:
    """Wait until the watchdogs of all ranks have written."""
    deadline = time.monotonic() + 60
    while run.text().count(" made no step for 5 s, see hang/\n") < RANKS:
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    """Keep hangs.py hanging while this file's tests ask it."""
    folder = tmp_path_factory.mktemp("hung")
    with running("hangs.py", folder) as run:
        until_silent(run)
        yield run


KINDS = (("record", ""), ("stack", ".txt"))  # what a watchdog writes
# Where the ranks are: two wait in backward, the third for its queue.
GET = line_of("prefetch", "sample = self.samples.get()")
NEXT = line_of("hangs", "sample = samples.next_sample()")
BACKWARD = line_of("hangs", ".backward()")


@pytest.mark.slow
def test_run_falls_silent_after_six_steps(hung: Hung) -> None:
    steps = re.findall(r"^step (\d+)$", hung.text(), re.M)
    assert steps == [str(step) for step in range(6)]
    # All are alive, asleep, and use no more processor time.
    ranks = [psutil.Process(pid) for pid in hung.pids]
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    time.sleep(1)
    after = [sum(rank.cpu_times()[:2]) for rank in ranks]
    assert [rank.status() for rank in ranks] == ["sleeping"] * RANKS
    assert [late - early < 0.3 for early, late in zip(before, after, strict=True)] == [
        True
    ] * RANKS


@pytest.mark.slow
def test_py_spy_shows_the_line_of_each_rank(hung: Hung) -> None:
    if reason := can_trace():
        pytest.skip(reason)
    dumps = [spy(pid).stdout for pid in hung.pids]
    assert len(dumps) == RANKS
    for rank, text in enumerate(dumps):
        assert f"Process {hung.pids[rank]}: " in text
        main = text.partition('"MainThread"')[2].partition("Thread ")[0]
        if rank == 1:
            assert f"next_sample (prefetch.py:{GET})" in main
            assert f"main (hangs.py:{NEXT})" in main
        else:
            assert "_engine_run_backward (torch/autograd/graph.py" in main
            assert f"main (hangs.py:{BACKWARD})" in main
        # The thread that should fill the queue is gone, on the one rank.
        assert ('"prefetch"' in text) == (rank != 1)


@pytest.mark.slow
def test_usr1_makes_a_rank_print_its_stack(hung: Hung) -> None:
    before = len(hung.text())
    os.kill(hung.pids[1], signal.SIGUSR1)
    deadline = time.monotonic() + 10
    frame = f'prefetch.py", line {GET} in next_sample'
    while frame not in hung.text()[before:]:
        assert time.monotonic() < deadline, hung.text()[before:]
        time.sleep(0.1)
    assert psutil.Process(hung.pids[1]).is_running()


@pytest.mark.slow
def test_watchdogs_write_where_each_rank_is(hung: Hung) -> None:
    names = sorted(path.name for path in hung.folder.iterdir())
    assert names == [f"{kind}_{r}" + end for kind, end in KINDS for r in range(RANKS)]
    stacks = [(hung.folder / f"stack_{r}.txt").read_text() for r in range(RANKS)]
    frames = [re.findall(r'([\w.]+)", line (\d+) in ([\w<>]+)', one) for one in stacks]
    assert frames[1][-3:] == [
        ("prefetch.py", str(GET), "next_sample"),
        ("hangs.py", str(NEXT), "main"),
        ("hangs.py", frames[1][-1][1], "<module>"),
    ]
    for waiting in (frames[0], frames[2]):
        assert waiting[-2] == ("hangs.py", str(BACKWARD), "main")
        assert waiting[-5][2] == "_engine_run_backward"


@pytest.mark.slow
def test_flight_record_names_the_rank_that_is_missing(
    hung: Hung, tmp_path: Path
) -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("torchfrtrace"), hung.folder, "-p", "record_"],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean_environment(),
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "missing ranks: {1}" in said and "expected ranks: {0, 1, 2}" in said
    assert "collective: gloo:all_reduce" in said and "input sizes: [[72]]" in said
    assert f"hangs.py:{BACKWARD}" in said
    # As PyTorch gives it out, it lacks the name of the group.
    records = [
        pickle.loads((hung.folder / f"record_{rank}").read_bytes())
        for rank in range(RANKS)
    ]
    called = [
        record["pg_status"]["0"]["last_enqueued_collective"] for record in records
    ]
    assert called == [called[1] + 1, called[1], called[1] + 1]
    assert [list(record["pg_config"]) for record in records] == [["0"]] * RANKS
    for rank, record in enumerate(records):
        record["pg_config"][""] = record["pg_config"].pop("0")
        (tmp_path / f"record_{rank}").write_bytes(pickle.dumps(record))
    with pytest.raises(KeyError, match="0"):
        fr_trace.main([str(tmp_path), "--prefix", "record_"])


def record_of_five_groups(folder: str, kept: int) -> str:
    """Leave out a call on rank 1, in one of five groups; return its error.

    Ranks 0 and 2 have made six calls more than rank 1, the first of all in a group that
    is gone. Only the last `kept` are kept.
    """
    early: Any = dist.new_group([0, 2])
    for _ in range(2 * (dist.get_rank() != 1)):
        dist.all_reduce(torch.ones(2), group=early)
    dist.destroy_process_group(early)
    second = dist.new_group(timeout=timedelta(seconds=1))
    third: Any = dist.new_group()
    outer = dist.new_group([0, 2])
    for group in (None, second, third):
        dist.all_reduce(torch.ones(2), group=group)
    for group in [outer] * 4 * (dist.get_rank() != 1) + [second] * 8:
        dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(third)
    said = ""
    if dist.get_rank() != 1:
        try:
            dist.all_reduce(torch.ones(5), group=second)
        except RuntimeError as error:
            said = str(error)
    record = pickle.loads(room()["watchdog"].flight_record())
    assert record["entries"].pop(0)["profiling_name"] == "gloo:barrier"  # the pool's
    record["entries"] = record["entries"][-kept:]
    Path(folder, f"record_{dist.get_rank()}").write_bytes(pickle.dumps(record))
    return said


@pytest.mark.parametrize("kept", [2000, 6])
def test_flight_record_knows_each_of_several_groups(
    kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with WorkerPool(3) as workers:  # of its own, or other tests' calls are recorded too
        said = workers.run(record_of_five_groups, str(tmp_path), kept, world_size=3)
    assert [" Timed out " in one for one in said] == [True, False, True]
    fr_trace.main([str(tmp_path), "--prefix", "record_"])
    assert "missing ranks: {1}" in caplog.text
    assert "expected ranks: {0, 1, 2}" in caplog.text
    numbers = re.findall(r"Not all ranks .*, sequence number: (\d+)", caplog.text)
    # Once calls are lost, of others on each rank, it names some that nobody has missed.
    assert numbers == (["10"] if kept == 2000 else [*"56789", "10"])
    page = words_of(ROOM)
    assert "let the recorder hold them all, or torchfrtrace names wrong ones." in page


def launch(script: str, folder: Path, *words: str, **env: str) -> Result:
    """Run a script of the room on three ranks to its end."""
    path, environment = ROOT / ROOM / script, clean_environment(**env)
    options: dict[str, Any] = {"nproc": RANKS, "cwd": folder, "env": environment}
    return torchrun(path, *words, **options)


@pytest.mark.slow
def test_monitored_barrier_names_the_rank_and_info_who_has_connected(
    tmp_path: Path,
) -> None:
    levels = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    result = launch("hangs.py", tmp_path, "--barrier", **levels)
    assert result.returncode == 1
    error = r"RuntimeError: \[Rank 0\]: Ranks 1 failed to pass monitoredBarrier in 3000"
    assert re.search(error, result.stderr)
    assert result.output.count("client socket has connected") == 2 + RANKS
    assert result.output.count("DDP Initialized with:") == RANKS


@pytest.mark.slow
def test_loud_prefetcher_ends_the_run_with_its_error(tmp_path: Path) -> None:
    result = launch("hangs.py", tmp_path, "--loud")
    assert result.returncode == 1
    error = "[rank1]: ValueError: could not convert string to float: 'n/a'"
    assert error in result.stderr
    assert "made no step" not in result.stdout


def test_prefetchers_differ_where_a_line_is_damaged() -> None:
    modules, lines = room(), ["1 2", "3 4", "5 x", "7 8"]
    silent, loud = (
        modules["prefetch"].Prefetcher(lines),
        modules["prefetch"].LoudPrefetcher(lines),
    )
    for prefetcher in (silent, loud):
        got = [prefetcher.next_sample().tolist() for _ in range(2)]
        assert got == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(ValueError, match="could not convert string to float: 'x'"):
        loud.next_sample()
    # Nor does the loud one wait for ever where its thread cannot even say an error.
    loud.samples.put(torch.ones(1))
    with mock.patch.object(loud.samples, "get", wraps=loud.samples.get) as got:
        loud.next_sample()
    assert got.mock_calls == [mock.call(timeout=60)]
    waits = threading.Thread(target=silent.next_sample, daemon=True)
    waits.start()
    waits.join(0.5)
    assert waits.is_alive()


def watched(folder: str, steps: int) -> tuple[list[str], float]:
    """Step for a while, then stop; return the files, and how late the end comes."""
    ended, watchdog_module = threading.Event(), room()["watchdog"]
    status: list[int] = []

    def note(code: int) -> None:
        status.append(code)
        ended.set()

    path = Path(folder)
    with (
        mock.patch.object(watchdog_module.os, "_exit", note),
        mock.patch.object(faulthandler, "dump_traceback_later") as later,
    ):
        watchdog = watchdog_module.Watchdog(seconds=0.6, folder=path, grace=0.2)
        quiet = 0
        for _ in range(steps):
            time.sleep(0.1)
            watchdog.step()
            quiet += list(path.glob(f"*_{dist.get_rank()}*")) == []
        assert quiet == steps
        stopped = time.monotonic()
        assert ended.wait(20)
    assert status == [1]
    # Each step puts off the timer in C, which would end the rank after the thread.
    assert later.mock_calls == [mock.call(1.0, exit=True)] * (1 + steps)
    dist.barrier()
    return sorted(one.name for one in path.iterdir()), time.monotonic() - stopped


def test_watchdog_is_quiet_while_steps_come_and_then_ends_the_run(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    results = worker_pool.run(watched, str(tmp_path / "hang"), 12)
    names = ["record_0", "record_1", "stack_0.txt", "stack_1.txt"]
    assert [files for files, _ in results] == [names] * 2
    assert [late > 0.7 for _, late in results] == [True] * 2


# --- A run that is slow. ----------


def time_steps(folder: str, tokenise: Callable | None = None) -> tuple[str, list[str]]:
    """Run slow.py on this rank of the pool; return what it printed and wrote."""
    module, output, before = room()["slow"], io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with (
            in_the_pool(module),
            mock.patch.object(module, "tokenise", tokenise or module.tokenise),
            contextlib.redirect_stdout(output),
        ):
            module.main()
    finally:
        os.chdir(before)
    return output.getvalue(), sorted(os.listdir(Path(folder, "traces")))


def in_rows(said: str) -> list[dict[str, tuple[float, float]]]:
    """Return the ranks' milliseconds by name: timed, traced, and both once more."""
    rows = re.findall(r"^  (\S+) +([\d.]+) +([\d.]+)$", said, re.M)
    assert [name for name, *_ in rows] == [
        *("step", "load", "compute", "wait"),
        *("step", "load", "compute", "gloo:all_reduce"),
    ] * 2
    times = [(name, (float(a), float(b))) for name, a, b in rows]
    return [dict(times[first : first + 4]) for first in range(0, 16, 4)]


def compare_traced_steps(
    pool: WorkerPool, folder: Path
) -> tuple[str, dict[str, tuple[float, float]], list[float]]:
    """Run slow.py: what it printed, the timed step, how often traces differ."""
    (said, files), (other, _) = pool.run(time_steps, str(folder))
    assert other == ""
    assert files == [
        f"{way}_{rank}.json" for way in ("blocks", "turns") for rank in (0, 1)
    ]
    timed, traced, *_ = in_rows(said)
    # Without the barrier the wait is in backward, and in gloo's all-reduce.
    names = ("gloo:all_reduce", "compute")
    return said, timed, [traced[name][0] / traced[name][1] for name in names]


def test_timer_and_trace_name_the_straggler(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    said, timed, ratios = compare_traced_steps(worker_pool, tmp_path)
    # A busy machine can hold up the one step that is traced; hardly three times.
    for _ in range(2):
        if min(ratios) <= 2:
            said, timed, ratios = compare_traced_steps(worker_pool, tmp_path)
    assert min(ratios) > 2
    # Both take as long; the slow one loads longer and waits less.
    assert timed["step"][0] == pytest.approx(timed["step"][1], rel=0.2)
    assert timed["load"][1] > 2 * timed["load"][0]
    assert timed["wait"][0] > 2 * timed["wait"][1]
    assert said.endswith("check: in blocks, rank 0 waits for rank 1\n")


def first_words(document: str) -> torch.Tensor:
    """Read no more of a document than is used: then no rank is slow."""
    return torch.tensor([ord(word[0]) for word in document[:400].split()][:64])


def test_without_a_straggler_the_check_fails(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="check failed on ranks"):
        worker_pool.run(time_steps, str(tmp_path), first_words)


def test_a_stopped_watchdog_ends_nothing(tmp_path: Path) -> None:
    watchdog_module = room()["watchdog"]
    for name in ("stack_0.txt", "record_0", "record_1"):
        (tmp_path / name).write_text("of an earlier run")
    with (
        mock.patch.object(watchdog_module.dist, "get_rank", return_value=0),
        mock.patch.object(watchdog_module.os, "_exit") as ended,
        mock.patch.object(faulthandler, "dump_traceback_later"),
        mock.patch.object(faulthandler, "cancel_dump_traceback_later") as cancelled,
    ):
        watchdog = watchdog_module.Watchdog(seconds=0.2, folder=tmp_path, grace=0.0)
        watchdog.stop()
        time.sleep(0.6)
    assert not ended.called and cancelled.call_count == 1
    # Its own are out of the way of torchfrtrace, which looks for record_ in a name.
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["old-record-0", "old-stack-0.txt", "record_1"]


class StoppedLate(threading.Event):
    """A step's event: the loop stops the watchdog when that is about to clear it."""

    def __init__(self, watchdog: Any) -> None:
        """Hold a step that the watchdog has not seen."""
        super().__init__()
        self.watchdog = watchdog
        self.set()

    def clear(self) -> None:
        """Stop first, then clear."""
        self.watchdog.stop()
        super().clear()


def endings_of_watching(
    folder: Path, event: Callable[[Any], threading.Event]
) -> list[Any]:
    """Watch in this thread; return how the process would have been ended."""
    module = room()["watchdog"]
    watchdog = module.Watchdog.__new__(module.Watchdog)
    watchdog.seconds, watchdog.grace, watchdog.rank = 0.1, 0.0, 0
    watchdog.folder, watchdog.is_stopped = folder, False
    watchdog.has_stepped = event(watchdog)
    with (
        mock.patch.object(module.os, "_exit") as ended,
        mock.patch.object(module, "flight_record", return_value=b"record"),
    ):
        watchdog.watch()
    return ended.mock_calls


def test_watchdog_stopped_while_it_looks_ends_nothing(tmp_path: Path) -> None:
    assert endings_of_watching(tmp_path, StoppedLate) == []
    assert list(tmp_path.iterdir()) == []


def test_watchdog_that_cannot_write_ends_the_rank_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(_: Any) -> threading.Event:
        return threading.Event()

    assert endings_of_watching(tmp_path, hang) == [mock.call(1)]
    assert "made no step for 0.1 s, see " in capsys.readouterr().out
    assert endings_of_watching(tmp_path / "removed", hang) == [mock.call(1)]
    assert "rank 0 made no step, and could not write" in capsys.readouterr().out


def hold_the_lock(folder: Path) -> None:
    """Hang where no other thread of Python can run; print where to a file."""
    # This pattern tries 2^60 ways.
    with mock.patch.object(dist, "get_rank", return_value=0):
        room()["watchdog"].Watchdog(seconds=0.2, folder=folder, grace=0.1)
    re.match("(a+)+$", "a" * 60 + "b")


def test_a_hang_that_holds_pythons_lock_is_ended_too(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with open(tmp_path / "stderr", "w") as file, mock.patch("sys.stderr", file):
            hold_the_lock(tmp_path)
        os._exit(3)
    give_up = time.monotonic() + 20
    while (end := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > give_up:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(end[1]) == 1
    assert " in hold_the_lock\n" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo"])
def test_record_comes_from_the_recorder_of_the_backend(backends: str) -> None:
    # A CPU build has no recorder of NCCL's: here a stand-in.
    module = room()["watchdog"]
    bindings = module._distributed_c10d
    record = {name: {"pg_config": {"0": name}} for name in ("nccl", "cpu")}
    dumps = {
        name: (lambda kept=kept: pickle.dumps(kept)) for name, kept in record.items()
    }
    with (
        mock.patch.object(dist, "get_backend_config", return_value=backends),
        mock.patch.object(bindings, "_dump_nccl_trace", dumps["nccl"], create=True),
        mock.patch.object(bindings, "_dump_fr_trace", dumps["cpu"]),
    ):
        kept = pickle.loads(module.flight_record())
    assert kept == record["nccl" if "nccl" in backends else "cpu"]


def test_timer_adds_up_its_parts() -> None:
    timer = room()["step_timer"].StepTimer()
    for _ in range(3):
        with timer.part("whole"):
            with timer.part("short"):
                time.sleep(0.01)
            with timer.part("long"):
                time.sleep(0.03)
    short, long, whole = (timer.seconds[name] for name in ("short", "long", "whole"))
    assert 0.03 <= short < long <= whole - short
    assert len(timer.seconds) == 3


# --- The exercises. ----------


def test_faults_are_spread_over_ranks_and_lines() -> None:
    planted = room()["planted"]
    for kind, statement in (("hang", "files.lock"), ("slow", "files.entries")):
        drawn = [planted.draw(kind, run) for run in range(1, planted.CASES + 1)]
        assert {rank for rank, _, _ in drawn} == {0, 1, 2}
        assert {name for _, name, _ in drawn} == set(room()["nightly"].ENTRIES)
        assert len(set(drawn)) == 3 * 4
        for _, name, line in drawn:
            assert line == line_of("nightly", f'{statement}["{name}"]')
        assert len(drawn) == 99


def answer(kind: str, *words: str) -> tuple[Any, str]:
    """Give an answer to an exercise; return how it ends and what it says."""
    module, said = room()[f"exercise_{kind}"], io.StringIO()
    with (
        mock.patch.object(sys, "argv", [f"exercise_{kind}.py", *words]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            module.main()
        except SystemExit as end:
            return end.code, said.getvalue()
    return 0, said.getvalue()


@pytest.mark.parametrize("kind", ["hang", "slow"])
@pytest.mark.parametrize("run", [1, 2, 50])
def test_checker_says_in_words_what_is_right(kind: str, run: int) -> None:
    rank, name, line = room()["planted"].draw(kind, run)
    ask = f"--case={run}"
    right = answer(kind, ask, f"--rank={rank}", f"--line={line}")
    assert right == (
        0,
        f"check: rank {rank}, line {line} of nightly.py: the file {name!r}\n",
    )
    code, _ = answer(kind, ask, f"--rank={(rank + 1) % 3}", f"--line={line}")
    assert re.match(rf"not rank {(rank + 1) % 3}: (it takes part|it waits, too)", code)
    code, _ = answer(kind, ask, f"--rank={rank}", f"--line={line + 1}")
    assert code == f"rank {rank} is right, line {line + 1} of nightly.py is not"
    code, said = answer(kind, ask, f"--rank={rank}")
    assert code == 2 and said.endswith(": an answer has both --rank and --line\n")


def struck(kind: str, run: int) -> tuple[list[str], list[str]]:
    """Plant a fault; return this rank's files that are locked, and those that grew."""
    modules = room()
    files, usual = modules["nightly"].Files(), modules["nightly"].ENTRIES
    modules["planted"].strike(kind, run, files)
    locked = [name for name, lock in files.lock.items() if lock.locked()]
    return locked, [name for name in usual if files.entries[name] > 100 * usual[name]]


@pytest.mark.parametrize("kind", ["hang", "slow"])
def test_a_fault_strikes_one_rank(worker_pool: WorkerPool, kind: str) -> None:
    rank, name, _ = room()["planted"].draw(kind, 3)
    expected: list[tuple[list[str], list[str]]] = [([], [])] * RANKS
    expected[rank] = ([name], []) if kind == "hang" else ([], [name])
    assert worker_pool.run(struck, kind, 3, world_size=RANKS) == expected


@pytest.mark.parametrize("name", ["index", "cache", "metrics", "weights"])
def test_each_fault_costs_time_in_its_own_line(name: str) -> None:
    nightly = room()["nightly"]
    files, model = nightly.Files(), torch.nn.Linear(2, 2)
    call = {
        "index": lambda: nightly.read_index(files),
        "cache": lambda: nightly.augment(files, torch.zeros(1)),
        "metrics": lambda: nightly.write_metrics(files, 0.5),
        "weights": lambda: nightly.save_weights(files, model),
    }
    call[name]()  # the first call loads what torch loads late
    taken = []
    for factor in (1, 2000):
        files.entries[name] *= factor
        start = time.process_time()
        call[name]()
        taken.append(time.process_time() - start)
    assert taken[1] > 10 * taken[0]


def innermost(stack: str) -> int:
    """Return the innermost line of nightly.py in a stack."""
    return int(re.findall(r"nightly\.py(?:\", line |:)(\d+)", stack)[0])


@pytest.mark.slow
def test_hang_is_found_by_what_the_watchdogs_wrote(tmp_path: Path) -> None:
    run = random.randrange(1, 100)
    with running("exercise_hang.py", tmp_path, f"--case={run}") as hung:
        until_silent(hung)
    stacks = [(hung.folder / f"stack_{r}.txt").read_text() for r in range(RANKS)]
    lines = [innermost(stack) for stack in stacks]
    (rank,) = (r for r in range(RANKS) if lines.count(lines[r]) == 1)
    assert (
        answer("hang", f"--case={run}", f"--rank={rank}", f"--line={lines[rank]}")[0]
        == 0
    )


@pytest.mark.slow
def test_straggler_is_found_by_its_wait_and_its_stacks(tmp_path: Path) -> None:
    if reason := can_trace():
        pytest.skip(reason)
    run = random.randrange(1, 100)
    with running("exercise_slow.py", tmp_path, f"--case={run}") as slow:
        while "step 60, rank 2" not in (said := slow.text()):
            time.sleep(0.2)
        waits = re.findall(r"^step 60, rank \d, .* wait (\d+)", said, re.M)
        rank = min(range(RANKS), key=lambda r: int(waits[r]))
        found = [innermost(spy(slow.pids[rank]).stdout) for _ in range(9)]
    line = max(set(found), key=found.count)
    assert answer("slow", f"--case={run}", f"--rank={rank}", f"--line={line}")[0] == 0


@pytest.mark.parametrize("script", ["hangs.py", "slow.py", "exercise_hang.py"])
def test_without_a_launcher_a_script_says_how_to_start_it(script: str) -> None:
    module, said = room()[script.removesuffix(".py")], io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit),
    ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        module.main()
    assert re.search(
        rf"start it with torchrun --nproc-per-node=[23] .*{script}", said.getvalue()
    )
