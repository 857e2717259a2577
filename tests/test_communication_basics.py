"""Chapter 01: what each collective does, and what send and receive promise."""

import contextlib
import io
import os
import runpy
import time
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import config_from_args, get_args_parser

from launch import ROOT, clean_environment, python, torchrun
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "01_communication"
COLLECTIVES = ROOT / CHAPTER / "collectives.py"
SEND_RECV = ROOT / CHAPTER / "send_recv.py"
# --- What runs on each rank. ----------


def make_all_calls() -> dict[str, tuple[list[float], list[float], bool]]:
    """Make each call of both scripts; return before, after and the script's verdict."""
    chapter = load_chapter(CHAPTER)
    calls = chapter["collectives"].CALLS | chapter["other_collectives"].OTHERS
    before = chapter["expected"].numbers_before(dist.get_world_size())
    rank, root, results = dist.get_rank(), dist.get_world_size() - 1, {}
    for name, call in calls.items():
        mine = torch.tensor(before[rank], dtype=torch.float64)
        after = call(mine, root).tolist()
        is_right = chapter["expected"].agrees(name, after, before, rank, root)
        results[name] = (before[rank], after, is_right)
    return results


def check_of_a_wrong_broadcast() -> tuple[Any, str]:
    """Run the lesson as if every rank should have kept its own numbers."""
    module, errors = load_chapter(CHAPTER)["expected"], io.StringIO()
    own = {"broadcast": lambda rows, rank, root: rows[rank]}
    with mock.patch.dict(module.EXPECTED, own), contextlib.redirect_stderr(errors):
        try:
            return 0, run_lesson(CHAPTER, "collectives")
        except SystemExit as end:
            return end.code, errors.getvalue()


def in_one_call_and_in_two() -> dict[str, list[torch.Tensor]]:
    """Make the calls of the four equalities on random whole numbers, from any root."""
    calls = load_chapter(CHAPTER)["collectives"].CALLS
    results = {}
    for root in range(dist.get_world_size()):
        # The sum of whole numbers is the same in any order.
        generator = torch.Generator().manual_seed(dist.get_rank())
        mine = torch.randint(1000, (dist.get_world_size(),), generator=generator)
        for name in calls:
            if " = " in name:
                both = (calls[name.split(" = ")[0]], calls[name])
                values = [call(mine.double(), root) for call in both]
                results[f"{name}, root {root}"] = [mine, *values]
    return results


def gather_different_sizes() -> str:
    """Bring a tensor of another size on each rank; return the error."""
    mine = torch.ones(dist.get_rank() + 1)
    received = [torch.empty(rank + 1) for rank in range(dist.get_world_size())]
    try:
        dist.all_gather(received, mine)
    except RuntimeError as error:
        return str(error)
    return ""


