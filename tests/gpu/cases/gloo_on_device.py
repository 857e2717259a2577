"""Which collectives gloo does on an accelerator's tensors, with several ranks on one.

Run: torchrun --standalone --nproc-per-node=2 tests/gpu/cases/gloo_on_device.py
Expect: for each collective whether its result is right; a `check:` that all_reduce and
    broadcast are.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def attempt(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> str:
    """Tell whether a collective gives what is expected, or what it says instead."""
    try:
        result = call()
    except Exception as error:
        return f"error: {str(error).splitlines()[0][:90]}"
    return "right" if torch.equal(result.cpu(), expected) else "wrong"


def main() -> None:
    """Try each collective on tensors of the device that this rank gets."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if kind is not None:
        index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
        device = torch.device(kind.type, index)
    mine = torch.full((4,), float(rank), device=device)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    total = torch.full((4,), float(sum(range(world_size))))
    each = torch.stack([torch.full((4,), float(r)) for r in range(world_size)])

    def all_reduce() -> torch.Tensor:
        dist.all_reduce(value := mine.clone())
        return value

    def broadcast() -> torch.Tensor:
        dist.broadcast(value := mine.clone(), src=0)
        return value

    def all_gather() -> torch.Tensor:
        dist.all_gather(everyone, mine)
        return torch.stack(everyone)

    def reduce_scatter() -> torch.Tensor:
        value = torch.empty_like(mine)
        dist.reduce_scatter_tensor(value, mine.repeat(world_size))
        return value

    def all_to_all() -> torch.Tensor:
        dist.all_to_all_single(value := torch.empty_like(mine), mine)
        return value

    def send_recv() -> torch.Tensor:
        value = mine.clone()
        if rank == 0:
            dist.send(mine, dst=1)
        elif rank == 1:
            dist.recv(value, src=0)
        return value

    parts = (torch.arange(4) // max(1, 4 // world_size)).float()
    received = torch.zeros(4) if rank == 1 else torch.full((4,), float(rank))
    cases = {all_reduce: total, broadcast: torch.zeros(4), all_gather: each}
    cases |= {reduce_scatter: total, all_to_all: parts, send_recv: received}
    found = {f.__name__: attempt(f, expected) for f, expected in cases.items()}
    if rank == 0:
        print(f"gloo, {world_size} ranks, tensors on {device.type}")
        print("\n".join(f"{name:15} {result}" for name, result in found.items()))
    if not found["all_reduce"] == found["broadcast"] == "right":
        sys.exit(f"check failed on rank {rank}: {found}")
    if rank == 0:
        print("check: all_reduce and broadcast are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
