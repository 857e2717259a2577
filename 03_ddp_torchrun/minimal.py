"""Train the GPT on several ranks: all that DDP takes.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/minimal.py
Expect: the losses of one_process.py.
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it too late: gloo might abort at the end
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig


def main() -> None:
    """Train for one epoch on one device a rank."""
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(GPTConfig()).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    sampler = DistributedSampler(train_set, drop_last=True)  # set_epoch(n) for epoch n
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        loss = model(inputs.to(device), labels.to(device))
        loss.backward()  # all-reduces the gradients
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
        if step % 4 == 0 and dist.get_rank() == 0:
            print(f"step {step:2} | loss {mean.item():.3f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # now the model is gone, even a compiled one
    dist.destroy_process_group()
