"""Chapter 02: three wrappers made by hand, each held against DDP and one process."""

import contextlib
import inspect
import runpy
import sys
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from launch import ROOT
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "02_ddp_mp"
BY_HAND = ["naive", "flat", "bucketed", "one bucket a parameter"]
ALL = [*BY_HAND, "DDP"]
BATCH = 4


# --- What runs on each rank. ----------


def wrap(way: str, module: nn.Module, **ddp_options: Any) -> Any:
    """Wrap a module in one of the ways; all but DDP have `finish_gradient_sync`."""
    chapter = load_chapter(CHAPTER)
    if way == "naive":
        return chapter["naive"].NaiveDDP(module)
    if way == "flat":
        return chapter["flat"].FlatDDP(module)
    if way == "bucketed":
        return chapter["bucketed"].BucketedDDP(module)
    if way == "one bucket a parameter":
        return chapter["bucketed"].BucketedDDP(module, bucket_cap_mb=0)
    return DistributedDataParallel(module, **ddp_options)


def finish(model: Any) -> None:
    """Make the one call that DDP does not need."""
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_sync()


class Knotty(nn.Module):
    """A model with a tied and a frozen parameter, a buffer, and odd memory layouts."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        # Stored by columns, and by channels: not the order in which they are indexed.
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv = self.conv.to(memory_format=torch.channels_last)  # pyright: ignore
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every parameter; from (B, 8) to (B,)."""
        x = torch.tanh(self.first(x) + self.shift)
        x = torch.tanh(self.tied(torch.tanh(self.frozen(x))))
        image = torch.cat([x, x @ self.turned.t(), x[:, :4]], dim=1).view(-1, 2, 3, 3)
        return self.conv(image).mean(dim=(1, 2, 3)) * self.scale


