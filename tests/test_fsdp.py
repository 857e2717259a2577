"""Chapter 06: DTensors, FSDP2 and distributed checkpoints, held against one process."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import io
import json
import math
import re
import resource
import sys
from collections import Counter, UserDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.optimizer import _foreach_supported_types
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from launch import ROOT, clean_environment, torchrun
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from tiny_gpt import write_text
from worker_pool import RankDied, RankError, WorkerPool

CHAPTER, DDP = "06_fsdp", "03_ddp_torchrun"
SETTINGS, CHECKPOINTS = f"{CHAPTER}/settings", f"{CHAPTER}/checkpoints"
DTENSOR = f"{CHAPTER}/dtensor"
# A model and an epoch that take milliseconds: 48 samples of 16 bytes.
TINY = ["--layers=2", "--width=16", "--heads=2", "--block-size=16", "--samples=48"]
FLOAT64 = torch.float64

# @record, around main(), has faulthandler write to a stderr that pytest has taken.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text to train on."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def ending(folder: str, script: str, **faults: Any) -> tuple[Any, str]:
    """Run a lesson with some of its parts replaced; return exit code and last line."""
    lesson, errors = load_chapter(folder)[script], io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(errors))
        # A check that fails leaves the group, which is the pool's.
        ranks = load_chapter(folder)["ranks"]
        stack.enter_context(mock.patch.object(ranks, "leave"))
        for name, fault in faults.items():
            stack.enter_context(mock.patch.object(lesson, name, fault))
        try:
            return 0, (run_lesson(folder, script).splitlines() or [""])[-1]
        except SystemExit as end:
            return end.code, errors.getvalue().strip()


def assert_failed(ends: list[tuple[Any, str]], claim: str) -> None:
    """Assert that the check of a lesson was red on every rank."""
    assert [status for status, _ in ends] == [1] * len(ends)
    said = ends[0][1].splitlines()[-1]  # above it there may be a warning
    assert re.match(rf"check failed on ranks \[.+\], not so: {claim}", said), ends


# --- The picture of a step. ----------


def record_the_picture() -> list[list[str]]:
    """Record the step of assets/06_fsdp.png again."""
    with mock.patch.object(sys, "path", [str(ROOT / "assets"), *sys.path]):
        recording = importlib.import_module("record_fsdp")
    return [list(event) for event in recording.record_step()]


def test_picture_is_drawn_from_what_fully_shard_does(worker_pool: WorkerPool) -> None:
    drawn = json.loads((ROOT / "assets" / "06_fsdp.json").read_text())
    assert len(drawn) == 2
    for events in drawn:
        for kind, units in (
            ("gather", "R123321"),
            ("forward", "R123R"),
            ("backward", "R321R"),
            ("reduce-scatter", "321R"),
            ("free", "123321R"),
        ):
            assert "".join(unit for event, unit in events if event == kind) == units
    assert worker_pool.run(record_the_picture) == drawn


# --- DTensor. ----------


@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_changes_of_placement_are_collectives(
    worker_pool: WorkerPool, world_size: int
) -> None:
    outputs = worker_pool.run(run_lesson, DTENSOR, "dtensor", world_size=world_size)
    lines = outputs[0].splitlines()
    rows = {2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 2, 0]}[world_size]
    shapes = [(n, 4) for n in rows]
    placed = f"shape (6, 4), placed (Shard(dim=0),), on ranks {shapes}"
    assert lines[0] == placed
    assert len(lines) == 9 and outputs[1:] == [""] * (world_size - 1)
    found = {tuple(re.split(r" +(?:->|\|) +", line)) for line in lines[1:6]}
    assert found == {
        ("Shard(dim=0)", "Replicate()", "1 all_gather_into_tensor"),
        ("Replicate()", "Shard(dim=0)", "none"),
        ("Shard(dim=0)", "Shard(dim=1)", "1 all_gather_into_tensor"),
        ("Partial(sum)", "Replicate()", "1 all_reduce"),
        ("Partial(sum)", "Shard(dim=0)", "1 reduce_scatter_tensor"),
    }
    assert lines[6].endswith("| 1 all_gather_into_tensor, 1 reduce_scatter_tensor")
    assert lines[7] == f"its gradient | placed (Shard(dim=0),), on ranks {shapes}"
    assert lines[8] == "check: 5 tensors and a gradient are one process's"


def local_gradient(inputs: torch.Tensor, weight: DTensor) -> torch.Tensor:
    """Forget that the gradients of the ranks are terms of a sum."""
    return inputs @ weight.full_tensor().detach().t() + weight.full_tensor().sum() * 0


def wrong_rows(inputs: torch.Tensor, weight: DTensor) -> torch.Tensor:
    """Take the rows of the weight in another order."""
    return inputs @ weight.full_tensor().flip(0).t().pow(1)


def doubled_sum(tensor: DTensor, placement: Any) -> tuple[DTensor, str]:
    """Change the placement of a tensor; of a sum, the values too."""
    times = 2 if tensor.placements[0].is_partial() and placement.is_shard() else 1
    changed: Any = tensor.redistribute(placements=[placement])
    return times * changed, ""


@pytest.mark.parametrize("fault", [local_gradient, wrong_rows, doubled_sum])
def test_dtensor_notices_a_wrong_part(worker_pool: WorkerPool, fault: Any) -> None:
    ends = worker_pool.run(ending_with_part, fault.__name__)
    assert_failed(ends, "5 tensors and a gradient are one process's")


def ending_with_part(name: str) -> tuple[Any, str]:
    """Run dtensor.py with another layer, or another change of placement."""
    part = "change" if name == "doubled_sum" else "sharded_linear"
    return ending(DTENSOR, "dtensor", **{part: globals()[name]})


# --- train.py. ----------


def run_train(chapter: str, sgd: bool, *words: str, stop_at: int = 0) -> str:
    """Be a rank of a chapter's train.py in float64; return what it printed.

    By SGD a wrong factor in the gradient is seen; AdamW nearly hides it. A run that is
    to stop is interrupted after the checkpoint of a step.
    """
    train, output = load_chapter(chapter)["train"], io.StringIO()
    torch.set_default_dtype(FLOAT64)

    def plain_sgd(parameters: Any, lr: float, **_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=0.9)

    class Stop(BaseException):
        pass

    units: list[str] = []

    def shard(module: Any, **settings: Any) -> Any:
        units.append(type(module).__name__)
        return fully_shard(module, **settings)

    save, seed, seeds = train.checkpoint.TrainingState.save, torch.manual_seed, []

    def seeded(number: int) -> torch.Generator:
        seeds.append(number)
        return seed(number)

    def save_and_stop(run: Any, *rest: Any) -> None:
        save(run, *rest)
        if run.step == stop_at:
            dist.barrier()
            raise Stop

    with (
        in_the_pool(train.ranks, *words),
        mock.patch.object(train.checkpoint.TrainingState, "save", save_and_stop),
        mock.patch.object(
            torch.optim, "AdamW", plain_sgd if sgd else torch.optim.AdamW
        ),
        mock.patch.object(train, "fully_shard", shard, create=True),
        mock.patch.object(torch, "manual_seed", seeded),
        # Two hundred forward passes for a text that nobody reads here.
        mock.patch.object(train.GPT, "generate", lambda *_, **__: ""),
        contextlib.redirect_stdout(output),
        contextlib.suppress(Stop),
    ):
        train.main(train.ranks.read_options(**train.OPTIONS))
    assert units == (["Block", "Block", "GPT"] if chapter == CHAPTER else [])
    assert seeds == [0, dist.get_rank()]  # the same weights, and other dropout
    return output.getvalue()


def words_for(text: Path, path: Path, ranks: int, parts: int = 1) -> list[str]:
    """Return a command line by which each number of ranks takes the same steps."""
    words = [*TINY, "--max-epochs=3", "--lr=0.03", f"--text={text}"]
    words += [f"--batch-size={12 // ranks // parts}", f"--grad-accum-steps={parts}"]
    return [*words, f"--checkpoint={path}", "--checkpoint-every=3"]


def largest_difference(one: Any, other: Any) -> float:
    """Compare two checkpoints: the weights and the optimizer's state."""
    pairs = [
        (one["model"][name], other["model"][name])
        for name in one["model"] | other["model"]
    ]
    states = [c["training"]["optimizer"]["state"] for c in (one, other)]
    assert states[0].keys() == states[1].keys()
    for number in states[0]:
        assert states[0][number].keys() == states[1][number].keys()
        pairs += [(v, states[1][number][k]) for k, v in states[0][number].items()]
    pairs = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
    assert len(pairs) > 30
    return max((a - b).abs().max().item() for a, b in pairs)


def load(path: Path) -> Any:
    """Read a checkpoint."""
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def alone(
    worker_pool: WorkerPool, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Any]:
    """Return the checkpoints of chapter 03's training on one rank, by the optimizer."""
    found = {}
    for sgd in (True, False):
        path = tmp_path_factory.mktemp("alone") / "gpt.pt"
        words = words_for(text, path, 1)
        worker_pool.run(run_train, DDP, sgd, *words, world_size=1)
        found[sgd] = load(path)
    return found


