"""Chapter 09: the comparison behind one_result.py, and that it finds what is wrong."""

import contextlib
import gc
import inspect
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from launch import ROOT
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "09_one_mesh/one_result"
NUMBERS = ROOT / "assets" / "09_one_result.json"
WHOLE = 4 * 117_376  # bytes of the weights, or of the gradients


def module(name: str) -> ModuleType:
    return load_chapter(ROOM)[name]


def invented_run(name: str, rank: int) -> Any:
    """Return what a rank would bring back that has done everything right."""
    way = module("table_of_ways").ALL[name]
    kept, sent = way.kept(rank), 1e6 * (way.ranks > 1)
    return module("training").Run(
        losses=[5.5, 4.0, 3.0],
        weights=torch.linspace(-1, 1, 1920),
        seconds=1.0,
        sent=sent,
        due=sent,
        kept=kept,
        peak=2 * kept,
    )


def invented_runs() -> dict[str, list[Any]]:
    """Return by way the runs of all ranks, nothing being wrong."""
    table = module("table_of_ways")
    runs = {
        n: [invented_run(n, r) for r in range(w.ranks)] for n, w in table.ALL.items()
    }
    for name in table.WRONG:
        runs[name] = [changed(run, "another loss") for run in runs[name]]
    one = table.usual("tensor: a term of a gradient")
    runs[one] = [changed(run, "another loss") for run in runs[one]]
    return runs


def changed(run: Any, what: str) -> Any:
    """Return a run in which one thing went wrong."""
    weights = run.weights.clone()
    if what == "weight":
        weights[7] += 2e-5
    elif what == "last bit":
        weights.view(torch.int32)[7] += 1
    elif what == "no number":
        weights[7] = torch.nan
    elif what == "a weight less":
        weights = weights[1:]
    more = {
        "loss": {"losses": [5.5, 4.0 + 2e-5, 3.0]},
        "another loss": {"losses": [5.5, 4.1, 3.1]},
        "loss is no number": {"losses": [5.5, float("nan"), 3.0]},
        "a step less": {"losses": run.losses[:-1]},
        "sent more": {"sent": run.sent * 1.2},
        "sent less": {"sent": run.sent * 0.8},
        "kept": {"kept": run.kept * 1.1},
    }
    return run._replace(weights=weights, **more.get(what, {}))


# Bytes that a rank keeps, written out from the shapes: 16 for a parameter, its gradient
# and Adam's two moments in fp32 (ZeRO paper, section 3.1, where the weights are their
# own master), of which ZeRO and FSDP divide what their stage divides.
NORM_VALUES, POSITION_VALUES, MODEL = 5 * 2 * 64, 32 * 64, 117_376
TOKEN_VALUES, BLOCK, MLP = 256 * 64, 12 * 64 * 64 + 2 * 2 * 64, 2 * 8 * 64 * 64
STAGES = [  # of a pipeline; and a buffer for what a batch receives
    16 * (BLOCK + TOKEN_VALUES + own) + 4 * 16 * 32 * 64
    for own in (POSITION_VALUES, 2 * 64)
]
SPLIT = MODEL - NORM_VALUES  # DTensor splits all but the norms
KEPT: dict[str, Any] = {
    "one process": [16 * MODEL],
    **dict.fromkeys(["naive", "flat buffer", "buckets, by hooks"], [16 * MODEL] * 2),
    **dict.fromkeys(["DDP, mp.spawn", "DDP, no_sync"], [16 * MODEL] * 2),
    **dict.fromkeys(["DDP, torchrun", "DDP, killed, resumed"], [16 * MODEL] * 2),
    "DDP, 4 ranks": [16 * MODEL] * 4,
    "ZeRO 1 by hand": [(4 + 4 + 8 / 2) * MODEL] * 2,
    "ZeRO 2 by hand": [(4 + 4 / 2 + 8 / 2) * MODEL] * 2,
    **dict.fromkeys(["ZeRO 3 by hand", "FSDP2"], [8 * MODEL] * 2),
    "HSDP, 2 x 2": [8 * MODEL] * 4,
    "tensor": [8 * (SPLIT - POSITION_VALUES) + 16 * (POSITION_VALUES + NORM_VALUES)]
    * 2,
    "tensor + sequence": [8 * SPLIT + 16 * NORM_VALUES] * 2,
    "FSDP2 x tensor": [4 * SPLIT + 8 * NORM_VALUES] * 4,
    "GPipe": STAGES,
    "1F1B": STAGES,
    "context, by a ring": [16 * MODEL] * 2,
    # Each of two blocks has a router of 4 rows, and 4 MLPs in place of one.
    "experts, one process": [16 * (MODEL + 2 * 4 * 64 + 3 * MLP)],
    "experts": [16 * (MODEL + 2 * 4 * 64 + MLP)] * 2,
    "DeepSpeed, ZeRO 0": [16 * MODEL] * 2,
    # The weights; gradients, master weights and moments are divided in both stages.
    **dict.fromkeys(
        ["DeepSpeed, ZeRO 1", "DeepSpeed, ZeRO 2"],
        [(4 + (4 + 4 + 8) / 2) * MODEL] * 2,
    ),
    # All is divided; a bucket for a quarter of the values is not.
    "DeepSpeed, ZeRO 3": [((4 + 4 + 4 + 8) / 2 + 4 / 4) * MODEL] * 2,
}


