"""Turn it into DDP: a training loop that was written for one process.

Run: python 03_ddp_torchrun/exercises/your_own_script.py
Expect: what is wrong when two ranks run the loop, and status 1; once they train as one
    process does, a `check:`.
"""

import torch
import torch.distributed as dist  # noqa: F401 (for your answer)
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel  # noqa: F401 (for your answer)
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: F401 (for your answer)

from check_your_own_script import check_script


class Throw(nn.Module):
    """From speed (10 m/s) and angle (rad) of a throw, (B, 2), to its length (10 m)."""

    mean: torch.Tensor

    def __init__(self) -> None:
        """Draw the weights; the running mean of the inputs begins with zeros."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, throws: torch.Tensor) -> torch.Tensor:
        """Centre the inputs, (B, 2), by the batches before; return (B, 1)."""
        lengths = self.layers(throws - self.mean)
        if self.training:
            self.mean.lerp_(throws.mean(dim=0), 0.1)
        return lengths


def fit(model: nn.Module, dataset: Dataset, epochs: int) -> list[float]:
    """Train with 32 samples in a step; return the mean loss of each epoch."""
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for throws, lengths in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(throws), lengths)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
        print(f"epoch {epoch} | loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    check_script(Throw, fit)
