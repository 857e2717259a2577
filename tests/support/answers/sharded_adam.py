"""The answer to 05_deepspeed_zero/exercise_sharded_adam.py."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedAdam:
    """Adam for this rank's share; the shares are equal because the last is padded."""

    def __init__(self, weights: torch.Tensor, lr: float) -> None:
        """Cut the share out of a padded copy; only Adam's parameter lives on."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        share = -(-len(weights) // world_size)
        self.weights = weights
        self.padding = share * world_size - len(weights)
        self.own = slice(rank * share, (rank + 1) * share)
        own = pad(weights, (0, self.padding))[self.own].clone()
        self.parameter = torch.nn.Parameter(own)
        self.adam = torch.optim.Adam([self.parameter], lr)

    def step(self, gradient: torch.Tensor) -> None:
        """Step for the share, then gather all of them, and cut off the padding."""
        self.parameter.grad = pad(gradient, (0, self.padding))[self.own]
        self.adam.step()
        own = self.parameter.detach()
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, own)
        self.weights.copy_(torch.cat(shares)[: len(self.weights)])
