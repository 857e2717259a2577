"""Chapter 03: what is dealt, normalised, left unused and called twice."""

import os
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

from launch import ROOT, torchrun
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "03_ddp_torchrun"
CPU = torch.device("cpu")
modules = load_chapter(CHAPTER)
sampler, sync_batch_norm = modules["sampler"], modules["sync_batch_norm"]
unused_parameters, two_forwards = modules["unused_parameters"], modules["two_forwards"]


# sampler.py


class OwnSeed(DistributedSampler):
    """Shuffles differently on each rank."""

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        """Take the rank for a seed."""
        super().__init__(*args, seed=seed + dist.get_rank(), **kwargs)


class Deaf(DistributedSampler):
    """Does not hear which epoch it is."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


class Blocks(DistributedSampler):
    """Deals neighbours to one rank, and so repeats other samples."""

    def __iter__(self) -> Any:
        """Take a part of the order and not every n-th of it."""
        return iter(sorted(super().__iter__()))


def deals_and_means(samples: int, broken: str = "") -> tuple[list[str], list[str]]:
    """Return the faults that the script finds, with one of its parts broken."""
    parts: dict[str, Any] = {
        "": {},
        "own seed": {"DistributedSampler": OwnSeed},
        "deaf": {"DistributedSampler": Deaf},
        "order": {"DistributedSampler": Blocks},
        "counts": {"mean_by_counts": sampler.mean_of_means},
    }
    with patch.multiple(sampler, **parts[broken]) if broken else nullcontext():
        return sampler.try_deals(samples)[1], sampler.try_means(samples, CPU)[1]


@pytest.mark.parametrize(("world_size", "samples"), [(2, 7), (3, 10), (3, 12), (3, 4)])
def test_sampler_deals_what_the_script_deals_by_hand(
    worker_pool: WorkerPool, world_size: int, samples: int
) -> None:
    found = worker_pool.run(deals_and_means, samples, world_size=world_size)
    assert found == [([], [])] * world_size


@pytest.mark.parametrize(
    ("broken", "titles"),
    [
        ("own seed", sampler.DEALS[1:]),
        ("deaf", sampler.DEALS[2:]),
        ("order", sampler.DEALS[1:]),
    ],
)
def test_a_sampler_that_deals_otherwise_is_noticed(
    worker_pool: WorkerPool, broken: str, titles: list[tuple[str, Any]]
) -> None:
    first, second = worker_pool.run(deals_and_means, 10, broken)
    # The seed of rank 0 is the right one, so that rank sees nothing wrong.
    assert bool(first[0]) == (broken != "own seed")
    for faults, _ in (first if first[0] else second, second):
        assert [fault.split(": dealt")[0] for fault in faults] == [t[0] for t in titles]


def means(samples: int) -> tuple[float, float, float]:
    """Return the three means of the script, found with the real sampler."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dealt: DistributedSampler = DistributedSampler(
        range(samples),  # type: ignore[arg-type]
        shuffle=False,
    )
    own = sampler.loss_of(range(rank, samples, world_size), samples)
    return (
        sampler.mean_of_means(sampler.loss_of(list(dealt), samples), CPU),
        sampler.mean_of_means(own, CPU),
        sampler.mean_by_counts(own, CPU),
    )


def test_padding_biases_a_mean_and_sums_with_counts_do_not(
    worker_pool: WorkerPool,
) -> None:
    true = sampler.loss_of(range(10), 10).mean().item()
    by_rank = worker_pool.run(means, 10, world_size=3)
    assert len(by_rank) == 3
    for padded, unpadded, counted in by_rank:
        assert padded > 1.4 * true
        assert unpadded < 0.95 * true
        assert counted == pytest.approx(true, rel=1e-6)
    # A rank may have no sample at all: four samples on three ranks leave none empty,
    # two do.
    by_rank = worker_pool.run(means, 2, world_size=3)
    true = sampler.loss_of(range(2), 2).mean().item()
    assert [counted for _, _, counted in by_rank] == [pytest.approx(true)] * 3