def test_what_a_rank_is_to_keep_follows_from_the_shapes() -> None:
    ways = module("table_of_ways").WAYS
    record = json.loads(NUMBERS.read_text())["ways"]
    assert sorted(ways) == sorted([*KEPT, "2x2x2"]) and len(KEPT) == 26
    for name, expected in KEPT.items():
        ours = [ways[name].kept(rank) for rank in range(ways[name].ranks)]
        assert ours == pytest.approx(expected, rel=1e-6), name
        # What was counted holds a batch too. DeepSpeed keeps the whole gradient of the
        # tensor that two partitions meet in.
        batch = 45_000 if name in ("DeepSpeed, ZeRO 1", "DeepSpeed, ZeRO 2") else 9_000
        assert 0 < record[name]["kept"] - max(expected) < batch, name
    # Three axes: stages as above, of whose values data and tensor leave a quarter, and
    # of the norms (two in a block, one at the end) a half.
    norms = [2 * 2 * 64, 3 * 2 * 64]
    buffer = 4 * 16 * 32 * 64
    for rank in range(8):
        stage = rank // 2 % 2
        values = (STAGES[stage] - buffer) / 16
        expected = 4 * (values - norms[stage]) + 8 * norms[stage] + buffer / 4
        near = pytest.approx(expected, rel=2e-3)
        assert ways["2x2x2"].kept(rank) == near


def faults(runs: dict[str, list[Any]], ways: Any = None) -> list[str]:
    comparison = module("comparison")
    return comparison.all_faults(runs, ways or comparison.ALL)


@pytest.mark.parametrize(
    ("way", "what", "words"),
    [
        ("naive", "loss", "rank 1: a loss is 2e-05 apart"),
        ("DDP, 4 ranks", "weight", "rank 1: .* and a weight 2e-05"),
        ("DeepSpeed, ZeRO 3", "no number", "rank 1: .* and a weight nan"),
        ("DeepSpeed, ZeRO 1", "loss is no number", "rank 1: a loss is nan apart"),
        ("DDP, mp.spawn", "a step less", "rank 1: 2 losses"),
        ("tensor", "last bit", "rank 1 and rank 0 have different"),
        ("GPipe", "weight", "rank 1: .* and a weight 2e-05"),
        ("HSDP, 2 x 2", "sent more", "rank 1 sent 1200000 bytes, not 1000000"),
        ("DDP, no_sync", "sent less", "rank 1 sent 800000 bytes, not 1000000"),
        ("DeepSpeed, ZeRO 2", "kept", "rank 1 keeps .* bytes, not"),
        ("FSDP2 x tensor", "kept", "rank 1 keeps .* bytes, not"),
        ("1F1B", "kept", "rank 1 keeps .* bytes, not"),
        ("context, by a ring", "loss", "rank 1: a loss is 2e-05 apart"),
        ("experts", "weight", "rank 1: .* and a weight 2e-05"),
    ],
)
def test_what_is_wrong_on_one_rank_is_found(way: str, what: str, words: str) -> None:
    runs = invented_runs()
    assert faults(runs) == []
    runs[way][1] = changed(runs[way][1], what)
    found = [fault for fault in faults(runs) if re.search(words, fault)]
    assert len(found) == 1 and found[0].startswith(way), faults(runs)


def test_a_way_that_is_missing_or_has_other_bits_is_found() -> None:
    comparison, runs = module("comparison"), invented_runs()
    runs["flat buffer"] = [changed(run, "last bit") for run in runs["flat buffer"]]
    runs["tensor"] = [changed(run, "last bit") for run in runs["tensor"]]
    # One bit is far below the limit. For averaged gradients there is no reason for it.
    one, other = runs["flat buffer"][0], runs["one process"][0]
    assert comparison.faults_of("", one, other) == []
    assert faults(runs) == ["flat buffer: not the bits of naive"]
    runs = invented_runs()
    runs["GPipe"] = [changed(run, "a weight less") for run in runs["GPipe"]]
    runs["DDP, 4 ranks"].pop()
    assert faults(runs) == [
        *(f"GPipe, rank {rank}: 1919 weights" for rank in range(2)),
        "DDP, 4 ranks: 3 of 4 ranks have ended",
    ]
    # Each way of the table is missed; one that nobody has asked for is not.
    some = {"one process": invented_runs()["one process"]}
    missed = [fault.split(":")[0] for fault in faults(some)]
    assert missed == list(comparison.WAYS)[1:] and len(missed) == 26
    assert faults(some, ["one process"]) == []


