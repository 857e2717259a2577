"""torch.nn.SyncBatchNorm on devices, held against one process with the whole batch.

Run: torchrun --standalone --nproc-per-node=2 tests/gpu/cases/real_sync_batch_norm.py
Expect: `figures:` with the largest differences; a `check:` that they are rounding.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

LIMIT = 1e-4


def main() -> None:
    """Compare outputs, gradients and running statistics; gloo if devices are few."""
    index = int(os.environ["LOCAL_RANK"])
    alone = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", index if alone else 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl" if alone else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    whole = whole.to(device)
    batch = torch.randn(8 * world_size, 8, device=device)
    shards = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    ).to(device)
    shards.load_state_dict(whole.state_dict())
    ddp_model = nn.parallel.DistributedDataParallel(shards, [device.index])
    expected = whole(batch)
    expected.square().mean().backward()
    output = ddp_model(batch.chunk(world_size)[rank])
    output.square().mean().backward()
    pairs = {
        "outputs": [(output, expected.chunk(world_size)[rank])],
        "gradients": [
            (a.grad, b.grad)
            for a, b in zip(shards.parameters(), whole.parameters(), strict=True)
        ],
        "buffers": list(zip(shards.buffers(), whole.buffers(), strict=True)),
    }
    apart = {
        name: max(float((a - b).abs().max()) for a, b in of)
        for name, of in pairs.items()
    }
    if max(apart.values()) > LIMIT:
        sys.exit(f"check failed on rank {rank}: {apart}")
    dist.barrier()
    if rank == 0:
        print(f"figures: {json.dumps(apart)}")
        print(f"check: {world_size} ranks by {dist.get_backend()} equal one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
