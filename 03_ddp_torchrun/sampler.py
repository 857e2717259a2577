"""See which rank is dealt which samples, and what the dealing does to a mean.

Run: torchrun --nproc-per-node=3 03_ddp_torchrun/sampler.py
Needs: all_ranks.py beside it, and 2 ranks or more.
Expect: the samples of each rank in order, shuffled, padded and cut off; then one
    validation loss found in three ways, of which one is right.
Before: 03_ddp_torchrun/speed.py
Next: 03_ddp_torchrun/sync_batch_norm.py
"""

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from all_ranks import raise_on_all_ranks

SEED = 0
EPOCHS = 3
# What is printed above a deal; shuffle, drop_last, whether set_epoch is called.
DEALS = [
    ("in order", False, False, True),
    ("shuffled, set_epoch forgotten", True, False, False),
    ("shuffled, set_epoch(0), set_epoch(1), set_epoch(2)", True, False, True),
    ("the same with drop_last=True", True, True, True),
]


def deal_by_hand(
    samples: int, world_size: int, rank: int, epoch: int, shuffle: bool, drop_last: bool
) -> list[int]:
    """Do what `DistributedSampler` does: the indices of one rank in one epoch."""
    order = list(range(samples))
    if shuffle:
        # Every rank draws the same order, because every rank has the same seed. The
        # epoch is part of it, and only `set_epoch` tells the sampler about that.
        generator = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(samples, generator=generator).tolist()
    spare = samples % world_size
    if spare and drop_last:
        order = order[:-spare]  # the last of the order are left out
    elif spare:
        order += order[: world_size - spare]  # the first of the order come again
    return order[rank::world_size]


def deal_epochs(sampler: DistributedSampler, calls_set_epoch: bool) -> list[list[int]]:
    """List what a sampler deals to this rank in each of EPOCHS epochs."""
    dealt = []
    for epoch in range(EPOCHS):
        if calls_set_epoch:
            sampler.set_epoch(epoch)
        dealt.append(list(sampler))
    return dealt


def loss_of(indices: Sequence[int], samples: int) -> torch.Tensor:
    """Squared errors of a fit, one for each index; the first samples fit worst."""
    x = torch.tensor(list(indices), dtype=torch.float64) / samples
    return (torch.exp(-3 * x) - 0.3) ** 2


