"""Chapter 09: a mixture whose experts are sharded is the mixture of one process."""

import contextlib
import functools
import io
import os
import re
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lessons import in_the_pool, run_lesson
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

ROOM = "09_one_mesh/experts"
modules: dict[str, Any] = load_chapter(ROOM)
mixture, experts = modules["mixture"], modules["experts"]
both, example = modules["whole_and_sharded"], modules["who_goes_where"]
CHECKERS: dict[str, Any] = load_chapter("09_one_mesh/exercises")

# The answer uses the chapter's module by its plain name.
with mock.patch.dict(sys.modules, {"mixture": CHECKERS["mixture"]}):
    from answers import broken_experts

B, T, D, E = 2, 6, 8, 8

# --- Who goes where. ----------


def test_table_says_who_sends_what_and_who_is_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example.main()
    assert capsys.readouterr().out.splitlines() == [
        "capacity: 1.25 * 3 * 1 / 4, rounded up, is 1",
        "       | expert of token | sends  | rows to experts | rows to ranks",
        "rank 0 | a 2, b 0, c 2   | b a    | [1, 0, 1, 0]    | [1, 1]",
        "rank 1 | x 0, y 3, z 1   | x z y  | [1, 1, 0, 1]    | [2, 1]",
        "check: the layer's output is zero for c, and no other token",
    ]


def test_table_has_the_places_of_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    generous = functools.partial(mixture.Mixture, capacity_factor=3.0)
    with mock.patch.object(example, "Mixture", generous):
        example.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "capacity: 3.0 * 3 * 1 / 4, rounded up, is 3"
    assert lines[2] == "rank 0 | a 2, b 0, c 2   | b a c  | [1, 0, 2, 0]    | [1, 2]"


