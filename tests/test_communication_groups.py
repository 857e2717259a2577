"""Chapter 01: collectives that do not wait, objects, groups and tags."""

import contextlib
import io
import pickle
import sys
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, python, torchrun
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "01_communication"


# --- What runs on each rank. ----------


def exchanged() -> dict[str, Any]:
    """Make every object collective; return what came."""
    return load_chapter(CHAPTER)["objects"].exchange_objects()


def surprised() -> list[str]:
    """Receive rank 0's surprise; return what ran here."""
    objects = load_chapter(CHAPTER)["objects"]
    # The worker knows the module under no name, and pickle looks functions up by name.
    with mock.patch.dict(sys.modules, {"objects": objects}):
        objects.HAS_RUN.clear()
        parcel = [objects.Surprise() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(parcel, src=0)
        return list(objects.HAS_RUN)


def objects_lesson(fault: str) -> tuple[Any, str]:
    """Run the lesson, also with a fault; return exit code and words."""
    objects = load_chapter(CHAPTER)["objects"]
    objects.HAS_RUN.clear()
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"objects": objects}))
        stack.enter_context(in_the_pool(objects))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        if fault == "nothing ran":
            harmless = mock.patch.object(objects, "Surprise", list)
            stack.enter_context(harmless)
        elif fault:  # one of the four collectives brings what is rank 0's
            received = objects.expected(0, dist.get_world_size())
            right = objects.expected(dist.get_rank(), dist.get_world_size())
            wrong = mock.Mock(return_value=right | {fault: received[fault]})
            stack.enter_context(mock.patch.object(objects, "exchange_objects", wrong))
        try:
            objects.main()
        except SystemExit as end:
            return end.code, output.getvalue()
    return 0, output.getvalue()


def row_and_column() -> tuple[str, str]:
    """Return the digits of this rank's row, then of its column."""
    groups = load_chapter(CHAPTER)["groups"]
    row, column = (groups.my_group(lists) for lists in (groups.ROWS, groups.COLUMNS))
    return groups.who_is_in(row), groups.who_is_in(column)


def reduced_later() -> tuple[bool | None, float]:
    """Start an all-reduce as the lesson does; return what it tells."""
    send = dist.send

    def send_and_sleep(*arguments: Any, **options: Any) -> None:
        send(*arguments, **options)
        time.sleep(0.2)  # enough for rank 1 to make its call

    with mock.patch.object(dist, "send", send_and_sleep):
        return load_chapter(CHAPTER)["async_all_reduce"].all_reduce_later()


def async_lesson(fault: str) -> tuple[Any, str]:
    """Run the lesson, whole or with a fault; return exit code and words."""
    module, words = load_chapter(CHAPTER)["async_all_reduce"], io.StringIO()
    answers = {"done at once": (True, 11.0), "not waited for": (False, 1.0)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(words))
        if fault:
            fake = mock.Mock(return_value=answers[fault])
            stack.enter_context(mock.patch.object(module, "all_reduce_later", fake))
        try:
            return 0, run_lesson(CHAPTER, "async_all_reduce")
        except SystemExit as end:
            return end.code, words.getvalue()


def name_of_the_next_group() -> str:
    """Let rank 2 leave out a group that it is not in; return the next one's name."""
    asked = mock.Mock(side_effect=InterruptedError)
    if dist.get_rank() < 2:
        dist.new_group([0, 1])
    helper = mock.patch.object(
        dist.distributed_c10d, "_new_process_group_helper", asked
    )
    with helper, contextlib.suppress(InterruptedError):
        dist.new_group([0, 2])
    return f"{asked.call_args.args[5]}"


def tags_taken_in_order() -> tuple[list[float], list[int]]:
    """Take two tagged messages as the lesson does; return them, and the tags asked."""
    received = mock.Mock(side_effect=dist.recv)
    with mock.patch.object(dist, "recv", received):
        messages = load_chapter(CHAPTER)["groups"].second_message_first()
    return messages, [call.kwargs["tag"] for call in received.call_args_list]


