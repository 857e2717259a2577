"""Chapter 08, its rooms: who waits, what goes wrong, where to cut, exercises."""

import contextlib
import copy
import functools
import gc
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from answers import broken_pipeline, stage_order
from launch import ROOT, python
from lessons import run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

BUBBLE = "08_pipeline_parallel/bubble"
BALANCE = "08_pipeline_parallel/balance"
EXERCISES = "08_pipeline_parallel/exercises"
LINK = "08_pipeline_parallel/link"
MISTAKES = "08_pipeline_parallel/mistakes"


def script(room: str, name: str) -> Any:
    """Return a module of a room."""
    return load_chapter(room)[name]


def run_here(room: str, name: str, *words: str) -> tuple[Any, str]:
    """Be one rank of a lesson; return its exit code and its output, or complaint."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return 0, run_lesson(room, name, *words)
    except SystemExit as end:
        return end.code, errors.getvalue()


# --- bubble/: who waits, and what is kept. ----------


def bubble_of(words: list[str], fault: str = "") -> tuple[Any, str]:
    """Run bubble.py on this rank, with one of its parts broken."""
    timed = script(BUBBLE, "timed_stages")
    faults = {
        "": contextlib.nullcontext(),
        "other order": mock.patch.dict(
            timed.BY_HAND, {"one_f_one_b": one_at_a_time, "gpipe": one_at_a_time}
        ),
        "units": mock.patch.dict(timed.UNITS, {"W": 2}),
    }
    with faults[fault]:
        return run_here(BUBBLE, "bubble", *words)


def one_at_a_time(stage: Any, micro_batches: int) -> None:
    """Let no two micro-batches be in flight: right gradients, and long waits."""
    for i in range(micro_batches):
        stage.forward(i)
        stage.backward(i)


ROW = re.compile(r"^(\S+) +([\d.]+)% +([\d.]+)% +([\d.]+)%  (.*)$", re.M)


def bubbles_in(text: str) -> dict[str, tuple[float, float, float, list[float]]]:
    """Return formula, replayed, measured and in flight, by the schedule's name."""
    return {
        name: (float(a), float(b), float(c), [float(x) for x in kept.split(", ")])
        for name, a, b, c, kept in ROW.findall(text)
    }


@pytest.fixture(scope="module")
def timelines_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where bubble.py writes the timelines that `four_ranks` shows."""
    return tmp_path_factory.mktemp("bubble") / "timelines.json"


@pytest.fixture(scope="module")
def four_ranks(worker_pool: WorkerPool, timelines_file: Path) -> dict[str, Any]:
    """Record all schedules on four ranks with 8 micro-batches, once for all tests."""
    words = ["--ms=5", f"--json={timelines_file}"]
    ends = worker_pool.run(bubble_of, words, world_size=4)
    assert [code for code, _ in ends] == [0] * 4, ends
    rows = bubbles_in(ends[0][1])
    assert len(rows) == 7
    return rows


def test_measured_shares_are_those_of_the_timelines_written(
    four_ranks: dict[str, Any], timelines_file: Path
) -> None:
    written = json.loads(timelines_file.read_text())
    assert (written["p"], written["m"], written["unit"]) == (4, 8, 0.005)  # seconds
    idle_share = script(BUBBLE, "timelines").idle_share
    shares = {name: 100 * idle_share(rows) for name, rows in written["spans"].items()}
    measured = {name: row[2] for name, row in four_ranks.items()}
    assert measured == pytest.approx(shares, abs=0.06)


def test_ranks_begin_the_step_that_is_timed_together() -> None:
    timed, calls = script(BUBBLE, "timed_stages"), []
    with mock.patch.object(dist, "barrier", lambda: calls.append("barrier")):
        timed.run_twice(lambda: calls.append("step"), timed.Clock(), 1.0)
    assert calls == ["step", "barrier", "step"]


def test_idle_share_of_each_order_is_its_formula_s(four_ranks: dict[str, Any]) -> None:
    plain, halved, zero = 100 * 3 / 11, 100 * 3 / 19, 100 * 3 / 51
    expected = dict.fromkeys(["gpipe", "one_f_one_b", "GPipe", "1F1B"], plain)
    expected |= {"Interleaved1F1B": halved}
    expected |= dict.fromkeys(["InterleavedZeroBubble", "ZBVZeroBubble"], zero)
    assert {name: row[1] for name, row in four_ranks.items()} == pytest.approx(
        expected, abs=0.06
    )
    late = [name for name, share in expected.items() if four_ranks[name][2] < share - 1]
    assert late == []


def test_1f1b_waits_as_long_as_gpipe(four_ranks: dict[str, Any]) -> None:
    assert four_ranks["1F1B"][1] == four_ranks["GPipe"][1] == pytest.approx(27.3)


def end_of_last(
    schedule: Callable, forward: list[int], m: int, message: float = 0
) -> float:
    """Return when a step's last call is over, if calls and messages take so long."""
    calls = load_chapter(BUBBLE)["call_timeline"]
    left = calls.calls_of(schedule, len(forward), m)
    ends: dict[Any, float] = {None: -message}
    free = [0.0] * len(forward)
    while any(left):
        for stage, row in enumerate(left):
            while row and (call := calls.needed(row[0], stage, len(left))) in ends:
                length = forward[stage] * (1 if row[0][0] == "F" else 2)
                arrives = ends[call] + message * (call is None or call[1] != stage)
                free[stage] = max(free[stage], arrives) + length
                ends[row.pop(0), stage] = free[stage]
    return max(free)


def test_1f1b_and_gpipe_differ_if_stages_are_unequal() -> None:
    modules = load_chapter(BUBBLE)
    gpipe, ours = modules["schedules"].SCHEDULES.values()
    for forward in ([1, 1, 1], [2, 2, 2]):
        assert end_of_last(gpipe, forward, 6) == end_of_last(ours, forward, 6)
    assert [end_of_last(way, [3, 1, 1], 6) for way in (gpipe, ours)] == [60, 54]
    # Each micro-batch waits for an answer in 1F1B, and in GPipe for the first one only.
    slow = [end_of_last(way, [1, 1, 1], 6, 0.5) for way in (gpipe, ours)]
    assert slow[0] == 24 + 4 * 0.5 < slow[1]


def dual_pipe_v() -> float:
    """Return how many of 8 micro-batches this rank keeps by DualPipeV."""
    modules, rank = load_chapter(BUBBLE), dist.get_rank()
    stages = [rank, 2 * dist.get_world_size() - 1 - rank]
    mine = modules["timed_pipeline"].record_torch("DualPipeV", stages, 8, 0.0)
    return modules["timelines"].most_in_flight(mine, 2)


def shares_of(name: str, micro_batches: tuple[int, ...]) -> list[Any]:
    """Record a schedule; return for each number its idle share, and what is kept."""
    modules, found = load_chapter(BUBBLE), []
    for m in micro_batches:
        spans: list[Any] = [None] * dist.get_world_size()
        mine = modules["timed_pipeline"].record(name, 2, m, 0.0)
        dist.all_gather_object(spans, mine)
        timelines = modules["timelines"]
        kept = [timelines.most_in_flight(row, 2) for row in spans]
        found.append((timelines.idle_share(timelines.replay(spans)), kept))
    return found


