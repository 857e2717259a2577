"""Chapter 05: the comparison behind same_result.py, and that it finds what is wrong."""

import functools
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from launch import ROOT
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "05_deepspeed_zero/one_result"
NUMBERS = ROOT / "assets" / "05_same_result.json"
SIZES = [640, 1280]  # values in each tensor of an invented model


def module(name: str) -> ModuleType:
    return load_chapter(ROOM)[name]


def invented_run(stage: int, ranks: int, rank: int, is_hand: bool = False) -> Any:
    """Return what a rank would bring back that has done everything right."""
    paper = module("paper")
    held = paper.bytes_held(sum(SIZES), stage, ranks, "fp32")
    if is_hand:
        held["optimizer"] = 8 * sum(SIZES) / ranks
    more = paper.values_added(SIZES, stage, rank, ranks, threshold=0)
    each = paper.bytes_for_each("fp32", stage)
    for kind, number in zip(paper.KINDS, each, strict=True):
        held[kind] += 0 if is_hand else number * more[kind]
    message = 4 * sum(SIZES)
    return module("ways").Run(
        losses=[5.5, 4.0, 3.0],
        weights=torch.linspace(-1, 1, sum(SIZES)),
        seconds=1.0,
        calls={"all_reduce": [message]} if ranks > 1 else {},
        sent=2 * message * (ranks - 1) // ranks,
        held={**held, "gathered": 0, "buckets": 0, "other": 99},
    )


def invented_runs() -> dict[str, list[Any]]:
    """Return by way the runs of all ranks, nothing being wrong."""
    verdict = module("verdict")
    hand, stages = verdict.HAND_STAGES, verdict.HAND_STAGES | verdict.STAGES
    return {
        name: [invented_run(stages.get(name, 0), n, r, name in hand) for r in range(n)]
        for name, n in verdict.WAYS.items()
    }


def changed(run: Any, what: str) -> Any:
    """Return a run in which one thing went wrong."""
    weights = run.weights.clone()
    if what == "weight":
        weights[7] += 2e-5
    elif what == "last bit":
        weights.view(torch.int32)[7] += 1
    elif what == "no number":
        weights[7] = torch.nan
    more = {
        "loss": {"losses": [5.5, 4.0 + 2e-5, 3.0]},
        "loss is no number": {"losses": [5.5, float("nan"), 3.0]},
        "a step less": {"losses": run.losses[:-1]},
        "sent more": {"sent": int(run.sent * 1.1)},
        "sent less": {
            "calls": {"all_reduce": [2 * n for n in run.calls["all_reduce"]]}
        },
        "held": {"held": {**run.held, "gradients": run.held["gradients"] * 1.1}},
    }
    return run._replace(weights=weights, **more.get(what, {}))


@pytest.mark.parametrize(
    ("way", "what", "words"),
    [
        ("averaged by hand", "loss", "rank 1: a loss is 2e-05 apart"),
        ("torchrun, DDP, 4 ranks", "weight", "rank 1: .* and a weight 2e-05"),
        ("deepspeed, ZeRO 3", "no number", "rank 1: .* and a weight nan"),
        ("deepspeed, ZeRO 1", "loss is no number", "rank 1: a loss is nan apart"),
        ("mp.spawn, DDP", "a step less", "rank 1: 2 losses"),
        ("torchrun, DDP, 4 ranks", "last bit", "rank 1 and rank 0 have different"),
        ("deepspeed, ZeRO 2", "sent more", "rank 1 sent 8448, not 7680"),
        ("mp.spawn, DDP, no_sync", "sent less", "rank 1 sent 7680, not 15360"),
        ("deepspeed, ZeRO 2", "held", "rank 1 holds .* bytes of gradients"),
        ("by hand, ZeRO 3", "held", "rank 1 holds .* bytes of gradients"),
        ("by hand, ZeRO 2", "weight", "rank 1: .* and a weight 2e-05"),
    ],
)
def test_what_is_wrong_on_one_rank_is_found(way: str, what: str, words: str) -> None:
    verdict, runs = module("verdict"), invented_runs()
    assert verdict.all_faults(runs, SIZES, is_cpu=True) == []
    runs[way][1] = changed(runs[way][1], what)
    faults = verdict.all_faults(runs, SIZES, is_cpu=True)
    found = [fault for fault in faults if re.search(words, fault)]
    assert len(found) == 1 and found[0].startswith(way), faults


