"""An exercise: a loop that exchanges gradients, learns, and is still wrong.

Run: python 02_ddp_mp/exercise_broken_loop.py
Needs: this folder and requirements.txt. Runs on the CPU, by gloo.
Expect: a loss that falls on both ranks, then what is wrong with it, and exit status 1.
    Repair one function, and it ends with a `check:` instead.
Before: 02_ddp_mp/README.md, "Exercises"
Next: 02_ddp_mp/by_hand.py, where the same is done in three ways that work.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
import torch.multiprocessing as mp
from torch.nn.functional import mse_loss

from options import refuse
from proof import different_weights
from terrain import TerrainModel, load_terrain, sample_points

WORLD_SIZE = 2


def average_gradients(model: torch.nn.Module) -> None:
    """Replace each gradient by its mean over the ranks; every rank calls this."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad / WORLD_SIZE
        dist.all_reduce(mean)


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def exercise_rank(rank: int, port: int, different: torch.Tensor) -> None:
    """Train on this rank's share; put into `different` what the check finds."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5))
    limit = timedelta(minutes=5)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit
    )
    train_set, _ = sample_points(load_terrain(), points=4096)
    # Every rank takes each second of the points, in batches of 32.
    places, heights = (tensor[rank::WORLD_SIZE] for tensor in train_set.tensors)
    torch.manual_seed(0)  # the same first weights on every rank
    model = TerrainModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for batch in zip(places.split(32), heights.split(32), strict=True):
        optimizer.zero_grad()
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    # mp.spawn shares tensors among the processes: the parent will find this there.
    different[rank] = different_weights(model)
    means = torch.tensor([[sum(losses[:8]) / 8, sum(losses[-8:]) / 8]])
    of_all = [torch.empty_like(means) for _ in range(WORLD_SIZE)]
    dist.all_gather(of_all, means)
    if rank == 0:
        for other, loss in enumerate(of_all):
            first, last = loss[0].tolist()
            print(f"rank {other} | loss {first:.2f} at first, {last:.2f} at last")
        sys.stdout.flush()
    dist.destroy_process_group()


def main() -> None:
    """Train on two ranks, then say whether they did it together."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your averaged gradients.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    different = torch.zeros(WORLD_SIZE)
    mp.spawn(exercise_rank, (store.port, different), nprocs=WORLD_SIZE)
    count = int(different.max())
    if count > 0:
        sys.exit(
            f"{count:,} weights differ between the ranks after 64 steps: each has gone "
            "its own way.\nThe gradients are sent, and the all-reduce returns their "
            "mean. Who reads it?"
        )
    print(f"check: {count} weights differ between {WORLD_SIZE} ranks after 64 steps")


if __name__ == "__main__":
    main()