def gradients_through_all_gather() -> tuple[list[Any], list[float], list[str]]:
    """Return grad_fn of all_gather's results, and a gradient through the other one."""
    from torch.distributed.nn.functional import all_gather

    weight = torch.ones(2, requires_grad=True)
    received = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(received, 3 * weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Every rank adds up the results of all, so each result has that many readers.
        torch.cat(all_gather(3 * weight)).sum().backward()
    assert weight.grad is not None
    names = [one.category.__name__ for one in caught]
    return [one.grad_fn for one in received], weight.grad.tolist(), names


def gradients_through_transposed_all_gather() -> list[list[list[float]]]:
    """Return this rank's gradients of a sum, weighted before or after transposing."""
    from torch.distributed.nn.functional import all_gather

    weight, found = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), []
    for weighted in (
        lambda x: x * weight.t().contiguous(),
        lambda x: x.t() * weight,
    ):
        mine = torch.zeros(2, 3, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            everyones = all_gather(mine)
        torch.stack([weighted(one).sum() for one in everyones]).sum().backward()
        assert mine.grad is not None
        found.append(mine.grad.tolist())
    return found


def gradients_through_gather() -> tuple[list[Any], list[float], list[float]]:
    """Gather on rank 0 by both functions.

    Returns:
        `grad_fn` of what the plain one brings, and the gradient through the other, if
        its results get gradients that are contiguous, and columns of a matrix.
    """
    from torch.distributed.nn.functional import gather

    is_root, world_size = dist.get_rank() == 0, dist.get_world_size()
    received = [torch.empty(2) for _ in range(world_size)] if is_root else None
    dist.gather(torch.ones(2, requires_grad=True), received, dst=0)
    weights = torch.arange(1.0, 2 * world_size + 1).view(2, world_size)
    gradients = []
    for dim, factor in ((0, weights.t().contiguous()), (1, weights)):
        mine = torch.ones(2, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            everyones = torch.stack(list(gather(mine, dst=0)), dim)
        (everyones * factor).sum().backward()  # a call for all ranks: it scatters
        assert mine.grad is not None
        gradients.append(mine.grad.tolist())
    return [one.grad_fn for one in received or []], gradients[0], gradients[1]


def objects_and_mean() -> tuple[str, list[Any] | None, float]:
    """Call what is said to exist on one backend only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received: list[Any] | None = [None] * world_size if rank == 1 else None
    dist.gather_object({"rank": rank}, received, dst=1)
    mine = torch.tensor(float(rank))
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        dist.all_reduce(torch.tensor(rank), op=dist.ReduceOp.AVG)
    # It adds before it divides: three times 60,000 is no float16, though their mean is.
    large = torch.tensor(60_000, dtype=torch.float16)
    dist.all_reduce(large, op=dist.ReduceOp.AVG)
    assert large.isinf()
    return dist.get_backend(), received, mine.item()


def sums_without_barrier(rounds: int) -> list[float]:
    """All-reduce without any barrier while the ranks are not in step."""
    rank, sums = dist.get_rank(), []
    for number in range(rounds):
        time.sleep(0.01 * ((rank + number) % 2))
        mine = torch.full((1000,), float(number))
        is_async = number % 2 == 1
        work = dist.all_reduce(mine, async_op=is_async)
        if is_async:
            assert work is not None
            work.wait()
        assert mine.min() == mine.max()
        sums.append(mine[0].item())
    assert len(sums) == rounds
    return sums


def reduced(numel: int, root: int) -> list[float]:
    """Reduce ones, tens and so on to a root; return what this rank has then."""
    mine = torch.full((numel,), 10.0 ** dist.get_rank())
    dist.reduce(mine, root)
    return mine.tolist()


def gathered_after_another_is_done() -> float:
    """Gather on rank 0; rank 1 calls only when rank 2's call has returned."""
    rank, done = dist.get_rank(), torch.zeros(1)
    mine = torch.tensor([float(rank)])
    received = [torch.empty(1) for _ in range(3)] if rank == 0 else None
    if rank == 1:
        dist.recv(done, src=2)
    dist.gather(mine, received, dst=0)
    if rank == 2:
        dist.send(torch.ones(1), dst=1)
    return float(torch.cat(received).sum() if received else done)


def call_of_nothing(name: str) -> str:
    """Call a collective of an empty tensor on rank 0 alone; return its error."""
    rank, nothing = dist.get_rank(), torch.empty(0)
    group, error_text = dist.new_group(timeout=timedelta(seconds=1)), ""
    if rank == 0:
        arguments = {"broadcast": (nothing, 0), "all_gather": ([nothing] * 2, nothing)}
        try:
            getattr(dist, name)(*arguments.get(name, (nothing,)), group=group)
        except RuntimeError as error:
            error_text = str(error)
    dist.barrier()  # so that rank 1 does not leave before
    return error_text


def names_that_warn() -> dict[str, list[str]]:
    """Call the old and the new names of the forms that take one tensor."""
    world_size, caught_by_name = dist.get_world_size(), {}
    one, all_of_them = torch.ones(1), torch.ones(world_size)
    for name, arguments in {
        "all_gather_into_tensor": (torch.empty(world_size), one),
        "all_gather_single": (torch.empty(world_size), one),
        "reduce_scatter_tensor": (torch.empty(1), all_of_them),
        "reduce_scatter_single": (torch.empty(1), all_of_them),
        "all_to_all_single": (torch.empty(world_size), all_of_them),
    }.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(dist, name)(*arguments)
        caught_by_name[name] = [one.category.__name__ for one in caught]
    return caught_by_name


# --- Collectives. ----------


def test_not_all_others_wait_for_a_rank_that_is_missing(
    worker_pool: WorkerPool,
) -> None:
    # Nobody would return if each rank waited for all: rank 1 waits for rank 2's return.
    found = worker_pool.run(gathered_after_another_is_done, world_size=3)
    assert found == [3.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_an_empty_tensor_makes_nobody_wait_but_in_broadcast(
    worker_pool: WorkerPool, name: str
) -> None:
    found, _ = worker_pool.run(call_of_nothing, name)
    assert ("Timed out waiting 1000ms" in found) == (name == "broadcast"), found
    assert bool(found) == (name == "broadcast")
    assert "others may wait, or get its next one" in words_of(CHAPTER)


def wanted(world_size: int) -> dict[str, list[Any]]:
    """Find what every rank must hold after each call, by arithmetic on one matrix."""
    n, root = world_size, world_size - 1
    # A row for each rank; a column for each place.
    held = torch.outer(10.0 ** torch.arange(n).double(), torch.arange(1.0, n + 1))

    def on_all(row: torch.Tensor) -> list[Any]:
        return [row.tolist()] * n

    def on_root(row: torch.Tensor, other: Any) -> list[Any]:
        return [other] * root + [row.tolist()]

    return {
        "broadcast": on_all(held[root]),
        "scatter": held[root].view(n, 1).tolist(),
        "gather": on_root(held[:, 0], None),
        "all_gather": on_all(held[:, 0]),
        "reduce_scatter": held.sum(0).view(n, 1).tolist(),
        "all_reduce": on_all(held.sum(0)),
        "all_reduce = reduce_scatter + all_gather": on_all(held.sum(0)),
        "all_reduce = reduce + broadcast": on_all(held.sum(0)),
        "all_gather = gather + broadcast": on_all(held[:, 0]),
        "reduce_scatter = reduce + scatter": held.sum(0).view(n, 1).tolist(),
        "reduce": on_root(held.sum(0), None),
        "all_to_all": held.t().tolist(),
        "barrier": on_all(torch.tensor([n])),
        "all_reduce AVG": on_all(held.mean(0)),
        "all_reduce PRODUCT": on_all(held.prod(0)),
        "all_reduce MIN": on_all(held[0]),
        "all_reduce MAX": on_all(held[root]),
        "all_gather_single": on_all(held[:, 0]),
        "reduce_scatter_single": held.sum(0).view(n, 1).tolist(),
        "all_to_all_single": held.t().tolist(),
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_collective_on_every_rank(
    worker_pool: WorkerPool, world_size: int
) -> None:
    by_rank = worker_pool.run(make_all_calls, world_size=world_size)
    expected = wanted(world_size)
    assert len(by_rank) == world_size and len(expected) == 20
    for rank, calls in enumerate(by_rank):
        assert list(calls) == list(expected)
        for title, after_by_rank in expected.items():
            _, after, is_right = calls[title]
            assert is_right
            if after_by_rank[rank] is not None:
                assert after == after_by_rank[rank], (rank, title)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_call_equals_two(worker_pool: WorkerPool, world_size: int) -> None:
    by_rank = worker_pool.run(in_one_call_and_in_two, world_size=world_size)
    assert len(by_rank) == world_size and len(by_rank[0]) == 4 * world_size
    for name in sorted(by_rank[0]):
        held = torch.stack([results[name][0] for results in by_rank]).double()
        for rank in range(world_size):
            _, one_call, two_calls = by_rank[rank][name]
            expected = {
                "all_reduce": held.sum(0),
                "all_gather": held[:, 0],
                "reduce_scatter": held.sum(0)[rank : rank + 1],
            }[name.split(" = ")[0]]
            assert torch.equal(one_call, expected), (name, rank)
            assert torch.equal(two_calls, expected), (name, rank)


def test_a_wrong_result_ends_all_ranks(worker_pool: WorkerPool) -> None:
    # The root itself keeps what it had, so only the other rank has a wrong result.
    claim = "10 calls on 2 ranks, root 1: as in plain Python"
    ends = worker_pool.run(check_of_a_wrong_broadcast)
    assert ends == [(1, f"check failed on ranks [0], not so: {claim}\n"), (1, "")]


@pytest.mark.slow
@pytest.mark.smoke
def test_collectives_script() -> None:
    result = torchrun(COLLECTIVES, nproc=4)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "device: cpu with gloo (no accelerator found)"
    assert len(lines) == 1 + 10 * 5 + 1
    assert lines[21:26] == [
        "reduce_scatter",
        "  rank 0 |    1    2    3    4 -> 1111",
        "  rank 1 |   10   20   30   40 -> 2222",
        "  rank 2 |  100  200  300  400 -> 3333",
        "  rank 3 | 1000 2000 3000 4000 -> 4444",
    ]
    assert lines[-1] == "check: 10 calls on 4 ranks, root 3: as in plain Python"


def test_other_collectives_script(worker_pool: WorkerPool) -> None:
    output, nothing = worker_pool.run(run_other_collectives)
    assert nothing == ""
    lines = output.splitlines()
    assert len(lines) == 10 * 3 + 1
    assert lines[3:6] == [
        *("all_to_all", "  rank 0 |  1  2 ->  1 10", "  rank 1 | 10 20 ->  2 20")
    ]
    assert lines[-1] == "check: 10 calls on 2 ranks, root 1: as in plain Python"


def run_other_collectives() -> str:
    """Run what other_collectives.py runs when it is started."""
    chapter, output = load_chapter(CHAPTER), io.StringIO()
    main, others = chapter["collectives"], chapter["other_collectives"].OTHERS
    cpu = mock.Mock(return_value=torch.device("cpu"))
    with (
        mock.patch.object(main, "join", cpu),
        mock.patch.object(main, "leave"),
        contextlib.redirect_stdout(output),
    ):
        main.main(others)
    return output.getvalue()


def test_collectives_without_torchrun_says_what_to_type() -> None:
    result = python(COLLECTIVES)
    assert (result.returncode, result.stdout) == (2, "")
    start = "start it with torchrun --nproc-per-node=2"
    assert result.stderr == f"collectives.py: {start} {CHAPTER}/collectives.py\n"


@pytest.mark.slow
def test_collectives_refuses_once_under_torchrun() -> None:
    result = torchrun(COLLECTIVES, "--only=all", nproc=2)
    assert result.returncode != 0
    assert result.output.count("unrecognized arguments: --only=all") == 1


def run_hello() -> str:
    """Run hello.py on this rank, which is in its group already."""
    output = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group") as joins,
        mock.patch.object(dist, "destroy_process_group") as leaves,
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(str(ROOT / CHAPTER / "hello.py"), run_name="__main__")
    joins.assert_called_once_with("gloo")
    leaves.assert_called_once_with()
    return output.getvalue()


@pytest.mark.parametrize("world_size", [2, 4])
def test_hello_sends_from_rank_0_to_rank_1(
    worker_pool: WorkerPool, world_size: int
) -> None:
    by_rank = worker_pool.run(run_hello, world_size=world_size)
    has = f"rank 1 of {world_size} has [7.0, 7.0, 7.0]\n"
    assert by_rank == ["", has, *[""] * (world_size - 2)]


def hello_alone() -> object:
    """Run hello.py on one rank; return what it ends with."""
    try:
        return run_hello()
    except SystemExit as end:
        return end.code


def test_hello_does_not_wait_for_a_rank_that_is_not_there(
    worker_pool: WorkerPool,
) -> None:
    said = ["start two ranks: torchrun --nproc-per-node=2"]
    assert worker_pool.run(hello_alone, world_size=1) == said


# --- Send and receive. ----------


def pass_on() -> str:
    """Run send_recv.py's lesson on this rank; return what it printed."""
    module, output = load_chapter(CHAPTER)["send_recv"], io.StringIO()
    with contextlib.redirect_stdout(output):
        module.pass_on(dist.get_rank(), dist.get_world_size())
    return output.getvalue()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_send_and_receive_on_every_rank(
    worker_pool: WorkerPool, world_size: int
) -> None:
    by_rank = worker_pool.run(pass_on, world_size=world_size)
    from_left = [float((rank - 1) % world_size) for rank in range(world_size)]
    ways = [f"{way:12}" for way in ("blocking", "non_blocking", "batched")]
    claim = "check: in 3 ways every rank has its left neighbour's number"
    lines = [f"{way} | ranks 0, 1, ... have {from_left}" for way in ways]
    assert by_rank[0].splitlines() == [*lines, claim]
    assert by_rank[1:] == [""] * (world_size - 1)


def pass_on_except_by(way: str) -> tuple[Any, str]:
    """Run the lesson with a way that passes nothing on; return exit code and words."""
    module, errors = load_chapter(CHAPTER)["send_recv"], io.StringIO()
    keep = mock.Mock(side_effect=lambda mine, left, right: mine, __name__=way)
    with (
        in_the_pool(module),
        mock.patch.object(module, way, keep),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        try:
            module.pass_on(dist.get_rank(), dist.get_world_size())
        except SystemExit as end:
            return end.code, errors.getvalue()
    return 0, ""


@pytest.mark.parametrize("way", ["blocking", "non_blocking", "batched"])
def test_send_and_receive_lesson_notices_a_way_that_passes_nothing_on(
    worker_pool: WorkerPool, way: str
) -> None:
    claim = "in 3 ways every rank has its left neighbour's number"
    ends = worker_pool.run(pass_on_except_by, way)
    assert ends == [(1, f"check failed on ranks [0, 1], not so: {claim}\n"), (1, "")]


def what_a_wrong_neighbour_sends() -> list[float]:
    """Pass each rank's number on, in each way, to see it in both directions."""
    module = load_chapter(CHAPTER)["send_recv"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    ways = (module.blocking, module.non_blocking, module.batched)
    mine = torch.tensor([float(rank)])
    # The ring the other way round: what comes is the right neighbour's number.
    return [way(mine, right, left).item() for way in ways]


def test_ways_to_send_follow_their_arguments(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(what_a_wrong_neighbour_sends, world_size=4)
    assert by_rank == [[float((rank + 1) % 4)] * 3 for rank in range(4)]


@pytest.mark.slow
@pytest.mark.smoke
def test_send_recv_script() -> None:
    # Like a reader whose shell still has a port and a rank count of another job.
    environment = clean_environment(WORLD_SIZE="7", MASTER_PORT="1")
    result = python(SEND_RECV, "--nprocs=4", env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "blocking     | ranks 0, 1, ... have [3.0, 0.0, 1.0, 2.0]",
        "non_blocking | ranks 0, 1, ... have [3.0, 0.0, 1.0, 2.0]",
        "batched      | ranks 0, 1, ... have [3.0, 0.0, 1.0, 2.0]",
        "check: in 3 ways every rank has its left neighbour's number",
    ]


def test_send_recv_refuses_in_one_line() -> None:
    result = python(SEND_RECV, "--nprocs=1")
    assert (result.returncode, result.stdout) == (2, "")
    text = "send_recv.py: argument --nprocs: '1' is no number from 2 to 16\n"
    assert result.stderr == text


# --- What people get wrong. ----------


def test_all_gather_wants_one_size(worker_pool: WorkerPool) -> None:
    errors = worker_pool.run(gather_different_sizes)
    text = "ProcessGroupGloo::allgather: invalid tensor size at index"
    assert errors == [
        f"{text} 1 (expected (1), got (2))",
        f"{text} 0 (expected (2), got (1))",
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_carries_no_gradient(
    worker_pool: WorkerPool, world_size: int
) -> None:
    by_rank = worker_pool.run(gradients_through_all_gather, world_size=world_size)
    gradient = [3.0 * world_size] * 2
    assert by_rank == [([None] * world_size, gradient, ["FutureWarning"])] * world_size


def test_gradients_through_all_gather_may_be_wrong_if_transposed(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(gradients_through_transposed_all_gather)
    # Each of two ranks reads all; weight[j][i] is due at place i, j.
    due = [[2.0, 6.0, 10.0], [4.0, 8.0, 12.0]]
    # The transposed gradient is sent as it lies in memory, without an error.
    garbage = [[2.0, 10.0, 8.0], [6.0, 4.0, 12.0]]
    assert by_rank == [[due, garbage]] * 2


def test_gather_carries_no_gradient(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(gradients_through_gather, world_size=3)
    assert [functions for functions, _, _ in by_rank] == [[None] * 3, [], []]
    # Rank r's numbers are multiplied by column r of [[1, 2, 3], [4, 5, 6]].
    assert [right for _, right, _ in by_rank] == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    # A column is not contiguous. It is sent as it lies in memory, without an error.
    assert [wrong for _, _, wrong in by_rank] == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]


def test_gather_object_and_mean_exist_on_gloo(worker_pool: WorkerPool) -> None:
    objects = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    by_rank = worker_pool.run(objects_and_mean, world_size=3)
    nothing = ("gloo", None, 1.0)
    assert by_rank == [nothing, ("gloo", objects, 1.0), nothing]
    assert "(gloo refuses integers; its sum may overflow first)" in words_of(CHAPTER)


def test_no_barrier_is_needed_after_a_collective(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(sums_without_barrier, 20, world_size=3)
    assert by_rank == [[3.0 * number for number in range(20)]] * 3


def test_reduce_spoils_the_other_tensors(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(make_all_calls, world_size=3)
    results = [calls["reduce"][:2] for calls in by_rank]
    changed = [after != before for before, after in results]
    assert changed == [True, True, True]
    # Only the root, the last rank, has all of the sum.
    total = [111.0, 222.0, 333.0]
    assert [after == total for _, after in results] == [False, False, True]
    # How much the other one has of the sum is a matter of the size, and of the root.
    for numel, root, other in (
        (2, 1, [11.0, 11.0]),
        (2, 0, [10.0, 10.0]),
        (4, 1, [11.0, 11.0, 1.0, 1.0]),
        (4, 0, [10.0, 10.0, 11.0, 11.0]),
    ):
        by_rank = worker_pool.run(reduced, numel, root)
        assert by_rank[root] == [11.0] * numel
        assert by_rank[1 - root] == other, (numel, root)
    # Of fewer elements than ranks, the last one's are as they were.
    by_rank = worker_pool.run(reduced, 1, 0, world_size=3)
    assert by_rank == [[111.0], [110.0], [100.0]]


def total_of_three_reports(copies: bool) -> float:
    """Count one in each of three steps, and report the total of all ranks each time."""
    total = reported = torch.zeros(1)
    for _ in range(3):
        total += 1
        reported = total.clone() if copies else total
        dist.all_reduce(reported)
    return reported.item()


def test_a_running_total_is_all_reduced_as_a_copy(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(total_of_three_reports, True) == [6.0] * 2
    # 2 x (2 x (2 x 1 + 1) + 1)
    assert worker_pool.run(total_of_three_reports, False) == [14.0] * 2


def calls_with_a_transposed_tensor() -> dict[str, str]:
    """Pass a tensor that is not contiguous to each call for two ranks."""
    other, said = 1 - dist.get_rank(), {}
    columns = torch.arange(6.0).view(2, 3).t()
    sends = [dist.P2POp(dist.isend, columns, other)]
    for name, call in {
        "send": lambda: dist.send(columns, other),
        "recv": lambda: dist.recv(columns, other),
        "isend": lambda: dist.isend(columns, other),
        "irecv": lambda: dist.irecv(columns, other),
        "batch_isend_irecv": lambda: dist.batch_isend_irecv(sends),
    }.items():
        with pytest.raises(RuntimeError) as refused:
            call()
        said[name] = str(refused.value)
    return said


def test_send_and_receive_want_contiguous_tensors(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(calls_with_a_transposed_tensor)
    assert len(by_rank) == 2
    for said in by_rank:
        assert len(said) == 5
        assert set(said.values()) == {"input tensor has to be contiguous"}


def test_local_rank_has_another_name() -> None:
    assert not hasattr(dist, "local_rank")
    environment = {"LOCAL_RANK": "5"}
    with mock.patch.dict("os.environ", environment):
        assert dist.get_node_local_rank() == 5


def test_two_names_are_deprecated(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(names_that_warn)
    expected = {
        "all_gather_into_tensor": ["FutureWarning"],
        "all_gather_single": [],
        "reduce_scatter_tensor": ["FutureWarning"],
        "reduce_scatter_single": [],
        "all_to_all_single": [],
    }
    assert by_rank == [expected, expected]


@pytest.mark.parametrize(
    ("nodes", "nproc", "threads"), [(1, 1, None), (2, 1, None), (1, 2, "1")]
)
def test_torchrun_sets_threads_for_several_ranks_of_a_machine_only(
    monkeypatch: pytest.MonkeyPatch, nodes: int, nproc: int, threads: str | None
) -> None:
    # So that monkeypatch takes away in the end what torchrun sets.
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    del os.environ["OMP_NUM_THREADS"]
    words = [f"--nnodes={nodes}", f"--nproc-per-node={nproc}", "script.py"]
    config_from_args(get_args_parser().parse_args(words))
    assert os.environ.get("OMP_NUM_THREADS") == threads
    claim = "If that is unset and a machine has several ranks, `torchrun` takes 1, and"
    assert claim in words_of(CHAPTER)


def test_agreement_leaves_room_for_rounding_only() -> None:
    agrees = load_chapter(CHAPTER)["expected"].agrees
    rows = [[36.0, 1.0], [38.0, 1.0]]
    assert agrees("all_reduce AVG", [36.99999999999999, 1.0], rows, 0, 1)
    assert agrees("reduce", [1.0], rows, 0, 1)  # undefined but on the root
    assert not agrees("reduce", [1.0], rows, 1, 1)
    # In float64 a sum of such numbers in another order is 1e-15 of it off.
    assert agrees("all_reduce AVG", [37 * (1 - 0.9e-9), 1.0], rows, 0, 1)
    assert not agrees("all_reduce AVG", [37 * (1 - 1.1e-9), 1.0], rows, 0, 1)
    assert not agrees("all_reduce AVG", [float("nan"), 1.0], rows, 0, 1)
    assert not agrees("all_reduce AVG", [37.0], rows, 0, 1)
