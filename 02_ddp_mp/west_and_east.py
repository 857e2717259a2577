"""What DDP does, seen on a map: of two ranks that see half of it, each knows all.

Run: python 02_ddp_mp/west_and_east.py
Needs: terrain.py beside it. A GPU for each of the two ranks is used if there is one.
Expect: after some seconds, how far each model is off in the west and in the east. A
    rank alone is lost where it saw nothing; under DDP no rank is lost anywhere.
Before: 02_ddp_mp/by_hand.py, which shows what DDP does with the gradients.
Next: 02_ddp_mp/draw_west_east.py, which draws the maps.
"""

import argparse
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from options import refuse
from terrain import TerrainModel, load_terrain, sample_points

BATCH_SIZE = 1024
# What one rank found out: [west, east] in metres alone and under DDP, and its weights.
Found = tuple[list[float], list[float], torch.Tensor]


def is_in_half(places: torch.Tensor, rank: int) -> torch.Tensor:
    """Tell for each place, (B, 2), if this rank sees it: 0 the west, 1 the east."""
    return (places[:, 0] < 0) == (rank == 0)


def teach(model: nn.Module, data: TensorDataset, rank: int, steps: int) -> None:
    """Train a model, in DDP or not, on random batches from one rank's half."""
    device = next(model.parameters()).device
    mine = is_in_half(data.tensors[0], rank)
    places, heights = (tensor[mine].to(device) for tensor in data.tensors)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        chosen = torch.randint(len(places), (BATCH_SIZE,), generator=generator)
        chosen = chosen.to(device)
        loss = (model(places[chosen]) - heights[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # if this is DDP, the ranks' gradients become their mean here
        optimizer.step()
        schedule.step()


@torch.no_grad()
def off_by_half(
    model: Callable[[torch.Tensor], torch.Tensor], data: TensorDataset
) -> list[float]:
    """Return the root of the mean squared error in the west, and that in the east."""
    places, heights = data.tensors
    squares = (model(places) - heights).square()
    return [squares[is_in_half(places, rank)].mean().sqrt().item() for rank in (0, 1)]


def show_and_check(found: list[Found], flat: list[float]) -> None:
    """Print all errors from rank 0; every rank checks all of them.

    Args:
        found: what rank 0 and what rank 1 found out.
        flat: how far a map is off that has the mean height everywhere, [west, east].

    Raises:
        RuntimeError: the lesson has gone wrong.
    """
    (alone_0, ddp_0, weights_0), (alone_1, ddp_1, weights_1) = found
    rows = {
        "rank 0 alone": alone_0,
        "rank 1 alone": alone_1,
        "rank 0, DDP": ddp_0,
        "rank 1, DDP": ddp_1,
        "a flat map": flat,
    }
    # For each half: the rank that saw it alone, and the one that did not.
    seen, unseen = [alone_0[0], alone_1[1]], [alone_1[0], alone_0[1]]
    lost = min(bad / good for bad, good in zip(unseen, seen, strict=True))
    ddp = max(row[i] / seen[i] for row in (ddp_0, ddp_1) for i in (0, 1))
    different = int((weights_0 != weights_1).sum())
    if dist.get_rank() == 0:
        print("metres off       west    east")
        for name, (west, east) in rows.items():
            print(f"{name:13}{west:8.1f}{east:8.1f}")
        print(
            f"where it saw nothing, a rank is off {lost:.1f} times as far as the "
            f"other, under DDP {ddp:.2f} times\n"
            f"check: {lost:.1f} > 4, {ddp:.2f} < 1.5, and {different} of "
            f"{len(weights_0):,} weights differ between the ranks under DDP",
            flush=True,
        )
    # Written so that a number which is no number fails as well.
    if different or ddp_0 != ddp_1 or not (ddp < 1.5 and lost > 4):
        raise RuntimeError("the ranks do not know what they should: see the table")


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


def half_rank(
    rank: int, port: int, steps: int, maps: torch.Tensor, errors: torch.Tensor
) -> None:
    """Be the rank of one half: train alone, train together, compare.

    The last two lie in memory that this process shares with the one that started it.

    Args:
        rank: 0 sees the west, 1 the east.
        port: of the store at which the ranks meet.
        steps: to take, twice.
        maps: (3, C, 1); gets what rank 0 alone, rank 1 alone and both under DDP draw.
        errors: (3, 2); gets how far these are off in west and east, in metres.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)  # otherwise each rank would start a thread for every core
    device, reason = choose_device(rank, 2)
    backend = dist.get_default_backend_for_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1)
    )
    if rank == 0:
        print(f"device: {device.type} with {backend} ({reason})", flush=True)
    terrain = load_terrain()
    data, held_out = sample_points(terrain, len(terrain.places) - 4096)
    off = []
    model = TerrainModel()
    for is_together in (False, True):
        torch.manual_seed(0)  # both models begin with the same weights
        model = TerrainModel(waves=256, width=128, scale=14.0).to(device)
        wrapped = model
        if is_together:
            device_ids = None if device.type == "cpu" else [device.index]
            wrapped = DistributedDataParallel(model, device_ids)
        teach(wrapped, data, rank, steps)
        model.cpu()
        off.append([terrain.std * error for error in off_by_half(model, held_out)])
        # Under DDP both ranks write the same numbers to the same place.
        row = 2 if is_together else rank
        maps[row] = model(terrain.places).detach()
        errors[row] = torch.tensor(off[-1])
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    found: list[Found] = [(off[0], off[1], weights)] * 2
    dist.all_gather_object(found, (off[0], off[1], weights))
    flat = off_by_half(lambda places: 0 * places[:, :1], held_out)
    show_and_check(found, [terrain.std * error for error in flat])
    del wrapped  # DDP holds on to the group, which has to go last
    dist.destroy_process_group()


def train_both(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Start the two ranks, wait for them, and return their maps and errors."""
    maps = torch.zeros(3, len(load_terrain().places), 1).share_memory_()
    errors = torch.zeros(3, 2).share_memory_()
    # The ranks meet at this store. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(half_rank, (store.port, steps, maps, errors), nprocs=2)
    return maps, errors


def read_steps(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line with --steps added, and refuse what cannot work."""
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own two ranks")
    if not 50 <= args.steps <= 100_000:
        refuse(f"--steps must be 50 to 100000, not {args.steps}")
    return args


def main() -> None:
    """Train, print, check."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = read_steps(argparse.ArgumentParser(description="Let two ranks share a map."))
    train_both(args.steps)


if __name__ == "__main__":
    main()
