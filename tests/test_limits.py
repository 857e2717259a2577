"""A lesson's check accepts what is just inside its limit, and not what is just outside.

Rounding stays far below these limits and the mistakes that other tests make far above,
so neither would tell that a limit was loosened. Here the lesson's own judgement gets
numbers that are 0.9 and 1.1 of the limit, and on one rank a NaN, which Python's max()
would drop; what takes time before it is faked.
"""

import contextlib
import copy
import io
import itertools
import json
import math
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons import in_the_pool
from scripts import load_chapter
from tiny_gpt import write_text
from worker_pool import WorkerPool

# By place and limit: a function that judges `off` times what the limit allows, and how
# many ranks it takes. It gets the lesson's module and returns whether that accepts.
Judge = Callable[[Any, float], bool]
CASES: dict[str, dict[str, tuple[Judge, int]]] = {}
# Counts and times, and what has been made infinite before it gets here. Of a validation
# on rank 0 alone, only that rank's loss is looked at.
NEVER_NAN = {
    *(f"03/cluster/laboratory {name}" for name in ("lost", "few bytes")),
    "03/data_loading/shared_memory held",
    "03/debugging/slow and computes less",
    "03/mixed_precision/autocast bf16 does not",
    "03/rules/rank_zero loss",
    "04/asynchronous some row is stale",
    "04/asynchronous unless nobody is late",
    *(
        f"04/lookup_cost/lookup_cost {name}"
        for name in ("weights", "rough", "no bytes")
    ),
    "04/lookup_cost/steps_per_second weights",
    *(f"05/communication/communication_volume {name}" for name in ("TCP", "less TCP")),
    *(
        f"05/memory/counted_step {name}"
        for name in ("kept", "other", "process", "slack", "lower peak", "peak")
    ),
    "05/memory/counted_step peak of the others",
    "05/offload/offload memory is freed",
    *(f"08/bubble/bubble {name}" for name in ("order", "time")),
}
CPU = torch.device("cpu")
FOLDERS = {"02": "02_ddp_mp", "03": "03_ddp_torchrun", "04": "04_rpc_parameter_server"}
FOLDERS |= {"05": "05_deepspeed_zero", "07": "07_tensor_parallel"}
FOLDERS |= {"08": "08_pipeline_parallel"}


def limit(place: str, *names: str, ranks: int = 2) -> Callable[[Callable], Callable]:
    """Register the limits of a lesson, "03/rules/sampler"; the judge is told which."""

    def register(judge: Callable[[Any, str, float], bool]) -> Callable:
        for name in names:

            def of_name(lesson: Any, off: float, name: str = name) -> bool:
                return judge(lesson, name, off)

            CASES.setdefault(place, {})[name] = (of_name, ranks)
        return judge

    return register


def accepts(
    lesson: Any, *words: str, run: Callable[[], object] | None = None, **fakes: Any
) -> bool:
    """Run a lesson with fakes in it; return whether it finds nothing wrong."""
    found: list[bool] = []
    place = lesson if hasattr(lesson, "check") else getattr(lesson, "ranks", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_the_pool(lesson, *words))
        if place:  # another lesson ends by itself
            check = mock.Mock(side_effect=lambda right, _: found.append(bool(right)))
            stack.enter_context(mock.patch.object(place, "check", check))
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(lesson, name, fake))
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        try:
            (run or lesson.main)()
        except (SystemExit, RuntimeError):
            return False
    assert found or not place, "nothing was checked"
    return all(found)


def sequence(*values: Any) -> mock.Mock:
    """Return one value after the other, whatever the arguments are."""
    return mock.Mock(side_effect=values)


def always(value: Any) -> Callable[..., Any]:
    """Return the same value, whatever the arguments are."""
    return lambda *_, **__: value


def one(value: float = 1.0) -> Tensor:
    """Return a number as a vector in float64, in which it is not rounded."""
    return torch.tensor([value], dtype=torch.float64)


# --- 02. ----------


@limit("02/naive", "weights")
def _(lesson: Any, _: str, off: float) -> bool:
    return accepts(lesson, train=sequence(one(0), one(), one(1e-11 * off)))


