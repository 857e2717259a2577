"""Chapter 09: the axes of a mesh, and a GPT trained on three of them at once."""

import contextlib
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)

from launch import ROOT, python
from lessons import in_the_pool
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "09_one_mesh"
modules: dict[str, Any] = load_chapter(CHAPTER)
mesh, train, gpt = (modules[name] for name in ("mesh", "train", "gpt_on_mesh"))
members = modules["groups_of_a_rank"].members
stateful: Any = load_chapter("06_fsdp")["stateful"]
AXES = ("data", "pipeline", "tensor")


def ending(
    script: str, words: list[str], faults: list[tuple[Any, str, Any]]
) -> tuple[Any, str, str]:
    """Be a rank of a lesson with parts replaced; return status, output and errors."""
    module, said, errors = modules[script], io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(in_the_pool(module, *words))
        # A failed check leaves the group, which is the pool's.
        stack.enter_context(mock.patch.object(modules["ranks"], "leave"))
        for owner, name, fault in faults:
            stack.enter_context(mock.patch.object(owner, name, fault))
        try:
            module.main()
        except SystemExit as end:
            return end.code, said.getvalue(), errors.getvalue()
    return 0, said.getvalue(), errors.getvalue()


def sized(*lengths: int) -> list[str]:
    """Return the options for so many ranks along data, pipeline and tensor."""
    return [f"--{axis}={n}" for axis, n in zip(AXES, lengths, strict=True)]


# --- Who is in a group with whom. ----------


@pytest.mark.parametrize("lengths", [(2, 2, 1, 2), (3, 4, 2, 5), (1, 3, 4, 2)])
def test_arithmetic_is_that_of_an_array(lengths: tuple[int, ...]) -> None:
    sizes = dict(zip(mesh.AXES, lengths, strict=True))
    grid = torch.arange(torch.Size(lengths).numel()).view(lengths)
    seen = 0
    for rank, place in enumerate(itertools.product(*map(range, lengths))):
        lines = [(*place[:i], slice(None), *place[i + 1 :]) for i in range(4)]
        groups = [members(rank, sizes, axis) for axis in mesh.AXES]
        assert groups == [grid[line].tolist() for line in lines]
        plane = grid[:, place[1], :, place[3]].flatten().tolist()
        assert members(rank, sizes, "data", "context") == plane
        pairs = itertools.combinations(map(set, groups), 2)
        assert [one & other for one, other in pairs] == [{rank}] * 6
        seen += 1
    assert seen == grid.numel()


def test_groups_of_two_axes_share_one_rank_or_none() -> None:
    sizes = {"data": 2, "pipeline": 2, "context": 1, "tensor": 2}
    found = {
        axis: {frozenset(members(rank, sizes, axis)) for rank in range(8)}
        for axis in AXES
    }
    shared = [
        len(one & other)
        for a, b in itertools.combinations(AXES, 2)
        for one in found[a]
        for other in found[b]
    ]
    # With a third axis, half of the pairs do not meet.
    assert sorted(set(shared)) == [0, 1] and sum(shared) == len(shared) / 2 == 24


def groups_told_right(are_swapped: bool) -> list[bool]:
    """Compare the groups of a mesh of 2 x 1 x 1 x 2, or with two names swapped."""
    sizes = dict(zip(mesh.AXES, (2, 1, 1, 2), strict=True))
    _, groups = mesh.make_mesh("cpu", sizes)
    if are_swapped:
        groups["data"], groups["tensor"] = groups["tensor"], groups["data"]
    arithmetic = modules["groups_of_a_rank"]
    told = arithmetic.groups_are_right
    found = [told(groups, sizes, is_real) for is_real in (True, False)]

    def wrong_for_others(rank: int, *words: Any) -> list[int]:
        return members(rank, *words) if rank == dist.get_rank() else [rank, 2]

    # One process alone sees that another rank's group is no part of the grid.
    with mock.patch.object(arithmetic, "members", wrong_for_others):
        found.append(told(groups, sizes, False))
    return found


@pytest.mark.parametrize("are_swapped", [False, True])
def test_check_sees_groups_of_other_axes(
    worker_pool: WorkerPool, are_swapped: bool
) -> None:
    told = worker_pool.run(groups_told_right, are_swapped, world_size=4)
    assert told == [[not are_swapped] * 2 + [False]] * 4


@pytest.mark.parametrize(
    ("rank", "batch", "expert", "copies"),
    [
        (37, [2, 5, 34, 37, 66, 69, 98, 101], [34, 37], [5, 37, 69, 101]),
        (66, [2, 5, 34, 37, 66, 69, 98, 101], [66, 69], [2, 34, 66, 98]),
    ],
)
def test_experts_of_a_rank_are_those_of_its_place(
    rank: int, batch: list[int], expert: list[int], copies: list[int]
) -> None:
    groups = {axis: [rank] for axis in mesh.AXES} | {"data x context": batch}
    report = modules["groups_of_a_rank"].report
    for context in ([rank], [rank, rank + 1]):
        told = report(rank, groups | {"context": context}, 2)
        lines = [text.splitlines()[0] for text in told]
        said = [f"expert, 2 ranks: {' '.join(map(str, expert))}"]
        said += [f"copies of the experts, 4 ranks: {' '.join(map(str, copies))}"]
        assert lines[-2:] == said
        # Without a context axis it is the group of the data axis.
        assert any("data x" in line for line in lines) == (len(context) > 1)
    lines = report(rank, groups, 1)
    assert not [line for line in lines if "expert" in line]


REPORT = """\
rank 37 of 2,048: data 0, pipeline 2, context 0, tensor 5
tensor, 8 ranks: 32 33 ... 39
    same layers, same tokens; all-reduce activations, 4 times a block
context, 2 ranks: 37 45
    same weights, same samples, other tokens; send keys and values
pipeline, 16 ranks: 5 21 ... 245
    same tokens, other layers; send activations and their gradients
data, 8 ranks: 37 293 ... 1829
    same weights, other samples; reduce gradients, shard by ZeRO or FSDP
data x context, 16 ranks: 37 45 ... 1837
    same weights, other tokens; reduce gradients, shard by ZeRO or FSDP
expert, 8 ranks: 37 45 ... 813
    other experts, else the same weights; send tokens there and back
copies of the experts, 2 ranks: 37 1061
    same experts; reduce their gradients
check: an axis's groups hold each rank once; those of two share at most one rank
"""


