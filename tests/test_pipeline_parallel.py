"""Chapter 08: layers on several ranks train what one process trains."""

import contextlib
import functools
import io
import itertools
import re
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.microbatch import _Replicate
from torch.distributed.pipelining.schedules import get_schedule_class

from launch import ROOT, torchrun
from lessons import CPU, in_the_pool
from pages import words_of
from scripts import load_chapter
from tiny_gpt import write_text
from worker_pool import WorkerPool

CHAPTER = "08_pipeline_parallel"
STEPS, T = 3, 8

# @record, around main(), has faulthandler write to a stderr that pytest has taken.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


def script(name: str) -> Any:
    """Return a module of the chapter."""
    return load_chapter(CHAPTER)[name]


def schedule_of(name: str) -> Callable:
    """Return a schedule by its name."""
    return script("schedules").SCHEDULES[name]


def timelines() -> Any:
    """Return the module that draws who is idle when."""
    return script("call_timeline")


def order(name: str, index: int, stages: int, micro_batches: int) -> str:
    """Return the calls of one stage."""
    return " ".join(
        timelines().calls_of(schedule_of(name), stages, micro_batches)[index]
    )


# --- The order of the calls, and who is idle when. ----------


def test_1f1b_order_of_each_stage_of_four() -> None:
    assert order("one_f_one_b", 0, 4, 5) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert order("one_f_one_b", 1, 4, 5) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert order("one_f_one_b", 2, 4, 5) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert order("one_f_one_b", 3, 4, 5) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert order("gpipe", 2, 4, 3) == "F0 F1 F2 B0 B1 B2"
    # Fewer micro-batches than stages: no stage runs ahead of what there is.
    assert order("one_f_one_b", 0, 4, 2) == "F0 F1 B0 B1"


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_stages_idle_for_p_minus_1_of_m_plus_p_minus_1(name: str) -> None:
    module, seen = timelines(), 0
    for p, m in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 8)):
        rows = module.timeline(module.calls_of(schedule_of(name), p, m))
        assert {len(row) for row in rows} == {2 * (m + p - 1)}
        assert {row.count("") for row in rows} == {2 * (p - 1)}
        calls = [call for row in rows for call in row if call]
        assert len(calls) == 2 * m * p == len({*zip(calls, itertools.count())})
        seen += 1
    assert seen == 20


def test_timeline_of_one_batch_on_two_stages() -> None:
    assert timelines().drawn([["F0", "B0"], ["F0", "B0"]]).splitlines() == [
        "stage 0 | F0 .  .  B0",
        "stage 1 | .  F0 B0 .",
        "of 4 units of time they wait: 2, 2",
    ]


def test_timeline_refuses_stages_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        timelines().timeline([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]])
    with pytest.raises(ValueError, match="wait for each other"):  # the last stage's B0
        timelines().timeline([["F0", "B0"], ["B0", "F0"]])


def test_cut_leaves_no_stage_empty() -> None:
    cut = script("part").even_cut
    assert cut(5, 4) == [2, 1, 1, 1] and cut(5, 3) == [2, 2, 1] and cut(4, 2) == [2, 2]
    with pytest.raises(ValueError, match="too few"):
        cut(3, 4)


def drawing_of(name: str, schedule: Callable, p: int, m: int) -> list[str]:
    """Run the script of a schedule, perhaps with another schedule; return its lines."""
    said, module = io.StringIO(), script("schedules")
    words = [f"--schedule={name}", f"--stages={p}", f"--micro-batches={m}"]
    with (
        mock.patch.object(sys, "argv", ["schedules.py", *words]),
        mock.patch.dict(module.SCHEDULES, {name: schedule}),
        contextlib.redirect_stdout(said),
    ):
        module.main()
    return said.getvalue().splitlines()


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_script_of_a_schedule_draws_it(name: str) -> None:
    seen = 0
    for p, m in ((1, 3), (2, 1), (3, 8), (4, 8), (5, 2)):
        *rows, waits, flying, check = drawing_of(name, schedule_of(name), p, m)
        assert [row.split(" | ")[0] for row in rows] == [f"stage {i}" for i in range(p)]
        calls = [re.findall(r"[FB]\d+", row) for row in rows]
        assert calls == [order(name, i, p, m).split() for i in range(p)]
        idle = ", ".join([str(2 * (p - 1))] * p)
        assert waits == f"of {2 * (m + p - 1)} units of time they wait: {idle}"
        most = [m] * p if name == "gpipe" else [min(m, p - i) for i in range(p)]
        assert flying.endswith(f": {most}")
        assert f"= {(p - 1) / (m + p - 1):.1%} idle" in check
        seen += 1
    assert seen == 5


def one_at_a_time(stage: Any, micro_batches: int) -> None:
    """Let no two micro-batches be in flight."""
    for i in range(micro_batches):
        stage.forward(i)
        stage.backward(i)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("gpipe", "one_f_one_b"),  # waits as long, with fewer in flight
        ("one_f_one_b", "gpipe"),  # with more
        ("gpipe", "one at a time"),
        ("one_f_one_b", "one at a time"),  # waits longer
    ],
)
def test_script_of_a_schedule_notices_another(name: str, other: str) -> None:
    schedule = one_at_a_time if " " in other else schedule_of(other)
    with pytest.raises(SystemExit, match="not so: "):
        drawing_of(name, schedule, 4, 8)


# --- The weights of one process. ----------


class Case(NamedTuple):
    """A training run in float64."""

    schedule: str
    cut: list[int]
    samples: int
    micro_batch_size: int
    max_norm: float | None = 0.3
    tied: bool = True


def whole_model(case: Case) -> nn.Module:
    """Build the GPT, the same on every rank."""
    model = script("model")
    torch.manual_seed(5)
    sizes = {"block_size": T, "width": 16, "layers": sum(case.cut), "heads": 2}
    return model.GPT(model.GPTConfig(**sizes, tied=case.tied)).double()


