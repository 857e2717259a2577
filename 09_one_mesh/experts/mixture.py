"""A mixture of experts, on one rank or sharded over n: carry away this one file.

E MLPs stand in the place of a block's one, and a token uses k of them. Shapes: B
samples of T tokens, width D; a rank has N = B T tokens, and sends them to E experts. A
pair is a token and one of its k choices: there are k N.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def choose_experts(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of (N, E) as weights and the experts they are of, (N, k).

    With k > 1 a token's weights add up to 1 (GShard, Mixtral). With k = 1 the weight is
    the probability itself (Switch): divided by itself it would be 1 for any router.
    """
    weights, experts = probabilities.topk(k)
    return (weights / weights.sum(1, keepdim=True) if k > 1 else weights), experts


def pairs_with_a_place(experts: Tensor, count: int, capacity: int) -> Tensor:
    """Return the pairs that are kept, the first `capacity` of each expert.

    Takes (N, k) choices among `count` experts. Pair i is choice i // N of token i % N:
    all first choices come before any second one (GShard, algorithm 1). Returned are
    the indices of the kept ones, those of expert 0 first.
    """
    expert = experts.T.flatten()  # (k N,)
    one_hot = F.one_hot(expert, count)
    place = (one_hot.cumsum(0) * one_hot).sum(1)  # counted from 1, in its expert
    kept = (place <= capacity).nonzero()[:, 0]
    return kept[expert[kept].argsort(stable=True)]


def balance_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Return E times the sum of f P over the experts: 1 if the load is even.

    f is the part of all pairs that chose an expert, dropped ones too, and P its mean
    probability (Switch, equation 4 without its alpha; there k is 1).
    """
    if not len(experts):  # this rank has no tokens; a mean would be 0 / 0
        return probabilities.sum()
    E = probabilities.shape[1]
    f = experts.flatten().bincount(minlength=E) / experts.numel()
    return E * (f.to(probabilities) * probabilities.mean(0)).sum()


class Mixture(nn.Module):
    """E experts in one process, with the capacity rule of any number of ranks.

    In `checkpoint` it needs `use_reentrant=False`: else `balance_loss` has no graph.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        k: int = 2,
        capacity_factor: float = 1.25,
        senders: int = 1,
    ) -> None:
        """Draw a router and `experts` MLPs of this width; none has a bias.

        Capacity and balance are those of `senders` ranks: each has as many samples.
        """
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(f"a token cannot use {k} of {experts} experts")
        self.k, self.capacity_factor, self.senders = k, capacity_factor, senders
        self.count = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict(
            {str(e): expert_mlp(width) for e in range(experts)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to the same shape; set `balance_loss`, `chosen`, `dropped`."""
        if len(x) % self.senders:
            raise ValueError(f"{len(x)} samples are not those of {self.senders} ranks")
        self.balance_loss = x.new_zeros(())  # the mean of the senders' own
        self.chosen = torch.zeros(self.count, dtype=torch.int64, device=x.device)
        self.dropped = 0
        parts = [self.of_one_sender(part) for part in x.chunk(self.senders)]
        return torch.cat(parts)

    def of_one_sender(self, x: Tensor) -> Tensor:
        """Map one sender's (B, T, D) to the same shape."""
        tokens = x.flatten(0, 1)  # (N, D)
        probabilities = self.router(tokens).softmax(1)  # (N, E)
        weights, experts = choose_experts(probabilities, self.k)
        pairs = experts.numel()
        capacity = math.ceil(round(self.capacity_factor * pairs / self.count, 6))
        kept = pairs_with_a_place(experts, self.count, capacity)
        token = kept % len(tokens)
        counts = experts.T.flatten()[kept].bincount(minlength=self.count)
        rows = self.through_experts(tokens[token], counts)
        rows = rows * weights.T.flatten()[kept, None]
        loss = balance_loss(probabilities, experts)
        self.balance_loss = self.balance_loss + loss / self.senders
        self.chosen += experts.flatten().bincount(minlength=self.count)
        self.dropped += pairs - len(kept)
        # A token none of whose choices was kept gets zero: the residual passes it on.
        return rows.new_zeros(tokens.shape).index_add(0, token, rows).view_as(x)

    def through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map (M, D) to the same shape; the first counts[0] rows are for expert 0."""
        parts = rows.split(counts.tolist())
        both = zip(self.experts.values(), parts, strict=True)
        return torch.cat([expert(part) for expert, part in both])


def expert_mlp(width: int) -> nn.Sequential:
    """Build the two matrices of a GPT's block, under their names."""
    return nn.Sequential(
        OrderedDict(
            mlp_in=nn.Linear(width, 4 * width, bias=False),
            gelu=nn.GELU(),
            mlp_out=nn.Linear(4 * width, width, bias=False),
        )
    )


class AllToAll(torch.autograd.Function):
    """Send rows to the ranks of a group; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, rows, received, sent, group=None):
        """Send sent[r] of the (M, D) rows to rank r; from it come received[r]."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
        return arrived

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        """Send the other way round: what was received is sent."""
        grad = AllToAll.apply(grad, ctx.sent, ctx.received, ctx.group)
        return grad, None, None, None


class MixtureOfExperts(Mixture):
    """A mixture of which each of n ranks has E / n experts, and tokens of its own."""

    def __init__(self, width, experts, k=2, capacity_factor=1.25, group=None):
        """Draw what `Mixture` draws, and keep this rank's experts; seed all alike."""
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        if experts % n:
            raise ValueError(f"{experts} experts are not divisible by {n} ranks")
        super().__init__(width, experts, k, capacity_factor)
        for e in range(experts):
            if e // (experts // n) != rank:
                del self.experts[str(e)]
        self.group = group

    def through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to the ranks that hold their experts, and the results back."""
        n = dist.get_world_size(self.group)
        # counts says how many rows are for each of E experts. What will arrive, from
        # each rank and for each expert here, nobody knows before asking.
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (c.view(n, -1).sum(1).tolist() for c in (counts, arriving))
        rows = AllToAll.apply(rows, received, sent, self.group)
        # They lie by sender, then by expert; each expert takes its rows in one piece.
        expert = torch.arange(len(arriving), device=rows.device) % len(self.experts)
        order = expert.repeat_interleave(arriving).argsort(stable=True)
        rows = super().through_experts(rows[order], arriving.view(n, -1).sum(0))
        return AllToAll.apply(rows[order.argsort()], sent, received, self.group)


def mean_gradients(model: nn.Module, copies: Any = None) -> None:
    """Sum each gradient over the ranks with a copy, divide by the number of all ranks.

    `copies` is the group of the ranks that hold the same experts; None means all.
    Experts are what is in a module of the name `experts`. A parameter that a rank did
    not use counts as zero, and gets a gradient although no rank may have used it.
    """
    for name, p in model.named_parameters():
        is_expert = "experts" in name.split(".")
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad, group=copies if is_expert else None)
            p.grad = grad.div_(dist.get_world_size())
