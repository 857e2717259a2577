"""Shard experts over the ranks with a copy of them, and all else over all ranks.

Run: torchrun --nproc-per-node=4 09_one_mesh/experts/with_fsdp.py
Expect: by default FSDP divides an expert's gradient by the number of its copies, and
    it is 2 times too large; divided by the number of all ranks, it is one process's.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranks import check, gather, join, leave, say
from whole_and_sharded import add_gradients_of_both, both_models

STEPS, EXPERT_RANKS = 3, 2


def shard(model: Any, everyone: DeviceMesh, copies: DeviceMesh, divide: bool) -> None:
    """Shard each expert over its copies, and what is left over all ranks."""
    share = copies.size() / everyone.size()
    for expert in model.blocks[0].mixture.experts.values():
        fully_shard(expert, mesh=copies)
        if divide:
            # Not set_gradient_divide_factor: in float64 it divides twice with one copy;
            # in float32, with several, it calls a reduction that gloo lacks.
            expert.set_all_reduce_hook(lambda mean: mean.mul_(share))
    fully_shard(model, mesh=everyone)


def ratios(ours: Any, alone: Any, of: str) -> dict[str, float]:
    """Return by name the size of our `grad` or `data`, and `error`, the largest."""
    found, errors = {}, []
    for name, p in ours.named_parameters():
        whole = (p.grad if of == "grad" else p.detach()).full_tensor()
        right = getattr(alone.get_parameter(name), of)
        found[name] = (whole.norm() / right.norm()).item()
        errors.append(torch.dist(whole, right) / right.norm())
    return found | {"error": torch.stack(errors).max().item()}


def main() -> None:
    """Compare gradients with and without the hook, then weights after some steps."""
    device = join(at_least=4, at_most=4)
    n = dist.get_world_size()
    everyone = init_device_mesh(device.type, (n,), mesh_dim_names=("all",))
    shape = (n // EXPERT_RANKS, EXPERT_RANKS)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "expert"))
    for divide in (False, True):
        alone, ours = both_models(device, mesh["expert"].get_group())
        shard(ours, everyone, mesh["data"], divide)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.3, foreach=False)
            for model in (alone, ours)
        ]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            add_gradients_of_both(step, alone, ours)
            if step == 0:
                sizes = ratios(ours, alone, "grad")
                ratio = [r for name, r in sizes.items() if ".experts." in name]
                times = f"{min(ratio):.2f} to {max(ratio):.2f} x right"
                say(f"divisor {n if divide else n // 2} | experts' gradients {times}")
            for optimizer in optimizers:
                optimizer.step()
    parts = [".experts." in name for name, _ in ours.named_parameters()]
    kept = [p.to_local().numel() for p in ours.parameters()]
    mine = sum(k for k, is_expert in zip(kept, parts, strict=True) if is_expert)
    say(f"experts' numbers, by rank | {gather(mine)}")
    say(f"all others', by rank      | {gather(sum(kept) - mine)}")
    error = ratios(ours, alone, "data")["error"]
    check(error < 1e-9, f"weights of {STEPS} steps are one process's")
    leave()


if __name__ == "__main__":
    main()
