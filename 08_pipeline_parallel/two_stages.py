"""Two stages: the first half of a GPT on rank 0, the second half on rank 1.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/two_stages.py
Expect: one batch goes forward through both ranks and its gradient back, which is one
    process's; at any time one of the two ranks waits.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from call_timeline import drawn
from part import GPT, GPTConfig, Part
from ranks import check, gather, join, leave, say

CONFIG = GPTConfig(block_size=32, width=64, layers=4, heads=2, tied=False)
SAMPLES = 8


def forward_and_backward(part: Part, inputs: Tensor, labels: Tensor) -> None:
    """Compute the gradients of this rank's half of the layers.

    Both ranks call this with the same tokens, (B, T); rank 0 needs no labels.
    """
    if dist.get_rank() == 0:
        activations = part(inputs)  # (B, T, D)
        dist.send(activations.detach(), dst=1)
        gradient = torch.empty_like(activations)
        dist.recv(gradient, src=1)
        activations.backward(gradient)  # goes on where rank 1 has stopped
    else:
        activations = part.head.weight.new_empty(*inputs.shape, CONFIG.width)
        dist.recv(activations, src=0)
        activations.requires_grad_()  # a leaf: backward stops here, and leaves .grad
        loss = part(activations, labels)
        loss.backward()
        dist.send(activations.grad, dst=0)  # type: ignore[arg-type]


def main() -> None:
    """Cut the GPT in two, compute a batch's gradient, compare with one process."""
    device = join(at_least=2, at_most=2)
    torch.manual_seed(0)  # the same weights and tokens on both ranks
    model = GPT(CONFIG).double().to(device)
    tokens = torch.randint(256, (SAMPLES, CONFIG.block_size + 1)).to(device)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    part = Part(copy.deepcopy(model), dist.get_rank(), cut=[2, 2])
    held = gather(sum(p.numel() for p in part.parameters()))
    say(f"parameters: {sum(held):,}, by stage {held}")
    forward_and_backward(part, inputs, labels)
    say(drawn([["F0", "B0"], ["F0", "B0"]]))

    model(inputs, labels).backward()  # one process
    alone: Any = {name: p.grad for name, p in model.named_parameters()}
    ours: Any = {name: p.grad for name, p in part.named_parameters()}
    errors = [torch.dist(ours[name], alone[name]).item() for name in ours]
    is_same, count = all(error < 1e-12 for error in errors), gather(len(errors))
    check(is_same, f"{sum(count)} gradients of two stages are one process's")
    leave()


if __name__ == "__main__":
    main()
