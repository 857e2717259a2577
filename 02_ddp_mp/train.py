"""Train on several ranks with `mp.spawn` and DistributedDataParallel (DDP).

Run: python 02_ddp_mp/train.py --max_epochs=2 --batch_size=32
Expect: batches and local loss of each rank; then the mean loss and the RMSE, which are
    those of `--nprocs=1 --batch_size=64`.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ranks
from ranks import check, fail, gather, number, say
from terrain import (
    TerrainModel,
    gradient_error,
    load_terrain,
    rmse_in_metres,
    sample_points,
    train_epoch,
)


def train_rank(rank: int, port: int, options: argparse.Namespace) -> None:
    """Be one rank: join the process group, train, leave."""
    ranks.tie_to_launcher()
    device, reason = ranks.choose_device(rank, options.nprocs)
    backend = dist.get_default_backend_for_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.nprocs)
    say(f"device: {device.type} with {backend} ({reason})\nranks: {options.nprocs}")
    train_on_shard(device, options)
    dist.destroy_process_group()


def train_on_shard(device: torch.device, options: argparse.Namespace) -> None:
    """Train under DDP, each rank on its shard of the points; evaluate."""
    terrain = load_terrain()
    train_set, held_out = sample_points(terrain)  # the same on every rank
    torch.manual_seed(0)
    model = TerrainModel().to(device)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=options.lr)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(options.max_epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(ddp_model, optimizer, loader)
        show_epoch(f"epoch {epoch}", sampler, loader, loss)

    error, baseline = rmse_in_metres(model, held_out, terrain), terrain.std
    say(f"held-out points: RMSE {error:.1f} m (predicting the mean: {baseline:.1f} m)")
    error = torch.tensor(gather(gradient_error(ddp_model, held_out))).max()
    is_right = ranks.same_on_all_ranks(model.parameters()) and error < 1e-5
    bits = f"{dist.get_world_size()} rank(s) hold the same bits"
    check(is_right, f"{bits}, and a gradient within {error:.0e} of one process's")


def show_epoch(
    epoch: str, sampler: DistributedSampler, loader: DataLoader, loss: float
) -> None:
    """Print what each rank has done; fail if two ranks have seen the same point."""
    steps, batch_size = len(loader), loader.batch_size or 1
    losses, indices = gather(loss), gather(list(sampler)[: steps * batch_size])
    done = f"batch size {batch_size} | steps {steps}"
    for rank, local in enumerate(losses):
        say(f"{epoch} | rank {rank} | {done} | local loss {local:.3f}")
    points = len(set().union(*indices))
    product = f"{batch_size} x {steps} x {len(losses)} = {points}"
    say(f"{epoch} | batch size x steps x ranks = {product} different points")
    if points != batch_size * steps * len(losses):
        raise RuntimeError(f"some points were seen twice: {product}")
    mean = sum(losses) / len(losses)
    say(f"{epoch} | mean loss over ranks {mean:.3f}")


def start(options: argparse.Namespace) -> None:
    """Open the store where the ranks meet; start them, and wait for them."""
    # Port 0: the system chooses one that is free, and this process holds it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(train_rank, (store.port, options), nprocs=options.nprocs)


def main() -> None:
    """Read the options, refuse what cannot work, start the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nprocs = max(2, torch.accelerator.device_count())
    options = ranks.read_options(
        max_epochs={"type": number(1, 10**6), "default": 10, "help": "passes"},
        batch_size={"type": number(1, 4096), "default": 32, "help": "points of a rank"},
        lr={"type": number(1e-9, 10.0), "default": 3e-3, "help": "learning rate"},
        nprocs={"type": number(1, 64), "default": nprocs, "help": "ranks to start"},
    )
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own ranks")
    if options.nprocs * options.batch_size > 4096:
        fail(f"{options.nprocs} ranks x {options.batch_size} are more than 4096 points")
    start(options)


if __name__ == "__main__":
    main()