@limit("02/train", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    options = Namespace(max_epochs=0, batch_size=32, lr=1e-3)
    return accepts(
        lesson,
        run=lambda: lesson.train_on_shard(CPU, options),
        gradient_error=always(1e-5 * off),
    )


@limit("02/timeline/ways", "gradients", "without synchronisation", ranks=1)
def _(lesson: Any, name: str, off: float) -> bool:
    way, error = "flat", 1e-5 * off
    if name == "without synchronisation":  # which is not to be right
        way, error = "no synchronisation", 1e-5 / off
    faults = lesson.find_faults(way, [0.0, error], [1.0], [])
    return not any(fault.startswith(f"{way}: gradients") for fault in faults)


# --- 03. ----------


@limit("03/debugging/slow", "loads longer", "fast rank waits", "and computes less")
def _(lesson: Any, name: str, off: float) -> bool:
    fast = {"step": 30.0, "load": 1.0, "compute": 1.0, "wait": 20.0}
    slow = {"step": 30.0, "load": 21.0, "compute": 1.0, "wait": 1.0}
    if name == "loads longer":
        slow["load"] = 1.0 + 10.0 / off
    elif name == "fast rank waits":
        slow["wait"] = 10.0 * off
    else:
        fast["compute"] = 20.0 * off
    timed = [fast, slow][dist.get_rank()]
    traced = {part: 0.0 for part in lesson.TRACED}
    with tempfile.TemporaryDirectory() as folder:
        fakes = {"timed_steps": always((timed, traced))}
        return accepts(lesson, Path=always(Path(folder)), **fakes)


@limit("03/mixed_precision/autocast", "float32", "autocast", "bf16 model")
def _(lesson: Any, name: str, off: float) -> bool:
    allowed = {"float32": 1e-6, "autocast": 1e-6, "bf16 model": 2**-7}
    alone = [one(1 + off * allowed[way] * (way == name)) for way in lesson.WAYS]
    return accepts(
        lesson,
        BLOCK_SIZE=8,
        by_one_process=sequence(one(), *alone),
        gradients_of=always(one()),
        moved_by_a_step=sequence(1.0, 1.0, 0.5),
    )


@limit("03/mixed_precision/autocast", "float32 moves", "bf16 does not")
def _(lesson: Any, name: str, off: float) -> bool:
    moved = [1 - 0.01 * off, 1.0, 0.5]
    if name == "bf16 does not":
        moved = [1.0, 1.0, 1 - 0.01 / off]
    return accepts(
        lesson,
        BLOCK_SIZE=8,
        by_one_process=always(one()),
        gradients_of=always(one()),
        moved_by_a_step=sequence(*moved),
    )


@limit("03/mixed_precision/grad_scaler", "gradient", "fp16 is off", "bf16 is not")
@limit("03/mixed_precision/grad_scaler", "norm", "norm clipped too early")
def _(lesson: Any, name: str, off: float) -> bool:
    scale, ours = lesson.SCALE, [1.5, 1.0, 1.0]
    if name == "fp16 is off":
        ours[0] = 1 + 0.1 / off
    elif name == "bf16 is not":
        ours[2] = 1 + 0.1 * off
    alone = list(map(one, ours))
    if name == "gradient":
        alone[1] += 1e-6 * off
    norms = [1e-3, 1e-3 / scale, 1.0, 1.0]
    if name == "norm":
        norms[0] = 0.5e-3 / off
    elif name == "norm clipped too early":
        norms[1] = 2e-3 / scale * off
    scales, equal = [1, 1, 0.5, 1], [True, True, True, False]
    rows = [(n, [scale * s], e) for n, s, e in zip(norms, scales, equal, strict=True)]
    return accepts(
        lesson,
        add_scaled=always(None),
        one_process=sequence(one(), *alone),
        gradient_of=sequence(one(ours[0]), one(ours[1] * scale), one(ours[2])),
        scaled_step=sequence(*rows),
    )


@limit("03/rules/accumulation", "accumulate", "unequal loop", "unequal sizes")
def _(lesson: Any, name: str, off: float) -> bool:
    place = {
        "accumulate": (lesson.accumulate, "equal"),
        "unequal loop": (lesson.accumulate_unequal, "equal"),
        "unequal sizes": (lesson.accumulate_unequal, "unequal"),
    }[name]

    def error_of(loop: Any, _: Any, sizes: str) -> float:
        return 1e-5 * off if (loop, sizes) == place else 0.0

    return accepts(lesson, error_of=error_of)


@limit("03/rules/initial_weights", "weights")
def _(lesson: Any, _: str, off: float) -> bool:
    def take_steps(model: Any, _: Tensor) -> None:
        is_alone = isinstance(model, nn.Linear)
        getattr(model, "module", model).weight.data.fill_(1e-6 * off * is_alone)

    return accepts(lesson, take_steps=take_steps)


@limit("03/rules/rank_zero", "loss")
def _(lesson: Any, _: str, off: float) -> bool:
    def on_all_ranks(_: Any) -> float:
        return lesson.F.mse_loss(lesson.INPUTS, lesson.LABELS).item() + 1e-5 * off

    return accepts(lesson, on_all_ranks=on_all_ranks)


@limit("03/rules/rank_zero", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    model = nn.Linear(1, 1)
    for parameter in model.parameters():  # by how much 1.00 may be rounded
        parameter.register_hook(lambda gradient: gradient + 0.005 * off)
    return lesson.gradient_of_a_step(model) == [1, 1]


@limit("03/rules/sampler", "loss")
def _(lesson: Any, _: str, off: float) -> bool:
    mean = lesson.LOSSES.mean().item() + 1e-6 * off
    return accepts(lesson, mean_by_counts=always(mean))


@limit("03/rules/two_forwards", "right", "wrong")
def _(lesson: Any, name: str, off: float) -> bool:
    def try_way(way: Any, _: Any) -> float:
        if way is lesson.two_backwards:
            return 1e-5 / off if name == "wrong" else 1.0
        return 1e-5 * off * (name == "right")

    return accepts(lesson, try_way=try_way)


@limit("03/rules/uneven_inputs", "weights")
def _(lesson: Any, _: str, off: float) -> bool:
    def train_batches(model: Any, *_: Any) -> None:
        is_alone = isinstance(model, nn.Linear)
        getattr(model, "module", model).weight.data.fill_(1e-6 * off * is_alone)

    def loop(*_: Any) -> None:
        """Do nothing."""

    return accepts(
        lesson,
        train_batches=train_batches,
        train_joined=loop,
        train_together=loop,
        wait_in_vain=always(["", ""]),
    )


@limit("03/rules/unused_parameters", "of a gradient", "of nothing")
def _(lesson: Any, name: str, off: float) -> bool:
    model = lesson.build_detour()
    losses = [lesson.local_loss(model, rank, "all") for rank in range(2)]
    torch.stack(losses).mean().backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads]).abs()
    if name == "of a gradient":  # the largest, of which 1e-5 counts for most
        for grad in grads:
            grad *= 1 + off * (1e-5 + 1e-7 / flat.max())
    else:
        (smallest,) = [grad for grad in grads if (grad.abs() == flat.min()).any()]
        place = smallest.abs() == flat.min()
        smallest += place * off * (1e-7 + 1e-5 * flat.min())
    return lesson.kind_of_gradients(model, "all") == "mean"