def test_a_mean_of_means_in_place_of_counts_is_noticed(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(deals_and_means, 10, "counts", world_size=3)
    for _, (fault,) in by_rank:
        assert fault.startswith("sums and counts: ")
    assert len(by_rank) == 3


def test_drop_last_leaves_out_other_samples_in_each_epoch() -> None:
    left_out = []
    for epoch in range(3):
        deals = [sampler.deal_by_hand(10, 3, r, epoch, True, True) for r in range(3)]
        seen = {index for dealt in deals for index in dealt}
        assert len(seen) == 9
        left_out += sorted(set(range(10)) - seen)
    assert left_out == [2, 4, 3]  # as in the README


def test_samples_fewer_than_ranks_are_one_line() -> None:
    result = torchrun(ROOT / CHAPTER / "sampler.py", "--samples=1")
    text = "sampler.py: --samples must be 2 (one for each rank) to 100"
    assert result.stderr.splitlines()[0] == text
    assert result.stdout == ""
    assert result.returncode == 1  # torchrun's own; the rank's is 2
    assert "exitcode  : 2" in result.stderr


@pytest.mark.parametrize(
    "script", [sampler, sync_batch_norm, unused_parameters, two_forwards]
)
@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}])
def test_wrong_launcher_is_one_line(
    script: Any,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name = os.path.basename(script.__file__)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: needs 2 ranks or more; start it with torchrun ")


# sync_batch_norm.py


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


def normed(layer: str, broken: bool = False) -> dict[str, float]:
    """Return how far a layer is from one process, as the script measures it."""
    norm = nn.BatchNorm1d if layer == "plain" else sync_batch_norm.SummedBatchNorm
    with (
        patch.object(sync_batch_norm, "SumOverRanks", ForwardOnly)
        if broken
        else nullcontext()
    ):
        return sync_batch_norm.off_under_ddp(sync_batch_norm.normed_model(norm), CPU)


@pytest.mark.parametrize("world_size", [2, 3])
def test_summed_statistics_are_one_process_s(
    worker_pool: WorkerPool, world_size: int
) -> None:
    names = {"outputs", "input grads", "weight grads", "running"}
    plain = worker_pool.run(normed, "plain", world_size=world_size)
    summed = worker_pool.run(normed, "summed", world_size=world_size)
    assert len(plain) == len(summed) == world_size
    for own, together in zip(plain, summed, strict=True):
        assert set(own) == set(together) == names
        assert min(own.values()) > 0.01
        assert max(together.values()) < 1e-5


def test_a_sum_without_a_backward_spoils_the_gradients_alone(
    worker_pool: WorkerPool,
) -> None:
    errors = worker_pool.run(normed, "summed", True)[0]
    assert max(errors["outputs"], errors["running"]) < 1e-5
    assert min(errors["input grads"], errors["weight grads"]) > 0.01


def uneven_step() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Normalise 2, 3 or 4 samples on this rank; return it and one process's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = [2 + r for r in range(world_size)]
    whole = sync_batch_norm.drifting_inputs(sum(counts)).requires_grad_()
    alone, layer = nn.BatchNorm1d(3), sync_batch_norm.SummedBatchNorm(3)
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
        [found.detach(), own.grad, layer.weight.grad, *buffers_of(layer)],
        [
            wanted.detach().split(counts)[rank],
            whole.grad.split(counts)[rank],
            alone.weight.grad,
            *buffers_of(alone),
        ],
    )


def buffers_of(layer: nn.Module) -> list[torch.Tensor]:
    """Return the running statistics."""
    return [b.clone() for b in layer.buffers() if b.is_floating_point()]