def mean_of_means(own: torch.Tensor, device: torch.device) -> float:
    """Average the ranks' own means: right only if all ranks have equally many."""
    mean = own.mean().to(device, torch.float32)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def mean_by_counts(own: torch.Tensor, device: torch.device) -> float:
    """Average over all samples of all ranks, however many each of them has.

    Args:
        own: this rank's losses, one for each sample; it may be empty.
        device: where this rank's tensors travel from.
    """
    # The sum and the count go in one message, and the division comes last.
    total = torch.tensor([own.sum().item(), float(len(own))], device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def describe_deal(by_rank: list[list[list[int]]], samples: int) -> list[str]:
    """Write out a deal: a line for each rank, one for what is repeated or left out."""
    rows = {f"rank {rank}": epochs for rank, epochs in enumerate(by_rank)}
    for epoch in range(len(by_rank[0])):
        seen = Counter(index for epochs in by_rank for index in epochs[epoch])
        repeated = [index for index in range(samples) if seen[index] > 1]
        left_out = [index for index in range(samples) if seen[index] == 0]
        rows.setdefault("repeated", []).append(repeated)
        rows.setdefault("left out", []).append(left_out)
    width = 3 * len(by_rank[0][0]) - 1
    lines = []
    for name, epochs in rows.items():
        cells = [" ".join(f"{index:2}" for index in dealt) for dealt in epochs]
        if any(cells):
            line = " | ".join(f"{cell:{width}}" for cell in cells)
            lines.append(f"  {name:8} | {line}".rstrip())
    return lines


def try_deals(samples: int) -> tuple[list[str], list[str]]:
    """Deal in four ways; return what to print, and what differs from the deal by hand.

    Every rank must call this: it collects what all of them were dealt.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lines, faults = [], []
    for title, shuffle, drop_last, calls_set_epoch in DEALS:
        sampler = DistributedSampler(
            range(samples),  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle,
            seed=SEED,
            drop_last=drop_last,
        )
        dealt = deal_epochs(sampler, calls_set_epoch)
        by_hand = [
            deal_by_hand(samples, world_size, rank, epoch, shuffle, drop_last)
            for epoch in (range(EPOCHS) if calls_set_epoch else [0] * EPOCHS)
        ]
        if dealt != by_hand:
            faults.append(f"{title}: dealt {dealt}, by hand {by_hand}")
        by_rank: list[list[list[int]]] = [[]] * world_size
        dist.all_gather_object(by_rank, dealt)
        lines += [title, *describe_deal(by_rank, samples)]
    return lines, faults


def try_means(samples: int, device: torch.device) -> tuple[list[str], list[str]]:
    """Find a validation loss in three ways; return what to print, and what is wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(
        range(samples),  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        shuffle=False,
    )
    padded = loss_of(list(sampler), samples)
    # Every world_size-th sample, from this rank's own number on: nothing is repeated.
    unpadded = loss_of(range(rank, samples, world_size), samples)
    everything = loss_of(range(samples), samples)
    repeated = everything[: -samples % world_size]
    shares = [everything[start::world_size] for start in range(world_size)]
    true = everything.mean().item()
    # What one process computes for each: the third is the one that is wanted.
    by_hand = {
        "means of padded shares": torch.cat([everything, repeated]).mean().item(),
        "means of unpadded shares": sum(s.mean().item() for s in shares) / world_size,
        "sums and counts": true,
    }
    found = {
        "means of padded shares": mean_of_means(padded, device),
        "means of unpadded shares": mean_of_means(unpadded, device),
        "sums and counts": mean_by_counts(unpadded, device),
    }
    lines = [f"validation loss of all {samples} samples: {true:.4f} in one process"]
    faults = []
    for title, value in found.items():
        off = round(value - true, 4) + 0.0  # never -0.0000
        lines.append(f"  {title:24} | {value:.4f} | {off:+.4f}")
        if not abs(value - by_hand[title]) < 1e-6:
            faults.append(f"{title}: {value}, by hand {by_hand[title]}")
    return lines, faults


def choose_device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Give each rank an accelerator of its own, or every rank the CPU; say why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "no accelerator found"
    kind, found = accelerator.type, torch.accelerator.device_count()
    if dist.get_default_backend_for_device(kind) == "gloo":
        return torch.device("cpu"), f"no backend connects {kind} devices"
    if found < local_world_size:
        return torch.device("cpu"), f"{found} {kind} for {local_world_size} local ranks"
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank), f"{found} {kind}, one for each local rank"


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Deal in four ways, then take a mean in three, each held against one process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Show who is dealt which samples.")
    parser.add_argument("--samples", type=int, default=10, help="10 unless given")
    parser.error = refuse  # type: ignore[method-assign]
    samples = parser.parse_args().samples
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("needs 2 ranks or more; start it with torchrun --nproc-per-node=3")
    if not world_size <= samples <= 100:
        refuse(f"--samples must be {world_size} (one for each rank) to 100")
    local_rank = int(os.environ["LOCAL_RANK"])
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=1))
    deals, wrong_deals = try_deals(samples)
    means, wrong_means = try_means(samples, device)
    if dist.get_rank() == 0:
        print(f"device: {device.type} with {backend} ({reason})")
        print("\n".join(deals + means))
    raise_on_all_ranks(wrong_deals + wrong_means)
    if dist.get_rank() == 0:
        print(
            f"check: {len(DEALS)} deals and 3 means on {world_size} ranks are what one "
            "process finds by hand"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