@pytest.mark.smoke
def test_one_process_tells_a_rank_of_thousands() -> None:
    words = ["--data=8", "--pipeline=16", "--context=2", "--tensor=8", "--expert=8"]
    result = python(ROOT / CHAPTER / "mesh.py", *words, "--rank=37")
    assert (result.returncode, result.stdout) == (0, REPORT), result.stderr


def degrees_of_four_ranks() -> tuple[int, int, list[int]]:
    """Shard over data and context; return their sizes, and a weight's shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    both = mesh["data", "context"]._flatten("shard")
    model: Any = nn.Linear(4, 4)
    fully_shard(model, mesh=both)
    context = mesh["context"].size()
    return both.size(), context, list(model.weight.to_local().shape)


def test_shards_over_two_axes_count_context_twice(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(degrees_of_four_ranks, world_size=4)
    # A report of FSDP 4 and CP 2 would make eight of four ranks.
    assert found == [(4, 2, [1, 4])] * 4


def test_one_process_compares_as_many_ranks_as_it_allows() -> None:
    # 2**17. A call for each rank of an axis of 65,536 took minutes and 8 GB.
    arithmetic = modules["groups_of_a_rank"]
    sizes = dict(zip(mesh.AXES, (1, 1024, 1, 2), strict=True))
    groups = {axis: members(0, sizes, axis) for axis in mesh.AXES}
    one_rank = {"get_rank": lambda: 0, "get_process_group_ranks": list}
    with (
        mock.patch.multiple(arithmetic.dist, **one_rank),
        mock.patch.object(arithmetic, "members", wraps=members) as calls,
    ):
        assert arithmetic.groups_are_right(groups, sizes, False)
    # Groups along each axis, then this rank's own: of each axis, and of 6 pairs.
    assert calls.call_count == 2048 + 2 + 2048 + 1024 + 4 + 2 * 6


@pytest.mark.slow
def test_one_process_notices_groups_that_are_not_pytorchs() -> None:
    code = (
        "import sys; sys.argv = ['mesh.py']; import groups_of_a_rank as groups, mesh; "
        "right = groups.members; "
        "groups.members = lambda r, s, *a: right(r, dict(reversed(s.items())), *a); "
        "mesh.main()"
    )
    result = python("-c", code, cwd=ROOT / CHAPTER)
    assert result.returncode == 2
    claim = "an axis's groups hold each rank once; those of two share at most one rank"
    assert f"not so: {claim}" in result.stderr


@pytest.mark.parametrize(
    ("lengths", "rank", "group"),
    [
        ((1, 2, 1, 2), 2, "pipeline, 2 ranks: 0 2"),
        ((2, 1, 2, 1), 3, "data x context, 4 ranks: 0 1 2 3"),
        ((1, 1, 1, 3), 1, "tensor, 3 ranks: 0 1 2"),
    ],
)
def test_ranks_all_gather_their_groups(
    worker_pool: WorkerPool, lengths: tuple[int, ...], rank: int, group: str
) -> None:
    words = [f"--{axis}={n}" for axis, n in zip(mesh.AXES, lengths, strict=True)]
    n = torch.Size(lengths).numel()
    ends = worker_pool.run(ending, "mesh", [*words, f"--rank={rank}"], [], world_size=n)
    assert [status for status, _, _ in ends] == [0] * n
    assert ends[0][1].endswith("those of two share at most one rank\n")
    told = ends[rank][1].splitlines()
    assert told[0].startswith(f"rank {rank} of {n}: data ") and group in told


def gathered_over_two_axes() -> tuple[Any, ...]:
    """Use the calls that the page names on 1 x 2 x 2 ranks."""
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=AXES)
    flat = whole["data", "tensor"]._flatten("stage")
    with pytest.warns(UserWarning, match="Users need to bookkeep the flattened mesh"):
        assert whole["stage"].size() == 4 // 2
    ranks = [
        modules["ranks"].gather(dist.get_rank(), group)
        for group in (whole["tensor"].get_group(), flat.get_group())
    ]
    return whole.get_coordinate(), whole.get_local_rank("pipeline"), ranks


def test_calls_of_a_mesh(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(gathered_over_two_axes, world_size=4)
    assert found == [
        ((0, p, t), p, [[2 * p, 2 * p + 1]] * 2) for p in (0, 1) for t in (0, 1)
    ]


def other_order(device: str, sizes: dict[str, int]) -> Any:
    """Make the mesh as if the first axis varied fastest."""
    turned = dict(reversed(sizes.items()))
    whole = init_device_mesh(
        device, tuple(turned.values()), mesh_dim_names=tuple(turned)
    )
    groups = {axis: whole[axis].get_group() for axis in sizes}
    return whole, {**groups, mesh.BATCH: groups["data"]}


def run_in_other_order() -> tuple[Any, str, str]:
    """Be a rank of mesh.py whose last axis does not vary fastest."""
    return ending("mesh", ["--pipeline=1"], [(mesh, "make_mesh", other_order)])


def test_mesh_of_another_order_is_noticed(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(run_in_other_order, world_size=4)
    assert [status for status, _, _ in ends] == [1] * 4
    claim = "an axis's groups hold each rank once; those of two share at most one rank"
    assert f"check failed on ranks [0, 1, 2, 3], not so: {claim}" in ends[0][2]


@pytest.mark.parametrize(
    ("script", "words", "complaint"),
    [
        ("mesh", ["--rank=8"], "no rank 8 of 8; try --rank=7"),
        ("mesh", ["--data=65536", "--tensor=65536"], "too many"),
        ("mesh", ["--expert=3"], "data x context does not divide into groups of 3"),
        ("train", sized(3, 2, 2), "two axes or three have 2 or 4 ranks"),
        ("train", sized(4, 1, 1), "two axes or three have 2 or 4 ranks"),
        ("train", sized(2, 2, 8), "'8' is no number from 1 to 4"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], script: str, words: list[str], complaint: str
) -> None:
    status, _, errors = ending(script, words, [])
    assert status == 2 and complaint in errors
    assert errors.count("\n") == 1 and not dist.is_initialized()


# --- Three axes at once. ----------

NUMBERS: dict[tuple[int, ...], tuple[int, int]] = {
    (1, 2, 2): (58880, 57984),
    (2, 1, 2): (58432, 58432),
    (2, 2, 1): (58624, 57664),
}
# Of the first rank and of the last: calls on each axis, and bytes of whole messages.
CALLS: dict[tuple[int, ...], list[dict[str, tuple[int, int]]]] = {
    (2, 1, 2): [
        {
            "data all-gather": (5, 934_912),
            "data reduce-scatter": (5, 934_912),
            "data x tensor all-reduce": (1, 360),
            "tensor all-gather": (4, 524_288),
            "tensor all-reduce": (76, 2_424_832),
        }
    ]
    * 2,
    (2, 2, 1): [
        {
            "data all-gather": (3, nbytes),
            "data reduce-scatter": (3, nbytes),
            "data x tensor all-reduce": (1, norms),
            "pipeline all-reduce": (1, 8),
            "pipeline receive": (4, 131_072),
            "pipeline send": (4, 131_072),
        }
        for nbytes, norms in ((937_984, 176), (922_624, 184))
    ],
    (1, 2, 2): [
        {
            "data x tensor all-reduce": (1, norms),
            "pipeline all-reduce": (1, 8),
            "pipeline receive": (4, 131_072),
            "pipeline send": (4, 131_072),
            **on_tensor,
        }
        for norms, on_tensor in (
            (176, {"tensor all-reduce": (40, 1_245_184)}),
            (
                184,
                {
                    "tensor all-gather": (4, 524_288),
                    "tensor all-reduce": (36, 1_179_648),
                },
            ),
        )
    ],
}


def calls_in(lines: list[str]) -> dict[str, tuple[int, int]]:
    """Read calls and bytes from what train.py prints."""
    found = {}
    for line in lines:
        if match := re.fullmatch(r" {4}(.*?) +\| +(\d+) (\S+) +\| +(\S+) bytes", line):
            axis, number, kind, nbytes = match.groups()
            found[f"{axis} {kind}"] = int(number), int(nbytes.replace(",", ""))
    return found


def run_and_note(shape: tuple[int, ...]) -> tuple[Any, list[tuple[bool, bool]]]:
    """Be a rank of train.py; note what is compared: alike in shape, a parameter?"""
    distance, pairs = torch.dist, []

    def noted(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        pairs.append((ours.shape == right.shape, right.requires_grad))
        return distance(ours, right)

    with mock.patch.object(torch, "dist", noted):
        return run_with("", shape), pairs


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 2), (2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)],
    ids=str,
)
def test_two_of_three_axes_give_one_process(
    worker_pool: WorkerPool, shape: tuple[int, ...]
) -> None:
    found = worker_pool.run(run_and_note, shape, world_size=4)
    ends = [end for end, _ in found]
    assert [status for status, _, _ in ends] == [0] * 4, ends[0][2]
    assert [said for _, said, _ in ends[1:]] == [""] * 3
    # The losses; each of the stage's parameters, which one process has whole, and its
    # gradient. A block has 10, the first stage 2 more and the last 3.
    due = [45] * 4 if shape[1] == 1 else [22, 23, 22, 23]
    due = sorted(due) if shape[2] == 2 else due
    each = [(True, True), (True, False)]
    assert [pairs for _, pairs in found] == [[(True, False), *each * n] for n in due]
    text = ends[0][1]
    first, last = text.split("rank 3 | ")
    assert [calls_in(part.splitlines()) for part in (first, last)] == CALLS[shape]
    blocks, numbers = zip(
        *re.findall(r"^rank [03] \| blocks ([\d ]+) \| (.*) numbers$", text, re.M),
        strict=True,
    )
    assert blocks == (("0 1 2 3",) * 2 if shape[1] == 1 else ("0 1", "2 3"))
    assert [int(n.replace(",", "")) for n in numbers] == list(NUMBERS[shape])
    # FSDP cuts what the tensor axis has cut already, if it has more than one rank.
    by_fsdp = "_StridedShard(dim=0, sf=2)" if shape[2] == 2 else "Shard(dim=0)"
    rows = 64 // (shape[0] * shape[2])
    weight = f"    query.weight ({rows}, 64) of (64, 64): ({by_fsdp}, Shard(dim=0))"
    assert [line for line in text.splitlines() if "query" in line] == [weight] * 2
    (apart,) = re.findall(r"^check: .* within (\S+); calls as by formula$", text, re.M)
    assert 0 < float(apart) < 1e-11


def norm_of_stage(part: Any, mesh: Any) -> None:
    """Clip by the norm that a stage knows."""
    gradients = [p.grad for p in part.parameters()]
    norm = train.get_total_norm(gradients).full_tensor()
    dist.all_reduce(torch.zeros(()).double(), group=mesh.get_group("pipeline"))
    train.clip_grads_with_norm_(part.parameters(), train.MAX_NORM, norm)


def forgotten(*_: Any, **__: Any) -> None:
    """Stand in for a call that is left out."""


def gathering_again(module: Any, **settings: Any) -> Any:
    """Shard so that each micro-batch gathers the weights."""
    return fully_shard(module, **{**settings, "reshard_after_forward": True})


def gathering_by_default(module: Any, mesh: Any, **settings: Any) -> Any:
    """Shard with FSDP's own choice."""
    return fully_shard(module, mesh=mesh)


