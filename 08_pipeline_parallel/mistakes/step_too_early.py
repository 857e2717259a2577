"""Step after each backward pass, while other micro-batches are in flight.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/mistakes/step_too_early.py
Expect: rank 0, which has two in flight, ends with an error; rank 1 has one, says
    nothing, and its second micro-batch has met other weights than the first.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn


def main() -> None:
    """Run two micro-batches by 1F1B through two stages of two layers each."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        ys = [stage(torch.ones(4, 3)) for _ in range(2)]  # F0 F1
        sending: list[Any] = [dist.isend(y.detach(), 1) for y in ys]
        for y, work in zip(ys, sending, strict=True):
            work.wait()
            dist.recv(gradient := torch.empty_like(y), 1)
            y.backward(gradient)  # B0, B1
            # WRONG: what autograd has kept for B1 are weights that this overwrites.
            # Step once, after the last backward pass.
            optimizer.step()
    else:
        for i in range(2):
            x: Any = torch.empty(4, 3)
            dist.recv(x, 0)
            loss = stage(x.requires_grad_()).square().mean()  # F0, F1
            loss.backward()  # B0, B1
            dist.send(x.grad, 0)
            print(f"micro-batch {i}: loss {loss.item():.3f}, of the same samples")
            # WRONG: micro-batch 1 of this batch meets the weights of the next step.
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
