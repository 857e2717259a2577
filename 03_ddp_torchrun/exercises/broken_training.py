"""Find the mistakes: a training loop that runs, learns, and is wrong in four places.

Run: python 03_ddp_torchrun/exercises/broken_training.py
Expect: for each rank the first thing that is wrong with what it did, and status 1; once
    the loop is right, a `check:`.
"""

from pathlib import Path

import torch
import torch.distributed as dist  # noqa: F401 (for your answer)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from check_broken_training import check_training


def train_and_save(
    ddp_model: DistributedDataParallel, dataset: Dataset, epochs: int, path: Path
) -> list[float]:
    """Train, save the weights at `path`, return a loss for each epoch.

    An epoch takes every sample once, in an order of its own. Its loss is the mean over
    all ranks' samples. A plain model, without DDP, must be able to load the file.
    """
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = mse_loss(ddp_model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append((total / len(loader)).item())
    torch.save(ddp_model.state_dict(), path)
    return losses


if __name__ == "__main__":
    check_training(train_and_save)
