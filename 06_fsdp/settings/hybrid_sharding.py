"""Hybrid sharding (HSDP): shards inside a host, and a replica of them on every host.

Run: torchrun --nproc-per-node=4 06_fsdp/settings/hybrid_sharding.py
Expect: with two replicas, a quarter of the bytes crosses between them. The gradient is
    one process's.
"""

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from counters import CollectiveLog
from model import GPT, GPTConfig
from ranks import check, join, leave, say

CONFIG = GPTConfig(block_size=64)


def shard_in_replicas(model: Any, replicas: int, device_type: str) -> DeviceMesh:
    """Shard a GPT over neighbouring ranks, in so many copies; return the mesh."""
    shape = replicas, dist.get_world_size() // replicas  # the last axis: neighbours
    names = ("replicate", "shard")
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return mesh


def main() -> None:
    """Shard in one, two and four replicas; count bytes and compare the gradients."""
    device = join(at_least=4, at_most=4)
    torch.manual_seed(0)
    alone = GPT(CONFIG).to(device)
    count = sum(p.numel() for p in alone.parameters())
    tokens = torch.randint(256, (8, CONFIG.block_size + 1), device=device)
    mine = tokens.chunk(4)[dist.get_rank()]
    plain = copy.deepcopy(alone)
    plain(tokens[:, :-1], tokens[:, 1:]).backward()
    is_right = True
    for replicas in (1, 2, 4):
        model: Any = copy.deepcopy(alone)
        mesh = shard_in_replicas(model, replicas, device.type)
        with CollectiveLog() as log:
            model(mine[:, :-1], mine[:, 1:]).backward()
        say(f"mesh {mesh.shape}: a weight is {model.head.weight.placements}")
        sent: Any = Counter()
        for call in log.calls:
            sent[call.name, call.ranks] += call.sent / count
        for (name, ranks), each in sent.items():
            if len(ranks) > 1:
                say(f"  {name:14} | ranks {ranks} | {each:.1f} bytes a parameter")
        # An all-reduce, by a ring, of a shard of the gradients in float32.
        twins = tuple(dist.get_process_group_ranks(mesh.get_group("replicate")))
        across = sum(n for (_, ranks), n in sent.items() if ranks == twins)
        due = 2 * (replicas - 1) / replicas * 4 / mesh.shape[1]
        is_right &= abs(across - due) < 0.01 * due + 1e-9
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        apart = [(p.grad.full_tensor() - q.grad).abs().max() for p, q in pairs]
        is_right &= bool(torch.stack(apart).max() < 1e-6)  # max() would drop a NaN
    claim = "the gradient of one process; between replicas a shard is all-reduced"
    check(is_right, claim)
    leave()


if __name__ == "__main__":
    main()
