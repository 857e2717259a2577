"""Data parallelism by hand: three wrappers that do what DDP does, in three ways.

All are used as DDP is: wrap the module, call the wrapper, call `backward`. One call is
added: `finish_gradient_sync()`, before the gradients are looked at, which mostly means
before `optimizer.step()`. DDP makes that call itself, at the end of `backward`.

A parameter that got no gradient on some rank counts as zero there. So every rank makes
the same calls, whatever its samples used, and every trainable parameter has a gradient
afterwards. DDP stops with an error instead, unless told `find_unused_parameters=True`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Replica(nn.Module):
    """What the three have in common: equal weights on all ranks, and `no_sync`."""

    def __init__(self, module: nn.Module, forward_sync_buffers: bool = True) -> None:
        """Give this rank's module the parameters and buffers of rank 0.

        Args:
            module: built alike on every rank, to be wrapped only once; whatever values
                ranks other than 0 have put into it are overwritten.
            forward_sync_buffers: whether to do the same with the buffers before each
                forward pass; a running mean would drift apart otherwise.

        Raises:
            RuntimeError: there is nothing to train.
        """
        super().__init__()
        self.module = module
        self.forward_sync_buffers = forward_sync_buffers
        self.is_syncing = True
        # A tied parameter comes once, a frozen one not at all.
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        if not self.trainable:
            raise RuntimeError("no parameter of this module requires a gradient")
        self.copy_from_rank_zero([*module.parameters(), *module.buffers()])

    @staticmethod
    @torch.no_grad()
    def copy_from_rank_zero(tensors: list[torch.Tensor]) -> None:
        """Overwrite these tensors with rank 0's, one call each."""
        for tensor in tensors:
            # A message is one piece of memory, in the same order on every rank.
            values = tensor.contiguous()
            dist.broadcast(values, src=0)
            if values is not tensor:
                tensor.copy_(values)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.forward_sync_buffers and self.is_syncing and torch.is_grad_enabled():
            self.copy_from_rank_zero(list(self.module.buffers()))
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank; they are exchanged after the last."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def finish_gradient_sync(self) -> None:
        """Replace every gradient by its mean over the ranks; every rank calls this.

        Raises:
            RuntimeError: inside `no_sync`. The ranks would go on, each by itself.
        """
        if not self.is_syncing:
            raise RuntimeError("finish_gradient_sync() inside no_sync()")
        self.average_gradients()

    def average_gradients(self) -> None:
        """Do it; this is what the three do in different ways."""
        raise NotImplementedError


class NaiveDDP(Replica):
    """One all-reduce for every parameter, when backward is over."""

    def average_gradients(self) -> None:
        """Send one gradient after another, and wait for each."""
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


class FlatDDP(Replica):
    """One all-reduce for everything, when backward is over."""

    def average_gradients(self) -> None:
        """Copy all gradients into one row, send it, copy them back."""
        gradients = []
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class Bucket:
    """Some parameters whose gradients are sent as one message.

    The gradients live in the bucket: after a step `parameter.grad` is a view of a part
    of `flat`, so that nothing need be copied back when the mean has arrived. (This is
    DDP's `gradient_as_bucket_view=True`.)
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        """Make room for the gradients of these parameters, of one dtype and device."""
        self.parameters = parameters
        self.flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = {
            parameter: part.view_as(parameter)
            for parameter, part in zip(parameters, parts, strict=True)
        }
        self.reset()

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.missing = set(self.parameters)
        self.work: dist.Work | None = None

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, world_size: int) -> None:
        """Move a gradient into its place, divided: a sum over ranks makes the mean."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            # Copying and dividing is one pass over memory. If the gradient has added
            # up in its place, because it was not set to None, this works in place.
            torch.mul(parameter.grad, 1 / world_size, out=view)
        parameter.grad = view
        self.missing.discard(parameter)


def make_buckets(parameters: list[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Sort parameters into buckets, the last parameter first.

    Backward goes from the last layer to the first, so the gradients arrive roughly in
    this order, and the first bucket is full long before backward is over.

    Args:
        parameters: in the order in which the module lists them.
        bucket_cap_mb: a bucket is closed once it holds this many MB (of 2**20 bytes),
            so that its last parameter may take it past the cap.
    """
    buckets: list[list[nn.Parameter]] = []
    held = 0
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        last = buckets[-1][-1] if buckets else None
        is_full = held >= bucket_cap_mb * 2**20
        if last is None or is_full or kind != (last.dtype, last.device):
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.numel() * parameter.element_size()
    return [Bucket(bucket) for bucket in buckets]


class BucketedDDP(Replica):
    """Several all-reduces, started by hooks while backward is still running."""

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25.0,
        forward_sync_buffers: bool = True,
    ) -> None:
        """Sort the parameters into buckets and hang a hook on each parameter.

        Raises:
            ValueError: `bucket_cap_mb` is negative.
        """
        super().__init__(module, forward_sync_buffers)
        if not bucket_cap_mb >= 0:
            raise ValueError(f"bucket_cap_mb must not be negative, not {bucket_cap_mb}")
        self.world_size = dist.get_world_size()
        self.buckets = make_buckets(self.trainable, bucket_cap_mb)
        self.started = 0  # how many buckets are under way
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, unless the gradients of the last backward are under way."""
        if self.started and torch.is_grad_enabled():
            raise RuntimeError("finish_gradient_sync() was not called after backward")
        return super().forward(*inputs, **kwargs)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Take in a gradient that backward has just found, and send what is full."""
        if not self.is_syncing:
            return
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise RuntimeError(
                "a second backward before finish_gradient_sync(); put all but the last "
                "backward of a step, and their forward passes, into no_sync()"
            )
        bucket.put(parameter, self.world_size)
        while self.started < len(self.buckets):
            if self.buckets[self.started].missing:
                break
            self.start_next()

    def start_next(self) -> None:
        """Start the all-reduce of the next bucket.

        The next in line, and not whichever is full: all ranks have to make their calls
        in the same order, and gradients may arrive in another.
        """
        bucket = self.buckets[self.started]
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self.started += 1

    def average_gradients(self) -> None:
        """Send what is left, then wait for all that is under way."""
        while self.started < len(self.buckets):
            bucket = self.buckets[self.started]
            for parameter in list(bucket.missing):
                bucket.put(parameter, self.world_size)
            self.start_next()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.reset()
        self.started = 0