def rows_on_the_way() -> list[list[int]]:
    """Send the example's tokens by the sharded layer; return what it sends, gets."""
    rank, torchs = dist.get_rank(), mixture.AllToAll.apply
    layer = mixture.MixtureOfExperts(4, 4, k=1)
    nn.init.eye_(layer.router.weight)
    noted = []

    def note(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Any:
        noted.extend([sent, received])
        return torchs(rows, received, sent, group)

    with mock.patch.object(mixture.AllToAll, "apply", note):
        layer(example.PROBABILITIES[rank, None].log())
    return noted


def test_table_is_what_two_ranks_send(worker_pool: WorkerPool) -> None:
    # There and back: the matrix's rows are sent, its columns received.
    assert worker_pool.run(rows_on_the_way) == [
        [[1, 1], [1, 2], [1, 2], [1, 1]],
        [[2, 1], [1, 1], [1, 1], [2, 1]],
    ]


@pytest.mark.parametrize(
    "owners",
    [[example], [mixture], [example, mixture]],
    ids=["table", "layer", "both"],
)
@pytest.mark.parametrize("fault", ["the last are kept", "none is dropped"])
def test_wrong_places_are_noticed(
    capsys: pytest.CaptureFixture[str], fault: str, owners: list[Any]
) -> None:
    right = mixture.pairs_with_a_place

    def keeps_others(experts: Tensor, count: int, capacity: int) -> Tensor:
        if fault == "none is dropped":
            return right(experts, count, len(experts))
        return len(experts) - 1 - right(experts.flip(0), count, capacity)

    with contextlib.ExitStack() as stack:
        for owner in owners:
            fault_of = mock.patch.object(owner, "pairs_with_a_place", keeps_others)
            stack.enter_context(fault_of)
        stack.enter_context(pytest.raises(SystemExit, match="2"))
        example.main()
    said = capsys.readouterr()
    assert "not so: the layer's output is zero for c, and no other" in said.err
    assert "check:" not in said.out


# --- All-to-all through autograd. ----------


def both_all_to_alls(rows_to: list[list[int]]) -> list[float]:
    """Send rows_to[i][j] rows from rank i to j in two ways; compare both directions."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sent, received = rows_to[rank], [rows_to[other][rank] for other in range(n)]
    x = (torch.randn(sum(sent), 3) + rank).double().requires_grad_()
    ours = mixture.AllToAll.apply(x, received, sent)
    theirs = all_to_all_single_autograd(x, received, sent, dist.group.WORLD)  # type: ignore
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(rank))
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, theirs * 1)]
    # Who sends a row gets back what its receiver has multiplied it by.
    weights: list[Any] = [None] * n
    dist.all_gather_object(weights, weight)
    parts = [
        weights[other].split([row[other] for row in rows_to])[rank]
        for other in range(n)
    ]
    right = torch.cat(parts).double()
    # The gradient of a sum is one number, expanded: not contiguous.
    again = mixture.AllToAll.apply(x, received, sent)
    assert torch.autograd.grad(again.sum(), x)[0].eq(1).all()
    pairs = [(ours, theirs), (grads[0], grads[1]), (grads[0], right)]
    return [(a - b).abs().sum().item() for a, b in pairs]


@pytest.mark.parametrize(
    "rows_to",
    [
        [[5]],
        [[0, 3], [2, 0]],
        [[4, 1], [0, 0]],
        [[1, 2, 3, 0], [0, 0, 0, 5], [2, 2, 2, 2], [0, 1, 0, 0]],
    ],
    ids=str,
)
def test_all_to_all_and_its_backward_are_torchs(
    worker_pool: WorkerPool, rows_to: list[list[int]]
) -> None:
    n = len(rows_to)
    found = worker_pool.run(both_all_to_alls, rows_to, world_size=n)
    assert found == [[0.0, 0.0, 0.0]] * n


def send_what_does_not_add_up() -> None:
    """Say of three rows that one goes to each of two ranks."""
    mixture.AllToAll.apply(torch.zeros(3, 2), [1, 1], [1, 1])


def test_split_sizes_must_add_up(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="Split sizes doesn't match total dim 0 size"):
        worker_pool.run(send_what_does_not_add_up)


# --- Which expert, and which tokens are dropped. ----------

PROBABILITIES = torch.tensor(
    [[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.8, 0.1, 0.1]],
    dtype=torch.float64,
)


def test_two_weights_add_up_to_one_and_one_weight_is_the_probability() -> None:
    weights, chosen = mixture.choose_experts(PROBABILITIES[:3], 2)
    assert chosen.tolist() == [[0, 1], [0, 1], [1, 0]]
    assert weights.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])
    weights, chosen = mixture.choose_experts(PROBABILITIES, 1)
    assert (chosen.tolist(), weights.tolist()) == (
        [[0], [0], [1], [0]],
        [[0.6], [0.5], [0.7], [0.8]],
    )


def test_one_renormalised_weight_teaches_the_router_nothing() -> None:
    torch.manual_seed(0)
    layer, x = mixture.Mixture(D, E, k=1).double(), torch.randn(B, T, D).double()
    layer(x).square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 1e-3

    def renormalised(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weights, chosen = probabilities.topk(k)
        return weights / weights.sum(1, keepdim=True), chosen

    layer.zero_grad()
    with mock.patch.object(mixture, "choose_experts", renormalised):
        layer(x).square().sum().backward()
    assert layer.router.weight.grad.abs().max() < 1e-12


def test_first_choices_take_the_places_first() -> None:
    # Tokens 0, 1 and 3 choose expert 0 first, token 2 second.
    chosen = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 2]])
    # Pairs are first choices 0 to 3, then second choices 4 to 7, by expert.
    for capacity, kept in (
        (9, [1, 2, 3, 4, 0, 5, 6, 7]),
        (3, [1, 2, 3, 0, 5, 6, 7]),
        (2, [1, 2, 0, 5, 7]),
        (1, [1, 0, 7]),
        (0, []),
    ):
        assert mixture.pairs_with_a_place(chosen, 3, capacity).tolist() == kept


def test_capacity_is_rounded_up() -> None:
    # Fedus et al., Switch Transformers, equation 3: tokens / experts x capacity factor.
    # A place is whole: 5 tokens for 2 experts are 2.5, so 3.
    # 1.1 x 100 / 2 are 55; in floats they are a little more.
    cases = ((5, 1, 1.0, 3), (4, 1, 1.0, 2), (5, 1, 1.25, 4), (100, 1, 1.1, 55))
    assert len(cases) == 4
    for tokens, k, factor, places in cases:
        layer = mixture.Mixture(D, 2, k, factor)
        nn.init.constant_(layer.router.weight, 0.0)
        with torch.no_grad():
            layer.router.weight[0] = 1.0  # all choose expert 0
        layer(torch.ones(1, tokens, D))
        assert layer.chosen.tolist() == [tokens, 0]
        assert tokens - layer.dropped == places


def test_a_mixture_runs_under_autocast() -> None:
    torch.manual_seed(0)
    layer, x = mixture.Mixture(D, 4, capacity_factor=100), torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    apart = (y - layer(x)).abs().max() / layer(x).abs().max()
    assert y.dtype == torch.bfloat16 and 1e-4 < apart < 0.2


def test_an_expert_is_the_mlp_of_a_block() -> None:
    model = modules["model"]
    block, x = model.Block(model.GPTConfig(width=D)), torch.randn(B, T, D)
    expert = mixture.expert_mlp(D)
    names = [name for name, _ in expert.named_parameters()]
    assert names == ["mlp_in.weight", "mlp_out.weight"]
    expert.load_state_dict({name: block.get_parameter(name) for name in names})
    # A block without attention adds its MLP to what it gets.
    nn.init.zeros_(block.attention_out.weight)
    torch.testing.assert_close(x + expert(block.mlp_norm(x)), block(x))
    # A mixture of one expert is that expert: the block is the GPT's, and drops as it.
    config = model.GPTConfig(width=D, heads=2, dropout=0.5)
    block, layer = model.Block(config), mixture.Mixture(D, 1, k=1)
    layer.experts["0"].load_state_dict({n: block.get_parameter(n) for n in names})
    of_experts = modules["expert_block"].ExpertBlock(config, layer)
    of_experts.load_state_dict(block.state_dict(), strict=False)
    outputs = []
    for one in (block, of_experts):
        torch.manual_seed(0)
        outputs.append(one(x))
    torch.testing.assert_close(*outputs)


def test_a_dropped_token_is_left_to_the_residual() -> None:
    torch.manual_seed(0)
    layer, x = mixture.Mixture(D, 4, k=1, capacity_factor=0.5), torch.randn(1, 16, D)
    y, chosen = layer(x)[0], layer.router(x[0]).argmax(1)
    kept = [i for e in range(4) for i in (chosen == e).nonzero()[:2, 0].tolist()]
    dropped = sorted(set(range(16)) - set(kept))
    assert len(dropped) == layer.dropped == 8 and layer.chosen.sum() == 16
    assert y[dropped].abs().max() == 0 and y[kept].abs().sum(1).min() > 0
    block = modules["expert_block"].ExpertBlock(
        modules["model"].GPTConfig(width=D), layer
    )
    with mock.patch.object(layer, "forward", torch.zeros_like):
        attention_alone = block(x)
    torch.testing.assert_close(
        block(x) - attention_alone, layer(block.mlp_norm(attention_alone))
    )


def test_what_is_dropped_depends_on_the_senders_other_samples() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, T, D)
    layers = []
    for senders in (1, 2, 4):
        torch.manual_seed(1)
        layers.append(mixture.Mixture(D, 4, 2, 1.0, senders))
    outputs = [layer(x) for layer in layers]
    assert [layer.dropped for layer in layers] == [3, 6, 8]
    assert layers[0].chosen.tolist() == layers[2].chosen.tolist()
    assert not torch.equal(outputs[0], outputs[1])
    for layer in layers:
        layer.capacity_factor = 100
    outputs = [layer(x) for layer in layers]
    torch.testing.assert_close(outputs[0], outputs[1])
    assert [layer.dropped for layer in layers] == [0, 0, 0]


def test_balance_loss_is_one_if_even_and_as_many_as_experts_if_not() -> None:
    even = torch.full((8, 4), 0.25).double()
    for_each = torch.arange(4).repeat(2)[:, None]
    assert mixture.balance_loss(even, for_each).item() == pytest.approx(1)
    certain = torch.eye(4)[[2] * 8].double()
    assert mixture.balance_loss(certain, torch.full((8, 1), 2)).item() == 4
    # By Switch, equation 4: f = (3/4, 1/4, 0), P is the mean of each column.
    found = mixture.balance_loss(PROBABILITIES, PROBABILITIES.argmax(1)[:, None])
    assert found.item() == pytest.approx(3 * (0.75 * 2.1 / 4 + 0.25 * 1.5 / 4))
    # A rank without tokens adds nothing, rather than 0 / 0.
    none = PROBABILITIES[:0].clone().requires_grad_()
    found = mixture.balance_loss(none, none.argmax(1, keepdim=True))
    found.backward()
    assert found.item() == 0 and none.grad is not None


def test_balance_loss_has_a_graph_if_a_checkpoint_is_not_reentrant() -> None:
    x, routers = torch.randn(B, T, D).double().requires_grad_(), []
    for recomputes in (False, True):
        torch.manual_seed(0)
        layer = mixture.Mixture(D, E).double()
        y = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        (y.square().sum() + 0.1 * layer.balance_loss).backward()
        routers.append(layer.router.weight.grad)
    torch.testing.assert_close(*routers)
    assert checkpoint(layer, x, use_reentrant=True).requires_grad
    assert not layer.balance_loss.requires_grad
    assert "needs `use_reentrant=False`" in mixture.Mixture.__doc__


def test_mean_of_local_balance_losses_is_not_the_global_one() -> None:
    torch.manual_seed(0)
    x, found = torch.randn(4, T, D).double(), []
    for senders in (1, 4):
        torch.manual_seed(1)
        layer = mixture.Mixture(D, 4, 2, 1.0, senders).double()
        layer(x)
        found.append(layer.balance_loss.item())
    whole, local = found
    assert local > whole + 0.01
    by_sample = []
    layer.senders = 1
    for sample in x:
        layer(sample[None])
        by_sample.append(layer.balance_loss.item())
    assert sum(by_sample) / 4 == pytest.approx(local)


# --- Sharded, and in one process. ----------


CASES = [(1, 1.0), (2, 0.5), (2, 1.25), (3, 100.0)]  # k and capacity factor


def layer_errors() -> list[tuple[dict[str, float], int]]:
    """Compare sharded layers with one process; of each, errors and drops of all."""
    n, rank, results = dist.get_world_size(), dist.get_rank(), []
    alone = dist.new_subgroups(group_size=1)[0]
    for k, factor in CASES:
        layers = []
        for kind, setting in (("Mixture", {"senders": n}), ("MixtureOfExperts", {})):
            torch.manual_seed(3)
            layers.append(getattr(mixture, kind)(D, E, k, factor, **setting).double())
        whole, ours = layers
        x, weight = torch.randn(2, n * B, T, D).double()
        x.requires_grad_()
        mine = x.detach().chunk(n)[rank].clone().requires_grad_()
        y, z = whole(x), ours(mine)
        # The mean over all ranks, in which each output counts differently.
        ((y * weight).mean() + 0.1 * whole.balance_loss).backward()
        ((z * weight.chunk(n)[rank]).mean() + 0.1 * ours.balance_loss).backward()
        mixture.mean_gradients(ours, alone)
        # What a rank's input adds to the mean loss is an n-th of its local gradient.
        pairs: dict[str, Any] = {"x": (mine.grad / n, x.grad.chunk(n)[rank])}  # type: ignore
        pairs["y"] = z, y.chunk(n)[rank]
        for name, p in ours.named_parameters():
            pairs[name] = p.grad, whole.get_parameter(name).grad
        dropped = torch.tensor([ours.dropped, *ours.chosen])
        dist.all_reduce(dropped)
        assert dropped.tolist() == [whole.dropped, *whole.chosen.tolist()]
        errors = {name: (p - q).abs().max().item() for name, (p, q) in pairs.items()}
        results.append((errors, whole.dropped))
    assert len(results) == len(CASES)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharded_mixture_is_one_processs(
    worker_pool: WorkerPool, world_size: int
) -> None:
    found = worker_pool.run(layer_errors, world_size=world_size)
    assert len(found) == world_size
    for of_rank in found:
        assert len(of_rank) == len(CASES) == 4
        for (_, factor), (errors, dropped) in zip(CASES, of_rank, strict=True):
            assert len(errors) == 3 + 2 * E // world_size
            assert max(errors.values()) < 1e-13, errors
            assert (dropped == 0) == (factor > 2)


def router_without_tokens() -> list[Any]:
    """Take a backward pass in which the last rank has no tokens."""
    torch.manual_seed(3)
    layer = mixture.MixtureOfExperts(D, E).double()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    y = layer(torch.randn(0 if is_last else B, T, D).double())
    (y.square().sum() + layer.balance_loss).backward()
    gradients = [p.grad.abs().max().item() for p in layer.parameters()]
    return [len(y), layer.balance_loss.item(), *gradients]


def test_rank_without_tokens_computes_for_the_others(worker_pool: WorkerPool) -> None:
    first, last = worker_pool.run(router_without_tokens)
    assert len(first) == len(last) == 2 + 1 + E // 2 * 2
    assert first[0] == B and min(first[1:]) > 1e-3
    assert last[:3] == [0, 0, 0] and 1e-3 < min(last[3:]) < 1e3


def ranks_with_unequally_many_samples() -> float:
    """Compare with a mixture that sees this rank's samples alone."""
    rank, outputs = dist.get_rank(), []
    x = torch.randn(1 + 2 * rank, T + rank, D).double()
    for kind in (mixture.Mixture, mixture.MixtureOfExperts):
        torch.manual_seed(3)
        outputs.append(kind(D, E).double()(x))
    return (outputs[0] - outputs[1]).abs().max().item()


def test_ranks_may_have_unequally_many_samples(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(ranks_with_unequally_many_samples, world_size=4)
    assert len(found) == 4 and max(found) < 1e-13


def three_experts(senders: int) -> None:
    """Build a layer, or call it, with numbers that do not divide."""
    if senders:
        mixture.Mixture(D, 4, senders=senders)(torch.zeros(4, T, D))
    mixture.MixtureOfExperts(D, 3)


@pytest.mark.parametrize(
    ("senders", "text"),
    [(0, "3 experts are not divisible by 2"), (3, "4 samples are not those of 3 rank")],
)
def test_what_does_not_divide_is_refused(
    worker_pool: WorkerPool, senders: int, text: str
) -> None:
    with pytest.raises(RankError, match=text):
        worker_pool.run(three_experts, senders)


@pytest.mark.parametrize("k", [0, 5])
def test_no_choice_and_more_than_there_are_experts_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"a token cannot use {k} of 4 experts"):
        mixture.Mixture(D, 4, k=k)


# --- Whose gradients are averaged. ----------


def average_over_copies(ours: Any, copies: Any) -> None:
    """Forget that an expert's gradient is a sum over its group already."""
    for p in ours.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG, copies)


