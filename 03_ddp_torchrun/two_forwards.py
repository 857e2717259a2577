"""Call a DDP model twice in a step, as a GAN does, and compare with one process.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/two_forwards.py
Needs: all_ranks.py beside it, and 2 ranks or more.
Expect: a table of ways to arrange forwards and backwards; under four settings of DDP,
    each gives the gradient of one process, another one in silence, or an error.
Before: 03_ddp_torchrun/unused_parameters.py
Next: 03_ddp_torchrun/accumulation.py
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: MYTHS.md, chapter 03.
import torch.distributed.nn
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from all_ranks import raise_on_all_ranks

LIMIT = 1e-5  # of the largest entry of a gradient
# What can come of it: two gradients, and the beginnings of four errors.
R, W = "right", "off"
LATE = "Expected to have finished reduction in the prior iteration"
CHANGED = "Your training graph has changed in this iteration"
TWICE = "Expected to mark a variable ready only once"
NO_HOOKS = "expect_autograd_hooks_ INTERNAL ASSERT FAILED"
ERRORS = {e: f"error {n}" for n, e in enumerate((LATE, TWICE, CHANGED, NO_HOOKS), 1)}


class RunningScale(nn.Module):
    """Divides by a running mean that belongs to this rank until DDP overwrites it."""

    def __init__(self, features: int) -> None:
        """Start with 1."""
        super().__init__()
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Update the buffer with this batch (B, D), then use it."""
        # A new tensor, as it must be: backward still needs the one it was used with.
        self.scale = 0.5 * self.get_buffer("scale") + 0.5 * x.detach().abs().mean(dim=0)
        return x / self.scale


class Judge(nn.Module):
    """A discriminator: samples (B, 4) in, one number for each out."""

    def __init__(self, norm: Callable[[int], nn.Module], heads: int = 1) -> None:
        """Make the same weights on every call."""
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(4, 8), norm(8)
        self.heads = nn.ModuleList([nn.Linear(8, 1) for _ in range(heads)])

    def forward(self, samples: torch.Tensor, use_last: bool = False) -> torch.Tensor:
        """Judge with the first head or with the last, which may be the same."""
        hidden = self.norm(self.body(samples)).tanh()
        return self.heads[-1 if use_last else 0](hidden)


class Calls(NamedTuple):
    """The three ways into a model under DDP, and this rank's samples."""

    ddp: Callable[..., torch.Tensor]
    module: Callable[..., torch.Tensor]
    no_sync: Callable[[], Any]
    real: torch.Tensor
    fake: torch.Tensor


def loss(judged: torch.Tensor, sign: int) -> torch.Tensor:
    """Push what is judged up (sign -1, real samples) or down (1, generated ones)."""
    return softplus(sign * judged).mean()


def one_forward(c: Calls) -> None:
    """Judge all samples in one call: one forward, one backward, nothing to go wrong."""
    real, fake = c.ddp(torch.cat([c.real, c.fake])).chunk(2)
    (loss(real, -1) + loss(fake, 1)).backward()


def one_backward(c: Calls, first: str = "ddp") -> None:
    """Two forwards, then one backward of the sum."""
    real = getattr(c, first)(c.real)
    (loss(real, -1) + loss(c.ddp(c.fake, True), 1)).backward()


def two_backwards(c: Calls) -> None:
    """Two forwards, then two backwards: the second finds the exchange already over."""
    real, fake = c.ddp(c.real), c.ddp(c.fake, True)
    loss(real, -1).backward()
    loss(fake, 1).backward()


def in_turn(c: Calls, first: str = "ddp", second: str = "ddp", quiet=False) -> None:
    """Forward, backward, forward, backward; if `quiet`, the first pair in no_sync."""
    with c.no_sync() if quiet else nullcontext():
        loss(getattr(c, first)(c.real), -1).backward()
    loss(getattr(c, second)(c.fake, True), 1).backward()