def groups_lesson(fault: str) -> tuple[Any, str]:
    """Run the lesson, whole or with a fault; return exit code and last line."""
    groups, errors = load_chapter(CHAPTER)["groups"], io.StringIO()
    faults = {
        "": (groups, "ROWS", groups.ROWS),
        "rows are columns": (groups, "ROWS", groups.COLUMNS),
        "tags are ignored": (groups, "second_message_first", lambda: [1.0, 2.0]),
    }
    with mock.patch.object(*faults[fault]), contextlib.redirect_stderr(errors):
        try:
            printed = run_lesson(CHAPTER, "groups").splitlines()
            return 0, printed[-1] if printed else ""
        except SystemExit as end:
            return end.code, errors.getvalue()


# --- Collectives that do not wait. ----------


def test_nothing_is_done_before_the_last_rank_calls(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(reduced_later) == [(False, 11.0), (None, 11.0)]


def test_async_lesson(worker_pool: WorkerPool) -> None:
    (code, printed), other = worker_pool.run(async_lesson, "")
    assert (code, other) == (0, (0, ""))
    assert printed.splitlines() == [
        "rank 0, before rank 1 calls | is_completed() False",
        "rank 0, after wait() | x 11",
        "rank 1, after wait() | x 11",
        "check: no result before rank 1 calls, and 11 after wait() on 2 ranks",
    ]


@pytest.mark.parametrize("fault", ["done at once", "not waited for"])
def test_async_lesson_notices_what_is_broken(
    worker_pool: WorkerPool, fault: str
) -> None:
    (code, said), other = worker_pool.run(async_lesson, fault)
    assert (code, other) == (1, (1, ""))
    assert said.startswith("check failed on ranks [0, 1], not so: no result before")


# --- Objects. ----------


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_objects_arrive_on_all_ranks(worker_pool: WorkerPool, world_size: int) -> None:
    by_rank = worker_pool.run(exchanged, world_size=world_size)
    reports = [{"rank": r, "losses": [0.5] * (r + 1)} for r in range(world_size)]
    assert len(by_rank) == world_size
    for rank, received in enumerate(by_rank):
        assert received == {
            "broadcast_object_list": ["settings", {"lr": 0.1}],
            "scatter_object_list": [reports[rank]],
            "gather_object": reports if rank == 0 else None,
            "all_gather_object": reports,
        }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unpickling_runs_the_senders_choice(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ran = ["chosen by rank 0"]
    others = [ran] * (world_size - 1)
    assert worker_pool.run(surprised, world_size=world_size) == [[], *others]


def test_objects_lesson(worker_pool: WorkerPool) -> None:
    (code, printed), *others = worker_pool.run(objects_lesson, "", world_size=3)
    assert (code, others) == (0, [(0, "")] * 2)
    ran = "['chosen by rank 0']"
    assert printed.splitlines()[-3:] == [
        "50,000 numbers: tensor 200,000 bytes, pickled 450,168",
        f"run_me() has run, by rank: [[], {ran}, {ran}]",
        "check: 4 object collectives on 3 ranks; run_me() on all but rank 0",
    ]


def test_a_pickled_list_of_floats_takes_more_than_twice_a_float32_tensor() -> None:
    # Each float takes nine bytes. A small integer takes two, and its int64 eight.
    floats, integers = torch.rand(1000), torch.arange(256)
    sizes = [len(pickle.dumps(one.tolist())) / one.nbytes for one in (floats, integers)]
    assert sizes[0] > 2 and sizes[1] < 1
    page = words_of(CHAPTER)
    assert "list of floats takes more than twice the bytes of a float32 tensor" in page


def test_objects_lesson_notices_that_nothing_ran(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(objects_lesson, "nothing ran", world_size=3)
    assert [code for code, _ in ends] == [1, 1, 1]
    assert "check failed on ranks [1, 2], not so: 4 object collectives" in ends[0][1]


@pytest.mark.parametrize("name", ["scatter_object_list", "gather_object"])
def test_objects_lesson_notices_a_wrong_object(
    worker_pool: WorkerPool, name: str
) -> None:
    ends = worker_pool.run(objects_lesson, name)
    assert [code for code, _ in ends] == [1, 1]
    assert "check failed on ranks [1], not so: 4 object collectives" in ends[0][1]


# --- Groups and tags. ----------


def test_rows_and_columns(worker_pool: WorkerPool) -> None:
    rows, columns = ("0011", "1100"), ("0101", "1010")
    assert worker_pool.run(row_and_column, world_size=4) == [
        (rows[rank // 2], columns[rank % 2]) for rank in range(4)
    ]


def test_a_rank_that_leaves_a_group_out_looks_for_the_next_elsewhere(
    worker_pool: WorkerPool,
) -> None:
    # The members of a group find each other in the store under its name, a number.
    names = worker_pool.run(name_of_the_next_group, world_size=3)
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_tags_tell_messages_apart(worker_pool: WorkerPool, world_size: int) -> None:
    nothing: tuple[list[float], list[int]] = ([0.0, 0.0], [])
    others = [nothing] * (world_size - 2)
    results = worker_pool.run(tags_taken_in_order, world_size=world_size)
    # Rank 0 has sent 1 with tag 0, then 2 with tag 1.
    assert results == [nothing, ([2.0, 1.0], [1, 0]), *others]


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("", []),
        ("rows are columns", [0, 1, 2, 3]),
        ("tags are ignored", [0, 1, 2, 3]),
    ],
)
def test_groups_lesson(worker_pool: WorkerPool, fault: str, failed: list[int]) -> None:
    claim = "the members of 4 groups, and 2 tagged messages"
    (code, said), *others = worker_pool.run(groups_lesson, fault, world_size=4)
    if failed:
        assert (code, said) == (1, f"check failed on ranks {failed}, not so: {claim}\n")
    else:
        assert (code, said) == (0, f"check: {claim}")
    assert others == [(code, "")] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "nproc"), [("async_all_reduce", 2), ("objects", 2), ("groups", 4)]
)
def test_scripts_run_as_a_reader_starts_them(script: str, nproc: int) -> None:
    result = torchrun(ROOT / CHAPTER / f"{script}.py", nproc=nproc)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].startswith("check: ")