def ratios_on_a_mesh(expert_ranks: int) -> list[dict[str, float]]:
    """Average gradients rightly, over copies, over all; compare with one process.

    Of each parameter return how many times its gradient is the right one, nan if it is
    no multiple of it.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    shape = n // expert_ranks, expert_ranks
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert"))
    group, copies = mesh["expert"].get_group(), mesh["data"].get_group()
    settings = {"Mixture": {"senders": n}, "MixtureOfExperts": {"group": group}}
    x, layers, results = torch.randn(n * B, T, D).double(), [], []
    for kind, setting in settings.items():
        torch.manual_seed(3)
        layers.append(getattr(mixture, kind)(D, E, **setting).double())
    whole, ours = layers
    whole(x).square().mean().backward()
    for average, among in (
        (mixture.mean_gradients, copies),
        (average_over_copies, copies),
        (mixture.mean_gradients, None),
    ):
        ours.zero_grad()
        ours(x.chunk(n)[rank]).square().mean().backward()
        average(ours, among)
        ratios = {}
        for name, p in ours.named_parameters():
            right = whole.get_parameter(name).grad
            ratio = ((p.grad * right).sum() / right.square().sum()).item()
            is_multiple = torch.allclose(p.grad, ratio * right)
            ratios[name] = ratio if is_multiple else float("nan")
        results.append(ratios)
    return results


@pytest.mark.parametrize("expert_ranks", [1, 2, 4])
def test_experts_are_summed_over_the_data_axis_and_divided_by_all(
    worker_pool: WorkerPool, expert_ranks: int
) -> None:
    found = worker_pool.run(ratios_on_a_mesh, expert_ranks, world_size=4)
    assert len(found) == 4
    count = 2 * E // expert_ranks
    for right, by_copies, by_all in found:
        assert list(right.values()) == pytest.approx([1.0] * (1 + count))
        # Each rank's gradient of an expert holds the tokens of its expert ranks.
        del by_copies["router.weight"]
        assert list(by_copies.values()) == pytest.approx([expert_ranks] * count)
        # The mean over all ranks is of different experts, unless each rank has all.
        assert by_all.pop("router.weight") == pytest.approx(1)
        mixed = [ratio != ratio for ratio in by_all.values()]
        assert mixed == [expert_ranks > 1] * count


def wrapped_by_ddp() -> list[bool]:
    """Wrap a mixture in DDP, run backward; tell whose experts and gradients are here.

    Are the experts still this rank's own, are they rank 0's, and is the gradient of
    the first one here that of the first one on rank 0?
    """
    torch.manual_seed(3)
    layer = mixture.MixtureOfExperts(D, 4)
    before = [p.detach().clone() for p in layer.experts.parameters()]
    model = DistributedDataParallel(layer)
    after = list(layer.experts.parameters())
    (
        torch.randn(2, B, T, D)[dist.get_rank()] * model(torch.randn(B, T, D))
    ).sum().backward()
    found = [all(map(torch.equal, after, before))]
    assert len(after) == len(before) == 4
    for mine in (after, [p.grad for p in after]):
        of_rank_0 = [torch.as_tensor(t).detach().clone() for t in mine]
        for tensor in of_rank_0:
            dist.broadcast(tensor, 0)
        found.append(all(map(torch.equal, mine, of_rank_0)))
    return found


def test_ddp_copies_rank_zeros_experts_and_averages_different_ones(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(wrapped_by_ddp)
    assert found == [[True, True, True], [False, True, True]]


# --- Clipped by one norm. ----------

LIMIT = 0.05  # far below the norm of the first gradient


def by_kind(model: Any) -> list[list[Any]]:
    """Return the experts' parameters, and all others."""
    named = list(model.named_parameters())
    return [
        [p for name, p in named if ("experts" in name.split(".")) == is_expert]
        for is_expert in (True, False)
    ]


