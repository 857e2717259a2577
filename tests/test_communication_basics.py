"""Chapter 01: what each collective does, and what send and receive promise."""

import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, clean_environment, python, torchrun
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "01_communication"
COLLECTIVES = ROOT / CHAPTER / "collectives.py"
SEND_RECV = ROOT / CHAPTER / "send_recv.py"
NAMES = (
    "scatter, gather, broadcast, reduce, all_reduce, all_gather, all_gather_single, "
    "reduce_scatter, reduce_scatter_single, all_to_all, all_to_all_single, barrier"
)


# --- What runs on each rank. ----------


def make_all_calls() -> dict[str, tuple[list[float], list[float], bool]]:
    """Make each call of collectives.py; return before, after and its own verdict."""
    module = load_chapter(CHAPTER)["collectives"]
    device = torch.device("cpu")
    return {title: module.make_call(title, device) for title in module.CALLS}


def make_call_that_is_wrong() -> bool:
    """Return the verdict on a broadcast when every rank should have kept its own."""
    module = load_chapter(CHAPTER)["collectives"]
    own = {"broadcast": lambda rows, rank, root: rows[rank]}
    with mock.patch.dict(module.EXPECTED, own):
        return module.make_call("broadcast", torch.device("cpu"))[2]


def take_all_lessons() -> dict[str, list[float]]:
    """Call what each lesson of send_recv.py calls."""
    lessons = load_chapter(CHAPTER)["send_recv"].lessons(dist.get_world_size())
    return {title: call() for title, (call, _) in lessons.items()}


