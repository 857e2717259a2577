"""Chapter 07: layers on several ranks compute what one process computes."""

import contextlib
import copy
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from launch import ROOT
from lessons import in_the_pool, run_lesson
from scripts import load_chapter
from tiny_gpt import write_text
from worker_pool import RankError, RankFailure, WorkerPool

CHAPTER = "07_tensor_parallel"
modules: dict[str, Any] = load_chapter(CHAPTER)
layers, gpt, by_hand, sent_and_kept = (
    modules[n] for n in ("parallel_layers", "parallel_gpt", "by_hand", "sent_and_kept")
)
train, minimal, model = (modules[name] for name in ("train", "minimal", "model"))
FLOAT64 = torch.float64
TINY = ["--layers=1", "--width=16", "--heads=4", "--block-size=16", "--samples=48"]

# @record, around main(), has faulthandler write to a stderr that pytest has taken.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text in a folder with a space in its name."""
    return write_text(tmp_path_factory.mktemp("a folder") / "text.txt")


def ending(script: str, faults: list[tuple[Any, str, Any]]) -> tuple[Any, str]:
    """Run a lesson with some of its parts replaced; return exit code and last line."""
    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(errors))
        # A failed check leaves the group, which is the pool's.
        stack.enter_context(mock.patch.object(modules["ranks"], "leave"))
        for owner, name, fault in faults:
            stack.enter_context(mock.patch.object(owner, name, fault))
        try:
            return 0, (run_lesson(CHAPTER, script).splitlines() or [""])[-1]
        except SystemExit as end:
            return end.code, errors.getvalue().strip()


def assert_noticed(ends: list[tuple[Any, str]], claim: str) -> None:
    """Assert that all ranks ended with an error, which rank 0 told."""
    assert [code for code, _ in ends] == [1] * len(ends)
    every_rank = list(range(len(ends)))
    assert ends[0][1].startswith(f"check failed on ranks {every_rank}, not so: {claim}")


def no_all_reduce(tensor: Tensor, *_: Any, **__: Any) -> None:
    """Stand in for an all-reduce that is forgotten."""


# --- One product. ----------


MATRIX = """\
in one process    | x A = [[31.0, 42.0]], gradient of x = [[201.0, 403.0]]
columns, forward  | [[31.0]] [[42.0]] side by side
columns, backward | [[1.0, 3.0]] [[200.0, 400.0]] to be added up
rows, forward     | [[1.0, 2.0]] [[30.0, 40.0]] to be added up
rows, backward    | [[201.0]] [[403.0]] side by side
check: 9 results are those of one process
"""


@pytest.mark.smoke
def test_two_of_four_products_are_sums(worker_pool: WorkerPool) -> None:
    outputs = worker_pool.run(run_lesson, CHAPTER, "matrix")
    assert outputs == [MATRIX, ""]


def matrix_ending(fault: str) -> tuple[Any, str]:
    """Run matrix.py with one thing wrong."""
    script = modules["matrix"]
    faults: dict[str, list[tuple[Any, str, Any]]] = {
        "cut": [(script, "cut", lambda w, dim: w.chunk(2, dim)[1 - dist.get_rank()])],
        "all-reduce": [(script.dist, "all_reduce", no_all_reduce)],
    }
    return ending("matrix", faults[fault])


@pytest.mark.parametrize("fault", ["cut", "all-reduce"])
def test_wrong_product_is_noticed(worker_pool: WorkerPool, fault: str) -> None:
    assert_noticed(worker_pool.run(matrix_ending, fault), "9 results are those of")


def wrong_parts() -> list[Any]:
    """Show parts that are wrong; then get each result of an MLP wrong by a millionth.

    What of the last ends with an error is told by its number, rows first by a 4.
    """
    script, whole = modules["matrix"], torch.arange(8.0).view(2, 4)
    rank, real, first = dist.get_rank(), script.mlp, script.mlp_rows_first
    with contextlib.redirect_stdout(io.StringIO()):
        told = [
            script.show_parts("", mine + off, whole)
            for mine in (script.cut(whole, 1), (1 - rank) * whole)
            for off in (0, 1e-3 * rank)
        ]

    def noticed(number: int) -> bool:
        def mlp(*parts: Tensor) -> list[Tensor]:
            return [y + 1e-4 * (i == number) for i, y in enumerate(real(*parts))]

        def rows_first(*parts: Tensor) -> Tensor:
            return first(*parts) + 1e-4 * (number == 4)

        faults = [(script, "mlp", mlp), (script, "mlp_rows_first", rows_first)]
        return ending("matrix", faults)[0] == 1

    return [told, [number for number in range(6) if noticed(number)]]


def test_each_part_and_each_result_of_an_mlp_is_compared(
    worker_pool: WorkerPool,
) -> None:
    complete, terms = [True, False], [[True, False], [0, 1, 2, 3, 4]]
    first, second = worker_pool.run(wrong_parts)
    assert second == [complete + terms[0], terms[1]]
    # Rank 0's columns are right, and its sum is not.
    assert first == [[True, True, *terms[0]], terms[1]]


# --- The layers. ----------


