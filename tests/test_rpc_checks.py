"""Chapter 04: what its scripts count and judge, with no process but the test's own."""

import contextlib
import io
import os
import pickle
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scripts import load_chapter
from worker_pool import RankError, WorkerPool

CHAPTER = "04_rpc_parameter_server"
MODULES = load_chapter(CHAPTER)
SERVED, TRAIN, ROLES = (MODULES[n] for n in ("served_table", "train", "roles"))
CLASSIFIER = MODULES["classifier"]
ROOM = load_chapter(f"{CHAPTER}/lookup_cost")


def autograd_here(gradients: Callable[[], Any] = dict) -> SimpleNamespace:
    """Stand in for distributed autograd where all is in one process."""
    return SimpleNamespace(
        context=contextlib.nullcontext,
        backward=lambda _, losses: losses[0].backward(),
        get_gradients=lambda _: gradients(),
    )


# --- The checks at the end of train.py. ----------


class ThreeBags:
    """Three samples of a word each: rows 1, 2 and 3."""

    bags = (torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))

    def __len__(self) -> int:
        """Count them."""
        return 3

    def batch(self, _: torch.Tensor) -> None:
        """Return what is not looked at."""


def checked(fault: str) -> list[str]:
    """Let two trainers check a dense part of two parameters, with one fault."""
    dense, rank = nn.Linear(2, 2), dist.get_rank()
    nn.init.ones_(dense.weight)
    nn.init.constant_(dense.bias, float(fault == "last parameter" and rank))
    moved = torch.tensor([1, 4] if fault == "row" else [1, 2])
    error = {"gradient": 1.0, "no number": torch.nan}.get(fault, 0.0) * rank
    fakes = {
        "rpc": SimpleNamespace(rpc_sync=lambda *_: moved),
        "load_samples": lambda _: (ThreeBags(), ThreeBags()),
        "table_gradient_error": lambda *_: error,
    }
    with mock.patch.multiple(SERVED, **fakes):
        return SERVED.check_trainers(SimpleNamespace(dense=dense), Namespace(rows=9), 1)


def test_trainers_check_what_all_of_them_hold(worker_pool: WorkerPool) -> None:
    lines = worker_pool.run(checked, "")
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0][0] == "the dense weights of 2 trainer(s) are equal"
    assert lines[0][2] == "2 of 9 rows have moved; all of these had been looked up"
    for fault, said in (
        ("last parameter", "2 trainer\\(s\\) are NOT equal"),
        ("row", "1 of these had not been looked up"),
        ("gradient", "gradient is within 1e\\+00 of"),
        ("no number", "gradient is within nan of"),
    ):
        with pytest.raises(RankError, match=said):
            worker_pool.run(checked, fault)


@pytest.mark.parametrize("fault", ["", "gradient", "row", "another row"])
def test_the_gradient_that_arrives_is_compared_with_local_autograds(fault: str) -> None:
    torch.manual_seed(0)
    table, dense = nn.EmbeddingBag(9, 32, mode="sum", sparse=True), nn.Linear(32, 6)
    model = CLASSIFIER.HybridModel(table, dense)
    batch = torch.tensor([1, 2, 2, 7]), torch.tensor([0, 2]), torch.tensor([0, 5])

    def answer(_: str, function: Any, args: tuple) -> Any:
        if function is SERVED.some_rows:
            return table.weight.detach()[args[0]]
        assert function is SERVED.table_gradient
        gradient = torch.as_tensor(table.weight.grad).coalesce()
        numbers, rows = gradient.indices()[0], gradient.values()
        if fault == "row":
            return numbers[1:], rows[1:]
        if fault == "another row":
            return torch.tensor([1, 2, 8]), rows
        return numbers, rows * (1 + 0.01 * (fault == "gradient"))

    with (
        mock.patch.object(SERVED, "rpc", SimpleNamespace(rpc_sync=answer)),
        mock.patch.object(SERVED, "dist_autograd", autograd_here()),
    ):
        error = SERVED.table_gradient_error(model, batch)
    due = {"": 0.0, "gradient": 0.01}.get(fault, float("inf"))
    assert error == pytest.approx(due, abs=1e-6)


