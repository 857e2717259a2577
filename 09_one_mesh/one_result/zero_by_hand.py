"""ZeRO's three stages by hand, in short: chapter 05 has the guards and the overlap."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad


def shard_length(p: Tensor) -> int:
    """Return how many values a shard has; the last may have fewer, or none."""
    return -(-p.numel() // dist.get_world_size())


def all_gather(p: Tensor, shard: Tensor) -> None:
    """Overwrite a parameter with the shards that the ranks hold; all call this."""
    length = shard_length(p)
    mine = pad(shard.detach(), (0, length - len(shard)))
    whole = p.new_empty(length * dist.get_world_size())
    dist.all_gather_single(whole, mine)  # before torch 2.13: all_gather_into_tensor
    # Through .data autograd does not see that a leaf is overwritten: it would object.
    p.data.view(-1).copy_(whole[: p.numel()])


class ZeRO:
    """AdamW on this rank's shards of a model's parameters, in stage 1, 2 or 3.

    Stage 1 all-reduces whole gradients. Stage 2 reduce-scatters each as soon as it is
    there, and frees it. Stage 3 frees the parameters as well, but for the units in use.
    """

    def __init__(
        self, model: nn.Module, units: Any, stage: int, **settings: Any
    ) -> None:
        """Cut the shards; in stage 3 the units, and the rest as one, come and go.

        The ranks' weights must be equal: nothing is broadcast.
        """
        self.model, self.stage, self.shards = model, stage, dict[Tensor, nn.Parameter]()
        for p in model.parameters():
            start = shard_length(p) * dist.get_rank()
            shard = p.detach().view(-1)[start : start + shard_length(p)]
            # A view: the step writes into p itself. In stage 3 there will be no p.
            self.shards[p] = nn.Parameter(shard.clone() if stage == 3 else shard)
            if stage > 1:
                p.register_post_accumulate_grad_hook(self.reduce_scatter)
        self.adamw = torch.optim.AdamW(self.shards.values(), **settings)
        inside = [p for unit in units for p in unit.parameters()]
        root = [p for p in self.shards if not any(p is other for other in inside)]
        for unit in units if stage == 3 else []:
            unit.register_forward_pre_hook(lambda unit, _: self.unshard(unit))
            unit.register_forward_hook(lambda unit, *_: self.free(unit.parameters()))
            unit.register_full_backward_pre_hook(lambda unit, _: self.unshard(unit))
        if stage == 3:
            # What is in no unit stays until its gradient is there.
            model.register_forward_pre_hook(lambda *_: self.unshard(root))
            self.free(self.shards)

    def unshard(self, parameters: Any) -> None:
        """All-gather the parameters of a unit, or of a list; every rank calls this."""
        if isinstance(parameters, nn.Module):
            parameters = list(parameters.parameters())
        for p in parameters:
            p.untyped_storage().resize_(p.numel() * p.element_size())
            all_gather(p, self.shards[p])

    def free(self, parameters: Any) -> None:
        """Return the memory of whole parameters; the shards stay."""
        for p in parameters:
            p.untyped_storage().resize_(0)

    def reduce_scatter(self, p: Tensor) -> None:
        """Average a gradient, of which this rank keeps its shard."""
        n, length = dist.get_world_size(), shard_length(p)
        whole = pad(p.grad.flatten(), (0, length * n - p.numel()))  # type: ignore
        p.grad, mine = None, whole.new_empty(length)
        # Before torch 2.13: reduce_scatter_tensor.
        dist.reduce_scatter_single(mine, whole, op=dist.ReduceOp.AVG)
        shard = self.shards[p]
        new = mine[: shard.numel()]
        shard.grad = new if shard.grad is None else shard.grad + new
        if self.stage == 3:
            self.free([p])

    def average_gradients(self) -> None:
        """Do what stage 1 does between backward and step."""
        for p, shard in self.shards.items():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            start = shard_length(p) * dist.get_rank()
            shard.grad = p.grad.view(-1)[start : start + len(shard)]  # type: ignore

    def step(self) -> None:
        """Step on the shards; in stages 1 and 2 every rank then gets the new values."""
        self.adamw.step()
        if self.stage < 3:
            for p, shard in self.shards.items():
                all_gather(p, shard)
        self.adamw.zero_grad()
        self.model.zero_grad()

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters by name; every rank calls this."""
        if self.stage == 3:
            self.unshard(self.shards)
        copies = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        if self.stage == 3:
            self.free(self.shards)
        return copies