def tokens_of(case: Case) -> Tensor:
    """Draw (steps, samples, T + 1) tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (STEPS, case.samples, T + 1), generator=generator)


Trained = tuple[dict[str, Tensor], list[float], list[str], int]


def train_stage(case: Case) -> Trained:
    """Train this rank's stage: weights, losses, the calls of a step, most in flight."""
    module, calls = script("stage"), []

    class Noting(module.Stage):
        def compute_forward(self, i: int, *rest: Any) -> Tensor:
            calls.append(f"F{i}")
            return super().compute_forward(i, *rest)

        def compute_backward(self, i: int, *rest: Any) -> None:
            calls.append(f"B{i}")
            super().compute_backward(i, *rest)

    part = module.Part(whole_model(case), dist.get_rank(), case.cut)
    stage = Noting(part)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in tokens_of(case):
        calls.clear()
        loss = stage.run(
            schedule_of(case.schedule),
            batch[:, :-1],
            batch[:, 1:],
            case.micro_batch_size,
        )
        losses.append(loss.item())
        if case.max_norm is not None:
            module.clip_grad_norm(part, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    assert not stage.in_flight and not stage.sending
    weights = {name: p.detach() for name, p in part.state_dict().items()}
    return weights, losses, calls, stage.most_in_flight


def train_alone(case: Case) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train the whole model without a group: weights, losses, norms before clipping."""
    model, losses, norms = whole_model(case), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in tokens_of(case):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        losses.append(loss.item())
        limit = float("inf") if case.max_norm is None else case.max_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses, norms


CASES = [
    Case("gpipe", [1, 1], samples=4, micro_batch_size=4),  # one micro-batch
    Case("gpipe", [2, 1], samples=7, micro_batch_size=2),  # the last of one sample
    Case("one_f_one_b", [1, 3], samples=7, micro_batch_size=3, tied=False),
    Case("gpipe", [1, 2, 1], samples=8, micro_batch_size=3, max_norm=None),
    Case("one_f_one_b", [2, 1, 0], samples=11, micro_batch_size=2),
    Case("gpipe", [1, 1, 2, 1], samples=9, micro_batch_size=2, tied=False),
    Case("one_f_one_b", [0, 2, 1, 1], samples=11, micro_batch_size=2),
    Case("one_f_one_b", [1, 1, 1, 1], samples=4, micro_batch_size=2),  # m < p
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_train_what_one_process_trains(
    worker_pool: WorkerPool, case: Case
) -> None:
    p, m = len(case.cut), -(-case.samples // case.micro_batch_size)
    results = worker_pool.run(train_stage, case, world_size=p)
    alone, losses_alone, norms = train_alone(case)
    before = whole_model(case).state_dict()
    assert case.max_norm is None or min(norms) > 1.5 * case.max_norm
    found = []
    for index, (weights, losses, calls, most) in enumerate(results):
        apart = [(ours - alone[name]).abs().max() for name, ours in weights.items()]
        moved = [(ours - before[name]).abs().max() for name, ours in weights.items()]
        assert max(apart) < 1e-13 and min(moved) > 1e-5, index
        found += list(weights)
        assert calls == order(case.schedule, index, p, m).split()
        assert most == (m if case.schedule == "gpipe" else min(m, p - index))
        expected = losses_alone if index == p - 1 else [0.0] * STEPS
        assert losses == pytest.approx(expected, abs=1e-12)
    assert sorted(found) == sorted(alone) and len(results) == p


def ends_of_tied() -> Tensor | None:
    """Train with 1F1B; return the matrix that the first and the last stage share."""
    case = Case("one_f_one_b", [1, 1, 1], samples=6, micro_batch_size=2)
    weights, *_ = train_stage(case)
    name = {0: "token_embedding.weight", 2: "head.weight"}.get(dist.get_rank())
    return weights[name] if name else None


def test_tied_matrix_stays_the_same_bits_on_both_ends(worker_pool: WorkerPool) -> None:
    first, middle, last = worker_pool.run(ends_of_tied, world_size=3)
    assert middle is None and torch.equal(first, last)


def held_after_sending(name: str, micro_batches: int, way: int) -> list[int]:
    """Run a step; when a tensor is sent, how many sent ones does this rank hold?

    `way` is 1 for activations and -1 for gradients.
    """
    module, sent, alive, isend = script("stage"), [], [], dist.isend

    def noted(tensor: Tensor, to: int, **options: Any) -> Any:
        if to == dist.get_rank() + way:
            sent.append(weakref.ref(tensor))
            alive.append(sum(one() is not None for one in sent))
        return isend(tensor, to, **options)

    case = Case(name, [1] * dist.get_world_size(), micro_batches, 1)
    stage = module.Stage(module.Part(whole_model(case), dist.get_rank(), case.cut))
    batch = tokens_of(case)[0]
    with mock.patch.object(dist, "isend", noted):
        stage.run(schedule_of(name), batch[:, :-1], batch[:, 1:], 1)
    return alive


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_stage_holds_few_gradients_that_it_has_sent(
    worker_pool: WorkerPool, name: str, p: int
) -> None:
    first, *others = worker_pool.run(held_after_sending, name, 9, -1, world_size=p)
    assert first == [] and len(others) == p - 1
    # However many micro-batches there are: the one before may still be on its way.
    for alive in others:
        assert len(alive) == 9 and max(alive) <= 2


def test_a_stage_holds_the_activations_that_are_in_flight(
    worker_pool: WorkerPool,
) -> None:
    *others, last = worker_pool.run(
        held_after_sending, "one_f_one_b", 9, 1, world_size=3
    )
    assert last == [] and [len(alive) for alive in others] == [9, 9]
    assert [max(alive) for alive in others] == [3, 2]


class Sent:
    """A message of which the sender must keep the tensor until it has waited."""

    def __init__(self, tensor: Tensor, to: int, group: Any) -> None:
        """Send a copy, so that nothing but the sender keeps the tensor."""
        assert not tensor.requires_grad
        self.tensor, self.to, self.group = weakref.ref(tensor), to, group
        self.work, self.kept = real_isend(tensor.clone(), to, group=group), list[bool]()

    def wait(self) -> None:
        """Note whether the tensor is still there."""
        self.kept.append(self.tensor() is not None)
        self.work.wait()


real_isend: Any = dist.isend


class Transposed(script("part").Part):
    """Sends activations that are not contiguous."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Change the order of the values in memory."""
        y = super().forward(x, labels)
        return y if self.is_last else y.mT.contiguous().mT


def messages_of_a_step() -> tuple[list[tuple[int, list[bool]]], int, float]:
    """Return to whom and how each message went, in how many groups, and the error."""
    case, module, sent = Case("one_f_one_b", [1, 1, 1], 5, 1), script("stage"), []

    def isend(tensor: Tensor, to: int, group: Any) -> Sent:
        sent.append(Sent(tensor, to, group))
        return sent[-1]

    model, batch = whole_model(case), tokens_of(case)[0]
    stage = module.Stage(Transposed(whole_model(case), dist.get_rank(), case.cut))
    with mock.patch.object(dist, "isend", isend):
        stage.run(schedule_of(case.schedule), batch[:, :-1], batch[:, 1:], 1)
    model(batch[:, :-1], batch[:, 1:]).backward()
    named: Any = dict(model.named_parameters(remove_duplicate=False))
    far = [(p.grad - named[name].grad).abs().max() for name, p in named_of(stage)]
    groups = {(one.to > dist.get_rank(), id(one.group)) for one in sent}
    assert len(groups) == len({group for _, group in groups})  # none for both ways
    found = [(one.to, one.kept) for one in sent]
    return found, len(groups), torch.stack(far).max().item()


def named_of(stage: Any) -> list[tuple[str, Any]]:
    """Return a stage's parameters by their names."""
    return list(stage.part.named_parameters())


def test_a_stage_waits_once_for_each_message_and_keeps_its_tensor_until_then(
    worker_pool: WorkerPool,
) -> None:
    first, middle, last = worker_pool.run(messages_of_a_step, world_size=3)
    assert first[0] == [(1, [True])] * 5 and last[0] == [(1, [True])] * 5
    assert sorted(middle[0]) == [(0, [True])] * 5 + [(2, [True])] * 5
    assert [groups for _, groups, _ in (first, middle, last)] == [1, 2, 1]
    assert max(far for *_, far in (first, middle, last)) < 1e-14


def gradients_of_runs(
    tied: bool, runs: int, ignored: int = 0, is_frozen: bool = False
) -> dict[str, float]:
    """Run a step's passes so often; how many times one process's is each gradient?

    Perhaps with labels to ignore, or with the head's matrix frozen.
    """
    case, module = Case("gpipe", [1, 1], 4, 2, tied=tied), script("stage")
    model, batch = whole_model(case), tokens_of(case)[0]
    inputs, labels = batch[:, :-1], batch[:, 1:].clone()
    labels[:1, :ignored] = -100
    stage = module.Stage(module.Part(whole_model(case), dist.get_rank(), case.cut))
    for one in (model, stage.part) if is_frozen else ():
        for name, p in one.named_parameters(remove_duplicate=False):
            p.requires_grad_(name not in ("token_embedding.weight", "head.weight"))
    for _ in range(runs):
        stage.run(schedule_of("gpipe"), inputs, labels, 2)
    model(inputs, labels).backward()
    named: Any = dict(model.named_parameters(remove_duplicate=False))
    trained = [(name, p) for name, p in named_of(stage) if p.grad is not None]
    norms = {name: p.grad.norm().item() for name, p in trained}
    return {name: norm / named[name].grad.norm().item() for name, norm in norms.items()}


def test_a_second_run_before_a_step_adds_to_a_tied_sum_again(
    worker_pool: WorkerPool,
) -> None:
    ends, seen = {"token_embedding.weight", "head.weight"}, 0
    for tied in (False, True):
        for found in worker_pool.run(gradients_of_runs, tied, 2):
            due = {name: 3 if tied and name in ends else 2 for name in found}
            assert found == pytest.approx(due)
            seen += 1
    assert seen == 4


def test_a_frozen_tied_matrix_has_no_gradient_to_add_up(
    worker_pool: WorkerPool,
) -> None:
    for tied in (False, True):
        first, last = worker_pool.run(gradients_of_runs, tied, 1, 0, True)
        assert first == pytest.approx(dict.fromkeys(first, 1))
        assert last == pytest.approx(dict.fromkeys(last, 1))
        assert len(first) == 1 + 10 and len(last) == 10 + 2  # positions; final norm


def test_samples_need_equally_many_labels(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(gradients_of_runs, False, 1, 6)
    far = [max(abs(x - 1) for x in found.values()) for found in ends]
    assert len(far) == 2 and min(far) > 0.01


def clipped(dtype: torch.dtype, is_frozen: bool) -> tuple[float, str, Any]:
    """Clip gradients of 400 on each of two stages; return norm, type and gradients."""
    part: Any = nn.Linear(4, 4).to(dtype)
    part.tied_weight, part.is_last = lambda: None, dist.get_rank() == 1
    part.weight.grad = torch.full((4, 4), 100.0, dtype=dtype)
    part.bias.grad = None if is_frozen else torch.zeros(4, dtype=dtype)
    norm = script("part").clip_grad_norm(part, 1.0)
    return norm.item(), str(norm.dtype), part.weight.grad[0, 0].item()


@pytest.mark.parametrize(
    "kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_norms_beyond_256_are_clipped_in_every_precision(
    worker_pool: WorkerPool, kind: torch.dtype
) -> None:
    whole = 400 * 2**0.5
    wide = "torch.float64" if kind == torch.float64 else "torch.float32"
    ends = [*worker_pool.run(clipped, kind, False)]
    ends += worker_pool.run(clipped, kind, True)
    assert len(ends) == 4
    for norm, dtype, gradient in ends:
        assert norm == pytest.approx(whole) and dtype == wide
        assert gradient == pytest.approx(100 / whole, rel=1e-2)


# --- What parts of one's own may take and return. ----------

PADDING, WORDS = 0, 20


class Reader(nn.Module):
    """Classifies padded texts: an embedding, four layers that read the mask, a mean."""

    def __init__(self) -> None:
        """Build the same weights on every rank."""
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def mix(self, layer: Any, x: Tensor, keep: Tensor) -> Tensor:
        """Add to each place the mean over those places that are kept."""
        weight = keep[..., None].to(x.dtype)
        return x + layer((x * weight).sum(1, keepdim=True) / weight.sum(1)[:, None])

    def pool(self, x: Tensor, keep: Tensor) -> Tensor:
        """Return the scores of the mean over places that are kept."""
        weight = keep[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))

    def forward(self, words: Tensor) -> Tensor:
        """Map (B, T) words to (B, 3) scores, as one process."""
        x, keep = self.embedding(words), words != PADDING
        for layer in self.layers:
            x = self.mix(layer, x, keep)
        return self.pool(x, keep)


class ReaderPart(nn.Module):
    """A stage of it that gets the mask as a keyword, or from the stage before."""

    def __init__(self, model: Reader, index: int, stages: int, way: str) -> None:
        """Keep some layers."""
        super().__init__()
        self.model = [model]  # no submodule
        own = torch.arange(4).tensor_split(stages)[index].tolist()
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in own})
        self.embedding = model.embedding if index == 0 else None
        self.head = model.head if index == stages - 1 else None
        self.way = way

    def forward(
        self, x: Tensor, told: Tensor | None = None, keep: Tensor | None = None
    ) -> Any:
        """Take words or activations, perhaps with the mask; return the same."""
        if self.embedding:
            keep, x = x != PADDING if keep is None else keep, self.embedding(x)
        keep = told != 0 if told is not None else keep
        assert keep is not None
        for layer in self.layers.values():
            x = self.model[0].mix(layer, x, keep)
        if self.head:
            return self.model[0].pool(x, keep)
        if self.way == "keyword":
            return x
        return x, keep.to(getattr(torch, self.way))


