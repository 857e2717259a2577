"""Train with DDP on ranks that mp.spawn starts: one file to copy.

Run: python 02_ddp_mp/minimal.py
Expect: the mean loss of each epoch, the same for every --nprocs; the weights in
    minimal.pt.
"""

import argparse
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # gloo may abort at Python's end: DDP imports it too late
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, GLOBAL_BATCH_SIZE = 3, 64


def make_dataset() -> TensorDataset:
    """Draw places and heights: on every rank the same."""
    places = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(places, torch.sin(6 * places).prod(dim=1, keepdim=True))


def train_shard(rank: int, world_size: int, device: torch.device) -> None:
    """Train on this rank's samples of each batch; rank 0 prints and saves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    ddp_model = DistributedDataParallel(model)  # gives all ranks rank 0's weights
    torch.manual_seed(rank)  # from here on: other dropout masks on each rank
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=1e-2)
    dataset, batch_size = make_dataset(), GLOBAL_BATCH_SIZE // world_size
    sampler = DistributedSampler(dataset, drop_last=True)  # in place of shuffle=True
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for places, heights in loader:
            outputs = ddp_model(places.to(device))
            loss = nn.functional.mse_loss(outputs, heights.to(device))
            loss.backward()  # afterwards every rank has the mean gradient
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # every rank calls this
        if rank == 0:
            print(f"epoch {epoch} | mean loss {mean.item():.5f}")
        # A check: do all ranks hold the same weights? Different ones hardly have equal
        # norms, and one number from each rank is less to send than all weights.
        norm = sum(p.abs().double().norm().item() for p in model.parameters())
        dist.all_gather_object(norms := [0.0] * world_size, norm)
        if len(set(map(str, norms))) > 1:  # as text, for NaN is not equal to NaN
            raise RuntimeError(f"the ranks' weights differ, with norms of {norms}")
    if rank == 0:
        torch.save(model.state_dict(), "minimal.pt")


def join_and_train(rank: int, world_size: int, port: int) -> None:
    """Join the process group, train, leave."""
    device = torch.device("cpu")  # unless each rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= world_size:
        torch.accelerator.set_device_index(rank)
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=2),  # by default 30 on gloo, 10 on NCCL
    )
    train_shard(rank, world_size, device)
    gc.collect()  # now the model is gone, even one in a reference cycle
    dist.destroy_process_group()  # else this rank might never end


if __name__ == "__main__":  # each rank imports this file again
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=2)
    nprocs, samples = parser.parse_args().nprocs, len(make_dataset())
    if "RANK" in os.environ:
        parser.error("start it with python: it starts its own ranks")
    if nprocs < 1 or GLOBAL_BATCH_SIZE % nprocs:
        parser.error(f"--nprocs must divide the batch of {GLOBAL_BATCH_SIZE} samples")
    if samples < GLOBAL_BATCH_SIZE:
        parser.error(f"{samples} samples make no batch of {GLOBAL_BATCH_SIZE}")
    # Where the ranks meet: a small server, at which they leave what the others need to
    # connect. Port 0: the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(join_and_train, (nprocs, store.port), nprocs=nprocs)
