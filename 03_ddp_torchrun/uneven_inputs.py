"""Ranks with unequal numbers of batches: the hang, `join`, and stopping together.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/uneven_inputs.py
Needs: all_ranks.py beside it. A GPU for every rank is used if there is one.
Expect: a rank with more batches waits in vain; then what `join` does, and stopping at
    once. A `check:` against one process.
Before: 03_ddp_torchrun/accumulation.py
Next: 03_ddp_torchrun/initial_weights.py
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: MYTHS.md, chapter 03.
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from all_ranks import apart, count_models, flat_copy, from_all_ranks, raise_on_all_ranks

TOLERANCE = 1e-5  # of the largest entry: float32 sums in another order differ by 1e-7
Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of(rank: int, device: torch.device) -> list[Batch]:
    """Draw a rank's batches of 4 samples: rank 0 has 3, each next rank has 2 more."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(4, 8, generator=generator) for _ in range(3 + 2 * rank)]
    return [(x.to(device), (x.sum(1, keepdim=True) + rank).to(device)) for x in drawn]


def linear_ddp_model(
    device: torch.device, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Wrap a linear layer with the same weights every time."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    return DistributedDataParallel(model, process_group=group)


def train_joined(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    divide_by_initial: bool = True,
) -> list[torch.Tensor]:
    """Take a step with each batch this rank has; return the gradients."""
    gradients = []
    # A rank that comes to the end of this block stays there and adds zeros to the
    # exchanges of the others, until all are through. Then all get the last one's model.
    with ddp_model.join(divide_by_initial_world_size=divide_by_initial):
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.mse_loss(ddp_model(inputs), labels).backward()
            gradients.append(flat_copy(p.grad for p in ddp_model.parameters()))
            optimizer.step()
    return gradients


def train_until_one_ends(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
) -> None:
    """Take a step with each batch, as long as every rank has one."""
    for batch in [*batches, None]:
        has_batch = torch.tensor(float(batch is not None), device=ddp_model.device)
        dist.all_reduce(has_batch, op=dist.ReduceOp.MIN)
        if not has_batch or batch is None:
            return
        optimizer.zero_grad()
        F.mse_loss(ddp_model(batch[0]), batch[1]).backward()
        optimizer.step()


SECOND_EPOCHS = [(train_joined, 0.0), (train_joined, 0.9), (train_until_one_ends, 0.9)]


def steps_alone(
    device: torch.device, divide_by_initial: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Take all ranks' steps in one process; return mean gradients and the weights."""
    torch.manual_seed(0)
    model, gradients = torch.nn.Linear(8, 1).to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    everyone = [batches_of(rank, device) for rank in range(dist.get_world_size())]
    for batches in zip_longest(*everyone):
        found = [batch for batch in batches if batch is not None]
        inputs, labels = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        gradients.append(flat_copy(p.grad for p in model.parameters()))
        if divide_by_initial:  # as if the missing batches were there, without a loss
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * len(found) / len(everyone)
        optimizer.step()
    return gradients, flat_copy(model.parameters())


def show_join(device: torch.device, divide_by_initial: bool, faults: list[str]) -> str:
    """Train with join; compare each gradient and the weights with one process's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_model, shares = linear_ddp_model(device), []
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    batches = batches_of(rank, device)
    gradients = train_joined(ddp_model, optimizer, batches, divide_by_initial)
    means, weights = steps_alone(device, divide_by_initial)
    for step, (gradient, mean) in enumerate(zip(gradients, means, strict=False)):
        active = sum(step < 3 + 2 * other for other in range(world_size))
        share = active / world_size if divide_by_initial else 1.0
        if not apart(gradient, share * mean) < TOLERANCE:
            faults.append(f"the gradient of step {step + 1} is not {share:.2f} of it")
        shares.append(((gradient @ mean) / (mean @ mean)).item())
    error = apart(flat_copy(ddp_model.parameters()), weights)
    if not error < TOLERANCE or len(shares) != 3 + 2 * rank:
        faults.append(f"{error:.0e} from one process after {len(shares)} steps")
    numbers = " ".join(f"{share:.2f}" for share in from_all_ranks(shares)[-1])
    return f"{divide_by_initial!s:5} {numbers}  weights {error:.0e} apart"


def show_next_epoch(
    device: torch.device,
    train: Callable[..., object],
    momentum: float,
    faults: list[str],
) -> str:
    """Train an epoch, and take one more step: are the ranks still together?"""
    ddp_model = linear_ddp_model(device)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=momentum)
    batches = batches_of(dist.get_rank(), device)
    train(ddp_model, optimizer, batches)
    before = count_models(ddp_model.module)
    train_until_one_ends(ddp_model, optimizer, batches[:1])
    models = (before, count_models(ddp_model.module))
    is_torn = train is train_joined and momentum > 0
    if models[0] != 1 or (models[1] > 1) != is_torn:
        faults.append(f"{train.__name__}, momentum {momentum}: {models} models")
    return f"{train.__name__:20} | {momentum:8} | {models[0]}, {models[1]}"


def run_out(
    ddp_model: DistributedDataParallel,
    context: contextlib.AbstractContextManager[None],
    group: dist.ProcessGroup | None = None,
) -> tuple[int, list[str]]:
    """Take steps until an error comes; return their number, and every rank's error."""
    steps, text = 0, ""
    try:
        with context:
            for inputs, labels in batches_of(dist.get_rank(), ddp_model.device):
                if steps == 3 and group:  # no earlier: a slow rank shall have its time
                    group.set_timeout(timedelta(seconds=1))
                F.mse_loss(ddp_model(inputs), labels).backward()
                steps += 1
    except RuntimeError as error:
        text = str(error).split("] ", 1)[-1]  # what follows gloo's file and line
    return steps, from_all_ranks(text)


def show_ends(device: torch.device, faults: list[str]) -> list[str]:
    """Train without join, and with a join that raises; return what is said."""
    # On the CPU and gloo, which report a time-out; NCCL's watchdog ends the process.
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    hanging = linear_ddp_model(torch.device("cpu"), group)
    after, texts = run_out(hanging, contextlib.nullcontext(), group)
    if after != 3 or texts[0] or not all(texts[1:]):
        faults.append(f"no hang, but {after} steps and {texts}")
    # A rank that gives up first makes the others lose their connection to it.
    first = next((text for text in texts if "imed out" in text), max(texts))
    ddp_model = linear_ddp_model(device)
    throwing = ddp_model.join(throw_on_early_termination=True)
    after, texts = run_out(ddp_model, throwing)
    if after != 3 or not all(texts):
        faults.append(f"stopped after {after} steps with {texts}")
    return [
        f"without join, all ranks but 0 wait in step 4\n  {first}",
        f"join(throw_on_early_termination=True)\n  {texts[0]}\n  {texts[1]}",
    ]


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
    """Join the group, show each way, check it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Train on unequal numbers of batches.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=2")
    local_rank, world_size = (int(os.environ[k]) for k in ("LOCAL_RANK", "WORLD_SIZE"))
    if world_size < 2:
        refuse("one rank waits for nobody; torchrun --nproc-per-node=2 starts two")
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    say = print if dist.get_rank() == 0 else lambda text: None
    faults: list[str] = []
    say(f"device: {device.type} with {backend} ({reason})")
    say("rank 0 has 3 batches of 4 samples, each next rank has 2 more")
    say("\n".join(show_ends(device, faults)))
    say("join(divide_by_initial_world_size=...): gradients / one process's mean")
    for divide_by_initial in (True, False):
        say(f"  {show_join(device, divide_by_initial, faults)}")
    say("epoch of uneven length | momentum | different models after it, a step later")
    for train, momentum in SECOND_EPOCHS:
        say(f"  {show_next_epoch(device, train, momentum, faults)}")
    raise_on_all_ranks(faults)
    say(f"check: {world_size} ranks, all gradients and weights against one process's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