def padded(seed: int) -> tuple[Tensor, Tensor]:
    """Draw 8 texts of at most 6 words, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (8, 6), generator=generator)
    ends = torch.randint(1, 7, (8, 1), generator=generator)
    words[torch.arange(6) >= ends] = PADDING
    return words, words[:, 0] % 3


def far_from_one_process(way: str) -> tuple[float, float, int]:
    """Train a reader for three steps, then evaluate it; return how far it is.

    The largest difference of a weight, that of the losses, and the parameters seen.
    """
    losses_of = script("minimal").losses_of
    rank, stages = dist.get_rank(), dist.get_world_size()
    alone, part = Reader(), ReaderPart(Reader(), rank, stages, way)
    stage = PipelineStage(part, rank, stages, CPU)
    pipeline = script("minimal").Schedule1F1B(
        stage, 4, loss_fn=nn.functional.cross_entropy
    )
    adders = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, part)]
    off = 0.0
    for seed in range(4):
        words, classes = padded(seed)
        loss = nn.functional.cross_entropy(alone(words), classes)
        loss.backward()
        run = pipeline.step if seed < 3 else pipeline.eval
        more = {"keep": words != PADDING} if way == "keyword" else {}
        with torch.set_grad_enabled(seed < 3):
            losses = losses_of(run, stage, words, classes, **more)
        if rank == stages - 1:
            off = max(off, (torch.stack(losses).mean() - loss).abs().item())
        for adder in adders if seed < 3 else []:
            adder.step()
            adder.zero_grad()
    named = dict(alone.named_parameters())
    far = [(p - named[name]).abs().max().item() for name, p in part.named_parameters()]
    return max(far), off, len(far)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("way", ["keyword", "bool", "int64", "float32"])
def test_parts_exchange_tuples_and_take_keywords(
    worker_pool: WorkerPool, way: str, stages: int
) -> None:
    ends = worker_pool.run(far_from_one_process, way, world_size=stages)
    assert (
        max(far for far, _, _ in ends) < 1e-6 and max(off for _, off, _ in ends) < 1e-6
    )
    assert sum(seen for *_, seen in ends) == 1 + 2 * 4 + 2


def predicted(samples: int) -> tuple[int, list[bool]]:
    """Predict in four micro-batches: how many rows, and which are one process's."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(stages)]
    x = torch.randn(samples, 4)
    stage = PipelineStage(layers[rank], rank, stages, CPU)
    pipeline = script("minimal").Schedule1F1B(stage, 4)
    with torch.no_grad():
        out = pipeline.eval(*[x][rank:])
        right = nn.Sequential(*layers)(x)
    if rank < stages - 1:
        return 0, []
    return len(out), [torch.allclose(*pair) for pair in zip(out, right, strict=False)]


def test_predictions_of_a_batch_that_does_not_divide_have_rows_too_many(
    worker_pool: WorkerPool,
) -> None:
    # Of 15 samples the last micro-batch has 3, and the message has room for 4.
    for samples in (15, 16):
        _, ended = worker_pool.run(predicted, samples)
        assert ended == (16, [True] * samples)
    page = words_of(CHAPTER)
    assert "15 samples in 4 micro-batches silently give 16 predictions" in page


def counted_by_batch_norm(schedules: int, told: Any = None) -> tuple[list[int], bool]:
    """Train, evaluate, train, by one schedule or one for each; 4 micro-batches each.

    Stages may be told their shapes.
    Return how many micro-batches a BatchNorm has counted after each, and whether its
    running mean is a number. Memory without values holds nan.
    """
    rank, norm = dist.get_rank(), nn.BatchNorm1d(3)
    part, counted = nn.Sequential(nn.Linear(3, 3), norm), []
    pipelines = [
        script("minimal").Schedule1F1B(
            PipelineStage(part, rank, 2, CPU, **told or {}),
            *(4, nn.functional.mse_loss),
        )
        for _ in range(schedules)
    ]
    inputs, target = [torch.randn(8, 3)][rank:], torch.ones(8, 3) if rank else None
    torch.use_deterministic_algorithms(True)
    for trains in (True, False, True):
        part.train(trains)
        run = pipelines[0].step if trains else pipelines[-1].eval
        with torch.set_grad_enabled(trains):
            run(*inputs, target=target, return_outputs=False)
        counted.append(norm.state_dict()["num_batches_tracked"].item())
    torch.use_deterministic_algorithms(False)
    return counted, norm.state_dict()["running_mean"].isfinite().all().item()


@pytest.mark.parametrize(
    ("schedules", "counted"), [(1, [5, 5, 10]), (2, [5, 5, 9])], ids=["one", "two"]
)
def test_batch_norm_counts_a_micro_batch_of_no_values(
    worker_pool: WorkerPool, schedules: int, counted: list[int]
) -> None:
    ends = worker_pool.run(counted_by_batch_norm, schedules)
    # The first stage runs a real micro-batch once more, the second memory as it lies.
    assert ends == [(counted, True), (counted, False)]


def test_stages_that_know_their_shapes_count_no_micro_batch_more(
    worker_pool: WorkerPool,
) -> None:
    shape = torch.ones(2, 3, requires_grad=True)
    told = {"input_args": shape, "output_args": shape}
    ends = worker_pool.run(counted_by_batch_norm, 2, told)
    assert ends == [([4, 4, 8], True)] * 2
    page = words_of(f"{CHAPTER}/mistakes")
    assert "To learn shapes, `PipelineStage` runs" in page


def gradients_with_unequal_labels(reduction: str, weights: list[float]) -> float:
    """Step with labels of unequal weight, some ignored; how far is the gradient off?"""
    rank, layers = dist.get_rank(), [nn.Linear(4, 4), nn.Linear(4, 4)]
    torch.manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.weight)
    x, labels = torch.randn(8, 4), torch.tensor([1, 0, 2, -100, 3, 0, -100, -100])
    weight = torch.tensor(weights)
    score = functools.partial(nn.functional.cross_entropy, weight=weight)
    score(nn.Sequential(*layers)(x), labels).backward()
    due = layers[rank].weight.grad
    assert due is not None
    layers[rank].zero_grad()
    loss = functools.partial(score, reduction=reduction)
    stage, averages = PipelineStage(layers[rank], rank, 2, CPU), reduction == "mean"
    pipeline = script("minimal").Schedule1F1B(stage, 2, loss, scale_grads=averages)
    target = labels if rank else None
    pipeline.step(*[x][rank:], target=target, return_outputs=False)
    found = layers[rank].weight.grad
    assert found is not None
    found = found if averages else found / weight[labels[labels != -100]].sum()
    return (torch.dist(found, due) / due.norm()).item()


@pytest.mark.parametrize("weights", [[1.0] * 4, [1.0, 2.0, 5.0, 0.5]])
def test_labels_that_count_are_counted_over_the_batch(
    worker_pool: WorkerPool, weights: list[float]
) -> None:
    assert min(worker_pool.run(gradients_with_unequal_labels, "mean", weights)) > 0.01
    assert max(worker_pool.run(gradients_with_unequal_labels, "sum", weights)) < 1e-5


