"""A real landscape with no download, and a small network that learns to draw it.

The elevations are those of the Jacksboro fault in Tennessee, and come with matplotlib:
344 rows from north to south, 403 columns from west to east.
Shapes: B points in a batch, C cells of the map.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.cbook import get_sample_data
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Terrain(NamedTuple):
    """A map of heights: C cells, in rows from north to south.

    `places` is (C, 2): x from -1 (west) to 1 (east), and y in nearly the same steps.
    `heights` is (C, 1): metres above `mean`, over `std`. `shape` is (rows, columns).
    """

    places: torch.Tensor
    heights: torch.Tensor
    shape: tuple[int, int]
    mean: float
    std: float


def load_terrain() -> Terrain:
    """Read the elevations; the tensors have torch's default dtype."""
    file = get_sample_data("jacksboro_fault_dem.npz", asfileobj=False)
    metres = torch.tensor(np.load(file)["elevation"], dtype=torch.get_default_dtype())
    rows, columns = metres.shape
    y = torch.linspace(1, -1, rows) * rows / columns
    x = torch.linspace(-1, 1, columns)
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)
    mean, std = metres.mean().item(), metres.std().item()
    heights = ((metres - mean) / std).reshape(-1, 1)
    return Terrain(places, heights, (rows, columns), mean, std)


def sample_points(
    terrain: Terrain, points: int = 4096, seed: int = 0
) -> tuple[TensorDataset, TensorDataset]:
    """Draw points to train on and 4096 held-out points; every rank draws the same.

    Each item of the two datasets is (place, height), of shapes (2,) and (1,). The seed
    is fixed: if each rank drew its own points, index 7 would be another point on each.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(terrain.places), generator=generator)
    chosen, held_out = order[:points], order[points : points + 4096]
    return (
        TensorDataset(terrain.places[chosen], terrain.heights[chosen]),
        TensorDataset(terrain.places[held_out], terrain.heights[held_out]),
    )


class TerrainModel(nn.Module):
    """From places, (B, 2), to their heights, (B, 1).

    Waves of fixed random frequencies as input let a network learn ridges, too (Tancik
    et al. 2020, https://arxiv.org/abs/2006.10739).
    """

    frequencies: torch.Tensor

    def __init__(self, waves: int = 64, width: int = 128, scale: float = 4.0) -> None:
        """Make waves of about `scale` / 2 periods per unit, and three layers."""
        super().__init__()
        # A buffer is not trained. It is the same in every process, whatever the seed.
        generator = torch.Generator().manual_seed(0)
        frequencies = torch.randn(2, waves, generator=generator) * scale * math.pi
        self.register_buffer("frequencies", frequencies)
        self.layers = nn.Sequential(
            nn.Linear(2 * waves, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 1),
        )

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Draw the heights at some places."""
        angles = places @ self.frequencies
        return self.layers(torch.cat([angles.sin(), angles.cos()], dim=-1))


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> float:
    """Take a step on each batch of places (B, 2), heights (B, 1); return the loss."""
    device, losses = next(model.parameters()).device, []
    for batch in loader:
        places, heights = (tensor.to(device) for tensor in batch)
        optimizer.zero_grad()
        loss = mse_loss(model(places), heights)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def rmse_in_metres(model: nn.Module, data: TensorDataset, terrain: Terrain) -> float:
    """Return the root mean squared error of a plain model, without DDP, in metres."""
    device = next(model.parameters()).device
    places, heights = (tensor.to(device) for tensor in data.tensors)
    return mse_loss(model(places), heights).sqrt().item() * terrain.std


def batch_gradient(model: Any, *batch: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the mean loss on (places, heights) as one flat tensor."""
    places, heights = batch
    loss = mse_loss(model(places), heights)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def gradient_error(ddp_model: Any, data: TensorDataset) -> float:
    """Return the largest relative error of DDP's gradient, next to one process's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = list(ddp_model.parameters())
    batch = [t[: 32 * world_size].to(parameters[0].device) for t in data.tensors]
    one_process = batch_gradient(ddp_model.module, *batch)
    places, heights = (tensor.chunk(world_size)[rank] for tensor in batch)
    ddp_model.zero_grad()
    mse_loss(ddp_model(places), heights).backward()
    mean = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return ((mean - one_process).abs().max() / one_process.abs().max()).item()
