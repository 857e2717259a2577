"""Tie the embedding on the first stage to the head on the last: wrong, then right.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/balance/tied_weights.py
Expect: left alone the two matrices diverge from the first step on, without an error;
    with the sum of both gradients they stay equal, and one process's.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ranks import check, gather, join, leave, say

V, D, T = 256, 32, 16
STEPS = 3


def tied_model() -> nn.Sequential:
    """Build a first and a last stage; one (V, D) matrix embeds and scores tokens."""
    embedding, head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
    nn.init.normal_(embedding.weight, std=0.1)
    head.weight = embedding.weight
    first = nn.Sequential(embedding, nn.Linear(D, D), nn.Tanh())
    last = nn.Sequential(nn.Linear(D, D), nn.Tanh(), head)
    return nn.Sequential(first, last).double()


def leave_alone(weight: nn.Parameter) -> None:
    """WRONG: each of the two matrices steps by its part of the gradient."""


def add_both_gradients(weight: nn.Parameter) -> None:
    """Give both copies the sum: equal weights with equal gradients stay equal."""
    dist.all_reduce(weight.grad)  # of two stages; else in a group of the two ends


def run_two_stages(part: Any, tokens: Tensor) -> None:
    """Compute the gradients of a batch, as in two_stages.py."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    if dist.get_rank() == 0:
        y = part(inputs)
        dist.send(y.detach(), 1)
        dist.recv(gradient := torch.empty_like(y), 1)
        y.backward(gradient)
    else:
        x: Any = torch.empty(*inputs.shape, D, dtype=torch.float64)
        dist.recv(x, 0)
        logits = part(x.requires_grad_())  # (B, T, V)
        cross_entropy(logits.mT, labels).backward()
        dist.send(x.grad, 0)


def train_tied(model: Any, batches: Tensor, tie: Callable) -> tuple[Tensor, Any]:
    """Train two stages; return this one's copy of the tied matrix, and its layers."""
    part = copy.deepcopy(model)[dist.get_rank()]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
    weight = part[0 if dist.get_rank() == 0 else -1].weight
    for tokens in batches:
        run_two_stages(part, tokens)
        tie(weight)
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach(), part


def main() -> None:
    """Train both ways; compare the two ends with each other and with one process."""
    join(at_least=2, at_most=2, only_cpu=True)
    torch.manual_seed(0)
    model = tied_model()
    batches = torch.randint(V, (STEPS, 8, T + 1))
    for tie in (leave_alone, add_both_gradients):
        weight, part = train_tied(model, batches, tie)
        first, last = gather(weight)
        apart = (first - last).abs().max().item()
        say(f"{tie.__name__:18} | embedding and head {apart:.0e} from each other")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # one process
    for tokens in batches:
        cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model[dist.get_rank()].parameters()
    pairs = zip(part.parameters(), expected, strict=True)
    error = torch.tensor([torch.dist(*pair).item() for pair in pairs]).max()  # or NaN
    right = apart == 0 and error < 1e-12
    check(right, f"with the sum, equal to the bit, and {STEPS} steps are one process's")
    leave()


if __name__ == "__main__":
    main()