def gradients_of_three_calls(averages: bool) -> float:
    """Call `step` three times before an optimizer's step; how far is the mean off?"""
    rank, layers = dist.get_rank(), [nn.Linear(4, 4), nn.Linear(4, 4)]
    torch.manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.weight)
    x, target = torch.randn(24, 4), torch.randn(24, 4)
    nn.functional.mse_loss(nn.Sequential(*layers)(x), target).backward()
    due = layers[rank].weight.grad
    assert due is not None
    layers[rank].zero_grad()
    pipeline = script("minimal").Schedule1F1B(
        PipelineStage(layers[rank], rank, 2, CPU),
        *(2, nn.functional.mse_loss),
        scale_grads=averages,
    )
    for part, of_part in zip(x.chunk(3), target.chunk(3), strict=True):
        last = of_part if rank else None
        pipeline.step(*[part][rank:], target=last, return_outputs=False)
    found = layers[rank].weight.grad
    assert found is not None
    return (torch.dist(found / (3 if averages else 6), due) / due.norm()).item()


def test_each_call_of_step_divides_what_was_accumulated(
    worker_pool: WorkerPool,
) -> None:
    assert min(worker_pool.run(gradients_of_three_calls, True)) > 0.3
    assert max(worker_pool.run(gradients_of_three_calls, False)) < 1e-5


# Which of four stages do not train.
FROZEN = {"frozen": {0}, "two frozen": {0, 1}, "second frozen": {1}}
FROZEN |= {f"{way}, mended": stages for way, stages in FROZEN.items()}


class Quarter(nn.Module):
    """One of four stages: a layer, and perhaps a weight that acts on no input."""

    def __init__(self, index: int, way: str) -> None:
        """Freeze some stages' layers, or give the second one such a weight."""
        super().__init__()
        self.layer, self.index, self.way = nn.Linear(4, 4), index, way
        self.layer.requires_grad_(index not in FROZEN.get(way, ()))
        has_aside = (way, index) == ("aside", 1)
        self.aside = nn.Parameter(torch.ones(4)) if has_aside else None

    def forward(self, x: Tensor, y: Any = None) -> Any:
        """Map (B, 4) to (B, 4), or to two of them."""
        x = self.layer(x).tanh()
        is_mended = self.way.endswith("mended") and torch.is_grad_enabled()
        if is_mended and not x.requires_grad:
            x = x.detach().requires_grad_()
        y = y if self.aside is None else self.aside * torch.ones_like(x)
        if y is None:
            return x
        return x + y if self.index == 3 else (x, y)


def gradients_off(name: str, way: str) -> dict[str, float]:
    """Step once by this schedule; how far is the gradient of each parameter off?"""
    torch.manual_seed(0)
    quarters, rank = [Quarter(i, way) for i in range(4)], dist.get_rank()
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    out: Any = (x,)
    for quarter in quarters:
        out = quarter(*out) if isinstance(out, tuple) else quarter(out)
    nn.functional.mse_loss(out, target).backward()
    due: Any = [{n: p.grad for n, p in q.named_parameters()} for q in quarters]
    own = [rank, 3 - rank if "V" in name else rank + 2]
    own = [rank] if name == "1F1B" else own  # of four ranks
    for quarter in quarters:
        quarter.zero_grad()
    stages = [PipelineStage(quarters[i], i, 4, CPU) for i in own]
    of_rank: Any = stages if len(stages) > 1 else stages[0]
    schedule = get_schedule_class(name)(of_rank, 4, nn.functional.mse_loss)
    last = target if 3 in own else None
    schedule.step(*[x][rank:], target=last, return_outputs=False)
    off = {}
    for i in own:
        for n, p in quarters[i].named_parameters():
            if p.requires_grad:
                found = torch.zeros_like(p) if p.grad is None else p.grad
                off[f"{i}.{n}"] = (
                    torch.dist(found, due[i][n]) / due[i][n].norm()
                ).item()
    return off


@pytest.mark.parametrize(
    ("way", "lost"),
    [
        ("frozen", {"1.layer.weight", "1.layer.bias"}),
        ("two frozen", {"2.layer.weight", "2.layer.bias"}),
        ("second frozen", set()),
        ("aside", {"1.aside"}),
    ],
)
def test_zero_bubble_schedules_lose_gradients_in_silence(
    worker_pool: WorkerPool, way: str, lost: set[str]
) -> None:
    counted = []
    for name, way_of_it, gone in (
        ("1F1B", way, set()),
        ("Interleaved1F1B", way, set()),
        ("InterleavedZeroBubble", way, lost),
        ("ZBVZeroBubble", way, lost),
        *[("ZBVZeroBubble", f"{way}, mended", set())] * (way in FROZEN),
    ):
        ranks = 4 if name == "1F1B" else 2
        by_rank = worker_pool.run(gradients_off, name, way_of_it, world_size=ranks)
        off = {name: far for one in by_rank for name, far in one.items()}
        assert {n for n in off if off[n] == 1} == gone, name
        assert max(off[n] for n in off.keys() - gone) < 1e-5, name
        counted.append(len(off))
    # DualPipeV computes them apart for some micro-batches only, and loses these parts.
    by_rank = worker_pool.run(gradients_off, "DualPipeV", way)
    off = {name: far for one in by_rank for name, far in one.items()}
    assert {n for n in off if off[n] > 1e-5} == lost
    assert {n for n in off if 0.1 < off[n] < 0.5} == lost
    # A layer has a weight and a bias.
    trained = [2 * (4 - len(FROZEN[way]))] * 5 if way in FROZEN else [9] * 4
    assert counted == trained
    page = words_of(CHAPTER)
    assert "behind a frozen first stage" in page


class LooksUp(nn.Module):
    """A stage that looks up ids; the first one passes them on."""

    def __init__(self, is_first: bool, way: str) -> None:
        """Take the ids as the second argument, from every rank or from the first."""
        super().__init__()
        self.embedding, self.is_first, self.way = nn.Embedding(9, 4), is_first, way

    def forward(self, x: Tensor, ids: Any = None) -> Any:
        """Add the ids' rows to what comes, (B,) or (B, 4)."""
        ids = x if ids is None else ids
        if not self.is_first:
            return x + self.embedding(ids)
        found = self.embedding(ids)
        return found if self.way == "keyword" else (found, ids)


