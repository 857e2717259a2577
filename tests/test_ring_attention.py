"""Chapter 09: attention and a GPT over a sequence that is cut over the ranks."""

import contextlib
import functools
import inspect
import io
import itertools
import re
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from answers import decode
from lessons import run_lesson
from scripts import load_chapter
from worker_pool import RankDied, WorkerPool

ROOM, EXERCISES = "09_one_mesh/context", "09_one_mesh/exercises"
modules: dict[str, Any] = load_chapter(ROOM)
ring, script = modules["ring_attention"], modules["context_parallel"]
comparison, in_parts = modules["context_comparison"], modules["online_softmax"]
CHECKERS = load_chapter(EXERCISES)
B, H, D = 2, 3, 8
# Of 3 tokens some ranks hold none; 2n divides 16, mostly, and never 21.
LENGTHS = (3, 16, 21)


def contiguous(tokens: int, n: int) -> list[Tensor]:
    """Give each rank an n-th of the positions, in their order."""
    return list(torch.arange(tokens).tensor_split(n))


def shuffled(tokens: int, n: int) -> list[Tensor]:
    """Give each rank any positions, in any order."""
    generator = torch.Generator().manual_seed(tokens)
    return list(torch.randperm(tokens, generator=generator).tensor_split(n))


WAYS: dict[str, Callable[[int, int], list[Tensor]]] = {
    "contiguous": contiguous,
    "zigzag": ring.zigzag,
    "shuffled": shuffled,
}


# --- A softmax in parts. ----------


def test_two_parts_are_one_softmax(capsys: pytest.CaptureFixture[str]) -> None:
    in_parts.main()
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 | (1 * 2 + 3 * 6) / 4 = 5",
        "rank 1 | (4 * 1 + 2 * 7) / 6 = 3",
        "both   | (4 * 5 + 6 * 3) / 10 = 3.8",
        "check: one softmax over the four keys gives 3.8 too",
    ]


def test_the_check_is_about_the_scores_that_are_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock.patch.object(in_parts, "SCORES", torch.zeros(2, 2).double()):
        in_parts.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "both   | (2 * 4 + 2 * 4) / 4 = 4",
        "check: one softmax over the four keys gives 4 too",
    ]


def test_parts_may_be_many_and_of_large_scores() -> None:
    scores, values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    scores = scores.double() * 1e4
    assert scores.exp().isinf().any()  # which no sum of exponentials would survive
    right = scores.flatten().softmax(0) @ values.flatten().double()
    assert abs(in_parts.attend_in_parts(scores, values.double()) - right) < 1e-12


