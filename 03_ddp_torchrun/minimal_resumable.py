"""Train with DDP in epochs; evaluate, save and resume: one file to copy.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/minimal_resumable.py
Expect: a validation loss after each of two epochs. If the run dies in the second, the
    same command takes up the first, and on two ranks ends with the same bits. To begin
    anew, delete resumable.pt.
"""

import os
import sys
from contextlib import nullcontext
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it too late: gloo might abort at the end
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import WindowDataset, load_text
from model import GPT, GPTConfig

EPOCHS, BATCH_SIZE, ACCUMULATE, FILE = 2, 16, 2, Path("resumable.pt")


def train_one_epoch(
    model: Any, optimizer: Any, schedule: Any, loader: DataLoader, device: torch.device
) -> None:
    """Take a step, with one all-reduce, for every `ACCUMULATE` batches of a rank."""
    used = len(loader) // ACCUMULATE * ACCUMULATE  # a step of fewer would weigh less
    for i, (_, inputs, labels) in enumerate(islice(loader, used), start=1):
        is_step = i % ACCUMULATE == 0
        with nullcontext() if is_step else model.no_sync():  # forward pass inside
            with torch.autocast(device.type, torch.bfloat16, device.type != "cpu"):
                loss = model(inputs.to(device), labels.to(device))
            (loss / ACCUMULATE).backward()
        if is_step:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


@torch.no_grad()
def validation_loss(model: Any, dataset: WindowDataset, device: torch.device) -> float:
    """Return the mean loss over all samples, each counted once; every rank calls it."""
    total = torch.zeros(2, device=device)  # the sum of the losses, and their number
    shard = range(dist.get_rank(), len(dataset), dist.get_world_size())
    model.eval()
    for _, inputs, labels in DataLoader(Subset(dataset, shard), BATCH_SIZE):
        loss, count = model(inputs.to(device), labels.to(device)), len(inputs)
        total += torch.stack([loss * count, loss.new_tensor(count)])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main() -> None:
    """Join, build, resume; train, evaluate and save each epoch."""
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = (WindowDataset(t, 128, 512) for t in load_text(None, 128))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = EPOCHS * (len(loader) // ACCUMULATE)
    if not steps:
        sys.exit(f"{len(train_set)} samples are too few for {world_size} ranks")
    schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * cos(pi * step / steps))
    parts, first_epoch = {"model": model, "adam": optimizer, "schedule": schedule}, 0
    if FILE.exists():  # on every machine, so on a file system that they share
        saved = torch.load(FILE, map_location="cpu")  # Adam counts its steps there
        try:
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        except (KeyError, RuntimeError, ValueError) as e:
            sys.exit(f"{FILE}: another model? Move it away: {str(e).splitlines()[-1]}")
        first_epoch = saved["epoch"]
        schedule.last_epoch = first_epoch * steps // EPOCHS  # other ranks, other steps
    dist.all_gather_object(seen := [0] * world_size, first_epoch)
    if len(set(seen)) > 1:
        sys.exit(f"{FILE} is not the same on all machines: it has seen {seen} epochs")
    if rank == 0:
        print(f"{world_size} ranks on {device}: {first_epoch} of {EPOCHS} epochs done")
    ddp_model = DistributedDataParallel(model)  # copies rank 0's weights to all
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(epoch * world_size + rank)  # dropout, also of a resumed run
        train_one_epoch(ddp_model, optimizer, schedule, loader, device)
        loss = validation_loss(model, test_set, device)
        if rank == 0:
            print(f"epoch {epoch} | validation loss {loss:.3f}", flush=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch + 1}, FILE.with_suffix(".tmp"))
            FILE.with_suffix(".tmp").replace(FILE)  # the whole new file, or the old


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
