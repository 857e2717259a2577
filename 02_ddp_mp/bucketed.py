"""Data parallelism by hand as DDP does it: buckets, all-reduced while backward runs.

Run: python 02_ddp_mp/bucketed.py
Expect: the same weights as `naive.py`. What the overlap gains: timeline/README.md.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from naive import NaiveDDP, main
from ranks import start_ranks


class Bucket:
    """Parameters whose gradients are sent as one message.

    A gradient is a view of a part of `flat` (DDP's `gradient_as_bucket_view=True`).
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        """Allocate a flat buffer for the gradients, of one dtype and device."""
        lengths = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros(sum(lengths), requires_grad=False)
        pairs = zip(parameters, self.flat.split(lengths), strict=True)
        self.views = {parameter: part.view_as(parameter) for parameter, part in pairs}
        self.missing = set(parameters)
        self.work: Any = None  # the handle of the all-reduce that is in flight

    @torch.no_grad()
    def put(self, parameter: nn.Parameter) -> None:
        """Move a gradient into its place; divide, as DDP does, before sums overflow."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, 1 / dist.get_world_size(), out=view)
        parameter.grad = view
        self.missing.discard(parameter)


def make_buckets(parameters: list[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Sort parameters into buckets, the last first, for backward begins there.

    A bucket is full once it holds `bucket_cap_mb` MB (of 2**20 bytes) of one dtype.
    """
    buckets, held = [], 0
    for parameter in reversed(parameters):
        is_full = held >= bucket_cap_mb * 2**20
        if not buckets or is_full or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return [Bucket(bucket) for bucket in buckets]


class BucketedDDP(NaiveDDP):
    """An all-reduce for every bucket, started by hooks while backward is running."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0) -> None:
        """Sort the parameters into buckets; register a hook on each parameter."""
        super().__init__(module)
        self.buckets = make_buckets(self.trainable, bucket_cap_mb)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.started = 0  # how many all-reduces backward has started
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, unless all-reduces of the last backward are in flight."""
        if self.started and torch.is_grad_enabled():
            raise RuntimeError("finish_gradient_sync() was not called after backward")
        return super().forward(*inputs, **kwargs)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Take in a gradient that backward has just computed; send what is full."""
        if not self.is_syncing:
            return
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError("a second gradient before finish_gradient_sync()")
        bucket.put(parameter)
        # In the order of the list, and not whichever is full: all ranks have to make
        # their calls in the same order, and gradients may arrive in another.
        for ready in self.buckets[self.started :]:
            if ready.missing:
                break
            ready.work = dist.all_reduce(ready.flat, async_op=True)  # `put` divides
            self.started += 1

    def average_gradients(self) -> None:
        """Send what is left, then wait for all that is in flight."""
        for bucket in self.buckets[self.started :]:
            for parameter in list(bucket.missing):
                bucket.put(parameter)
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        for bucket in self.buckets:
            bucket.work.wait()
            # A handle that is kept would keep a destroyed group's threads running.
            bucket.work, bucket.missing = None, set(bucket.views)
        self.started = 0


if __name__ == "__main__":
    # The model has 0.13 MB of gradients, in float64 0.25: two buckets.
    start_ranks(main, 2, partial(BucketedDDP, bucket_cap_mb=0.05))
