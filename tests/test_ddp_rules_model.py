"""Chapter 03, the rules: the sampler, BatchNorm, unused layers and two forwards."""

import contextlib
import copy
import dataclasses
import io
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler
from transformers.utils import ModelOutput

from lessons import run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "03_ddp_torchrun/rules"
modules = load_chapter(ROOM)
sampler, sync_batch_norm = modules["sampler"], modules["sync_batch_norm"]
unused_parameters, two_forwards = modules["unused_parameters"], modules["two_forwards"]


def ending(script: str, faults: dict[str, Any]) -> tuple[Any, str]:
    """Run a lesson with some of its parts replaced; return exit code and last line."""
    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(errors))
        for name, fault in faults.items():
            stack.enter_context(mock.patch.object(modules[script], name, fault))
        try:
            return 0, (run_lesson(ROOM, script).splitlines() or [""])[-1]
        except SystemExit as end:
            return end.code, errors.getvalue().strip()


@pytest.mark.parametrize(
    "script", ["sampler", "sync_batch_norm", "unused_parameters", "two_forwards"]
)
@pytest.mark.parametrize("ranks", ["", "1"])
def test_wrong_launcher_is_one_line(
    script: str,
    ranks: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if ranks:
            monkeypatch.setenv(name, ranks if "SIZE" in name else "0")
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    with pytest.raises(SystemExit) as stopped:
        modules[script].main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    refusal = f"not with {ranks} rank(s); " if ranks else ""
    launch = f"start it with torchrun --nproc-per-node=2 {script}.py"
    assert line == f"{script}.py: {refusal}{launch}"


# --- The sampler. ----------


def test_sampler_refuses_ranks_among_which_the_samples_divide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Then nothing is repeated or left out, and there is nothing to see.
    left_over = [sampler.SAMPLES % ranks for ranks in range(2, sampler.SAMPLES)]
    assert left_over == [1, 1, 3, 2, 1]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(sampler.SAMPLES) if "SIZE" in name else "0")
    monkeypatch.setattr(sys, "argv", ["sampler.py"])
    with pytest.raises(SystemExit) as stopped:
        sampler.main()
    assert stopped.value.code == 2
    assert "not with 7 rank(s); start it with" in capsys.readouterr().err


class OwnSeed(DistributedSampler):
    """Shuffles differently on each rank."""

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        """Take the rank for a seed."""
        super().__init__(*args, seed=seed + dist.get_rank(), **kwargs)


class Deaf(DistributedSampler):
    """Does not hear which epoch it is."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


class Sorted(DistributedSampler):
    """Assigns the right indices in another order."""

    def __iter__(self) -> Any:
        """Sort them."""
        return iter(sorted(super().__iter__()))


def sampler_ending(samples: int, broken: str = "") -> tuple[Any, str]:
    """Run the lesson with another number of samples, and one of its parts broken."""
    faults: dict[str, dict[str, Any]] = {
        "": {},
        "own seed": {"DistributedSampler": OwnSeed},
        "deaf": {"DistributedSampler": Deaf},
        "order": {"DistributedSampler": Sorted},
        "counts": {"mean_by_counts": sampler.mean_of_means},
    }
    few = {"SAMPLES": samples, "LOSSES": torch.exp(-torch.arange(samples))}
    return ending("sampler", few | faults[broken])


SAMPLER_CLAIM = "3 x 3 epochs and the loss are one process's"


@pytest.mark.parametrize(("world_size", "samples"), [(2, 7), (3, 7), (3, 12), (3, 4)])
def test_sampler_assigns_what_one_process_would(
    worker_pool: WorkerPool, world_size: int, samples: int
) -> None:
    ends = worker_pool.run(sampler_ending, samples, world_size=world_size)
    assert ends == [(0, f"check: {SAMPLER_CLAIM}")] + [(0, "")] * (world_size - 1)
    # In order: every n-th sample, and the first ones again where they do not divide.
    order = [*range(samples), *range(-samples % world_size)]
    data: Any = range(samples)
    in_order = [
        list(DistributedSampler(data, world_size, rank, shuffle=False))
        for rank in range(world_size)
    ]
    assert in_order == [order[rank::world_size] for rank in range(world_size)]


@pytest.mark.parametrize(
    ("broken", "wrong"),
    # The seed of rank 0 is the right one, so that rank sees nothing wrong.
    [("own seed", [1, 2]), *[(n, [0, 1, 2]) for n in ("deaf", "order", "counts")]],
)
def test_sampler_or_mean_that_is_wrong_is_noticed(
    worker_pool: WorkerPool, broken: str, wrong: list[int]
) -> None:
    ends = worker_pool.run(sampler_ending, 7, broken, world_size=3)
    said = f"check failed on ranks {wrong}, not so: {SAMPLER_CLAIM}"
    assert ends == [(1, said), (1, ""), (1, "")]


def three_means(samples: int) -> list[float]:
    """Return a loss by means of padded and unpadded shards, and by sums and counts.

    The last is by the sums and counts of padded shards.
    """
    losses, data = torch.exp(-torch.arange(samples)), range(samples)
    padded = losses[list(DistributedSampler(data, shuffle=False))]  # type: ignore
    own = losses[dist.get_rank() :: dist.get_world_size()]
    means = sampler.mean_of_means
    by_counts = sampler.mean_by_counts
    return [means(padded), means(own), by_counts(own), by_counts(padded)]


def means_of_halves() -> list[float]:
    """Average equal losses whose sum and number two bytes cannot hold."""
    many = torch.full((40_001,), 2, dtype=torch.float16)
    few = torch.full((257,), 3, dtype=torch.bfloat16)
    return [sampler.mean_by_counts(losses) for losses in (many, few)]


def test_padding_biases_a_mean_and_sums_with_counts_do_not(
    worker_pool: WorkerPool,
) -> None:
    losses = torch.exp(-torch.arange(7))
    true = losses.mean().item()
    due = [
        torch.cat([losses, losses[:2]]).mean().item(),
        statistics.mean(losses[rank::3].mean().item() for rank in range(3)),
        true,
        # Counted are then the repeated samples too.
        torch.cat([losses, losses[:2]]).mean().item(),
    ]
    assert due[0] > 1.4 * true and due[1] < 0.95 * true
    # With `drop_last=True` the seventh sample is left out.
    options: Any = {"dataset": range(7), "shuffle": False, "drop_last": True}
    kept = [
        list(DistributedSampler(**options, num_replicas=3, rank=r)) for r in (0, 1, 2)
    ]
    assert kept == [[0, 3], [1, 4], [2, 5]]
    by_rank = worker_pool.run(three_means, 7, world_size=3)
    assert by_rank == [pytest.approx(due, rel=1e-6)] * 3
    # If the ranks divide the samples, all four are right.
    (found, *_) = worker_pool.run(three_means, 6, world_size=3)
    assert found == [pytest.approx(losses[:6].mean().item())] * 4
    # A rank may have no sample at all: of two samples, the third rank has none.
    by_rank = worker_pool.run(three_means, 2, world_size=3)
    true = losses[:2].mean().item()
    assert [counted for _, _, counted, _ in by_rank] == [pytest.approx(true)] * 3
    assert worker_pool.run(means_of_halves, world_size=3) == [[2, 3]] * 3


@pytest.mark.parametrize(
    ("shuffle", "sets_epoch", "expected"),
    [
        (True, True, [1, 4, 5]),  # as on the page
        (True, False, [1, 1, 1]),
        (False, True, [6, 6, 6]),
    ],
)
def test_drop_last_leaves_out_other_samples_in_each_epoch(
    shuffle: bool, sets_epoch: bool, expected: list[int]
) -> None:
    left_out = []
    for epoch in range(3):
        seen = set()
        for rank in range(3):
            data: Any = range(7)
            shard = DistributedSampler(data, 3, rank, shuffle, drop_last=True)
            if sets_epoch:
                shard.set_epoch(epoch)
            seen |= set(shard)
        assert len(seen) == 6
        left_out += sorted(set(range(7)) - seen)
    assert left_out == expected


# --- BatchNorm. ----------


class ForwardOnly(torch.autograd.Function):
    """An all-reduce whose backward forgets that other ranks depend on the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Keep this rank's own gradient."""
        return grads[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_synchronised_layer_trains_as_one_process(
    worker_pool: WorkerPool, world_size: int
) -> None:
    printed = worker_pool.run(
        run_lesson, ROOM, "sync_batch_norm", world_size=world_size
    )
    plain, summed, converted, check = printed[0].splitlines()
    assert plain.startswith("wrap_plain     | differs after step 1: loss moved ")
    same = "wrap_summed    | same as one process: 3 steps, loss and 9 tensors within "
    assert summed.startswith(same)
    refusal = "wrap_converted | SyncBatchNorm layers only work with GPU modules"
    assert converted == refusal
    assert check == "check: synchronised layers equal one process"


@pytest.mark.parametrize(
    "fault", [{"SumOverRanks": ForwardOnly}, {"SummedBatchNorm": nn.BatchNorm1d}]
)
def test_lesson_notices_a_layer_that_is_not_synchronised(
    worker_pool: WorkerPool, fault: dict[str, Any]
) -> None:
    said = "not so: synchronised layers equal one process"
    ends = worker_pool.run(ending, "sync_batch_norm", fault)
    assert ends == [(1, f"check failed on ranks [0, 1], {said}"), (1, "")]


def drifting_inputs(count: int) -> torch.Tensor:
    """Make inputs (count, 3) that drift, so that the ranks' shards are not alike."""
    drift = torch.linspace(-1, 1, count).unsqueeze(1)
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1)) + drift


