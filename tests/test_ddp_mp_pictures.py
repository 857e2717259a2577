"""The two pictures of chapter 02: who knows which half, and where the time goes."""

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from launch import ROOT, clean_environment
from scripts import load_chapter
from worker_pool import WorkerPool

MODULES = load_chapter("02_ddp_mp")
WEST_EAST, DRAW_WEST_EAST = MODULES["west_and_east"], MODULES["draw_west_east"]
TIMELINE, TRACING = MODULES["timeline"], MODULES["tracing"]
DRAW_TIMELINE, TERRAIN = MODULES["draw_timeline"], MODULES["terrain"]


@pytest.fixture(autouse=True)
def interrupt_handler_stays() -> Iterator[None]:
    """Put back pytest's handler of Ctrl-C, which each script's `main` replaces."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


# --- What runs on each rank. ----------


def two_models(steps: int) -> tuple[list[list[float]], torch.Tensor]:
    """Train on one's half alone, then under DDP; return the errors and last weights."""
    terrain = TERRAIN.load_terrain()
    data, held_out = TERRAIN.sample_points(terrain, len(terrain.places) - 4096)
    off, model = [], nn.Module()
    for is_together in (False, True):
        torch.manual_seed(dist.get_rank())
        model = TERRAIN.TerrainModel(waves=128, width=64, scale=14.0)
        wrapped = DistributedDataParallel(model) if is_together else model
        WEST_EAST.teach(wrapped, data, dist.get_rank(), steps)
        errors = WEST_EAST.off_by_half(model, held_out)
        off.append([terrain.std * error for error in errors])
    return off, nn.utils.parameters_to_vector(model.parameters()).detach()


def traced_steps(width: int) -> dict:
    """Trace three steps of each way, with four buckets."""
    os.environ["KINETO_LOG_LEVEL"] = "99"
    half_of_two_layers = width * width * 4 / 2**20
    return TIMELINE.measure_ways(width, 16, 2 * half_of_two_layers, rounds=3)


# --- Who knows which half. ----------


