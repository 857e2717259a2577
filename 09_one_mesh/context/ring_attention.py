"""Causal attention over a sequence that is cut over n ranks: carry away this one file.

Shapes: B samples, H heads, T tokens of which this rank holds some, D width of a head.
`shards` holds each rank's positions in the whole sequence, and is the same list on all
ranks of a group; so each rank knows the shapes that it receives, and the mask.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag(tokens: int, n: int) -> list[Tensor]:
    """Return each rank's positions: of 2n chunks rank r holds r and 2n - 1 - r."""
    chunks = torch.arange(tokens).tensor_split(2 * n)
    return [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(n)]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, shards: Sequence[Tensor], group: Any = None
) -> Tensor:
    """Attend from this rank's tokens to those of all ranks that come before them.

    Every rank of the group calls this, and its backward. In tests the results are
    those of `scaled_dot_product_attention(..., is_causal=True)`. It computes in float32
    at least, under autocast too, and sends gradients so; keys and values as they are.

    Args:
        q: (B, H, tokens of this rank, D), and so are k, v and the result.
        k: keys.
        v: values.
        shards: positions of each rank's tokens, in the order in which it holds them.
        group: the ranks that share the sequence; None: all.

    Raises ValueError if q, or the number of ranks, does not fit the shards, or k or v
    has another shape than q. A backward with create_graph=True raises RuntimeError.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(shards) != n or len(shards[rank]) != q.shape[-2]:
        lengths = [len(positions) for positions in shards]
        raise ValueError(f"rank {rank} of {n} has {q.shape[-2]} tokens, not {lengths}")
    for name, x in (("keys", k), ("values", v)):
        if x.shape != q.shape:
            shapes = f"{name} {tuple(x.shape)} for queries {tuple(q.shape)}"
            raise ValueError(f"{shapes}: repeat those of grouped heads")
    with torch.autocast(q.device.type, enabled=False):
        return RingAttention.apply(q, k, v, shards, group)


class RingAttention(torch.autograd.Function):
    """Keeps queries, keys, values and outputs of this rank's tokens, of no others."""

    @staticmethod
    def forward(ctx, q, k, v, shards, group):  # type: ignore[override]
        """Take the softmax over the keys of one rank more in each step of the ring."""
        kv, mine, wide_q = torch.stack([k, v]), shards[dist.get_rank(group)], wide(q)
        # The results so far, and the logarithm of what they have been divided by.
        out = torch.zeros_like(wide_q)
        lse = torch.full_like(wide_q[..., :1], -torch.inf)
        for theirs, (k, v) in around_the_ring(kv, shards, group):
            rows, columns, scores = scores_of(wide_q, k, mine, theirs)
            before = lse[..., rows, :]
            after = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
            more = (scores - after).exp() @ v[..., columns, :]
            out[..., rows, :] = out[..., rows, :] * (before - after).exp() + more
            lse[..., rows, :] = after
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.shards, ctx.group = shards, group
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        """Let keys and values go round again, and the sums of their gradients home."""
        if torch.is_grad_enabled():  # autograd would take what is sent for constants
            raise RuntimeError("ring attention does not support create_graph=True")
        (q, kv, out, lse), shards, group = ctx.saved_tensors, ctx.shards, ctx.group
        mine, dtype = shards[dist.get_rank(group)], q.dtype
        q, grad = wide(q), wide(grad)
        grad_q = torch.zeros_like(q)
        # By the softmax's denominator each score has a part in all of a row's outputs:
        # FlashAttention-2 (arXiv 2307.08691), algorithm 2, calls this sum D.
        dot, sums = (grad * out).sum(-1, keepdim=True), []
        # As in forward: a caller may go back inside of an autocast, too.
        with torch.autocast(q.device.type, enabled=False):
            for theirs, (k, v) in around_the_ring(kv, shards, group):
                rows, columns, scores = scores_of(q, k, mine, theirs)
                p = (scores - lse[..., rows, :]).exp()  # of the softmax over all keys
                grad_p = grad[..., rows, :] @ v[..., columns, :].mT
                grad_scores = p * (grad_p - dot[..., rows, :]) * q.shape[-1] ** -0.5
                grad_q[..., rows, :] += grad_scores @ k[..., columns, :]
                grad_kv = k.new_zeros(2, *k.shape)
                grad_kv[0][..., columns, :] = grad_scores.mT @ q[..., rows, :]
                grad_kv[1][..., columns, :] = p.mT @ grad[..., rows, :]
                if len(sums) == 2:  # the rank that had these keys before has a sum
                    grad_kv += received(sums.pop(), len(theirs), group)
                sums.append(grad_kv)
        if len(sums) == 2:
            sums[0] += received(sums.pop(), len(mine), group)
        return grad_q.to(dtype), *sums[0].to(dtype), None, None


def scores_of(q: Tensor, k: Tensor, mine: Tensor, theirs: Tensor) -> tuple[Tensor, ...]:
    """Return which queries see some of these keys, which keys are seen, and scores.

    The other products are not computed.
    """
    sees = mine[:, None] >= theirs  # causal, by the positions in the sequence
    # Another mask, of all samples and heads, goes here. If packed:
    # sees &= doc[mine][:, None] == doc[theirs]
    sees = sees.to(q.device)
    rows, columns = sees.any(1), sees.any(0)
    scores = q[..., rows, :] @ k[..., columns, :].mT * q.shape[-1] ** -0.5
    return rows, columns, scores.masked_fill(~sees[rows][:, columns], -torch.inf)


def around_the_ring(kv: Tensor, shards: Sequence[Tensor], group: Any) -> Iterator:
    """Yield the positions, keys and values of every rank, this one's first."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in range(n):
        source, arriving, works = (rank - step) % n, kv, []
        if step < n - 1:  # the next are under way while the caller computes
            arriving, works = pass_on(kv, len(shards[source - 1]), group)
        yield shards[source], wide(kv)
        for work in works:
            work.wait()
        kv = arriving


def wide(x: Tensor) -> Tensor:
    """Return x in float32, if it has fewer bits."""
    # In bf16 each step of the ring would lose digits.
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pass_on(x: Tensor, length: int, group: Any) -> tuple[Tensor, list]:
    """Begin to send x to the next rank, and to receive from the one before.

    Returns what is arriving, (..., length, D), and both operations, to be waited for.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    arriving = x.new_empty(*x.shape[:-2], length, x.shape[-1])
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n)
    return arriving, dist.batch_isend_irecv([receive, send])


def received(x: Tensor, length: int, group: Any) -> Tensor:
    """Pass x on, and return what has arrived."""
    arriving, works = pass_on(x, length, group)
    for work in works:
        work.wait()
    return arriving
