"""Chapter 01, the room failures/: how each failure looks, and which tool finds it.

What ranks print is compared with white space made one, because show.py wraps lines.
"""

import contextlib
import functools
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from launch import ROOT, Result, clean_environment, python, torchrun
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import RankDied, WorkerPool

ROOM = "01_communication/failures"
SHOW = ROOT / ROOM / "show.py"
# Seconds for a run of show.py, most of which go to importing torch on a busy machine.
# It kills by itself what hangs for 30 s.
RUN_LIMIT = 60

# What the survivors of a lost connection say: the word differs from run to run.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
TIMED_OUT = r"Timed out waiting 2000ms for (recv|send) operation to complete"
# Who first loses patience closes its connections: the others lose theirs.
HUNG = rf"RuntimeError: \[\S+\] .*({TIMED_OUT}|{'|'.join(LOST)}).*"
GONE = rf"RuntimeError: \[\S+\] .*({'|'.join(LOST)}).*"
NAMED = r".*RuntimeError: \[Rank 0\]: Ranks 1 failed to pass monitoredBarrier in {} ms"
NOTHING = ""


class End(NamedTuple):
    """What a rank has to print, as a pattern for the whole of it, and how it ends."""

    text: str
    how: str


def exactly(text: str) -> End:
    """Expect that a rank prints this and ends well."""
    return End(re.escape(text), "exit code 0")


def mismatch(differs: str, *values: str) -> list[End]:
    """Expect DETAIL to stop both ranks, to name both and to say what differs."""
    named = (
        r"RuntimeError: Detected mismatch between collectives on ranks\. Rank {0} is "
        r"running collective: .*, but Rank {1} is running collective: .* {2}: {3}vs {4}"
    )
    first, second = values
    return [
        End(named.format(0, 1, differs, first, second), "exit code 1"),
        End(named.format(1, 0, differs, second, first), "exit code 1"),
    ]


def stack(where: str, then: str) -> str:
    """Expect the stack of a rank after one second, then its last words."""
    thread = r"Thread \w+ \(most recent call first\):"
    return rf"Timeout \(0:00:01\)! {thread} {where} in main .* in <module> {then}"


# The line of slow_rank.py in which the straggler loses its time.
SLEEP = 1 + next(
    number
    for number, line in enumerate(
        (ROOT / ROOM / "slow_rank.py").read_text().splitlines()
    )
    if "time.sleep(1.5)" in line
)
WRONG_SUM = [
    exactly("strides (3, 1): [[0.0, 4.0, 3.0], [7.0, 6.0, 10.0]]"),
    exactly("strides (1, 2): [[0.0, 3.0, 6.0], [4.0, 7.0, 10.0]]"),
]
LOST_SUM = [
    exactly(
        "strides (3, 1): [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]] "
        "strides (1, 2): [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"
    )
] * 2
# What must come of each script on each rank, under each tool.
ENDS: dict[str, dict[str, list[End]]] = {
    "plain": {
        "dtypes_differ": [
            exactly("torch.float32: [1.5, 2.5]"),
            exactly("torch.int32: [1069547520, 1075838976]"),
        ],
        "shapes_differ": [
            exactly("(2, 3): [[0.0, 4.0, 3.0], [7.0, 6.0, 10.0]]"),
            exactly("(3, 2): [[0.0, 4.0], [3.0, 7.0], [6.0, 10.0]]"),
        ],
        "strides_differ": WRONG_SUM,
        "reduced_copy": LOST_SUM,
        "skipped_call": [
            End(rf"RuntimeError: \[\S+\] {TIMED_OUT}", "exit code 1"),
            exactly(NOTHING),
        ],
        "monitored_barrier": [
            End(NAMED.format(1000), "exit code 1"),
            exactly(NOTHING),
        ],
        "swapped_calls": [End(HUNG, "exit code 1")] * 2,
        "longer_message": [
            End(
                r"terminate called after throwing an instance of .gloo::EnforceNotMet. "
                r"what\(\): .*op\.preamble\.length <= op\.nbytes\. "
                r"2000 vs 1000\. Received data size doesn't match expected size\. .*",
                "killed by SIGABRT",
            ),
            End(GONE, "exit code 1"),
        ],
        "wrong_peer": [End(HUNG, "exit code 1")] * 3,
        "all_send_first": [End(HUNG, "exit code 1")] * 2,
        "killed_rank": [
            End(GONE, "exit code 1"),
            End(NOTHING, "killed by SIGKILL"),
        ],
        "slow_rank": [
            exactly("all_reduce took more than 0.75 s"),
            exactly("all_reduce took less than 0.75 s"),
        ],
    },
    "DETAIL": {
        "dtypes_differ": mismatch("Tensor Tensor dtypes", "Float", "Int"),
        "shapes_differ": mismatch("Tensor Tensor shapes", "2 3", "3 2"),
        # Neither of these two is found.
        "strides_differ": WRONG_SUM,
        "reduced_copy": LOST_SUM,
        "skipped_call": [
            End(NAMED.format(2000), "exit code 1"),
            exactly(NOTHING),
        ],
        "swapped_calls": mismatch("Op type", "ALLREDUCE", "BROADCAST"),
        "longer_message": mismatch("Tensor Tensor shapes", "1000", "2000"),
        # It compares collectives only.
        "wrong_peer": [End(HUNG, "exit code 1")] * 3,
        "all_send_first": [End(HUNG, "exit code 1")] * 2,
        # It names the missing rank unless it notices the lost connection first.
        "killed_rank": [
            End(rf"{NAMED.format(2000)}|{GONE}", "exit code 1"),
            End(NOTHING, "killed by SIGKILL"),
        ],
    },
    "stacks": {
        "all_send_first": [End(stack(".* in send .*", HUNG), "exit code 1")] * 2,
        "wrong_peer": [End(stack(".* in recv .*", HUNG), "exit code 1")] * 3,
        "slow_rank": [
            End(
                stack(".* in all_reduce .*", "all_reduce took more than 0.75 s"),
                "exit code 0",
            ),
            # No frame stands before that of the script.
            End(
                stack(
                    rf'File "slow_rank.py", line {SLEEP}',
                    "all_reduce took less than 0.75 s",
                ),
                "exit code 0",
            ),
        ],
    },
    "recorder": {
        "swapped_calls": [
            End(rf"{HUNG} recorded \['1 gloo:all_reduce \[\[2\]\]'\]", "exit code 1"),
            End(rf"{HUNG} recorded \['1 gloo:broadcast \[\[2\]\]'\]", "exit code 1"),
        ],
        # It records collectives only.
        "wrong_peer": [End(rf"{HUNG} recorded \[\]", "exit code 1")] * 3,
    },
}
# Which scripts are run together, to import torch less often.
RUNS: dict[str, list[tuple[str, ...]]] = {
    "plain": [
        tuple(list(ENDS["plain"])[:5]),
        ("monitored_barrier", "swapped_calls", "longer_message", "killed_rank"),
        ("wrong_peer", "all_send_first", "slow_rank"),
    ],
    "DETAIL": [tuple(list(ENDS["DETAIL"])[:5]), tuple(list(ENDS["DETAIL"])[5:])],
    "stacks": [tuple(ENDS["stacks"])],
    "recorder": [tuple(ENDS["recorder"])],
}
# The first of all runs belongs to `make test`: what is wrong without an error, and the
# most frequent hang.
FAST = ("plain", RUNS["plain"][0])
CASES = [
    pytest.param(
        tool,
        names,
        name,
        id=f"{name}-{tool}",
        marks=[] if (tool, names) == FAST else pytest.mark.slow,
    )
    for tool, runs in RUNS.items()
    for names in runs
    for name in names
]
SETTINGS = {
    "DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "recorder": {"TORCH_FR_BUFFER_SIZE": "100"},
}


