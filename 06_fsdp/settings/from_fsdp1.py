"""The same training by FSDP1 and by FSDP2: what becomes of each argument.

Run: torchrun --nproc-per-node=2 06_fsdp/settings/from_fsdp1.py
Expect: three steps by each, with the gradient norms and the weights of one process.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from model import GPT, Block, GPTConfig
from ranks import check, join, leave, say


class InFSDP1:
    """Wraps a model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Shard it; every rank calls this and the other two."""
        self.model = fsdp.FullyShardedDataParallel(
            model,
            device_id=device,
            sync_module_states=device.type != "cpu",  # on a CPU an error
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            use_orig_params=True,
        )

    def add_gradients(self, batches: list[Tensor]) -> float:
        """Accumulate, then clip; return the gradient's norm before."""
        for i, tokens in enumerate(batches, start=1):
            with nullcontext() if i == len(batches) else self.model.no_sync():
                loss = self.model(tokens[:, :-1], tokens[:, 1:])
                (loss / len(batches)).backward()
        return self.model.clip_grad_norm_(max_norm=1.0).item()

    def weights(self) -> list[Tensor]:
        """Return them whole, in the model's order."""
        with fsdp.FullyShardedDataParallel.summon_full_params(self.model):
            return [p.detach().clone() for p in self.model.parameters()]


class InFSDP2:
    """Changes a model in place."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Shard it; every rank calls this and the other two."""
        self.model = model.to(device)  # device_id
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)  # sync_module_states
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        for module in (*reversed(blocks), model):  # auto_wrap_policy; inner ones first
            fully_shard(module, mesh=mesh)  # FULL_SHARD; the last three: not needed

    def add_gradients(self, batches: list[Tensor]) -> float:
        """Accumulate, then clip; return the gradient's norm before."""
        for i, tokens in enumerate(batches, start=1):
            self.model.set_requires_gradient_sync(i == len(batches))  # no_sync
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            (loss / len(batches)).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        return norm.full_tensor().item()  # type: ignore

    def weights(self) -> list[Tensor]:
        """Return them whole, in the model's order."""
        return [p.full_tensor().detach() for p in self.model.parameters()]


def main() -> None:
    """Train by each, and by one process on all ranks' batches."""
    device = join(at_least=2)
    torch.manual_seed(0)
    alone = GPT(GPTConfig(block_size=32, width=32, layers=2, heads=2)).to(device)
    ways = [way(copy.deepcopy(alone), device) for way in (InFSDP1, InFSDP2)]
    single = torch.optim.AdamW(alone.parameters())
    optimizers = [torch.optim.AdamW(way.model.parameters()) for way in ways]
    far = [0.0]
    for step in range(1, 4):
        # Of each rank two micro-batches of four samples.
        tokens = torch.randint(256, (dist.get_world_size(), 2, 4, 33), device=device)
        whole = tokens.flatten(0, 2)
        alone(whole[:, :-1], whole[:, 1:]).backward()
        due = nn.utils.clip_grad_norm_(alone.parameters(), max_norm=1.0).item()
        norms = [way.add_gradients([*tokens[dist.get_rank()]]) for way in ways]
        say("step {} | norm by FSDP1 {:.4f}, by FSDP2 {:.4f}".format(step, *norms))
        far += [abs(norm - due) for norm in norms]
        for optimizer in (single, *optimizers):
            optimizer.step()
            optimizer.zero_grad()
    for way in ways:
        pairs = zip(way.weights(), alone.parameters(), strict=True)
        far += [(mine - one).abs().max().item() for mine, one in pairs]
    is_same = all(distance < 1e-5 for distance in far)  # a NaN is not
    check(is_same, "3 steps' norms, and the weights, are one process's")
    leave()


if __name__ == "__main__":
    main()
