"""Weights come from rank 0 once, when DDP wraps the model; buffers again and again.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/initial_weights.py
Needs: all_ranks.py beside it. A GPU for every rank is used if there is one.
Expect: how many models the ranks hold; which passes copy buffers; a `check:` of both.
Before: 03_ddp_torchrun/uneven_inputs.py
Next: 03_ddp_torchrun/rank_zero.py
"""

import argparse
import os
import signal
import sys
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from all_ranks import count_models, from_all_ranks, raise_on_all_ranks


class TwoLayers(torch.nn.Module):
    """Two layers, and a buffer that says which rank it comes from."""

    origin: torch.Tensor

    def __init__(self) -> None:
        """Draw weights from torch's global generator."""
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.register_buffer("origin", torch.tensor(float(dist.get_rank())))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, 4) to (samples, 1)."""
        return self.last(self.first(inputs))


def fresh_model(device: torch.device) -> TwoLayers:
    """Build a model that is another one on each rank."""
    torch.manual_seed(dist.get_rank())
    return TwoLayers().to(device)


def take_steps(ddp_model: DistributedDataParallel, optimizer: SGD, steps: int) -> None:
    """Train on numbers that only this rank has."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(8, 4, generator=generator).to(ddp_model.device)
        optimizer.zero_grad()
        ddp_model(inputs).square().mean().backward()
        optimizer.step()


def before_wrapping(device: torch.device) -> int:
    """Give every rank a seed of its own, and do not wrap."""
    return count_models(fresh_model(device))


def wrapped(device: torch.device) -> int:
    """Give every rank a seed of its own, and wrap."""
    return count_models(DistributedDataParallel(fresh_model(device)).module)


def wrapped_without_sync(device: torch.device) -> int:
    """Wrap with init_sync=False, and train: the gradients are the same mean for all."""
    ddp_model = DistributedDataParallel(fresh_model(device), init_sync=False)
    take_steps(ddp_model, SGD(ddp_model.parameters(), 0.05, 0.9), steps=5)
    return count_models(ddp_model.module)


def changed_by_hand(device: torch.device) -> int:
    """Change one weight on all ranks but 0 after wrapping, and train."""
    ddp_model = DistributedDataParallel(fresh_model(device))
    with torch.no_grad():
        ddp_model.module.last.bias += float(dist.get_rank() > 0)
    take_steps(ddp_model, SGD(ddp_model.parameters(), 0.05, 0.9), steps=5)
    return count_models(ddp_model.module)


def layer_too_late(device: torch.device) -> int:
    """Replace a layer after wrapping: DDP keeps to the tensors of the old one."""
    model = fresh_model(device)
    ddp_model = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(0)  # the new layer, too, is the same on all ranks to begin with
    model.last = torch.nn.Linear(4, 1).to(device)
    take_steps(ddp_model, SGD(model.parameters(), 0.05, 0.9), steps=1)
    return count_models(model)


def built_before_and_after(device: torch.device) -> tuple[bool, bool]:
    """Build the optimizer before and after wrapping; are tensors, weights the same?"""
    weights, same_tensors = [], True
    for is_before in (True, False):
        model = fresh_model(device)
        early = SGD(model.parameters(), 0.05, 0.9)
        ddp_model = DistributedDataParallel(model)
        optimizer = early if is_before else SGD(ddp_model.parameters(), 0.05, 0.9)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = zip(held, ddp_model.parameters(), strict=True)
        same_tensors &= all(mine is its for mine, its in pairs)
        take_steps(ddp_model, optimizer, steps=5)
        weights.append([p.tolist() for p in ddp_model.parameters()])
    return same_tensors, weights[0] == weights[1]


def layer_after_optimizer(device: torch.device) -> tuple[bool, bool]:
    """Replace a layer after the optimizer was built; do old and new layer learn?"""
    model = fresh_model(device)
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    model.last = torch.nn.Linear(4, 1).to(device)
    ddp_model = DistributedDataParallel(model)
    first, last = model.first.weight.clone(), model.last.weight.clone()
    take_steps(ddp_model, optimizer, steps=5)
    is_same = (
        torch.equal(first, model.first.weight),
        torch.equal(last, model.last.weight),
    )
    return not is_same[0], not is_same[1]


