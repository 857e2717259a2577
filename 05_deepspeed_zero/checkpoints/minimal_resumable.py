"""Train by ZeRO in epochs, evaluate, save and resume: chapter 03's file, by DeepSpeed.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/checkpoints/minimal_resumable.py
Expect: the losses of 03_ddp_torchrun/minimal_resumable.py. The same command resumes, in
    the same stage and on as many ranks. To begin anew, delete saved/run.
"""

import sys
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import WindowDataset, load_text
from deepspeed_setup import join, leave, prepare, refuse_other_ranks
from model import GPT, GPTConfig

EPOCHS, BATCH_SIZE, ACCUMULATE, FOLDER = 2, 16, 2, Path("saved/run")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": 1.0,  # clip_grad_norm_ would clip nothing
    "bf16": {"enabled": False},  # True on GPUs
    "zero_optimization": {"stage": 2},  # or 1 or 3
}


@torch.no_grad()
def held_out_loss(engine: Any, dataset: Any) -> float:
    """Return the mean loss; every rank calls it."""
    world_size, total = dist.get_world_size(), torch.zeros((), device=engine.device)
    # Equally many on all ranks, which in stage 3 gather weights for every batch.
    shard = range(dist.get_rank(), len(dataset) // world_size * world_size, world_size)
    engine.eval()
    for _, inputs, labels in DataLoader(Subset(dataset, shard), BATCH_SIZE):
        loss = engine(inputs.to(engine.device), labels.to(engine.device))
        total += len(inputs) * loss / len(shard)
    engine.train()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


def main() -> None:
    """Join, build, resume; train, evaluate and save each epoch."""
    prepare(CONFIG)  # before DeepSpeed is imported
    refuse_other_ranks(FOLDER)
    join()
    import deepspeed

    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = (WindowDataset(t, 128, 512) for t in load_text(None, 128))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    steps = len(loader) // ACCUMULATE or sys.exit("too few samples per rank")
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig())
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    half_turn = pi / (EPOCHS * steps)
    schedule: Any = LambdaLR(adam, lambda step: 0.5 + 0.5 * cos(half_turn * step))
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam, lr_scheduler=schedule, config=CONFIG
    )
    first_epoch = 0
    if (FOLDER / "latest").exists():
        _, state = engine.load_checkpoint(FOLDER)  # schedule and optimizer, too
        first_epoch = state["epoch"]
    if rank == 0:
        print(f"{world_size} ranks: {first_epoch} of {EPOCHS} epochs done")
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(epoch * world_size + rank)  # dropout, also of a resumed run
        for _, inputs, labels in islice(loader, steps * ACCUMULATE):
            loss = engine(inputs.to(engine.device), labels.to(engine.device))
            engine.backward(loss)  # divides by ACCUMULATE
            engine.step()  # steps, and the schedule too, on the last micro-batch only
        loss = held_out_loss(engine, test_set)
        tag, done = f"epoch_{epoch + 1}", {"epoch": epoch + 1}
        engine.save_checkpoint(FOLDER, tag, client_state=done, save_latest=False)
        if rank == 0:
            print(f"epoch {epoch} | validation loss {loss:.3f}", flush=True)
            (FOLDER / "latest.new").write_text(tag)  # now that all shards are there
            (FOLDER / "latest.new").replace(FOLDER / "latest")


if __name__ == "__main__":
    main()
    leave()