@pytest.mark.parametrize("fault", ["", "table", "dense"])
def test_one_trainer_is_compared_with_all_of_one_process(fault: str) -> None:
    options = Namespace(rows=3001, seed=0, batch_size=4, lr=0.1)
    samples = CLASSIFIER.load_samples(3001)[0]
    table = CLASSIFIER.Table(3001, 32, 0)
    model = CLASSIFIER.HybridModel(table, CLASSIFIER.dense_part(0))
    batches = samples.batches(4)
    steps = ([next(batches)] for _ in range(2))
    CLASSIFIER.train_in_one_process(model, steps, 0.1, 0.1)
    with torch.no_grad():
        table.weight[-1, -1] += fault == "table"
        [*model.dense.parameters()][-1][-1] += fault == "dense"
    here = SimpleNamespace(table=table, file=None)
    dense = [p.detach() for p in model.dense.parameters()]
    with mock.patch.object(SERVED, "HERE", here):
        error = SERVED.error_of_one_trainer(options, 2, dense)
    assert (error > 0.1) == bool(fault) and (fault or error < 1e-6)


def test_rpc_and_gloo_are_told_to_stay_on_loopback() -> None:
    names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    others = {name: text for name, text in os.environ.items() if name not in names}
    with mock.patch.dict(os.environ, others, clear=True):
        ROLES.stay_on_loopback()
        found = [os.environ[name] for name in names]
    assert found in (["lo"] * 2, ["lo0"] * 2)


def is_kept_on_loopback(address: str) -> bool:
    """Join RPC at a store there; tell whether this process has hidden from others."""
    roles = MODULES["supervised_roles"]
    fakes = {name: mock.Mock() for name in ("dist", "rpc", "stay_on_loopback")}
    with mock.patch.multiple(roles, **fakes):
        roles.join_rpc("master", ["master"], SimpleNamespace(host=address))
    assert fakes["rpc"].init_rpc.called
    return fakes["stay_on_loopback"].called


def test_a_run_whose_store_is_on_this_machine_stays_on_it() -> None:
    here = ("127.0.0.1", "localhost", "127.0.1.1")
    assert [is_kept_on_loopback(address) for address in here] == [True] * 3
    assert not is_kept_on_loopback("192.0.2.1")


def test_a_server_keeps_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVED, "HERE", SERVED.TableServer())
    SERVED.ServedTable(8, 0)
    # It would be saved in the other's place, or the other in its.
    with pytest.raises(RuntimeError, match="has a table: a second one would not be"):
        SERVED.ServedTable(8, 1)


def test_trainers_may_take_any_time() -> None:
    limits: list[Any] = []

    def noted(*_: Any, timeout: Any = None) -> torch.futures.Future:
        limits.append(timeout)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(["all is well"])
        return future

    fake = SimpleNamespace(rpc_async=noted, rpc_sync=lambda *_: None)
    options = Namespace(rows=9, trainers=2, seed=0)
    with (
        mock.patch.object(TRAIN, "rpc", fake),
        mock.patch.object(TRAIN, "RemoteModule"),
        mock.patch.object(ROLES, "rpc", fake),
    ):
        TRAIN.be_master(("127.0.0.1", 1), options)
        ROLES.on_all_trainers(3, print)
    assert limits == [0] * 5


# --- The table's file. ----------


