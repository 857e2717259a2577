"""Prefetching: which units' weights are being gathered while another unit computes?

Run: torchrun --nproc-per-node=2 06_fsdp/settings/prefetch.py
Expect: by default a unit begins to gather only its own weights in forward, and those of
    the unit before it in backward. Told to look ahead, it begins with the next ones.
"""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from model import GPT, GPTConfig
from ranks import check, join, leave, say


# Begin without it. On a GPU, all-gathers (A0: block 0's) and computations (C0) are two
# streams, queues that the CPU fills far ahead. By default it queues the next block's
# all-gather in forward after this block's computations, while the GPU still does them
# ("implicit prefetching"). If blocks compute too little, that is late: look 1 ahead,
# which queues it before them. Two streams, time to the right:
#     by default      | too little to compute | the same, 1 ahead
#     A0  A1  A2      | A0    A1    A2        | A0 A1 A2
#         C0- C1- C2- |    C0    C1    C2     |    C0 C1 C2
# To look 2 ahead helps only if blocks are unequal, and takes the memory of one more. In
# backward the default is 1 ahead already. (From FSDP's source, not run on a GPU. gloo
# has the order, but waits: nothing overlaps.)
def gather_ahead(blocks: list[Any], ahead: int) -> None:
    """Let each block begin to gather those that come next, in forward and backward."""
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


def gathered_at(events: Any) -> list[tuple[str, str, str]]:
    """List what FSDP begins to gather, from a profile of a step, in order.

    Returns:
        For each unit's turn the pass, the unit (a block's number, or R, the root), and
        the units whose all-gather begins then, before it computes.
    """
    turns: list[tuple[str, str, str]] = []
    for event in sorted(events, key=lambda one: one.time_range.start):
        what, _, unit = event.name.removeprefix("FSDP::").partition(" (")
        unit = unit.strip(")").removeprefix("blocks.") or "R"
        if what in ("pre_forward", "pre_backward"):
            turns.append((what.removeprefix("pre_"), unit, ""))
        elif what == "all_gather":
            turns[-1] = (*turns[-1][:2], f"{turns[-1][2]} {unit}".strip())
    return turns


def main() -> None:
    """Shard a GPT by each setting; let the profiler watch a step; compare gradients."""
    device = join(at_least=2)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    tokens = torch.arange(66, device=device).view(2, 33)  # the same on all ranks
    alone: Any = GPT(GPTConfig(block_size=32, width=32, layers=4, heads=2))
    alone.to(device)(tokens[:, :-1], tokens[:, 1:]).backward()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # not a word on every start
    seen, wrong = {}, []
    for name, ahead in {"default": 0, "1 ahead": 1, "2 ahead": 2}.items():
        model = copy.deepcopy(alone)
        model.zero_grad()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        if ahead:
            gather_ahead(list(model.blocks), ahead)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        seen[name] = gathered_at(profiler.events())
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        far = [(p.grad.full_tensor() - one.grad).abs().max() for p, one in pairs]
        wrong += [] if torch.stack(far).max() < 1e-6 else [name]  # a NaN, too
    for way in ("forward", "backward"):
        turns = {n: [t for t in found if t[0] == way] for n, found in seen.items()}
        say(f"{way:8} | " + " | ".join(f"{unit:5}" for _, unit, _ in turns["default"]))
        for name, found in turns.items():
            say(f"{name:8} | " + " | ".join(f"{begun:5}" for *_, begun in found))
    check(not wrong, f"{len(seen)} ways, one gradient: one process's")
    leave()


if __name__ == "__main__":
    main()
