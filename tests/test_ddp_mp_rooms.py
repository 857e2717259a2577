"""Chapter 02: both halves of the map, the timeline, mp.spawn, and its pictures."""

import argparse
import contextlib
import copy
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.cbook import get_sample_data
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from launch import ROOT, clean_environment, python
from lessons import in_the_pool
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = ROOT / "02_ddp_mp"
EXERCISES = CHAPTER / "exercises"
MODULES, ASSETS = load_chapter("02_ddp_mp"), load_chapter("assets")
WEST_EAST, TERRAIN = MODULES["west_and_east"], MODULES["terrain"]
TIMELINE_ROOM = load_chapter("02_ddp_mp/timeline")
TIMELINE, TRACING, WAYS = (
    TIMELINE_ROOM[name] for name in ("timeline", "tracing", "ways")
)
DRAW_TIMELINE, DRAW_WEST_EAST = ASSETS["draw_timeline"], ASSETS["draw_west_east"]


# --- Who sees which half. ----------


def learn_halves(steps: int) -> tuple[str, torch.Tensor]:
    """Be a rank of west_and_east.py; return what it printed and the maps it drew."""
    maps = torch.zeros(3, *TERRAIN.load_terrain().heights.shape)
    output = io.StringIO()

    def small_model(**_: Any) -> nn.Module:
        return TERRAIN.TerrainModel(waves=128, width=64, scale=14.0)

    with (
        in_the_pool(WEST_EAST),
        mock.patch.object(WEST_EAST, "TerrainModel", small_model),
        contextlib.redirect_stdout(output),
    ):
        WEST_EAST.main(steps, maps)
    return output.getvalue(), maps


@pytest.mark.slow
def test_alone_a_rank_is_lost_where_it_saw_nothing(worker_pool: WorkerPool) -> None:
    (printed, maps), (silence, of_rank_1) = worker_pool.run(
        learn_halves, 80, world_size=2
    )
    table = {
        name.strip(): [float(west), float(east)]
        for name, west, east in re.findall(
            r"^(.{20}) +([\d.]+) +([\d.]+)$", printed, re.M
        )
    }
    names = ["rank 0 alone", "rank 1 alone", "rank 0, DDP", "rank 1, DDP"]
    assert list(table) == [*names, "predicting the mean"] and silence == ""
    alone_0, alone_1, ddp_0, ddp_1, baseline = table.values()
    assert max(alone_0[0], alone_1[1]) < 40
    assert min(alone_0[1], alone_1[0]) > 120 < min(baseline)
    assert max(ddp_0) < 40 and ddp_0 == ddp_1
    assert "check: unseen half > 4 x seen half alone, < 1.5 x under DDP; " in printed
    # One model, so both ranks draw the same map under DDP, and neither another's alone.
    assert torch.equal(maps[2], of_rank_1[2]) and maps[2].std() > 0.5
    assert not maps[1].any() and not of_rank_1[0].any()
    # What the picture says below the maps is what the script says.
    both = torch.stack([maps[0], of_rank_1[1], maps[2]])
    errors = DRAW_WEST_EAST.errors_of(both, TERRAIN.load_terrain(), TERRAIN)
    assert np.allclose(errors, [alone_0, alone_1, ddp_0], atol=0.06)


def test_half_of_the_points_is_west_or_east() -> None:
    places = torch.tensor([[-1.0, 0.3], [-0.01, -0.5], [0.0, 0.1], [0.7, 0.2]])
    data = TensorDataset(places, torch.tensor([[3.0], [4.0], [0.0], [2.0]]))
    west, east = (WEST_EAST.half_of(data, rank).tensors for rank in (0, 1))
    assert torch.equal(west[0], places[:2]) and torch.equal(east[0], places[2:])
    assert west[1].flatten().tolist() == [3.0, 4.0]
    assert east[1].flatten().tolist() == [0.0, 2.0]


def points_of(data: TensorDataset) -> set[tuple[float, ...]]:
    """Return places with their heights, (x, y, height)."""
    return set(map(tuple, torch.cat(data.tensors, dim=1).tolist()))


def test_map_lies_as_it_should_and_held_out_points_are_unseen() -> None:
    terrain = TERRAIN.load_terrain()
    path = get_sample_data("jacksboro_fault_dem.npz", asfileobj=False)
    metres = np.load(path)["elevation"]  # its first row is the north, see the picture
    assert terrain.shape == metres.shape == (344, 403)
    drawn = (terrain.heights * terrain.std + terrain.mean).view(344, 403)
    assert np.allclose(drawn, metres, atol=1e-3)
    x, y = terrain.places.view(344, 403, 2).unbind(-1)
    assert (x[0, 0], x[0, -1]) == (-1, 1) and torch.equal(x[0], x[-1])
    assert y[0, 0] == -y[-1, 0] == pytest.approx(344 / 403)
    assert torch.equal(y[:, 0], y[:, -1])
    everything = points_of(TensorDataset(terrain.places, terrain.heights))
    for count in (192, 4096, len(terrain.places) - 4096):
        seen, held_out = map(points_of, TERRAIN.sample_points(terrain, count))
        assert (len(seen), len(held_out)) == (count, 4096)
        assert not seen & held_out and seen | held_out <= everything
    # A model of one height everywhere, two standard deviations above the mean.
    flat, (all_cells, _) = nn.Linear(2, 1), TERRAIN.sample_points(terrain, 138_632)
    nn.init.zeros_(flat.weight)
    nn.init.constant_(flat.bias, 2.0)
    error = TERRAIN.rmse_in_metres(flat, all_cells, terrain)
    assert error == pytest.approx(5**0.5 * metres.std(), rel=1e-4)


