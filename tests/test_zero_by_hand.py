"""Chapter 05: ZeRO's three stages made by hand, each held against one process."""

import contextlib
import copy
import importlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from launch import ROOT
from lessons import in_the_pool
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "05_deepspeed_zero/by_hand"
STAGES = (1, 2, 3)
BATCH = 4  # samples of a rank
STEPS = 4


# --- What runs on each rank. ----------


def script(name: str) -> Any:
    """Return a module of the chapter."""
    return load_chapter(CHAPTER)[name]


class Knotty(nn.Module):
    """A model with all that sharding may stumble over; from (B, 8) to (B,).

    Tied, frozen and unused parameters, numbers that belong to the model itself and are
    used before and after its children's, fewer of them than there are ranks, sizes that
    no number of ranks divides, a module with two outputs, and one that is called twice.
    """

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.early = nn.Parameter(torch.randn(8))
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.lstm = nn.LSTM(8, 3)
        self.twice = nn.Linear(3, 3, bias=False)
        self.narrow = nn.Linear(3, 1)
        self.unused = nn.Linear(5, 1)
        self.late = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        """Use every parameter but those of `unused`."""
        x = torch.tanh(self.first(x * self.early) + self.shift)
        x = torch.tanh(self.tied(torch.tanh(self.frozen(x))))
        _, (state, _) = self.lstm(x[None])
        x = self.twice(torch.tanh(self.twice(state[0])))
        return self.narrow(x)[:, 0] * self.late


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean squared error on a batch, (samples, 9); the last column is the label."""
    return (model(batch[:, :8]) - batch[:, 8]).square().mean()


def batches_of(steps: int, samples: int) -> Tensor:
    """Draw (steps, samples, 9) numbers in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(steps, samples, 9, generator=generator, dtype=torch.float64)


def build(seed: int = 7) -> Knotty:
    """Make the model in float64, the same on every rank for the same seed."""
    torch.manual_seed(seed)
    return Knotty().double()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Give weights and the other parameters settings of their own."""
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if "weight" in name]
    others = [p for name, p in named.items() if "weight" not in name]
    assert len(weights) == 7 and len(others) == 9
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": others, "lr": 0.02, "weight_decay": 0.0},
    ]


def sharded(
    stage: int, module: nn.Module, groups: Callable, make: Any, **settings: Any
) -> tuple[Any, Any, Callable[[], Any]]:
    """Prepare a module for a stage; return it, its optimizer, and what averages."""
    if stage == 3:
        model = script("zero_3").FullySharded(module)
        return model, make(groups(model), **settings), model.finish_gradient_sync
    if stage == 2:
        optimizer = script("zero_2").ShardedGradients(groups(module), make, **settings)
        return module, optimizer, optimizer.finish_gradient_sync
    optimizer = script("zero_1").ShardedOptimizer(groups(module), make, **settings)
    return (
        module,
        optimizer,
        partial(script("train_and_compare").average_gradients, module),
    )


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters by name, copied."""
    named = script("train_and_compare").whole_parameters(model)
    return {name: tensor.clone() for name, tensor in named.items()}


# An optimizer, its settings, a schedule, and how many micro-batches make a step.
Case = tuple[Any, dict[str, Any], Callable[[Any], Any], int]


def halve(optimizer: Any) -> Any:
    """Halve the learning rates every other step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def one_cycle(optimizer: Any) -> Any:
    """Move learning rate and momentum, which it finds in the optimizer's defaults."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)


OPTIMIZERS: dict[str, Case] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}, halve, 1),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, one_cycle, 2),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "maximize": True}, halve, 1),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, halve, 2),
}


def train(
    model: Any, optimizer: Any, finish: Callable, schedule: Any, batches: list[Tensor]
) -> None:
    """Take steps on (micro-batches, samples, 9) each."""
    for micro_batches in batches:
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            (loss_of(model, micro_batch) / len(micro_batches)).backward()
        finish()
        optimizer.step()
        schedule.step()


def local_batches(k: int, steps: int = STEPS) -> list[Tensor]:
    """Return this rank's rows of every micro-batch."""
    rank, n = dist.get_rank(), dist.get_world_size()
    batches = batches_of(steps * k, BATCH * n).view(steps, k, BATCH * n, 9)
    return [batch.chunk(n, dim=1)[rank] for batch in batches]


def train_alone(name: str, world_size: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Train one plain model, without a group, on the ranks' batches joined."""
    make, settings, schedule, k = OPTIMIZERS[name]
    model = build()
    optimizer = make(two_groups(model), **settings)
    batches = list(batches_of(steps * k, BATCH * world_size).view(steps, 1, -1, 9))
    train(model, optimizer, lambda: None, schedule(optimizer), batches)
    return {name: p.detach() for name, p in model.named_parameters()}


def train_every_stage(names: list[str]) -> dict[tuple[str, int], dict[str, Tensor]]:
    """Train with each optimizer in each stage; return all weights."""
    weights = {}
    for name in names:
        make, settings, schedule, k = OPTIMIZERS[name]
        for stage in STAGES:
            module = build(seed=7 + dist.get_rank())  # rank 0's weights are everyone's
            if stage < 3:  # an optimizer knows of no buffers
                module.shift = build().shift
            prepared = sharded(stage, module, two_groups, make, **settings)
            model, optimizer, _ = prepared
            train(*prepared, schedule(optimizer), local_batches(k))
            weights[name, stage] = whole(model)
    return weights


# --- The weights of one process. ----------


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (3, ["AdamW", "SGD"]),
        pytest.param(2, ["AdamW", "Adagrad"], marks=pytest.mark.slow),
        pytest.param(3, ["RMSprop"], marks=pytest.mark.slow),
        pytest.param(4, ["AdamW", "SGD"], marks=pytest.mark.slow),
    ],
)
def test_every_stage_equals_one_process(
    worker_pool: WorkerPool, world_size: int, names: list[str]
) -> None:
    results = worker_pool.run(train_every_stage, names, world_size=world_size)
    before = dict(build().named_parameters())
    untrained = {name for name in before if name.startswith(("frozen", "unused"))}
    assert len(before) == 16 and len(untrained) == 4 and len(results) == world_size
    checked = 0
    for name in names:
        alone = train_alone(name, world_size)
        for stage in STAGES:
            for rank, weights in enumerate(results):
                ours = weights[name, stage]
                assert list(ours) == list(before)
                for p in before:
                    case = (name, stage, rank, p)
                    assert (ours[p] - alone[p]).abs().max() < 1e-11, case
                    assert torch.equal(ours[p], results[0][name, stage][p]), case
                    moved = (alone[p] - before[p]).abs().max()
                    assert moved == 0 if p in untrained else moved > 1e-6, case
                    checked += 1
    assert checked == len(names) * 3 * world_size * 16


