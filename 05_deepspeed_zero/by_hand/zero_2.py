"""ZeRO stage 2 by hand: gradients are sharded as well, while backward runs.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/by_hand/zero_2.py
Expect: half of the gradients, too; the weights of one process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import start_ranks
from train_and_compare import main
from zero_1 import ShardedOptimizer


class ShardedGradients(ShardedOptimizer):
    """As stage 1, but backward leaves each rank with the mean gradient of its shards.

    At most two gradients are in flight at a time; what has been sent is freed. Freeze
    and unfreeze parameters before: their hooks are set here. All ranks must use the
    same ones in the same order: else they mix up gradients, without an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ShardedOptimizer takes."""
        self.in_flight: list[tuple[Any, ...]] = []
        super().__init__(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard parameters, and their gradients once backward has computed them."""
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce_scatter_gradient)

    def reduce_scatter_gradient(self, p: Tensor) -> None:
        """Start to send a gradient to the owners of its shards; autograd calls this."""
        n = dist.get_world_size()
        whole = p.new_zeros(-(-p.numel() // n) * n)  # n shards of equal length
        whole[: p.numel()] = p.grad.flatten()  # type: ignore[union-attr]
        p.grad = None
        mine = whole.new_empty(whole.numel() // n)
        # Before torch 2.13: reduce_scatter_tensor.
        work = dist.reduce_scatter_single(
            mine, whole, op=dist.ReduceOp.AVG, async_op=True
        )
        # This list keeps `whole` until it has been sent. The one before is waited for.
        self.in_flight.append((work, self.shards[p], mine, whole))
        self.finish_gradient_sync(but_last=1)

    # `step` and `zero_grad` call it first: else the last gradient would be lost.
    def finish_gradient_sync(self, but_last: int = 0) -> None:
        """Wait until every shard has its gradient; micro-batches add up."""
        while len(self.in_flight) > but_last:
            work, shard, mine, _ = self.in_flight.pop(0)
            work.wait()
            mine = mine[: shard.numel()].to(shard.dtype)
            shard.grad = mine if shard.grad is None else shard.grad + mine

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the shards' gradients; the parameters have none."""
        self.finish_gradient_sync()
        self.local.zero_grad(set_to_none)

    def step(self, closure: Callable | None = None) -> Any:
        """Step on this rank's shards, then all-gather the parameters; all call this."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.finish_gradient_sync()
        self.step_and_gather()
        return loss


def stage_2(model: Any, bf16: bool) -> tuple[Any, ShardedGradients, Callable]:
    """Shard the optimizer state and the gradients; weights are whole on every rank."""
    model = model.bfloat16() if bf16 else model
    optimizer = ShardedGradients(
        model.parameters(), torch.optim.AdamW, torch.float32 if bf16 else None, lr=1e-3
    )
    return model, optimizer, optimizer.finish_gradient_sync


if __name__ == "__main__":
    start_ranks(main, 2, stage_2)
