"""Chapter 07, its rooms: mistakes, exercises, and when tensor parallelism pays."""

import contextlib
import functools
import io
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from launch import ROOT, python
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

CHAPTER = "07_tensor_parallel"
MISTAKES, EXERCISES, PAYS = (
    f"{CHAPTER}/{room}" for room in ("mistakes", "exercises", "when_it_pays")
)
SHOW = load_chapter(MISTAKES)["show"]
CHECKERS = load_chapter(EXERCISES)
LAYERS = CHECKERS["parallel_layers"]

# The answers use the chapter's layers by their plain name.
with mock.patch.dict(sys.modules, {"parallel_layers": LAYERS}):
    from answers import broken_block, gated_mlp

# --- Mistakes. ----------


def sources() -> dict[str, str]:
    """Return the text of each script of the room."""
    return {n: path.read_text() for n, path in SHOW.FILES.items() if n != "show"}


def run_mistakes() -> dict[str, list[str]]:
    """Run each script as it is, and mended."""
    return {
        name: [SHOW.what_it_prints(code), SHOW.what_it_prints(SHOW.mended(code))]
        for name, code in sources().items()
    }


@pytest.fixture(scope="module")
def printed(worker_pool: WorkerPool) -> dict[str, list[list[str]]]:
    """Run all mistakes; return what ranks 0 and 1 print, as it is and mended."""
    by_rank = worker_pool.run(run_mistakes)
    return {
        name: [list(both) for both in zip(*(of[name] for of in by_rank), strict=True)]
        for name in by_rank[0]
    }


def numbers(text: str) -> list[float]:
    """Return the numbers of a text."""
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text)]


def test_each_mistake_has_one_line_and_its_mend() -> None:
    files = sources()
    assert len(files) == 8
    for name, text in files.items():
        assert len(re.findall(r"^ *# WRONG: ", text, re.M)) == 1, name
        assert len(SHOW.WRONG_LINE.findall(text)) == 1, name
        assert 20 <= len(text.splitlines()) <= 60, name
        assert SHOW.mended(text) != text, name


def test_a_falling_loss_hides_a_missing_all_reduce(printed: dict) -> None:
    wrong, mended = printed["input_gradient"]
    for both, least, most in ((wrong, 0.3, 9), (mended, 0, 0)):
        (start, end, apart, _), (_, _, other, _) = map(numbers, both)
        assert end < 0.05 * start and apart == 0
        assert least <= other <= most
    assert len(wrong) == 2


def gradients_of_what_two_read() -> list[Tensor]:
    """Read an activation by a cut and by a whole matrix; return its gradients.

    First that of one process, then with `CopyToRanks` before the cut matrix, then
    before both.
    """
    torch.manual_seed(0)
    cut, whole, found = torch.randn(4, 6), torch.randn(4, 3), []
    mine = LAYERS.shard_of(cut, 1)
    for place in ("one process", "cut", "both"):
        x = torch.ones(4, requires_grad=True)
        copied = LAYERS.CopyToRanks.apply(x)
        if place == "one process":
            loss = (x @ cut).sum() + (x @ whole).sum()
        else:
            loss = LAYERS.SumOverRanks.apply((copied @ mine).sum())
            loss = loss + ((copied if place == "both" else x) @ whole).sum()
        (grad,) = torch.autograd.grad(loss, x)
        found.append(grad)
    return [*found, whole.sum(1)]


def test_what_a_whole_matrix_reads_is_not_summed_over_ranks(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(gradients_of_what_two_read)
    assert len(ends) == 2
    for due, right, summed, of_whole in ends:
        torch.testing.assert_close(right, due)
        torch.testing.assert_close(summed, due + of_whole)
        assert of_whole.abs().max() > 0.1
    rule = "after the norm; never on the residual or before a whole head."
    assert rule in words_of(MISTAKES)


def test_whole_activations_need_one_dropout_mask(printed: dict) -> None:
    wrong, mended = printed["dropout_differs"]
    assert wrong[0] != wrong[1] and mended[0] == mended[1]
    assert len(numbers(mended[0])) == 8


def test_shards_need_dropout_masks_of_their_own(printed: dict) -> None:
    wrong, mended = printed["dropout_equal"]
    masks = [[text.splitlines()[0] for text in both] for both in (wrong, mended)]
    assert masks[0][0] == masks[0][1] and masks[1][0] != masks[1][1]
    noise = [numbers(both[0])[-1] for both in (wrong, mended)]
    assert noise == pytest.approx([4.0, 8**0.5], abs=0.15)


def masks_drawn(rank: int, is_swapped: bool) -> list[list[Tensor]]:
    """Take two steps of a checkpointed block; return its masks, of a shard and whole.

    Each is drawn in the forward pass and again in the backward pass.
    """
    torch.manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(1 + rank)
        other = torch.get_rng_state()

    def mask_of_shard(x: Tensor) -> Tensor:
        nonlocal other
        if not is_swapped:
            seed = int(torch.randint(2**31, ()))
            with torch.random.fork_rng():
                torch.manual_seed(seed + rank)
                return F.dropout(torch.ones_like(x), 0.5)
        kept = torch.get_rng_state()
        torch.set_rng_state(other)
        mask = F.dropout(torch.ones_like(x), 0.5)
        other = torch.get_rng_state()
        torch.set_rng_state(kept)
        return mask

    drawn = []

    def block(x: Tensor) -> Tensor:
        drawn.append([mask_of_shard(x), F.dropout(torch.ones_like(x), 0.5)])
        return (x * drawn[-1][0]).sin() * drawn[-1][1]

    for _ in range(2):
        x = torch.ones(64, requires_grad=True)
        cast(Tensor, checkpoint(block, x, use_reentrant=False)).sum().backward()
    assert len(drawn) == 4
    return drawn


def test_masks_of_shards_are_drawn_again_as_they_were() -> None:
    one, other = (masks_drawn(rank, is_swapped=False) for rank in (0, 1))
    for drawn in (one, other):
        for forward, again in ((0, 1), (2, 3)):
            assert all(map(torch.equal, drawn[forward], drawn[again]))
        assert not torch.equal(drawn[0][0], drawn[2][0])
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) == 4
    for mine, theirs in pairs:
        assert not torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    first, again, *_ = masks_drawn(0, is_swapped=True)
    assert not torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    page = words_of(MISTAKES)
    assert "`fork_rng([device])`, seed by it plus the rank." in page


