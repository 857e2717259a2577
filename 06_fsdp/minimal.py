"""Train the GPT on several ranks, sharded: all that FSDP2 takes.

Run: torchrun --nproc-per-node=2 06_fsdp/minimal.py
Expect: the losses of chapter 03's minimal.py.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import leave


def main() -> None:
    """Train for one epoch on one device a rank."""
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(0)  # the same weights on all ranks
    model = GPT(GPTConfig()).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # all in a row
    for module in (*model.blocks, model):  # the root last: it takes what is left
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # steps the shards
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    sampler = DistributedSampler(train_set, drop_last=True)  # set_epoch(n) for epoch n
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        loss = model(inputs.to(device), labels.to(device))  # gathers block by block
        loss.backward()  # gathers again, reduce-scatters the gradients
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
        if step % 4 == 0 and dist.get_rank() == 0:
            print(f"step {step:2} | loss {mean.item():.3f}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # every rank calls this
    if dist.get_rank() == 0:
        torch.save(weights, "model.pt")


if __name__ == "__main__":
    main()
    leave()  # after dist.destroy_process_group() alone gloo might abort