def test_rows_fit_the_page_and_show_the_worst_rank() -> None:
    comparison, runs = module("comparison"), invented_runs()
    rows = [comparison.row(name, runs) for name in comparison.WAYS]
    assert len(rows) == 27
    assert {len(row) for row in rows} == {len(comparison.HEAD)} and len(rows[0]) <= 88
    words = ["1", "3.0000", "0", "0", "0.0", "1878.0", "3756.0", "1.00"]
    assert rows[0].split()[-8:] == words
    four = runs["DDP, 4 ranks"]
    four[3] = changed(changed(changed(four[3], "weight"), "loss"), "sent more")
    four[3] = four[3]._replace(kept=2e6, peak=5e6, seconds=2.0)
    words = ["4", "3.0000", "2e-05", "2e-05", "1050.0", "2000.0", "5000.0", "2.00"]
    assert comparison.row("DDP, 4 ranks", runs).split()[-8:] == words
    numbers = comparison.record_of(runs)["ways"]["DDP, 4 ranks"]
    assert numbers == {
        "ranks": 4,
        "distances": pytest.approx((2e-5, 2e-5), rel=1e-2),
        "losses": [5.5, 4.0, 3.0],
        **{"sent": 1.05e6, "kept": 2e6, "peak": 5e6},
    }
    worst = comparison.closing_lines(runs)[-1]
    assert "losses 2e-05 from one process's, weights 2e-05" in worst
    four[3] = four[3]._replace(kept=four[0].kept)
    # Where TCP does not tell, what the messages make it.
    four[2], four[3] = four[2]._replace(sent=math.nan), changed(four[2], "loss")
    assert comparison.row("DDP, 4 ranks", runs).split()[-4] == "1000.0"
    assert not [fault for fault in faults(runs) if "bytes" in fault]
    four[1] = changed(four[1], "no number")
    assert comparison.row("DDP, 4 ranks", runs).split()[-5] == "nan"
    runs = invented_runs()
    said = comparison.closing_lines(runs)
    # With the usual eps a sum in place of a mean does not show.
    shows = {"gradients: a sum over ranks": ["1e-01", "0", "0", "0"]}
    shows["tensor: a term of a gradient"] = ["1e-01", "0", "1e-01", "0"]
    shows |= {"pipeline: a sum of means": ["1e-01", "0", "0", "0"], "naive": ["0"] * 4}
    assert {line[:28].strip(): line[28:].split() for line in said[1:5]} == shows
    usual = {name: float(words[2]) for name, words in shows.items()}
    record = comparison.record_of(runs)["usual_eps"]
    assert {n: loss for n, (loss, _) in record.items()} == pytest.approx(usual)
    assert len(said) == 7 and {len(line) for line in said[:5]} == {64}
    assert said[-1].startswith("check: 27 ways, 64 ranks: losses 0e+00 from one proc")


@pytest.mark.parametrize("number", range(3))
def test_a_mistake_has_to_be_found_and_hidden_where_the_page_says(number: int) -> None:
    table, runs = module("table_of_ways"), invented_runs()
    name = list(table.WRONG)[number]
    wrong, right = runs[name], runs[table.WRONG[name].alone] * 2
    runs[name] = right
    assert f"{name}: nobody would notice" in faults(runs)
    runs[name] = wrong
    assert faults(runs) == []
    runs[table.usual(name)] = wrong
    shows = [f"{table.usual(name)}: it shows"] if "sum" in name else []
    assert faults(runs) == shows


def test_a_mistake_is_found_by_a_hundred_limits_and_hidden_below_its_hundredth() -> (
    None
):
    table, name = module("table_of_ways"), "gradients: a sum over ranks"

    def told(off: float, hidden: float) -> list[str]:
        runs = invented_runs()
        for one, more in ((name, off), (table.usual(name), hidden)):
            losses = [5.5, 4.0 + more, 3.0]
            runs[one] = [run._replace(losses=losses) for run in runs[one]]
        return faults(runs)

    # The limit is 1e-5: at 1e-3 the picture draws a mistake far above it.
    assert told(1.1e-3, 0) == []
    assert told(0.9e-3, 0) == [f"{name}: nobody would notice"]
    assert told(0.1, 0.9e-3) == []
    assert told(0.1, 1.1e-3) == [f"{table.usual(name)}: it shows"]


