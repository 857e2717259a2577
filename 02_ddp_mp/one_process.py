"""Learn a landscape in one process: what every other script here must come out at.

Run: python 02_ddp_mp/one_process.py --max_epochs=2 --batch_size=64
Needs: this folder and requirements.txt. Uses an accelerator if there is one.
Expect: the loss of each epoch, how many metres the model is off at places that it has
    not seen, and a `check:` of the fact that data parallelism stands on.
Before: 01_communication/collectives.py, where all-reduce is one call among many.
Next: 02_ddp_mp/compare.py, where several processes share the work.
"""

import argparse
import signal
import sys

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler

from options import make_parser, refuse_impossible, with_hyphens
from proof import check_shares, rmse_in_metres
from terrain import TerrainModel, load_terrain, sample_points


def train_batch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    places: torch.Tensor,
    heights: torch.Tensor,
) -> torch.Tensor:
    """Take one step on a batch of places (B, 2) and heights (B, 1); return its loss."""
    optimizer.zero_grad()
    loss = mse_loss(model(places), heights)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_one_process(args: argparse.Namespace) -> None:
    """Train, print the loss of each epoch, test on places that were held out."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    print(f"device: {device.type}")
    terrain = load_terrain()
    train_set, held_out = sample_points(terrain, args.points)
    torch.manual_seed(args.seed)
    model = TerrainModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.max_epochs):
        order.manual_seed(args.seed + epoch)
        losses = torch.zeros(len(loader), device=device)
        for step, (places, heights) in enumerate(loader):
            places, heights = places.to(device), heights.to(device)
            losses[step] = train_batch(model, optimizer, places, heights)
        print(
            f"epoch {epoch} | batch size {args.batch_size} | steps {len(loader)} | "
            f"mean loss {losses.mean():.3f}"
        )
    error = rmse_in_metres(model, held_out, terrain)
    print(f"error on unseen places: {error:.1f} m (a flat map: {terrain.std:.1f} m)")
    print(f"check: {check_shares(model, held_out)}")


def main() -> None:
    """Read the command line, refuse what cannot work, train."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it in silence
    parser = make_parser("Learn a landscape in one process.")
    args = parser.parse_args(with_hyphens(sys.argv[1:]))
    refuse_impossible(args, world_size=1)
    train_one_process(args)


if __name__ == "__main__":
    main()