def test_alone_a_rank_is_lost_where_it_saw_nothing(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run(two_models, 60, world_size=2, timeout=120)
    (alone_0, ddp_0), (alone_1, ddp_1) = ranks[0][0], ranks[1][0]
    # About 160 m would be off who draws the mean height everywhere.
    assert max(alone_0[0], alone_1[1]) < 40
    assert min(alone_0[1], alone_1[0]) > 120
    assert max(ddp_0) < 40
    assert ddp_0 == ddp_1
    assert torch.equal(ranks[0][1], ranks[1][1])


def test_errors_are_counted_in_the_right_half() -> None:
    places = torch.tensor([[-1.0, 0.3], [-0.01, -0.5], [0.0, 0.1], [0.7, 0.2]])
    assert WEST_EAST.is_in_half(places, 0).tolist() == [True, True, False, False]
    assert WEST_EAST.is_in_half(places, 1).tolist() == [False, False, True, True]
    data = TensorDataset(places, torch.tensor([[3.0], [4.0], [0.0], [2.0]]))
    off = WEST_EAST.off_by_half(lambda places: 0 * places[:, :1], data)
    assert off == pytest.approx([12.5**0.5, 2**0.5])


def test_teach_uses_no_point_of_the_other_half() -> None:
    class Recorder(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(input)
            return super().forward(input)

    data, _ = TERRAIN.sample_points(TERRAIN.load_terrain(), 5000)
    sides = []
    for rank in (0, 1):
        seen: list[torch.Tensor] = []
        WEST_EAST.teach(Recorder(2, 1), data, rank, 2)
        places = torch.cat(seen)
        assert len(places) == 2 * WEST_EAST.BATCH_SIZE
        sides.append((places[:, 0].min().item(), places[:, 0].max().item()))
    assert sides[0][1] < 0 <= sides[1][0]


ZEROS, ONES = torch.zeros(5), torch.ones(5)
GOOD = [([10.0, 200.0], [11.0, 11.0], ZEROS), ([200.0, 10.0], [11.0, 11.0], ZEROS)]


@pytest.mark.parametrize(
    "found",
    [
        [GOOD[0], ([200.0, 10.0], [11.0, 11.0], ONES)],
        [GOOD[0], ([200.0, 10.0], [11.0, 11.1], ZEROS)],
        [([10.0, 30.0], [11.0, 11.0], ZEROS), GOOD[1]],
        [GOOD[0], ([30.0, 10.0], [11.0, 11.0], ZEROS)],
        [(row[0], [11.0, 90.0], ZEROS) for row in GOOD],
        [(row[0], [90.0, 11.0], ZEROS) for row in GOOD],
        [(row[0], [float("nan"), 11.0], ZEROS) for row in GOOD],
    ],
    ids=["weights", "errors", "no loss east", "no loss west", "east", "west", "nan"],
)
def test_check_of_the_halves_can_fail(
    found: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    WEST_EAST.show_and_check(GOOD, [150.0, 160.0])
    with pytest.raises(RuntimeError, match="do not know what they should"):
        WEST_EAST.show_and_check(found, [150.0, 160.0])


def test_picture_shows_the_errors_and_cuts_heights_off(tmp_path: Path) -> None:
    terrain = TERRAIN.load_terrain()
    too_high = terrain.heights + 1e6 * (terrain.places[:, :1] > 0)
    maps = torch.stack([terrain.heights, too_high, terrain.heights])
    errors = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    figure = DRAW_WEST_EAST.draw_four(terrain, maps, errors)
    pictures = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:4]]
    assert np.array_equal(pictures[0], pictures[1])
    assert np.array_equal(pictures[0], pictures[3])
    # Far from the edge, where nothing slopes: the summits' colour, lit as flat land.
    assert np.ptp(pictures[2][50:-50, 250:-50, :3], axis=(0, 1)).max() < 0.01
    told = [[text.get_text() for text in axes.texts] for axes in figure.axes[:4]]
    assert told[0] == ["236 m", "1076 m"]
    assert told[1] == ["its half", "off by 1 m", "never seen", "off by 2 m"]
    assert told[2] == ["never seen", "off by 3 m", "its half", "off by 4 m"]
    assert told[3] == ["rank 0's half", "off by 5 m", "rank 1's half", "off by 6 m"]
    DRAW_WEST_EAST.save_small(figure, tmp_path / "map.png")
    plt.close(figure)
    assert Image.open(tmp_path / "map.png").size == (1500, 549)


def test_heights_differ_in_lightness_evenly() -> None:
    colours = DRAW_WEST_EAST.EARTH(np.linspace(0, 1, 33))[:, :3]
    linear = np.where(
        colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4
    )
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    steps = np.diff(116 * np.cbrt(luminance) - 16)  # the L of CIELAB
    assert len(steps) == 32
    assert steps.min() / steps.mean() > 0.75 and steps.max() / steps.mean() < 1.25


# --- Where the time goes. ----------


def test_all_ways_are_traced_as_they_are(worker_pool: WorkerPool) -> None:
    measured, other = worker_pool.run(traced_steps, 256, world_size=2, timeout=120)
    assert measured == other
    assert TIMELINE.find_faults(measured) == []
    counts = {
        name: {(step["calls"], step["early"]) for rank in ranks for step in rank}
        for name, ranks in measured["traces"].items()
    }
    assert counts == {
        "no exchange": {(0, 0)},
        "naive": {(16, 0)},
        "flat": {(1, 0)},
        "overlapped": {(4, 3)},
        "DDP": {(4, 3)},
    }
    # gloo has sent what was called for, during the step. When it has sent, the rank
    # goes on; the thread that sent may write that down a little later.
    checked = 0
    for ranks in measured["traces"].values():
        for step in (s for ranks in TRACING.whole_steps(ranks) for s in ranks):
            starts = [start for start, _ in step["sent"]]
            late = [t for t in starts if t > step["backward"][1]]
            assert len(starts) == step["calls"]
            assert len(late) >= step["calls"] - step["early"]
            assert step["backward"][0] < min(starts, default=step["backward"][1])
            assert max(starts, default=0) < step["optimizer"][0]
            checked += 1
    assert checked >= 5 * 2
    assert max(measured["errors"]["overlapped"]) < 1e-6
    assert min(measured["errors"]["no exchange"]) > 1e-5
    # What the check is for: each of these would be another lesson.
    wrong = copy.deepcopy(measured)
    wrong["errors"]["flat"][1] = 1e-3
    wrong["errors"]["no exchange"] = [0.0, 0.0]
    wrong["traces"]["naive"][0][1]["early"] = 1
    wrong["traces"]["DDP"][1][0]["early"] = 0
    late = wrong["traces"]["overlapped"][0][0]
    late["sent"] = [(a + 10**9, b + 10**9) for a, b in late["sent"]]
    faults = TIMELINE.find_faults(wrong)
    assert [fault.split(":")[0] for fault in faults] == [
        *("no exchange", "naive", "flat", "overlapped", "DDP")
    ]
    # The version made by hand is as fast as DDP; the margin is wide, for noise.
    quickest = {name: min(times) for name, times in measured["seconds"].items()}
    assert quickest["overlapped"] < 4 * quickest["DDP"]


def one_step(shift: int = 0) -> dict:
    """Make up a summary whose times are all `shift` later."""
    spans = {
        "part: forward": [(0, 10)],
        "part: backward": [(10, 95)],
        "part: finish": [(95, 120)],
        "part: optimizer": [(120, 130)],
        "AddmmBackward0": [(12, 30), (40, 60)],
        "TBackward0": [(60, 70)],
        "autograd::engine::evaluate_function: TBackward0": [(60, 90)],
        "c10d::allreduce_": [(35, 36), (69, 71), (72, 73)],
        "gloo:all_reduce": [(37, 50), (71, 110), (74, 80)],
    }
    moved = {n: [(a + shift, b + shift) for a, b in s] for n, s in spans.items()}
    return TRACING.summarise(moved)


def test_backward_is_over_with_the_last_gradient() -> None:
    step = one_step()
    assert step["backward"] == (10, 70)
    assert step["finish"] == (70, 120)
    assert (step["calls"], step["early"]) == (3, 2)


def test_clocks_that_disagree_are_noticed() -> None:
    millisecond = 1_000_000
    here, near, far = one_step(), one_step(40), one_step(3 * millisecond)
    assert TRACING.is_possible([here, near])
    assert not TRACING.is_possible([here, far])
    assert not TRACING.is_possible([far, here])
    fewer = {**here, "sent": here["sent"][:2]}
    assert not TRACING.is_possible([here, fewer])


def test_step_drawn_is_the_one_of_median_length() -> None:
    slow, quick, middle = one_step(), one_step(), one_step()
    slow["optimizer"], quick["optimizer"] = (120, 900), (120, 125)
    first = TRACING.middle_step([(slow, slow), (quick, quick), (middle, one_step(20))])
    assert first == TRACING.middle_step([(middle, one_step(20))])
    later = one_step(20_000_000), one_step(25_000_000)
    first = TRACING.middle_step([later])
    assert [rank["forward"][0] for rank in first] == [0.0, 5.0]


def test_step_with_a_gap_is_left_out() -> None:
    whole, gap = one_step(), one_step()
    del gap["sent"][1]
    ranks = [[whole, whole, gap], [whole, gap, whole]]
    assert TRACING.whole_steps(ranks) == [(whole, whole)]


def test_spans_that_overlap_get_lanes_of_their_own() -> None:
    spans = [[0.0, 5.0], [1.0, 2.0], [3.0, 9.0], [5.0, 6.0], [5.5, 7.0]]
    assert DRAW_TIMELINE.lanes_of(spans) == [0, 1, 1, 0, 2]


def test_numbers_behind_the_picture_show_what_it_says() -> None:
    measured = json.loads((ROOT / "assets" / "02_timeline.json").read_text())
    assert list(measured["steps"]) == list(measured["ms"]) == list(TIMELINE.WAYS)
    early = {
        name: min(DRAW_TIMELINE.count_overlaps(measured["steps"][name]))
        for name in DRAW_TIMELINE.TITLES
    }
    assert early["naive"] == early["flat"] == 0 < early["overlapped"]
    assert early["DDP"] > 0
    # What the chapter claims of the measured run.
    assert measured["ms"]["DDP"] / measured["ms"]["overlapped"] >= 0.95


# --- What cannot work. ----------


@pytest.mark.parametrize(
    ("module", "words", "complaint"),
    [
        (WEST_EAST, ["--steps=1"], r"--steps must be 50 to 100000, not 1"),
        (WEST_EAST, ["--stops=1"], r"unrecognized arguments: --stops=1"),
        (WEST_EAST, [], r"start it with python, not torchrun.*"),
        (DRAW_WEST_EAST, ["--out=no"], r"argument --out: there is no folder no"),
        (TIMELINE, ["--bucket-mb=20"], r"32\.0 MB of gradients: .*"),
        (TIMELINE, ["--width=0"], r"argument --width: '0' is not a whole number.*"),
        (TIMELINE, ["--json=no/t.json"], r"cannot write into the folder no"),
        (TIMELINE, [], r"start it with python, not torchrun.*"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    module: ModuleType,
    words: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(module.__file__), *words])
    if not words:
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as exit_info:
        module.main()
    line = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert re.fullmatch(rf"{module.__name__}\.py: {complaint}\n", line)


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (["west_and_east.py", "--steps=100000"], signal.SIGINT),
        pytest.param(
            ["timeline.py", "--rounds=1000"], signal.SIGKILL, marks=pytest.mark.slow
        ),
    ],
)
def test_no_rank_outlives_its_script(command: list[str], end: signal.Signals) -> None:
    script, option = command
    process = subprocess.Popen(
        [sys.executable, ROOT / "02_ddp_mp" / script, option],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment(PYTHONUNBUFFERED="1"),
        text=True,
        start_new_session=True,
        # What a script starts in the background ignores Ctrl-C; here it must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    everyone: list[psutil.Process] = []
    try:
        # The first line says that both ranks have come.
        assert process.stdout is not None
        assert re.match("device: cpu|2 ranks, 8 layers", process.stdout.readline())
        everyone = psutil.Process(process.pid).children(recursive=True)
        assert len(everyone) >= 2
        if end == signal.SIGINT:
            os.killpg(process.pid, end)  # as a terminal does: to all of them
        else:
            process.kill()
        rest, _ = process.communicate(timeout=60)  # until the last has closed stdout
        assert process.returncode == -end
        assert psutil.wait_procs(everyone, timeout=10)[1] == []
        assert rest == ""
    finally:
        for one in [process, *everyone]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
