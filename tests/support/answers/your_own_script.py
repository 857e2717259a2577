"""The answer to 03_ddp_torchrun/exercises/your_own_script.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def fit(model: nn.Module, dataset: Dataset, epochs: int) -> list[float]:
    """Train with 32 samples in a step, whoever has them; report as one."""
    ddp_model = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for throws, lengths in loader:
            optimizer.zero_grad()
            loss = mse_loss(ddp_model(throws), lengths)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            # DDP would copy rank 0's running mean, of half the samples, to all ranks.
            # (gloo averages no integers, such as BatchNorm's count of batches.)
            for buffer in model.buffers():
                dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append((total / len(loader)).item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | loss {losses[-1]:.3f}")
    return losses
