"""Write it: ZeRO stage 1, made of Adam and one collective.

Run: python 05_deepspeed_zero/exercises/sharded_adam.py
Expect: a line for each of three ranks that says what is still wrong with its weights,
    or with what it keeps, and status 1; once nothing is, a `check:`.
"""

import torch
import torch.distributed as dist  # noqa: F401 (yours to use)
from torch.nn.functional import pad  # noqa: F401 (yours to use)

from check_sharded_adam import check_sharded_adam


class ShardedAdam:
    """Adam whose state is sharded over the ranks; yours to rewrite.

    Each rank is to keep state for its shard of the weights, to step for that shard
    alone, and to send it to the others. Now every rank keeps all and steps for all.
    """

    def __init__(self, weights: torch.Tensor, lr: float) -> None:
        """Make the optimizer, in `self.adam`, where its state is counted.

        Args:
            weights: (N,), the same on every rank; `step` is to change them in place.
                N need not be a multiple of the ranks.
            lr: the learning rate.
        """
        self.parameter = torch.nn.Parameter(weights)  # shares the memory of `weights`
        self.adam = torch.optim.Adam([self.parameter], lr)

    def step(self, gradient: torch.Tensor) -> None:
        """Change the weights by one step; every rank calls this.

        Args:
            gradient: (N,), the mean over the ranks already.
        """
        self.parameter.grad = gradient
        self.adam.step()


if __name__ == "__main__":
    check_sharded_adam(ShardedAdam)
