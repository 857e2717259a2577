"""The warm pool of gloo ranks: right results, named failures, nothing left behind."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from pickle import PicklingError
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_pool as module
from worker_pool import RankDied, RankError, RankFailure, RankTimeout, WorkerPool

# What tests are made with is tested where that is changed: with `make test-all`.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

# Generous, for machines that do much else: how long killing and noticing may take.
SLACK = 15.0


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Return a pool of this file's own, since the tests kill its workers."""
    with WorkerPool(max_ranks=3) as pool:
        yield pool


# What the ranks run. Each function is found by its name, so it stands at top level.


def sum_of_ranks(factor: int) -> tuple[int, torch.Tensor]:
    tensor = torch.full((3,), factor * (dist.get_rank() + 1.0))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def environment_and_group() -> tuple[dict[str, str], int, int, str, int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: os.environ[name] for name in names}
    group = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    return environment, *group, torch.get_num_threads()


def leave_traces() -> None:
    os.environ["RANK"] = "9"
    os.environ["LEFT"] = "over"
    os.chdir("/")
    sys.path.append("/left/over")
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.new_group([0])
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    raise SystemExit("with traces")


def look_for_traces() -> tuple[Any, ...]:
    return (
        *(os.environ["RANK"], os.environ.get("LEFT"), os.getcwd() == "/"),
        *("/left/over" in sys.path, torch.get_num_threads()),
        *(torch.get_default_dtype(), torch.is_grad_enabled()),
        *(dist.get_debug_level().name, dist.get_world_size()),
        *(torch.rand(2).tolist(), os.getpid()),
    )


def big_result(length: int) -> torch.Tensor:
    return torch.full((length,), float(dist.get_rank()), requires_grad=True) * 2


def ddp_gradient() -> torch.Tensor:
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return model.module.weight.grad


def raise_in_ddp(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1), static_graph=True)
    loss = model(torch.ones(1, 2)).sum()
    if dist.get_rank() == rank:
        raise ValueError("between forward and backward")
    loss.backward()


def sleep_on(rank: int) -> None:
    print("started on", dist.get_rank())
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def die_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def fail_to_join_on(rank: int, file: str) -> int:
    if dist.get_rank() == rank:
        dist.destroy_process_group()
        store = dist.FileStore(file, 2)
        wait = timedelta(seconds=0.1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=wait)
    return dist.get_rank()


def leave_the_group() -> int:
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


def join_late_from_now_on(seconds: float) -> None:
    join = dist.init_process_group

    def join_late(*args: Any, **kwargs: Any) -> None:
        join(*args, **kwargs)
        time.sleep(seconds * kwargs["rank"])

    dist.init_process_group = join_late


def start_time() -> float:
    return time.monotonic()


def return_a_local_function() -> Any:
    return lambda: None


def start_a_child_and_hang(file: str) -> None:
    child = subprocess.Popen(["sleep", "444"])
    with open(f"{file}{dist.get_rank()}", "w") as output:
        print(os.getpid(), child.pid, file=output)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def fail_to_serve(_: Any, log: Path) -> None:
    log.write_text("out of order")
    os._exit(1)


def wait_for_end(pid: int) -> bool:
    """Say whether the process `pid` ends within the slack."""
    deadline = time.monotonic() + SLACK
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def assert_usable(pool: WorkerPool, world_size: int = 2) -> None:
    results = pool.run(sum_of_ranks, 1, world_size=world_size)
    total = world_size * (world_size + 1) / 2
    assert [rank for rank, _ in results] == list(range(world_size))
    assert [tensor.tolist() for _, tensor in results] == [[total] * 3] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_in_rank_order(pool: WorkerPool, world_size: int) -> None:
    results = pool.run(sum_of_ranks, 10, world_size=world_size)
    assert [rank for rank, _ in results] == list(range(world_size))
    total = 10.0 * sum(range(1, world_size + 1))
    assert len(results) == world_size
    for _, tensor in results:
        assert tensor.tolist() == [total] * 3


def sum_with_a_default_group() -> float:
    """Sum up ranks by a function whose group is a default argument."""
    from torch.distributed.nn import functional

    return functional.all_reduce(torch.tensor(float(dist.get_rank()))).item()


