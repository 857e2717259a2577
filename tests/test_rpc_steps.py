"""Steps per second: four ways to use a table, and the proof that none cheats."""

import re
import sys
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, Result, python
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "04_rpc_parameter_server/lookup_cost"
SCRIPT = ROOT / ROOM / "steps_per_second.py"
MODULES = load_chapter(ROOM)
STEPS, WAYS = MODULES["comparison"], MODULES["ways_to_step"]
SERVED = MODULES["row_server"]
NAMES = ["as often written", "autograd", "one call", "ahead"]
ROW = re.compile(
    r"(\D+?) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d,]+) of ([\d,]+) entries"
)


def rows_of(result: Result) -> dict[str, list[float]]:
    """Return the table's rows: median, slowest, fastest, ratio, lost, moved."""
    found = [ROW.fullmatch(line) for line in result.stdout.splitlines()[2:6]]
    return {
        row[1]: [float(number.replace(",", "")) for number in row.groups()[1:]]
        for row in found
        if row
    }


def rows_looked_up(trainers: int, steps: int) -> int:
    """Count the different rows in the batches of all trainers."""
    training, _ = STEPS.load_samples()
    each = [
        islice(training.batches(5, rank, trainers), steps) for rank in range(trainers)
    ]
    return len(torch.cat([batch[0] for batch in chain(*each)]).unique())


def check_table(result: Result, trainers: int, steps: int) -> None:
    """Assert what must hold for the table whatever the machine is doing."""
    assert result.returncode == 0, result.output
    assert result.stderr == ""  # the warning of TorchScript, above all
    rows = rows_of(result)
    assert len(rows) == 4 and list(rows) == NAMES
    entries = 32 * rows_looked_up(trainers, steps)
    first = rows[NAMES[0]][0]
    for name, (median, slowest, fastest, times, lost, moved) in rows.items():
        assert 0 < slowest <= median <= fastest
        assert times == pytest.approx(median / first, abs=0.01)
        # An entry whose gradient is exactly 0 stays, and so does one whose only update
        # was lost; one that was never used must.
        assert (0.9 if lost else 0.99) * entries <= moved <= entries
        # Nothing says that the first way must lose updates, only that it may.
        assert lost == 0 or (name == NAMES[0] and trainers > 1)


@pytest.mark.slow
def test_two_trainers_in_four_ways_lose_nothing_where_calls_take_turns() -> None:
    result = python(SCRIPT, "--rounds=2", "--steps=8")
    check_table(result, trainers=2, steps=24)
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "2 trainer(s), 1 server, 5 bags in a batch; 2 round(s) of 8 steps"
    )
    assert lines[6:] == [
        "check: 4 ways: the dense weights of all trainers are equal",
        "check: 4 ways: 0 of 48 updates of the table are missing",
        "check: 3 ways: 0 entries of the table are not the sum of what was sent "
        "(limit 1e-03)",
    ]


@pytest.mark.slow
def test_one_trainer_ends_where_one_process_does_in_every_way() -> None:
    result = python(SCRIPT, "--trainers=1", "--rounds=1", "--steps=10")
    check_table(result, trainers=1, steps=20)
    lines = result.stdout.splitlines()
    assert lines[6:9] == [
        "check: 4 ways: the dense weights of all trainers are equal",
        "check: 4 ways: 0 of 20 updates of the table are missing",
        "check: 4 ways: 0 entries of the table are not the sum of what was sent "
        "(limit 1e-03)",
    ]
    (last,) = lines[9:]
    apart = re.fullmatch(
        r"check: 4 ways: (\S+) from one process alone \(limit 1e-05\)", last
    )
    assert apart and 0 <= float(apart[1]) <= 1e-5


# The ways that need no more of RPC than calls, with a server in the same process.


def train_with_server_here(
    name: str, forget: int | None, fault: str = ""
) -> tuple[Any, ...]:
    """Train in two rounds; return the calls, the proof, and the same of one process.

    Args:
        name: of the way.
        forget: this update is not made, though it is counted; None for all.
        fault: "update", one is not counted; "dense", rank 1's part is changed; "nan".
    """
    calls: list[str] = []

    def answer(_: str, function: Any, args: tuple[Any, ...]) -> Any:
        calls.append(function.__name__)
        if calls.count("call_alone") == forget:
            gradient = args[3]
            args = (*args[:3], torch.zeros_like(gradient), *args[4:])
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(function(*args))
        return future

    fake = SimpleNamespace(
        rpc_async=answer, rpc_sync=lambda *args: answer(*args).value()
    )
    training, _ = STEPS.load_samples()
    batches = list(islice(training.batches(5), 12))
    rounds = [batches[:6], batches[6:]]
    with mock.patch.object(WAYS, "rpc", fake):
        SERVED.make(name, STEPS.ROWS, 32, STEPS.LR, 0.0)
        way = {"one call": WAYS.ByOneCall, "ahead": WAYS.Ahead}[name](name)
        before = way.changes()
        calls.clear()
        way.optimizer.register_step_post_hook(lambda *_: calls.append("dense step"))
        rates = [STEPS.rate_of_a_round(way, one) for one in rounds]
        made = list(calls)
        forget = None  # or the proof's own calls would be spoilt
        if fault == "dense":
            with torch.no_grad():
                [*way.dense.parameters()][-1].add_(dist.get_rank())
        if fault == "nan":
            with torch.no_grad():
                [*way.dense.parameters()][-1].fill_(torch.nan)
        before += fault == "update"
        return made, min(rates), tuple(STEPS.prove(name, way, rounds, before))