def test_zero_bubble_formula_wants_enough_micro_batches(
    worker_pool: WorkerPool,
) -> None:
    few, enough, multiple = [3 / (3 * 2 * m + 3) for m in (4, 7, 8)]
    ends = worker_pool.run(shares_of, "ZBVZeroBubble", (4, 7, 8), world_size=4)
    shares = [share for share, _ in ends[0]]
    assert shares == pytest.approx([0.2, enough, multiple]) and few < 0.12
    assert [kept for _, kept in ends[0][1:]] == [[4] * 4] * 2
    name = "InterleavedZeroBubble"
    ends = worker_pool.run(shares_of, name, (4, 7, 8), world_size=4)
    shares = [share for share, _ in ends[0]]
    assert shares == pytest.approx([few, enough, multiple])
    assert [kept for _, kept in ends[0]] == [[4] * 4, [5.5] * 4, [4] * 4]


def test_with_p_micro_batches_interleaving_keeps_no_more_than_1f1b_on_rank_0(
    worker_pool: WorkerPool,
) -> None:
    (_, kept), *_ = worker_pool.run(shares_of, "Interleaved1F1B", (4,), world_size=4)[0]
    assert kept[0] == 4  # as with 1F1B, which keeps 3, 2 and 1 on the others
    assert kept[1] > 3 and kept[2] > 2 and kept[3] > 1


def test_interleaved_schedules_refuse_some_numbers_of_micro_batches(
    worker_pool: WorkerPool,
) -> None:
    # 5 is no multiple of the 5 // 2 rounds; ZBV has no rounds.
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        with pytest.raises(RankError, match="to be a multiple of the number of rounds"):
            worker_pool.run(shares_of, name, (5,))
    (share, kept), *_ = worker_pool.run(shares_of, "ZBVZeroBubble", (5,))[0]
    assert (share, kept) == (pytest.approx(1 / (3 * 2 * 5 + 1)), [2, 2])


def test_zero_bubble_schedules_have_a_bubble(four_ranks: dict[str, Any]) -> None:
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        assert 5 < four_ranks[name][1] < four_ranks[name][2]


def test_first_stage_keeps_most_micro_batches(four_ranks: dict[str, Any]) -> None:
    kept = {name: row[3] for name, row in four_ranks.items()}
    assert kept["gpipe"] == kept["GPipe"] == [8, 8, 8, 8]
    assert kept["one_f_one_b"] == kept["1F1B"] == [4, 3, 2, 1]


def test_interleaving_keeps_more_than_1f1b(
    worker_pool: WorkerPool, four_ranks: dict[str, Any]
) -> None:
    assert four_ranks["Interleaved1F1B"][3] == [5.5, 4.5, 3.5, 2.5]
    assert four_ranks["InterleavedZeroBubble"][3] == [4, 4, 4, 4]
    assert four_ranks["ZBVZeroBubble"][3] == [4, 4, 4, 4]
    # Another schedule that puts weights' gradients off, and keeps more.
    assert worker_pool.run(dual_pipe_v, world_size=4) == [4.5] * 4
    assert "These two zero bubble schedules keep" in words_of(BUBBLE)


@pytest.mark.parametrize("fault", ["other order", "units"])
def test_bubble_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(bubble_of, ["--ms=1"], fault, world_size=2)
    assert [code for code, _ in ends] == [1, 1]
    assert "not so: 7 orders" in ends[0][1]


