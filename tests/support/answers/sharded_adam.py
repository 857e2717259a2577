"""The answer to 05_deepspeed_zero/exercises/sharded_adam.py."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedAdam:
    """Adam for this rank's shard; the shards are equal because the last is padded."""

    def __init__(self, weights: torch.Tensor, lr: float) -> None:
        """Cut the shard out of a padded copy; only Adam's parameter lives on."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        length = -(-len(weights) // world_size)
        self.weights = weights
        self.padding = length * world_size - len(weights)
        self.own = slice(rank * length, (rank + 1) * length)
        shard = pad(weights, (0, self.padding))[self.own].clone()
        self.parameter = torch.nn.Parameter(shard)
        self.adam = torch.optim.Adam([self.parameter], lr)

    def step(self, gradient: torch.Tensor) -> None:
        """Step for the shard, then gather all of them, and cut off the padding."""
        self.parameter.grad = pad(gradient, (0, self.padding))[self.own]
        self.adam.step()
        shard = self.parameter.detach()
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        self.weights.copy_(torch.cat(shards)[: len(self.weights)])
