"""Chapter 03, rules/: what DDP sends, when, and which rank may do what alone."""

import contextlib
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from launch import clean_environment, free_port, run
from lessons import run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import RankDied, WorkerPool

ROOM = "03_ddp_torchrun/rules"
CPU = torch.device("cpu")


def script(name: str) -> Any:
    """Import one of the room's scripts."""
    return load_chapter(ROOM)[name]


def flat(tensors: Any) -> torch.Tensor:
    """Join tensors into one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    return script("ranks").gather(value)


def count_models(model: torch.nn.Module) -> int:
    """Count the different sets of weights that the ranks hold; 1 if all agree."""
    return len(set(map(tuple, gather(flat(model.parameters()).tolist()))))


def end_of(
    name: str, faults: dict[str, Any], environment: dict[str, str]
) -> tuple[Any, str, str]:
    """Run a lesson with some of its names replaced; return its code and its output."""
    module, errors = script(name), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(contextlib.redirect_stderr(errors))
        # A failed check leaves the group, which is the pool's, and which a DDP in the
        # frames of the error would then be the last to hold.
        stack.enter_context(mock.patch.object(script("ranks"), "leave"))
        for replaced, fault in faults.items():
            if isinstance(fault, str):  # the name of another function of the lesson
                fault = getattr(module, fault)
            stack.enter_context(mock.patch.object(module, replaced, fault))
        try:
            return 0, run_lesson(ROOM, name), errors.getvalue()
        except SystemExit as end:
            return end.code, "", errors.getvalue()


# --- The lessons, whole and broken. ----------


CLAIMS = {
    "accumulation": "the last two all-reduce gradients once a step, and get those of "
    "one process",
    "uneven_inputs": "after train_together all ranks hold the weights of one process",
    "initial_weights": "loaded before wrapping, 5 steps end with the weights of one "
    "process",
    "rank_zero": "in one process the loss is 2.58, the gradient [1, 1]",
    "main_process": "is_rank_zero writes the log of one process, LOCAL_RANK one a "
    "machine",
}
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", CLAIMS)
def test_lesson_holds_on_three_ranks(worker_pool: WorkerPool, name: str) -> None:
    first, *others = worker_pool.run(end_of, name, {}, {}, world_size=3)
    assert [code for code, *_ in (first, *others)] == [0, 0, 0]
    assert first[1].splitlines()[-1] == f"check: {CLAIMS[name]}"
    assert [printed for _, printed, _ in others] == ["", ""]


def own_shard_only(ddp_model: DistributedDataParallel) -> float | None:
    """Validate as `on_all_ranks` does, and forget the all-reduce."""
    rank_zero = script("rank_zero")
    with mock.patch.object(dist, "all_reduce"):
        loss = rank_zero.validate(ddp_model.module)
    return loss if dist.get_rank() == 0 else None


def one_batch_less(batches: list[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches, one less than all ranks have."""
    return iter(batches[:2])


def a_little_too_large(ddp_model: DistributedDataParallel, batches: Any) -> None:
    """Accumulate gradients of which each is a little too large."""
    script("accumulation").accumulate_unequal(ddp_model, batches)
    (weight,) = ddp_model.parameters()
    assert weight.grad is not None
    weight.grad *= 1 + 1e-4


class WithoutNoSync(DistributedDataParallel):
    """A DDP that all-reduces in every backward pass."""

    no_sync = staticmethod(contextlib.nullcontext)  # type: ignore[assignment]


def with_gradients_left(ddp_model: DistributedDataParallel) -> float | None:
    """Validate as `on_all_ranks` does, and leave gradients to be added to."""
    rank_zero = script("rank_zero")
    ddp_model.module(rank_zero.INPUTS + 1).sum().backward()
    loss = rank_zero.validate(ddp_model.module)
    return loss if dist.get_rank() == 0 else None


def skipped_wait(*arguments: Any) -> list[str]:
    """Stand for what a lesson waits for in vain."""
    return ["", ""]


WAITS = {"uneven_inputs": "wait_in_vain"}
FAULTS = [
    ("accumulation", {"accumulate": "no_sync_too_late"}),
    ("accumulation", {"accumulate": "undivided"}),
    ("accumulation", {"accumulate_unequal": "accumulate"}),
    ("accumulation", {"accumulate": a_little_too_large}),
    ("accumulation", {"DDP": WithoutNoSync}),
    ("uneven_inputs", {"train_together": "train_joined"}),
    ("uneven_inputs", {"while_all_have": one_batch_less}),
    ("initial_weights", {"load_before_wrapping": "load_after_wrapping"}),
    ("initial_weights", {"DDP": partial(DistributedDataParallel, init_sync=False)}),
    (
        "initial_weights",
        {"DDP": partial(DistributedDataParallel, forward_sync_buffers=False)},
    ),
    ("rank_zero", {"on_all_ranks": own_shard_only}),
    ("rank_zero", {"on_all_ranks": with_gradients_left}),
    ("rank_zero", {"on_rank_zero_alone": own_shard_only}),
    ("main_process", {"is_rank_zero": "is_first_on_its_machine"}),
    ("main_process", {"is_first_on_its_machine": "is_rank_zero"}),
]