def normed_step(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and running statistics of one forward and backward."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    outputs.square().mean().backward()
    assert inputs.grad is not None
    return {
        "outputs": outputs.detach(),
        "input grads": inputs.grad,
        "weight grads": torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ),
        "running": torch.cat(running_statistics(model)),
    }


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the running means and variances."""
    return [b.clone() for b in model.buffers() if b.is_floating_point()]


def build_trained() -> nn.Sequential:
    """Build the lesson's model as if its BatchNorm had been set and trained before."""
    model: Any = sync_batch_norm.build_normed()
    model[1].eps, model[1].momentum = 0.5, 0.3
    for tensor in model[1].state_dict().values():
        tensor += 2
    return model


def sum_and_gradients() -> list[float]:
    """Return S, the ranks' sum, and two gradients by this rank's part, of S³."""
    part = torch.tensor(dist.get_rank() + 1.0, requires_grad=True)
    total = sync_batch_norm.SumOverRanks.apply(part)
    (first,) = torch.autograd.grad(total**3, part, create_graph=True)
    (second,) = torch.autograd.grad(first, part)
    return [total.item(), first.item(), second.item()]


def test_a_sum_over_ranks_can_be_differentiated_twice(worker_pool: WorkerPool) -> None:
    # The ranks' S³ add up to n S³; their first gradients, 3 n S² each, to 3 n² S².
    for n, s in ((2, 3), (3, 6)):
        ends = worker_pool.run(sum_and_gradients, world_size=n)
        assert ends == [[s, 3 * n * s**2, 6 * n**2 * s]] * n


def error_for_one_sample() -> str:
    """Normalise a sample that one rank alone has."""
    inputs = drifting_inputs(1)[dist.get_rank() :]
    with pytest.raises(ValueError) as caught:
        sync_batch_norm.SummedBatchNorm(3)(inputs)
    return str(caught.value)