def test_a_bias_of_every_rank_is_learnt_by_halves(printed: dict) -> None:
    wrong, mended = printed["bias_of_every_rank"]
    assert wrong == ["loss 0.000, bias 1.50\n"] * 2
    assert mended == ["loss 0.000, bias 3.00\n"] * 2


def test_heads_that_do_not_divide_are_merged(printed: dict) -> None:
    wrong, mended = printed["heads_do_not_divide"]
    for text, right in zip(wrong, mended, strict=True):
        assert text.startswith("3 heads of 4; here 1 of 6\n")
        assert numbers(text)[4] > 0.5
        assert right.startswith("4 heads of 3; here 2 of 3\n0.0 away")
    assert len(wrong) == 2


def test_fan_in_is_that_of_the_whole_matrix(printed: dict) -> None:
    wrong, mended = (numbers(both[0]) for both in printed["fan_in_of_a_shard"])
    assert wrong == pytest.approx([0.816, 0.577], abs=0.02)
    assert mended == pytest.approx([0.577, 0.577], abs=0.02)


def test_shards_of_one_seed_stay_equal(printed: dict) -> None:
    wrong, mended = (list(map(numbers, both)) for both in printed["twin_shards"])
    assert [found[3] for found in wrong] == [0, 0]
    assert mended[0][3] == 0 and mended[1][3] > 1
    assert mended[0][0] < 0.7 * wrong[0][0]


def test_tensor_parallel_ranks_need_the_same_samples(printed: dict) -> None:
    assert printed["other_samples"] == [
        ["sample 0: 43, in one process 7\n", "sample 1: 43, in one process 70\n"],
        ["sample 0: 7, in one process 7\n"] * 2,
    ]


def errors_of_sums_in_place() -> list[float]:
    """Sum what @, + and tanh return in place; return how wrong its gradients are."""
    torch.manual_seed(dist.get_rank())
    x, rows, bias = torch.randn(4, 3), torch.randn(3, 2), torch.randn(2)
    operations = (
        lambda rows: x @ rows,
        lambda rows: x @ rows + bias,
        lambda rows: (x @ rows).tanh(),
    )
    errors = []
    for operation in operations:
        grads = []
        for detached in (True, False):
            rows.requires_grad_()
            y = operation(rows)
            terms = y.detach() if detached else y.detach().clone()
            dist.all_reduce(terms)
            grads += torch.autograd.grad(y, rows, 2 * terms)
        errors.append((torch.dist(*grads) / grads[1].norm()).item())
    return errors


