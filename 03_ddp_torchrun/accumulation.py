"""Add up the gradients of several micro-batches, and exchange them once.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/accumulation.py
Needs: all_ranks.py and sent_bytes.py beside it; megabytes are counted with gloo on
    Linux only. A GPU for every rank is used if there is one.
Expect: ways to do it, with the exchanges, megabytes and gradient of each: one sends a
    quarter and is right, one saves nothing, one is four times too large. A `check:`.
Before: 03_ddp_torchrun/two_forwards.py
Next: 03_ddp_torchrun/uneven_inputs.py
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: MYTHS.md, chapter 03.
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from all_ranks import apart, flat_copy, raise_on_all_ranks
from sent_bytes import note_exchanges, sent_by_a_rank

MicroBatches = list[tuple[torch.Tensor, torch.Tensor]]  # (samples, 256) twice
TOLERANCE = 1e-5  # of the largest entry: float32 sums in another order differ by 1e-7


def exchange_once(
    ddp_model: DistributedDataParallel,
    batches: MicroBatches,
    weights: list[float] | None = None,
) -> None:
    """Add the gradient of all micro-batches to the parameters, exchanged once.

    `weights` are those of the losses in their sum. None makes it a mean: 1 / k each.
    """
    for number, (inputs, labels) in enumerate(batches):
        weight = weights[number] if weights else 1 / len(batches)
        is_last = number == len(batches) - 1
        # Around the forward pass too: that is where DDP decides.
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            (F.mse_loss(ddp_model(inputs), labels) * weight).backward()


def always_exchange(ddp_model: DistributedDataParallel, batches: MicroBatches) -> None:
    """Do without no_sync: right, but only the last of these exchanges is needed."""
    for inputs, labels in batches:
        (F.mse_loss(ddp_model(inputs), labels) / len(batches)).backward()


def no_sync_too_late(ddp_model: DistributedDataParallel, batches: MicroBatches) -> None:
    """Use no_sync where it has no effect."""
    for number, (inputs, labels) in enumerate(batches, start=1):
        loss = F.mse_loss(ddp_model(inputs), labels) / len(batches)
        is_last = number == len(batches)
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            loss.backward()


def forget_to_divide(ddp_model: DistributedDataParallel, batches: MicroBatches) -> None:
    """Add up the gradients of mean losses, as if their sum were a mean."""
    exchange_once(ddp_model, batches, weights=[1.0] * len(batches))


def weigh_by_samples(ddp_model: DistributedDataParallel, batches: MicroBatches) -> None:
    """Give each sample of all ranks the same weight, however they are divided up."""
    total = torch.tensor(sum(len(x) for x, _ in batches), device=ddp_model.device)
    dist.all_reduce(total)
    # DDP will divide by the number of ranks, which this takes back.
    per_sample = dist.get_world_size() / total.item()
    exchange_once(ddp_model, batches, [len(x) * per_sample for x, _ in batches])


class Way(NamedTuple):
    """A way to take a step, and whether it saves exchanges and is right."""

    run: Callable[[DistributedDataParallel, MicroBatches], None]
    saves: bool
    is_right: bool


EQUAL = {
    "exchange in every backward": Way(always_exchange, False, True),
    "no_sync, forward and backward": Way(exchange_once, True, True),
    "no_sync, backward only": Way(no_sync_too_late, False, True),
    "no_sync, loss not divided": Way(forget_to_divide, True, False),
}
UNEQUAL = {
    "each micro-batch weighs 1 / k": Way(exchange_once, True, False),
    "each sample weighs the same": Way(weigh_by_samples, True, True),
}


def make_samples(sizes: list[int], rank: int, device: torch.device) -> MicroBatches:
    """Draw micro-batches of `sizes` samples; every rank can draw every rank's."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(2, samples, 256, generator=generator) for samples in sizes]
    return [(inputs.to(device), labels.to(device)) for inputs, labels in drawn]


