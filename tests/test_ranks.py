"""ranks.py, which every chapter has: options, devices, joining, checking, ending."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from launch import ROOT, clean_environment, python, torchrun
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "01_communication"
RANKS: Any = load_chapter(CHAPTER)["ranks"]


def refusal(*words: str, call: Any, **environment: str) -> str:
    """Return the one line with which a call ends this process, with status 2."""
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["a folder/lesson.py", *words]),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(RANKS.signal, "signal"),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        call()
    assert end.value.code == 2
    (line,) = errors.getvalue().splitlines()
    assert line.startswith("lesson.py: ")
    return line.removeprefix("lesson.py: ")


# --- The command line. ----------


def read_two() -> Any:
    """Read a whole number and a fraction."""
    return RANKS.read_options(
        max_epochs={"type": RANKS.number(1, 9), "default": 3, "help": "passes"},
        lr={"type": RANKS.number(1e-9, 1.0), "default": 0.5, "help": "step"},
    )


@pytest.mark.parametrize("name", ["--max_epochs", "--max-epochs"])
@pytest.mark.parametrize("form", ["{} 2", "{}=2"])
def test_options_are_spelled_either_way(name: str, form: str) -> None:
    words = form.format(name).split()
    with mock.patch.object(sys, "argv", ["lesson.py", *words]):
        options = read_two()
    assert (options.max_epochs, options.lr) == (2, 0.5)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("--max-epochs=0", "argument --max-epochs/--max_epochs: '0' is no number from"),
        ("--max_epochs=10", "'10' is no number from 1 to 9"),
        ("--max_epochs=1.5", "'1.5' is no number from 1 to 9"),
        ("--lr=nan", "argument --lr: 'nan' is no number from 1e-09 to 1.0"),
        ("--lr=x", "'x' is no number"),
        ("--epochs=3", "unrecognized arguments: --epochs=3"),
    ],
)
def test_bad_options_are_one_line(word: str, complaint: str) -> None:
    assert complaint in refusal(word, call=read_two)


def test_only_one_local_rank_speaks_and_the_others_wait_to_be_stopped() -> None:
    with mock.patch.object(RANKS.time, "sleep") as sleep:
        assert refusal(call=lambda: RANKS.fail("no"), LOCAL_RANK="0") == "no"
        assert sleep.call_count == 0
        refusal(call=lambda: RANKS.fail("no"), LOCAL_RANK="1")
        sleep.assert_called_once_with(3)


# --- Devices. ----------


@pytest.mark.parametrize(
    ("accelerator", "found", "local_ranks", "expected"),
    [
        (None, 0, 2, ("cpu", "no accelerator found")),
        ("cuda", 1, 2, ("cpu", "1 cuda for 2 local ranks")),
        ("cuda", 2, 2, ("cuda:1", "2 cuda, one for each local rank")),
        ("mps", 1, 1, ("cpu", "no backend connects mps devices")),
    ],
)
def test_device_rule(
    accelerator: str | None, found: int, local_ranks: int, expected: tuple[str, str]
) -> None:
    device = None if accelerator is None else torch.device(accelerator)
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", lambda **_: device),
        mock.patch.object(torch.accelerator, "device_count", lambda: found),
        mock.patch.object(torch.accelerator, "set_device_index") as chosen,
    ):
        device, reason = RANKS.choose_device(local_ranks - 1, local_ranks)
    assert (str(device), reason) == expected
    assert [call.args for call in chosen.mock_calls] == (
        [(1,)] if device.type == "cuda" else []
    )


def agreement(choices: list[str]) -> list[str]:
    """Let threads play ranks with these choices; return what each is told."""
    store, said, ended = dist.HashStore(), dict[str, str](), [""] * len(choices)

    def be(rank: int) -> None:
        RANKS.agree_on_device(store, rank, len(choices), choices[rank])
        ended[rank] = said.pop(threading.current_thread().name, "")

    def fail(text: str) -> None:
        said[threading.current_thread().name] = text

    with mock.patch.object(RANKS, "fail", fail):
        threads = [threading.Thread(target=be, args=(r,)) for r in range(len(choices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    return ended


def test_node_that_chooses_another_device_is_named_to_every_rank() -> None:
    gpu, cpu = "cuda on a (8 cuda)", "cpu on b (no accelerator found)"
    assert agreement([gpu, "cuda on b (8 cuda)", gpu]) == ["", "", ""]
    assert agreement([cpu, cpu]) == ["", ""]
    text = "all nodes need the same kind of device, not {} but {}"
    assert agreement([gpu, gpu, cpu]) == [text.format(gpu, cpu)] * 3
    assert agreement([cpu, gpu]) == [text.format(cpu, gpu)] * 2


# --- Joining. ----------

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
START = "start it with torchrun --nproc-per-node={} 'a folder/lesson.py'"


def test_join_says_what_to_type() -> None:
    with mock.patch.dict(os.environ):
        for name in TWO:
            os.environ.pop(name, None)
        assert refusal(call=RANKS.join) == START.format(2)
    needs_four = refusal(call=lambda: RANKS.join(at_least=4), **TWO)
    assert needs_four == f"not with 2 rank(s); {START.format(4)}"
    at_most = refusal(call=lambda: RANKS.join(at_most=1), **TWO)
    assert at_most == f"not with 2 rank(s); {START.format(1)}"


def test_ranks_wait_five_minutes_for_each_other() -> None:
    asked: dict[str, Any] = {}

    def rendezvous(where: str, timeout: Any) -> Any:
        asked["store"] = timeout
        yield dist.HashStore(), 0, 1

    def init_process_group(backend: str, timeout: Any, **_: Any) -> None:
        asked["group"] = timeout
        raise InterruptedError

    one = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], "1")
    with (
        mock.patch.object(sys, "argv", ["lesson.py"]),
        mock.patch.dict(os.environ, {**one, "RANK": "0", "LOCAL_RANK": "0"}),
        mock.patch.object(RANKS, "tie_to_launcher"),
        mock.patch.object(dist, "rendezvous", rendezvous),
        mock.patch.object(dist, "init_process_group", init_process_group),
        pytest.raises(InterruptedError),
    ):
        RANKS.join(only_cpu=True)
    # As three pages say; gloo by itself would wait for half an hour.
    assert [limit.total_seconds() for limit in asked.values()] == [300, 300]


def test_join_starts_no_group_with_a_node_on_another_device() -> None:
    def rendezvous(*_: Any, **__: Any) -> Any:
        store = dist.HashStore()
        store.set("device 1", "cuda on another node (8 cuda)")
        yield store, 0, 2

    with (
        mock.patch.object(RANKS, "tie_to_launcher"),
        mock.patch.object(dist, "rendezvous", rendezvous),
        mock.patch.object(dist, "init_process_group") as start,
    ):
        said = refusal(call=lambda: RANKS.join(only_cpu=True), **TWO)
    assert said.startswith("all nodes need the same kind of device, not cpu on ")
    assert said.endswith(" but cuda on another node (8 cuda)")
    start.assert_not_called()


def test_lesson_without_options_refuses_all() -> None:
    with mock.patch.object(RANKS, "has_options", False):
        assert refusal("--x", call=RANKS.join, **TWO) == "unrecognized arguments: --x"


# --- What ranks tell each other. ----------


def check_that_fails_on(bad_ranks: list[int]) -> tuple[int | str | None, str, str]:
    """Check something that is wrong on some ranks; return exit code, both outputs."""
    output, errors, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            RANKS.check(dist.get_rank() not in bad_ranks, "all is well")
        except SystemExit as end:
            code = end.code
    return code, output.getvalue(), errors.getvalue()


def test_check_ends_all_ranks_if_one_is_wrong(worker_pool: WorkerPool) -> None:
    passed = worker_pool.run(check_that_fails_on, [], world_size=3)
    assert passed == [(None, "check: all is well\n", ""), *[(None, "", "")] * 2]
    failed = worker_pool.run(check_that_fails_on, [1, 2], world_size=3)
    line = "check failed on ranks [1, 2], not so: all is well\n"
    assert failed == [(1, "", line), *[(1, "", "")] * 2]


def comparisons() -> list[bool]:
    """Compare tensors that are the same bits, or nearly, on all ranks."""
    rank, same = dist.get_rank(), RANKS.same_on_all_ranks
    nan = torch.tensor([float("nan"), 1.0])
    transposed = torch.arange(6.0).reshape(2, 3).t()
    return [
        same([nan, torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(3)]),
        same([transposed]),
        same([transposed if rank else transposed.contiguous()]),
        same([torch.tensor([0.0, -0.0][rank % 2])]),
        same([torch.ones(3), torch.full((2,), 1.0 + 1e-7 * (rank == 1))]),
        same([torch.tensor([float(rank)]), torch.ones(2)]),
        same([torch.ones(1, dtype=[torch.int32, torch.float32][rank % 2])]),
    ]


def test_same_on_all_ranks_compares_every_bit(worker_pool: WorkerPool) -> None:
    expected = [True, True, True, False, False, False, False]
    assert worker_pool.run(comparisons, world_size=3) == [expected] * 3


# --- Local ranks, and their end. ----------

LESSON = """
import os, sys, time
import torch
import torch.distributed as dist
from ranks import check, gather, join, leave, number, read_options, say, start_ranks