def train_with_pytorch_s_own() -> tuple[list[bool], list[int], set[torch.dtype]]:
    """Train in fp32 with ZeroRedundancyOptimizer and with stage 1 by hand.

    Return which weights end with the same bits, of how many values the first one's
    optimizer states on this rank are, and their dtypes where a model is in bf16.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns

    averaged, ends = script("train_and_compare").average_gradients, []
    optimizers: dict[type, Any] = {}
    kept: list[torch.dtype] = []
    for make, dtype in [
        (ZeroRedundancyOptimizer, torch.float32),
        (script("zero_1").ShardedOptimizer, torch.float32),
        (ZeroRedundancyOptimizer, torch.bfloat16),
    ]:
        model = build().to(dtype)
        used = [p for p in model.parameters() if p.requires_grad]
        optimizer = make(used, optimizer_class=torch.optim.AdamW, lr=0.01)
        batches = [batch.to(dtype) for batch in local_batches(1)]
        train(model, optimizer, partial(averaged, model), halve(optimizer), batches)
        if dtype == torch.float32:
            ends.append([p.detach() for p in model.parameters()])
            optimizers[make] = optimizer
        else:
            states = optimizer.optim.state.values()
            kept = [t.dtype for s in states for t in s.values() if t.dim()]
    sharded = optimizers[ZeroRedundancyOptimizer]
    states = sharded.optim.state
    values = [state["exp_avg"].numel() for state in states.values()]
    assert values == [p.numel() for p in states]
    sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:  # it is AdamW's own, of all parameters
        whole = sharded.state_dict()
        parameters = [p for group in sharded.param_groups for p in group["params"]]
        plain = torch.optim.AdamW(parameters)
        plain.load_state_dict(whole)
        assert [p.shape for p, state in plain.state.items() if state] == [
            state["exp_avg"].shape for state in plain.state.values() if state
        ]
        assert len(whole["state"]) > len(states) > 0
        for p, state in states.items():
            assert torch.equal(plain.state[p]["exp_avg"], state["exp_avg"])
    else:
        with pytest.raises(RuntimeError, match="has not been consolidated"):
            sharded.state_dict()
    return [torch.equal(p, q) for p, q in zip(*ends, strict=True)], values, {*kept}


def test_pytorch_s_own_stage_1_comes_to_the_same_weights(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(train_with_pytorch_s_own, world_size=2)
    trained = [p for p in build().named_parameters() if p[1].requires_grad]
    used = [p for name, p in trained if not name.startswith("unused")]
    assert len(by_rank) == 2
    for same, values, dtypes in by_rank:
        assert same == [True] * 16 and values
        assert dtypes == {torch.bfloat16}  # no master weights, nor moments, in fp32
    # The ranks have whole parameters, and each of them is on one rank.
    of_all = [count for _, values, _ in by_rank for count in values]
    assert sorted(of_all) == sorted(p.numel() for p in used)


def add_a_group_later() -> list[dict[str, Tensor]]:
    """Begin with the weights alone, add the rest after two steps; both classes."""
    found = []
    for stage in (0, 1, 2):
        model = build()
        weights, others = two_groups(model)
        make, n = torch.optim.AdamW, dist.get_world_size()
        if stage == 0:  # one process, on all samples
            optimizer, finish = make([weights], lr=0.01), lambda: None
            batches = list(batches_of(4, BATCH * n)[:, None])
        else:
            _, optimizer, finish = sharded(
                stage, model, lambda _, given=weights: [given], make, lr=0.01
            )
            batches = local_batches(1, steps=4)
        schedule = halve(optimizer)
        for number, batch in enumerate(batches):
            if number == 2:
                others["initial_lr"] = others["lr"]  # which schedules ask for
                optimizer.add_param_group(others)
                schedule.base_lrs.append(others["lr"])
                optimizer.zero_grad()
            model.zero_grad()  # of parameters that no optimizer has yet
            train(model, optimizer, finish, schedule, [batch])
        assert [len(group["params"]) for group in optimizer.param_groups] == [7, 9]
        assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
        found.append(whole(model))
    return found


def test_parameter_group_can_be_added(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(add_a_group_later, world_size=3)
    assert len(results) == 3
    for alone, *stages in results:
        assert len(stages) == 2
        for ours in stages:
            apart = [(ours[p] - alone[p]).abs().max().item() for p in alone]
            assert len(apart) == 16 and max(apart) < 1e-11
        assert (alone["late"] - 1).abs() > 1e-3


class Heads(nn.Module):
    """A head for each of two tasks, and one for none; from (B, 4) to (B, 1)."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Use one of the heads."""
        return self.heads[task](torch.tanh(self.body(x)))


def steps_with_a_head_of_its_own() -> list[dict[str, float]]:
    """Train rank r's head; return how far each weight is from one process's."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), []
    inputs = torch.randn(3, n, 5, 4, generator=torch.Generator().manual_seed(0))
    for stage in STAGES:
        torch.manual_seed(0)
        alone = Heads()
        adam = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.1)
        prepared = sharded(
            stage,
            copy.deepcopy(alone),
            lambda m: m.parameters(),
            torch.optim.AdamW,
            lr=0.1,
            weight_decay=0.1,
        )
        model, optimizer, finish = prepared
        for shards in inputs:
            for other, x in enumerate(shards):
                (alone(x, other % 2).square().mean() / n).backward()
            model(shards[rank], rank % 2).square().mean().backward()
            finish()
            for one in (adam, optimizer):
                one.step()
                one.zero_grad()
        ours = whole(model)
        named = alone.named_parameters()
        found.append({name: (ours[name] - p).abs().max().item() for name, p in named})
    return found


def test_stage_1_alone_takes_parameters_that_some_ranks_use(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(steps_with_a_head_of_its_own)
    assert len(results) == 2
    for apart in results:
        assert [len(of_stage) for of_stage in apart] == [8] * 3
        assert max(apart[0].values()) < 1e-5
        # Without an error, the others take one head's gradient for the other's.
        for of_stage in apart[1:]:
            assert of_stage["heads.0.weight"] > 0.01 < of_stage["heads.1.weight"]
            assert of_stage["heads.2.weight"] == 0  # which no rank uses
    assert (
        "and use the same parameters in the same order on all ranks, or gradients and "
        "weights silently mix up" in words_of(CHAPTER)
    )


# In what order forward and backward of a step may be called.
USES = ("two forwards", "two backwards of one", "two of each", "input with a gradient")


def backward_by(use: str, model: Any, batch: Tensor) -> Tensor | None:
    """Compute a step's gradients in one of the ways; return the input's, if it has."""
    x, label = batch[:, :8], batch[:, 8]
    x.requires_grad_(use == "input with a gradient")
    loss = (model(x) - label).square().mean()
    if use.startswith("two backwards"):
        loss.backward(retain_graph=True)
        loss.backward()
        return None
    if use.startswith("two"):
        other = (model(x * 2) - label).square().mean()
        for part in (loss + other,) if use == "two forwards" else (loss, other):
            part.backward()
        return None
    loss.backward()
    return x.grad


def call_stage_3_in_every_order() -> dict[str, tuple[float, float, int]]:
    """Train in stage 3 and in one process; return how far weights and inputs differ."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), {}
    for use in USES:
        model = script("zero_3").FullySharded(build())
        alone = build()
        ours = torch.optim.AdamW(model.parameters(), lr=0.01)
        theirs = torch.optim.AdamW(alone.parameters(), lr=0.01)
        apart = 0.0
        for batch in batches_of(3, BATCH * n):
            ours.zero_grad()
            theirs.zero_grad()
            gradient = backward_by(use, model, batch.chunk(n)[rank].clone())
            model.finish_gradient_sync()
            expected = backward_by(use, alone, batch.clone())
            if gradient is not None and expected is not None:
                # A rank's loss is a mean over fewer samples.
                mine = expected.chunk(n)[rank] * n
                apart = max(apart, (gradient - mine).abs().max().item())
            ours.step()
            theirs.step()
        weights, expected = model.full_parameters(), dict(alone.named_parameters())
        errors = [(weights[p] - expected[p]).abs().max().item() for p in weights]
        if len(errors) != 16:
            raise ValueError(f"{len(errors)} parameters were compared, not 16")
        found[use] = (max(errors), apart, whole_bytes(model))
    assert tuple(found) == USES
    return found