class Intruder:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        """Keep the file that the code would make."""
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Have the file made."""
        return Path.touch, (self.path,)


def test_nothing_in_a_tables_file_runs(tmp_path: Path) -> None:
    path, made = tmp_path / "table.pt", tmp_path / "made"
    torch.save({"table": torch.ones(2, 2), "more": Intruder(made)}, path)
    with pytest.raises(ValueError, match="is damaged or is no table"):
        MODULES["table_file"].load_table(path)
    assert not made.exists()
    pickle.loads(pickle.dumps(Intruder(made)))
    assert made.exists()  # elsewhere it would have


# --- Heartbeats. ----------


def named_dead(
    pause: float, heard_until: float, every: float = 0.5, is_done: bool = False
) -> float | None:
    """Let a process beat for 60 s; return when it says that a trainer has died.

    The trainer beats until `heard_until`, and may then be done. At 20 s all stands
    still, for `pause` s.
    """
    beats, clock = load_chapter(CHAPTER)["heartbeats"], [0.0]
    seen = {"when": 0.0, "beat": 0.0}

    class Dead(Exception):
        """What ends the process."""

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        if clock[0] == 20:
            clock[0] += pause
        return clock[0] > 60 + pause

    def beat(_: list[str]) -> list[bytes]:
        if clock[0] - seen["when"] < 1:  # after a pause it has not beaten yet either
            seen["beat"] = min(clock[0] // every, heard_until // every)
        seen["when"] = clock[0]
        if is_done and clock[0] > heard_until:
            return [b"done"]
        return [str(seen["beat"]).encode()]

    names = ["master", "trainer0"]
    store = SimpleNamespace(set=lambda *_: None, multi_get=beat)
    heart = beats.Heartbeat("master", names, store, "the launcher")
    heart.over = SimpleNamespace(wait=wait)
    with (
        mock.patch.object(beats.time, "monotonic", lambda: clock[0]),
        mock.patch.object(heart, "end", side_effect=Dead),
    ):
        try:
            heart.run()
        except Dead:
            return clock[0]
    return None


def test_a_pause_of_all_processes_is_nobodys_death() -> None:
    assert named_dead(pause=0, heard_until=1e9) is None
    assert named_dead(pause=3600, heard_until=1e9) is None  # a laptop that was closed
    assert named_dead(pause=3600, heard_until=19.5) == pytest.approx(3629.5, abs=1.5)
    assert named_dead(pause=0, heard_until=30) == pytest.approx(41, abs=1)
    assert named_dead(pause=0, heard_until=30, is_done=True) is None
    # What counts is how long it has been silent since its last beat.
    assert named_dead(pause=0, heard_until=1e9, every=8) is None


def acts_of_an_end(host: str) -> list[Any]:
    """Let a trainer whose disk hangs end; return how it saves, and waits."""
    beats, acts, may_end = load_chapter(CHAPTER)["heartbeats"], [], threading.Event()
    heart = beats.Heartbeat("trainer0", ["master", "trainer0"], mock.Mock(), host)
    heart.last_act = lambda: acts.append("saves") or may_end.wait(20)
    began = time.monotonic()
    with (
        mock.patch.object(beats, "TIME_TO_SAVE", 0.2),
        mock.patch.object(beats.time, "sleep", acts.append),
        mock.patch.object(beats.os, "_exit", side_effect=SystemExit) as exits,
        contextlib.redirect_stdout(io.StringIO()) as output,
        pytest.raises(SystemExit),
    ):
        heart.end("master")
    may_end.set()
    assert time.monotonic() - began < 10
    said = "trainer 0: master has died or cannot be reached; ending\n"
    assert output.getvalue() == said and exits.call_args.args == (3,)
    return acts


def test_who_ends_saves_first_and_a_stores_host_stays_until_all_have_heard() -> None:
    assert acts_of_an_end("master") == ["saves"]
    assert acts_of_an_end("trainer0") == ["saves", 3.0]


def test_a_stores_host_says_who_dies_when_all_else_is_over() -> None:
    beats, roles = MODULES["heartbeats"], MODULES["supervised_roles"]
    store = beats.host_store("127.0.0.1")
    store.set("beat trainer0", "7")  # it has died before it could write "done"
    statuses, said = [], io.StringIO()

    def leave(status: int) -> None:
        statuses.append(status)
        store.set("beat trainer0", "done")  # `run_role` need not wait any more

    names, too_late = ["master", "trainer0"], threading.Timer(10, leave, [0])
    too_late.start()
    with (
        mock.patch.multiple(roles, roll_call=mock.Mock(), join_rpc=mock.Mock()),
        mock.patch.object(roles.rpc, "shutdown"),
        mock.patch.multiple(beats, BEAT=0.05, DEAD_AFTER=0.5, FAREWELL=0),
        mock.patch.object(beats.os, "_exit", leave),
        contextlib.redirect_stdout(said),
        pytest.raises(SystemExit),
    ):
        roles.run_role({}, "master", names, store, "master", 5, None)
    too_late.cancel()
    line = "master: trainer 0 has died or cannot be reached; ending\n"
    assert statuses[0] == 3 and line in said.getvalue()


# --- Times and rates. ----------


def test_a_slow_server_waits_before_each_answer() -> None:
    server, slept = ROOM["row_server"], []
    server.make("slow", 8, 4, 1.0, 0.005)
    with mock.patch.object(server.time, "sleep", slept.append):
        rows = server.call("slow", "some_rows", torch.tensor([3]))
    assert slept == [0.005] and rows.shape == (1, 4)


def test_calls_of_one_table_take_turns() -> None:
    ways, server = ROOM["ways_to_step"], ROOM["row_server"]
    server.make("turns", 8, 4, 1.0, 0.0)
    arguments = ("turns", "some_rows", torch.tensor([3]))
    thread = threading.Thread(target=ways.call_alone, args=arguments, daemon=True)
    with server.RowServer.one_at_a_time:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


def test_autograd_waits_in_its_lookup_its_backward_pass_and_its_step() -> None:
    lookups, weight = ROOM["lookups"], nn.Parameter(torch.ones(9, 32))
    dense = nn.Linear(32, 6)
    parameters = [*dense.parameters()]
    line = SimpleNamespace(
        module=lambda indices, _: weight[indices],
        dense=dense,
        optimizer=torch.optim.SGD(parameters, 0.1),
        rows_optimizer=mock.Mock(),
        waited=0.0,
        bytes=0,
    )
    # Lookup, own backward, the server's backward, dense step, the server's step.
    clock = mock.Mock(side_effect=[0.0, 1.0, 11.0, 31.0, 131.0, 431.0])
    gradients = autograd_here(lambda: {p: p.grad for p in parameters})
    batch = torch.tensor([1, 2]), torch.tensor([0, 1]), torch.tensor([0, 5])
    with (
        mock.patch.object(lookups, "dist_autograd", gradients),
        mock.patch.object(lookups, "time", SimpleNamespace(perf_counter=clock)),
    ):
        lookups.by_autograd(line, [batch])
    assert line.waited == 1 + 20 + 300


def rate_by_own_clock() -> float:
    """Take five steps, of which four last 2 s by rank 0's clock and 4 s by rank 1's."""
    module = ROOM["comparison"]
    clock = [0.0, 10.0, 12.0 + 2 * dist.get_rank()]
    times = SimpleNamespace(perf_counter=mock.Mock(side_effect=clock))
    with mock.patch.object(module, "time", times):
        return module.rate_of_a_round(SimpleNamespace(steps=iter), [0] * 5)


def test_a_rate_is_that_of_the_slowest_trainer(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(rate_by_own_clock) == [1.0, 1.0]


# --- Late updates. ----------


def late_updates_accept(
    first: float = 0.0, dips: tuple[float, bool, int] | None = None
) -> bool:
    """Let late_updates.py judge losses that rise by 0.01 for each step of delay.

    The first of those that are not late is off by `first`. With one rate, for the
    table or all, the losses of one lag may be those of none.
    """
    lesson, empty = load_chapter(f"{CHAPTER}/staleness")["late_updates"], []

    def train_late(_: Any, lr: float, lag: int, is_all: bool) -> list[float]:
        rise = 0.0 if dips == (lr, is_all, lag) else 0.01 * lag
        return [1 + rise + first * (lag == 0), *[1 + rise] * 39]

    fakes = {
        "load_samples": lambda: (CLASSIFIER.Samples(empty, torch.tensor([])), None),
        "train_in_one_process": lambda *_: [1.0] * 40,
        "train_late": train_late,
    }
    with (
        mock.patch.multiple(lesson, **fakes),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        lesson.main()
        return True
    return False


def test_each_delay_has_to_raise_the_loss_at_the_larger_rate() -> None:
    assert late_updates_accept() and late_updates_accept(first=0.9e-5)
    assert not late_updates_accept(first=1.1e-5)
    assert not late_updates_accept(first=float("nan"))
    dips = [(0.2, is_all, lag) for is_all in (False, True) for lag in (1, 4, 16)]
    assert [late_updates_accept(dips=one) for one in dips] == [False] * 6
    assert late_updates_accept(dips=(0.05, False, 16))


# --- What the tutorial's way is. ----------


def test_the_first_ways_gradient_is_that_of_the_whole_table() -> None:
    module = ROOM["comparison"]
    with (
        mock.patch.object(module, "rpc"),
        mock.patch.object(
            module,
            "RemoteModule",
            lambda _, kind, args, kwargs=None: kind(*args, **(kwargs or {})),
        ),
    ):
        often, ours = module.make_tables()
    batch = torch.tensor([1, 2]), torch.tensor([0, 1])
    for table in (often, ours):
        table(*batch).sum().backward()
    assert type(often) is nn.EmbeddingBag
    gradients = [torch.as_tensor(table.weight.grad) for table in (often, ours)]
    assert [gradient.is_sparse for gradient in gradients] == [False, True]
    assert torch.equal(often.weight, ours.weight)
