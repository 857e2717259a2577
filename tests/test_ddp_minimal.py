"""The minimal scripts of five chapters: few lines that train as one process does."""

import argparse
import ast
import contextlib
import copy
import functools
import gc
import inspect
import io
import json
import os
import pickle
import re
import runpy
import shutil
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR

from launch import ROOT, deepspeed, torchrun
from pages import words_of
from scripts import load_apart, load_chapter
from worker_pool import WorkerPool
from zero_ranks import Pools, forget_earlier_group

pytestmark = pytest.mark.filterwarnings("error")

SMALL = {"layers": 1, "width": 32, "heads": 2}
# How far weights may end apart: AdamW divides a small gradient by itself, rounding and
# all. The text, another in each version of Python, has gradients near 0 or not.
ROUNDED = 1e-4
PAGE_03, PAGE_06 = "03_ddp_torchrun/README.md", "06_fsdp/README.md"
FEW = 256  # samples, of 512 or 1024
FILE = "resumable.pt"  # what minimal_resumable.py saves, and chapter 06's takes up


def fewer_samples(module: Any, samples: int = FEW) -> Any:
    """Replace a script's data sets by others of so many samples."""
    dataset = module.WindowDataset
    return mock.patch.object(
        module, "WindowDataset", lambda text, *_, **__: dataset(text, 128, samples)
    )


def train(
    script: str, chapter: str = "03_ddp_torchrun", **sizes: Any
) -> tuple[dict[str, torch.Tensor], str]:
    """Run a script on this rank of the pool; return what it saves and prints.

    It joins no group, since the pool has one. The GPT is smaller, the samples fewer.
    """
    module: Any = load_chapter(chapter)[script]
    config = partial(module.GPTConfig, **SMALL | sizes)
    output, saved = io.StringIO(), {}
    save = torch.save

    def keep(state: Any, file: Any, **settings: Any) -> None:
        if file == "model.pt":
            saved.update(state)
        else:  # a tensor on its way to another rank is pickled so
            save(state, file, **settings)

    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    with (
        mock.patch.dict(os.environ, local_size),
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.object(torch.distributed, "destroy_process_group"),
        mock.patch.object(torch, "save", keep),
        mock.patch.object(module, "GPTConfig", config),
        fewer_samples(module),
        contextlib.redirect_stdout(output),
    ):
        module.main()
    return {name: value.clone() for name, value in saved.items()}, output.getvalue()


@functools.cache
def in_one_process(
    optimizer: str = "", clips: bool = False, **sizes: Any
) -> tuple[dict[str, torch.Tensor], str]:
    """Train in one process: a worker does so once for all tests that compare with it.

    `optimizer` names another one than the script's, as `made_by` makes it.
    """
    if not optimizer:
        return train("one_process", **sizes)
    by = made_by(optimizer)
    one = partial(clipping, by) if clips else by
    with mock.patch.object(torch.optim, "AdamW", lambda p, lr: one(p)):
        return train("one_process", **sizes)


def both_ways(chapter: str) -> tuple[float, str, str, int]:
    """Train in one process, then on all ranks; return how far apart they end."""
    alone, said_alone = in_one_process()
    together, said = train("minimal", chapter=chapter)
    apart = [(together[name] - alone[name]).abs().max().item() for name in together]
    return max(apart, default=0.0), said_alone, said, len(apart)


@pytest.mark.parametrize(
    "chapter", ["03_ddp_torchrun", "06_fsdp", "07_tensor_parallel"]
)
def test_two_ranks_train_as_one_process(worker_pool: WorkerPool, chapter: str) -> None:
    (apart, said_alone, said, tensors), other = worker_pool.run(
        both_ways, chapter, world_size=2
    )
    assert tensors == 15
    assert apart < ROUNDED
    assert said.splitlines()[0].startswith("step  4 | loss 4.")
    assert said == said_alone
    # Rank 1 neither prints nor saves.
    assert (other[2], other[3]) == ("", 0)


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
@pytest.mark.parametrize(
    ("chapter", "script"),
    [
        ("02_ddp_mp", "minimal"),
        ("03_ddp_torchrun", "minimal"),
        ("03_ddp_torchrun", "minimal_resumable"),
        ("06_fsdp", "minimal"),
        ("06_fsdp", "minimal_resumable"),
        ("07_tensor_parallel", "minimal"),
        ("08_pipeline_parallel", "minimal"),
        ("09_one_mesh", "minimal"),
    ],
)
def test_the_device_is_set_before_the_group_is_joined(
    chapter: str, script: str, device: str
) -> None:
    # No backend connects Apple's GPUs, although torch names gloo for them:
    # github.com/pytorch/pytorch/issues/160732. Their ranks stay on the CPU.
    module: Any = load_chapter(chapter)[script]
    sizes = ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    calls, has_backend = mock.Mock(), device != "mps"
    calls.join.side_effect = InterruptedError
    with (
        mock.patch.dict(os.environ, dict.fromkeys(["RANK", "LOCAL_RANK"], "1")),
        mock.patch.dict(os.environ, dict.fromkeys(sizes, "2")),
        mock.patch.object(torch.accelerator, "device_count", lambda: 2),
        mock.patch.object(torch.mps, "device_count", lambda: 0 if has_backend else 2),
        mock.patch.object(torch.accelerator, "set_device_index", calls.set_device),
        mock.patch.object(
            torch.accelerator, "current_accelerator", lambda: torch.device(device)
        ),
        mock.patch.object(torch.distributed, "TCPStore"),
        mock.patch.object(torch.distributed, "init_process_group", calls.join),
        pytest.raises(InterruptedError),
    ):
        if chapter == "02_ddp_mp":
            module.join_and_train(1, 2, 0)
        else:
            module.main()
    made = [(name, *arguments) for name, arguments, _ in calls.mock_calls]
    on_device = [("set_device", 1), ("join", "nccl")]
    assert made == (on_device if has_backend else [("join", "gloo")])


@pytest.mark.parametrize("lost", ["all_reduce in backward", "sampler"])
def test_a_line_that_is_missing_shows(worker_pool: WorkerPool, lost: str) -> None:
    (apart, *_), _ = worker_pool.run(without, lost, world_size=2)
    assert apart > 1e-3


def without(lost: str) -> tuple[float, str, str, int]:
    """Train as `both_ways` does, with one line of minimal.py left out."""
    module: Any = load_chapter("03_ddp_torchrun")["minimal"]
    if lost == "sampler":
        name, replaced = "DistributedSampler", lambda data, drop_last: None
    else:
        name, replaced = "DistributedDataParallel", Unwrapped
    with mock.patch.object(module, name, replaced):
        return both_ways("03_ddp_torchrun")


class Died(Exception):
    """What ends a run in the middle."""