def test_settings_are_those_that_the_page_names() -> None:
    training = module("training")
    usual = inspect.signature(torch.optim.AdamW).parameters["eps"].default
    assert training.USUAL_EPS == usual == 1e-8
    assert training.EPS == training.SETTINGS["eps"] == 1e-3
    assert (training.SAMPLES, training.STEPS) == (16, 12)
    page = words_of(ROOM)
    assert "on the same 16 samples in each of 12 steps, by AdamW" in page
    assert "AdamW in float32 with an `eps` of 1e-3" in page


def test_words_choose_ways() -> None:
    table = module("table_of_ways")
    # Eight ranks are started where somebody asks for them.
    assert table.ALL.keys() - table.asked_for([]).keys() == {"2x2x2"}
    assert len(table.ALL) == 35
    assert list(table.asked_for(["2X2X2"])) == ["one process", "2x2x2"]
    assert len(table.asked_for(["torchrun"])) == 6
    asked = list(table.asked_for(["hsdp", "EXPERTS"]))
    assert asked == ["one process", "experts, one process", "experts", "HSDP, 2 x 2"]
    asked = table.asked_for(["deepspeed"])
    assert list(asked)[1:] == [f"DeepSpeed, ZeRO {stage}" for stage in range(4)]
    # A mistake comes with what is right, and with either eps.
    asked = list(table.asked_for(["sum of means"]))
    mistake = "pipeline: a sum of means"
    both = [name for one in ("one process", "naive", mistake) for name in (one,)]
    assert asked == [*both, *(table.usual(name) for name in both)]
    with pytest.raises(
        ValueError, match="no way is called 'slurm'; there are one proc"
    ):
        table.asked_for(["slurm"])


# --- The ways themselves, as far as warm workers can go them. ----------


def patched(name: str, attribute: str, value: Any) -> Any:
    """Return what breaks a module of the room."""
    return mock.patch.object(module(name), attribute, value)


def no_op(*_: Any) -> None:
    """Do nothing."""


# A way of each family, what breaks it, and what the comparison then says.
SABOTAGE: dict[str, tuple[str, str, Any, str]] = {
    "buckets, by hooks": (
        *("ways_data_parallel", "all_reduced_together", lambda _: no_op),
        "rank 1: a loss is",
    ),
    "ZeRO 2 by hand": ("zero_by_hand", "all_gather", no_op, "rank 1: a loss is"),
    "FSDP2": (
        "ways_sharded",
        "fully_shard",
        lambda *_, **__: None,
        "rank 1: a loss is",
    ),
    "tensor": ("parallel_gpt", "shard_like", lambda whole, mine: mine, "a loss is"),
    "tensor + sequence": ("ways_split", "split_over", no_op, "keeps 1882"),
    "1F1B": ("ways_split", "MICRO_BATCHES", 2, "a loss is"),
    "context, by a ring": ("ways_tokens", "add_up_gradients", no_op, "a loss is"),
    "experts": (
        *("ways_tokens", "mean_gradients"),
        lambda model, copies: module("mixture").mean_gradients(model),
        "rank 0: a loss is",
    ),
}


FEW = 2  # steps, where many ways are trained


