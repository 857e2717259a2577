"""Train with DDP in epochs; evaluate, save and resume: one file to copy.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/minimal_resumable.py
Expect: a validation loss after each of two epochs. The same command takes up a run that
    died, less an epoch at most, and on two ranks ends with the same bits. SIGUSR1 ends
    it after an epoch. (train.py saves every so many steps, and ends after a step.) To
    begin anew, delete resumable.pt.
"""

import gc
import os
import signal
import sys
from contextlib import nullcontext
from math import cos, pi  # torch.load refuses what NumPy's would put into a rate
from zipfile import is_zipfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it too late: gloo might abort at the end
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import WindowDataset, load_text
from model import GPT, GPTConfig

EPOCHS, BATCH_SIZE, ACCUMULATE, FILE = 2, 16, 2, "resumable.pt"


def train_one_epoch(model, optimizer, schedule, loader, device) -> None:
    """Take a step, and send gradients once, for every `ACCUMULATE` batches."""
    used = len(loader) // ACCUMULATE * ACCUMULATE  # a step of fewer would weigh less
    for i, (_, inputs, labels) in zip(range(1, used + 1), loader, strict=False):
        with model.no_sync() if i % ACCUMULATE else nullcontext():  # forward inside
            with torch.autocast(device.type, torch.bfloat16, device.type != "cpu"):
                loss = model(inputs.to(device), labels.to(device))
            (loss / ACCUMULATE).backward()
        if i % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


@torch.no_grad()
def validation_loss(model, dataset, device) -> float:
    """Return the mean loss over all samples, each counted once; every rank calls it."""
    total = torch.zeros((), device=device)
    shard = range(dist.get_rank(), len(dataset), dist.get_world_size())
    training = [module for module in model.modules() if module.training]
    model.eval()
    for _, inputs, labels in DataLoader(Subset(dataset, shard), BATCH_SIZE):
        total += len(inputs) * model(inputs.to(device), labels.to(device))
    for module in training:  # a frozen part may have been in eval() before
        module.training = True
    dist.all_reduce(total)
    return total.item() / len(dataset)


def save_parts(parts, epochs_done) -> None:
    """Write what a run needs to go on; rank 0 alone calls it."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "epoch": epochs_done}, f"{FILE}.tmp")
    os.replace(f"{FILE}.tmp", FILE)  # whole, new or old, unless power fails


def load_parts(parts) -> int:
    """Load what was saved, if anything; every rank calls it. Return the epochs done."""
    if not os.path.exists(FILE):  # all machines must share the file system that has it
        return 0
    rates = {  # of this run: "lr", and what schedules keep beside it, as "initial_lr"
        one: [{k: g[k] for k in g if k[-2:] == "lr"} for g in one.param_groups]
        for one in parts.values()
        if isinstance(one, torch.optim.Optimizer)
    }
    # Each part then moves its tensors to its device, but for Adam's counts of steps,
    # which are read in each step and would be slow there.
    saved = torch.load(FILE, map_location="cpu")
    try:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
            # Settings of SGD without momentum load into Adam without an error; only a
            # step raises one. So step here, where the message is clear: as there are no
            # gradients yet, a step with the right settings changes nothing.
            if part in rates:
                part.step()
    except (KeyError, RuntimeError, ValueError) as e:
        sys.exit(f"{FILE}: another model or optimizer: {str(e).splitlines()[-1]}")
    for optimizer, own in rates.items():
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group.update(rate)  # of the first step; main() then steps the schedule
    return saved["epoch"]


# A buffer, such as BatchNorm's running mean, follows each rank's own samples. Before
# they evaluate and save, all ranks take rank 0's.
def share_buffers(model) -> None:
    """Give all ranks rank 0's, such as BatchNorm's statistics, as it saves them."""
    for buffer in model.buffers():
        dist.broadcast(values := buffer.contiguous(), src=0)
        if not values.equal(buffer):  # contiguous() has copied a strided one
            buffer.copy_(values)


# The scheduler of a cluster, such as Slurm, can send a signal, here SIGUSR1, some time
# before it kills a job. The ranks then end after an epoch, which has been saved.
def is_stopped(noted, epochs_done) -> bool:
    """Tell all ranks alike whether to leave the loop; every rank calls it."""
    dist.all_gather_object(counts := [0] * dist.get_world_size(), len(noted))
    if not any(counts) or epochs_done == EPOCHS:
        return False  # no rank has noted a signal, or all is done
    if dist.get_rank() == 0:  # a job script that finds this file starts the run again
        open(f"{FILE}.requeue", "w").close()
    return True


def main() -> None:
    """Join, build, resume; train, compare the ranks, evaluate and save each epoch."""
    if os.path.exists(FILE) and not is_zipfile(FILE):
        sys.exit(f"{FILE} is damaged, or no checkpoint: move it away")
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    noted = []  # signals, of which this process would otherwise die
    signal.signal(signal.SIGUSR1, lambda number, _: noted.append(number))
    train_set, test_set = (WindowDataset(t, 128, 512) for t in load_text(None, 128))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = EPOCHS * (len(loader) // ACCUMULATE) or sys.exit("too few samples per rank")
    schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * cos(pi * step / steps))
    parts = {"model": model, "adam": optimizer}  # all that is saved and loaded
    first_epoch = load_parts(parts)
    # The schedule is stepped to where it was, not saved: with another number of ranks
    # an epoch has another number of steps, and this run's own rates are to hold.
    for _ in range(first_epoch * steps // EPOCHS):
        schedule.step()
    dist.all_gather_object(seen := [0] * world_size, first_epoch)
    if len(set(seen)) > 1:
        sys.exit(f"{FILE} is not the same on all machines: it has seen {seen} epochs")
    if rank == 0:
        print(f"{world_size} ranks on {device}: {first_epoch} of {EPOCHS} epochs done")
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)  # rank 0's weights
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(epoch * world_size + rank)  # dropout, also of a resumed run
        train_one_epoch(ddp_model, optimizer, schedule, loader, device)
        # Ranks that all-reduced other gradients have other weights, hardly equal norms.
        norm = sum(p.cpu().abs().double().norm().item() for p in model.parameters())
        dist.all_gather_object(seen, norm)
        if len(set(map(str, seen))) > 1:  # as text, for NaN is not equal to NaN
            sys.exit(f"epoch {epoch}: the ranks' weights differ; their norms: {seen}")
        for part in parts.values():
            if isinstance(part, torch.nn.Module):
                share_buffers(part)
        # Not with ddp_model: its forward pass may send buffers, so the ranks would need
        # equally many batches.
        loss = validation_loss(model, test_set, device)
        if rank == 0:
            # If the reader of a pipe has ended, this raises BrokenPipeError: not saved.
            print(f"epoch {epoch} | validation loss {loss:.3f}", flush=True)
            save_parts(parts, epoch + 1)
        if is_stopped(noted, epoch + 1):
            break


if __name__ == "__main__":
    main()
    gc.collect()  # now the model is gone, even a compiled one
    dist.destroy_process_group()