def resumable(
    folder: str,
    dropout: float = 0.1,
    batch_size: int = 16,
    dies_in: str = "",
) -> tuple[dict[str, Any], str, list[int]]:
    """Run minimal_resumable.py there, a smaller GPT; return its file and its output.

    And the epochs that it told the sampler of.

    `dies_in` names what fails in the second epoch: `evaluate`, or `save`, after half of
    the file has been written. Or in the first epoch rank 1 alone gets a `signal`.
    """
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    config = partial(module.GPTConfig, **SMALL, dropout=dropout)
    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    output, path = io.StringIO(), Path(folder, "resumable.pt")
    resumes = path.exists()
    evaluate, save, called = module.validation_loss, torch.save, []
    is_stopped = module.is_stopped
    older: list[Any] = []
    held_out = module.load_text(None, 128)[1]

    def evaluate_or_die(*arguments: Any) -> float:
        called.append("evaluate")
        assert torch.equal(arguments[1].text, held_out)
        if dies_in == "evaluate" and len(called) == 2:
            raise Died
        if dies_in == "signal" and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        # Each rank draws masks of its own in each epoch, and evaluation draws none.
        epoch, group = told.mock_calls[-1].args[1], torch.distributed
        seed = epoch * group.get_world_size() + group.get_rank()
        assert torch.initial_seed() == seed
        loss = evaluate(*arguments)
        assert loss == evaluate(*arguments) and arguments[0].training
        return loss

    def save_or_die(state: Any, file: str) -> None:
        if path.exists():
            older.append(path.open("rb"))
        save(state, file)
        if dies_in == "save" and called == ["evaluate"] * 2:
            os.truncate(file, os.path.getsize(file) // 2)
            raise Died

    def ask_or_die(*arguments: Any) -> bool:
        if dies_in == "save" and called == ["evaluate"] * 2:  # as rank 0 has
            raise Died
        return is_stopped(*arguments)

    set_epoch = mock.patch.object(
        module.DistributedSampler,
        "set_epoch",
        autospec=True,
        side_effect=module.DistributedSampler.set_epoch,
    )
    with (
        set_epoch as told,
        mock.patch.dict(os.environ, local_size),
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.multiple(module, GPTConfig=config, FILE=path, BATCH_SIZE=batch_size),
        fewer_samples(module),
        mock.patch.object(module, "validation_loss", evaluate_or_die),
        mock.patch.object(module, "is_stopped", ask_or_die),
        mock.patch.object(torch, "save", save_or_die),
        contextlib.redirect_stdout(output),
        contextlib.suppress(Died),
    ):
        module.main()
    # Who has opened the first epoch's file reads on: it is replaced, not changed.
    saves_again = dies_in in ("", "save") or resumes
    saves_again = torch.distributed.get_rank() == 0 and saves_again
    assert [torch.load(file)["epoch"] for file in older] == [1] * saves_again
    return (
        torch.load(path),
        output.getvalue(),
        [call.args[1] for call in told.mock_calls],
    )


def weights_of(state: dict[str, Any]) -> torch.Tensor:
    assert len(state["model"]) == 15
    return torch.cat([weight.flatten() for weight in state["model"].values()])


@pytest.mark.parametrize(
    "dies_in", [pytest.param("evaluate", marks=pytest.mark.slow), "save"]
)
def test_a_run_that_died_resumes_with_the_same_bits(
    worker_pool: WorkerPool, tmp_path: Path, dies_in: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    (expected, said, told), _ = worker_pool.run(resumable, str(whole), world_size=2)
    words = (str(broken), 0.1, 16, dies_in)
    (half, said_first, _), _ = worker_pool.run(resumable, *words, world_size=2)
    words = (str(broken), 0.1, 16)
    (resumed, said_then, then), _ = worker_pool.run(resumable, *words, world_size=2)
    assert told == [0, 1] and then == [1]
    begins, *epochs = said.splitlines()
    assert begins == "2 ranks on cpu: 0 of 2 epochs done"
    assert [line[:26] for line in epochs] == [
        "epoch 0 | validation loss ",
        "epoch 1 | validation loss ",
    ]
    assert half["epoch"] == 1 and resumed["epoch"] == expected["epoch"] == 2
    # A cosine: half of the highest rate after half of the steps, at the end nothing.
    groups = [state["adam"]["param_groups"][0] for state in (half, resumed, expected)]
    rates = [group["lr"] for group in groups]
    assert rates == pytest.approx([1e-3, 0, 0], abs=1e-9)
    assert said_first.splitlines()[1:] == epochs[: 1 + (dies_in == "save")]
    assert said_then.splitlines() == ["2 ranks on cpu: 1 of 2 epochs done", *epochs[1:]]
    assert not torch.equal(weights_of(half), weights_of(expected))
    assert torch.equal(weights_of(resumed), weights_of(expected))


def test_a_signal_to_one_rank_ends_all_after_the_epoch(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    marker = tmp_path / "resumable.pt.requeue"
    words = (str(tmp_path), 0.1, 16, "signal")
    stopped = worker_pool.run(resumable, *words, world_size=2)
    assert [(state["epoch"], told) for state, _, told in stopped] == [(1, [0])] * 2
    assert len(stopped[0][1].splitlines()) == 2 and marker.exists()
    marker.unlink()
    # A signal in the last epoch asks for nothing more; the file has that of another.
    resumed = worker_pool.run(resumable, *words, world_size=2)
    assert [(state["epoch"], told) for state, _, told in resumed] == [(2, [1])] * 2
    assert not marker.exists()


def outline_of(page: str) -> list[str]:
    """Return the lines of the code that a page shows after "In outline"."""
    text = (ROOT / page).read_text()
    (block,) = re.findall(r"In outline.*?\n```text\n(.*?)```", text, re.DOTALL)
    return block.splitlines()


def test_outline_of_a_run_that_resumes_is_the_order_of_its_main() -> None:
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    source = inspect.getsource(module.main)
    # What a line says of itself stands after it; `...` is what it leaves out.
    code = [re.split(r"  +(?=\S)", line.strip()) for line in outline_of(PAGE_03)]
    parts = [re.split(r"\.\.\.|\)$", line[0])[0] for line in code]
    places = [source.replace("torch.nn.parallel.", "").find(part) for part in parts]
    assert len(parts) == 8 and -1 not in places
    # The rank is asked for the first time before it saves: to print.
    places.pop(parts.index("if rank == 0:"))
    assert places == sorted(places)


def test_outline_of_two_axes_is_in_the_file_and_not_in_fsdps() -> None:
    codes = [
        line.split("  #")[0].rstrip() for line in outline_of("09_one_mesh/README.md")
    ]
    parts = [re.split(r"\.\.\.\)$", code)[0] for code in codes]
    module: Any = load_chapter("09_one_mesh")["minimal"]
    sources = [
        re.sub(r"\btp\.", "", inspect.getsource(one))
        for one in (module, load_chapter("06_fsdp")["minimal_resumable"])
    ]
    found = [[part in source for part in parts] for source in sources]
    assert found == [[True] * 5, [False] * 5]
    twice = inspect.getsource(module.shard_twice)
    assert 0 < twice.find(parts[1]) < twice.find(parts[2])


def test_a_checkpoint_is_loaded_where_adam_counts_its_steps(tmp_path: Path) -> None:
    # An optimizer's state follows its parameters, but for the number of its step. On a
    # GPU it would be fetched for each parameter in each step. "meta" stands for a GPU.
    source = inspect.getsource(load_chapter("03_ddp_torchrun")["minimal_resumable"])
    (place,) = re.findall(r"torch.load\(FILE, map_location=(.*?)\)", source)
    adam = torch.optim.AdamW([weight := torch.nn.Parameter(torch.ones(2))])
    weight.grad = torch.ones(2)
    adam.step()
    torch.save(adam.state_dict(), tmp_path / "adam.pt")
    found = {}
    for device in ('"cpu"', '"meta"'):
        there = torch.nn.Parameter(torch.ones(2, device="meta"))
        resumed = torch.optim.AdamW([there])
        resumed.load_state_dict(
            torch.load(tmp_path / "adam.pt", map_location=device.strip('"'))
        )
        state = resumed.state[there]
        assert state["exp_avg"].device.type == "meta"
        found[device] = state["step"].device.type
    assert adam.state[weight]["step"].device.type == "cpu"
    assert found == {'"cpu"': "cpu", '"meta"': "meta"} and found[place] == "cpu"


def test_epochs_on_two_ranks_are_those_of_one(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        words = (str(folder), 0.0, 32 // ranks)
        ends.append(worker_pool.run(resumable, *words, world_size=ranks)[0])
    (alone, said_alone, _), (together, said, _) = ends
    assert len(said.splitlines()) == 3
    assert said.splitlines()[1:] == said_alone.splitlines()[1:]
    assert torch.allclose(weights_of(together), weights_of(alone), atol=1e-5)


def made(kind: str, optimizer: Any, steps: int) -> Any:
    """Make a schedule of so many steps, as a reader may put it in place of ours."""
    schedules = torch.optim.lr_scheduler
    if kind == "StepLR":
        return schedules.StepLR(optimizer, steps // 4)
    if kind == "OneCycleLR":
        highest = 10 * optimizer.param_groups[0]["lr"]
        return schedules.OneCycleLR(optimizer, highest, steps)
    if kind == "CosineAnnealingLR":
        return schedules.CosineAnnealingLR(optimizer, steps)
    warmup = schedules.LinearLR(optimizer, 0.1, total_iters=steps // 4)
    cosine = schedules.CosineAnnealingLR(optimizer, steps - steps // 4)
    return schedules.SequentialLR(optimizer, [warmup, cosine], [steps // 4])


def rates_of(optimizer: Any, schedule: Any, steps: int) -> list[float]:
    """Take so many steps without gradients; return the rate of each."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def with_schedule(folder: str, kind: str, dies: bool) -> list[list[float]]:
    """Run minimal_resumable.py there with it; return each epoch's learning rates.

    Nothing is trained; if it dies, then in the second epoch, and at another rate.
    """
    adam = partial(torch.optim.AdamW, lr=2e-2 if dies else 2e-3)
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    local_size, rates = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}, []
    config, steps = partial(module.GPTConfig, **SMALL), 16 // int(*local_size.values())

    def epoch(_: Any, optimizer: Any, schedule: Any, *rest: Any) -> None:
        if dies and rates:
            raise Died
        rates.append(rates_of(optimizer, schedule, steps))

    with (
        mock.patch.dict(os.environ, local_size),
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.multiple(module, GPTConfig=config, FILE=Path(folder, FILE)),
        mock.patch.object(module, "train_one_epoch", epoch),
        mock.patch.object(module, "validation_loss", lambda *_: 0.0),
        mock.patch.object(torch.optim, "AdamW", lambda p, lr: adam(p)),
        mock.patch.object(module, "LambdaLR", lambda o, _: made(kind, o, 2 * steps)),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Died),
    ):
        module.main()
    return rates


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "kind", ["StepLR", "OneCycleLR", "CosineAnnealingLR", "SequentialLR"]
)
def test_any_schedule_goes_on_where_it_was_on_other_ranks_too(
    worker_pool: WorkerPool, tmp_path: Path, kind: str, ranks: int
) -> None:
    run = partial(worker_pool.run, with_schedule, str(tmp_path), kind)
    first, _ = run(True, world_size=2)
    resumed = run(False, world_size=ranks)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=2e-3)
    steps = 32 // ranks  # one rank takes twice as many steps in an epoch
    due = rates_of(optimizer, made(kind, optimizer, steps), steps)[steps // 2 :]
    assert len(first) == 1 and len(first[0]) == 8 and len(set(due)) > 1
    assert resumed == [[due]] * ranks


def scheduled(kind: str, rate: float) -> tuple[Any, Any]:
    """Make an optimizer and a schedule of 12 steps, to ten times the rate."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate)
    if kind == "SWALR":
        return optimizer, SWALR(optimizer, 10 * rate, anneal_epochs=12)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 10 * rate, 12)
    return optimizer, schedule


def resumed_at_twice_the_rate(
    kind: str, put_back: Callable[[str], bool]
) -> list[float]:
    """Resume after 4 steps, put such keys back, step as often; return later rates."""
    before, (resumed, schedule) = scheduled(kind, 1e-3), scheduled(kind, 2e-3)
    rates_of(*before, 4)
    (group,) = resumed.param_groups
    ours = {name: group[name] for name in group if put_back(name)}
    resumed.load_state_dict(before[0].state_dict())
    resumed.param_groups[0].update(ours)
    return rates_of(resumed, schedule, 12)[4:]


@pytest.mark.parametrize("kind", ["OneCycleLR", "SWALR"])
def test_some_schedules_keep_rates_in_the_optimizer(kind: str) -> None:
    old, due = (rates_of(*scheduled(kind, rate), 12)[4:] for rate in (1e-3, 2e-3))
    assert len(due) == 8 and due == pytest.approx([2 * rate for rate in old])
    by_lr = resumed_at_twice_the_rate(kind, lambda key: key == "lr")
    assert by_lr[-1] != pytest.approx(due[-1])
    ours = resumed_at_twice_the_rate(kind, lambda key: key.endswith("lr"))
    assert ours == pytest.approx(due)


def test_a_plateau_cannot_be_stepped_without_its_loss() -> None:
    optimizer, _ = scheduled("SWALR", 1e-3)
    schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match=r"missing 1 required .*: 'metrics'"):
        schedule.step()


def test_a_schedule_that_was_given_numbers_is_given_them_again() -> None:
    def by_numbers(first: int, last: int, schedule: Any, optimizer: Any) -> list[float]:
        rates = []
        for step in range(first, last):
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step((step + 1) / 4)  # four steps an epoch
        return rates

    def made() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
        return restarts(optimizer, 4), optimizer

    due = by_numbers(0, 12, *made())[7:]
    assert len(due) == 5
    schedule, optimizer = made()
    by_numbers(0, 7, schedule, optimizer)
    assert by_numbers(7, 12, schedule, optimizer) == pytest.approx(due)
    schedule, optimizer = made()
    for _ in range(7):
        schedule.step()
    wrong, *later = by_numbers(7, 12, schedule, optimizer)
    assert wrong != pytest.approx(due[0]) and later == pytest.approx(due[1:])


def decay_after_resuming(folder: str) -> float:
    """Resume there with another weight decay; return the one that was used."""
    made = partial(torch.optim.AdamW, weight_decay=0.5)
    with mock.patch.object(torch.optim, "AdamW", made):
        state, *_ = resumable(folder)
    return state["adam"]["param_groups"][0]["weight_decay"]


def test_a_resumed_run_keeps_the_weight_decay_that_was_saved(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(resumable, str(tmp_path), 0.1, 16, "evaluate", world_size=1)
    resumed = worker_pool.run(decay_after_resuming, str(tmp_path), world_size=1)
    assert resumed == [0.01]  # AdamW's default was saved


def test_the_schedule_ends_with_the_run_on_other_ranks_too(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    words = (str(tmp_path), 0.1, 16, "evaluate")
    (half, *_), _ = worker_pool.run(resumable, *words, world_size=2)
    ((ended, *_),) = worker_pool.run(resumable, str(tmp_path), world_size=1)
    adams = [state["adam"] for state in (half, ended)]
    # One rank takes twice as many steps in an epoch.
    assert [adam["state"][0]["step"] for adam in adams] == [4, 4 + 8]
    rates = [adam["param_groups"][0]["lr"] for adam in adams]
    assert rates == pytest.approx([1e-3, 0], abs=1e-9)


def one_folder_each(folder: str) -> str:
    """Train as on machines that share no disk; return with what it ends."""
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    path = Path(folder, str(torch.distributed.get_rank()), FILE)
    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    config = partial(module.GPTConfig, **SMALL)
    with (
        mock.patch.dict(os.environ, local_size),
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.multiple(module, GPTConfig=config, FILE=path),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            module.main()
        except SystemExit as stop:
            return str(stop.code)
    return ""


def test_ranks_that_do_not_find_the_same_file_are_stopped(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    own = tmp_path / "0"
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    worker_pool.run(resumable, str(own), world_size=1)
    before = (own / FILE).read_bytes()
    said = worker_pool.run(one_folder_each, str(tmp_path), world_size=2)
    text = "resumable.pt is not the same on all machines: it has seen [2, 0] epochs"
    assert [line[-len(text) :] for line in said] == [text] * 2
    assert (own / FILE).read_bytes() == before


def refusal(folder: str, batch_size: int = FEW) -> str | int | None:
    """Train with as many samples in a batch as the data set has."""
    try:
        resumable(folder, batch_size=batch_size)
    except SystemExit as stop:
        return stop.code
    return None


def test_an_epoch_without_a_whole_step_is_refused(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (said,) = worker_pool.run(refusal, str(tmp_path), world_size=1)
    assert said == "too few samples per rank"
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_named(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "resumable.pt"
    adam = torch.optim.AdamW([torch.zeros(1)])
    for model in ({"weight": torch.zeros(1)}, None):
        state = {} if model is None else {"model": model, "adam": adam.state_dict()}
        torch.save(state, path)
        before = path.read_bytes()
        (said,) = worker_pool.run(refusal, str(tmp_path), 16, world_size=1)
        (line,) = str(said).splitlines()
        name, _, cause = line.partition(": another model or optimizer: ")
        assert name.endswith(FILE)
        assert ("Unexpected key(s)" in cause) if model else (cause == "'model'")
        assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "no checkpoint", None])
def test_a_damaged_checkpoint_is_refused_before_the_group_is_joined(
    tmp_path: Path, content: str | None
) -> None:
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    path = tmp_path / FILE
    torch.save(torch.zeros(1000), path)
    if content is None:
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_text(content)
    before = path.read_bytes()
    with (
        mock.patch.object(module, "FILE", path),
        mock.patch.object(torch.distributed, "init_process_group") as join,
        pytest.raises(SystemExit) as stop,
    ):
        module.main()
    assert stop.value.code == f"{path} is damaged, or no checkpoint: move it away"
    assert not join.called and path.read_bytes() == before


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def end_with(folder: str, **replaced: Any) -> str:
    """Train as `one_folder_each` does, in one folder; return with what it ends.

    `replaced` says what stands in the place of the model, the optimizer or DDP.
    """
    places = {"GPT": "minimal_resumable", "AdamW": "optim"}
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    config = partial(module.GPTConfig, **SMALL)
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name, new in replaced.items():
            where = {"optim": torch.optim, "minimal_resumable": module}
            place = where.get(places.get(name, ""), torch.nn.parallel)
            stack.enter_context(mock.patch.object(place, name, new))
        for patch in (
            mock.patch.dict(os.environ, local_size),
            mock.patch.object(torch.distributed, "init_process_group"),
            mock.patch.multiple(module, GPTConfig=config, FILE=Path(folder, FILE)),
            fewer_samples(module),
            contextlib.redirect_stdout(output),
        ):
            stack.enter_context(patch)
        try:
            module.main()
        except SystemExit as stop:
            return str(stop.code)
    return output.getvalue()


@pytest.mark.parametrize(("saved_by", "missing"), [(None, "momentum"), (sgd, "betas")])
def test_another_optimizer_s_checkpoint_is_named(
    worker_pool: WorkerPool, tmp_path: Path, saved_by: Any, missing: str
) -> None:
    first, then = ({"AdamW": one} if one else {} for one in (saved_by, sgd))
    then = {} if saved_by else then
    (said,) = worker_pool.run(partial(end_with, **first), str(tmp_path), world_size=1)
    assert "epoch 1 | validation loss " in said
    before = (tmp_path / FILE).read_bytes()
    (said,) = worker_pool.run(partial(end_with, **then), str(tmp_path), world_size=1)
    assert said.endswith(f"{FILE}: another model or optimizer: '{missing}'")
    assert "\n" not in said
    assert (tmp_path / FILE).read_bytes() == before


def test_another_optimizer_of_adam_s_family_is_not_noticed(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run = partial(worker_pool.run, world_size=1)
    run(partial(end_with), str(tmp_path))
    state = torch.load(tmp_path / FILE)
    torch.save({**state, "epoch": 1}, tmp_path / FILE)
    for kind in (torch.optim.Adam, torch.optim.RAdam):
        (said,) = run(partial(end_with, AdamW=kind), str(tmp_path))
        assert "epoch 1 | validation loss " in said
        assert torch.load(tmp_path / FILE)["adam"]["param_groups"][0]["weight_decay"]
        torch.save({**state, "epoch": 1}, tmp_path / FILE)
    assert "`Adam` for `AdamW` go unnoticed" in words_of("03_ddp_torchrun")


def sgd_at(rate: float, parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Take another rate than the script's."""
    return torch.optim.SGD(parameters, lr=rate)


def at_a_rate_of(rate: float) -> Any:
    """Return what makes SGD with this rate."""
    return partial(sgd_at, rate)


def unfrozen_after_wrapping(model: Any) -> DistributedDataParallel:
    """Wrap when one small layer is frozen."""
    model.final_norm.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    model.final_norm.requires_grad_(True)
    return wrapped


def bare(model: Any) -> Any:
    """Let the loop train the model itself, which communicates nothing."""
    model.no_sync = contextlib.nullcontext
    DistributedDataParallel(model)
    return model


def test_weights_that_are_nan_on_all_ranks_are_no_difference(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    diverges = partial(end_with, AdamW=at_a_rate_of(1e30))
    said, _ = worker_pool.run(diverges, str(tmp_path), world_size=2)
    assert said.splitlines()[1:] == [f"epoch {n} | validation loss nan" for n in (0, 1)]


def with_an_imaginary_part(model: Any) -> DistributedDataParallel:
    """Wrap; add a complex weight whose imaginary part is each rank's own."""
    wrapped = DistributedDataParallel(model)
    own = complex(1, dist.get_rank() / 1000)
    model.wave = torch.nn.Parameter(torch.tensor([own]))
    return wrapped


@pytest.mark.parametrize(
    "wrap", [unfrozen_after_wrapping, bare, with_an_imaginary_part]
)
def test_ranks_with_different_weights_are_stopped_and_save_nothing(
    worker_pool: WorkerPool, tmp_path: Path, wrap: Any
) -> None:
    # So little that no more than the ninth digit of a norm shows it.
    run = partial(end_with, DistributedDataParallel=wrap, AdamW=at_a_rate_of(1e-6))
    said = worker_pool.run(run, str(tmp_path), world_size=2)
    assert len(said) == 2 and said[0] == said[1]
    begin = r"epoch 0: the ranks' weights differ; their norms: \[(\S+), (\S+)\]"
    match = re.fullmatch(begin, said[0])
    assert match and 0 < abs(float(match[1]) - float(match[2])) < 1e-4
    assert not list(tmp_path.iterdir())


class Normalised(torch.nn.Module):
    """Predicts all bytes of a sample from its first, by way of BatchNorm.

    Its running statistics are those of the last batch, so of one rank's 16 samples.
    """

    def __init__(self, config: Any) -> None:
        """Draw the weights."""
        super().__init__()
        self.norm, self.head = (
            torch.nn.BatchNorm1d(1, momentum=1),
            torch.nn.Linear(1, 256),
        )
        # A column, of which not all numbers stand at the beginning of its memory.
        self.register_buffer("first", torch.zeros(2, 2)[:, 0])

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; both are (B, T)."""
        if self.training:
            self.first.copy_(inputs[:2, 0] / 64)  # type: ignore
        logits = self.head(self.norm(inputs[:, :1].float()) + self.first.sum())  # type: ignore
        logits = logits[:, :, None].expand(-1, -1, labels.shape[1])
        return torch.nn.functional.cross_entropy(logits, labels)


def test_the_loss_that_is_printed_is_that_of_the_model_that_is_saved(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run = partial(end_with, GPT=Normalised)
    said, _ = worker_pool.run(run, str(tmp_path), world_size=2)
    printed = float(said.splitlines()[-1].rpartition(" ")[2])
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    model = Normalised(None).eval()
    model.load_state_dict(torch.load(tmp_path / FILE)["model"])
    held_out = module.WindowDataset(module.load_text(None, 128)[1], 128, FEW)
    _, inputs, labels = next(iter(torch.utils.data.DataLoader(held_out, FEW)))
    assert printed == pytest.approx(model(inputs, labels).item(), abs=6e-4)


# What a reader does who adds a running mean of the weights.
WITH_A_MEAN = (
    (
        'parts = {"model": model, "adam": optimizer}  # all that is saved and loaded',
        """mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer.register_step_post_hook(lambda *_: mean.update_parameters(model))
    parts = {"model": model, "adam": optimizer, "mean": mean}""",
    ),
    ("validation_loss(model,", "validation_loss(mean,"),
)


def train_with_a_mean(folder: str) -> str:
    """Run minimal_resumable.py there with another module in `parts`."""
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    source = inspect.getsource(module.main)
    assert len(WITH_A_MEAN) == 2
    for old, new in WITH_A_MEAN:
        assert source.count(old) == 1
        source = source.replace(old, new)
    with mock.patch.object(module, "main"):
        exec(source, vars(module))
        return end_with(folder, GPT=Normalised)


def test_a_second_module_is_evaluated_as_it_is_saved(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    said, _ = worker_pool.run(train_with_a_mean, str(tmp_path), world_size=2)
    printed = float(said.splitlines()[-1].rpartition(" ")[2])
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    mean = torch.optim.swa_utils.AveragedModel(Normalised(None)).eval()
    mean.load_state_dict(torch.load(tmp_path / FILE)["mean"])
    held_out = module.WindowDataset(module.load_text(None, 128)[1], 128, FEW)
    _, inputs, labels = next(iter(torch.utils.data.DataLoader(held_out, FEW)))
    assert printed == pytest.approx(mean(inputs, labels).item(), abs=6e-4)


def two_optimizers(kind: str) -> tuple[dict[str, Any], list[Any]]:
    """Make two optimizers of a layer, with a schedule of 8 steps for each."""
    model = torch.nn.Linear(2, 2)
    muon = torch.optim.Muon([model.weight], lr=0.02)
    parts = {"adam": torch.optim.AdamW([model.bias], lr=2e-3), "muon": muon}
    return {"model": model, **parts}, [made(kind, one, 8) for one in parts.values()]


def rates_of_two(parts: dict[str, Any], schedules: list[Any]) -> list[list[float]]:
    """Take four steps without gradients; return the rates of each optimizer."""
    steps = [list(parts.values())[1:], schedules]
    return [rates_of(*pair, steps=4) for pair in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    "kind", ["StepLR", "OneCycleLR", "CosineAnnealingLR", "SequentialLR"]
)
def test_two_optimizers_resume_at_their_rates(tmp_path: Path, kind: str) -> None:
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    parts, schedules = two_optimizers(kind)
    with mock.patch.object(module, "FILE", str(tmp_path / FILE)):
        rates_of_two(parts, schedules)
        module.save_parts(parts, 1)
        due = rates_of_two(parts, schedules)
        resumed, schedules = two_optimizers(kind)
        assert module.load_parts(resumed) == 1
        rates_of_two(resumed, schedules)  # to where they were
    assert rates_of_two(resumed, schedules) == due
    assert [len(set(rates)) > 1 for rates in due] == [True, True]


def test_a_rate_of_numpy_s_is_not_read_back(tmp_path: Path) -> None:
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    source = inspect.getsource(module)
    assert "from math import cos, pi  # torch.load refuses what NumPy's" in source
    parts, _ = two_optimizers("StepLR")
    parts["adam"].param_groups[0]["lr"] = np.float64(0.1)
    with mock.patch.object(module, "FILE", str(tmp_path / FILE)):
        module.save_parts(parts, 1)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            module.load_parts(parts)


def test_loading_takes_no_step(tmp_path: Path) -> None:
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    model = torch.nn.Linear(2, 2)
    mean = torch.optim.swa_utils.AveragedModel(model)
    adam = torch.optim.AdamW(model.parameters())
    adam.register_step_post_hook(lambda *_: mean.update_parameters(model))
    parts = {"model": model, "adam": adam, "mean": mean}
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    adam.zero_grad()
    adam.step()  # the mean is no longer the model
    with mock.patch.object(module, "FILE", str(tmp_path / FILE)):
        assert module.load_parts(parts) == 0
        module.save_parts(parts, 1)
        assert module.load_parts(parts) == 1
    saved = torch.load(tmp_path / FILE)
    assert saved["mean"]["n_averaged"] == mean.n_averaged == 2
    counts = [state["step"] for state in adam.state.values()]
    assert counts == [1, 1]  # the second step had no gradients
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def steps_of_an_epoch() -> tuple[float, int, list[Any]]:
    """Take two steps of two batches; return how far from one process's, and no_syncs.

    Clipping, which would hide a wrong factor, is left out; its calls are returned.
    """
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    wrapper, rank = DistributedDataParallel, torch.distributed.get_rank()
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(**SMALL))
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    # Two steps of two; a fifth, whose step would weigh less, is left out.
    batches = [(0, *torch.randint(256, (2, 4, 16))) for _ in range(5)]
    mine = [(0, x[rank::2], y[rank::2]) for _, x, y in batches]
    no_sync = mock.patch.object(
        wrapper, "no_sync", autospec=True, side_effect=wrapper.no_sync
    )
    with no_sync as told, mock.patch.object(torch.nn.utils, "clip_grad_norm_") as clip:
        module.train_one_epoch(
            wrapper(model), optimizers[0], mock.Mock(), mine, torch.device("cpu")
        )
    for first in (0, 2):
        for _, x, y in batches[first : first + 2]:
            (alone(x, y) / 2).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    assert len(pairs) > 10
    clipped = [call.kwargs for call in clip.mock_calls]
    apart = max((p - q).abs().max().item() for p, q in pairs)
    return apart, told.call_count, clipped


def test_steps_are_one_process_s_with_one_all_reduce_each(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(steps_of_an_epoch, world_size=2)
    assert len(by_rank) == 2
    for apart, no_syncs, clipped in by_rank:
        assert apart < 1e-6 and no_syncs == 2
        assert clipped == [{"max_norm": 1.0}] * 2


def loss_by_hand_and_evaluated() -> tuple[float, float]:
    """Evaluate five samples, of which one rank of two takes three."""
    module: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(**SMALL))
    samples = module.WindowDataset(module.load_text(None, 128)[1], 128, 5)
    assert len(samples) == 5
    losses = [
        model(x[None], y[None]).item() for _, x, y in (samples[i] for i in range(5))
    ]
    return sum(losses) / 5, module.validation_loss(model, samples, torch.device("cpu"))


def test_each_sample_counts_once_in_an_evaluation(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(loss_by_hand_and_evaluated, world_size=2)
    assert len(by_rank) == 2
    for by_hand, evaluated in by_rank:
        assert evaluated == pytest.approx(by_hand, rel=1e-6)


def modes_around(chapter: str, script: str, name: str) -> list[list[bool]]:
    """Evaluate a model with a part that is frozen in eval(); return its modes.

    They are those before and after.
    """
    module: Any = load_chapter(chapter)[script]
    minimal: Any = load_chapter("03_ddp_torchrun")["minimal_resumable"]
    model = minimal.GPT(minimal.GPTConfig(**SMALL))
    if chapter.startswith("06"):  # whose GPT returns logits
        model = load_chapter(chapter)["model"].GPT(minimal.GPTConfig(**SMALL))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    samples = minimal.WindowDataset(minimal.load_text(None, 128)[1], 128, 4)
    if script == "recipe":  # which trains a model of transformers on tokens
        model, samples = load_chapter(chapter)["qwen"].small_model(), torch.arange(256)
    next(model.children()).eval()
    modes = [[part.training for part in model.modules()]]
    place = {"data": 2}.get(script, torch.device("cpu"))
    if script == "recipe":
        place = None
    elif chapter.startswith("05"):
        model.device, place = torch.device("cpu"), None
    words = [model, samples] if place is None else [model, samples, place]
    getattr(module, name)(*words)
    return [*modes, [part.training for part in model.modules()]]


@pytest.mark.parametrize(
    ("chapter", "script", "name"),
    [
        ("03_ddp_torchrun", "minimal_resumable", "validation_loss"),
        ("03_ddp_torchrun", "data", "evaluate"),
        ("05_deepspeed_zero/checkpoints", "minimal_resumable", "held_out_loss"),
        ("05_deepspeed_zero", "recipe", "evaluate"),
        ("06_fsdp", "evaluate", "validation_loss"),
    ],
)
def test_what_was_in_eval_is_so_after_an_evaluation(
    worker_pool: WorkerPool, chapter: str, script: str, name: str
) -> None:
    by_rank = worker_pool.run(modes_around, chapter, script, name, world_size=2)
    assert len(by_rank) == 2
    for before, after in by_rank:
        assert before == after and {*before} == {False, True}


# --- Sharded: resumed from DCP's folders, or from the file of a run of DDP. ----------


def sharded(
    folder: str, lost: str = "", samples: int = FEW, **sizes: Any
) -> tuple[str, str]:
    """Run chapter 06's minimal_resumable.py there, a smaller GPT.

    Return what it prints, and the exit message. `lost` is what it does not take up.
    """
    module: Any = load_chapter("06_fsdp")["minimal_resumable"]
    config = partial(module.GPTConfig, **{**SMALL, **sizes})
    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    output, real = io.StringIO(), module.states.set_optimizer_state_dict
    places: Any = {"FOLDER": Path(folder, "sharded"), "DDP_FILE": Path(folder, FILE)}

    def set_adam(model: Any, optimizer: Any, state: Any, options: Any) -> None:
        if lost != "adam":
            real(model, optimizer, state, options=options)

    load, loss_of = torch.load, module.F.cross_entropy
    losses: list[float] = []

    def loss_noted(*arguments: Any) -> torch.Tensor:
        losses.append((loss := loss_of(*arguments)).item())
        return loss

    def load_noted(file: Any, **words: Any) -> Any:
        # Saved by a rank with a GPU, it would else go there, from all ranks.
        assert file != places["DDP_FILE"] or words["map_location"] == "cpu"
        return load(file, **words)

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.dict(os.environ, local_size),
            mock.patch.object(torch.distributed, "init_process_group"),
            mock.patch.object(torch, "load", load_noted),
            mock.patch.object(module.F, "cross_entropy", loss_noted),
            mock.patch.multiple(module, GPTConfig=config, **places),
            fewer_samples(module, samples),
            mock.patch.object(module.states, "set_optimizer_state_dict", set_adam),
            contextlib.redirect_stdout(output),
        ):
            stack.enter_context(patch)
        if lost == "order":
            sampler = module.DistributedSampler
            stack.enter_context(mock.patch.object(sampler, "set_epoch"))
        try:
            module.main()
        except SystemExit as stop:
            return output.getvalue(), str(stop.code)
    gather = load_chapter("06_fsdp")["ranks"].gather
    told = gather(re.findall(r"mean loss (\S+)", output.getvalue()))[0]
    if losses:  # those told are the means of all ranks
        means = torch.tensor(gather(losses)).mean(dim=0).view(len(told), -1)
        due = pytest.approx(means.mean(dim=1).tolist(), abs=1e-4)
        assert [float(loss) for loss in told] == due
    return output.getvalue(), ""


def rates_in_shards(
    folder: str, chapter: str, script: str, kind: str, rate: float
) -> list[float]:
    """Run it there with another schedule and rate; return the rate of each step."""
    module: Any = load_chapter(chapter)[script]
    adam = partial(torch.optim.AdamW, lr=rate)
    per_rank = {"06_fsdp": 1, "09_one_mesh": 2}[chapter]  # ranks that share samples
    shards = int(os.environ["WORLD_SIZE"]) // per_rank
    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    optimizers: list[Any] = []
    rates: list[float] = []

    def schedule(optimizer: Any, _: Any) -> Any:
        optimizers.append(optimizer)
        return made(kind, optimizer, 2 * 8 // shards)

    def noted(*_: Any, max_norm: float) -> None:
        rates.append(optimizers[0].param_groups[0]["lr"])

    with (
        mock.patch.dict(os.environ, local_size),
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.multiple(module, FOLDER=Path(folder, "sharded"), BATCH_SIZE=4),
        mock.patch.object(module, "GPTConfig", partial(module.GPTConfig, **SMALL)),
        mock.patch.object(module, "LambdaLR", schedule),
        mock.patch.object(torch.optim, "AdamW", lambda p, lr: adam(p)),
        mock.patch.object(torch.nn.utils, "clip_grad_norm_", noted),
        fewer_samples(module, 32),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        module.main()
    return rates


@pytest.mark.parametrize(
    ("chapter", "script", "ranks", "kind"),
    [
        pytest.param(
            *("06_fsdp", "minimal_resumable", 2, "StepLR"), marks=pytest.mark.slow
        ),
        ("06_fsdp", "minimal_resumable", 2, "SequentialLR"),
        ("06_fsdp", "minimal_resumable", 2, "OneCycleLR"),
        pytest.param("09_one_mesh", "minimal", 4, "StepLR", marks=pytest.mark.slow),
        ("09_one_mesh", "minimal", 4, "SequentialLR"),
        pytest.param("09_one_mesh", "minimal", 4, "OneCycleLR", marks=pytest.mark.slow),
    ],
)
def test_any_schedule_goes_on_in_shards_too(
    worker_pool: WorkerPool,
    tmp_path: Path,
    chapter: str,
    script: str,
    ranks: int,
    kind: str,
) -> None:
    run = partial(worker_pool.run, rates_in_shards, str(tmp_path), chapter, script)
    for rank, rates in enumerate(both := run(kind, 2e-2, world_size=ranks)):
        assert len(rates) == 8 and rates == both[0], rank
    (tmp_path / "sharded/epoch_002/.metadata").unlink()
    resumed = run(kind, 2e-3, world_size=ranks // 2)
    assert len(both) == 2 * len(resumed) == ranks
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=2e-3)
    due = rates_of(optimizer, made(kind, optimizer, 16), 16)[8:]
    assert len(due) == 8 and resumed == [due] * len(resumed)


def whole_state(folder: Path, epoch: int) -> dict[str, Any]:
    """Read a folder of shards as one process's state, without a group."""
    file = folder / "whole.pt"
    dcp_to_torch_save(folder / "sharded" / f"epoch_{epoch:03}", file)
    return torch.load(file)


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> list[bool]:
    """Compare the weights and both of Adam's moments, by name."""
    moments = [
        torch.equal(one["adam"]["state"][name][moment], values[moment])
        for name, values in other["adam"]["state"].items()
        for moment in ("exp_avg", "exp_avg_sq", "step")
    ]
    weights = [torch.equal(one["model"][n], w) for n, w in other["model"].items()]
    return weights + moments


def test_a_sharded_run_that_died_resumes_from_the_newest_whole_folder(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (said, _), other = worker_pool.run(sharded, str(tmp_path), world_size=2)
    begins, *epochs = said.splitlines()
    assert begins == "2 ranks on cpu: 0 of 2 epochs done"
    assert [line[:20] for line in epochs] == [f"epoch {n} | mean loss " for n in (0, 1)]
    assert other == ("", "")  # rank 1 is silent
    first, expected = whole_state(tmp_path, 1), whole_state(tmp_path, 2)
    assert (first["epoch"], expected["epoch"]) == (1, 2)
    assert not all(same_bits(first, expected))
    # The second save breaks off: all shards are there, and no index of them.
    (tmp_path / "sharded" / "epoch_002" / ".metadata").unlink()
    (then, _), _ = worker_pool.run(sharded, str(tmp_path), world_size=2)
    assert then.splitlines() == ["2 ranks on cpu: 1 of 2 epochs done", *epochs[1:]]
    same = same_bits(whole_state(tmp_path, 2), expected)
    assert len(same) == 15 + 3 * 14 and all(same)
    # A run that has ended does no more, whatever the number of the newest folder, and
    # whatever else is there.
    for epoch, number in ((2, 1000), (1, 999)):
        folder = tmp_path / "sharded" / f"epoch_{epoch:03}"
        folder.rename(tmp_path / "sharded" / f"epoch_{number:03}")
    copy = tmp_path / "sharded" / "epoch_999_backup"
    shutil.copytree(tmp_path / "sharded" / "epoch_999", copy)
    (end, _), _ = worker_pool.run(sharded, str(tmp_path), world_size=2)
    assert end == "2 ranks on cpu: 2 of 2 epochs done\n"
    shutil.rmtree(copy)
    for epoch, number in ((2, 1000), (1, 999)):
        folder = tmp_path / "sharded" / f"epoch_{number:03}"
        folder.rename(tmp_path / "sharded" / f"epoch_{epoch:03}")
    # One rank takes twice as many steps in an epoch. With the last the rate is 0 too.
    (tmp_path / "sharded" / "epoch_002" / ".metadata").unlink()
    ((one, _),) = worker_pool.run(sharded, str(tmp_path), world_size=1)
    assert one.startswith("1 ranks on cpu: 1 of 2 epochs done\nepoch 1")
    for state in (expected, whole_state(tmp_path, 2)):
        (group,) = state["adam"]["param_groups"]
        assert group["lr"] == pytest.approx(0, abs=1e-9)


def saved_and_loaded(outline: str, folder: str) -> list[bool]:
    """Save by the first half of it, load by the second; compare with another model."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    runs: list[dict[str, Any]] = []
    for seed, half in enumerate(outline.split("# The next run, after fully_shard:\n")):
        torch.manual_seed(seed)  # the second has other weights, and takes no step
        fully_shard(model := torch.nn.Linear(8, 4), mesh=mesh)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        if seed == 0:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        names = {"model": model, "optimizer": optimizer, "dcp": dcp}
        names |= {"get_state_dict": get_state_dict, "set_state_dict": set_state_dict}
        exec(half.replace("sharded/", f"{folder}/sharded/"), names)
        runs.append({"model": model, "optimizer": optimizer})
    (first, then), same = runs, []
    both = (run["model"].parameters() for run in runs)
    for one, other in zip(*both, strict=True):
        saved, loaded = first["optimizer"].state[one], then["optimizer"].state[other]
        pairs = [(one, other)] + [(saved[name], loaded[name]) for name in saved]
        same += [torch.equal(local(a), local(b)) for a, b in pairs]
    rates = [run["optimizer"].param_groups[0]["lr"] for run in runs]
    return [*same, rates[0] == rates[1]]


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of it; of a plain tensor all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_the_outline_of_sharded_checkpoints_saves_and_loads(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    outline = "\n".join(outline_of(PAGE_06))
    assert outline.count("dcp.") == 2
    found = worker_pool.run(saved_and_loaded, outline, str(tmp_path), world_size=2)
    # Weight and bias, for each the two moments and the number of the step.
    assert found == [[True] * 9] * 2
    without = outline[: outline.index("set_state_dict")]
    (tmp_path / "other").mkdir()
    found = worker_pool.run(saved_and_loaded, without, str(tmp_path / "other"))
    assert not all(found[0])


@pytest.fixture(scope="module")
def ddp_runs(
    worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Train with DDP; return how a whole run ends, and the file of one that died."""
    folders = [tmp_path_factory.mktemp(name) for name in ("whole", "died")]
    for folder, dies_in in zip(folders, ("", "evaluate"), strict=True):
        words = (str(folder), 0.0, 16, dies_in)
        worker_pool.run(resumable, *words, world_size=2)
    return torch.load(folders[0] / FILE), folders[1] / FILE


@pytest.mark.parametrize("lost", ["", "adam", "order"])
def test_fsdp_ends_a_run_of_ddp_as_ddp_does(
    worker_pool: WorkerPool,
    ddp_runs: tuple[dict[str, Any], Path],
    tmp_path: Path,
    lost: str,
) -> None:
    expected, file = ddp_runs
    shutil.copy(file, tmp_path / FILE)
    before = (tmp_path / FILE).read_bytes()
    (said, _), _ = worker_pool.run(sharded, str(tmp_path), lost, world_size=2)
    assert said.splitlines()[0] == "2 ranks on cpu: 1 of 2 epochs done"
    ended = whole_state(tmp_path, 2)
    apart = (weights_of(ended) - weights_of(expected)).abs().max().item()
    assert apart > 1e-3 if lost else apart < 1e-5
    if not lost:
        assert ended["epoch"] == 2
        (group,) = ended["adam"]["param_groups"]
        assert group["lr"] == pytest.approx(0, abs=1e-9)  # the schedule ends here too
        gpt: Any = load_chapter("06_fsdp")["minimal_resumable"]
        model = gpt.GPT(gpt.GPTConfig(**SMALL))
        names = [name for name, _ in model.named_parameters()]
        assert len(names) == len(ended["adam"]["state"]) == 14
        for i, name in enumerate(names):
            found, right = ended["adam"]["state"][name], expected["adam"]["state"][i]
            assert found["step"] == right["step"]
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.allclose(found[moment], right[moment], atol=1e-5)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("saved_by", ["dcp", "ddp"])
@pytest.mark.parametrize("sizes", [{"width": 64}, {"layers": 2}])
def test_another_model_s_shards_are_named_and_kept(
    worker_pool: WorkerPool,
    ddp_runs: tuple[dict[str, Any], Path],
    tmp_path: Path,
    saved_by: str,
    sizes: dict[str, int],
) -> None:
    shutil.copy(ddp_runs[1], tmp_path / FILE)
    if saved_by == "dcp":
        worker_pool.run(sharded, str(tmp_path), world_size=1)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    assert len(files) == (3 if saved_by == "dcp" else 1)
    run = partial(sharded, **sizes)
    ends = worker_pool.run(run, str(tmp_path), world_size=2)
    cause = "Missing|Size mismatch|size mismatch"
    assert len(ends) == 2
    for said, error in ends:
        assert said == ""
        newest = "sharded/epoch_002" if saved_by == "dcp" else FILE
        # A new layer is asked for in Adam's state first, as one without gradient is.
        assert f"move {tmp_path / newest} away: " in error
        assert "\n" not in error
        assert re.search(cause, error), error
    assert [path.read_bytes() for path in files] == before


def test_a_truncated_file_of_ddp_and_too_few_samples_end_in_a_line(
    worker_pool: WorkerPool, ddp_runs: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    content = ddp_runs[1].read_bytes()
    (tmp_path / FILE).write_bytes(content[: len(content) // 2])
    ends = worker_pool.run(sharded, str(tmp_path), world_size=2)
    begins = f"move {re.escape(str(tmp_path / FILE))} away: "
    told = [bool(re.fullmatch(f"{begins}.+", error)) for _, error in ends]
    assert told == [True, True], ends  # a dot matches no end of a line
    assert [said for said, _ in ends] == ["", ""]
    few = partial(sharded, samples=1)
    ends = worker_pool.run(few, str(tmp_path / "few"), world_size=2)
    assert ends == [("", "too few samples per rank")] * 2


def with_unused_layer(folder: str, frozen: bool) -> tuple[str, str]:
    """Train a GPT with a layer that no forward pass uses; return how it ends."""
    module: Any = load_chapter("06_fsdp")["minimal_resumable"]

    class OwnModel(module.GPT):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.unused = torch.nn.Linear(4, 4).requires_grad_(not frozen)

    with mock.patch.object(module, "GPT", OwnModel):
        return sharded(folder, samples=96)


def test_a_layer_without_gradient_is_to_be_frozen_when_a_run_resumes(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(with_unused_layer, str(tmp_path), False)
    shutil.rmtree(tmp_path / "sharded" / "epoch_002")
    ends = worker_pool.run(with_unused_layer, str(tmp_path), False)
    begins = f"freeze what had no gradient, or move {tmp_path}/sharded/epoch_001 away: "
    for said, error in ends:
        assert said == "" and error.startswith(begins) and "\n" not in error
        assert "Missing key in checkpoint state_dict: adam.state.unused." in error
    (said, error), _ = worker_pool.run(with_unused_layer, str(tmp_path), True)
    assert not error and said.startswith("2 ranks on cpu: 1 of 2 epochs done\nepoch 1")
    assert len(ends) == 2 and " at the save, or had no gradient" in words_of("06_fsdp")


def with_statistics(folder: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Train a GPT with BatchNorm; return its buffers, and the seeds that were set."""
    module: Any = load_chapter("06_fsdp")["minimal_resumable"]
    noted: dict[str, torch.Tensor] = {}
    state_of, seed = module.state_of, mock.Mock(side_effect=torch.manual_seed)

    class OwnModel(module.GPT):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            norms = (torch.nn.BatchNorm1d(1) for _ in range(5))
            self.norms = torch.nn.ModuleList(norms)
            column = torch.full((3, 2), float(torch.distributed.get_rank()))[:, 0]
            self.register_buffer("column", column)
            self.register_buffer("mask", torch.arange(3).expand(2, 3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            values = inputs.float().reshape(-1, 1)
            return super().forward(inputs) + sum(n(values).mean() for n in self.norms)

    def note(model: Any, *rest: Any) -> dict[str, Any]:
        noted.update({name: one.clone() for name, one in model.named_buffers()})
        return state_of(model, *rest)

    with (
        mock.patch.multiple(module, GPT=OwnModel, state_of=note),
        mock.patch.object(torch, "manual_seed", seed),
    ):
        assert sharded(folder, samples=96)[1] == ""
    return noted, [call.args[0] for call in seed.mock_calls]


def test_saved_statistics_are_rank_zero_s_and_ranks_draw_otherwise(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    # On two ranks DCP takes all buffers from one; on three a mean and its variance
    # may come from two.
    (expected, seeds), *others = worker_pool.run(
        with_statistics, str(tmp_path), world_size=3
    )
    saved = whole_state(tmp_path, 2)["model"]
    assert len(expected) == 5 * 3 + 2 and len(others) == 2
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name
        assert all(torch.equal(theirs[name], value) for theirs, _ in others), name
    drawn = [seeds, *(seeds for _, seeds in others)]
    assert drawn == [[0, rank, 3 + rank] for rank in range(3)]


def test_adam_s_numbers_get_the_names_of_its_own_groups() -> None:
    module: Any = load_chapter("06_fsdp")["minimal_resumable"]
    model = module.GPT(module.GPTConfig(**SMALL))
    named = list(model.named_parameters())
    frozen, *others = reversed(named)
    frozen[1].requires_grad_(False)
    groups = [
        {"params": [p for _, p in others if p.dim() == dim], "lr": 0.1 * dim}
        for dim in (1, 2)
    ]
    adam = torch.optim.AdamW(groups)
    model(*torch.zeros(2, 1, 4, dtype=torch.long)).backward()
    adam.step()
    content = module.by_name(adam.state_dict(), model, adam)
    assert len(content["state"]) == len(others) == 13
    for name, parameter in others:
        assert content["state"][name]["exp_avg"] is adam.state[parameter]["exp_avg"]
    assert [group["lr"] for group in content["param_groups"]] == [0.1, 0.2]
    told = [name for group in content["param_groups"] for name in group["params"]]
    assert told == [n for dim in (1, 2) for n, p in others if p.dim() == dim]


def test_a_saved_block_that_the_model_lacks_is_named(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    # dcp.load says nothing of it: it asks only for what the model has.
    worker_pool.run(partial(sharded, layers=2), str(tmp_path), world_size=1)
    shutil.rmtree(tmp_path / "sharded" / "epoch_002")
    ends = worker_pool.run(sharded, str(tmp_path), world_size=2)
    why = "no place for model.blocks.1.value.weight"
    newest = tmp_path / "sharded" / "epoch_001"
    assert ends == [("", f"move {newest} away: {why}")] * 2
    ends = worker_pool.run(on_two_axes, str(tmp_path), world_size=2)
    said = f"move {newest} away: {why}"
    assert [(end.said, end.error) for end in ends] == [("", said)] * 2
    assert [path.name for path in (tmp_path / "sharded").iterdir()] == ["epoch_001"]


def sharded_gpt(module: Any, is_wrapped: bool = False) -> tuple[Any, Any]:
    """Return a small GPT of a script, sharded, and what steps it."""
    torch.manual_seed(0)
    model: Any = module.GPT(module.GPTConfig(**SMALL))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block) if is_wrapped else block
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_step(model: Any, optimizer: Any) -> None:
    """Step on tokens that are the same on all ranks."""
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed_with_frozen_blocks(folder: str, is_frozen: bool) -> str | int:
    """Unfreeze blocks in mid-run and save; resume; return the error, or the states."""
    module: Any = load_chapter("06_fsdp")["minimal_resumable"]
    model, optimizer = sharded_gpt(module)
    model.blocks.requires_grad_(False)
    one_step(model, optimizer)
    model.blocks.requires_grad_(True)
    one_step(model, optimizer)
    module.dcp.save(module.state_of(model, optimizer, 1), checkpoint_id=folder)
    other, new = sharded_gpt(module)
    other.blocks.requires_grad_(not is_frozen)
    try:
        module.resume(Path(folder), other, new)
    except RuntimeError as error:
        return str(error)
    one_step(model, optimizer)
    one_step(other, new)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert len(pairs) == 14
    for a, b in pairs:
        assert torch.equal(a.full_tensor(), b.full_tensor())
    return len(new.state)


def test_adam_s_moments_of_what_was_unfrozen_are_not_dropped(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run = partial(resumed_with_frozen_blocks, str(tmp_path / "frozen"))
    refusal = "no place for adam.state.blocks.0.value.weight.step"
    assert worker_pool.run(run, True, world_size=2) == [refusal] * 2
    run = partial(resumed_with_frozen_blocks, str(tmp_path / "unfrozen"))
    assert worker_pool.run(run, False, world_size=2) == [14] * 2


def taken_from_a_file_of_ddp(folder: str, kind: str) -> str | float:
    """Resume from what one process saved; return the error, or how far Adam is off.

    The sharded model has wrapped or frozen blocks, or groups in another order. Or both
    are trained by SGD.
    """
    module: Any = load_chapter("06_fsdp")["minimal_resumable"]

    def grouped(model: Any, dims: tuple[int, ...]) -> Any:
        of = {dim: [p for p in model.parameters() if p.dim() == dim] for dim in dims}
        groups = [{"params": of[dim], "weight_decay": 0.1 * dim} for dim in dims]
        if kind == "SGD":
            return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-2)

    torch.manual_seed(0)
    plain = module.GPT(module.GPTConfig(**SMALL))
    adam = grouped(plain, (1, 2))
    one_step(plain, adam)
    file = Path(folder, FILE)
    if dist.get_rank() == 0:
        state = {"model": plain.state_dict(), "adam": adam.state_dict(), "epoch": 1}
        torch.save(state, file)
    dist.barrier()
    model, _ = sharded_gpt(module, is_wrapped=kind == "wrapped")
    model.blocks.requires_grad_(kind != "frozen")
    sharded_adam = grouped(model, (2, 1) if kind == "swapped" else (1, 2))
    try:
        module.resume(file, model, sharded_adam)
    except (KeyError, RuntimeError) as error:
        return str(error)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert len(pairs) == len(sharded_adam.state) == 14
    moments = [(sharded_adam.state[p], adam.state[q]) for p, q in pairs]
    return max(
        (ours[name].full_tensor() - due[name]).abs().max().item()
        for ours, due in moments
        for name in (
            ["momentum_buffer"] if kind == "SGD" else ["exp_avg", "exp_avg_sq"]
        )
    )


@pytest.mark.parametrize(
    ("kind", "misfit"),
    [
        ("", ""),
        ("wrapped", ""),
        ("SGD", ""),
        ("swapped", "token_embedding.weight"),
        ("frozen", "blocks.0.attention_norm.weight"),
    ],
)
def test_a_file_of_ddp_fits_wrapped_blocks_and_equal_groups_alone(
    worker_pool: WorkerPool, tmp_path: Path, kind: str, misfit: str
) -> None:
    ends = worker_pool.run(taken_from_a_file_of_ddp, str(tmp_path), kind, world_size=2)
    refusal = f"size mismatch, or frozen: {misfit}"
    assert ends == [refusal if misfit else 0.0] * 2


class Unwrapped(torch.nn.Module):
    """A wrapper like DDP that communicates nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Keep the module under DDP's name for it."""
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        return self.module(*inputs)


def kept_by_fsdp() -> list[float]:
    """Train chapter 06's loop; return the parts of weights and state that are here."""
    made, real = [], torch.optim.AdamW

    def adamw(parameters: Any, **settings: Any) -> Any:
        made.append(real(parameters, **settings))
        return made[-1]

    module: Any = load_chapter("06_fsdp")["minimal"]
    shard = mock.patch.object(module, "fully_shard", side_effect=module.fully_shard)
    with mock.patch.object(torch.optim, "AdamW", adamw), shard as told:
        train("minimal", chapter="06_fsdp")
    units = [type(call.args[0]).__name__ for call in told.mock_calls]
    assert units == ["FSDPBlock", "FSDPGPT"]  # one block, and the root last
    (optimizer,) = made
    parts = []
    for kept in (optimizer.param_groups[0]["params"], optimizer.state.values()):
        tensors = [one["exp_avg"] if isinstance(one, dict) else one for one in kept]
        here = sum(one.to_local().numel() for one in tensors)
        parts.append(here / sum(one.numel() for one in tensors))
    return parts


def test_each_rank_keeps_half_of_weights_and_moments(worker_pool: WorkerPool) -> None:
    parts = worker_pool.run(kept_by_fsdp, world_size=2)
    assert parts == [pytest.approx([0.5, 0.5], abs=0.01)] * 2


# --- Two axes: the same run by FSDP and tensor parallelism. -------------------------


class TwoAxes(NamedTuple):
    """What a rank of chapter 09's minimal.py prints, ends with, and does.

    The seeds that it sets; each unit of FSDP and the ranks that share it, and the
    dtypes of its policies; what DTensor warns of.
    """

    said: str
    error: str
    seeds: list[int]
    units: list[tuple[str, list[int]]]
    dtypes: set[tuple[Any, Any]]
    warnings: int


def trained_on_two_axes() -> list[str]:
    """Freeze all but the head, cut the GPT on two axes, and name what trains."""
    module: Any = load_chapter(MESH)["minimal"]
    model = module.GPT(module.GPTConfig(**SMALL, tied=False))
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    names = ("data", "tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    module.shard_twice(model, mesh, MixedPrecisionPolicy())
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_what_is_frozen_stays_frozen_on_two_axes(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(trained_on_two_axes) == [["head.weight"]] * 2


def all_samples(dataset: Any, *place: int, drop_last: bool) -> Any:
    """Give each of all ranks samples of its own, as if none shared matrices."""
    return torch.utils.data.DistributedSampler(dataset)


def with_a_plain_norm(model: Any, mesh: Any, plan: Any) -> None:
    """Split all but the last norm, which no style makes a DTensor."""
    left = {name: style for name, style in plan.items() if name != "final_norm"}
    parallelize_module(model, mesh, left)


def untied(config: Any) -> Any:
    """Build the GPT without telling that it is tied."""
    model = load_chapter(MESH)["model"].GPT(config)
    model.config = mock.Mock(tied=False)
    return model


def on_meta(config: Any) -> Any:
    """Build a GPT that has shapes and no memory, and is not moved."""
    with torch.device("meta"):
        model = load_chapter(MESH)["model"].GPT(config)
    model.to = lambda device: model
    return model


def plan_and_wrap(model: Any, *mesh_and_plan: Any) -> None:
    """Split the model, then let backward compute half of each block again."""
    parallelize_module(model, *mesh_and_plan)
    keep = load_chapter("06_fsdp/settings")["selective"].keep_half_of_products
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, context_fn=keep)


def shard_and_fill(module: Any, **more: Any) -> None:
    """Shard it; give the shards of the root, the last one, memory."""
    fully_shard(module, **more)
    if hasattr(module, "token_embedding"):
        module.to_empty(device="cpu")


def with_a_copy_of_adam(*of: Any, get: Any = get_state_dict) -> tuple[Any, Any]:
    """Return a state whose second half is not the optimizer's own memory."""
    weights, adam = get(*of)
    return weights, copy.deepcopy(adam)


MESH, SAMPLES = "09_one_mesh", 256
BF16 = "the policy of a GPU"
LARGE = "a model too large for one rank"
UNCLIPPED = "gradients not clipped"
# What is replaced in the script, and by what.
MESH_FAULTS: dict[str, dict[str, Any]] = {
    "": {},
    "a sampler of all ranks": {"DistributedSampler": all_samples},
    UNCLIPPED: {"torch.nn.utils.clip_grad_norm_": mock.Mock()},
    "Adam's state lost": {
        "states.get_state_dict": with_a_copy_of_adam,
        "states.set_optimizer_state_dict": mock.Mock(),
    },
    "the order of samples": {"DistributedSampler.set_epoch": lambda self, epoch: None},
    BF16: {"MixedPrecisionPolicy": lambda param_dtype, **more: POLICY},
    "a plain norm": {"tp.parallelize_module": with_a_plain_norm},
    "an odd length": {"LENGTH": 127},
    LARGE: {
        "GPT": on_meta,
        "tp.parallelize_module": plan_and_wrap,
        "fully_shard": shard_and_fill,
    },
}
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def on_two_axes(folder: str, fault: str = "", **sizes: Any) -> TwoAxes:
    """Run chapter 09's minimal.py there, with a smaller GPT."""
    module: Any = load_chapter(MESH)["minimal"]
    config = partial(module.GPTConfig, **{**SMALL, **sizes})
    output, error, seeds = io.StringIO(), "", mock.Mock(side_effect=torch.manual_seed)
    replaced = MESH_FAULTS[fault]
    shard = mock.Mock(side_effect=replaced.get("fully_shard", fully_shard))
    with contextlib.ExitStack() as stack:
        local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        stack.enter_context(mock.patch.dict(os.environ, local_size))
        for place, new in {
            **replaced,
            "GPTConfig": config,
            "FOLDER": Path(folder, "sharded"),
            "torch.manual_seed": seeds,
            "fully_shard": shard,
            "dist.init_process_group": mock.Mock(),
        }.items():
            *names, name = place.split(".")
            target = functools.reduce(getattr, names, module)
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(fewer_samples(module, SAMPLES))
        stack.enter_context(contextlib.redirect_stdout(output))
        warned = stack.enter_context(mock.patch.object(_redistribute.logger, "warning"))
        try:
            module.main()
        except SystemExit as stop:
            error = str(stop.code)
    seen = [seed.args[0] for seed in seeds.mock_calls]
    units = [
        (type(call.args[0]).__name__, call.kwargs["mesh"].mesh.tolist())
        for call in shard.mock_calls
    ]
    policies = [call.kwargs["mp_policy"] for call in shard.mock_calls]
    dtypes = {(policy.param_dtype, policy.reduce_dtype) for policy in policies}
    return TwoAxes(output.getvalue(), error, seen, units, dtypes, warned.call_count)


def with_another_decay(folder: str) -> tuple[str, float]:
    """Resume there with another weight decay; return what is said, and the decay."""
    made: list[torch.optim.Optimizer] = []
    real = torch.optim.AdamW

    def adam(*words: Any, lr: float) -> torch.optim.Optimizer:
        made.append(real(*words, lr=lr, weight_decay=0.5))
        return made[-1]

    fault = {"torch.optim.AdamW": adam}
    with mock.patch.dict(MESH_FAULTS, {"another decay": fault}):
        said = on_two_axes(folder, "another decay").said
    ((group,),) = [one.param_groups for one in made]
    return said, group["weight_decay"]


def without_tie(folder: str) -> TwoAxes:
    """Run it with a GPT that does not tell that one matrix has two names."""
    with mock.patch.object(load_chapter(MESH)["minimal"], "GPT", untied):
        return on_two_axes(folder)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far apart two states are, in weights and in both of Adam's moments."""
    adam = "exp_avg", "exp_avg_sq"
    ends = [
        [*run["model"].items()]
        + [(n, s[m]) for n, s in run["adam"]["state"].items() for m in adam]
        for run in (one, other)
    ]
    pairs = list(zip(*(sorted(end, key=lambda x: x[0]) for end in ends), strict=True))
    assert len(pairs) == 15 + 2 * 14
    assert all(a[0] == b[0] for a, b in pairs)
    return max((a[1] - b[1]).abs().max().item() for a, b in pairs)


@pytest.fixture(scope="module")
def fsdp_run(
    worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], dict[str, Any]]:
    """Train by FSDP; return its folder, what it says of each epoch, and its end."""
    folder = tmp_path_factory.mktemp("fsdp")
    (said, _), _ = worker_pool.run(sharded, str(folder), "", SAMPLES, world_size=2)
    return folder, said.splitlines()[1:], whole_state(folder, 2)


def test_two_axes_resume_with_the_weight_decay_that_was_saved(
    worker_pool: WorkerPool, fsdp_run: tuple
) -> None:
    folder, *_ = fsdp_run
    ends = worker_pool.run(with_another_decay, str(folder), world_size=2)
    done = "(1, 2) ranks on cpu: 2 of 2 epochs done\n"
    assert ends == [(done, 0.01), ("", 0.01)]  # AdamW's default was saved


def after_one_epoch(folder: Path, new: Path) -> None:
    """Copy two checkpoints, the first with the larger number: it is the newest."""
    for old, number in (("epoch_001", 1000), ("epoch_002", 999)):
        shutil.copytree(folder / "sharded" / old, new / "sharded" / f"epoch_{number}")


def test_two_axes_train_as_fsdp_does_and_take_up_each_other_s_shards(
    worker_pool: WorkerPool, fsdp_run: tuple, tmp_path: Path
) -> None:
    _, losses, expected = fsdp_run
    ends = worker_pool.run(on_two_axes, str(tmp_path), world_size=4)
    begins = "(2, 2) ranks on cpu: 0 of 2 epochs done"
    assert ends[0].said.splitlines() == [begins, *losses]
    assert [(end.said, end.error) for end in ends[1:]] == [("", "")] * 3
    # Sharded by tokens, each rank's dropout has a mask of its own.
    assert [end.seeds for end in ends] == [[0, rank, 4 + rank] for rank in range(4)]
    assert distance(whole_state(tmp_path, 2), expected) < 1e-5
    # Neighbours share matrices, so FSDP's ranks are every second one.
    shards = [[0, 2], [1, 3]] * 2
    assert [end.units for end in ends] == [
        [("FSDPBlock", ranks), ("FSDPGPT", ranks)] for ranks in shards
    ]
    assert [end.warnings for end in ends] == [0] * 4
    assert [end.dtypes for end in ends] == [{(None, torch.float32)}] * 4
    # Of two checkpoints, and a copy, it takes the last, which leaves nothing to do.
    saved = tmp_path / "sharded"
    shutil.copytree(saved / "epoch_001", saved / "epoch_001_backup")
    done, *_ = worker_pool.run(on_two_axes, str(tmp_path), world_size=4)
    assert done.said == "(2, 2) ranks on cpu: 2 of 2 epochs done\n"
    # FSDP alone goes on from the first.
    fsdp = tmp_path / "fsdp"
    after_one_epoch(tmp_path, fsdp)
    worker_pool.run(sharded, str(fsdp), "", SAMPLES, world_size=2)
    assert distance(whole_state(fsdp, 2), expected) < 1e-5


@pytest.mark.parametrize(
    "fault",
    [
        "",
        BF16,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (LARGE, UNCLIPPED)),
        pytest.param("a sampler of all ranks", marks=pytest.mark.slow),
        pytest.param("Adam's state lost", marks=pytest.mark.slow),
        pytest.param("the order of samples", marks=pytest.mark.slow),
    ],
)
def test_two_axes_go_on_from_fsdp(
    worker_pool: WorkerPool, fsdp_run: tuple, tmp_path: Path, fault: str
) -> None:
    folder, losses, expected = fsdp_run
    after_one_epoch(folder, tmp_path)
    first, *_ = worker_pool.run(on_two_axes, str(tmp_path), fault, world_size=4)
    assert not first.error
    begins, loss = first.said.splitlines()
    assert begins == "(2, 2) ranks on cpu: 1 of 2 epochs done"
    apart = distance(whole_state(tmp_path, 2), expected)
    if fault == BF16:  # rounds, and trains as well
        assert 1e-5 < apart < 0.05
        value, right = (float(line.split()[-1]) for line in (loss, losses[1]))
        assert value == pytest.approx(right, rel=0.01)
    elif fault in ("", LARGE):
        kind = "FSDPCheckpointWrapper" if fault else "FSDPBlock"
        assert [name for name, _ in first.units] == [kind, "FSDPGPT"]
        assert apart < 1e-5 and loss == losses[1]
    else:
        assert apart > 1e-4


def test_two_axes_without_the_tie_have_another_matrix(
    worker_pool: WorkerPool, fsdp_run: tuple, tmp_path: Path
) -> None:
    after_one_epoch(fsdp_run[0], tmp_path)
    ends = worker_pool.run(without_tie, str(tmp_path), world_size=2)
    assert len(ends) == 2
    for end in ends:
        assert end.error.startswith("freeze what had no gradient, or move ")
        assert end.error.endswith("adam.state.head.weight.step.")


def test_two_axes_refuse_another_model_and_ranks_that_do_not_divide(
    worker_pool: WorkerPool, fsdp_run: tuple, tmp_path: Path
) -> None:
    after_one_epoch(fsdp_run[0], tmp_path)
    wide = partial(on_two_axes, width=64)
    ends = worker_pool.run(wide, str(tmp_path), world_size=2)
    assert len(ends) == 2
    for end in ends:
        assert re.fullmatch("move .*epoch_1000 away: .*Size mismatch .*", end.error)
    plain = worker_pool.run(on_two_axes, str(tmp_path), "a plain norm", world_size=2)
    said = "PLAN has no style for final_norm.weight"
    assert [end.error for end in plain] == [said] * 2
    odd = worker_pool.run(on_two_axes, str(tmp_path), "an odd length", world_size=2)
    said = "samples of 127 tokens: pad to a multiple of 2"
    assert [end.error for end in odd] == [said] * 2
    (alone,) = worker_pool.run(on_two_axes, str(tmp_path), world_size=1)
    assert alone.error == "each host needs a multiple of 2 ranks"
    kept = sorted(path.name for path in (tmp_path / "sharded").iterdir())
    assert kept == ["epoch_1000", "epoch_999"]


PIPELINE, AUTOCAST = "08_pipeline_parallel", "bf16"


class OtherLabels(Schedule1F1B):
    """Gives each micro-batch the labels of another one."""

    def step(self, *args: Any, target: Any, **more: Any) -> None:
        """Move all labels on by one micro-batch."""
        target = None if target is None else target.roll(len(target) // 8, 0)
        super().step(*args, target=target, **more)


class OneMissing(Schedule1F1B):
    """Leaves out the samples of the last micro-batch."""

    def step(self, *args: Any, target: Any, **more: Any) -> None:
        """Cut the last eighth off."""
        target = None if target is None else target[: len(target) // 8 * 7]
        super().step(*(x[: len(x) // 8 * 7] for x in args), target=target, **more)


class OtherBlocks(load_chapter(PIPELINE)["minimal"].Part):
    """Has the blocks of another stage."""

    def __init__(self, model: Any, *place: int) -> None:
        """Cut a model of which the blocks have changed places."""
        model.blocks = torch.nn.ModuleList(reversed(model.blocks))
        super().__init__(model, *place)


def one_left_out(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Step all parameters of a stage but the last matrix."""
    return torch.optim.SGD([p for p in parameters if p.ndim > 1][:-1], lr=lr)


def local_samples(dataset: Any, num_replicas: int, rank: int) -> Any:
    """Give each stage samples of its own."""
    return torch.utils.data.DistributedSampler(dataset)


def only_of_the_world(
    tensor: torch.Tensor, group: Any = None, reduce: Any = torch.distributed.all_reduce
) -> None:
    """Leave the tied gradients, which two stages add up, as they are."""
    if group is None:
        reduce(tensor)


def under_autocast(*call: Any) -> Any:
    """Call a schedule's step or eval as the page says for bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        return losses_of(*call)


losses_of = load_chapter(PIPELINE)["minimal"].losses_of
# What is replaced in the script, and by what.
FAULTS: dict[str, tuple[str, Any]] = {
    "another stage's blocks": ("Part", OtherBlocks),
    "gradients summed": ("Schedule1F1B", partial(Schedule1F1B, scale_grads=False)),
    "labels of another micro-batch": ("Schedule1F1B", OtherLabels),
    "a micro-batch missing": ("Schedule1F1B", OneMissing),
    "a parameter missing": ("torch.optim.AdamW", one_left_out),
    "tied gradients apart": ("dist.all_reduce", only_of_the_world),
    "other samples on each stage": ("DistributedSampler", local_samples),
    AUTOCAST: ("losses_of", under_autocast),
}


def made_by(optimizer: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes AdamW or SGD, with a rate that suits it."""
    lr = {"AdamW": 2e-3, "SGD": 0.1}[optimizer]
    return partial(getattr(torch.optim, optimizer), lr=lr)


MAX_NORM = 0.5  # the first steps' norms are larger


def clipping(
    optimizer: Any, parameters: Any, max_norm: float = MAX_NORM
) -> torch.optim.Optimizer:
    """Make an optimizer that clips before each step, as one process does."""
    parameters = list(parameters)
    made = optimizer(parameters)
    made.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(parameters, max_norm) and None
    )
    return made


def held_out_loss(weights: dict[str, torch.Tensor], **sizes: Any) -> float:
    """Return the mean loss of one process on the first 64 held-out windows."""
    module: Any = load_chapter(PIPELINE)["minimal"]
    model = module.GPT(module.GPTConfig(**SMALL | sizes))
    model.load_state_dict(weights)
    samples = module.WindowDataset(module.load_text(None, 128)[1], 128, 256)
    _, inputs, labels = next(iter(torch.utils.data.DataLoader(samples, 64)))
    return model.eval()(inputs, labels).item()


def in_stages(
    sizes: dict[str, Any], optimizer: str, fault: str = "", clips: bool = False
) -> tuple[float, str, str, list[str]]:
    """Train in one process, then in stages; return how far apart they end.

    And what each prints, and the names of what is saved. With SGD in AdamW's place a
    wrong factor of a gradient shows, which AdamW hides.
    """
    module: Any = load_chapter(PIPELINE)["minimal"]
    by = made_by(optimizer)
    alone, said_alone = in_one_process(optimizer, clips, **sizes)
    with contextlib.ExitStack() as stack:
        chosen = mock.patch.object(torch.optim, "AdamW", lambda p, lr: by(p))
        stack.enter_context(chosen)
        if clips:
            stack.enter_context(mock.patch.object(module, "MAX_NORM", MAX_NORM))
        if fault:
            place, replaced = FAULTS[fault]
            *names, name = place.split(".")
            target = functools.reduce(getattr, names, module)
            stack.enter_context(mock.patch.object(target, name, replaced))
        together, said = train("minimal", chapter=PIPELINE, **sizes)
    apart = [(together[name] - alone[name]).abs().max().item() for name in together]
    assert list(together) in ([], list(alone))  # the order is the whole model's too
    if torch.distributed.get_rank() == 0:
        said_alone += f"held out | loss {held_out_loss(together, **sizes):.3f}\n"
    return max(apart, default=0.0), said_alone, said, list(together)


@pytest.mark.parametrize(
    ("stages", "layers", "is_tied", "optimizer"),
    [
        (2, 3, False, "AdamW"),
        pytest.param(2, 2, True, "SGD", marks=pytest.mark.slow),
        pytest.param(1, 1, True, "AdamW", marks=pytest.mark.slow),
        pytest.param(3, 4, True, "AdamW", marks=pytest.mark.slow),
        pytest.param(4, 4, False, "SGD", marks=pytest.mark.slow),
    ],
)
def test_stages_train_as_one_process(
    worker_pool: WorkerPool, stages: int, layers: int, is_tied: bool, optimizer: str
) -> None:
    sizes = {"layers": layers, "tied": is_tied}
    ends = worker_pool.run(in_stages, sizes, optimizer, world_size=stages)
    apart, said_alone, _, saved = ends[0]
    assert len(saved) == 5 + 10 * layers and apart < 1e-5
    assert said_alone.splitlines()[0].startswith("step  4 | loss ")
    assert said_alone.splitlines()[-1].startswith("held out | loss ")
    # The last stage prints, the first one saves.
    assert [said for _, _, said, _ in ends] == [""] * (stages - 1) + [said_alone]
    assert [names for *_, names in ends[1:]] == [[]] * (stages - 1)


@pytest.mark.parametrize("micro_batches", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_batch_is_so_many_micro_batches(
    worker_pool: WorkerPool, micro_batches: int
) -> None:
    ends = worker_pool.run(cut_into, micro_batches)
    # A batch of 64, as in one process, whatever it is cut into.
    assert ends[0][0] < 1e-5 and ends[0][1] == ends[1][2]


def cut_into(micro_batches: int) -> tuple[float, str, str]:
    """Train with other micro-batches, of which a batch of 64 is made."""
    module: Any = load_chapter(PIPELINE)["minimal"]
    with (
        mock.patch.object(module, "MICRO_BATCHES", micro_batches),
        mock.patch.object(module, "MICRO_BATCH_SIZE", 64 // micro_batches),
    ):
        return in_stages({"layers": 2}, "SGD")[:3]


class Norm(torch.nn.BatchNorm1d):
    """Normalises each of D over all positions of all samples."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Take (B, T, D)."""
        return super().forward(input.flatten(0, 1)).view_as(input)


class OwnModel(torch.nn.Module):
    """Nothing like the GPT: it scores the next byte by the byte alone."""

    def __init__(self, *_: Any) -> None:
        """Tie two pairs of layers, and keep a parameter that is not used."""
        super().__init__()
        linear = partial(torch.nn.Linear, bias=False)
        self.look_up, self.scale = linear(256, 16), linear(16, 16)
        square = partial(torch.nn.Linear, 16, 16)
        self.blocks = torch.nn.ModuleList([square(), Norm(16), square(), Norm(16)])
        self.scale_back, self.score = linear(16, 16), linear(16, 256)
        self.scale_back.weight = self.scale.weight
        self.blocks[2].weight = self.blocks[0].weight
        self.score.unused = torch.nn.Parameter(torch.ones(3))

    def layers(self) -> dict[str, torch.nn.Module]:
        """Return all layers in their order, by name."""
        middle = {f"blocks.{i}": block for i, block in enumerate(self.blocks)}
        ends = {"scale_back": self.scale_back, "score": self.score}
        return {"look_up": self.look_up, "scale": self.scale, **middle, **ends}

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return scores, or the mean loss."""
        if labels is not None:  # BatchNorm sees one micro-batch after the other
            parts = zip(inputs.chunk(8), labels.chunk(8), strict=True)
            loss = load_chapter(PIPELINE)["minimal"].micro_batch_loss
            losses = [loss(self(one), target) for one, target in parts]
            return torch.stack(losses).mean()
        x = torch.nn.functional.one_hot(inputs, 256).float()
        for layer in self.layers().values():
            x = layer(x)
        return x


class OwnPart(torch.nn.Module):
    """A stage of it: a third of the layers; its names are of its own."""

    held: tuple[str, ...] = ()  # layers whose weights it keeps all the same

    def __init__(self, model: OwnModel, index: int, stages: int) -> None:
        """Keep some layers."""
        super().__init__()
        self.is_first, layers = index == 0, list(model.layers().items())
        for name in self.held:
            weight = getattr(model, name).weight
            self.register_parameter(f"{name}_held", weight)
        for i in torch.arange(len(layers)).tensor_split(stages)[index].tolist():
            name, layer = layers[i]
            self.add_module(name.replace(".", "_"), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take bytes, or what the stage before returns."""
        if self.is_first:
            x = torch.nn.functional.one_hot(x, 256).float()
        for layer in self.children():
            x = layer(x)
        return x


class HoldingPart(OwnPart):
    """One that holds weights which only another stage may use."""

    held = ("look_up", "score")


def own_model_in_stages(max_norm: float, part: Any) -> tuple[float, int]:
    """Train another model by the same main; how far is it from one process's?"""
    module, by = load_chapter(PIPELINE)["minimal"], partial(torch.optim.SGD, lr=0.5)
    alone = load_chapter("03_ddp_torchrun")["one_process"]
    with (
        mock.patch.object(
            torch.optim, "AdamW", lambda p, lr: clipping(by, p, max_norm)
        ),
        mock.patch.object(alone, "GPT", OwnModel),
    ):
        due, _ = train("one_process")
    with (
        mock.patch.object(torch.optim, "AdamW", lambda p, lr: by(p)),
        mock.patch.object(module, "GPT", OwnModel),
        mock.patch.object(module, "Part", part),
        mock.patch.object(module, "MAX_NORM", max_norm),
    ):
        found, _ = train("minimal", chapter=PIPELINE)
    due = {name.replace("blocks.", "blocks_"): value for name, value in due.items()}
    due |= {f"{name}_held": due[f"{name}.weight"] for name in part.held}
    far = [(value - due[name]).abs().max().item() for name, value in found.items()]
    return max(far, default=0.0), len(far)


@pytest.mark.parametrize(
    ("stages", "part"),
    [
        (2, HoldingPart),
        (3, OwnPart),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, OwnPart), (1, HoldingPart), (2, OwnPart), (3, HoldingPart))
        ),
    ],
)
def test_stages_train_another_model_in_place_of_the_gpt(
    worker_pool: WorkerPool, stages: int, part: Any
) -> None:
    ends = worker_pool.run(own_model_in_stages, 0.05, part, world_size=stages)
    (far, seen), *others = ends
    assert far < 5e-6 and seen == 4 + 2 * 2 + 5 * 2 + 1 + len(part.held)
    assert others == [(0.0, 0)] * (stages - 1)


def stages_from_the_meta_device() -> list[bool]:
    """Train parts that are built without memory and loaded; are they as without?"""
    chapter: Any = load_chapter(PIPELINE)
    module, whole, weights = chapter["minimal"], chapter["model"].GPT, {}
    due, _ = train("minimal", chapter=PIPELINE, layers=2)

    def build(config: Any) -> Any:
        weights.update(whole(config).state_dict())  # what is in the file
        with torch.device("meta"):
            return whole(config)

    def load(part: Any, device: torch.device) -> None:
        part.to_empty(device=device)
        part.load_state_dict({name: weights[name] for name in part.state_dict()})

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            mock.patch.object(module, "GPT", build),
            mock.patch.object(module.Part, "to", load),
        ):
            found, _ = train("minimal", chapter=PIPELINE, layers=2)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return [torch.equal(found[name], value) for name, value in due.items()]


def test_stages_are_built_without_memory(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(stages_from_the_meta_device, world_size=2)
    assert ends == [[True] * (5 + 10 * 2), []]


def test_what_a_model_of_your_own_replaces_is_marked() -> None:
    text = (ROOT / PIPELINE / "minimal.py").read_text()
    _, main = text.split("def main(")
    lines = main.splitlines()
    gpts = re.compile(
        r"GPT|blocks\b|WindowDataset|cross_entropy|_, inputs|embed|head\b"
    )
    named = [i for i, line in enumerate(lines) if gpts.search(line)]
    marked = [i for i in named if "yours" in lines[i] + lines[i - 1]]
    assert named == marked and len(named) == 6
    assert text.count('"""Yours: ') == 2  # Part and the loss


def test_held_out_text_is_read_without_dropout(worker_pool: WorkerPool) -> None:
    sizes = {"dropout": 0.5}
    ((_, said_alone, said, _),) = worker_pool.run(
        in_stages, sizes, "AdamW", world_size=1
    )
    assert said.splitlines()[-1] == said_alone.splitlines()[-1]


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stages_clip_by_the_norm_of_all(worker_pool: WorkerPool, is_tied: bool) -> None:
    sizes = {"layers": 2, "tied": is_tied}
    ends = worker_pool.run(in_stages, sizes, "SGD", "", True, world_size=2)
    assert ends[0][0] < 1e-6


def frozen_in_fp16() -> tuple[list[int], set[float]]:
    """Train stages with frozen parameters, as if norms were in fp16, and 424.

    Return the seeds that a rank has set, and by which norm it clips.
    """
    module: Any = load_chapter(PIPELINE)["minimal"]
    seeds, norms = mock.Mock(side_effect=torch.manual_seed), []

    def frozen(config: Any) -> Any:
        model = load_chapter(PIPELINE)["model"].GPT(config)
        for part in (model.position_embedding, model.final_norm):
            part.requires_grad_(False)
        return model

    half = torch.tensor(424, dtype=torch.float16)
    with (
        mock.patch.object(module, "GPT", frozen),
        mock.patch.object(module.torch, "manual_seed", seeds),
        mock.patch.object(module, "get_total_norm", lambda g: half * (None not in g)),
        mock.patch.object(
            module, "clip_grads_with_norm_", lambda *call: norms.append(call[-1].item())
        ),
    ):
        train("minimal", chapter=PIPELINE, layers=2)
    return [call.args[0] for call in seeds.mock_calls], set(norms)


def test_stages_have_masks_of_their_own_and_a_finite_norm(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(frozen_in_fp16, world_size=2)
    # Both build the same model; then dropout differs.
    assert [seeds for seeds, _ in ends] == [[0, 0], [0, 1]]
    # 424 squared is above the largest number of fp16.
    assert [[*norms] for _, norms in ends] == [[pytest.approx(424 * 2**0.5)]] * 2


def test_stages_train_in_bf16_under_autocast(worker_pool: WorkerPool) -> None:
    (apart, said_alone, *_), (_, _, said, _) = worker_pool.run(
        in_stages, {"layers": 2}, "SGD", AUTOCAST, world_size=2
    )
    assert 1e-6 < apart < 1e-2
    exact, rounded = (re.findall(r"loss (\S+)", one) for one in (said_alone, said))
    assert len(exact) == 2
    losses = [float(loss) for loss in exact]
    assert [float(loss) for loss in rounded] == pytest.approx(losses, rel=0.01)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != AUTOCAST])
def test_a_fault_of_the_pipeline_shows(worker_pool: WorkerPool, fault: str) -> None:
    (apart, *_), (_, said_alone, said, _) = worker_pool.run(
        in_stages, {"layers": 2}, "SGD", fault, world_size=2
    )
    assert apart > 1e-3
    assert said != said_alone


ENDING = """
import os, sys
from functools import partial
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import minimal

def threads():
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

dataset = minimal.WindowDataset
minimal.WindowDataset = lambda text, block_size, samples: dataset(text, 128, 64)
minimal.main()
before = threads()
dist.destroy_process_group()
os.write(1, f"{before > 0} {threads()}\\n".encode())
"""


@pytest.mark.slow
def test_gloos_threads_end_with_the_pipeline(tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    done = torchrun(script, str(ROOT / PIPELINE), nproc=2, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("True 0\n") == 2


class Cycle:
    """What only the garbage collector frees."""

    def __init__(self) -> None:
        """Refer to itself."""
        self.me = self


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("02_ddp_mp/minimal.py", "join_and_train"),
        ("03_ddp_torchrun/minimal.py", ""),
        ("03_ddp_torchrun/minimal_resumable.py", ""),
        ("04_rpc_parameter_server/minimal.py", "main"),
        ("08_pipeline_parallel/minimal.py", ""),
    ],
)
def test_a_model_in_a_cycle_is_freed_before_the_group(name: str, function: str) -> None:
    body: list[Any] = ast.parse((ROOT / name).read_text()).body
    named = [n for n in body if function and getattr(n, "name", "") == function]
    places = named or body[-1:]
    assert len(places) == 1
    left = []

    def leave() -> None:
        left.append(model() is None)

    given = {"gc": gc, "dist": SimpleNamespace(destroy_process_group=leave)}
    gc.disable()
    try:
        model = weakref.ref(Cycle())
        exec(compile(ast.Module(places[0].body[-2:], []), name, "exec"), given)
    finally:
        gc.enable()
    assert left == [True]


def too_many_stages() -> tuple[Any, int]:
    """Start more stages than there are blocks: what is said, how many have joined."""
    module: Any = load_chapter(PIPELINE)["minimal"]
    with (
        mock.patch.object(module, "GPTConfig", partial(module.GPTConfig, **SMALL)),
        mock.patch.object(torch.distributed, "init_process_group") as join,
    ):
        try:
            module.main()
        except SystemExit as end:
            return end.code, join.call_count
    return None, join.call_count


def test_more_stages_than_blocks_are_refused_before_the_group_is_joined(
    worker_pool: WorkerPool,
) -> None:
    said = "1 block(s) cannot make 2 stages"
    assert worker_pool.run(too_many_stages, world_size=2) == [(said, 0)] * 2


def with_zero(folder: str, stage: int, lost: str) -> tuple[float, str, str, int]:
    """Train chapter 05's loop and in one process; return what `both_ways` returns.

    The weights are those that all ranks together have saved.
    """
    alone, said_alone = in_one_process()
    forget_earlier_group()
    module: Any = load_apart()
    from deepspeed.utils import zero_to_fp32

    module.CONFIG["zero_optimization"]["stage"] = stage
    dataset, output, apart = module.WindowDataset, io.StringIO(), []
    module.GPTConfig = partial(module.GPTConfig, **SMALL)
    module.WindowDataset = lambda text, block_size, samples: dataset(text, 128, 256)
    if lost == "sampler":
        module.DistributedSampler = lambda data, drop_last: None
    if lost == "clipping":
        del module.CONFIG["gradient_clipping"]
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        stack.enter_context(contextlib.redirect_stdout(output))
        module.main()
    if torch.distributed.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            saved: Any = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                f"{folder}/saved/minimal"
            )
        apart = [(saved[name] - alone[name]).abs().max().item() for name in alone]
    return max(apart, default=0.0), said_alone, output.getvalue(), len(apart)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_of_zero_trains_as_one_process(
    zero_pools: Pools, tmp_path: Path, stage: int
) -> None:
    (apart, said_alone, said, tensors), other = zero_pools(2).run(
        with_zero, str(tmp_path), stage, "", world_size=2
    )
    assert tensors == 15
    assert apart < ROUNDED
    assert said.splitlines()[0].startswith("step  4 | loss 4.")
    assert said == said_alone
    assert other[2] == ""


@pytest.mark.parametrize("lost", ["sampler", "clipping"])
def test_a_line_that_is_missing_with_zero_shows(
    zero_pools: Pools, tmp_path: Path, lost: str
) -> None:
    (apart, *_), _ = zero_pools(2).run(with_zero, str(tmp_path), 2, lost, world_size=2)
    assert apart > 1e-4


def ways_to_give_a_config(folder: str) -> tuple[list[int], list[str]]:
    """Give DeepSpeed a file, as minimal.py says: what it reads, and what it refuses."""
    forget_earlier_group()
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    path = Path(folder, f"{os.environ['RANK']}.json")
    zero = {"stage": 2}
    path.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 3, "zero_optimization": zero})
    )
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    words = [f"--deepspeed_config={path}"]
    args = parser.parse_args(words)
    # The launcher `deepspeed` passes another one.
    assert "local_rank" not in args
    parser.add_argument("--local_rank", type=int)
    both = parser.parse_args(["--local_rank=0", *words])
    sizes, refused = [], []
    ways = ({"config": str(path)}, {"args": args}, {"config": str(path), "args": args})
    for way in (*ways, {}):
        model: Any = torch.nn.Linear(4, 2)
        adam = torch.optim.AdamW(model.parameters())
        try:
            given: Any = {"model": model, "optimizer": adam, **way}
            engine: Any = deepspeed.initialize(**given)[0]
        except AssertionError as error:
            refused.append(str(error).split(",")[0])
        else:
            assert engine.zero_optimization_stage() == 2
            sizes.append(engine.train_batch_size())
    assert both.deepspeed_config == str(path)
    return sizes, refused


def test_deepspeed_takes_a_file_or_the_arguments_that_name_it(
    zero_pools: Pools, tmp_path: Path
) -> None:
    by_rank = zero_pools(2).run(ways_to_give_a_config, str(tmp_path), world_size=2)
    needed = "DeepSpeed requires --deepspeed_config to specify configuration file"
    # Of the file's 3 samples for each of two ranks; both ways, but not together.
    assert by_rank == [([6, 6], ["Not sure how to proceed", needed])] * 2


def steps_in_fp16(**scaling: float) -> list[tuple[float, bool]]:
    """Take four steps, the second with gradients that overflow, and the third.

    Return after each the loss scale, and whether the weights have moved.
    """
    forget_earlier_group()
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    config: Any = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True} | scaling,
    }
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(8, 4)
    adam = torch.optim.AdamW(model.parameters())
    accelerator, found = get_accelerator(), []
    with (
        mock.patch.object(accelerator, "is_fp16_supported", lambda: False),
        pytest.raises(ValueError, match="fp16 is not supported on your device"),
    ):
        deepspeed.initialize(model=model, optimizer=adam, config=config)
    model = torch.nn.Linear(8, 4)
    adam = torch.optim.AdamW(model.parameters())
    with mock.patch.object(accelerator, "is_fp16_supported", lambda: True):
        given: Any = {"model": model, "optimizer": adam, "config": config}
        engine: Any = deepspeed.initialize(**given)[0]
    for factor in (1, 1e4, 1e4, 1):
        before = model.weight.detach().clone()
        inputs = factor * torch.randn(4, 8)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            engine(inputs)
        engine.backward(engine(inputs.half()).float().square().mean())
        engine.step()
        moved = not torch.equal(before, model.weight)
        found.append((float(engine.optimizer.loss_scale), moved))
    return found


@pytest.mark.parametrize("fixed", [0, 1024])
def test_fp16_scales_the_loss_and_skips_a_step_that_overflows(
    zero_pools: Pools, fixed: float
) -> None:
    scaling = {"loss_scale": fixed} | ({} if fixed else {"initial_scale_power": 16})
    by_rank = zero_pools(2).run(partial(steps_in_fp16, **scaling), world_size=2)
    scales = [fixed] * 4 if fixed else [2**16, 2**16, 2**15, 2**15]
    moved = [True, False, False, True]
    assert by_rank == [[*zip(scales, moved, strict=True)]] * 2


def own_model(module: Any, frozen: float) -> Any:
    """Return a class of GPTs with a frozen weight, and buffers that differ by rank."""

    class OwnModel(module.GPT):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            weight = torch.tensor([frozen])
            self.frozen = torch.nn.Parameter(weight, requires_grad=False)
            self.norm = torch.nn.BatchNorm1d(1)
            column = torch.full((3, 2), float(torch.distributed.get_rank()))[:, 0]
            self.register_buffer("column", column, persistent=False)
            mask = torch.arange(3).expand(2, 3)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            normed = self.norm(inputs.float().reshape(-1, 1)).mean()
            return super().forward(inputs, labels) + self.frozen[0] * normed

    return OwnModel


def by_groups(adam: Any, parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Let biases and norms not decay, and go twice as fast."""
    matrices, others = [], []
    for p in parameters:
        (matrices if p.ndim > 1 else others).append(p)
    faster = {"params": others, "weight_decay": 0.0, "lr": 2 * lr}
    return adam([{"params": matrices, "weight_decay": 1.0}, faster], lr=lr)


def resumable_with_zero(
    folder: str, stage: int, frozen: float | None = None, has_groups: bool = False
) -> tuple[str, dict[str, torch.Tensor], list[float]]:
    """Run chapter 05's minimal_resumable.py there, a smaller GPT.

    Return what it prints, and what it has saved last: all weights, on rank 0, and the
    rates of the groups. With `frozen` the model has a weight of this value, and more.
    """
    forget_earlier_group()
    module: Any = load_chapter("05_deepspeed_zero/checkpoints")["minimal_resumable"]
    config = {**module.CONFIG, "zero_optimization": {"stage": stage}}
    output, saved, engines = io.StringIO(), Path(folder, "saved"), []
    load = module.held_out_loss
    model = module.GPT if frozen is None else own_model(module, frozen)
    adam = partial(by_groups, torch.optim.AdamW) if has_groups else torch.optim.AdamW

    def noted(engine: Any, dataset: Any) -> float:
        assert len(dataset) == FEW and engine.gradient_clipping() == 1.0
        buffers = [buffer.contiguous() for buffer in engine.module.buffers()]
        assert load_chapter("05_deepspeed_zero")["ranks"].same_on_all_ranks(buffers)
        loss = load(engine, dataset)
        assert loss == load(engine, dataset) and engine.module.training
        engines.append(engine)
        return loss

    with (
        mock.patch.multiple(
            module,
            GPTConfig=partial(module.GPTConfig, **SMALL),
            GPT=model,
            CONFIG=config,
            FOLDER=saved,
            join=mock.Mock(),
            held_out_loss=noted,
        ),
        fewer_samples(module),
        mock.patch.object(torch.optim, "AdamW", adam),
        contextlib.redirect_stdout(output),
    ):
        module.main()
    from deepspeed.utils import zero_to_fp32

    weights: Any = {}
    if torch.distributed.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(saved))
    if engines and stage < 3:
        weights |= engines[-1].module.state_dict()  # in stage 1 the other has no frozen
    states = [s for one in engines for s in one.optimizer.optimizer.state.values()]
    assert {int(state["step"]) for state in states} in (set(), {2 * 4})
    said = re.findall(r"^\d ranks: .*|^epoch .*", output.getvalue(), re.M)
    rates = [rate for engine in engines for rate in engine.get_lr()]
    return "\n".join(said), weights, rates


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_zero_trains_and_resumes_as_chapter_03_does(
    zero_pools: Pools, tmp_path: Path, stage: int
) -> None:
    ddp, zero = str(tmp_path / "ddp"), str(tmp_path / "zero")
    Path(ddp).mkdir()
    (expected, printed, _), _ = zero_pools(2).run(resumable, ddp, 0.0, world_size=2)
    begins, *losses = printed.splitlines()
    assert begins == "2 ranks on cpu: 0 of 2 epochs done" and len(losses) == 2
    run = zero_pools(2).run
    (said, whole, rates), other = run(resumable_with_zero, zero, stage, world_size=2)
    assert said.splitlines() == ["2 ranks: 0 of 2 epochs done", *losses]
    assert other[0] == "" and rates == [pytest.approx(0, abs=1e-9)] * 2
    assert len(whole) == len(expected["model"]) == 15
    for name, weight in expected["model"].items():
        assert (whole[name] - weight).abs().max() < ROUNDED
    # The second epoch's shards are lost.
    shutil.rmtree(f"{zero}/saved/epoch_2")
    Path(zero, "saved", "latest").write_text("epoch_1")
    (then, resumed, _), _ = run(resumable_with_zero, zero, stage, world_size=2)
    assert then.splitlines() == ["2 ranks: 1 of 2 epochs done", losses[1]]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    (end, *_), _ = run(resumable_with_zero, zero, stage, world_size=2)
    assert end == "2 ranks: 2 of 2 epochs done"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_goes_on_with_another_number_of_ranks(
    zero_pools: Pools, tmp_path: Path, stage: int
) -> None:
    """As many samples in a step, and the same schedule."""
    (said, whole, _), _ = zero_pools(2).run(
        resumable_with_zero, str(tmp_path), stage, world_size=2
    )
    to_universal(zero_pools, tmp_path / "saved")  # the shards of epoch_2 are in the way
    ((alone, moved, rates),) = zero_pools(1).run(
        resumable_with_zero, str(tmp_path), stage, world_size=1
    )
    begins, loss = alone.splitlines()
    assert begins == "1 ranks: 1 of 2 epochs done" and rates == [pytest.approx(0)]
    last = said.splitlines()[2]
    assert loss[:-5] == last[:-5]
    assert float(loss[-5:]) == pytest.approx(float(last[-5:]), abs=0.0011)
    assert len(moved) == len(whole) == 15
    for name, weight in whole.items():
        assert (moved[name] - weight).abs().max() < ROUNDED


def test_groups_keep_their_settings_and_count_their_steps_in_stage_3(
    zero_pools: Pools, tmp_path: Path
) -> None:
    def run(ranks: int) -> Any:
        call = resumable_with_zero, str(tmp_path), 3, None, True
        return zero_pools(ranks).run(*call, world_size=ranks)[0]

    _, whole, _ = run(2)
    to_universal(zero_pools, tmp_path / "saved")
    _, moved, _ = run(1)
    assert len(moved) == len(whole) == 15
    for name, weight in whole.items():
        assert (moved[name] - weight).abs().max() < ROUNDED


def convert(words: list[str]) -> None:
    """Run a module, with the words that follow it on its command line."""
    module, *options = words
    with (
        mock.patch.object(sys, "argv", [module, *options]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        runpy.run_module(module, run_name="__main__")


def to_universal(pools: Pools, saved: Path) -> None:
    """Give the page's command, and let `latest` name what it has made."""
    page = (ROOT / "05_deepspeed_zero/checkpoints/README.md").read_text()
    (command,) = re.findall(r"\$ python -m (deepspeed.checkpoint[^|]*) 2>&1 \|", page)
    words = command.replace("\\\n", "").replace("saved/run", str(saved)).split()
    # More worker processes are worth their start for large models only.
    words += ["--num_extract_workers=1", "--num_merge_workers=1"]
    pools(1).run(convert, words, world_size=1)
    shutil.copy(saved / "latest_universal", saved / "latest")
    assert (saved / "latest").read_text() == "epoch_1_universal"


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_own_model_keeps_its_running_means_and_its_frozen_weights(
    zero_pools: Pools, tmp_path: Path, stage: int
) -> None:
    def run(ranks: int, frozen: float) -> Any:
        return zero_pools(ranks).run(
            resumable_with_zero, str(tmp_path), stage, frozen, world_size=ranks
        )

    (said, whole, _), _ = run(2, 3.0)
    assert len(whole) == 15 + 1 + 5  # two weights of the BatchNorm and three buffers
    assert whole["frozen"] == 3.0 and whole["norm.num_batches_tracked"] == 8 * 2
    shutil.rmtree(tmp_path / "saved/epoch_2")
    (tmp_path / "saved/latest").write_text("epoch_1")
    (then, resumed, _), _ = run(2, 4.0)  # as if it were drawn, and otherwise
    assert then.splitlines()[1] == said.splitlines()[2]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    to_universal(zero_pools, tmp_path / "saved")
    ((_, moved, rates),) = run(1, 4.0)
    assert moved["frozen"] == 3.0 and rates == [pytest.approx(0, abs=1e-9)]
    # One rank takes twice as many micro-batches as each of two.
    assert moved["norm.num_batches_tracked"] == 8 + 16


@pytest.mark.slow
def test_deepspeed_starts_its_minimal_script(tmp_path: Path) -> None:
    script = ROOT / "05_deepspeed_zero" / "minimal.py"
    result = deepspeed(script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [line for line in result.stdout.splitlines() if line.startswith("step")]
    assert [line[:15] for line in losses] == [
        f"step {n:2} | loss " for n in (4, 8, 12, 16)
    ]
    assert (tmp_path / "saved" / "minimal" / "latest").read_text() == "global_step16"