@pytest.mark.parametrize(
    ("name", "faults"),
    FAULTS,
    ids=[f"{name}-{next(iter(faults))}" for name, faults in FAULTS],
)
def test_lesson_notices_what_is_broken(
    worker_pool: WorkerPool, name: str, faults: dict[str, Any]
) -> None:
    machines = ONE_RANK_A_MACHINE if name == "main_process" else {}
    if name in WAITS:  # nothing that is looked for here is in them
        faults = {WAITS[name]: skipped_wait, **faults}
    ends = worker_pool.run(end_of, name, faults, machines)
    assert [code for code, *_ in ends] == [1, 1]
    assert ends[0][2].endswith(f"not so: {CLAIMS[name]}\n")


# --- Accumulation. ----------


def own_batches(rank: int, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw a rank's micro-batches in double precision."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (
            torch.randn(samples, 4, generator=generator, dtype=torch.float64),
            torch.randn(samples, 2, generator=generator, dtype=torch.float64),
        )
        for samples in sizes
    ]


def all_reduce_each_time(ddp_model: DistributedDataParallel, batches: Any) -> None:
    """Accumulate without no_sync."""
    for inputs, labels in batches:
        (F.mse_loss(ddp_model(inputs), labels) / len(batches)).backward()


def gradients_by(
    ways: list[str], sizes: list[list[int]]
) -> list[tuple[torch.Tensor, int]]:
    """Take a step in each way; return the gradient and the all-reduces."""
    accumulation = script("accumulation")
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    ddp_model = DistributedDataParallel(layer)
    buckets, found = script("sent_bytes").note_buckets(ddp_model), []
    batches = own_batches(dist.get_rank(), sizes[dist.get_rank()])
    for way in ways:
        buckets.clear()
        ddp_model.zero_grad()
        loop = getattr(accumulation, way, all_reduce_each_time)
        loop(ddp_model, batches)
        found.append((flat(p.grad for p in layer.parameters()), len(buckets)))
    return found


def gradient_alone(sizes: list[list[int]]) -> torch.Tensor:
    """Return the gradient of the mean loss over all samples of all ranks."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    pairs = [pair for rank, own in enumerate(sizes) for pair in own_batches(rank, own)]
    inputs, labels = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    F.mse_loss(layer(inputs), labels).backward()
    return flat(p.grad for p in layer.parameters())


def weight_after_no_sync() -> float:
    """Leave `no_sync` on in the last micro-batch of a step; return the weight."""
    layer = torch.nn.Linear(1, 1, bias=False)
    ddp_model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with ddp_model.no_sync():
        ddp_model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    return layer.weight.item()


def test_a_step_under_no_sync_alone_lets_weights_diverge(
    worker_pool: WorkerPool,
) -> None:
    one, other = worker_pool.run(weight_after_no_sync)
    assert one - other == pytest.approx(1)


WAYS = {  # how often each all-reduces, and how many times the gradient it computes
    "all_reduce_each_time": (3, 1),
    "no_sync_too_late": (3, 1),
    "undivided": (1, 3),
    "accumulate": (1, 1),
    "accumulate_unequal": (1, 1),
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_sync_saves_only_around_the_forward_pass_too(
    worker_pool: WorkerPool, world_size: int
) -> None:
    sizes = [[5, 5, 5]] * world_size
    results = worker_pool.run(gradients_by, list(WAYS), sizes, world_size=world_size)
    alone = gradient_alone(sizes)
    assert len(results) == world_size
    for by_way in results:
        assert [count for _, count in by_way] == [count for count, _ in WAYS.values()]
        times = torch.tensor([[times] for _, times in WAYS.values()])
        gradients = torch.stack([gradient for gradient, _ in by_way])
        assert (gradients - times * alone).abs().max() < 1e-12


def test_unequal_micro_batches_need_weights(worker_pool: WorkerPool) -> None:
    ways = ["accumulate_unequal", "accumulate"]
    # Unequal in length, or in number alone: one rank has four of 8, the other two.
    for sizes in [[1, 4], [6, 2]], [[8] * 4, [8] * 2]:
        results = worker_pool.run(gradients_by, ways, sizes)
        alone = gradient_alone(sizes)
        assert len(results) == 2
        for (right, count), (wrong, _) in results:
            assert count == 1
            assert (right - alone).abs().max() < 1e-12
            assert (wrong - alone).abs().max() > 0.01
    said = "Right if all ranks have equally many micro-batches, all of one size."
    assert script("accumulation").accumulate.__doc__ == said


IGNORED = "ignore_index"


def gradients_of_labels(kind: str, micro_batches: int) -> list[tuple[float, bool]]:
    """Return how far from one process's gradient each way is; is a loss NaN?

    The ways: a mean, the sum, and the mean times the number of labels that count.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    inputs, labels = torch.randn(8, 4).double(), torch.randint(3, (8,))
    more: dict[str, Any] = {"weight": torch.tensor([1.0, 4.0, 16.0]).double()}
    if kind != "weight":
        labels[: 3 if kind == IGNORED else 4], more = -100, {}
    F.cross_entropy(layer(inputs), labels, **more).backward()
    alone = flat(p.grad for p in layer.parameters()).clone()
    ddp_model = DistributedDataParallel(layer)
    own_inputs, own_labels = (x.chunk(world_size)[rank] for x in (inputs, labels))
    steps = [x.chunk(micro_batches) for x in (own_inputs, own_labels)]
    weights = more.get("weight", torch.ones(3).double())
    # Of the whole step, and of all ranks.
    total = weights[own_labels[own_labels != -100]].sum()
    dist.all_reduce(total)
    found = []
    for way in ("mean", "sum", "mean, counted"):
        layer.zero_grad()
        is_nan = False
        for i, (x, y) in enumerate(zip(*steps, strict=True), start=1):
            is_last = i == micro_batches
            with contextlib.nullcontext() if is_last else ddp_model.no_sync():
                more["reduction"] = "sum" if way == "sum" else "mean"
                loss = F.cross_entropy(ddp_model(x), y, **more)
                if way == "mean":
                    loss = loss / micro_batches
                else:
                    counted = weights[y[y != -100]].sum() if way != "sum" else 1
                    loss = loss * counted / total * world_size
                loss.backward()
                is_nan |= bool(loss.isnan())
        apart = flat(p.grad for p in layer.parameters()) - alone
        found.append(((apart.norm() / alone.norm()).item(), is_nan))
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", [IGNORED, "weight", "none on rank 0"])
def test_a_mean_over_labels_needs_their_number(
    worker_pool: WorkerPool, kind: str, micro_batches: int
) -> None:
    ends = worker_pool.run(gradients_of_labels, kind, micro_batches)
    assert len(ends) == 2
    for rank, ((mean, _), summed, counted) in enumerate(ends):
        assert mean > 0.05 and summed[0] < 1e-12 and not summed[1]
        # Its gradient is right all the same.
        no_label = kind == "none on rank 0" or (kind, micro_batches) == (IGNORED, 2)
        assert counted[0] < 1e-12 and counted[1] == (no_label and rank == 0)


