"""Check a gated MLP on two ranks, and say in words what is wrong."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ask_ranks import ask_ranks, in_words
from ranks import read_options
from sent_and_kept import Collectives

WORLD_SIZE, B, T, D, H = 2, 2, 3, 6, 8
CUTS = {"gate": 0, "up": 0, "down": 1}  # in which dimension, as nn.Linear stores them
FAULTS = (RuntimeError, AttributeError, AssertionError, ValueError, TypeError)


def check_gated_mlp(answer: Any) -> None:
    """Start the ranks, and let each of them try the answer."""
    read_options()
    claim = "one process's result and gradients, half of the weights, one sum each way"
    ask_ranks(try_gated_mlp, answer, WORLD_SIZE, claim)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Draw tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute in one process, or a rank's term with its part of the weights."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def grads_alone(x: Tensor, weights: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the result and the gradients of x and of the weights."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *weights)]
    y = gated(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def explain(
    name: str, found: Any, right: Tensor, term: Tensor | None, hint: str = ""
) -> str:
    """Say what is wrong with a tensor, or nothing; `term` is this rank's of its sum."""
    if not isinstance(found, Tensor):
        return f"{name} is {found!r:.40}"
    if found.shape != right.shape:
        return f"{name} has shape {[*found.shape]}, and should have {[*right.shape]}"
    if torch.allclose(found, right):
        return ""
    if torch.allclose(found, WORLD_SIZE * right):
        return f"{name} is {WORLD_SIZE} times too large: what is added up too often?"
    if term is not None and torch.allclose(found, term):
        return f"{name} is this rank's term of a sum: who adds them up?"
    return f"{name} is not that of one process{hint}"


def try_gated_mlp(answer: Any) -> str:
    """Run the answer forward and backward; say what is wrong on this rank."""
    x, *weights, grad = draw((B, T, D), (H, D), (H, D), (D, H), (B, T, D))
    rank = dist.get_rank()
    mine = [
        w.chunk(WORLD_SIZE, dim)[rank]
        for w, dim in zip(weights, CUTS.values(), strict=True)
    ]
    right, terms = grads_alone(x, weights, grad), grads_alone(x, mine, grad)
    try:
        model = answer(*(w.clone() for w in weights))
        leaf = x.clone().requires_grad_()
        with Collectives() as forward:
            y = model(leaf)
        if text := explain("the result", y, right[0], terms[0]):
            return text
        with Collectives() as backward:
            y.backward(grad)
    except FAULTS as error:
        return in_words(error)
    hint = ": x is read twice; is one of its two gradients not summed?"
    if text := explain("the gradient of x", leaf.grad, right[1], terms[1], hint):
        return text
    return explain_weights(model, right[2:]) or explain_messages(
        forward.noted, backward.noted
    )


def numbers_kept(model: Any) -> int:
    """Count the numbers in all storages that the model's modules refer to."""
    leaves = tree_leaves([vars(module) for module in model.modules()])
    storages = [t.untyped_storage() for t in leaves if isinstance(t, Tensor)]
    itemsize = torch.float64.itemsize
    return sum({s.data_ptr(): s.nbytes() // itemsize for s in storages}.values())


def explain_weights(model: Any, right: list[Tensor]) -> str:
    """Say what is wrong with what this rank keeps and with its gradients."""
    kept = numbers_kept(model)
    shards = sum(g.numel() for g in right) // WORLD_SIZE
    if kept != shards:
        text = f"right, but this rank keeps {kept} weights; a part has {shards}"
        own = sum(p.numel() for p in model.parameters())
        return f"{text}: in attributes, or behind views?" if own == shards else text
    rank = dist.get_rank()
    for (name, dim), whole in zip(CUTS.items(), right, strict=True):
        found, due = getattr(model, name, None), whole.chunk(WORLD_SIZE, dim)[rank]
        if isinstance(found, nn.Module):
            kind = type(found).__name__
            return f"right, but {name} is a {kind}, and is to be the parameter itself"
        text = explain(
            f"the gradient of {name}",
            getattr(found, "grad", None),
            due,
            None,
            ", for the part that shard_of cuts",
        )
        if text:
            return text
    return ""


def explain_messages(forward: list, backward: list) -> str:
    """Say whether one sum each way was enough."""
    for way, noted in (("forward", forward), ("backward", backward)):
        if len(noted) != 1:
            return f"right, but {way} sends {len(noted)} messages; one will do"
        if (name := noted[0][0]).strip("_").replace("_", "") != "allreduce":
            return f"right, but {way} calls {name}, where one all-reduce will do"
    return ""
