"""Trainers that do not wait for each other change rows under each other's feet.

Run: python 04_rpc_parameter_server/asynchronous.py
Needs: this folder and requirements.txt. It runs on the CPU.
Expect: the same batches twice, first with trainers that wait for each other, which is
    what one process alone would do; then without. The losses hardly differ, and the
    share of rows that somebody else changed in between is shown; then a `check:`.
Before: 04_rpc_parameter_server/train.py
Next: 04_rpc_parameter_server/several_servers.py
"""

import argparse
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import table
from data import PACKAGES, ROWS, Samples, load_samples
from model import WIDTH, HybridModel, Table, dense_part
from options import positive_int, refuse
from proof import relative_error, table_of
from table import ServedTable, held, whole_table
from train import be_parameter_server, join_trainers
from trainer import (
    SERVER,
    Settings,
    accuracy,
    distributed_sgd,
    mean_over_trainers,
    wait_for_the_group,
)
from world import launch

LOOK_EVERY = 5  # steps; looking means two more calls
TOLERANCE = 1e-3  # of the largest entry, after all steps: float32 in another order


@dataclass
class Outcome:
    """What one way of training has led to."""

    losses: list[float]  # mean over trainers, for each epoch
    right: float  # share of held-out samples
    changed: float  # share of rows that changed between lookup and step
    table: torch.Tensor


def start_again(rows: int, seed: int) -> None:
    """Put the server's table back to where it was made."""
    with torch.no_grad():
        held[0].weight.copy_(Table(rows, WIDTH, seed).weight)


def rows_now(numbers: torch.Tensor) -> torch.Tensor:
    """Return some rows as they are at this moment."""
    return held[0].weight.detach()[numbers]