def run_with(fault: str, shape: tuple[int, ...]) -> tuple[Any, str, str]:
    """Be a rank of train.py, perhaps with one thing wrong, for two steps."""
    schedule = train.Schedule1F1B

    def summed(*args: Any, **settings: Any) -> Any:
        return schedule(*args, **settings, scale_grads=False)

    step = train.mesh_step

    def same_samples(part: Any, run: Any, adam: Any, mesh: Any, batch: Any) -> Any:
        n = mesh["data"].size()
        return step(part, run, adam, mesh, batch.chunk(n)[0].repeat(n, 1))

    steps = itertools.count(1)

    def spoiled(what: str, part: Any, *more: Any) -> Any:
        loss = step(part, *more)
        if next(steps) == 2:  # the last one, so that no loss shows it
            with torch.no_grad():
                for p in part.parameters():
                    (p if what == "weights" else p.grad).mul_(1 + 1e-6)
        return loss

    faults: dict[str, tuple[Any, str, Any]] = {
        "other weights": (train, "mesh_step", functools.partial(spoiled, "weights")),
        "other gradients": (
            train,
            "mesh_step",
            functools.partial(spoiled, "gradients"),
        ),
        "norm of one stage": (train, "clip_by_norm_of_all", norm_of_stage),
        "no clipping": (train, "clip_grads_with_norm_", forgotten),
        "losses are summed": (train, "Schedule1F1B", summed),
        "same samples": (train, "mesh_step", same_samples),
        "gathered again": (train, "fully_shard", gathering_again),
    }
    wrong = [faults[fault]] if fault else []
    return ending("train", sized(*shape), [*wrong, (train, "STEPS", 2)])