def step_that_looks_up(way: str) -> str:
    """Step with ids that come in a tuple or by keyword; return the error."""
    rank = dist.get_rank()
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    stage = PipelineStage(LooksUp(rank == 0, way), rank, 2, CPU, group=group)
    schedule = script("minimal").Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    ids, target = torch.arange(8), torch.ones(8, 4) if rank else None
    more = {"ids": ids} if way == "keyword" else {}
    torch.use_deterministic_algorithms(True)  # memory without values holds huge ids
    try:
        schedule.step(*[ids][rank:], target=target, return_outputs=False, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.use_deterministic_algorithms(False)
    return ""


def test_ids_that_a_later_stage_looks_up_go_by_keyword(
    worker_pool: WorkerPool,
) -> None:
    waited, failed = worker_pool.run(step_that_looks_up, "tuple")
    assert failed == "IndexError: index out of range in self" and waited
    assert worker_pool.run(step_that_looks_up, "keyword") == ["", ""]


class Scales(nn.Module):
    """A stage that multiplies."""

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply (B, D) by a factor for each of D columns, (D, 1)."""
        return x * factors.flatten()


def scaled_by_two_factors(is_told: bool) -> Any:
    """Run two micro-batches of two columns through a stage that scales each.

    The schedule may be told not to cut the factors.
    """
    rank, part = dist.get_rank(), Scales()
    stage = PipelineStage(part, rank, 2, CPU)
    whole = {"kwargs_chunk_spec": {"factors": _Replicate()}} if is_told else {}
    pipeline = script("minimal").Schedule1F1B(stage, 2, **whole)
    with torch.no_grad():
        out = pipeline.eval(
            *[torch.ones(4, 2)][rank:], factors=torch.tensor([[1.0], [2.0]])
        )
    return out.tolist() if rank else None


def test_a_keyword_without_samples_is_cut_as_well(worker_pool: WorkerPool) -> None:
    # One process gives [1, 4] for every sample: each column has its factor, twice.
    assert worker_pool.run(scaled_by_two_factors, False) == [
        None,
        [[1.0, 1.0], [1.0, 1.0], [4.0, 4.0], [4.0, 4.0]],
    ]
    due = [[1.0, 4.0]] * 4
    assert worker_pool.run(scaled_by_two_factors, True) == [None, due]


def step_in_place(is_mended: bool) -> str:
    """Step with a second stage that begins in place; return the error."""
    rank, relu = dist.get_rank(), nn.ReLU(inplace=not is_mended)
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    part = nn.Sequential(*[relu][1 - rank :], nn.Linear(4, 4))
    stage = PipelineStage(part, rank, 2, CPU, group=group)
    schedule = script("minimal").Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 4)
    try:
        schedule.step(*[x][rank:], target=x if rank else None, return_outputs=False)
    except Exception as error:
        return str(error)
    return ""


def test_a_stage_that_begins_in_place_fails(worker_pool: WorkerPool) -> None:
    waited, failed = worker_pool.run(step_in_place, False)
    said = "a leaf Variable that requires grad is being used in an in-place operation."
    assert failed == said and waited
    assert worker_pool.run(step_in_place, True) == ["", ""]


def losses_at(lengths: list[int]) -> list[tuple[float, float]]:
    """Evaluate texts of these lengths by one schedule: losses, and what is due."""
    rank, layers = dist.get_rank(), [nn.Embedding(9, 4), nn.Linear(4, 4)]
    torch.manual_seed(0)
    for layer in layers:
        nn.init.normal_(layer.weight)

    def score(x: Tensor, classes: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x.mean(1), classes)

    stage = PipelineStage(layers[rank], rank, 2, CPU)
    pipeline, found = script("minimal").Schedule1F1B(stage, 4, loss_fn=score), []
    for length in lengths:
        words, classes = torch.randint(9, (8, length)), torch.randint(4, (8,))
        with torch.no_grad():
            due = score(nn.Sequential(*layers)(words), classes)
            losses = script("minimal").losses_of(pipeline.eval, stage, words, classes)
        if losses:
            found.append((torch.stack(losses).mean().item(), due.item()))
    return found


def test_another_length_is_evaluated_wrongly_in_silence(
    worker_pool: WorkerPool,
) -> None:
    _, ((same, due), (shorter, right)) = worker_pool.run(losses_at, [6, 3])
    assert same == pytest.approx(due) and abs(shorter - right) > 0.01


def test_losses_of_moves_what_every_stage_takes() -> None:
    stage = Namespace(device="meta", is_first=True, is_last=True)
    run, one = mock.Mock(), torch.ones(2)
    script("minimal").losses_of(run, stage, one, one, mask=one, flag=True)
    (inputs,), named = run.call_args
    assert inputs.is_meta and named["target"].is_meta and named["mask"].is_meta
    assert named["flag"] is True


class Memory(nn.Module):
    """The end of an encoder, and a decoder's embeddings."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Take (B, T, D)."""
        return x * 1, x * 2


class Decoder(nn.Module):
    """A decoder of one layer, which may make gradients contiguous."""

    def __init__(self, is_mended: bool) -> None:
        """Build it."""
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.is_mended = is_mended

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        """Take what the first stage returns."""
        for one in (memory, x) if self.is_mended else ():
            if one.requires_grad:
                one.register_hook(Tensor.contiguous)
        return self.layer(x, memory)


def step_of_a_decoder(is_mended: bool) -> str:
    """Step with memory and decoder on two stages; return the error."""
    rank = dist.get_rank()
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    part = nn.Sequential(nn.Linear(4, 4), Memory()) if rank == 0 else Decoder(is_mended)
    stage = PipelineStage(part, rank, 2, CPU, group=group)
    schedule = script("minimal").Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 3, 4)
    try:
        schedule.step(*[x][rank:], target=x if rank else None, return_outputs=False)
    except Exception as error:
        return str(error)
    return ""


def test_a_stage_that_sends_gradients_with_other_strides_fails_before_it(
    worker_pool: WorkerPool,
) -> None:
    failed, waited = worker_pool.run(step_of_a_decoder, False)
    assert failed == "input tensor has to be contiguous" and waited
    assert worker_pool.run(step_of_a_decoder, True) == ["", ""]


class ChannelsLast(nn.Module):
    """A stage whose activations and gradients are not contiguous."""

    def __init__(self, mends: str) -> None:
        """Build it."""
        super().__init__()
        self.layer: Any = nn.Conv2d(3, 3, 3)
        self.layer.to(memory_format=torch.channels_last)
        self.mends = mends

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, 3, H - 2, W - 2)."""
        if "in" in self.mends and x.requires_grad:
            x.register_hook(Tensor.contiguous)
        x = self.layer(x)
        return x.contiguous() if "out" in self.mends else x


def step_of_channels_last(mends: str) -> str:
    """Step with two stages of this kind; return the error."""
    rank = dist.get_rank()
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    stage = PipelineStage(ChannelsLast(mends), rank, 2, CPU, group=group)
    schedule = script("minimal").Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    x, target = torch.ones(4, 3, 8, 8), torch.ones(4, 3, 4, 4)
    try:
        schedule.step(*[x][rank:], target=target if rank else None)
    except Exception as error:
        return str(error)
    return ""


def test_channels_last_wants_contiguous_activations_and_gradients(
    worker_pool: WorkerPool,
) -> None:
    for mends in ("", "in", "out"):
        assert "input tensor has to be contiguous" in worker_pool.run(
            step_of_channels_last, mends
        )
    assert worker_pool.run(step_of_channels_last, "in and out") == ["", ""]


# --- PyTorch's pipeline, in the first script. ----------


class Shifted(ScheduleGPipe):
    """Gives each micro-batch the labels of the next sample."""

    def step(self, *args: Any, target: Any = None, **more: Any) -> Any:
        """Move all labels on."""
        target = None if target is None else target.roll(1, 0)
        return super().step(*args, target=target, **more)


class Twice(ScheduleGPipe):
    """Counts the first micro-batch's loss twice; its gradients are right."""

    def step(self, *args: Any, losses: Any = None, **more: Any) -> Any:
        """Append one loss more."""
        super().step(*args, losses=losses, **more)
        if losses:
            losses.append(losses[0])


def scaled_by(factor: float, stage: Any, loss_fn: Any, **more: Any) -> ScheduleGPipe:
    """Make a schedule of which the loss, and so each gradient, is off."""
    return ScheduleGPipe(stage, loss_fn=lambda *x: loss_fn(*x) * factor, **more)


# What ScheduleGPipe is replaced by; whether all ranks, or the last alone, see that.
OTHER_SCHEDULES: dict[str, tuple[Any, bool]] = {
    "gradients summed": (functools.partial(ScheduleGPipe, scale_grads=False), True),
    "labels of another sample": (Shifted, True),
    "gradients a thousandth too large": (functools.partial(scaled_by, 1.001), True),
    "a loss twice": (Twice, False),
}


def first_pipeline(name: str, by: Any) -> tuple[str, str]:
    """Be one rank of minimal_gpipe.py with `by` for `name`; return output and error."""
    said, module = io.StringIO(), script("minimal_gpipe")
    with (
        contextlib.redirect_stdout(said),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(module, name, by),
    ):
        try:
            module.main()
        except AssertionError as error:
            return said.getvalue(), str(error)
    return said.getvalue(), ""


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_first_pipeline_computes_what_one_process_does(
    worker_pool: WorkerPool, ranks: int, schedule: Any
) -> None:
    words = ("ScheduleGPipe", schedule)
    *others, last = worker_pool.run(first_pipeline, *words, world_size=ranks)
    assert others == [("", "")] * (ranks - 1) and last[1] == ""
    # All over again: four means of 8 samples.
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    inputs, labels = torch.randn(2, 32, 16)
    errors = (nn.Sequential(*layers)(inputs) - labels).square()
    means = [errors[i : i + 8].mean().item() for i in (0, 8, 16, 24)]
    losses, check = last[0].splitlines()
    assert losses == "losses: " + " ".join(f"{mean:.3f}" for mean in means)
    assert check == "check: their mean, and 8 gradients, are one process's"


@pytest.mark.parametrize("fault", list(OTHER_SCHEDULES))
def test_first_pipeline_notices(worker_pool: WorkerPool, fault: str) -> None:
    by, is_seen_by_all = OTHER_SCHEDULES[fault]
    ends = worker_pool.run(first_pipeline, "ScheduleGPipe", by, world_size=2)
    assert [said for said, _ in ends] == ["", ""]
    seen = ["not close" in error for _, error in ends]
    assert seen == [is_seen_by_all, True]


@pytest.mark.parametrize("ranks", [None, "1", "5"])
def test_first_pipeline_names_its_ranks_before_they_join(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    joined = mock.Mock()
    monkeypatch.setattr(dist, "init_process_group", joined)
    with pytest.raises(SystemExit, match="4 layers take 2 to 4 ranks: torchrun --n"):
        script("minimal_gpipe").main()
    joined.assert_not_called()


def with_traced_stage() -> str:
    """Be a rank of minimal_gpipe.py with its commented lines; return its output."""
    file = ROOT / CHAPTER / "minimal_gpipe.py"
    commented = r"^    # ((?:cuts|traced|stage|part) = .*)"
    text, lines = re.subn(commented, r"    \1", file.read_text(), flags=re.M)
    text, made = re.subn(r"^    stage = PipelineStage\(.*\n", "", text, flags=re.M)
    assert (lines, made) == (4, 1)
    names: dict[str, Any] = {"__name__": "traced", "pipeline": pipeline}
    names["SplitPoint"] = SplitPoint
    exec(compile(text, str(file), "exec"), names)
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        mock.patch.object(dist, "init_process_group"),
    ):
        names["main"]()
    return said.getvalue()