@functools.cache
def shown(tool: str, names: tuple[str, ...]) -> dict[str, list[End]]:
    """Run scripts under a tool; return what each rank printed and how it ended."""
    words = ["--stacks"] if tool == "stacks" else []
    environment = clean_environment(**SETTINGS.get(tool, {}))
    # `python` raises if the run takes too long or leaves a process.
    result = python(SHOW, *words, *names, env=environment, timeout=RUN_LIMIT)
    assert (result.returncode, result.stderr) == (0, ""), result.output
    return ends_in(result.stdout)


def ends_in(output: str) -> dict[str, list[End]]:
    """Take apart what show.py printed: for each script the end of each rank."""
    _, *parts = re.split(r"^--- (.*)\n", output, flags=re.M)
    found = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        found[name] = []
        for rank in range(len(re.findall(r"^rank \d:", text, re.M))):
            said = re.findall(rf"^rank {rank} \| (.*)", text, re.M)
            (how,) = re.findall(rf"^rank {rank}: (.*)", text, re.M)
            found[name].append(End(" ".join(" ".join(said).split()), how))
    return found


@pytest.mark.parametrize(("tool", "names", "name"), CASES)
def test_script_fails_as_described(
    tool: str, names: tuple[str, ...], name: str
) -> None:
    found, expected = shown(tool, names), ENDS[tool][name]
    assert tuple(found) == names
    assert len(found[name]) == len(expected) == (3 if name == "wrong_peer" else 2)
    for rank, (end, (pattern, how)) in enumerate(
        zip(found[name], expected, strict=True)
    ):
        assert end.how == how, f"rank {rank}: {end.text}"
        assert re.fullmatch(pattern, end.text, re.S), f"rank {rank}: {end.text}"
    if HUNG in [pattern for pattern, _ in expected]:
        # Somebody has to run out of time before the others lose their connection.
        assert any(re.search(TIMED_OUT, end.text) for end in found[name])


def test_every_script_has_its_ends() -> None:
    scripts = {path.stem for path in (ROOT / ROOM).glob("*.py")}
    tools = {"show", "ranks", "strides_table"}
    assert scripts - tools == set(ENDS["plain"])
    assert len(CASES) == sum(map(len, ENDS.values())) == 27


# --- The marked line is what is wrong. ----------


AVERAGE = "dist.all_reduce(loss, op=dist.ReduceOp.AVG)"
SUM = "[[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]"
# For each script: what stands there, and in its place what the comment above it says;
# then what each rank must print.
MENDS: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "dtypes_differ": (
        [("torch.empty(2, dtype=torch.int32)", "torch.empty(2)")],
        ["torch.float32: [1.5, 2.5]"] * 2,
    ),
    "shapes_differ": (
        [("if dist.get_rank() == 1:", "if True:")],
        ["(3, 2): [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]"] * 2,
    ),
    "strides_differ": (
        [("else columns.t()", "else columns.t().contiguous()")],
        [f"strides (3, 1): {SUM}"] * 2,
    ),
    "reduced_copy": (
        [
            (
                "dist.all_reduce(x.contiguous())",
                "y = x.contiguous()\n        dist.all_reduce(y)\n        x.copy_(y)",
            )
        ],
        [f"strides (3, 1): {SUM} strides (1, 2): {SUM}"] * 2,
    ),
    "skipped_call": (
        [
            ("    if dist.get", f"    {AVERAGE}\n    if dist.get"),
            (f"        {AVERAGE}", "        pass"),
        ],
        ["mean loss 1.0", ""],
    ),
    "monitored_barrier": (
        [("if dist.get_rank() == 0:", "if True:")],
        ["mean loss 1.0"] * 2,
    ),
    "swapped_calls": (
        [("dist.get_rank() == 0", "True")],
        ["", ""],
    ),
    "longer_message": (
        [("1000 if dist.get_rank() == 0 else 2000", "2000")],
        ["", ""],
    ),
    "wrong_peer": (
        [("src=right", "src=(rank - 1) % world_size")],
        ["", "", ""],
    ),
    "all_send_first": (
        [
            ("dist.send(", "sending = dist.isend("),
            ("src=left)", "src=left)\n    sending.wait()"),
        ],
        ["", ""],
    ),
    "killed_rank": (
        [("os.kill(os.getpid(), signal.SIGKILL)", "pass")],
        ["", ""],
    ),
    "slow_rank": (
        [("time.sleep(1.5)", "pass")],
        ["all_reduce took less than 0.75 s"] * 2,
    ),
}


def copy_of_show(folder: Path, **scripts: list[tuple[str, str]]) -> Path:
    """Copy show.py and some scripts, and replace parts of those; return the copy."""
    for name, changes in {"show": [], **scripts}.items():
        text = (ROOT / ROOM / f"{name}.py").read_text()
        for old, new in changes:
            if text.count(old) != 1:
                raise ValueError(f"not once in {name}.py: {old}")
            text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text)
    return folder / "show.py"


@pytest.mark.slow
def test_scripts_are_right_once_the_marked_line_is_mended(tmp_path: Path) -> None:
    show = copy_of_show(tmp_path, **{name: MENDS[name][0] for name in MENDS})
    assert set(MENDS) == set(ENDS["plain"])
    names, found = list(MENDS), {}
    for some in (names[:6], names[6:]):
        result = python(show, *some, timeout=RUN_LIMIT)
        assert (result.returncode, result.stderr) == (0, ""), result.output
        found |= ends_in(result.stdout)
    assert found == {
        name: [End(text, "exit code 0") for text in printed]
        for name, (_, printed) in MENDS.items()
    }


def test_scripts_are_short_and_mark_one_line() -> None:
    paths = [ROOT / ROOM / f"{name}.py" for name in ENDS["plain"]]
    assert len(paths) == 12
    for path in paths:
        text = path.read_text()
        assert 20 <= len(text.splitlines()) <= 30  # as the page says
        assert len(re.findall(r"^ +# WRONG: ", text, re.M)) == 1
        assert f"torchrun --nproc-per-node={len(ENDS['plain'][path.stem])} " in text


# --- The tool that shows them. ----------


