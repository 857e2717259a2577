"""Train on two axes: FSDP2 across hosts, tensor and sequence parallelism inside each.

Run: torchrun --nproc-per-node=4 09_one_mesh/minimal.py
Expect: the losses of 06_fsdp/minimal_resumable.py, whose shards it takes up as its own.
"""

import os
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import leave

EPOCHS, BATCH_SIZE, LENGTH, FOLDER = 2, 32, 128, Path("sharded")
TENSOR = 2  # ranks that share matrices; divides heads, tokens and widths
WHOLE, TOKENS = Replicate(), Shard(1)  # how (B, T, D) lies on these ranks
POSITIONS = {"input_layouts": WHOLE, "output_layouts": Shard(0)}  # (T, D)
# What comes out stays a DTensor, which loss_parallel needs.
LOGITS = {"output_layouts": Shard(2), "use_local_output": False}
PLAN = {
    "token_embedding": tp.RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
    "position_embedding": tp.RowwiseParallel(**POSITIONS),
    "blocks.*.*_norm": tp.SequenceParallel(),
    # Both names match this norm, so it gets both styles. This one gathers its output,
    # once for query, key and value. Because it stays a DTensor, one reduce-scatter sums
    # their three gradients; else each takes an all-reduce.
    "blocks.*.attention_norm": tp.PrepareModuleOutput(
        output_layouts=TOKENS, desired_output_layouts=WHOLE, use_local_output=False
    ),
    "blocks.*.query": tp.ColwiseParallel(),
    "blocks.*.key": tp.ColwiseParallel(),
    "blocks.*.value": tp.ColwiseParallel(),
    "blocks.*.mlp_in": tp.ColwiseParallel(input_layouts=TOKENS),
    "blocks.*.*_out": tp.RowwiseParallel(output_layouts=TOKENS),
    "final_norm": tp.SequenceParallel(),
    "head": tp.ColwiseParallel(input_layouts=TOKENS, **LOGITS),
}


def shard_twice(model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Any:
    """Cut the matrices over "tensor", and shard what is left over "data"."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    tp.parallelize_module(model, mesh["tensor"], PLAN)
    for name in frozen:  # SequenceParallel has made new parameters
        model.get_parameter(name).requires_grad_(False)
    if model.config.tied:  # the plan has made two matrices of one
        model.head.weight = model.token_embedding.weight
    if plain := [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise SystemExit(f"PLAN has no style for {plain[0]}")  # its ranks would diverge
    for module in (*model.blocks, model):  # the root last
        fully_shard(module, mesh=mesh["data"], mp_policy=policy)
    return model


def main() -> None:
    """Join, build, cut twice, resume; train and save each epoch."""
    if int(os.environ["LOCAL_WORLD_SIZE"]) % TENSOR:
        raise SystemExit(f"each host needs a multiple of {TENSOR} ranks")
    if LENGTH % TENSOR:  # gloo would abort in the forward pass
        raise SystemExit(f"samples of {LENGTH} tokens: pad to a multiple of {TENSOR}")
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    shape = dist.get_world_size() // TENSOR, TENSOR  # the last axis: inside a host
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    mesh._flatten("both")  # else clip_grad_norm_ warns, and all-reduces twice
    text, _ = load_text(None, LENGTH)
    train_set = WindowDataset(text, block_size=LENGTH, samples=512)
    place = mesh.get_local_rank("data")  # ranks that share matrices share samples
    sampler = DistributedSampler(train_set, shape[0], place, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler)  # of a data rank
    torch.manual_seed(0)  # the same weights on all ranks
    model: Any = GPT(GPTConfig(block_size=LENGTH)).to(device)
    dtype = None if device.type == "cpu" else torch.bfloat16
    shard_twice(model, mesh, MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32))
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = EPOCHS * len(loader)
    schedule = LambdaLR(adam, lambda step: 0.5 + 0.5 * cos(pi * step / steps))
    rates = [{k: g[k] for k in g if k[-2:] == "lr"} for g in adam.param_groups]
    run: dict[str, Any] = {"epoch": 0}  # .metadata is the last file of a save
    whole = [path.parent for path in FOLDER.glob("epoch_*/.metadata")]
    if whole := [path for path in whole if path.name[6:].isdecimal()]:  # and no copy
        run["model"], run["adam"] = states.get_state_dict(model, adam)
        newest = max(whole, key=lambda path: int(path.name[6:]))
        planner = dcp.DefaultLoadPlanner()
        try:
            dcp.load(run, checkpoint_id=newest, planner=planner)  # in shards
        except dcp.CheckpointException as e:
            why = str(e).splitlines()[-1]
            hint = "freeze what had no gradient, or " if "dict: adam." in why else ""
            raise SystemExit(f"{hint}move {newest} away: {why}") from e
        saved: Any = planner.metadata  # DCP ignores what else is saved
        left = saved.state_dict_metadata.keys() - planner.state_dict
        if more := [n for n in left if n.startswith(("model.", "adam.state."))]:
            raise SystemExit(f"move {newest} away: no place for {max(more)}")
        states.set_model_state_dict(model, run["model"])
        # With the weight decay and betas that were saved; the lr is that of `main`.
        states.set_optimizer_state_dict(model, adam, run["adam"])
    for group, rate in zip(adam.param_groups, rates, strict=True):
        group.update(rate)  # "lr", and what schedules keep beside it, as "initial_lr"
    for _ in range(run["epoch"] * len(loader)):  # as these ranks count them
        schedule.step()
    if dist.get_rank() == 0:
        print(f"{shape} ranks on {device}: {run['epoch']} of {EPOCHS} epochs done")
    for epoch in range(run["epoch"], EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        torch.manual_seed(epoch * mesh.size() + mesh.get_rank())  # dropout of TOKENS
        mean = torch.zeros((), device=device)
        for _, inputs, labels in loader:
            with tp.loss_parallel():  # each rank has the logits of a part of V
                out = model(inputs.to(device)).float()  # the loss in float32
                loss = F.cross_entropy(out.flatten(0, 1), labels.to(device).flatten())
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            adam.step()
            adam.zero_grad()
            schedule.step()
            mean += loss.detach().full_tensor() / len(loader)  # type: ignore
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | mean loss {mean.item():.4f}")
        run = {"epoch": epoch + 1}
        run["model"], run["adam"] = states.get_state_dict(model, adam)
        dcp.save(run, checkpoint_id=FOLDER / f"epoch_{epoch + 1:03}")


if __name__ == "__main__":
    main()
    leave()  # after dist.destroy_process_group() alone gloo might abort