def test_wrong_number_of_ranks_is_one_line() -> None:
    environment = {name: "2" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    program = (
        "import os, runpy, sys; sys.argv = ['01_communication/groups.py']; "
        f"os.environ |= {environment} | {{'RANK': '0', 'LOCAL_RANK': '0'}}; "
        "sys.path.insert(0, '01_communication'); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    result = python("-c", program)
    start = "start it with torchrun --nproc-per-node=4 01_communication/groups.py"
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"groups.py: not with 2 rank(s); {start}\n"


def group_of_two_by_themselves() -> list[int] | None:
    """Let ranks 0 and 1 alone make a group, then all meet; return who is in it."""
    members = None
    if dist.get_rank() < 2:
        group: Any = dist.new_group([0, 1], use_local_synchronization=True)
        members = dist.get_process_group_ranks(group)
    dist.barrier()
    return members


def test_members_alone_can_make_a_group_if_they_say_so(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(group_of_two_by_themselves, world_size=3)
    assert found == [[0, 1], [0, 1], None]


def group_after_one_of_rank_zero(alone: bool) -> str | list[int]:
    """Make a group of both ranks, rank 0 one of itself before; return who is in it."""
    options: dict[str, Any] = {"use_local_synchronization": True}
    options["timeout"] = timedelta(seconds=0.5 if alone else 60)
    if alone and dist.get_rank() == 0:
        dist.new_group([0], **options)
    try:
        group: Any = dist.new_group([0, 1], **options)
    except RuntimeError as error:  # of the store
        return str(error)
    return dist.get_process_group_ranks(group)


def test_members_wait_in_vain_if_one_has_made_more_groups(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(group_after_one_of_rank_zero, False) == [[0, 1]] * 2
    errors = worker_pool.run(group_after_one_of_rank_zero, True)
    assert len(errors) == 2
    assert all("wait timeout" in str(error).lower() for error in errors), errors
    page = words_of(CHAPTER)
    unequal = "(with `use_local_synchronization=True`, unless all have equally many)"
    assert f"or a later call may hang {unequal}" in page
