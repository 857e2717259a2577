"""FSDP2's fully_shard on the devices there are, held against plain training.

Run: torchrun --standalone --nproc-per-node=1 tests/gpu/cases/fsdp2.py
Expect: a `check:` that a few steps of AdamW end with the same weights.
"""

import copy
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS, LIMIT = 5, 1e-4


def main() -> None:
    """Train a stack of layers both ways; every rank has the whole batch's shard."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if kind is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = kind
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    plain = nn.Sequential(*layers).to(device)
    sharded = copy.deepcopy(plain)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (plain, sharded)]
    for _ in range(STEPS):
        batch = torch.randn(8 * world_size, 64, device=device)
        for model, optimizer, inputs in (
            (plain, optimizers[0], batch),
            (sharded, optimizers[1], batch.chunk(world_size)[rank]),
        ):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    apart = max(
        float((a.full_tensor() - b).abs().max())  # type: ignore
        for a, b in zip(sharded.parameters(), plain.parameters(), strict=True)
    )
    if apart > LIMIT:
        sys.exit(f"check failed on rank {rank}: weights are {apart:.0e} apart")
    dist.barrier()
    if rank == 0:
        print(f"figures: {json.dumps({'weights apart': apart})}")
        print(
            f"check: {STEPS} steps of fully_shard on {world_size} rank(s) are plain's"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