def test_a_way_that_is_missing_or_has_other_bits_is_found() -> None:
    verdict, runs = module("verdict"), invented_runs()
    del runs["deepspeed, ZeRO 3"]
    runs["torchrun, DDP, 4 ranks"].pop()
    by_hand = [changed(run, "last bit") for run in runs["averaged by hand"]]
    runs["averaged by hand"] = by_hand
    # One bit is far below the limit. On two ranks there is no reason for it.
    assert verdict.faults_of("", by_hand[0], runs["one process"][0]) == []
    assert verdict.all_faults(runs, SIZES, is_cpu=True) == [
        "averaged by hand: not the bits of mp.spawn, DDP",
        "torchrun, DDP, 4 ranks: 3 of 4 ranks have ended",
        "deepspeed, ZeRO 3: 0 of 2 ranks have ended",
    ]
    assert len(verdict.all_faults(runs, SIZES, is_cpu=False)) == 2
    del runs["mp.spawn, DDP"]
    assert len(verdict.all_faults(runs, SIZES, is_cpu=True)) == 3
    # A way that nobody has asked for is not missed.
    some = {name: n for name, n in verdict.WAYS.items() if name not in runs or n == 1}
    assert len(some) == 3
    faults = verdict.all_faults(runs, SIZES, True, {**some, "deepspeed, ZeRO 3": 0})
    assert faults == ["mp.spawn, DDP: 0 of 2 ranks have ended"]


def test_rows_fit_the_page_and_show_the_worst_rank() -> None:
    verdict, runs = module("verdict"), invented_runs()
    reference = runs["one process"][0]
    rows = [verdict.row(name, found, reference) for name, found in runs.items()]
    assert len(rows) == 14
    assert {len(row) for row in rows} == {len(verdict.HEAD)} and len(rows[0]) <= 88
    assert rows[0].split()[-7:] == ["1", "3.00000", "0", "0", "1.00", "0.0", "30.7"]
    four = runs["torchrun, DDP, 4 ranks"]
    four[3] = changed(changed(four[3], "weight"), "loss")
    # An all-reduce on four ranks is 1.5 times the message for each of them.
    words = verdict.row("torchrun, DDP, 4 ranks", four, reference).split()[-7:]
    assert words == ["4", "3.00000", "2e-05", "2e-05", "1.00", "11.5", "30.7"]
    runs = invented_runs()
    name = "mp.spawn, DDP, no_sync"
    runs[name] = [changed(run, "last bit") for run in runs[name]]
    said = verdict.closing_lines(runs).splitlines()
    assert said[0] == "11 of 12 ways on two ranks end with the same bits"
    assert said[1].startswith("check: 14 ways, 29 ranks: losses 0e+00 from")


def test_the_mistake_has_to_be_found() -> None:
    verdict, run = module("verdict"), invented_run(0, 2, 0)
    references = dict.fromkeys(verdict.SUMMED, run)
    wrong = run._replace(losses=[5.5, 4.1, 3.1])
    mistakes = dict.fromkeys(verdict.MISTAKES, run)
    with pytest.raises(RuntimeError, match="a loss 0e"):
        verdict.mistake_lines(mistakes, references)
    mistakes[verdict.SUMMED[1e-3]] = wrong
    assert "a loss 1e-01 apart" in verdict.mistake_lines(mistakes, references)[1]
    # The page says that the usual eps hides it: that is held up as well.
    mistakes[verdict.SUMMED[1e-8]] = wrong
    with pytest.raises(RuntimeError, match="eps 1e-08: a loss 1e-01"):
        verdict.mistake_lines(mistakes, references)


# --- The ways themselves, as far as warm workers can go them. ----------


def train_and_hand_in(folder: str) -> dict[str, Any]:
    """Train on this rank; hand in what is right, then what is wrong."""
    each, ways, verdict = module("each_rank"), module("ways"), module("verdict")
    tokens, cpu, path = each.text_tokens(), torch.device("cpu"), Path(folder)
    by_hand = ways.train_in_torch(tokens, cpu, ways.average_by_hand)
    # In a second life nobody is killed. The first of these leaves a checkpoint behind.
    os.environ[ways.RESTARTS] = "1"
    checkpoint = path / "checkpoint"
    options: Any = {"wrap": ways.wrap_in_ddp, "checkpoint": checkpoint}
    in_ddp = ways.train_in_torch(tokens, cpu, **options)
    resumed = ways.train_in_torch(tokens, cpu, **options)
    summed = ways.train_in_torch(tokens, cpu, ways.sum_by_hand)
    in_parts = ways.train_in_torch(tokens, cpu, ways.wrap_in_ddp, parts=2)
    each.hand_in(path, {"averaged by hand": by_hand, "mp.spawn, DDP": in_ddp})
    each.hand_in(path, {"mp.spawn, DDP, no_sync": in_parts})
    for name, stage in verdict.HAND_STAGES.items():
        wrap = functools.partial(ways.shard_by_hand, stage)
        each.hand_in(path, {name: ways.train_in_torch(tokens, cpu, wrap)})
    said = []
    # Wrong on rank 1 alone; and a mistake that is none.
    mixed = summed if dist.get_rank() == 1 else by_hand
    for wrong in ({"torchrun, DDP": mixed}, {"summed, eps 1e-03": by_hand}):
        try:
            each.hand_in(path, wrong)
        except RuntimeError as error:
            said.append(str(error))
    return {
        "said": said,
        "saved after": len(torch.load(checkpoint, weights_only=True)["losses"]),
        "equal": verdict.is_same_run(resumed, in_ddp),
    }


