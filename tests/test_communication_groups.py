"""Chapter 01: objects, groups, asynchronous work, and what goes wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from launch import ROOT, Result, clean_environment, python, torchrun
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "01_communication"
FOLDER = ROOT / CHAPTER
GOES_WRONG, OBJECTS, GROUPS = (
    FOLDER / name for name in ("goes_wrong.py", "objects.py", "groups.py")
)
# Seconds for a case, most of which go to importing torch on a busy machine. A case
# that hangs would be stopped by the script itself after twice that.
CASE_LIMIT = 40

DETAIL = "with TORCH_DISTRIBUTED_DEBUG=DETAIL"
# What must be read on the screen, in this order, below each heading of a case. A
# rank's text comes before the line that says how it ended.
SIGNATURES = {
    "skip": {
        "plain": [
            "Timed out waiting 3000ms for recv operation to complete",
            "rank 0 : exit code 1",
            "rank 1 : exit code 0",
        ],
        DETAIL: [
            "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 3000 ms",
            "rank 0 : exit code 1",
            "rank 1 : exit code 0",
        ],
        "with monitored_barrier": [
            "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms",
            "rank 0 : exit code 1",
            "rank 1 : exit code 0",
        ],
    },
    "order": {
        "plain": [
            *("RuntimeError: [", "rank 0 : exit code 1"),
            *("RuntimeError: [", "rank 1 : exit code 1"),
        ],
        DETAIL: [
            *("Op type: ALLREDUCEvs BROADCAST", "rank 0 : exit code 1"),
            *("Op type: BROADCASTvs ALLREDUCE", "rank 1 : exit code 1"),
        ],
        "with the flight recorder": [
            *("recorded ['gloo:all_reduce'] RuntimeError", "rank 0 : exit code 1"),
            *("recorded ['gloo:broadcast'] RuntimeError", "rank 1 : exit code 1"),
        ],
    },
    "shape": {
        "plain": [
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
            "2000 vs 1000. Received data size doesn't match expected size.",
            "rank 0 : killed by SIGABRT",
            *("by peer", "rank 1 : exit code 1"),
        ],
        DETAIL: [
            *("Tensor shapes: 1000vs 2000", "rank 0 : exit code 1"),
            *("Tensor shapes: 2000vs 1000", "rank 1 : exit code 1"),
        ],
    },
    "layout": {
        "plain": [
            "sum [[0.0, 4.0, 3.0], [7.0, 6.0, 10.0]] rank 0 : exit code 0 "
            "sum [[0.0, 4.0], [3.0, 7.0], [6.0, 10.0]] rank 1 : exit code 0",
        ],
        DETAIL: [
            *("Tensor shapes: 2 3vs 3 2", "rank 0 : exit code 1"),
            *("Tensor shapes: 3 2vs 2 3", "rank 1 : exit code 1"),
        ],
    },
    "dtype": {
        "plain": [
            "received [1.5, 2.5], torch.float32 rank 0 : exit code 0 "
            "received [1069547520, 1075838976], torch.int32 rank 1 : exit code 0",
        ],
        DETAIL: [
            *("Rank 0 is running collective", "but Rank 1 is running collective"),
            *("Tensor dtypes: Floatvs Int", "rank 0 : exit code 1"),
            *("Rank 1 is running collective", "but Rank 0 is running collective"),
            *("Tensor dtypes: Intvs Float", "rank 1 : exit code 1"),
        ],
    },
    "peer": {
        "plain": [f"rank {rank} : exit code 1" for rank in range(3)],
        DETAIL: [f"rank {rank} : exit code 1" for rank in range(3)],
        "with stacks": [
            text
            for rank in range(3)
            for text in ("in recv", "in peer", f"rank {rank} : exit code 1")
        ],
    },
    "death": {
        "plain": ["by peer", "rank 0 : exit code 1", "rank 1 : killed by SIGKILL"],
        DETAIL: ["RuntimeError: ", "rank 0 : exit code 1 rank 1 : killed by SIGKILL"],
    },
    "slow": {
        "plain": [
            "all_reduce took more than 0.75 s rank 0 : exit code 0",
            "all_reduce took less than 0.75 s rank 1 : exit code 0",
        ],
        "with stacks": [
            *("in all_reduce", "in slow", "took more", "rank 0 : exit code 0"),
            *("in slow", "took less", "rank 1 : exit code 0"),
        ],
    },
}
# Somebody has to run out of time before the others lose their connection.
HANGS = {("skip", "plain"), ("order", "plain"), ("peer", "plain"), ("peer", DETAIL)}


def acts_of(output: str) -> dict[str, str]:
    """Split a case's output at its headings, and undo the wrapping of the texts."""
    _, *parts = re.split(r"^--- (.*)\n", output, flags=re.M)
    texts = [re.sub(r"(^|\s+)(rank \d \| +)?", " ", part) for part in parts[1::2]]
    return dict(zip(parts[::2], texts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", SIGNATURES)
@pytest.mark.timeout(120)
def test_case_fails_as_described_and_leaves_nothing_behind(case: str) -> None:
    # `python` raises if the case takes too long or leaves a process.
    result = python(GOES_WRONG, f"--case={case}", timeout=CASE_LIMIT)
    assert result.returncode == 0, result.output
    acts = acts_of(result.stdout)
    assert list(acts) == list(SIGNATURES[case])
    found = 0
    for title, signature in SIGNATURES[case].items():
        rest = acts[title]
        for part in signature:
            _, separator, rest = rest.partition(part)
            assert separator, f"{part!r} is not in its place in\n{acts[title]}"
            found += 1
        if (case, title) in HANGS:
            assert "Timed out waiting 3000ms for" in acts[title]
    assert found == sum(map(len, SIGNATURES[case].values())) > 0
    ranks = 3 if case == "peer" else 2
    assert result.stdout.splitlines()[-1] == (
        f"check: {case}: exit code and text of all {ranks} ranks are as described, "
        f"in {len(acts)} runs"
    )
    assert result.stderr == ""


def test_every_case_has_its_signature() -> None:
    assert set(load_chapter(CHAPTER)["failures"].CASES) == set(SIGNATURES)


def one_line(result: Result, text: str) -> None:
    """Assert that the user is told one line and nothing else, with status 2."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert text in result.stderr


@pytest.mark.parametrize("words", [[], ["--case=nope"]])
def test_unknown_case_lists_the_known_ones(words: list[str]) -> None:
    result = python(GOES_WRONG, *words, timeout=60)
    one_line(result, "skip, order, shape, layout, dtype, peer, death, slow")


@pytest.mark.parametrize("script", [GOES_WRONG, OBJECTS, GROUPS])
def test_unknown_option_is_one_line(script: Path) -> None:
    result = python(script, "--no-such", timeout=60)
    one_line(result, f"{script.name}: unrecognized arguments: --no-such")


def test_goes_wrong_starts_its_own_ranks() -> None:
    outside = clean_environment(RANK="0", WORLD_SIZE="1")
    result = python(GOES_WRONG, "--case=dtype", env=outside, timeout=60)
    one_line(result, "goes_wrong.py: start it with python, not torchrun: it starts")


# What a program does that imports the script, changes one thing and starts it.
CHANGED = """
import sys
sys.path.insert(0, {folder!r})
import failures, goes_wrong
if __name__ == "__main__":
    sys.argv = ["goes_wrong.py", "--case={case}"]
    {change}
    goes_wrong.main()
"""


@pytest.mark.parametrize(
    ("case", "change", "surprise"),
    [
        # The ranks receive rubbish, and the script expects another.
        (
            "dtype",
            "failures.CASES['dtype'][0].ends[1] = (0, 'received .0, 0.')",
            "did not go wrong as described: plain, rank 1\n",
        ),
        # The text is the expected one, the exit code is not.
        (
            "layout",
            "failures.CASES['layout'][0].ends[0] = (1, 'sum')",
            "did not go wrong as described: plain, rank 0\n",
        ),
        # Ranks that would run on are killed, and that is no success.
        (
            "slow",
            "goes_wrong.LIMIT = 0.2",
            "did not go wrong as described: plain, rank 0; plain, rank 1; "
            "with stacks, rank 0; with stacks, rank 1\n",
        ),
    ],
)
def test_a_failure_that_did_not_happen_is_an_error(
    tmp_path: Path, case: str, change: str, surprise: str
) -> None:
    program = tmp_path / "changed.py"
    program.write_text(CHANGED.format(folder=str(FOLDER), case=case, change=change))
    result = python(program, timeout=CASE_LIMIT)
    assert result.returncode == 1
    assert result.stderr == surprise
    assert "check:" not in result.stdout


# Once while the fork server, the second process, is importing torch; once as soon as
# the three ranks are there.
@pytest.mark.parametrize(("processes", "pause"), [(2, 0.3), (5, 0)])
def test_interrupt_ends_all_ranks_in_silence(processes: int, pause: float) -> None:
    process = subprocess.Popen(
        [sys.executable, GOES_WRONG, "--case=peer"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(PYTHONUNBUFFERED="1"),
        text=True,
        start_new_session=True,
        # What a script starts in the background ignores Ctrl-C; here it must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith("--- plain"):
            assert process.poll() is None
        # All of the terminal's processes get a Ctrl-C.
        script = psutil.Process(process.pid)
        while len(script.children(recursive=True)) < processes:
            assert process.poll() is None
        time.sleep(pause)
        everyone = script.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 130
        assert rest == ""
        assert psutil.wait_procs(everyone, timeout=5)[1] == []
    finally:
        process.kill()
        process.communicate()


# --- What runs on each rank. ----------


def exchanged() -> dict[str, tuple[Any, Any]]:
    """Make every object collective; return what came and what should have come."""
    return load_chapter(CHAPTER)["objects"].exchange_objects()


def surprised() -> tuple[list[str], Any]:
    """Receive rank 0's surprise; return what ran here and what arrived."""
    objects = load_chapter(CHAPTER)["objects"]
    # The worker knows the module under no name, and pickle looks functions up by name.
    sys.modules["objects"] = objects
    try:
        objects.NOTES.clear()
        parcel = [objects.Surprise() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(parcel, src=0)
        return list(objects.NOTES), None if dist.get_rank() == 0 else parcel[0]
    finally:
        del sys.modules["objects"]


def row_and_column_sums() -> tuple[int, int]:
    """Sum over this rank's row, then over its column."""
    groups = load_chapter(CHAPTER)["groups"]
    row, column = (groups.make_groups(lists) for lists in (groups.ROWS, groups.COLUMNS))
    return groups.total(row), groups.total(column)


def done_early() -> bool | None:
    """Ask a handle in the group of all ranks."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return load_chapter(CHAPTER)["groups"].is_done_early(group)


def all_reduce_two_types() -> list[float]:
    """Sum float32 on rank 0 with int32 on rank 1."""
    x = torch.tensor([1.5, 2.5])
    if dist.get_rank() == 1:
        x = torch.tensor([1, 2], dtype=torch.int32)
    dist.all_reduce(x)
    return x.tolist()


def broadcast_two_into_three() -> list[float]:
    """Broadcast two numbers to ranks that ask for three."""
    x = torch.full((2 if dist.get_rank() == 0 else 3,), float(dist.get_rank() + 7))
    dist.broadcast(x, src=0)
    return x.tolist()


def wait_for_a_rank_that_left() -> str:
    """Wait without a time-out of one's own in a group that allows two seconds."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_rank() == 1:
        # Longer than the group's time-out, and far less than the one that is used.
        time.sleep(4)
        dist.monitored_barrier(group)
        return "late"
    start = time.monotonic()
    dist.monitored_barrier(group)
    return "waited longer than the group allows" if time.monotonic() - start > 3 else ""


# --- Proofs on warm ranks. ----------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_objects_arrive_on_all_ranks(worker_pool: WorkerPool, world_size: int) -> None:
    by_rank = worker_pool.run(exchanged, world_size=world_size)
    reports = [{"rank": r, "losses": [0.5] * (r + 1)} for r in range(world_size)]
    assert len(by_rank) == world_size
    for rank, received in enumerate(by_rank):
        assert {name: found for name, (found, _) in received.items()} == {
            "broadcast_object_list": ["settings", {"lr": 0.1}],
            "scatter_object_list": [reports[rank]],
            "gather_object": reports if rank == 0 else None,
            "all_gather_object": reports,
        }
        assert all(found == expected for found, expected in received.values())
        assert len(received) == 4


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unpickling_runs_the_senders_choice(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ran = (["chosen by rank 0"], "chosen by rank 0")
    assert worker_pool.run(surprised, world_size=world_size) == [
        ([], None),
        *[ran] * (world_size - 1),
    ]


def test_rows_and_columns(worker_pool: WorkerPool) -> None:
    sums = worker_pool.run(row_and_column_sums, world_size=4)
    assert sums == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nothing_is_done_before_the_last_rank_calls(
    worker_pool: WorkerPool, world_size: int
) -> None:
    answers = worker_pool.run(done_early, world_size=world_size)
    assert answers == [False] * (world_size - 1) + [None]


def test_sum_of_two_types_is_rubbish_without_an_error(worker_pool: WorkerPool) -> None:
    on_rank_0, on_rank_1 = worker_pool.run(all_reduce_two_types)
    assert on_rank_0 != [2.5, 4.5]
    # The bits of 1.5 and 2.5, read as whole numbers.
    assert on_rank_1 == [1069547520, 1075838976]


def test_short_broadcast_leaves_the_rest_alone(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(broadcast_two_into_three) == [[7.0, 7.0], [7.0, 7.0, 8.0]]


def test_monitored_barrier_ignores_the_timeout_of_its_group(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(wait_for_a_rank_that_left) == [
        "waited longer than the group allows",
        "late",
    ]


# --- The scripts, as a user starts them. ----------


def test_objects_script() -> None:
    result = torchrun(OBJECTS, nproc=3, timeout=60)
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    assert "  as a tensor of float32 | 200,000 bytes" in lines
    # Nine bytes for each number, and the marks around batches of a thousand.
    assert "  as a pickled list      | 450,168 bytes" in lines
    assert "  one number as a tensor | 4 bytes" in lines
    start = lines.index("functions that ran because an object arrived")
    assert lines[start + 1 :] == [
        "  rank 0 | []",
        "  rank 1 | ['chosen by rank 0']",
        "  rank 2 | ['chosen by rank 0']",
        "check: 4 object collectives deliver what was sent, on 3 ranks; 2 ran note()",
    ]


def test_wrong_number_of_ranks_is_one_line() -> None:
    one_line(python(OBJECTS, timeout=60), "objects.py: needs 2 ranks or more; start it")
    one_line(python(GROUPS, timeout=60), "groups.py: needs 4 ranks; start it with")
    result = torchrun(GROUPS, nproc=2, timeout=60)
    assert result.returncode == 1
    assert result.stderr.count("groups.py: needs 4 ranks; start it with torchrun") == 1