def bytes_of_an_all_reduce(numbers: int) -> float | None:
    """Count what a rank sends for one all-reduce of float32 numbers."""
    tensor = torch.ones(numbers)
    return script("sent_bytes").sent_by_a_rank(partial(dist.all_reduce, tensor))


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_sent_are_those_of_a_ring(
    worker_pool: WorkerPool, world_size: int
) -> None:
    arguments = (bytes_of_an_all_reduce, 250_000)
    results = worker_pool.run(*arguments, world_size=world_size)
    # An all-reduce sends each number on 2 (n - 1) times, in n-th parts.
    expected = 1e6 * 2 * (world_size - 1) / world_size
    assert results == pytest.approx([expected] * world_size, rel=0.02)


# `struct tcp_info` of Linux (include/uapi/linux/tcp.h): 8 bytes, 24 numbers of 4 bytes,
# two rates, bytes acknowledged and received, and so on, in the order of the file.
TCP_INFO = struct.Struct("=8x 24I 2Q QQ 6I 4Q 2I QQ")


class Connection(socket.socket):
    """A TCP connection of which Linux tells what is written here."""

    def getsockopt(self, *_: Any) -> bytes:  # type: ignore[override]
        """Say that 1,000 bytes were received, and 5,000 sent, 300 of them again."""
        received, sent, again = 1_000, 5_000, 300
        return TCP_INFO.pack(*[7] * 27, received, *[7] * 12, sent, again)


@pytest.mark.parametrize(
    ("room", "name", "function", "expected"),
    [
        (ROOM, "sent_bytes", "sent_by", 4_700),
        ("05_deepspeed_zero/communication", "traffic", "sent_by", 4_700),
        ("04_rpc_parameter_server/lookup_cost", "wire", "tcp_bytes", 4_700 + 1_000),
    ],
)
def test_what_tcp_has_sent_again_counts_once(
    room: str, name: str, function: str, expected: int
) -> None:
    count = getattr(load_chapter(room)[name], function)
    with socket.socket() as one, mock.patch.object(socket, "socket", Connection):
        assert count(one.fileno()) == expected


# --- Uneven inputs. ----------


def gradients_in_join(divide_by_initial: bool, with_hook: bool) -> list[float]:
    """Train on 2 batches of ones on rank 0, and 3 of twos on rank 1."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    if with_hook:
        ddp_model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    gradients = []
    with ddp_model.join(divide_by_initial_world_size=divide_by_initial):
        for _ in range(2 + dist.get_rank()):
            ddp_model.zero_grad()
            ddp_model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
            gradients += flat(p.grad for p in ddp_model.parameters()).tolist()
    return gradients


@pytest.mark.parametrize(
    ("divide_by_initial", "with_hook", "last"),
    # A hook divides by what it likes: join does not reach into it.
    [(True, False, 1.0), (False, False, 2.0), (True, True, 1.0), (False, True, 1.0)],
)
def test_join_divides_by_all_ranks_or_by_those_still_there(
    worker_pool: WorkerPool, divide_by_initial: bool, with_hook: bool, last: float
) -> None:
    results = worker_pool.run(gradients_in_join, divide_by_initial, with_hook)
    assert results == [[1.5, 1.5], [1.5, 1.5, last]]


def losses_in_join(by_all: bool) -> list[float]:
    """Train on 2 batches on rank 0, and 3 on rank 1; all-reduce the losses or not."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1))
    losses = []
    with ddp_model.join():
        for _ in range(2 + dist.get_rank()):
            loss = ddp_model(torch.ones(1, 1)).square().mean()
            loss.backward()
            if by_all:
                dist.all_reduce(loss := loss.detach())
            losses.append(loss.item())
    return losses