def test_workers_are_kept_up_to_the_limit(pool: WorkerPool) -> None:
    assert_usable(pool, 3)
    kept = pool.pids
    assert len(kept) == 3
    assert_usable(pool, 5)
    assert pool.pids == kept
    assert_usable(pool, 2)
    assert pool.pids == kept


def test_warm_runs_are_quick(pool: WorkerPool) -> None:
    assert_usable(pool)
    start = time.monotonic()
    for _ in range(5):
        assert_usable(pool)
    # Each would cost more than two seconds if it had to import torch.
    assert time.monotonic() - start < 10


def test_environment_and_group(pool: WorkerPool) -> None:
    results = pool.run(environment_and_group, world_size=3)
    assert len(results) == 3
    for number, (environment, rank, world_size, backend, threads) in enumerate(results):
        assert environment == {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
        }
        assert (rank, world_size, backend, threads) == (number, 3, "gloo", 1)


def test_each_run_starts_fresh(pool: WorkerPool) -> None:
    before = pool.run(look_for_traces)
    with pytest.raises(RankError, match="SystemExit: with traces"):
        pool.run(leave_traces)
    after = pool.run(look_for_traces)
    assert after == before
    torch.manual_seed(0)
    numbers = torch.rand(2).tolist()
    assert len(after) == 2
    for rank, found in enumerate(after):
        expected = (str(rank), None, False, False, 1, torch.float32, True, "OFF", 2)
        assert found[:-1] == (*expected, numbers)
    assert [found[-1] for found in after] == pool.pids[:2]


@pytest.mark.parametrize("kind", ["result", "error"])
def test_imports_take_no_time_of_the_job(
    pool: WorkerPool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"slow_to_import_{kind}"
    slow = 'import os, time\nif os.environ.get("RANK") == "1":\n    time.sleep(4)\n'
    fails = "    raise ImportError('as planned')\n" if kind == "error" else ""
    (tmp_path / f"{name}.py").write_text(f"{slow}{fails}def one(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module(name).one
    if kind == "result":
        assert pool.run(function, timeout=2) == [1, 1]
        return
    with pytest.raises(RankError, match="ImportError: as planned") as caught:
        pool.run(function, timeout=10)
    assert caught.value.rank == 1


def test_big_results_and_arguments(pool: WorkerPool) -> None:
    results = pool.run(big_result, 2_000_000)
    assert [result.shape for result in results] == [(2_000_000,)] * 2
    assert [result.sum().item() for result in results] == [0, 4_000_000]
    large = torch.ones(2_000_000)
    assert [v.item() for v in pool.run(torch.sum, large)] == [2_000_000] * 2


def test_ddp_averages_gradients(pool: WorkerPool) -> None:
    for _ in range(3):
        gradients = pool.run(ddp_gradient, world_size=3)
        assert [g.tolist() for g in gradients] == [[[2.0, 2.0]]] * 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_raises_first_is_named(pool: WorkerPool, rank: int) -> None:
    assert_usable(pool, 3)
    pids = pool.pids
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(raise_in_ddp, rank, world_size=3, timeout=60)
    assert time.monotonic() - start < SLACK
    assert caught.value.rank == rank
    assert "in raise_in_ddp\n" in caught.value.traceback
    message = str(caught.value)
    assert message.startswith(f"rank {rank} raised\nTraceback ")
    assert "ValueError: between forward and backward\n" in message
    others = {0, 1, 2} - {rank}
    assert [f"rank {one} failed as a consequence: " in message for one in others] == [
        True,
        True,
    ]
    # No worker was lost by it.
    assert_usable(pool, 3)
    assert pool.pids == pids


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_hangs_is_named(pool: WorkerPool, rank: int) -> None:
    assert_usable(pool)
    pids = pool.pids
    start = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        pool.run(sleep_on, rank, timeout=3)
    assert 3 <= time.monotonic() - start < 3 + SLACK
    assert caught.value.ranks == [rank]
    message = str(caught.value)
    assert message.startswith(f"rank {rank} did not end within 3 s\n")
    assert f"rank {1 - rank} failed as a consequence: RuntimeError: " in message
    assert "[rank 0] started on 0\n" in message
    assert "[rank 1] started on 1\n" in message
    own_lines = [
        line for line in message.splitlines() if line.startswith(f"[rank {rank}]")
    ]
    assert [line for line in own_lines if line.endswith(" in sleep_on")] != []
    assert not psutil.pid_exists(pids[rank])
    assert_usable(pool)
    assert pids[1 - rank] in pool.pids


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("exit", 7, "with exit code 7"), ("kill", -9, "of signal SIGKILL")],
)
def test_the_rank_that_dies_is_named_at_once(
    pool: WorkerPool, how: str, code: int, words: str
) -> None:
    assert_usable(pool)
    start = time.monotonic()
    with pytest.raises(RankDied, match=f"^rank 1 died {words}\n") as caught:
        pool.run(die_on, 1, how, timeout=60)
    assert time.monotonic() - start < SLACK
    assert (caught.value.rank, caught.value.exitcode) == (1, code)
    assert_usable(pool)