def batches_of(steps: int, samples: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw (steps, samples, 9) numbers, the same on every rank; the last is a label."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(steps, samples, 9, generator=generator).to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean squared error on a batch, (samples, 9)."""
    return (model(batch[:, :8]) - batch[:, 8]).square().mean()


def flat(model: nn.Module) -> torch.Tensor:
    """Join a model's parameters and buffers into one vector."""
    return torch.cat([t.detach().flatten() for t in model.state_dict().values()])


def train_in_every_way(
    dtype: torch.dtype, steps: int, grad_accum_steps: int = 1
) -> dict[str, torch.Tensor]:
    """Train on this rank's share in all ways, from weights that only rank 0 has."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = batches_of(steps * grad_accum_steps, BATCH * world_size, dtype)
    weights = {}
    for way in ALL:
        torch.manual_seed(7 + rank)
        module = Knotty().to(dtype)
        model = wrap(way, module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for number, batch in enumerate(batches, start=1):
            is_last = number % grad_accum_steps == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                share = batch.chunk(world_size)[rank]
                (loss_of(model, share) / grad_accum_steps).backward()
            if is_last:
                finish(model)
                optimizer.step()
                optimizer.zero_grad()
        weights[way] = flat(module)
    return weights


def train_alone(dtype: torch.dtype, steps: int, batches: torch.Tensor) -> torch.Tensor:
    """Train one plain model, without a wrapper or a group, on whole batches."""
    torch.manual_seed(7)
    model = Knotty().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    assert len(batches) == steps
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return flat(model)


# --- The same weights as one process. ----------


def far_apart_by_rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Train attention on whole batches, and by the mean over two halves.

    Return how far apart the bias of the keys ends, and all other parameters. The bias
    moves all scores of a query alike, so its gradient is zero but for rounding.
    """
    keys, others = [], []
    for parts in (1, 2):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(8, 2, dtype=dtype)
        adam = torch.optim.Adam(layer.parameters(), lr=1e-3)
        for _ in range(20):
            x = torch.randn(6, 4, 8).to(dtype)
            for part in x.chunk(parts, dim=1):
                layer(part, part, part)[0].square().sum().div(parts).backward()
            adam.step()
            adam.zero_grad()
        query, key, value = layer.in_proj_bias.detach().chunk(3)
        keys.append(key)
        weights = [layer.in_proj_weight, *layer.out_proj.parameters()]
        others.append(nn.utils.parameters_to_vector([query, value, *weights]))
    return tuple((a - b).abs().max().item() for a, b in (keys, others))  # pyright: ignore


def test_adam_makes_steps_of_rounding_where_a_gradient_is_zero() -> None:
    key, others = far_apart_by_rounding(torch.float32)
    assert others < 1e-6 and key > 1e-3  # after 20 steps of at most 1e-3 each
    assert max(far_apart_by_rounding(torch.float64)) < 1e-7


# SGD, because Adam divides a gradient by its own size: given the sum over the ranks in
# place of the mean, it takes nearly the same steps. What is left between the ranks and
# one process is rounding, of sums in another order: some units of the last digit (6e-8
# in float32, 1e-16 in float64), passed on and enlarged for 30 steps. That it shrinks
# with that unit shows that nothing else is behind it.
@pytest.mark.parametrize("world_size", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow),
        (torch.float64, 1e-13),
    ],
)
def test_every_way_equals_one_process_on_the_concatenated_batch(
    worker_pool: WorkerPool, world_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    steps = 30
    results = worker_pool.run(train_in_every_way, dtype, steps, world_size=world_size)
    batches = batches_of(steps, BATCH * world_size, dtype)
    alone = train_alone(dtype, steps, batches)
    torch.manual_seed(7)
    assert (alone - flat(Knotty().to(dtype))).abs().max() > 0.1
    checked = 0
    assert len(results) == world_size
    for weights in results:
        for way in ("naive", "flat", "bucketed", "one bucket a parameter", "DDP"):
            assert (weights[way] - alone).abs().max() < tolerance, way
            # Between ranks there is no tolerance: every bit is the same.
            assert torch.equal(weights[way], results[0][way]), way
            checked += 1
    assert checked == world_size * len(ALL)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_accumulation_under_no_sync_equals_one_larger_batch(
    worker_pool: WorkerPool, world_size: int
) -> None:
    steps, k, dtype = 10, 3, torch.float64
    results = worker_pool.run(
        train_in_every_way, dtype, steps, k, world_size=world_size
    )
    small = batches_of(steps * k, BATCH * world_size, dtype)
    alone = train_alone(dtype, steps, small.reshape(steps, -1, 9))
    checked = 0
    assert len(results) == world_size
    for weights in results:
        for way in ("naive", "flat", "bucketed", "one bucket a parameter", "DDP"):
            assert (weights[way] - alone).abs().max() < 1e-13, way
            assert torch.equal(weights[way], results[0][way]), way
            checked += 1
    assert checked == world_size * len(ALL)


def leave_no_sync_after_forward() -> dict[str, tuple[float, bool]]:
    """Compute the last loss inside no_sync and go backward outside, in all ways.

    Returns:
        For each way: how far the gradient is from the mean of all ranks' own, and
        whether all ranks hold the same.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = batches_of(1, BATCH * world_size, torch.float64)[0]
    results = {}
    for way in ALL:
        torch.manual_seed(7)
        module = Knotty().double()
        alone = torch.autograd.grad(loss_of(module, batch), module.first.weight)[0]
        model = wrap(way, module)
        with model.no_sync():
            loss = loss_of(model, batch.chunk(world_size)[rank])
        loss.backward()
        finish(model)
        mine = torch.as_tensor(module.first.weight.grad).clone()
        of_all = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(of_all, mine)
        is_equal = all(torch.equal(other, of_all[0]) for other in of_all)
        results[way] = ((mine - alone).abs().max().item(), is_equal)
    return results


def test_leaving_no_sync_after_forward_sends_nothing_under_ddp(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(leave_no_sync_after_forward)
    assert len(results) == 2
    for result in results:
        error, is_equal = result["DDP"]
        assert error > 0.01 and not is_equal
        # Those made by hand look when the gradient arrives, and when they finish.
        for way in ("naive", "flat", "bucketed", "one bucket a parameter"):
            error, is_equal = result[way]
            assert error < 1e-14 and is_equal, way


# --- What wrapping does. ----------


def weights_before_and_after_wrapping() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Build a model from a seed of this rank's own, then wrap it."""
    results = {}
    for way in ALL:
        torch.manual_seed(100 + dist.get_rank())
        module = Knotty()
        module.gaps = nn.Parameter(torch.randn(8, 6)[:, ::2])  # every other column
        before = flat(module).clone()
        results[way] = (before, flat(wrap(way, module).module))
    return results


def test_wrapping_gives_every_rank_the_weights_and_buffers_of_rank_zero(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(weights_before_and_after_wrapping, world_size=3)
    assert len(results) == 3
    for way in ("naive", "flat", "bucketed", "one bucket a parameter", "DDP"):
        of_rank_zero = results[0][way][0]
        for rank in (0, 1, 2):
            before, after = results[rank][way]
            assert torch.equal(after, of_rank_zero), way
            assert torch.equal(before, of_rank_zero) == (rank == 0), way


def train_with_running_means() -> dict[str, dict[str, torch.Tensor]]:
    """Train a model whose buffers change in each forward pass, differently by rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = batches_of(6, BATCH * world_size, torch.float64)
    states = {}
    for way in ALL:
        torch.manual_seed(7)
        layers = [nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 1), nn.Flatten(0)]
        module = nn.Sequential(*layers)
        model = wrap(way, module.double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch.chunk(world_size)[rank]).backward()
            finish(model)
            optimizer.step()
        states[way] = {name: t.clone() for name, t in module.state_dict().items()}
    return states


def test_buffers_go_the_way_they_go_under_ddp(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(train_with_running_means)
    mean = "1.running_mean"
    # The last forward pass changed them after rank 0's had been copied.
    assert not torch.equal(results[0]["DDP"][mean], results[1]["DDP"][mean])
    names = ["0.weight", "1.weight", mean, "1.running_var", "1.num_batches_tracked"]
    assert len(results) == 2 and set(names) < set(results[0]["DDP"])
    for states in results:
        for way in ("naive", "flat", "bucketed", "one bucket a parameter"):
            for name in sorted(states["DDP"]):
                close = torch.isclose(
                    states[way][name].double(), states["DDP"][name].double(), atol=1e-12
                )
                assert bool(close.all()), (way, name)
        assert len(states["DDP"]) == 9


def buffers_around_no_sync() -> list[Any]:
    """Give this rank's number to a buffer before each forward pass; return it after.

    And whether the wrapper synchronises again when an inner `no_sync` has ended, and
    when the outer one has. The last pass is without gradients.
    """
    module = nn.BatchNorm1d(8, momentum=0.0)
    model, found = wrap("naive", module), []

    def after_forward() -> float:
        torch.as_tensor(module.running_mean).fill_(dist.get_rank())
        model(torch.ones(4, 8))
        return torch.as_tensor(module.running_mean)[0].item()

    found.append(after_forward())
    with model.no_sync():
        with model.no_sync():
            found.append(after_forward())
        found.append(model.is_syncing)
    found += [model.is_syncing, after_forward()]
    with torch.no_grad():
        found.append(after_forward())
    return found


def test_no_sync_and_no_grad_keep_buffers_and_no_sync_can_be_nested(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(buffers_around_no_sync)
    assert found == [[0, own, False, True, 0, own] for own in (0, 1)]


def handles_after_a_step() -> list[bool]:
    """Take a step with several buckets; which of them still has a handle?"""
    model = wrap("one bucket a parameter", Knotty())
    real, works = dist.all_reduce, []

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        works.append(mock.Mock(wraps=real(*arguments, **options)))
        return works[-1]

    with mock.patch.object(dist, "all_reduce", all_reduce):
        loss_of(model, batches_of(1, BATCH, torch.float32)[0]).backward()
        in_flight = [bucket.work is not None for bucket in model.buckets]
        # Backward has gone on: it has waited for none of those that it started.
        assert len(works) > 3 and not any(work.wait.called for work in works)
        model.finish_gradient_sync()
    assert len(works) == len(in_flight) and all(work.wait.called for work in works)
    assert len(in_flight) > 3 and any(in_flight)
    return [bucket.work is not None for bucket in model.buckets]


def test_backward_waits_for_no_bucket_and_none_keeps_its_handle(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(handles_after_a_step)
    assert len(found) == 2 and not any(any(of_rank) for of_rank in found)


class OneOfTwo(nn.Module):
    """Uses `left` or `right` as the caller says, and never `neither`."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)
        self.neither = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, goes_left: bool) -> torch.Tensor:
        """Use one of the two; from (B, 8) to (B, 1)."""
        return (self.left if goes_left else self.right)(x)


class WithoutGradient(torch.autograd.Function):
    """Takes a weight and a bias, and has no gradient for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Return the first input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the first input's gradient, and none of the others."""
        return gradients[0], None, None


class BothWays(OneOfTwo):
    """Takes the other part in as well, without a gradient."""

    def forward(self, x: torch.Tensor, goes_left: bool) -> torch.Tensor:
        """Use one of the two for its value; from (B, 8) to (B, 1)."""
        y = super().forward(x, goes_left)
        for part in (self.right if goes_left else self.left, self.neither):
            y = WithoutGradient.apply(y, part.weight, part.bias)
        return y


def gradients_of_what_only_one_rank_uses() -> dict[str, list[torch.Tensor | None]]:
    """Let each rank use another part of the model; take three steps."""
    rank = dist.get_rank()
    x = batches_of(1, BATCH, torch.float64)[0, :, :8] + rank
    results = {}
    ways = [(way, way, OneOfTwo, {"find_unused_parameters": True}) for way in ALL]
    ways.append(("static graph", "DDP", OneOfTwo, {"static_graph": True}))
    ways.append(("without gradient", "DDP", BothWays, {}))
    for name, way, kind, options in ways:
        torch.manual_seed(7)
        module = kind().double()
        model = wrap(way, module, **options)
        for _ in range(3):
            model.zero_grad()
            model(x, goes_left=rank == 0).sum().backward()
            finish(model)
        parts = (module.left, module.right, module.neither)
        results[name] = [part.weight.grad for part in parts]
    return results


def test_parameter_without_a_gradient_counts_as_zero(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(gradients_of_what_only_one_rank_uses)
    x = batches_of(1, BATCH, torch.float64)[0, :, :8]
    assert len(results) == 2
    for result in results:
        assert list(result) == [*ALL, "static graph", "without gradient"]
        for way, (left, right, neither) in result.items():
            # One rank's gradient and a zero, divided by two.
            torch.testing.assert_close(left, x.sum(dim=0, keepdim=True) / 2)
            torch.testing.assert_close(right, (x + 1).sum(dim=0, keepdim=True) / 2)
            if way in ("DDP", "static graph"):
                assert neither is None
            else:
                assert torch.equal(neither, torch.zeros(1, 8, dtype=torch.float64))


def moved_by_weight_decay() -> dict[str, list[float]]:
    """Take a step of AdamW; return how far each part that no rank uses has moved."""
    x, results = torch.ones(BATCH, 8), {}
    for way, options in (
        ("naive", {}),
        ("DDP", {"find_unused_parameters": True}),
        ("DDP", {"static_graph": True}),
    ):
        torch.manual_seed(7)
        module = OneOfTwo()
        model = wrap(way, module, **options)
        before = [module.right.weight.clone(), module.neither.weight.clone()]
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
        model(x, goes_left=True).sum().backward()
        finish(model)
        optimizer.step()
        after = [module.right.weight, module.neither.weight]
        results[" ".join([way, *options])] = [
            (new / old).mean().item() for old, new in zip(before, after, strict=True)
        ]
    return results


def test_what_no_rank_uses_decays_by_hand_and_stays_under_ddp(
    worker_pool: WorkerPool,
) -> None:
    decayed = pytest.approx([1 - 0.1 * 0.5] * 2)
    expected = {
        "naive": decayed,
        "DDP find_unused_parameters": [1.0, 1.0],
        "DDP static_graph": [1.0, 1.0],
    }
    assert worker_pool.run(moved_by_weight_decay) == [expected] * 2


def frozen_and_unfrozen_after_wrapping() -> dict[str, tuple[float, bool]]:
    """Unfreeze a layer, or freeze it, once it is wrapped.

    Return by way this rank's gradient of the unfrozen one, and whether a step of AdamW
    has left the other one alone.
    """
    found = {}
    for way in ALL:
        grads, kept = [], []
        for is_frozen in (True, False):
            torch.manual_seed(0)
            layers: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
            layers[0].requires_grad_(not is_frozen)
            model = wrap(way, layers)
            layers[0].requires_grad_(is_frozen)
            before = layers[0].weight.detach().clone()
            model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
            finish(model)
            if is_frozen:
                grads.append(layers[0].weight.grad.item())
            torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1).step()
            kept.append(torch.equal(layers[0].weight, before))
        found[way] = grads[0], kept == [False, True]
    return found


def test_what_is_frozen_or_unfrozen_after_wrapping(worker_pool: WorkerPool) -> None:
    one, two = worker_pool.run(frozen_and_unfrozen_after_wrapping)
    assert [*one] == [*two] == ["naive", "flat", *ALL[2:]]
    assert len(ALL) == 5
    for way in ALL:
        is_averaged = one[way][0] == two[way][0]
        has_buckets = way not in ("naive", "flat", "DDP")
        assert is_averaged is (way in ("naive", "flat")), way
        # The buckets' zeros are gradients, with which weights decay.
        assert one[way][1] is two[way][1] is not has_buckets, way


def gradients_of_unequal_epochs() -> list[tuple[int, float]]:
    """Train 3 batches an epoch on rank 0, 2 on rank 1; return epoch and gradient."""
    layer: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    batches = [(epoch, i) for epoch in range(2) for i in range(3 - dist.get_rank())]
    found = []
    for epoch, i in batches[:4]:  # of rank 0 one would wait
        layer.zero_grad()
        layer(torch.full((1, 1), 10.0 * epoch + i)).sum().backward()
        found.append((epoch, layer.module.weight.grad.item()))
    return found


def test_a_short_rank_s_next_epoch_meets_the_last_steps_of_others(
    worker_pool: WorkerPool,
) -> None:
    one, two = worker_pool.run(gradients_of_unequal_epochs)
    assert one == [(0, 0.0), (0, 1.0), (0, (2 + 10) / 2), (1, (10 + 11) / 2)]
    assert two == [(0, 0.0), (0, 1.0), (1, 6.0), (1, 10.5)]


def ddp_without_being_told_of_unused_parameters() -> str:
    """Leave a parameter out, with DDP as it comes; return its error."""
    model = wrap("DDP", OneOfTwo())
    x = torch.ones(2, 8)
    model(x, goes_left=True).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(x, goes_left=True)
    return str(caught.value)


def test_ddp_refuses_a_parameter_without_a_gradient(worker_pool: WorkerPool) -> None:
    errors = worker_pool.run(ddp_without_being_told_of_unused_parameters)
    assert len(errors) == 2
    assert all("Expected to have finished reduction" in error for error in errors)


class Sides(nn.Module):
    """Two weights of 3 and of 5; the first is always used."""

    def __init__(self) -> None:
        """Set them."""
        super().__init__()
        self.left = nn.Parameter(torch.tensor([3.0]))
        self.right = nn.Parameter(torch.tensor([5.0]))

    def forward(self, uses_both: bool) -> torch.Tensor:
        """Return their sum, or the first; gradients are 1."""
        return (self.left + self.right if uses_both else self.left).sum()


def leave_a_layer_out_on_rank_1() -> tuple[list[float], list[float]]:
    """Average the loss after that; return rank 1's sums, and rank 0's gradients."""
    model, is_second = DistributedDataParallel(Sides()), dist.get_rank() == 1
    loss = model(not is_second)
    loss.backward()
    loss_and_samples = torch.tensor([loss.item(), 1.0])
    if is_second:
        dist.all_reduce(loss_and_samples)
        return loss_and_samples.tolist(), []
    gradients = [p.grad for p in model.parameters()]
    return [], [g.item() for g in gradients if g is not None]


def test_a_layer_left_out_on_one_rank_mixes_a_loss_with_gradients(
    worker_pool: WorkerPool,
) -> None:
    (_, gradients), (sums, _) = worker_pool.run(leave_a_layer_out_on_rank_1)
    # Rank 0's gradients of 1, as a term of the mean 1 / 2, and rank 1's (3, 1).
    assert sums == [3.5, 1.5]
    assert sorted(gradients) == sorted(sums)


def leave_it_out_and_average_no_loss() -> str:
    """Take two steps, without the layer on rank 1; return the error."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = DistributedDataParallel(Sides(), process_group=group)
    is_second = dist.get_rank() == 1
    try:
        for _ in range(2):
            model(not is_second).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_layer_left_out_on_one_rank_stops_it_if_no_loss_is_averaged(
    worker_pool: WorkerPool,
) -> None:
    waited, stopped = worker_pool.run(leave_it_out_and_average_no_loss)
    assert "Expected to have finished reduction" in stopped
    assert waited and "Expected to have finished reduction" not in waited


class TwoDtypes(nn.Module):
    """Parameters of three dtypes, taking turns."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go through all layers, each in its dtype; from (B, 8) to (B,)."""
        for layer in self.layers:
            x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return x[:, 0]


def gradients_in_low_precision() -> dict[str, list[torch.Tensor]]:
    """Average gradients of several dtypes, in all ways."""
    batch = batches_of(2, BATCH, torch.float32)[dist.get_rank()]
    results = {}
    for way in ALL:
        torch.manual_seed(7)
        module = TwoDtypes()
        model = wrap(way, module)
        loss_of(model, batch).backward()
        finish(model)
        results[way] = [p.grad for p in module.parameters() if p.grad is not None]
    return results


def test_low_and_mixed_precision(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(gradients_in_low_precision)
    batches = batches_of(2, BATCH, torch.float32)
    torch.manual_seed(7)
    module = TwoDtypes()
    parameters = list(module.parameters())
    own = [torch.autograd.grad(loss_of(module, batch), parameters) for batch in batches]
    mean = [(a.double() + b.double()) / 2 for a, b in zip(*own, strict=True)]
    assert len(results) == 2 and len(mean) == 8
    for result in results:
        for way in ("naive", "flat", "bucketed", "one bucket a parameter", "DDP"):
            for got, expected, parameter in zip(
                result[way], mean, parameters, strict=True
            ):
                assert got.dtype == parameter.dtype
                # bfloat16 has 8 significant bits: half a unit of the last is 2 ** -9.
                error = (got.double() - expected).abs().max()
                assert error <= 2**-8 * expected.abs().max(), (way, got.dtype)


# --- Buckets. ----------


@pytest.mark.parametrize(
    ("bucket_cap_mb", "expected"),
    [
        (0, [[4], [3], [2], [1], [0]]),  # each parameter alone
        (1, [[4, 3, 2], [1], [0]]),  # closed by the one that reaches the cap
        (2.9, [[4, 3, 2, 1], [0]]),
        (25, [[4, 3, 2, 1, 0]]),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_up_to_the_cap(
    bucket_cap_mb: float, expected: list[list[int]]
) -> None:
    bucketed = load_chapter(CHAPTER)["bucketed"]
    # In MB: 1, 2, 0.5, 0.25, 0.25.
    lengths = [2**18, 2**19, 2**17, 2**16, 2**16]
    parameters = [nn.Parameter(torch.zeros(length)) for length in lengths]
    buckets = bucketed.make_buckets(parameters, bucket_cap_mb)
    assert len(buckets) == len(expected)
    for bucket, numbers in zip(buckets, expected, strict=True):
        assert len(bucket.views) == len(numbers)
        for parameter, number in zip(bucket.views, numbers, strict=True):
            assert parameter is parameters[number]
        assert bucket.flat.numel() == sum(lengths[number] for number in numbers)


def caps_of_ddp() -> tuple[int, int]:
    """Return the bytes of DDP's buckets by default: of the first, and of the others."""
    return dist._DEFAULT_FIRST_BUCKET_BYTES, int(
        DistributedDataParallel(nn.Linear(2, 1)).bucket_bytes_cap
    )


def test_buckets_are_as_large_as_ddp_s(worker_pool: WorkerPool) -> None:
    (found,) = worker_pool.run(caps_of_ddp, world_size=1)
    # 1 MB and 25 MB, of 2**20 bytes each, as its documentation and two pages say.
    assert found == (2**20, 25 * 2**20)
    ours = load_chapter(CHAPTER)["bucketed"].BucketedDDP
    assert inspect.signature(ours).parameters["bucket_cap_mb"].default == 25
    for path, words in {
        "README.md": "`bucket_cap_mb` or more: 25 by default, as in DDP",
        "timeline/README.md": "then its first is full at 1 MB, the others at 25.",
    }.items():
        assert words in " ".join((ROOT / CHAPTER / path).read_text("utf-8").split())


def test_small_model_fills_two_buckets() -> None:
    # bucketed.py as a script gives its cap to the ranks that it starts.
    modules = dict(load_chapter(CHAPTER))
    modules["ranks"] = mock.Mock()
    with mock.patch.dict(sys.modules, modules):
        runpy.run_path(str(ROOT / CHAPTER / "bucketed.py"), run_name="__main__")
    ((_, ranks, wrap), _) = modules["ranks"].start_ranks.call_args
    assert ranks == 2 and wrap.func.__name__ == "BucketedDDP"
    model = modules["terrain"].TerrainModel().double()
    buckets = modules["bucketed"].make_buckets(
        list(model.parameters()), **wrap.keywords
    )
    # In kB, last layer first: 0.008, 1, 1, 131, then 1 and 131. 0.05 MB are 52 kB.
    assert [len(bucket.views) for bucket in buckets] == [4, 2]
    page = words_of(CHAPTER)
    cap = wrap.keywords["bucket_cap_mb"]
    assert f"For this small model it is {cap}, which makes two buckets" in page


def buckets_and_buffers() -> tuple[str, str, float]:
    """Return DDP's buckets in step 1 and after it, and a buffer that is not copied."""
    model = nn.Sequential(*[nn.Linear(800, 800, bias=False) for _ in range(4)])
    model.double_too = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model.register_buffer("mine", torch.tensor(float(dist.get_rank())))
    ddp_model = DistributedDataParallel(model, broadcast_buffers=False)
    for _ in range(3):  # the second buckets are noted in the third step
        (ddp_model(torch.randn(2, 800)).sum() + model.double_too.sum()).backward()
    noted: Any = ddp_model._get_ddp_logging_data()
    buffer: Any = model.mine
    return noted["bucket_sizes"], noted["rebuilt_bucket_sizes"], buffer.item()


def test_first_step_of_ddp_has_one_bucket_per_dtype(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(buckets_and_buffers)
    # Bytes, of matrices of 2.56 MB. The first is full with one. Then float64.
    due = "10240000, 16", "2560000, 7680000, 16"
    assert [one[:2] for one in found] == [due] * 2
    assert [buffer for _, _, buffer in found] == [0.0, 1.0]


def test_bucket_holds_one_dtype() -> None:
    bucketed = load_chapter(CHAPTER)["bucketed"]
    kinds = [torch.float32, torch.float32, torch.float16, torch.float32]
    parameters = [nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds]
    buckets = bucketed.make_buckets(parameters, 25)
    assert [bucket.flat.dtype for bucket in buckets] == [kinds[3], kinds[2], kinds[0]]
    assert [len(bucket.views) for bucket in buckets] == [1, 1, 2]


def buckets_sent_when_the_last_gradient_arrives() -> tuple[int, int]:
    """Look, at the end of backward, how many buckets are already under way."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    model = wrap("one bucket a parameter", module)
    first = module[0].weight
    sent = []
    assert isinstance(first, nn.Parameter)
    first.register_hook(lambda _: sent.append(model.started))
    model(torch.ones(2, 8)).sum().backward()
    assert model.started == len(model.buckets)
    model.finish_gradient_sync()
    return sent[0], len(model.buckets)


def test_buckets_are_sent_in_an_order_that_overlaps_with_backward(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(buckets_sent_when_the_last_gradient_arrives)
    assert len(results) == 2
    for sent, buckets in results:
        assert buckets == 10
        # All but those of the first layer, whose gradients are only now being computed.
        assert sent >= buckets - 2


def gradients_stay_in_the_bucket() -> list[bool]:
    """Take steps with gradients that are zeroed in place, and see where they lie."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    module = nn.Linear(8, 1).double()
    alone = nn.Sequential(nn.Linear(8, 1).double(), nn.Flatten(0))
    alone[0].load_state_dict(module.state_dict())
    model = wrap("bucketed", nn.Sequential(module, nn.Flatten(0)))
    found = []
    for batch in batches_of(3, BATCH * world_size, torch.float64):
        model.zero_grad(set_to_none=False)
        loss_of(model, batch.chunk(world_size)[rank]).backward()
        model.finish_gradient_sync()
        expected = torch.autograd.grad(loss_of(alone, batch), list(alone.parameters()))[
            0
        ]
        gradient = torch.as_tensor(module.weight.grad)
        place = gradient.untyped_storage().data_ptr()
        found.append(place == model.buckets[0].flat.untyped_storage().data_ptr())
        found.append(bool((gradient - expected).abs().max() < 1e-14))
    return found


def test_gradients_are_views_of_the_bucket(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(gradients_stay_in_the_bucket) == [[True] * 6] * 2


# --- Wrong use is an error, not a wrong gradient. ----------


class Twice(nn.Module):
    """Uses a layer twice, each time under a reentrant checkpoint."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (B, 8) to (B, 8)."""
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def wrong_uses() -> dict[str, str]:
    """Use the wrappers wrongly in every way they notice; return what they say."""
    x, errors = torch.ones(2, 8), {}

    def note(name: str, error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as caught:
            call()
        errors[name] = str(caught.value)

    model = wrap("bucketed", nn.Linear(8, 1))
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    note("two backwards", RuntimeError, loss.backward)
    note("no finish", RuntimeError, lambda: model(x))
    model.finish_gradient_sync()
    # Each use of this layer adds to its gradient, and calls its hook, by itself.
    twice = wrap("bucketed", Twice())
    note("layer used twice", RuntimeError, twice(x.requires_grad_()).sum().backward)
    twice.finish_gradient_sync()
    with model.no_sync():
        note("finish in no_sync", RuntimeError, model.finish_gradient_sync)
    frozen = nn.Linear(8, 1).requires_grad_(False)
    for way in ALL:
        note(f"{way} frozen", RuntimeError, lambda way=way: wrap(way, frozen))
    return errors


def test_wrong_use_is_an_error(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(wrong_uses)
    assert len(results) == 2
    for errors in results:
        for name in ("two backwards", "layer used twice"):
            said = "a second gradient before finish_gradient_sync()"
            assert errors[name] == said
        assert "finish_gradient_sync() was not called" in errors["no finish"]
        assert "inside no_sync()" in errors["finish in no_sync"]
        for way in ("naive", "flat", "bucketed", "DDP"):
            assert "require" in errors[f"{way} frozen"]


def gradient_after_logging(
    operation: str, detached: bool = True, is_read: bool = True, records: bool = True
) -> tuple[list[float], str]:
    """All-reduce a loss, or its value, before backward; return what comes of it."""
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    # Only a square root's backward pass reads its value, here 5.
    loss = weight.square().sum().sqrt() if is_read else (weight + 0.0).sum()
    if operation:
        tensor = loss.detach() if detached else loss
        with torch.set_grad_enabled(records):
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
    try:
        loss.backward()
    except RuntimeError as error:
        return [], str(error)
    assert weight.grad is not None
    return weight.grad.tolist(), ""


def check_that_a_loss_is_read(pool: WorkerPool, *how: bool) -> None:
    """Assert what comes of a loss that is all-reduced and then read by backward."""
    # w / |w|, of which twice the length gives half.
    for operation, expected in (("", [0.6, 0.8]), ("SUM", [0.3, 0.4])):
        found = pool.run(gradient_after_logging, operation, *how)
        assert found == [(pytest.approx(expected), "")] * 2
    # The mean is made by a division in place, of which autograd knows.
    found = pool.run(gradient_after_logging, "AVG", *how)
    assert len(found) == 2
    for gradient, said in found:
        assert gradient == [] and "modified by an inplace operation" in said


def test_a_detached_loss_shares_memory_with_the_loss(worker_pool: WorkerPool) -> None:
    check_that_a_loss_is_read(worker_pool, True)


def test_a_loss_that_backward_reads_may_not_be_overwritten(
    worker_pool: WorkerPool,
) -> None:
    for records in (True, False):  # under no_grad it is no better
        check_that_a_loss_is_read(worker_pool, False, True, records)


def warnings_of_an_averaged_loss() -> list[str]:
    """Return what is said, which it is otherwise only once in a process."""
    before = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        gradient_after_logging("AVG", False, False)
        torch.set_warn_always(before)
    return [str(warning.message) for warning in caught]


def test_an_averaged_loss_divides_the_gradients_once_more(
    worker_pool: WorkerPool,
) -> None:
    for operation, records, due in (
        *(("", True, 1.0), ("SUM", True, 1.0), ("AVG", True, 1 / 3)),
        ("AVG", False, 1.0),  # under no_grad
    ):
        how = (operation, False, False, records)
        found = worker_pool.run(gradient_after_logging, *how, world_size=3)
        assert found == [(pytest.approx([due, due]), "")] * 3
    said = worker_pool.run(warnings_of_an_averaged_loss)
    assert len(said) == 2
    for warning, *others in said:
        assert "an autograd kernel was not registered" in warning and others == []
