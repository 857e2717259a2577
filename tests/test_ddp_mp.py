"""Chapter 02: training with mp.spawn and DDP, held against one process."""

import argparse
import contextlib
import io
import json
import math
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from launch import ROOT, clean_environment, free_port, python
from lessons import in_the_pool, run_lesson
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "02_ddp_mp"
TRAIN = ROOT / CHAPTER / "train.py"
TERRAIN: Any = load_chapter(CHAPTER)["terrain"]
LINES = (
    "epoch (\\d) \\| rank (\\d) \\| batch size 12 \\| steps (\\d+) \\| local loss (.+)"
)


# --- What runs on each rank. ----------


@contextlib.contextmanager
def fewer_points(module: Any) -> Iterator[None]:
    """Let a script train on 192 points: 3 steps of 2 ranks x 32, or 2 of 3 x 32."""

    def sample_192(terrain: Any) -> Any:
        return TERRAIN.sample_points(terrain, points=192)

    with mock.patch.object(module, "sample_points", sample_192):
        yield


def run_rank(batch_size: int, max_epochs: int) -> str:
    """Be a rank of train.py in the pool's group; return what it printed."""
    train, output = load_chapter(CHAPTER)["train"], io.StringIO()
    options = argparse.Namespace(batch_size=batch_size, max_epochs=max_epochs, lr=3e-3)
    with fewer_points(train), contextlib.redirect_stdout(output):
        train.train_on_shard(torch.device("cpu"), options)
    return output.getvalue()