def test_stage_3_takes_forward_and_backward_in_any_order(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(call_stage_3_in_every_order)
    found = [(use, *values) for one in results for use, values in one.items()]
    assert len(found) == 2 * len(USES)
    for use, weights, inputs, kept in found:
        assert weights < 1e-11 and inputs < 1e-11 and kept == 0, use


# --- Drop-in: what an optimizer can do besides. ----------


def small(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Make a model of 5 x 7 + 5 + 5 + 1 numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def backward(model: nn.Module, step: int) -> Tensor:
    """Compute gradients on samples of this rank's own; return the loss."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(4, 7, generator=generator).to(dtype)).square().mean()
    loss.backward()
    return loss.detach()


def drop_in(stage: int, model: nn.Module, **settings: Any) -> tuple[Any, Callable]:
    """Return AdamW of stage 1 or 2 for a model, and what averages its gradients."""
    settings = {"lr": 0.01} | settings
    _, optimizer, finish = sharded(
        stage, model, lambda m: m.parameters(), torch.optim.AdamW, **settings
    )
    return optimizer, finish


def state_of_one_rank() -> list[dict[str, Any]]:
    """Look at what a rank keeps after a step of each stage, in bf16 and in float64."""
    found = []
    for stage in (1, 2):
        for dtype, master in ((torch.bfloat16, torch.float32), (torch.float64, None)):
            model = small(dtype)
            optimizer, finish = drop_in(stage, model, master_dtype=master)
            backward(model, 0)
            finish()
            optimizer.step()
            states = list(optimizer.local.state.values())
            parameters = list(model.parameters())
            # Numbers that no gradient can have, so that their shard may want none.
            table = nn.ParameterList([nn.Parameter(torch.arange(5), False)])
            frozen = drop_in(stage, table)[0].shards.values()
            found.append(
                {
                    "lengths": [len(shard) for shard in optimizer.shards.values()],
                    "moments": [
                        (len(state["exp_avg"]), len(state["exp_avg_sq"]))
                        for state in states
                    ],
                    "dtypes": {t.dtype for s in states for t in s.values() if t.dim()},
                    # Does the shard lie in the parameter's own memory?
                    "views": [
                        shard.untyped_storage().data_ptr()
                        == p.untyped_storage().data_ptr()
                        for p, shard in optimizer.shards.items()
                    ],
                    "given": optimizer.param_groups[0]["params"][0] is parameters[0],
                    "defaults": optimizer.defaults["betas"],
                    "group": optimizer.param_groups[0].get("betas"),
                    "frozen": [shard.requires_grad for shard in frozen],
                    "is optimizer": isinstance(optimizer, torch.optim.Optimizer),
                }
            )
    return found


def test_rank_keeps_state_for_its_shards_alone(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(state_of_one_rank, world_size=4)
    # Of 35, 5, 5 and 1 numbers.
    lengths = [[9, 2, 2, 1], [9, 2, 2, 0], [9, 1, 1, 0], [8, 0, 0, 0]]
    assert len(results) == 4
    for rank, found in enumerate(results):
        assert len(found) == 4
        for kept, dtype in zip(found, [torch.float32, torch.float64] * 2, strict=True):
            assert kept["lengths"] == lengths[rank]
            assert kept["moments"] == [(length, length) for length in lengths[rank]]
            assert kept["dtypes"] == {dtype}
            assert kept["given"] and kept["is optimizer"]
            # A schedule may read settings from the groups that nobody has named.
            assert kept["defaults"] == kept["group"] == (0.9, 0.999)
            assert kept["frozen"] == [False]
            if dtype == torch.float64:
                # Without master weights there is no copy of the weights.
                assert all(
                    view
                    for view, length in zip(kept["views"], lengths[rank], strict=True)
                    if length
                )
            else:
                assert not any(kept["views"])
    assert [sum(of_all) for of_all in zip(*lengths, strict=True)] == [35, 5, 5, 1]


def resume(path: str) -> list[bool]:
    """Train six steps; train three, save, load elsewhere, train three more."""
    found = []
    kinds = ((torch.bfloat16, torch.float32), (torch.float64, None))
    for stage, (dtype, master) in [(s, kind) for s in (1, 2) for kind in kinds]:
        file = f"{path}/{stage}_{dtype}_{dist.get_rank()}"

        def start(seed: int, stage: int = stage, dtype=dtype, master=master) -> Any:
            model = small(dtype, seed)
            optimizer, finish = drop_in(stage, model, master_dtype=master)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
            return model, optimizer, finish, schedule

        def steps(first: int, model: Any, optimizer: Any, finish: Any, schedule: Any):
            for step in range(first, first + 3):
                optimizer.zero_grad()
                backward(model, step)
                finish()
                optimizer.step()
                schedule.step()

        uninterrupted = start(seed=0)
        steps(0, *uninterrupted)
        model, optimizer, _, schedule = uninterrupted
        state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, file)
        # A view would bring the whole parameter into every rank's file.
        saved = state["optimizer"]["shards"]
        found.append(all(one.untyped_storage().nbytes() == one.nbytes for one in saved))
        halfway = [p.detach().clone() for p in model.parameters()]
        steps(3, *uninterrupted)

        resumed = start(seed=1)
        other, optimizer, _, schedule = resumed
        found.append(not torch.equal(halfway[0], other[0].weight))
        state = torch.load(file, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        found.append(optimizer.param_groups[0]["lr"] == 0.01 * 0.7 * 0.7 * 0.7)
        found += [
            torch.equal(*ps) for ps in zip(halfway, other.parameters(), strict=True)
        ]
        steps(3, *resumed)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        found += [torch.equal(*pair) for pair in pairs]
        found.append(not torch.equal(halfway[0], model[0].weight))
    return found


def test_resumes_to_the_same_bits(worker_pool: WorkerPool, tmp_path: Any) -> None:
    results = worker_pool.run(resume, str(tmp_path), world_size=3)
    assert results == [[True] * 4 * (3 + 4 + 4 + 1)] * 3


def step_with_closures() -> list[tuple[bool, bool, bool]]:
    """Step with a closure and without, also where gradients are switched off."""
    found = []
    for stage in (1, 2):
        weights, losses = [], []
        for way in ("plain", "closure", "no_grad"):
            model = small()
            optimizer, finish = drop_in(stage, model)

            def closure(model=model, optimizer=optimizer, finish=finish) -> Tensor:
                optimizer.zero_grad()
                loss = backward(model, 0)
                finish()
                return loss

            if way == "plain":
                losses.append(closure().item())
                assert optimizer.step() is None
            else:
                with torch.set_grad_enabled(way == "closure"):
                    losses.append(optimizer.step(closure).item())
            weights.append(nn.utils.parameters_to_vector(model.parameters()))
        start = nn.utils.parameters_to_vector(small().parameters())
        is_same = all(torch.equal(one, weights[0]) for one in weights)
        has_moved = not torch.equal(weights[0], start)
        found.append((is_same, len(set(losses)) == 1, has_moved))
    return found


def test_closure(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(step_with_closures) == [[(True, True, True)] * 2] * 2


def gradients_that_are_forgotten() -> list[Any]:
    """Zero gradients in every way, before and after they were sent."""
    found = []
    for stage in (1, 2):
        for set_to_none in (True, False):
            model = small()
            optimizer, finish = drop_in(stage, model)
            backward(model, 0)  # of a step that is skipped, as after a NaN
            optimizer.zero_grad(set_to_none)
            kept = [p.grad for p in model.parameters()]
            kept += [shard.grad for shard in optimizer.shards.values()]
            found.append(all(g is None or not g.any() for g in kept))
            left = [shard.grad is None for shard in optimizer.shards.values()]
            found.append(left == [stage == 1 or set_to_none] * 4)
            backward(model, 1)
            finish()
            optimizer.step()
            other = small()
            optimizer, finish = drop_in(stage, other)
            backward(other, 1)
            finish()
            optimizer.step()
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            found.append(all(torch.equal(*pair) for pair in pairs))
    return found


def test_zero_grad(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(gradients_that_are_forgotten) == [[True] * 12] * 2


def gradients_alive_after_a_step() -> list[int]:
    """Count the gradients whose memory is in use after step and zero_grad."""
    alive = []
    for stage in (1, 2):
        model = small()
        optimizer, finish = drop_in(stage, model)
        memory: list[StorageWeakRef] = []

        def note(gradient: Tensor, memory: list[StorageWeakRef] = memory) -> None:
            memory.append(StorageWeakRef(gradient.untyped_storage()))

        for p in model.parameters():
            p.register_hook(note)
        backward(model, 0)
        if stage == 1:
            # What autograd passed along and what it left in .grad may be copies.
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            memory += [StorageWeakRef(grad.untyped_storage()) for grad in grads]
            del grads
        finish()
        optimizer.step()
        optimizer.zero_grad()
        alive.append(sum(not reference.expired() for reference in memory))
        assert len(memory) == (8 if stage == 1 else 4)
    return alive


def test_no_gradient_outlives_its_step(worker_pool: WorkerPool) -> None:
    # A shard's gradient that is a view would hold the memory of the whole one.
    assert worker_pool.run(gradients_alive_after_a_step) == [[0, 0]] * 2


def refusals() -> list[str]:
    """Shard what cannot be sharded as a view."""
    with pytest.raises(RuntimeError) as caught:
        drop_in(1, nn.ParameterList([torch.randn(3, 4).t()]))
    return [str(caught.value)]


def test_strided_parameter_is_an_error_and_no_silent_copy(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(refusals)
    assert len(results) == 2
    assert all("view size is not compatible" in text for (text,) in results)


# --- Low precision, and master weights. ----------


class TwoDtypes(nn.Module):
    """A bf16 and a float32 layer; from (B, 7) in float32 to (B, 1)."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.low = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.high = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Go through the layers, each in its dtype."""
        return self.high(torch.tanh(self.low(x.bfloat16())).float())


def steps_in_two_dtypes(master_dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """Step a model of two dtypes in stages 1 and 2, beside one process."""
    n, found = dist.get_world_size(), []
    for stage in (1, 2):
        torch.manual_seed(0)
        model = TwoDtypes()
        alone = copy.deepcopy(model)
        # One process keeps float32 weights and rounds them, if there are to be any.
        masters = [
            nn.Parameter(p.detach().to(master_dtype)) for p in alone.parameters()
        ]
        adam = torch.optim.AdamW(masters, lr=0.01)
        optimizer, finish = drop_in(stage, model, master_dtype=master_dtype)
        rounded = []
        for step in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(n, 4, 7, generator=generator)
            model(batch[dist.get_rank()]).square().mean().backward()
            finish()
            optimizer.step()
            gradients = [
                torch.autograd.grad(
                    alone(shard).square().mean(), list(alone.parameters())
                )
                for shard in batch
            ]
            for p, master, *of_ranks in zip(
                alone.parameters(), masters, *gradients, strict=True
            ):
                master.grad = (sum(of_ranks) / n).to(master.dtype)  # type: ignore
                if of_ranks[0].dtype != p.dtype:
                    raise TypeError(f"a gradient of {of_ranks[0].dtype} for {p.dtype}")
            adam.step()
            for p, master in zip(alone.parameters(), masters, strict=True):
                p.data.copy_(master.data)
            local_shard = script("zero_1").local_shard
            for p, shard in optimizer.shards.items():
                rounded.append(torch.equal(local_shard(p), shard.detach().to(p.dtype)))
        apart = [
            ((p - q).abs().max() / q.abs().max()).item()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        ]
        is_same = script("ranks").same_on_all_ranks(model.parameters())
        dtypes = [shard.dtype for shard in optimizer.shards.values()]
        found.append(
            {"apart": apart, "same": is_same, "rounded": rounded, "dtypes": dtypes}
        )
    return found


@pytest.mark.parametrize("master_dtype", [None, torch.float32])
def test_several_dtypes(
    worker_pool: WorkerPool, master_dtype: torch.dtype | None
) -> None:
    results = worker_pool.run(steps_in_two_dtypes, master_dtype)
    low = master_dtype or torch.bfloat16
    assert len(results) == 2
    for found in results:
        assert len(found) == 2
        for stage in found:
            assert stage["dtypes"] == [low, low, torch.float32, torch.float32]
            assert stage["same"]
            # The mean of two bf16 numbers is rounded alike here and there.
            assert len(stage["apart"]) == 4 and max(stage["apart"]) < 1e-6
            # What everyone computes with is the master weights, rounded.
            assert stage["rounded"] == [True] * 6 * 4


def small_updates() -> dict[str, tuple[float, float]]:
    """Subtract 2 ** -10 from weights of 1.0, 16 times; return the least and the most.

    Below 1.0 neighbours of bf16 are 2 ** -8 apart.
    """
    found = {}
    for way in ("plain bf16", "stage 1", "stage 2", "stage 3"):
        module = nn.Linear(5, 3, bias=False, dtype=torch.float32)
        nn.init.ones_(module.weight)
        lr = 2.0**-10
        if way == "stage 3":
            model = script("zero_3").FullySharded(module, torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            finish = model.finish_gradient_sync
        else:
            master = None if way == "plain bf16" else torch.float32
            stage = 2 if way == "stage 2" else 1
            model, optimizer, finish = sharded(
                stage,
                module.bfloat16(),
                lambda m: m.parameters(),
                torch.optim.SGD,
                master_dtype=master,
                lr=lr,
            )
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()  # all ones
            finish()
            optimizer.step()
        (weight,) = whole(model).values()
        found[way] = (weight.min().item(), weight.max().item())
    return found


def test_master_weights_keep_updates_that_bf16_loses(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(small_updates)
    exact = 1 - 16 * 2.0**-10
    assert len(results) == 2
    for found in results:
        assert found == {
            "plain bf16": (1.0, 1.0),  # not one of 16 steps
            "stage 1": (exact, exact),
            "stage 2": (exact, exact),
            "stage 3": (exact, exact),
        }


# --- What is sent, and when. ----------


class Recorder:
    """Writes down, in order, which collectives start and are waited for."""

    def __init__(self) -> None:
        """Know no tensor by name yet."""
        self.log: list[tuple[str, Any]] = []
        self.sizes: list[tuple[str, int]] = []  # kind, numbers in the larger tensor
        self.names: dict[int, Any] = {}  # by the tensor that is sent or received
        self.freed: list[int] = []  # tensors of a call that were freed before its wait
        self.look: Callable[[], None] = lambda: None

    def note(self, kind: str, what: Any) -> None:
        """Write down one event."""
        self.log.append((kind, what))

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Stand between the scripts and the collectives they use."""
        with contextlib.ExitStack() as stack:
            for kind, is_first_whole in (
                ("all_reduce", True),
                ("broadcast", True),
                ("all_gather_single", True),
                ("reduce_scatter_single", False),
            ):
                real = getattr(dist, kind)
                fake = self.stand_in(kind, is_first_whole, real)
                stack.enter_context(mock.patch.object(dist, kind, fake))
            yield

    def stand_in(self, kind: str, is_first_whole: bool, real: Any) -> Any:
        """Make a collective that is written down."""

        def call(first: Tensor, *others: Any, **settings: Any) -> Any:
            large = first if is_first_whole else others[0]
            name = self.names.get(id(first), "?")
            self.note(kind, name)
            self.sizes.append((kind, large.numel()))
            self.look()
            work = real(first, *others, **settings)
            if work is None:
                self.note(f"wait {kind}", name)
                return None
            in_use = [StorageWeakRef(t.untyped_storage()) for t in (first, *others)]
            handle = mock.Mock(spec=["wait"])
            handle.wait.side_effect = lambda: (
                self.note(f"wait {kind}", name),
                self.freed.append(sum(storage.expired() for storage in in_use)),
                work.wait(),
            )
            return handle

        return call


def what_stages_do_besides() -> dict[str, Any]:
    """Clip, step at once after backward, and step with a frozen layer, in float64."""
    found: dict[str, Any] = {}
    alone = small()
    generators = [
        torch.Generator().manual_seed(r) for r in range(dist.get_world_size())
    ]
    inputs = [torch.randn(4, 7, generator=g).double() for g in generators]
    torch.stack([alone(x).square().mean() for x in inputs]).mean().backward()
    gradients = [p.grad for p in alone.parameters() if p.grad is not None]
    found["norm"] = nn.utils.get_total_norm(gradients).item()
    for stage in STAGES:
        model: Any = small()
        if stage == 3:
            model = script("zero_3").FullySharded(model)
            finish = model.finish_gradient_sync
        else:
            optimizer, finish = drop_in(stage, model, lr=0.1)
        backward(model, 0)
        finish()
        found[f"norm {stage}"] = nn.utils.clip_grad_norm_(
            model.parameters(), 0.1
        ).item()
        if stage == 1:
            clipped = [p.grad.norm() for p in model.parameters()]
            found["clipped"] = torch.stack(clipped).norm().item()
    weights = []
    for finishes in (True, False):
        model = small()
        optimizer, finish = drop_in(2, model)
        backward(model, 0)
        if finishes:
            finish()
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    found["finished or not"] = torch.equal(*weights)
    model, recorder = small(), Recorder()
    model[0].requires_grad_(False)
    optimizer, finish = drop_in(1, model)
    backward(model, 0)
    with recorder.listen():
        finish()
        optimizer.step()
    found["sent"] = [kind for kind, _ in recorder.sizes]
    return found


def test_what_stages_do_besides(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(what_stages_do_besides)
    assert len(results) == 2
    for found in results:
        # Stage 1 clips as one process does. In stage 2 the parameters have no gradient,
        # in stage 3 this rank's shards have theirs.
        assert found["norm 1"] == pytest.approx(found["norm"], rel=1e-12)
        assert found["clipped"] == pytest.approx(0.1, rel=1e-5)
        assert found["norm 2"] == 0
        assert 0 < found["norm 3"] < 0.999 * found["norm"]
        # A step waits for the gradient in flight itself.
        assert found["finished or not"]
        # Two tensors of four; nobody gathers what did not move.
        assert found["sent"] == ["all_reduce"] * 2 + ["all_gather_single"] * 2


def order_of_stage_2() -> dict[str, Any]:
    """Write down what happens in a backward pass of stage 2."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=False) for _ in range(5)]
    layers[2].requires_grad_(False)
    model = nn.Sequential(*layers)
    optimizer, finish = drop_in(2, model)
    recorder, in_flight = Recorder(), []
    recorder.look = lambda: in_flight.append(len(optimizer.in_flight))
    for number, layer in enumerate(layers):

        def note(_: Tensor, number: int = number) -> None:
            recorder.note("computed", number)

        if layer.weight.requires_grad:
            layer.weight.register_hook(note)
    with recorder.listen():
        model(torch.ones(2, 6)).sum().backward()
        recorder.note("backward", "returned")
        has_no_gradient = [p.grad is None for p in model.parameters()]
        gradients = [shard.grad is not None for shard in optimizer.shards.values()]
        finish()
    return {
        "log": recorder.log,
        "in flight": in_flight,
        "none": has_no_gradient,
        "shards": gradients,
        "after": [shard.grad is not None for shard in optimizer.shards.values()],
        "whole gradients": len(optimizer.in_flight),
        "freed": recorder.freed,
    }


def test_stage_2_sends_gradients_while_backward_runs(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(order_of_stage_2, world_size=3)
    send, wait = ("reduce_scatter_single", "?"), ("wait reduce_scatter_single", "?")
    assert len(results) == 3
    for found in results:
        assert found["log"] == [
            ("computed", 4),
            send,
            # While this gradient is computed, the one before is on its way.
            ("computed", 3),
            send,
            wait,
            # The frozen layer, 2, sends nothing.
            ("computed", 1),
            send,
            wait,
            ("computed", 0),
            send,
            wait,
            ("backward", "returned"),
            wait,
        ]
        # Before each was sent: never more than one other.
        assert found["in flight"] == [0, 1, 1, 1]
        assert found["none"] == [True] * 5
        # The first layer's is still in flight when backward returns.
        assert found["shards"] == [False, True, False, True, True]
        assert found["after"] == [True, True, False, True, True]
        assert found["whole gradients"] == 0
        assert found["freed"] == [0] * 4


def gpt(tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Make the chapter's GPT with small and awkward sizes."""
    model = load_chapter("05_deepspeed_zero")["model"]
    torch.manual_seed(0)
    config = model.GPTConfig(block_size=9, width=10, layers=1, heads=2, tied=tied)
    return model.GPT(config).to(dtype)


def tokens_of(step: int) -> tuple[Tensor, Tensor]:
    """Draw this rank's inputs and labels, (2, 9) each."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(256, (2, 10), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def volume_of_every_stage() -> dict[int, tuple[dict[str, Fraction], int, int]]:
    """Count the numbers that a rank sends in a step, by the ring's formulas.

    Returns:
        For each stage: what each collective sends, the parameters, and the parameters
        padded to shards of equal length.
    """
    n, found = dist.get_world_size(), {}
    part = Fraction(n - 1, n)  # of a tensor that a rank sends to the next, in a ring
    for stage in (0, 1, 2, 3):
        model = gpt(tied=False)
        sizes = [p.numel() for p in model.parameters()]
        padded = sum(-(-numel // n) * n for numel in sizes)
        if stage == 0:
            optimizer = torch.optim.AdamW(model.parameters())
            finish = partial(script("train_and_compare").average_gradients, model)
        else:
            way = getattr(script(f"zero_{stage}"), f"stage_{stage}")
            model, optimizer, finish = way(model, False)
        recorder = Recorder()
        with recorder.listen():
            for step in range(2):
                recorder.sizes.clear()
                optimizer.zero_grad()
                model(*tokens_of(step)).backward()
                finish()
                optimizer.step()
        sent: Counter[str] = Counter()
        for kind, numel in recorder.sizes:
            sent[kind] += numel
        factors = {"all_reduce": 2 * part}
        volume = {kind: factors.get(kind, part) * sent[kind] for kind in sent}
        found[stage] = (volume, sum(sizes), padded)
    return found


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_communication_volume(worker_pool: WorkerPool, world_size: int) -> None:
    results = worker_pool.run(volume_of_every_stage, world_size=world_size)
    part = Fraction(world_size - 1, world_size)
    assert len(results) == world_size
    for found in results:
        assert list(found) == [0, 1, 2, 3]
        for stage, (sent, parameters, padded) in found.items():
            assert parameters <= padded < 1.01 * parameters
            if world_size == 3:
                assert padded > parameters
            gather, scatter = "all_gather_single", "reduce_scatter_single"
            assert (
                sent
                == {
                    0: {"all_reduce": 2 * part * parameters},
                    1: {"all_reduce": 2 * part * parameters, gather: part * padded},
                    2: {scatter: part * padded, gather: part * padded},
                    3: {scatter: part * padded, gather: 2 * part * padded},
                }[stage]
            )
            total = sum(sent.values()) / (part * parameters)
            assert total == pytest.approx({0: 2, 1: 3, 2: 2, 3: 3}[stage], rel=0.01)


# --- Stage 3: whole only while it is used. ----------


Frozen = tuple[str, ...]  # parameters with one of these in their names
LAYERS = ("attention_norm", "query", "key", "value", "attention_out")
LAYERS += ("mlp_norm", "mlp_in", "mlp_out")
ORDER = [
    *("position_embedding", "token_embedding"),
    *(f"blocks.0.{layer}" for layer in LAYERS),
    *("final_norm", "head"),
]
PARAMETERS = 15  # nine matrices, three norms with their biases
WALKS: list[tuple[bool, Frozen]] = [
    (tied, frozen)
    for tied in (False, True)
    for frozen in ((), ("query", "mlp_norm", "final_norm"))
]


class Recomputed(NamedTuple):
    """How far gradients are from one process's, an error, and what is whole after it.

    And whether the model's `zero_grad` clears the gradient of every shard.
    """

    apart: list[float]
    error: str
    whole: list[str]
    nbytes: int
    clears: bool


def recompute_in_stage_3(is_reentrant: bool | None, ends: str) -> Recomputed:
    """Take three steps, with the middle layers under activation checkpointing.

    Not if `is_reentrant` is None. They end in a layer, or in one without parameters.
    """

    class Middle(nn.Sequential):
        def forward(self, input: Tensor) -> Any:
            if is_reentrant is None:
                return super().forward(input)
            return checkpoint(super().forward, input, use_reentrant=is_reentrant)

    torch.manual_seed(0)
    middle = Middle(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    if ends == "Tanh":
        middle.append(nn.Tanh())
    module = nn.Sequential(nn.Linear(7, 7), middle, nn.Linear(7, 1)).double()
    alone = copy.deepcopy(module)
    model = script("zero_3").FullySharded(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    single, apart = torch.optim.SGD(alone.parameters(), lr=0.5), []
    for step in range(3):
        backward(model, step)
        model.finish_gradient_sync()
        backward(alone, step)
        script("train_and_compare").average_gradients(alone)
        largest = 0.0
        for part, p in zip(model.parts, alone.parameters(), strict=True):
            gathered = torch.empty_like(part.flat)
            dist.all_gather_single(gathered, part.shard.grad)
            ours: Any = gathered[: p.numel()].view_as(p)
            largest = max(largest, float(torch.dist(ours, p.grad)))  # type: ignore
        apart.append(largest)
        for one in (optimizer, single):
            one.step()
            one.zero_grad()
    whole = {id(part.whole) for part in model.parts}
    shown = [name for name, p in module.named_parameters() if id(p) in whole]
    backward(model, 3)
    model.finish_gradient_sync()
    model.zero_grad()
    clears = all(part.shard.grad is None for part in model.parts)
    error = ""
    try:
        model.full_parameters()
    except (KeyError, RuntimeError) as raised:
        error = type(raised).__name__
    return Recomputed(apart, error, shown, whole_bytes(model), clears)


@pytest.mark.parametrize("ends", ["Linear", "Tanh"])
@pytest.mark.parametrize("is_reentrant", [None, True, False])
def test_stage_3_takes_activation_checkpointing_if_it_is_reentrant(
    worker_pool: WorkerPool, is_reentrant: bool | None, ends: str
) -> None:
    results = worker_pool.run(recompute_in_stage_3, is_reentrant, ends, world_size=3)
    # The other kind leaves a forward pass early: no hook puts back the last shards.
    is_left = is_reentrant is False and ends == "Linear"
    for found in results:
        assert found.apart == pytest.approx([0.0] * 3, abs=1e-12)
        assert (found.error != "") == is_left
        assert found.whole == (["1.2.weight", "1.2.bias"] if is_left else [])
        assert (found.nbytes, found.clears) == (0, not is_left)
    assert len(results) == 3
    page = words_of(CHAPTER)
    assert "activation checkpointing takes `use_reentrant=True`." in page


def moved_in_stage_3(when: str) -> list[bool]:
    """Change something before or after a model is sharded; which weights move then?"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(when != "unfrozen after")
    early = torch.optim.SGD(model.parameters(), 0.1)
    sharded_model = script("zero_3").FullySharded(model)
    model[0].requires_grad_(when != "frozen after")
    late = torch.optim.SGD(sharded_model.parameters(), 0.1)
    before = sharded_model.full_parameters()
    sharded_model(torch.ones(3, 4)).square().mean().backward()
    sharded_model.finish_gradient_sync()
    (early if when == "optimizer before" else late).step()
    after = sharded_model.full_parameters()
    return [not torch.equal(after[name], before[name]) for name in before]


def test_stage_3_takes_what_is_frozen_before_and_an_optimizer_from_after(
    worker_pool: WorkerPool,
) -> None:
    due = {
        "as it should be": [True] * 4,
        "frozen after": [True] * 4,
        "unfrozen after": [False, False, True, True],
        "optimizer before": [False] * 4,
    }
    assert len(due) == 4
    for when, moved in due.items():
        assert worker_pool.run(moved_in_stage_3, when) == [moved] * 2


def evaluated_with_running_means(stage: int) -> float:
    """Train a model with BatchNorm for a while; evaluate it on the same input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    ways: Any = script(f"zero_{stage}")
    wrapped, optimizer, finish = getattr(ways, f"stage_{stage}")(model, False)
    for step in range(3):
        torch.manual_seed(2 * step + dist.get_rank())
        wrapped(torch.randn(8, 4)).square().mean().backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return wrapped.eval()(torch.ones(1, 4)).item()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_running_means_are_each_rank_s_own(worker_pool: WorkerPool, stage: int) -> None:
    one, other = worker_pool.run(evaluated_with_running_means, stage)
    assert abs(one - other) > 1e-3
    assert "Buffers, such as BatchNorm's, differ by rank." in words_of(CHAPTER)


def whole_bytes(model: Any) -> int:
    """Return the memory of whole parameters, now."""
    return sum(part.flat.untyped_storage().size() for part in model.parts)


def record_stage_3(model: Any) -> Recorder:
    """Name the parts of a sharded model, and write down what its modules do."""
    recorder = Recorder()
    names = {module: name for name, module in model.module.named_modules()}
    for module, parts in model.parts_of.items():
        for part in parts.values():
            recorder.names.setdefault(id(part.flat), names[module])

        def before(child: nn.Module, _: Any) -> None:
            shapes = [
                p.shape for p in child.parameters(False) if len(p.untyped_storage())
            ]
            if shapes != [p.whole.shape for p in model.parts_of[child].values()]:
                raise RuntimeError(f"{names[child]} computes without its parameters")
            recorder.note("forward", names[child])

        def after(child: nn.Module, _: Any, output: Tensor) -> None:
            if output.requires_grad:
                name = names[child]
                output.register_hook(lambda _: recorder.note("backward", name))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return recorder


def walk_through_stage_3(tied: bool, frozen: Frozen) -> dict[str, Any]:
    """Take steps with a GPT; look at the memory and the order of all that happens."""
    torch.manual_seed(0)
    module = gpt(tied)
    for name, p in module.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    model = script("zero_3").FullySharded(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder, peaks, kept = record_stage_3(model), [], [whole_bytes(model)]
    in_flight: list[int] = []
    logs = []

    def look() -> None:
        peaks.append(whole_bytes(model))
        in_flight.append(len(model.in_flight))

    recorder.look = look  # memory grows before a collective alone
    with recorder.listen():
        for step in range(3):
            recorder.log.clear()
            optimizer.zero_grad()
            loss = model(*tokens_of(step))
            kept.append(whole_bytes(model))
            loss.backward()
            recorder.note("backward", "returned")
            model.finish_gradient_sync()
            kept.append(whole_bytes(model))
            optimizer.step()
            logs.append(list(recorder.log))
        recorder.log.clear()
        model.eval()
        with torch.no_grad():
            model(*tokens_of(9))
        kept.append(whole_bytes(model))
        logs.append(list(recorder.log))
        model.full_parameters()
        kept.append(whole_bytes(model))
    names = {child: name for name, child in model.module.named_modules()}
    sizes = {
        names[child]: {id(part): part.flat.nbytes for part in parts.values()}
        for child, parts in model.parts_of.items()
    }
    return {
        "logs": logs,
        "kept": kept,
        "peak": max(peaks),
        "in flight": max(in_flight),
        "order": [names[child] for child in model.order],
        # What each two modules that follow each other have, tied parameters once.
        "pairs": [
            sum((sizes[one] | sizes[other]).values())
            for one, other in pairwise([names[child] for child in model.order])
        ],
    }


def walk_in_every_way() -> list[dict[str, Any]]:
    """Take the walks one after another."""
    return [walk_through_stage_3(tied, frozen) for tied, frozen in WALKS]


@pytest.fixture(scope="module")
def walks(worker_pool: WorkerPool) -> list[tuple[bool, Frozen, dict[str, Any]]]:
    """Return what both ranks saw on all walks."""
    results = worker_pool.run(walk_in_every_way)
    assert len(results) == 2
    found = [(*walk, seen[i]) for seen in results for i, walk in enumerate(WALKS)]
    assert len(found) == 8
    return found


def test_stage_3_has_at_most_two_modules_whole(walks: Any) -> None:
    assert len(walks) == 8
    for tied, frozen, found in walks:
        assert found["order"] == ORDER
        # After wrapping, three times after forward and after backward, after a forward
        # pass without gradients, after full_parameters: nothing is whole.
        assert found["kept"] == [0] * 9, (tied, frozen)
        assert len(found["pairs"]) == len(ORDER) - 1
        assert found["peak"] == max(found["pairs"]), (tied, frozen)
        assert found["in flight"] == 1  # beside the one that is about to be sent


def places_in_backward() -> list[int]:
    """Call a module twice, another in between; return the places backward reaches."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = script("zero_3").FullySharded(nn.Sequential(first, second, first, second))
    places, real = [], model.before_backward

    def note(used: list[nn.Module], i: int) -> None:
        places.append(i)
        real(used, i)

    with mock.patch.object(model, "before_backward", note):
        model(torch.ones(2, 3)).sum().backward()
    model.finish_gradient_sync()
    return places


def test_stage_3_knows_each_call_of_a_module(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(places_in_backward) == [[3, 2, 1, 0]] * 2


def test_stage_3_gathers_ahead(walks: Any) -> None:
    gather, wait = "all_gather_single", "wait all_gather_single"
    plain = [found["logs"] for tied, frozen, found in walks if not tied and not frozen]
    followed = list(pairwise(ORDER))
    assert len(plain) == 2 and len(followed) == len(ORDER) - 1 == 11
    for first, second, third, evaluation in plain:
        # Nobody knows yet what comes next.
        for name, following in followed:
            computes = first.index(("forward", name))
            assert first.index((gather, following)) > computes
        for log in (second, third, evaluation):
            for name, following in followed:
                computes = log.index(("forward", name))
                assert log.index((wait, name)) < computes
                assert log.index((gather, following)) < computes
                assert log.index((wait, following)) > computes
        for log in (first, second, third):
            start = log.index(("forward", "head")) + 1
            backward = log[start : log.index(("backward", "returned"))]
            for following, name in followed:
                computes = backward.index(("backward", name))
                assert backward.index((wait, name)) < computes
                assert backward.index((gather, following)) < computes
                assert backward.index((wait, following)) > computes
            # Gradients are sent while backward goes on; the last is still in flight.
            kinds = Counter(kind for kind, _ in backward)
            assert kinds["reduce_scatter_single"] == PARAMETERS
            assert kinds["wait reduce_scatter_single"] == PARAMETERS - 1
        assert ("backward", "head") not in evaluation


def test_stage_3_gathers_once_a_use_and_reduces_once(walks: Any) -> None:
    assert len(walks) == 8
    for tied, frozen, found in walks:
        training = found["logs"][:3]
        assert len(training) == 3
        for log in training:
            gathered = Counter(n for kind, n in log if kind == "all_gather_single")
            # Forward and backward, weights and biases; the tied matrix is used twice.
            assert gathered == {
                name: (4 if "norm" in name or (tied and "token" in name) else 2)
                for name in ORDER
                if not (tied and name == "head")
            }
            kinds = Counter(kind for kind, _ in log)
            trainable = PARAMETERS - tied - (5 if frozen else 0)
            assert kinds["reduce_scatter_single"] == trainable
            assert kinds["wait reduce_scatter_single"] == trainable
        forward_only = Counter(kind for kind, _ in found["logs"][3])
        assert forward_only["all_gather_single"] == PARAMETERS
        assert forward_only["reduce_scatter_single"] == 0


def record_the_picture() -> list[list[Any]]:
    """Record the step of assets/05_zero_3.png again."""
    with mock.patch.object(sys, "path", [str(ROOT / "assets"), *sys.path]):
        recording = importlib.import_module("record_zero_3")
    events = recording.record_step(load_chapter(CHAPTER)["zero_3"])
    return [list(event) for event in events]


def test_picture_is_drawn_from_what_stage_3_does(worker_pool: WorkerPool) -> None:
    drawn = json.loads((ROOT / "assets" / "05_zero_3.json").read_text())
    # Four modules: twice a gather and a computation, which begin and end, and a free;
    # once a reduce-scatter, which begins and ends.
    assert [len(events) for events in drawn] == [4 * (2 * (2 + 2 + 1) + 2)] * 2
    assert worker_pool.run(record_the_picture) == drawn


class Buffered(nn.Module):
    """A model with buffers of several dtypes, and a path that depends on the input."""

    def __init__(self) -> None:
        """Draw weights and buffers from the default generator."""
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.left, self.right = nn.Linear(7, 3), nn.Linear(7, 3)
        self.turned = nn.Parameter(torch.randn(6, 3).t())  # stored by columns
        for kind in (torch.int64, torch.bool, torch.float64):
            values = torch.randint(2, (5,)).to(kind)
            self.register_buffer(str(kind).removeprefix("torch."), values)
        self.register_buffer("column", torch.randn(5, 2)[:, 0])
        self.register_buffer("expanded", torch.arange(3).expand(4, 3))

    def forward(self, x: Tensor, goes_left: bool = True) -> Tensor:
        """Use one of the two layers; from (B, 7) to (B, 6)."""
        return (self.left if goes_left else self.right)(self.norm(x)) @ self.turned


def wrap_with_other_seeds() -> dict[str, Any]:
    """Build from a seed of this rank's own, then wrap."""
    torch.manual_seed(dist.get_rank())
    module = Buffered()
    original = {name: t.clone() for name, t in module.state_dict().items()}
    model = script("zero_3").FullySharded(module)
    names = [name for name, _ in model.module.named_parameters()]
    buffers = {name: b.clone() for name, b in model.module.named_buffers()}
    lengths = [len(p) for p in model.parameters()]
    kept = []
    for goes_left in (True, False, True):  # what was gathered ahead is not what is used
        with torch.no_grad():
            model(torch.ones(2, 7), goes_left=goes_left)
        kept.append(whole_bytes(model))
    return {
        "original": original,
        "names": names,
        "whole": model.full_parameters(),
        "buffers": buffers,
        "lengths": lengths,
        "keys": list(model.module.state_dict()),
        "kept": kept,
    }


def test_wrapping_takes_rank_zeros_weights_and_buffers(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(wrap_with_other_seeds, world_size=3)
    original = results[0]["original"]
    names = [name for name, _ in Buffered().named_parameters()]
    assert len(results) == 3 and len(names) == 7
    assert not torch.equal(
        original["left.weight"], results[1]["original"]["left.weight"]
    )
    for found in results:
        assert found["names"] == list(found["whole"]) == names
        assert found["keys"] == list(original)
        for name, tensor in (found["whole"] | found["buffers"]).items():
            assert tensor.shape == original[name].shape
            assert tensor.dtype == original[name].dtype
            assert torch.equal(tensor, original[name]), name
        assert len(found["buffers"]) == 8
        shapes = [original[name].numel() for name in names]
        assert found["lengths"] == [-(-numel // 3) for numel in shapes]
        assert found["kept"] == [0, 0, 0]


class Normed(nn.Module):
    """Layers that insist on one dtype, and a float32 number between them."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.first, self.norm = nn.Linear(7, 12), nn.LayerNorm(12)
        self.last = nn.Linear(12, 1)
        self.register_buffer("shift", torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        """Go from (B, 7) to (B, 1)."""
        return self.last(torch.tanh(self.norm(self.first(x) + self.shift)))


def compute_in_bf16() -> dict[str, Any]:
    """Train in bf16 with float32 shards; do the same arithmetic in one process."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    module = Normed()
    masters = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    alone = copy.deepcopy(module)
    for layer in (alone.first, alone.norm, alone.last):
        layer.bfloat16()
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    model = script("zero_3").FullySharded(module, compute_dtype=torch.bfloat16)
    computed = []
    for layer in (module.first, module.norm, module.last):
        layer.register_forward_hook(lambda *seen: computed.append(seen[-1].dtype))
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(masters, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    gradient_dtypes = set()
    for _ in range(5):
        batch = torch.randn(n, 4, 7, generator=generator)
        ours.zero_grad()
        model(batch[rank]).square().mean().backward()
        model.finish_gradient_sync()
        gradient_dtypes |= {
            p.grad.dtype for p in model.parameters() if p.grad is not None
        }
        ours.step()
        for p, master in zip(alone.parameters(), masters, strict=True):
            p.data.copy_(master.data)
        of_ranks = [
            torch.autograd.grad(alone(x).square().mean(), list(alone.parameters()))
            for x in batch
        ]
        for master, *gradients in zip(masters, *of_ranks, strict=True):
            master.grad = torch.stack([g.float() for g in gradients]).mean(dim=0)
        theirs.step()
    weights = model.full_parameters().values()
    x = torch.randn(4, 7, requires_grad=True)
    model(x).sum().backward()
    model.finish_gradient_sync()
    return {
        "apart": [
            (w - m).abs().max().item() for w, m in zip(weights, masters, strict=True)
        ],
        "computed": set(computed),
        "shards": {p.dtype for p in model.parameters()},
        "gradients": gradient_dtypes,
        "input": torch.as_tensor(x.grad).dtype,
        "moved": (masters[0] - next(Normed().parameters())).abs().max().item(),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_stage_3_computes_in_bf16_and_keeps_float32(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(compute_in_bf16, world_size=world_size)
    assert len(results) == world_size
    for found in results:
        assert found["computed"] == {torch.bfloat16}
        assert found["shards"] == found["gradients"] == {torch.float32}
        assert found["input"] == torch.float32
        # A float32 sum of three in another order may round a bf16 weight elsewhere.
        assert len(found["apart"]) == 6
        assert max(found["apart"]) < (1e-7 if world_size == 2 else 1e-3)
        assert found["moved"] > 0.01


class Shared(nn.Module):
    """One matrix under two names, a keyword, a tuple, and a frozen table of numbers."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.one = self.other = nn.Parameter(torch.randn(3, 3))
        self.last, self.lstm = nn.Linear(3, 3), nn.LSTM(3, 3)
        self.table = nn.Parameter(torch.tensor([1000, 1001, 1003]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Give a float32 keyword to one child, and a tuple to the other."""
        y = self.last(input=(x @ self.one @ self.other.T).float())
        zeros = torch.zeros(1, *x.shape)
        return self.lstm(y[None], (zeros, zeros))[0] * self.table


class Divided(nn.Module):
    """A layer whose output is divided by the norm of its weight."""

    def __init__(self) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.child = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Go from (B, 3) to (B, 4)."""
        return self.child(x) / self.child.weight.norm()


def call_in_other_ways() -> dict[str, Any]:
    """Call what FullySharded has to cast, and what it cannot shard."""
    torch.manual_seed(0)
    alone, x = Shared(), torch.randn(2, 3)
    model = script("zero_3").FullySharded(copy.deepcopy(alone))
    y = model(x)
    y.sum().backward()
    model.finish_gradient_sync()
    alone(x).sum().backward()
    flat = torch.as_tensor(alone.one.grad).flatten()
    padded = torch.cat([flat, torch.zeros(-len(flat) % 2)])
    found: dict[str, Any] = {
        "output": torch.equal(y, alone(x)),
        "gradient": torch.dist(
            model.module.one.grad, padded.chunk(2)[dist.get_rank()]
        ).item(),
    }
    model = script("zero_3").FullySharded(copy.deepcopy(alone), torch.bfloat16)
    y = model(x)
    found["low"] = y.dtype, ((y - alone(x)).norm() / alone(x).norm()).item()
    found["table"] = model.full_parameters()["table"].tolist()
    attention = script("zero_3").FullySharded(nn.MultiheadAttention(4, 1))
    with pytest.raises(RuntimeError) as caught:
        attention(*[torch.randn(2, 4)] * 3)
    found["refused"] = str(caught.value)
    # Where the shape does not matter, a shard is silently taken for the whole.
    with_norm = Divided()
    shard = script("zero_1").local_shard(with_norm.child.weight).clone()
    whole = with_norm.child.weight.detach().norm()
    model = script("zero_3").FullySharded(copy.deepcopy(with_norm))
    found["silent"] = (model(x) / with_norm(x) * shard.norm() / whole).tolist()
    return found


def test_stage_3_casts_all_that_a_module_is_given(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(call_in_other_ways)
    assert len(results) == 2
    for found in results:
        assert found["output"] and found["gradient"] < 1e-5
        dtype, far = found["low"]
        assert dtype == torch.bfloat16 and far < 0.05
        assert found["table"] == [1000, 1001, 1003]
        # Its weight belongs to a child, and is a shard there.
        assert "must be a matrix, got 1-D tensor" in found["refused"]
        torch.testing.assert_close(found["silent"], [[1.0] * 4] * 2)
    page = words_of(CHAPTER)
    assert "as `nn.MultiheadAttention` does, fails or is silently wrong" in page


# --- Memory. ----------


def bytes_of_every_stage() -> dict[int | str, dict[str, float]]:
    """Take a step in bf16 in each stage; return the bytes kept for each parameter."""
    by_hand, found = script("train_and_compare"), {}
    torch.manual_seed(0)
    prepared: Any = None
    count = 1
    for stage in STAGES:
        model = load_chapter("05_deepspeed_zero")["model"]
        config = model.GPTConfig(block_size=16, width=48, layers=1, heads=2)
        module = model.GPT(config)
        count = sum(p.numel() for p in module.parameters())
        way = getattr(script(f"zero_{stage}"), f"stage_{stage}")
        prepared = way(module, True)
        by_hand.train_batches(*prepared, [torch.randint(256, (2, 17))])
        found[stage] = by_hand.bytes_kept(prepared[0], prepared[1], count)
    for part in prepared[0].parts:  # stage 3's, as if nobody had freed the weights
        part.start_gather()
        part.finish_gather()
    found["gathered"] = by_hand.bytes_kept(prepared[0], prepared[1], count)
    # Two weights in one memory, as without master weights a shard is in its parameter.
    flat = torch.zeros(8)
    views: Any = nn.ParameterList(nn.Parameter(part) for part in flat.chunk(2))
    found["views"] = by_hand.bytes_kept(views, torch.optim.SGD(views.parameters()), 8)
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_kept_bytes_equal_the_formulas(worker_pool: WorkerPool, n: int) -> None:
    results = worker_pool.run(bytes_of_every_stage, world_size=n)
    assert len(results) == n
    for found in results:
        for stage, kinds in (
            (1, {"weights": 2, "gradients": 2, "optimizer state": 12 / n}),
            (2, {"weights": 2, "gradients": 4 / n, "optimizer state": 12 / n}),
            (3, {"weights": 4 / n, "gradients": 4 / n, "optimizer state": 8 / n}),
            (
                "gathered",
                {
                    "weights": 4 / n + 2,
                    "gradients": 4 / n,
                    "optimizer state": 8 / n,
                },
            ),
            ("views", {"weights": 4, "gradients": 0, "optimizer state": 0}),
        ):
            assert found[stage] == pytest.approx(kinds, rel=0.01), stage


# --- The scripts. ----------


def run_script(stage: int, break_it: str = "") -> tuple[int, str]:
    """Be one rank of a script, whole or broken; return its status and what it said."""
    by_hand, zero = script("train_and_compare"), script(f"zero_{stage}")
    way = getattr(zero, f"stage_{stage}")
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(in_the_pool(by_hand))
        # A check that fails leaves the group, which is the pool's.
        stack.enter_context(mock.patch.object(script("ranks"), "leave"))
        if break_it:
            stack.enter_context(mock.patch.multiple(by_hand, STEPS=2, WIDTH=8))
            BREAKS[break_it](stack, stage)
        try:
            by_hand.main(way)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


def sum_for_mean(stack: contextlib.ExitStack, stage: int) -> None:
    """Let gradients be added up and not averaged."""
    name = "all_reduce" if stage == 1 else "reduce_scatter_single"
    real = getattr(dist, name)

    def fake(*tensors: Tensor, op: Any, **settings: Any) -> Any:
        assert op == dist.ReduceOp.AVG
        return real(*tensors, op=dist.ReduceOp.SUM, **settings)

    stack.enter_context(mock.patch.object(dist, name, fake))


def gradient_of_another_rank(stack: contextlib.ExitStack, stage: int) -> None:
    """Let each rank step its shard with the gradient of its neighbour's."""
    if stage == 1:
        real_average = script("train_and_compare").average_gradients

        def average(model: nn.Module) -> None:
            real_average(model)
            for p in model.parameters():
                length = -(-p.numel() // dist.get_world_size())
                p.grad = torch.as_tensor(p.grad).flatten().roll(length).view(p.shape)

        zero_1 = script("zero_1")
        stack.enter_context(mock.patch.object(zero_1, "average_gradients", average))
        return
    real = dist.reduce_scatter_single

    def fake(mine: Tensor, large: Tensor, **settings: Any) -> Any:
        return real(mine, large.roll(len(mine)), **settings)

    stack.enter_context(mock.patch.object(dist, "reduce_scatter_single", fake))


def no_gather_after_the_step(stack: contextlib.ExitStack, stage: int) -> None:
    """Let everyone go on with the weights of before, but for their own shards."""
    if stage == 3:
        # Nothing is freed, so that the first weights stay whole for ever.
        part = script("zero_3").ShardedParameter
        stack.enter_context(mock.patch.object(part, "free", part.finish_gather))
        return
    real = script("zero_1").all_gather_shards

    def fake(tensor: Tensor, shard: Tensor) -> None:
        others = tensor.detach().clone()
        real(tensor, shard)
        values = script("zero_1").local_shard(tensor).clone()
        tensor.data.copy_(others)
        script("zero_1").local_shard(tensor).copy_(values)

    stack.enter_context(mock.patch.object(script("zero_1"), "all_gather_shards", fake))


BREAKS = {
    "sum for mean": sum_for_mean,
    "gradient of another rank": gradient_of_another_rank,
    "no gather after the step": no_gather_after_the_step,
}


def scripts_on_ranks() -> list[tuple[int, str]]:
    """Run all three scripts as they are."""
    return [run_script(stage) for stage in STAGES]


TOTALS = {1: (2, 2, 6), 2: (2, 2, 6), 3: (2, 2, 4)}


def test_scripts(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(scripts_on_ranks)
    assert [status for found in results for status, _ in found] == [0] * 6
    assert len(results[0]) == len(TOTALS) == 3
    for (_, said), kept in zip(results[0], TOTALS.values(), strict=True):
        weights, gradients, state = (f"{number:.2f}" for number in kept)
        row = f"weights {weights} | gradients {gradients} | optimizer state {state}"
        assert said.count(f"{row} | together {sum(kept):.2f}\n") == 2
        assert said.endswith(
            "check: after 5 steps 2 ranks hold one process's weights\n"
        )
    assert [said for _, said in results[1]] == [""] * 3


def broken_scripts_on_ranks() -> dict[tuple[int, str], tuple[int, str]]:
    """Run each script broken in every way."""
    return {(s, name): run_script(s, name) for s in STAGES for name in BREAKS}


def test_broken_scripts_fail(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(broken_scripts_on_ranks)
    assert len(results) == 2
    for rank, found in enumerate(results):
        assert len(found) == 9
        for case, (status, said) in found.items():
            assert status == 1, (case, said)
            if rank == 0:
                assert "check failed on ranks [" in said, case
                assert "check: " not in said, case