@pytest.mark.parametrize(
    ("ranks", "parts", "sgd"),
    [
        (3, 2, False),
        pytest.param(2, 3, True, marks=pytest.mark.slow),
        pytest.param(4, 1, True, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_process(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    alone: dict[bool, Any],
    ranks: int,
    parts: int,
    sgd: bool,
) -> None:
    path = tmp_path / "gpt.pt"
    words = words_for(text, path, ranks, parts)
    outputs = worker_pool.run(run_train, CHAPTER, sgd, *words, world_size=ranks)
    found = load(path)
    assert largest_difference(found, alone[sgd]) < 1e-12
    assert found["training"]["step"] == alone[sgd]["training"]["step"] == 12
    start = f"check: {ranks} rank(s) compute the gradient of one process, within "
    assert re.search(re.escape(start) + r"\de-1[3-8]\n", outputs[0]), outputs[0]


@pytest.mark.parametrize(
    ("first", "ranks", "then", "more_ranks", "limit"),
    [
        pytest.param(CHAPTER, 3, CHAPTER, 3, 0.0, marks=pytest.mark.slow),
        pytest.param(CHAPTER, 2, CHAPTER, 4, 1e-12, marks=pytest.mark.slow),
        (DDP, 2, CHAPTER, 3, 1e-12),
        pytest.param(CHAPTER, 3, DDP, 2, 1e-12, marks=pytest.mark.slow),
    ],
)
def test_run_resumes_on_other_ranks_and_in_the_other_chapter(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    alone: dict[bool, Any],
    first: str,
    ranks: int,
    then: str,
    more_ranks: int,
    limit: float,
) -> None:
    path, whole = tmp_path / "gpt.pt", alone[False]
    if limit == 0:  # every bit is that of a run on as many ranks without interruption
        words = words_for(text, tmp_path / "whole.pt", ranks)
        worker_pool.run(run_train, then, False, *words, world_size=ranks)
        whole = load(tmp_path / "whole.pt")
    words = words_for(text, path, ranks)
    worker_pool.run(stopped_train, first, words, world_size=ranks)
    assert load(path)["training"]["step"] == 6
    outputs = worker_pool.run(
        run_train,
        then,
        False,
        *words_for(text, path, more_ranks),
        world_size=more_ranks,
    )
    assert f"resuming from {path}, step 6, global batch size 12" in outputs[0]
    found = load(path)
    assert found["training"]["step"] == 12
    assert largest_difference(found, whole) <= limit


def stopped_train(chapter: str, words: list[str]) -> str:
    """Be a rank of a run that ends at its sixth step."""
    return run_train(chapter, False, *words, stop_at=6)


def broken_train(fault: str, *words: str) -> tuple[Any, str]:
    """Be a rank of a run of which one part is broken; return how it ends."""
    train, errors = load_chapter(CHAPTER)["train"], io.StringIO()
    real_error = train.data.gradient_error

    def local(model: Any, plain: Any, dataset: Any) -> float:
        model.set_gradient_divide_factor(1.0)
        error = real_error(model, plain, dataset)
        return error if dist.get_rank() == 1 else 0.0  # all are told of it

    def moved(model: Any, plain: Any, dataset: Any) -> float:
        with torch.no_grad():
            next(model.parameters()).to_local().mul_(1.5)
        return real_error(model, plain, dataset)

    fake = {"sum for mean": local, "other weights": moved}[fault]
    with (
        contextlib.redirect_stderr(errors),
        mock.patch.object(train.data, "gradient_error", fake),
        mock.patch.object(train.ranks, "leave"),
    ):
        try:
            run_train(CHAPTER, False, *words)
        except SystemExit as end:
            return end.code, errors.getvalue().strip()
    return 0, ""


@pytest.mark.parametrize("fault", ["sum for mean", "other weights"])
def test_train_notices_a_gradient_that_is_not_one_processs(
    worker_pool: WorkerPool, text: Path, tmp_path: Path, fault: str
) -> None:
    words = [*words_for(text, tmp_path / "gpt.pt", 2), "--max-steps=1"]
    ends = worker_pool.run(broken_train, fault, *words)
    assert_failed(ends, r"2 rank\(s\) compute the gradient of one")
    assert "ranks [0, 1]" in ends[0][1]


# --- From the meta device. ----------


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_are_drawn_as_one_process_draws(
    worker_pool: WorkerPool, world_size: int
) -> None:
    outputs = worker_pool.run(run_lesson, DTENSOR, "meta_init", world_size=world_size)
    output = outputs[0]
    assert re.findall(r"(\d+) of (\d+) parameters are", output) == [
        ("26", "64"),  # the norms
        ("64", "64"),
    ]
    assert re.findall(r"weight are equal: (\w+)", output) == ["True", "False"]
    model, largest = map(
        number_in, re.findall(r"model: (\S+) .* (\S+)$", output, re.M)[0]
    )
    for kept, peak in re.findall(r"rank 0: (\S+) kept, (\S+) at", output):
        assert number_in(kept) == pytest.approx(model / world_size, rel=0.02)
        # One parameter is whole at a time.
        more = number_in(peak) - number_in(kept)
        assert largest <= more <= 2 * largest < model - number_in(kept)
    assert output.splitlines()[-1].startswith("check: 64 parameters, drawn")


def seen_by_the_rule(*sizes: int) -> list[bool]:
    """Fill a GPT's shards as they are, and whole: do the rule's shards differ?"""
    lesson = load_chapter(DTENSOR)["meta_init"]
    names, found = ("replicate", "shard")[-len(sizes) :], []
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for mode in (contextlib.nullcontext(), lesson.DrawWhole()):
        config = lesson.GPTConfig(layers=1, width=16, heads=2)
        model = lesson.build_in_shards(config, mesh)
        torch.manual_seed(0)
        with mode:
            lesson.draw_weights(model)
        found.append(lesson.shards_differ(model.blocks[0].mlp_in.weight))
    return found


def rule_of_uneven_rows() -> list[bool]:
    """Do the rule's shards differ, of three rows of which the last is the first?

    And of three that differ; and of rows that each rank has drawn from one seed?
    """
    lesson = load_chapter(DTENSOR)["meta_init"]
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([[1.0], [2.0], [3.0]])
    for whole, dim in ((torch.ones(1, 4), 0), (torch.ones(4, 4), 1)):
        with pytest.raises(ValueError):  # rows on one rank only; no rows are cut
            lesson.shards_differ(distribute_tensor(whole, mesh, [Shard(dim)]))
    # On the CPU `normal_` draws the last 16 values anew where 16 does not divide all.
    torch.manual_seed(0)
    copies = distribute_tensor(torch.empty(101, 50), mesh, [Shard(0)])
    torch.nn.init.normal_(copies)
    weights: list[Any] = [distribute_tensor(x, mesh, [Shard(0)]) for x in rows]
    return [lesson.shards_differ(weight) for weight in (*weights, copies)]


def test_rule_of_the_meta_device_compares_the_rows_that_both_have(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(rule_of_uneven_rows) == [[False, True, False]] * 2


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_rule_of_the_meta_device_finds_copies_on_any_mesh(
    worker_pool: WorkerPool, sizes: tuple[int, ...]
) -> None:
    ranks = math.prod(sizes)
    found = worker_pool.run(seen_by_the_rule, *sizes, world_size=ranks)
    assert found == [[False, True]] * ranks


def drawn_shards(*rows: int) -> list[list[float]]:
    """Draw DTensors of so many rows of two, one after another, with one seed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    tensors = [distribute_tensor(torch.empty(n, 2), mesh, [Shard(0)]) for n in rows]
    for one in tensors:
        torch.nn.init.normal_(one)
    return [one.to_local().flatten().tolist() for one in tensors]


def test_ranks_draw_the_same_shards_until_a_tensor_is_uneven(
    worker_pool: WorkerPool,
) -> None:
    even, other = worker_pool.run(drawn_shards, 4, 2, 6)
    assert even == other and [len(shard) for shard in even] == [4, 2, 6]
    uneven, other = worker_pool.run(drawn_shards, 4, 3, 6)
    assert uneven[0] == other[0] and len(other[1]) == 2
    assert uneven[1][:2] == other[1] and uneven[2] != other[2]
    # Ranks with equally large shards go on with one sequence.
    same, twin, uneven = worker_pool.run(drawn_shards, 4, 5, 6, world_size=3)
    assert same == twin and len(same[2]) == len(uneven[2]) and same[2] != uneven[2]


def drawn_by_the_first_version() -> list[bool]:
    """Fill a model by FSDP's first version; tell what is as one process draws it."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5))

    def fill(module: Any) -> None:
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    torch.manual_seed(0)
    device = torch.device("cpu")
    ours = FullyShardedDataParallel(model, param_init_fn=fill, device_id=device)
    kept = sum(weight.numel() for weight in ours.parameters())
    numel = sum(weight.numel() for weight in alone.parameters())
    assert kept < numel  # it is sharded
    with FullyShardedDataParallel.summon_full_params(ours):
        pairs = zip(ours.parameters(), alone.parameters(), strict=True)
        return [torch.equal(one, other) for one, other in pairs]


def test_first_version_draws_whole_tensors(worker_pool: WorkerPool) -> None:
    drawn = worker_pool.run(drawn_by_the_first_version, world_size=3)
    assert drawn == [[True] * 4] * 3


def drawn_whole(axes: tuple[str, ...]) -> list[bool]:
    """Draw two layers in shards of a mesh; tell which are those of one process."""
    sizes = (4,) if len(axes) == 1 else (2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    torch.manual_seed(0)
    # Sizes that no number of ranks divides.
    alone = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 5))
    if "tp" in axes:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"] if "tp" in axes else mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    room = load_chapter(DTENSOR)
    with room["counters"].CollectiveLog() as log, room["init_whole"].DrawWhole():
        for index in range(2):
            layer: Any = model.get_submodule(str(index))
            layer.reset_parameters()
    assert not log.calls  # each rank draws for itself
    shards: Any = model.parameters()
    ours = [weight.full_tensor() for weight in shards]
    return list(map(torch.equal, ours, alone.parameters()))


@pytest.mark.parametrize("axes", [("dp",), ("replicate", "shard"), ("dp", "tp")])
def test_parameters_drawn_whole_are_one_process_s_on_any_mesh(
    worker_pool: WorkerPool, axes: tuple[str, ...]
) -> None:
    assert worker_pool.run(drawn_whole, axes, world_size=4) == [[True] * 4] * 4


def drawn_by_others() -> tuple[bool, list[bool]]:
    """Draw a matrix by `trunc_normal_`, and an embedding whose second row is padding.

    Tell whether the one is as one process draws it, and which rows of the other.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices = torch.zeros(6, 4), distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])
    rows: list[Any] = [nn.Embedding(4, 3, padding_idx=1) for _ in range(2)]
    fully_shard(rows[1], mesh=mesh)
    with load_chapter(DTENSOR)["init_whole"].DrawWhole():
        for matrix, embedding in zip(matrices, rows, strict=True):
            torch.manual_seed(0)
            torch.nn.init.trunc_normal_(matrix)
            torch.manual_seed(0)
            embedding.reset_parameters()
    pairs = zip(rows[1].weight.full_tensor(), rows[0].weight, strict=True)
    same = [torch.equal(*pair) for pair in pairs]
    return torch.equal(matrices[1].full_tensor(), matrices[0]), same


def test_other_functions_and_rows_of_padding_are_not_drawn_whole(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(drawn_by_others)
    assert found == [(False, [True, False, True, True])] * 2


def number_in(text: str) -> int:
    """Read a whole number with commas in it."""
    return int(text.strip(",").replace(",", ""))


def ending_of_meta(fault: str) -> tuple[Any, str]:
    """Run meta_init.py with a part that is wrong."""
    lesson = load_chapter(DTENSOR)["meta_init"]
    real = lesson.draw_weights

    def all_at_once(model: Any) -> None:
        _held = torch.zeros(sum(p.numel() for p in model.parameters()))
        real(model)

    def without_reset(model: Any) -> None:
        model.init_weights()

    return ending(
        DTENSOR,
        "meta_init",
        draw_weights={"all at once": all_at_once, "no reset": without_reset}[fault],
    )


@pytest.mark.parametrize("fault", ["all at once", "no reset"])
def test_meta_init_notices_other_values_and_a_whole_model(
    worker_pool: WorkerPool, fault: str
) -> None:
    ends = worker_pool.run(ending_of_meta, fault)
    assert_failed(ends, r"\d+ parameters, drawn in shards, are")


# --- A file of weights, trained in shards. ----------


def small_gpt() -> Any:
    """Configure a GPT of which a step takes milliseconds."""
    return load_chapter(CHAPTER)["model"].GPTConfig(width=32, layers=2, heads=2)


def ending_of_finetune(path: Path, fault: str) -> tuple[Any, str]:
    """Run four steps of finetune.py on a file, with a fault; return how it ends."""
    lesson: Any = load_chapter(CHAPTER)["finetune"]
    training, states = lesson.Training, lesson.states
    take_over = training.load_state_dict

    def forget(run: Any, state: dict[str, Any]) -> None:
        if fault == "schedule forgotten":
            state = {**state, "schedule": run.others["schedule"].state_dict()}
        elif fault == "moments forgotten":
            for moments in state["optimizer"]["state"].values():
                moments["exp_avg"].zero_()
        take_over(run, state)

    right = states.set_model_state_dict

    def fill(model: Any, *rest: Any, **words: Any) -> None:
        right(model, *rest, **words)
        if fault == "one weight is another":  # of 25, in both runs
            with torch.no_grad():
                model.final_norm.bias.to_local().add_(0.01)

    train = lesson.finetune

    def finetune(*arguments: Any) -> list[float]:
        losses = train(*arguments)  # means, of 5.5 at first: the logarithm of 256
        assert lesson.gather(losses) == [losses] * 2 and max(losses) < 6
        return losses

    with (
        mock.patch.object(training, "load_state_dict", forget),
        mock.patch.object(states, "set_model_state_dict", fill),
        mock.patch.object(lesson, "finetune", finetune),
    ):
        return ending(CHAPTER, "finetune", FILE=path, STEPS=4, GPTConfig=small_gpt)


@pytest.fixture(scope="module")
def file_of_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a GPT as minimal.py does."""
    model = load_chapter(CHAPTER)["model"]
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("weights") / "model.pt"
    torch.save(model.GPT(small_gpt()).state_dict(), path)
    return path


def test_file_is_trained_in_shards(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    end = (0, "check: 25 weights of the file; resumed, the same losses")
    assert worker_pool.run(ending_of_finetune, file_of_weights, "none") == [
        *(end, (0, ""))
    ]


@pytest.mark.parametrize(
    "fault",
    [
        "one weight is another",
        pytest.param("moments forgotten", marks=pytest.mark.slow),
        pytest.param("schedule forgotten", marks=pytest.mark.slow),
    ],
)
def test_finetune_notices(
    worker_pool: WorkerPool, file_of_weights: Path, fault: str
) -> None:
    ends = worker_pool.run(ending_of_finetune, file_of_weights, fault)
    assert_failed(ends, "25 weights of the file; resumed, the same")


def kept_by_finetune(path: Path) -> list[Any]:
    """Load a file in shards; return what is kept, its dtypes, and who read it."""
    lesson: Any = load_chapter(CHAPTER)["finetune"]
    read = mock.Mock(side_effect=torch.load)
    with (
        mock.patch.object(lesson, "FILE", path),
        mock.patch.object(lesson, "GPTConfig", small_gpt),
        mock.patch.object(lesson.torch, "load", read),
    ):
        run = lesson.start(torch.device("cpu"))
    local = sum(p.to_local().numel() for p in run.model.parameters())
    whole = sum(p.numel() for p in run.model.parameters())
    dtypes = {str(p.dtype) for p in run.model.parameters()}
    is_tied = run.model.head.weight is run.model.token_embedding.weight
    wrapper = lesson.checkpoint_wrapper.CheckpointWrapper
    recomputed = [isinstance(block, wrapper) for block in run.model.blocks]
    return [local / whole, dtypes, read.call_count, is_tied, recomputed]


def first_losses(path: Path) -> tuple[float, float]:
    """Take finetune.py's first step; return its loss, and that in float32."""
    lesson: Any = load_chapter(CHAPTER)["finetune"]
    torch.manual_seed(dist.get_rank())
    inputs, labels = torch.randint(256, (2, 8, 128))
    plain = lesson.GPT(small_gpt())
    plain.load_state_dict(torch.load(path))
    with (
        mock.patch.object(lesson, "FILE", path),
        mock.patch.object(lesson, "GPTConfig", small_gpt),
    ):
        run = lesson.start(torch.device("cpu"))
        loss = lesson.finetune_step(run, inputs, labels)
    assert loss.dtype == torch.float32
    return loss.item(), plain(inputs, labels).item()


def test_loss_outside_the_model_has_more_than_the_digits_of_bf16(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    losses = worker_pool.run(first_losses, file_of_weights)
    assert len(losses) == 2
    for loss, exact in losses:
        # bf16 has steps of 1/32 here; without the policy the losses would be equal.
        assert 1e-7 < abs(loss - exact) < 2e-3


def dtypes_of_a_step(path: Path) -> dict[str, set[torch.dtype]]:
    """Take finetune.py's first step; return the dtypes of its collectives, by kind."""
    modules = load_chapter(CHAPTER)
    lesson, log = modules["finetune"], modules["counters"].CollectiveLog()
    tokens = torch.randint(256, (2, 8, 128))
    with (
        mock.patch.object(lesson, "FILE", path),
        mock.patch.object(lesson, "GPTConfig", small_gpt),
    ):
        run = lesson.start(torch.device("cpu"))
        with log:
            lesson.finetune_step(run, *tokens)
    dtypes: dict[str, set[torch.dtype]] = {}
    for call in log.calls:
        dtypes.setdefault(call.name, set()).add(call.dtype)
    assert len(log.calls) >= 8
    return dtypes


def test_finetune_reduces_in_float32(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    found = worker_pool.run(dtypes_of_a_step, file_of_weights)
    assert len(found) == 2
    for dtypes in found:
        assert dtypes["reduce-scatter"] == {torch.float32}


def reductions_of_a_step(micro_batches: int) -> int:
    """Add up train.py's gradients in micro-batches; count reduce-scatters."""
    modules = load_chapter(CHAPTER)
    log = modules["counters"].CollectiveLog()
    model: Any = modules["model"].GPT(small_gpt())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    batches = [(0, *torch.randint(256, (2, 2, 16))) for _ in range(micro_batches)]
    with torch.no_grad():
        due = sum(2 * model(*tokens).item() for _, *tokens in batches)
    add_gradients = modules["train"].add_gradients
    with log:
        loss = add_gradients(model, model, batches, 4 * micro_batches, False)
    assert loss.item() == pytest.approx(due)  # of two samples in each
    return sum(call.name == "reduce-scatter" for call in log.calls)


def test_train_reduces_once_a_step(worker_pool: WorkerPool) -> None:
    # Two blocks and the root.
    assert worker_pool.run(reductions_of_a_step, 3) == [3, 3]


def gradient_of_a_step(path: Path) -> tuple[float, float, float]:
    """Take finetune.py's first step; compare its gradient with one process's.

    Return the norm of one process's, and how far the step's gradient is from it, and
    from it clipped to 1, as shares of the norms.
    """
    lesson: Any = load_chapter(CHAPTER)["finetune"]
    weights = torch.load(path)
    torch.manual_seed(0)
    inputs = torch.randint(256, (8, 128))
    labels = torch.zeros_like(inputs)  # all alike: a long gradient
    plain = lesson.GPT(small_gpt())
    plain.load_state_dict(weights)
    plain(inputs, labels).backward()
    whole = torch.cat([p.grad.flatten() for p in plain.parameters()])
    taken: list[torch.Tensor] = []
    with (
        mock.patch.object(lesson, "FILE", path),
        mock.patch.object(lesson, "GPTConfig", small_gpt),
    ):
        run = lesson.start(torch.device("cpu"))

    def step() -> None:
        gradients = [p.grad.full_tensor().flatten() for p in run.model.parameters()]
        taken.append(torch.cat(gradients))

    with mock.patch.object(run.optimizer, "step", step):
        rank, n = dist.get_rank(), dist.get_world_size()
        lesson.finetune_step(run, inputs.chunk(n)[rank], labels.chunk(n)[rank])
    norm, (gradient,) = whole.norm(), taken
    apart = torch.dist(gradient, whole) / norm, torch.dist(gradient, whole / norm)
    return norm.item(), apart[0].item(), apart[1].item()


def test_finetune_clips_by_the_norm_of_all_shards(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    found = worker_pool.run(gradient_of_a_step, file_of_weights)
    assert len(found) == 2
    for norm, unclipped, clipped in found:
        # bf16 is off by some hundredths; a rank's shards alone have a smaller norm.
        assert norm > 4 and clipped < 0.1 and unclipped > 0.7
    assert found[0] == found[1]


def test_only_rank_0_reads_the_file_and_each_keeps_its_shards(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    assert worker_pool.run(kept_by_finetune, file_of_weights) == [
        [pytest.approx(0.5, abs=0.01), {"torch.float32"}, number, True, [True, True]]
        for number in (1, 0)
    ]


@pytest.mark.parametrize("script", ["finetune", "evaluate"])
@pytest.mark.parametrize("share", [None, 0.0, 0.9])
def test_without_a_whole_file_it_says_what_to_run(
    tmp_path: Path, script: str, share: float | None
) -> None:
    path = tmp_path / "model.pt"
    if share is not None:
        torch.save({"weight": torch.ones(999)}, path)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    code, said = ending(CHAPTER, script, FILE=path)
    assert code == 2
    assert said.endswith("model.pt: run 06_fsdp/minimal.py first")


# --- Evaluated, and asked for a text. ----------


def ending_of_evaluate(path: Path, fault: str) -> tuple[Any, str]:
    """Run evaluate.py on a file, with a fault; return how it ends."""
    lesson: Any = load_chapter(CHAPTER)["evaluate"]
    load, reduce = lesson.load_in_shards, dist.all_reduce
    take = lesson.WindowDataset.batch

    def without_labels(samples: Any, which: Any) -> list[torch.Tensor]:
        """Sample 0 alone, as a rank runs it that has none left, has a loss of NaN."""
        inputs, labels = take(samples, which)
        return [inputs, labels.fill_(-100) if which == [0] else labels]

    def load_badly(device: torch.device) -> Any:
        model = load(device)
        if fault == "another text":
            model.generate = lambda *_: "ab"
        return model

    def reduce_badly(tensor: torch.Tensor, **words: Any) -> Any:
        if fault != "a rank's own loss" or tensor.shape != (2,):
            return reduce(tensor, **words)

    def range_badly(*ends: int) -> range:
        return range(*ends) or range(fault == "a sample too many")

    with (
        mock.patch.dict(load.__globals__, FILE=path, GPTConfig=small_gpt),
        mock.patch.object(dist, "all_reduce", reduce_badly),
        mock.patch.object(lesson, "range", range_badly, create=True),
        mock.patch.object(lesson.WindowDataset, "batch", without_labels),
    ):
        words = {"FILE": path, "GPTConfig": small_gpt, "SAMPLES": 49}
        words["PROMPT"] = (b"def ", 10, 0.7, 0)
        return ending(CHAPTER, "evaluate", load_in_shards=load_badly, **words)


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_and_text_are_those_of_one_process(
    worker_pool: WorkerPool, file_of_weights: Path, world_size: int
) -> None:
    ends = worker_pool.run(
        ending_of_evaluate, file_of_weights, "none", world_size=world_size
    )
    said = "check: the mean loss of 49 samples, and the text, of one process"
    assert ends == [(0, said)] + [(0, "")] * (world_size - 1)


@pytest.mark.parametrize(
    "fault", ["a rank's own loss", "a sample too many", "another text"]
)
def test_evaluate_notices(
    worker_pool: WorkerPool, file_of_weights: Path, fault: str
) -> None:
    # Two ranks have none of 49 samples left when the first takes its last.
    ends = worker_pool.run(ending_of_evaluate, file_of_weights, fault, world_size=3)
    assert_failed(ends, "the mean loss of 49 samples, and the text, of one")


def gathers_of_a_text(path: Path) -> tuple[list[int], list[int], set[str], float]:
    """Generate five bytes in two ways; count all-gathers, and forward passes.

    Return also what kind the weights are after it, and the part of them that is kept.
    """
    modules = load_chapter(CHAPTER)
    lesson, log = modules["evaluate"], modules["counters"].CollectiveLog
    finetune = lesson.load_in_shards.__globals__
    with mock.patch.dict(finetune, FILE=path, GPTConfig=small_gpt):
        model = lesson.load_in_shards(torch.device("cpu"))
    counts = []
    for way in (contextlib.nullcontext(), lesson.gathered_once(model)):
        model.reshard()
        with log() as gathers, contextlib.suppress(EOFError), way:
            model.generate(b"ab", 5, 1.0, 0)
            raise EOFError  # the blocks are freed after an error as well
        counts.append(len(gathers.calls))
    kinds = {type(weight).__name__ for weight in model.parameters()}
    kept = sum(weight.to_local().numel() for weight in model.parameters())
    calls = []
    model.register_forward_hook(
        lambda *_: calls.append((model.training, torch.is_grad_enabled()))
    )
    samples = lesson.WindowDataset(lesson.load_text(None, 128)[1], 128, 33)
    model.train()
    lesson.validation_loss(model, samples, torch.device("cpu"))
    assert calls == [(False, False)] and model.training
    with log() as again:
        model.reshard()
        model(torch.zeros(1, 4, dtype=torch.long))
        model(torch.zeros(1, 4, dtype=torch.long))
    whole = sum(weight.numel() for weight in model.parameters())
    return counts, [len(calls) - 2, len(again.calls)], kinds, kept / whole


def test_weights_are_gathered_once_for_a_text_and_freed(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    found = worker_pool.run(gathers_of_a_text, file_of_weights, world_size=3)
    assert len(found) == 3
    for counts, (passes, again), kinds, kept in found:
        # Two blocks and the root, which stays whole; then each of them once.
        assert counts == [1 + 2 * 5, 1 + 2]
        # Of 33 samples in batches of 16 the third rank has one.
        assert passes == 1 and again == 1 + 2 * 2
        assert kinds == {"DTensor"} and kept == pytest.approx(1 / 3, abs=0.02)


def freed_after(way: str) -> tuple[list[int], int]:
    """Run a model in a way; return which weights stay whole, and later all-gathers.

    Each block has a unit within it, and some units are to stay whole after forward.
    """
    modules = load_chapter(CHAPTER)
    lesson, log = modules["evaluate"], modules["counters"].CollectiveLog
    mesh, stays = init_device_mesh("cpu", (2,)), way == "evaluated"
    model: Any = modules["model"].GPT(small_gpt())
    for block in model.blocks:
        fully_shard(block.mlp_in, mesh=mesh, reshard_after_forward=not stays)
        fully_shard(block, mesh=mesh, reshard_after_forward=not stays)
    fully_shard(model, mesh=mesh)
    if stays:
        samples = lesson.WindowDataset(lesson.load_text(None, 128)[1], 128, 4)
        lesson.validation_loss(model, samples, torch.device("cpu"))
    else:
        with torch.no_grad(), lesson.gathered_once(model):
            model(torch.zeros(1, 4, dtype=torch.long))
    weights = enumerate(model.parameters())
    whole = [number for number, w in weights if not isinstance(w, DTensor)]
    with torch.no_grad(), log() as gathers:
        for _ in range(2):
            model(torch.zeros(1, 4, dtype=torch.long))
    model.reshard()
    return whole, len(gathers.calls)


@pytest.mark.parametrize("way", ["evaluated", "gathered once"])
def test_units_within_blocks_are_freed_as_well(
    worker_pool: WorkerPool, way: str
) -> None:
    found = worker_pool.run(freed_after, way)
    # The root; and two units of each of two blocks, which are freed or stay.
    gathers = 1 + 4 * (1 if way == "evaluated" else 2)
    assert found == [([], gathers)] * 2


def embed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Use a weight in a method that is not `forward`."""
    return self.token_embedding.weight[tokens]


def embedded_by_a_method(path: Path) -> tuple[str, bool]:
    """Call such a method of a sharded model; then, registered, once more."""
    lesson: Any = load_chapter(CHAPTER)["evaluate"]
    finetune = lesson.load_in_shards.__globals__
    tokens = torch.tensor([3, 1])
    with mock.patch.dict(finetune, FILE=path, GPTConfig=small_gpt):
        model = lesson.load_in_shards(torch.device("cpu"))
    type(model).encode = embed
    with pytest.raises(
        RuntimeError, match=r"got mixed torch\.Tensor and DTensor"
    ) as no:
        model.encode(tokens)
    register_fsdp_forward_method(model, "encode")
    rows = torch.load(path)["token_embedding.weight"][tokens]
    return str(no.value)[:30], torch.equal(model.encode(tokens), rows.bfloat16())


def test_a_method_that_uses_weights_is_registered(
    worker_pool: WorkerPool, file_of_weights: Path
) -> None:
    found = worker_pool.run(embedded_by_a_method, file_of_weights)
    assert len(found) == 2 and found[0][1] and found[1][1]


CHANGES = ("freeze", "unfreeze", "init", "swap", "step")


def changed_after_an_evaluation(change: str, by: str) -> float:
    """Train, evaluate, change the root, train; return how far from one process.

    The evaluation is the lesson's, or a forward pass, perhaps with `reshard()`.
    """
    modules, rank = load_chapter(CHAPTER), dist.get_rank()
    lesson: Any = modules["evaluate"]
    samples = lesson.WindowDataset(lesson.load_text(None, 128)[1], 128, 4)
    torch.manual_seed(0)
    sharded: Any = modules["model"].GPT(small_gpt())
    plain: Any = copy.deepcopy(sharded)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*sharded.blocks, sharded):
        fully_shard(module, mesh=mesh)

    def evaluate(model: Any) -> None:
        if model is sharded and by == "the lesson":
            lesson.validation_loss(model, samples, torch.device("cpu"))
        elif model is sharded:
            with torch.no_grad():
                model(samples.batch([0])[0])
            if by == "reshard":
                model.reshard()

    for model in (sharded, plain):
        mine = range(4) if model is plain else range(2 * rank, 2 * rank + 2)
        inputs, labels = samples.batch(mine)
        model.final_norm.requires_grad_(change != "unfreeze")
        weights = list(model.parameters())  # as a script has them that averages
        optimizer = torch.optim.SGD(weights, lr=0.5)
        for step in range(4):
            model(inputs, labels).backward()
            if step == 1 and change == "step":
                evaluate(model)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and change != "step":
                evaluate(model)
                model.final_norm.requires_grad_(change != "freeze")
                with torch.no_grad():
                    if change == "init":
                        nn.init.zeros_(model.final_norm.weight)
                    for weight in weights if change == "swap" else []:
                        weight.mul_(0.5)
                    if change == "swap":
                        model(inputs)
    sharded.reshard()
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max((p.full_tensor() - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("by", ["the lesson", "reshard", "forward alone"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_root_stays_whole_after_an_evaluation_until_reshard(
    worker_pool: WorkerPool, change: str, by: str
) -> None:
    apart = worker_pool.run(changed_after_an_evaluation, change, by)
    assert len(apart) == 2
    for distance in apart:
        assert distance > 1e-3 if by == "forward alone" else distance < 1e-5


def sharded_after_an_evaluation() -> list[list[bool]]:
    """Evaluate models, the root told to be freed or not; are weights shards now?"""
    found, mesh = [], init_device_mesh("cpu", (2,))
    for at_the_root in (None, True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=at_the_root)
        with torch.no_grad():
            model(torch.ones(1, 4))
        found.append([isinstance(weight, DTensor) for weight in model.parameters()])
    return found


def test_a_root_that_is_told_to_reshard_is_freed_after_an_evaluation(
    worker_pool: WorkerPool,
) -> None:
    stays, freed = [True, True, False, False], [True] * 4
    found = worker_pool.run(sharded_after_an_evaluation)
    assert found == [[stays, freed, stays]] * 2


def evaluated_with_a_number(at_block: Any, at_root: Any) -> list[tuple[int, float]]:
    """Evaluate, and zero all weights that the model then has.

    Returns, for the block's weight and the root's, how many of its eight rows this rank
    has after the evaluation, and the largest value once all units are freed.
    """
    lesson: Any = load_chapter(CHAPTER)["evaluate"]
    layers = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    model, mesh = nn.Sequential(*layers), init_device_mesh("cpu", (4,))
    fully_shard(layers[0], mesh=mesh, reshard_after_forward=at_block)
    fully_shard(model, mesh=mesh, reshard_after_forward=at_root)
    with torch.no_grad():
        model(torch.ones(1, 8))
    weights: list[Any] = list(model.parameters())
    rows = [getattr(w, "to_local", lambda w=w: w)().shape[0] for w in weights]
    for weight in weights:
        nn.init.zeros_(weight)
    lesson.free_gathered(model)
    freed: list[Any] = list(model.parameters())
    left = [weight.full_tensor().abs().max().item() for weight in freed]
    return list(zip(rows, left, strict=True))


@pytest.mark.parametrize(
    ("at_block", "at_root", "due"), [(True, 2, [2, 4]), (2, None, [4, 8])]
)
def test_a_number_leaves_units_in_larger_shards_after_an_evaluation(
    worker_pool: WorkerPool, at_block: Any, at_root: Any, due: list[int]
) -> None:
    # Only shards of four ranks are the parameters: what is done to others is lost.
    found = worker_pool.run(evaluated_with_a_number, at_block, at_root, world_size=4)
    assert len(found) == 4
    for of_rank in found:
        assert [rows for rows, _ in of_rank] == due
        assert [largest > 0 for _, largest in of_rank] == [n > 2 for n in due]


def loaded_after_an_evaluation(reshard: bool, broadcast: bool) -> str | list[float]:
    """Load a whole file into a root that was evaluated; return the weights, or why."""
    model: Any = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        model(torch.ones(1, 2))
    if reshard:
        model.reshard()
    weights: Any = {"weight": torch.full((2, 2), 3.0)}
    if broadcast and dist.get_rank():
        weights = {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    try:
        set_model_state_dict(model, weights, options=options)
    except RuntimeError as error:
        return str(error)
    return model.weight.full_tensor().flatten().tolist()


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_whole_file_is_not_loaded_into_a_gathered_root(
    worker_pool: WorkerPool, broadcast: bool
) -> None:
    said = worker_pool.run(loaded_after_an_evaluation, False, broadcast)
    mixed = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert"
    assert [mixed in str(text) for text in said] == [True] * 2, said
    loaded = worker_pool.run(loaded_after_an_evaluation, True, broadcast)
    assert loaded == [[3.0] * 4] * 2


def mixed_after_an_evaluation(reshards: list[bool]) -> list[list[bool]]:
    """Run a block and the root, which stay whole; average weights after each reshard.

    Tell of which an average that was made before is refused.
    """
    model: Any = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    mesh, found = init_device_mesh("cpu", (2,)), []
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    averages = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model(torch.ones(1, 2))
    for is_root in reshards:
        (model if is_root else model[0]).reshard()
        found.append([])
        for average, p in zip(averages, model.parameters(), strict=True):
            try:
                average.lerp_(p.detach(), 0.1)
                found[-1].append(False)
            except RuntimeError as error:
                found[-1].append("aten.lerp_.Scalar got mixed" in str(error))
    return found


def test_blocks_that_stay_whole_need_a_reshard_each(worker_pool: WorkerPool) -> None:
    steps = worker_pool.run(mixed_after_an_evaluation, [True, False])
    assert steps == [[[True, False], [False, False]]] * 2


def moved_after_an_evaluation(keeps: bool, each_unit: bool) -> list[bool]:
    """Evaluate, reshard the root or each unit, train; tell which weights moved."""
    model: Any = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model[:2], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if keeps else None)
    before = [p.full_tensor() for p in model.parameters()]
    with torch.no_grad():
        model(torch.ones(1, 2))
    for unit in (*model[:2], model) if each_unit else (model,):
        unit.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), before, strict=True)
    return [not torch.equal(p.full_tensor(), old) for p, old in pairs]


def test_an_optimizer_made_after_an_evaluation_needs_each_unit_resharded(
    worker_pool: WorkerPool,
) -> None:
    run = worker_pool.run
    assert run(moved_after_an_evaluation, False, False) == [[True] * 3] * 2
    assert run(moved_after_an_evaluation, True, False) == [[False, False, True]] * 2
    assert run(moved_after_an_evaluation, True, True) == [[True] * 3] * 2
    code = (ROOT / CHAPTER / "mistakes/evaluated_first.py").read_text("utf-8")
    assert "    # or reshard each unit here.\n" in code


def all_gathers_of_evaluations(blocks: int) -> list[int]:
    """Evaluate three times; return how many all-gathers each pass starts."""
    counters = load_chapter(CHAPTER)["counters"]
    model: Any = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    mesh, found = init_device_mesh("cpu", (2,)), []
    for module in (*model[:blocks], model):
        fully_shard(module, mesh=mesh)
    for _ in range(3):
        with torch.no_grad(), counters.CollectiveLog() as log:
            model(torch.ones(1, 2))
        found.append([call.name for call in log.calls].count("all-gather"))
    return found


def test_an_evaluation_gathers_the_root_once_and_blocks_each_time(
    worker_pool: WorkerPool,
) -> None:
    # So ranks that evaluate unequally often notice it only if there are blocks.
    assert worker_pool.run(all_gathers_of_evaluations, 0) == [[1, 0, 0]] * 2
    assert worker_pool.run(all_gathers_of_evaluations, 2) == [[3, 2, 2]] * 2
    code = (ROOT / CHAPTER / "mistakes/unequal_steps.py").read_text("utf-8")
    assert "forward all-gathers what is not whole" in code


def refused_copy() -> str:
    """Copy a sharded model; return what is said."""
    model: Any = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    copies = [p.detach().clone() for p in model.parameters()]
    assert [type(one) for one in copies] == [DTensor] * 2
    with pytest.raises(AssertionError) as error:
        copy.deepcopy(model)
    return str(error.value)


def test_a_sharded_model_is_not_deep_copied(worker_pool: WorkerPool) -> None:
    said = "FSDP does not support deepcopy. Please use state dict for serialization."
    assert worker_pool.run(refused_copy) == [said] * 2


# --- Parameters that only some ranks use. ----------


class Routed(nn.Module):
    """A layer, and two more, by default of one shape, of which a batch takes one."""

    def __init__(self, widths: tuple[int, int] = (4, 4)) -> None:
        """Draw the same weights on all ranks."""
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.routes = nn.ModuleList(nn.Linear(4, width) for width in widths)

    def forward(self, x: torch.Tensor, route: int, order: str) -> torch.Tensor:
        """Take a route; with an order of calls, call the other one too, times 0."""
        calls = {"": [route], "equal": [0, 1], "own": [route, 1 - route]}[order]
        x = self.layer(x)
        results = {call: self.routes[call](x) for call in calls}
        return results[route] + sum(0 * y.sum() for y in results.values())


def apart_by_routes(
    units: bool, alike: bool = False, reduce_unused: bool = False, order: str = ""
) -> float:
    """Train, a route for each rank; return how far from one process.

    If `alike`, both ranks draw the route from a generator with one seed.
    """
    sharded: Any = Routed()
    plain, rank = copy.deepcopy(sharded), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    for module in (*(sharded.routes if units else ()), sharded):
        fully_shard(module, mesh=mesh)
    if reduce_unused:
        sharded.set_reduce_scatter_unused_params(True)
    draw = torch.Generator().manual_seed(3)
    batches = torch.randn(5, 2, 3, 4, generator=draw)  # steps, ranks, samples, width
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    taken = []
    for step, batch in enumerate(batches):
        first = int(torch.randint(2, (), generator=draw))
        routes = [first, first] if alike else [step % 2, (step + 1) % 2]
        taken.append(routes)
        sharded(batch[rank], routes[rank], order).square().mean().backward()
        each = [plain(batch[r], routes[r], order).square().mean() for r in range(2)]
        torch.stack(each).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert {route for routes in taken for route in routes} == {0, 1}
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max((p.full_tensor() - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize(
    ("units", "mistake", "mend"),
    [
        (False, {}, {"reduce_unused": True}),
        (False, {}, {"order": "equal"}),
        (True, {}, {"alike": True}),
        (True, {"order": "own"}, {"order": "equal"}),
        (True, {"reduce_unused": True}, {"alike": True}),
    ],
)
def test_gradients_of_what_other_ranks_do_not_use_are_mixed(
    worker_pool: WorkerPool, units: bool, mistake: Any, mend: Any
) -> None:
    mixed = worker_pool.run(functools.partial(apart_by_routes, **mistake), units)
    mended = worker_pool.run(functools.partial(apart_by_routes, **mend), units)
    assert len(mixed) == len(mended) == 2
    assert min(mixed) > 0.01 and max(mended) < 1e-6


class TwoHeads(nn.Module):
    """A body and two heads."""

    def __init__(self) -> None:
        """Make the three layers."""
        super().__init__()
        self.body, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, head: str, both: bool) -> torch.Tensor:
        """Compute a head; `both` calls the other one too, times 0."""
        x = self.body(x)
        other = self.get_submodule({"a": "b", "b": "a"}[head])
        y = self.get_submodule(head)(x)
        return y + 0 * other(x).sum() if both else y


def accumulate_under_a_policy(
    heads: str,
    reduce_dtype: torch.dtype | None = torch.float32,
    param_dtype: torch.dtype | None = torch.bfloat16,
    units: bool = False,
    each: bool = False,
    both: bool = False,
    unused: bool = False,
) -> str | float:
    """Run a micro-batch for each head; return the error, or how far gradients are off.

    `units` makes each head one, `each` reduces after each micro-batch.
    """
    torch.manual_seed(0)
    model: Any = TwoHeads()
    plain: Any = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*((model.a, model.b) if units else ()), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.set_reduce_scatter_unused_params(unused)
    for i, head in enumerate(heads, start=1):
        x = torch.randn(3, 4)  # the same on all ranks, so the mean is this one
        model.set_requires_gradient_sync(each or i == len(heads))
        try:
            model(x, head, both).float().sum().backward()
        except (AssertionError, AttributeError) as error:
            return str(error).partition(" but got")[0]
        plain(x, head, both).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    due = [(p.grad, q.grad) for p, q in pairs if q.grad is not None]
    assert len(due) >= 4
    return max(torch.dist(g.full_tensor(), q).item() for g, q in due)


def test_micro_batches_that_use_other_weights_fail_under_a_reduce_dtype(
    worker_pool: WorkerPool,
) -> None:
    mixed = "FSDP reduce-scatter expects uniform gradient dtype"
    uncalled = "'FSDPParam' object has no attribute '_unsharded_param'"
    cases: list[tuple[str, dict[str, Any], str]] = [
        *(("ab", {}, mixed), ("ba", {}, mixed), ("aa", {"unused": True}, mixed)),
        *(("aa", {"units": True}, uncalled), ("ab", {"units": True}, uncalled)),
        *(("aa", {}, ""), ("a", {"unused": True}, ""), ("a", {"units": True}, "")),
        *(("ab", {"each": True}, ""), ("ab", {"each": True, "units": True}, "")),
        *(("ab", {"both": True}, ""), ("ab", {"both": True, "units": True}, "")),
        *(
            ("ab", {"reduce_dtype": None}, ""),
            ("aa", {"each": True, "units": True}, ""),
        ),
        ("aa", {"reduce_dtype": None, "units": True}, ""),
        # What is already in the dtype of the reduction needs no other; the last case
        # differs the other way round.
        ("ab", {"reduce_dtype": torch.bfloat16}, ""),
        *((order, {"param_dtype": None}, "") for order in ("ab", "ba", "aba")),
        ("ab", {"param_dtype": None, "reduce_dtype": torch.bfloat16}, mixed),
    ]
    ends = worker_pool.run(run_all, [(h, more) for h, more, _ in cases])
    assert len(ends) == 2
    checked = 0
    for found in ends:
        for (heads, more, said), end in zip(cases, found, strict=True):
            checked += 1
            if said:
                assert end == said, (heads, more, end)
            else:
                least = 0.0 if "param_dtype" in more else 1e-9  # bf16 rounds
                assert isinstance(end, float), (heads, more, end)
                assert least <= end < 0.2, (heads, more, end)
    assert checked == 2 * 20


def run_all(cases: list[tuple[str, dict[str, Any]]]) -> list[str | float]:
    """Accumulate in every way."""
    return [accumulate_under_a_policy(heads, **more) for heads, more in cases]


def moved_at_rest(reduce_unused: bool, order: str) -> tuple[float | None, float]:
    """Let all ranks train route 1, then 0; return the last gradient of 1, and its move.

    Of the gradient it is the largest value, or None if there is no gradient.
    """
    model: Any = Routed()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(reduce_unused)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    resting, weights, largest = model.routes[1].weight, [], None
    for route in (1, 0):
        weights.append(resting.full_tensor().clone())
        model(torch.ones(1, 4), route, order if route == 0 else "").sum().backward()
        grad = resting.grad
        largest = None if grad is None else grad.full_tensor().abs().max().item()
        adam.step()
        adam.zero_grad()
    assert not weights[1].equal(weights[0])
    return largest, (resting.full_tensor() - weights[1]).abs().max().item()


def test_a_route_at_rest_is_moved_if_its_gradient_is_of_zeros(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(moved_at_rest, False, "") == [(None, 0.0)] * 2
    for mend in ((True, ""), (False, "equal")):
        ends = worker_pool.run(moved_at_rest, *mend)
        assert len(ends) == 2
        assert all(largest == 0.0 and moved > 0.01 for largest, moved in ends), mend


def output_of_other_routes() -> float:
    """Let each rank call another unit; return how far from one process's output."""
    sharded: Any = Routed()
    plain, rank = copy.deepcopy(sharded), dist.get_rank()
    for module in (*sharded.routes, sharded):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        outputs = [m(torch.ones(1, 4), rank, "") for m in (sharded, plain)]
    return (outputs[0] - outputs[1]).abs().max().item()


def test_ranks_that_call_different_units_compute_with_mixed_weights(
    worker_pool: WorkerPool,
) -> None:
    assert min(worker_pool.run(output_of_other_routes)) > 0.01


def gradients_of_a_late_layer(is_late: bool) -> list[float]:
    """Add a layer before or after `fully_shard`; return the gradient of its weight."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4))
    sharded = model if is_late else model.append(nn.Linear(4, 1))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    if is_late:
        torch.manual_seed(1)
        model.append(nn.Linear(4, 1))
    model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    gradient = model[1].weight.grad
    return getattr(gradient, "full_tensor", lambda: gradient)().flatten().tolist()


def clipped_with_a_late_layer(
    is_frozen: bool, has_own_group: bool = False
) -> tuple[list[str], float]:
    """Add a layer afterwards, clip and step; return the errors, and the norm."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4)).requires_grad_(not is_frozen)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(1)
    model.append(nn.Linear(4, 1))
    model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    norm, errors = math.nan, []
    for call in ("clip", "step", "foreach", "fused"):
        settings: Any = {call: True} if call.startswith("f") else {}
        groups: Any = [{"params": list(part.parameters())} for part in model]
        parameters = groups if has_own_group else model.parameters()
        optimizer = torch.optim.AdamW(parameters, **settings)
        try:
            if call == "clip":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 9.0).item()
            else:
                optimizer.step()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error).partition(" ")[2][:34])
    return errors, norm


def test_a_layer_added_after_fully_shard_is_each_rank_s_own(
    worker_pool: WorkerPool,
) -> None:
    first, second = worker_pool.run(gradients_of_a_late_layer, False)
    assert first == second
    first, second = worker_pool.run(gradients_of_a_late_layer, True)
    assert first != second
    mixed = "got mixed torch.Tensor and DTensor"
    # A GPU takes foreach by itself, for DTensors too.
    assert DTensor in _foreach_supported_types
    found = worker_pool.run(clipped_with_a_late_layer, False)
    assert [errors for errors, _ in found] == [[mixed, "", mixed, mixed]] * 2
    # No step has an error if the layer has a parameter group of its own.
    found = worker_pool.run(clipped_with_a_late_layer, False, True)
    assert [errors for errors, _ in found] == [[mixed, "", "", ""]] * 2
    (ours, norm), (theirs, other) = worker_pool.run(clipped_with_a_late_layer, True)
    assert ours == theirs == [""] * 4 and norm != other
    said = "add it before `fully_shard`, or each rank silently trains its own"
    assert said in words_of(CHAPTER)


def routes_of_two_shapes(units: bool, order: str) -> float:
    """Take a route on each rank, reducing what is unused; return a gradient's mean."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
    model: Any = Routed((4, 64))
    for module in (*(model.routes if units else ()), model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1, 4), dist.get_rank(), order).sum().backward()
    return model.routes[0].bias.grad.full_tensor().mean().item()


def test_units_of_their_own_are_called_by_all_ranks(worker_pool: WorkerPool) -> None:
    # One of two ranks takes the route, so the mean over the ranks is half of its own.
    for units, order in ((False, ""), (True, "equal")):
        assert worker_pool.run(routes_of_two_shapes, units, order) == [0.5] * 2
    with pytest.raises(RankDied, match="died of signal SIGABRT"):
        worker_pool.run(routes_of_two_shapes, True, "")


class HeadForEachTask(nn.Module):
    """Has a body, and a head for each of two tasks; all ranks call both heads."""

    def __init__(self) -> None:
        """Make the three layers."""
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Apply both heads, in one order."""
        hidden = self.body(x)
        return [head(hidden) for head in self.heads]


def gradient_with_a_head_each(factor: float | None) -> bool:
    """Make a loss of one head, and `factor` times all; is the body's gradient right?"""
    torch.manual_seed(0)
    model: Any = HeadForEachTask()
    alone, rank = copy.deepcopy(model), dist.get_rank()
    for module in (*model.heads, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(True)
    outputs = model(torch.full((1, 4), rank + 1.0))
    loss = outputs[rank].square().sum()
    if factor is not None:
        loss = loss + factor * sum(output.sum() for output in outputs)
    loss.backward()
    for task in range(2):
        of_task = alone(torch.full((1, 4), task + 1.0))[task]
        (of_task.square().sum() / 2).backward()
    found = model.body.weight.grad.full_tensor()
    return torch.allclose(found, alone.body.weight.grad, rtol=1e-4)


def test_a_unit_that_is_called_must_be_in_the_loss(worker_pool: WorkerPool) -> None:
    for factor, is_right in ((None, False), (0.0, True)):
        assert worker_pool.run(gradient_with_a_head_each, factor) == [is_right] * 2
    page = words_of(CHAPTER)
    said = "A unit is called by all ranks, and in every rank's loss, if need be times 0"
    assert f"{said}, or [by none](" in page


class Output:
    """What `forward` returns, in a class of one's own."""

    def __init__(self, logits: torch.Tensor) -> None:
        """Keep them."""
        self.logits = logits


@dataclass
class DataOutput:
    """The same, as a dataclass."""

    logits: torch.Tensor


class Probe(nn.Module):
    """A body, mostly frozen, and a head that learns."""

    def __init__(self, kind: Any, trains: bool) -> None:
        """Make the layers; `kind` is what `forward` returns."""
        super().__init__()
        self.kind, self.body = kind, nn.Linear(4, 4).requires_grad_(trains)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logits, in something."""
        return self.kind(logits=self.head(self.body(x)))


def moved_by_a_step(kind: Any, trains: bool = False) -> bool:
    """Take a step; has the root's own layer moved?"""
    model: Any = Probe(kind, trains)
    before = model.head.weight.detach().clone()
    for module in (model.body, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    sgd = torch.optim.SGD(model.head.parameters(), lr=1.0)
    output = model(torch.ones(1, 4))
    logits = output["logits"] if kind is dict else output.logits
    logits.sum().backward()
    sgd.step()
    (weight, _) = sgd.param_groups[0]["params"]
    return not torch.equal(before, weight.full_tensor())


def test_fsdp_finds_no_tensor_in_an_object_of_one_s_own(
    worker_pool: WorkerPool,
) -> None:
    for kind, moves in ((dict, True), (DataOutput, True), (Output, False)):
        assert worker_pool.run(moved_by_a_step, kind) == [moves] * 2
    # A unit that trains reduces the root's gradients too.
    assert worker_pool.run(moved_by_a_step, Output, True) == [True] * 2


def one_route_more_on_rank_0(reduce_unused: bool) -> float:
    """Use more of the root's parameters on rank 0; return the mean of a gradient."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
    model: Any = Routed()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(reduce_unused)
    order = "" if dist.get_rank() else "equal"
    model(torch.ones(1, 4), 0, order).sum().backward()
    return model.routes[0].bias.grad.full_tensor().mean().item()


def test_unequally_many_gradients_abort_gloo(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(one_route_more_on_rank_0, True) == [1.0] * 2
    with pytest.raises(RankDied, match="died of signal SIGABRT"):
        worker_pool.run(one_route_more_on_rank_0, False)


# --- What a loop does with weights and gradients. ----------


EMPTY_SHARD = "cannot compute the infinity norm on an empty tensor"


def clip_by_the_largest(parameters: Iterable[Any], most: float) -> None:
    """Scale all gradients so that their largest value is `most`; all ranks call it."""
    weights = [p for p in parameters if p.grad is not None]
    shards = [p.grad.to_local().abs().flatten() for p in weights]
    norm = torch.cat([shards[0].new_zeros(1), *shards]).max()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    nn.utils.clip_grads_with_norm_(weights, most, norm)


def clipped_by_the_largest() -> tuple[str, list[float]]:
    """Clip by norm_type=inf where this rank has no row; then by hand, on all ranks."""
    model: Any = nn.Linear(4, 1)
    model.bias.requires_grad_(False)  # so it has no gradient
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    (model(torch.tensor([[1.0, 2.0, -5.0, 4.0]])) * 2).sum().backward()
    said = ""
    if dist.get_rank() == 1:  # rank 0 would wait
        with pytest.raises(RuntimeError) as error:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)
        said = str(error.value)
    clip_by_the_largest(model.parameters(), 1.0)
    return said, model.weight.grad.full_tensor().flatten().tolist()


def test_infinity_norm_fails_on_a_rank_without_rows(worker_pool: WorkerPool) -> None:
    (silent, first), (said, second) = worker_pool.run(clipped_by_the_largest)
    assert silent == "" and EMPTY_SHARD in said
    assert first == second == pytest.approx([0.2, 0.4, -1.0, 0.8], abs=1e-5)


def item_of_the_largest() -> tuple[float, float]:
    """Clip by norm_type=inf; return `.item()` of the norm, and its whole value."""
    model: Any = nn.Linear(1, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    (model(torch.ones(1, 1)) * torch.tensor([[3.0, 5.0]])).sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)
    return norm.item(), norm.full_tensor().item()


def test_item_of_an_infinity_norm_is_a_rank_s(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(item_of_the_largest) == [(3.0, 5.0), (5.0, 5.0)]


def rows_after_a_step(way: str) -> list[float]:
    """Keep rows of an embedding no longer than 1 in forward, or after the step."""
    is_after = way == "after the step"
    model: Any = nn.Embedding(4, 2, max_norm=None if is_after else 1.0)
    nn.init.constant_(model.weight, 3.0)
    if way != "one process":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    if is_after:
        with torch.no_grad():
            lengths = model.weight.norm(dim=1, keepdim=True)
            model.weight.div_(lengths.clamp(min=1.0))
    whole = getattr(model.weight, "full_tensor", model.weight.detach)()
    return whole.norm(dim=1).tolist()


@pytest.mark.parametrize(
    ("way", "length"),
    [("in forward", 18**0.5), ("after the step", 1.0), ("one process", 1.0)],
)
def test_what_forward_writes_into_a_weight_is_lost(
    worker_pool: WorkerPool, way: str, length: float
) -> None:
    due = [pytest.approx([length] * 4, abs=1e-5)] * 2
    assert worker_pool.run(rows_after_a_step, way) == due


# --- Checkpoints. ----------


PLACES = ("by 3 ranks", "by 1 process", "from 1 file")


def test_sharded_checkpoint_is_loaded_on_any_number_of_ranks(
    worker_pool: WorkerPool,
) -> None:
    outputs = worker_pool.run(run_lesson, CHAPTER, "sharded_checkpoint", world_size=3)
    lines = outputs[0].splitlines()
    assert lines[0] == "saved by 2 ranks: .metadata, __0_0.distcp, __1_0.distcp"
    assert len(lines) == 5
    for place, line in zip(PLACES, lines[1:4], strict=True):
        assert re.fullmatch(rf"loaded {place} +\| .* (0e\+00|\de-1\d) apart", line)
    assert lines[4].startswith("check: model and optimizer resume alike")
    assert outputs[1:] == ["", ""]


def ending_of_checkpoint(fault: str) -> tuple[Any, str]:
    """Run sharded_checkpoint.py without a part of the state, or with other digits."""
    stateful = load_chapter(CHAPTER)["stateful"]
    real = stateful.set_state_dict

    def forget(model: Any, optimizer: Any, **states: Any) -> Any:
        if fault == "no weights":
            states["model_state_dict"] = {}
            states["options"] = StateDictOptions(strict=False)
            return real(model, optimizer, **states)
        result = real(model, optimizer, **states)
        if fault == "no optimizer":
            optimizer.state.clear()
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 1e-8)
        return result

    with mock.patch.object(stateful, "set_state_dict", forget):
        return ending(CHAPTER, "sharded_checkpoint")


@pytest.mark.parametrize(
    "fault",
    [
        "a hundred-millionth",
        pytest.param("no weights", marks=pytest.mark.slow),
        pytest.param("no optimizer", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_without_a_part_is_noticed(
    worker_pool: WorkerPool, fault: str
) -> None:
    ends = worker_pool.run(ending_of_checkpoint, fault, world_size=3)
    assert_failed(ends, "model and optimizer resume alike")


def saved_before_the_first_step(folder: Path, kind: str) -> tuple[float, str]:
    """Save a run before its first step; return what differs then, and an error.

    The run takes two steps after it was saved or loaded, beside one that was neither.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    name, *damps = kind.split(" with ")
    settings: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    settings |= {"dampening": 0.5} if damps else {}
    settings |= {"weight_decay": 0.5} if name != "Rprop" else {}  # it has none

    def run() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if name != "Rprop":  # which steps no DTensor
            fully_shard(model, mesh=mesh)
        optimizer = getattr(torch.optim, name)(model.parameters(), 0.1, **settings)
        return load_chapter(CHAPTER)["stateful"].Training(model, optimizer)

    plain, saved, loaded, late = (run() for _ in range(4))
    dcp.save({"run": saved}, checkpoint_id=folder)
    dcp.load({"run": loaded}, checkpoint_id=folder)
    runs = (plain, saved, loaded)
    for number in range(2):
        for one in runs:
            one.model(torch.full((2, 4), number + 1.0)).square().sum().backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
    weights: list[Any] = [one.model.weight for one in runs]
    weights = [getattr(w, "full_tensor", w.detach)() for w in weights]
    apart = max((weights[0] - other).abs().max().item() for other in weights[1:])
    late.model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError) as told:
        dcp.load({"run": late}, checkpoint_id=folder)
    if (
        name == "AdamW"
    ):  # what it guards against: PyTorch's own loads none, and is silent
        model, adam = late.model, late.optimizer
        of_model, of_adam = get_state_dict(model, adam)
        assert of_adam["state"] == {}
        dcp.load(
            {"run": {"model": of_model, "optimizer": of_adam}}, checkpoint_id=folder
        )
        set_state_dict(model, adam, model_state_dict=of_model, optim_state_dict=of_adam)
        assert len(adam.state) == 0
    return apart, str(told.value)


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_a_state_that_pytorch_makes_is_that_before_the_first_step(
    worker_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    ends = worker_pool.run(saved_before_the_first_step, tmp_path, kind)
    assert ends == [(0.0, "optimizer.zero_grad() first: it has no state yet")] * 2


@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Rprop", "SGD with dampening"])
def test_an_optimizer_that_does_not_begin_with_zeros_is_saved_later(
    worker_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    ends = worker_pool.run(saved_before_the_first_step, tmp_path, kind)
    said = load_chapter(CHAPTER)["stateful"].Training.state_dict.__doc__
    assert kind in " ".join(said.split())
    assert len(ends) == 2 and min(apart for apart, _ in ends) > 1e-3


def refused_shards(rows: int) -> list[str]:
    """Let PyTorch's optimizers of dense gradients step; name those that shards stop.

    The others step as one process does, Muon nearly: it computes in bf16.
    """
    refused, stepped = [], 0
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = {name for name in torch.optim.__all__ if name[0].isupper()}
    for name in sorted(names - {"Optimizer", "SparseAdam"}):
        torch.manual_seed(0)
        plain = nn.Linear(4, rows, bias=False)
        sharded = copy.deepcopy(plain)
        fully_shard(sharded, mesh=mesh)
        for layer in (plain, sharded):
            optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)

            def loss(layer: Any = layer, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (layer(torch.ones(4, 4)) - 1).square().mean()
                loss.backward()
                return loss

            try:
                for _ in range(3):
                    optimizer.step(loss)
            except RuntimeError as error:
                assert layer is sharded, error
                assert re.search(
                    "placement|unevenly sharded|redistribut", str(error)
                ), error
                refused.append(name)
        if name not in refused:
            weight: Any = sharded.weight
            atol = 1e-2 if name == "Muon" else 1e-3
            torch.testing.assert_close(
                weight.full_tensor(), plain.weight, rtol=0, atol=atol
            )
            stepped += 1
    assert stepped + len(refused) == 14
    return refused


def test_optimizers_that_step_no_shards_or_no_uneven_ones(
    worker_pool: WorkerPool,
) -> None:
    two = ["Adafactor", "Rprop"]
    assert worker_pool.run(refused_shards, 4) == [two] * 2
    assert worker_pool.run(refused_shards, 5) == [["Adafactor", "LBFGS", "Rprop"]] * 2
    few = ["Adafactor", "LBFGS", "Muon", "Rprop"]  # one row: rank 1 has none
    assert worker_pool.run(refused_shards, 1) == [few] * 2
    page = " ".join((ROOT / CHAPTER / "README.md").read_text().split())
    more = (
        "fused `SGD` and `Adagrad`, of uneven shards `LBFGS`, of fewer rows than ranks"
    )
    assert f"`Adafactor`, `Rprop`, {more} `Muon` fail" in page


FUSED = ["Adagrad", "Adam", "AdamW", "SGD"]  # those that take `fused=True`


def refused_when_fused() -> list[str]:
    """Let fused optimizers step even shards; name those that DTensor stops."""
    refused, stepped = [], 0
    rule = "does not have a sharding strategy registered"
    for name in FUSED:
        layer = nn.Linear(4, 4, bias=False)
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1, fused=True)
        layer(torch.ones(4, 4)).sum().backward()
        before: Any = layer.weight.detach().clone()
        try:
            optimizer.step()
        except NotImplementedError as error:
            assert rule in str(error)
            refused.append(name)
        else:
            assert not before.equal(layer.weight.detach())
            stepped += 1
    assert stepped + len(refused) == len(FUSED)
    return refused


def test_fused_sgd_and_adagrad_step_no_shards(worker_pool: WorkerPool) -> None:
    every = [
        torch.optim.__dict__[name] for name in torch.optim.__all__ if name[0] < "a"
    ]
    takes = [c.__name__ for c in every if "fused" in inspect.signature(c).parameters]
    assert sorted(takes) == FUSED
    assert worker_pool.run(refused_when_fused) == [["Adagrad", "SGD"]] * 2


class Kept:
    """Has a state of two numbers, by a text and by a number, and of a tensor."""

    def __init__(self, number: int) -> None:
        """Take it three times."""
        tensor = torch.tensor([number])
        self.state: dict[Any, Any] = {"text": number, 7: number, 8: tensor}

    def state_dict(self) -> dict[Any, Any]:
        """Return the state."""
        return dict(self.state)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Take it over."""
        self.state = state


def loaded_by_keys(folder: Path) -> dict[Any, Any]:
    """Save a state of ones, and load it over one of twos."""
    layer = nn.Linear(2, 2)
    saved, loaded = (
        load_chapter(CHAPTER)["stateful"].Training(
            layer, torch.optim.SGD(layer.parameters(), 0.1), kept=Kept(number)
        )
        for number in (1, 2)
    )
    dcp.save({"run": saved}, checkpoint_id=folder)
    dcp.load({"run": loaded}, checkpoint_id=folder)
    return loaded.others["kept"].state


def test_what_else_resumes_has_strings_as_keys(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    due = {"text": 1, 7: 2, "7": 1, 8: torch.tensor([1])}  # the tensor in place
    assert worker_pool.run(loaded_by_keys, tmp_path) == [due] * 2


def loaded_of_what_differs(folder: Path) -> int:
    """Save what each rank has otherwise; return what this rank gets back."""
    layer, rank = nn.Linear(2, 2), dist.get_rank()
    training = load_chapter(CHAPTER)["stateful"].Training(
        layer, torch.optim.SGD(layer.parameters(), 0.1), kept=Kept(rank + 1)
    )
    dcp.save({"run": training}, checkpoint_id=folder)
    dcp.load({"run": training}, checkpoint_id=folder)
    return training.others["kept"].state["text"]


def test_what_else_resumes_is_equal_on_all_ranks(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    first, second = worker_pool.run(loaded_of_what_differs, tmp_path)
    assert first == second and first in (1, 2)
    said = "`others` is what else must resume and is equal on all ranks"
    assert said in words_of(f"{CHAPTER}/checkpoints")


def resumed_with_an_unused_layer(folder: Path, way: str) -> str:
    """Save the state of two layers, one without AdamW's; load it; return the error."""
    stateful = load_chapter(CHAPTER)["stateful"]

    def run(way: str) -> Any:
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("used", "unused")})
        model["unused"].requires_grad_(way != "left out")
        for layer in model.values():
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        if way == "SGD":
            optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return stateful.Training(model, optimizer)

    was = "SGD" if "was SGD" in way else "left out" if "was left out" in way else ""
    saved, loaded = run(was), run(way)
    for parameter in saved.model["used"].parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.optimizer.step()
    dcp.save({"run": saved}, checkpoint_id=folder)
    if way.startswith("rolled back"):
        saved.optimizer.step()
        loaded = saved
    if way.startswith("has stepped"):
        for parameter in loaded.model["used"].parameters():
            parameter.grad = torch.ones_like(parameter)
        loaded.optimizer.step()
    partial = dcp.DefaultLoadPlanner(allow_partial_load="partial load" in way)
    options = StateDictOptions(strict="not strict" not in way)
    takes_over = functools.partial(set_state_dict, options=options)
    with mock.patch.object(stateful, "set_state_dict", takes_over):
        try:
            dcp.load({"run": loaded}, checkpoint_id=folder, planner=partial)
        except (CheckpointException, RuntimeError) as error:
            return str(error)
    if was == "SGD":
        (group,) = loaded.optimizer.param_groups
        return f"weight_decay {group['weight_decay']}, betas {group['betas']}"
    states = [run.model.state_dict() for run in (saved, loaded)]
    for (name, ours), theirs in zip(states[0].items(), states[1].values(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
    weight = loaded.model["used"].weight
    assert loaded.optimizer.state[weight]["step"] == 1 and len(states[0]) == 4
    return ""


def test_weights_that_never_had_a_gradient_are_missing_from_a_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    said = (
        "Missing key in checkpoint state_dict: run.optimizer.state.unused.weight.step."
    )
    fails = ["", "was left out", "was SGD"]
    loads = ["left out", "partial load", "was left out, partial load"]
    for number, way in enumerate([*fails, *loads]):
        errors = worker_pool.run(
            resumed_with_an_unused_layer, tmp_path / str(number), way
        )
        assert len(errors) == 2
        for error in errors:
            if way == "was SGD":  # it has a momentum of one layer, and no step
                error = error.replace("state.used.", "state.unused.")
            assert said in error if way in fails else error == "", error
    # AdamW's own decay is 0.01.
    arguments = (resumed_with_an_unused_layer, tmp_path / "SGD")
    said = "weight_decay 0, betas (0.9, 0.999)"
    assert worker_pool.run(*arguments, "was SGD, partial load") == [said] * 2
    # The process that saved has a state of one layer, and makes none of the other.
    said = "Missing optimizer state for parameter 'unused.weight' in checkpoint."
    # So is it if the layer was frozen, and no batch has used it yet.
    fails = loads = 0
    for first in ("rolled back", "has stepped, was left out"):
        for mend in ("", ", partial load", ", not strict"):
            way = f"{first}{mend}"
            folder = tmp_path / way
            errors = worker_pool.run(resumed_with_an_unused_layer, folder, way)
            if mend == ", not strict":
                assert errors == ["", ""], way
                loads += 1
            else:
                assert [e.startswith(said) for e in errors] == [True] * 2, errors
                fails += 1
    assert (fails, loads) == (4, 2)


def moments_resumed(folder: Path, is_frozen: bool) -> int:
    """Save AdamW's state of a weight and a bias; count those loaded, one if frozen."""
    stateful = load_chapter(CHAPTER)["stateful"]

    def run() -> Any:
        model: Any = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return stateful.Training(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    saved, loaded = run(), run()
    saved.model(torch.ones(1, 4)).sum().backward()
    saved.optimizer.step()
    saved.optimizer.zero_grad()
    dcp.save({"run": saved}, checkpoint_id=folder)
    loaded.model.bias.requires_grad_(not is_frozen)
    dcp.load({"run": loaded}, checkpoint_id=folder)
    return len(loaded.optimizer.state)


def test_adam_s_state_of_a_weight_that_is_frozen_is_not_loaded(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    for is_frozen, number in ((False, 2), (True, 1)):
        folder = tmp_path / str(number)
        assert worker_pool.run(moments_resumed, folder, is_frozen) == [number] * 2


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_state_dict_is_what_the_table_says(
    worker_pool: WorkerPool, world_size: int
) -> None:
    outputs = worker_pool.run(
        run_lesson, CHECKPOINTS, "state_dicts", world_size=world_size
    )
    lines = outputs[0].splitlines()
    assert lines[-1] == "check: 7 state dicts loaded, and equal to the last bit"
    rows = [re.split(r" +\| +", line) for line in lines[:-1]]
    assert len(rows) == 7
    for name, kind, on_rank_0, on_rank_1 in rows:
        numbers = number_in(on_rank_0), number_in(on_rank_1)
        assert kind == ("whole" if "FULL" in name or "TO_RANK" in name else "shards")
        if "TO_RANK_0" in name:
            assert numbers[1] == 0 < numbers[0]
        else:
            assert numbers[0] == pytest.approx(numbers[1], rel=0.05)
    whole = {row[0]: number_in(row[2]) for row in rows}
    shards = whole["get_model_state_dict"]
    assert whole["model.state_dict()"] == shards
    assert whole["get_model_state_dict, FULL"] == pytest.approx(
        world_size * shards, rel=0.05
    )


def saved_by_rank_zero() -> tuple[list[int], str]:
    """Save on rank 0 a model's state dict, and what all ranks have gathered.

    Return the sizes, and how it ends if rank 0 gathers alone.
    """
    model: Any = nn.Linear(25_000, 4, bias=False)
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    options = StateDictOptions(full_state_dict=True)
    sizes, gathered = [], get_model_state_dict(model, options=options)
    if dist.get_rank():
        return sizes, ""
    for weights in (model.state_dict(), gathered):
        torch.save(weights, file := io.BytesIO())
        sizes.append(file.tell())
    try:
        get_model_state_dict(model, options=options)
    except RuntimeError as error:
        return sizes, str(error)
    return sizes, "no error"


def test_rank_zero_saves_its_shard_or_what_all_have_gathered(
    worker_pool: WorkerPool,
) -> None:
    (saved, alone), nothing = worker_pool.run(saved_by_rank_zero)
    assert saved == pytest.approx([4 * 100_000 / 2, 4 * 100_000], rel=0.05)
    assert "Timed out waiting 1000ms for" in alone and nothing == ([], "")
    help_page = (ROOT / "WHEN_IT_GOES_WRONG.md").read_text()
    assert "around the writing alone" in " ".join(help_page.split())
    page = words_of(f"{CHAPTER}/mistakes")
    assert "Under FSDP `state_dict()` has this rank's shards, and gathering" in page


def saved_by_rank_zero_alone(folder: str) -> str:
    """Call `dcp.save` on rank 0 only; return how that ends."""
    group: Any = dist.new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        try:
            dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, process_group=group)
        except RuntimeError as error:
            return str(error)
    return ""


def test_dcp_save_waits_for_all_ranks(worker_pool: WorkerPool, tmp_path: Path) -> None:
    waited, nothing = worker_pool.run(saved_by_rank_zero_alone, str(tmp_path))
    assert "Timed out waiting" in waited and nothing == ""


def ends_of_what_was_not_loaded() -> list[tuple[Any, str]]:
    """Load a state dict of model or of optimizer nowhere; then compare nothing."""
    ways = load_chapter(CHECKPOINTS)["state_dicts"].WAYS
    model, optimizer = "model.state_dict()", "optimizer.state_dict()"
    faults: list[dict[str, Any]] = [
        {"WAYS": {model: (ways[model][0], lambda *_: None)}},
        {"WAYS": {optimizer: (ways[optimizer][0], lambda *_: None)}},
        {"WAYS": {model: ways[model]}, "shards": lambda _: []},
    ]
    return [ending(CHECKPOINTS, "state_dicts", **fault) for fault in faults]


def test_a_state_dict_not_loaded_or_not_compared_is_noticed(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(ends_of_what_was_not_loaded)
    for ends in zip(*by_rank, strict=True):
        assert_failed(list(ends), "1 state dicts loaded, and equal to the last bit")
    assert len(by_rank) == 2 and len(by_rank[0]) == 3


def test_save_in_the_background_holds_the_weights_of_its_call(
    worker_pool: WorkerPool,
) -> None:
    outputs = worker_pool.run(run_lesson, CHECKPOINTS, "async_checkpoint")
    lines = outputs[0].splitlines()
    assert re.fullmatch("step 2 was taken before .*: (True|False)", lines[0])
    assert ".metadata" not in lines[1] and "__0_0.distcp" in lines[1]
    assert lines[2] == "the newest that is whole: step_1"
    assert lines[3] == "check: loaded: the weights at the call, to the last bit"


def ending_of_async(fault: str) -> tuple[Any, str]:
    """Run async_checkpoint.py with a part that is wrong."""
    lesson = load_chapter(CHECKPOINTS)["async_checkpoint"]

    def idle(*arguments: Any) -> torch.Tensor:
        weights.append(weights[0] if weights else take(*arguments))
        return weights[0]

    weights: list[torch.Tensor] = []

    def late(training: Any, folder: Path, number: int, group: Any, *writer: Any) -> Any:
        """Save when the next step has been taken."""
        if number == 1:
            torch.manual_seed(1)
            tokens = torch.randint(256, (lesson.SAMPLES, lesson.BLOCK_SIZE + 1))
            mesh = next(training.model.parameters()).device_mesh
            take(training, tokens, mesh)
        return lesson_save(training, folder, number, group, *writer)

    lesson_save, take = lesson.save_in_background, lesson.step
    faults = {"late": {"save_in_background": late}, "no second step": {"step": idle}}
    return ending(CHECKPOINTS, "async_checkpoint", **faults[fault])


def test_newest_checkpoint_has_the_largest_number_of_those_that_are_whole(
    tmp_path: Path,
) -> None:
    # As text "step_9" comes after "step_10"; step 11 has no `.metadata`.
    for number in (9, 10, 11):
        (tmp_path / f"step_{number}").mkdir()
    for number in (9, 10):
        (tmp_path / f"step_{number}" / ".metadata").touch()
    newest_whole = load_chapter(CHECKPOINTS)["async_checkpoint"].newest_whole
    assert newest_whole(tmp_path) == tmp_path / "step_10"
    (tmp_path / "step_10").rename(tmp_path / "step_10.old")
    assert newest_whole(tmp_path) == tmp_path / "step_9"
    (tmp_path / "step_9" / ".metadata").unlink()
    assert newest_whole(tmp_path) is None


@pytest.mark.parametrize(
    "fault", ["late", pytest.param("no second step", marks=pytest.mark.slow)]
)
def test_save_of_later_weights_is_noticed(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(ending_of_async, fault)
    assert_failed(ends, "loaded: the weights at the call")


# --- Settings. ----------


@pytest.mark.parametrize(
    "fault",
    [
        "gathers float32",
        "bf16 off by a fifth",
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("keeps what it gathers", "no policy", "float32 off by 1e-4")
        ),
    ],
)
def test_mixed_precision_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(ending_of_mixed, fault)
    assert_failed(ends, "shards and gradients are float32")


def ending_of_mixed(fault: str) -> tuple[Any, str]:
    """Run mixed_precision.py with policies that do not what they say."""
    lesson = load_chapter(SETTINGS)["mixed_precision"]
    real = lesson.fully_shard

    def shard(module: Any, **settings: Any) -> Any:
        policy, off = settings["mp_policy"], 0.0
        if fault == "no policy":
            settings.pop("mp_policy")
        elif fault == "keeps what it gathers" and policy.param_dtype:
            module.bfloat16()
        elif fault == "gathers float32" and policy.reduce_dtype:
            settings["mp_policy"] = MixedPrecisionPolicy(None, torch.float32)
        elif fault == "float32 off by 1e-4" and not policy.param_dtype:
            off = 1e-4
        elif fault == "bf16 off by a fifth" and policy.param_dtype:
            off = 0.2
        if off and isinstance(module, lesson.GPT):
            module.register_forward_hook(lambda *call: call[2] * (1 + off))
        return real(module, **settings)

    return ending(SETTINGS, "mixed_precision", fully_shard=shard)


def gradient_off_by(share: float) -> tuple[Any, str]:
    """Run one row of memory_and_messages.py on a small GPT, its gradient scaled."""
    lesson = load_chapter(SETTINGS)["memory_and_messages"]
    real, small = lesson.shard_gpt, lesson.GPTConfig(8, width=16, layers=1, heads=2)

    def scaled(*arguments: Any, **settings: Any) -> Any:
        model = real(*arguments, **settings)
        model.register_forward_hook(lambda *call: call[2] * (1 + share))
        return model

    faults = {"CONFIG": small, "SETTINGS": {"default": {}}, "shard_gpt": scaled}
    return ending(SETTINGS, "memory_and_messages", **faults)


def test_gradient_of_a_setting_is_held_to_a_millionth(worker_pool: WorkerPool) -> None:
    claim = "1 settings, one gradient: one process's"
    ends = worker_pool.run(gradient_off_by, 0.0, world_size=4)
    assert ends[0] == (0, f"check: {claim}")
    ends = worker_pool.run(gradient_off_by, 1e-3, world_size=4)
    assert [code for code, _ in ends] == [1] * 4 and claim in ends[0][1]


def test_hybrid_sharding_gathers_among_neighbours_and_reduces_across(
    worker_pool: WorkerPool,
) -> None:
    outputs = worker_pool.run(run_lesson, SETTINGS, "hybrid_sharding", world_size=4)
    *rows, check = outputs[0].splitlines()
    row = r"  (\S+) +\| ranks (\(.*\)) \| (\S+) bytes a parameter"
    found = [m.groups() if (m := re.fullmatch(row, line)) else line for line in rows]
    # A ring sends (n - 1) / n of a message, an all-reduce twice that; 4 bytes a number.
    # The blocks' weights are gathered twice, the root's once.
    whole, pair, twins = "(0, 1, 2, 3)", "(0, 1)", "(0, 2)"
    weight = "a weight is (Replicate(), Shard(dim=0))"
    assert found == [
        f"mesh (1, 4): {weight}",
        ("all-gather", whole, "5.7"),
        ("reduce-scatter", whole, "3.0"),
        f"mesh (2, 2): {weight}",
        ("all-gather", pair, "3.8"),
        ("reduce-scatter", pair, "2.0"),
        ("all-reduce", twins, "2.0"),
        f"mesh (4, 1): {weight}",
        ("all-reduce", whole, "6.0"),
    ]
    assert check.startswith("check: the gradient of one process")


def ending_of_hybrid(fault: str) -> tuple[Any, str]:
    """Run hybrid_sharding.py with replicas that send more, or a wrong gradient."""
    lesson = load_chapter(SETTINGS)["hybrid_sharding"]
    real = lesson.fully_shard

    def shard(module: Any, mesh: Any) -> Any:
        twins, root = mesh.get_group("replicate"), isinstance(module, lesson.GPT)
        if root and fault == "replicas send more":
            module.register_forward_hook(
                lambda *_: dist.all_reduce(torch.ones(10**5), group=twins)
            )
        elif root:
            module.register_forward_hook(lambda *call: call[2] * 1.001)
        return real(module, mesh=mesh)

    return ending(SETTINGS, "hybrid_sharding", fully_shard=shard)


@pytest.mark.parametrize("fault", ["replicas send more", "off by a thousandth"])
def test_hybrid_sharding_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(ending_of_hybrid, fault, world_size=4)
    assert_failed(ends, "the gradient of one process")


def test_prefetched_are_the_next_blocks_nearest_first() -> None:
    lesson = load_chapter(SETTINGS)["memory_and_messages"]
    model = mock.Mock(blocks=[mock.Mock() for _ in range(5)])
    with mock.patch.object(lesson, "fully_shard"):
        lesson.shard_gpt(model, mock.Mock(), blocks=5, prefetch=2)
    found = []
    for block in model.blocks:
        (later,) = block.set_modules_to_forward_prefetch.call_args.args
        (earlier,) = block.set_modules_to_backward_prefetch.call_args.args
        numbers = ([model.blocks.index(one) for one in way] for way in (later, earlier))
        found.append(tuple(numbers))
    # In the order in which each pass comes to them.
    assert found[2] == ([3, 4], [1, 0]) and len(found) == 5
    assert found[0] == ([1, 2], []) and found[1] == ([2, 3], [0])
    assert found[3] == ([4], [2, 1]) and found[4] == ([], [3, 2])


@pytest.mark.slow
def test_each_unit_gathers_as_far_ahead_as_it_is_told(worker_pool: WorkerPool) -> None:
    # The page shows two ranks. Columns: the units in their turn; rows: three ways.
    outputs = worker_pool.run(run_lesson, SETTINGS, "prefetch", world_size=3)
    *table, check = outputs[0].splitlines()
    assert check == "check: 3 ways, one gradient: one process's"
    rows = [[cell.strip() for cell in line.split("|")] for line in table]
    assert rows == [
        ["forward", "R", "0", "1", "2", "3"],
        ["default", "R", "0", "1", "2", "3"],
        ["1 ahead", "R", "0 1", "2", "3", ""],
        ["2 ahead", "R", "0 1 2", "3", "", ""],
        ["backward", "R", "3", "2", "1", "0"],
        ["default", "3", "2", "1", "0", ""],
        ["1 ahead", "3", "2", "1", "0", ""],
        ["2 ahead", "3", "2 1", "0", "", ""],
    ]


def ending_of_prefetch() -> tuple[Any, str]:
    """Run prefetch.py where looking two ahead changes what blocks compute."""

    def wrong(blocks: list[Any], ahead: int) -> None:
        for block in blocks if ahead == 2 else ():
            block.register_forward_hook(lambda *call: call[2] * 1.001)

    return ending(SETTINGS, "prefetch", gather_ahead=wrong)


def test_prefetch_notices_another_gradient(worker_pool: WorkerPool) -> None:
    assert_failed(worker_pool.run(ending_of_prefetch), "3 ways, one gradient")


def units_that_look_nowhere() -> tuple[list[str], int, list[float], str]:
    """Tell what the table from FSDP1 says of units inside units, and of what is lost.

    Return what units gather in backward if each names itself, how many units there are,
    a weight after a change while it was whole, and what clipping says.
    """
    lessons = load_chapter(SETTINGS)
    fsdp1, prefetch = lessons["from_fsdp1"], lessons["prefetch"]
    config = fsdp1.GPTConfig(block_size=8, width=16, layers=2, heads=2)
    gpt: Any = fsdp1.GPT(config)
    gpt.blocks[0].inner = fsdp1.Block(config)  # which computes nothing
    model: Any = fsdp1.InFSDP2(gpt, torch.device("cpu")).model
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for unit in units:
        unit.set_modules_to_backward_prefetch([unit])
    tokens = torch.ones(1, 8, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(tokens, tokens).backward()
    turns = prefetch.gathered_at(profiler.events())
    begun = [f"{unit} {other}" for way, unit, other in turns if way == "backward"]
    model.unshard()
    model.final_norm.weight.data.fill_(5)
    model.reshard()
    weight = model.final_norm.weight.full_tensor().detach()
    part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(part, mesh=mesh, ignored_params=set(part[1].parameters()))
    part(torch.ones(1, 2)).sum().backward()
    try:
        nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    except RuntimeError as error:
        return begun, len(units), weight.tolist(), str(error)
    return begun, len(units), weight.tolist(), ""


def test_what_the_table_from_fsdp1_says_of_units_is_so(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(units_that_look_nowhere)
    assert len(found) == 2
    for begun, units, weight, said in found:
        # The root's weights are still whole from the forward pass.
        assert begun == ["R ", "1 1", "0 0"] and units == 4
        assert weight == [1.0] * 16
        assert "got mixed torch.Tensor and DTensor" in said


def test_fsdp1_and_fsdp2_train_as_one_process(worker_pool: WorkerPool) -> None:
    # The page shows two ranks.
    outputs = worker_pool.run(run_lesson, SETTINGS, "from_fsdp1", world_size=3)
    *steps, check = outputs[0].splitlines()
    assert check == "check: 3 steps' norms, and the weights, are one process's"
    norms = [re.findall(r"\d\.\d{4}", line) for line in steps]
    assert len(norms) == 3 and all(one == two for one, two in norms)
    assert len({one for one, _ in norms}) == 3


def ending_of_from_fsdp1(fault: str) -> tuple[Any, str]:
    """Run from_fsdp1.py with a part of the migration forgotten."""
    lesson: Any = load_chapter(SETTINGS)["from_fsdp1"]
    way = lesson.InFSDP2

    class Faulty(way):
        def __init__(self, model: Any, device: torch.device) -> None:
            if fault == "no broadcast" and dist.get_rank() == 1:
                nn.init.zeros_(model.blocks[0].mlp_in.weight)
            broadcast = mock.Mock() if fault == "no broadcast" else dist.broadcast
            with mock.patch.object(dist, "broadcast", broadcast):
                super().__init__(model, device)

        def add_gradients(self, batches: list[torch.Tensor]) -> float:
            if "clipped" not in fault:
                return super().add_gradients(batches)
            with mock.patch.object(nn.utils, "clip_grad_norm_", unclipped):
                return super().add_gradients(batches)

    return ending(SETTINGS, "from_fsdp1", **{way.__name__: Faulty})


def unclipped(parameters: Any, max_norm: float) -> torch.Tensor:
    """Return the norm, but one rank's part of it, as a DTensor's `item` does."""
    parts = [p.grad.to_local().square().sum() for p in parameters]
    return SimpleNamespace(full_tensor=lambda: sum(parts).sqrt())  # type: ignore


@pytest.mark.parametrize("fault", ["no broadcast", "clipped by its own norm"])
def test_from_fsdp1_notices(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(ending_of_from_fsdp1, fault)
    assert_failed(ends, "3 steps' norms, and the weights")


KILLED = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from async_checkpoint import save_in_background
from ranks import join
from sharded_checkpoint import BLOCK_SIZE, SAMPLES, new_training, step

moment, folder = sys.argv.pop(), Path(sys.argv.pop())

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Killed(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if moment == "before rank 1 writes" and dist.get_rank() == 1:
            die()
        return super().write_data(plan, planner)

    def finish(self, metadata, results):
        if moment == "before the metadata":
            die()
        super().finish(metadata, results)

mesh = init_device_mesh(join().type, (2,))
group = dist.new_group(backend="gloo")
torch.manual_seed(0)
tokens = torch.randint(256, (SAMPLES, BLOCK_SIZE + 1))
training = new_training(torch.device("cpu"), mesh)
weights = step(training, tokens, mesh)
if dist.get_rank() == 0:
    torch.save(weights, folder / "weights.pt")
save_in_background(training, folder, 1, group).result()
step(training, tokens, mesh)
save_in_background(training, folder, 2, group, Killed).result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before rank 1 writes", "before the metadata"])
def test_killed_while_it_writes_the_older_checkpoint_is_whole(
    tmp_path: Path, moment: str
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    environment = clean_environment(PYTHONPATH=str(ROOT / CHECKPOINTS))
    result = torchrun(script, folder, moment, env=environment)
    assert result.returncode != 0 and "SIGKILL" in result.output
    assert (folder / "step_2").is_dir()
    modules = load_chapter(CHECKPOINTS)
    newest = modules["async_checkpoint"].newest_whole(folder)
    assert newest == folder / "step_1"
    training = modules["sharded_checkpoint"].new_training(torch.device("cpu"))
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"run": training}, checkpoint_id=newest)
    loaded = torch.cat([w.flatten() for w in training.model.state_dict().values()])
    assert torch.equal(loaded, torch.load(folder / "weights.pt", weights_only=True))


class Unfinished(dcp.FileSystemWriter):
    """Writes the shards, and not what belongs to all of them."""

    def finish(self, metadata: Any, results: Any) -> None:
        """End before `.metadata` is written."""
        raise InterruptedError("as planned")


def saved_twice(folder: str, again: str) -> tuple[bool, float]:
    """Save ones, then twos until the end fails; return what `again` holds then."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ones = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    dcp.save({"w": ones}, checkpoint_id=folder)
    with pytest.raises(dcp.api.CheckpointException, match="as planned"):
        dcp.save({"w": 2 * ones}, storage_writer=Unfinished(again))
    if not Path(again, ".metadata").exists():
        return False, 0.0
    loaded: Any = {"w": torch.zeros_like(ones)}
    dcp.load(loaded, checkpoint_id=again)
    return True, loaded["w"].full_tensor().mean().item()


def test_metadata_tells_of_a_whole_checkpoint_in_a_new_folder_only(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    new, used = str(tmp_path / "new"), str(tmp_path / "used")
    assert worker_pool.run(saved_twice, str(tmp_path / "old"), new) == [(False, 0)] * 2
    assert worker_pool.run(saved_twice, used, used) == [(True, 2)] * 2


def saved_without_collectives(folder: str) -> tuple[list[str], list[float]]:
    """Let each rank save for itself; return the metadata files, and what is loaded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    four = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    dcp.save({"w": four}, checkpoint_id=folder, use_collectives=False)
    dist.barrier()
    loaded: Any = {"w": torch.zeros_like(four)}
    dcp.load(loaded, checkpoint_id=folder)
    names = sorted(path.name for path in Path(folder).glob("*.metadata"))
    return names, loaded["w"].full_tensor().tolist()


def test_without_collectives_each_rank_has_a_metadata_file(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    both = ["__0.metadata", "__1.metadata"], [0, 1, 2, 3]
    assert worker_pool.run(saved_without_collectives, str(tmp_path)) == [both] * 2


def first_rows_on_rank_1() -> list[float]:
    """Shard a layer that each rank fills with its own number; return all of it."""
    layer = torch.nn.Linear(1, 4, bias=False)
    torch.nn.init.constant_(layer.weight, float(dist.get_rank()))
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return layer.weight.full_tensor().flatten().tolist()  # type: ignore[operator]


def test_fully_shard_broadcasts_nothing(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(first_rows_on_rank_1)
    assert results == [[0.0, 0.0, 1.0, 1.0]] * 2


def statistics_saved_and_loaded(folder: str) -> tuple[list[float], list[float]]:
    """Feed this rank's number to BatchNorm; return its mean, and what DCP loads."""
    norm: Any = torch.nn.BatchNorm1d(2)
    fully_shard(norm, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    norm(torch.full((4, 2), 10.0 * (1 + dist.get_rank())))
    own = norm.running_mean.tolist()
    dcp.save(get_model_state_dict(norm), checkpoint_id=folder)
    state: dict[str, Any] = get_model_state_dict(norm)
    dcp.load(state, checkpoint_id=folder)
    return own, state["running_mean"].tolist()


def test_running_statistics_are_each_rank_s_and_one_rank_s_are_saved(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(statistics_saved_and_loaded, str(tmp_path))
    assert [own for own, _ in ends] == [[1.0, 1.0], [2.0, 2.0]]
    (first, second) = [loaded for _, loaded in ends]
    assert first == second and first in ([1.0, 1.0], [2.0, 2.0])


def statistics_of_three_norms(folder: str) -> list[float]:
    """Save three norms whose statistics are all this rank's number; load them."""
    norms = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3)))
    fully_shard(norms, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for name, buffer in norms.named_buffers():
        buffer.fill_(1 + dist.get_rank() if "running" in name else 0)
    dcp.save(get_model_state_dict(norms), checkpoint_id=folder)
    state: dict[str, Any] = get_model_state_dict(norms)
    dcp.load(state, checkpoint_id=folder)
    return [state[name].mean().item() for name in state if "running" in name]


def test_saved_statistics_may_be_of_several_ranks(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(statistics_of_three_norms, str(tmp_path), world_size=3)
    assert ends[0] == ends[1] == ends[2] and len(ends[0]) == 6
    assert set(ends[0]) <= {1.0, 2.0, 3.0} and len(set(ends[0])) > 1


def loaded_from_a_damaged_file(folder: str, damage: str) -> list[float] | str:
    """Save four numbers, damage the file, perhaps by a bit, and load them."""
    saved = {"numbers": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    dcp.save(saved, checkpoint_id=folder)
    (file,) = Path(folder).glob("*.distcp")
    content = bytearray(file.read_bytes())
    first = content.find(saved["numbers"].numpy().tobytes())
    content[first + 4 + 2] ^= 0x40  # of the mantissa
    file.write_bytes(content[:first] if damage == "cut" else content)
    if damage == "gone":
        file.unlink()
    state = {"numbers": torch.zeros(4)}
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException:
        return "refused"
    return state["numbers"].tolist()


@pytest.mark.parametrize(
    ("damage", "loaded"),
    [("flip", [1.0, 3.0, 3.0, 4.0]), ("cut", "refused"), ("gone", "refused")],
)
def test_dcp_loads_a_flipped_bit_without_a_word(
    worker_pool: WorkerPool, tmp_path: Path, damage: str, loaded: list[float] | str
) -> None:
    call = (loaded_from_a_damaged_file, str(tmp_path), damage)
    assert worker_pool.run(*call, world_size=1) == [loaded]


def new_head(strict: bool) -> tuple[str, list[float]]:
    """Load a file that lacks the second layer; return what is said and its weight."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():  # as if it were what the memory held
        parameter.data.fill_(77.0)
    weights: Any = {"0.weight": torch.ones(2, 2)} if dist.get_rank() == 0 else {}
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=strict
    )
    try:
        said = str(set_model_state_dict(model, weights, options=options))
    except RuntimeError as error:
        said = str(error)
    return said, model[1].weight.full_tensor().flatten().tolist()  # type: ignore


def test_without_strict_a_layer_stays_undefined(
    worker_pool: WorkerPool,
) -> None:
    first, second = worker_pool.run(new_head, False)
    assert first == ("<All keys matched successfully>", [77.0, 77.0])
    assert second[1] == [77.0, 77.0]
    refused = worker_pool.run(new_head, True)
    assert ["1.weight" in said for said, _ in refused] == [True] * 2, refused


class Told(nn.Module):
    """Notes the inputs that its forward gets."""

    def __init__(self) -> None:
        """Have a layer to shard, and nothing noted."""
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 1), [0.0]

    def forward(self, batch: Any) -> torch.Tensor:
        """Note the times of a batch; apply the layer to its features."""
        held = batch if isinstance(batch, (dict, UserDict)) else vars(batch)
        self.seen = held["time"].tolist()
        return self.layer(held["features"].to(self.layer.weight.dtype))


def inputs_under_a_policy(kind: Any, **policy: Any) -> list[float]:
    """Return the times that forward sees of 999 and 1001, under a policy."""
    model: Any = Told()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    times = torch.tensor([999.0, 1001.0])
    model(kind(features=torch.ones(2, 2), time=times))
    return model.seen


@dataclasses.dataclass
class Batch:
    """Features and times."""

    features: torch.Tensor
    time: torch.Tensor


BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "policy", "seen"),
    [
        (dict, BF16, [1000.0] * 2),
        (dict, {**BF16, "cast_forward_inputs": False}, [999, 1001]),
        (dict, {"reduce_dtype": torch.bfloat16}, [999, 1001]),
        (Batch, BF16, [1000.0] * 2),
        (SimpleNamespace, BF16, [999, 1001]),
        (UserDict, BF16, [999, 1001]),  # as BatchEncoding, which tokenizers return
    ],
)
def test_a_policy_rounds_every_float_of_the_root_s_inputs(
    worker_pool: WorkerPool, kind: Any, policy: dict[str, Any], seen: list[float]
) -> None:
    found = worker_pool.run(functools.partial(inputs_under_a_policy, kind, **policy))
    assert found == [seen] * 2


class Masked(nn.Module):
    """Adds a mask to scores, as attention does."""

    def __init__(self) -> None:
        """Have a layer to shard."""
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the chances of three keys."""
        return torch.softmax(self.layer(x) + mask, dim=-1)


def chances_under_a_mask(dtype: torch.dtype) -> list[bool]:
    """Mask all keys by the least number of a dtype, in bf16; tell which are NaN."""
    model: Any = Masked()
    policy = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    mask = torch.full((1, 3), torch.finfo(dtype).min)
    return model(torch.ones(1, 2), mask).isnan().flatten().tolist()


def test_a_policy_rounds_a_mask_to_minus_infinity(worker_pool: WorkerPool) -> None:
    for dtype, is_nan in ((torch.float32, True), (torch.bfloat16, False)):
        expected = [[is_nan] * 3] * 2
        assert worker_pool.run(chances_under_a_mask, dtype) == expected
    # PyTorch's own attention gives zeros for a query without a key.
    x = torch.ones(1, 3, 2, dtype=torch.bfloat16)
    mask = torch.full((3, 3), -torch.inf, dtype=torch.bfloat16)
    assert not F.scaled_dot_product_attention(x, x, x, mask).any()


class WithPositions(nn.Module):
    """Adds a float32 buffer between two layers."""

    def __init__(self) -> None:
        """Have two layers to shard, and what each has computed with noted."""
        super().__init__()
        self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))
        self.register_buffer("positions", torch.ones(2))
        self.dtypes: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both; note the dtype of what each is given."""
        for layer in (self.first, self.last):
            self.dtypes.append(str(x.dtype))
            x = layer(x) + self.positions
        return x


def dtypes_with_a_buffer(dtype: torch.dtype) -> tuple[list[str], str]:
    """Return what the layers are given under a policy of bf16, and what is said."""
    model: Any = WithPositions().to(dtype)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        return model.dtypes, str(error)
    return model.dtypes, ""


def test_a_float32_buffer_ends_bf16(worker_pool: WorkerPool) -> None:
    bf16, float32 = "torch.bfloat16", "torch.float32"
    right = [bf16, bf16], ""
    assert worker_pool.run(dtypes_with_a_buffer, torch.bfloat16) == [right] * 2
    ends = worker_pool.run(dtypes_with_a_buffer, torch.float32)
    assert len(ends) == 2
    for dtypes, said in ends:
        assert dtypes == [bf16, float32]
        assert said.startswith("expected m1 and m2 to have the same dtype")
    assert "unless a float32 buffer joins in" in words_of(SETTINGS)


def norm_under_a_policy(of_its_own: dict[str, Any] | None) -> str:
    """Apply a convolution, BatchNorm and a convolution in bf16; return what is said."""
    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
    )
    mesh = init_device_mesh("cpu", (2,))
    if of_its_own is not None:
        policy = MixedPrecisionPolicy(torch.float32, **of_its_own)
        fully_shard(model[1], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    try:
        return str(model(torch.ones(2, 3, 2, 2)).dtype)
    except RuntimeError as error:
        return str(error)


NORM_IN_BF16 = "expected scalar type BFloat16 but found Float"


@pytest.mark.parametrize(
    ("of_its_own", "said"),
    [
        (None, NORM_IN_BF16),
        ({}, "Input type (float) and bias type (c10::BFloat16) should be the same"),
        ({"output_dtype": torch.bfloat16}, "torch.bfloat16"),
    ],
)
def test_batch_norm_under_bf16_takes_a_policy_of_its_own(
    worker_pool: WorkerPool, of_its_own: dict[str, Any] | None, said: str
) -> None:
    assert worker_pool.run(norm_under_a_policy, of_its_own) == [said] * 2


def results_of_two_dtypes() -> list[list[str]]:
    """Weight classes and multiply in float32, where the logits are in bf16; mend it."""
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(torch.bfloat16)
    model: Any = fully_shard(nn.Linear(4, 3), mesh=mesh, mp_policy=policy)
    logits, labels, said = model(torch.ones(2, 4)), torch.tensor([0, 1]), []
    other = torch.ones(2, 3, 1)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: F.cross_entropy(x, labels, weight=torch.ones(3)),
        lambda x: torch.bmm(x.unsqueeze(1), other),
        lambda x: x.unsqueeze(1) @ other,
        lambda x: torch.einsum("bc,bcd->bd", x, other),
    ]
    for call in calls:
        said.append([])
        for each in (logits, logits.to(other.dtype)):
            try:
                said[-1].append(str(call(each).dtype))
            except RuntimeError as error:
                said[-1].append(str(error))
    return said


def test_losses_and_products_of_two_dtypes_need_one(worker_pool: WorkerPool) -> None:
    said = worker_pool.run(results_of_two_dtypes)
    assert said == [[[NORM_IN_BF16, "torch.float32"]] * 4] * 2


class Scaled(nn.Module):
    """Holds one number, as a model that learns a temperature does."""

    def __init__(self) -> None:
        """Begin with 1."""
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


REFUSED = """\
FSDP does not support non-contiguous parameters yet
fully_shard doesn't support scalar parameters. Change scale to a 1D tensor
Each distinct composable distributed API can only be applied to a module once.
"""


def modules_refused() -> list[str]:
    """Give `fully_shard` five modules that it does not take."""
    mesh, said = init_device_mesh("cpu", (2,)), []
    looped = nn.Sequential(nn.Linear(2, 2))
    for module in reversed([*looped.modules()]):
        fully_shard(module, mesh=mesh)
    fully_shard(twice := nn.Linear(2, 2), mesh=mesh)
    last = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore
    transposed, contiguous = nn.Linear(4, 2), nn.Linear(4, 2)
    transposed.weight = nn.Parameter(torch.ones(4, 2).t())
    contiguous.weight = nn.Parameter(torch.ones(4, 2).t().contiguous())
    fully_shard(contiguous, mesh=mesh)
    for module in (last, transposed, Scaled(), twice, looped):
        with pytest.raises((NotImplementedError, ValueError, AssertionError)) as error:
            fully_shard(module, mesh=mesh)
        said.append(str(error.value))
    return said


def test_fully_shard_refuses_in_these_words(worker_pool: WorkerPool) -> None:
    (said, other), lines = worker_pool.run(modules_refused), REFUSED.splitlines()
    assert said == other and (len(said), len(lines)) == (5, 3)
    for text, number in zip(said, (0, 0, 1, 2, 2), strict=True):
        assert text.startswith(lines[number])


def saved_after_an_early_forward(kind: str) -> None:
    """Build the optimizer when the root is gathered, train, and save it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    with torch.no_grad():
        model(torch.ones(1, 4))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    model(torch.ones(1, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    get_state_dict(model, optimizer)


def test_saving_an_optimizer_of_freed_weights_kills_the_process(
    worker_pool: WorkerPool,
) -> None:
    with pytest.raises(RankDied, match="died of signal SIGSEGV"):
        worker_pool.run(saved_after_an_early_forward, "SGD")
    # With a state of the block, of which it has shards.
    with pytest.raises(RankError, match="KeyError: 1"):
        worker_pool.run(saved_after_an_early_forward, "AdamW")


def batches_tracked(checkpoints: bool) -> list[int]:
    """Take a step through a frozen block and another; return how many each has seen."""
    blocks: Any = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    blocks[0].requires_grad_(False)
    norms = [block[1] for block in blocks]
    if checkpoints:
        blocks = [checkpoint_wrapper(block) for block in blocks]
    model = nn.Sequential(*blocks)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.randn(4, 2)).square().mean().backward()
    return [int(norm.num_batches_tracked) for norm in norms]


@pytest.mark.parametrize(("checkpoints", "seen"), [(True, [1, 2]), (False, [1, 1])])
def test_activation_checkpointing_moves_running_means_twice(
    worker_pool: WorkerPool, checkpoints: bool, seen: list[int]
) -> None:
    assert worker_pool.run(batches_tracked, checkpoints) == [seen] * 2


def undefined_after_drawing() -> list[str]:
    """Draw a transformer's shards as the lesson does; return what is undefined."""
    lesson = load_chapter(DTENSOR)["meta_init"]
    with torch.device("meta"):
        model: Any = nn.TransformerEncoderLayer(8, 2, 16)
        model.init_weights = mock.Mock()
        model.scale = nn.Parameter(torch.ones(8))
        model.register_buffer("angles", torch.ones(4))
        model.statistics = nn.BatchNorm1d(4, affine=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    model.to_empty(device="cpu")
    with lesson.DrawWhole():
        lesson.draw_weights(model)
    named = [(name, p.full_tensor()) for name, p in model.named_parameters()]
    named += model.named_buffers()
    assert len(named) == 13 + 4
    return [name for name, values in named if values.isnan().any()]


def test_attention_of_torch_is_not_drawn_by_reset_parameters(
    worker_pool: WorkerPool,
) -> None:
    names = ["scale", "self_attn.in_proj_weight", "self_attn.in_proj_bias", "angles"]
    assert worker_pool.run(undefined_after_drawing) == [names] * 2
    page = words_of(DTENSOR)
    assert "**`draw_weights` leaves undefined what no `reset_parameters` sets**" in page


@pytest.mark.slow  # the page shows the same table, and its block is a test
def test_settings_cost_what_the_table_says(worker_pool: WorkerPool) -> None:
    outputs = worker_pool.run(run_lesson, SETTINGS, "memory_and_messages", world_size=4)
    lines = outputs[0].splitlines()
    rows = {}
    for line in lines[1:10]:
        name, calls, *numbers = re.split(r" +\| +", line)
        counts = [int(count) for count in calls.split(" + ")]
        rows[name] = (counts, *(float(number) for number in numbers))
    assert len(rows) == 9 and lines[-1].startswith("check: 9 settings, one gradient")
    counts = {name: row[0] for name, row in rows.items()}
    assert counts == {
        "blocks and root": [13, 7, 0],
        "root alone": [1, 1, 0],
        "reshard: never": [7, 7, 0],
        "reshard: root too": [14, 7, 0],
        "reshard: to 2 ranks": [14, 7, 0],
        "prefetch 2 blocks": [13, 7, 0],
        "activation checkpointing": [13, 7, 0],
        "selective checkpointing": [13, 7, 0],
        "replicas: 2 x 2": [13, 7, 7],
    }
    default, never = rows["blocks and root"], rows["reshard: never"]
    sent, kept, peak, work = range(1, 5)
    assert never[sent] == rows["root alone"][sent] == pytest.approx(6, rel=0.02)
    assert never[sent] < rows["reshard: to 2 ranks"][sent] < default[sent] < 9
    assert rows["replicas: 2 x 2"][kept] == 2 * default[kept] == 4
    assert default[peak] < never[peak] < rows["root alone"][peak]
    assert default[peak] < rows["reshard: to 2 ranks"][peak] < never[peak]
    assert default[peak] < rows["prefetch 2 blocks"][peak]
    recompute = rows["activation checkpointing"]
    assert recompute[peak] < default[peak]
    # Not a third more: what no gradient needs is not computed again.
    assert recompute[work] / default[work] == pytest.approx(1.22, abs=0.02)
    selective = rows["selective checkpointing"]
    assert recompute[peak] < selective[peak] < default[peak]
    assert selective[work] / default[work] == pytest.approx(1.05, abs=0.01)


class Operators(TorchDispatchMode):
    """Counts what is computed, and not taken from what was kept."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count a call by its operator's name, without what says for which device."""
        self.seen[func.name().removeprefix("aten::").removesuffix("_for_cpu")] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("recompute", "again"), [({}, (5, 1)), ("keep_half_of_products", (2, 0))]
)
@pytest.mark.parametrize("bias", [False, True])
def test_selective_checkpointing_computes_two_products_again(
    recompute: Any, again: tuple[int, int], bias: bool
) -> None:
    room = load_chapter(SETTINGS)
    if recompute:
        recompute = {"context_fn": getattr(room["selective"], recompute)}
    config = room["model"].GPTConfig(8, width=16, layers=1, heads=2)
    block, passes = room["model"].GPT(config).blocks[0], (Operators(), Operators())
    if bias:
        for linear in (m for m in block.modules() if isinstance(m, torch.nn.Linear)):
            linear.bias = torch.nn.Parameter(torch.zeros(linear.out_features))
    wrapped = room["memory_and_messages"].checkpoint_wrapper(block, **recompute)
    with passes[0]:
        result = wrapped(torch.ones(2, 8, 16, requires_grad=True))
    with passes[1]:
        result.sum().backward()
    forward, backward = (one.seen for one in passes)
    product, attention = (
        "addmm" if bias else "mm",
        "_scaled_dot_product_flash_attention",
    )
    assert (forward[product], forward[attention]) == (6, 1)
    # Beside the two that each product's gradients take.
    products = backward["mm"] + backward["addmm"] - 12
    assert (products, backward[attention]) == again


def reduced_again(selective: bool) -> int:
    """Return how many reduce-scatters of a checkpointed function backward sends."""
    keep = load_chapter(SETTINGS)["selective"].keep_half_of_products
    backward = Operators()
    group: Any = dist.group.WORLD

    def reduce(x: Any) -> Any:
        return reduce_scatter_tensor_autograd(x, "sum", 0, group).sin()

    context = {"context_fn": keep} if selective else {}
    given = torch.ones(4, requires_grad=True)
    result = checkpoint(reduce, given, use_reentrant=False, **context)
    with backward:
        result.sum().backward()
    return backward.seen["_c10d_functional::reduce_scatter_tensor"]


def test_selective_checkpointing_sends_nothing_again(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(reduced_again, True) == [0, 0]
    assert worker_pool.run(reduced_again, False) == [1, 1]


def test_mixed_precision_gathers_half_and_autocast_all(
    worker_pool: WorkerPool,
) -> None:
    output = worker_pool.run(run_lesson, SETTINGS, "mixed_precision")[0]
    found = re.findall(r"(\d) x (\S+) +\| torch\.(\S+) \| (\S+) bytes", output)
    full = [("5", "all-gather", "float32"), ("3", "reduce-scatter", "float32")]
    half = [("5", "all-gather", "bfloat16"), ("3", "reduce-scatter", "bfloat16")]
    assert [row[:3] for row in found] == full * 2 + half + [half[0], full[1]] * 2
    each = [float(row[3]) for row in found]
    assert each[1::2] == [4.0, 4.0, 2.0, 4.0, 4.0]
    assert each[0] == each[2] == pytest.approx(2 * each[4], abs=0.02)
    losses = re.findall(r"the loss is torch\.(\S+): (\S+)", output)
    assert [dtype for dtype, _ in losses] == ["float32"] * 2 + ["bfloat16"] * 2 + [
        "float32"
    ]
    exact, autocast, low, _, outside = (float(loss) for _, loss in losses)
    assert abs(autocast - exact) < 5e-4 < abs(low - exact) < 0.02
    assert abs(outside - exact) < 5e-4