@contextlib.contextmanager
def one_thread(steps: int = 12) -> Iterator[None]:
    """Compute as the command's ranks do; more threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    fewer: Any = {"STEPS": steps, "COUNTED": min(9, steps - 1)}
    with mock.patch.multiple(module("training"), **fewer):
        yield
    torch.set_num_threads(before)


def noting(noted: list[tuple[int, bool]]) -> Callable[..., Any]:
    """Return an all-reduce that notes bytes, and whether the caller goes on."""
    all_reduce = dist.all_reduce

    def note(tensor: torch.Tensor, *words: Any, async_op: bool = False, **more: Any):
        noted.append((tensor.nbytes, async_op))
        return all_reduce(tensor, *words, async_op=async_op, **more)

    return note


def train_here(names: list[str]) -> dict[str, Any]:
    """Train in some ways on this rank, then once more, each broken in one place."""
    training, table = module("training"), module("table_of_ways")
    gc.freeze()  # each run looks for garbage, and not in all that was imported
    tokens, runs, buckets = module("text").read_tokens(), {}, []
    with one_thread(FEW):
        for name in names:
            noted = buckets if name == "buckets, by hooks" else []
            with mock.patch.object(dist, "all_reduce", noting(noted)):
                runs[name] = training.train_in_way(table.ALL[name], tokens)._asdict()
        for name, (where, attribute, value, _) in SABOTAGE.items():
            with patched(where, attribute, value):
                run = training.train_in_way(table.ALL[name], tokens)
            runs[f"broken: {name}"] = run._asdict()
    return runs | {"buckets": buckets}


def resume_here(folder: str) -> dict[str, Any]:
    """Save and resume; then see what becomes of a first life in which nobody dies."""
    training, ways = module("training"), module("ways_data_parallel")
    os.environ[ways.FOLDER], os.environ[ways.RESTARTS] = folder, "0"
    table, path = module("table_of_ways").ALL, Path(folder) / "checkpoint"
    killed, tokens, said = (
        table["DDP, killed, resumed"],
        module("text").read_tokens(),
        "",
    )
    with one_thread():
        with mock.patch.object(ways, "KILLED", 99):
            training.train_in_way(killed, tokens)
        saved = torch.load(path, weights_only=True)
        os.environ[ways.RESTARTS] = "1"
        run = training.train_in_way(killed, tokens)
        twin = training.train_in_way(table["naive"], tokens)
        os.environ[ways.RESTARTS] = "0"
        try:
            with mock.patch.object(os, "kill", no_op):
                training.train_in_way(killed, tokens)
        except RuntimeError as error:
            said = str(error)
    return {
        "said": said,
        "saved after": len(saved["losses"]),
        "equal": module("comparison").is_same_run(run, twin),
        "can try again": path.exists(),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Train in this process alone, by the names of the ways."""
    training, table = module("training"), module("table_of_ways")
    tokens = module("text").read_tokens()
    names = [name for name, way in table.ALL.items() if way.ranks == 1]
    with one_thread(FEW):
        return {name: training.train_in_way(table.ALL[name], tokens) for name in names}


def test_one_process_learns(alone: dict[str, Any]) -> None:
    assert [len(run.losses) for run in alone.values()] == [FEW] * 3
    training, table = module("training"), module("table_of_ways")
    with one_thread():
        run = training.train_in_way(
            table.ALL["one process"], module("text").read_tokens()
        )
    assert run.losses[:FEW] == alone["one process"].losses
    # Each Python brings a text of its own, and single batches differ much.
    assert len(run.losses) == 12 and run.losses[0] > 5.4
    assert sum(run.losses[-4:]) / 4 < 3.6
    assert run.sent == 0 and 16 * 117_376 <= run.kept < 16.1 * 117_376 < run.peak


def test_a_way_of_each_family_is_right_and_each_broken_one_is_found(
    worker_pool: WorkerPool, alone: dict[str, Any]
) -> None:
    make = module("training").Run
    names = ["naive", *SABOTAGE]
    by_rank = worker_pool.run(train_here, names)
    # Three full buckets and the rest, and none waits for another; then the loss.
    each_step = [(131_584, True), (132_096, True), (115_200, True), (90_624, True)]
    sent = [one.pop("buckets") for one in by_rank]
    assert sent == [[*each_step, (4, False)] * FEW] * 2
    assert sum(nbytes for nbytes, _ in each_step) == WHOLE
    runs = {
        name: [make(**by_rank[rank][name]) for rank in range(2)] for name in by_rank[0]
    }
    references = {name: [run] for name, run in alone.items()}
    assert len(runs) == 17
    assert faults(references | {n: runs[n] for n in names}, names) == []
    # What was counted, in numbers that are written out here: 117,376 values; a message
    # of activations is 16 x 32 x 64 values, of which the context's ranks have half.
    activations, head = 4 * 16 * 32 * 64, 4 * 256 * 64
    due = {
        "naive": WHOLE,
        "buckets, by hooks": WHOLE,
        "ZeRO 2 by hand": 1.5 * WHOLE,
        "tensor": 10 * activations,
        "1F1B": activations + head,
        "context, by a ring": WHOLE + 2 * 3 * activations,
    }
    for name in due:
        assert runs[name][0].due + runs[name][1].due == pytest.approx(
            2 * due[name], rel=0.03
        ), name
    assert len(due) == 6 and assert_measured(references | runs) == 10
    # TCP counts what gloo adds, too.
    assert [run.sent == run.due for name in names for run in runs[name]] == [False] * 18
    for name, (_, _, _, words) in SABOTAGE.items():
        broken = {"naive": runs["naive"], name: runs[f"broken: {name}"]}
        found = faults(references | broken, [name])
        assert any(words in fault for fault in found), (name, found)
    assert len(SABOTAGE) == 8


