"""A model too large for one rank: built without memory, filled in shards.

Run: torchrun --nproc-per-node=2 06_fsdp/dtensor/meta_init.py
Expect: drawn as they are, the shards of all ranks are the same; drawn whole, one
    parameter at a time, they are one process's to the last bit. No rank needs it whole.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from counters import PeakMemory
from init_whole import DrawWhole
from model import GPT, GPTConfig
from ranks import check, join, leave, say

CONFIG = GPTConfig(layers=6)


def build_in_shards(config: GPTConfig, mesh: DeviceMesh) -> Any:
    """Build a GPT of which each rank has memory for its shards, not yet for values."""
    with torch.device("meta"):  # shapes and dtypes alone
        model = GPT(config)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model.to_empty(device=mesh.device_type)


def draw_weights(model: Any) -> None:
    """Give each parameter its first values, in the order in which GPT() draws them."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.init_weights()


def shards_differ(weight: DTensor) -> bool:
    """Tell whether half of a weight's first rows and the next rank's do; all call this.

    Raises `ValueError` where the weight is not cut by rows, or only one rank has rows.
    """
    dim = weight.placements.index(Shard(0))  # of the mesh; others hold copies
    first, second, *_ = weight.full_tensor().chunk(weight.device_mesh.size(dim))
    # Not torch.equal: where 16 does not divide a shard's values, the CPU draws its last
    # 16 anew, so that copies which differ in length end otherwise.
    return (first[: len(second)] == second).float().mean().item() < 0.5


def main() -> None:
    """Fill the shards in both ways, and compare them with a model built as usual."""
    device = join(at_least=2)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    alone = GPT(CONFIG).to(device)  # to compare with; its memory is not counted
    sizes = [p.nbytes for p in alone.parameters()]
    say(f"the model: {sum(sizes):,} bytes, its largest parameter {max(sizes):,}")
    equal, peak, shards = 0, 0, 0
    for name, mode in {"as they are": nullcontext(), "whole": DrawWhole()}.items():
        with PeakMemory() as memory:
            model = build_in_shards(CONFIG, mesh)
            torch.manual_seed(0)
            with mode:
                draw_weights(model)
        pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
        equal = sum(torch.equal(p.full_tensor(), a) for p, a in pairs)
        kept = [p.to_local().untyped_storage() for p in model.parameters()]
        shards = sum(storage.nbytes() for storage in kept)
        are_twins = not shards_differ(model.blocks[0].query.weight)
        peak = memory.peak
        say(f"drawn {name:11} | {equal} of {len(pairs)} parameters are one process's")
        say(f"  two ranks' shards of a weight are equal: {are_twins}")
        say(f"  bytes on rank 0: {shards:,} kept, {peak:,} at the peak")
    most = shards + 1.6 * max(sizes)  # a whole parameter, and a copy of its shard
    check(
        equal == len(sizes) and shards < peak < most < sum(sizes),
        f"{equal} parameters, drawn in shards, are one process's bits",
    )
    leave()


if __name__ == "__main__":
    main()