@limit("03/same_as_one_process", "of a weight", "of nothing", "moved")
def _(lesson: Any, name: str, off: float) -> bool:
    weight = 1000.0 if name == "of a weight" else 0.0

    def build() -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(weight)
        return model

    def wrap(model: nn.Module) -> nn.Module:
        changes = {"of a weight": 1e-5 * weight, "of nothing": 1e-6, "moved": 0}
        model.get_parameter("weight").data.add_(off * changes[name])
        return model

    is_same, _ = lesson.same_as_one_process(
        build,
        lambda model, batch: model(batch[0]).mean(),  # whose gradient is 1
        wrap,
        [[torch.ones(2, 1)]],
        lr=1e-4 / off if name == "moved" else 0.1,
    )
    return is_same


@limit("03/scaling/speed", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    samples = SimpleNamespace(batch=always((torch.ones(2, 4), torch.ones(2, 4))))
    with mock.patch.object(lesson.train.data, "load_sets", always([samples])):
        return accepts(
            lesson,
            *("--steps=1", "--batch-size=2"),
            build=always((None, None)),
            gradient=sequence(one(), one(1 + 1e-5 * off), one()),
            timed=always((1.0, 1.0)),
        )


@limit("03/scaling/scaling", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    found = ([{"way": "a", "ranks": 2, "measured": [1.0]}], [0.0, 1e-5 * off])
    return accepts(lesson, measure_all=always(found))


@limit("03/scaling/slow_link", "fp32", "bf16", "bytes", "few bytes", "time")
@limit("03/scaling/slow_link", "times that the link decides")
def _(lesson: Any, name: str, off: float) -> bool:
    hosts, link = 1 if name == "few bytes" else 2, {"LAB_HOST": "0"}
    link |= {"LAB_LINK_RATE": "8mbit", "GROUP_WORLD_SIZE": str(hosts)}
    elements = 10**6
    found = {}
    for way, (micro_batches, nbytes) in lesson.WAYS.items():
        sent = float(elements * nbytes) if hosts > 1 else 0.0
        # A megabyte a second, but for the headers of a frame.
        on_link, compute = sent / 1e6 * 1514 / 1448 / micro_batches, 0.0
        if name == "times that the link decides":
            compute = on_link / (4 * off - 1)
        found[way] = [compute, compute + on_link, sent]
    chosen = found["bfloat16"]
    if name == "bytes":
        chosen[2] *= 1 + 0.1 * off
    elif name == "few bytes":
        chosen[2] = 1e5 * off
    elif name == "time":
        chosen[1] *= 1 + 0.25 * off
    elif name == "times that the link decides":
        chosen[1] *= 1.5
    errors = [1e-5 * off * (name == "fp32"), 2e-2 * off * (name == "bf16")]
    model = nn.Linear(1000, 1000, bias=False)
    with mock.patch.dict(os.environ, link):
        return accepts(
            lesson,
            Team=always(SimpleNamespace(model=model)),
            distance_from=sequence(*errors),
            measure_ways=always(found),
        )


@limit("03/generate", "loss", ranks=1)
def _(lesson: Any, _: str, off: float) -> bool:
    model = mock.Mock(return_value=one(1 + 1e-4 * off))
    data = mock.MagicMock(**{"batch.return_value": (), "__len__.return_value": 2})
    with mock.patch.dict(os.environ):
        del os.environ["RANK"]
        return accepts(
            lesson,
            load_checkpoint=always((model, {"text": None, "validation_loss": 1.0})),
            load_text=always((None, None)),
            WindowDataset=always(data),
        )


TINY = ["--width=16", "--heads=2", "--block-size=16", "--samples=16", "--max-steps=1"]
TINY += ["--batch-size=4"]


def accepts_training(lesson: Any, *words: str) -> bool:
    """Train for a step, on a text of our own."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_text(Path(folder) / "text.txt")
        options = lesson.ranks.read_options
        with in_the_pool(lesson.ranks, *TINY, *words, f"--text={path}"):
            options = lesson.ranks.read_options(**lesson.OPTIONS)
        with (
            mock.patch.multiple(lesson.ranks, join=always(CPU), leave=always(None)),
            mock.patch.object(lesson.GPT, "generate", always("...")),  # is slow
        ):
            return accepts(lesson, run=lambda: lesson.main(options))


@limit("03/train", "gradient")
@limit("07/train", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    with mock.patch.object(lesson.data, "gradient_error", always(1e-5 * off)):
        return accepts_training(lesson)


@limit("03/data_loading/shared_memory", "held", ranks=1)
def _(lesson: Any, _: str, off: float) -> bool:
    disk = SimpleNamespace(f_bavail=1, f_frsize=1)
    with (
        mock.patch.object(os, "statvfs", always(disk), create=True),
        mock.patch.object(os.path, "isdir", always(True)),
    ):
        return accepts(
            lesson,
            DataLoader=always([None] * 2),
            wait_for=lambda needed: needed * (1 + 0.1 * off),
        )


@limit("03/cluster/laboratory", "lost", "few bytes", ranks=1)
def _(lesson: Any, name: str, off: float) -> bool:
    sent, lost = (1_000_000, 0.02 * off) if name == "lost" else (500_000 * off, 0.5)
    before, after = [(0, 0), (7, 7)], [(sent, sent * (1 - lost))]
    after.append((7 + sent, 7 + sent * (1 - lost)))
    hosts = [SimpleNamespace(name=name, address="") for name in ("host0", "host1")]
    options = Namespace(hosts=2, link_rate="")
    return accepts(
        lesson,
        run=lambda: lesson.run_laboratory(options, always([])),
        build_hosts=always(hosts),
        bytes_at_switch=sequence(before, after),
        run_on_all=always([0, 0]),
    )


# --- 04. ----------


class FewSamples:
    """Stands for 64 samples, of which nothing is trained."""

    def __len__(self) -> int:
        """Count the samples."""
        return 64

    def batches(self, *_: int) -> Iterator[Any]:
        """Yield as many batches as are wanted."""
        return itertools.repeat((torch.zeros(1, dtype=torch.long),) * 3)

    bags = (torch.tensor([1]),)

    def batch(self, numbers: Tensor) -> None:
        """Return nothing."""


@contextlib.contextmanager
def no_samples(classifier: Any, train: Callable | None = None) -> Iterator[None]:
    """Read no samples, and let `train` stand for the training in one process."""
    samples = (FewSamples(), FewSamples())
    with mock.patch.multiple(
        classifier,
        load_samples=always(samples),
        train_in_one_process=train or always([1.0]),
    ):
        yield


def on_server(weight: Tensor) -> SimpleNamespace:
    """Return what stands for a remote module with one weight."""
    owner = SimpleNamespace(to_here=lambda: weight)
    return SimpleNamespace(remote_parameters=lambda: [owner])


@limit("04/asynchronous", "weights", "stale rows")
def _(lesson: Any, name: str, off: float) -> bool:
    def train_in_one_process(alone: Any, _: Any, lr: float, of_table: float) -> list:
        # Two trainers' steps add up in the table: one process takes steps twice as far.
        alone.get_parameter("table.weight").data.fill_(of_table / lr)
        return [1.0]

    end = torch.full((lesson.ROWS, lesson.WIDTH), 2.0, dtype=torch.float64)
    end[3, 1] += 2e-3 * off * (name == "weights")
    # No row may be stale where all wait; here one of a thousand is.
    shares = [0.001 * (name == "stale rows" and off > 1), 0.3]
    tables = [on_server(end), on_server(end)]
    with no_samples(lesson.classifier, train_in_one_process):
        return accepts(
            lesson,
            run=lambda: lesson.compare(tables, 5.0),
            run_steps=sequence(*[([1.0], share) for share in shares]),
        )


@limit("04/asynchronous", "some row is stale", "unless nobody is late")
def _(lesson: Any, name: str, off: float) -> bool:
    is_late = off > 1 or name == "some row is stale"
    share = 0.0 if off > 1 or name == "unless nobody is late" else 0.001
    weight = torch.zeros(lesson.ROWS, lesson.WIDTH)
    weight[0, 0] = 1.0

    def train_in_one_process(alone: Any, *_: Any) -> list:
        alone.get_parameter("table.weight").data.copy_(weight)
        return [1.0]

    with no_samples(lesson.classifier, train_in_one_process):
        return accepts(
            lesson,
            run=lambda: lesson.compare([on_server(weight)] * 2, 5.0 * is_late),
            run_steps=sequence(([1.0], 0.0), ([1.0], share)),
        )


@limit("04/sharded_tables", "table", "dense weights")
def _(lesson: Any, name: str, off: float) -> bool:
    def train_sharded(_: Any, rows: int) -> tuple[Any, list[float]]:
        own = lesson.draw_shard(rows, dist.get_rank(), dist.get_world_size())
        model = lesson.HybridModel(lesson.ShardedTable(own), lesson.dense_part())
        weight = own if name == "table" else next(model.dense.parameters()).data
        weight[0].add_(1e-5 * off)
        return model, [1.0]

    with no_samples(lesson.classifier):
        return accepts(lesson, run=lambda: lesson.main(1), train_sharded=train_sharded)


@limit("04/sharding/split_table", "table", "dense weights")
def _(lesson: Any, name: str, off: float) -> bool:
    rows = 50
    table = lesson.classifier.Table(rows, lesson.WIDTH, seed=0).weight.detach()
    dense = nn.utils.parameters_to_vector(lesson.dense_part().parameters()).detach()
    (table if name == "table" else dense)[7:8].add_(1e-5 * off)
    shards = [on_server(table[0::2]), on_server(table[1::2])]
    with no_samples(lesson.classifier):
        return accepts(
            lesson,
            run=lambda: lesson.compare([shards], 1, rows),
            train_in_turn=always([(dense, 0.1)]),
        )


@limit("04/served_table", "gradient", "weights", ranks=1)
def _(lesson: Any, name: str, off: float) -> bool:
    def rpc_sync(_: str, function: Any, *__: Any, **___: Any) -> Any:
        if function is lesson.moved_rows:
            return torch.tensor([1])
        assert function is lesson.error_of_one_trainer
        return 1e-5 * off * (name == "weights")

    samples = FewSamples()
    return accepts(
        lesson,
        run=lambda: lesson.check_trainers(
            SimpleNamespace(dense=nn.Linear(1, 1)), Namespace(rows=9), 1
        ),
        rpc=SimpleNamespace(rpc_sync=rpc_sync),
        load_samples=always((samples, samples)),
        table_gradient_error=always(1e-5 * off * (name == "gradient")),
    )


@limit("04/lookup_cost/lookup_cost", "weights", "rough", "bytes", "no bytes", ranks=1)
def _(lesson: Any, name: str, off: float) -> bool:
    around = {"bytes": 6000 * off, "no bytes": 1.0 - (off > 1)}.get(name, 100.0)
    cost = load_chapter(f"{FOLDERS['04']}/lookup_cost")["measured_costs"].Cost
    costs = {"one call": cost(1e4, 1e4 + around, 1.0, 1.0, 1.0)}
    costs["ahead"] = cost(1e4, 1e4 + 100.0, 1.0, 1.0, 1.0)  # and nothing is wrong
    apart = dict.fromkeys(lesson.OTHER_ORDER, 1e-2 * off * (name == "rough"))
    apart |= {"one call": 1e-5 * off * (name == "weights"), "ahead": 0.0}
    options = Namespace(batch_sizes=[8], steps=1, rounds=1, latency=0.0, json=None)
    return accepts(
        lesson,
        run=lambda: lesson.compare_batch_sizes(options),
        load_samples=always((FewSamples(), None)),
        cost_of_each_way=always((costs, 1.0, apart)),
        print_costs=always(None),
    )


@limit("04/lookup_cost/comparison", "sum")
def _(lesson: Any, _: str, off: float) -> bool:
    start = lesson.Table(lesson.ROWS, lesson.WIDTH, seed=0).weight.detach().double()
    end = start - 1.0
    end[5, 5] += 1e-3 * off  # of the largest change, which is 1
    way = SimpleNamespace(
        weight=lambda: end,
        sum_of_all_updates=always(torch.full_like(end, 1 / lesson.LR)),
        changes=always(2),
        dense=nn.Linear(1, 1),
    )
    found = lesson.prove("one call", way, [[None]], 0)
    assert found.different == found.missing == 0 and found.lost in (0, 1)
    return found.lost == 0


@limit("04/lookup_cost/steps_per_second", "weights", ranks=1)
def _(lesson: Any, _: str, off: float) -> bool:
    names = [lesson.OFTEN, "one call"]
    room = load_chapter(f"{FOLDERS['04']}/lookup_cost")
    found = {name: room["comparison"].Found(0, 0, 0, 9, 0.0) for name in names}
    found["one call"] = found["one call"]._replace(apart=1e-5 * off)
    rates = {name: [1.0, 1.0] for name in names}
    options = Namespace(steps=1, rounds=1, batch_size=5)
    return accepts(
        lesson,
        run=lambda: lesson.compare_four_ways([], options),
        take_turns=always((rates, found)),
    )


# --- 05. ----------


@limit("05/engine_checks", "fp32 losses", "fp32 weights", "fp32 norm", "20 steps")
@limit("05/engine_checks", "bf16 losses", "bf16 weights", "bf16 norm")
def _(lesson: Any, name: str, off: float) -> bool:
    is_bf16, what = name.startswith("bf16"), name.split()[-1]
    of_losses, of_weights = (2e-3, 3e-2) if is_bf16 else (1e-4, 1e-3)
    dtype, steps = torch.bfloat16 if is_bf16 else torch.float32, 1
    if what == "steps":  # twice as many as the limits are for, and twice as far
        steps, of_losses = 20, 2 * of_losses
    untrained = nn.Linear(1, 1, bias=False)
    untrained.weight.data.zero_()

    def train_alone(model: Any, *_: Any) -> tuple[list[float], float]:
        model.weight.data.fill_(1.0)
        return [1.0] * steps, 1.0

    weight = 1 + of_weights * off * (what == "weights")
    if is_bf16 and what == "weights":  # next to 1 it has steps of 1/128
        weight = 1 + (3 if off < 1 else 4) / 128
    engine = mock.Mock()
    engine.optimizer.param_groups = [{}]
    engine.gradient_clipping.return_value = 1.0
    engine.get_global_grad_norm.return_value = 1 + of_weights * off * (what == "norm")
    losses = [1.0] * steps
    losses[-1] += of_losses * off * (what in ("losses", "steps"))
    with mock.patch.multiple(
        lesson,
        whole_weights=always([torch.tensor([weight], dtype=dtype)]),
        train_alone=train_alone,
    ):
        return lesson.same_as_one_process(
            engine, untrained, always(torch.zeros(2)), losses
        )[0]


@limit("05/by_hand/train_and_compare", "weights")
def _(lesson: Any, _: str, off: float) -> bool:
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(3)]
    for layer, weight in zip(layers, (0.0, 1e-11 * off, 0.0), strict=True):
        layer.weight.data.fill_(weight)
    return accepts(
        lesson,
        run=lambda: lesson.main(lambda model, _: (model, None, None)),
        build_model=sequence(*layers),
        train_batches=always(None),
        bytes_kept=always({"weights": 1.0}),
    )


@limit("05/checkpoints/resume_elsewhere", "losses")
def _(lesson: Any, _: str, off: float) -> bool:
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name) / "half_1").mkdir()
        (folder / lesson.RECORD).write_text(json.dumps({"ranks": 2}))
        (folder.parent / "latest").write_text(folder.name)
        options = Namespace(folder=Path(name), stage=1)
        trained = mock.Mock()
        trained.return_value.load_checkpoint.return_value = ("", {"stage": 1})
        return accepts(
            lesson,
            run=lambda: lesson.main(options),
            prepare=always(CPU),
            find_problem=always(""),
            new_engine=trained,
            train_steps=mock.Mock(side_effect=[[1.0] * 7, [1.0, 1 - 2e-2 * off]]),
        )


@limit("05/communication/communication_volume", "formula", "TCP", "less TCP")
def _(lesson: Any, name: str, off: float) -> bool:
    # isclose takes a share of the larger number.
    times = 1 / (1 - 0.01 * off) if name == "formula" else 1.0
    tcp = {"TCP": 1 + 0.05 * off, "less TCP": 1 - 0.05 * off}.get(name, 1.0)
    whole, counted = 4 * 10**6, {"all_reduce": (1, 9)}
    step = {"sizes": [10**6], "logged": counted, "counted": counted}

    def bytes_due(_: Any, __: int, is_gloo: bool) -> float:
        return 2.0 * whole * (1.0 if is_gloo else times)

    return accepts(
        lesson,
        run=lambda: lesson.main(Namespace()),
        prepare=always(CPU),
        count_step=always(step | {"sent": whole * tcp}),
        bytes_due=bytes_due,
        volume=always(2.0),
    )


@limit("05/offload/offload", "memory is freed", ranks=1)
def _(lesson: Any, _: str, off: float) -> bool:
    values, state = [10**6], 12 * 10**6
    way = {"losses": [1.0], "values": values, "state": state, "weights": 2 * 10**6}
    plain = way | {"places": {"cuda": state, "disk": 0}}
    left = {"cuda": 0.01 * off * state, "disk": 0}
    found = {"nothing": plain, "optimizer state": way | {"places": left}}
    return lesson.find_faults(found) == []


@limit("05/memory/counted_step", "kept", "other", "peak", "lower peak", ranks=1)
@limit("05/memory/counted_step", "peak of the others", "process", "slack", ranks=1)
def _(lesson: Any, name: str, off: float) -> bool:
    kinds = dict.fromkeys(lesson.KINDS, 1e9)
    kept = dict.fromkeys(lesson.LIVE_KINDS, 0.0) | kinds | {"buckets": 0.0}
    kept["other"] = 0.0
    whole = sum(kept[kind] for kind in lesson.LIVE_KINDS)
    result = {"paper": kinds, "added": dict.fromkeys(kinds, 0.0), "bucket": 0.0}
    result |= {"default_buckets": False, "stage": 2, "rank": 1, "worked_out": 1e9}
    result["peak"] = 1e9
    kept["process"] = whole
    if name == "kept":
        kept[next(iter(kinds))] *= 1 + 0.01 * off
        kept["process"] = sum(kept[kind] for kind in lesson.LIVE_KINDS)
    elif name == "other":
        kept["other"] = 0.01 * off * whole + 500_000
        whole = sum(kept[kind] for kind in lesson.LIVE_KINDS)
        kept["process"] = whole
    elif name == "peak":
        result["peak"] *= 1 + 0.02 * off
    elif name == "lower peak":
        result["peak"] *= 1 - 0.02 * off
    elif name == "peak of the others":  # lower is right in stage 1
        result |= {"stage": 1, "peak": 1e9 * (1 + 0.02 * off if off > 1 else 0.5)}
    elif name == "process":
        kept["process"] += 0.05 * off * whole + 5_000_000
    else:
        kept["process"] += 0.05 * whole + 5_000_000 * off
    return lesson.is_as_worked_out([result | {"kept": kept}], exact=True)[0]


@limit("05/huggingface/from_pretrained", "kept", "peak")
def _(lesson: Any, name: str, off: float) -> bool:
    weight = torch.zeros(10**6)
    whole = weight.nbytes
    model = nn.ParameterDict({"weight": nn.Parameter(weight.clone())})
    kept = whole / 2 * (1 + 0.01 * off) if name == "kept" else whole / 2
    model["weight"].ds_tensor = SimpleNamespace(nbytes=kept)
    peak = 0.8 * whole * off if name == "peak" else 0
    engine, silent = mock.MagicMock(), mock.MagicMock()
    modules = {"deepspeed": engine, "transformers.utils.logging": silent}
    with mock.patch.dict("sys.modules", modules):
        return accepts(
            lesson,
            prepare=always(CPU),
            write_checkpoint=always({"weight": weight}),
            load=always((model, peak)),
        )


@limit("05/memory/activation_checkpointing", "activations", "peak", ranks=1)
def _(lesson: Any, name: str, off: float) -> bool:
    model = mock.MagicMock()
    model.to.return_value.train.return_value = model
    model.parameters.side_effect = lambda: iter(())
    saving = (300 / 3 * off if name == "activations" else 1, 1)
    if name == "peak":
        saving = (1, 400 * off)
    return accepts(
        lesson,
        run=lambda: lesson.main(Namespace(width=1, layers=1, samples=1)),
        new_model=always(model),
        count_bytes=sequence((300, 400), saving),
        seconds_of=always(1.0),
    )


@limit("05/memory/zero_init", "sharded", "whole")
def _(lesson: Any, name: str, off: float) -> bool:
    whole = 2 * lesson.LAYERS * (lesson.WIDTH**2 + lesson.WIDTH)
    built = [whole / 2, 1.5 * whole]
    if name == "sharded":
        built[0] += off * 3 * whole / lesson.LAYERS
    else:  # which is at least all of the weights
        built[1] = whole if off < 1 else 0.99 * whole
    runs = [{"build": one, "initialize": 0, "losses": [1.0]} for one in built]
    return accepts(lesson, prepare=always(CPU), train_layers=sequence(*runs))


# --- 07. ----------


@limit("07/by_hand", "weights")
def _(lesson: Any, _: str, off: float) -> bool:
    with mock.patch.object(torch, "dist", always(one(1e-9 * off))):
        return accepts(lesson, STEPS=1)


@limit("07/plan_in_steps", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    with mock.patch.object(torch, "dist", always(one(1e-9 * off))):
        return accepts(lesson, CONFIG=lesson.GPTConfig(16, 16), T=16, D=16)


@limit("07/matrix", "mlp", "rows first")
def _(lesson: Any, name: str, off: float) -> bool:
    mlp, mlp_rows_first = lesson.mlp, lesson.mlp_rows_first
    times = 1 + off * 1e-5
    return accepts(
        lesson,
        mlp=lambda *a: [x * (times if name == "mlp" else 1) for x in mlp(*a)],
        mlp_rows_first=lambda *a: (
            mlp_rows_first(*a) * (times if name == "rows first" else 1)
        ),
    )


class OneWeight(nn.Module):
    """Stands for a GPT: its loss is its weight."""

    def __init__(self) -> None:
        """Make the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *_: Tensor) -> Tensor:
        """Return the loss, whatever the tokens are."""
        return self.weight.sum()


@limit("07/sequence_parallel", "gradient", "memory", "less memory")
def _(lesson: Any, name: str, off: float) -> bool:
    # Worked out for two ranks: (B, T, D) that blocks, last norm and logits keep.
    kept = [30.0, 25.5, 23.5]
    if name == "memory":
        kept[1] *= 1 + 0.03 * off
    elif name == "less memory":  # not even a thousandth
        kept[1] *= 1.001 if off < 1 else 0.999
    nbytes = lesson.B * lesson.T * lesson.D * 8
    calls = mock.MagicMock()
    calls.return_value.__enter__.return_value.sent_on_a_ring.side_effect = [2, 2, 1]
    error = 1e-9 * off * (name == "gradient")
    with (
        mock.patch.object(torch, "dist", always(one(error))),
        mock.patch.object(Tensor, "full_tensor", lambda x: x, create=True),
    ):
        return accepts(
            lesson,
            init_device_mesh=always(None),
            GPT=always(OneWeight()),
            split_over_ranks=lambda model, *_: copy.deepcopy(model),
            kept_for_backward=sequence(*[k * nbytes for k in kept]),
            Collectives=calls,
        )


@limit("07/when_it_pays/step_time", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    link = {"LAB_HOST": "0", "LAB_LINK_RATE": "1gbit"}
    ways = mock.MagicMock()
    ways.return_value.largest_error.return_value = 1e-4 * off
    ways.return_value.whole = nn.Linear(1, 1)
    with mock.patch.dict(os.environ, link):
        return accepts(lesson, "--rounds=1", Ways=ways, seconds=always(0.1))


# --- 08. ----------


@limit("08/two_stages", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    with mock.patch.object(torch, "dist", always(one(1e-12 * off))):
        return accepts(lesson)


@limit("08/train_stages", "weights")
def _(lesson: Any, _: str, off: float) -> bool:
    with mock.patch.object(torch, "dist", always(one(1e-12 * off))):
        return accepts(
            lesson,
            train_by_schedule=always(None),
            weights_of_one_process=always(mock.MagicMock()),
        )


@limit("08/train", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    with mock.patch.object(lesson.staged_gpt, "largest_error", always(1e-5 * off)):
        return accepts_training(lesson, "--grad-accum-steps=2")


@limit("08/balance/tied_weights", "weights", "two ends")
def _(lesson: Any, name: str, off: float) -> bool:
    train_tied = lesson.train_tied

    def trained(*arguments: Any) -> tuple[Tensor, Any]:
        weight, part = train_tied(*arguments)
        # The ends are equal to the bit: even the last one counts.
        is_apart = name == "two ends" and off > 1 and dist.get_rank() == 1
        return weight * (1 + 2**-52 * is_apart), part

    error = 1e-12 * off * (name == "weights")
    with mock.patch.object(torch, "dist", always(one(error))):
        return accepts(lesson, train_tied=trained)


@limit("08/bubble/bubble", "order", "time")
def _(lesson: Any, name: str, off: float) -> bool:
    def share_of(spans: list) -> Fraction | float:
        (kind, way), *_ = spans
        share = lesson.formula(way, 2, 4)
        if kind == "replayed":
            return float(share) + 1e-9 * off * (name == "order" and way == "1F1B")
        return float(share) - 0.01 * off * (name == "time" and way == "1F1B")

    return accepts(
        lesson,
        record=lambda way, *_: ("recorded", way),
        replay=lambda spans: [("replayed", way) for _, way in spans],
        idle_share=share_of,
        most_in_flight=always(1),
    )


@limit("08/link/three_ways", "gradient")
def _(lesson: Any, _: str, off: float) -> bool:
    small = lesson.GPTConfig(block_size=8, width=16, layers=2, heads=2, tied=False)
    return accepts(lesson, CONFIG=small, distance_from=always(1e-5 * off))


# --- The test. ----------


def verdicts(place: str, ranks: int) -> dict[str, list[bool]]:
    """Judge on this rank: for each limit, just inside, just outside and no number.

    It is the last rank that has found no number; the others have a right one.
    """
    chapter, *room, script = place.split("/")
    lesson = load_chapter("/".join([FOLDERS[chapter], *room]))[script]
    nan = math.nan if dist.get_rank() == ranks - 1 else 0.5
    # From zero every time: a judge may set what the next one reads.
    return {
        name: [judge(lesson, off) for off in (0.9, 1.1, nan)]
        for name, (judge, wanted) in CASES[place].items()
        if wanted == ranks
    }


@pytest.mark.parametrize("place", CASES)
def test_just_inside_is_accepted_and_just_outside_is_not(
    worker_pool: WorkerPool, place: str
) -> None:
    (ranks,) = {ranks for _, ranks in CASES[place].values()}
    by_rank = worker_pool.run(verdicts, place, ranks, world_size=ranks)
    # `check` ends all ranks if one of them has found something wrong.
    together = {
        name: [all(of_rank[name][i] for of_rank in by_rank) for i in range(3)]
        for name in CASES[place]
    }
    assert together == {
        name: [True, False, f"{place} {name}" in NEVER_NAN] for name in CASES[place]
    }


def test_every_limit_is_tried() -> None:
    assert len(CASES) == 49 and sum(map(len, CASES.values())) == 104
    assert len(NEVER_NAN) == 24
    known = {f"{place} {name}" for place, names in CASES.items() for name in names}
    assert known >= NEVER_NAN