def train_alone(batch_size: int, max_epochs: int) -> tuple[list[float], float]:
    """Train as train.py does, in this process; return losses and RMSE."""
    terrain, losses = TERRAIN.load_terrain(), []
    points, held_out = TERRAIN.sample_points(terrain, points=192)
    torch.manual_seed(0)
    model = TERRAIN.TerrainModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(max_epochs):
        order = torch.randperm(192, generator=torch.Generator().manual_seed(epoch))
        own = []
        for batch in order.split(batch_size)[: 192 // batch_size]:
            places, heights = points[batch]
            optimizer.zero_grad()
            loss = mse_loss(model(places), heights)
            loss.backward()
            optimizer.step()
            own.append(loss.item())
        losses.append(sum(own) / len(own))
    return losses, TERRAIN.rmse_in_metres(model, held_out, terrain)


def run_minimal() -> tuple[str, dict[str, torch.Tensor] | None]:
    """Be a rank of minimal.py; return what it printed and, of rank 0, what it saved."""
    module, output, saved = load_chapter(CHAPTER)["minimal"], io.StringIO(), []
    with (
        contextlib.redirect_stdout(output),
        mock.patch.object(torch, "save", lambda *arguments: saved.append(arguments)),
    ):
        module.train_shard(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    assert [name for _, name in saved] == ["minimal.pt"] * (dist.get_rank() == 0)
    assert torch.initial_seed() == dist.get_rank()  # dropout draws other masks on each
    return output.getvalue(), saved[0][0] if saved else None


def unfreeze_afterwards(model: torch.nn.Module) -> DistributedDataParallel:
    """Wrap a model of which one layer requires no gradient, and then does."""
    model[0].requires_grad_(False)  # type: ignore[operator]
    ddp_model = DistributedDataParallel(model)
    model[0].requires_grad_(True)  # type: ignore[operator]
    return ddp_model


def freeze_afterwards(model: torch.nn.Module) -> DistributedDataParallel:
    """Wrap a model all of whose layers require gradients, and then one does not."""
    ddp_model = DistributedDataParallel(model)
    model[0].requires_grad_(False)  # type: ignore[operator]
    return ddp_model


def forget_gradient(parameter: torch.Tensor) -> None:
    """Leave no gradient, so that an optimizer takes no step."""
    parameter.grad = None


def shifted_afterwards(model: torch.nn.Module) -> DistributedDataParallel:
    """Wrap a model; on rank 1 add to a weight what another one loses. Train nothing."""
    ddp_model = DistributedDataParallel(model)
    first = next(model.parameters())
    with torch.no_grad():
        first.fill_(1.0)
        first[0] += dist.get_rank() * torch.tensor([0.5, -0.5])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(forget_gradient)
    return ddp_model


def imaginary_afterwards(model: torch.nn.Module) -> DistributedDataParallel:
    """Wrap a model; add a complex weight whose imaginary part is each rank's own."""
    ddp_model = DistributedDataParallel(model)
    model.wave = torch.nn.Parameter(torch.tensor([complex(1, dist.get_rank())]))
    return ddp_model


def run_minimal_with(mistake: str) -> tuple[str, int]:
    """Make a mistake of the page's table; return the error and the samples seen."""
    module, seen = load_chapter(CHAPTER)["minimal"], []
    fakes = {
        "bypass": ("DistributedDataParallel", lambda model: model),
        "unfreeze": ("DistributedDataParallel", unfreeze_afterwards),
        "freeze": ("DistributedDataParallel", freeze_afterwards),
        "shuffle": ("DistributedSampler", lambda data, **_: AllOfIt(data)),
        "none": ("EPOCHS", 1),
        "NaN": ("EPOCHS", 1),  # all ranks have the same weights: none
        "zero sum": ("DistributedDataParallel", shifted_afterwards),
        "complex": ("DistributedDataParallel", imaginary_afterwards),
    }

    def noted(outputs: torch.Tensor, heights: torch.Tensor) -> torch.Tensor:
        seen.append(len(heights))
        return mse_loss(outputs, heights) * (float("nan") if mistake == "NaN" else 1)

    name, fake = fakes[mistake]
    with (
        mock.patch.object(module, "EPOCHS", 1),
        mock.patch.object(module, name, fake),
        mock.patch.object(torch.nn.functional, "mse_loss", noted),
        mock.patch.object(torch, "save"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            module.train_shard(
                dist.get_rank(), dist.get_world_size(), torch.device("cpu")
            )
        except RuntimeError as error:
            return str(error), sum(seen)
    return "", sum(seen)


def running_mean_of_this_rank() -> tuple[list[float], list[float]]:
    """Return a BatchNorm's running mean before and after a pass of DDP."""
    ddp_model = DistributedDataParallel(torch.nn.BatchNorm1d(1))
    found = []
    for _ in range(2):
        ddp_model(torch.full((4, 1), 1.0 + dist.get_rank())).sum().backward()
        found.append(ddp_model.module.running_mean.item())
    return found[0], found[1]


# --- The run as a whole. ----------


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_file_to_copy_trains_as_one_process(
    worker_pool: WorkerPool, world_size: int
) -> None:
    module: Any = load_chapter(CHAPTER)["minimal"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for epoch in range(3):
        order = torch.randperm(4096, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            places, heights = module.make_dataset()[batch]
            optimizer.zero_grad()
            loss = mse_loss(model(places), heights)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    (said, weights), *others = worker_pool.run(run_minimal, world_size=world_size)
    assert others == [("", None)] * (world_size - 1) and weights is not None
    means = [float(mean) for mean in re.findall(r"epoch \d \| mean loss (.+)", said)]
    due = [sum(losses[i : i + 64]) / 64 for i in (0, 64, 128)]
    assert means == pytest.approx(due, abs=2e-5)
    assert means[-1] < means[0] / 2
    assert weights.keys() == model.state_dict().keys()
    pairs = [(weights[name], due) for name, due in model.state_dict().items()]
    assert len(pairs) == 4
    assert all(torch.allclose(weight, due, atol=1e-4) for weight, due in pairs)


def test_one_process_prints_and_saves_what_the_ranks_do(
    worker_pool: WorkerPool,
) -> None:
    module: Any = load_chapter(CHAPTER)["one_process"]
    (said, weights), _ = worker_pool.run(run_minimal)
    output, saved = io.StringIO(), []
    with (
        contextlib.redirect_stdout(output),
        mock.patch.object(torch, "save", lambda *arguments: saved.append(arguments)),
    ):
        module.main(torch.device("cpu"))
    ((alone, name),) = saved
    assert name == "minimal.pt" and weights is not None and len(alone) == 4
    assert weights.keys() == alone.keys()
    assert all(torch.allclose(alone[key], weights[key], atol=1e-4) for key in alone)
    means = [re.findall(r"mean loss (.+)", text) for text in (said, output.getvalue())]
    assert len(means[0]) == 3
    assert [float(mean) for mean in means[1]] == pytest.approx(
        [float(mean) for mean in means[0]], abs=2e-5
    )


@pytest.mark.parametrize(
    ("mistake", "says", "samples"),
    [
        ("none", "", 2048),
        ("NaN", "", 2048),
        ("bypass", "the ranks' weights differ, with norms of [", 2048),
        ("zero sum", "the ranks' weights differ, with norms of [", 2048),
        ("complex", "the ranks' weights differ, with norms of [", 2048),
        ("unfreeze", "the ranks' weights differ, with norms of [", 2048),
        ("freeze", "Expected to have finished reduction", 32),  # at the second step
        ("shuffle", "", 4096),  # not a word: each rank has trained on all 4096
    ],
)
def test_the_file_to_copy_notices_some_mistakes(
    worker_pool: WorkerPool, mistake: str, says: str, samples: int
) -> None:
    found = worker_pool.run(run_minimal_with, mistake)
    assert len(found) == 2
    for said, seen in found:
        assert seen == samples
        assert said.startswith(says) and bool(said) == bool(says)


@pytest.mark.parametrize(
    ("old", "new", "words", "says"),
    [
        ("", "", "--nprocs=3", "--nprocs must divide the batch of 64 samples"),
        ("", "", "--nprocs=0", "--nprocs must divide the batch of 64 samples"),
        ("", "", "--nprocs=-2", "--nprocs must divide the batch of 64 samples"),
        ("rand(4096", "rand(63", "--nprocs=1", "63 samples make no batch of 64"),
        ("= 3, 64", "= 3, 60", "--nprocs=8", "divide the batch of 60 samples"),
        ("= 3, 64", "= 3, 60", "--nprocs=3", ""),
        ("rand(4096", "rand(64", "--nprocs=8", ""),
        ("", "", "under torchrun", "start it with python: it starts its own ranks"),
    ],
)
def test_the_file_to_copy_refuses_what_makes_no_batch(
    tmp_path: Path, old: str, new: str, words: str, says: str
) -> None:
    text = (ROOT / CHAPTER / "minimal.py").read_text()
    assert old in text
    (tmp_path / "minimal.py").write_text(text.replace(old, new))
    errors, spawn = io.StringIO(), mock.Mock()
    started = TORCHRUN if words == "under torchrun" else {}
    with (
        mock.patch.object(sys, "argv", ["minimal.py", *([] if started else [words])]),
        mock.patch.dict(os.environ, started),
        mock.patch.object(torch.multiprocessing, "spawn", spawn),
        contextlib.redirect_stderr(errors),
        contextlib.nullcontext() if not says else pytest.raises(SystemExit),
    ):
        runpy.run_path(str(tmp_path / "minimal.py"), run_name="__main__")
    assert spawn.called == (not says)
    assert says in errors.getvalue() and bool(says) == bool(errors.getvalue())


def test_a_running_mean_is_a_rank_s_own_until_the_next_pass(
    worker_pool: WorkerPool,
) -> None:
    # A tenth of each batch's mean, 1 or 2; then the same, from rank 0's 0.1 for both.
    found = worker_pool.run(running_mean_of_this_rank, world_size=2)
    assert found[0] == pytest.approx((0.1, 0.19))
    assert found[1] == pytest.approx((0.2, 0.29))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_print_what_one_process_prints(
    worker_pool: WorkerPool, world_size: int
) -> None:
    batch_size = 12
    steps = 192 // (batch_size * world_size)
    outputs = worker_pool.run(run_rank, batch_size, 3, world_size=world_size)
    alones, alone = train_alone(batch_size * world_size, 3)
    assert outputs[1:] == [""] * (world_size - 1)
    lines = re.findall(LINES, outputs[0])
    assert [line[:3] for line in lines] == [
        (str(epoch), str(rank), str(steps))
        for epoch in range(3)
        for rank in range(world_size)
    ]
    products = re.findall(r"x ranks = (\d+) x (\d+) x (\d+) = (\d+) diff", outputs[0])
    total = batch_size * steps * world_size
    assert products == [(f"{batch_size}", f"{steps}", f"{world_size}", f"{total}")] * 3
    means = [float(loss) for loss in re.findall(r"mean loss over .* (.+)", outputs[0])]
    assert len(means) == 3 and len(alones) == 3
    for epoch in range(3):
        own = [float(line[3]) for line in lines if line[0] == str(epoch)]
        # All are rounded to three digits after the point.
        assert means[epoch] == pytest.approx(sum(own) / len(own), abs=1.1e-3)
        assert means[epoch] == pytest.approx(alones[epoch], abs=1.1e-3)
        assert world_size == 1 or len(set(own)) > 1
    (error,) = re.findall(r"points: RMSE (.+?) m", outputs[0])
    assert float(error) == pytest.approx(alone, abs=0.11)
    assert f"check: {world_size} rank(s) hold the same bits, and" in outputs[0]


def test_sampler_gives_the_ranks_the_order_of_one_process_in_turn() -> None:
    points, seed, epoch = range(100), 5, 2
    generator = torch.Generator().manual_seed(seed + epoch)
    order = list(RandomSampler(points, generator=generator))
    samplers = [
        DistributedSampler(points, 3, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        for rank in range(3)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert len(samplers) == 3
    indices = [list(sampler) for sampler in samplers]
    assert indices == [order[rank:99:3] for rank in range(3)]


def trained_weights() -> tuple[dict[str, torch.Tensor], list[str], float]:
    """Train a step under DDP; return the plain model's weights and RMSE, all names."""
    terrain = TERRAIN.load_terrain()
    points, held_out = TERRAIN.sample_points(terrain, 64)
    model = TERRAIN.TerrainModel()
    ddp_model = DistributedDataParallel(model)
    places, heights = (t.chunk(2)[dist.get_rank()] for t in points.tensors)
    mse_loss(ddp_model(places), heights).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    error = TERRAIN.rmse_in_metres(model, held_out, terrain)
    return ddp_model.module.state_dict(), list(ddp_model.state_dict()), error


def test_weights_of_the_wrapped_model_load_in_one_process(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(trained_weights)
    terrain, model = TERRAIN.load_terrain(), TERRAIN.TerrainModel()
    _, held_out = TERRAIN.sample_points(terrain, 64)
    assert len(results) == 2
    for weights, names_of_ddp, error in results:
        assert names_of_ddp == [f"module.{name}" for name in weights]
        model.load_state_dict(weights)
        assert TERRAIN.rmse_in_metres(model, held_out, terrain) == error
        assert weights.keys() == results[0][0].keys() and len(weights) == 7
        of_rank_zero = torch.cat([t.flatten() for t in results[0][0].values()])
        assert torch.equal(
            torch.cat([t.flatten() for t in weights.values()]), of_rank_zero
        )


# --- Proofs that can fail. ----------


def end_of(script: str, faults: dict[str, Any]) -> tuple[Any, str]:
    """Run a lesson with some functions replaced; return exit code and last words."""
    chapter, errors = load_chapter(CHAPTER), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(errors))
        for place, fault in faults.items():
            module, _, name = place.rpartition(" ")
            owner = chapter[module.split(".")[0]]
            for part in module.split(".")[1:]:
                owner = getattr(owner, part)
            stack.enter_context(mock.patch.object(owner, name, fault))
        try:
            printed = run_lesson(CHAPTER, script)
            return 0, printed.splitlines()[-1] if printed else ""
        except SystemExit as end:
            return end.code, errors.getvalue()


def do_nothing(*arguments: Any) -> None:
    """Stand for a method that has been forgotten."""


def sum_gradients(self: Any) -> None:
    """Add the gradients up, and forget to divide by the number of ranks."""
    for parameter in self.trainable:
        dist.all_reduce(parameter.grad)


def average_in_float32(self: Any) -> None:
    """Lose digits on the way."""
    for parameter in self.trainable:
        rounded = parameter.grad.float()
        dist.all_reduce(rounded, op=dist.ReduceOp.AVG)
        parameter.grad.copy_(rounded)


def average_on_rank_zero_only(self: Any) -> None:
    """Reduce to rank 0, which alone gets the mean."""
    for parameter in self.trainable:
        dist.reduce(parameter.grad, dst=0)
        parameter.grad /= dist.get_world_size()


def train_nothing(wrap: Any, batches: Any, seed: int) -> torch.Tensor:
    """Return the same weights, with a wrapper and without."""
    return torch.zeros(3)


CLAIM = "after 50 steps 2 ranks hold one process's weights, alone none"
FAILED = (1, f"check failed on ranks [0, 1], not so: {CLAIM}\n")


def test_lesson_of_the_naive_way_holds(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(end_of, "naive", {}) == [
        (0, f"check: {CLAIM}"),
        (0, ""),
    ]


@pytest.mark.parametrize(
    "fault",
    [
        {"naive.NaiveDDP average_gradients": do_nothing},
        {"naive.NaiveDDP average_gradients": sum_gradients},
        {"naive.NaiveDDP average_gradients": average_in_float32},
        {"naive.NaiveDDP average_gradients": average_on_rank_zero_only},
        {"naive.NaiveDDP copy_from_rank_zero": do_nothing},
        {"naive same_on_all_ranks": do_nothing},
        {"naive train": train_nothing},
    ],
    ids=[
        "none",
        "sum",
        "float32",
        "rank zero only",
        "no broadcast",
        "bits",
        "all alike",
    ],
)
def test_lesson_notices_what_is_broken(
    worker_pool: WorkerPool, fault: dict[str, Any]
) -> None:
    assert worker_pool.run(end_of, "naive", fault) == [FAILED, (1, "")]


def check_of_a_broken_run(fault: str) -> tuple[Any, str]:
    """Run train.py's training with one fault; return its exit code and last words."""
    train, errors = load_chapter(CHAPTER)["train"], io.StringIO()
    options = argparse.Namespace(batch_size=32, max_epochs=1, lr=3e-3)
    fakes = {
        "bypass": ("DistributedDataParallel", Bypass),
        "sampler": ("DistributedSampler", lambda data, **_: AllOfIt(data)),
        "gradient": ("gradient_error", lambda *_: 1e-4 * dist.get_rank()),
        "bits": ("ranks", mock.Mock(same_on_all_ranks=do_nothing)),
    }
    name, fake = fakes[fault]
    with (
        fewer_points(train),
        in_the_pool(train),
        mock.patch.object(train, name, fake),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            train.train_on_shard(torch.device("cpu"), options)
        except SystemExit as end:
            return end.code, errors.getvalue()
        except RuntimeError as error:
            return "RuntimeError", str(error)
    return 0, ""


class Bypass(torch.nn.Module):
    """Looks like DDP, and synchronises nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Hold the module."""
        super().__init__()
        self.module = module

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self.module(places)


class AllOfIt(SequentialSampler):
    """A sampler that gives every rank all indices."""

    def set_epoch(self, epoch: int) -> None:
        """Ignore the epoch."""


@pytest.mark.parametrize("fault", ["bypass", "gradient", "bits"])
def test_training_notices_a_model_that_is_not_synchronised(
    worker_pool: WorkerPool, fault: str
) -> None:
    ends = worker_pool.run(check_of_a_broken_run, fault)
    assert [code for code, _ in ends] == [1, 1]
    assert ends[0][1].startswith(
        "check failed on ranks [0, 1], not so: 2 rank(s) hold the same"
    )


def errors_of_gradients() -> list[float]:
    """Compare DDP's gradient, and that of a model that is not synchronised."""
    _, held_out = TERRAIN.sample_points(TERRAIN.load_terrain(), 64)
    errors = []
    for wrap in (DistributedDataParallel, Bypass):
        torch.manual_seed(0)
        model = wrap(TERRAIN.TerrainModel())
        errors.append(TERRAIN.gradient_error(model, held_out))
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradient_is_compared_on_other_points_of_each_rank(
    worker_pool: WorkerPool, world_size: int
) -> None:
    # On equal points, a model that is not synchronised would have the same gradient.
    results = worker_pool.run(errors_of_gradients, world_size=world_size)
    assert len(results) == world_size
    assert all(of_ddp < 1e-5 and alone > 0.05 for of_ddp, alone in results)


def test_training_notices_points_that_are_seen_twice(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(check_of_a_broken_run, "sampler")
    text = "some points were seen twice: 32 x 6 x 2 = 192"
    assert ends == [("RuntimeError", text)] * 2


def test_halves_of_a_batch_must_give_the_gradient_of_the_whole() -> None:
    points, _ = TERRAIN.sample_points(TERRAIN.load_terrain(), 64)
    torch.manual_seed(0)
    model = TERRAIN.TerrainModel()

    def error_of(*sizes: int) -> float:
        parts = zip(*(tensor.split(sizes) for tensor in points.tensors), strict=True)
        mean = torch.stack([TERRAIN.batch_gradient(model, *p) for p in parts]).mean(0)
        whole = TERRAIN.batch_gradient(model, *points.tensors)
        return ((mean - whole).abs().max() / whole.abs().max()).item()

    assert error_of(32, 32) < 1e-5 < 0.01 < error_of(16, 48)

    # A sum over the batch in place of a mean: twice the gradient for twice the points.
    def sum_of_squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).square().sum()

    with mock.patch.object(TERRAIN, "mse_loss", sum_of_squares):
        assert error_of(32, 32) == pytest.approx(0.5, rel=1e-4)


# --- What people get wrong. ----------


def test_cross_entropy_on_one_logit_has_no_gradient() -> None:
    # As in PyTorch's tutorial series on DDP: Linear(20, 1), targets that are numbers.
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    loss = cross_entropy(model(torch.rand(32, 20)), torch.rand(32, 1))
    loss.backward()
    assert loss.item() == 0
    for parameter in (model.weight, model.bias):
        assert parameter.grad is not None and not parameter.grad.any()
    # A second logit, and there is something to learn.
    model = torch.nn.Linear(20, 2)
    cross_entropy(model(torch.rand(32, 20)), torch.rand(32, 2)).backward()
    assert model.weight.grad is not None and model.weight.grad.abs().max() > 0.01


def test_adam_hardly_notices_a_sum_in_place_of_the_mean() -> None:
    # It divides by the gradient's own size, so that a missing "/ world_size" can hide.
    def train(
        optimizer_class: Any,
        factor: float,
        steps: int = 30,
        clip: float = math.inf,
        **options: Any,
    ) -> torch.Tensor:
        torch.manual_seed(0)
        model, batch = torch.nn.Linear(8, 1), torch.randn(64, 8)
        optimizer = optimizer_class(model.parameters(), lr=0.01, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(batch).square().mean() * factor).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        return model.weight.detach()

    def difference(optimizer_class: Any, **options: Any) -> float:
        ways = [train(optimizer_class, factor, **options) for factor in (1, 4)]
        return (ways[0] - ways[1]).abs().max().item()

    assert difference(Adam) < 1e-5 and difference(AdamW) < 1e-5
    # Adam's weight decay is a part of the gradient, AdamW's is not.
    assert difference(AdamW, weight_decay=0.1) < 1e-5
    assert difference(Adam, weight_decay=0.1) > 1e-3
    assert difference(Adam, eps=1e-2) > 1e-3
    assert difference(SGD) > 0.05
    # Nor does who clips, if both are longer than that: the clipped sum is that mean.
    assert difference(SGD, clip=0.01) < 1e-6
    start, step, longer = (train(SGD, f, n) for f, n in ((1, 0), (1, 1), (4, 1)))
    torch.testing.assert_close(longer - start, 4 * (step - start))


def test_data_parallel_without_a_gpu_is_the_plain_model() -> None:
    model = torch.nn.Linear(3, 1)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = torch.ones(8, 3)
    with mock.patch.object(torch.cuda, "device_count", return_value=0):
        parallel = torch.nn.DataParallel(model, device_ids=[])
        assert torch.equal(parallel(batch), model(batch))
    assert len(calls) == 2  # the whole batch at once, and no threads


def test_fresh_processes_draw_different_random_numbers() -> None:
    # Without a seed, each rank that builds its own data builds other data.
    own = "torch.rand(8, generator=torch.Generator())"
    script = f"import torch; print([torch.rand(8).tolist(), {own}.tolist()])"
    first, second = (json.loads(python("-c", script).stdout) for _ in range(2))
    assert [len(numbers) for numbers in first] == [8, 8]
    # A generator of one's own always starts from the same seed.
    assert first[0] != second[0] and first[1] == second[1]


def draw_into(queue: Any) -> None:
    """Put eight numbers there, as a rank would that is not seeded."""
    queue.put(torch.rand(8).tolist())


def drawn_by_forks() -> list[list[float]]:
    """Let two forks of this rank draw, as `mp.start_processes` can start ranks."""
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    torch.multiprocessing.start_processes(
        lambda _, queue: draw_into(queue), (queue,), 2, start_method="fork"
    )
    return [queue.get() for _ in range(2)]


def test_forks_that_are_not_seeded_draw_alike(worker_pool: WorkerPool) -> None:
    ((first, second),) = worker_pool.run(drawn_by_forks, world_size=1)
    assert len(first) == 8 and first == second


def points_drawn_by_each_rank(seed_by_rank: bool) -> list[tuple[float, ...]]:
    """Give out points as train.py does, from a dataset that each rank drew itself."""
    seed = dist.get_rank() if seed_by_rank else 0
    points, _ = TERRAIN.sample_points(TERRAIN.load_terrain(), 8192, seed=seed)
    sampler = DistributedSampler(points, drop_last=True)
    return [tuple(place) for place in points.tensors[0][list(sampler)].tolist()]


def test_points_that_each_rank_draws_for_itself_overlap(
    worker_pool: WorkerPool,
) -> None:
    seen = worker_pool.run(points_drawn_by_each_rank, True)
    assert [len(of_rank) for of_rank in seen] == [4096, 4096]
    # Two draws of 4096 out of 138,632 cells share 121 on average.
    assert 8192 - 180 < len(set(seen[0] + seen[1])) < 8192 - 60
    # The cure: one seed, so that all ranks have one dataset, and the sampler shards it.
    seen = worker_pool.run(points_drawn_by_each_rank, False)
    assert len(set(seen[0] + seen[1])) == 8192


# --- The command line. ----------


def refusal(script: str, words: list[str], environment: dict[str, str]) -> str:
    """Run a script's main() on bad input; return the line that it printed."""
    module: Any = load_chapter(CHAPTER)[script]
    errors, output = io.StringIO(), io.StringIO()
    spawn = mock.Mock(side_effect=AssertionError("it should not have come to this"))
    with (
        mock.patch.object(sys, "argv", [f"{script}.py", *words]),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(signal, "signal"),
        mock.patch.object(torch.multiprocessing, "spawn", spawn),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit) as end,
    ):
        module.main()
    assert end.value.code == 2 and not output.getvalue()
    (line,) = errors.getvalue().splitlines()
    assert line.startswith(f"{script}.py: ")
    return line


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("script", "words", "environment", "expected"),
    [
        ("train", ["--nprocs", "0"], {}, "--nprocs: '0' is no number from 1 to 64"),
        ("train", ["--max_epochs=-1"], {}, "'-1' is no number from 1"),
        ("train", ["--batch_size=1.5"], {}, "'1.5' is no number from 1"),
        ("train", ["--lr=nan"], {}, "argument --lr: 'nan' is no number"),
        ("train", ["--nprocs=60", "--batch-size=80"], {}, "are more than 4096 points"),
        ("train", ["--epochs=3"], {}, "unrecognized arguments: --epochs=3"),
        ("train", [], TORCHRUN, "start it with python, not torchrun"),
    ],
)
def test_bad_input_is_one_line(
    script: str, words: list[str], environment: dict[str, str], expected: str
) -> None:
    assert expected in refusal(script, words, environment)


# --- Whole launches. ----------


@pytest.mark.smoke
@pytest.mark.slow
def test_four_ranks_from_another_folder_while_29500_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(socket.socket())
        # If another job holds it already, all the better.
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", 29500))  # allowed port: it is held on purpose
            holder.listen()
        words = ["--nprocs=4", "--max_epochs=1", "--batch_size=32"]
        done = python(TRAIN, *words, cwd=folder, timeout=300)
    assert done.returncode == 0, done.output
    assert re.findall(r"rank (\d) \| batch size 32 \| steps 32 ", done.stdout) == [
        *("0", "1", "2", "3")
    ]
    assert "32 x 32 x 4 = 4096 different points" in done.stdout
    assert "check: 4 rank(s) hold the same bits, and a gradient" in done.stdout
    assert done.stderr == ""


# A page's command shows it as well.
@pytest.mark.slow
def test_three_ways_to_join_count_two_ranks() -> None:
    done = python(ROOT / CHAPTER / "rendezvous.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "by_environment | 2 ranks",
        "by_address     | 2 ranks",
        "by_store       | 2 ranks",
        "check: 2 ranks joined in 3 ways",
    ]


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_each_way_to_join_says_where_the_store_is_and_who_asks(
    ranks: list[int],
) -> None:
    module: Any = load_chapter(CHAPTER)["rendezvous"]
    told: dict[str, str] = {}
    joins = mock.Mock(side_effect=lambda *_, **__: told.update(os.environ))
    calls, store = mock.Mock(), mock.Mock()
    with (
        mock.patch.dict(os.environ, clear=True),
        mock.patch.multiple(
            dist,
            init_process_group=joins,
            destroy_process_group=calls.leave,
            TCPStore=store,
        ),
        mock.patch.multiple(
            module, gather=lambda rank: ranks, say=mock.Mock(), check=calls.check
        ),
    ):
        module.main(1, [7, 8, 9])
    assert told == {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"},
        **{"RANK": "1", "WORLD_SIZE": "2"},
    }
    me = {"rank": 1, "world_size": 2, "timeout": module.LIMIT}
    assert joins.call_args_list == [
        mock.call("gloo", timeout=module.LIMIT),
        mock.call("gloo", init_method="tcp://127.0.0.1:8", **me),
        mock.call("gloo", store=store.return_value, **me),
    ]
    store.assert_called_once_with("127.0.0.1", 9, is_master=False)
    is_right, claim = ranks == [0, 1], "2 ranks joined in 3 ways"
    last = [mock.call.check(is_right, claim), mock.call.leave()]
    assert calls.mock_calls == [mock.call.leave(), mock.call.leave(), *last]


# What runs on each of two nodes, which here are two processes of one machine.
NODE = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def be_rank(local_rank, node, port):
    address = f"tcp://127.0.0.1:{port}"
    rank = 2 * node + local_rank
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=4)
    dist.all_reduce(x := torch.tensor(10**rank))
    print(f"rank {rank} has {x.item()}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(be_rank, tuple(map(int, sys.argv[1:])), nprocs=2)
"""


@pytest.mark.slow
def test_spawn_on_each_of_two_nodes_makes_one_group(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    script.write_text(NODE)
    port = free_port()
    with ThreadPoolExecutor() as threads:
        nodes = list(threads.map(lambda node: python(script, node, port), (0, 1)))
    assert [node.returncode for node in nodes] == [0, 0]
    lines = [sorted(node.stdout.splitlines()) for node in nodes]
    assert lines == [
        ["rank 0 has 1111", "rank 1 has 1111"],
        ["rank 2 has 1111", "rank 3 has 1111"],
    ]


def start_long_run() -> "subprocess.Popen[str]":
    """Start train.py with more to do than any test waits for."""
    return subprocess.Popen(
        [sys.executable, TRAIN, "--max-epochs=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        # What a test starts in the background may have inherited an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "waits_for"),
    [
        pytest.param(signal.SIGINT, "epoch 0", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "epoch 0", marks=pytest.mark.slow),
        (signal.SIGKILL, "children"),
    ],
)
def test_no_rank_outlives_the_parent(number: signal.Signals, waits_for: str) -> None:
    process = start_long_run()
    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        if waits_for == "epoch 0":
            for line in process.stdout:
                if "epoch 0 | mean loss" in line:
                    break
        deadline = time.monotonic() + 120
        # The two ranks; multiprocessing's resource tracker is a third, and ends alone.
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            children = parent.children(recursive=True)
        assert len(children) >= 2
        # Only the parent gets it, as from `kill`; a terminal would signal all of them.
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == -number
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        assert number == signal.SIGKILL or errors == ""
    finally:
        for one in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