def wide_ddp_model(device: torch.device) -> DistributedDataParallel:
    """Wrap a model of half a million parameters, sent as one message."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)]
    return DistributedDataParallel(
        torch.nn.Sequential(*layers).to(device),
        bucket_cap_mb=25,
    )


def compare_gradients(
    ddp_model: DistributedDataParallel, sizes_of: Callable[[int], list[int]]
) -> tuple[float, float]:
    """Return how many times one process's the gradient is, and how far off at worst."""
    model, device = ddp_model.module, ddp_model.device
    ranks = range(dist.get_world_size())
    drawn = [pair for r in ranks for pair in make_samples(sizes_of(r), r, device)]
    inputs, labels = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
    loss = F.mse_loss(model(inputs), labels)
    alone = torch.autograd.grad(loss, list(model.parameters()))
    found, whole = flat_copy(p.grad for p in model.parameters()), flat_copy(alone)
    return ((found @ whole) / (whole @ whole)).item(), apart(found, whole)


def try_ways(
    device: torch.device,
    ways: dict[str, Way],
    sizes_of: Callable[[int], list[int]],
    rounds: int,
) -> tuple[list[str], list[str]]:
    """Take a step in each way; return a line about each, and this rank's faults."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_model = wide_ddp_model(device)
    exchanged = note_exchanges(ddp_model)
    batches = make_samples(sizes_of(rank), rank, device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):  # in turn; these are also DDP's first steps
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            way.run(ddp_model, batches)
            dist.barrier()  # all ranks have all they wait for
            seconds[name].append(time.perf_counter() - started)
    lines, faults = [], []
    for name, way in ways.items():
        ddp_model.zero_grad()
        exchanged.clear()
        sent = sent_by_a_rank(partial(way.run, ddp_model, batches))
        times, error = compare_gradients(ddp_model, sizes_of)
        shown = "-" if sent is None else f"{sent / 1e6:.2f}"
        taken = 1000 * statistics.median(seconds[name])
        numbers = f"{len(exchanged):9}{shown:>9}{taken:7.1f}{times:8.3f}{error:8.0e}"
        lines.append(f"  {name:29}{numbers}")
        # An all-reduce sends each number on 2 (n - 1) times, in n-th parts.
        expected = sum(exchanged) * 2 * (world_size - 1) / world_size
        if sent is not None and abs(sent / expected - 1) > 0.05:
            faults.append(f"{name}: {sent:,.0f} bytes sent, not {expected:,.0f}")
        if len(exchanged) != (1 if way.saves else len(batches)):
            faults.append(f"{name}: {len(exchanged)} exchanges")
        if (error < TOLERANCE) != way.is_right:
            faults.append(f"{name}: the gradient is off by {error:.0e}")
    return lines, faults


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


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


def main() -> None:
    """Join the group, run each way, check it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Accumulate gradients in four ways.")
    parser.add_argument("--micro-batches", type=int, default=4, help="in a step")
    parser.add_argument("--rounds", type=int, default=5, help="to time")
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=2")
    local_rank, world_size = (int(os.environ[k]) for k in ("LOCAL_RANK", "WORLD_SIZE"))
    if world_size < 2 or args.micro_batches < 2 or args.rounds < 1:
        refuse("takes 2 or more ranks, 2 or more micro-batches, 1 or more rounds")
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    say = print if dist.get_rank() == 0 else lambda text: None
    say(f"device: {device.type} with {backend} ({reason})")
    k = args.micro_batches
    equal = try_ways(device, EQUAL, lambda rank: [8] * k, args.rounds)
    unequal = try_ways(
        device, UNEQUAL, lambda rank: [n + rank for n in range(1, k + 1)], args.rounds
    )
    say(f"{'':31}exchanges  MB sent     ms   times  off by")
    say("\n".join([f"{k} micro-batches of 8 samples on every rank", *equal[0]]))
    say("\n".join(["of 1, 2, 3 ... samples, rank 1 has one more in each", *unequal[0]]))
    raise_on_all_ranks(equal[1] + unequal[1])
    say(
        f"check: {len(EQUAL | UNEQUAL)} gradients on {world_size} ranks held against "
        "one process's, and their exchanges counted"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