def test_a_group_that_failed_to_form_spoils_no_later_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert_usable(pool)
    pids = pool.pids
    with pytest.raises(RankError, match="rank 1 raised") as caught:
        pool.run(fail_to_join_on, 1, str(tmp_path / "store"))
    assert "init_process_group" in caught.value.traceback
    assert_usable(pool)
    assert pool.run(leave_the_group) == [0, 1]
    assert_usable(pool)
    assert pool.pids == pids


def test_no_function_starts_before_all_have_joined() -> None:
    # A function that leaves the group at once would break off what others still make.
    with WorkerPool() as other:
        other.run(join_late_from_now_on, 2.0)
        first, second = other.run(start_time)
    assert abs(second - first) < 1


def test_a_worker_that_died_between_runs_is_replaced(pool: WorkerPool) -> None:
    assert_usable(pool)
    first, *rest = pool.pids
    os.kill(first, signal.SIGKILL)
    pool._workers[0].process.join(SLACK)
    assert pool._workers[0].exit_code == -signal.SIGKILL
    assert_usable(pool)
    assert first not in pool.pids
    assert pool.pids[0] == rest[0]


def test_what_ranks_print_is_shown(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(sleep_on, -1)
    shown = "[rank 0] started on 0\n[rank 1] started on 1\n"
    assert capsys.readouterr().out == shown
    pool.run(sum_of_ranks, 1)
    assert capsys.readouterr().out == ""


def test_what_cannot_be_pickled(pool: WorkerPool) -> None:
    with pytest.raises((PicklingError, AttributeError), match="pickle"):
        pool.run(return_a_local_function())
    with pytest.raises(RankError, match="pickle"):
        pool.run(return_a_local_function)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        pool.run(sum_of_ranks, 1, world_size=0)
    assert_usable(pool)


def test_an_interrupt_does_not_leave_a_job_behind(pool: WorkerPool) -> None:
    assert_usable(pool)
    pids = pool.pids[:2]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleep_on, 0, timeout=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [psutil.pid_exists(pid) for pid in pids] == [False, False]
    assert_usable(pool)


def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "serve", fail_to_serve)
    with (
        WorkerPool() as broken,
        pytest.raises(RankFailure, match=r"did not start:\nout of order"),
    ):
        broken.run(sum_of_ranks, 1)


def test_closing_ends_workers_and_removes_files() -> None:
    with WorkerPool() as other:
        assert_usable(other, 1)
        (pid,) = other.pids
        folder = other._folder
        assert folder.is_dir()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def test_workers_and_their_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(module.__file__).parent)]!r}
from test_worker_pool import start_a_child_and_hang
from worker_pool import WorkerPool
if __name__ == "__main__":
    WorkerPool().run(start_a_child_and_hang, {str(tmp_path / "pids")!r}, timeout=300)
"""
    )
    files = [tmp_path / f"pids{rank}" for rank in range(2)]
    # The killed parent cannot remove its files: they go with this test's own.
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, parent], env=environment) as process:
        deadline = time.monotonic() + 60
        while not all(f.exists() and f.read_text().endswith("\n") for f in files):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        pids = [int(pid) for f in files for pid in f.read_text().split()]
        assert len(pids) == 4
        assert [psutil.pid_exists(pid) for pid in pids] == [True] * 4
        process.kill()
    assert [wait_for_end(pid) for pid in pids] == [True] * 4


def test_no_job_gets_the_group_of_an_earlier_one(worker_pool: WorkerPool) -> None:
    for world_size in (2, 3):
        sums = worker_pool.run(sum_with_a_default_group, world_size=world_size)
        assert sums == [sum(range(world_size))] * world_size
    assert world_size == 3
