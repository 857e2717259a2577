"""Add up the gradients of the micro-batches' mean losses.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/mistakes/sum_of_means.py
Expect: no error; with four micro-batches the gradient is four times too long.
"""

from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Send four micro-batches through two stages; compare with the whole batch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stages, batch = [torch.nn.Linear(3, 3) for _ in range(2)], torch.randn(8, 3)
    mine: Any = stages[dist.get_rank()]
    for x in batch.chunk(4):
        if dist.get_rank() == 0:
            y = mine(x)
            dist.send(y.detach(), 1)
            dist.recv(gradient := torch.empty_like(y), 1)
            y.backward(gradient)
        else:
            received: Any = torch.empty_like(x)
            dist.recv(received, 0)
            received.requires_grad_()
            # WRONG: the mean over a micro-batch. Its part of the mean over the batch
            # is mean() * len(x) / len(batch).
            mine(received).square().mean().backward()
            dist.send(received.grad, 0)
    ours = mine.weight.grad.clone()
    mine.zero_grad()
    stages[1](stages[0](batch)).square().mean().backward()  # one process
    print(f"gradient: {ours.norm() / mine.weight.grad.norm():.3f} times one process's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