def due_of_each_call() -> dict[str, float]:
    """Return what is due on this rank for each kind of message, 48 values long."""
    n, rank, messages = dist.get_world_size(), dist.get_rank(), module("training")
    group: Any = dist.group.WORLD
    whole, shard, due = torch.ones(48), torch.ones(48 // n), {}
    # Rank 0 gives 1, 2 and 3 rows of 4 values to the ranks 0, 1 and 2; rank 1 gives
    # them four times as many, and rank 2 nine times.
    given = [(rank + 1) ** 2 * (to + 1) for to in range(n)]
    taken = [(by + 1) ** 2 * (rank + 1) for by in range(n)]
    rows, got = torch.ones(sum(given), 4), torch.empty(sum(taken), 4)

    def send_to_next() -> None:
        sent: Any = dist.isend(whole, (rank + 1) % n)
        dist.recv(whole.clone(), (rank - 1) % n)
        sent.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_single(whole, shard),
        "all-gather, by DTensor": lambda: funcol.all_gather_single(
            shard, 0, group
        ).sum(),
        "reduce-scatter": lambda: dist.reduce_scatter_single(shard, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all-to-all": lambda: dist.all_to_all_single(got, rows, taken, given),
        "send": send_to_next,
    }
    for name, call in calls.items():
        with messages.Messages() as log:
            call()
        due[name] = log.due
        dist.barrier()
    return due


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_due_for_a_message_is_what_its_algorithm_sends(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n, whole = world_size, 4 * 48
    # A ring sends n - 1 times an n-th, and an all-reduce is two of them (Thakur,
    # Rabenseifner and Gropp, 2005, section 4.4). Gloo's reduce-scatter is an
    # all-reduce; its reduce ends with n - 1 ranks that send their n-th to one. To all
    # receivers of a broadcast together the message goes n - 1 times.
    ring = (n - 1) * whole / n
    due = dict.fromkeys(["all-gather", "all-gather, by DTensor", "broadcast"], ring)
    due |= dict.fromkeys(["all-reduce", "reduce-scatter"], 2 * ring)
    due |= {"reduce": ring + (n - 1) * (whole / n) / n, "send": whole}
    found = worker_pool.run(due_of_each_call, world_size=n)
    for rank, one in enumerate(found):
        # Of the rows all but those that stay.
        rows = (rank + 1) ** 2 * sum(to + 1 for to in range(n) if to != rank)
        assert one == pytest.approx(due | {"all-to-all": 4 * 4 * rows})
    assert len(found) == n


def test_a_killed_run_resumes(worker_pool: WorkerPool, tmp_path: Path) -> None:
    by_rank = worker_pool.run(resume_here, str(tmp_path))
    expected = {"said": "no rank was killed", "saved after": 4, "equal": True}
    expected["can try again"] = False
    assert by_rank == [expected, expected]


def assert_measured(runs: dict[str, list[Any]]) -> int:
    """Hold bytes due and at the peak against the pictures'; return how many ways."""
    record = json.loads(NUMBERS.read_text())["ways"]
    # How many rows experts send, and need memory for, depends on the text.
    record = {n: r for n, r in record.items() if n in runs and n != "experts"}
    due = {n: sum(run.due for run in runs[n]) / len(runs[n]) for n in record}
    peak = {n: max(run.peak for run in runs[n]) for n in record}
    assert due == pytest.approx({n: r["sent"] for n, r in record.items()}, rel=0.1)
    # Gloo's threads may be late to free what they have sent: in one run of ten, with
    # tensor and sequence parallelism, it is a sixth more.
    ratios = {n: peak[n] / r["peak"] for n, r in record.items()}
    assert len(ratios) == len(record)
    assert min(ratios.values()) > 0.9 and max(ratios.values()) < 1.2, ratios
    return len(record)


def train_others(names: list[str]) -> dict[str, dict[str, Any]]:
    """Train in some ways on this rank."""
    training, table = module("training"), module("table_of_ways")
    tokens = module("text").read_tokens()
    with one_thread(FEW):
        return {n: training.train_in_way(table.ALL[n], tokens)._asdict() for n in names}


def train_on_three_axes(shape: tuple[int, ...]) -> dict[str, Any]:
    """Train as on 2 x 2 x 2 ranks, on four: one axis has one rank."""
    ways, way = module("ways_split"), module("table_of_ways").ALL["2x2x2"]
    whole, tokens = ways.init_device_mesh, module("text").read_tokens()

    def smaller(device: str, _: Any, **names: Any) -> Any:
        return whole(device, shape, **names)

    with one_thread(FEW), mock.patch.object(ways, "init_device_mesh", smaller):
        way = way._replace(shards=shape[0])
        return module("training").train_in_way(way, tokens)._asdict()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1)])