def test_ranks_may_have_batches_of_different_length(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(uneven_step, world_size=3)
    assert len(by_rank) == 3
    for rank in range(3):
        found, wanted = by_rank[rank]
        assert len(found) == len(wanted) == 5
        for name in range(5):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def running() -> list[list[float]]:
    """Return the running means of the script."""
    return sync_batch_norm.running_means(CPU)


def test_running_statistics_are_those_of_rank_zero_s_samples(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(running, world_size=3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    after_step, after_forward = by_rank[0]
    assert len(set(after_step)) == 3
    assert after_forward == [after_step[0]] * 3


def refusals() -> list[str]:
    """Return what PyTorch's layer says."""
    return sync_batch_norm.refusals_on_a_cpu()


def test_sync_batch_norm_refuses_a_cpu(worker_pool: WorkerPool) -> None:
    wanted = [
        "SyncBatchNorm expected input tensor to be on GPU or XPU or privateuseone",
        "SyncBatchNorm layers only work with GPU modules",
    ]
    assert worker_pool.run(refusals) == [wanted] * 2


# unused_parameters.py


def play(number: int) -> tuple[list[str], list[str]]:
    """Play one act of the script; return its outcomes, and those not expected."""
    setting, steps = unused_parameters.ACTS[number]
    outcomes = unused_parameters.play(setting, steps, CPU)
    faults = unused_parameters.unexpected(steps, dist.get_rank(), outcomes)
    return outcomes, faults


# The act that waits in vain is run by the README.
@pytest.mark.parametrize("number", [0, 2, 3, 4, 5])
def test_acts_come_out_as_described_on_three_ranks(
    worker_pool: WorkerPool, number: int
) -> None:
    by_rank = worker_pool.run(play, number, world_size=3)
    assert [faults for _, faults in by_rank] == [[], [], []]
    assert all(outcomes for outcomes, _ in by_rank), by_rank
    assert len(by_rank) == 3


def test_a_silent_step_is_followed_by_the_error(worker_pool: WorkerPool) -> None:
    (first, faults), _ = worker_pool.run(play, 0)
    assert first[:2] == [unused_parameters.MEAN, unused_parameters.OWN]
    assert first[2].startswith(unused_parameters.NOT_FINISHED)
    assert "Parameter indices which did not receive grad for rank 0: 2 3" in first[2]
    assert faults == []


def play_under(setting: str, number: int) -> list[str]:
    """Play an act under another setting; return what is not as expected of it."""
    steps = unused_parameters.ACTS[number][1]
    outcomes = unused_parameters.play(setting, steps, CPU)
    return unused_parameters.unexpected(steps, dist.get_rank(), outcomes)


@pytest.mark.parametrize(
    ("setting", "number"),
    [("", 2), (unused_parameters.FIND, 0), (unused_parameters.FIND, 4)],
)
def test_another_setting_is_noticed(
    worker_pool: WorkerPool, setting: str, number: int
) -> None:
    faults = worker_pool.run(play_under, setting, number)
    assert [len(own) for own in faults] == [1, 1]


class Recomputed(nn.Module):
    """Keeps no activations of a layer that it uses once or twice."""

    def __init__(self, uses: int) -> None:
        """Make two layers."""
        super().__init__()
        self.first, self.layer, self.uses = nn.Linear(4, 4), nn.Linear(4, 4), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 4) to a loss."""
        x = self.first(x)
        for _ in range(self.uses):
            x = checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[assignment]
        return x.square().mean()


def recompute(uses: int, options: dict[str, bool]) -> str:
    """Make two steps; return the error, or nothing."""
    ddp_model = DistributedDataParallel(Recomputed(uses), **options)  # type: ignore[arg-type]
    try:
        for _ in range(2):
            ddp_model(torch.ones(2, 4)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_static_graph_takes_what_find_unused_does_not(worker_pool: WorkerPool) -> None:
    once_only = "Expected to mark a variable ready only once"
    for uses, option, error in (
        (1, "", ""),
        (1, "find_unused_parameters", once_only),
        (1, "static_graph", ""),
        (2, "", once_only),
        (2, "static_graph", ""),
    ):
        options = {option: True} if option else {}
        said = worker_pool.run(recompute, uses, options)
        assert [text[: len(once_only)] for text in said] == [error] * 2


# two_forwards.py


def table() -> list[list[str]]:
    """Return the whole table of the script as this rank finds it."""
    return [
        [
            two_forwards.try_way(way, make, kind, CPU)
            for _, kind in two_forwards.SETTINGS
        ]
        for _, way, make, _ in two_forwards.ROWS
    ]


def test_table_is_the_same_on_all_of_three_ranks(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(table, world_size=3, timeout=60)
    rows = two_forwards.ROWS
    assert len(by_rank) == 3 and len(rows) == 13
    for found in by_rank:
        assert len(found) == 13
        for number in range(13):
            title, _, _, expected = rows[number]
            assert len(found[number]) == len(expected) == 4, title
            for column in range(4):
                assert found[number][column].endswith(expected[column]), title


def unaveraged(options: dict[str, bool]) -> str:
    """Try the safe way with a DDP that never exchanges anything."""
    way, make = two_forwards.one_forward, two_forwards.JUDGE

    class Silent(DistributedDataParallel):
        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    with patch.object(two_forwards, "DistributedDataParallel", Silent):
        return two_forwards.try_way(way, make, options, CPU)


def test_a_missing_exchange_is_noticed(worker_pool: WorkerPool) -> None:
    outcomes = worker_pool.run(unaveraged, {})
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.endswith(two_forwards.W)
        assert float(outcome.split()[0]) > 0.1


def mean_and_whole() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over shares, and the gradient of all samples in one batch."""
    way, make, whole = (
        two_forwards.one_forward,
        two_forwards.JUDGE,
        two_forwards.JUDGE(),
    )
    shares = [two_forwards.own_samples(r, CPU) for r in range(dist.get_world_size())]
    both = torch.cat(shares, dim=1)
    way(two_forwards.Calls(whole, whole, nullcontext, both[0], both[1]))
    return two_forwards.mean_of_shares(way, make, CPU), two_forwards.flat_grad(whole)


def test_mean_over_shares_is_the_gradient_of_the_whole_batch(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(mean_and_whole, world_size=3)
    assert len(by_rank) == 3
    for mean, whole in by_rank:
        torch.testing.assert_close(mean, whole)
        assert whole.abs().max() > 0.01


def scale_after_two_forwards(forward_sync_buffers: bool) -> tuple[float, float, int]:
    """Return a buffer's value before and after a second forward begins, and writes."""
    make = partial(two_forwards.Judge, two_forwards.RunningScale)
    ddp_model = DistributedDataParallel(
        make(), forward_sync_buffers=forward_sync_buffers
    )
    ddp_model(two_forwards.own_samples(dist.get_rank(), CPU)[0])
    scale = ddp_model.module.norm.scale
    before, version = scale[0].item(), scale._version
    ddp_model(two_forwards.own_samples(dist.get_rank(), CPU)[0])
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