def test_a_result_that_backward_needs_is_not_summed_in_place(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(errors_of_sums_in_place)
    assert len(found) == 2
    for product, added, tanh in found:
        assert max(product, added) < 1e-6 and tanh > 0.1


def masks_by_swapped_states() -> list[list[float]]:
    """Drop a whole tensor, a shard, a whole one; each kind has a generator's state."""
    states, found = {}, []
    for kind, seed in (("whole", 0), ("shard", 1 + dist.get_rank())):
        torch.manual_seed(seed)
        states[kind] = torch.get_rng_state()
    for kind in ("whole", "shard", "whole"):
        torch.set_rng_state(states[kind])
        found.append(F.dropout(torch.ones(64), 0.5).tolist())
        states[kind] = torch.get_rng_state()
    return found


def test_two_states_of_the_generator_are_swapped(worker_pool: WorkerPool) -> None:
    both = zip(*worker_pool.run(masks_by_swapped_states), strict=True)
    one, shard, other = both
    assert one[0] == one[1] and other[0] == other[1] and one[0] != other[0]
    assert shard[0] != shard[1]


# --- What people get wrong, and what it says then. ----------


def dropout_of_dtensors() -> tuple[list, list, list[str]]:
    """Drop a sharded tensor, seeded alike, and a whole one, seeded by rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        cut = distribute_tensor(torch.ones(4, 64), mesh, [Shard(1)])
        of_shard = F.dropout(cut, 0.5).to_local().tolist()  # pyright: ignore
        torch.manual_seed(dist.get_rank())
        whole = distribute_tensor(torch.ones(4, 64), mesh, [Replicate()])
        of_whole = F.dropout(whole, 0.5).to_local().tolist()  # pyright: ignore
    return of_shard, of_whole, [str(one.message) for one in warned]


def test_dtensors_on_a_cpu_leave_dropout_masks_to_the_seeds(
    worker_pool: WorkerPool,
) -> None:
    (shard_0, whole_0, _), (shard_1, whole_1, _) = worker_pool.run(dropout_of_dtensors)
    assert shard_0 == shard_1 and whole_0 != whole_1
    assert 0 < sum(value > 0 for row in shard_0 for value in row) < 4 * 32


def gradient_through_the_deprecated_sum() -> list[float]:
    """Differentiate two sums over ranks, one after the other, in two ways."""
    import torch.distributed.nn.functional as differentiable

    grads = []
    for way in (differentiable.all_reduce, LAYERS.SumOverRanks.apply):
        term = torch.ones((), requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            way(way(term * 1)).backward()
        grads.append(torch.as_tensor(term.grad).item())
    return grads


def test_differentiable_all_reduce_counts_the_loss_n_times(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(gradient_through_the_deprecated_sum, world_size=3)
    # Three for each of the two sums.
    assert found == [[9.0, 1.0]] * 3


def parallelize_own_weights(
    src_data_rank: int | None = 0, names_norm: bool = False, distribute: bool = False
) -> tuple[bool, bool, list[float]]:
    """Seed each rank differently, then split; return whose weights there are now.

    The plan may name the norm, and `distribute_module` may follow.
    """
    torch.manual_seed(0)
    of_rank_0 = nn.Linear(4, 8, bias=False).weight.detach()
    torch.manual_seed(dist.get_rank())
    linear, norm = nn.Linear(4, 8, bias=False), nn.LayerNorm(4)
    nn.init.constant_(norm.weight, 1.0 + dist.get_rank())
    own = linear.weight.detach().clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: Any = {"1": ColwiseParallel()}
    if names_norm:
        plan["0"] = SequenceParallel()
    model = nn.Sequential(norm, linear)
    parallelize_module(model, mesh, plan, src_data_rank=src_data_rank)
    if distribute:
        distribute_module(model, mesh)
    now, of_norm = cast(Any, linear.weight), cast(Any, norm.weight)
    if names_norm or distribute:
        assert of_norm.placements == (Replicate(),)
        of_norm = of_norm.to_local()
    shard, (of_rank_0, own) = (
        now.to_local(),
        (
            whole.chunk(dist.get_world_size())[dist.get_rank()]
            for whole in (of_rank_0, own)
        ),
    )
    return torch.equal(shard, of_rank_0), torch.equal(shard, own), of_norm.tolist()


@pytest.mark.parametrize(
    ("names_norm", "distribute", "of_rank_1"),
    # `distribute_module` sends rank 0's, unless `SequenceParallel` was before it.
    [(False, False, 2.0), (True, False, 2.0), (True, True, 2.0), (False, True, 1.0)],
)
def test_parallelize_module_sends_only_what_is_cut(
    worker_pool: WorkerPool, names_norm: bool, distribute: bool, of_rank_1: float
) -> None:
    found = worker_pool.run(parallelize_own_weights, 0, names_norm, distribute)
    assert found == [(True, True, [1.0] * 4), (True, False, [of_rank_1] * 4)]


def bias_of_row_parallel() -> tuple[bool, list[float]]:
    """Cut a layer by rows; tell whether its bias is whole, and return it."""
    linear: Any = nn.Linear(4, 3)
    nn.init.constant_(linear.bias, 1.0 + dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(linear, mesh, RowwiseParallel())
    bias = linear.bias
    return bias.placements == (Replicate(),), bias.to_local().tolist()


def test_a_row_parallel_layer_s_bias_is_sent_whole(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(bias_of_row_parallel) == [(True, [1.0] * 3)] * 2


def test_without_a_source_each_rank_cuts_its_own_weights(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(parallelize_own_weights, None)
    assert found == [(True, True, [1.0] * 4), (False, True, [2.0] * 4)]


def split_fused_projection(head_by_head: bool) -> tuple[float, float]:
    """Cut query, key and value as one matrix; compare this rank's queries."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    fused, x = nn.Linear(4, 12, bias=False), torch.randn(2, 4)
    right = fused(x).chunk(3, -1)[0].chunk(n, -1)[rank]
    if head_by_head:
        # Two heads of width 2: query, key and value of the first, then of the second.
        with torch.no_grad():
            rows = fused.weight.unflatten(0, (3, 2, 2))
            fused.weight.copy_(rows.transpose(0, 1).flatten(0, 2).clone())
    parallelize_module(fused, init_device_mesh("cpu", (n,)), ColwiseParallel())
    found = fused(x)
    return torch.dist(found.chunk(3, -1)[0], right).item(), found.shape[-1]


def test_a_fused_projection_is_cut_across_its_parts(worker_pool: WorkerPool) -> None:
    for head_by_head in (False, True):
        found = worker_pool.run(split_fused_projection, head_by_head)
        assert [columns for _, columns in found] == [6, 6]
        apart = max(apart for apart, _ in found)
        assert apart < 1e-6 if head_by_head else apart > 0.5


def fixed_view(is_local: bool) -> list[int]:
    """View a query, cut by columns, as four heads; return its shape."""
    style = ColwiseParallel(use_local_output=is_local)
    query = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (2,)), style)
    return list(query(torch.ones(2, 3, 8)).view(2, 3, 4, 2).shape)