def test_first_pipeline_can_be_traced(worker_pool: WorkerPool) -> None:
    first, last = worker_pool.run(with_traced_stage)
    assert first == ""
    assert "check: their mean, and 8 gradients, are one process's\n" in last


# --- The lessons, whole and broken. ----------


def local_norm(part: nn.Module, max_norm: float) -> Tensor:
    """Clip as one would without a pipeline."""
    return nn.utils.clip_grad_norm_(part.parameters(), max_norm)


def without_the_last_backward(stage: Any, micro_batches: int) -> None:
    """Be GPipe, but for one micro-batch's gradient."""
    for i in range(micro_batches):
        stage.forward(i)
    for i in range(micro_batches - 1):
        stage.backward(i)
    stage.in_flight.clear()


def unweighted(self: Any, i: int, x: Tensor, labels: Tensor) -> Tensor:
    """Give the smaller last micro-batch the weight of the others."""
    return self.part(x, labels) * (4 / len(labels) if self.is_last else 1)


# What is replaced: a module, a name in it, and by what.
FAULTS: dict[str, tuple[str, str, Any]] = {
    "a faulty GPipe": (
        "train_stages",
        "SCHEDULES",
        {**script("schedules").SCHEDULES, "gpipe": without_the_last_backward},
    ),
    "norm of one stage": ("train_stages", "clip_grad_norm", local_norm),
    "tied gradients apart": ("stage", "add_tied_gradients", lambda part, ends: None),
    "all micro-batches alike": ("stage.Stage", "compute_forward", unweighted),
}


