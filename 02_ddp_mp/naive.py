"""Data parallelism by hand, the naive way: one all-reduce for every parameter.

Run: python 02_ddp_mp/naive.py
Expect: alone, each rank diverges from one process; synchronised, none does.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from ranks import check, gather, join, leave, same_on_all_ranks, say, start_ranks
from terrain import TerrainModel, load_terrain, sample_points


def average_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """After backward, overwrite each dense gradient with the mean over all ranks."""
    for parameter in parameters:  # those that require a gradient
        if parameter.grad is None:  # all ranks have to make the same calls
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)  # now it is the mean


class NaiveDDP(nn.Module):
    """As DDP, if each weight is used; call `finish_gradient_sync()` before a step."""

    def __init__(self, module: nn.Module) -> None:
        """Overwrite the module's parameters and buffers with those of rank 0."""
        super().__init__()
        self.module = module
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        if not self.trainable:
            raise RuntimeError("no parameter of this module requires a gradient")
        self.is_syncing = True
        self.copy_from_rank_zero([*module.parameters(), *module.buffers()])

    @torch.no_grad()
    def copy_from_rank_zero(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors of any strides, one by one."""
        for tensor in tensors:
            values = tensor.contiguous()
            dist.broadcast(values, src=0)
            tensor.copy_(values)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; in synchronised training with rank 0's buffers."""
        if self.is_syncing and torch.is_grad_enabled():
            self.copy_from_rank_zero(self.module.buffers())
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on this rank; the last backward stands outside."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def finish_gradient_sync(self) -> None:
        """Replace every gradient by its mean over the ranks; every rank calls this."""
        if not self.is_syncing:
            raise RuntimeError("finish_gradient_sync() inside no_sync()")
        self.average_gradients()

    def average_gradients(self) -> None:
        """All-reduce one by one, not by `trainable`: some may be unfrozen since."""
        average_over_ranks(p for p in self.parameters() if p.requires_grad)


def train(wrap: Any, batches: Sequence[Sequence[torch.Tensor]], seed: int):
    """Train on batches of places (B, 2) and heights (B, 1); return the weights."""
    torch.manual_seed(seed)
    model = wrap(TerrainModel().to(batches[0][0].device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for places, heights in batches:
        optimizer.zero_grad()
        mse_loss(model(places), heights).backward()
        if isinstance(model, NaiveDDP):
            model.finish_gradient_sync()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main(wrap: Any = NaiveDDP) -> None:
    """Train in one process, then each rank alone, then together; compare."""
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide a mistake
    device = join(at_least=2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    points, _ = sample_points(load_terrain(), 50 * 32 * world_size)
    places, heights = (t.to(device).split(32 * world_size) for t in points.tensors)
    batches = list(zip(places, heights, strict=True))
    shards = [[t.chunk(world_size)[rank] for t in batch] for batch in batches]
    one_process = train(lambda model: model, batches, seed=0)
    alone = train(lambda model: model, shards, seed=0)
    weights = train(wrap, shards, seed=rank)  # wrapping gives all rank 0's weights
    far = [(w - one_process).abs().max().item() for w in (alone, weights)]
    apart, error = torch.tensor(gather(far)).amax(dim=0)  # max() would drop a NaN
    say(f"weights off by up to {apart:.0e} alone, {error:.0e} synchronised")
    claim = f"after 50 steps {world_size} ranks hold one process's weights, alone none"
    check(same_on_all_ranks([weights]) and error < 1e-11 and far[0] > 0.01, claim)
    leave()


if __name__ == "__main__":
    start_ranks(main, 2)
