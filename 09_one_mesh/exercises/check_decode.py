"""Check attention to keys on all ranks, and say in words what is wrong with it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ask_ranks import ask_ranks, in_words
from ranks import read_options

WORLD_SIZE, H, D = 3, 2, 8
# How many keys each rank holds, and by what its scores are multiplied. For a negative
# factor they are made of positive numbers, so that each is very negative.
CASES = {
    "first case": ((5, 40, 12), 1.0),
    "large scores": ((5, 40, 12), 1000.0),
    "a rank without keys": ((40, 0, 12), 1.0),
    "no keys, low scores": ((40, 0, 12), -10_000.0),
}
FAULTS = (RuntimeError, AttributeError, ValueError, TypeError, IndexError)
MOST_BYTES = 4 * WORLD_SIZE * H * (D + 2) * 8  # keys and values: seven times as many


class Messages(TorchDispatchMode):
    """Adds up the bytes of the largest tensor that is given to each collective."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call what was to be called."""
        if "c10d" in func.namespace:
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.nbytes += max((t.nbytes for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


def check_decode(answer: Callable) -> None:
    """Start the ranks, and let each of them try the answer."""
    read_options()
    claim = f"{len(CASES)} results are one process's; no keys were sent"
    ask_ranks(try_decode, answer, WORLD_SIZE, claim)


def try_decode(answer: Callable) -> str:
    """Try all cases; say what is wrong on this rank, or nothing."""
    for name, (lengths, factor) in CASES.items():
        generator = torch.Generator().manual_seed(sum(lengths))
        q, k, v = (
            torch.randn(H, length, D, generator=generator, dtype=torch.float64)
            for length in (1, sum(lengths), sum(lengths))
        )
        if factor < 0:
            q, k = q.abs(), k.abs()
        parts = list(zip(k.split(lengths, 1), v.split(lengths, 1), strict=True))
        mine = parts[dist.get_rank()]
        given = [tensor.clone() for tensor in mine]
        try:
            with Messages() as messages:
                found = answer(q.clone() * factor, *given)
        except FAULTS as error:
            return f"{name}: {in_words(error)}"
        if text := explain_result(found, q * factor, parts):
            return f"{name}: {text}"
        if not all(map(torch.equal, given, mine)):
            return f"{name}: right, but it changes k or v: the next token needs them"
        if messages.nbytes > MOST_BYTES:
            return (
                f"{name}: right, but the messages have {messages.nbytes:,} bytes; keys "
                f"and values can stay where they are: {H * (D + 2) * 8} bytes will do"
            )
    return ""


def explain_result(found: Any, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> str:
    """Say what is wrong with a result, or nothing; `parts` are all ranks' keys."""
    keys, values = (torch.cat(one, 1) for one in zip(*parts, strict=True))
    right = F.scaled_dot_product_attention(q, keys, values)
    if not isinstance(found, Tensor):
        return f"the result is {found!r:.40}"
    if found.shape != right.shape:
        return f"the result has shape {[*found.shape]}, and should have [{H}, 1, {D}]"
    if found.dtype != right.dtype:
        return f"the result is in {found.dtype}, and q, k and v in {right.dtype}"
    if torch.allclose(found, right):
        return ""
    if not found.isfinite().all():
        return (
            "the result is not finite: which exponential is too large, are all of them "
            "0, and what is divided by a sum over no keys?"
        )
    holders = [(k, v) for k, v in parts if k.shape[1]]
    local = torch.stack([F.scaled_dot_product_attention(q, *one) for one in holders])
    mine = parts[dist.get_rank()]
    if mine[0].shape[1] == 0 and not found.any():
        return "the result is zero: a rank without keys needs the others' result too"
    if mine[0].shape[1] and torch.allclose(
        found, F.scaled_dot_product_attention(q, *mine)
    ):
        return "this rank attends to its own keys alone"
    lengths = torch.tensor([k.shape[1] for k, _ in holders], dtype=q.dtype)
    ways = {
        "the mean of the ranks' results": local.mean(0),
        "the sum of the ranks' results": local.sum(0),
        "the mean of the ranks' results, weighted by their numbers of keys": (
            local * (lengths / lengths.sum())[:, None, None, None]
        ).sum(0),
    }
    for way, wrong in ways.items():
        if torch.allclose(found, wrong):
            return (
                f"this is {way}: a rank counts by the sum of its exponentials, by "
                "which its own softmax has divided"
            )
    return "the result is not that of one process"