def test_two_of_three_axes_give_one_process(
    worker_pool: WorkerPool, alone: dict[str, Any], shape: tuple[int, ...]
) -> None:
    by_rank = worker_pool.run(train_on_three_axes, shape, world_size=4)
    runs = [module("training").Run(**run) for run in by_rank]
    faults_of, right = module("comparison").faults_of, alone["one process"]
    assert [faults_of("", run, right) for run in runs] == [[]] * 4
    # Stages and matrices are split, and what is left is sharded.
    assert max(run.kept for run in runs) < 0.4 * 16 * MODEL


@pytest.mark.slow
def test_all_other_ways_that_are_no_launchers_are_right(
    worker_pool: WorkerPool, alone: dict[str, Any]
) -> None:
    table, make = module("table_of_ways"), module("training").Run
    runs = {name: [run] for name, run in alone.items()}
    for ranks in (2, 4):
        names = [
            name
            for name, way in table.ALL.items()
            if way.ranks == ranks and way.start != "deepspeed" and "kill" not in name
        ]
        by_rank = worker_pool.run(train_others, names, world_size=ranks)
        runs |= {name: [make(**each[name]) for each in by_rank] for name in names}
    assert len(runs) == 29 and assert_measured(runs) == 20
    assert faults(runs, runs) == []


# --- The command, the pictures, and what they refuse. ----------