def train_remotely(
    remote: RemoteModule, settings: Settings, samples: list[Samples], wait: bool
) -> Outcome:
    """Train with all trainers; `wait` makes them step from the same table, together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        rpc.rpc_sync(SERVER, start_again, args=(settings.rows, settings.seed))
    dist.barrier()
    training, held_out = samples
    dense = dense_part(WIDTH, len(PACKAGES), settings.seed)
    model = HybridModel(remote, DistributedDataParallel(dense))
    optimizer = distributed_sgd(model, settings.lr)
    epochs, seen = [], torch.zeros(2)  # changed rows; rows looked at
    for epoch in range(settings.epochs):
        losses = []
        batches = training.batches(epoch, settings.batch_size, rank, world_size)
        for step, (indices, offsets, labels) in enumerate(batches):
            look = step % LOOK_EVERY == 0
            numbers = indices.unique()
            before = rpc.rpc_sync(SERVER, rows_now, args=(numbers,)) if look else None
            with dist_autograd.context() as context_id:
                loss = cross_entropy(model(indices, offsets), labels)
                dist_autograd.backward(context_id, [loss])
                if before is not None:
                    now = rpc.rpc_sync(SERVER, rows_now, args=(numbers,))
                    changed = (now != before).any(dim=1).sum()
                    seen += torch.tensor([changed, len(numbers)])
                if wait:
                    dist.barrier()  # all have looked up: nobody's rows change too soon
                optimizer.step(context_id)
                if wait:
                    dist.barrier()  # all have stepped: the next lookup sees it all
            losses.append(loss.detach())
        epochs.append(mean_over_trainers(torch.stack(losses).mean()))
    dist.all_reduce(seen)
    right = accuracy(model, held_out)
    dist.barrier()
    after = rpc.rpc_sync(SERVER, whole_table)
    return Outcome(epochs, right, (seen[0] / seen[1]).item(), after)


def train_as_one(settings: Settings, training: Samples) -> Outcome:
    """Do what waiting trainers do, in one process: all their losses, then one step."""
    local = table_of(Table(settings.rows, WIDTH, settings.seed).weight.detach())
    dense = dense_part(WIDTH, len(PACKAGES), settings.seed)
    model, trainers = HybridModel(local, dense), settings.trainers
    # DDP takes the mean of the trainers' gradients. The server adds up their steps.
    optimizer = torch.optim.SGD(
        [
            {"params": local.parameters(), "lr": settings.lr},
            {"params": dense.parameters(), "lr": settings.lr / trainers},
        ]
    )
    epochs = []
    for epoch in range(settings.epochs):
        losses = []
        for batches in zip(
            *(
                training.batches(epoch, settings.batch_size, rank, trainers)
                for rank in range(trainers)
            ),
            strict=True,
        ):
            each = torch.stack(
                [cross_entropy(model(i, offsets), y) for i, offsets, y in batches]
            )
            optimizer.zero_grad()
            each.sum().backward()
            optimizer.step()
            losses.append(each.detach().mean())
        epochs.append(torch.stack(losses).mean().item())
    return Outcome(epochs, 0.0, 0.0, local.weight.detach())


def compare(remote: RemoteModule, settings: Settings) -> bool:
    """Train in both ways; print from trainer 0; tell whether all is as it should be."""
    wait_for_the_group()
    samples = list(load_samples(settings.rows))
    waiting, free = (
        train_remotely(remote, settings, samples, wait) for wait in (True, False)
    )
    alone = train_as_one(settings, samples[0])
    start = Table(settings.rows, WIDTH, settings.seed).weight.detach()
    unused = torch.ones(settings.rows, dtype=torch.bool)
    unused[samples[0].indices] = False
    moved = sum(
        int((outcome.table != start)[unused].any(dim=1).sum())
        for outcome in (waiting, free)
    )
    error = relative_error(waiting.table, alone.table)
    if dist.get_rank() == 0:
        print("mean loss         one process   trainers that wait   that do not")
        for epoch in range(settings.epochs):
            print(
                f"  epoch {epoch}         {alone.losses[epoch]:11.3f}   "
                f"{waiting.losses[epoch]:18.3f}   {free.losses[epoch]:11.3f}"
            )
        print(
            f"held out, right                 {waiting.right:18.1%}   "
            f"{free.right:11.1%}\n"
            f"rows changed by others          {waiting.changed:18.1%}   "
            f"{free.changed:11.1%}\n"
            "  between a trainer's lookup and its step\n"
            f"check: trainers that wait end {error:.0e} from one process (limit "
            f"{TOLERANCE:.0e})\n"
            f"check: {moved} of {int(unused.sum())} rows that nobody looked up moved",
            flush=True,
        )
    with_others = settings.trainers > 1
    return (
        error < TOLERANCE
        and moved == 0
        and waiting.changed == 0
        and (free.changed > 0) == with_others
        and min(waiting.right, free.right) > 1.5 / len(PACKAGES)
    )


def be_one_of_them(name: str, store: dist.TCPStore, settings: Settings) -> None:
    """Be the master, the server or a trainer."""
    if name == SERVER:
        be_parameter_server(None)
    elif name != "master":
        rank = int(name.removeprefix("trainer"))
        join_trainers(rank, settings.trainers, store, torch.device("cpu"))
    else:
        remote = RemoteModule(
            SERVER, ServedTable, args=(settings.rows, WIDTH, settings.seed)
        )
        futures = [
            rpc.rpc_async(f"trainer{r}", compare, args=(remote, settings), timeout=0)
            for r in range(settings.trainers)
        ]
        results = torch.futures.wait_all(futures)
        rpc.rpc_sync(SERVER, table.release)
        if not all(results):
            print("the lesson has gone wrong on a trainer", file=sys.stderr)
            os._exit(1)


def parse_args() -> argparse.Namespace:
    """Read the command line, and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Show what asynchronous means.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--trainers", type=positive_int, default=2, help="trainers (default 2)")
    add("--epochs", type=positive_int, default=2, help="passes (default 2)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if args.trainers > 16:
        refuse(f"--trainers is at most 16, not {args.trainers}")
    return args


def main() -> None:
    """Start the processes."""
    args = parse_args()
    settings = Settings(
        trainers=args.trainers,
        rows=ROWS,
        batch_size=16,
        epochs=args.epochs,
        max_steps=None,
        lr=0.1,
        seed=0,
    )
    names = ["master", SERVER, *(f"trainer{rank}" for rank in range(args.trainers))]
    launch(names, be_one_of_them, settings)


if __name__ == "__main__":
    main()