def end_of(name: str, fault: str = "") -> tuple[Any, str]:
    """Be one rank of a lesson, perhaps with a fault; return status and output."""
    said, module = io.StringIO(), script(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(in_the_pool(module))
        # A check that fails leaves the group, which is the pool's.
        stack.enter_context(mock.patch.object(script("ranks"), "leave"))
        if fault in FAULTS:
            place, replaced, by = FAULTS[fault]
            target = script(place.split(".")[0])
            target = getattr(target, place.split(".")[1]) if "." in place else target
            stack.enter_context(mock.patch.object(target, replaced, by))
        elif fault == "last parameter":  # two_stages: half of its gradient
            right = module.forward_and_backward

            def halves_one(part: Any, *tokens: Tensor) -> None:
                right(part, *tokens)
                list(part.parameters())[-1].grad /= 2

            fake = mock.patch.object(module, "forward_and_backward", halves_one)
            stack.enter_context(fake)
        elif fault:  # two_stages: what travels is wrong
            kind = {"activations": 0, "gradient": 1}[fault]
            send = dist.send

            def halved(tensor: Tensor, dst: int) -> None:
                send(tensor / 2 if dist.get_rank() == kind else tensor, dst=dst)

            stack.enter_context(mock.patch.object(dist, "send", halved))
        try:
            module.main()
        except SystemExit as end:
            return end.code, said.getvalue()
    return 0, said.getvalue()


@pytest.mark.parametrize("p", [2, 3, 4])
def test_lesson_holds_on_so_many_stages(worker_pool: WorkerPool, p: int) -> None:
    (status, said), *others = worker_pool.run(end_of, "train_stages", world_size=p)
    assert others == [(0, "")] * (p - 1) and status == 0
    by_gpipe, by_1f1b, check = said.splitlines()
    cut = {2: [3, 2], 3: [2, 2, 1], 4: [2, 1, 1, 1]}[p]
    told = f"blocks {cut}, in flight at most"
    assert by_gpipe == f"gpipe       | {told} {[8] * p}, by stage"
    most = [p - i for i in range(p)]
    assert by_1f1b == f"one_f_one_b | {told} {most}, by stage"
    assert check == "check: 110 tensors after 3 steps are one process's"


@pytest.mark.parametrize("fault", list(FAULTS))
def test_lesson_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(end_of, "train_stages", fault, world_size=3)
    assert [status for status, _ in ends] == [1, 1, 1]
    assert "check failed on ranks" in ends[0][1]


def largest_difference(fault: str) -> tuple[float, float]:
    """Train by 1F1B: the largest difference, and the largest weight of a matrix."""
    lesson = script("train_stages")
    alone = lesson.weights_of_one_process(CPU)
    with contextlib.ExitStack() as stack:
        if fault:
            place, replaced, by = FAULTS[fault]
            stack.enter_context(mock.patch.object(script(place), replaced, by))
        model, batches = lesson.model_and_batches(CPU)
        part = lesson.Part(model, dist.get_rank(), [2, 1, 1, 1])
        lesson.train_by_schedule(
            lesson.Stage(part), lesson.SCHEDULES["one_f_one_b"], batches
        )
    weights = part.state_dict()
    far = max((p - alone[name]).abs().max().item() for name, p in weights.items())
    return far, max(p.abs().max().item() for p in alone.values() if p.ndim > 1)


def test_faults_move_the_weights_as_far_as_the_page_says(
    worker_pool: WorkerPool,
) -> None:
    page = (ROOT / CHAPTER / "README.md").read_text()
    rows = {
        "as above": "",
        "each stage clips by its own norm": "norm of one stage",
        "the tied matrix's gradients are not added up": "tied gradients apart",
    }
    for row, fault in rows.items():
        (limit, told) = re.findall(rf"^\| {row} \| (below )?(\S+) \|$", page, re.M)[0]
        found = worker_pool.run(largest_difference, fault, world_size=4)
        far = max(far for far, _ in found)
        # What rounding makes is another number on another processor.
        assert bool(limit) == (not fault), row
        if limit:
            assert far < float(told) < 1e-12
        else:
            assert f"{far:.0e}" == f"{float(told):.0e}", row
        assert {f"{largest:.1f}" for _, largest in found} == {"0.4"}
    assert len(rows) == 3


def test_two_stages_as_the_page_has_it(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(end_of, "two_stages")
    assert ends[0][1].endswith("45 gradients of two stages are one process's\n")
    assert [status for status, _ in ends] == [0, 0] and ends[1][1] == ""


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [("activations", "[0, 1]"), ("gradient", "[0]"), ("last parameter", "[0, 1]")],
)
def test_two_stages_notices(worker_pool: WorkerPool, fault: str, ranks: str) -> None:
    ends = worker_pool.run(end_of, "two_stages", fault)
    assert [status for status, _ in ends] == [1, 1]
    assert f"check failed on ranks {ranks}" in ends[0][1]


# --- train.py. ----------

TINY = ["--width=16", "--heads=2", "--block-size=16", "--samples=48", "--max-epochs=1"]
TINY += ["--batch-size=4", "--grad-accum-steps=4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text to train on."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


class Run(NamedTuple):
    """What a rank of train.py printed, how it ended, its calls, what it draws from."""

    output: str
    status: Any
    calls: list[tuple[int, str]]
    seed: int


def run_train(chapter: str, *words: str, stop_after: int = 0) -> Run:
    """Be a rank of a chapter's train.py in the pool's group, perhaps not to its end."""
    train, said, calls = load_chapter(chapter)["train"], io.StringIO(), []
    status: Any = 0
    state = train.checkpoint.TrainingState
    when_due = state.save_when_due

    def save_when_due(self: Any) -> bool:
        if self.step != stop_after:
            return when_due(self)
        self.save()
        return True

    forward = PipelineStage.forward_one_chunk
    backward = PipelineStage.backward_one_chunk
    generate = train.GPT.generate

    def generate_three(self: Any, prompt: bytes, _: int, **more: Any) -> str:
        return generate(self, prompt, 3, **more)  # of 200, which take as many passes

    def note_forward(self: Any, i: int, *rest: Any, **more: Any) -> Any:
        calls.append((self.stage_index, f"F{i}"))
        return forward(self, i, *rest, **more)

    def note_backward(self: Any, i: int, *rest: Any, **more: Any) -> Any:
        calls.append((self.stage_index, f"B{i}"))
        return backward(self, i, *rest, **more)

    with (
        in_the_pool(train.ranks, *words),
        mock.patch.object(state, "save_when_due", save_when_due),
        mock.patch.object(PipelineStage, "forward_one_chunk", note_forward),
        mock.patch.object(PipelineStage, "backward_one_chunk", note_backward),
        mock.patch.object(train.GPT, "generate", generate_three),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            train.main(train.ranks.read_options(**train.OPTIONS))
        except SystemExit as end:
            status = end.code
    return Run(said.getvalue(), status, calls, torch.initial_seed())


def weights_in(path: Path) -> dict[str, Tensor]:
    """Load a checkpoint's model."""
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def words(text: Path) -> list[str]:
    """Return a command line that trains for three steps."""
    return [*TINY, "--layers=4", f"--text={text}", "--lr=0.01"]


@pytest.fixture(scope="module")
def alone(
    worker_pool: WorkerPool,
    words: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Tensor]:
    """Return the weights that train.py gives on one rank."""
    path = tmp_path_factory.mktemp("alone") / "gpt.pt"
    more = ["--schedule=GPipe", f"--checkpoint={path}"]
    (run,) = worker_pool.run(run_train, CHAPTER, *words, *more, world_size=1)
    assert run.status == 0, run.output
    return weights_in(path)


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [
        ("GPipe", 2),
        ("1F1B", 4),
        ("Interleaved1F1B", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
    ],
)
def test_train_gives_the_weights_of_one_rank(
    worker_pool: WorkerPool,
    words: list[str],
    alone: dict[str, Tensor],
    tmp_path: Path,
    schedule: str,
    world_size: int,
) -> None:
    more = [f"--schedule={schedule}", f"--checkpoint={tmp_path / 'gpt.pt'}"]
    runs = worker_pool.run(run_train, CHAPTER, *words, *more, world_size=world_size)
    assert [run.status for run in runs] == [0] * world_size, runs[0].output
    said = f"{world_size} rank(s), a gradient"
    assert said in runs[0].output.splitlines()[-1]
    (losses,) = re.findall(r"validation: (\S+) .* before, (\S+) ", runs[0].output)
    assert float(losses[0]) > float(losses[1]) + 0.1
    ours = weights_in(tmp_path / "gpt.pt")
    assert list(ours) == list(alone) and len(alone) > 30
    torch.testing.assert_close(ours, alone, rtol=1e-3, atol=1e-5)


def gradient_of_a_shared_matrix(name: str, scale_grads: bool) -> float:
    """Let two stages of rank 0 share a matrix; return its gradient over what is due."""
    torch.manual_seed(0)
    layers, rank = [nn.Linear(4, 4, bias=False) for _ in range(4)], dist.get_rank()
    by_rank = [[r, 3 - r if "V" in name else r + 2] for r in range(2)]
    first, second = by_rank[0]
    layers[second].weight = layers[first].weight
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    nn.functional.mse_loss(nn.Sequential(*layers)(x), target).backward()
    matrix: Any = layers[by_rank[rank][0]].weight
    due = matrix.grad.norm()
    matrix.grad = None
    stages = [PipelineStage(layers[i], i, 4, CPU) for i in by_rank[rank]]
    schedule = get_schedule_class(name)(
        stages, 4, nn.functional.mse_loss, scale_grads=scale_grads
    )
    last = target if 3 in by_rank[rank] else None
    schedule.step(*[x][rank:], target=last, return_outputs=False)
    found: Any = matrix.grad
    return (found.norm() / due).item()


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "Interleaved1F1B"])
def test_each_stage_divides_its_gradients(worker_pool: WorkerPool, name: str) -> None:
    # Why train.py, whose two stages of a rank may have the tied matrix, divides itself.
    # What the first stage that is done finds in the matrix is divided twice: by 16.
    tied, own = worker_pool.run(gradient_of_a_shared_matrix, name, True)
    assert 0.3 < tied < 0.7 and own == pytest.approx(1)
    assert (
        worker_pool.run(gradient_of_a_shared_matrix, name, False)
        == [pytest.approx(4)] * 2
    )


def loss_of_many_micro_batches(dtype: torch.dtype) -> tuple[float, float]:
    """Run 512 of one sample through two stages; return the loss, and what is due."""
    stage, part = script("stage"), script("part")
    torch.manual_seed(0)
    config = part.GPTConfig(width=16, heads=2, layers=2, block_size=8)
    model = part.GPT(config).to(dtype)
    tokens = torch.randint(256, (512, 9))
    due = 0.0
    with torch.no_grad():
        for one in tokens.split(1):
            due += model(one[:, :-1], one[:, 1:]).item() / len(tokens)
    ours = stage.Stage(part.Part(model, dist.get_rank(), stage.even_cut(2, 2)))
    schedule = script("schedules").one_f_one_b
    return ours.run(schedule, tokens[:, :-1], tokens[:, 1:], 1).item(), due


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(
            pytest.param(dtype, marks=pytest.mark.slow)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
)
def test_a_loss_of_many_micro_batches_is_added_up_in_float32(
    worker_pool: WorkerPool, dtype: torch.dtype
) -> None:
    (none, _), (found, due) = worker_pool.run(loss_of_many_micro_batches, dtype)
    assert none == 0 and found == pytest.approx(
        due, rel=1e-12 if dtype == torch.float64 else 1e-5
    )


def errors_of_a_step(text: Path, is_halved: bool) -> float:
    """Compare a step in training mode, with dropout, with one process's gradient."""
    staged, data = script("staged_gpt"), script("data")
    sizes = {"block_size": 8, "width": 16, "layers": 2, "heads": 2, "dropout": 0.3}
    model = staged.StagedGPT(staged.GPT(staged.GPTConfig(**sizes)), "GPipe").train()

    def add_gradients(micro_batches: list) -> None:
        ((_, *tokens),) = micro_batches
        model.parts["0"](*tokens).backward()
        if is_halved:
            list(model.parameters())[-2].grad /= 2

    dataset = data.WindowDataset(data.load_text(text, 8)[0], 8, 16)
    return staged.largest_error(model, add_gradients, dataset, 16)


def test_largest_error_is_of_all_parameters_and_without_dropout(
    worker_pool: WorkerPool, text: Path
) -> None:
    (error,) = worker_pool.run(errors_of_a_step, text, False, world_size=1)
    assert error < 1e-6
    (error,) = worker_pool.run(errors_of_a_step, text, True, world_size=1)
    assert error > 1e-4


def evaluated_and_loaded() -> tuple[float, Any, str]:
    """Evaluate stages under autocast, and load two files; return how they end."""
    staged = script("staged_gpt")
    sizes = {"block_size": 8, "width": 16, "heads": 2, "layers": 2}
    torch.manual_seed(0)
    whole, tokens = staged.GPT(staged.GPTConfig(**sizes)), torch.randint(256, (2, 8))
    model = staged.StagedGPT(whole, "1F1B")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        apart = (model(tokens) - whole(tokens)).abs().max().item()
    right = model.load_state_dict(whole.state_dict())
    deeper = staged.GPT(staged.GPTConfig(**{**sizes, "layers": 4}))
    try:
        model.load_state_dict(deeper.state_dict())
    except RuntimeError as error:
        return apart, tuple(right), str(error)
    return apart, tuple(right), ""


def test_stages_evaluate_under_autocast_and_refuse_another_models_file(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(evaluated_and_loaded)
    assert len(ends) == 2
    for apart, keys, said in ends:
        assert apart == 0 and keys == ([], []) and "Unexpected key(s)" in said


def train_with_tied_gradients_apart(*words: str) -> Run:
    """Be a rank of a run in which embedding and head keep their own gradients."""
    with (
        mock.patch.object(
            script("staged_gpt"), "add_tied_gradients", lambda model, ends: None
        ),
        mock.patch.object(script("ranks"), "leave"),
    ):
        return run_train(CHAPTER, *words)


def test_train_notices_a_gradient_that_is_not_one_processs(
    worker_pool: WorkerPool, words: list[str]
) -> None:
    more = [*words, "--max-steps=1"]
    runs = worker_pool.run(train_with_tied_gradients_apart, *more)
    assert [run.status for run in runs] == [1, 1]
    assert "check failed on ranks [0, 1]" in runs[0].output


def test_train_makes_the_calls_of_the_lessons_1f1b(
    worker_pool: WorkerPool, words: list[str]
) -> None:
    more = [*words, "--max-steps=1", "--seed=5"]
    runs = worker_pool.run(run_train, CHAPTER, *more, world_size=4)
    assert len(runs) == 4
    for index, run in enumerate(runs):
        first_step = [call for stage, call in run.calls if stage == index][:8]
        assert " ".join(first_step) == order("one_f_one_b", index, 4, 4)
    assert [run.seed for run in runs] == [5, 6, 7, 8]  # each draws its own masks
    rule = "Seed each rank by itself once the weights are made, or all stages draw one"
    assert f"- **Dropout.** {rule} mask." in words_of(f"{CHAPTER}/balance")


def rates_and_log(*words: str) -> tuple[list[float], list[dict[str, float]], str]:
    """Run train.py; return the rates that make the utilisation, the log, the output."""
    staged, checkpoint = script("staged_gpt"), script("checkpoint")
    rates, logged = [], []

    def utilisation(self: Any, rate: float, device: torch.device) -> str:
        rates.append(rate)
        return ""

    def open_log(*_: Any) -> Callable:
        return lambda step, **values: logged.append(values)

    with (
        mock.patch.object(staged.StagedGPT, "utilisation", utilisation),
        mock.patch.object(checkpoint, "open_log", open_log),
    ):
        return rates, logged, run_train(CHAPTER, *words).output


def test_a_rank_uses_its_part_of_the_rate_and_the_log_has_the_learning_rate(
    worker_pool: WorkerPool, words: list[str]
) -> None:
    (rates, logged, said), _ = worker_pool.run(rates_and_log, *words)
    assert len(rates) == len(logged) == 3
    lr_factor = script("train").lr_factor
    for step, (rate, values) in enumerate(zip(rates, logged, strict=True), start=1):
        assert f"step {step:3} of 3 | mean loss {values['loss']:.3f}" in said
        assert values["tokens_per_second"] == pytest.approx(2 * rate)
        assert values["lr"] == pytest.approx(0.01 * lr_factor(step, 3))


def test_learning_rate_is_the_same_in_every_train_py() -> None:
    chapters = ["03_ddp_torchrun", "06_fsdp", "07_tensor_parallel", CHAPTER]
    texts = [(ROOT / chapter / "train.py").read_text() for chapter in chapters]
    found = [re.findall(r"^def lr_factor.*?(?=^def )", x, re.M | re.S) for x in texts]
    assert len(found) == 4 and found == [found[0]] * 4 and "0.45" in found[0][0]


def run_until(chapter: str, words: list[str], stop_after: int) -> Run:
    """Be a rank of a run that stops after so many steps."""
    return run_train(chapter, *words, stop_after=stop_after)


def test_checkpoint_goes_from_03_to_08_and_back(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    # Two epochs of two steps.
    words = [*TINY, "--layers=3", f"--text={text}", "--lr=0.01", "--seed=1"]
    words += ["--samples=32", "--max-epochs=2"]
    uninterrupted, path = tmp_path / "uninterrupted.pt", tmp_path / "gpt.pt"
    legs: list[tuple[str, int, int, Path, list[str]]] = [
        (CHAPTER, 3, 0, uninterrupted, []),
        ("03_ddp_torchrun", 1, 1, path, []),
        (CHAPTER, 3, 2, path, []),
        ("03_ddp_torchrun", 1, 3, path, []),
        (CHAPTER, 3, 0, path, ["--batch-size=2"]),  # of a micro-batch: eight in a step
    ]
    uneven, losses, said = [*words, f"--checkpoint={path}", "--batch-size=3"], [], []
    for chapter, n, stop_after, file, more in legs:
        every = [*words, f"--checkpoint={file}", *more]
        runs = worker_pool.run(run_until, chapter, every, stop_after, world_size=n)
        assert [run.status for run in runs] == [0] * n, runs[0].output
        losses.append(re.findall(r"mean loss (\S+)", runs[0].output))
        said.append(runs[0].output)
        if stop_after == 1:
            (refused,) = worker_pool.run(run_until, CHAPTER, uneven, 0, world_size=1)
            assert refused.status == 2
            assert "micro-batches must be equal" in refused.output
            other = [*every, "--lr=0.02"]
            (refused,) = worker_pool.run(run_until, CHAPTER, other, 0, world_size=1)
            assert refused.status == 2 and "with --lr=0.01, this" in refused.output
    assert "step 3, global batch size 16" in said[4]
    ends = [text.count("16 x 2 = 32 different samples") for text in said]
    assert ends == [2, 0, 1, 0, 1]
    assert len(losses[0]) == 4 and losses[0] == [
        loss for leg in losses[1:] for loss in leg
    ]
    expected, found = (
        torch.load(one, weights_only=True) for one in (uninterrupted, path)
    )
    torch.testing.assert_close(found["model"], expected["model"], rtol=1e-3, atol=1e-5)
    ours, alone = (one["training"]["optimizer"]["state"] for one in (found, expected))
    assert list(ours) == list(alone) == list(range(len(ours))) and len(ours) > 20
    for number in ours:
        for moment in ("exp_avg", "exp_avg_sq"):
            theirs = alone[number][moment]
            torch.testing.assert_close(
                ours[number][moment], theirs, rtol=1e-2, atol=1e-7
            )


@pytest.mark.parametrize(
    ("schedule", "layers", "samples", "complaint"),
    [
        ("1F1B", 1, 64, "1 layers are too few for 2 stages"),
        ("ZBVZeroBubble", 3, 64, "3 layers are too few for 4 stages"),
        ("GPipe", 2, 60, "micro-batches must be equal"),
        ("1F1B", 2, 16, r"1 micro-batch\(es\) are too few for 2 ranks"),
        ("Interleaved1F1B", 4, 112, "7 micro-batches do not divide into 3 rounds"),
        ("InterleavedZeroBubble", 4, 112, "7 micro-batches do not divide into 3"),
    ],
)
def test_too_few_or_unequal_parts_are_refused(
    schedule: str, layers: int, samples: int, complaint: str
) -> None:
    check_cut = script("staged_gpt").check_cut
    options = Namespace(schedule=schedule, layers=layers, batch_size=16)
    with pytest.raises(ValueError, match=complaint):
        check_cut(options, samples, 2)
    options.layers = 8
    check_cut(options, 64, 2)


def fewer_than_ranks(schedule: str, micro_batches: int) -> tuple[str, float]:
    """Step with so many micro-batches: PyTorch's refusal, or the gradients' error."""
    staged, train = script("staged_gpt"), script("train")
    sizes = {"block_size": 4, "width": 8, "layers": 6, "heads": 1}
    torch.manual_seed(0)
    whole = staged.GPT(staged.GPTConfig(**sizes))
    model, count = staged.StagedGPT(whole, schedule), micro_batches
    stages: Any = [
        PipelineStage(part, int(i), len(model.owners), CPU)
        for i, part in model.parts.items()
    ]
    try:
        pipeline = train.get_schedule_class(schedule)(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=count,
            loss_fn=lambda *both: staged.token_loss(*both) / count,
            scale_grads=False,
        )
    except ValueError as error:
        return str(error), 0.0
    step = functools.partial(train.add_gradients, pipeline, model)
    text = torch.arange(100, dtype=torch.uint8)
    dataset = script("data").WindowDataset(text, 4, count)
    return "", staged.largest_error(model, step, dataset, count)


@pytest.mark.parametrize("schedule", list(script("staged_gpt").PLACES))
def test_1f1b_alone_wants_as_many_micro_batches_as_ranks(
    worker_pool: WorkerPool, schedule: str
) -> None:
    for count in (1, 2):
        options = Namespace(schedule=schedule, layers=6, batch_size=1)
        ends = worker_pool.run(fewer_than_ranks, schedule, count, world_size=3)
        if schedule == "1F1B":
            assert all("or equal to the number of stages" in said for said, _ in ends)
            with pytest.raises(ValueError, match="too few for 3 ranks"):
                script("staged_gpt").check_cut(options, count, 3)
        else:
            assert [said for said, _ in ends] == ["", "", ""]
            assert max(error for _, error in ends) < 1e-6
            script("staged_gpt").check_cut(options, count, 3)


def step_of_unequal_parts() -> str:
    """Give a schedule of PyTorch five samples as two micro-batches."""
    index, stages = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    stage = PipelineStage(nn.Linear(2, 2), index, stages, CPU, group=group)
    loss: Any = nn.functional.cross_entropy
    schedule = script("train").get_schedule_class("GPipe")(stage, 2, loss_fn=loss)
    inputs = [torch.ones(5, 2)] if index == 0 else []
    labels = torch.ones(5, dtype=torch.long) if index == stages - 1 else None
    try:
        schedule.step(*inputs, target=labels)
    except Exception as error:
        return str(error)
    return ""


def test_unequal_micro_batches_fail_from_two_ranks_on(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(step_of_unequal_parts, world_size=1) == [""]
    waited, failed = worker_pool.run(step_of_unequal_parts)
    text = "Expected input batch_size (3) to match target batch_size (2)"
    assert waited and text in failed


def test_a_run_with_amp_does_not_resume_here(
    worker_pool: WorkerPool, words: list[str], tmp_path: Path
) -> None:
    words = [*words, f"--checkpoint={tmp_path / 'gpt.pt'}", "--max-steps=1"]
    (run,) = worker_pool.run(
        run_train, "03_ddp_torchrun", *words, "--amp", world_size=1
    )
    assert run.status == 0, run.output
    (refused,) = worker_pool.run(run_train, CHAPTER, *words, world_size=1)
    assert refused.status == 2 and "from a run with --amp=True" in refused.output


def test_train_refuses_in_one_line(worker_pool: WorkerPool, text: Path) -> None:
    words = [*TINY, f"--text={text}", "--layers=1"]
    runs = worker_pool.run(run_train, CHAPTER, *words)
    assert [run.status for run in runs] == [2, 2]
    complaint = "1 layers are too few for 2 stages"
    assert [complaint in run.output for run in runs] == [True, True]


@pytest.mark.slow  # the page starts them as well
@pytest.mark.smoke
def test_two_stages_are_started_as_the_page_says() -> None:
    result = torchrun(ROOT / CHAPTER / "two_stages.py", nproc=2)
    assert result.returncode == 0
    assert "gradients of two stages are one process's" in result.stdout
