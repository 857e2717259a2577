"""Compute in bf16 under DDP, by autocast or as a bf16 model: what is bf16, what sent?

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/mixed_precision/autocast.py
Expect: under autocast products are bf16; weights, gradients and what DDP sends stay
    float32. A bf16 model sends half, and a small step leaves many of its weights alone.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig
from ranks import check, join, leave, same_on_all_ranks, say
from sent_bytes import sent_by_a_rank

BLOCK_SIZE, BATCH_SIZE = 64, 4
# Each with the dtype of the weights, and whether the forward pass is under autocast.
WAYS = {
    "float32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bf16 model": (torch.bfloat16, False),
}


def forward_backward(ddp_model: torch.nn.Module, tokens: torch.Tensor, autocast: bool):
    """Go forward under autocast, and backward outside of it."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        loss = ddp_model(tokens[:, :-1], tokens[:, 1:])
    # Backward computes each product in the dtype of the forward pass. The gradient of a
    # float32 weight is then converted to float32, and that is what DDP gets.
    loss.backward()


def gradients_of(model: torch.nn.Module) -> torch.Tensor:
    """Return all gradients in one float32 vector."""
    return torch.cat(
        [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    )


def by_one_process(start: GPT, shards, dtype: torch.dtype, autocast: bool):
    """Compute the ranks' gradients here, one after the other, and their mean."""
    by_rank = []
    for shard in shards:
        model = copy.deepcopy(start).to(dtype)
        forward_backward(model, shard, autocast)
        by_rank.append(gradients_of(model))
    return torch.stack(by_rank).mean(dim=0)


def moved_by_a_step(model: torch.nn.Module) -> float:
    """Take a step of AdamW; return which part of the weights it has changed."""
    before = copy.deepcopy(list(model.parameters()))
    torch.optim.AdamW(model.parameters(), lr=1e-4).step()
    pairs = zip(model.parameters(), before, strict=True)
    return (
        torch.cat([(new != old).flatten() for new, old in pairs]).float().mean().item()
    )


def main() -> None:
    """Take a step in three ways; compare each with one process."""
    device, is_right = join(at_least=2), []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    start = GPT(GPTConfig(BLOCK_SIZE, width=64)).to(device)
    tokens = torch.randint(256, (world_size * BATCH_SIZE, BLOCK_SIZE + 1))
    shards = tokens.to(device).chunk(world_size)
    exact = by_one_process(start, shards, torch.float32, False)
    say("            weight    product   gradient  kB sent  off by  weights moved")
    for name, (dtype, autocast) in WAYS.items():
        model, outputs = copy.deepcopy(start).to(dtype), []
        layer: Any = model.blocks[0].mlp_in
        layer.register_forward_hook(lambda *call, seen=outputs: seen.append(call[2]))
        step = partial(forward_backward, DDP(model), shards[rank], autocast)
        sent, ours = sent_by_a_rank(step) or 0, gradients_of(model)
        alone = by_one_process(start, shards, dtype, autocast)
        far, off_by = (
            (ours - g).abs().max() / exact.abs().max() for g in (alone, exact)
        )
        tensors = (layer.weight, outputs[0], layer.weight.grad)
        shown = "".join(f"{str(t.dtype).removeprefix('torch.'):10}" for t in tensors)
        moved = moved_by_a_step(model)
        say(f"{name:12}{shown}{sent / 1e3:7.1f}{off_by:8.0e}{moved:15.0%}")
        is_right += [(moved > 0.99) == (dtype == torch.float32)]
        low = name != "float32"
        is_right += [
            (outputs[0].dtype != torch.float32) == low,
            tensors[2].dtype == dtype,
        ]
        # A bf16 model's gradients are averaged in bf16, too.
        is_right += [far < (1e-6 if dtype == torch.float32 else 2**-7)]
        is_right += [same_on_all_ranks(model.parameters())]
    check(
        all(is_right), f"{len(WAYS)} ways, each with one process's mean over the shards"
    )
    leave()


if __name__ == "__main__":
    main()
