"""Accumulate the gradients of several micro-batches, and all-reduce them once a step.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/accumulation.py
Expect: four loops over four micro-batches: how often each all-reduces, what a rank
    sends, and how far the gradient is from one process's.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import check, join, leave, say
from sent_bytes import note_buckets, sent_by_a_rank

Batches = list[tuple[torch.Tensor, torch.Tensor]]  # (samples, 1024), (samples, 512)
SIZES = {"equal": [8, 8, 8, 8], "unequal": [8, 8, 8, 2]}


def no_sync_too_late(ddp_model: DDP, batches: Batches) -> None:
    """Wasteful: DDP has decided in the forward pass that it will all-reduce."""
    for i, (inputs, labels) in enumerate(batches, start=1):
        loss = F.mse_loss(ddp_model(inputs), labels) / len(batches)
        with nullcontext() if i == len(batches) else ddp_model.no_sync():
            loss.backward()


def undivided(ddp_model: DDP, batches: Batches) -> None:
    """Wrong: adds up the gradients of mean losses as if the sum were a mean."""
    for i, (inputs, labels) in enumerate(batches, start=1):
        with nullcontext() if i == len(batches) else ddp_model.no_sync():
            F.mse_loss(ddp_model(inputs), labels).backward()


def accumulate(ddp_model: DDP, batches: Batches) -> None:
    """Right if all ranks have equally many micro-batches, all of one size."""
    for i, (inputs, labels) in enumerate(batches, start=1):
        with nullcontext() if i == len(batches) else ddp_model.no_sync():
            (F.mse_loss(ddp_model(inputs), labels) / len(batches)).backward()


def accumulate_unequal(ddp_model: DDP, batches: Batches) -> None:
    """Right if each rank has a micro-batch, of any size: all samples weigh alike."""
    samples = torch.tensor(sum(len(x) for x, _ in batches), device=ddp_model.device)
    dist.all_reduce(samples)
    for i, (inputs, labels) in enumerate(batches, start=1):
        with nullcontext() if i == len(batches) else ddp_model.no_sync():
            loss = F.mse_loss(ddp_model(inputs), labels) * len(inputs) / samples
            (loss * dist.get_world_size()).backward()  # DDP will divide by it


def draw_batches(sizes: str, rank: int, device: torch.device) -> Batches:
    """Draw a rank's micro-batches; unequal ones differ between the ranks, too."""
    generator = torch.Generator().manual_seed(rank)
    lengths = [n + rank * (sizes == "unequal") for n in SIZES[sizes]]
    drawn = [torch.randn(n, 1536, generator=generator).to(device) for n in lengths]
    return [(both[:, :1024], both[:, 1024:]) for both in drawn]


def error_of(loop: Callable, ddp_model: DDP, sizes: str) -> float:
    """Compare a loop's gradient with one process's, for all samples in one batch."""
    ranks, weight = range(dist.get_world_size()), ddp_model.module.weight
    pairs = [pair for r in ranks for pair in draw_batches(sizes, r, weight.device)]
    inputs, labels = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    (alone,) = torch.autograd.grad(F.mse_loss(inputs @ weight.T, labels), weight)
    ddp_model.zero_grad()
    loop(ddp_model, draw_batches(sizes, dist.get_rank(), weight.device))
    return ((weight.grad - alone).abs().max() / alone.abs().max()).item()


def main() -> None:
    """Run each loop, count what it sends, and compare its gradient."""
    device = join(at_least=2)
    torch.manual_seed(0)
    ddp_model = DDP(torch.nn.Linear(1024, 512, bias=False).to(device))
    buckets, results = note_buckets(ddp_model), {}
    batches = draw_batches("equal", dist.get_rank(), device)
    say(f"{'':18} | gradient all-reduces | MB sent | gradient off by | if unequal")
    for loop in (no_sync_too_late, undivided, accumulate, accumulate_unequal):
        errors = [error_of(loop, ddp_model, sizes) for sizes in SIZES]
        buckets.clear()
        sent = sent_by_a_rank(partial(loop, ddp_model, batches))
        mb = "unknown" if sent is None else f"{sent / 1e6:.2f}"
        counts = f"{len(buckets):20} | {mb:>7}"
        say(f"{loop.__name__:18} | {counts} | {errors[0]:15.0%} | {errors[1]:10.0%}")
        results[loop] = (len(buckets), *[error < 1e-5 for error in errors])
    is_right = results[accumulate][:2] == results[accumulate_unequal][:2] == (1, True)
    check(
        is_right and results[accumulate_unequal][2],
        "the last two all-reduce gradients once a step, and get those of one process",
    )
    leave()


if __name__ == "__main__":
    main()
