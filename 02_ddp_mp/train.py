"""Learn a landscape on several ranks, which DDP keeps in step.

Run: python 02_ddp_mp/train.py --max_epochs=2 --batch_size=32
Needs: this folder and requirements.txt. A GPU for every rank is used if there is one.
Expect: the batches and the loss of each rank and epoch, batch size x steps x ranks =
    4096, the same error as `one_process.py --batch_size=64`, and a `check:`.
Before: 02_ddp_mp/compare.py, where DDP's work is done by hand.
Next: 02_ddp_mp/spawn_traps.py, what `mp.spawn` does with your script.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
import torch.multiprocessing as mp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from options import (
    make_parser,
    positive_int,
    refuse,
    refuse_impossible,
    with_hyphens,
)
from proof import check_ranks, count_epoch, rmse_in_metres
from saving import check_place, check_saved, save_weights
from terrain import TerrainModel, load_terrain, sample_points


def choose_device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Give each rank an accelerator of its own, or every rank the CPU; say why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "no accelerator found"
    kind, found = accelerator.type, torch.accelerator.device_count()
    if dist.get_default_backend_for_device(kind) == "gloo":
        return torch.device("cpu"), f"no backend connects {kind} devices"
    if found < local_world_size:
        return torch.device("cpu"), f"{found} {kind} for {local_world_size} local ranks"
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank), f"{found} {kind}, one for each local rank"


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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


def train_rank(rank: int, world_size: int, port: int, args: argparse.Namespace) -> None:
    """Be one rank: join, train on this rank's share, let rank zero print and save."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    device, reason = choose_device(rank, world_size)
    backend = dist.get_default_backend_for_device(device)
    # The ranks find each other here. One that waits too long ends with an error.
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    is_rank_zero = rank == 0
    if is_rank_zero:
        print(f"device: {device.type} with {backend} ({reason})")
        print(f"ranks: {world_size}", flush=True)
    terrain = load_terrain()
    train_set, held_out = sample_points(terrain, args.points)
    torch.manual_seed(args.seed)
    model = TerrainModel().to(device)
    ddp_model = DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [rank]
    )
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    sampler = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(len(loader), device=device)
        seen = []
        for step, (places, heights) in enumerate(loader):
            seen.append(places)
            places, heights = places.to(device), heights.to(device)
            losses[step] = train_batch(ddp_model, optimizer, places, heights)
        for line in count_epoch(args.batch_size, seen, losses):
            if is_rank_zero:
                print(f"epoch {epoch} | {line}", flush=True)
    # The plain model, not DDP's: this forward pass needs no other rank.
    error = rmse_in_metres(model, held_out, terrain)
    result = check_ranks(ddp_model, model, held_out)
    if is_rank_zero:
        print(
            f"error on unseen places: {error:.1f} m (a flat map: {terrain.std:.1f} m)"
        )
        if args.save:
            save_weights(args.save, ddp_model.module, error)
        print(f"check: {result}", flush=True)
    del ddp_model  # DDP holds on to the group, which has to go last
    dist.destroy_process_group()


def main() -> None:
    """Read the command line, refuse what cannot work, start the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it in silence
    parser = make_parser("Learn a landscape on several ranks.")
    add = parser.add_argument
    ranks = max(2, torch.accelerator.device_count())
    add("--nprocs", type=positive_int, default=ranks, help="processes to start")
    add("--master-port", type=int, default=0, help="0: any that is free")
    add("--save", type=Path, default=None, help="file for the trained weights")
    args = parser.parse_args(with_hyphens(sys.argv[1:]))
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    refuse_impossible(args, args.nprocs)
    if not 0 <= args.master_port < 2**16:
        refuse(f"--master-port must be 0 to 65535, not {args.master_port}")
    try:
        if args.save:
            check_place(args.save)
        # Bound here and kept: nobody can take the port before the ranks come.
        store = dist.TCPStore(
            "127.0.0.1", args.master_port, is_master=True, wait_for_workers=False
        )
    except dist.DistNetworkError:
        refuse(
            f"--master-port {args.master_port} is taken or not allowed; without it, "
            "a free port is chosen"
        )
    except ValueError as error:
        refuse(str(error))
    mp.spawn(train_rank, (args.nprocs, store.port, args), nprocs=args.nprocs)
    if args.save:
        terrain = load_terrain()
        _, held_out = sample_points(terrain, args.points)
        print(f"check: {args.save}: {check_saved(args.save, held_out, terrain)}")


if __name__ == "__main__":
    main()