def has_ended(pid: int) -> bool:
    """Wait until a process that was killed is gone; who is a zombie is gone."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_ctrl_c_ends_a_launcher_with_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, note = module("launches"), tmp_path / "rank"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "broken.py").write_text("raise RuntimeError('not the same')\n")
    said = command.start_by_launcher(["broken", "--fast"], tmp_path)
    assert said == "broken --fast ended with 1: RuntimeError: not the same"
    # The one rank of this launcher writes down who it is, then presses Ctrl-C.
    rank = (
        f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\n"
        f"os.kill({os.getpid()}, 2)\ntime.sleep(600)"
    )
    starts_it = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {rank!r}])"
    )
    (tmp_path / "endless.py").write_text(starts_it)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            command.start_by_launcher(["endless"], tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert has_ended(int(note.read_text()))
    monkeypatch.setattr(command, "PATIENCE", 0.1)
    (tmp_path / "slow.py").write_text("while True:\n    pass\n")
    said = command.start_by_launcher(["slow"], tmp_path)
    assert said == "slow ended with no end after 0.1 s: without a word"


@pytest.mark.parametrize(
    ("words", "rank", "line"),
    [
        ([], "0", "start it with python, not torchrun: it starts its own processes"),
        (["--json=no/x.json"], None, "--json no/x.json: there is no folder no"),
        (["--json=."], None, "--json .: this is a folder"),
        (["--only", "slurm"], None, "--only: no way is called 'slurm'; there are one"),
        (["--only", ""], None, "--only: no way is called ''; there are one process,"),
        (["--only", "naive", " "], None, "--only: no way is called ' '; there are"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    rank: str | None,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["one_result.py", *words])
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        module("one_result").main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith(f"one_result.py: {line}") and said.err.count("\n") == 1


def test_ranks_train_what_is_asked_of_them_and_not_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, run, trained = module("launches"), invented_run("one process", 0), []

    def train(way: Any, tokens: Any) -> Any:
        trained.append(way)
        return run

    monkeypatch.setattr(launches, "train_in_way", train)
    monkeypatch.setattr(launches, "read_tokens", lambda: None)
    names = ["one process", module("table_of_ways").EXPERTS_ALONE, "naive"]
    ways = {name: module("table_of_ways").ALL[name] for name in names}
    (tmp_path / f"{names[0]}.0").touch()
    # One that has ended before torchrun started its ranks anew is left alone.
    assert next(launches.launches(tmp_path, ways)) == ""
    assert trained == [ways[names[1]]]
    (tmp_path / f"{names[0]}.0").unlink()
    assert list(launches.handed_in(tmp_path)) == [names[1]]


def test_a_rank_that_dies_is_told_and_the_other_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, ranks = module("launches"), [mock.Mock(), mock.Mock()]
    error = launches.mp.ProcessRaisedException("at\nRuntimeError: no\n", 1, 7)
    started = mock.Mock(processes=ranks, join=mock.Mock(side_effect=[False, error]))
    monkeypatch.setattr(launches.mp, "spawn", lambda *_, **__: started)
    assert launches.start_by_spawn(tmp_path) == "mp.spawn: RuntimeError: no"
    assert [rank.kill.call_count for rank in ranks] == [1, 1]


@pytest.mark.parametrize(
    ("what", "faults"),
    [
        ("", ""),
        ("weight", "naive, rank 1: a loss is 0e+00 apart and a weight 2e-05"),
        ("launch", "naive: 0 of 2 ranks have ended\n  mp.spawn: a rank has died"),
    ],
)
def test_the_command_fails_if_a_run_or_a_launch_does(
    what: str,
    faults: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    runs, launches, steps = invented_runs(), module("launches"), mock.Mock()
    runs = {name: runs[name] for name in ("one process", "naive")}
    runs["naive"][1] = changed(runs["naive"][1], what)
    there: dict[str, Any] = {}

    def launched(folder: Path, ways: dict[str, Any]) -> Iterator[str]:
        assert list(ways) == list(runs)
        there["one process"] = runs["one process"]
        yield ""
        if what == "launch":
            yield "mp.spawn: a rank has died"
        there["naive"] = runs["naive"]
        yield ""

    words = ["one_result.py", f"--json={tmp_path / 'runs'}", "--only", "naive"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(launches, "launches", launched)
    monkeypatch.setattr(launches, "handed_in", lambda folder: dict(there))
    monkeypatch.setattr(signal, "signal", steps)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with one_thread():
        try:
            module("one_result").main()
            ended: Any = ""
        except SystemExit as end:
            ended = end.code
    told = capsys.readouterr().out.splitlines()
    begins = ["way  ", "one p", *(["naive"] if what != "launch" else [])]
    if what:
        said = f"one_result.py: not the same result:\n  {faults}"
        assert str(ended).startswith(said)
        assert [line[:5] for line in told] == begins
        assert not (tmp_path / "runs").exists()
    else:
        assert [line[:5] for line in told] == [*begins, "2 way", "check"]
        record = json.loads((tmp_path / "runs").read_text())
        assert ended == "" and list(record["ways"]) == list(runs)
    # Ended politely, it ends by an exception, and so its ranks too.
    ((number, handler),) = (call.args for call in steps.mock_calls)
    with pytest.raises(SystemExit, match="143"):
        handler(number, None)
    assert number == signal.SIGTERM


def draw(monkeypatch: pytest.MonkeyPatch, numbers: Path, out: Path) -> None:
    words = ["draw_one_result.py", f"--numbers={numbers}", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", words)
    load_chapter("assets")["draw_one_result"].main()


def test_pictures_show_what_was_measured_and_their_check_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draw(monkeypatch, NUMBERS, tmp_path)
    assert re.match(r"check: 26 ways at most \de-07 apart, 3", capsys.readouterr().out)
    for name in ("09_one_result.png", "09_sent_and_kept.png"):
        assert (tmp_path / name).stat().st_size > 30_000
    record, table = json.loads(NUMBERS.read_text()), module("table_of_ways")
    assert [*record["ways"], "2x2x2"] == list(table.WAYS)
    assert list(record["wrong"]) == list(table.WRONG)
    # The theory, written out: what a rank sends, in messages as large as the model. Of
    # ZeRO 3 the blocks are gathered twice and the rest once; gloo's reduce-scatter is
    # an all-reduce; an all-reduce on four ranks is half as much again.
    sent = {name: way["sent"] / WHOLE for name, way in record["ways"].items()}
    blocks = 98_560 / 117_376
    expected = {
        **dict.fromkeys(["one process", "experts, one process"], 0),
        **dict.fromkeys(["naive", "flat buffer", "buckets, by hooks"], 1),
        **dict.fromkeys(["DDP, mp.spawn", "DDP, no_sync", "DDP, torchrun"], 1),
        **dict.fromkeys(["DDP, killed, resumed", "DeepSpeed, ZeRO 0"], 1),
        **dict.fromkeys(["ZeRO 1 by hand", "ZeRO 2 by hand", "DDP, 4 ranks"], 1.5),
        **dict.fromkeys(["DeepSpeed, ZeRO 1", "DeepSpeed, ZeRO 2"], 1.5),
        **dict.fromkeys(["ZeRO 3 by hand", "FSDP2"], 1 + (1 + blocks) / 2),
        "HSDP, 2 x 2": 1 + (1 + blocks) / 2 + 0.5,
    }
    near = {name: sent[name] for name in expected}
    assert near == pytest.approx(expected, rel=0.06)
    record["ways"]["GPipe"]["distances"][1] = 2e-5
    (tmp_path / "wrong.json").write_text(json.dumps(record))
    with pytest.raises(RuntimeError, match="the ways are 2"):
        draw(monkeypatch, tmp_path / "wrong.json", tmp_path)
