"""Rank zero may print and save alone; it must not communicate alone.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rank_zero.py
Needs: all_ranks.py beside it. A GPU for every rank is used if there is one.
Expect: a validation that rank zero alone enters, and what it hits: nobody, or somebody
    else's exchange. How to find which rank is missing. Then the right ways, and a
    `check:` of all of them.
Before: 03_ddp_torchrun/initial_weights.py
Next: 03_ddp_torchrun/comm_hooks.py
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: MYTHS.md, chapter 03.
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from all_ranks import flat_copy, from_all_ranks, raise_on_all_ranks

SECONDS = 0.5  # that a rank waits where it is meant to wait in vain
Group = dist.ProcessGroup | None


def held_out(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 12 samples with their targets, the same on every rank."""
    inputs = torch.linspace(-1, 1, 12, device=device)[:, None]
    return inputs, 3 * inputs + 1


def validate_together(
    model: torch.nn.Module, device: torch.device, group: Group = None
) -> float:
    """Mean loss on the held-out samples; every rank takes its share, all must call."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = (one[rank::world_size] for one in held_out(device))
    with torch.no_grad():
        loss = F.mse_loss(model(inputs), targets, reduction="sum")
    total = torch.stack([loss, torch.tensor(float(len(inputs)), device=device)])
    dist.all_reduce(total, group=group)
    return (total[0] / total[1]).item()


def validate_alone(model: torch.nn.Module, device: torch.device) -> float:
    """Mean loss on the held-out samples, found without any other rank."""
    inputs, targets = held_out(device)
    with torch.no_grad():
        return F.mse_loss(model(inputs), targets).item()


class Norm(torch.nn.Module):
    """A layer with two weights, and a buffer, as batch norm has it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        """Start with the same weights everywhere."""
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, 1) to (samples, 1)."""
        return self.layer(inputs - self.mean)


def try_alone(
    call: Callable[[DistributedDataParallel, dist.ProcessGroup], object],
) -> str:
    """Let rank zero alone make a call; return its error, the same text on all ranks."""
    # On the CPU and gloo, which report a time-out; NCCL's watchdog ends the process.
    # A group of its own: after a time-out its connections cannot be used again.
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    ddp_model, text = DistributedDataParallel(Norm(), process_group=group), ""
    dist.barrier()
    # Not before: a rank that is only slow shall have its time to come here.
    group.set_timeout(timedelta(seconds=SECONDS))
    if dist.get_rank() == 0:
        try:
            call(ddp_model, group)
        except RuntimeError as error:
            # The first line, without gloo's file name and line number.
            text = str(error).split("] ", 1)[-1].splitlines()[0].strip()
    return from_all_ranks(text)[0]


def cross_with_training() -> tuple[float, list[float]]:
    """Let rank zero validate while the others take the next training step.

    Returns:
        The loss that rank zero found, and the gradient that rank 1 found.
    """
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    model = Norm()
    ddp_model = DistributedDataParallel(
        model, process_group=group, forward_sync_buffers=False
    )
    found = [0.0, 0.0]
    if dist.get_rank() == 0:
        found = [validate_together(model, CPU, group)]
    else:
        # Two weights and one message: as many numbers as validate sends.
        ddp_model(torch.ones(1, 1)).sum().backward()
        found = flat_copy(p.grad for p in model.parameters()).tolist()
    by_rank = from_all_ranks(found)
    return by_rank[0][0], by_rank[1]


CPU = torch.device("cpu")
Call = Callable[[DistributedDataParallel, dist.ProcessGroup], object]
# What rank zero enters alone, and whether that must end in an error.
ALONE: dict[str, tuple[Call, bool]] = {
    "validate_together(...)": (
        lambda ddp, group: validate_together(ddp.module, CPU, group),
        True,
    ),
    "ddp_model(...)": (lambda ddp, group: validate_alone(ddp, CPU), True),
    "monitored_barrier(...)": (
        lambda ddp, group: dist.monitored_barrier(
            group, timedelta(seconds=SECONDS), wait_all_ranks=True
        ),
        True,
    ),
    "ddp_model.module(...)": (
        lambda ddp, group: validate_alone(ddp.module, CPU),
        False,
    ),
}


def read_what_rank_zero_writes(folder: str) -> tuple[bool, bool]:
    """Look for rank zero's file before and after a barrier; is it there?"""
    path = Path(folder, "snapshot")
    was_there = path.exists()
    dist.barrier()  # rank zero's disk is so slow that the others have looked already
    if dist.get_rank() == 0:
        path.write_text("weights")
    dist.barrier()  # no rank passes before rank zero has written
    return was_there, path.exists() and path.read_text() == "weights"


def show_all(device: torch.device, say: Callable[[str], None]) -> None:
    """Go wrong, then right; check both on all ranks."""
    faults = []
    say("rank 0 alone, and the others do nothing")
    for name, (call, is_wrong) in ALONE.items():
        text = try_alone(call)
        say(f"  {name:23} {text or 'no error, nobody else is needed'}")
        if bool(text) != is_wrong:
            faults.append(f"{name}: {text!r}")
    model, right = Norm().to(device), validate_alone(Norm(), CPU)
    crossed, gradient = cross_with_training()
    say("rank 0 validates, and the others take a training step: no error")
    say(f"  the loss is {right:.2f}, rank 0 finds {crossed:.2f}")
    say(f"  the gradient is 1, 1; rank 1 finds {gradient[0]:.2f}, {gradient[1]:.2f}")
    if abs(crossed - right) < 0.1 or max(abs(one - 1) for one in gradient) < 0.1:
        faults.append(f"nothing crossed: {crossed}, {gradient}")
    by_rank = from_all_ranks(validate_together(model, device))
    say("all ranks validate, rank 0 prints")
    say(f"  {by_rank[0]:.2f}, in one process {right:.2f}")
    if not max(abs(loss / right - 1) for loss in by_rank) < 1e-5:
        faults.append(f"validation: {by_rank}, not {right}")
    with tempfile.TemporaryDirectory() as folder:
        there = read_what_rank_zero_writes(from_all_ranks(folder)[0])
        say("rank 0 writes a file, the others read it")
        say(f"  it is there before the barrier: {there[0]}, after it: {there[1]}")
        if there != (False, True):
            faults.append(f"the file is there before and after: {there}")
        dist.barrier()  # rank zero shall not take the folder away from under a reader
    raise_on_all_ranks(faults)


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
    """Join the group, go wrong, go right."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Show what rank zero may do alone.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=2")
    local_rank, world_size = (int(os.environ[k]) for k in ("LOCAL_RANK", "WORLD_SIZE"))
    if world_size < 2:
        refuse("one rank is all ranks; torchrun --nproc-per-node=2 starts two")
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    say = print if dist.get_rank() == 0 else lambda text: None
    say(f"device: {device.type} with {backend} ({reason})")
    show_all(device, say)
    say(f"check: {len(ALONE) + 3} ways on {world_size} ranks end as described")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