def off_under_ddp(wrap: str, broken: bool = False) -> dict[str, float]:
    """Compare a step under DDP with BatchNorm in one process.

    Returns how far this rank's results are off, as a share of the largest entry.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = drifting_inputs(8 * world_size)
    alone = normed_step(build_trained(), samples)
    # A rank's loss is a mean over its own samples, one process's is over all of them.
    # DDP makes up for that in the gradients of weights; nobody does for the inputs.
    alone["input grads"] *= world_size
    model = getattr(sync_batch_norm, wrap)(build_trained())
    replaced = mock.patch.object(sync_batch_norm, "SumOverRanks", ForwardOnly)
    with replaced if broken else nullcontext():
        found = normed_step(model, samples.chunk(world_size)[rank])
    errors = {}
    for name, whole in alone.items():
        per_sample = name in ("outputs", "input grads")
        due = whole.chunk(world_size)[rank] if per_sample else whole
        errors[name] = ((found[name] - due).abs().max() / due.abs().max()).item()
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_summed_statistics_are_one_process_s(
    worker_pool: WorkerPool, world_size: int
) -> None:
    names = {"outputs", "input grads", "weight grads", "running"}
    plain = worker_pool.run(off_under_ddp, "wrap_plain", world_size=world_size)
    summed = worker_pool.run(off_under_ddp, "wrap_summed", world_size=world_size)
    assert len(plain) == len(summed) == world_size
    for own, together in zip(plain, summed, strict=True):
        assert set(own) == set(together) == names
        assert min(own.values()) > 0.01
        assert max(together.values()) < 1e-5


def test_one_sample_in_all_has_no_variance(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(error_for_one_sample) == ["not with 1 sample(s) in all"] * 2


def test_a_sum_without_a_backward_spoils_the_gradients_alone(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(off_under_ddp, "wrap_summed", True)
    assert len(by_rank) == 2
    for errors in by_rank:
        assert max(errors["outputs"], errors["running"]) < 1e-5
        assert min(errors["input grads"], errors["weight grads"]) > 0.01


def told_before_wrapping() -> tuple[float, float, bool, list[bool]]:
    """Freeze BatchNorm's weight, put it into eval(), wrap; return what is left."""
    model = build_trained()
    model[1].eval().weight.requires_grad_(False)
    layer = sync_batch_norm.wrap_summed(model).module[1]
    learns = [parameter.requires_grad for parameter in layer.parameters()]
    return layer.eps, layer.momentum, layer.training, learns


def test_a_summed_layer_keeps_all_that_batch_norm_was_told(
    worker_pool: WorkerPool,
) -> None:
    assert (
        worker_pool.run(told_before_wrapping) == [(0.5, 0.3, False, [False, True])] * 2
    )


def uneven_step() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Normalise 2, 3 or 4 samples on this rank; return it and one process's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = [2 + r for r in range(world_size)]
    whole = drifting_inputs(sum(counts)).requires_grad_()
    # Other settings than the defaults, or a layer could have these written in it.
    settings: Any = {"eps": 0.5, "momentum": 0.3}
    alone = nn.BatchNorm1d(3, **settings)
    layer = sync_batch_norm.SummedBatchNorm(3, **settings)
    target = torch.arange(3.0)
    wanted = alone(whole)
    (wanted - target).square().sum().backward()
    assert whole.grad is not None and alone.weight.grad is not None
    own = whole.detach().split(counts)[rank].clone().requires_grad_()
    found = layer(own)
    (found - target).square().sum().backward()
    assert own.grad is not None and layer.weight.grad is not None
    dist.all_reduce(layer.weight.grad)
    return (
        [found.detach(), own.grad, layer.weight.grad, *running_statistics(layer)],
        [
            wanted.detach().split(counts)[rank],
            whole.grad.split(counts)[rank],
            alone.weight.grad,
            *running_statistics(alone),
        ],
    )


