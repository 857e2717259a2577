"""What each setting of FSDP costs: memory, messages, and work that is done twice.

Run: torchrun --nproc-per-node=4 06_fsdp/settings/memory_and_messages.py
Expect: a table of one forward and backward pass under nine settings. All of them
    compute the gradient of one process.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from counters import CollectiveLog, PeakMemory
from model import GPT, GPTConfig
from ranks import check, join, leave, say
from selective import keep_half_of_products

# The root and 6 blocks are 7 units. To gather 4 bytes of each parameter, or to reduce
# them, each of 4 ranks sends 3/4 of them: 3.0 by 7 all-gathers in forward, 2.9 by 6
# in backward (the root is whole), and 3.0 by 7 reduce-scatters.
CONFIG = GPTConfig(block_size=64, layers=6)
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks and root": {},
    "root alone": {"blocks": 0},  # one unit, all whole at the peak
    "reshard: never": {"reshard_after_forward": False},  # whole until backward
    "reshard: root too": {"reshard_after_forward": True},  # not the blocks alone
    # Each rank of a pair keeps a half: the second all-gather stays inside the pair.
    "reshard: to 2 ranks": {"reshard_after_forward": 2},
    "prefetch 2 blocks": {"prefetch": 2},
    "activation checkpointing": {"recompute": {}},
    # Attention and every second matrix product are kept.
    "selective checkpointing": {"recompute": {"context_fn": keep_half_of_products}},
    # Each pair shards the whole model; between pairs gradients are all-reduced.
    "replicas: 2 x 2": {"replicas": 2},
}


def shard_gpt(
    model: Any,
    mesh: DeviceMesh,
    blocks: int = CONFIG.layers,
    prefetch: int = 0,
    recompute: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Shard a GPT over a mesh: its first `blocks` one by one, then what is left.

    The weights of `prefetch` blocks are gathered ahead. Unless `recompute` is None,
    backward computes a block's activations again; it is given to checkpoint_wrapper.
    """
    if recompute is not None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, **recompute)
    units = list(model.blocks[:blocks])
    for module in (*units, model):
        fully_shard(module, mesh=mesh, **settings)
    # When a unit's weights are there, and before it computes, it begins to gather those
    # of the next units, in backward of the ones before it (by default: of one).
    for i, unit in enumerate(units if prefetch else ()):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + prefetch])
        unit.set_modules_to_backward_prefetch(units[max(0, i - prefetch) : i][::-1])
    return model


def main() -> None:
    """Run forward and backward under each setting; count, and compare gradients."""
    device = join(at_least=4, at_most=4)
    one = init_device_mesh(device.type, (4,))
    two = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    alone = GPT(CONFIG).to(device)
    count = sum(p.numel() for p in alone.parameters())
    tokens = torch.randint(256, (8, CONFIG.block_size + 1), device=device)
    mine = tokens.chunk(4)[dist.get_rank()]
    plain = copy.deepcopy(alone)
    plain(tokens[:, :-1], tokens[:, 1:]).backward()
    due = [torch.as_tensor(p.grad) for p in plain.parameters()]
    say(f"{'':24} | collectives | sent | kept | peak | GFLOP")
    wrong = []
    for name, setting in SETTINGS.items():
        mesh = two if setting.pop("replicas", 1) == 2 else one
        model = shard_gpt(copy.deepcopy(alone), mesh, **setting)
        counters = FlopCounterMode(display=False), CollectiveLog(), PeakMemory()
        with counters[0] as work, counters[1] as log, counters[2] as memory:
            memory.follow(*model.parameters())
            model(mine[:, :-1], mine[:, 1:]).backward()
        kept = sum(t.to_local().nbytes for p in model.parameters() for t in (p, p.grad))
        calls = [c.name for c in log.calls]
        kinds = ("all-gather", "reduce-scatter", "all-reduce")
        numbers = " + ".join(f"{calls.count(kind):2}" for kind in kinds)
        each = [sum(c.sent for c in log.calls), kept, memory.peak]
        costs = " | ".join(f"{n / count:4.1f}" for n in each)
        say(f"{name:24} | {numbers} | {costs} | {work.get_total_flops() / 1e9:.2f}")
        pairs = zip(model.parameters(), due, strict=True)
        far = [(p.grad.full_tensor() - g).abs().max() for p, g in pairs]
        wrong += [] if torch.stack(far).max() < 1e-6 else [name]  # a NaN, too
    say("sent, kept, peak: rank 0's bytes a parameter; GFLOP (CPU): without attention")
    check(not wrong, f"{len(SETTINGS)} settings, one gradient: one process's")
    leave()


if __name__ == "__main__":
    main()
