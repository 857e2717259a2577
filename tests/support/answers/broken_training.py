"""The answer to 03_ddp_torchrun/exercises/broken_training.py."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def train_and_save(
    ddp_model: DistributedDataParallel, dataset: Dataset, epochs: int, path: Path
) -> list[float]:
    """Tell the sampler the epoch, average the losses, save once and the plain model."""
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = mse_loss(ddp_model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        # Every rank makes this call, also those that print nothing.
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append((total / len(loader)).item())
    if dist.get_rank() == 0:
        torch.save(ddp_model.module.state_dict(), path)
    return losses