@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        ("norm of one stage", (2, 2, 1)),
        pytest.param("other weights", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("other gradients", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("no clipping", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("losses are summed", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("same samples", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("gathered again", (2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_mesh_gone_wrong_is_noticed(
    worker_pool: WorkerPool, fault: str, shape: tuple[int, ...]
) -> None:
    ends = worker_pool.run(run_with, fault, shape, world_size=4)
    assert [status for status, _, _ in ends] == [1] * 4
    assert "check failed on ranks [0, 1, 2, 3], not so: loss" in ends[0][2]


# --- Two axes in the file to copy, and one process. ----------


def heads_counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Split into as many heads as the model has, and not into heads of one width."""
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def not_told_of_the_tie(config: Any) -> Any:
    """Build a GPT of which the script does not know that two names are one matrix."""
    model = modules["model"].GPT(config)
    model.config = dataclasses.replace(config, tied=False)
    return model


CLASS_WEIGHTS = torch.linspace(0.1, 2, 256)


def loss_of_some(model: Any, batch: list[Any], of: str, by: str) -> Any:
    """Return the mean loss of labels that are not ignored, or by class weights.

    It is the mean of the global batch, or of what a data rank has.
    """
    inputs, labels = batch
    if of == "labels":  # on some ranks fewer are left
        labels = labels.masked_fill(inputs[:, :1] < 80, -100)
    weight = CLASS_WEIGHTS if of == "weights" else None
    logits, labels = model(inputs).flatten(0, 1), labels.flatten()
    if by == "rank":
        return nn.functional.cross_entropy(logits, labels, weight)
    loss = nn.functional.cross_entropy(logits, labels, weight, reduction="sum")
    kept = labels[labels != -100]
    count = torch.ones(len(kept)).sum() if weight is None else weight[kept].sum()
    if len(inputs) < 8:  # a data rank's; of TENSOR ranks each has counted
        dist.all_reduce(count)
        count = count / dist.get_world_size()
    return loss / count


def some_labels(of: str, by: str) -> Any:
    """Let check_minimal.py take another loss."""
    loss = functools.partial(loss_of_some, of=of, by=by)
    return mock.patch.object(modules["check_minimal"], "next_byte_loss", loss)


def whole_logits(has_style: bool) -> Any:
    """Smooth labels, which wants whole logits; perhaps gather them."""
    stack = contextlib.ExitStack()
    loss = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    stack.enter_context(mock.patch.object(nn.functional, "cross_entropy", loss))
    minimal = modules["minimal"]
    layouts = {"input_layouts": minimal.TOKENS, "output_layouts": minimal.WHOLE}
    head = {"head": ColwiseParallel(**layouts)} if has_style else {}
    stack.enter_context(mock.patch.dict(minimal.PLAN, head))
    return stack


def gpt_of(vocabulary: int) -> Any:
    """Let check_minimal.py build a GPT with a vocabulary of another size."""
    config = functools.partial(modules["model"].GPTConfig, vocabulary=vocabulary)
    return mock.patch.object(modules["check_minimal"], "GPTConfig", config)


RIGHT = "check: same as one process: 3 steps, loss and 24 tensors within"
TWO_AXES: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "a mean of each rank's labels": lambda: some_labels("labels", "rank"),
    "a mean by each rank's class weights": lambda: some_labels("weights", "rank"),
    "all labels": lambda: some_labels("labels", "all"),
    "all class weights": lambda: some_labels("weights", "all"),
    "smoothed labels of gathered logits": lambda: whole_logits(True),
    "an odd vocabulary": lambda: gpt_of(257),
    "as many heads on each rank": lambda: mock.patch.object(
        modules["model"].Block, "split_heads", heads_counted
    ),
    "untied": lambda: mock.patch.object(
        modules["check_minimal"], "GPT", not_told_of_the_tie
    ),
    "samples of another rank": lambda: mock.patch.object(
        torch.Tensor, "chunk", lambda part, n: part.tensor_split(n)[::-1][:1] * n
    ),
}


def check_two_axes(fault: str) -> tuple[Any, str, str]:
    """Be a rank of check_minimal.py, perhaps with one thing wrong."""
    with TWO_AXES[fault]():
        return ending("check_minimal", [], [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", RIGHT),
        ("a mean of each rank's labels", "differs after step 1: loss"),
        pytest.param(
            "a mean by each rank's class weights",
            "differs after step 1: loss",
            marks=pytest.mark.slow,
        ),
        pytest.param("all labels", RIGHT, marks=pytest.mark.slow),
        pytest.param("all class weights", RIGHT, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("smoothed labels of gathered logits", RIGHT),
                ("an odd vocabulary", RIGHT),
                ("as many heads on each rank", "differs after step 1: loss"),
            )
        ),
        ("untied", "differs after step 1: token_embedding.weight"),
        ("samples of another rank", "differs after step 1: loss"),
    ],
)
def test_two_axes_are_compared_with_one_process(
    worker_pool: WorkerPool, fault: str, said: str
) -> None:
    ends = worker_pool.run(check_two_axes, fault, world_size=4)
    is_wrong = said != RIGHT
    assert [status for status, _, _ in ends] == [int(is_wrong)] * 4
    assert said in ends[0][2 if is_wrong else 1]


def check_three_data_ranks() -> tuple[Any, str, str]:
    """Be a rank of check_minimal.py, where a tensor rank holds whole matrices."""
    with (
        mock.patch.object(modules["minimal"], "TENSOR", 1),
        mock.patch.object(modules["check_minimal"], "TENSOR", 1),
    ):
        return ending("check_minimal", [], [])


def test_two_axes_are_compared_on_any_number_of_data_ranks(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(check_three_data_ranks, world_size=3)
    assert len(ends) == 3 and ends[0][1].startswith(RIGHT)


SMOOTHED = "aten.masked_fill_.Scalar got mixed torch.Tensor and DTensor"


def smooth_sharded_logits() -> str:
    """Smooth labels under loss_parallel; return what it says."""
    with whole_logits(False):
        try:
            ending("check_minimal", [], [])
        except RuntimeError as error:
            return str(error)
    return ""


def test_label_smoothing_wants_whole_logits(worker_pool: WorkerPool) -> None:
    said = worker_pool.run(smooth_sharded_logits)
    assert [text.startswith(SMOOTHED) for text in said] == [True] * 2


BOTH_AT_ONCE = "index -100 is out of bounds for dimension 1 with size 8"


def loss_by(weights: bool, ignores: bool) -> str | float:
    """Go back from a loss of sharded logits; return the error, or what is said."""
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    labels = torch.tensor([1, 7, -100 if ignores else 5, 4, 0, 2])
    weight = torch.linspace(0.1, 2, 8) if weights else None
    mesh = init_device_mesh("cpu", (2,))
    sharded: Any = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    loss_of = functools.partial(nn.functional.cross_entropy, reduction="sum")
    (right,) = torch.autograd.grad(loss_of(logits, labels, weight), logits)
    with loss_parallel():
        try:
            loss_of(sharded, labels, weight).backward()
        except RuntimeError as error:
            return str(error)
    return torch.dist(sharded.grad.full_tensor(), right).item()


def test_loss_parallel_refuses_weights_and_ignored_labels_at_once(
    worker_pool: WorkerPool,
) -> None:
    for weights, ignores in ((True, False), (False, True)):
        apart = worker_pool.run(loss_by, weights, ignores)
        assert len(apart) == 2 and max(apart) < 1e-5
    assert worker_pool.run(loss_by, True, True) == [BOTH_AT_ONCE] * 2


class Pooled(nn.Module):
    """An embedding of tokens, a mean over them, a pooler with dropout, a classifier.

    Perhaps with a norm before the mean.
    """

    def __init__(self, has_norm: bool = False) -> None:
        """Draw weights."""
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(16, 8))
        self.norm = nn.LayerNorm(8) if has_norm else nn.Identity()
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (B, T) to (B, 6)."""
        pooled = self.pooler(self.norm(self.body(tokens)).mean(1)).tanh()
        return self.classifier(nn.functional.dropout(pooled, 0.5))


def pooled_on_two_ranks(pools: str, by_rank: bool) -> tuple[float, int]:
    """Pool this rank's tokens, or all; return the largest error, and of how many."""
    minimal, rank = modules["minimal"], dist.get_rank()
    whole, tokens = minimal.WHOLE, minimal.TOKENS
    rows = minimal.tp.RowwiseParallel(input_layouts=whole, output_layouts=tokens)
    gathered = minimal.tp.PrepareModuleOutput(
        output_layouts=tokens, desired_output_layouts=whole
    )
    has_norm = "norm" in pools
    plan = {"body.0": rows}
    plan |= {"norm": minimal.tp.SequenceParallel()} if has_norm else {}
    if pools == "gathered behind a norm":  # which another pattern names, too
        plan["*norm"] = minimal.tp.PrepareModuleOutput(
            output_layouts=tokens, desired_output_layouts=whole, use_local_output=False
        )
    elif pools != "local":
        plan["body"] = gathered
    plan |= {n: ColwiseParallel(output_layouts=whole) for n in ("pooler", "classifier")}
    models = []
    for seed in (0, rank if by_rank else 0):
        torch.manual_seed(1)
        model = Pooled(has_norm)
        if models:
            parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randint(16, (8, 4), generator=generator)
        torch.manual_seed(seed)
        model(inputs).square().sum().backward()
        models.append(model)
    alone, ours = (dict(model.named_parameters()) for model in models)
    errors = [
        torch.dist(ours[name].grad.full_tensor(), p.grad) / p.grad.norm()
        for name, p in alone.items()
    ]
    return max(error.item() for error in errors), len(errors)


@pytest.mark.parametrize(
    ("pools", "by_rank", "is_right"),
    [
        ("gathered", False, True),
        ("local", False, False),
        ("gathered", True, False),
        ("gathered before a norm", False, False),
        ("gathered behind a norm", False, True),
    ],
)
def test_a_pooled_vector_is_of_all_tokens_and_has_one_mask(
    worker_pool: WorkerPool, pools: str, by_rank: bool, is_right: bool
) -> None:
    found = worker_pool.run(pooled_on_two_ranks, pools, by_rank)
    assert len(found) == 2
    for error, compared in found:
        assert compared == 5 + 2 * ("norm" in pools)
        assert error < 1e-5 if is_right else error > 0.1


# --- What PyTorch does, and what it refuses. ----------


def place_on_a_small_mesh() -> list[int] | None:
    """Make a mesh of two; return this rank's place on it."""
    place = init_device_mesh("cpu", (2,)).get_coordinate()
    return None if place is None else list(place)


def test_a_mesh_smaller_than_the_world_leaves_ranks_out_silently(
    worker_pool: WorkerPool,
) -> None:
    places = worker_pool.run(place_on_a_small_mesh, world_size=3)
    assert places == [[0], [1], None]


def test_an_axis_may_straddle_hosts_unless_it_divides_them() -> None:
    def hosts(tensor: int) -> set[int]:
        sizes = dict(zip(mesh.AXES, (48 // tensor, 1, 1, tensor), strict=True))
        groups = [members(rank, sizes, "tensor") for rank in range(48)]
        return {len({rank // 8 for rank in group}) for group in groups}

    assert [hosts(n) for n in (2, 4, 8)] == [{1}] * 3
    assert hosts(6) == {1, 2} and hosts(16) == {2}


def take_two_steps(
    shape: tuple[int, ...], fault: Any = None, flattened: bool = True
) -> tuple[list[Any], set[str]]:
    """Return the calls of two steps, and the placements of the parameters."""
    whole = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    meshes = [whole]
    if flattened:
        meshes.append(whole["data", "tensor"]._flatten("data x tensor"))
    with mock.patch.object(train, "fully_shard", fault or fully_shard):
        part, schedule = train.cut_three_times(whole, torch.device("cpu"))
    adam, noted = torch.optim.AdamW(part.parameters()), []
    batch = torch.randint(256, (shape[0] * train.MICRO_BATCHES * train.B, 33))
    for _ in range(2):
        with gpt.CallsByAxis(*meshes) as calls:
            train.mesh_step(part, schedule, adam, whole, batch)
        noted.append(calls.calls)
    return noted, {str(p.placements) for p in part.parameters()}


@pytest.mark.parametrize(
    ("shard", "number"),
    [
        pytest.param(gathering_again, 3 * (4 + 1), marks=pytest.mark.slow),
        (gathering_by_default, 2 * (4 + 1) + 1),
    ],
)
def test_weights_are_gathered_once_a_step_only_if_they_stay(
    worker_pool: WorkerPool, shard: Any, number: int
) -> None:
    results = worker_pool.run(take_two_steps, (2, 2, 1), shard, world_size=4)
    numbers = [noted[1]["data", "all-gather"][0] for noted, _ in results]
    # Two blocks and what else the stage has, for each of four micro-batches and the
    # last backward pass; 3 in all if they stay. By default the root does.
    assert numbers == [number] * 4
    # Gradients are reduced once, after the last micro-batch, not after each.
    reduced = [noted[1]["data", "reduce-scatter"][0] for noted, _ in results]
    assert reduced == [3] * 4
    assert CALLS[2, 2, 1][0]["data all-gather"][0] == 3


def zero_2() -> tuple[list[str], list[tuple[int, ...]]]:
    """Take a step of three micro-batches with weights that stay until its end."""
    whole = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model: Any = fully_shard(nn.Linear(4, 4), mesh=whole, reshard_after_forward=False)
    shapes: list[tuple[int, ...]] = []
    with gpt.CallsByAxis(whole) as calls:
        for i in range(3):
            model.set_reshard_after_backward(i == 2)
            model(torch.ones(2, 4)).sum().backward()
            gradient, *_ = model._get_fsdp_state()._fsdp_param_group.fsdp_params
            shapes.append(tuple(gradient.sharded_param.grad.to_local().shape))
    return [
        f"{kind} {number}" for (_, kind), (number, _) in calls.calls.items()
    ], shapes


def test_weights_stay_and_gradients_are_sharded_as_in_zero_2(
    worker_pool: WorkerPool,
) -> None:
    sharded = [(2, 4)] * 3
    calls = ["all-gather 1", "reduce-scatter 3"]
    assert worker_pool.run(zero_2) == [(calls, sharded)] * 2


@pytest.mark.slow
def test_first_step_runs_the_stages_once_more(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(take_two_steps, (1, 2, 2), world_size=4)
    key = "tensor", "all-reduce"
    numbers = [[calls[key][0] for calls in noted] for noted, _ in results]
    # PyTorch finds the shapes of what is sent by running a micro-batch: forward, and
    # backward where a gradient has to be sent.
    assert numbers == [[46, 40], [46, 40], [45, 36], [45, 36]]


def forward_passes(tells_shapes: bool) -> list[int]:
    """Return how often a stage runs forward in two steps of four micro-batches."""
    rank, counts = dist.get_rank(), []
    shapes: dict[str, Any] = {}
    if tells_shapes:
        first, then = (
            torch.zeros(2, 4, requires_grad=wants) for wants in (False, True)
        )
        shapes = {"input_args": (then if rank else first,), "output_args": (then,)}
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: counts.append(len(counts)))
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"), **shapes)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    seen = []
    for _ in range(2):
        counts.clear()
        target: dict[str, Any] = {"target": torch.zeros(8, 4)} if rank else {}
        schedule.step(*([] if rank else [torch.ones(8, 4)]), **target)
        seen.append(len(counts))
    return seen


@pytest.mark.parametrize(("tells_shapes", "first"), [(False, 5), (True, 4)])
def test_stages_that_are_told_their_shapes_run_no_micro_batch_more(
    worker_pool: WorkerPool, tells_shapes: bool, first: int
) -> None:
    assert worker_pool.run(forward_passes, tells_shapes) == [[first, 4]] * 2


def before_reducing() -> tuple[Any, ...]:
    """Look at a matrix after the last backward pass, and at the end of the step."""
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=AXES)
    part, schedule = train.cut_three_times(whole, torch.device("cpu"))
    adam, calls, seen = torch.optim.AdamW(part.parameters()), gpt.CallsByAxis(whole), []
    stage = schedule._stage
    reduce = stage.perform_reduce_grad

    def look(*_: Any) -> None:
        weight = part.blocks[min(part.blocks)].query.weight
        shapes = [
            tuple(t.to_local().shape) for t in (weight, weight.grad) if t is not None
        ]
        reduced = ("data", "reduce-scatter") in calls.calls
        moments = [
            tuple(m.to_local().shape)
            for m in adam.state.get(weight, {}).values()
            if m.ndim
        ]
        seen.append((shapes, reduced, moments))

    def look_and_reduce(*arguments: Any) -> None:
        look()
        reduce(*arguments)

    stage.perform_reduce_grad = look_and_reduce
    batch = torch.randint(256, (2 * train.MICRO_BATCHES * train.B, 33))
    with calls:
        train.mesh_step(part, schedule, adam, whole, batch)
    look()
    return tuple(seen)


@pytest.mark.slow
def test_only_the_optimizer_state_is_sharded_all_the_time(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(before_reducing, world_size=4)
    whole, shard = (64, 64), (32, 64)
    before, after = ([whole, whole], False, []), ([shard] * 2, True, [shard] * 2)
    assert results == [(before, after)] * 4


@pytest.mark.slow
def test_norm_takes_a_message_for_each_axis_unless_they_are_one(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(take_two_steps, (2, 1, 2), None, False, world_size=4)
    assert len(results) == 4
    for noted, placements in results:
        assert noted[1]["data", "all-reduce"] == (1, 360)
        assert noted[1]["tensor", "all-reduce"] == (77, 2_424_832 + 360)
        assert placements == {
            "(_StridedShard(dim=0, sf=2), Shard(dim=0))",
            "(Shard(dim=0), Shard(dim=1))",
            "(Shard(dim=0), Replicate())",
        }


def refusal(call: Callable[[], Any]) -> str:
    """Return what an error says."""
    with pytest.raises((RuntimeError, TypeError, ValueError)) as refused:
        call()
    return f"{refused.type.__name__}: {refused.value}"


def refusals() -> list[str]:
    """Cut in another order, on another mesh, without norms; return what is said.

    The last two are loops over the modules, the root first, with a mesh and without.
    """
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "x"))

    def stage(tensor: Any = None) -> Any:
        part = train.Stage(train.CONFIG, 0, 1)
        if tensor is not None:
            train.parallelize_module(part, tensor, gpt.PLAN)
            train.distribute_module(part, tensor)
        return part

    def fsdp_first() -> None:
        part = stage()
        fully_shard(part, mesh=whole["data"])
        train.parallelize_module(part, whole["tensor"], gpt.PLAN)

    def norms_are_plain() -> None:
        part = stage()
        train.parallelize_module(part, whole["tensor"], gpt.PLAN)
        part(torch.zeros(1, 4, dtype=torch.int64))

    def root_first(**settings: Any) -> None:
        for module in stage().modules():
            fully_shard(module, **settings)

    calls = [
        fsdp_first,
        lambda: fully_shard(stage(other["tensor"]), mesh=whole["data"]),
        lambda: fully_shard(stage(whole["tensor"])),
        norms_are_plain,
        lambda: root_first(mesh=whole["data"]),
        root_first,
    ]
    return [refusal(call) for call in calls]


def test_order_and_meshes_that_pytorch_refuses(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(refusals, world_size=4)
    assert len(results) == 4
    for first, other, unnamed, plain, *root_first in results:
        assert "ValueError: Cannot distribute a DTensor with device mesh" in first
        assert "to a different device mesh" in first
        assert "Cannot concatenate overlapping meshes" in other
        assert "Invariant encountered: value was None" in unnamed
        assert "native_layer_norm.default got mixed torch.Tensor and DTensor" in plain
        assert len(root_first) == 2
        assert "Cannot concatenate overlapping meshes" in root_first[0]
        assert "Invariant encountered: value was None" in root_first[1]


# --- Save and resume. ----------


@contextlib.contextmanager
def flattened(is_flat: bool) -> Iterator[None]:
    """Let chapter 06's `Training` name a parameter group's settings by parameter."""
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    with contextlib.ExitStack() as stack:
        for name in ("get_state_dict", "set_state_dict"):
            with_options = functools.partial(getattr(stateful, name), options=options)
            stack.enter_context(mock.patch.object(stateful, name, with_options))
        yield


def new_run(shape: tuple[int, ...], seed: int) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return the part of a GPT on a mesh, its optimizer, and what takes a step."""
    whole = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    torch.manual_seed(seed)
    part, schedule = train.cut_three_times(whole, torch.device("cpu"))
    adam = torch.optim.AdamW(part.parameters())
    return part, adam, functools.partial(train.mesh_step, part, schedule, adam, whole)


def weights_of_all(part: Any) -> dict[str, Any]:
    """Return the whole weights of all stages, on every rank."""
    own = {
        name: gpt.gathered(p).detach().clone() for name, p in part.named_parameters()
    }
    by_rank = modules["ranks"].gather(own)
    return {name: weight for of_rank in by_rank for name, weight in of_rank.items()}


def resume(
    folder: str, shape: tuple[int, ...], other: tuple[int, ...], is_flat: bool
) -> tuple[int, list[float], int]:
    """Save a run on one mesh, and resume it on another.

    Returns the number of weights, how far apart they are before loading and after a
    step more, and the optimizer's step after it.
    """
    generator = torch.Generator().manual_seed(4)
    tokens = (2, 2 * train.MICRO_BATCHES * train.B, 33)
    first, last = torch.randint(256, tokens, generator=generator)
    part, adam, step = new_run(shape, 0)
    step(first)
    far = []
    with flattened(is_flat):
        dcp.save({"run": stateful.Training(part, adam)}, checkpoint_id=folder)
        part_2, adam_2, step_2 = new_run(other, 1)
        pairs = [(weights_of_all(part), weights_of_all(part_2))]
        dcp.load({"run": stateful.Training(part_2, adam_2)}, checkpoint_id=folder)
    step(last)
    step_2(last)
    pairs.append((weights_of_all(part), weights_of_all(part_2)))
    assert len(pairs) == 2
    for right, found in pairs:
        assert right.keys() == found.keys()
        far.append(max(torch.dist(right[n], found[n]).item() for n in right))
    steps = {int(state["step"]) for state in adam_2.state.values()}
    return len(pairs[0][0]), far, steps.pop()


@pytest.mark.parametrize(
    ("shape", "other", "is_flat"),
    [
        # Without a pipeline: the test of minimal.py has a cheaper one.
        pytest.param((2, 1, 2), (2, 1, 2), False, marks=pytest.mark.slow),
        pytest.param((2, 1, 2), (2, 1, 2), True, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), (2, 2, 1), True, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), (2, 1, 2), True, marks=pytest.mark.slow),
        pytest.param((2, 1, 2), (1, 2, 2), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_on_a_mesh_resumes_on_any(
    worker_pool: WorkerPool,
    tmp_path: Path,
    shape: tuple[int, ...],
    other: tuple[int, ...],
    is_flat: bool,
) -> None:
    arguments = (str(tmp_path), shape, other, is_flat)
    results = worker_pool.run(resume, *arguments, world_size=4)
    assert len(results) == 4
    for number, (before, after), steps in results:
        assert (number, steps) == (45, 2)
        assert before > 1 and after < 1e-12


def step_after_loading(folder: str) -> tuple[bool, str]:
    """Save two stages by one name for all parameter groups; load, and step."""
    part, adam, step = new_run((1, 2, 2), 0)
    step(torch.randint(256, (2 * train.MICRO_BATCHES * train.B, 33)))
    run = {"run": stateful.Training(part, adam)}
    dcp.save(run, checkpoint_id=folder)
    dcp.load(run, checkpoint_id=folder)
    try:
        adam.step()
    except KeyError as error:
        return part.is_first, f"KeyError: {error}"
    return part.is_first, ""


def test_stages_overwrite_each_others_parameter_groups(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    found = worker_pool.run(step_after_loading, str(tmp_path), world_size=4)
    # Which stage's groups survive, DCP decides; the ranks of the other cannot step.
    assert len(found) == 4 and len(set(found)) == 2
    assert sorted({said for _, said in found}) == ["", "KeyError: 'betas'"]


def test_adamw_loads_what_sgd_saved_and_fails_in_its_next_step() -> None:
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    sgd, adam = torch.optim.SGD, torch.optim.AdamW(layer.parameters())
    for momentum in (0.9, 0.0):
        one = sgd(layer.parameters(), lr=0.1, momentum=momentum)
        one.step()
        if momentum:
            with pytest.raises(KeyError, match="'step'"):
                adam.load_state_dict(one.state_dict())
            continue
        adam.load_state_dict(one.state_dict())
    assert "lr" in adam.param_groups[0] and "betas" not in adam.param_groups[0]
    with pytest.raises(KeyError, match="'betas'"):
        adam.step()


def resumed_as_minimal_does(folder: str) -> tuple[set[str], set[str], float]:
    """Save two stages and resume; return this one's weights, which are left, how far.

    What is left is what the file has and this stage has no place for.
    """
    generator = torch.Generator().manual_seed(4)
    tokens = (2, 2 * train.MICRO_BATCHES * train.B, 33)
    first, last = torch.randint(256, tokens, generator=generator)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    part, adam, step = new_run((1, 2, 1), 0)
    step(first)
    saved = states.get_state_dict(part, adam, options=options)
    dcp.save({"model": saved[0], "adam": saved[1]}, checkpoint_id=folder)
    part_2, adam_2, step_2 = new_run((1, 2, 1), 1)
    run: dict[str, Any] = {}
    run["model"], run["adam"] = states.get_state_dict(part_2, adam_2, options=options)
    planner: Any = dcp.DefaultLoadPlanner()
    dcp.load(run, checkpoint_id=folder, planner=planner)
    left = planner.metadata.state_dict_metadata.keys() - planner.state_dict
    states.set_model_state_dict(part_2, run["model"], options=options)
    states.set_optimizer_state_dict(part_2, adam_2, run["adam"], options=options)
    step(last)
    step_2(last)
    right, found = weights_of_all(part), weights_of_all(part_2)
    far = max(torch.dist(right[name], found[name]).item() for name in right)
    own = {f"model.{name}" for name, _ in part.named_parameters()}
    return own, {name for name in left if name.startswith("model.")}, far


def test_a_stage_has_no_place_for_the_others_weights(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    results = worker_pool.run(resumed_as_minimal_does, str(tmp_path))
    (first, left_first, far), (last, left_last, far_too) = results
    assert left_first == last and left_last == first and len(first | last) == 45
    assert max(far, far_too) < 1e-12


# --- All eight ranks. ----------


def on_eight_ranks() -> list[tuple[Any, str, str]]:
    """Run both scripts, as one would start them on eight ranks."""
    return [ending("mesh", ["--rank=5"], []), ending("train", [], [])]


@pytest.mark.slow
def test_three_axes_at_once_give_one_process(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(on_eight_ranks, world_size=8)
    assert [[status for status, _, _ in pair] for pair in ends] == [[0, 0]] * 8
    told = ends[5][0][1].splitlines()
    groups = [line.split(" ranks: ")[1] for line in told if " ranks: " in line]
    assert groups == ["4 5", "5 7", "1 5"]
    text = ends[0][1][1]
    first, last = text.split("rank 7 | ")
    for part, shape in ((first, 0), (last, 1)):
        found = calls_in(part.splitlines())
        on_data, on_tensor = CALLS[2, 2, 1][shape], CALLS[1, 2, 2][shape]
        assert len(found) in (7, 8)
        assert {k: found[k] for k in on_tensor} == on_tensor
        number, nbytes = on_data["data all-gather"]
        # Half of the matrices, but whole norms.
        n, half = found["data all-gather"]
        assert n == number and nbytes / 2 < half < nbytes / 1.98
        assert found["data reduce-scatter"] == (n, half)
    assert "within" in text and "calls as by formula" in text