def one_line(result: Result, text: str) -> None:
    """Assert that the user is told one line and nothing else, with status 2."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert text in result.stderr


@pytest.mark.parametrize("words", [[], ["--no-such"], ["nope", "slow_rank"], ["show"]])
def test_unknown_name_lists_the_known_ones(words: list[str]) -> None:
    result = python(SHOW, *words)
    wrong = "".join(f"there is no {word}; " for word in words if word not in MENDS)
    assert bool(wrong) == bool(words)
    one_line(result, f"show.py: {wrong}choose from {', '.join(sorted(MENDS))}\n")


@pytest.mark.slow
def test_rank_that_hangs_is_killed_and_old_settings_do_not_matter(
    tmp_path: Path,
) -> None:
    show = copy_of_show(
        tmp_path, slow_rank=[("sleep(1.5)", "sleep(90)"), ("seconds=3", "seconds=90")]
    )
    show.write_text(show.read_text().replace("signal.alarm(30)", "signal.alarm(2)"))
    outside = clean_environment(RANK="5", WORLD_SIZE="1", MASTER_PORT="1")
    result = python(show, "slow_rank", env=outside)
    killed = [End("", "killed by SIGALRM")] * 2
    assert (result.returncode, result.stderr) == (0, "")
    assert ends_in(result.stdout) == {"slow_rank": killed}


def is_importing_torch(process: psutil.Process) -> bool:
    """Tell whether a process has begun to load torch."""
    return any("libtorch" in part.path for part in process.memory_maps())


def has_three_ranks(process: psutil.Process) -> bool:
    """Tell whether a process has started three others."""
    return len(process.children()) == 3


@pytest.mark.parametrize("is_ready", [is_importing_torch, has_three_ranks])
def test_interrupt_ends_all_ranks_in_silence(is_ready: Any) -> None:
    process = subprocess.Popen(
        [sys.executable, SHOW, "wrong_peer"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(PYTHONUNBUFFERED="1"),
        text=True,
        start_new_session=True,
        # What a script starts in the background ignores Ctrl-C; here it must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        script = psutil.Process(process.pid)
        while not is_ready(script):
            assert process.poll() is None
        everyone = script.children(recursive=True)
        # All of the terminal's processes get a Ctrl-C.
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 130
        assert printed in ("", "--- wrong_peer\n")
        assert psutil.wait_procs(everyone, timeout=45)[1] == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_torchrun_names_the_signal_that_killed_a_rank() -> None:
    result = torchrun(ROOT / ROOM / "killed_rank.py", nproc=2)
    assert result.returncode == 1
    assert re.search(r"exitcode +: -9 \(pid: \d+\)", result.stderr)
    assert "Signal 9 (SIGKILL) received by PID" in result.stderr
    assert re.search("|".join(LOST), result.stderr)


# --- What strides do to the calls of gloo, on warm ranks. ----------


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return as many numbers as x has as they lie in memory, gaps included."""
    return x.as_strided((x.numel(),), (1,))


def calls_on_strides(layouts: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All-reduce and broadcast; return what memory holds then, and what it should.

    `layouts` has a letter for each rank, as in strides_table.py.
    """
    lay_out = load_chapter(ROOM)["strides_table"].lay_out
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    values = [torch.arange(6.0).view(2, 3) + 10 * r for r in ranks]
    # Every rank knows what lies in the others' memory, and so needs no message.
    blocks = [in_memory(lay_out(values[r], layouts[r])) for r in ranks]
    summed, sent = (lay_out(values[rank], layouts[rank]) for _ in range(2))
    dist.all_reduce(summed)
    dist.broadcast(sent, 0)
    return [
        (in_memory(summed), torch.stack(blocks).sum(0)),
        (in_memory(sent), blocks[0]),
    ]


@pytest.mark.parametrize("layouts", ["tt", "rt", "tr", "rg", "gg", "rtt", "rtg", "ggg"])
def test_gloo_takes_tensors_as_they_lie_in_memory(
    worker_pool: WorkerPool, layouts: str
) -> None:
    by_rank = worker_pool.run(calls_on_strides, layouts, world_size=len(layouts))
    pairs = [pair for results in by_rank for pair in results]
    assert len(pairs) == 2 * len(layouts)
    for result, memory in pairs:
        assert torch.equal(result, memory)


def what_became_of_the_columns_between() -> list[list[float]]:
    """Sum every other column, which is all that the call is given."""
    table = torch.arange(8.0).view(2, 4)
    dist.all_reduce(table[:, ::2])
    return table.tolist()


def test_sum_of_columns_overwrites_the_columns_between(worker_pool: WorkerPool) -> None:
    # Right would be [0, 1, 4, 3] and [8, 5, 12, 7].
    wrong = [[0.0, 2.0, 4.0, 6.0], [4.0, 5.0, 6.0, 7.0]]
    assert worker_pool.run(what_became_of_the_columns_between) == [wrong, wrong]


def sum_put_back(needs_no_grad: bool) -> list[list[float]] | str:
    """Follow the page's rule with a parameter that is not contiguous."""
    x = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t())
    y = x.detach().contiguous()
    dist.all_reduce(y)
    try:
        with torch.no_grad() if needs_no_grad else contextlib.nullcontext():
            x.copy_(y)
    except RuntimeError as error:
        return str(error)
    return x.tolist()


def test_a_sum_goes_back_into_a_parameter_without_grad_only(
    worker_pool: WorkerPool,
) -> None:
    summed = [[2.0, 6.0], [4.0, 8.0]]
    assert worker_pool.run(sum_put_back, True) == [summed, summed]
    for error in worker_pool.run(sum_put_back, False):
        assert "leaf Variable that requires grad is being used in an in-place" in error
    assert "into a parameter under `torch.no_grad()`" in words_of(ROOM)


def sum_of_images() -> tuple[bool, bool]:
    """Sum equal batches, which lie channels_last on rank 1; then contiguous copies."""
    image = torch.arange(24.0).view(1, 2, 3, 4)
    mine = image.clone()
    if dist.get_rank() == 1:
        mine = image.to(memory_format=torch.channels_last)
    copy = mine.contiguous().clone()
    dist.all_reduce(mine)
    dist.all_reduce(copy)
    return torch.equal(mine, 2 * image), torch.equal(copy, 2 * image)


