"""Learn a landscape in one process: the baseline of everything in this chapter.

Run: python 02_ddp_mp/one_process.py --max_epochs=2 --batch_size=64
Expect: the loss of each epoch, the error on held-out points, and the fact on which data
    parallelism stands: two half batches have the mean gradient of the whole batch.
"""

import sys

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler

from ranks import number, read_options
from terrain import (
    TerrainModel,
    batch_gradient,
    load_terrain,
    rmse_in_metres,
    sample_points,
)


def train_epoch(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
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


def main() -> None:
    """Train, evaluate, and compare the gradient of a batch with those of its halves."""
    options = read_options(
        max_epochs={"type": number(1, 1000), "default": 10, "help": "passes"},
        batch_size={"type": number(1, 4096), "default": 64, "help": "points in a step"},
    )
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    terrain = load_terrain()
    train_set, held_out = sample_points(terrain)
    torch.manual_seed(0)
    model = TerrainModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(options.max_epochs):
        order.manual_seed(epoch)
        loss = train_epoch(model, optimizer, loader)
        print(f"epoch {epoch} | steps {len(loader)} | mean loss {loss:.3f}")
    error, baseline = rmse_in_metres(model, held_out, terrain), terrain.std
    print(
        f"held-out points: RMSE {error:.1f} m (predicting the mean: {baseline:.1f} m)"
    )

    batch = [tensor[:64].to(device) for tensor in held_out.tensors]
    halves = zip(*(tensor.chunk(2) for tensor in batch), strict=True)
    of_halves = torch.stack([batch_gradient(model, *half) for half in halves])
    whole = batch_gradient(model, *batch)
    error = ((of_halves.mean(dim=0) - whole).abs().max() / whole.abs().max()).item()
    if not error < 1e-5:
        sys.exit(f"two half batches: mean gradient {error:.0e} from the whole batch's")
    print(
        f"check: mean gradient of two half batches {error:.0e} from the whole batch's"
    )


if __name__ == "__main__":
    main()
