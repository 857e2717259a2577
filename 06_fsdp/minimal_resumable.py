"""Train with FSDP2 in epochs; save and resume with DCP, or go on from a DDP run's file.

Run: torchrun --nproc-per-node=2 06_fsdp/minimal_resumable.py
Expect: a loss and a folder of shards for each epoch. The same command resumes from the
    newest whole one, else from chapter 03's resumable.pt. To begin anew, delete both.
"""

import os
import sys
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import leave

EPOCHS, BATCH_SIZE, FOLDER, DDP_FILE = 2, 32, Path("sharded"), Path("resumable.pt")


def state_of(model: Any, optimizer: Any, epoch: int) -> dict[str, Any]:
    """Return what to save, and where to load to; every rank calls this."""
    weights, adam = states.get_state_dict(model, optimizer)
    return {"model": weights, "adam": adam, "epoch": epoch}


def newest() -> Path | None:
    """Return the newest whole folder (.metadata is written last), else DDP's file."""
    whole = [path.parent for path in FOLDER.glob("epoch_*/.metadata")]
    whole = [path for path in whole if path.name[6:].isdecimal()]  # and no copy
    if whole:
        return max(whole, key=lambda path: int(path.name[6:]))
    return DDP_FILE if DDP_FILE.exists() else None


def resume(path: Path, model: Any, optimizer: Any) -> int:
    """Take up what `newest` has found, on any number of ranks; return its epochs.

    Let `requires_grad` be as it was at the save: what is frozen gets no state of Adam.
    """
    if path.is_dir():
        state, planner = state_of(model, optimizer, epoch=0), dcp.DefaultLoadPlanner()
        dcp.load(state, checkpoint_id=path, planner=planner)  # into shards
        # That is all. But DCP ignores saved layers that have no place here: refuse.
        saved: Any = planner.metadata
        left = saved.state_dict_metadata.keys() - planner.state_dict
        if more := [n for n in left if n.startswith(("model.", "adam.state."))]:
            raise RuntimeError(f"no place for {max(more)}")
    else:  # chapter 03's file; without one, leave out this and `by_name`
        state = torch.load(path, map_location="cpu", mmap=True)  # on every rank
        state["adam"] = by_name(state["adam"], model, optimizer)
    options = states.StateDictOptions(full_state_dict=path.is_file())
    states.set_model_state_dict(model, state["model"], options=options)
    # With the weight decay and betas that were saved; the lr is that of `main`.
    states.set_optimizer_state_dict(model, optimizer, state["adam"], options=options)
    return state["epoch"]


# Only for a file of chapter 03: it numbers what shards find by name.
def by_name(adam: dict[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """Name what `optimizer.state_dict()` has numbered, as shards are found by name."""
    wrapper = "_checkpoint_wrapped_module."
    name_of = {p: name.replace(wrapper, "") for name, p in model.named_parameters()}
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name_of[p] for p in ours]
    for i, state in adam["state"].items():
        shape = state.get("exp_avg", ours[i]).shape  # Adam's; SGD has none
        if shape != ours[i].shape or not ours[i].requires_grad:
            raise RuntimeError(f"size mismatch, or frozen: {names[i]}")
    for group in adam["param_groups"]:
        group["params"] = [names[i] for i in group["params"]]
    return {**adam, "state": {names[i]: s for i, s in adam["state"].items()}}


def main() -> None:
    """Join, build, shard, resume; train and save each epoch."""
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=512)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler)
    torch.manual_seed(0)  # equal weights
    model: Any = GPT(GPTConfig()).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = None if device.type == "cpu" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):  # the root last
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = EPOCHS * len(loader) or sys.exit("too few samples per rank")
    schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * cos(pi * step / steps))
    rates = [{k: g[k] for k in g if k[-2:] == "lr"} for g in optimizer.param_groups]
    first_epoch, path = 0, newest()
    try:
        if path:
            first_epoch = resume(path, model, optimizer)
    except (dcp.CheckpointException, LookupError, OSError, RuntimeError) as e:
        why = str(e).splitlines()[-1]
        hint = "freeze what had no gradient, or " if "dict: adam." in why else ""
        raise SystemExit(f"{hint}move {path} away: {why}") from e
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update(rate)  # also "initial_lr"
    for _ in range(first_epoch * len(loader)):  # as these ranks count them
        schedule.step()
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks on {device}: {first_epoch} of {EPOCHS} epochs done")
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * mesh.size() + dist.get_rank())  # for dropout
        mean = torch.zeros((), device=device)
        for _, inputs, labels in loader:
            logits = model(inputs.to(device)).float()  # the loss in float32
            loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | mean loss {mean.item():.4f}")
        for buffer in model.buffers():  # each rank has its own
            dist.broadcast(values := buffer.contiguous(), src=0)
            if not values.equal(buffer):  # contiguous() has copied a strided one
                buffer.copy_(values)
        state = state_of(model, optimizer, epoch + 1)
        dcp.save(state, checkpoint_id=FOLDER / f"epoch_{epoch + 1:03}")


if __name__ == "__main__":
    main()
    leave()  # after dist.destroy_process_group() alone gloo might abort