def test_channels_last_on_one_rank_gives_a_wrong_sum(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(sum_of_images) == [(False, True)] * 2


@pytest.mark.parametrize(
    ("world_size", "wrong"),
    # The true sums are 10, 12, 14, ... and 30, 33, 36, ...
    [
        (2, [10.0, 14.0, 13.0, 17.0, 16.0, 20.0]),
        (3, [30.0, 37.0, 34.0, 41.0, 38.0, 45.0]),
    ],
    ids=["2", "3"],
)
def test_collectives_with_other_strides_are_right_refused_or_silently_wrong(
    worker_pool: WorkerPool, world_size: int, wrong: list[float]
) -> None:
    # The lesson compares each result with the values that one process computes.
    by_rank = worker_pool.run(run_lesson, ROOM, "strides_table", world_size=world_size)
    table = load_chapter(ROOM)["strides_table"].TABLE
    check = "check: every call does what the table in the script says"
    assert by_rank == [f"{table}\n{check}\n", *[""] * (world_size - 1)]
    # 13 calls with 5 pairs of layouts, of which eight do not exist.
    words = re.findall(r"\b(right|wrong|refused)\b", table)
    assert len(words) == 13 * 5 - 8
    assert (words.count("wrong"), words.count("refused")) == (16, 12)
    # One sum by hand: rank 0 stores 0, 1, 2, ... row by row, the others their 10, 11,
    # 12, ... and 20, 21, 22, ... column by column.
    layouts = "r" + "t" * (world_size - 1)
    sums = worker_pool.run(calls_on_strides, layouts, world_size=world_size)
    assert [results[0][0].tolist() for results in sums] == [wrong] * world_size


def outcomes(function: str) -> list[str]:
    """Try a call of strides_table.py under another name, with each pair of layouts."""
    lesson = load_chapter(ROOM)["strides_table"]
    name = {
        "all_gather_into_tensor": "all_gather_single",
        "reduce_scatter_tensor": "reduce_scatter_single",
    }.get(function, function)
    called = mock.Mock(side_effect=getattr(dist, function))
    with mock.patch.object(dist, name, called):
        found = [
            lesson.try_call(name, *layouts.split()[dist.get_rank() > 0])
            for layouts in lesson.LAYOUTS
        ]
    assert called.call_count == len(found) == 5
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("all_gather_into_tensor", "all_gather_single"),
        ("reduce_scatter_tensor", "reduce_scatter_single"),
    ],
)
def test_old_names_treat_strides_as_the_new_ones(
    worker_pool: WorkerPool, old: str, new: str
) -> None:
    found = worker_pool.run(outcomes, old)
    assert found == worker_pool.run(outcomes, new)
    is_right = ["right"] * 5
    is_wrong = ["right", "wrong", "right", "right", "right"]
    assert found == [is_wrong if "reduce" in old else is_right] * 2


def table_with_a_mistake() -> tuple[Any, str]:
    """Run the lesson with a table that calls the strided all-reduce right."""
    lesson: Any = load_chapter(ROOM)["strides_table"]
    claim = "all_reduce             right     "
    table = lesson.TABLE.replace(f"{claim}wrong", f"{claim}right")
    assert table != lesson.TABLE
    errors = io.StringIO()
    with (
        in_the_pool(lesson),
        mock.patch.object(lesson, "TABLE", table),
        contextlib.redirect_stderr(errors),
    ):
        try:
            lesson.main()
        except SystemExit as end:
            return end.code, errors.getvalue()
    return None, errors.getvalue()


def test_table_that_is_no_longer_true_is_an_error(worker_pool: WorkerPool) -> None:
    text = "every call does what the table in the script says"
    failed = f"check failed on ranks [0, 1], not so: {text}\n"
    assert worker_pool.run(table_with_a_mistake) == [(1, failed), (1, "")]


# --- More failures, on warm ranks. ----------


def send_and_sum_two_types(
    type_0: torch.dtype, type_1: torch.dtype
) -> tuple[list[float], list[float]]:
    """Broadcast, then sum, tensors of one type on rank 0 and another on rank 1."""
    dtype = type_0 if dist.get_rank() == 0 else type_1
    sent, summed = (torch.tensor([1.5, 2.5]).to(dtype) for _ in range(2))
    dist.broadcast(sent, src=0)
    dist.all_reduce(summed)
    return sent.tolist(), summed.tolist()


def test_two_types_of_one_width_give_garbage_without_an_error(
    worker_pool: WorkerPool,
) -> None:
    types = (torch.float32, torch.int32)
    (sent, on_rank_0), (received, on_rank_1) = worker_pool.run(
        send_and_sum_two_types, *types
    )
    assert sent == [1.5, 2.5]
    assert on_rank_0 != [3.0, 5.0]
    # The bits of 1.5 and 2.5, read as whole numbers.
    assert received == on_rank_1 == [1069547520, 1075838976]


def refused_types() -> list[str]:
    """Make calls with types that gloo may not know; return which are refused."""
    rank, refused = dist.get_rank(), []
    for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn, torch.int32):
        calls: dict[str, Callable[[torch.Tensor], object]] = {
            "all_reduce": dist.all_reduce,
            "broadcast": functools.partial(dist.broadcast, src=0),
            "send or recv": functools.partial(dist.recv, src=0)
            if rank
            else functools.partial(dist.send, dst=1),
        }
        assert len(calls) == 3
        for name, call in calls.items():
            try:
                call(torch.ones(2).to(dtype))
            except RuntimeError as error:
                assert str(error) == "Invalid scalar type"
                refused.append(f"{dtype} in {name}")
    return refused


def test_gloo_does_not_know_all_types(worker_pool: WorkerPool) -> None:
    refused = [
        f"torch.{dtype} in {call}"
        for dtype in ("int16", "uint32", "float8_e4m3fn")
        for call in ("all_reduce", "broadcast")
    ]
    assert worker_pool.run(refused_types) == [refused] * 2


def test_sum_of_two_widths_aborts_a_rank(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankDied, match=r"^rank 0 died of signal SIGABRT"):
        worker_pool.run(send_and_sum_two_types, torch.float32, torch.float64)
    page = words_of(ROOM)
    assert (
        "`EnforceNotMet`) | [lengths](#not-the-same-length) or dtypes' widths" in page
    )


def test_sum_of_two_half_precisions_is_wrong_and_plausible(
    worker_pool: WorkerPool,
) -> None:
    types = (torch.float16, torch.bfloat16)
    results = worker_pool.run(send_and_sum_two_types, *types)
    assert results == [
        ([1.5, 2.5], [3.4375, 4.5625]),
        ([0.125, 8.0], [112.0, 1152.0]),
    ]


def received_by_a_wider_type() -> list[list[int]]:
    """Send eight bytes in four ways to rank 1, which has room for sixteen."""
    is_sender = dist.get_rank() == 0
    given, got = torch.tensor([1.5, 2.5]), torch.zeros(4, 2, dtype=torch.int64)
    dist.broadcast(given if is_sender else got[0], src=0)
    room = torch.empty(2) if is_sender else got[1]
    dist.scatter(room, [given, given] if is_sender else None, src=0)
    rows = None if is_sender else [got[2], torch.zeros(2, dtype=torch.int64)]
    dist.gather(given if is_sender else torch.ones(2, dtype=torch.int64), rows, dst=1)
    dist.send(given, 1) if is_sender else dist.recv(got[3], 0)
    return got.tolist()


def test_too_few_bytes_are_no_error_either(worker_pool: WorkerPool) -> None:
    _, got = worker_pool.run(received_by_a_wider_type)
    assert [first for first, _ in got] == [4620693218751676416] * 4
    # In gather's result, after what was sent, stands whatever was in memory.
    by_broadcast, by_scatter, _, by_recv = (rest for _, rest in got)
    assert (by_broadcast, by_scatter, by_recv) == (0, 0, 0)