def clip_by_one_norm(model: Any, group: Any) -> float:
    """Clip by experts' squares, summed over their group, and all others', once."""
    squares = [
        torch.as_tensor(whole(nn.utils.get_total_norm([p.grad for p in part])).square())
        for part in by_kind(model)
    ]
    dist.all_reduce(squares[0], group=group)
    norm = sum(squares).sqrt()  # type: ignore
    for part in by_kind(model):  # FSDP's DTensors are on two meshes
        nn.utils.clip_grads_with_norm_(part, LIMIT, norm)
    return norm.item()


def whole(tensor: Any) -> Tensor:
    """Gather a DTensor; return a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_each_kind(model: Any) -> None:
    """Clip experts by their norm, and all others by theirs."""
    for part in by_kind(model):
        nn.utils.clip_grad_norm_(part, LIMIT)


def clipped(way: str, with_fsdp: bool) -> tuple[float, float, float, int]:
    """Clip on four ranks; return both norms, the largest error, and what is compared.

    The error is relative, of the clipped gradients, to those of one process.
    """
    lesson = load_chapter(ROOM)["with_fsdp"]
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    group = grid["expert"].get_group()
    alone, ours = both.both_models(torch.device("cpu"), group)
    if with_fsdp:
        lesson.shard(ours, init_device_mesh("cpu", (4,)), grid["data"], True)
    both.add_gradients_of_both(0, alone, ours)
    if not with_fsdp:
        mixture.mean_gradients(ours, grid["data"].get_group())
    norm = right = nn.utils.clip_grad_norm_(alone.parameters(), LIMIT).item()
    if way == "one norm":
        norm = clip_by_one_norm(ours, group)
    elif way == "each kind":
        clip_each_kind(ours)
    else:
        norm = whole(nn.utils.clip_grad_norm_(ours.parameters(), LIMIT)).item()
    errors = [
        torch.dist(whole(p.grad), grad) / grad.norm()
        for name, p in ours.named_parameters()
        if (grad := alone.get_parameter(name).grad) is not None
    ]
    return norm, right, torch.stack(errors).max().item(), len(errors)


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_experts_are_clipped_by_one_norm(
    worker_pool: WorkerPool, with_fsdp: bool
) -> None:
    found = worker_pool.run(clipped, "one norm", with_fsdp, world_size=4)
    assert len(found) == 4
    for norm, right, error, compared in found:
        assert norm == pytest.approx(right, rel=1e-12) and right > 10 * LIMIT
        # Four matrices of two experts each, and what every rank has.
        assert error < 1e-12 and compared == 4 + 13


def test_each_rank_clips_its_experts_by_another_norm(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(clipped, "plain", False, world_size=4)
    norms = [norm for norm, *_ in found]
    # Ranks with the same experts have the same norm, which is too small.
    assert norms[:2] == norms[2:] and abs(norms[0] - norms[1]) > 0.01
    assert len(found) == 4
    for norm, right, error, _ in found:
        assert norm < 0.99 * right and error > 0.01


SAME_MESH = "RuntimeError: All operands in aten.stack.default must have the same mesh"


def test_fsdp_refuses_one_norm_of_two_meshes(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=re.escape(SAME_MESH)):
        worker_pool.run(clipped, "plain", True, world_size=4)
    found = worker_pool.run(clipped, "each kind", True, world_size=4)
    assert len(found) == 4
    assert min(error for _, _, error, _ in found) > 0.05


class OtherNames(nn.Module):
    """A mixture whose experts are in a list of another name."""

    def __init__(self, layer: Any) -> None:
        """Keep router and experts."""
        super().__init__()
        self.router, self.mlps = layer.router, layer.experts


def averaged(change: str) -> list[tuple[str, float, bool]]:
    """Average gradients; of each tell how wrong it is, and whether it is None."""
    n, rank, layers = dist.get_world_size(), dist.get_rank(), []
    for kind, setting in (("Mixture", {"senders": n}), ("MixtureOfExperts", {})):
        torch.manual_seed(3)
        layers.append(getattr(mixture, kind)(D, E, **setting).double())
    alone, ours = layers
    if change == "frozen":
        ours.router.requires_grad_(False)
    if change == "unused":
        for layer in layers:
            layer.of_rank_0 = nn.Parameter(torch.ones(1).double())
            layer.of_nobody = nn.Parameter(torch.ones(1).double())
    x = torch.randn(n * B, T, D).double()
    alone(x).square().mean().backward()
    ours(x.chunk(n)[rank]).square().mean().backward()
    if change == "unused":
        alone.of_nobody.grad = torch.zeros(1).double()
        (alone.of_rank_0 / n).sum().backward()
        if rank == 0:
            ours.of_rank_0.sum().backward()
    copies = dist.new_subgroups(group_size=1)[0]
    mixture.mean_gradients(OtherNames(ours) if change == "named" else ours, copies)
    found = []
    for name, p in ours.named_parameters():
        right = alone.get_parameter(name).grad
        grad = torch.zeros_like(right) if p.grad is None else p.grad
        error = (torch.dist(grad, right) / right.norm().clamp(min=1e-6)).item()
        found.append((name, error, p.grad is None))
    return found


def test_a_frozen_router_has_no_gradient_to_average(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(averaged, "frozen")
    assert len(found) == 2
    for (name, _, is_missing), *of_experts in found:
        assert name == "router.weight" and is_missing
        assert len(of_experts) == 8 and max(e for _, e, _ in of_experts) < 1e-12


def test_what_some_or_all_ranks_did_not_use_counts_as_zero(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(averaged, "unused")
    assert len(found) == 2
    for of_rank in found:
        assert {"of_rank_0", "of_nobody"} < {name for name, *_ in of_rank}
        assert len(of_rank) == 2 + 1 + 8
        assert max(e for _, e, _ in of_rank) < 1e-12
        assert not any(is_missing for *_, is_missing in of_rank)


def test_experts_are_known_by_their_name(worker_pool: WorkerPool) -> None:
    found = worker_pool.run(averaged, "named")
    assert len(found) == 2
    for (_, error, _), *of_experts in found:
        assert error < 1e-12 and len(of_experts) == 8
        assert min(error for _, error, _ in of_experts) > 0.4


# --- The script. ----------


def lesson_output(outputs: list[str], dropped: int) -> None:
    """Assert what the script says, on any number of ranks."""
    n = len(outputs)
    assert outputs[1:] == [""] * (n - 1)
    lines = outputs[0].splitlines()
    assert len(lines) == 7
    assert lines[1] == "experts summed over copies      | gradients 0% wrong"
    nbytes = re.findall(r"\[([\d, ]+)\]", lines[2])
    given = [list(map(int, of_rank.split(", "))) for of_rank in nbytes]
    assert len(given) == n
    assert all(len(of_rank) == 4 for of_rank in given)
    # Forward: there, back. Backward gives the same again: back's gradients, there's.
    assert all(of_rank[:2] == of_rank[2:] for of_rank in given)
    pairs = 2 * n * 4 * 32
    assert sum(map(sum, given)) == 4 * (pairs - dropped) * 32 * 8
    loads, kinds = [], ["fresh router", "alpha 0.0", "alpha 0.03"]
    for kind, line in zip(kinds, lines[3:6], strict=True):
        assert line.split("|")[0].rstrip() == f"choices, {kind}"
        *chosen, lost = map(int, re.findall(r"\d+", line.split("|")[1]))
        assert len(chosen) == 4 and sum(chosen) == pairs
        loads.append((max(chosen), lost))
    fresh, without, with_loss = loads
    assert fresh[1] == dropped
    assert with_loss[0] < without[0] and with_loss[1] < without[1] / 2
    assert (
        lines[-1]
        == "check: a gradient and 80 steps are one process's, bytes the formula's"
    )


def with_fsdp(fault: str) -> tuple[Any, str]:
    """Be a rank of with_fsdp.py, with a fault; return how it ends, and its output."""
    lesson, output = load_chapter(ROOM)["with_fsdp"], io.StringIO()
    shard, models = lesson.shard, lesson.both_models

    def shard_badly(model: Any, everyone: Any, copies: Any, divide: bool) -> None:
        copies = everyone if fault == "sharded over all" else copies
        shard(model, everyone, copies, divide and fault != "default divisor")

    def in_float32(device: torch.device, group: Any) -> list[Any]:
        return [model.float() for model in models(device, group)]

    changes = {"shard": shard_badly, "leave": mock.Mock()}
    if fault == "float32":
        changes["both_models"] = in_float32
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.redirect_stdout(output))
        ranks = load_chapter(ROOM)["ranks"]
        stack.enter_context(mock.patch.object(ranks, "leave"))
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(lesson, name, change))
        stack.enter_context(in_the_pool(lesson))
        try:
            lesson.main()
        except SystemExit as end:
            return end.code, output.getvalue()
    return 0, output.getvalue()


def ratios_of_two_layers() -> dict[str, float]:
    """Shard two layers, of which the first is 1.5 times what is right; compare both."""
    lesson, mesh = load_chapter(ROOM)["with_fsdp"], init_device_mesh("cpu", (1,))
    ours, alone = (
        nn.Sequential(nn.Linear(2, 2, False), nn.Linear(2, 3, False)) for _ in "ab"
    )
    ours.load_state_dict(alone.state_dict())
    with torch.no_grad():
        next(ours.parameters()).mul_(1.5)
    lesson.fully_shard(ours, mesh=mesh)
    return lesson.ratios(ours, alone, "data")


def test_the_largest_error_of_all_weights_is_compared(worker_pool: WorkerPool) -> None:
    (found,) = worker_pool.run(ratios_of_two_layers, world_size=1)
    right = {"0.weight": 1.5, "1.weight": 1.0, "error": 0.5}
    assert found == pytest.approx(right)


def sharded_errors(expert_ranks: int, dtype: torch.dtype) -> tuple[float, int]:
    """Shard by with_fsdp.py; return its largest relative error, and what it compared.

    Gradients of two backward passes are accumulated.
    """
    lesson, n = load_chapter(ROOM)["with_fsdp"], dist.get_world_size()
    shape = (n // expert_ranks, expert_ranks)
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert"))
    models = both.both_models(torch.device("cpu"), grid["expert"].get_group())
    alone, ours = (model.to(dtype) for model in models)
    lesson.shard(ours, init_device_mesh("cpu", (n,)), grid["data"], True)
    for step in range(2):
        both.add_gradients_of_both(step, alone, ours)
    found = lesson.ratios(ours, alone, "grad")
    return found["error"], sum(".experts." in name for name in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("expert_ranks", [1, 2], ids=["two copies", "one copy"])
def test_experts_of_any_number_of_copies_are_divided_once(
    worker_pool: WorkerPool, expert_ranks: int, dtype: torch.dtype
) -> None:
    found = worker_pool.run(sharded_errors, expert_ranks, dtype)
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    assert [count for _, count in found] == [2 * both.E // expert_ranks] * 2
    assert max(error for error, _ in found) < limit


def divided_by_two(dtype: torch.dtype, is_forced: bool) -> float:
    """Have FSDP divide the gradient 8 by 2 on a mesh of one rank."""
    mesh = init_device_mesh("cpu", (1,))
    layer: Any = nn.Linear(1, 1, bias=False).to(dtype)
    layer = load_chapter(ROOM)["with_fsdp"].fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(2.0)
    layer.set_force_sum_reduction_for_comms(is_forced)
    layer(torch.full((1, 1), 8.0, dtype=dtype)).sum().backward()
    return layer.weight.grad.full_tensor().item()


def test_on_one_rank_fsdp_divides_by_a_factor_twice(worker_pool: WorkerPool) -> None:
    found = {
        (dtype, is_forced): worker_pool.run(
            divided_by_two, dtype, is_forced, world_size=1
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for is_forced in (True, False)
    }
    once = {(torch.bfloat16, False), (torch.float32, False)}
    assert len(found) == 8
    assert found == {key: [4.0 if key in once else 2.0] for key in found}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["default divisor", "sharded over all", "float32"])
def test_wrong_divisor_or_mesh_is_found(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(with_fsdp, fault, world_size=4)
    # In float32 it runs on gloo, too, but not to 1e-9.
    assert [code for code, _ in ends] == [1] * 4
    if fault == "float32":
        assert "divisor 4 | experts' gradients 1.00 to 1.00 x right" in ends[0][1]


@pytest.mark.slow
def test_fsdp_divides_an_experts_gradient_by_its_copies_alone(
    worker_pool: WorkerPool,
) -> None:
    outputs = worker_pool.run(run_lesson, ROOM, "with_fsdp", world_size=4)
    assert outputs[0].splitlines() == [
        "divisor 2 | experts' gradients 2.00 to 2.00 x right",
        "divisor 4 | experts' gradients 1.00 to 1.00 x right",
        "experts' numbers, by rank | [8192, 8192, 8192, 8192]",
        "all others', by rank      | [3408, 3408, 3408, 3408]",
        "check: weights of 3 steps are one process's",
    ]


@pytest.mark.smoke
def test_experts_train_as_in_one_process(worker_pool: WorkerPool) -> None:
    outputs = worker_pool.run(run_lesson, ROOM, "experts")
    lesson_output(outputs, 52)
    (wrong,) = re.findall(r"^experts averaged .* (\d+)% wrong$", outputs[0], re.M)
    assert int(wrong) > 100


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--expert-ranks=2"], []], ids=str)
def test_experts_train_on_a_mesh(worker_pool: WorkerPool, words: list[str]) -> None:
    run = functools.partial(worker_pool.run, world_size=4)
    lesson_output(run(run_lesson, ROOM, "experts", *words), 122)


def ending_with(fault: str) -> tuple[Any, str, list[str]]:
    """Run experts.py with one thing wrong; return exit code, complaint and words."""
    AllToAll, errors, said = mixture.AllToAll, io.StringIO(), []

    def stays_here(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.new_ones(sum(ctx.sent), grad.shape[1]), None, None, None

    def forgets_division(model: nn.Module, copies: Any = None) -> None:
        mixture.mean_gradients(model, copies)
        for name, p in model.named_parameters():
            if ".experts." in name:
                p.grad = torch.as_tensor(p.grad) * dist.get_world_size()

    def next_expert(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weights, chosen = probabilities.topk(k)
        return weights / weights.sum(1, keepdim=True), (chosen + dist.get_rank()) % 4

    def gives_more(layer: Any, rows: Tensor, counts: Tensor) -> Tensor:
        padded = torch.cat([rows, rows])  # as if each row were sent twice
        doubled = through(
            layer, padded[torch.arange(len(rows)).repeat_interleave(2)], 2 * counts
        )
        return doubled[::2]

    def off_by(error: float, where: str) -> Any:
        averaged = iter([2.0])  # what is averaged over all ranks is asked for first
        return lambda _, __, of: next(averaged, error if of == where else 0.0)

    through = mixture.MixtureOfExperts.through_experts
    faulty = functools.partial(mixture.MixtureOfExperts, capacity_factor=1.0)
    faults: dict[str, tuple[Any, str, Any]] = {
        "backward": (AllToAll, "backward", staticmethod(stays_here)),
        "division": (experts, "mean_gradients", forgets_division),
        "router": (mixture, "choose_experts", next_expert),
        "capacity": (both, "MixtureOfExperts", faulty),
        "bytes": (mixture.MixtureOfExperts, "through_experts", gives_more),
        "gradients alone": (experts, "largest_error", off_by(1e-10, "grad")),
        "weights alone": (experts, "largest_error", off_by(1e-7, "data")),
    }
    with (
        contextlib.redirect_stderr(errors),
        mock.patch.object(modules["ranks"], "leave"),
        mock.patch.object(experts, "STEPS", 1),
        mock.patch.object(experts, "say", said.append),
        mock.patch.object(*faults[fault]),
    ):
        try:
            return 0, run_lesson(ROOM, "experts"), said
        except SystemExit as end:
            return end.code, errors.getvalue().strip(), said


@pytest.mark.parametrize(
    "fault",
    [
        *("backward", "division", "router", "capacity", "bytes"),
        *("gradients alone", "weights alone"),
    ],
)
def test_experts_gone_wrong_are_noticed(worker_pool: WorkerPool, fault: str) -> None:
    ends = worker_pool.run(ending_with, fault)
    assert [code for code, *_ in ends] == [1, 1]
    complaint = "check failed on ranks [0, 1], not so: a gradient and 2 steps are one"
    assert ends[0][1].startswith(complaint)
    wrong = {"division": (1, "summed over copies     ", "100%")}
    for name in ("gradients alone", "weights alone"):
        wrong[name] = 0, "averaged over all ranks", "200%"
    if fault in wrong:
        line, gradients, apart = wrong[fault]
        for _, _, said in ends:
            assert said[line] == f"experts {gradients} | gradients {apart} wrong"


def refusal(ranks: int, *words: str) -> tuple[Any, str]:
    """Start experts.py with options that it must refuse before it joins."""
    errors, world = io.StringIO(), {"WORLD_SIZE": str(ranks)}
    with contextlib.redirect_stderr(errors), mock.patch.dict(os.environ, world):
        try:
            run_lesson(ROOM, "experts", *words)
        except SystemExit as end:
            return end.code, errors.getvalue()
    return 0, ""


@pytest.mark.parametrize(
    ("ranks", "words", "text"),
    [
        # The experts do not divide by 3, nor do the ranks by 2.
        (3, [], "of 3 ranks, 3 cannot share 4 experts; see --expert-ranks"),
        (3, ["--expert-ranks=2"], "of 3 ranks, 2 cannot share 4 experts; see --exp"),
        (1, ["--expert-ranks=5"], "argument --expert-ranks/--expert_ranks: '5' is no"),
        (1, ["--expert-ranks=0"], "argument --expert-ranks/--expert_ranks: '0' is no"),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(
    worker_pool: WorkerPool, ranks: int, words: list[str], text: str
) -> None:
    ((code, said),) = worker_pool.run(refusal, ranks, *words, world_size=1)
    assert code == 2 and len(said.splitlines()) == 1
    assert said.startswith(f"experts.py: {text}")


# --- The exercise. ----------


class FlawedLayer(broken_experts.TwoExperts):
    """The right layer, but for one flaw."""

    def __init__(self, *parts: Any, flaw: str) -> None:
        """Keep the flaw's name."""
        super().__init__(*parts)
        self.flaw = flaw

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, D) to something like (N, D)."""
        y = super().forward(x)
        weight, chosen = self.router(x).softmax(1).max(1)
        rows = (y - x) / weight[:, None]
        if self.flaw == "no residual":
            return y - x
        if self.flaw == "by expert":
            return x + weight[:, None] * rows[chosen.argsort(stable=True)]
        if self.flaw == "sorted again":
            order = chosen.argsort(stable=True)
            return x + weight[:, None] * rows[order][order]
        return rows[:3]


def step_with(layer: Any, x: Tensor, labels: Tensor, optimizer: Any, flaw: str) -> None:
    """Take a step in which gradients are averaged in a wrong way."""
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(layer(x), labels).backward()
    for p in layer.router.parameters():
        if flaw != "own router" and not (flaw == "own bias" and p.ndim == 1):
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    for p in layer.expert.parameters():
        if flaw == "mean of experts":
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        if flaw == "a quarter":
            p.grad /= 4
        if flaw == "own bias":
            p.grad /= 2
    if flaw != "no step":
        optimizer.step()


OTHERS = "the outputs are not those of one process"
HINTS = {
    "no residual": OTHERS,
    "by expert": "the results lie by expert, and not in the order in which the tok",
    "sorted again": "the results are sorted once more: result i is of token order[i]",
    "three rows": "the layer returns torch.Size([3, 4]), not (N, D)",
    "own router": "the router has moved by this rank's tokens only",
    "mean of experts": "this rank's expert has moved by the mean of two experts' grad",
    "not divided": "this rank's expert has moved 2 times as far as in one process",
    "a quarter": "this rank's expert has not moved as in one process",
    "no step": "the router has not moved as in one process",
    "own bias": "of the biases: the router has moved by this rank's tokens only",
}


def tell_experts() -> list[str]:
    """Let the checker try the stub, the answer, and answers with a flaw."""
    stub, checker = CHECKERS["broken_experts"], CHECKERS["check_broken_experts"]
    right = broken_experts.TwoExperts
    answers = [
        (stub.TwoExperts, stub.train_experts),
        (right, broken_experts.train_experts),
        (right, stub.train_experts),
    ]
    for number, flaw in enumerate(HINTS):
        layer = functools.partial(FlawedLayer, flaw=flaw) if number < 4 else right
        answers.append((layer, functools.partial(step_with, flaw=flaw)))
    return [checker.try_experts(answer) for answer in answers]


def test_broken_experts_are_told_what_is_wrong(worker_pool: WorkerPool) -> None:
    told = worker_pool.run(tell_experts)
    due = ["it ended with: Split sizes doesn't match total dim 0 size", ""]
    due += [HINTS["mean of experts"], *HINTS.values()]
    assert len(told) == 2 and len(due) == 13
    for of_rank in told:
        cut = [text[: len(d)] or text for text, d in zip(of_rank, due, strict=True)]
        assert cut == due