def test_rounds_are_micro_batches_for_each_rank(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(bubble_of, ["--ms=1", "--rounds=3"], world_size=2)
    assert ends[0][1].startswith("2 ranks, 6 micro-batches of 1 ms forward")
    assert bubbles_in(ends[0][1])["gpipe"][3] == [6, 6]


@pytest.mark.slow
def test_formulas_hold_for_other_numbers(worker_pool: WorkerPool) -> None:
    for ranks, rounds in ((2, 5), (3, 2)):
        words = ["--ms=1", f"--rounds={rounds}"]
        ends = worker_pool.run(bubble_of, words, world_size=ranks)
        assert [code for code, _ in ends] == [0] * ranks, ends


def test_backward_takes_twice_the_time_of_forward_and_has_two_halves() -> None:
    # Of 6 operations a weight and token forward takes 2 (Kaplan et al., 2020, section
    # 2.1). Backward multiplies twice: one product each for the gradients of the input
    # and of the weights (Qi et al., Zero Bubble Pipeline Parallelism, 2023).
    units = load_chapter(BUBBLE)["timed_stages"].UNITS
    assert units == {"F": 1, "B": (6 - 2) / 2, "I": 1, "W": 1}
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.ones(2, 8, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    work = backward.get_total_flops(), forward.get_total_flops()
    assert work[0] / work[1] == units["B"] / units["F"] == 2


def test_the_clock_gives_each_kind_its_time() -> None:
    # As above: backward is twice forward, and each of its halves as long as forward.
    timed, slept = script(BUBBLE, "timed_stages"), []
    clock = timed.Clock()
    clock.unit = 3.0
    frozen = SimpleNamespace(perf_counter=lambda: 100.0, sleep=slept.append)
    with mock.patch.object(timed, "time", frozen):
        for kind in "FBIW":
            with clock.call(kind, 0, 0):
                pass
    assert slept == [3, 6, 3, 3]


def unit_of(name: str, stages_on_a_rank: int) -> float:
    """Return the unit of a call, where a forward pass of all layers takes 8 seconds."""
    pipeline = script(BUBBLE, "timed_pipeline")
    with mock.patch.object(pipeline, "run_twice", lambda step, clock, unit: unit):
        return pipeline.record(name, stages_on_a_rank, 4, 8.0)


def test_half_of_the_layers_take_half_of_the_time(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(unit_of, "1F1B", 1) == [8, 8]
    assert worker_pool.run(unit_of, "ZBVZeroBubble", 2) == [4, 4]


def test_idle_share_begins_with_the_first_call() -> None:
    # Two ranks, one micro-batch, at any time of day: 6 units, of which each computes 3.
    spans = [
        [("F", 0, 0, 100.0, 101.0), ("B", 0, 0, 104.0, 106.0)],
        [("F", 1, 0, 101.0, 102.0), ("B", 1, 0, 102.0, 104.0)],
    ]
    assert script(BUBBLE, "timelines").idle_share(spans) == 1 / 2


def test_recorded_numbers_are_the_picture_s() -> None:
    numbers = json.loads((ROOT / "assets" / "08_bubble.json").read_text())
    timelines = script(BUBBLE, "timelines")
    assert (numbers["p"], numbers["m"], len(numbers["spans"])) == (4, 8, 7)
    for name, ranks in numbers["spans"].items():
        ideal = timelines.idle_share(timelines.replay(ranks))
        formula = script(BUBBLE, "bubble").formula(name, 4, 8)
        assert ideal == pytest.approx(float(formula))
        calls = [tuple(span[:3]) for spans in ranks for span in spans]
        parts = script(BUBBLE, "bubble").STAGES_ON_A_RANK[name]
        kinds = 3 if "Zero" in name else 2
        assert len(calls) == len(set(calls)) == kinds * 8 * 4 * parts
    shares = [
        script(BUBBLE, "bubble").formula(n, 4, 8) for n in ("1F1B", "ZBVZeroBubble")
    ]
    said = "four ranks wait {:.0%} by 1F1B, and {:.0%} by a zero bubble schedule"
    said = said.format(*map(float, shares)).replace("%", " %")
    assert said in (ROOT / "08_pipeline_parallel/README.md").read_text()


def test_replay_refuses_ranks_that_wait_for_each_other() -> None:
    calls = [[("B", 0, 0, 0, 0), ("F", 0, 0, 0, 0)], [("F", 1, 0, 0, 0)]]
    with pytest.raises(ValueError, match="wait for each other"):
        script(BUBBLE, "timelines").replay(calls)


def real_stages(fault: str = "") -> tuple[Any, str]:
    """Run two_real_stages.py on a smaller GPT."""
    real, timed = script(BUBBLE, "two_real_stages"), script(BUBBLE, "timed_stages")
    config = timed.GPTConfig(block_size=8, width=16, layers=4, heads=2, tied=False)
    by_hand = dict(timed.BY_HAND)
    if fault:
        by_hand["one_f_one_b"] = by_hand["gpipe"]
    with (
        mock.patch.object(real, "CONFIG", config),
        mock.patch.object(real, "BY_HAND", by_hand),
    ):
        return run_here(BUBBLE, "two_real_stages")


def test_bytes_that_autograd_keeps_are_counted(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(real_stages)
    assert [code for code, _ in ends] == [0, 0], ends
    ends = worker_pool.run(real_stages, "gpipe twice")
    assert [code for code, _ in ends] == [1, 1]


def test_a_storage_counts_once_and_a_weight_never() -> None:
    real = script(BUBBLE, "two_real_stages")
    weight = torch.ones(4, requires_grad=True)
    saved = real.SavedBytes(weight)
    with saved.hooks():
        y = (weight * weight).exp()  # keeps the weight twice, and y: 4 values
        total = (y * y.view(4)).sum()  # keeps y twice more
    assert (saved.now, saved.peak) == (4 * 4, 4 * 4)
    total.backward()
    del y, total
    assert (saved.now, saved.peak) == (0, 4 * 4)


def peaks_of_1f1b() -> list[int]:
    """Return the bytes that each of two real stages keeps by 1F1B."""
    real = script(BUBBLE, "two_real_stages")
    samples = real.MICRO_BATCHES * real.MICRO_BATCH_SIZE
    tokens = torch.zeros(samples, real.CONFIG.block_size + 1, dtype=torch.int64)
    return real.run_real(real.BY_HAND["one_f_one_b"], tokens)[1]


def test_kept_bytes_follow_from_the_shapes(worker_pool: WorkerPool) -> None:
    tokens, width, vocabulary, heads = 4 * 128, 256, 256, 4  # of a micro-batch
    activation = 4 * tokens * width
    # Input and output of two norms, query, key, value, attention, 4 D before gelu and
    # after; in fp32 mean and deviation of each norm, and a logarithm for each head.
    block = (4 + 4 + 8) * activation + 4 * tokens * (2 * 2 + heads)
    head = 2 * activation + 4 * tokens * (2 + vocabulary)  # norm, log-probabilities
    positions, labels = 8 * 128, 8 * tokens + 4  # int64, and how many labels count
    peaks = worker_pool.run(peaks_of_1f1b)
    assert peaks[0] == peaks[1]
    expected = [2 * (2 * block + positions), 2 * block + head + labels]
    assert peaks[0] == pytest.approx(expected, rel=1e-3)


def kept_of_inputs() -> tuple[list[int], int]:
    """Let blocks compute again what backward needs; return a small GPT's peaks.

    And the bytes of the activations between two blocks.
    """
    real, block = script(BUBBLE, "two_real_stages"), script(BUBBLE, "model").Block
    sizes = {"block_size": 8, "width": 16, "layers": 4, "heads": 2, "tied": False}
    forward = block.forward

    def keeping_its_input(self: Any, x: torch.Tensor) -> Any:
        return checkpoint(forward, self, x, use_reentrant=False)

    with (
        mock.patch.object(real, "CONFIG", real.GPTConfig(**sizes)),
        mock.patch.object(block, "forward", keeping_its_input),
    ):
        return peaks_of_1f1b(), 4 * real.MICRO_BATCH_SIZE * 8 * 16


def test_blocks_that_compute_again_keep_their_inputs(worker_pool: WorkerPool) -> None:
    (peaks, activation), _ = worker_pool.run(kept_of_inputs)
    # Two micro-batches, two blocks each; and the embedding keeps the positions.
    assert peaks[0] == 2 * (2 * activation + 8 * 8)
    assert "(fewer with `torch.utils.checkpoint`)" in words_of(BUBBLE)


def received_into(micro_batches: int) -> int:
    """Step twice by PyTorch's 1F1B; how many messages' tensors are there still?"""
    rank, width = dist.get_rank(), 37
    stage = PipelineStage(nn.Linear(width, width), rank, 2, torch.device("cpu"))
    pipeline = Schedule1F1B(stage, micro_batches, nn.functional.mse_loss)
    x = torch.ones(micro_batches, width)
    for _ in range(2):
        pipeline.step(*[x][rank:], target=x if rank else None, return_outputs=False)
    there = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return sum(one.shape == (1, width) for one in there)


def test_pytorchs_1f1b_keeps_a_message_of_each_micro_batch(
    worker_pool: WorkerPool,
) -> None:
    # The first stage has received gradients, the last activations.
    assert worker_pool.run(received_into, 4) == [4, 4]
    assert worker_pool.run(received_into, 32) == [32, 32]
    assert "PyTorch's keeps a buffer for each message" in words_of(BUBBLE)


def shown_bytes(by_1f1b: tuple[int, int] = (2, 1)) -> tuple[Any, str]:
    """Let two_real_stages.py show peaks that are known, in MiB; 8 each by GPipe."""
    real = script(BUBBLE, "two_real_stages")
    peaks = [(0.3, [8 << 20, 8 << 20]), (0.3, [peak << 20 for peak in by_1f1b])]
    with mock.patch.object(real, "run_real", side_effect=peaks):
        return run_here(BUBBLE, "two_real_stages")


def test_bytes_are_shown_in_mib_beside_the_formula_s_share(
    worker_pool: WorkerPool,
) -> None:
    (code, said), _ = worker_pool.run(shown_bytes)
    assert code == 0 and "kept for backward: 2.0 and 1.0 MiB" in said
    # (p - 1) / (m + p - 1) of two stages and eight micro-batches.
    assert f"formula     | idle {1 / 9:.1%}\n" in said


@pytest.mark.parametrize("by_1f1b", [(3, 1), (2, 2)], ids=str)
def test_other_bytes_on_either_stage_are_noticed(
    worker_pool: WorkerPool, by_1f1b: tuple[int, int]
) -> None:
    ends = worker_pool.run(shown_bytes, by_1f1b)
    assert [code for code, _ in ends] == [1, 1]


# --- mistakes/: each is provoked. ----------

IN_PLACE = "one of the variables needed for gradient computation has been modified"
# What the ranks print, and their exit codes.
ENDS = {
    "both_send_first": ("2000ms for send operation", "for send operation", 1, 1),
    "sum_of_means": ("gradient: 4.000 times", "gradient: 4.000 times", 0, 0),
    "step_too_early": (IN_PLACE, "micro-batch 1: loss", 1, 0),
    "batch_norm": ("", "LayerNorm: 0.00 off", 0, 0),
}


@pytest.fixture(scope="module")
def shown() -> dict[str, list[tuple[str, int]]]:
    """Run all mistakes at once; return what each rank printed, and its exit code."""
    result = python(f"{MISTAKES}/show.py", *ENDS)
    assert result.returncode == 0, result.output
    found: dict[str, list[tuple[str, int]]] = {}
    for part in result.stdout.split("--- ")[1:]:
        name, *lines = part.splitlines()
        found[name] = []
        for rank in (0, 1):
            said = [x[9:] for x in lines if x.startswith(f"rank {rank} | ")]
            (code,) = re.findall(rf"^rank {rank}: exit code (-?\d+)$", part, re.M)
            found[name].append((" ".join(said), int(code)))
    assert list(found) == list(ENDS)
    return found


@pytest.mark.parametrize("name", ENDS)
def test_mistake_of_a_pipeline_ends_as_described(
    shown: dict[str, list[tuple[str, int]]], name: str
) -> None:
    first, second, *codes = ENDS[name]
    ends = [said for said, _ in shown[name]]
    assert [code for _, code in shown[name]] == codes
    if name == "both_send_first":  # the second to end may see the first one gone
        assert any(first in said for said in ends)
    else:
        assert first in ends[0] and second in ends[1]


def test_every_mistake_of_a_pipeline_is_shown() -> None:
    files = {path.stem for path in (ROOT / MISTAKES).glob("*.py")} - {"show"}
    assert files == set(ENDS)


def test_last_stage_steps_too_early_in_silence(
    shown: dict[str, list[tuple[str, int]]],
) -> None:
    (_, failed), (said, ended) = shown["step_too_early"]
    first, second = map(float, re.findall(r"loss ([\d.]+)", said))
    assert (failed, ended) == (1, 0) and first > second + 0.01


def end_of_second_backward(stage: Any, forward: Callable, step: Callable) -> str:
    """Step between two backward passes; return the error of the second, or nothing."""
    ys = [forward(stage).sum() for _ in range(2)]
    ys[0].backward()
    before = [p.detach().clone() for p in stage.parameters()]
    step(list(stage.parameters()))
    assert not torch.equal(before[-1], list(stage.parameters())[-1])
    try:
        ys[1].backward()
    except RuntimeError as error:
        return str(error)
    return ""


def in_bfloat16(stage: Any) -> torch.Tensor:
    """Run a stage under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return stage(torch.ones(4, 3))


def computed_again(stage: Any) -> Any:
    """Run a stage that keeps no activations."""
    return checkpoint(stage, torch.ones(4, 3), use_reentrant=False)


def through_data(parameters: list[Any]) -> None:
    """Step as some optimizers do."""
    for p in parameters:
        p.data.add_(p.grad, alpha=-0.1)


def by(kind: Callable, fused: bool = False) -> Callable:
    """Step by an optimizer."""
    return lambda parameters: kind(parameters, lr=0.1, fused=fused).step()


def test_autograd_overlooks_a_fused_step() -> None:
    def two() -> Any:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def one_pass(stage: Any) -> Any:
        return stage(torch.ones(4, 3))

    sgd, adam = torch.optim.SGD, torch.optim.AdamW

    def with_norm(kind: Callable, *sizes: int) -> Any:
        return nn.Sequential(nn.Linear(3, 3), kind(*sizes), nn.Linear(3, 3))

    noticed = [
        (two(), one_pass, by(sgd)),
        (two(), one_pass, by(adam)),
        (with_norm(nn.LayerNorm, 3), in_bfloat16, by(sgd)),
        (with_norm(nn.GroupNorm, 1, 3), in_bfloat16, by(sgd)),
    ]
    silent = [
        (two(), one_pass, by(sgd, fused=True)),
        (two(), one_pass, by(adam, fused=True)),
        (two(), one_pass, through_data),
        (two(), in_bfloat16, by(sgd)),
        (two(), computed_again, by(sgd)),
        (nn.Linear(3, 3), one_pass, by(sgd)),  # that comes first: x needs no gradient
        (nn.Embedding(5, 3), lambda table: table(torch.tensor([1])), by(sgd)),
    ]
    ends = [end_of_second_backward(*case) for case in noticed]
    # A matrix; with autocast, which casts matrices, a norm's weight.
    changed = r"modified by an inplace operation: \[torch.FloatTensor (\[.*?\])\]"
    shapes = [re.findall(changed, end) for end in ends]
    assert shapes == [["[3, 3]"]] * 2 + [["[3]"]] * 2
    assert [end_of_second_backward(*case) for case in silent] == [""] * 7


def test_batch_norm_sees_micro_batches(
    shown: dict[str, list[tuple[str, int]]],
) -> None:
    (error,) = re.findall(r"BatchNorm: ([\d.]+) off", shown["batch_norm"][1][0])
    assert float(error) > 0.1


# --- balance/: where to cut, and tied weights. ----------


def tied_with(fault: str) -> tuple[Any, str]:
    """Run tied_weights.py with a sum, without one, or with one that is nearly right."""
    tied = script(BALANCE, "tied_weights")
    both = tied.add_both_gradients

    def a_millionth_more(weight: Any) -> None:
        both(weight)
        weight.grad *= 1 + 1e-6

    wrong = {"": both, "no sum": tied.leave_alone, "a millionth": a_millionth_more}
    with mock.patch.object(tied, "add_both_gradients", wrong[fault]):
        return run_here(BALANCE, "tied_weights")


def test_tied_ends_diverge_without_a_sum(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(tied_with, "")
    assert [code for code, _ in ends] == [0, 0], ends
    apart = dict(re.findall(r"^(\w+) +\| .* head (\S+) from", ends[0][1], re.M))
    assert float(apart["leave_alone"]) > 1e-3 and apart["add_both_gradients"] == "0e+00"
    for fault in ("no sum", "a millionth"):
        ends = worker_pool.run(tied_with, fault)
        assert [code for code, _ in ends] == [1, 1], fault


def kept_of_both(first: str, last: str) -> list[float]:
    """Load a head of 1 and an embedding of 2, which are tied; what do they hold?"""
    layers = {"head": nn.Linear(4, 8, bias=False), "embedding": nn.Embedding(8, 4)}
    model = nn.ModuleDict({name: layers[name] for name in (first, last)})
    layers["embedding"].weight = layers["head"].weight
    values = {"head.weight": torch.ones(8, 4), "embedding.weight": 2 * torch.ones(8, 4)}
    found = []
    for names in (list(values), list(values)[::-1]):
        model.load_state_dict({name: values[name] for name in names})
        found.append(layers["head"].weight[0, 0].item())
    model.load_state_dict(values, assign=True)
    both = [layers[name].weight[0, 0].item() for name in ("head", "embedding")]
    assert both == [1, 2]  # no longer one matrix
    return found


def test_a_tied_model_keeps_the_matrix_that_is_registered_last() -> None:
    assert kept_of_both("embedding", "head") == [1, 1]
    assert kept_of_both("head", "embedding") == [2, 2]
    sizes = {"block_size": 4, "width": 4, "layers": 1, "heads": 1}
    lesson = script(LINK, "ways")
    gpt = lesson.GPT(lesson.GPTConfig(**sizes))
    state = {name: value.clone() for name, value in gpt.state_dict().items()}
    gpt.load_state_dict(state | {"head.weight": state["head.weight"] + 1})
    assert torch.equal(gpt.token_embedding.weight, state["head.weight"] + 1)
    page = words_of(BALANCE)
    assert "keeps the one registered last (with `assign=True` both, untied)" in page


# --- balance/: is a cut right? ----------


def without_scaling(*call: Any, **settings: Any) -> Any:
    """Make a schedule that adds up the micro-batches' gradients."""
    return Schedule1F1B(*call, scale_grads=False, **settings)


def only_of_the_world(tensor: torch.Tensor, group: Any = None) -> None:
    """Leave the tied gradients, which two stages add up, as they are."""
    if group is None:
        real_all_reduce(tensor)


real_all_reduce = dist.all_reduce


class NoFinalNorm(script(BALANCE, "minimal").Part):
    """Loses a layer."""

    def __init__(self, *place: Any) -> None:
        """Cut, and forget the norm before the head."""
        super().__init__(*place)
        self.final_norm = nn.Identity()


class Renumbered(script(BALANCE, "minimal").Part):
    """Numbers its blocks from 0 on each stage."""

    def __init__(self, *place: Any) -> None:
        """Cut, and lose the blocks' names."""
        super().__init__(*place)
        self.blocks: Any = nn.ModuleList(self.blocks.values())


class Copied(script(BALANCE, "minimal").Part):
    """Holds copies, so that no two stages share a weight."""

    def __init__(self, model: Any, *place: int) -> None:
        """Cut a copy."""
        super().__init__(copy.deepcopy(model), *place)


def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Step as minimal.py does by default."""
    return torch.optim.AdamW(parameters, lr=2e-3)


def adam_with_decay(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Add the weight decay to the gradient, as Adam does; AdamW does not."""
    return torch.optim.Adam(parameters, lr=2e-3, weight_decay=0.01)


def in_bf16(config: Any) -> Any:
    """Build a GPT with weights in bf16."""
    return script(BALANCE, "model").GPT(config).bfloat16()


CUT_FAULTS: dict[str, tuple[str, str, Any]] = {
    "": ("minimal", "MAX_NORM", 1e-3),  # is none here: the check does not clip
    "gradients summed": ("minimal", "Schedule1F1B", without_scaling),
    "tied gradients apart": ("minimal", "dist.all_reduce", only_of_the_world),
    "a layer is lost": ("minimal", "Part", NoFinalNorm),
    "renumbered": ("minimal", "Part", Renumbered),
    "copied": ("minimal", "Part", Copied),
    "hidden by Adam": ("check_minimal", "sgd", adam),
    "Adam with weight decay": ("check_minimal", "sgd", adam_with_decay),
    "bf16 in stages": ("minimal", "GPT", in_bf16),
    "bf16 alone": ("check_minimal", "GPT", in_bf16),
}


def end_of_cut(*faults: str) -> tuple[Any, str]:
    """Be a rank of check_minimal.py with a smaller GPT and text."""
    modules = [script(BALANCE, name) for name in ("minimal", "check_minimal")]
    sizes = {"layers": 2, "width": 32, "heads": 2}
    small_gpt = functools.partial(modules[0].GPTConfig, **sizes)
    dataset = modules[0].WindowDataset

    def two_batches(text: Any, block_size: int, samples: int) -> Any:
        return dataset(text, block_size, 128)

    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        stack.enter_context(mock.patch.dict(os.environ, local_size))
        stack.enter_context(mock.patch.object(dist, "init_process_group"))
        stack.enter_context(contextlib.redirect_stderr(said))
        small: list[tuple[Any, str, Any]] = [
            *((module, "GPTConfig", small_gpt) for module in modules),
            *((module, "WindowDataset", two_batches) for module in modules),
        ]
        for fault in ("", *faults):
            name, place, by = CUT_FAULTS[fault]
            *path, last = place.split(".")
            target = functools.reduce(getattr, path, script(BALANCE, name))
            small.append((target, last, by))
        for target, name, by in small:
            stack.enter_context(mock.patch.object(target, name, by))
        try:
            return 0, run_lesson(BALANCE, "check_minimal")
        except SystemExit as end:
            return end.code, said.getvalue()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_cut_is_compared_with_one_process(
    worker_pool: WorkerPool, stages: int
) -> None:
    ends = worker_pool.run(end_of_cut, world_size=stages)
    assert [status for status, _ in ends] == [0] * stages
    claim = "check: 25 tensors, 25 of them trained, are one process's\n"
    assert [said.endswith(claim) for _, said in ends] == [True] + [False] * (stages - 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "gradients summed",
            r"token_embedding.weight differs: it moved [78]\.\d+ times",
        ),
        ("tied gradients apart", r"token_embedding.weight differs: it moved "),
        ("a layer is lost", r"in one of the two only: \['final_norm.bias', "),
    ],
    ids=["gradients summed", "tied gradients apart", "a layer is lost"],
)
def test_a_wrong_cut_is_noticed(worker_pool: WorkerPool, fault: str, said: str) -> None:
    ends = worker_pool.run(end_of_cut, fault)
    assert [status for status, _ in ends] == [1, 1]
    assert re.match(rf"check failed on ranks \[0, 1\], not so: {said}", ends[0][1])
    far = re.search(
        r"moved (\S+) times as far, and is (\S+) times that off", ends[0][1]
    )
    if fault == "gradients summed":
        assert far and float(far[2]) == pytest.approx(float(far[1]) - 1, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("renumbered", "stage 1: blocks.0.attention_norm.weight"),
        ("copied", "stage 0: token_embedding.weight"),
    ],
)
def test_a_part_keeps_the_models_weights_and_their_names(
    worker_pool: WorkerPool, fault: str, where: str
) -> None:
    ends = worker_pool.run(end_of_cut, fault)
    assert ends == [(f"{where} is a copy, or two have this name", "")] * 2


def test_adam_hides_gradients_eight_times_too_large(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(end_of_cut, "hidden by Adam", "gradients summed")
    assert [status for status, _ in ends] == [0, 0], ends[0][1]
    ends = worker_pool.run(end_of_cut, "Adam with weight decay", "gradients summed")
    assert [status for status, _ in ends] == [1, 1]
    assert "AdamW hides the mistake" in words_of(MISTAKES)


def test_a_right_cut_in_bf16_differs_by_rounding(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(end_of_cut, "bf16 in stages", "bf16 alone")
    assert [status for status, _ in ends] == [1, 1]
    times, off = re.findall(r"[\d.]+(?= times)", ends[0][1])
    assert 0.8 < float(times) < 1.2 and 0.01 < float(off) < 0.5
    assert "Put your model here, in float32, and into" in words_of(BALANCE)


def balanced_with(fault: str) -> tuple[Any, str]:
    """Run balance.py with a search that may be wrong."""
    balance = script(BALANCE, "balance")

    def first_layers_alone(seconds: list[float], stages: int) -> list[int]:
        return [1] * (stages - 1) + [len(seconds) - stages + 1]

    if not fault:
        return run_here(BALANCE, "balance")
    small = balance.GPTConfig(block_size=8, width=32, layers=8, heads=2, tied=False)
    with (
        mock.patch.object(balance, "best_cut", first_layers_alone),
        mock.patch.object(balance, "CONFIG", small),
    ):
        return run_here(BALANCE, "balance")


def test_equal_blocks_are_not_equal_stages(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(balanced_with, "")
    assert [code for code, _ in ends] == [0, 0], ends
    (head,) = re.findall(r"head ([\d.]+) times a block", ends[0][1])
    found = re.findall(
        r"^(\w+): blocks \[(\d), (\d)\], .* ([\d.]+) ms", ends[0][1], re.M
    )
    (even, *equal, slow), (best, *uneven, fast) = found
    assert (even, best, equal) == ("even", "best", ["4", "4"])
    assert float(head) > 2 and uneven[0] > uneven[1] and float(fast) < float(slow)


def balanced_with_known_times() -> tuple[str, list[Any]]:
    """Run balance.py where layers and steps take what is given here, in seconds.

    By rank 1's own times its head is fast. Also returns which cuts were run, and of how
    many samples what was measured.
    """
    balance = script(BALANCE, "balance")
    known = [0.001, *[0.002] * 8, 0.012 if dist.get_rank() == 0 else 0.001]
    layers, steps = mock.Mock(return_value=known), mock.Mock(side_effect=[0.128, 0.123])
    with mock.patch.multiple(balance, layer_seconds=layers, step_seconds=steps):
        said = run_here(BALANCE, "balance")[1]
    (_, inputs, labels), _ = layers.call_args
    ran = [
        (blocks, len(tokens), n) for (_, blocks, tokens, n), _ in steps.call_args_list
    ]
    return said, [len(inputs), len(labels), *ran]


def test_times_of_a_cut_are_sums_of_its_layers_in_milliseconds(
    worker_pool: WorkerPool,
) -> None:
    (said, ran), (_, ran_there) = worker_pool.run(balanced_with_known_times)
    lines = said.splitlines()
    # A half of a block, and six blocks. Four blocks and the head take 8 + 12 ms; seven
    # with the embedding 1 + 14, one with the head 2 + 12.
    assert lines[0] == "embedding 0.5, head 6.0 times a block"
    assert lines[1] == "even: blocks [4, 4], slowest stage 20.0 ms, step 128"
    assert lines[2] == "best: blocks [7, 1], slowest stage 15.0 ms, step 123"
    # A layer is measured with a micro-batch, a step with four; rank 0's times cut.
    assert ran == ran_there == [4, 4, ([4, 4], 16, 4), ([7, 1], 16, 4)]


def clock_of(seconds: list[float]) -> SimpleNamespace:
    """Return a clock by which what is timed takes these seconds, one after another."""
    starts = [100.0 * i for i in range(len(seconds))]
    both = [(t, t + took) for t, took in zip(starts, seconds, strict=True)]
    return SimpleNamespace(perf_counter=mock.Mock(side_effect=sum(both, ())))


def test_a_layer_takes_its_shortest_time_of_ten() -> None:
    cuts = script(BALANCE, "cuts")
    config = cuts.GPTConfig(block_size=4, width=8, layers=1, heads=2, tied=False)
    # Embeddings are fastest in the first of ten rounds, the block in the sixth, the
    # head in the last.
    rounds = [[1 + r, 3 + abs(r - 5), 5 + 9 - r] for r in range(10)]
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    clock = clock_of([float(x) for one in rounds for x in one])
    with mock.patch.object(cuts, "time", clock):
        found = cuts.layer_seconds(cuts.GPT(config), tokens[:, :-1], tokens[:, 1:])
    assert found == [1, 3, 5]


def test_an_embeddings_backward_pass_fills_all_rows() -> None:
    cuts, seconds, tokens = script(BALANCE, "cuts"), [], torch.zeros(1, 5).long()
    for rows in (256, 1 << 16):
        sizes = {"block_size": 4, "width": 64, "layers": 1, "heads": 2, "tied": False}
        model = cuts.GPT(cuts.GPTConfig(**sizes, vocabulary=rows))
        seconds.append(cuts.layer_seconds(model, tokens[:, :-1], tokens[:, 1:])[0])
    assert seconds[1] > 5 * seconds[0]  # of the same five tokens
    assert "looks up rows; only its backward pass touches all" in words_of(BALANCE)


def step_of_known_seconds() -> float:
    """Time steps of which rank 1's take twice as long as rank 0's."""
    cuts = script(BALANCE, "cuts")
    config = cuts.GPTConfig(block_size=4, width=8, layers=2, heads=2, tied=False)
    clock = clock_of([x * (1.0 + dist.get_rank()) for x in (1, 4, 3, 5)])
    stage = mock.Mock()
    with mock.patch.multiple(cuts, time=clock, Stage=stage):
        seconds = cuts.step_seconds(config, [1, 1], torch.zeros(2, 5), 1)
    assert [call.args[3] for call in stage().run.mock_calls] == [1] * 4
    return seconds


def test_a_step_takes_the_slower_rank_s_time_but_for_the_first(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(step_of_known_seconds) == [2 * 3.0] * 2


@pytest.mark.slow
def test_a_worse_cut_is_noticed(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(balanced_with, "first layers alone")
    assert [code for code, _ in ends] == [1, 1]


def test_best_cut_by_hand() -> None:
    cuts = script(BALANCE, "cuts")
    assert cuts.best_cut([1, 1, 1, 1, 4], 2) == [4, 1]
    assert cuts.best_cut([3, 1, 1, 3], 3) == [1, 2, 1]
    assert cuts.blocks_of([4, 1]) == [3, 0] and cuts.blocks_of([1, 2, 1]) == [0, 2, 0]
    assert len(list(cuts.all_cuts(32, 3))) == 31 * 30 // 2
    assert sorted(cuts.all_cuts(4, 3)) == [[1, 1, 2], [1, 2, 1], [2, 1, 1]]


# --- link/: what is sent. ----------


def without_a_norm(model: Any, step: Callable) -> Callable:
    """Let a step leave half of the gradient of a norm in a block."""

    def broken(tokens: Any) -> Any:
        loss = step(tokens)
        model.blocks[1].mlp_norm.weight.grad /= 2
        return loss

    return broken


OF_THE_STEP = {
    "half of a norm": without_a_norm,
    "no loss": lambda model, step: lambda tokens: 0 * step(tokens),
}


def three_ways_with(fault: str, samples: int = 8) -> tuple[Any, str]:
    """Run three_ways.py on a smaller GPT, with one of its parts broken.

    It crosses at 81 samples: 41,792 parameters by 16 tokens of width 32.
    """
    lesson, words = script(LINK, "three_ways"), [f"--samples={samples}"]
    sizes = {"block_size": 16, "width": 32, "layers": 2, "heads": 4, "tied": False}
    with contextlib.ExitStack() as stack:
        small = mock.patch.object(lesson, "CONFIG", lesson.GPTConfig(**sizes))
        stack.enter_context(small)
        if fault == "no sum":
            nothing = mock.patch.object(dist, "all_reduce", lambda *_, **__: None)
            stack.enter_context(nothing)
        if fault in OF_THE_STEP:
            build = lesson.WAYS["data"]
            broken = {"data": lambda model: OF_THE_STEP[fault](model, build(model))}
            stack.enter_context(mock.patch.dict(lesson.WAYS, broken))
        if fault == "half":
            right = lesson.expected_bytes
            half = mock.patch.object(lesson, "expected_bytes", lambda *a: right(*a) / 2)
            stack.enter_context(half)
        return run_here(LINK, "three_ways", *words)


def test_bytes_of_three_ways_and_where_they_cross(worker_pool: WorkerPool) -> None:
    sent = {}
    for samples in (8, 128):
        ends = worker_pool.run(three_ways_with, "", samples)
        assert [code for code, _ in ends] == [0, 0], ends
        found = re.findall(r"^(\w+) +\| a rank sends +([\d.]+) MB", ends[0][1], re.M)
        sent[samples] = {way: float(megabytes) for way, megabytes in found}
        # In fp32: all gradients once; four all-reduces of (B, T, D) in each of two
        # blocks; the activations between two stages.
        activations = 4 * samples * 16 * 32
        due = {"data": 4 * 41_792, "tensor": 4 * 2 * activations}
        due["pipeline"] = activations
        shown = {way: float(f"{nbytes / 1e6:.2f}") for way, nbytes in due.items()}
        assert sent[samples] == shown
    assert min(sent[8], key=sent[8].__getitem__) == "pipeline"
    assert min(sent[128], key=sent[128].__getitem__) == "data"


def buckets_of_ddp(is_frozen: bool = False) -> tuple[int, list[list[int]]]:
    """Take three steps by DDP; return the gradients' bytes, and its buckets'."""
    lesson = script(LINK, "three_ways")
    model, steps = lesson.GPT(lesson.CONFIG), []
    model.token_embedding.requires_grad_(not is_frozen)

    def note(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        steps[-1].append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, note)
    tokens = torch.zeros(2, lesson.CONFIG.block_size + 1, dtype=torch.int64)
    for _ in range(3):
        steps.append([])
        ddp(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return 4 * sum(gradient.numel() for gradient in gradients), steps


def test_ddp_sends_the_gradients_of_three_ways_in_two_messages(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(buckets_of_ddp)
    assert len(ends) == 2
    for nbytes, steps in ends:
        assert f"{nbytes / 1e6:.2f}" == "1.87"
        assert [len(buckets) for buckets in steps] == [1, 2, 2]
        assert [sum(buckets) for buckets in steps] == [nbytes] * 3
    matrix, lesson = 4 * 256 * 128, script(LINK, "three_ways")
    assert (lesson.CONFIG.vocabulary, lesson.CONFIG.width) == (256, 128)
    (trained, steps), other = worker_pool.run(buckets_of_ddp, True)
    assert other == (trained, steps) and trained == ends[0][0] - matrix
    assert [sum(buckets) for buckets in steps] == [trained] * 3
    assert "as much as the model has *trained* parameters" in words_of(LINK)
    source = Path(script(LINK, "ways").__file__).read_text()
    assert (
        "In one message. DDP sends two for this GPT, from its second step on." in source
    )


def bytes_of_a_pipeline(tied: bool) -> float:
    """Return what this rank sends in a step of eight samples."""
    ways = script(LINK, "ways")
    sizes = {"block_size": 16, "width": 32, "layers": 2, "heads": 4}
    step = ways.pipeline_parallel(ways.GPT(ways.GPTConfig(**sizes, tied=tied)))
    with script(LINK, "counted_sends").CountedSends() as sent:
        step(torch.zeros(8, 17, dtype=torch.int64))
    return sent.bytes


def errors_of_uneven_samples(name: str) -> tuple[float, float]:
    """Take a step of five samples; return how far loss and gradient are."""
    ways = script(LINK, "ways")
    torch.manual_seed(0)
    model = ways.GPT(ways.GPTConfig(block_size=16, width=32, layers=2, heads=4))
    alone, tokens = copy.deepcopy(model), torch.randint(256, (5, 17))
    loss = getattr(ways, name)(model)(tokens)
    dist.all_reduce(loss)
    due = alone(tokens[:, :-1], tokens[:, 1:])
    due.backward()
    off = zip(model.parameters(), alone.parameters(), strict=True)
    errors = [(p.grad - q.grad).abs().max().item() for p, q in off]  # type: ignore
    assert len(errors) > 10
    return abs(loss - due).item(), max(errors)


def test_ranks_with_unequal_parts_of_the_samples_get_the_mean_of_all(
    worker_pool: WorkerPool,
) -> None:
    (loss, gradient), _ = worker_pool.run(errors_of_uneven_samples, "data_parallel")
    assert loss < 1e-5 and gradient < 1e-5


def test_a_tied_pipeline_sends_its_matrix_too(worker_pool: WorkerPool) -> None:
    activations, matrix = 4 * 8 * 16 * 32, 4 * 256 * 32
    assert worker_pool.run(bytes_of_a_pipeline, False) == [activations] * 2
    assert worker_pool.run(bytes_of_a_pipeline, True) == [activations + matrix] * 2


def messages_of_a_pipeline() -> tuple[str, list[tuple[int, ...]]]:
    """Run three_ways.py with six samples; return the first line, and what is sent."""
    sent, isend = [], dist.isend

    def note(tensor: torch.Tensor, *to: Any, **named: Any) -> Any:
        sent.append(tuple(tensor.shape))
        return isend(tensor, *to, **named)

    with mock.patch.object(dist, "isend", note):
        code, said = three_ways_with("", samples=6)
    assert code == 0
    return said.split("\n")[0], sent


def test_pipeline_of_three_ways_sends_four_micro_batches(
    worker_pool: WorkerPool,
) -> None:
    (said, *_), (_, backward) = worker_pool.run(messages_of_a_pipeline)
    assert said == "41,792 parameters, 8 samples of 16 tokens"  # all equally large
    # Two steps: the first connects.
    assert backward == [(2, 16, 32)] * 2 * 4


@pytest.mark.parametrize("fault", ["no sum", "half", *OF_THE_STEP])
def test_three_ways_notice(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(three_ways_with, fault)
    assert [code for code, _ in ends] == [1, 1]
    assert "not so: 3 ways" in ends[0][1]


# --- exercises/. ----------


def check_order(order_of: Callable) -> tuple[int, str]:
    """Ask the checker; return its exit code and what it printed."""
    printed = io.StringIO()
    checker = script(EXERCISES, "check_stage_order")
    with (
        mock.patch.object(sys, "argv", ["stage_order.py"]),
        contextlib.redirect_stdout(printed),
    ):
        try:
            checker.check_stage_order(order_of)
        except SystemExit as end:
            return int(str(end.code)), printed.getvalue()
    return 0, printed.getvalue()


def test_answer_is_1f1b_s_order() -> None:
    code, text = check_order(stage_order.order_of)
    assert (code, text.splitlines()[-1][:20]) == (0, "check: 6 pipelines r")
    assert text.startswith("stage 0 | F0 F1 F2 F3 .  .  .  B0 F4")


def one_forward_too_many(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Run ahead by one more than needed."""
    return stage_order.order_of(stage, stages + 1, micro_batches)


def all_like_the_last(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Let no stage run ahead."""
    return stage_order.order_of(stages - 1, stages, micro_batches)


def backwards(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Run the last micro-batch's backward pass first."""
    calls = [f"F{i}" for i in range(micro_batches)]
    return calls + [f"B{i}" for i in reversed(range(micro_batches))]


def forgets_the_last(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Leave the last backward pass out."""
    return stage_order.order_of(stage, stages, micro_batches)[:-1]


def returns_a_tuple(stage: int, stages: int, micro_batches: int) -> tuple[str, ...]:
    """Return the right calls in something else."""
    return tuple(stage_order.order_of(stage, stages, micro_batches))


def waits_for_the_next(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Let stage 0 want its first gradient before the last stage has its input."""
    calls = stage_order.order_of(stages - 1, stages, micro_batches)
    late = stage_order.order_of(0, stages, micro_batches)
    return calls if stage == 0 else late


def one_backward_more(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Let stage 0 wait for one gradient more before each forward pass but the first."""
    calls = stage_order.order_of(stage, stages, micro_batches)
    for i in range(stages, micro_batches if stage == 0 else 0):
        at = calls.index(f"F{i}")
        calls[at : at + 2] = calls[at + 1], calls[at]
    return calls


def ahead_of_too_few(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Run ahead as if there were as many micro-batches as stages."""
    calls = stage_order.order_of(stage, stages, micro_batches)
    ahead = [calls.index(f"F{i}") for i in range(stages - 1 - stage)]
    assert len(ahead) == stages - 1 - stage
    return calls


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (ahead_of_too_few, "4 stages, 2 micro-batches: stage 0 ends with ValueError("),
        (None, "stage 0 has 6 in flight, where 4 are needed"),
        (one_forward_too_many, "stage 0 has 5 in flight, where 4 are needed"),
        (all_like_the_last, "4 stages, 6 micro-batches: 48 units of time, not 18"),
        (backwards, "messages arrive in the order 0, 1, 2"),
        (returns_a_tuple, "stage 0 returns a tuple, not a list"),
        (forgets_the_last, "stage 0 makes the calls B0 B1 B2 B3 B4, not B0"),
        (waits_for_the_next, "the stages wait for each other"),
        (one_backward_more, "22 units of time, not 18"),
    ],
)
def test_order_s_checker_says_what_is_wrong(answer: Any, hint: str) -> None:
    untouched = script(EXERCISES, "stage_order").order_of
    code, text = check_order(answer or untouched)
    assert code == 1 and hint in text.splitlines()[-1]


def scale_to(parameters: Iterable[nn.Parameter], norm: float, found: Any) -> None:
    """Clip without a clamp: make a small gradient larger."""
    gradients = [torch.as_tensor(parameter.grad) for parameter in parameters]
    assert len(gradients) == 2
    for gradient in gradients:
        gradient *= norm / found


def step_with_flaw(
    part: nn.Module, micro_batches: list, optimizer: torch.optim.Optimizer, flaw: str
) -> None:
    """Take the right step, but for one thing."""
    if flaw == "sum":
        many = [(x, y) for x, y in micro_batches]
        share = {len(x): sum(len(x) for x, _ in many) / len(x) for x, _ in many}
    elif flaw == "equal":
        samples = sum(len(x) for x, _ in micro_batches)
        share = {
            len(x): samples / len(micro_batches) / len(x) for x, _ in micro_batches
        }
    else:
        samples = sum(len(x) for x, _ in micro_batches)
        share = {
            len(x): samples / 10 if flaw == "ten" else 1.0 for x, _ in micro_batches
        }
    right = broken_pipeline.mse_loss
    norm = mock.patch.object(broken_pipeline.dist, "all_reduce", lambda *_: None)
    loss = mock.patch.object(
        broken_pipeline, "mse_loss", lambda y, to: right(y, to) * share[len(y)]
    )
    limit = mock.patch.object(broken_pipeline, "MAX_NORM", 1e9)
    always = mock.patch.object(nn.utils, "clip_grads_with_norm_", scale_to)
    still = mock.patch.object(optimizer, "step", lambda: None)
    kept = mock.patch.object(optimizer, "zero_grad", lambda: None)
    # Neither squared before the sum nor its root taken after it.
    added = mock.patch.multiple(torch.Tensor, square=lambda t: t, sqrt=lambda t: t)
    with contextlib.ExitStack() as stack:
        stack.enter_context(loss)
        patches = {"own": norm, "none": limit, "always": always, "still": still}
        patches |= {"kept": kept, "added": added}
        for name, patch in patches.items():
            if flaw == name:
                stack.enter_context(patch)
        broken_pipeline.train_step(part, micro_batches, optimizer)


def try_steps(flaws: list[str]) -> list[str]:
    """Try the answer, and the answer with flaws; the page tries the exercise."""
    checker = script(EXERCISES, "check_broken_pipeline")
    found = [checker.try_pipeline(broken_pipeline.train_step)]
    for flaw in flaws:
        step = functools.partial(step_with_flaw, flaw=flaw)
        found.append(checker.try_pipeline(step))
    return found


def test_two_of_three_steps_are_clipped() -> None:
    checker, clip = script(EXERCISES, "check_broken_pipeline"), nn.utils.clip_grad_norm_
    norms: list[Any] = []
    noted = lambda parameters, limit: norms.append(clip(parameters, limit))  # noqa: E731
    with mock.patch.object(nn.utils, "clip_grad_norm_", noted):
        checker.train_whole("part", "whole")
    assert [norm > checker.MAX_NORM for norm in norms] == [False, True, True]


def test_broken_pipeline_s_checker(worker_pool: WorkerPool) -> None:
    hints = {
        "sum": "each micro-batch's mean loss counts whole",
        "equal": "every micro-batch counts alike",
        "own": "this stage clips by the norm of its layers",
        "none": "nothing is clipped",
        "ten": "a step is taken as if every batch had 10 samples",
        "always": "a norm below the limit is scaled up to it",
        "added": "the stages' norms are added up: the squares do that",
        "kept": "the gradients of earlier steps are still there: who clears them?",
        "still": "its weights have not moved",
    }
    by_rank = worker_pool.run(try_steps, list(hints))
    assert [found[0] for found in by_rank] == ["", ""]
    assert len(by_rank[0]) == len(hints) + 1 == 10
    for number, hint in enumerate(hints.values(), start=1):
        assert all(hint in found[number] for found in by_rank), by_rank