def main(options):
    join()
    rank = dist.get_rank()
    say(f"threads {gather(torch.get_num_threads())} of {gather(rank)}")
    if options.end == "exit" and rank == 1:
        sys.exit(3)
    if options.end == "kill" and rank == 1:
        os.kill(os.getpid(), 9)
    if options.end == "stay":
        say("here")
        time.sleep(600)
    check(options.end != "check", "it should not")
    leave()

if __name__ == "__main__":
    end = {"choices": ["exit", "kill", "stay", "check", "well"], "default": "well"}
    nprocs = {"type": number(1, 4), "default": 2}
    options = read_options(end=end, nprocs=nprocs)
    start_ranks(main, options.nprocs, options)
"""


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """Write a lesson beside a copy of ranks.py, in a folder with a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "ranks.py").write_text((ROOT / CHAPTER / "ranks.py").read_text())
    (folder / "lesson.py").write_text(LESSON)
    return folder / "lesson.py"


@pytest.mark.slow
def test_local_ranks_and_torchrun_take_the_same_script(lesson: Path) -> None:
    # Like a reader whose shell still has a port and a rank count of another job.
    stale = {"WORLD_SIZE": "7", "MASTER_PORT": "1"}
    environment = clean_environment(**stale)
    del environment["OMP_NUM_THREADS"]
    done = python(lesson, "--nprocs=3", env=environment, cwd=lesson.parent)
    threads = max(1, torch.get_num_threads() // 3)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "device: cpu with gloo (no accelerator found)",
        f"threads {[threads] * 3} of [0, 1, 2]",
        "check: it should not",
    ]
    done = torchrun(lesson, nproc=2)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1:] == [
        "threads [1, 1] of [0, 1]",
        "check: it should not",
    ]


