"""Seven ways to ask for the state of a sharded model: who gets what, how it is loaded.

Run: torchrun --nproc-per-node=2 06_fsdp/checkpoints/state_dicts.py
Expect: what each rank gets: shards, whole tensors, or nothing. Each is loaded into a
    model with other weights, which then has the first one's, to the last bit.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from ranks import check, gather, join, leave, say

FULL = StateDictOptions(full_state_dict=True)
TO_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# How to get a state dict of a model m or its optimizer o, and how to load it.
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "model.state_dict()": (
        lambda m, o: m.state_dict(),
        lambda m, o, state: m.load_state_dict(state),
    ),
    "get_model_state_dict": (
        lambda m, o: get_model_state_dict(m),
        lambda m, o, state: set_model_state_dict(m, state),
    ),
    "get_model_state_dict, FULL": (
        lambda m, o: get_model_state_dict(m, options=FULL),
        lambda m, o, state: set_model_state_dict(m, state, options=FULL),
    ),
    "get_model_state_dict, TO_RANK_0": (
        lambda m, o: get_model_state_dict(m, options=TO_RANK_0),
        lambda m, o, state: set_model_state_dict(m, state, options=FROM_RANK_0),
    ),
    "optimizer.state_dict()": (
        lambda m, o: o.state_dict(),
        lambda m, o, state: o.load_state_dict(state),
    ),
    "get_optimizer_state_dict": (
        lambda m, o: get_optimizer_state_dict(m, o),
        lambda m, o, state: set_optimizer_state_dict(m, o, state),
    ),
    "get_optimizer_state_dict, TO_RANK_0": (
        lambda m, o: get_optimizer_state_dict(m, o, options=TO_RANK_0),
        lambda m, o, state: set_optimizer_state_dict(m, o, state, options=FROM_RANK_0),
    ),
}


def trained_for_a_step(
    mesh: DeviceMesh, seed: int
) -> tuple[Any, torch.optim.Optimizer]:
    """Build a sharded GPT, and an AdamW that has taken a step."""
    torch.manual_seed(seed)
    model: Any = GPT(GPTConfig(width=64)).to(mesh.device_type)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (2, 9), device=mesh.device_type)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    return model, optimizer


def shards(state: Any) -> list[Tensor]:
    """Return what this rank has of the tensors in a state dict."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def main() -> None:
    """Get a state dict in each way, load it elsewhere, and compare."""
    mesh = init_device_mesh(join(at_least=2).type, (dist.get_world_size(),))
    first, same = trained_for_a_step(mesh, seed=0), []
    for name, (get, load) in WAYS.items():
        state = get(*first)
        is_sharded = any(isinstance(leaf, DTensor) for leaf in tree_leaves(state))
        nbytes = gather(sum(t.nbytes for t in shards(state)))
        kind = "shards" if is_sharded else "whole"
        say(f"{name:35} | {kind:6} | {nbytes[0]:9,} | {nbytes[1]:9,}")
        other = trained_for_a_step(mesh, seed=1)
        load(*other, state)
        part = 1 if "optimizer" in name else 0
        due, now = (shards(pair[part].state_dict()) for pair in (first, other))
        same.append(all(map(torch.equal, due, now)) and len(due) == len(now) > 0)
    check(all(same), f"{len(same)} state dicts loaded, and equal to the last bit")
    leave()


if __name__ == "__main__":
    main()