def main_with_fakes(rank: int, **fakes: Any) -> mock.Mock:
    """Run west_and_east.main in this process, without training; return its `check`."""
    nothing = mock.Mock()
    names = ("fit", "check", "gather", "same_on_all_ranks", "say", "leave")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(dist, "get_rank", return_value=rank))
        patch(mock.patch.object(WEST_EAST, "DistributedDataParallel", lambda m: m))
        for name in {*names, *fakes}:
            patch(mock.patch.object(WEST_EAST, name, fakes.get(name, nothing)))
        patch(mock.patch.object(WEST_EAST, "join", return_value=torch.device("cpu")))
        WEST_EAST.main(50)
    return fakes.get("check", nothing)


GOOD = [([10.0, 200.0], [11.0, 11.0]), ([200.0, 10.0], [11.0, 11.0])]


@pytest.mark.parametrize(
    ("found", "is_same", "is_right"),
    [
        (GOOD, True, True),
        (GOOD, False, False),
        ([GOOD[0], ([200.0, 10.0], [11.0, 11.1])], True, False),
        ([([10.0, 30.0], [11.0, 11.0]), GOOD[1]], True, False),
        ([GOOD[0], ([30.0, 10.0], [11.0, 11.0])], True, False),
        ([(row[0], [11.0, 90.0]) for row in GOOD], True, False),
        ([(row[0], [90.0, 11.0]) for row in GOOD], True, False),
        ([(row[0], [float("nan"), 11.0]) for row in GOOD], True, False),
    ],
    ids=[
        *("good", "weights", "errors", "no loss east", "no loss west"),
        *("east", "west", "nan"),
    ],
)
def test_check_of_the_halves_can_fail(
    found: list, is_same: bool, is_right: bool
) -> None:
    check = main_with_fakes(
        1,
        gather=mock.Mock(return_value=found),
        same_on_all_ranks=mock.Mock(return_value=is_same),
        check=mock.Mock(),
    )
    assert [bool(call.args[0]) for call in check.call_args_list] == [is_right]


def test_no_rank_trains_on_a_point_of_the_other_half() -> None:
    class Recorder(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(input)
            return super().forward(input)

    sides = []
    for rank in (0, 1):
        fit, say, rmse = mock.Mock(), mock.Mock(), mock.Mock(return_value=1.0)
        good = mock.Mock(return_value=GOOD)
        main_with_fakes(rank, fit=fit, gather=good, say=say, rmse_in_metres=rmse)
        # Alone and under DDP: the same points, first weights and batches.
        (alone, data, *rest), (together, same_data, *same_rest) = (
            call.args for call in fit.call_args_list
        )
        assert rest == same_rest == [rank, 50]
        assert all(map(torch.equal, data.tensors, same_data.tensors))
        assert all(map(torch.equal, alone.parameters(), together.parameters()))
        assert 60_000 < len(data) < 75_000
        # What the models are measured on, west and east, has not been trained on.
        halves = [call.args[1] for call in rmse.call_args_list]
        assert len(halves) == 4 and sum(map(len, halves[:2])) == 4096
        assert not any(points_of(half) & points_of(data) for half in halves)
        metres = [half.tensors[1] * TERRAIN.load_terrain().std for half in halves[:2]]
        flat = [one.square().mean().sqrt().item() for one in metres]
        row = f"predicting the mean {flat[0]:8.1f}{flat[1]:8.1f}"
        assert say.call_args_list[-1] == mock.call(row)
        seen: list[torch.Tensor] = []
        WEST_EAST.fit(Recorder(2, 1), data, rank, 2)
        places = torch.cat(seen)
        assert len(places) == 2 * WEST_EAST.BATCH_SIZE
        sides.append((places[:, 0].min().item(), places[:, 0].max().item()))
        assert data.tensors[0][:, 0].min() <= places[:, 0].min()
        assert data.tensors[0][:, 0].max() >= places[:, 0].max()
    assert sides[0][1] < 0 <= sides[1][0]


def test_picture_shows_the_errors_and_cuts_heights_off(tmp_path: Path) -> None:
    terrain = TERRAIN.load_terrain()
    too_high = terrain.heights + 1e6 * (terrain.places[:, :1] > 0)
    maps = torch.stack([terrain.heights, too_high, terrain.heights])
    errors = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    figure = DRAW_WEST_EAST.draw_four(terrain, maps, errors)
    pictures = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:4]]
    assert np.array_equal(pictures[0], pictures[1])
    assert np.array_equal(pictures[0], pictures[3])
    # Far from the edge, where nothing slopes: the summits' colour, lit as flat land.
    assert np.ptp(pictures[2][50:-50, 250:-50, :3], axis=(0, 1)).max() < 0.01
    told = [[text.get_text() for text in axes.texts] for axes in figure.axes[:4]]
    assert told[0] == ["236 m", "1076 m"]
    assert told[1] == ["seen half", "RMSE 1 m", "unseen half", "RMSE 2 m"]
    assert told[2] == ["unseen half", "RMSE 3 m", "seen half", "RMSE 4 m"]
    assert told[3] == ["seen by rank 0", "RMSE 5 m", "seen by rank 1", "RMSE 6 m"]
    DRAW_WEST_EAST.save_small(figure, tmp_path / "map.png")
    plt.close(figure)
    assert Image.open(tmp_path / "map.png").size == (1500, 549)


