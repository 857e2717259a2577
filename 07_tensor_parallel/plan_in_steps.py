"""Cut a GPT by one part of the plan after another; after each, it trains correctly.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/plan_in_steps.py
Expect: three parts leave fewer parameters on each rank; the fourth cuts nothing, but
    saves all-reduces; after each part the gradient is that of one process.
"""

import copy
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from minimal import ATTENTION, MLP, NORMS, VOCABULARY, split_over_ranks
from model import GPT, GPTConfig
from ranks import check, fail, join, leave, say
from sent_and_kept import Collectives

PARTS = {"MLP": MLP, "attention": ATTENTION, "vocabulary": VOCABULARY}
B, CONFIG = 4, GPTConfig()
T, D, L, V = CONFIG.block_size, CONFIG.width, CONFIG.layers, CONFIG.vocabulary


def parts_applied(model: GPT, mesh: DeviceMesh) -> Iterator[str]:
    """Cut a tied model in place, further and further; yield what was cut last."""
    for name, part in PARTS.items():
        parallelize_module(model, mesh, part)
        model.head.weight = model.token_embedding.weight  # a style makes two of one
        yield name
    split_over_ranks(model, mesh, NORMS)  # their weights must become DTensors too
    yield "norms"


def all_reduces(calls: Collectives) -> int:
    """Count the all-reduces of (B, T, D) in float64."""
    return calls.noted.count(("all_reduce", B * T * D * 8))


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; every rank calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def here(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """Take a forward and a backward pass after each part; count, and compare."""
    if CONFIG.heads % int(os.environ.get("WORLD_SIZE", 1)):
        fail(f"{CONFIG.heads} heads take 2 or 4 ranks; type --nproc-per-node=2")
    device = join(at_least=2)
    n = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = GPT(CONFIG).to(device, torch.float64)
    inputs, labels = torch.randint(V, (2, B, T), device=device)
    right = torch.autograd.grad(alone(inputs, labels), list(alone.parameters()))
    left = sum(p.numel() for p in alone.parameters())
    say(f"one process  | {left:,} parameters, {L} blocks")
    # What each part cuts, and the all-reduces in forward and in backward after it.
    formula = [
        (L * 8 * D**2, L, L),
        (L * 4 * D**2, 2 * L, 4 * L),
        ((V + T) * D, 2 * L + 1, 4 * L + 1),
        (0, 2 * L + 1, 2 * L + 1),
    ]
    model, results = copy.deepcopy(alone), []
    for name, row in zip(parts_applied(model, mesh), formula, strict=True):
        model.zero_grad()
        with Collectives() as forward:
            loss = model(inputs, labels)
        with Collectives() as backward:
            loss.backward()
        parameters = sum(here(p).numel() for p in model.parameters())
        calls = all_reduces(forward), all_reduces(backward)
        said = f"{calls[0]} all-reduces in forward, {calls[1]} in backward"
        say(f"+ {name:10} | {parameters:,} on a rank | {said}")
        left -= row[0] * (n - 1) // n
        grads = [whole(p.grad) for p in model.parameters()]  # type: ignore[arg-type]
        is_same = all(distance < 1e-9 for distance in map(torch.dist, grads, right))
        results.append(is_same and (parameters, *calls) == (left, *row[1:]))
    claim = "parts one process's gradient, and counts by the formula"
    check(all(results), f"after each of {len(results)} {claim}")
    leave()


if __name__ == "__main__":
    main()
