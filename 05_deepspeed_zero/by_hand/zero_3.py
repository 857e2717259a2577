"""ZeRO stage 3 by hand: every parameter is sharded, and whole only while it is used.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/by_hand/zero_3.py
Expect: half of everything; the weights of one process.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ranks import start_ranks
from train_and_compare import main


class ShardedParameter:
    """A parameter of which this rank keeps one shard, and memory for the whole."""

    def __init__(self, p: nn.Parameter, compute_dtype: torch.dtype | None) -> None:
        """Take this rank's shard of rank 0's values."""
        n = dist.get_world_size()
        padded = p.new_zeros(-(-p.numel() // n) * n)  # n shards of equal length
        padded[: p.numel()] = p.detach().flatten()
        dist.broadcast(padded, src=0)
        shard = padded.chunk(n)[dist.get_rank()].clone()
        self.shard = nn.Parameter(shard, p.requires_grad)
        self.flat = in_dtype(torch.empty_like(padded), compute_dtype)
        # Autograd watches whether a leaf is overwritten between forward and backward.
        # Through .data it does not see it: the values will be the same ones, unless
        # somebody calls optimizer.step() in between.
        whole = self.flat.data[: p.numel()].view(p.shape)
        self.whole = nn.Parameter(whole, p.requires_grad)
        self.gathering: Any = None  # the handle of an all-gather in flight
        self.free()

    def start_gather(self) -> None:
        """Begin to all-gather the whole, unless it is there or on its way."""
        if self.flat.untyped_storage().size() == 0:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            mine = self.shard.detach().to(self.flat.dtype)
            # Before torch 2.13: all_gather_into_tensor.
            self.gathering = dist.all_gather_single(self.flat, mine, async_op=True)

    def finish_gather(self) -> None:
        """Wait for an all-gather in flight, if there is one."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Return the memory of the whole parameter; the shard stays."""
        self.finish_gather()
        self.flat.untyped_storage().resize_(0)


class FullySharded(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded.

    Any optimizer made after it takes its parameters, which are this rank's shards. A
    module finds its own whole, not its children's. Freeze and unfreeze before. Buffers
    are rank 0's at first, then each rank's own. For activation checkpointing,
    use_reentrant=True.

    All ranks must use the same modules in the same order: else they mix up gradients
    and weights, without an error. Likewise, a step between a forward and its backward
    lets backward use new weights, and what a forward writes into a weight (as
    nn.Embedding with `max_norm` does) is lost.
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None
    ) -> None:
        """Shard every parameter by itself; compute in `compute_dtype` if given."""
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        # PyTorch lists a tied parameter once.
        parts = {p: ShardedParameter(p, compute_dtype) for p in module.parameters()}
        self.parts, self.parts_of = list(parts.values()), {}
        for child in module.modules():
            named = child.named_parameters(recurse=False, remove_duplicate=False)
            if of_child := {name: parts[p] for name, p in named}:
                self.parts_of[child] = of_child
        for buffer in module.buffers():
            dist.broadcast(values := buffer.contiguous(), src=0)
            if not values.equal(buffer):  # contiguous() has copied a strided one
                buffer.copy_(values)
        self.order: list[nn.Module] = []  # in which the last forward pass used them
        self.used: list[nn.Module] = []  # by this forward pass, so far
        self.in_flight: list[tuple[Any, ...]] = []
        for child in self.parts_of:
            self.show("shard", child)
            child.register_forward_pre_hook(self.before_forward, with_kwargs=True)
            child.register_forward_hook(self.after_forward)
        for part in self.parts:
            if part.shard.requires_grad:
                hook = partial(self.reduce_scatter_gradient, part)
                part.whole.register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        output = self.module(*inputs, **kwargs)
        self.order, self.used = self.used, []
        self.free(self.parts_of)  # what was gathered and not used
        return output

    def show(self, kind: str, child: nn.Module) -> None:
        """Let a module's parameters be this rank's shards, or whole."""
        for name, part in self.parts_of[child].items():
            setattr(child, name, getattr(part, kind))

    def gather(self, order: list[nn.Module], i: int, following: int) -> None:
        """Let module `i` of an order have its parameters, and start the next one's."""
        for child in (order[i], *order[following : following + 1]):
            for part in self.parts_of[child].values():
                part.start_gather()
        for part in self.parts_of[order[i]].values():
            part.finish_gather()

    def free(self, modules: Iterable[nn.Module]) -> None:
        """Free the whole parameters of some modules."""
        for child in modules:
            for part in self.parts_of[child].values():
                part.free()

    def before_forward(self, child: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather; from the second pass on, the module that comes next as well."""
        i = len(self.used)
        self.used.append(child)
        is_known = self.order[i : i + 1] == [child]
        self.gather(self.order if is_known else self.used, i, i + 1)
        self.show("whole", child)
        return tree_map(lambda x: in_dtype(x, self.compute_dtype), (args, kwargs))

    def after_forward(self, child: nn.Module, _: Any, output: Any) -> None:
        """Free; gather again when backward reaches the output."""
        self.show("shard", child)
        self.free([child])
        used = self.used
        # Its place. A module that is called twice has two; this call is the last.
        i = max(place for place, module in enumerate(used) if module is child)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # Runs just before backward enters the module.
                tensor.register_hook(lambda _: self.before_backward(used, i))

    def before_backward(self, used: list[nn.Module], i: int) -> None:
        """Gather module `i`, start the one before it, free the one after it."""
        # For frozen and tied parameters: the others are freed by their gradient.
        self.free(used[i + 1 : i + 2])
        self.gather(used, i, i - 1)

    def reduce_scatter_gradient(self, part: ShardedParameter, whole: Tensor) -> None:
        """Free a parameter; send its gradient to the owners of its shards."""
        part.free()
        padded = part.shard.new_zeros(part.flat.numel())
        padded[: whole.numel()] = whole.grad.flatten()  # type: ignore[union-attr]
        whole.grad = None
        mine = torch.empty_like(part.shard)
        # Before torch 2.13: reduce_scatter_tensor.
        work = dist.reduce_scatter_single(
            mine, padded, op=dist.ReduceOp.AVG, async_op=True
        )
        self.in_flight.append((work, part.shard, mine, padded))
        self.add_gradients(but_last=1)

    def add_gradients(self, but_last: int) -> None:
        """Wait for gradients in flight; micro-batches add up."""
        while len(self.in_flight) > but_last:
            work, shard, mine, _ = self.in_flight.pop(0)
            work.wait()
            shard.grad = mine if shard.grad is None else shard.grad + mine

    def finish_gradient_sync(self) -> None:
        """Wait until every shard has its gradient; every rank calls this."""
        self.add_gradients(but_last=0)
        self.free(self.parts_of)  # what was gathered and not used

    def full_parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters by name, in the shards' dtype; all call this."""
        shapes = {part.shard: part.whole.shape for part in self.parts}
        whole = {}
        for name, shard in self.module.named_parameters():
            flat = shard.new_empty(len(shard) * dist.get_world_size())
            dist.all_gather_single(flat, shard.detach())
            whole[name] = flat[: shapes[shard].numel()].view(shapes[shard])
        return whole


def in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a floating-point tensor in a dtype, and anything else as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if dtype and is_float else value


def stage_3(model: Any, bf16: bool) -> tuple[FullySharded, torch.optim.AdamW, Callable]:
    """Shard everything; the optimizer is PyTorch's own and sees only shards."""
    sharded = FullySharded(model, torch.bfloat16 if bf16 else None)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    return sharded, optimizer, sharded.finish_gradient_sync


if __name__ == "__main__":
    start_ranks(main, 2, stage_3)