SETTINGS: list[tuple[str, dict[str, bool]]] = [
    ("as it comes", {}),
    ("find unused", {"find_unused_parameters": True}),
    ("static graph", {"static_graph": True}),
    ("own buffers", {"forward_sync_buffers": False}),
]
JUDGE, TWO_HEADS = partial(Judge, nn.Identity), partial(Judge, nn.Identity, heads=2)
NORM, SCALE = partial(Judge, nn.BatchNorm1d), partial(Judge, RunningScale)
Way = Callable[[Calls], None]
Make = Callable[[], Judge]
QUIET, BOTH = partial(in_turn, quiet=True), partial(one_backward, first="module")
FIRST, SECOND = partial(in_turn, first="module"), partial(in_turn, second="module")
# A title, what is done with which model, and what comes of it under each setting.
ROWS: list[tuple[str, Way, Make, list[str]]] = [
    ("one forward of both", one_forward, JUDGE, [R, R, R, R]),
    ("two forwards, one backward", one_backward, JUDGE, [R, R, R, R]),
    ("two forwards, two backwards", two_backwards, JUDGE, [W, W, W, W]),
    ("forward, backward, twice", in_turn, JUDGE, [R, R, R, R]),
    ("  the first in no_sync", QUIET, JUDGE, [R, R, NO_HOOKS, R]),
    ("  the first past DDP", FIRST, JUDGE, [R, R, W, R]),
    ("  the second past DDP", SECOND, JUDGE, [W, W, W, W]),
    ("one past DDP, one backward", BOTH, JUDGE, [R, R, R, R]),
    ("two heads, one backward", one_backward, TWO_HEADS, [R, TWICE, R, R]),
    ("  forward, backward, twice", in_turn, TWO_HEADS, [LATE, R, CHANGED, LATE]),
    ("BatchNorm, one backward", one_backward, NORM, [R, R, R, R]),
    ("running scale, one backward", one_backward, SCALE, [W, W, W, R]),
    ("  one forward of both", one_forward, SCALE, [R, R, R, R]),
]


def own_samples(rank: int, device: torch.device) -> torch.Tensor:
    """Make a rank's real and generated samples, (2, 6, 4)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 6, 4, generator=generator).to(device)


def flat_grad(model: nn.Module) -> torch.Tensor:
    """Join the gradients of all parameters."""
    return torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


def mean_of_shares(way: Way, make: Make, device: torch.device) -> torch.Tensor:
    """Let one process do it with each rank's samples, without DDP; return the mean."""
    judges = [make().to(device) for _ in range(dist.get_world_size())]
    for rank, judge in enumerate(judges):
        way(Calls(judge, judge, nullcontext, *own_samples(rank, device)))
    return torch.stack([flat_grad(judge) for judge in judges]).mean(dim=0)


def try_way(way: Way, make: Make, options: dict, device: torch.device) -> str:
    """Take two steps; return R, or how far the gradient is off, or the error's text."""
    wanted, judge = mean_of_shares(way, make, device), make().to(device)
    device_ids = None if device.type == "cpu" else [device.index]
    ddp = DistributedDataParallel(judge, device_ids=device_ids, **options)
    start, off = make().state_dict(), []
    for _ in range(2):
        judge.load_state_dict(start)  # the buffers as they were
        ddp.zero_grad()
        try:
            way(Calls(ddp, judge, ddp.no_sync, *own_samples(dist.get_rank(), device)))
        except RuntimeError as error:
            return next((e for e in ERRORS if str(error).startswith(e)), str(error))
        off.append((flat_grad(judge) - wanted).abs().max() / wanted.abs().max())
    worst = torch.stack(off).max().item()
    return R if worst < LIMIT else f"{worst:.2f} {W}"


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
    """Try each way under each setting; hold the table against what is expected."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Call a DDP model twice in a step.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("needs 2 ranks or more; start it with torchrun --nproc-per-node=2")
    local_rank = int(os.environ["LOCAL_RANK"])
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=1))
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"device: {device.type} with {backend} ({reason})", flush=True)
    lines = [" " * 27 + " ".join(f"{name:>12}" for name, _ in SETTINGS)]
    faults: list[str] = []
    for title, way, make, expected in ROWS:
        cells = []
        for (name, options), wanted in zip(SETTINGS, expected, strict=True):
            outcome = try_way(way, make, options, device)
            cells.append(ERRORS.get(outcome, outcome))
            if not outcome.endswith(wanted):
                faults.append(f"{title}, {name}: {outcome}, not {wanted}")
        lines.append(f"{title:27}" + " ".join(f"{cell:>12}" for cell in cells))
    lines += [f"{name}: {text}" for text, name in ERRORS.items()]
    say("\n".join(lines), flush=True)
    raise_on_all_ranks(faults)
    say(f"check: {4 * len(ROWS)} results on {world_size} ranks against one process's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