def all_reduce_in_three_ways() -> list[torch.Tensor]:
    """All-reduce random numbers at once, by pieces and by the root."""
    module = load_chapter(CHAPTER)["collectives"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Whole numbers, so that the sum is the same in any order.
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randint(1000, (world_size,), generator=generator).double()
    calls = (module.try_all_reduce, module.by_pieces, module.by_root)
    return [mine, *(call(mine.clone(), 0) for call in calls)]


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


def objects_and_mean() -> tuple[str, list[Any] | None, float]:
    """Call what is said to exist on one backend only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received: list[Any] | None = [None] * world_size if rank == 1 else None
    dist.gather_object({"rank": rank}, received, dst=1)
    mine = torch.tensor(float(rank))
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    return dist.get_backend(), received, mine.item()


def without_contiguous_memory() -> tuple[list[torch.Tensor], list[str]]:
    """Return what transposed tensors become, and the errors of what refuses them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def transposed() -> torch.Tensor:
        return (torch.arange(6.0).view(2, 3) * (rank + 1)).t()

    reduced, sent = transposed(), transposed()
    assert not reduced.is_contiguous()
    dist.all_reduce(reduced)
    dist.broadcast(sent, src=1)
    received = [torch.empty(3, 2) for _ in range(world_size)]
    dist.all_gather(received, transposed())
    errors = []
    # All ranks are refused before anything is sent, so that none is left waiting.
    rows = torch.zeros(2, world_size).t()
    for call in (
        lambda: dist.all_to_all_single(torch.empty(world_size, 2), rows),
        lambda: dist.send(rows, dst=(rank + 1) % world_size),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return [reduced, sent, received[1]], errors


def sums_without_barrier(rounds: int) -> list[float]:
    """All-reduce without any barrier while the ranks are not in step."""
    rank, sums = dist.get_rank(), []
    for number in range(rounds):
        time.sleep(0.01 * ((rank + number) % 2))
        mine = torch.full((1000,), float(number))
        dist.all_reduce(mine)
        assert mine.min() == mine.max()
        sums.append(mine[0].item())
    assert len(sums) == rounds
    return sums


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
        "scatter": held[root].view(n, 1).tolist(),
        "gather": on_root(held[:, 0], []),
        "broadcast": on_all(held[root]),
        "reduce": on_root(held.sum(0), None),
        "all_reduce SUM": on_all(held.sum(0)),
        "all_reduce AVG": on_all(held.mean(0)),
        "all_reduce PRODUCT": on_all(held.prod(0)),
        "all_reduce MIN": on_all(held[0]),
        "all_reduce MAX": on_all(held[root]),
        "all_reduce by pieces": on_all(held.sum(0)),
        "all_reduce by root": on_all(held.sum(0)),
        "all_gather": on_all(held[:, 0]),
        "all_gather_single": on_all(held[:, 0]),
        "reduce_scatter": held.sum(0).view(n, 1).tolist(),
        "reduce_scatter_single": held.sum(0).view(n, 1).tolist(),
        "all_to_all": held.t().tolist(),
        "all_to_all_single": held.t().tolist(),
        "barrier": on_all(torch.tensor([n])),
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_collective_on_every_rank(
    worker_pool: WorkerPool, world_size: int
) -> None:
    by_rank = worker_pool.run(make_all_calls, world_size=world_size)
    expected = wanted(world_size)
    assert len(by_rank) == world_size and len(expected) == 18
    for rank, calls in enumerate(by_rank):
        assert list(calls) == list(expected)
        for title, after_by_rank in expected.items():
            _, after, is_right = calls[title]
            assert is_right
            if after_by_rank[rank] is not None:
                assert after == after_by_rank[rank], (rank, title)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_is_two_halves(worker_pool: WorkerPool, world_size: int) -> None:
    by_rank = worker_pool.run(all_reduce_in_three_ways, world_size=world_size)
    total = torch.stack([mine for mine, *_ in by_rank]).sum(0)
    assert len(by_rank) == world_size
    for _, at_once, by_pieces, by_root in by_rank:
        assert torch.equal(at_once, total)
        assert torch.equal(by_pieces, total)
        assert torch.equal(by_root, total)


def test_a_wrong_result_is_noticed(worker_pool: WorkerPool) -> None:
    # The root itself keeps what it had, so only the other rank has a wrong result.
    assert worker_pool.run(make_call_that_is_wrong) == [False, True]


@pytest.mark.smoke
def test_collectives_table() -> None:
    only = ["--only=all_to_all", "--only=reduce_scatter", "--only=gather"]
    result = torchrun(COLLECTIVES, *only, nproc=4, timeout=60)
    assert result.returncode == 0
    assert result.stdout.splitlines()[1:] == [
        "the root is rank 3; ranks 0, 1, 2 hold ones, tens, hundreds",
        "gather: the root collects everybody's number",
        "  rank 0 |    1 -> (nothing)",
        "  rank 1 |   10 -> (nothing)",
        "  rank 2 |  100 -> (nothing)",
        "  rank 3 | 1000 ->    1   10  100 1000",
        "reduce_scatter: each gets the sum at its own place",
        "  rank 0 |    1    2    3    4 -> 1111",
        "  rank 1 |   10   20   30   40 -> 2222",
        "  rank 2 |  100  200  300  400 -> 3333",
        "  rank 3 | 1000 2000 3000 4000 -> 4444",
        "all_to_all: each gets one number from everybody",
        "  rank 0 |    1    2    3    4 ->    1   10  100 1000",
        "  rank 1 |   10   20   30   40 ->    2   20  200 2000",
        "  rank 2 |  100  200  300  400 ->    3   30  300 3000",
        "  rank 3 | 1000 2000 3000 4000 ->    4   40  400 4000",
        "check: 3 calls on 4 ranks agree with plain Python",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "start it with torchrun --nproc-per-node=3"),
        (["--only=all"], f"no collective is called 'all'; known: {NAMES}"),
        (["--every"], "unrecognized arguments: --every"),
    ],
)
def test_collectives_refuses_in_one_line(words: list[str], message: str) -> None:
    result = python(COLLECTIVES, *words, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"collectives.py: {message}\n"


def test_collectives_says_once_that_a_name_is_unknown() -> None:
    result = torchrun(COLLECTIVES, "--only=all", nproc=2, timeout=60)
    assert result.returncode != 0
    assert result.output.count("no collective is called") == 1


# --- Send and receive. ----------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_send_and_receive_on_every_rank(
    worker_pool: WorkerPool, world_size: int
) -> None:
    by_rank = worker_pool.run(take_all_lessons, world_size=world_size)
    assert len(by_rank) == world_size
    for rank, got in enumerate(by_rank):
        left = [float((rank - 1) % world_size)]
        lists = [[2.5, 3.5, 4.5], [2.5, 3.5, 4.5], [7.0, 8.0, 9.0], [10.0, 11.0, 12.0]]
        tagged = [2.0, 1.0] if rank == 1 else []
        assert list(got.values()) == [
            *([100.0 + rank], left, left, left, tagged, lists[rank])
        ]


