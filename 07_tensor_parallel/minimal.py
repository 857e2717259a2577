"""Train the GPT, each matrix cut over the ranks: all that tensor parallelism takes.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/minimal.py
Expect: the losses of chapter 03's one_process.py.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, RandomSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import leave

MLP = {
    "blocks.*.mlp_in": ColwiseParallel(),  # its input is whole, its output Shard(-1)
    "blocks.*.mlp_out": RowwiseParallel(),  # the reverse, by an all-reduce
}
ATTENTION = {
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.attention_out": RowwiseParallel(),
}
# An embedding is not transposed: by rows is Shard(0). Every rank reads all tokens.
EMBEDDING = RowwiseParallel(input_layouts=Replicate())
VOCABULARY = {
    "token_embedding": EMBEDDING,
    "position_embedding": EMBEDDING,
    "head": ColwiseParallel(output_layouts=Replicate()),  # gathers the logits
}
# Of a plain input, whole on every rank, this makes a DTensor that is as whole.
NORM = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
NORMS = {
    "blocks.*.attention_norm": NORM,
    "blocks.*.mlp_norm": NORM,
    "final_norm": NORM,
}
PLAN = MLP | ATTENTION | VOCABULARY | NORMS


def split_over_ranks(model: GPT, mesh: DeviceMesh, *plans: dict[str, Any]) -> GPT:
    """Make all parameters DTensors: shards by the plans, else whole on every rank."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for plan in plans:
        parallelize_module(model, mesh, plan)
    for name in frozen:  # SequenceParallel makes new parameters
        model.get_parameter(name).requires_grad_(False)
    if model.config.tied:  # of one matrix it has made two
        model.head.weight = model.token_embedding.weight
    distribute_module(model, mesh)  # makes whole DTensors of all other parameters
    return model


def main() -> None:
    """Train for one epoch on one device a rank."""
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    config = GPTConfig()
    if config.heads % int(os.environ["WORLD_SIZE"]):
        raise SystemExit(f"{config.heads} heads: the number of ranks must divide them")
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(0)  # the same weights on all ranks, and the same dropout masks
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # all in a row
    model = split_over_ranks(GPT(config).to(device), mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    # No DistributedSampler: all ranks take the same samples, in the same order.
    sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        loss = model(inputs.to(device), labels.to(device))  # the same on all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0 and dist.get_rank() == 0:
            print(f"step {step:2} | loss {loss.item():.3f}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # every rank calls this
    if dist.get_rank() == 0:
        torch.save(weights, "model.pt")


if __name__ == "__main__":
    main()
    leave()  # after dist.destroy_process_group() alone gloo might abort