def test_errors_below_the_maps_are_those_of_the_halves() -> None:
    terrain = TERRAIN.load_terrain()
    is_east = (terrain.places[:, :1] >= 0).float()
    maps = torch.stack([terrain.heights, terrain.heights + is_east])
    exact, one_off_in_the_east = DRAW_WEST_EAST.errors_of(maps, terrain, TERRAIN)
    assert exact == [0.0, 0.0]
    assert one_off_in_the_east == pytest.approx([0.0, terrain.std])


def test_heights_differ_in_lightness_evenly() -> None:
    colours = DRAW_WEST_EAST.EARTH(np.linspace(0, 1, 33))[:, :3]
    linear = np.where(
        colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4
    )
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    steps = np.diff(116 * np.cbrt(luminance) - 16)  # the L of CIELAB
    assert len(steps) == 32
    assert steps.min() / steps.mean() > 0.75 and steps.max() / steps.mean() < 1.25


# --- timeline/: where the time goes. ----------


def traced_steps(width: int) -> dict:
    """Trace three steps of each way, with four buckets of two layers each."""
    two_layers = 2 * width * width * 4 / 2**20
    options = argparse.Namespace(
        width=width, batch_size=16, bucket_mb=two_layers, rounds=3
    )
    return TIMELINE.measure_ways(options)


def traced_once(width: int, bucket_mb: float) -> dict:
    """Trace a step of each way."""
    options = argparse.Namespace(
        width=width, batch_size=16, bucket_mb=bucket_mb, rounds=1
    )
    return TIMELINE.measure_ways(options)


def faults_of(measured: dict) -> list[str]:
    """Return what the script would find wrong with all ways."""
    return [
        fault for way in measured for fault in WAYS.find_faults(way, **measured[way])
    ]


def known_steps() -> dict[str, dict]:
    """Measure ways whose steps take a second on rank 0, and two on rank 1."""
    clock, names = [0.0], ["one", "other"]

    def take_step(*_: object) -> None:
        clock[0] += 1.0 + dist.get_rank()

    options = argparse.Namespace(width=4, batch_size=2, bucket_mb=1.0, rounds=2)
    with mock.patch.multiple(
        TIMELINE,
        take_step=take_step,
        time=mock.Mock(perf_counter=lambda: clock[0]),
        make_models=lambda *_: (None, dict.fromkeys(names)),
        gradient_errors=lambda *_: dict.fromkeys(names, float(dist.get_rank())),
        trace=lambda *_: None,
        summarise=lambda _: dist.get_rank(),
    ):
        return TIMELINE.measure_ways(options)


