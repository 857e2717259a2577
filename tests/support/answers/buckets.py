"""The answer to 02_ddp_mp/exercises/buckets.py."""

import torch
import torch.distributed as dist


def average_in_buckets(parameters: list[torch.nn.Parameter], cap: int) -> None:
    """Fill a bucket as far as it goes, send it, write the mean back."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not buckets or parameter.numel() > room:
            buckets.append([])
            room = cap
        buckets[-1].append(parameter.grad)
        room -= parameter.numel()
    for bucket in buckets:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
