"""A step on one rank, on data-parallel and on tensor-parallel ranks, and its time.

All three compute the same gradient, of the mean loss of the same samples.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

from parallel_gpt import GPT, GPTConfig, ParallelGPT, shard_like
from ranks import gather

T, D, LAYERS = 128, 512, 1


class Ways:
    """The three ways of taking a step on the same samples; a step returns nothing."""

    def __init__(self, samples: int) -> None:
        """Build both models from one seed, and draw the samples, alike on all ranks."""
        config = GPTConfig(block_size=T, width=D, layers=LAYERS)
        torch.manual_seed(0)
        self.whole = GPT(config)
        torch.manual_seed(0)
        self.split = ParallelGPT(config)
        self.tokens = torch.randint(256, (samples, T))
        self.mean = torch.zeros(0)

    def alone(self) -> None:
        """Compute all samples on this rank; send nothing."""
        self.whole.zero_grad()
        self.whole(self.tokens, self.tokens.roll(-1, 1)).backward()

    def data(self) -> None:
        """Compute an n-th of the samples; average the gradients, in one message."""
        n = dist.get_world_size()
        tokens = self.tokens.chunk(n)[dist.get_rank()]
        self.whole.zero_grad()
        share = len(tokens) / len(self.tokens)
        (self.whole(tokens, tokens.roll(-1, 1)) * share).backward()
        grads = [
            p.grad.flatten() for p in self.whole.parameters() if p.grad is not None
        ]
        self.mean = torch.cat(grads)
        dist.all_reduce(self.mean)

    def tensor(self) -> None:
        """Compute an n-th of each layer on all samples."""
        self.split.zero_grad()
        self.split(self.tokens, self.tokens.roll(-1, 1)).backward()

    def largest_error(self) -> float:
        """Compare the gradients of both parallel ways with those of one rank alone."""
        self.alone()
        alone = {
            name: torch.as_tensor(p.grad).clone()
            for name, p in self.whole.named_parameters()
        }
        self.data()
        self.tensor()
        flat = torch.cat([grad.flatten() for grad in alone.values()])
        errors = [(self.mean - flat).abs().max()]
        for name, p in self.split.named_parameters():
            mine = torch.as_tensor(p.grad)
            errors.append((mine - shard_like(alone[name], p)).abs().max())
        return (torch.stack(errors).max() / flat.abs().max()).item()


def seconds(step: Callable[[], None], is_silent: bool) -> float:
    """Time a step on the slowest rank, with its all-reduces or without."""
    time.sleep(0.02)  # so that a link's token bucket is full again
    dist.barrier()
    started = time.perf_counter()
    with mock.patch.object(dist, "all_reduce") if is_silent else nullcontext():
        step()
    return max(gather(time.perf_counter() - started))
