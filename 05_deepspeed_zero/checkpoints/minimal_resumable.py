"""Train by ZeRO in epochs, evaluate, save and resume: chapter 03's file, by DeepSpeed.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/checkpoints/minimal_resumable.py
Expect: the losses of 03_ddp_torchrun/minimal_resumable.py. The same command resumes, in
    the same stage; from a universal checkpoint on 1, 2 or 4 ranks, as batches
    of 16 each must make up 64. To begin anew, delete saved/run.
"""

import sys
from copy import deepcopy
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import WindowDataset, load_text
from deepspeed_setup import join, latest_tag, leave, prepare, save_shards
from model import GPT, GPTConfig

EPOCHS, BATCH_SIZE, GLOBAL_BATCH_SIZE, FOLDER = 2, 16, 64, Path("saved/run")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "train_batch_size": GLOBAL_BATCH_SIZE,  # of all ranks, by accumulation
    "gradient_clipping": 1.0,  # clip_grad_norm_ would clip nothing
    "bf16": {"enabled": False},  # True on GPUs; then cast float inputs, too
    "zero_optimization": {"stage": 2},  # or 1 or 3
}


@torch.no_grad()
def held_out_loss(engine: Any, dataset: Any) -> float:
    """Return the mean loss; every rank calls it."""
    world_size, total = dist.get_world_size(), torch.zeros((), device=engine.device)
    # Equally many on all ranks, which in stage 3 gather weights for every batch.
    shard = range(dist.get_rank(), len(dataset) // world_size * world_size, world_size)
    training = [module for module in engine.modules() if module.training]
    engine.eval()
    for _, inputs, labels in DataLoader(Subset(dataset, shard), BATCH_SIZE):
        loss = engine(inputs.to(engine.device), labels.to(engine.device))
        total += len(inputs) * loss / len(shard)
    for module in training:  # a frozen part may have been in eval() before
        module.training = True
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


def load_what_universal_lacks(model: Any, tag: str) -> None:
    """Load frozen weights and buffers, which DeepSpeed leaves out without an error."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    file = FOLDER / tag / "mp_rank_00_model_states.pt"
    if file.exists():  # in stages 1 and 2
        weights: Any = torch.load(file, map_location="cpu")["module"]
    else:
        tag = tag.removesuffix("_universal")
        weights = get_fp32_state_dict_from_zero_checkpoint(FOLDER, tag)
    model.load_state_dict(weights)


def separate_groups(adam: Any, own: list, rates: list[float]) -> None:
    """Undo what stage 3 does: all groups have the first one's settings and counter."""
    for group, old, rate in zip(adam.param_groups, own, rates, strict=True):
        kept = {key: old[key] for key in old if key != "params"}
        group.update(kept | {"lr": rate})
    for state in adam.state.values():
        state["step"] = deepcopy(state["step"])  # else each group adds 1 to the same


def main() -> None:
    """Join, build, resume; train, evaluate and save each epoch."""
    tag = latest_tag(FOLDER)
    universal = (FOLDER / tag / "zero").is_dir()  # made for another number of ranks
    config = CONFIG | {"checkpoint": {"load_universal": universal}}
    prepare(config)  # before DeepSpeed is imported
    join()
    import deepspeed

    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = (WindowDataset(t, 128, 512) for t in load_text(None, 128))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    steps = len(train_set) // GLOBAL_BATCH_SIZE or sys.exit("too few samples")
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig())
    if universal:
        load_what_universal_lacks(model, tag)
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    half_turn = pi / (EPOCHS * steps)
    schedule: Any = LambdaLR(adam, lambda step: 0.5 + 0.5 * cos(half_turn * step))
    parts: Any = {"model": model, "optimizer": adam, "lr_scheduler": schedule}
    engine: Any = deepspeed.initialize(**parts, config=config)[0]
    first_epoch, own = 0, [dict(group) for group in adam.param_groups]
    if tag:  # also schedule and optimizer: with the learning rate that was saved
        # It returns a path, and what `save_shards` has saved beside the engine.
        first_epoch = engine.load_checkpoint(FOLDER, tag)[1]["epoch"]
        if universal and engine.zero_optimization_stage() == 3:
            separate_groups(adam, own, schedule.get_last_lr())
    used = steps * engine.gradient_accumulation_steps()  # micro-batches in an epoch
    if rank == 0:
        print(f"{world_size} ranks: {first_epoch} of {EPOCHS} epochs done")
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(epoch * world_size + rank)  # dropout, also of a resumed run
        for _, inputs, labels in islice(loader, used):
            loss = engine(inputs.to(engine.device), labels.to(engine.device))
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # steps, and the schedule too, on the last of them only
        for buffer in model.buffers():  # BatchNorm's statistics, as rank 0 saves them
            dist.broadcast(values := buffer.contiguous(), src=0)
            if not values.equal(buffer):  # contiguous() has copied a strided one
                buffer.copy_(values)
        loss = held_out_loss(engine, test_set)
        if rank == 0:
            print(f"epoch {epoch} | validation loss {loss:.3f}", flush=True)
        save_shards(engine, FOLDER, f"epoch_{epoch + 1}", epoch=epoch + 1)


if __name__ == "__main__":
    main()
    leave()