HOLDER = """\
import atexit, weakref
from pathlib import Path
import torch
import torch.distributed as dist

def report():
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    print("at exit", group() is not None, sum("gloo" in name for name in names))

# What is registered before `join` runs after all that `join` registers.
atexit.register(report)
from ranks import check, join, leave, start_ranks

def main():
    join()
    global group
    group = weakref.ref(dist.group.WORLD)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    {end}
    del model
    print("without DDP", group() is not None)

if __name__ == "__main__":
    start_ranks(main, 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("leave()", ["without DDP True", "at exit False 0"]),
        ('check(False, "it should not")', ["at exit False 0"]),
    ],
)
def test_group_outlives_ddp_and_its_threads_end_before_python(
    lesson: Path, end: str, said: list[str]
) -> None:
    """DDP that frees the group itself waits for a thread that waits for the GIL.

    A thread that wants the GIL when Python is ending aborts the process.
    """
    lesson.write_text(HOLDER.replace("{end}", end))
    done = python(lesson)
    assert done.stdout.splitlines()[1:] == said
    assert done.returncode == (end != "leave()")


SHARDED = """\
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ranks import leave

def threads():
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

main()
before = threads()
{end}
print(before > 0, threads())
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("leave()", "True 0"),
        pytest.param(
            "dist.destroy_process_group()", r"True [1-9]", marks=pytest.mark.slow
        ),
    ],
)
def test_leave_frees_a_group_that_a_mesh_keeps(
    lesson: Path, end: str, said: str
) -> None:
    """As minimal.py of chapter 06 leaves, which joins without `join`."""
    lesson.write_text(SHARDED.replace("{end}", end))
    done = torchrun(lesson, nproc=1)
    assert re.fullmatch(said, done.stdout.splitlines()[-1]), done.output


@pytest.mark.parametrize(
    ("end", "code", "complaint"),
    [
        pytest.param("exit", 3, "", marks=pytest.mark.slow),
        pytest.param(
            *("kill", 1, "process 1 terminated with signal SIGKILL\n"),
            marks=pytest.mark.slow,
        ),
        ("check", 1, "check failed on ranks [0, 1], not so: it should not\n"),
    ],
)
def test_rank_that_ends_ends_the_run(
    lesson: Path, end: str, code: int, complaint: str
) -> None:
    done = python(lesson, f"--end={end}")
    assert done.returncode == code
    said = re.sub(r"W\d+ .*Terminating process \d+ via signal.*\n", "", done.stderr)
    assert said == complaint


@pytest.mark.parametrize(
    ("number", "waits_for", "launcher"),
    [
        pytest.param(signal.SIGINT, "here", "python", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "here", "python", marks=pytest.mark.slow),
        (signal.SIGKILL, "children", "python"),
        pytest.param(signal.SIGKILL, "children", "torchrun", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "here", "torchrun", marks=pytest.mark.slow),
    ],
)
def test_no_rank_outlives_its_launcher(
    lesson: Path, number: signal.Signals, waits_for: str, launcher: str
) -> None:
    command = [sys.executable, lesson, "--end=stay"]
    if launcher == "torchrun":
        agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command = [*agent, lesson, "--end=stay"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        # What a test starts in the background may have inherited an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        if waits_for == "here":
            for line in process.stdout:
                if line == "here\n":
                    break
        parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
        # The two ranks; under python there is multiprocessing's resource tracker too.
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            children = parent.children(recursive=True)
        assert len(children) >= 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == -number
        assert psutil.wait_procs(children, timeout=45)[1] == []
        assert number == signal.SIGKILL or errors == ""
    finally:
        for one in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