@pytest.mark.smoke
def test_send_recv_prints_every_rank() -> None:
    # Like a reader whose shell still has a port and a rank count of another job.
    environment = clean_environment(WORLD_SIZE="7", MASTER_PORT="1")
    result = python(SEND_RECV, env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == 6 * 4 + 1
    assert lines[-5:] == [
        "all_reduce, the mean, in new_group([0, 1])",
        "  rank 0 has 2.5, 3.5, 4.5",
        "  rank 1 has 2.5, 3.5, 4.5",
        "  rank 2 has 7, 8, 9",
        "check: 18 results on 3 ranks, 0 lessons wrong",
    ]


def test_all_send_first_gets_stuck_at_any_size() -> None:
    result = python(SEND_RECV, "--all-send-first", "--nprocs=2", timeout=60)
    timed_out = "  Timed out waiting 1000ms for send operation to complete"
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        *("all send 1 number(s) first; gloo says:", timed_out),
        *("all send 1,000,000 number(s) first; gloo says:", timed_out),
        "check: 4 of 4 sends got stuck, whatever the size",
    ]


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--nprocs=1"], {}, "--nprocs must be 2 to 16, not 1"),
        (["--nprocs=x"], {}, "argument --nprocs: invalid int value: 'x'"),
        (
            [],
            {"RANK": "0"},
            "start it with python, not torchrun: it starts its own processes",
        ),
    ],
)
def test_send_recv_refuses_in_one_line(
    words: list[str], environment: dict[str, str], message: str
) -> None:
    environment = clean_environment(**environment)
    result = python(SEND_RECV, *words, env=environment, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"send_recv.py: {message}\n"


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


def test_gather_object_and_mean_exist_on_gloo(worker_pool: WorkerPool) -> None:
    objects = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    by_rank = worker_pool.run(objects_and_mean, world_size=3)
    nothing = ("gloo", None, 1.0)
    assert by_rank == [nothing, ("gloo", objects, 1.0), nothing]


def test_most_calls_take_transposed_tensors(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(without_contiguous_memory)
    values = torch.arange(6.0).view(2, 3).t()
    assert len(by_rank) == 2
    for (reduced, sent, gathered), errors in by_rank:
        assert torch.equal(reduced, 3 * values)
        assert torch.equal(sent, 2 * values)
        assert torch.equal(gathered, 2 * values)
        assert errors == [
            "Tensors must be contiguous",
            "input tensor has to be contiguous",
        ]


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
    # With two ranks there is nothing half-made: the other one holds the sum as well.
    by_rank = worker_pool.run(make_all_calls, world_size=2)
    assert [calls["reduce"][1] for calls in by_rank] == [[11.0, 22.0]] * 2


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


def test_agreement_leaves_room_for_rounding_only() -> None:
    agrees = load_chapter(CHAPTER)["expected"].agrees
    assert agrees([36.99999999999999], [37.0])
    assert agrees([1.0], None)
    assert not agrees([36.9999], [37.0])
    assert not agrees([float("nan")], [37.0])
    assert not agrees([37.0, 1.0], [37.0])