def test_ranks_may_have_batches_of_different_length(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(uneven_step, world_size=3)
    assert len(by_rank) == 3
    for rank in range(3):
        found, wanted = by_rank[rank]
        assert len(found) == len(wanted) == 5
        for name in range(5):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def running_means() -> list[float]:
    """Return a feature's running mean after a step, and after the next forward.

    And the plain model's outputs for one sample between the two, and at the end.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_model = sync_batch_norm.wrap_plain(sync_batch_norm.build_normed())
    own = drifting_inputs(8 * world_size).chunk(world_size)[rank]
    normed_step(ddp_model, own)
    after_step = next(ddp_model.buffers())[0].item()
    plain, sample = ddp_model.eval().module, torch.ones(1, 3)
    output = plain(sample).item()
    # This changes no statistics, but begins with a broadcast of rank 0's buffers.
    ddp_model(own[:1])
    means = [after_step, next(ddp_model.buffers())[0].item()]
    return [*means, output, plain(sample).item()]


def test_running_statistics_are_those_of_rank_zero_s_samples(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(running_means, world_size=3)
    after_step, after_forward, output, output_later = zip(*by_rank, strict=True)
    assert len(set(after_step)) == 3
    assert after_forward == (after_step[0],) * 3
    # So without a broadcast the ranks validate three models.
    assert len(set(output)) == 3 and output_later == (output[0],) * 3
    said = "`ddp_model.module`, after broadcasting its buffers."
    assert said in words_of(ROOM)


def refusals() -> list[str]:
    """Ask PyTorch's layer to run on the CPU, first by itself, then under DDP."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(sync_batch_norm.build_normed())
    said = []
    with pytest.raises(ValueError) as refusal:
        model(drifting_inputs(8))
    said.append(str(refusal.value))
    # In evaluation there is nothing to all-reduce.
    assert model.eval()(drifting_inputs(8)).shape[0] == 8
    with pytest.raises(ValueError) as refusal:
        DistributedDataParallel(model)
    said.append(str(refusal.value))
    with pytest.raises(ValueError) as refusal:
        sync_batch_norm.wrap_converted(sync_batch_norm.build_normed())
    return [*said, str(refusal.value)]


def test_sync_batch_norm_refuses_a_cpu(worker_pool: WorkerPool) -> None:
    wanted = [
        "SyncBatchNorm expected input tensor to be on GPU or XPU or privateuseone",
        *["SyncBatchNorm layers only work with GPU modules"] * 2,
    ]
    assert worker_pool.run(refusals) == [wanted] * 2
    # Where there is no process group, it is a BatchNorm.
    assert torch.nn.SyncBatchNorm(3)(torch.randn(4, 3)).shape == (4, 3)


# --- Layers that a step does not use. ----------

LATE = "Expected to have finished reduction in the prior iteration"
CHANGED = "Your training graph has changed in this iteration"
TWICE = "Expected to mark a variable ready only once"
FIND, STATIC = ({name: True} for name in ("find_unused_parameters", "static_graph"))

# A setting; for each step who uses the middle layer, and what comes of it for those
# who do and for those who do not. An error ends a rank's steps.
STEPS: list[tuple[dict[str, bool], list[tuple[str, str, str]]]] = [
    ({}, [("all", "mean", ""), ("nobody", "", "local"), ("all", LATE, "")]),
    ({}, [("nobody", "", "local"), ("nobody", "", LATE)]),
    (FIND, [("nobody", "", "mean"), ("rank 0", "mean", "mean"), ("all", "mean", "")]),
    (STATIC, [("rank 0", "mean", "mean")] * 2),
    (STATIC, [("nobody", "", "mean")] * 2),
    (STATIC, [("all", "mean", ""), ("nobody", "", "local"), ("all", LATE, "")]),
    (STATIC, [("nobody", "", "mean"), ("all", CHANGED, "")]),
]


def steps_of(setting: dict[str, bool], users: list[str]) -> list[str]:
    """Return what comes of the steps on this rank."""
    return unused_parameters.take_steps(setting, users)


@pytest.mark.parametrize(("setting", "steps"), STEPS)
def test_settings_make_of_unused_layers_what_the_table_says(
    worker_pool: WorkerPool, setting: dict[str, bool], steps: list[tuple[str, str, str]]
) -> None:
    users = [who for who, _, _ in steps]
    by_rank = worker_pool.run(steps_of, setting, users, world_size=3)
    assert len(by_rank) == 3
    for rank in range(3):
        due = [
            with_it if who in ("all", f"rank {rank}") else without
            for who, with_it, without in steps
        ]
        assert len(by_rank[rank]) == len(due)
        for number in range(len(due)):
            assert by_rank[rank][number].startswith(due[number] or "no such rank")


def used_before_the_last_pass_alone(setting: dict[str, Any]) -> list[str]:
    """Let every step use the middle layer in the first of two micro-batches alone."""
    n, rank, loss = dist.get_world_size(), dist.get_rank(), unused_parameters.local_loss
    model, alone = unused_parameters.build_detour(), unused_parameters.build_detour()
    ddp_model, outcomes = DistributedDataParallel(model, **setting), []
    for r in range(n):
        for users in ("all", "nobody"):
            (loss(alone, r, users) / n).backward()
    due = unused_parameters.flat_gradients(alone)
    for _ in range(2):
        ddp_model.zero_grad()
        try:
            with ddp_model.no_sync():
                loss(ddp_model, rank, "all").backward()
            loss(ddp_model, rank, "nobody").backward()
        except RuntimeError as error:
            outcomes.append(str(error))
            break
        far = (unused_parameters.flat_gradients(model) - due).abs().max()
        outcomes.append("mean" if far < 1e-6 else f"{far:.0e} off")
    return outcomes


def test_the_pass_that_synchronises_has_to_use_all_layers(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(used_before_the_last_pass_alone, {})
    assert len(found) == 2
    for first, second in found:
        assert float(first.removesuffix(" off")) > 1e-3 and second.startswith(LATE)
    told = worker_pool.run(used_before_the_last_pass_alone, FIND)
    assert told == [["mean", "mean"]] * 2


class TwoLosses(nn.Module):
    """A layer for each of two losses; a wrong one keeps the second to itself."""

    def __init__(self, returns_both: bool) -> None:
        """Draw the same weights on every call."""
        super().__init__()
        torch.manual_seed(0)
        self.main, self.side = nn.Linear(2, 1), nn.Linear(2, 1)
        self.returns_both, self.kept = returns_both, torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (B, 2) to a loss."""
        self.kept = self.side(inputs).sum()
        loss = self.main(inputs).sum()
        return loss + self.kept if self.returns_both else loss


def gradients_of_two_losses(returns_both: bool) -> list[float] | str:
    """Sum two losses and look for unused parameters; return gradients, or the error."""
    model = TwoLosses(returns_both)
    ddp_model = DistributedDataParallel(model, find_unused_parameters=True)
    loss = ddp_model(torch.full((1, 2), dist.get_rank() + 1.0))
    try:
        (loss if returns_both else loss + model.kept).backward()
    except RuntimeError as error:
        return str(error)
    return unused_parameters.flat_gradients(model).tolist()


def head_outside_of_forward(finds_unused: bool) -> str:
    """Call a layer by itself, on what the wrapper returned; return the error."""
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    head, model.forward = model[1], model[0].forward
    ddp_model = DistributedDataParallel(model, find_unused_parameters=finds_unused)
    try:
        head(ddp_model(torch.ones(1, 2))).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_find_unused_parameters_does_not_know_layers_outside_of_forward(
    worker_pool: WorkerPool,
) -> None:
    errors = worker_pool.run(head_outside_of_forward, True)
    assert [error[: len(TWICE)] for error in errors] == [TWICE] * 2
    assert worker_pool.run(head_outside_of_forward, False) == ["", ""]


def test_find_unused_parameters_needs_all_losses_from_forward(
    worker_pool: WorkerPool,
) -> None:
    mean = [1.5, 1.5, 1.0]  # the inputs are 1 and 2
    assert worker_pool.run(gradients_of_two_losses, True) == [mean * 2] * 2
    errors = worker_pool.run(gradients_of_two_losses, False)
    assert [error[: len(TWICE)] for error in errors] == [TWICE] * 2
    said = "which come # from what it returns (also a tuple, list or dict)"
    assert said in words_of(ROOM)


class TwoHeads(torch.nn.Module):
    """Runs both of two heads on what a body makes."""

    def __init__(self) -> None:
        """Begin with ones."""
        super().__init__()
        layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
        self.body, self.first, self.second = layers
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (B, 1) to two of (B, 1)."""
        hidden = self.body(inputs)
        return self.first(hidden), self.second(hidden)


@dataclasses.dataclass
class Fields:
    """What a model returns, into which DDP looks in forward alone."""

    first: torch.Tensor
    second: torch.Tensor | None = None


class Two(NamedTuple):
    """What a model returns, by name and by number."""

    first: torch.Tensor
    second: torch.Tensor | None = None


class Named(dict):
    """A dict of one's own, into which DDP looks in forward alone."""


@dataclasses.dataclass
class OfTransformers(ModelOutput):
    """What models of transformers return, a dataclass and a dict that torch knows."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None


# How `forward` may return one output or two; what comes of a step that skips the
# second head, and of one whose loss leaves it out: a mean, or each rank's own gradient.
OWN = "own, then " + LATE
RETURNED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a tuple": (lambda *outputs: outputs, "mean", "mean"),
    "a list": (lambda *outputs: list(outputs), "mean", "mean"),
    "a dict": (lambda *outputs: dict(enumerate(outputs)), "mean", "mean"),
    "a named tuple": (lambda *outputs: Two(*outputs), "mean", "mean"),
    "a dataclass": (Fields, "mean", OWN),
    "a dict of one's own": (lambda *outputs: Named(enumerate(outputs)), "mean", OWN),
    "transformers' own": (OfTransformers, "mean", "mean"),
    "an object": (lambda *outputs: SimpleNamespace(first=outputs[0]), TWICE, TWICE),
}


def steps_with_returned(kind: str, skips: bool) -> str:
    """Use one head's output in the loss of two steps; return what comes of them."""
    wrap, *_ = RETURNED[kind]
    model: Any = TwoHeads()
    heads = model.forward
    model.forward = lambda inputs: (
        wrap(model.first(model.body(inputs))) if skips else wrap(*heads(inputs))
    )
    ddp_model = DistributedDataParallel(model, find_unused_parameters=True)
    own = dist.get_rank() + 1.0  # input, and so local gradient
    outcomes = []
    for _ in range(2):
        ddp_model.zero_grad()
        try:
            outputs = ddp_model(torch.full((1, 1), own))
            used = outputs.first if hasattr(outputs, "first") else outputs[0]
            used.sum().backward()
        except RuntimeError as error:
            outcomes.append(str(error))
            break
        gradient = model.body.weight.grad.item()
        outcomes.append({1.5: "mean", own: "own"}[gradient])
    return ", then ".join(outcomes)


@pytest.mark.parametrize("kind", RETURNED)
def test_find_unused_parameters_sees_a_loss_through_tuples_lists_and_dicts_alone(
    worker_pool: WorkerPool, kind: str
) -> None:
    _, skipped, left_out = RETURNED[kind]
    for skips, due in ((True, skipped), (False, left_out)):
        due = "mean, then mean" if due == "mean" else due
        outcomes = worker_pool.run(steps_with_returned, kind, skips)
        assert [outcome[: len(due)] for outcome in outcomes] == [due] * 2


def gradient_of_two_backwards(settings: dict[str, Any], at_once: bool) -> float:
    """Go back from two heads, at once or one by one; return their body's gradient."""
    model = TwoHeads()
    ddp_model = DistributedDataParallel(model, **settings)
    outputs = ddp_model(torch.full((1, 1), dist.get_rank() + 1.0))
    for loss in [torch.stack(outputs)] if at_once else outputs:
        loss.sum().backward(retain_graph=True)
    assert model.body.weight.grad is not None
    return model.body.weight.grad.item()


def test_find_unused_parameters_needs_one_backward(worker_pool: WorkerPool) -> None:
    find = {"find_unused_parameters": True}
    assert worker_pool.run(gradient_of_two_backwards, find, True) == [3.0, 3.0]
    # The mean of the first loss's gradients, and this rank's own of the second.
    found = worker_pool.run(gradient_of_two_backwards, find, False)
    assert found == [1.5 + 1.0, 1.5 + 2.0]


def gradients_with_penalty(settings: dict[str, Any]) -> float:
    """Take steps whose loss has a gradient in it; return how far off theirs are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    plain, far = copy.deepcopy(model), 0.0
    ddp_model = DistributedDataParallel(model, **settings)

    def loss_of(module: Any, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        outputs = module(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return outputs.square().mean() + slope.square().mean()

    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(dist.get_world_size(), 3, 2, generator=generator)
        for module in (model, plain):
            module.zero_grad()
        loss_of(ddp_model, batches[dist.get_rank()]).backward()
        torch.stack([loss_of(plain, batch) for batch in batches]).mean().backward()
        flat = unused_parameters.flat_gradients(plain)
        far = max(torch.dist(unused_parameters.flat_gradients(model), flat).item(), far)
    return far


def test_a_static_graph_has_no_gradient_in_its_loss(worker_pool: WorkerPool) -> None:
    for settings in ({}, {"find_unused_parameters": True}):
        assert max(worker_pool.run(gradients_with_penalty, settings)) < 1e-6, settings
    assert min(worker_pool.run(gradients_with_penalty, {"static_graph": True})) > 1e-2
    said = "For equal steps whose loss takes all that `forward` returns, and without # "
    assert said + "`autograd.grad`" in words_of(ROOM)


def steps_from_one_head(settings: dict[str, Any]) -> list[float | str]:
    """Run both heads, and go back from one, in three steps; return what comes of it."""
    model = TwoHeads()
    ddp_model = DistributedDataParallel(model, **settings)
    found: list[float | str] = []
    for _ in range(3):
        ddp_model.zero_grad()
        try:
            used, _ = ddp_model(torch.full((1, 1), dist.get_rank() + 1.0))
            used.sum().backward()
        except RuntimeError as error:
            return [*found, str(error)[: len(LATE)]]
        assert model.body.weight.grad is not None
        found.append(model.body.weight.grad.item())
    return found


def test_a_static_graph_has_no_output_that_its_loss_leaves_out(
    worker_pool: WorkerPool,
) -> None:
    find = {"find_unused_parameters": True}
    assert worker_pool.run(steps_from_one_head, find) == [[1.5] * 3] * 2
    # The second step's gradient is this rank's own, without an error.
    found = worker_pool.run(steps_from_one_head, {"static_graph": True})
    assert found == [[1.5, own, LATE] for own in (1.0, 2.0)]


def both_heads_by_turns(settings: dict[str, Any]) -> float | str:
    """Use a head in each of two forward passes, and go back from both at once."""
    model: Any = TwoHeads()
    heads = (model.first, model.second)
    model.forward = lambda inputs, i: heads[i](model.body(inputs))
    ddp_model = DistributedDataParallel(model, **settings)
    inputs = torch.full((1, 1), dist.get_rank() + 1.0)
    try:
        torch.stack([ddp_model(inputs, i) for i in (0, 1)]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return model.body.weight.grad.item()


def test_find_unused_parameters_needs_one_forward(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(both_heads_by_turns, {}) == [3.0, 3.0]
    found = worker_pool.run(both_heads_by_turns, {"find_unused_parameters": True})
    assert [str(error)[: len(TWICE)] for error in found] == [TWICE] * 2


def gradient_of_one_head(finds_unused: bool) -> float:
    """Run both heads, go back from one; return the gradient of their body."""
    model = TwoHeads()
    ddp_model = DistributedDataParallel(model, find_unused_parameters=finds_unused)
    used, _ = ddp_model(torch.full((1, 1), dist.get_rank() + 1.0))
    used.sum().backward()
    assert model.body.weight.grad is not None
    return model.body.weight.grad.item()


def test_a_layer_that_runs_but_is_in_no_loss_is_unused(worker_pool: WorkerPool) -> None:
    # By default each rank's own, which is its input.
    assert worker_pool.run(gradient_of_one_head, False) == [1.0, 2.0]
    assert worker_pool.run(gradient_of_one_head, True) == [1.5] * 2
    assert "Let every loss depend on every parameter, or set" in words_of(ROOM)


def gradients_in_views() -> list[bool]:
    """Leave out the middle of three layers, each in a bucket of its own.

    Return whether the last layer has the mean over the ranks, and the first this rank's
    own gradient, divided.
    """
    torch.manual_seed(0)
    plain: Any = unused_parameters.Detour(torch.nn.Linear(4, 4) for _ in range(3))
    ddp = DistributedDataParallel(
        copy.deepcopy(plain), bucket_cap_mb=1e-6, gradient_as_bucket_view=True
    )
    torch.manual_seed(dist.get_rank())
    inputs, used = torch.randn(5, 4), torch.randn(5, 4)
    ddp(used, True).backward()  # buckets are laid out anew after the first step
    ddp.zero_grad()
    ddp(inputs, False).backward()
    plain(inputs, False).backward()
    mean = plain[2].weight.grad.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    last, first = ddp.module[2].weight.grad, ddp.module[0].weight.grad
    own = plain[0].weight.grad / dist.get_world_size()
    # DDP waits for all buckets or for none: this one's all-reduce may not be over.
    end = time.monotonic() + 10
    while not torch.allclose(last, mean) and time.monotonic() < end:
        time.sleep(0.01)
    return [torch.allclose(last, mean), torch.allclose(first, own)]


def test_with_bucket_views_some_gradients_are_means(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(gradients_in_views) == [[True, True]] * 2


def test_a_silent_step_is_followed_by_the_error(worker_pool: WorkerPool) -> None:
    users = ["all", "nobody", "all"]
    by_rank = worker_pool.run(steps_of, {}, users)
    assert len(by_rank) == 2
    for rank in range(2):
        first, second, error = by_rank[rank]
        assert (first, second) == ("mean", "local")
        assert error.startswith(LATE)
        text = f"Parameter indices which did not receive grad for rank {rank}: 2 3"
        assert text in error


class FirstOrNot(nn.Module):
    """Three layers of a bucket each, of which a step may leave out the first."""

    def __init__(self) -> None:
        """Make the same weights on every call."""
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_first: bool) -> torch.Tensor:
        """Map (B, 8) to a loss."""
        return self.last(self.second(self.first(x) if uses_first else x)).sum()


def last_gradient_of_a_silent_step(is_view: bool) -> tuple[bool, bool]:
    """Leave the first layer out; return whether this rank's gradient is its own.

    And whether it is the same on all ranks, for which it waits two seconds.
    """
    model = FirstOrNot()
    ddp_model = DistributedDataParallel(
        model, bucket_cap_mb=1e-4, gradient_as_bucket_view=is_view
    )
    x = torch.full((1, 8), dist.get_rank() + 1.0)
    for uses_first in (True, True, False):  # the first step settles the buckets
        ddp_model.zero_grad()
        ddp_model(x, uses_first).backward()
    own = torch.autograd.grad(model(x, False), model.last.weight)[0]
    found = model.last.weight.grad
    assert found is not None
    deadline = time.monotonic() + 2
    while True:
        of_all = modules["ranks"].gather((found.tolist(), time.monotonic() > deadline))
        is_same = all(gradient == of_all[0][0] for gradient, _ in of_all)
        if is_same or any(is_late for _, is_late in of_all):
            return torch.equal(found, own), is_same


def test_silent_step_averages_full_buckets_of_views(
    worker_pool: WorkerPool,
) -> None:
    for is_view, due in ((False, (True, False)), (True, (False, True))):
        assert worker_pool.run(last_gradient_of_a_silent_step, is_view) == [due] * 2


UNUSED_CLAIM = "find_unused_parameters: 5 steps' gradients are one process's"


class NeverUnused(nn.ModuleList):
    """Three layers, of which no step leaves one out."""

    def forward(self, inputs: torch.Tensor, uses_middle: bool) -> torch.Tensor:
        """Map (B, 4) to a loss."""
        for layer in self:
            inputs = layer(inputs).tanh()
        return inputs.square().mean()


def unused_ending(fault: str) -> tuple[Any, str]:
    """Run the lesson with one fault, and little patience."""
    faults: dict[str, dict[str, Any]] = {
        "": {},
        "setting": {"SETTINGS": {"default": {}, "find_unused_parameters": STATIC}},
        "model": {"Detour": NeverUnused},
    }
    short = mock.Mock(return_value=timedelta(seconds=1))
    return ending("unused_parameters", {"timedelta": short, **faults[fault]})


def test_lesson_on_unused_parameters_holds_on_three_ranks(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(unused_ending, "", world_size=3)
    assert ends == [(0, f"check: {UNUSED_CLAIM}"), (0, ""), (0, "")]


@pytest.mark.parametrize("fault", ["setting", "model"])
def test_another_setting_or_model_is_noticed(
    worker_pool: WorkerPool, fault: str
) -> None:
    ends = worker_pool.run(unused_ending, fault)
    said = f"check failed on ranks [0, 1], not so: {UNUSED_CLAIM}"
    assert ends == [(1, said), (1, "")]


def wait_in_vain() -> list[str]:
    """Use the layer on rank 0 alone; a rank that waits gives up after a second."""
    short = mock.Mock(return_value=timedelta(seconds=1))
    with mock.patch.object(unused_parameters, "timedelta", short):
        return unused_parameters.take_steps({}, ["rank 0", "rank 0"])


def test_rank_that_alone_uses_a_layer_waits_in_vain(worker_pool: WorkerPool) -> None:
    user, first, second = worker_pool.run(wait_in_vain, world_size=3)
    # Who hears of the timeout and who of the lost connection is a race.
    hints = ("Timed out", "timeout", "losed by peer", "reset by peer")
    assert len(user) == 1 and any(hint in user[0] for hint in hints)
    for outcomes in (first, second):
        assert outcomes[0] == "local" and outcomes[1].startswith(LATE)


def all_reduces_of_steps(setting: dict[str, Any]) -> list[int]:
    """Count the all-reduces that DDP starts in two steps that use all layers."""
    model = unused_parameters.build_detour()
    ddp_model = DistributedDataParallel(model, **setting)
    found = []
    for _ in range(2):  # the first is not like the others
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            unused_parameters.local_loss(ddp_model, dist.get_rank(), "all").backward()
        calls = {event.key: event.count for event in profiler.key_averages()}
        found.append(calls.get("c10d::allreduce_", 0))
    return found


def test_looking_for_unused_parameters_all_reduces(
    worker_pool: WorkerPool,
) -> None:
    both = FIND | STATIC  # then the first step alone asks, as with STATIC by itself
    due = (({}, [1, 1]), (STATIC, [2, 1]), (FIND, [2, 2]), (both, [2, 1]))
    assert len(due) == 4
    for setting, counts in due:
        assert worker_pool.run(all_reduces_of_steps, setting) == [counts] * 2


def relative_times(rounds: int) -> list[float]:
    """Time a step of 100 small layers with each setting; the default is 1."""
    settings: list[dict[str, Any]] = [{}, FIND, STATIC]
    models = [
        DistributedDataParallel(
            nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)]), **setting
        )
        for setting in settings
    ]
    seconds: list[list[float]] = [[] for _ in models]
    for number in range(rounds * len(models)):
        # In turn, so that a slow moment of the machine meets all of them.
        model = models[number % len(models)]
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        model(torch.ones(4, 16)).mean().backward()
        seconds[number % len(models)].append(time.perf_counter() - start)
    best = [min(own[3:]) for own in seconds]  # a busy machine only adds to them
    return [least / best[0] for least in best]


@pytest.mark.slow
def test_looking_for_unused_parameters_takes_time(worker_pool: WorkerPool) -> None:
    times = worker_pool.run(relative_times, 60)
    print(f"times of a step: {times[0]}")  # pytest -s shows them
    assert len(times) == 2
    for default, find, static in times:
        assert default == 1
        assert find > 0.95 and static < 1.5


class Recomputed(nn.Module):
    """Keeps no activations of a layer that it uses once or twice."""

    def __init__(self, uses: int, use_reentrant: bool) -> None:
        """Make two layers."""
        super().__init__()
        self.first, self.layer, self.uses = nn.Linear(4, 4), nn.Linear(4, 4), uses
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 4) to a loss."""
        x = self.first(x)
        for _ in range(self.uses):
            x = checkpoint(  # type: ignore[assignment]
                self.layer, x, use_reentrant=self.use_reentrant
            )
        return x.square().mean()


def recompute(uses: int, options: dict[str, Any], use_reentrant: bool = True) -> str:
    """Make two steps; return the error, or nothing."""
    ddp_model = DistributedDataParallel(Recomputed(uses, use_reentrant), **options)
    try:
        for _ in range(2):
            ddp_model(torch.ones(2, 4)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_static_graph_takes_what_find_unused_does_not(worker_pool: WorkerPool) -> None:
    for uses, options, error in (
        (1, {}, ""),
        (1, FIND, TWICE),
        (1, STATIC, ""),
        (2, {}, TWICE),
        (2, FIND, TWICE),
        (2, STATIC, ""),
    ):
        said = worker_pool.run(recompute, uses, options)
        assert [text[: len(TWICE)] for text in said] == [error] * 2
    # The other kind of checkpoint adds no backward pass of its own.
    for options in ({}, FIND, STATIC):
        assert worker_pool.run(recompute, 2, options, False) == ["", ""]


# --- Two forwards. ----------


class RunningScale(nn.Module):
    """Divides by a running mean that belongs to this rank until DDP overwrites it."""

    def __init__(self, features: int) -> None:
        """Start with 1."""
        super().__init__()
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Update the buffer with this batch (B, D), then use it."""
        # A new tensor, as it must be: backward still needs the one it was used with.
        self.scale = 0.5 * self.get_buffer("scale") + 0.5 * x.detach().abs().mean(dim=0)
        return x / self.scale


class Discriminator(nn.Module):
    """The script's, with a normalisation, and perhaps a head for each of two calls."""

    # What DDP offers, for the model without DDP.
    no_sync = staticmethod(nullcontext)

    def __init__(self, norm: Callable[[int], nn.Module], heads: int = 1) -> None:
        """Make the same weights on every call."""
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(4, 8), norm(8)
        self.heads = nn.ModuleList([nn.Linear(8, 1) for _ in range(heads)])
        self.calls = 0

    @property
    def module(self) -> nn.Module:
        """Return the model that DDP would wrap."""
        return self

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map samples (B, 4) to logits by one head after another."""
        head = self.heads[self.calls % len(self.heads)]
        self.calls += 1
        return head(self.norm(self.body(samples)).tanh())


def past_ddp(first: bool, model: Any, real: torch.Tensor, fake: torch.Tensor) -> None:
    """Go forward and backward twice, once of it past DDP: the first time or not."""
    softplus(-(model.module if first else model)(real)).mean().backward()
    softplus((model if first else model.module)(fake)).mean().backward()


def past_ddp_at_last(model: Any, real: torch.Tensor, fake: torch.Tensor) -> None:
    """Go forward and backward twice, the last time past DDP."""
    past_ddp(False, model, real, fake)


def past_ddp_at_once(model: Any, real: torch.Tensor, fake: torch.Tensor) -> None:
    """Go forward past DDP and through it, then backward once."""
    real_loss = softplus(-model.module(real)).mean()
    (real_loss + softplus(model(fake)).mean()).backward()


def first_in_no_sync(model: Any, real: torch.Tensor, fake: torch.Tensor) -> None:
    """Go forward and backward twice, with one all-reduce."""
    with model.no_sync():
        softplus(-model(real)).mean().backward()
    softplus(model(fake)).mean().backward()


NO_HOOKS = "expect_autograd_hooks_ INTERNAL ASSERT FAILED"
ERRORS = (LATE, TWICE, CHANGED, NO_HOOKS)
RIGHT, OFF = "right", "off"
PLAIN = partial(Discriminator, nn.Identity)
TWO_HEADS = partial(Discriminator, nn.Identity, heads=2)
NORM, SCALE = (partial(Discriminator, norm) for norm in (nn.BatchNorm1d, RunningScale))
DDP_SETTINGS: list[dict[str, bool]] = [
    {},
    FIND,
    STATIC,
    {"forward_sync_buffers": False},
]
# What is done, with which model, and what comes of it with each of the settings.
WAYS: list[tuple[Any, Any, list[str]]] = [
    (two_forwards.one_forward, PLAIN, [RIGHT] * 4),
    (two_forwards.one_backward, PLAIN, [RIGHT] * 4),
    (two_forwards.two_backwards, PLAIN, [OFF] * 4),
    (two_forwards.in_turn, PLAIN, [RIGHT] * 4),
    (first_in_no_sync, PLAIN, [RIGHT, RIGHT, NO_HOOKS, RIGHT]),
    (partial(past_ddp, True), PLAIN, [RIGHT, RIGHT, OFF, RIGHT]),
    (past_ddp_at_last, PLAIN, [OFF] * 4),
    (past_ddp_at_once, PLAIN, [RIGHT] * 4),
    (two_forwards.one_backward, TWO_HEADS, [RIGHT, TWICE, RIGHT, RIGHT]),
    (two_forwards.in_turn, TWO_HEADS, [LATE, RIGHT, CHANGED, LATE]),
    (two_forwards.one_backward, NORM, [RIGHT] * 4),
    (two_forwards.one_backward, SCALE, [OFF, OFF, OFF, RIGHT]),
    (two_forwards.one_forward, SCALE, [RIGHT] * 4),
]


def outcome(way: Any, build: Any, settings: dict[str, bool]) -> str:
    """Return RIGHT, OFF or the beginning of the error."""
    try:
        error = two_forwards.try_way(way, build, **settings)
    except RuntimeError as error:
        return next((e for e in ERRORS if str(error).startswith(e)), str(error))
    return RIGHT if error < 1e-5 else OFF if error > 0.01 else str(error)


def table() -> list[list[str]]:
    """Return what comes of all ways with all settings on this rank."""
    return [
        [outcome(way, build, settings) for settings in DDP_SETTINGS]
        for way, build, _ in WAYS
    ]


def test_table_is_the_same_on_all_of_three_ranks(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(table, world_size=3)
    expected = [outcomes for _, _, outcomes in WAYS]
    assert len(expected) == 13 and {len(row) for row in expected} == {4}
    assert by_rank == [expected] * 3


class Silent(DistributedDataParallel):
    """A DDP that never all-reduces anything."""

    def forward(self, *args: Any) -> Any:
        """Go past DDP."""
        return self.module(*args)


class Nearly(DistributedDataParallel):
    """A DDP whose gradients are a little too large."""

    def __init__(self, module: nn.Module) -> None:
        """Let backward enlarge each gradient."""
        super().__init__(module)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * (1 + 1e-4))


def ways_ending(fault: str) -> tuple[Any, str]:
    """Run the lesson with one fault."""
    faults: dict[str, dict[str, Any]] = {
        "": {},
        "silent": {"DistributedDataParallel": Silent},
        "nearly": {"DistributedDataParallel": Nearly},
        "nothing wrong": {"two_backwards": two_forwards.one_backward},
        "past DDP": {
            "in_turn": past_ddp_at_last,
            "build_discriminator": PLAIN,
        },
    }
    return ending("two_forwards", faults[fault])


CLAIM_OF_WAYS = "3 of 4 ways give one process's gradients, on all ranks"


def test_lesson_on_two_forwards_holds_on_three_ranks(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(ways_ending, "", world_size=3)
    assert ends == [(0, f"check: {CLAIM_OF_WAYS}"), (0, ""), (0, "")]


@pytest.mark.parametrize("fault", ["silent", "nearly", "nothing wrong", "past DDP"])
def test_lesson_notices_a_way_that_is_not_as_described(
    worker_pool: WorkerPool, fault: str
) -> None:
    ends = worker_pool.run(ways_ending, fault)
    said = f"check failed on ranks [0, 1], not so: {CLAIM_OF_WAYS}"
    assert ends == [(1, said), (1, "")]


def mean_and_whole() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over shards, and the gradient of all samples in one batch."""
    build, way = two_forwards.build_discriminator, two_forwards.one_forward
    ranks = range(dist.get_world_size())
    shards = [two_forwards.gradients(build(), way, rank) for rank in ranks]

    def with_all_samples(model: Any, *_: torch.Tensor) -> None:
        seeds = [torch.Generator().manual_seed(rank) for rank in ranks]
        samples = [torch.randn(2, 6, 4, generator=seed) for seed in seeds]
        way(model, *torch.cat(samples, dim=1))

    whole = two_forwards.gradients(build(), with_all_samples, 0)
    return torch.stack(shards).mean(dim=0), whole


def test_mean_over_shards_is_the_gradient_of_the_whole_batch(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(mean_and_whole, world_size=3)
    assert len(by_rank) == 3
    for mean, whole in by_rank:
        torch.testing.assert_close(mean, whole)
        assert whole.abs().max() > 0.01


def scale_after_two_forwards(forward_sync_buffers: bool) -> tuple[float, float, int]:
    """Return a buffer's value before and after a second forward begins, and writes."""
    ddp_model = DistributedDataParallel(
        SCALE(), forward_sync_buffers=forward_sync_buffers
    )
    torch.manual_seed(dist.get_rank())
    samples = torch.randn(6, 4)
    ddp_model(samples)
    scale = ddp_model.module.norm.scale
    before, version = scale[0].item(), scale._version
    ddp_model(samples)
    return before, scale[0].item(), scale._version - version


def test_a_second_forward_overwrites_buffers_unseen(
    worker_pool: WorkerPool,
) -> None:
    (zero, zero_later, _), (one, one_later, writes) = worker_pool.run(
        scale_after_two_forwards, True
    )
    assert one_later == zero == zero_later != one
    assert writes == 0
    kept = worker_pool.run(scale_after_two_forwards, False)
    assert len(kept) == 2
    for before, after, _ in kept:
        assert before == after