@pytest.mark.parametrize("fault", ["mean of means", "exponentials not summed"])
def test_parts_that_do_not_count_by_their_sums_are_noticed(
    capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    attend = in_parts.attend

    def wrong(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        mean, lse = attend(scores, values)
        return mean, lse * 0 if fault == "mean of means" else scores.amax(-1)

    with (
        mock.patch.object(in_parts, "attend", wrong),
        pytest.raises(SystemExit, match="2"),
    ):
        in_parts.main()
    said = capsys.readouterr()
    assert "the mean in parts is not that of one softmax" in said.err
    assert "check:" not in said.out


# --- The order. ----------


def test_zigzag_gives_an_early_and_a_late_chunk() -> None:
    shards = ring.zigzag(16, 4)
    assert [s.tolist() for s in shards] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_zigzag_holds_each_position_once(tokens: int) -> None:
    for n in (1, 2, 3, 4):
        shards = ring.zigzag(tokens, n)
        assert len(shards) == n
        assert sorted(torch.cat(shards).tolist()) == list(range(tokens))
        lengths = [len(shard) for shard in shards]
        assert max(lengths) - min(lengths) <= 2


# --- Attention. ----------


def leaves_of(tokens: int, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys, values and the gradient of the output; same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    shape = (4, B, H, tokens, D)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    drawn[0] *= scale
    return list(drawn)


def attention_errors(
    scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> list[float]:
    """Compare output and three gradients with PyTorch's, for all ways and lengths."""
    n, rank, errors = dist.get_world_size(), dist.get_rank(), []
    for way, tokens in itertools.product(WAYS, LENGTHS):
        *whole, grad = leaves_of(tokens, scale, dtype)
        whole = [t.requires_grad_() for t in whole]
        q, k, v = whole
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        rights = [right, *torch.autograd.grad(right, whole, grad)]
        shards = WAYS[way](tokens, n)
        mine = shards[rank]
        parts = [t[..., mine, :].detach().requires_grad_() for t in whole]
        found = ring.ring_attention(*parts, shards)
        founds = [found, *torch.autograd.grad(found, parts, grad[..., mine, :])]
        assert len(founds) == 4
        for one, other in zip(founds, rights, strict=True):
            assert one.shape == (B, H, len(mine), D)
            errors.append(torch.dist(one, other[..., mine, :]).item())
    assert len(errors) == 4 * len(WAYS) * len(LENGTHS)
    return errors


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, 3, 4]
)
def test_ring_attention_is_attention(worker_pool: WorkerPool, world_size: int) -> None:
    results = worker_pool.run(attention_errors, world_size=world_size)
    assert len(results) == world_size
    for errors in results:
        assert len(errors) == 4 * 3 * len(LENGTHS)
        assert max(errors) < 1e-12, errors


def test_large_scores_do_not_overflow(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(attention_errors, 1e4, world_size=2)
    assert len(results) == 2
    for errors in results:
        # Gradients of keys have the size of the queries.
        assert len(errors) == 36 and max(errors) < 1e-7, errors


def test_float32_is_as_exact_as_float32(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(attention_errors, 1.0, torch.float32, world_size=2)
    assert len(results) == 2
    for errors in results:
        assert len(errors) == 36 and 0 < max(errors) < 1e-4, errors


def errors_in_groups() -> list[float]:
    """Let ranks 0 and 1 share a sequence, and 2 and 3 another one; then 1 to 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    three: Any = dist.new_group([1, 2, 3])
    errors = [error_in_group(mesh["context"].get_group(), dist.get_rank() // 2)]
    return errors + ([error_in_group(three, 0)] if dist.get_rank() > 0 else [0.0])


def error_in_group(group: Any, sequence: int) -> float:
    """Compare output and gradients with PyTorch's; a group has one sequence."""
    *whole, grad = leaves_of(21, 1.0 + sequence, torch.float64)
    q, k, v = whole = [t.requires_grad_() for t in whole]
    shards = ring.zigzag(21, dist.get_world_size(group))
    mine = shards[dist.get_rank(group)]
    parts = [t[..., mine, :].detach().requires_grad_() for t in whole]
    found = ring.ring_attention(*parts, shards, group)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    founds = [found, *torch.autograd.grad(found, parts, grad[..., mine, :])]
    rights = [right, *torch.autograd.grad(right, whole, grad)]
    pairs = zip(founds, rights, strict=True)
    return max(torch.dist(one, other[..., mine, :]).item() for one, other in pairs)


def test_ring_runs_in_a_group(worker_pool: WorkerPool) -> None:
    errors = worker_pool.run(errors_in_groups, world_size=4)
    assert len(errors) == 4 and max(map(max, errors)) < 1e-12


def differentiated_twice() -> str:
    """Ask for the gradient of a gradient, of which a part is by another way."""
    shards = ring.zigzag(8, dist.get_world_size())
    x = torch.randn(B, H, 4, D, requires_grad=True)
    out = ring.ring_attention(x.sin(), x.cos(), x.tanh(), shards)
    try:
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        torch.autograd.grad(grad.square().sum(), x)
    except RuntimeError as error:
        return str(error)
    return "it ran"


def test_a_gradient_of_a_gradient_is_refused(worker_pool: WorkerPool) -> None:
    said = "ring attention does not support create_graph=True"
    assert worker_pool.run(differentiated_twice) == [said] * 2


def refusals() -> list[str]:
    """Give shards of another length, and those of another number of ranks."""
    told = []
    for shards in (ring.zigzag(12, 2), ring.zigzag(30, 3)):
        x = torch.zeros(B, H, 10, D)
        try:
            ring.ring_attention(x, x, x, shards)
        except ValueError as error:
            told.append(str(error))
    return told


def test_shards_that_do_not_fit_are_refused(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(refusals)
    said = ["has 10 tokens, not [6, 6]", "has 10 tokens, not [10, 10, 10]"]
    assert by_rank == [[f"rank {rank} of 2 {end}" for end in said] for rank in (0, 1)]


def refused_heads() -> str:
    """Give four heads of queries and two of keys and values."""
    q, k = torch.zeros(B, 4, 5, D), torch.zeros(B, 2, 5, D)
    try:
        ring.ring_attention(q, k, k, ring.zigzag(10, 2))
    except ValueError as error:
        return str(error)
    return ""


def test_fewer_heads_of_keys_are_refused(worker_pool: WorkerPool) -> None:
    said = "keys (2, 2, 5, 8) for queries (2, 4, 5, 8): repeat those of grouped heads"
    assert worker_pool.run(refused_heads) == [said] * 2


def errors_in_16_bits(
    dtype: torch.dtype, scale: float, under_autocast: bool
) -> tuple[list[float], list[float], set[torch.dtype]]:
    """Compare attention in 16 bits with float64; return ours, PyTorch's, and dtypes.

    The relative errors are of the output and of three gradients.
    """
    tokens, autocast = 256, torch.autocast("cpu", dtype, enabled=under_autocast)
    rounded = [t.to(dtype) for t in leaves_of(tokens, scale, torch.float64)]
    shards = ring.zigzag(tokens, dist.get_world_size())
    mine = shards[dist.get_rank()]
    inside = torch.float32 if under_autocast else dtype

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def results(attend: Any, of: torch.dtype, at: Any = slice(None)) -> list[Tensor]:
        *qkv, grad = (t[..., at, :].to(of) for t in rounded)
        qkv = [t.detach().requires_grad_() for t in qkv]
        with autocast:  # backward too, in which a loop may call it
            out = attend(*qkv)
            return [out, *torch.autograd.grad(out, qkv, grad.to(out.dtype))]

    right = results(sdpa, torch.float64)
    with torch.autocast("cpu", enabled=False):
        theirs = results(sdpa, dtype)
    ours = results(lambda *qkv: ring.ring_attention(*qkv, shards), inside, mine)
    errors = [
        [(torch.dist(f.double(), r) / r.norm()).item() for f, r in pairs]
        for pairs in (
            zip(ours, [r[..., mine, :] for r in right], strict=True),
            zip(theirs, right, strict=True),
        )
    ]
    return errors[0], errors[1], {found.dtype for found in ours}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_in_16_bits_the_ring_is_as_exact_as_attention(
    worker_pool: WorkerPool, dtype: torch.dtype, scale: float
) -> None:
    results = worker_pool.run(errors_in_16_bits, dtype, scale, False)
    assert len(results) == 2
    for ours, theirs, dtypes in results:
        assert dtypes == {dtype} and len(ours) == len(theirs) == 4
        for our, their in zip(ours, theirs, strict=True):
            assert 0 < our < 1.5 * their, (ours, theirs)


def errors_without_wide(scale: float) -> tuple[list[float], list[float]]:
    """Do it in bf16, and add up parts in bf16 too."""
    with mock.patch.object(ring, "wide", lambda x: x):
        return errors_in_16_bits(torch.bfloat16, scale, False)[:2]


@pytest.mark.parametrize(("scale", "times"), [(1.0, 3), (3.0, 6)])
def test_parts_added_up_in_bf16_lose_digits(
    worker_pool: WorkerPool, scale: float, times: int
) -> None:
    results = worker_pool.run(errors_without_wide, scale)
    assert len(results) == 2
    for (_, ours, *_), (_, theirs, *_) in results:  # of the query's gradient
        assert times * theirs < ours < 3 * times * theirs


def test_under_autocast_the_ring_computes_in_float32(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(errors_in_16_bits, torch.bfloat16, 3.0, True)
    assert len(results) == 2
    for ours, _, dtypes in results:
        assert dtypes == {torch.float32} and len(ours) == 4 and max(ours) < 1e-5


DOCUMENT = torch.tensor([0] * 10 + [1] * 14)


def packed_errors(line: str) -> list[float]:
    """Put a line where scores_of says so; compare two documents in one sequence."""
    source = inspect.getsource(ring.scores_of)
    (comment,) = re.findall(r"^ +# Another mask.*\n +# sees &= .*\n", source, re.M)
    names = {**vars(ring), "doc": DOCUMENT}
    exec(source.replace(comment, f"    {line}\n"), names)
    tokens = len(DOCUMENT)
    *whole, grad = leaves_of(tokens, 1.0, torch.float64)
    q, k, v = whole = [t.requires_grad_() for t in whole]
    mask = (DOCUMENT[:, None] == DOCUMENT) & torch.ones(tokens, tokens).tril().bool()
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rights = [right, *torch.autograd.grad(right, whole, grad)]
    shards = ring.zigzag(tokens, dist.get_world_size())
    mine = shards[dist.get_rank()]
    parts = [t[..., mine, :].detach().requires_grad_() for t in whole]
    with mock.patch.object(ring, "scores_of", names["scores_of"]):
        found = ring.ring_attention(*parts, shards)
        founds = [found, *torch.autograd.grad(found, parts, grad[..., mine, :])]
    pairs = zip(founds, rights, strict=True)
    return [torch.dist(one, other[..., mine, :]).item() for one, other in pairs]


def test_another_mask_is_one_line(worker_pool: WorkerPool) -> None:
    # The line that the comment in scores_of gives.
    (line,) = re.findall(r"sees &= .*", inspect.getsource(ring.scores_of))
    packed = worker_pool.run(packed_errors, line)
    causal = worker_pool.run(packed_errors, "pass")
    assert len(packed) == len(causal) == 2
    for right, wrong in zip(packed, causal, strict=True):
        assert len(right) == len(wrong) == 4
        assert max(right) < 1e-12 and min(wrong) > 0.1


def receive_too_much() -> list[float]:
    """Send three numbers to a rank that expects five."""
    numbers = torch.full((5,), -1.0)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(numbers, 0)
    return numbers.tolist()


def test_a_receive_that_is_too_long_is_silent(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(receive_too_much)[1] == [1.0, 1.0, 1.0, -1.0, -1.0]


def receive_too_little() -> None:
    """Send five numbers to a rank that expects three."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(5), 1)
    else:
        dist.recv(torch.empty(3), 0)


def test_a_receive_that_is_too_short_aborts(worker_pool: WorkerPool) -> None:
    text = "Received data size doesn't match expected size."
    with pytest.raises(RankDied, match=text) as died:
        worker_pool.run(receive_too_little)
    assert (died.value.rank, died.value.exitcode) == (1, -signal.SIGABRT)


# --- What it costs. ----------


def costs(way: str, tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Count scores by step, bytes sent each way, and numbers kept for backward."""
    n, rank = dist.get_world_size(), dist.get_rank()
    *whole, grad = leaves_of(tokens, 1.0, dtype)
    shards = WAYS[way](tokens, n)
    mine = shards[rank]
    q, k, v, grad = (t[..., mine, :].requires_grad_() for t in (*whole, grad))
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with (
        comparison.Counted() as forward,
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = ring.ring_attention(q, k, v, shards)
    with comparison.Counted() as backward:
        torch.autograd.grad(out, [q, k, v], grad)
    return {
        "scores": [scores // (B * H) for scores in forward.products[::2]],
        "products": [len(forward.products), len(backward.products)],
        "sent": [forward.sent, backward.sent],
        "kept": sum(kept),
    }


def waited_when_yielded() -> list[int]:
    """Go round the ring; count the messages waited for when each part is yielded."""
    lesson: Any = load_chapter(ROOM)["ring_attention"]
    waited, pass_on = [], lesson.pass_on

    def counted(*words: Any) -> Any:
        arriving, works = pass_on(*words)
        seen = [mock.Mock(wait=lambda w=w: (waited.append(1), w.wait())) for w in works]
        return arriving, seen

    shards = [torch.arange(2)] * 3
    with mock.patch.object(lesson, "pass_on", counted):
        kv = torch.full((2, 2, 4), float(dist.get_rank()))
        ring = lesson.around_the_ring(kv, shards, dist.group.WORLD)
        counts = [len(waited) for _ in ring]
    return counts


def test_the_next_keys_travel_while_these_are_used(worker_pool: WorkerPool) -> None:
    # A send and a receive, both waited for only when the caller asks for the next.
    assert worker_pool.run(waited_when_yielded, world_size=3) == [[0, 2, 4]] * 3


def test_zigzag_ranks_compute_equally_much_in_each_step(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(costs, "zigzag", 32, world_size=4)
    assert [found["scores"] for found in results] == [[64, 32, 32, 32]] * 4
    # One product for the scores and one for the output; in backward, four more.
    assert [found["products"] for found in results] == [[8, 20]] * 4


def test_contiguous_ranks_wait_for_the_last(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(costs, "contiguous", 32, world_size=4)
    scores = [found["scores"] for found in results]
    assert scores == [[64, 0, 0, 0], [64, 64, 0, 0], [64, 64, 64, 0], [64] * 4]
    slowest = sum(max(step) for step in zip(*scores, strict=True))
    assert slowest / (sum(map(sum, scores)) / 4) == 2 * 4 / (4 + 1)


@pytest.mark.parametrize(("world_size", "tokens"), [(1, 21), (2, 32), (4, 32), (4, 21)])
def test_bytes_and_memory_are_by_the_formula(
    worker_pool: WorkerPool, world_size: int, tokens: int
) -> None:
    results = worker_pool.run(costs, "zigzag", tokens, world_size=world_size)
    n, lengths = world_size, [len(shard) for shard in ring.zigzag(tokens, world_size)]
    token = 2 * B * H * D * 8  # a key and a value
    assert len(results) == n
    for rank, found in enumerate(results):
        # A rank passes on what every rank had, but not the next one's back to it. It
        # passes on the gradients of all keys but its own.
        keys = tokens - lengths[(rank + 1) % n]
        assert found["sent"] == [token * keys, token * (keys + tokens - lengths[rank])]
        if tokens % n == 0:
            forward = (n - 1) * token * tokens // n
            assert found["sent"] == [forward, 2 * forward]
        # Query, key, value, output, and one number for the softmax.
        assert found["kept"] == B * H * lengths[rank] * (4 * D + 1)


def test_in_bf16_gradients_are_twice_as_wide_on_the_way(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(costs, "zigzag", 32, torch.bfloat16)
    forward = 2 * B * H * D * 2 * 16  # to the other rank, keys and values of 16 tokens
    assert [found["sent"] for found in results] == [[forward, 3 * forward]] * 2


# --- The GPT. ----------


@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [2, 4])
def test_gpt_on_parts_of_a_sequence_is_one_process(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n = world_size
    outputs = worker_pool.run(run_lesson, ROOM, "context_parallel", world_size=n)
    assert outputs[1:] == [""] * (n - 1)
    lines = outputs[0].splitlines()
    first, last = ["1.0"] + ["0.0"] * (n - 1), ["1.0"] * n
    zigzag = ["1.0"] + ["0.5"] * (n - 1)
    assert len(lines) == 4
    numbers = [re.findall(r"\d\.\d+", line) for line in lines[:3]]
    assert numbers[0][:-1] == first + last
    assert numbers[1][:-1] == zigzag * 2
    assert abs(float(numbers[0][-1]) - 2 * n / (n + 1)) < 0.02
    assert 1 <= float(numbers[1][-1]) < 1.03
    # Rank 0 passes on all keys but rank 1's, twice, and all gradients but its own's.
    length, next_one = map(len, ring.zigzag(250, n)[:2])
    sent = 2 * (3 * 250 - 2 * next_one - length) / 250
    assert numbers[2] == [f"{sent:.2f}", f"{6 * (n - 1) / n:.2f}"]
    claim = r"check: loss and 24 gradients are one process's to \de-1\d"
    assert re.fullmatch(claim, lines[3])


def test_labels_are_the_next_of_many_different_tokens() -> None:
    _, inputs, labels, right = comparison.gradients_of_one_process(torch.device("cpu"))
    assert inputs.shape == labels.shape == (2, 250) and len(right) == 25
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert len(inputs.unique()) > 200


def loss_of_labels_that_count() -> tuple[float, float, float]:
    """Ignore labels; return one process's loss, and ours by two numbers of tokens."""
    model, inputs, labels, _ = comparison.gradients_of_one_process(torch.device("cpu"))
    labels = labels.masked_fill(torch.arange(labels.shape[1]) < 100, -100)
    logits = model(inputs)
    right = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    shards = ring.zigzag(inputs.shape[1], dist.get_world_size())
    loss = script.loss_of_shard(model, inputs, labels, shards).detach()
    dist.all_reduce(loss)
    times = labels.numel() / (labels != -100).sum().item()
    return right.item(), (loss * times).item(), loss.item()


def test_a_loss_is_divided_by_the_labels_that_count(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(loss_of_labels_that_count)
    assert len(found) == 2
    for right, ours, by_tokens in found:
        assert ours == pytest.approx(right, rel=1e-9)
        assert by_tokens == pytest.approx(0.6 * right, rel=1e-9)


def gradients_of_what_is_trained() -> list[Any]:
    """Freeze a bias, and sum over the ranks."""
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    script.add_up_gradients(model)
    weight: Any = model.weight.grad
    return [weight.tolist(), model.bias.grad]


def test_what_is_frozen_has_no_gradient_to_add(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(gradients_of_what_is_trained) == [[[[3.0, 3.0]], None]] * 2


def ending(faults: list[tuple[Any, str, Any]]) -> tuple[Any, str]:
    """Run the lesson with some of its parts replaced; return exit code and error."""
    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(errors))
        # A failed check leaves the group, which is the pool's.
        stack.enter_context(mock.patch.object(modules["ranks"], "leave"))
        for owner, name, fault in faults:
            stack.enter_context(mock.patch.object(owner, name, fault))
        try:
            run_lesson(ROOM, "context_parallel")
        except SystemExit as end:
            return end.code, errors.getvalue()
    return 0, ""


FAULTS = [
    "is_causal in each block",
    "gradients of keys stay",
    "weights not summed",
    "mean of local means",
    "embeds local positions",
    "zigzag is contiguous",
    "a fiftieth more is sent",
    "gradients a millionth off",
    "contiguous loss alone a millionth off",
    "slowest a tenth slower",
]


def ends_with_faults() -> dict[str, tuple[Any, str]]:
    """Run the lesson with one thing wrong, again and again."""
    scores_of, loss_of_shard = ring.scores_of, script.loss_of_shard
    arange, cross_entropy = torch.arange, F.cross_entropy
    activations_sent = script.Counted.activations_sent
    slowest_to_mean, add_up = script.slowest_to_mean, script.add_up_gradients

    def local_positions(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        # What is_causal=True on each block would do.
        return scores_of(q, k, arange(q.shape[-2]), arange(k.shape[-2]))

    def mean_of_local_means(model: Any, *tokens: Any) -> Tensor:
        def mean(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
            whole = comparison.B * comparison.T / dist.get_world_size()
            return cross_entropy(logits, labels) * whole

        with mock.patch.object(F, "cross_entropy", mean):
            return loss_of_shard(model, *tokens)

    def embeds_local_positions(model: Any, *tokens: Any) -> Tensor:
        embed = model.position_embedding.forward
        with mock.patch.object(
            model.position_embedding, "forward", lambda at: embed(arange(len(at)))
        ):
            return loss_of_shard(model, *tokens)

    def add_up_a_little_more(model: Any) -> None:
        add_up(model)
        for parameter in model.parameters():
            parameter.grad *= 1 + 1e-6

    def contiguous_loss_a_little_off(model: Any, *tokens: Any) -> Tensor:
        is_zigzag = comparison.T - 1 in tokens[2][0]
        return loss_of_shard(model, *tokens) + (0.0 if is_zigzag else 1e-6)

    faults = {
        "is_causal in each block": (ring, "scores_of", local_positions),
        "gradients of keys stay": (
            ring,
            "received",
            lambda x, length, _: x.new_zeros(*x.shape[:-2], length, x.shape[-1]),
        ),
        "weights not summed": (script, "add_up_gradients", lambda model: None),
        "mean of local means": (script, "loss_of_shard", mean_of_local_means),
        "embeds local positions": (script, "loss_of_shard", embeds_local_positions),
        "zigzag is contiguous": (script, "zigzag", contiguous),
        # Little more than the limits of the check.
        "a fiftieth more is sent": (
            script.Counted,
            "activations_sent",
            lambda calls: activations_sent(calls) * 1.02,
        ),
        "gradients a millionth off": (script, "add_up_gradients", add_up_a_little_more),
        "contiguous loss alone a millionth off": (
            script,
            "loss_of_shard",
            contiguous_loss_a_little_off,
        ),
        "slowest a tenth slower": (
            script,
            "slowest_to_mean",
            lambda work: slowest_to_mean(work) * 1.09,
        ),
    }
    return {name: ending([fault]) for name, fault in faults.items()}


def test_lesson_gone_wrong_is_noticed(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(ends_with_faults, world_size=4)
    said = "check failed on ranks [0, 1, 2, 3], not so: loss and 24 gradients"
    assert len(by_rank) == 4
    for rank, ends in enumerate(by_rank):
        assert list(ends) == FAULTS
        assert [code for code, _ in ends.values()] == [1] * len(FAULTS)
        heard = [text.startswith(said) for _, text in ends.values()]
        # The sum of four ranks' losses is off, and nothing else is.
        _, text = ends["contiguous loss alone a millionth off"]
        assert rank > 0 or text.endswith(" are one process's to 4e-06\n")
        assert heard == [rank == 0] * len(FAULTS), ends


def block_and_its_copy() -> list[Tensor]:
    """Drop in a block of the GPT, and in what the lesson makes of it, by one seed."""
    model = modules["model"]
    torch.manual_seed(0)
    block = model.Block(model.GPTConfig(width=16, heads=2, dropout=0.5))
    outputs, x = [], torch.randn(B, 6, 16)
    for run in (block, lambda x: script.run_block(block, x, [torch.arange(6)])):
        torch.manual_seed(1)
        outputs.append(run(x).detach())
    return outputs


def test_a_block_drops_as_the_gpts(worker_pool: WorkerPool) -> None:
    ((right, found),) = worker_pool.run(block_and_its_copy, world_size=1)
    torch.testing.assert_close(found, right)


# --- PyTorch's own. ----------


def try_context_parallel() -> str:
    """Use PyTorch's context parallelism on a CPU; return what it says."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v, _ = leaves_of(16, 1.0, torch.float32)
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return "it ran"


def test_pytorchs_context_parallel_does_not_run_on_a_cpu(
    worker_pool: WorkerPool,
) -> None:
    said = (
        "Operator aten._scaled_dot_product_flash_attention_for_cpu.default "
        "does not have a sharding strategy registered."
    )
    assert worker_pool.run(try_context_parallel) == [said] * 2


# --- exercises/decode.py. ----------


def flawed(q: Tensor, k: Tensor, v: Tensor, flaw: str) -> Tensor:
    """Do what the answer does, but for one flaw."""
    n = dist.get_world_size()
    scores = q @ k.mT * q.shape[-1] ** -0.5
    own = scores.softmax(-1) @ v
    if flaw == "float32":
        return decode.attend_to_all(q.float(), k.float(), v.float())
    if flaw == "in place":
        found = decode.attend_to_all(q, k, v)
        v.zero_()
        return found
    if flaw == "keys":
        lengths: list[Any] = [None] * n
        dist.all_gather_object(lengths, k.shape[1])
        both = torch.stack([k, v])
        all_ranks = [
            both.new_empty(2, k.shape[0], length, k.shape[2]) for length in lengths
        ]
        for source, part in enumerate(all_ranks):
            dist.broadcast(both if source == dist.get_rank() else part, source)
        all_ranks[dist.get_rank()] = both
        k, v = torch.cat(all_ranks, 2)
        return F.scaled_dot_product_attention(q, k, v)
    if flaw == "one by one":
        lengths = [None] * n
        dist.all_gather_object(lengths, k.shape[1])
        found = []
        for source, length in enumerate(lengths):
            for i in range(length):
                pair = torch.zeros(2, k.shape[0], k.shape[2], dtype=k.dtype)
                if source == dist.get_rank():
                    pair = torch.stack([k[:, i], v[:, i]])
                dist.broadcast(pair, source)
                found.append(pair)
        k, v = torch.stack(found, 2)
        return F.scaled_dot_product_attention(q, k, v)
    if flaw in ("mean", "sum", "by number"):
        numbers = torch.tensor(float(k.shape[1]), dtype=q.dtype)
        dist.all_reduce(numbers)
        weight = {"mean": 1 / n, "sum": 1.0, "by number": k.shape[1] / numbers}[flaw]
        dist.all_reduce(own := own * weight)
        return own
    largest = torch.zeros_like(q[..., :1])
    if flaw == "amax" or (flaw == "amax or 0" and k.shape[1]):
        largest = scores.amax(-1, keepdim=True)
    if flaw != "no maximum":
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    p = (scores - largest).exp()
    sums = torch.cat([p @ v, p.sum(-1, keepdim=True)], dim=-1)
    dist.all_reduce(sums)
    return sums[..., :-1] / sums[..., -1:]


HINTS = {
    "mean": "first case: this is the mean of the ranks' results: a rank counts by",
    "sum": "first case: this is the sum of the ranks' results: a rank counts by the",
    "by number": "first case: this is the mean of the ranks' results, weighted by",
    "no maximum": "large scores: the result is not finite: which exponential is too",
    "amax or 0": "no keys, low scores: the result is not finite: which exponential i",
    "float32": "first case: the result is in torch.float32, and q, k and v in torch.f",
    "in place": "first case: right, but it changes k or v: the next token needs t",
    "keys": "first case: right, but the messages have ",
    "one by one": "first case: right, but the messages have ",
}


def tell_answers() -> list[str]:
    """Let the checker try the stub, the answer and flawed answers."""
    check = CHECKERS["check_decode"]
    answers = [CHECKERS["decode"].attend_to_all, decode.attend_to_all]
    answers += [functools.partial(flawed, flaw=flaw) for flaw in HINTS]
    return [check.try_decode(answer) for answer in answers]


def test_decode_is_told_what_is_wrong(worker_pool: WorkerPool) -> None:
    told = worker_pool.run(tell_answers, world_size=3)
    due = ["first case: this rank attends to its own keys alone", "", *HINTS.values()]
    assert len(told) == 3 and len(due) == 11
    for of_rank in told:
        cut = [
            text[: len(hint)] or text for text, hint in zip(of_rank, due, strict=True)
        ]
        assert cut == due


def tell_amax() -> str:
    """Try an answer that takes the largest of no scores."""
    return CHECKERS["check_decode"].try_decode(functools.partial(flawed, flaw="amax"))


@pytest.mark.slow
def test_a_rank_without_keys_is_told(worker_pool: WorkerPool) -> None:
    told = worker_pool.run(tell_amax, world_size=3, timeout=30)
    assert len(told) == 3
    assert told[1].startswith("a rank without keys: it ended with: IndexError: amax()")