def test_join_allows_no_collective_but_those_of_ddp(worker_pool: WorkerPool) -> None:
    assert [len(own) for own in worker_pool.run(losses_in_join, False)] == [2, 3]
    # Rank 0 has left the loop, and takes rank 1's sum for one of DDP's.
    with pytest.raises(RankDied, match="died of signal SIGABRT"):
        worker_pool.run(losses_in_join, True)
    assert "where only DDP may communicate" in words_of(ROOM)


def steps_alone(divide_by_initial: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Take all ranks' steps in one process; return mean gradients and the weights."""
    uneven, ranks = script("uneven_inputs"), range(dist.get_world_size())
    model, gradients = uneven.linear_model()[0], []
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(3 + 2 * max(ranks)):
        batches = [uneven.batches_of(rank) for rank in ranks]
        found = [own[step] for own in batches if step < len(own)]
        inputs, labels = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        gradients.append(flat(p.grad for p in model.parameters()))
        # As if the missing batches were there, without a loss.
        share = len(found) / len(ranks) if divide_by_initial else 1
        optimizer.param_groups[0]["lr"] = 0.05 * share
        optimizer.step()
    return gradients, flat(model.parameters())


def join_against_one_process(
    divide_by_initial: bool, divide_alone: bool
) -> tuple[list[float], float, float]:
    """Train in join; return the gradients' shares, the largest error, the weights'.

    A share is that of the mean over the samples of the step. `divide_alone` is the
    divisor of the one process.
    """
    uneven, rank = script("uneven_inputs"), dist.get_rank()
    ddp_model = DistributedDataParallel(uneven.linear_model()[0])
    optimizer = SGD(ddp_model.parameters(), lr=0.05)
    means, weights = steps_alone(divide_alone)
    shares, errors = [], []
    with ddp_model.join(divide_by_initial_world_size=divide_by_initial):
        for step, batch in enumerate(uneven.batches_of(rank)):
            uneven.train_batches(ddp_model, optimizer, [batch])
            gradient = flat(p.grad for p in ddp_model.parameters())
            mean = means[step]
            shares.append(((gradient @ mean) / (mean @ mean)).item())
            errors.append((gradient - shares[-1] * mean).abs().max().item())
    apart = (flat(ddp_model.parameters()) - weights).abs().max().item()
    return shares, max(errors), apart


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("divide_by_initial", [True, False])
def test_join_equals_one_process_that_divides_alike(
    worker_pool: WorkerPool, world_size: int, divide_by_initial: bool
) -> None:
    arguments = (join_against_one_process, divide_by_initial, divide_by_initial)
    results = worker_pool.run(*arguments, world_size=world_size)
    assert len(results) == world_size
    for rank, (shares, error, apart) in enumerate(results):
        active = [
            sum(step < 3 + 2 * other for other in range(world_size))
            for step in range(3 + 2 * rank)
        ]
        expected = [n / world_size if divide_by_initial else 1 for n in active]
        assert shares == pytest.approx(expected, rel=1e-5)
        assert error < 1e-5
        assert apart < 1e-5


def test_one_process_that_divides_otherwise_ends_elsewhere(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(join_against_one_process, True, False)
    assert len(results) == 2
    assert all(apart > 1e-3 for *_, apart in results)


def models_after_an_epoch(
    loop: str, momentum: float, is_scheduled: bool = False
) -> tuple[int, int]:
    """Count the models after an epoch of uneven length, and one step later."""
    uneven = script("uneven_inputs")
    ddp_model = DistributedDataParallel(uneven.linear_model()[0])
    optimizer = SGD(ddp_model.parameters(), lr=0.05, momentum=momentum)
    if is_scheduled:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    batches = uneven.batches_of(dist.get_rank())
    getattr(uneven, loop)(ddp_model, optimizer, batches)
    before = count_models(ddp_model)
    uneven.train_batches(ddp_model, optimizer, batches[:1])
    return before, count_models(ddp_model)


def models_after_epochs() -> list[tuple[int, int]]:
    """Count models for join plain, with momentum, a schedule; for stopping together."""
    joined = [(0.0, False), (0.9, False), (0.0, True)]
    cases = [("train_joined", *more) for more in joined]
    cases.append(("train_together", 0.9, True))
    return [models_after_an_epoch(*case) for case in cases]


@pytest.mark.parametrize("world_size", [2, 3])
def test_join_equals_one_process_but_not_the_optimizers(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(models_after_epochs, world_size=world_size)
    apart = (1, world_size)
    assert results == [[(1, 1), apart, apart, (1, 1)]] * world_size


def errors_at_the_end() -> tuple[int, list[str], int, list[str]]:
    """Train without join, and with a join that raises; return steps and errors."""
    uneven = script("uneven_inputs")
    batches = uneven.batches_of(dist.get_rank())
    hang = uneven.wait_in_vain(rest := iter(batches))
    begun = len(batches) - len(list(rest))
    model, optimizer = uneven.linear_model()
    ddp_model, steps, text = DistributedDataParallel(model), 0, ""
    try:
        with ddp_model.join(throw_on_early_termination=True):
            for batch in batches:
                uneven.train_batches(ddp_model, optimizer, [batch])
                steps += 1
    except RuntimeError as error:
        text = str(error)
    return begun, hang, steps, gather(text)


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_with_more_batches_waits_or_is_told(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(errors_at_the_end, world_size=world_size)
    assert len(results) == world_size
    for rank, (begun, hang, steps, thrown) in enumerate(results):
        assert begun == (4 if rank else 3)  # the fourth step has no partner
        assert hang[0] == ""
        # Which of the ranks gives up first, and in what, is not fixed.
        lost = ("imed out", "losed", "closure", "reset")
        assert [any(word in text for word in lost) for text in hang[1:]] == [True] * (
            world_size - 1
        )
        assert steps == 3
        assert "Rank 0 exhausted all inputs." in thrown[0]
        assert len(thrown) == world_size
        assert all("Throwing across all ranks." in text for text in thrown[1:])


# --- Initial weights and buffers. ----------


class TwoLayers(torch.nn.Module):
    """Two layers with other weights on each rank, and a buffer that holds the rank."""

    origin: torch.Tensor

    def __init__(self) -> None:
        """Draw weights from torch's global generator, seeded by the rank."""
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.register_buffer("origin", torch.tensor(float(dist.get_rank())))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, 4) to (samples, 1)."""
        return self.last(self.first(inputs))


def take_steps(model: torch.nn.Module, optimizer: SGD, steps: int) -> None:
    """Train on numbers that only this rank has."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def replace_last(model: TwoLayers) -> None:
    """Replace a layer by a new one, the same on all ranks."""
    torch.manual_seed(0)
    model.last = torch.nn.Linear(4, 1)


def models_of_each_case() -> dict[str, int]:
    """Count the models that the ranks hold, in each case."""
    models = {"unwrapped": count_models(TwoLayers())}
    ddp_model = DistributedDataParallel(TwoLayers())
    models["wrapped"] = count_models(ddp_model)
    with torch.no_grad():
        ddp_model.module.last.bias += float(dist.get_rank() > 0)
    take_steps(ddp_model, SGD(ddp_model.parameters(), 0.05, 0.9), steps=5)
    models["changed by hand"] = count_models(ddp_model)
    ddp_model = DistributedDataParallel(TwoLayers(), init_sync=False)
    take_steps(ddp_model, SGD(ddp_model.parameters(), 0.05, 0.9), steps=5)
    models["init_sync=False"] = count_models(ddp_model)
    # DDP keeps to the tensors of the old layer.
    ddp_model = DistributedDataParallel(TwoLayers(), find_unused_parameters=True)
    replace_last(ddp_model.module)
    take_steps(ddp_model, SGD(ddp_model.parameters(), 0.05, 0.9), steps=1)
    models["layer replaced"] = count_models(ddp_model)
    ddp_model = DistributedDataParallel(TwoLayers())
    optimizer = SGD(ddp_model.parameters(), 0.05, 0.9)
    for weight in ddp_model.parameters():
        momentum = torch.full_like(weight, dist.get_rank())
        optimizer.state[weight]["momentum_buffer"] = momentum
    take_steps(ddp_model, optimizer, steps=1)
    models["other momentum"] = count_models(ddp_model)
    return models


def origins_after_forward() -> dict[str, float]:
    """Put the rank into the buffer before each forward pass; what is it afterwards?"""
    ddp_model = DistributedDataParallel(TwoLayers())
    origins = {}

    def forward(title: str, model: torch.nn.Module = ddp_model) -> None:
        ddp_model.module.origin.fill_(dist.get_rank())
        output = model(torch.ones(2, 4))
        if output.requires_grad:
            output.sum().backward()
        origins[title] = ddp_model.module.origin.item()

    forward("training")
    ddp_model.eval()
    forward("eval")
    with torch.no_grad():
        forward("no_grad, first")
        forward("no_grad, second")
    ddp_model.train()
    forward("training, first after no_grad")
    with torch.inference_mode():
        forward("inference_mode, first")
    forward("training, first after inference_mode")
    with ddp_model.no_sync():
        forward("no_sync, first")
        forward("no_sync, second")
    forward("ddp_model.module", ddp_model.module)
    unsynced = DistributedDataParallel(ddp_model.module, forward_sync_buffers=False)
    forward("forward_sync_buffers=False", unsynced)
    ddp_model = DistributedDataParallel(TwoLayers())
    with ddp_model.join():
        forward("join", ddp_model)
    return origins


def initial_results() -> tuple[dict[str, int], dict[str, float]]:
    """Run all cases."""
    return models_of_each_case(), origins_after_forward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_copied_once_and_buffers_often(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(initial_results, world_size=world_size)
    assert len(results) == world_size
    for rank, (models, origins) in enumerate(results):
        assert models == {
            "unwrapped": world_size,
            "wrapped": 1,
            "changed by hand": 2,
            "init_sync=False": world_size,
            "layer replaced": world_size,
            "other momentum": world_size,
        }
        # In `join` they come from the highest rank that still trains.
        assert origins.pop("join") == world_size - 1
        # A forward pass whose gradients will not be all-reduced still copies buffers,
        # but makes the next one leave them alone.
        assert {name: origin == 0 for name, origin in origins.items()} == {
            "training": True,
            "eval": True,
            "no_grad, first": True,
            "no_grad, second": rank == 0,
            "training, first after no_grad": rank == 0,
            "inference_mode, first": True,
            "training, first after inference_mode": rank == 0,
            "no_sync, first": True,
            "no_sync, second": rank == 0,
            "ddp_model.module": rank == 0,
            "forward_sync_buffers=False": rank == 0,
        }
    said = "After a pass under `no_grad()`, `inference_mode()` or `no_sync()`, the next"
    assert f"{said} skips the copy." in words_of(ROOM)


def optimizers_before_and_after() -> tuple[bool, bool, list[bool]]:
    """Build the optimizer before and after wrapping, and before a layer is replaced.

    Returns:
        Whether tensors and weights are the same, and which layers learn.
    """
    weights, same_tensors = [], True
    for is_before in (True, False):
        model = TwoLayers()
        early = SGD(model.parameters(), 0.05, 0.9)
        ddp_model = DistributedDataParallel(model)
        optimizer = early if is_before else SGD(ddp_model.parameters(), 0.05, 0.9)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = zip(held, ddp_model.parameters(), strict=True)
        same_tensors &= all(ours is its for ours, its in pairs)
        take_steps(ddp_model, optimizer, steps=5)
        weights.append(flat(ddp_model.parameters()).tolist())
    model = TwoLayers()
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    replace_last(model)
    layers = [model.first, model.last]
    ddp_model = DistributedDataParallel(model)
    before = [layer.weight.clone() for layer in layers]
    take_steps(ddp_model, optimizer, steps=5)
    pairs = zip(layers, before, strict=True)
    learns = [not torch.equal(layer.weight, old) for layer, old in pairs]
    return same_tensors, weights[0] == weights[1], learns


def test_optimizer_may_be_built_before_wrapping(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(optimizers_before_and_after)
    assert results == [(True, True, [True, False])] * 2


def layer_changed_too_late(change: str, **settings: Any) -> tuple[list[float], str]:
    """Change a wrapped model; return its gradients and the second pass's error."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    ddp_model = DistributedDataParallel(torch.nn.Sequential(*layers), **settings)
    if change == "replace":
        ddp_model.module[1] = torch.nn.Linear(2, 1)
    else:
        layers[0].requires_grad_(False)
    inputs = torch.full((1, 2), dist.get_rank() + 1.0)
    ddp_model(inputs).sum().backward()
    gradient = flat(p.grad for p in ddp_model.module[1].parameters()).tolist()
    try:
        ddp_model(inputs)
    except RuntimeError as error:
        return gradient, str(error)
    return gradient, ""


@pytest.mark.parametrize("change", ["replace", "freeze"])
def test_layer_changed_after_wrapping_is_an_error_in_the_second_pass(
    worker_pool: WorkerPool, change: str
) -> None:
    results = worker_pool.run(layer_changed_too_late, change)
    assert results[0][0] != results[1][0]
    assert len(results) == 2
    for _, text in results:
        assert "Expected to have finished reduction in the prior iteration" in text
    # Of a new layer nothing is said where the old one may be unused.
    replaced = partial(layer_changed_too_late, "replace", find_unused_parameters=True)
    (first, *_), (second, *_) = said = worker_pool.run(replaced)
    assert first != second and [text for _, text in said] == ["", ""]
    said = "Load weights, freeze, unfreeze and replace layers before wrapping"
    assert said in words_of(ROOM)


def buffers_after_wrapping() -> list[tuple[float, str]]:
    """Wrap with each setting off; return the rank's buffer and the warnings."""
    found = []
    for setting in ("broadcast_buffers", "forward_sync_buffers"):
        settings: dict[str, Any] = {setting: False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp_model = DistributedDataParallel(TwoLayers(), **settings)
        text = " ".join(str(one.message) for one in caught)
        found.append((ddp_model.module.origin.item(), text))
    return found


def test_broadcast_buffers_is_deprecated_and_not_the_same(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(buffers_after_wrapping)
    assert [[origin for origin, _ in both] for both in results] == [[0, 0], [1, 0]]
    for (_, old), (_, new) in results:
        assert "`broadcast_buffers` is deprecated" in old
        assert "deprecated" not in new


# --- Rank zero. ----------


class Norm(torch.nn.Linear):
    """A layer with two weights and a buffer, as batch norm has it."""

    def __init__(self) -> None:
        """Add the buffer."""
        super().__init__(1, 1)
        self.register_buffer("mean", torch.zeros(1))


def error_on_rank_zero(
    call: Callable[[DistributedDataParallel, dist.ProcessGroup], object],
) -> str:
    """Let rank zero alone make a call; return its error, the same text on all ranks."""
    group: Any = dist.new_group()  # its connections may break
    ddp_model, text = DistributedDataParallel(Norm(), process_group=group), ""
    dist.barrier()
    # Not before: a rank that is only slow shall have its time to come here.
    group.set_timeout(timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        try:
            call(ddp_model, group)
        except RuntimeError as error:
            text = str(error)
    return gather(text)[0]


ALONE: dict[str, Any] = {
    "all_reduce": lambda ddp, group: dist.all_reduce(torch.ones(2), group=group),
    "ddp_model": lambda ddp, group: ddp(torch.ones(1, 1)),
    "ddp_model.module": lambda ddp, group: ddp.module(torch.ones(1, 1)),
}


def alone_results() -> dict[str, str]:
    """Let rank zero alone make each of the calls."""
    return {name: error_on_rank_zero(call) for name, call in ALONE.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_zero_alone_waits_for_the_others_unless_nothing_is_sent(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(alone_results, world_size=world_size)
    assert len(results) == world_size
    for texts in results:
        assert list(texts) == list(ALONE)
        for name in ("all_reduce", "ddp_model"):
            assert "imed out" in texts[name] or "timeout" in texts[name]
        assert texts["ddp_model.module"] == ""


def gradients_of_an_unfrozen_layer(is_wrapped_first: bool) -> list[float]:
    """Unfreeze the first of two weights of 1; return their gradients on this rank."""
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    layers[0].requires_grad_(False)
    if not is_wrapped_first:
        layers[0].requires_grad_(True)
    ddp_model = DistributedDataParallel(model)
    layers[0].requires_grad_(True)
    ddp_model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient.item() for gradient in gradients if gradient is not None]


def test_a_layer_unfrozen_after_wrapping_keeps_its_own_gradients(
    worker_pool: WorkerPool,
) -> None:
    run = worker_pool.run
    found = [run(gradients_of_an_unfrozen_layer, wrapped) for wrapped in (True, False)]
    assert found == [[[1.0, 1.5], [2.0, 1.5]], [[1.5, 1.5], [1.5, 1.5]]]


def gradients_of_backwards(times: int) -> list[float]:
    """Call backward so often after one forward pass; return a gradient of two steps."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    ddp_model, gradients = DistributedDataParallel(layer), []
    for _ in range(2):
        ddp_model.zero_grad()
        loss = ddp_model(torch.full((1, 1), 1.0 + dist.get_rank())).sum()
        for _ in range(times):
            loss.backward(retain_graph=True)
        gradients.append(layer.weight.grad.item())  # type: ignore
    return gradients


def test_a_second_backward_after_one_forward_adds_a_local_gradient(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(gradients_of_backwards, 1) == [[1.5, 1.5]] * 2
    assert worker_pool.run(gradients_of_backwards, 2) == [[2.5, 2.5], [3.5, 3.5]]


def crossing_results() -> tuple[Any, list[float]]:
    """Cross a validation with a training step; then validate in both right ways."""
    rank_zero, is_rank_zero = script("rank_zero"), dist.get_rank() == 0
    ddp_model = rank_zero.two_weights()
    cross = rank_zero.on_rank_zero if is_rank_zero else rank_zero.gradient_of_a_step
    crossed, by_all = cross(ddp_model), rank_zero.validate(ddp_model.module)
    return crossed, [by_all, gather(rank_zero.on_rank_zero_alone(ddp_model))[0]]


def test_validation_on_rank_zero_mixes_with_gradients(
    worker_pool: WorkerPool,
) -> None:
    (loss, first), (gradient, second) = worker_pool.run(crossing_results)
    # Rank 0 adds its loss summed over 6 samples, and their number; rank 1 half of 1, 1.
    inputs = torch.linspace(-1, 1, 12)
    squares = (inputs - (3 * inputs + 1)).square()
    total = squares[::2].sum().item()
    assert gradient == pytest.approx([total + 0.5, 6.5], abs=0.01)
    assert loss == pytest.approx((total + 0.5) / 6.5)
    assert first == second == pytest.approx([squares.mean().item()] * 2, rel=1e-6)


def validated(way: str) -> tuple[float, float, bool, bool]:
    """Validate a model with BatchNorm, frozen too, and Dropout between two steps.

    Returns the loss, and what it is in eval(); then whether the running statistics are
    untouched, and whether what did not train does not, and the rest does.
    """
    rank_zero = script("rank_zero")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)]
    layers += [torch.nn.BatchNorm1d(4).eval(), torch.nn.Linear(4, 1)]
    model: Any = torch.nn.Sequential(*layers)
    ddp_model = DistributedDataParallel(model)
    ddp_model(rank_zero.INPUTS).sum().backward()
    before = model[1].running_mean.clone()
    loss = gather(getattr(rank_zero, way)(ddp_model))[0]
    is_kept = torch.equal(model[1].running_mean, before)
    frozen = [module for module in ddp_model.modules() if not module.training]
    trains = frozen == [model[3]]
    with torch.no_grad():
        due = F.mse_loss(model.eval()(rank_zero.INPUTS), rank_zero.LABELS).item()
    return loss, due, is_kept, trains


@pytest.mark.parametrize("way", ["on_all_ranks", "on_rank_zero_alone"])
def test_validation_drops_nothing_out_and_adds_to_no_statistics(
    worker_pool: WorkerPool, way: str
) -> None:
    results = worker_pool.run(validated, way)
    assert len(results) == 2
    for loss, due, is_kept, trains in results:
        assert loss == pytest.approx(due, rel=1e-5) and is_kept and trains
    said = "All ranks validate, in `eval()`, and one prints."
    assert said in words_of(ROOM)


def test_ddp_dies_at_the_debug_level_detail_on_gloo() -> None:
    # As long as this holds, readers are sent to monitored_barrier.
    program = (
        "import torch.distributed as dist, torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "print('joined', flush=True)\n"
        "DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "print('wrapped', flush=True)\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    port = {"MASTER_PORT": str(free_port())}
    environment = clean_environment(TORCH_DISTRIBUTED_DEBUG="DETAIL", **place, **port)
    result = run([sys.executable, "-c", program], env=environment)
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout.splitlines() == ["joined"]


# --- The main process. ----------


def test_each_machine_has_a_local_rank_zero(
    worker_pool: WorkerPool,
) -> None:
    arguments = (end_of, "main_process", {}, ONE_RANK_A_MACHINE)
    (code, printed, _), *others = worker_pool.run(*arguments, world_size=3)
    assert [code, *(one for one, *_ in others)] == [0, 0, 0]
    assert printed.splitlines()[:3] == [
        "rank 0, LOCAL_RANK 0  rank 1, LOCAL_RANK 0  rank 2, LOCAL_RANK 0",
        "is_first_on_its_machine | lines in the log: 3",
        "is_rank_zero            | lines in the log: 1",
    ]


def prepared(folder: str) -> tuple[int, bool]:
    """Prepare a slow disk, then once more; return how often, and if it was there."""
    own_disk, mkdir, made = Path(folder, "disk"), Path.mkdir, []

    def make_late(path: Path, **words: Any) -> None:
        time.sleep(0.5)
        made.append(path)
        mkdir(path, **words)

    with mock.patch.object(Path, "mkdir", make_late):
        script("main_process").prepare_once(own_disk)
        is_there = own_disk.is_dir()
        script("main_process").prepare_once(own_disk)
    return len(made), is_there


def test_what_a_machine_needs_is_prepared_once_before_all_go_on(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    found = worker_pool.run(prepared, str(tmp_path), world_size=3)
    assert found == [(2, True), (0, True), (0, True)]


@pytest.mark.slow
def test_two_agents_on_one_machine_have_two_local_ranks_zero(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    told = "{os.environ['RANK']} {os.environ['LOCAL_RANK']}"
    script.write_text(f'import os\nos.write(1, f"told {told}\\n".encode())\n')
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    agent += ["--nproc-per-node=2", "--master-addr=127.0.0.1"]
    agent += [f"--master-port={free_port()}"]
    agents = [
        subprocess.Popen(
            [*agent, f"--node-rank={i}", script],
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )
        for i in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in agents]
    finally:
        for process in agents:
            process.kill()
            process.wait()
    told_by_agent = [sorted(lines.splitlines()) for lines in printed]
    assert told_by_agent == [["told 0 0", "told 1 1"], ["told 2 0", "told 3 1"]]


def read_what_a_slow_rank_writes(folder: str, with_barrier: bool) -> str:
    """Write the log on a rank 0 whose disk is slow; return what this rank reads."""
    lesson, write = script("main_process"), Path.open

    def open_late(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        time.sleep(0.5 if mode == "a" else 0)
        return write(path, mode, *rest, **named)

    barrier = dist.barrier if with_barrier else lambda: None
    with (
        mock.patch.object(Path, "open", open_late),
        mock.patch.object(dist, "barrier", barrier),
    ):
        try:
            return lesson.write_log(Path(folder), lesson.is_rank_zero)
        except FileNotFoundError:
            return "not there"


def test_barrier_stands_between_writing_and_reading(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    line = "step 1 | loss 0.5\n"
    for with_barrier, others in ((True, line), (False, "not there")):
        folder = tmp_path / str(with_barrier)
        folder.mkdir()
        arguments = (read_what_a_slow_rank_writes, str(folder), with_barrier)
        texts = worker_pool.run(*arguments, world_size=3)
        assert texts == [line, others, others]


def write_the_same_checkpoint(folder: str) -> str:
    """Be one of two ranks that each hold themselves for the main process."""
    checkpoint = load_chapter("03_ddp_torchrun")["checkpoint"]
    path, replace = Path(folder, "run.pt"), os.replace

    def replace_in_turn(*names: Any) -> None:
        dist.barrier()  # both have written
        if dist.get_rank() == 1:
            dist.barrier()  # rank 0 has renamed
        replace(*names)
        if dist.get_rank() == 0:
            dist.barrier()

    with mock.patch.object(os, "replace", replace_in_turn):
        try:
            checkpoint.write_whole(path, {"rank": dist.get_rank()})
        except FileNotFoundError as error:
            return f"{type(error).__name__}: {Path(error.filename).name}"
    return ""


def test_second_writer_of_a_checkpoint_finds_its_file_renamed(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(write_the_same_checkpoint, str(tmp_path))
    assert ends == ["", "FileNotFoundError: run.pt.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    # Two that make its folder, or delete it.
    with pytest.raises(FileExistsError):
        os.makedirs(tmp_path)
    os.makedirs(tmp_path, exist_ok=True)
    os.remove(tmp_path / "run.pt")
    with pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "run.pt")
    with pytest.raises(RuntimeError, match=r"^Parent directory .* does not exist"):
        torch.save({}, tmp_path / "none" / "run.pt")


# --- What a user can type. ----------


@pytest.mark.parametrize(
    ("name", "ranks", "words", "said"),
    [
        ("rank_zero", "", [], "start it with torchrun --nproc-per-node=2 "),
        ("accumulation", "1", [], "not with 1 rank(s); start it with torchrun "),
        ("uneven_inputs", "2", ["--no-such=1"], "unrecognized arguments: --no-such=1"),
    ],
)
def test_mistake_gets_one_line(
    name: str,
    ranks: str,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, ours = script(name), script("ranks")
    monkeypatch.setattr(ours, "has_options", False)  # as in a process that has begun
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    for variable, value in zip(ours.ENVIRONMENT, ("0", ranks) * 2, strict=True):
        monkeypatch.delenv(variable, raising=False)
        if ranks:
            monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        module.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"{name}.py: {said}")