def reduced_to_a_wider_type(numbers: int) -> list[float]:
    """Reduce ones, of float64 on rank 0 and of float32 on rank 1, to rank 0."""
    x = torch.ones(numbers, dtype=(torch.float64, torch.float32)[dist.get_rank()])
    dist.reduce(x, dst=0)
    return x.tolist()


def test_a_narrower_term_is_lost_in_a_short_reduce(worker_pool: WorkerPool) -> None:
    for numbers in (1, 2):
        sums, _ = worker_pool.run(reduced_to_a_wider_type, numbers)
        assert sums == [1.0] * numbers  # not 2


def broadcast_two_into_three() -> list[float]:
    """Broadcast two numbers to ranks that ask for three."""
    x = torch.full((2 if dist.get_rank() == 0 else 3,), float(dist.get_rank() + 7))
    dist.broadcast(x, src=0)
    return x.tolist()


def test_short_broadcast_leaves_the_rest_alone(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(broadcast_two_into_three) == [[7.0, 7.0], [7.0, 7.0, 8.0]]


def test_short_broadcast_may_bring_another_rank_s_rest(worker_pool: WorkerPool) -> None:
    # From four ranks on, a rank within gloo's tree passes on what it has itself.
    ends = worker_pool.run(broadcast_two_into_three, world_size=4)
    assert [end[:2] for end in ends] == [[7.0, 7.0]] * 4
    rests = [end[2] for end in ends[1:]]
    assert rests != [8.0, 9.0, 10.0] and set(rests) <= {8.0, 9.0, 10.0}


def sum_one_number_with_two() -> str:
    """Bring another length than the other rank, in a group that allows one second."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    try:
        dist.all_reduce(torch.ones(1 + dist.get_rank()), group=group)
    except RuntimeError as error:
        return str(error)
    return "a sum"


def test_other_lengths_may_time_out(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(sum_one_number_with_two, world_size=2)
    timed_out = "Timed out waiting 1000ms"
    assert len(ends) == 2
    assert any(timed_out in end for end in ends), ends
    # If the other has not run out of time by then, its connection is closed.
    assert all(re.search("|".join([timed_out, *LOST]), end) for end in ends), ends


def calls_beside_one_that_times_out() -> tuple[list[str], float]:
    """Start four sums on rank 0 alone, and one later; then sum in a new group.

    Returns what the five calls have said, and that sum.
    """
    group, said = dist.new_group(timeout=timedelta(seconds=1)), []
    dist.all_reduce(torch.ones(9), group=group)
    if dist.get_rank() == 0:
        sums = [torch.ones(9) for _ in range(4)]
        works: Any = [dist.all_reduce(x, group=group, async_op=True) for x in sums]
        later = functools.partial(dist.all_reduce, sums[0], group=group)
        for call in (*(work.wait for work in works), later):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
    dist.all_reduce(total := torch.ones(1), group=dist.new_group())
    return said, total.item()


def test_what_is_under_way_when_a_call_times_out_says_something_else(
    worker_pool: WorkerPool,
) -> None:
    (said, total), other = worker_pool.run(calls_beside_one_that_times_out)
    closed = "Application timeout caused pair closure"
    assert other == ([], 2) and total == 2 and len(said) == 5
    timed_out = ["Timed out waiting 1000ms" in text for text in said]
    assert any(timed_out) and not all(timed_out)
    others = [
        text for text, is_first in zip(said, timed_out, strict=True) if not is_first
    ]
    assert set(others) == {closed} and said[-1] == closed
    page = (ROOT / "WHEN_IT_GOES_WRONG.md").read_text("utf-8")
    assert f"`{closed}`: make a new group" in page


def sums_by_call(numbers: list[list[list[float]]]) -> list[Any]:
    """Sum the tensors of each call in turn; return what came, and the error if any.

    `numbers` has, for each rank, what it brings to its first call, its second, ...
    """
    group, found = dist.new_group(timeout=timedelta(seconds=1)), []
    for mine in numbers[dist.get_rank()]:
        x = torch.tensor(mine)
        try:
            dist.all_reduce(x, group=group)
            found.append(x.tolist())
        except RuntimeError as error:
            return [*found, str(error)]
    return found


ENDS_OF_A_WAIT = "|".join(["Timed out waiting 1000ms", *LOST])


def test_one_number_against_two_may_be_a_wrong_sum_on_three_ranks(
    worker_pool: WorkerPool,
) -> None:
    calls = [[[1.0]], [[10.0]], [[100.0, 200.0]]]
    (first,), (second,), (third,) = worker_pool.run(sums_by_call, calls, world_size=3)
    # Both that brought one number return; the middle one has no sum at all.
    assert first == [111.0] != second
    assert len(second) == 1 and isinstance(second[0], float)
    assert re.search(ENDS_OF_A_WAIT, third), third
    assert "or give some a wrong sum." in words_of(ROOM)


def sum_of_millions(lengths: list[int], *dtypes: torch.dtype) -> dict[float, int] | str:
    """Bring so many of 1.0, rank 1 of 10.0; count what came, or return the error."""
    group, rank = dist.new_group(timeout=timedelta(seconds=1)), dist.get_rank()
    x = torch.full((lengths[rank] * 10**6,), 10.0**rank, dtype=dtypes[rank])
    try:
        dist.all_reduce(x, group=group)
    except RuntimeError as error:
        return str(error)
    values, counts = x.unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def test_half_of_a_sum_comes_back_if_the_lengths_fit(worker_pool: WorkerPool) -> None:
    # Gloo cuts both tensors into pieces of one size, so no length that arrives is
    # wrong. Rank 0 has half of the sum, and rank 1's numbers in place of the rest.
    one = (torch.float32, torch.float32)
    first, second = worker_pool.run(sum_of_millions, [1, 2], *one)
    assert first == {10.0: 500_000, 11.0: 500_000}
    assert isinstance(second, str) and re.search(ENDS_OF_A_WAIT, second), second


def test_half_of_a_sum_is_garbage_if_the_dtypes_are_of_two_widths(
    worker_pool: WorkerPool,
) -> None:
    two = (torch.float32, torch.float64)
    first, second = worker_pool.run(sum_of_millions, [1, 1], *two)
    # As two float32, a float64's 10 is 0 and 2.5625: half of them lie there alone, to
    # the others 1 is added.
    assert first == dict.fromkeys((0.0, 1.0, 2.5625, 3.5625), 250_000)
    assert isinstance(second, str) and re.search(ENDS_OF_A_WAIT, second), second


def test_after_a_skipped_call_the_sums_are_of_different_steps(
    worker_pool: WorkerPool,
) -> None:
    # Three steps; rank 1 leaves out the first, and its next call stands for that one.
    steps = [[[1.0], [10.0], [100.0]], [[2000.0], [30000.0]]]
    *sums, error = worker_pool.run(sums_by_call, steps)[0]
    assert sums == [[2001.0], [30010.0]]
    assert re.search(ENDS_OF_A_WAIT, error), error


OTHER_KINDS = ("broadcast", "reduce", "barrier")


def beside_a_sum_left_out(level: str) -> list[str]:
    """Sum on rank 0, while rank 1's next call is of another kind; return the errors.

    All start before anybody waits, so that three timeouts take the time of one.
    """
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    limit, x = timedelta(seconds=1), torch.ones(4)
    groups = {kind: dist.new_group(timeout=limit) for kind in OTHER_KINDS}
    started: list[Any] = []
    errors = []
    for kind, group in groups.items():
        name = kind if dist.get_rank() else "all_reduce"
        arguments = {"broadcast": (x, 0), "reduce": (x, 0), "all_reduce": (x,)}
        call = functools.partial(getattr(dist, name), *arguments.get(name, ()))
        try:
            started.append(call(group=group, async_op=True))
        except RuntimeError as error:
            errors.append(str(error))
    for work in started:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_after_a_skipped_call_another_kind_is_waited_out(
    worker_pool: WorkerPool,
) -> None:
    waited, _ = worker_pool.run(beside_a_sum_left_out, "OFF")
    assert len(waited) == len(OTHER_KINDS)
    assert all(re.search(ENDS_OF_A_WAIT, error) for error in waited), waited
    found = worker_pool.run(beside_a_sum_left_out, "DETAIL")
    assert [len(errors) for errors in found] == [len(OTHER_KINDS)] * 2
    for errors in found:
        assert all("Detected mismatch between collectives" in one for one in errors)


def wait_for_a_rank_that_left() -> str:
    """Wait without a timeout of one's own in a group that allows one second."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_rank() == 1:
        # Longer than the group's timeout, and far less than the one that is used.
        time.sleep(2.5)
        dist.monitored_barrier(group)
        return "late"
    start = time.monotonic()
    module = sys.modules[dist.monitored_barrier.__module__]
    with mock.patch.object(module, "_check_valid_timeout") as checked:
        dist.monitored_barrier(group)
    waited = time.monotonic() - start
    # That is what the barrier itself gets.
    checked.assert_called_once_with(timedelta(minutes=30))
    return "waited longer than the group allows" if waited > 1.2 else f"{waited:.1f} s"


def test_monitored_barrier_ignores_the_timeout_of_its_group(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(wait_for_a_rank_that_left) == [
        "waited longer than the group allows",
        "late",
    ]


def wait_for_a_rank_that_ends() -> str:
    """Wait without a timeout of one's own for a rank that leaves; return the error."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(0.5)  # had it left before, rank 0's error might not name it
        dist.destroy_process_group(group)
        return ""
    try:
        dist.monitored_barrier(group)
    except RuntimeError as error:
        return str(error)
    return "all came"


def test_monitored_barrier_ends_when_the_missing_rank_does(
    worker_pool: WorkerPool,
) -> None:
    error, nothing = worker_pool.run(wait_for_a_rank_that_ends)
    assert nothing == ""
    named = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms"
    assert named in error and any(lost in error for lost in LOST), error
    claim = "rank 0 waits up to 30 minutes, whatever the group's timeout."
    assert f"Without `timeout=`, {claim}" in words_of(ROOM)


def refused_monitored_barriers() -> list[str]:
    """Meet in groups on gloo that were named otherwise; return the errors."""
    errors = []

    def meet(name: str, group: Any = None) -> None:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=60))
        except ValueError as error:
            errors.append(f"{name}: {error}")

    # A group without a name has the world's, which is "gloo" here.
    for backend in ("gloo", None, "cpu:gloo"):
        meet(str(backend), dist.new_group(backend=backend))
    dist.destroy_process_group()
    # A world of this rank alone, without a name.
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    meet("no name")
    return errors


def test_monitored_barrier_wants_the_name_gloo(worker_pool: WorkerPool) -> None:
    error = "monitored_barrier is only implemented for GLOO backend."
    refused = [f"{name}: {error}" for name in ("cpu:gloo", "no name")]
    assert worker_pool.run(refused_monitored_barriers) == [refused] * 2


def wait_with_a_timeout_of_ones_own(missing: int) -> str:
    """Wait for a rank in a group that allows one second; return the error."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    said, start = "", time.monotonic()
    if dist.get_rank() != missing:
        # Rank 0 gets more than the group's, or the others less.
        seconds = 1.5 if missing else 0.2
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            said = f"after {time.monotonic() - start:.0f} s: {error}"
    dist.barrier()  # whoever is missing stays until the others have given up
    return said


@pytest.mark.parametrize("missing", [2, 0])
def test_monitored_barrier_uses_the_timeout_of_its_group_but_on_rank_zero(
    worker_pool: WorkerPool, missing: int
) -> None:
    found = worker_pool.run(wait_with_a_timeout_of_ones_own, missing, world_size=3)
    assert len(found) == 3 and found.pop(missing) == ""
    if missing:
        named = "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1500 ms"
        assert named in found.pop(0)
    assert len(found) == (1 if missing else 2)
    for said in found:
        assert "Please check rank 0 logs for faulty rank." in said
        assert re.search(r"^after [1-9].* Timed out waiting 1000ms for", said, re.S)


def recorded_during(calls: Callable[[], None]) -> list[str]:
    """Return numbers and names of the calls that the flight recorder notes."""
    recorder: Any = _distributed_c10d  # its types leave out the function

    def recorded() -> list[dict[str, Any]]:
        return pickle.loads(recorder._dump_fr_trace())["entries"]

    last = max((entry["record_id"] for entry in recorded()), default=-1)
    calls()
    new = [entry for entry in recorded() if entry["record_id"] > last]
    return [f"{entry['collective_seq_id']} {entry['profiling_name']}" for entry in new]


def recorded_calls() -> list[str]:
    """Make calls of four kinds; return those that the flight recorder has noted."""
    groups: list[Any] = [dist.new_group(), dist.new_group()]

    def calls() -> None:
        dist.all_reduce(one := torch.ones(1), group=groups[0])
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        if dist.get_rank() == 0:
            dist.send(one, 1)
        else:
            dist.recv(one, 0)
        dist.broadcast(one, 0, group=groups[0])
        dist.all_reduce(one, group=groups[1])

    return recorded_during(calls)


def test_flight_recorder_notes_no_monitored_barrier_and_no_message(
    worker_pool: WorkerPool,
) -> None:
    # Each group counts its own.
    both = ["1 gloo:all_reduce", "2 gloo:broadcast", "1 gloo:all_reduce"]
    assert worker_pool.run(recorded_calls) == [both, both]
    assert "(here up to 100), numbered in each group:" in words_of(ROOM)


def calls_that_differ() -> dict[str, str | float]:
    """Differ in one thing a call at DETAIL; return each call's error or number."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    rank, found, started = dist.get_rank(), {}, {}
    for name, (numel, call, options) in {
        "shape": (1 + rank, dist.all_reduce, {}),
        "op": (1, dist.all_reduce, {"op": ("sum", "avg")[rank]}),
        "src": (1, dist.broadcast, {"src": rank}),
        "dst": (1, dist.reduce, {"dst": rank}),
        "layout": (1, dist.all_reduce, {}),
    }.items():
        x = torch.full((numel,), rank + 1.0)
        x = x.to_sparse() if (name, rank) == ("layout", 0) else x
        # All start before anybody waits, so that two timeouts take the time of one.
        group = dist.new_group(timeout=timedelta(seconds=2))
        if "op" in options:
            options = {"op": getattr(dist.ReduceOp, options["op"].upper())}
        try:
            started[name] = call(x, group=group, async_op=True, **options), x
        except RuntimeError as error:
            found[name] = f"RuntimeError: {error}"
    for name, (work, x) in started.items():
        try:
            work.wait()
            found[name] = x.item()
        except RuntimeError as error:
            found[name] = f"RuntimeError: {error}"
    return found


def test_detail_compares_shapes_but_no_layout_op_src_or_dst(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(calls_that_differ)
    assert len(results) == 2
    for found in results:
        assert "Detected mismatch between collectives" in str(found["shape"])
        others = [text for name, text in found.items() if name != "shape"]
        assert len(others) == 4 and not any("mismatch" in str(one) for one in others)
    # A sum on one rank, a mean on the other; the others wait for what nobody sends.
    assert [found["op"] for found in results] == [3.0, 1.5]
    for name in ("src", "dst", "layout"):
        assert any("Timed out waiting 2000ms" in str(found[name]) for found in results)


def mismatches_found() -> dict[str, list[bool]]:
    """At DETAIL, call with other dtypes, then other shapes; say what was an error."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[str, list[bool]] = {}
    for dtypes, shapes in (
        ((torch.float32, torch.int32), ((2, 3), (2, 3))),
        ((torch.float32, torch.float32), ((2, 3), (3, 2))),
    ):
        x = torch.ones(shapes[rank], dtype=dtypes[rank])
        both, single = [x.clone() for _ in range(world_size)], torch.cat([x, x])
        lists, unequal = both if rank == 0 else None, [x, single]
        for name, tensors in {
            "all_reduce": (x,),
            "broadcast": (x, 0),
            "reduce": (x, 0),
            "scatter": (x, lists, 0),
            "gather": (x, lists, 0),
            "all_gather": (both, x),
            "all_gather_single": (single, x),
            "reduce_scatter": (x, both),
            "reduce_scatter_single": (x, single),
            "reduce_scatter of unequal parts": (unequal[rank].clone(), unequal),
            "all_to_all": (both, [x, x]),
            "all_to_all_single": (single, single.clone()),
            "all_reduce_coalesced": ([x.clone()],),
            "all_gather_coalesced": ([[one] for one in both], [x]),
        }.items():
            # With its own debug level, and no connections that an error has spoilt.
            group = dist.new_group(timeout=timedelta(seconds=5))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # coalesced
                    getattr(dist, name.split()[0])(*tensors, group=group)
                found.setdefault(name, []).append(False)
            except RuntimeError as error:
                assert "Detected mismatch between collectives" in str(error)
                found.setdefault(name, []).append(True)
    return found


def test_detail_finds_dtypes_and_shapes_but_not_in_all_to_all(
    worker_pool: WorkerPool,
) -> None:
    found, others = worker_pool.run(mismatches_found)
    assert found == others and len(found) == 14
    kinds = ("all_to_all", "coalesced", "unequal parts")
    not_found = {name for name in found if any(kind in name for kind in kinds)}
    assert len(not_found) == 5
    for name, is_found in found.items():
        assert is_found == [name not in not_found] * 2, name
    claim = (
        "finds differing dtypes and shapes (not in `all_to_all`, `*_coalesced` or a "
        "`reduce_scatter` of unequal parts) and"
    )
    assert claim in words_of(ROOM)


def asks_after_its_own_call(level: str) -> float | str:
    """Let rank 1 call only when rank 0's call with async_op has returned."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.tensor([10.0 ** dist.get_rank()])
    try:
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), 0, group=group)
        work = dist.all_reduce(x, group=group, async_op=True)
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1, group=group)
        assert work is not None
        work.wait()
    except RuntimeError as error:
        return str(error)
    return x.item()


def test_under_detail_a_call_with_async_op_waits(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(asks_after_its_own_call, "OFF") == [11.0, 11.0]
    first, second = worker_pool.run(asks_after_its_own_call, "DETAIL")
    assert "Ranks 1 failed to pass monitoredBarrier in 1000 ms" in first
    assert re.search(ENDS_OF_A_WAIT, second), second
    assert "even `async_op=True` waits, so a right program may hang" in words_of(ROOM)


def swapped_sums(level: str) -> tuple[list[float], list[str]]:
    """Sum two numbers, rank 1 in the other order; also return the recorded calls."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    group = dist.new_group(timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    x, y = torch.tensor([10.0**rank]), torch.tensor([100 * 10.0**rank])

    def calls() -> None:
        for one in (x, y) if rank == 0 else (y, x):
            dist.all_reduce(one, group=group)

    recorded = recorded_during(calls)
    return [x.item(), y.item()], recorded


def test_swapped_calls_of_one_shape_give_wrong_sums_without_an_error(
    worker_pool: WorkerPool,
) -> None:
    for level in ("OFF", "DETAIL"):
        (first, calls), (second, others) = worker_pool.run(swapped_sums, level)
        # Right would be 11 and 1100 on both.
        assert (first, second) == ([1001.0, 110.0], [110.0, 1001.0]), level
        # The flight recorder has two equal lists.
        sums = [call for call in calls if call.endswith(":all_reduce")]
        assert sums == ["1 gloo:all_reduce", "2 gloo:all_reduce"], level
        assert calls == others, level
    claim = "all-reduces of one shape and dtype: equal lists, wrong values, and no "
    assert claim + "error, even with `DETAIL`" in words_of(ROOM)


def swapped_roots(roots: list[int]) -> list[float] | str:
    """Broadcast two numbers from these roots, rank 1 in the other order."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    rank = dist.get_rank()
    x, y = torch.tensor([10.0**rank]), torch.tensor([100 * 10.0**rank])
    calls = [(x, roots[0]), (y, roots[1])]
    try:
        for one, root in calls if rank == 0 else reversed(calls):
            dist.broadcast(one, root, group=group)
    except RuntimeError as error:
        return str(error)
    return [x.item(), y.item()]


def test_swapped_broadcasts_hang_if_their_roots_differ(worker_pool: WorkerPool) -> None:
    # With one root rank 1 takes the first number for the second.
    found = worker_pool.run(swapped_roots, [0, 0])
    assert found == [[1.0, 100.0], [100.0, 1.0]]
    first, second = worker_pool.run(swapped_roots, [0, 1])
    assert re.search(ENDS_OF_A_WAIT, str(first)), first
    assert re.search(ENDS_OF_A_WAIT, str(second)), second


def meets_an_all_reduce(kind: str) -> list[float] | str:
    """Call it on rank 1 while rank 0 all-reduces; return this rank's numbers."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.arange(4.0) + 10 * dist.get_rank()
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(x, group=group)
        elif kind == "reduce_scatter_tensor":
            half = torch.zeros(2)
            dist.reduce_scatter_tensor(half, x, group=group)
            x = half
        else:
            dist.reduce(x, 0, group=group)
    except RuntimeError as error:
        return str(error)
    return x.tolist()


def test_gloo_tells_most_kinds_of_calls_apart_but_not_all(
    worker_pool: WorkerPool,
) -> None:
    # Its reduce-scatter is an all-reduce, of which a rank keeps its part.
    found = worker_pool.run(meets_an_all_reduce, "reduce_scatter_tensor")
    assert found == [[10.0, 12.0, 14.0, 16.0], [14.0, 16.0]]
    said = worker_pool.run(meets_an_all_reduce, "reduce")
    assert [bool(re.search(ENDS_OF_A_WAIT, str(one))) for one in said] == [True] * 2
    assert "on gloo, most also by kind" in words_of(ROOM)


def swapped_messages(tags: list[int]) -> list[float] | str:
    """Send two numbers with these tags; rank 1 receives them in the other order."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    calls = [(torch.tensor([i + 1.0]), tag) for i, tag in enumerate(tags)]
    try:
        for one, tag in calls if dist.get_rank() == 0 else reversed(calls):
            if dist.get_rank() == 0:
                dist.send(one, 1, group, tag)
            else:
                dist.recv(one.zero_(), 0, group, tag)
    except RuntimeError as error:
        return str(error)
    return [one.item() for one, _ in calls]


def test_swapped_messages_hang_if_their_tags_differ(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(swapped_messages, [0, 0]) == [[1.0, 2.0], [2.0, 1.0]]
    row = "two messages of one length and direction without tags"
    assert row in (ROOT / "MYTHS.md").read_text()
    for text in (said := worker_pool.run(swapped_messages, [1, 2])):
        assert re.search(ENDS_OF_A_WAIT, str(text)), text
    assert len(said) == 2


def swapped_sums_of_two_groups(level: str) -> list[float] | str:
    """Sum a number in each of two groups, rank 1 in the other order."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    limit, rank = timedelta(seconds=1), dist.get_rank()
    calls = [
        (torch.tensor([first * 10.0**rank]), dist.new_group(timeout=limit))
        for first in (1, 100)
    ]
    try:
        for one, group in calls if rank == 0 else reversed(calls):
            dist.all_reduce(one, group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return [one.item() for one, _ in calls]


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_swapped_sums_of_two_groups_hang(worker_pool: WorkerPool, level: str) -> None:
    said = [str(one) for one in worker_pool.run(swapped_sums_of_two_groups, level)]
    assert len(said) == 2
    for text in said:
        # DETAIL compares the calls of one group: it misses a rank, and tells no more.
        ends = ENDS_OF_A_WAIT if level == "OFF" else "failed to pass monitoredBarrier"
        assert re.search(f"{ends}|{ENDS_OF_A_WAIT}", text), text
        assert "mismatch" not in text
    if level == "DETAIL":
        assert "Ranks 1 failed to pass monitoredBarrier" in said[0]


def done_before_rank_1_calls(folder: str) -> list[list[str]]:
    """Sum, then broadcast; on rank 1 return who has done so before it calls."""
    done = []
    for name in ("all_reduce", "broadcast"):
        call = functools.partial(getattr(dist, name), torch.ones(9))
        call = functools.partial(call, src=0) if name == "broadcast" else call
        call()
        dist.barrier()
        if dist.get_rank() == 1:
            # In a broadcast it waits until rank 2 has its numbers, for long if need be.
            for _ in range(3000 if name == "broadcast" else 30):
                if Path(folder, f"{name} 2").exists():
                    break
                time.sleep(0.01)
            done.append(sorted(path.name for path in Path(folder).glob(f"{name} *")))
        call()
        Path(folder, f"{name} {dist.get_rank()}").touch()
        dist.barrier()
    return done


def test_straggler_is_not_the_only_one_that_does_not_wait_in_a_broadcast(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run = functools.partial(worker_pool.run, done_before_rank_1_calls, str(tmp_path))
    _, done, _ = run(world_size=3)
    assert done == [[], ["broadcast 2"]]  # rank 0 waits until rank 1 takes its own
    assert "In an all-reduce it waits least." in words_of(ROOM)


def all_send_first(elements: int) -> str:
    """Let every rank send before it receives; return the error."""
    # After a timeout a group's connections cannot be used again.
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(elements)
    try:
        dist.send(x, dst=(rank + 1) % world_size, group=group)
        dist.recv(x, src=(rank - 1) % world_size, group=group)
    except RuntimeError as error:
        return str(error)
    return "received"


@pytest.mark.parametrize("elements", [1, 1_000_000])
def test_all_send_first_gets_stuck_at_any_size(
    worker_pool: WorkerPool, elements: int
) -> None:
    errors = worker_pool.run(all_send_first, elements, world_size=3)
    timed_out = "Timed out waiting 1000ms for send operation to complete"
    assert len(errors) == 3
    assert any(error.endswith(timed_out) for error in errors)
    assert all(re.search("|".join([timed_out, *LOST]), error) for error in errors)


def send_past_the_receiver(way: str) -> str:
    """Send what rank 1 does not wait for; return the error."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    try:
        if dist.get_rank() == 0:
            wrong = {"dst": 2} if way == "dst" else {"dst": 1, "tag": 1}
            if way == "isend":
                work = dist.isend(torch.ones(1), group=group, **wrong)
                assert work is not None
                work.wait()
            dist.send(torch.ones(1), group=group, **wrong)
        elif dist.get_rank() == 1 and way != "no recv":
            dist.recv(torch.ones(1), src=0, group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


@pytest.mark.parametrize("way", ["dst", "tag", "isend"])
def test_a_send_and_a_recv_that_do_not_fit_both_wait(
    worker_pool: WorkerPool, way: str
) -> None:
    *errors, third = worker_pool.run(send_past_the_receiver, way, world_size=3)
    assert third == "" and len(errors) == 2
    for error, call in zip(errors, ("send", "recv"), strict=True):
        timed_out = f"Timed out waiting 1000ms for {call} operation to complete"
        assert re.search("|".join([timed_out, *LOST]), error)
    assert any("Timed out" in error for error in errors)


def test_a_send_waits_for_a_rank_that_does_not_come_to_recv(
    worker_pool: WorkerPool,
) -> None:
    error, *others = worker_pool.run(send_past_the_receiver, "no recv", world_size=3)
    assert error.endswith("Timed out waiting 1000ms for send operation to complete")
    assert others == ["", ""]