def origins_after_forward(device: torch.device) -> dict[str, float]:
    """Put the rank into the buffer before each forward pass; what is it afterwards?"""
    ddp_model = DistributedDataParallel(fresh_model(device))
    origins = {}

    def forward(title: str, model: torch.nn.Module = ddp_model) -> None:
        ddp_model.module.origin.fill_(dist.get_rank())
        output = model(torch.ones(2, 4, device=device))
        if output.requires_grad:
            output.sum().backward()
        origins[title] = ddp_model.module.origin.item()

    forward("training")
    ddp_model.eval()
    forward("eval")
    with torch.no_grad():
        forward("no_grad, first")
        forward("no_grad, second")
    ddp_model.train()
    forward("training, first after no_grad")
    with ddp_model.no_sync():
        forward("no_sync, first")
        forward("no_sync, second")
    forward("ddp_model.module", ddp_model.module)
    unsynced = DistributedDataParallel(ddp_model.module, forward_sync_buffers=False)
    forward("forward_sync_buffers=False", unsynced)
    return origins


CASES: dict[str, tuple[Callable[[torch.device], int], bool]] = {
    "another seed on each rank": (before_wrapping, False),
    "the same, wrapped": (wrapped, True),
    "wrapped with init_sync=False, 5 steps": (wrapped_without_sync, False),
    "changed by hand after wrapping, 5 steps": (changed_by_hand, False),
    "layer replaced after wrapping, 1 step": (layer_too_late, False),
}
# Whether rank 0's buffers are copied. A forward pass whose gradients will not be
# exchanged still copies them, but makes the next one leave them alone.
COPIES = {
    **{"training": True, "eval": True},
    **{"no_grad, first": True, "no_grad, second": False},
    "training, first after no_grad": False,
    **{"no_sync, first": True, "no_sync, second": False},
    **{"ddp_model.module": False, "forward_sync_buffers=False": False},
}


def show_cases(device: torch.device, say: Callable[[str], None]) -> None:
    """Run all of it, print it, check it on all ranks."""
    faults, rank, world_size = [], dist.get_rank(), dist.get_world_size()
    say("different models on the ranks")
    for name, (case, is_one) in CASES.items():
        models = case(device)
        say(f"  {name:40} {models}")
        expected = 1 if is_one else 2 if case is changed_by_hand else world_size
        if models != expected:
            faults.append(f"{name}: {models} models")
    say("optimizer built before or after wrapping")
    same = built_before_and_after(device)
    say(f"  same tensors {same[0]}, same weights after 5 steps {same[1]}")
    learns = layer_after_optimizer(device)
    say("layer replaced after the optimizer was built, 5 steps")
    say(f"  an old layer learns {learns[0]}, the new one learns {learns[1]}")
    if same + learns != (True, True, True, False):
        faults.append(f"same tensors, weights: {same}; learns: {learns}")
    say("whose buffers the last rank has after a forward pass")
    last = from_all_ranks(origins := origins_after_forward(device))[-1]
    for name, copies in COPIES.items():
        say(f"  {name:40} {'rank 0' if last[name] == 0 else 'its own'}")
        if origins[name] != (0 if copies else rank):
            faults.append(f"{name}: buffers of rank {origins[name]:.0f}")
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
    """Join the group, run all cases, check them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Show what DDP copies, and when.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=2")
    local_rank, world_size = (int(os.environ[k]) for k in ("LOCAL_RANK", "WORLD_SIZE"))
    if world_size < 2:
        refuse("one rank has nobody to copy from; torchrun --nproc-per-node=2")
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    say = print if dist.get_rank() == 0 else lambda text: None
    say(f"device: {device.type} with {backend} ({reason})")
    show_cases(device, say)
    say(f"check: {len(CASES) + len(COPIES) + 2} cases on {world_size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