def grads_of(module: nn.Module, x: Tensor, grad_y: Tensor) -> tuple[Tensor, ...]:
    """Run a layer both ways; return output and gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = module(x)
    return y, *torch.autograd.grad(y, [x, *module.parameters()], grad_y)


def pair(in_pairs: bool) -> Any:
    """Return the group of ranks 0 and 1 or of ranks 2 and 3, or None for all ranks."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])] if in_pairs else []
    return pairs[dist.get_rank() // 2] if pairs else None


def layer_errors(in_pairs: bool = False) -> dict[str, float]:
    """Compare layers of 8 to 12 features with nn.Linear of the same seed.

    Two ranks of four may share them, and the other two read something else.
    """
    group = pair(in_pairs)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    x, grad_y = (torch.randn(3, 5, width).double() for width in (8, 12))
    x = x * (1 + dist.get_rank() // n)
    errors = {}

    def mine(whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(n, dim)[rank]

    def note(name: str, found: Any, right: Any) -> None:
        assert len(found) == len(right)
        assert all(a.shape == b.shape for a, b in zip(found, right, strict=True))
        apart = [(a - b).abs().max() for a, b in zip(found, right, strict=True)]
        errors[name] = max(apart).item()

    for bias in (True, False):
        torch.manual_seed(3)
        plain = nn.Linear(8, 12, bias).double()
        y, grad_x, grad_weight, *grad_bias = grads_of(plain, x, grad_y)
        for gathers in (True, False):
            torch.manual_seed(3)
            layer = layers.ColumnParallelLinear(8, 12, bias, gathers, group).double()
            found = grads_of(layer, x, grad_y if gathers else mine(grad_y, -1))
            right = [y if gathers else mine(y, -1), grad_x, mine(grad_weight, 0)]
            right += [mine(b, 0) for b in grad_bias]
            note(f"column {bias} {gathers}", found, right)
        for is_parallel in (True, False):
            torch.manual_seed(3)
            layer = layers.RowParallelLinear(8, 12, bias, is_parallel, group).double()
            shards = [p for p in layer.parameters() if p is not layer.bias]
            assert [p.untyped_storage().nbytes() for p in shards] == [8 * 96 // n]
            found = grads_of(layer, mine(x, -1) if is_parallel else x, grad_y)
            right = [y, mine(grad_x, -1) if is_parallel else grad_x]
            note(
                f"row {bias} {is_parallel}",
                found,
                [*right, mine(grad_weight, 1), *grad_bias],
            )
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_equal_linear(worker_pool: WorkerPool, world_size: int) -> None:
    results = worker_pool.run(layer_errors, world_size=world_size)
    assert len(results) == world_size
    for errors in results:
        assert len(errors) == 8
        assert all(error < 1e-13 for error in errors.values()), errors


def test_two_of_four_ranks_can_share_a_layer(worker_pool: WorkerPool) -> None:
    for found in (layer_errors, vocabulary_errors):
        results = worker_pool.run(found, True, world_size=4)
        assert len(results) == 4
        for errors in results:
            assert len(errors) > 5
            assert all(error < 1e-12 for error in errors.values()), errors


def cut_and_keep() -> tuple[int, int]:
    """Cut a matrix by rows; return the bytes of a shard, and what it keeps alive."""
    shard = layers.shard_of(torch.ones(8, 8), 0)
    term = torch.arange(6.0).view(2, 3)  # on rank 1 in another order of memory
    mine = term.t().contiguous().t() if dist.get_rank() == 1 else term
    assert torch.equal(layers.all_reduced(mine), 4 * term)
    return shard.nbytes, shard.untyped_storage().nbytes()


def test_a_shard_does_not_keep_the_whole_alive(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(cut_and_keep, world_size=4) == [(64, 64)] * 4


def initial_scale() -> float:
    """Return how wide the weights of a row-parallel layer of 256 features are drawn."""
    return layers.RowParallelLinear(256, 64, bias=False).weight.abs().max().item()


def test_shards_are_drawn_by_the_whole_layers_fan_in(worker_pool: WorkerPool) -> None:
    scales = worker_pool.run(initial_scale, world_size=4)
    # nn.Linear draws from -1 / sqrt(256) to 1 / sqrt(256).
    assert len(scales) == 4
    assert min(scales) > 0.9 / 16 and max(scales) <= 1 / 16


def ten_columns() -> None:
    """Build a layer whose output does not divide by four ranks."""
    layers.ColumnParallelLinear(8, 10)


def test_features_that_do_not_divide_are_refused(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="10 is not divisible by 4 ranks"):
        worker_pool.run(ten_columns, world_size=4)


def adapter_errors(copies_before: str) -> list[float]:
    """Add B A x to a layer cut by columns; return how wrong x's and A's gradients are.

    All ranks have A, and B is cut as the layer is.
    """
    x, weight, a, b = (
        torch.randn(shape, dtype=FLOAT64, generator=torch.Generator().manual_seed(i))
        for i, shape in enumerate([(16, 8), (6, 8), (2, 8), (6, 2)])
    )
    n, rank, copy = dist.get_world_size(), dist.get_rank(), layers.CopyToRanks.apply
    leaves = [[t.clone().requires_grad_() for t in (x, a)] for _ in "12"]
    (x, a), (mine, own_a) = leaves
    right = x @ weight.T + x @ a.T @ b.T
    copied = copy(mine)
    low = copied @ own_a.T if copies_before == "A" else copy(mine @ own_a.T)
    found = copied @ weight.chunk(n)[rank].T + low @ b.chunk(n)[rank].T
    grads = [
        torch.autograd.grad(y.square().sum(), part)
        for y, part in zip((right, found), leaves, strict=True)
    ]
    pairs = zip(*grads, strict=True)
    return [(torch.dist(right, g) / right.norm()).item() for right, g in pairs]


def test_an_adapter_is_copied_between_its_two_matrices(worker_pool: WorkerPool) -> None:
    right = worker_pool.run(adapter_errors, "B")
    wrong = worker_pool.run(adapter_errors, "A")
    assert len(right) == len(wrong) == 2
    for (x, a), (x_too, a_wrong) in zip(right, wrong, strict=True):
        assert max(x, a, x_too) < 1e-14 and a_wrong > 0.1


def penalty_errors() -> list[float]:
    """Penalise a gradient's norm; return how wrong the penalty's gradients are."""
    x, a, b = (
        torch.randn(shape, dtype=FLOAT64, generator=torch.Generator().manual_seed(i))
        for i, shape in enumerate([(16, 8), (8, 6), (6, 2)])
    )
    n, rank = dist.get_world_size(), dist.get_rank()
    cuts = x, a.chunk(n, 1)[rank], b.chunk(n)[rank]
    f, g = layers.CopyToRanks.apply, layers.SumOverRanks.apply
    grads = []
    for leaves, copied, added in (
        ((x, a, b), lambda x: x, lambda y: y),
        (cuts, f, g),
    ):
        x, a, b = leaves = [t.clone().requires_grad_() for t in leaves]
        y = added((copied(x.sin()) @ a).sin() @ b).sin()
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grads.append([grad, *torch.autograd.grad(grad.square().sum(), leaves)])
    of_x, of_its_penalty, of_a, of_b = grads[0]
    rights = of_x, of_its_penalty, of_a.chunk(n, 1)[rank], of_b.chunk(n)[rank]
    pairs = zip(rights, grads[1], strict=True)
    return [(torch.dist(right, g) / right.norm()).item() for right, g in pairs]


def test_a_gradient_of_a_gradient_is_one_process_s(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(penalty_errors)
    assert [len(errors) for errors in found] == [4, 4]
    assert max(map(max, found)) < 1e-13, found


class HeadsThatDiffer(nn.Module):
    """Causal attention with ALiBi's slopes and half as many heads of keys."""

    def __init__(self, way: str) -> None:
        """Take slopes and pairs of heads in some way."""
        super().__init__()
        self.way = way
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to the same shape."""
        q, k, v = (
            f(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if self.way == "keys are tiled":
            k, v = (t.repeat(1, q.shape[1] // k.shape[1], 1, 1) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        heads = q.shape[1] if self.way == "slopes of the heads here" else 4
        # Press et al. (arXiv 2108.12409): 2 ** (-8 i / heads), for heads 1, 2, ...
        slopes = 2 ** (-8 * torch.arange(1, heads + 1) / heads)
        if heads > q.shape[1]:
            slopes = slopes.chunk(dist.get_world_size())[dist.get_rank()]
        at = torch.arange(x.shape[1])
        far = at[:, None] - at
        bias = torch.where(far < 0, -torch.inf, -slopes[:, None, None] * far)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


def error_of_heads(way: str) -> float:
    """Cut such an attention over two ranks; return how far off its output is."""
    outputs, mesh = [], init_device_mesh("cpu", (2,))
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    for is_cut in (False, True):
        torch.manual_seed(0)
        attention = HeadsThatDiffer(way)
        if is_cut:
            plan: dict[str, Any] = {"out": RowwiseParallel()}
            plan |= {name: ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(attention, mesh, plan)
        outputs.append(attention(x))
    right, found = outputs
    return (torch.dist(found, right) / right.norm()).item()


@pytest.mark.parametrize(
    ("way", "is_right"),
    [
        ("slopes of all heads, cut", True),
        ("slopes of the heads here", False),
        ("keys are tiled", False),
    ],
)
def test_what_differs_by_head_is_cut_from_the_whole_models(
    worker_pool: WorkerPool, way: str, is_right: bool
) -> None:
    errors = worker_pool.run(error_of_heads, way)
    assert len(errors) == 2
    assert max(errors) < 1e-6 if is_right else min(errors) > 0.01, errors


def vocabulary_errors(in_pairs: bool = False) -> dict[str, float]:
    """Compare embedding and cross-entropy with PyTorch's, labels in every shard."""
    group = pair(in_pairs)
    n, rank, errors = dist.get_world_size(group), dist.get_rank(group), {}
    tokens = torch.randperm(64).view(4, 16).roll(dist.get_rank() // n, dims=0)
    torch.manual_seed(3)
    plain = nn.Embedding(64, 8).double()
    torch.manual_seed(3)
    ours = gpt.VocabularyParallelEmbedding(64, 8, group).double()
    grad = torch.randn(4, 16, 8).double()
    plain(tokens).backward(grad)
    ours(tokens).backward(grad)
    errors["embedding"] = (ours(tokens) - plain(tokens)).abs().max().item()
    shard = plain.weight.grad.chunk(n)[rank]  # type: ignore[union-attr]
    errors["its gradient"] = (ours.weight.grad - shard).abs().max().item()
    for scale in (1.0, 1e4):  # the exponential of 1e4 is infinite
        scale = scale * 1e4 ** (dist.get_rank() // n)
        logits = scale * torch.randn(64, 64).double()
        whole = logits.clone().requires_grad_()
        mine = logits.chunk(n, 1)[rank].clone().requires_grad_()
        right = F.cross_entropy(whole, tokens.flatten())
        loss = gpt.vocabulary_parallel_cross_entropy(mine, tokens.flatten(), group)
        (3 * right).backward()
        (3 * loss).backward()
        errors[f"loss {scale}"] = ((loss - right) / right).abs().item()
        shard = whole.grad.chunk(n, 1)[rank]  # type: ignore[union-attr]
        errors[f"gradient {scale}"] = (mine.grad - shard).abs().max().item()  # type: ignore
    # A logit that is masked out is nobody's term; a row of NaN is that token's alone.
    labels, masked = torch.arange(1, 64), torch.randn(63, 64).double()
    masked[:, 0] = -torch.inf
    right = F.cross_entropy(masked, labels)
    mine = masked.chunk(n, 1)[rank]
    loss = gpt.vocabulary_parallel_cross_entropy(mine, labels, group)
    errors["masked logits"] = (loss - right).abs().item()
    with torch.no_grad():
        ours.weight[0] = torch.nan
        starts = torch.arange(0, 64, 64 // n)
        errors["rows of NaN"] = ours(starts + 1).isnan().sum().item()
        assert ours(starts).isnan().all()
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_vocabulary_is_split_exactly(worker_pool: WorkerPool, world_size: int) -> None:
    results = worker_pool.run(vocabulary_errors, world_size=world_size)
    assert len(results) == world_size
    for errors in results:
        assert len(errors) == 8
        assert all(error < 1e-13 for error in errors.values()), errors


def single_head_errors() -> list[float]:
    """Let each rank have half of the queries and all of one head of keys and values.

    Return how far off the output is, and the sum of the ranks' gradients of its weight.
    """
    x, of_q, of_kv, grad = (
        torch.randn(shape, dtype=FLOAT64, generator=torch.Generator().manual_seed(i))
        for i, shape in enumerate([(2, 6, 8), (16, 8), (8, 8), (2, 4, 6, 4)])
    )
    n, rank, found = dist.get_world_size(), dist.get_rank(), []
    for heads in (slice(None), slice(rank * 4 // n, (rank + 1) * 4 // n)):
        weight = of_kv.clone().requires_grad_()
        q = (x @ of_q.T).unflatten(-1, (4, 4)).transpose(1, 2)[:, heads]
        k, v = (x @ weight.T).unflatten(-1, (2, 1, 4)).unbind(2)
        k, v = (t.transpose(1, 2).expand(-1, q.shape[1], -1, -1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(grad[:, heads])
        found.append((out.detach(), weight.grad))
    (right, right_grad), (mine, term) = found
    assert term is not None and right_grad is not None
    parts = right[:, rank * 4 // n : (rank + 1) * 4 // n]
    alone = torch.dist(term, right_grad).item()
    dist.all_reduce(term)
    return [
        torch.dist(mine, parts).item(),
        torch.dist(term, right_grad).item(),
        alone,
    ]


def test_a_single_key_head_may_be_on_all_ranks(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(single_head_errors)
    assert len(found) == 2
    for output, added_up, alone in found:
        assert max(output, added_up) < 1e-12 and alone > 0.1


def losses_with_an_ignored_label() -> tuple[float, float, float]:
    """Ignore a label; return PyTorch's loss, ours, and one in which it counts."""
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 7, -100, 4, 0, 2])
    mine = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    ours = gpt.vocabulary_parallel_cross_entropy(mine, labels)
    # As if its logit were the row's largest.
    counted = F.cross_entropy(logits, labels.where(labels >= 0, logits.argmax(1)))
    return F.cross_entropy(logits, labels).item(), ours.item(), counted.item()


def test_the_vocabulary_s_loss_ignores_no_label(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(losses_with_an_ignored_label)
    assert len(found) == 2
    for right, ours, counted in found:
        assert ours == pytest.approx(counted) and abs(ours - right) > 0.01


# --- The whole GPT. ----------


PAYS = load_chapter(f"{CHAPTER}/when_it_pays")
TYPE_TWO = "ranks; type --nproc-per-node=2"


def train_with_usual_options() -> None:
    """Begin chapter 07's training run as its command line without options does."""
    train.main(modules["ranks"].read_options(**train.OPTIONS))


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (by_hand.main, f"4 heads take 1, 2 or 4 {TYPE_TWO}"),
        (modules["sequence_parallel"].main, f"4 heads take 2 or 4 {TYPE_TWO}"),
        (modules["plan_in_steps"].main, f"4 heads take 2 or 4 {TYPE_TWO}"),
        (PAYS["bytes_and_memory"].main, f"4 heads take 2 or 4 {TYPE_TWO}"),
        (train_with_usual_options, "3 ranks cannot share 4 heads evenly; give --heads"),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    begin: Callable[[], None],
    said: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr("sys.argv", ["lesson.py"])
    with pytest.raises(SystemExit) as ended:
        begin()
    assert ended.value.code == 2 and not dist.is_initialized()
    errors = capsys.readouterr().err
    assert errors.startswith(f"lesson.py: {said}") and errors.count("\n") == 1


def test_the_file_to_copy_refuses_ranks_that_cannot_share_the_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    with pytest.raises(SystemExit) as ended:
        minimal.main()
    said = "4 heads: the number of ranks must divide them"
    assert ended.value.code == said and not dist.is_initialized()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gpt_by_hand_is_one_process_after_50_steps(
    worker_pool: WorkerPool, world_size: int
) -> None:
    outputs = worker_pool.run(run_lesson, CHAPTER, "by_hand", world_size=world_size)
    assert outputs[1:] == [""] * (world_size - 1)
    lines = outputs[0].splitlines()
    assert len(lines) == 5
    n, L, whole, for_loss = world_size, 2, 4 * 32 * 64 * 8, 3 * 4 * 32 * 8
    assert lines[1] == (
        f"all-reduced in a step | {4 * L + 2} x {whole:,} bytes, and {for_loss:,} for "
        "the loss"
    )
    sent = ((4 * L + 2) * whole + for_loss) * 2 * (n - 1) // n
    assert lines[2] == f"sent by each rank in a step | {sent:,} bytes"
    before, after = map(float, re.findall(r"\d\.\d+", lines[3]))
    # The bytes that it trains on are those of no file here: an edit moves no loss.
    assert by_hand.SOURCE.is_file() and not by_hand.SOURCE.is_relative_to(ROOT)
    assert (before, after) == (5.649, 2.965)  # as the page has it
    (apart,) = re.findall(r"^check: losses, weights, gradients within (\S+)$", lines[4])
    assert float(apart) < 1e-9


def hand_ending(fault: str) -> tuple[Any, str]:
    """Run by_hand.py with one thing wrong, for fewer steps."""
    forgotten: Any = staticmethod(lambda ctx, grad: (grad, None))
    twice: Any = staticmethod(lambda ctx, grad: (layers.all_reduced(grad), None))
    index = gpt.local_index

    def next_rank(tokens: Tensor, rows: int, group: Any) -> tuple[Tensor, Tensor]:
        return index((tokens + rows) % 256, rows, group)

    faults = {
        "f sends nothing": (layers.CopyToRanks, "backward", forgotten),
        "g sends twice": (layers.SumOverRanks, "backward", twice),
        "vocabulary": (gpt, "local_index", next_rank),
        "sum": (layers, "all_reduced", lambda x, *_: 2 * x.detach()),
    }
    return ending("by_hand", [faults[fault], (by_hand, "STEPS", 3)])


def hand_off_by_little(part: str) -> Any:
    """Run a step of by_hand.py, a value off by 1e-8 or a message more; how ends it?"""
    real = by_hand.train_by_adam

    def train_by_adam(one: Any, device: torch.device) -> Tensor:
        losses, norm = real(one, device), one.final_norm.weight
        if type(one) is gpt.ParallelGPT:
            off = {"weight": norm, "gradient": norm.grad, "loss": losses}.get(part)
            if off is None:
                one.register_forward_hook(lambda *_: dist.all_reduce(torch.ones(1)))
            else:
                off.detach()[0] += 1e-8
        return losses

    faults = [(by_hand, "train_by_adam", train_by_adam), (by_hand, "STEPS", 1)]
    return ending("by_hand", faults)[0]


def ends_off_by_little() -> list[Any]:
    """Get the loss, a weight, a gradient and the bytes wrong, one at a time."""
    parts = ("loss", "weight", "gradient", "bytes")
    return [hand_off_by_little(part) for part in parts]


def test_losses_weights_and_gradients_are_compared_to_eight_digits(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(ends_off_by_little) == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    "fault",
    [
        *("f sends nothing", "vocabulary"),
        pytest.param("g sends twice", marks=pytest.mark.slow),
        pytest.param("sum", marks=pytest.mark.slow),
    ],
)
def test_gpt_gone_wrong_is_noticed(worker_pool: WorkerPool, fault: str) -> None:
    assert_noticed(worker_pool.run(hand_ending, fault), "losses, weights, gradients")


def seeded_alike() -> bool:
    """Compare the shards that a parallel GPT draws with what GPT draws."""
    config = model.GPTConfig(block_size=16, width=16)
    torch.manual_seed(5)
    alone = model.GPT(config)
    torch.manual_seed(5)
    ours = dict(gpt.ParallelGPT(config).named_parameters())
    assert list(ours) == [name for name, _ in alone.named_parameters()]
    shards = {n: gpt.shard_like(alone.get_parameter(n), ours[n]) for n in ours}
    assert len(shards) == 24
    assert sum(shards[n].shape != alone.get_parameter(n).shape for n in ours) == 13
    return all(torch.equal(shards[n], ours[n]) for n in ours)


def test_parallel_gpt_draws_the_weights_of_gpt(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(seeded_alike, world_size=4) == [True] * 4


# --- The same by parallelize_module. ----------


T, D, L, B = 16, 16, 2, 4


def gpt_of(dtype: torch.dtype = FLOAT64, **sizes: Any) -> Any:
    """Build a small GPT, always with the same weights."""
    torch.manual_seed(7)
    config = model.GPTConfig(block_size=T, width=D, layers=L, **sizes)
    return model.GPT(config).to(dtype)


def batches_of(steps: int) -> list[Tensor]:
    """Draw inputs and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    return list(torch.randint(256, (steps, 2, B, T), generator=generator))


def take_steps(one: Any, make: Callable = torch.optim.AdamW, **settings: Any) -> None:
    """Clip and step as train.py does."""
    optimizer = make(one.parameters(), 0.01, **settings)
    for batch in batches_of(3):
        optimizer.zero_grad()
        one(*batch).backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step()


class Planned(NamedTuple):
    """What a plan did: largest errors, collectives of (B, T, D), others, sizes."""

    by_hand: float
    gradient: float
    weights: float
    calls: Counter
    others: list[tuple[str, int]]
    numbers: int


def by_plan() -> Planned:
    """Compare minimal.PLAN with the layers by hand, and with one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, ours = gpt_of(), minimal.split_over_ranks(gpt_of(), mesh, minimal.PLAN)
    torch.manual_seed(7)
    hand = gpt.ParallelGPT(gpt_of().config)
    for name, p in hand.double().named_parameters():
        p.detach().copy_(gpt.shard_like(alone.get_parameter(name), p))
    (batch,) = batches_of(1)
    with sent_and_kept.Collectives() as calls:
        loss = ours(*batch)
        loss.backward()
    found = [(alone(*batch), loss), (hand(*batch), loss)]
    for one, _ in found:
        one.backward()
    gradients = [
        (p.grad.full_tensor(), alone.get_parameter(name).grad)
        for name, p in ours.named_parameters()
    ]
    shards = [
        (gpt.shard_like(p.grad.full_tensor(), q), q.grad)
        for (_, p), q in zip(ours.named_parameters(), hand.parameters(), strict=True)
    ]
    take_steps(alone, fused=True)
    take_steps(ours, fused=True)  # as train.py does
    weights = [
        (p.full_tensor(), alone.get_parameter(name))
        for name, p in ours.named_parameters()
    ]
    assert len(gradients) == len(shards) == len(weights) == 24
    whole = Counter(name for name, nbytes in calls.noted if nbytes == B * T * D * 8)
    others = [(n, b) for n, b in calls.noted if b != B * T * D * 8 and n[0] != "_"]

    def apart(pairs: list[Any]) -> float:
        return max((a - b).abs().max().item() for a, b in pairs)

    numbers = sum(p.to_local().numel() for p in ours.parameters())
    return Planned(
        apart([*found, *shards]),
        apart(gradients),
        apart(weights),
        whole,
        others,
        numbers,
    )


@pytest.mark.parametrize("world_size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_plan_is_the_layers_by_hand_and_one_process(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(by_plan, world_size=world_size)
    assert len(results) == world_size
    matrices, norms = 2 * 12 * D * D + 256 * D + T * D, (2 * L + 1) * 2 * D
    for found in results:
        assert max(found.by_hand, found.gradient) < 1e-12
        assert found.weights < 1e-9
        assert found.calls["all_reduce"] == 4 * L + 2
        # Unlike the layers by hand it sums positions, (T, D), and gathers the logits.
        logits = B * T * 256 * 8 // world_size
        positions = "all_reduce", T * D * 8
        assert found.others == [positions, ("all_gather_into_tensor", logits)]
        assert found.numbers == matrices // world_size + norms


STEPS = """\
one process  | 443,648 parameters, 2 blocks
+ MLP        | {} on a rank | 2 all-reduces in forward, 2 in backward
+ attention  | {} on a rank | 4 all-reduces in forward, 8 in backward
+ vocabulary | {} on a rank | 5 all-reduces in forward, 9 in backward
+ norms      | {} on a rank | 5 all-reduces in forward, 5 in backward
check: after each of 4 parts one process's gradient, and counts by the formula
"""


@pytest.mark.parametrize(
    ("world_size", "parameters"),
    [
        # 2 x 8 x 128^2 are cut; 2 x 4 x 128^2 more; (256 + 128) x 128 more.
        pytest.param(
            2,
            ["312,576", "247,040", "222,464", "222,464"],
            marks=pytest.mark.slow,  # as on the page
        ),
        (4, ["247,040", "148,736", "111,872", "111,872"]),
    ],
)
def test_parts_of_the_plan_cut_more_and_norms_save_all_reduces(
    worker_pool: WorkerPool, world_size: int, parameters: list[str]
) -> None:
    outputs = worker_pool.run(
        run_lesson, CHAPTER, "plan_in_steps", world_size=world_size
    )
    assert outputs == [STEPS.format(*parameters)] + [""] * (world_size - 1)


def parts_ending(fault: str) -> tuple[Any, str]:
    """Run plan_in_steps.py with one thing wrong."""
    script = modules["plan_in_steps"]

    split = script.split_over_ranks

    def split_and_spoil(*arguments: Any) -> None:
        split(*arguments).blocks[1].query.weight.data.mul_(1 + 1e-5)

    real, counted = script.all_reduces, itertools.count()
    one_more = {"first forward": 0, "last backward": 7}.get(fault)
    faults: dict[str, list[tuple[Any, str, Any]]] = {
        "gradient": [(script, "split_over_ranks", split_and_spoil)],
        "norms stay plain": [(script, "split_over_ranks", lambda *_: None)],
        "parameters": [(script, "here", script.whole)],
    }
    counts = (script, "all_reduces", lambda c: real(c) + (next(counted) == one_more))
    small: list[tuple[Any, str, Any]] = [
        (script, "CONFIG", script.GPTConfig(16, 16)),
        (script, "T", 16),
        (script, "D", 16),
    ]
    return ending("plan_in_steps", [*faults.get(fault, [counts]), *small])


@pytest.mark.parametrize(
    "fault",
    [
        *("gradient", "last backward"),
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("norms stay plain", "parameters", "first forward")
        ),
    ],
)
def test_wrong_part_of_the_plan_is_noticed(worker_pool: WorkerPool, fault: str) -> None:
    claim = "after each of 4 parts one process's gradient, and counts by the formula"
    assert_noticed(worker_pool.run(parts_ending, fault), claim)


class Parts(NamedTuple):
    """What the first parts of a plan did: error, all-reduces each way, sizes."""

    gradient: float
    calls: list[int]
    plain: int
    numbers: int


def by_first_parts() -> tuple[list[Parts], str]:
    """Cut untied models by one, two and three parts; then by all of them alone."""
    mesh, (batch,) = init_device_mesh("cpu", (dist.get_world_size(),)), batches_of(1)
    alone, found, plan = gpt_of(tied=False), [], {}
    alone(*batch).backward()
    for part in (minimal.MLP, minimal.ATTENTION, minimal.VOCABULARY):
        plan |= part
        ours = gpt_of(tied=False)
        parallelize_module(ours, mesh, plan)
        with sent_and_kept.Collectives() as forward:
            loss = ours(*batch)
        with sent_and_kept.Collectives() as backward:
            loss.backward()
        calls = [
            sum(call == ("all_reduce", B * T * D * 8) for call in way.noted)
            for way in (forward, backward)
        ]
        apart, plain, numbers = [], 0, 0
        for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
            is_plain = not hasattr(p, "placements")
            grad = p.grad if is_plain else p.grad.full_tensor()
            apart.append((grad - q.grad).abs().max().item())
            numbers += (p if is_plain else p.to_local()).numel()
            plain += is_plain
        assert len(apart) == 25
        found.append(Parts(max(apart), calls, plain, numbers))
    ours = gpt_of(tied=False)
    parallelize_module(ours, mesh, plan | minimal.NORMS)
    with pytest.raises(RuntimeError) as refused:
        ours(*batch)
    return found, str(refused.value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_first_parts_of_the_plan_are_one_process(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(by_first_parts, world_size=world_size)
    assert len(results) == world_size
    norms, n = (2 * L + 1) * 2, world_size
    attention, mlp, ends = L * 4 * D * D, L * 8 * D * D, (2 * 256 + T) * D
    for found, said in results:
        assert max(part.gradient for part in found) < 1e-12
        # Attention adds one in forward, and in backward one for each that reads x.
        calls = [[L, L], [2 * L, 4 * L], [2 * L + 1, 4 * L + 1]]
        assert [part.calls for part in found] == calls
        assert [part.plain - norms for part in found] == [4 * L + 3, 3, 0]
        assert [part.numbers - norms * D for part in found] == [
            attention + mlp // n + ends,
            (attention + mlp) // n + ends,
            (attention + mlp + ends) // n,
        ]
        # Norms get DTensors, so their weights must be some too.
        assert said.startswith("aten.native_layer_norm.default got mixed torch.Tensor")


def without_norms_in_the_plan() -> tuple[int, bool, list[str]]:
    """Leave norms and positions out of the plan, as the tutorials do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = gpt_of()
    plan = {
        name: style
        for name, style in minimal.PLAN.items()
        if "norm" not in name and "position" not in name
    }
    minimal.parallelize_module(ours, mesh, plan)
    is_tied = ours.head.weight is ours.token_embedding.weight
    (batch,) = batches_of(1)
    with sent_and_kept.Collectives() as calls:
        ours(*batch).backward()
    reduced = [n for n, b in calls.noted if (n, b) == ("all_reduce", B * T * D * 8)]
    said = []
    parameters = list(ours.parameters())
    for call in (
        lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        torch.optim.AdamW(parameters, fused=True).step,
        torch.optim.AdamW(parameters, foreach=True).step,
    ):
        with pytest.raises(RuntimeError) as refused:
            call()
        said.append(str(refused.value))
    minimal.distribute_module(ours, mesh)
    with pytest.raises(RuntimeError) as refused:
        ours(*batch)
    return len(reduced), is_tied, [*said, str(refused.value)]


def test_plan_without_norms_all_reduces_more_and_cannot_be_clipped(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(without_norms_in_the_plan)
    assert len(results) == 2
    for reduced, _, said in results:
        # Query, key and value all-reduce the gradient of their input one by one.
        assert reduced == 6 * L + 2
        # Then `distribute_module` has been called, and the forward pass fails.
        assert len(said) == 4
        assert all("got mixed torch.Tensor and DTensor" in text for text in said)
        assert said[-1].startswith("aten.embedding")  # of the positions


# With a residual connection, where the plan takes a whole input for a part.
OTHER_LENGTH = "The size of tensor a (4) must match the size of tensor b (8)"
OTHER_LABELS = "Expected input batch_size (8) to match target batch_size (4)."


def norms_of_two_meshes(way: str) -> tuple[str, float, float, float]:
    """Split by columns and rows, then shard; return what clipping says, and two norms.

    The first norm adds up the squares of all meshes, the second is one process's. Last
    comes how far gradients that are clipped by the first are from the process's own.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    layers = [nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    ours: Any = nn.Sequential(*layers).double()
    alone, x = copy.deepcopy(ours), torch.randn(4, 8).double()
    plan: Any = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    mine = x
    if way != "no norms in the plan":
        plan["0"] = SequenceParallel(sequence_dim=0)
        plan["1"] = ColwiseParallel(input_layouts=Shard(0))
    if way == "sequence parallelism":
        mine = x.chunk(2)[grid["tensor"].get_local_rank()]
    parallelize_module(ours, grid["tensor"], plan)
    fully_shard(ours, mesh=grid["data"])
    if "whole input" in way:
        with pytest.raises(RuntimeError, match=re.escape(OTHER_LENGTH)):
            _ = mine + ours(mine)
        with pytest.raises(ValueError, match=re.escape(OTHER_LABELS)):
            nn.functional.cross_entropy(ours(mine), torch.zeros(4).long())
    for model, tokens in ((ours, mine), (alone, x)):
        losses = 16 * model(tokens).square()
        (losses.mean() if "mean" in way else losses.sum()).backward()
    by_mesh: dict[Any, list[Any]] = {}
    for p in ours.parameters():
        by_mesh.setdefault(p.device_mesh, []).append(p)
    assert len(by_mesh) == 1 + (way == "no norms in the plan")
    norms: Any = [
        nn.utils.get_total_norm([p.grad for p in of_mesh])
        for of_mesh in by_mesh.values()
    ]
    norm = math.hypot(*(one.full_tensor().item() for one in norms))
    right = nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
    assert right > 2
    try:
        of_all: Any = nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        said = of_all.full_tensor().item()
    except RuntimeError as error:
        said = str(error)
        for of_mesh in by_mesh.values():
            total = torch.tensor(norm, dtype=torch.float64)
            nn.utils.clip_grads_with_norm_(of_mesh, 1.0, total)
    pairs = list(zip(ours.parameters(), alone.parameters(), strict=True))
    assert len(pairs) == 6
    errors = [(p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs]
    return str(said), norm, right, max(errors)


def test_under_fsdp_norms_in_the_plan_are_clipped_with_all_others(
    worker_pool: WorkerPool,
) -> None:
    ways = "no norms in the plan", "sequence parallelism", "whole input"
    without, within, twice, mean = (
        worker_pool.run(norms_of_two_meshes, way, world_size=4)
        for way in (*ways, "mean of a whole input")
    )
    assert [len(one) for one in (without, within, twice, mean)] == [4] * 4
    for said, norm, right, error in without:
        assert "aten.stack.default must have the same mesh" in said
        assert norm == pytest.approx(right, rel=1e-12) and error < 1e-12
    for said, norm, right, error in within:
        assert float(said) == pytest.approx(right, rel=1e-12)
        assert norm == pytest.approx(right, rel=1e-12) and error < 1e-12
    # SequenceParallel takes a whole input for a part: all of it is counted twice, by a
    # sum. Labels are too few, and a mean is right.
    for said, _, right, _ in twice:
        assert float(said) == pytest.approx(2 * right, rel=1e-12)
    for said, _, right, error in mean:
        assert float(said) == pytest.approx(right, rel=1e-12) and error < 1e-12


def test_parallelize_module_unties_weights(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(without_norms_in_the_plan)
    assert [is_tied for _, is_tied, _ in results] == [False, False]


def is_one_weight(way: str) -> tuple[bool, list[str]]:
    """Split two layers of one weight; tell if it is one still, and how it lies."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first = nn.Linear(4, 4, bias=False)
    second = first if way == "one module" else nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model: Any = nn.ModuleDict({"first": first, "second": second})
    # Of a module with two names the second style is ignored, without a word.
    parallelize_module(
        model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    weights = model["first"].weight, model["second"].weight
    return weights[0] is weights[1], [str(one.placements) for one in weights]


def test_a_module_with_two_names_stays_one(worker_pool: WorkerPool) -> None:
    rows, columns = "(Shard(dim=0),)", "(Shard(dim=1),)"
    assert worker_pool.run(is_one_weight, "two") == [(False, [rows, columns])] * 2
    same = worker_pool.run(is_one_weight, "one module")
    assert same == [(True, [rows, rows])] * 2


def layout_of_embedding_gradient() -> tuple[Any, ...]:
    """Return the shapes of an untied embedding's shard and of its gradient's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = minimal.split_over_ranks(gpt_of(tied=False), mesh, minimal.PLAN)
    ours(*batches_of(1)[0]).backward()
    weight = ours.token_embedding.weight
    head = ours.head.weight.grad.to_local()
    shapes = weight.to_local(), weight.grad.to_local(), head
    return tuple(tuple(tensor.shape) for tensor in shapes)


def test_embedding_split_by_rows_has_a_whole_gradient(worker_pool: WorkerPool) -> None:
    shapes = worker_pool.run(layout_of_embedding_gradient)
    assert shapes == [((128, D), (256, D), (128, D))] * 2


def dtypes_under_autocast() -> list[torch.dtype]:
    """Return what a row-parallel layer with a bias makes, and what `nn.Linear` does."""
    layers = [modules["parallel_layers"].RowParallelLinear(4, 4), nn.Linear(2, 4)]
    with torch.autocast("cpu", torch.bfloat16):
        return [layer(torch.ones(1, 2)).dtype for layer in layers]


def test_a_bias_is_added_in_the_dtype_of_the_sum(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(dtypes_under_autocast) == [[torch.bfloat16] * 2] * 2


# --- train.py as a whole. ----------


def off_in_micro_batches() -> tuple[float, float]:
    """Add up the gradient of three micro-batches; return what is off, and the loss's.

    One process takes the mean of all samples at once.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, ours = gpt_of(), minimal.split_over_ranks(gpt_of(), mesh, minimal.PLAN)
    micro_batches = [(0, *tokens) for tokens in batches_of(3)]
    loss = train.add_gradients(ours, ours, micro_batches, 3 * B, amp=False)
    inputs, labels = (
        torch.cat(list(part)) for part in zip(*batches_of(3), strict=True)
    )
    (mean := alone(inputs, labels)).backward()
    grads = [
        (p.grad.full_tensor() - q.grad).abs().max().item()
        for p, q in zip(ours.parameters(), alone.parameters(), strict=True)
    ]
    assert len(grads) == 24
    return max(grads), (loss - 3 * B * mean).abs().item()


def test_micro_batches_add_up_to_a_step(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(off_in_micro_batches)
    assert len(found) == 2
    for gradient, loss in found:
        assert gradient < 1e-12 and loss < 1e-4  # it is added up in float32


class Run(NamedTuple):
    """What a rank of train.py printed, and how it ended."""

    output: str
    errors: str
    status: Any


def run_train(*words: str) -> Run:
    """Be a rank of train.py in the pool's group, from the command line to the end."""
    output, errors, status = io.StringIO(), io.StringIO(), 0
    losses, evaluate = list[float](), train.data.evaluate

    def evaluated(*arguments: Any, **settings: Any) -> float:
        losses.append(evaluate(*arguments, **settings))
        return losses[-1]

    with (
        in_the_pool(train.ranks, *words),
        mock.patch.object(train.data, "evaluate", evaluated),
        mock.patch.object(train.GPT, "generate", lambda *_, **__: "..."),  # is slow
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            train.main(train.ranks.read_options(**train.OPTIONS))
        except SystemExit as end:
            status = end.code
    if dist.get_rank() == 0:
        before, after = (f"{loss:.2f}" for loss in losses)
        due = f"validation: {before} nats per byte before, {after} after"
        assert due in output.getvalue() and before != after
    return Run(output.getvalue(), errors.getvalue(), status)


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_train_sees_each_sample_once_on_all_ranks(
    worker_pool: WorkerPool, text: Path, world_size: int
) -> None:
    words = [
        *TINY,
        "--batch-size=8",
        "--max-epochs=2",
        f"--text={text}",
        "--dropout=0.1",
    ]
    runs = worker_pool.run(run_train, *words, world_size=world_size)
    assert [run.status for run in runs] == [0] * world_size, runs[0].errors
    assert [run.output for run in runs[1:]] == [""] * (world_size - 1)
    lines = runs[0].output.splitlines()
    for epoch in range(2):
        product = "global batch size x steps = 8 x 6 = 48 different samples"
        assert f"epoch {epoch} | {product}" in lines
    (error,) = re.findall(
        rf"^check: {world_size} rank\(s\) gather the same bits, "
        r"and a gradient within (\S+) of",
        lines[-1],
    )
    assert float(error) < 1e-5


def with_switches(*words: str) -> tuple[Run, set[bool], int, list[float]]:
    """Train with --amp and --compile: what autocast, the compiler and MFU are given.

    `torch.compile` is replaced, since it takes a minute.
    """
    casts, calls, rates, autocast = set[bool](), [], list[float](), torch.autocast

    def cast(kind: str, dtype: torch.dtype, enabled: bool) -> Any:
        casts.add(enabled)
        return autocast(kind, dtype, enabled=enabled)

    def compiled(function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            calls.extend([0] * isinstance(function, nn.Module))
            return function(*arguments)

        return call

    def utilisation(_: Any, rate: float, __: Any) -> str:
        rates.append(rate)
        return ""

    with (
        mock.patch.object(torch, "autocast", cast),
        mock.patch.object(torch, "compile", compiled),
        mock.patch.object(train.GPT, "utilisation", utilisation),
    ):
        run = run_train(*words, "--amp", "--compile")
    return run, casts, len(calls), rates


def test_train_passes_its_switches_on(worker_pool: WorkerPool, text: Path) -> None:
    words = [*TINY, "--batch-size=8", "--max-epochs=1", f"--text={text}"]
    ends = worker_pool.run(with_switches, *words)
    assert len(ends) == 2
    for run, casts, calls, rates in ends:
        assert (run.status, casts, calls) == (0, {True}, 6), run.errors
        assert len(rates) == 2
    said = re.findall(r"(\S+) tokens/s", ends[0][0].output)
    # A rank computes half of what both train on.
    assert [float(n.replace(",", "")) for n in said] == pytest.approx(
        [2 * rate for rate in ends[0][3]], abs=1
    )


def run_until(chapter: str, stop: int, *words: str) -> None:
    """Be a rank of a chapter's train.py that saves at step `stop` and leaves."""
    script = load_chapter(chapter)["train"]

    def save_when_due(run: Any) -> bool:
        if run.step == stop:
            run.save()
        return run.step == stop

    torch.set_default_dtype(FLOAT64)
    state = script.checkpoint.TrainingState
    with (
        in_the_pool(script.ranks, *words),
        mock.patch.object(state, "save_when_due", save_when_due),
        mock.patch.object(state, "note_signals"),
        mock.patch.object(script.GPT, "generate", lambda *_, **__: "..."),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        script.main(script.ranks.read_options(**script.OPTIONS))


def test_checkpoints_travel_between_chapters(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    ddp, samples = "03_ddp_torchrun", [*TINY, "--max-epochs=3", f"--text={text}"]
    alone, mixed = (f"--checkpoint={tmp_path / n}.pt" for n in ("alone", "mixed"))
    # The same 8 samples in each of 18 steps: DDP has 4 on each of its two ranks.
    run = worker_pool.run
    run(run_until, ddp, 18, *samples, "--batch-size=8", alone, world_size=1)
    run(run_until, ddp, 6, *samples, "--batch-size=4", mixed)
    parts = ["--batch-size=4", "--grad-accum-steps=2"]
    run(run_until, CHAPTER, 12, *samples, *parts, mixed, world_size=4)
    run(run_until, ddp, 18, *samples, "--batch-size=4", mixed)
    right, found = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)
        for name in ("alone", "mixed")
    )
    assert found["training"]["step"] == right["training"]["step"] == 18
    assert list(found["model"]) == list(right["model"]) and len(right["model"]) == 15
    for name, tensor in right["model"].items():
        assert (found["model"][name] - tensor).abs().max() < 1e-9, name


def train_ending(fault: str, words: list[str]) -> Run:
    """Run train.py with gradients summed once too often, or with a seed by rank."""
    seed, rank = torch.manual_seed, dist.get_rank()
    wrong: tuple[Any, str, Any] = {
        # On rank 1 alone; all are told.
        "sum": (train.data, "whole", lambda tensor: (1 + rank) * tensor.full_tensor()),
        "dropout": (torch, "manual_seed", lambda number: seed(number + rank)),
    }[fault]
    error = train.data.gradient_error
    if fault == "dropout":  # the bits alone must tell
        error = mock.Mock(return_value=0.0)
    with (
        mock.patch.object(train.ranks, "leave"),
        mock.patch.object(*wrong),
        mock.patch.object(train.data, "gradient_error", error),
    ):
        return run_train(*words)


@pytest.mark.parametrize(
    "fault", ["dropout", pytest.param("sum", marks=pytest.mark.slow)]
)
def test_train_gone_wrong_is_noticed(
    worker_pool: WorkerPool, text: Path, fault: str
) -> None:
    words = [
        *TINY,
        "--batch-size=8",
        "--max-steps=2",
        f"--text={text}",
        "--dropout=0.1",
    ]
    runs = worker_pool.run(train_ending, fault, words)
    assert [run.status for run in runs] == [1, 1]
    assert "check failed on ranks [0, 1], not so: 2 rank(s) gather" in runs[0].errors


# --- Sequence parallelism. ----------


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_sequence_parallel_sends_as_much_and_keeps_less(
    worker_pool: WorkerPool, world_size: int
) -> None:
    outputs = worker_pool.run(
        run_lesson, CHAPTER, "sequence_parallel", world_size=world_size
    )
    assert outputs[1:] == [""] * (world_size - 1)
    *lines, last = outputs[0].splitlines()
    claim = "each of the three gives one process's gradient; memory by the formula"
    assert last == f"check: {claim}"
    found = [
        re.fullmatch(r"(.{10}) \| sends (\S+) bytes \| keeps (\S+) x \(B, T, D\)", line)
        for line in lines
    ]
    assert len(found) == 3 and all(found)
    names, sent, kept = zip(*(one.groups() for one in found if one), strict=True)
    assert [name.strip() for name in names] == ["tensor", "+ sequence", "+ loss"]
    assert sent[0] == sent[1] and kept[0] > kept[1] > kept[2]
    n, whole = world_size, 4 * 64 * 64 * 8
    logits, positions = 4 * 64 * 256 * 8, 64 * 64 * 8
    ring = ((4 * 2 + 2) * whole + positions) * 2 * (n - 1) // n
    assert sent[0] == f"{ring + logits * (n - 1) // n:,}"
    for_loss = 3 * 4 * 64 * 8
    assert sent[2] == f"{ring + for_loss * 2 * (n - 1) // n:,}"


def sequence_ending(fault: str) -> tuple[Any, str]:
    """Run sequence_parallel.py with one thing wrong."""
    script = modules["sequence_parallel"]
    wrong = {
        "gathered thrice": {
            "+ sequence": ([script.SEQUENCE_PLAN], contextlib.nullcontext)
        },
        "keeps more": {},
        "gradient": {},
        "sends more": {},
    }
    more = 1.05 if fault == "keeps more" else 1
    split, kept = script.split_over_ranks, script.kept_for_backward
    models: list[Any] = []

    def split_and_spoil(*arguments: Any) -> Any:
        models.append(ours := split(*arguments))
        ours.blocks[1].query.weight.data.mul_(1 + 1e-5 * (fault == "gradient"))
        if fault == "sends more" and len(models) == 3:
            ours.register_forward_hook(lambda *_: dist.all_reduce(torch.ones(10**6)))
        return ours

    faults = [
        (script, "WAYS", script.WAYS | wrong[fault]),
        (script, "split_over_ranks", split_and_spoil),
        (script, "kept_for_backward", lambda *x: round(kept(*x) * more)),
    ]
    return ending("sequence_parallel", faults)


@pytest.mark.parametrize(
    "fault",
    [
        *("gathered thrice", "gradient"),
        pytest.param("keeps more", marks=pytest.mark.slow),
        pytest.param("sends more", marks=pytest.mark.slow),
    ],
)
def test_sequence_parallel_gone_wrong_is_noticed(
    worker_pool: WorkerPool, fault: str
) -> None:
    ends = worker_pool.run(sequence_ending, fault)
    assert_noticed(ends, "each of the three gives one process's gradient")


def steps_by_sequence() -> list[float]:
    """Train with norms whose gradients are partial; return the largest errors."""
    script, errors = modules["sequence_parallel"], []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plans, _ = script.WAYS["+ sequence"]
    for make, settings in (
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {}),
    ):
        alone, ours = gpt_of(), minimal.split_over_ranks(gpt_of(), mesh, *plans)
        for one in (alone, ours):
            take_steps(one, make, **settings)
        norm = ours.blocks[0].mlp_norm.weight
        assert (
            norm.grad.placements[0].is_partial() and norm.placements[0].is_replicate()
        )
        apart = [
            (p.full_tensor() - q).abs().max().item()
            for p, q in zip(ours.parameters(), alone.parameters(), strict=True)
        ]
        assert len(apart) == 24
        errors.append(max(apart))
    return errors


def test_optimizers_add_up_the_norms_partial_gradients(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(steps_by_sequence)
    assert len(results) == 2
    for errors in results:
        assert len(errors) == 3 and max(errors) < 1e-9


def trained_when_split() -> list[list[str]]:
    """Freeze all but the head; name what trains, split by the lesson or plans alone."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    plans = modules["sequence_parallel"].WAYS["+ sequence"][0]
    for split in (
        minimal.split_over_ranks,
        lambda model, mesh, *plans: [parallelize_module(model, mesh, p) for p in plans],
    ):
        model = gpt_of(tied=False).requires_grad_(False)
        model.head.requires_grad_(True)
        split(model, mesh, *plans)
        found.append([n for n, p in model.named_parameters() if p.requires_grad])
    return found


def test_what_is_frozen_stays_frozen_and_a_plan_alone_trains_norms(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(trained_when_split)
    assert len(by_rank) == 2
    for ours, plan_alone in by_rank:
        assert ours == ["head.weight"]
        norms = {name for name in plan_alone if "norm" in name}
        assert len(norms) > 5 and norms == set(plan_alone) - set(ours)


def steps_with_clipping(is_right: bool) -> list[float]:
    """Clip a split MLP and a whole norm, two parameters frozen; compare three steps."""
    layers = modules["parallel_layers"]
    n, inputs = dist.get_world_size(), torch.linspace(-1, 1, 48).view(4, 12)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12))
    torch.manual_seed(0)
    ours = nn.Sequential(
        nn.LayerNorm(12),
        columns := layers.ColumnParallelLinear(12, 24),
        rows := layers.RowParallelLinear(24, 12),
    )
    sharded = [columns.weight, columns.bias, rows.weight]
    whole = [*ours[0].parameters(), rows.bias]
    assert len(sharded) + len(whole) == len(list(ours.parameters())) == 6
    for model in (alone, ours):
        for name in ("0.bias", "1.bias"):  # one is whole, one is sharded
            model.get_parameter(name).requires_grad_(False)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            sgd.zero_grad()
            model(inputs).square().mean().backward()
            if is_right and model is ours:
                # As `parameters()` gives them: once.
                layers.clip_sharded(iter(sharded), iter(whole), 0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            sgd.step()
    cut = {"1.weight": 0, "1.bias": 0, "2.weight": 1}
    theirs = dict(alone.named_parameters())
    apart = []
    for name, p in ours.named_parameters():
        q = theirs[name]
        q = q.chunk(n, cut[name])[dist.get_rank()] if name in cut else q
        apart.append((p - q).abs().max().item())
    return apart


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_right", [True, False])
def test_shards_are_clipped_by_the_norm_of_all(
    worker_pool: WorkerPool, ranks: int, is_right: bool
) -> None:
    by_rank = worker_pool.run(steps_with_clipping, is_right, world_size=ranks)
    assert [len(apart) for apart in by_rank] == [6] * ranks
    most = max(max(apart) for apart in by_rank)
    assert most < 1e-6 if is_right else most > 1e-3


def clipped_in(dtype: torch.dtype, value: float, count: int) -> list[Any]:
    """Clip `count` shards and as many whole parameters; return norm and a gradient."""
    lists = [
        [nn.Parameter(torch.zeros(16, dtype=dtype)) for _ in range(count)] for _ in "sw"
    ]
    for p in (*lists[0], *lists[1]):
        p.grad = torch.full_like(p, value)
    norm = modules["parallel_layers"].clip_sharded(*lists, 1.0)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert lists[0][-1].grad is not None and lists[0][-1].grad.dtype == dtype
    return [norm.item(), lists[0][-1].grad.double().tolist()]


@pytest.mark.parametrize(
    ("dtype", "value", "count", "error"),
    [
        # Added up one by one in bfloat16, 400 squares of 16 make 4096.
        (torch.bfloat16, 1.0, 400, 2**-8),
        # In float16 the square of 300 is infinite.
        (torch.float16, 300.0, 1, 2**-11),
        (torch.float32, 300.0, 2, 1e-6),
        (torch.float64, 300.0, 2, 1e-8),
    ],
    ids=str,
)
def test_gradients_in_half_precision_are_clipped_by_their_norm(
    worker_pool: WorkerPool, dtype: torch.dtype, value: float, count: int, error: float
) -> None:
    by_rank = worker_pool.run(clipped_in, dtype, value, count)
    assert len(by_rank) == 2
    due = value * (16 * count * (len(by_rank) + 1)) ** 0.5
    for norm, gradient in by_rank:
        assert norm == pytest.approx(due, rel=min(error, 1e-6))
        assert gradient == pytest.approx([value / due] * 16, rel=error)


def loss_of_dtensors(layout: Any, covers: str) -> str | float:
    """Compute a loss of logits that are DTensors; return its error, or how far off."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))
    alone = copy.deepcopy(model)
    style = ColwiseParallel(output_layouts=layout, use_local_output=False)
    parallelize_module(model, mesh, {"1": style})
    x, labels = torch.randn(8, 4), torch.arange(8) % 6
    with contextlib.ExitStack() as stack:
        if covers:
            stack.enter_context(loss_parallel())
        try:
            loss = F.cross_entropy(model(x), labels)
            if covers == "loss":
                stack.close()
            loss.backward()
        except (RuntimeError, ValueError) as error:
            return str(error).partition(":")[0]
    F.cross_entropy(alone(x), labels).backward()
    gradients: list[Any] = [m[0].weight.grad for m in (model, alone)]
    return torch.dist(*gradients).item()


def test_a_loss_of_dtensors_needs_loss_parallel_around_backward_too(
    worker_pool: WorkerPool,
) -> None:
    cases = [
        ((Shard(-1), ""), "aten.nll_loss_forward.default got mixed"),
        ((Shard(-1), "loss"), "aten.nll_loss_backward.default got mixed"),
        ((Shard(-1), "both"), ""),
        ((Replicate(), ""), "aten.nll_loss_forward.default got mixed"),
        ((Replicate(), "both"), "loss_parallel() requires exactly one mesh dim"),
    ]
    for case, said in cases:
        results = worker_pool.run(loss_of_dtensors, *case)
        assert len(results) == 2
        for found in results:
            if said:
                assert said in str(found), (case, found)
            else:
                assert isinstance(found, float) and found < 1e-6
    assert len(cases) == 5


NO_STYLE = "ColwiseParallel currently only support nn.Linear and nn.Embedding!"


class ThreeLinears(nn.Module):
    """Computes what an `nn.MultiheadAttention` does, by layers that a plan can cut."""

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        """Take over the weights."""
        super().__init__()
        width = whole.embed_dim
        self.width = width // whole.num_heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )
        weights, biases = whole.in_proj_weight.chunk(3), whole.in_proj_bias.chunk(3)
        for i, layer in enumerate((self.query, self.key, self.value)):
            layer.load_state_dict({"weight": weights[i], "bias": biases[i]})
        self.out.load_state_dict(whole.out_proj.state_dict())

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """Attend within each sample of (B, T, D), but not to what is `padded`."""
        q, k, v = (
            f(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        seen = ~padded[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


def attention_of_torch() -> tuple[str, float]:
    """Cut nn.MultiheadAttention, then its three Linears; return text and distance."""
    from transformers.pytorch_utils import Conv1D  # what GPT-2 is made of

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(8, 4, batch_first=True)
    with pytest.raises(NotImplementedError) as refused:
        parallelize_module(whole, mesh, ColwiseParallel())
    for other in (nn.Sequential(nn.Linear(2, 2)), Conv1D(2, 2)):
        with pytest.raises(NotImplementedError, match=re.escape(str(refused.value))):
            parallelize_module(other, mesh, ColwiseParallel())
    x, padded = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padded[:, 4] = True
    ours = ThreeLinears(whole)
    plan = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
    parallelize_module(ours, mesh, {**plan, "out": RowwiseParallel()})
    expected, _ = whole(x, x, x, key_padding_mask=padded)
    expected.square().sum().backward()
    found = ours(x, padded)
    found.square().sum().backward()
    weight: Any = ours.out.weight.grad
    grads = weight.full_tensor() - whole.out_proj.weight.grad
    return str(refused.value), max(
        (found - expected).abs().max().item(), grads.abs().max().item()
    )


def test_attention_of_torch_has_no_style_and_its_three_linears_have(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(attention_of_torch)
    assert [said for said, _ in ends] == [NO_STYLE] * 2
    assert [apart < 1e-5 for _, apart in ends] == [True, True], ends


class TokenAndPosition(nn.Module):
    """Adds a vector to the token of each position, and puts another one before all."""

    def __init__(self, is_module: bool) -> None:
        """Hold the positions in a layer, or as a parameter."""
        super().__init__()
        self.token, position = nn.Embedding(6, 8), nn.Embedding(5, 8)
        self.position = position if is_module else nn.Parameter(position.weight.data)
        self.class_token = nn.Embedding(1, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, 5) to (B, 6, 8)."""
        own = self.position
        own = own(torch.arange(5)) if isinstance(own, nn.Embedding) else own
        x = self.token(tokens) + own
        first = self.class_token(torch.zeros(len(x), 1, dtype=torch.long))
        return torch.cat([first, x], dim=1)


class Masked(nn.Module):
    """A layer with a buffer, which multiplies what it returns."""

    def __init__(self) -> None:
        """Mask one of four."""
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 8) to (N, 4)."""
        return self.layer(x) * self.mask


def with_a_buffer() -> tuple[str, float]:
    """Distribute a buffer; return what forward says, and how far its cure is off."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.linspace(-1, 1, 24).view(3, 8)
    torch.manual_seed(0)
    ours: Any = Masked()
    due = ours(x).detach()
    columns = ColwiseParallel(output_layouts=minimal.Replicate())
    parallelize_module(ours, mesh, {"layer": columns})
    assert torch.allclose(ours(x), due, atol=1e-6)
    minimal.distribute_module(ours, mesh)
    with pytest.raises(RuntimeError) as refused:
        ours(x)
    ours.mask = ours.mask.to_local()
    assert "mask" in dict(ours.named_buffers())
    return str(refused.value), (ours(x) - due).abs().max().item()


def test_distributed_buffers_meet_plain_activations_until_they_are_put_back(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(with_a_buffer)
    assert len(ends) == 2
    for said, apart in ends:
        assert said.startswith("aten.mul.Tensor got mixed torch.Tensor and DTensor")
        assert apart < 1e-6


def encoder() -> nn.TransformerEncoderLayer:
    """Build a small one of torch."""
    return nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)


def without_a_style() -> tuple[list[str], float]:
    """Cut what a plan cannot; return what is said, and how far its cure is off."""
    mesh, said = init_device_mesh("cpu", (2,)), []
    x, tokens, rows = torch.ones(2, 5, 8), torch.arange(5)[None], minimal.EMBEDDING
    out: dict[str, Any] = {"self_attn.out_proj": RowwiseParallel()}
    for model, plan, inputs in (
        (encoder(), out, x),
        (encoder(), {}, x),
        (TokenAndPosition(False), {"token": rows}, tokens),
    ):
        parallelize_module(model, mesh, plan)
        if plan is not out:
            minimal.distribute_module(model, mesh)
        with pytest.raises(RuntimeError) as refused:
            model(inputs)
        said.append(str(refused.value))
    torch.manual_seed(0)
    alone, ours = TokenAndPosition(True), TokenAndPosition(True)
    ours.load_state_dict(alone.state_dict())
    parallelize_module(
        ours, mesh, {"token": rows, "position": rows, "class_token": rows}
    )
    pairs = [(ours(tokens), alone(tokens))]
    for end in pairs[0]:
        end.square().sum().backward()
    params: Any = zip(ours.parameters(), alone.parameters(), strict=True)
    pairs += [(p.grad.full_tensor(), q.grad) for p, q in params]
    assert len(pairs) == 4
    return said, max((a - b).abs().max().item() for a, b in pairs)


def test_what_has_no_style_meets_plain_tensors_until_it_is_a_module(
    worker_pool: WorkerPool,
) -> None:
    ends = worker_pool.run(without_a_style)
    assert [len(said) for said, _ in ends] == [3, 3]
    for said, apart in ends:
        assert all("got mixed torch.Tensor and DTensor" in text for text in said), said
        assert said[2].startswith("aten.add.Tensor "), said[2]  # not the embedding
        assert apart < 1e-6


def masks_of_tokens(by_rank: bool) -> list[Tensor]:
    """Return this rank's mask of its tokens, and that of each rank."""
    script, mesh = modules["sequence_parallel"], init_device_mesh("cpu", (2,))
    ours = gpt_of(dropout=0.5)
    minimal.split_over_ranks(ours, mesh, *script.WAYS["+ sequence"][0])
    masks: list[Tensor] = []
    ours.blocks[0].drop.register_forward_hook(
        lambda _, __, output: masks.append(output != 0)
    )
    torch.manual_seed(dist.get_rank() if by_rank else 0)
    ours.train()(*batches_of(1)[0])
    both = [torch.empty_like(masks[0]) for _ in range(2)]
    dist.all_gather(both, masks[0])
    return both


def test_tokens_need_masks_of_their_own(worker_pool: WorkerPool) -> None:
    for by_rank in (False, True):
        ends = worker_pool.run(masks_of_tokens, by_rank)
        assert len(ends) == 2
        for first, second in ends:
            assert first.shape == second.shape and 0.3 < first.float().mean() < 0.7
            assert torch.equal(first, second) == (not by_rank)


def counted_calls() -> list[tuple[list[tuple[str, int]], int]]:
    """Return what is noted of gathers and sums that a script makes itself."""
    x, whole, found = torch.ones(4), torch.empty(8), []
    parts = [torch.empty(4), torch.empty(4)]
    for call in (
        lambda: dist.all_gather(parts, x),
        lambda: dist.all_gather_into_tensor(whole, x),
        lambda: dist.reduce_scatter_tensor(x, whole),
        lambda: dist.all_reduce(x),
    ):
        with sent_and_kept.Collectives() as calls:
            call()
        found.append((calls.noted, calls.sent_on_a_ring()))
    with sent_and_kept.Collectives() as calls:
        dist.broadcast(x, src=0)
    with pytest.raises(KeyError, match="broadcast_"):
        calls.sent_on_a_ring()
    return found


def test_plain_collectives_count_as_those_of_dtensors(worker_pool: WorkerPool) -> None:
    names = ["allgather_", "_allgather_base_", "_reduce_scatter_base_", "allreduce_"]
    given = zip(names, (16, 16, 32, 16), strict=True)
    assert worker_pool.run(counted_calls) == [[([one], 16) for one in given]] * 2


def clip_by_value() -> str:
    """Clip the values of norms' partial gradients; return what PyTorch says."""
    script, mesh = modules["sequence_parallel"], init_device_mesh("cpu", (2,))
    ours = minimal.split_over_ranks(gpt_of(), mesh, *script.WAYS["+ sequence"][0])
    ours(*batches_of(1)[0]).backward()
    with pytest.raises(RuntimeError) as refused:
        torch.nn.utils.clip_grad_value_(ours.parameters(), 0.1)
    return str(refused.value)


def test_partial_gradients_are_not_clipped_by_value(worker_pool: WorkerPool) -> None:
    said = worker_pool.run(clip_by_value)
    words = "in-place operations that require placement changes are not supported."
    assert [words in text and "Partial(sum)" in text for text in said] == [True] * 2


def read_tokens(count: int) -> float:
    """Split the GPT by tokens, and read so many of them; return the loss."""
    script, mesh = modules["sequence_parallel"], init_device_mesh("cpu", (2,))
    ours = minimal.split_over_ranks(gpt_of(), mesh, *script.WAYS["+ sequence"][0])
    inputs, labels = batches_of(1)[0]
    return ours(inputs[:, :count], labels[:, :count]).item()


def test_tokens_must_divide_by_the_ranks_in_sequence_parallelism(
    worker_pool: WorkerPool,
) -> None:
    assert len(set(worker_pool.run(read_tokens, 6))) == 1
    with pytest.raises(RankFailure, match=r"SIGABRT|gloo"):
        worker_pool.run(read_tokens, 7)
    # One token leaves the last rank none, which it says itself.
    with pytest.raises(RankError, match="integer modulo by zero"):
        worker_pool.run(read_tokens, 1)


def fused_sgd() -> str:
    """Step with norms' partial gradients; return what PyTorch says."""
    script, mesh = modules["sequence_parallel"], init_device_mesh("cpu", (2,))
    ours = minimal.split_over_ranks(gpt_of(), mesh, *script.WAYS["+ sequence"][0])
    with pytest.raises(RuntimeError) as refused:
        take_steps(ours, torch.optim.SGD, fused=True)
    return str(refused.value)


def test_fused_sgd_refuses_partial_gradients(worker_pool: WorkerPool) -> None:
    said = worker_pool.run(fused_sgd)
    words = "aten._fused_sgd_.default does not have a sharding strategy"
    assert [words in text for text in said] == [True] * 2