def test_a_step_takes_as_long_as_on_the_slower_rank(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(known_steps)
    way = {"errors": [0, 1], "seconds": [2, 2], "traces": [[0, 0], [1, 1]]}
    assert found == [{"one": way, "other": way}] * 2


@pytest.mark.slow
def test_all_ways_are_traced_as_they_are(worker_pool: WorkerPool) -> None:
    measured, other = worker_pool.run(traced_steps, 256, world_size=2)
    assert measured == other
    assert faults_of(measured) == []
    counts = {
        way: {
            (step["calls"], step["early"]) for rank in of_way["traces"] for step in rank
        }
        for way, of_way in measured.items()
    }
    assert counts == {
        "no synchronisation": {(0, 0)},
        "naive": {(16, 0)},
        "flat": {(1, 0)},
        "bucketed": {(4, 3)},
        "DDP": {(4, 3)},
    }
    # gloo carries out what was called for, during the step. When it is done, the rank
    # goes on; gloo's thread may write that down a little later.
    checked = 0
    for of_way in measured.values():
        steps = TRACING.whole_steps(of_way["traces"])
        for step in (one for both in steps for one in both):
            starts = [start for start, _ in step["all_reduces"]]
            late = [start for start in starts if start > step["backward"][1]]
            assert len(starts) == step["calls"]
            assert len(late) >= step["calls"] - step["early"]
            assert step["backward"][0] < min(starts, default=step["backward"][1])
            assert max(starts, default=0) < step["optimizer"][0]
            checked += 1
    assert checked >= 5 * 2
    assert max(measured["bucketed"]["errors"]) < 1e-6
    assert min(measured["no synchronisation"]["errors"]) > 1e-5
    # What the check is for: each of these would be another lesson.
    wrong = copy.deepcopy(measured)
    wrong["no synchronisation"]["errors"] = [0.0, 0.0]
    wrong["naive"]["traces"][0][1]["early"] = 1
    wrong["flat"]["errors"][1] = float("nan")
    late = wrong["bucketed"]["traces"][0][0]
    late["all_reduces"] = [(a + 10**9, b + 10**9) for a, b in late["all_reduces"]]
    for steps in wrong["DDP"]["traces"]:  # one bucket for everything
        one = steps[0]["all_reduces"][:1]
        steps[0] |= {"calls": 1, "early": 0, "all_reduces": one}
    assert [fault.split(":")[0] for fault in faults_of(wrong)] == [
        *("no synchronisation", "naive", "flat", "bucketed", "DDP")
    ]
    # The version made by hand is as fast as DDP; the margin is wide, for noise.
    quickest = {way: min(of_way["seconds"]) for way, of_way in measured.items()}
    assert quickest["bucketed"] < 4 * quickest["DDP"]


def traced_with_first_layers_first() -> dict:
    """Trace a step with the buckets of an exercise: those of the first layers first."""
    bucketed = TIMELINE_ROOM["bucketed"]
    with mock.patch.object(bucketed, "reversed", list, create=True):
        return traced_steps(64)


def test_buckets_of_the_first_layers_first_do_not_overlap(
    worker_pool: WorkerPool,
) -> None:
    ranks = worker_pool.run(traced_with_first_layers_first)
    fault = "bucketed: 0 of 5 all-reduces started during backward"
    assert [faults_of(measured) for measured in ranks] == [[fault]] * 2
    page = " ".join((CHAPTER / "README.md").read_text().split())
    assert "no all-reduce starts before backward is over" in page
    assert f"it says `{fault}`, and its check fails" in page


@pytest.mark.parametrize(("width", "bucket_mb"), [(256, 1.0), (256, 0.0625)])
def test_counts_that_the_page_promises(
    worker_pool: WorkerPool, width: int, bucket_mb: float
) -> None:
    # A sixteenth of the page's sizes: 16 MB makes two buckets, 1 MB one of each layer.
    measured = worker_pool.run(traced_once, width, bucket_mb)[0]
    counts = {
        (step["calls"], step["early"]) for step in measured["bucketed"]["traces"][0]
    }
    assert counts == {(2, 1) if bucket_mb == 1.0 else (8, 7)}


@pytest.mark.parametrize("wrong", ["", "flat", "bucketed", "flat, bucketed"])
def test_timeline_ends_on_what_was_measured(wrong: str, tmp_path: Path) -> None:
    step = {"calls": 4, "early": 3, "all_reduces": [(40, 60)] * 4}
    step |= {"forward": (0, 10), "backward": (10, 70)}
    step |= {"finish": (70, 90), "optimizer": (90, 100)}
    quiet = step | {"calls": 0, "early": 0, "all_reduces": []}
    late = step | {"early": 0}
    of_ways = {
        "no synchronisation": (0.5, 0.020, quiet),
        "naive": (1e-7, 0.050, late),
        "flat": (1e-2 if "flat" in wrong else 1e-7, 0.060, late),
        "bucketed": (2e-7, 0.030, late if "bucketed" in wrong else step),
        "DDP": (1e-7, 0.030, step),
    }
    measured = {
        way: {"errors": [error] * 2, "seconds": [took] * 3, "traces": [[one], [one]]}
        for way, (error, took, one) in of_ways.items()
    }
    path, said, check = tmp_path / "numbers.json", mock.Mock(), mock.Mock()
    check.side_effect = None if not wrong else SystemExit(1)
    options = argparse.Namespace(width=8, json=path)
    with (
        in_the_pool(TIMELINE),
        mock.patch.object(TIMELINE, "measure_ways", return_value=measured),
        mock.patch.object(TIMELINE, "say", said),
        mock.patch.object(TIMELINE, "check", check),
        mock.patch.object(dist, "get_rank", return_value=0),
        pytest.raises(SystemExit) if wrong else contextlib.nullcontext(),
    ):
        TIMELINE.main(options)
    rows = [call.args[0].split() for call in said.call_args_list]
    assert rows[2] == ["no", "synchronisation", "20.0", "1.50", "0", "0"]
    early = "0" if "bucketed" in wrong else "3"
    assert rows[5] == ["bucketed", "30.0", "1.00", "4", early]
    claim = "4 ways' gradients up to 2e-07 from one process's (limit 1e-05)"
    if wrong:  # the claim that is not so names the way, and nothing that is right
        claim = f"{wrong} as described"
    assert check.call_args.args == (not wrong, claim)
    faults = {
        "flat": "gradients 1e-02 from one process's",
        "bucketed": "0 of 4 all-reduces started during backward",
    }
    assert [" ".join(row) for row in rows[7:]] == [
        f"not as described: {way}: {fault}"
        for way, fault in faults.items()
        if way in wrong
    ]
    if not wrong:
        assert set(json.loads(path.read_text())["steps"]) == set(measured)


class WrongLater(nn.Module):
    """Doubles what comes out from the second forward pass on."""

    def __init__(self, module: nn.Module) -> None:
        """Wrap a module that is right."""
        super().__init__()
        self.module, self.passes = module, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (B, W) to (B, W)."""
        self.passes += 1
        return self.module(inputs) * min(self.passes, 2)


def errors_of_two_passes() -> dict[str, float]:
    """Compare a replica that is right, and one that is right once, on one rank."""
    plain, both = nn.Linear(2, 2), torch.ones(1, 3, 2)
    replicas = [copy.deepcopy(plain) for _ in range(2)]
    models = {"right": replicas[0], "wrong later": WrongLater(replicas[1])}
    return TIMELINE_ROOM["ways"].gradient_errors(plain, models, both)


def test_gradients_of_the_second_backward_are_compared_too(
    worker_pool: WorkerPool,
) -> None:
    # DDP has other buckets from then on. Twice the output is four times the gradient.
    (found,) = worker_pool.run(errors_of_two_passes, world_size=1)
    assert found == {"right": 0.0, "wrong later": pytest.approx(3.0)}


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


def test_what_the_profiler_writes_is_in_microseconds(tmp_path: Path) -> None:
    # The Trace Event Format has `ts` and `dur` in microseconds; a base is PyTorch's.
    events = [
        {"ph": "X", "name": "a", "ts": 2.5, "dur": 1.25},
        {"ph": "i", "name": "b"},
    ]
    written = {"baseTimeNanoseconds": 5000, "traceEvents": events}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(written))
    assert TRACING.read_spans(path) == {"a": [(7500, 8750)]}


def test_clocks_that_disagree_are_noticed() -> None:
    millisecond = 1_000_000
    # Clocks may seem to be a thousandth of a second apart, and no more.
    here, near = one_step(), one_step(millisecond - 100_000)
    far = one_step(millisecond + 100_000)
    assert TRACING.is_possible([here, near])
    assert not TRACING.is_possible([here, far])
    assert not TRACING.is_possible([far, here])
    fewer = {**here, "all_reduces": here["all_reduces"][:2]}
    assert not TRACING.is_possible([here, fewer])


def test_step_drawn_is_the_one_of_median_length() -> None:
    slow, quick, middle = one_step(), one_step(), one_step()
    ends = {1_000_000: quick, 5_000_000: middle, 9_000_000: slow}
    for end, step in ends.items():
        step["optimizer"] = (120, end)
    # Of five steps two are quicker and two slower, in any order.
    four = [(slow, slow), (quick, quick), (quick, quick), (slow, slow)]
    first = TRACING.middle_step([*four[:2], (middle, one_step(20)), *four[2:]])
    assert first == TRACING.middle_step([(middle, one_step(20))])
    assert first[0]["optimizer"][1] == 5.0
    later = one_step(20_000_000), one_step(25_000_000)
    first = TRACING.middle_step([later])
    assert [rank["forward"][0] for rank in first] == [0.0, 5.0]


def test_step_with_a_gap_is_left_out() -> None:
    whole, gap = one_step(), one_step()
    del gap["all_reduces"][1]
    ranks = [[whole, whole, gap], [whole, gap, whole]]
    assert TRACING.whole_steps(ranks) == [(whole, whole)]
    # Where every step has a gap, nothing was shown.
    faults = WAYS.find_faults("flat", [0.0, 0.0], [1.0], [[gap], [whole]])
    assert faults == ["flat: no step was traced without a gap"]


def test_spans_that_overlap_get_lanes_of_their_own() -> None:
    spans = [[0.0, 5.0], [1.0, 2.0], [3.0, 9.0], [5.0, 6.0], [5.5, 7.0]]
    assert DRAW_TIMELINE.lanes_of(spans) == [0, 1, 1, 0, 2]


def test_numbers_behind_the_picture_show_what_it_says() -> None:
    measured = json.loads((ROOT / "assets" / "02_timeline.json").read_text())
    assert list(measured["steps"]) == list(measured["ms"]) == list(WAYS.WAYS)
    early = {
        name: min(DRAW_TIMELINE.count_overlaps(measured["steps"][name]))
        for name in DRAW_TIMELINE.TITLES
    }
    assert early["naive"] == early["flat"] == 0 < early["bucketed"]
    assert early["DDP"] > 0
    # What the page claims of the measured run, and of the steps that are drawn.
    assert measured["ms"]["DDP"] / measured["ms"]["bucketed"] >= 0.95
    backward = {
        name: [rank["backward"][1] - rank["backward"][0] for rank in step]
        for name, step in measured["steps"].items()
    }
    alone = backward["naive"] + backward["flat"]  # those that are drawn
    overlapped = backward["bucketed"] + backward["DDP"]
    assert (round(min(alone)), round(max(alone))) == (22, 25)
    assert (round(min(overlapped)), round(max(overlapped))) == (29, 40)
    page = (CHAPTER / "timeline" / "README.md").read_text()
    claim = "backward takes 22 to 25 ms without it and 29 to 40 ms with it"
    assert claim in " ".join(page.split())
    shown = {
        name: f"{name:18}{ms:11.1f}{measured['ms']['DDP'] / ms:7.2f}"
        for name, ms in measured["ms"].items()
    }
    assert len(shown) == 5
    assert [name for name, line in shown.items() if line not in page] == []


# --- spawn/: what mp.spawn does with a script. ----------

SPAWN_ROOM = load_chapter("02_ddp_mp/spawn")
ARGUMENTS, FIRST_EXCEPTION = SPAWN_ROOM["arguments"], SPAWN_ROOM["first_exception"]


def spawn_as_described(
    errors: list[Exception | None], **seen: float
) -> Callable[..., None]:
    """Make a stand-in for mp.spawn that fills in what two ranks would see.

    `errors` are raised one after the other where something cannot be pickled.
    """
    row = {"file_has": 0.1, "argument": 0.5, "is_imported": 1.0} | seen

    def spawn(function: Any, arguments: tuple, nprocs: int) -> None:
        assert (function, nprocs) == (ARGUMENTS.be_rank, 2)
        if isinstance(arguments[0], float):
            arguments[1].copy_(torch.tensor([list(row.values())] * nprocs))
        elif error := errors.pop(0):
            raise error

    return spawn


LAMBDA = AttributeError("Can't pickle local object 'main.<locals>.<lambda>'")
FILE = TypeError("cannot pickle '_io.TextIOWrapper' object")


@pytest.mark.parametrize(
    ("of_a_lambda", "of_a_file"),
    [  # 3.10 and 3.11; 3.12; 3.13
        ("Can't pickle local object 'f'", "cannot pickle '_io.TextIOWrapper' object"),
        ("Can't pickle local object 'f'", "cannot pickle 'TextIOWrapper' instances"),
        ("Can't get local object 'f'", "cannot pickle 'TextIOWrapper' instances"),
    ],
)
def test_refusals_are_known_by_the_words_of_each_python(
    of_a_lambda: str,
    of_a_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [AttributeError(f"{of_a_lambda}.<locals>.<lambda>"), TypeError(of_a_file)]
    monkeypatch.setattr(ARGUMENTS.mp, "spawn", spawn_as_described(list(errors)))
    ARGUMENTS.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "parent | global 0.5"
    assert lines[1] == "rank 0 | global 0.1 | argument 0.5 | file imported here: True"
    assert lines[3] == f"a lambda | AttributeError: {errors[0]}"
    assert lines[4] == f"an open file | TypeError: {of_a_file}"
    assert lines[5].startswith("check: 2 ranks have the file's global, ")


@pytest.mark.parametrize(
    ("errors", "seen"),
    [
        ([LAMBDA, TypeError("needs an integer")], {}),
        ([None, FILE], {}),
        ([LAMBDA, FILE], {"file_has": 0.5}),
        ([LAMBDA, FILE], {"argument": 0.1}),
        ([LAMBDA, FILE], {"argument": 0.0, "file_has": 0.0, "is_imported": 0.0}),
        ([LAMBDA, FILE], {"is_imported": 0.0}),
    ],
    ids=["words", "no refusal", "global", "argument", "tensor is copied", "import"],
)
def test_check_of_the_arguments_can_fail(
    errors: list, seen: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ARGUMENTS, "LEARNING_RATE", 0.1)
    monkeypatch.setattr(ARGUMENTS.mp, "spawn", spawn_as_described(list(errors), **seen))
    with pytest.raises(SystemExit, match="not as described: "):
        ARGUMENTS.main()


@pytest.mark.parametrize(
    ("exit_codes", "error", "is_right"),
    [
        ([-15, 1], mp.ProcessRaisedException("its traceback", 1, 7), True),
        ([0, 1], mp.ProcessRaisedException("its traceback", 1, 7), False),
        ([None, 1], mp.ProcessRaisedException("its traceback", 1, 7), False),
        ([1, -15], mp.ProcessRaisedException("its traceback", 0, 7), False),
        ([0, 0], None, False),
    ],
    ids=["as described", "rank 0 left", "rank 0 is alive", "rank 0 failed", "none"],
)
def test_first_exception_is_told_from_other_ends(
    exit_codes: list,
    error: Exception | None,
    is_right: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = mock.Mock(processes=[mock.Mock(exitcode=code) for code in exit_codes])
    ranks.join.side_effect = [False, error or True]
    spawn = mock.Mock(return_value=ranks)
    monkeypatch.setattr(FIRST_EXCEPTION.mp, "spawn", spawn)
    if is_right:
        FIRST_EXCEPTION.main()
        assert capsys.readouterr().out.startswith(
            "its traceback\nexit codes of ranks 0"
        )
    else:
        with pytest.raises(SystemExit, match=r"not as described|no rank has failed"):
            FIRST_EXCEPTION.main()
    assert spawn.call_args.args[0] is FIRST_EXCEPTION.be_rank


def raise_in_turn(number: int, go: Any) -> None:
    """Fail; process 0 only when it may."""
    if number == 0:
        go.wait()
    raise ValueError(f"of process {number}")


def exception_shown_by_spawn(together: bool) -> str:
    """Let process 1 fail, and 0 as a consequence; look after both, or between them."""
    go = mp.get_context("fork").Event()
    ranks: Any = mp.start_processes(
        raise_in_turn, (go,), 2, join=False, start_method="fork"
    )
    ranks.processes[1].join()
    if together:
        go.set()
        ranks.processes[0].join()
    with pytest.raises(mp.ProcessRaisedException) as shown:
        ranks.join()
    return str(shown.value).splitlines()[-1]


def test_spawn_may_show_the_later_of_two_exceptions(worker_pool: WorkerPool) -> None:
    for together, number in ((True, 0), (False, 1)):
        (shown,) = worker_pool.run(exception_shown_by_spawn, together, world_size=1)
        assert shown == f"ValueError: of process {number}"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["arguments.py", "first_exception.py"])
def test_real_ranks_do_what_the_room_says(script: str) -> None:
    done = python(CHAPTER / "spawn" / script)
    assert done.returncode == 0, done.output
    assert re.search(r"^check: ", done.stdout, re.M)
    if script == "arguments.py":
        assert done.stderr == ""
        assert "rank 1 | global 0.1 | argument 0.5 | file imported" in done.stdout
    else:
        assert "ValueError: rank 1 got a broken sample" in done.stdout


def end_or_go_on(rank: int, error: BaseException, went_on: torch.Tensor) -> None:
    """Raise on rank 1; on rank 0 note that nobody has ended it."""
    if rank == 1:
        raise error
    # Where rank 0 is to be ended, it stays longer than that takes.
    time.sleep(60 if is_a_failure(error) else 0.5)
    went_on.fill_(1)


def is_a_failure(error: BaseException) -> bool:
    """Tell whether the room says that this ends all ranks."""
    return isinstance(error, Exception) or error.args == (3,)


def spawn_and_raise(error: BaseException) -> tuple[str, bool]:
    """Raise on one rank; return the parent's error, and whether the other went on."""
    went_on, said = torch.zeros(1).share_memory_(), ""
    ranks = {"nprocs": 2, "start_method": "fork"}  # the quickest; `spawn` is the same
    try:
        mp.start_processes(end_or_go_on, (error, went_on), **ranks)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as end:
        said = f"{type(end).__name__}: {end}"
    return said, bool(went_on)


def test_only_an_exception_has_a_traceback_and_a_good_exit_ends_nobody(
    worker_pool: WorkerPool,
) -> None:
    errors = [ValueError("bad"), SystemExit(3), SystemExit(0), KeyboardInterrupt()]
    found = [worker_pool.run(spawn_and_raise, e, world_size=1)[0] for e in errors]
    (raised, _), (exited, _) = found[:2]
    assert raised.startswith("ProcessRaisedException: ")
    assert "Traceback (most recent call last)" in raised and "ValueError: bad" in raised
    assert exited == ("ProcessExitedException: process 1 terminated with exit code 3")
    assert [went_on for _, went_on in found] == [False, False, True, True]
    assert [said for said, _ in found[2:]] == ["", ""]


@pytest.mark.slow
def test_without_the_guard_a_rank_would_start_ranks(tmp_path: Path) -> None:
    text = (CHAPTER / "spawn" / "arguments.py").read_text()
    assert text.count('if __name__ == "__main__":') == 1
    script = tmp_path / "broken.py"
    script.write_text(text.replace('if __name__ == "__main__":', "if True:"))
    done = python(script)
    assert (done.returncode, done.stdout) == (1, "")
    assert "current process has finished its bootstrapping phase." in done.stderr


def device_errors() -> list[str]:
    """Return how `.to(rank)` and `device_ids=[rank]` fail on a machine without GPUs."""
    model, found = nn.Linear(2, 1), []
    for call in (
        lambda: model.to(dist.get_rank()),
        lambda: DistributedDataParallel(model, device_ids=[dist.get_rank()]),
    ):
        with pytest.raises((RuntimeError, ValueError)) as failure:
            call()
        found.append(f"{failure.type.__name__}: {failure.value}")
    return found


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_rank_is_no_device_on_a_cpu(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(device_errors)
    page = (ROOT / "WHEN_IT_GOES_WRONG.md").read_text("utf-8")
    assert len(by_rank) == 2
    build = "Found no NVIDIA driver on your system" if torch.version.cuda else ""
    words = build or "Cannot access accelerator device when none is available."
    for rank, (of_to, of_ddp) in enumerate(by_rank):
        assert of_to.removeprefix("RuntimeError: ").startswith(words)
        assert of_ddp == (
            "ValueError: DistributedDataParallel device_ids and output_device "
            "arguments only work with single-device/multiple-device GPU modules or CPU "
            f"modules, but got device_ids [{rank}], output_device None, and module "
            "parameters {device(type='cpu')}."
        )
    assert words in page


# --- exercises/: what tests/test_exercises.py does not try. ----------


def test_text_of_an_exercise_holds_no_answer() -> None:
    text = (EXERCISES / "broken_loop.py").read_text()
    assert "copy_" not in text and "grad =" not in text and "read" not in text.lower()
    for name in ("broken_loop", "buckets"):
        lines = (EXERCISES / f"{name}.py").read_text().splitlines()
        assert 25 <= len(lines) <= 50, name
    page = (EXERCISES / "README.md").read_text()
    outside = re.sub(r"(?s)<details>.*?</details>", "", page)
    assert page.count("<details>") == page.count("</details>") == 4
    assert "copy_" in page and "copy_" not in outside
    assert "torch.cat" in page and "torch.cat" not in outside


REPAIRED = {
    "broken_loop.py": (
        "        dist.all_reduce(mean)\n",
        "        dist.all_reduce(mean)\n        parameter.grad.copy_(mean)\n",
        "check: after 32 steps 2 ranks hold the weights of one process\n",
    ),
    "buckets.py": (
        "    check_buckets(average_in_buckets)\n",
        "    from answers.buckets import average_in_buckets\n\n"
        "    check_buckets(average_in_buckets)\n",
        "check: 35 gradients on each of 3 ranks are means, sent in 22 messages\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REPAIRED))
def test_repaired_exercise_ends_with_its_check(name: str, tmp_path: Path) -> None:
    wrong, right, said = REPAIRED[name]
    room = tmp_path / "room"
    shutil.copytree(EXERCISES, room)  # in the place of the links, what they lead to
    shutil.copytree(ROOT / "tests" / "support" / "answers", room / "answers")
    text = (room / name).read_text()
    assert text.count(wrong) == 1
    # As the page allows: a copy of another name, beside the untouched script.
    (room / f"my_{name}").write_text(text.replace(wrong, right))
    done = python(room / f"my_{name}", timeout=300)
    assert (done.returncode, done.stdout) == (0, said), done.output


# --- What cannot work. ----------


def run_as_script(script: Path) -> None:
    """Run a script as its own __main__, and forget its neighbours again."""
    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
    ):
        for name in ("ranks", "terrain"):
            sys.modules.pop(name, None)
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    ("script", "words", "complaint"),
    [
        (
            "west_and_east.py",
            ["--steps=1"],
            r"argument --steps: '1' is no number from 50 to 100000",
        ),
        ("west_and_east.py", ["--stops=1"], r"unrecognized arguments: --stops=1"),
        (
            "timeline/timeline.py",
            ["--bucket-mb=20"],
            r"--bucket-mb is more than half of 32\.0 MB of gradients",
        ),
        (
            "timeline/timeline.py",
            ["--width=0"],
            r"argument --width: '0' is no number from 1 to 8192",
        ),
        (
            "timeline/timeline.py",
            ["--json=no/t.json"],
            r"--json: there is no folder no",
        ),
        ("exercises/buckets.py", ["--x"], r"unrecognized arguments: --x"),
        ("exercises/broken_loop.py", ["--x"], r"unrecognized arguments: --x"),
        ("exercises/buckets.py", [], r"start it with python, not torchrun.*"),
        ("exercises/broken_loop.py", [], r"start it with python, not torchrun.*"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    script: str,
    words: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = CHAPTER / script
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    if not words:
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as exit_info:
        run_as_script(path)
    assert exit_info.value.code == 2
    line = capsys.readouterr().err
    assert re.fullmatch(rf"{re.escape(path.name)}: {complaint}\n", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "end"),
    [
        (["west_and_east.py", "--steps=100000"], signal.SIGINT),
        pytest.param(
            ["timeline/timeline.py", "--rounds=1000"],
            signal.SIGKILL,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_rank_outlives_its_script(command: list[str], end: signal.Signals) -> None:
    script, option = command
    process = subprocess.Popen(
        [sys.executable, CHAPTER / script, option],
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
        rest, _ = process.communicate(timeout=120)  # until the last has closed stdout
        assert process.returncode == -end
        assert psutil.wait_procs(everyone, timeout=45)[1] == []
        assert rest == ""
    finally:
        for one in [process, *everyone]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
