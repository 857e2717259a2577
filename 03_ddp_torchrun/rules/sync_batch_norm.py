"""Normalise by the statistics of all ranks' samples, so that N ranks equal one process.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/sync_batch_norm.py
Expect: how far BatchNorm under DDP is from one process with the whole batch, and how
    far synchronised layers are; on a CPU, what PyTorch's own layer says there.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import check, join, leave, say
from same_as_one_process import same_as_one_process


class SumOverRanks(torch.autograd.Function):
    """An all-reduce that gradients pass: every rank's loss depends on every part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts; every rank must call this."""
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' gradients: an all-reduce again."""
        return SumOverRanks.apply(grads[0])


class SummedBatchNorm(nn.BatchNorm1d):
    """BatchNorm with the statistics of all ranks' samples, for inputs (B, D).

    They must be float32: in half precision sums and the count overflow, or are rounded.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; in training every rank must call this, and B may differ."""
        if not self.training:
            return super().forward(input)  # running statistics, no communication
        counted = torch.cat([input, input.new_ones(len(input), 1)], dim=1)
        sums = SumOverRanks.apply(counted.sum(dim=0))  # the last one is the count
        count, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        if count < 2:
            raise ValueError(f"not with {int(count)} sample(s) in all")
        # Not from sums of squares: that is a small difference of two large numbers.
        variance = SumOverRanks.apply((input - mean).square().sum(dim=0)) / count
        unbiased = variance.detach() * count / (count - 1)
        self.num_batches_tracked.add_(1)  # type: ignore
        self.running_mean.lerp_(mean.detach(), self.momentum)  # type: ignore
        self.running_var.lerp_(unbiased, self.momentum)  # type: ignore
        return (input - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def wrap_plain(model: nn.Sequential) -> nn.Module:
    """Wrong, if one process is the measure: each rank normalises by its own batch."""
    return DistributedDataParallel(model)


def wrap_summed(model: nn.Sequential) -> nn.Module:
    """Right: BatchNorm becomes the layer above, and keeps its state and settings."""
    model[1].__class__ = SummedBatchNorm  # type: ignore
    return DistributedDataParallel(model)


def wrap_converted(model: nn.Sequential) -> nn.Module:
    """Right, on an accelerator: PyTorch's own layer in place of every BatchNorm."""
    return DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))


def build_normed() -> nn.Sequential:
    """Build a small model with a BatchNorm; the same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def mean_square(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Compute the loss of a batch, [inputs]."""
    return model(batch[0]).square().mean()


def main() -> None:
    """Train with each layer, and compare with one process that has all samples."""
    device, are_same = join(at_least=2), {}
    torch.manual_seed(1)  # a walk, so that the ranks' shards are not alike
    inputs = torch.randn(8 * dist.get_world_size(), 3).cumsum(dim=0).to(device)
    for wrap in (wrap_plain, wrap_summed, wrap_converted):
        try:
            are_same[wrap], result = same_as_one_process(
                lambda: build_normed().to(device), mean_square, wrap, [[inputs]] * 3
            )
        except ValueError as error:  # of wrap_converted, on a CPU
            result = str(error)
        say(f"{wrap.__name__:14} | {result}")
    are_right = not are_same.pop(wrap_plain) and are_same[wrap_summed]
    check(are_right and all(are_same.values()), "synchronised layers equal one process")
    leave()


if __name__ == "__main__":
    main()
