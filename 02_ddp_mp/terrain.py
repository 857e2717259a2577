"""A real landscape with no download, and a small network that can learn to draw it.

The elevations are those of the Jacksboro fault in Tennessee, which come with
matplotlib: 344 rows from north to south, 403 columns from west to east.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from torch import nn
from torch.utils.data import TensorDataset


class Terrain(NamedTuple):
    """A map of heights: C cells, in rows from north to south.

    `places` is (C, 2): x from -1 in the west to 1 in the east, y to the same scale with
    north up. `heights` is (C, 1): metres above `mean`, divided by `std`. `shape` is
    (rows, columns); `mean` and `std` are in metres.
    """

    places: torch.Tensor
    heights: torch.Tensor
    shape: tuple[int, int]
    mean: float
    std: float

    def metres(self, heights: torch.Tensor) -> torch.Tensor:
        """Turn heights that a model works with, (C, 1), into a map in metres."""
        return (heights * self.std + self.mean).reshape(self.shape)


def load_terrain() -> Terrain:
    """Read the elevations that matplotlib brings with it."""
    file = get_sample_data("jacksboro_fault_dem.npz", asfileobj=False)
    metres = torch.tensor(np.load(file)["elevation"], dtype=torch.float32)
    rows, columns = metres.shape
    y = torch.linspace(1, -1, rows) * rows / columns
    x = torch.linspace(-1, 1, columns)
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)
    mean, std = metres.mean().item(), metres.std().item()
    heights = ((metres - mean) / std).reshape(-1, 1)
    return Terrain(places, heights, (rows, columns), mean, std)


def sample_points(
    terrain: Terrain, points: int, held_out: int = 4096, seed: int = 0
) -> tuple[TensorDataset, TensorDataset]:
    """Draw cells to train on and others to test on; every rank draws the same.

    Each item of the two datasets is (place, height), of shapes (2,) and (1,). The
    generator is seeded: ranks that each drew points of their own would hold different
    datasets, and a sampler that deals indices would deal out something else on each.

    Raises:
        ValueError: the terrain does not have that many cells.
    """
    cells = len(terrain.places)
    if points + held_out > cells:
        raise ValueError(
            f"the terrain has {cells} cells, of which {held_out} are held out: "
            f"{cells - held_out} at most"
        )
    order = torch.randperm(cells, generator=torch.Generator().manual_seed(seed))
    chosen, unseen = order[:points], order[points : points + held_out]
    return (
        TensorDataset(terrain.places[chosen], terrain.heights[chosen]),
        TensorDataset(terrain.places[unseen], terrain.heights[unseen]),
    )


class TerrainModel(nn.Module):
    """From a place, (B, 2), to its height, (B, 1).

    A plain network learns smooth functions of its input first and ridges hardly ever.
    Waves of fixed random frequencies as input change that (Tancik et al. 2020,
    https://arxiv.org/abs/2006.10739).
    """

    frequencies: torch.Tensor

    def __init__(self, waves: int = 64, width: int = 128, scale: float = 4.0) -> None:
        """Make waves of about `scale` / 2 periods per unit, and three layers."""
        super().__init__()
        # A buffer and not a parameter: it is not trained. The generator of its own
        # makes it the same in every process, whatever the weights are seeded with.
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