@pytest.mark.parametrize(("name", "more"), [("one call", 1), ("ahead", 2)])
def test_a_step_is_one_call(worker_pool: WorkerPool, name: str, more: int) -> None:
    ((calls, rate, found),) = worker_pool.run(
        train_with_server_here, name, None, world_size=1
    )
    # A round of six steps has one lookup before them; ahead has an update behind them.
    # The call of a step leaves before the dense part has stepped: it need not wait.
    steps = ["call_alone", "dense step"] * 6
    assert (
        calls
        == (
            [*["call_alone"] * (more == 1), *steps]
            if more == 1
            else ["call_alone", *steps, "call_alone"]
        )
        * 2
    )
    different, missing, lost, moved, apart = found
    assert (different, missing, lost) == (0, 0, 0)
    assert moved > 1000 and rate > 0 and apart <= STEPS.ALONE_LIMIT


def test_the_proof_finds_a_single_update_that_was_not_made(
    worker_pool: WorkerPool,
) -> None:
    ((_, _, found),) = worker_pool.run(
        train_with_server_here, "one call", 14, world_size=1
    )
    different, missing, lost, _, apart = found
    assert (different, missing) == (0, 0)  # the call was made, and has been counted
    assert lost > 100 and apart > STEPS.ALONE_LIMIT


def test_the_proof_counts_calls_and_compares_dense_parts(
    worker_pool: WorkerPool,
) -> None:
    run = worker_pool.run
    ((_, _, found),) = run(
        train_with_server_here, "ahead", None, "update", world_size=1
    )
    assert found[:3] == (0, 1, 0)
    ((_, _, found),) = run(train_with_server_here, "ahead", None, "nan", world_size=1)
    assert found[4] == torch.inf
    ends = run(train_with_server_here, "one call", None, "dense")
    assert [found[0] for _, _, found in ends] == [1, 1]
    ends = run(train_with_server_here, "one call", None, "")
    assert [found[0] for _, _, found in ends] == [0, 0]


def checks_of(**found: float) -> list[bool]:
    """Let steps_per_second.py judge ways of which one has what is given."""
    lesson, check = MODULES["steps_per_second"], mock.Mock()
    right = {"different": 0, "missing": 0, "lost": 0, "moved": 9, "apart": 0.9e-5}
    ways = dict.fromkeys(NAMES, STEPS.Found(**right))
    ways["one call"] = STEPS.Found(**(right | found))
    rates = {name: [1.0, 1.0] for name in NAMES}
    options = SimpleNamespace(rounds=1, steps=2, batch_size=5)
    with (
        mock.patch.object(lesson, "take_turns", return_value=(rates, ways)),
        mock.patch.object(lesson, "say"),
        mock.patch.object(lesson, "check", check),
        mock.patch.object(lesson.dist, "get_world_size", return_value=1),
    ):
        lesson.compare_four_ways([], options)
    return [bool(call.args[0]) for call in check.call_args_list]


def test_each_fault_of_a_way_fails_its_check() -> None:
    # In the order of the checks: dense weights, updates, entries, one process.
    assert checks_of() == [True] * 4
    assert checks_of(different=1) == [False, True, True, True]
    assert checks_of(missing=1) == checks_of(moved=0) == [True, False, True, True]
    assert checks_of(lost=1) == [True, True, False, True]
    assert checks_of(apart=1.1e-5) == [True, True, True, False]


# Bad input.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainers=17"], "'17' is no number from 1 to 16"),
        (["--rounds=some"], "'some' is no number from 1 to 100"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["steps_per_second.py", *words])
    with pytest.raises(SystemExit) as refusal:
        MODULES["steps_per_second"].main()
    printed = capsys.readouterr()
    assert refusal.value.code == 2 and printed.out == ""
    assert printed.err.startswith("steps_per_second.py: argument ")
    assert message in printed.err and printed.err.count("\n") == 1
