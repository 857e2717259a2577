"""A DTensor: one tensor of which ranks hold shards, copies, or terms of a sum.

Run: torchrun --nproc-per-node=2 06_fsdp/dtensor/dtensor.py
Expect: which collective each change of placement is. Then a layer with a sharded
    weight: two such changes, and the gradient of one process.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

from ranks import check, gather, join, leave, say

CHANGES = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Partial(), Replicate()),
    (Partial(), Shard(0)),
]


def change(tensor: DTensor, placement: Placement) -> tuple[DTensor, str]:
    """Redistribute a tensor; return the result, and the collectives that it took."""
    with CommDebugMode() as counter:
        result = tensor.redistribute(placements=[placement])
    return result, collectives(counter)


def collectives(counter: CommDebugMode) -> str:
    """Name what was counted, by the dispatcher's names."""
    counts = counter.get_comm_counts()
    return ", ".join(f"{n} {op.__name__}" for op, n in counts.items()) or "none"


def sharded_linear(inputs: Tensor, weight: DTensor) -> Tensor:
    """Multiply this rank's samples by a weight of which it holds a shard.

    Forward all-gathers the weight. In backward each rank computes one term of the sum
    that is its gradient, `Partial`; the weight is `Shard(0)`, so they reduce-scatter.
    """
    whole = weight.redistribute(placements=[Replicate()])
    return inputs @ whole.to_local(grad_placements=[Partial()]).t()


def main() -> None:
    """Make a DTensor, change its placement in five ways, train one as a weight."""
    device = join(at_least=2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(24.0, device=device).view(6, 4)

    mesh = init_device_mesh(device.type, (world_size,))
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    shapes = gather(tuple(weight.to_local().shape))
    say(f"shape {tuple(weight.shape)}, placed {weight.placements}, on ranks {shapes}")
    is_right = True
    for before, after in CHANGES:
        changed, how = change(distribute_tensor(whole, mesh, [before]), after)
        say(f"{before!r:12} -> {after!r:12} | {how}")
        is_right &= torch.equal(changed.full_tensor(), whole)

    samples = torch.randn(world_size, 3, 4, generator=torch.Generator().manual_seed(0))
    samples = samples.to(device)
    weight.requires_grad_()
    with CommDebugMode() as counter:
        sharded_linear(samples[rank], weight).square().sum().backward()
    grad = weight.grad
    assert isinstance(grad, DTensor)
    say(f"a sharded layer, both passes | {collectives(counter)}")
    say(f"its gradient | placed {grad.placements}, on ranks {shapes}")
    alone = whole.clone().requires_grad_()
    (samples.flatten(0, 1) @ alone.t()).square().sum().backward()
    is_right &= torch.allclose(grad.full_tensor(), torch.as_tensor(alone.grad))
    check(is_right, f"{len(CHANGES)} tensors and a gradient are one process's")
    leave()


if __name__ == "__main__":
    main()
