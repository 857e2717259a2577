"""What DDP does, seen on a map: two ranks see one half each, and both learn all of it.

Run: python 02_ddp_mp/west_and_east.py
Expect: alone, a rank's error is small in the half that it sees and large in the other;
    under DDP it is small in both.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ranks import (
    check,
    gather,
    join,
    leave,
    number,
    read_options,
    same_on_all_ranks,
    say,
    start_ranks,
)
from terrain import TerrainModel, load_terrain, rmse_in_metres, sample_points

BATCH_SIZE = 1024


def half_of(data: TensorDataset, rank: int) -> TensorDataset:
    """Return the points that a rank sees: 0 those in the west, 1 those in the east."""
    places, heights = data.tensors
    mine = (places[:, 0] < 0) == (rank == 0)
    return TensorDataset(places[mine], heights[mine])


def fit(model: nn.Module, data: TensorDataset, seed: int, steps: int) -> None:
    """Train a model, under DDP or not, on random batches of some points."""
    device = next(model.parameters()).device
    places, heights = (tensor.to(device) for tensor in data.tensors)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(places), (BATCH_SIZE,), generator=generator)
        chosen = chosen.to(device)
        optimizer.zero_grad()
        mse_loss(model(places[chosen]), heights[chosen]).backward()
        optimizer.step()
        schedule.step()


def main(steps: int = 400, maps: torch.Tensor | None = None) -> None:
    """Train alone, then under DDP; fill `maps`, (3, C, 1): rank 0, rank 1, both."""
    device = join(at_least=2, at_most=2)
    rank, terrain = dist.get_rank(), load_terrain()
    points, held_out = sample_points(terrain, len(terrain.places) - 4096)
    halves = [half_of(held_out, other) for other in (0, 1)]
    flat = [h.tensors[1].square().mean().sqrt().item() * terrain.std for h in halves]
    errors, model = [], nn.Module()
    for is_together in (False, True):
        torch.manual_seed(0)  # both models begin with the same weights
        model = TerrainModel(waves=256, width=128, scale=14.0).to(device)
        wrapped = DistributedDataParallel(model) if is_together else model
        fit(wrapped, half_of(points, rank), rank, steps)
        errors.append([rmse_in_metres(model, half, terrain) for half in halves])
        if maps is not None:
            drawn = model(terrain.places.to(device)).detach()
            maps[2 if is_together else rank] = drawn.cpu()
    (alone_0, ddp_0), (alone_1, ddp_1) = gather(errors)
    rows = {"rank 0 alone": alone_0, "rank 1 alone": alone_1}
    rows |= {"rank 0, DDP": ddp_0, "rank 1, DDP": ddp_1, "predicting the mean": flat}
    say(f"{'RMSE in metres':20}{'west':>8}{'east':>8}")
    for name, (west, east) in rows.items():
        say(f"{name:20}{west:8.1f}{east:8.1f}")
    seen, unseen = (alone_0[0], alone_1[1]), (alone_1[0], alone_0[1])
    is_lost = all(bad > 4 * good for bad, good in zip(unseen, seen, strict=True))
    is_learned = all(e < 1.5 * good for e, good in zip(ddp_0, seen, strict=True))
    is_same = same_on_all_ranks(model.parameters()) and ddp_0 == ddp_1
    claim = "unseen half > 4 x seen half alone, < 1.5 x under DDP; the same weights"
    check(is_lost and is_learned and is_same, claim)
    leave()


if __name__ == "__main__":
    steps = {"type": number(50, 100_000), "default": 400, "help": "of each training"}
    start_ranks(main, 2, read_options(steps=steps).steps)