def test_a_fixed_number_of_heads_fails_on_a_plain_shard_alone(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(fixed_view, False) == [[2, 3, 4, 2]] * 2
    with pytest.raises(RankError, match="is invalid for input of size 24"):
        worker_pool.run(fixed_view, True)


def odd_sizes(case: str) -> None:
    """Split what does not divide by two."""
    mesh = init_device_mesh("cpu", (2,))
    if case == "heads":
        part = nn.Linear(12, 12)
        parallelize_module(part, mesh, ColwiseParallel())
        part(torch.ones(2, 5, 12)).unflatten(-1, (-1, 4))
    elif case == "features":
        mlp = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(mlp, mesh, plan)(torch.ones(2, 4))
    else:
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        parallelize_module(model, mesh, {"1": ColwiseParallel()})
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


TEXTS = {
    "heads": r"unflatten: Provided sizes \[-1, 4\] don't multiply up to the size of "
    r"dim 2 \(6\) in the input tensor",
    "features": r"a and b must have same reduction dim, but got \[2, [24]\] X \[3, 4\]",
    "norms": r"got mixed torch\.Tensor and DTensor",
}


@pytest.mark.parametrize("case", TEXTS)
def test_odd_sizes_and_plain_norms_say_so(worker_pool: WorkerPool, case: str) -> None:
    with pytest.raises(RankError) as caught:
        worker_pool.run(odd_sizes, case)
    assert re.search(TEXTS[case], caught.value.traceback)


# --- Exercises. ----------


class GatherTerms(torch.autograd.Function):
    """Sends n times what a sum needs."""

    @staticmethod
    def forward(ctx: Any, term: Tensor) -> Tensor:
        """Gather all terms, and add them up here."""
        terms = [torch.empty_like(term) for _ in range(dist.get_world_size())]
        dist.all_gather(terms, term.contiguous())
        return torch.stack(terms).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Send nothing."""
        return grad


class FlawedMLP(gated_mlp.GatedMLP):
    """The right answer, but for one flaw."""

    def __init__(self, *whole: Tensor, flaw: str) -> None:
        """Keep the flaw's name."""
        super().__init__(*whole)
        self.flaw = flaw
        if flaw == "down by columns":
            self.down = nn.Parameter(LAYERS.shard_of(whole[2], 0))
        if flaw == "keeps up":
            self.whole = nn.Parameter(whole[1])
        if flaw == "keeps up in a list":
            self.aside = [whole[1]]
        if flaw == "keeps up in a buffer":
            self.register_buffer("aside", whole[1])
        rank, n = dist.get_rank(), dist.get_world_size()
        if flaw == "views":
            self.gate = nn.Parameter(whole[0].chunk(n)[rank])
        if flaw == "every other row":
            self.gate, self.up = (nn.Parameter(w[rank::n].clone()) for w in whole[:2])
            self.down = nn.Parameter(whole[2][:, rank::n].clone())
        if flaw == "a layer":
            layer = nn.Linear(1, 1, bias=False)
            layer.weight = self.gate
            del self.gate
            self.register_module("gate", layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to something like (B, T, D)."""
        copied = LAYERS.CopyToRanks.apply(x)
        twice = copied if self.flaw != "two messages" else LAYERS.CopyToRanks.apply(x)
        if self.flaw == "no copy":
            copied = twice = x
        if self.flaw == "gate alone":
            twice = x
        gate = getattr(self.gate, "weight", self.gate)
        hidden = F.silu(F.linear(copied, gate)) * F.linear(twice, self.up)
        y = F.linear(hidden, self.down)
        if self.flaw == "no sum":
            return y
        if self.flaw == "gathers terms":
            return GatherTerms.apply(y)
        if self.flaw == "summed twice":
            y = LAYERS.SumOverRanks.apply(y)
        return LAYERS.SumOverRanks.apply(y)


MLP_HINTS = {
    "": "",
    "no sum": "the result is this rank's term of a sum: who adds them up?",
    "summed twice": "the result is 2 times too large: what is added up too often?",
    "no copy": "the gradient of x is this rank's term of a sum: who adds them up?",
    "two messages": "right, but backward sends 2 messages; one will do",
    "keeps up": "right, but this rank keeps 120 weights; a part has 72",
    "keeps up in a list": "right, but this rank keeps 120 weights; a part has 72",
    "keeps up in a buffer": "right, but this rank keeps 120 weights; a part has 72: i",
    "views": "right, but this rank keeps 96 weights; a part has 72: in at",
    "every other row": "the gradient of gate is not that of one process, for the part",
    "gate alone": "the gradient of x is not that of one process: x is read twice",
    "gathers terms": "right, but forward calls allgather_, where one all-reduce will",
    "a layer": "right, but gate is a Linear, and is to be the parameter itself",
    "down by columns": "it ended with: mat1 and mat2 shapes cannot be multiplied",
}


def tell_mlps() -> list[str]:
    """Let the checker try the stub, the answer, and answers with a flaw."""
    stub, check = CHECKERS["gated_mlp"].GatedMLP, CHECKERS["check_gated_mlp"]
    flawed = [functools.partial(FlawedMLP, flaw=flaw) for flaw in MLP_HINTS]
    return [check.try_gated_mlp(a) for a in (stub, gated_mlp.GatedMLP, *flawed)]


def test_gated_mlp_is_told_what_is_wrong(worker_pool: WorkerPool) -> None:
    told = worker_pool.run(tell_mlps)
    due = ["right, but this rank keeps 144 weights; a part has 72", ""]
    due += MLP_HINTS.values()
    assert len(told) == 2 and len(due) == 16
    for of_rank in told:
        # A hint may go on with the sizes; where none is due, none is given.
        cut = [
            text[: len(hint)] or text for text, hint in zip(of_rank, due, strict=True)
        ]
        assert cut == due
    # Every other row would be right as well, and is not what is asked for.
    page = words_of("07_tensor_parallel/exercises")
    assert "keeps and computes the part that `shard_of(whole, dim)` cuts" in page


class FlawedBlock(broken_block.SplitBlock):
    """The right answer, with one mistake."""

    def __init__(self, whole: Any, flaw: str) -> None:
        """Keep the flaw's name."""
        super().__init__(whole)
        self.flaw = flaw

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to (B, D)."""
        if self.flaw == "copy of all":
            x = LAYERS.CopyToRanks.apply(x)
            y = LAYERS.CopyToRanks.apply(self.norm(x))
        elif self.flaw == "copy in front":
            y = self.norm(LAYERS.CopyToRanks.apply(x))
        else:
            y = self.norm(x)  # never copied to all ranks
        y = F.gelu(F.linear(y, self.columns, self.columns_bias))
        return x + LAYERS.SumOverRanks.apply(F.linear(y, self.rows)) + self.bias


def train_without_clamp(block: Any, batches: list) -> None:
    """Do what the answer does, but scale small gradients up to the limit."""
    with mock.patch.object(Tensor, "clamp", lambda tensor, max: tensor):
        broken_block.train_block(block, batches)


def norms_of_steps() -> list[float]:
    """Return the norm of each step's gradient, taken at the first weights."""
    check, norms = CHECKERS["check_broken_block"], []
    for inputs, labels in check.draw_steps_of_block():
        block = check.WholeBlock()
        F.mse_loss(block(inputs), labels).backward()
        norms.append(nn.utils.get_total_norm(p.grad for p in block.parameters()).item())
    return norms


def test_first_step_of_block_alone_is_small() -> None:
    first, *others = norms_of_steps()
    assert 0.01 < first < 0.09 and len(others) == 4 and min(others) > 0.15


def tell_blocks() -> list[str]:
    """Let the checker try the stub, its mistakes one by one, and the answer."""
    check, stub = CHECKERS["check_broken_block"], CHECKERS["broken_block"]
    right, train = broken_block.SplitBlock, broken_block.train_block
    flawed = functools.partial(FlawedBlock, flaw="copy in front")
    never = functools.partial(FlawedBlock, flaw="no copy")
    answers = [
        (stub.SplitBlock, stub.train_block),
        (flawed, train),
        (never, train),
        (right, stub.train_block),
        (right, train),
        (functools.partial(FlawedBlock, flaw="copy of all"), train),
        (right, train_without_clamp),
    ]
    return [check.try_block(answer) for answer in answers]


def test_broken_block_is_told_what_is_wrong(worker_pool: WorkerPool) -> None:
    told = worker_pool.run(tell_blocks)
    assert len(told) == 2
    for of_rank in told:
        assert of_rank[0] == "the result has the last bias 2 times in it"
        term = "the gradient of norm.weight is not that of one process (as the block al"
        assert [text[: len(term)] for text in of_rank[1:3]] == [term] * 2
        assert re.search(r"have moved 1\.\d\d times as far .* whose norm", of_rank[3])
        assert of_rank[4] == ""
        inputs = "the gradient of the inputs is not that of one process"
        assert of_rank[5] == inputs and len(of_rank) == 7
        assert re.search(r"times as far .* is a small one left as it is", of_rank[6])
    # Terms of the norm could be added up in the loop, which the second does not say.
    page = words_of("07_tensor_parallel/exercises")
    assert "the block alone must give one process's gradients" in page


# --- When it pays. ----------

COST, CROSSING, BYTES, WAYS = (
    load_chapter(PAYS)[name]
    for name in ("step_cost", "crossing", "bytes_and_memory", "three_ways")
)


def test_small_batches_send_less_and_large_ones_more() -> None:
    width, layers = 512, 24
    weights = layers * 12 * width**2
    ratios = [
        COST.tensor_parallel_bytes(tokens, width, layers)
        / COST.data_parallel_bytes(weights)
        for tokens in (3 * width // 10, 3 * width, 30 * width)
    ]
    # Equal at B T = 3 D, but for the embedding, the head and the loss.
    assert ratios == pytest.approx([0.1, 1, 10], rel=0.03)


def test_a_larger_batch_does_not_lower_the_rate_that_pays() -> None:
    width, layers, flops = 512, 24, 5e10
    rates: dict[str, list[float]] = {"data": [], "tensor": []}
    for tokens in (500, 5000, 50_000):
        saved = 72 * width**2 * layers * tokens / flops / 2
        nbytes = {
            "data": COST.data_parallel_bytes(layers * 12 * width**2),
            "tensor": COST.tensor_parallel_bytes(tokens, width, layers),
        }
        for way, sent in nbytes.items():
            rates[way].append(COST.break_even_rate(sent, saved))
    assert rates["tensor"] == pytest.approx(rates["tensor"][:1] * 3)
    assert rates["data"][0] / rates["data"][2] == pytest.approx(100)
    # A layer twice as wide is worth a link half as fast.
    wider = COST.tensor_parallel_bytes(tokens, 2 * width, layers)
    assert COST.break_even_rate(wider, 4 * saved) == pytest.approx(
        rates["tensor"][2] / 2, rel=1e-3
    )
    # A token of a longer sample is more to compute, and as many bytes to send.
    model = load_chapter("07_tensor_parallel")["model"]
    with torch.device("meta"):
        gpts = [model.GPT(model.GPTConfig(block_size=T)) for T in (128, 256)]
    assert gpts[0].flops_per_token() < gpts[1].flops_per_token()
    assert COST.seconds_on_link(nbytes["tensor"], rates["tensor"][2]) == pytest.approx(
        saved
    )
    assert COST.sent_by_a_rank(8, 2) == 8 and COST.sent_by_a_rank(8, 4) == 12


def test_a_frame_has_66_bytes_of_headers_and_adam_16_bytes_a_parameter() -> None:
    # Ethernet 14, IPv4 20, TCP 20 and its timestamps 12 (RFC 894, 791, 9293, 7323), and
    # 1,448 bytes of data: Ethernet carries 1,500 beside its own header.
    headers = 14 + 20 + 20 + 12
    assert 1500 - (headers - 14) == 1448
    assert pytest.approx(1448 + headers) == COST.FRAME * 1448
    # In float32: a weight, its gradient, and Adam's two moments (Kingma and Ba, 2015).
    assert sum([4, 4, 4 + 4]) == BYTES.STATES


def test_a_crossing_is_found_between_two_points() -> None:
    assert COST.crossing({3.0: 2.0, 1.0: -2.0}) == 2.0
    assert COST.crossing({1.0: 4.0, 2.0: 1.0, 4.0: -1.0}) == 3.0
    assert COST.crossing({1.0: 1.0, 2.0: 3.0}) is None
    assert COST.crossing({1.0: 0.0, 2.0: 0.0, 3.0: 1.0}) == 1.0


def ending_of(script: Any, faults: list[tuple[Any, str, Any]]) -> tuple[Any, str]:
    """Run a lesson in the pool, some of it replaced; return exit code and last line."""
    said, complaint = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(complaint))
        stack.enter_context(in_the_pool(script))
        # A failed check leaves the group, which is the pool's.
        stack.enter_context(mock.patch.object(load_chapter(PAYS)["ranks"], "leave"))
        for fault in faults:
            stack.enter_context(mock.patch.object(*fault))
        try:
            script.main()
        except SystemExit as end:
            return end.code, complaint.getvalue().strip()
    return 0, (said.getvalue().splitlines() or [""])[-1]


class LargerGPT(BYTES.ParallelGPT):
    """Has a number that nothing uses, and so sends nothing more."""

    def __init__(self, config: Any) -> None:
        """Add it."""
        super().__init__(config)
        self.unused = nn.Parameter(torch.zeros(1))


def count_bytes(fault: str = "") -> tuple[Any, str]:
    """Run bytes_and_memory.py, as it is or with a fault."""
    faults: dict[str, tuple[Any, str, Any]] = {
        "formula": (BYTES, "tensor_parallel_bytes", lambda *_: 0),
        "one parameter more": (BYTES, "ParallelGPT", LargerGPT),
    }
    return ending_of(BYTES, [faults[fault]] if fault else [])


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_and_memory_are_the_formulas(
    worker_pool: WorkerPool, world_size: int
) -> None:
    found = worker_pool.run(count_bytes, world_size=world_size)
    claim = "check: 4 counts are the formulas'; a block sums 1.05 MB"
    assert found == [(0, claim)] + [(0, "")] * (world_size - 1)


def test_megabytes_of_a_rank_follow_from_the_shapes(worker_pool: WorkerPool) -> None:
    said, _ = worker_pool.run(run_lesson, PAYS, "bytes_and_memory")
    row = r"^(\S+)(?: process)? +(\d) +([\d.]+) +([\d.]+) +([\d.]+)$"
    found = {
        (way, int(n)): list(map(float, x)) for way, n, *x in re.findall(row, said, re.M)
    }
    assert len(found) == 6
    tokens, width, vocabulary = 8 * 64, 128, 256
    activation = 4 * tokens * width / 1e6  # MB of (B, T, D) in fp32
    for n in (1, 2):
        norms = (2 * n + 1) * 2 * width
        uncut, cut = 64 * width + norms, n * 12 * width**2 + vocabulary * width
        # 16 bytes a parameter; tensor parallelism halves all but norms and positions.
        whole, split = uncut + cut, uncut + cut / 2
        # Forward keeps for backward, of a block: input and output of two norms, query,
        # key, value, attention, 4 D before gelu and 4 D after. Then the last norm's
        # two, and log-probabilities.
        kept = (16 * n + 2 + vocabulary / width) * activation
        # Two all-reduces a block each way, one for embedding and head, 3 for the loss.
        sums = 4 * ((4 * n + 2) * tokens * width + 3 * tokens) / 1e6
        expected = {
            "one": [16e-6 * whole, kept, 0],
            "data-parallel": [16e-6 * whole, kept / 2, 4e-6 * whole],
            "tensor-parallel": [16e-6 * split, found["tensor-parallel", n][1], sums],
        }
        assert len(expected) == 3
        for way, values in expected.items():
            assert found[way, n] == pytest.approx(values, rel=0.01, abs=0.005), way
    # Of a block's 16 the norms' inputs and outputs are whole on each of two ranks.
    more = found["tensor-parallel", 2][1] - found["tensor-parallel", 1][1]
    assert more == pytest.approx((4 + 12 / 2) * activation, rel=0.01)


@pytest.mark.parametrize("fault", ["formula", "one parameter more"])
def test_wrong_counts_are_noticed(worker_pool: WorkerPool, fault: str) -> None:
    found = worker_pool.run(count_bytes, fault)
    assert [code for code, _ in found] == [1, 1]
    assert found[0][1].startswith("check failed on ranks [0, 1], not so: 4 counts")


def errors_of_ways(fault: str = "", samples: int = 4) -> tuple[float, float]:
    """Compare both parallel ways with one rank; time a step that sends nothing."""
    with contextlib.ExitStack() as stack:
        for name in ("T", "D"):
            stack.enter_context(mock.patch.object(WAYS, name, 16))
        ways = WAYS.Ways(samples)
        if fault == "nothing is sent":
            stack.enter_context(mock.patch.object(dist, "all_reduce"))
        elif fault:
            right = getattr(ways, fault)

            def of_other_samples() -> None:
                kept, ways.tokens = ways.tokens, ways.tokens.flip(1)
                right()
                ways.tokens = kept

            stack.enter_context(mock.patch.object(ways, fault, of_other_samples))
        error = ways.largest_error()
    return error, WAYS.seconds(ways.tensor, is_silent=True)


def test_three_ways_compute_one_gradient(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(errors_of_ways)
    assert len(found) == 2
    assert max(error for error, _ in found) < 1e-5
    assert found[0][1] == found[1][1] > 0
    (error, _), _ = worker_pool.run(errors_of_ways, "", 5)  # 3 samples and 2
    assert error < 1e-5
    for fault in ("nothing is sent", "data", "tensor"):
        broken = worker_pool.run(errors_of_ways, fault)
        assert len(broken) == 2
        assert min(error for error, _ in broken) > 1e-2, fault


def known_steps() -> tuple[list[Any], list[float]]:
    """Time a step of 1 second on rank 0 and 2 on rank 1; is it silent, how long?

    Say also what comes before a step: nothing of this is timed.
    """
    heard, clock, barrier = list[Any](), [0.0], dist.barrier

    def step() -> None:
        heard.append(isinstance(dist.all_reduce, mock.Mock))
        clock[0] += 1.0 + dist.get_rank()

    def wait(seconds: float | None = None) -> None:
        heard.append(seconds)
        clock[0] += 5.0
        if seconds is None:
            barrier()

    known = mock.Mock(sleep=wait, perf_counter=lambda: clock[0])
    with (
        mock.patch.object(WAYS, "time", known),
        mock.patch.object(dist, "barrier", wait),
    ):
        took = [WAYS.seconds(step, is_silent) for is_silent in (True, False)]
    return heard, took


def test_a_step_takes_as_long_as_on_its_slowest_rank(worker_pool: WorkerPool) -> None:
    before = [0.02, None]
    heard = [*before, True, *before, False]
    assert worker_pool.run(known_steps) == [(heard, [2.0, 2.0])] * 2


def made_up_times(equal: float) -> dict[str, Any]:
    """Make times of two batches, of which `equal` samples suit the slowest link.

    On the others both ways take equally long with 10, to which the bytes that are told
    belong. What a way computes is the median over the rates.
    """
    compute, found = {"alone": 1.0, "data": 0.5, "tensor": 0.6}, {}
    for samples in (16, 4):
        told = {"alone": 0.0, "data": 1e7, "tensor": 1e6 * samples}
        found[str(samples)] = {}
        for rate, share in ((1e9, 2.0), (1e7, 1.0), (1e8, 0.3)):
            sent = told | {"tensor": 1e7 * samples / (equal if rate == 1e7 else 10)}
            found[str(samples)][str(rate)] = {
                way: [
                    compute[way] * share,
                    (1.0 if way == "alone" else 0.5)
                    + COST.seconds_on_link(sent[way], rate),
                    told[way],
                ]
                for way in compute
            }
    return found


def find_crossings(
    path: Path, equal: float, capsys: pytest.CaptureFixture[str]
) -> tuple[Any, str]:
    """Run crossing.py on made-up times; return how it ended and what it printed."""
    path.write_text(json.dumps(made_up_times(equal)))
    with mock.patch.object(sys, "argv", ["crossing.py", f"--json={path}"]):
        try:
            CROSSING.main()
        except SystemExit as end:
            return end.code, capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_crossings_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    code, said = find_crossings(path, 10.0, capsys)
    due = [
        f"data = tensor at {rate:5} Mbit/s | predicted 10.0 samples | measured 10.0"
        for rate in (10, 100, 1000)
    ]
    for samples in (4, 16):
        for way, saved, nbytes in (("data", 0.5, 1e7), ("tensor", 0.4, 1e6 * samples)):
            rates = [COST.break_even_rate(nbytes, x) / 1e6 for x in (saved, 0.5)]
            due.append(
                f"{way:6} = one rank, {samples:2} samples | predicted {rates[0]:.0f} "
                f"Mbit/s | measured {rates[1]:.0f}"
            )
    assert code == 0 and said.splitlines()[:-1] == due
    assert said.endswith(
        "check: at the slowest link the batch is off by +0% (limit 25%)\n"
    )
    code, _ = find_crossings(path, 6.0, capsys)
    assert str(code).startswith(
        "check failed, not so: at the slowest link the batch is"
    )


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"4": {"0": {"alone": [1, 1, 0], "data": [1, 1, 1], "tensor": [1, 1, 1]}}}',
    ],
)
def test_a_file_without_times_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)
    monkeypatch.setattr("sys.argv", ["crossing.py", f"--json={path}"])
    with pytest.raises(SystemExit) as ended:
        CROSSING.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f"--json={path} is no file by step_time.py: " in said