def test_all_ranks_agree_with_one_process_or_all_raise(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    each, verdict = module("each_rank"), module("verdict")
    alone = each.write_job(tmp_path, torch.device("cpu"))[1e-3]
    # Each Python brings a text of its own, and single batches differ much.
    assert len(alone.losses) == 24 and alone.losses[0] > 5.4
    assert sum(alone.losses[-6:]) / 6 < 3.3
    by_rank = worker_pool.run(train_and_hand_in, str(tmp_path), timeout=120)
    assert len(by_rank) == 2
    for result in by_rank:
        one_is_wrong, none_is_wrong = result["said"]
        # Rank 0 had found nothing, and learns of rank 1.
        assert "[[], ['torchrun, DDP: a loss is 5e-02 apart" in one_is_wrong
        assert "summed, eps 1e-03: nobody would notice" in none_is_wrong
        assert result["saved after"] == 10 and result["equal"]
    runs = module("launches").handed_in(tmp_path)
    assert [len(runs[name]) for name in ("one process", "averaged by hand")] == [1, 2]
    found = [*runs["averaged by hand"], *runs["mp.spawn, DDP"]]
    found_in_parts = runs["mp.spawn, DDP, no_sync"]
    assert len(found_in_parts) == 2
    assert not verdict.is_same_run(found_in_parts[0], found[0])
    assert len(found) == 4 and all(verdict.is_same_run(r, found[0]) for r in found)
    # What was counted, in numbers that are written out here: 117,376 values.
    found += found_in_parts
    assert [len(run.calls["all_reduce"]) for run in found] == [24, 24, 1, 1, 1, 1]
    for run in found:
        assert sum(run.calls["all_reduce"]) == 4 * 117_376
        assert math.isnan(run.sent) or 1 <= run.sent / (4 * 117_376) < 1.05
        assert verdict.all_held(run) == pytest.approx(16 * 117_376, rel=0.01)
    # And ZeRO by hand: the same bits; what is sent and kept is less, and the formula's.
    calls = [{"all_reduce": 1, "all_gather": 1}, {"reduce_scatter": 1, "all_gather": 1}]
    calls.append({"reduce_scatter": 1, "all_gather": 2})
    kept = [4 + 4 + 8 / 2, 4 + 4 / 2 + 8 / 2, (4 + 4 + 8) / 2]
    for stage in (1, 2, 3):
        by_rank = runs[f"by hand, ZeRO {stage}"]
        assert len(by_rank) == 2
        for run in (by_rank[0], by_rank[1]):
            assert verdict.is_same_run(run, found[0])
            assert verdict.all_held(run) == pytest.approx(
                kept[stage - 1] * 117_376, rel=0.02
            )
            sent = {call: sum(each) / (4 * 117_376) for call, each in run.calls.items()}
            # The output matrix is the embedding: stage 3 gathers it for both ends.
            assert sent == pytest.approx(calls[stage - 1], abs=0.3 * (stage == 3))


# --- The command, the picture, and what they refuse. ----------


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
        (["--by=slurm"], None, "argument --by: invalid choice: 'slurm'"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    rank: str | None,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["same_result.py", *words])
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        module("same_result").main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith(f"same_result.py: {line}") and said.err.count("\n") == 1


def draw(monkeypatch: pytest.MonkeyPatch, numbers: Path, out: Path) -> None:
    words = ["draw_same_result.py", f"--numbers={numbers}", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", words)
    load_chapter("assets")["draw_same_result"].main()


def test_picture_shows_what_was_measured_and_its_check_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draw(monkeypatch, NUMBERS, tmp_path)
    assert re.match(r"check: 14 curves, at most \de-07 apart", capsys.readouterr().out)
    assert (tmp_path / "05_same_result.png").stat().st_size > 50_000
    record = json.loads(NUMBERS.read_text())
    whole = 4 * record["parameters"]
    # The theory, written out: what a rank sends, in messages as large as the model.
    sent = {name: way["sent"] / whole for name, way in record["ways"].items()}
    # Gloo's reduce-scatter is an all-reduce; the embedding is gathered for both ends.
    by_hand = [1.5, 1.5, 2 + 16_384 / 117_376]
    expected = [0, *[1] * 3, *by_hand, *[1] * 2, 1.5, 1, 1.5, 1.5, 2]
    assert list(sent.values()) == pytest.approx(expected, rel=0.1)
    held = [sum(way["held"].values()) / whole for way in record["ways"].values()]
    assert held[:4] + held[7:11] == [pytest.approx(4, rel=0.03)] * 8
    assert held[3] > held[4] > held[5] > held[6] > 1.9
    assert held[10] > held[11] > held[12] > held[13] > 2
    record["ways"]["mp.spawn, DDP"]["losses"][3] += 2e-5
    (tmp_path / "wrong.json").write_text(json.dumps(record))
    with pytest.raises(RuntimeError, match="the curves are 2"):
        draw(monkeypatch, tmp_path / "wrong.json", tmp_path)
