"""Check a layer of two experts and its training step, and say what is wrong."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ask_ranks import ask_ranks, in_words
from ranks import read_options

N, D = 8, 4  # tokens of a rank, width
ORDER = "the results lie by expert, and not in the order in which the tokens came"
SORTED = "the results are sorted once more: result i is of token order[i]"
HALVES = "by the mean of two experts' gradients: which ranks hold this one?"
TWICE = "2 times as far as in one process: its loss is the mean over both ranks"
ALONE = "by this rank's tokens only"


def check_experts(answer: tuple[Any, Any]) -> None:
    """Start the ranks, and let each of them try the answer: a layer, and its step."""
    read_options()
    claim = "outputs and a step of two experts are one process's on both ranks"
    ask_ranks(try_experts, answer, 2, claim)


def router_and_experts() -> tuple[nn.Linear, list[nn.Linear]]:
    """Build a router and both experts, the same on every rank."""
    torch.manual_seed(0)
    router, *experts = (nn.Linear(D, width).double() for width in (2, D, D))
    return router, experts


def tokens_of(rank: int) -> tuple[Tensor, Tensor]:
    """Draw a rank's tokens and labels, (N, D) each."""
    generator = torch.Generator().manual_seed(10 + rank)
    x, labels = torch.randn(2, N, D, generator=generator).double()
    return x, labels


def outputs(router: nn.Linear, experts: list[nn.Linear], x: Tensor) -> Tensor:
    """Map (N, D) to (N, D) in one process."""
    weight, chosen = router(x).softmax(1).max(1)
    both = torch.stack([expert(x) for expert in experts])  # (2, N, D)
    return x + weight[:, None] * both[chosen, torch.arange(len(x))]


def gradients_of(rank: int, name: str) -> list[Tensor]:
    """Return one rank's gradients of `weight` or `bias`: of router and experts."""
    router, experts = router_and_experts()
    x, labels = tokens_of(rank)
    F.mse_loss(outputs(router, experts, x), labels).backward()
    parameters = [getattr(layer, name) for layer in (router, *experts)]
    return [torch.as_tensor(parameter.grad) for parameter in parameters]


def explain_outputs(found: Any, x: Tensor) -> str:
    """Say what is wrong with a layer's outputs, or nothing."""
    router, experts = router_and_experts()
    right = outputs(router, experts, x)
    if not isinstance(found, Tensor) or found.shape != right.shape:
        return f"the layer returns {getattr(found, 'shape', found)}, not (N, D)"
    if torch.allclose(found, right):
        return ""
    weight, chosen = router(x).softmax(1).max(1)
    order = chosen.argsort(stable=True)
    rows = ((right - x) / weight[:, None])[order]
    if torch.allclose(found, x + weight[:, None] * rows):
        return ORDER
    if torch.allclose(found, x + weight[:, None] * rows[order]):
        return SORTED
    return "the outputs are not those of one process"


def explain_step(
    router: nn.Linear, expert: nn.Linear, rank: int, part: str = "weight"
) -> str:
    """Say which way a step of SGD went wrong for the weights or biases, or nothing."""
    old_router, old_experts = router_and_experts()
    (router_0, *of_0), (router_1, *of_1) = (gradients_of(r, part) for r in (0, 1))
    mine, other = (of_0[e] + of_1[e] for e in (rank, 1 - rank))  # sums of two losses
    routers = {"": (router_0 + router_1) / 2, TWICE: router_0 + router_1}
    routers[ALONE] = (router_0, router_1)[rank]
    experts = {"": mine / 2, TWICE: mine, HALVES: (mine + other) / 2}
    for name, new, old, hints in (
        ("the router has", router, old_router, routers),
        ("this rank's expert has", expert, old_experts[rank], experts),
    ):
        moved = (getattr(old, part) - getattr(new, part)).detach()
        for hint, gradient in hints.items():
            if torch.allclose(moved, gradient):
                if hint:
                    return f"{name} moved {hint}"
                break
        else:
            return f"{name} not moved as in one process"
    return ""


def try_experts(answer: tuple[Any, Any]) -> str:
    """Run the layer and take a step; say what is wrong on this rank, or nothing."""
    layer_type, step = answer
    rank = dist.get_rank()
    router, experts = router_and_experts()
    x, labels = tokens_of(rank)
    try:
        layer = layer_type(router, experts[rank])
        if wrong := explain_outputs(layer(x), x):
            return wrong
        step(layer, x, labels, torch.optim.SGD(layer.parameters(), lr=1.0))
    except RuntimeError as error:
        return in_words(error)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        return f"it ended with: {' '.join(str(error).split())}"
    text = explain_step(router, experts[rank], rank)
    biases = explain_step(router, experts[rank], rank, "bias")
    return text or (biases and f"of the biases: {biases}")
