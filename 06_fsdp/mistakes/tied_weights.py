"""Put the two modules that share a weight into two units.

Run: torchrun --nproc-per-node=2 06_fsdp/mistakes/tied_weights.py
Expect: `is shared with a parameter already managed by another FSDP group` in forward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Shard an embedding and a head that have one weight."""
    dist.init_process_group("gloo")
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(4, 4), head)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # WRONG: each unit gathers and frees the weight as if it had it alone. Give both to
    # one unit, fully_shard([embedding, head]), or leave both to the root.
    fully_shard(embedding, mesh=mesh)
    fully_shard(head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.arange(3)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