def test_samples_that_ranks_cannot_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step_time.py", "--samples=3"])
    monkeypatch.setattr(
        os, "environ", {"RANK": "0", "LAB_HOST": "0", "WORLD_SIZE": "2"}
    )
    with pytest.raises(SystemExit) as ended:
        load_chapter(PAYS)["step_time"].main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == "step_time.py: 2 ranks cannot share 3 samples evenly\n"


def test_step_time_wants_the_laboratory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step_time.py"])
    for name in ("RANK", "LAB_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        load_chapter(PAYS)["step_time"].main()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert "start it in the laboratory: python 03_ddp_torchrun/cluster/lab.py" in line


def step_time_with_known_times(rate: str, error: float = 0.0, *words: str) -> str:
    """Be a rank of step_time.py where each step takes a tenth of a second."""
    link = {"LAB_HOST": "0", "LAB_LINK_RATE": rate}
    script = load_chapter(PAYS)["step_time"]
    with (
        mock.patch.dict(os.environ, link),
        mock.patch.object(script, "seconds", lambda *_: 0.1),
        mock.patch.object(script.Ways, "largest_error", lambda _: error),
    ):
        return run_lesson(PAYS, "step_time", "--samples=2", "--rounds=1", *words)


def test_gradients_of_a_timed_step_are_held_against_one_rank_s(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    # The largest of a thousand terms of fp32 is known to about 1e-5.
    path = tmp_path / "times.json"
    run, words = step_time_with_known_times, f"--json={path}"
    (said, _) = worker_pool.run(run, "1gbit", 2e-5, words)
    assert said.endswith("check: both ways give one rank's gradient, 2e-05 off\n")
    with pytest.raises(RankError, match="SystemExit: 1"):
        worker_pool.run(run, "2gbit", 1e-3, words)
    times = json.loads(path.read_text())["2"]  # the second is added to the first
    assert list(times) == ["1000000000", "2000000000"]
    assert times["1000000000"] == times["2000000000"]


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("500kbit", 5e5), ("300mbit", 3e8), ("1gbit", 1e9), ("", 100e9)],
)
def test_a_step_is_computation_and_its_bytes_over_the_rate(
    worker_pool: WorkerPool, rate: str, bits: float
) -> None:
    said, _ = worker_pool.run(step_time_with_known_times, rate)
    # A ring of two sends a message once: the gradient, or a block's activations.
    d, tokens = 512, 2 * 128
    parameters = 12 * d**2 + 256 * d + 128 * d + 3 * 2 * d
    sent = [0, 4 * parameters, 4 * ((4 + 2) * tokens * d + 3 * tokens)]
    times = [f"{100 + 8e3 * each * 1514 / 1448 / bits:.0f}" for each in sent]
    rows = [line.split() for line in said.splitlines()[2:5]]
    assert [row[0] for row in rows] == ["alone", "data", "tensor"]
    assert [row[1] for row in rows] == [f"{each / 1e6:.2f}" for each in sent]
    assert [row[2:] for row in rows] == [["100", time, "100"] for time in times]


@pytest.mark.slow
def test_steps_take_their_bytes_over_the_rate(laboratory: None, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    lab = ROOT / "03_ddp_torchrun" / "cluster" / "lab.py"
    words = ["--rounds=2", "--samples=2", f"--json={path}"]
    script = ROOT / PAYS / "step_time.py"
    run = python(lab, "--link-rate=50mbit", "--", script, *words)
    assert run.returncode == 0, run.output
    found = json.loads(path.read_text())["2"]["50000000"]
    for way, expected in (("data", 13.38e6), ("tensor", 3.15e6)):
        compute, whole, nbytes = found[way]
        assert nbytes == pytest.approx(expected, rel=0.01)
        predicted = compute + COST.seconds_on_link(nbytes, 50e6)
        assert whole == pytest.approx(predicted, rel=0.4)


def test_no_room_is_forgotten() -> None:
    rooms = {path.parent.name for path in (ROOT / CHAPTER).glob("*/*.py")}
    assert rooms == {"mistakes", "exercises", "when_it_pays", "huggingface"}
