"""ZeRO stage 1 by hand: each rank keeps the optimizer state of its shards alone.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/by_hand/zero_1.py
Expect: half of the optimizer state on each of two ranks; the weights of one process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import start_ranks
from train_and_compare import average_gradients, main


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's n-th of a contiguous tensor, flat: a view, no copy."""
    length = -(-tensor.numel() // dist.get_world_size())  # the last ones may be shorter
    return tensor.detach().view(-1)[length * dist.get_rank() :][:length]


def all_gather_shards(tensor: Tensor, shard: Tensor) -> None:
    """Overwrite a tensor with the shards that the ranks hold of it; all call this."""
    mine = tensor.new_zeros(-(-tensor.numel() // dist.get_world_size()))
    mine[: shard.numel()] = shard
    whole = tensor.new_empty(mine.numel() * dist.get_world_size())
    dist.all_gather_single(whole, mine)  # before torch 2.13: all_gather_into_tensor
    tensor.detach().view(-1).copy_(whole[: tensor.numel()])


class ShardedOptimizer(torch.optim.Optimizer):
    """A drop-in for any optimizer that treats each number by itself, as Adam does.

    It has state, and master weights of `master_dtype` if given, for local shards alone.
    With these, load the model's before: a step undoes other changes. No buffer is sent.
    """

    def __init__(
        self, params: Any, optimizer_class: Any, master_dtype: Any = None, **kwargs: Any
    ) -> None:
        """Shard every parameter, frozen and tied ones too."""
        self.shards: dict[Tensor, nn.Parameter] = {}
        self.master_dtype, groups = master_dtype, []
        self.add_local_group: Callable = groups.append
        super().__init__(params, kwargs)  # it calls add_param_group
        self.local: Any = optimizer_class(groups, **kwargs)
        self.add_local_group = self.local.add_param_group
        self.defaults = self.local.defaults
        copy_settings(self.local, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take rank 0's values; let the local optimizer have shards; all call this."""
        super().add_param_group(param_group)
        for p in param_group["params"]:
            dist.broadcast(p.detach().view(-1), src=0)
            # Without master weights this is a view: a step writes into p itself.
            shard = local_shard(p).to(self.master_dtype)
            self.shards[p] = nn.Parameter(shard, p.requires_grad)
        shards = [self.shards[p] for p in param_group["params"]]
        self.add_local_group({**param_group, "params": shards})  # to self.local: AdamW

    def step(self, closure: Callable | None = None) -> Any:
        """Step on shards, with averaged gradients, then all-gather; all call this."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p, shard in self.shards.items():
            shard.grad = None if p.grad is None else local_shard(p.grad).to(shard.dtype)
        self.step_and_gather()
        self.local.zero_grad()  # in the same dtype they are views of the gradients
        return loss

    def step_and_gather(self) -> None:
        """Step on the shards that have a gradient; give everyone the new values."""
        copy_settings(self, self.local)  # a schedule may have changed lr and the like
        self.local.step()
        for p, shard in self.shards.items():
            if shard.grad is not None:
                all_gather_shards(p, shard.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state and its shards of the weights; every rank saves."""
        copy_settings(self, self.local)
        shards = [shard.detach().clone() for shard in self.shards.values()]
        return {**self.local.state_dict(), "shards": shards}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what as many ranks have saved, the weights too; all call this."""
        self.local.load_state_dict(state_dict)
        copy_settings(self.local, self)
        for p, saved in zip(self.shards, state_dict["shards"], strict=True):
            self.shards[p].detach().copy_(saved)
            all_gather_shards(p, saved)


def copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy the learning rate and the like from one optimizer's groups to another's."""
    for mine, other in zip(target.param_groups, source.param_groups, strict=True):
        mine.update({name: other[name] for name in other if name != "params"})


def stage_1(model: Any, bf16: bool) -> tuple[Any, ShardedOptimizer, Callable]:
    """Shard the optimizer state; gradients are all-reduced, and whole on every rank."""
    model, master = (model.bfloat16(), torch.float32) if bf16 else (model, None)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, master, lr=1e-3)
    return model, optimizer, lambda: average_gradients(model)  # before each step


if __name__ == "__main__":
    start_ranks(main, 2, stage_1)
