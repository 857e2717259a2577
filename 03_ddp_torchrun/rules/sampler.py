"""Shard the samples anew in each epoch, and evaluate on each of them exactly once.

Run: torchrun --nproc-per-node=3 03_ddp_torchrun/rules/sampler.py
Expect: each rank's indices in three epochs, the same each time if `set_epoch` is
    forgotten; then a validation loss computed in three ways, of which one is right.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

from ranks import check, gather, join, leave, say

SAMPLES, EPOCHS = 7, 3  # a prime: 2 to 6 ranks cannot share it evenly
LOSSES = torch.exp(-torch.arange(SAMPLES))  # one of each sample; the first fit worst


def without_set_epoch(sampler: DistributedSampler) -> Iterator[list[int]]:
    """Wrong: every epoch has the order of the first one."""
    for _ in range(EPOCHS):
        yield list(sampler)  # a DataLoader reads it in the same way


def with_set_epoch(sampler: DistributedSampler) -> Iterator[list[int]]:
    """Right: the epoch is added to the seed, on all ranks the same."""
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # before the epoch's first batch
        yield list(sampler)


def mean_of_means(losses: torch.Tensor) -> float:
    """Wrong: each rank counts as much, whatever it has evaluated."""
    mean = losses.mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def mean_by_counts(losses: torch.Tensor) -> float:
    """Right: each sample counts as much; a rank may have none."""
    losses = losses.float()  # a sum in float16 may overflow, in bf16 it is rounded
    total = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
    dist.all_reduce(total)  # the sum and the count in one message
    return (total[0] / total[1]).item()


def indices_by_hand(seed: int, drop_last: bool) -> list[int]:
    """Do what the sampler does: one order for all, and every n-th of it for a rank."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(SAMPLES, generator=generator).tolist()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_each = (math.floor if drop_last else math.ceil)(SAMPLES / world_size)
    return (order + order)[: of_each * world_size][rank::world_size]


def show_epochs(title: str, epochs: list[list[int]]) -> None:
    """Print the indices of all ranks, and those that were repeated or left out."""
    rows = {f"rank {rank}": own for rank, own in enumerate(gather(epochs))}
    by_epoch = torch.tensor([*rows.values()]).transpose(0, 1).flatten(1)
    counts = torch.stack([epoch.bincount(minlength=SAMPLES) for epoch in by_epoch])
    rows["repeated"] = [row.nonzero().flatten().tolist() for row in counts > 1]
    rows["left out"] = [row.nonzero().flatten().tolist() for row in counts == 0]
    say(title)
    for name in [name for name, cells in rows.items() if any(cells)]:
        say(f"  {name:8} | " + " | ".join(f"{cell!s:12}" for cell in rows[name]))


def main() -> None:
    """Shard in three ways and evaluate in three, compared with one process."""
    device, dataset = join(at_least=2, at_most=SAMPLES - 1), TensorDataset(LOSSES)
    padded = LOSSES[[*DistributedSampler(dataset, shuffle=False)]].to(device)
    unpadded = LOSSES[dist.get_rank() :: dist.get_world_size()].to(device)
    mean, one_process = mean_by_counts(unpadded), LOSSES.mean().item()
    is_right = abs(mean - one_process) < 1e-6
    ways = [(without_set_epoch, False), (with_set_epoch, False), (with_set_epoch, True)]
    for loop, drop_last in ways:
        epochs = list(loop(DistributedSampler(dataset, drop_last=drop_last)))
        show_epochs(loop.__name__ + drop_last * ", drop_last=True", epochs)
        seeds = range(EPOCHS) if loop is with_set_epoch else [0] * EPOCHS
        is_right &= epochs == [indices_by_hand(seed, drop_last) for seed in seeds]
    say(f"validation loss: {one_process:.4f} in one process, from sums {mean:.4f}")
    say(f"  as a mean of padded shards' means   {mean_of_means(padded):.4f}")
    say(f"  as a mean of unpadded shards' means {mean_of_means(unpadded):.4f}")
    check(is_right, f"{len(ways)} x {EPOCHS} epochs and the loss are one process's")
    leave()


if __name__ == "__main__":
    main()
