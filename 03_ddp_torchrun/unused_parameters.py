"""Leave a part of the model out of a step, and see what DDP makes of that.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/unused_parameters.py
Needs: all_ranks.py beside it, and 2 ranks or more.
Expect: for each setting, step by step, whether the gradients are the mean over ranks or
    each rank's own, or an error comes; and what looking for unused parts costs.
Before: 03_ddp_torchrun/sync_batch_norm.py
Next: 03_ddp_torchrun/two_forwards.py
"""

import argparse
import os
import re
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: MYTHS.md, chapter 03.
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from all_ranks import raise_on_all_ranks

HANG = timedelta(seconds=3)  # how long to wait in vain
ROUNDS = 60  # of timing, the first three to warm up
FIND = "find_unused_parameters"
# What can become of a step: two gradients, and the beginnings of three errors.
MEAN, OWN = "the mean over ranks", "each rank its own"
NOT_FINISHED = "Expected to have finished reduction in the prior iteration"
CHANGED = "Your training graph has changed in this iteration"
# Who hears of the time-out and who of the lost connection is a race.
IN_VAIN = "Timed out|timeout|[Cc]losed by peer|reset by peer"


# Each act is a DDP model with one setting, and its steps: who uses the middle layer,
# and the outcome for those who do and those who do not. An error ends a rank's act.
Steps = list[tuple[str, str, str]]
ACTS: list[tuple[str, Steps]] = [
    ("", [("all", MEAN, ""), ("none", "", OWN), ("all", NOT_FINISHED, "")]),
    ("", [("rank 0", IN_VAIN, OWN), ("rank 0", "", NOT_FINISHED)]),
    (FIND, [("none", "", MEAN), ("rank 0", MEAN, MEAN), ("all", MEAN, "")]),
    ("static_graph", [("rank 0", MEAN, MEAN), ("rank 0", MEAN, MEAN)]),
    ("static_graph", [("all", MEAN, ""), ("none", "", OWN), ("all", NOT_FINISHED, "")]),
    ("static_graph", [("none", "", MEAN), ("all", CHANGED, "")]),
]


class Detour(nn.Module):
    """Three layers; the caller says whether the middle one takes part."""

    def __init__(self) -> None:
        """Make the same weights on every call."""
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: torch.Tensor, uses_middle: bool) -> torch.Tensor:
        """Map (B, 4) to a loss."""
        hidden = self.first(inputs).tanh()
        if uses_middle:
            hidden = self.middle(hidden).tanh()
        return self.last(hidden).square().mean()


def is_user(who: str, rank: int) -> bool:
    """Tell whether a rank is one of those who use the middle layer in a step."""
    return who == "all" or who == f"rank {rank}"


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """Join all gradients; where there is none at all, put NaN."""
    nan = torch.tensor(torch.nan)
    grads = [nan.expand_as(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten().cpu() for grad in grads])


def loss_of_rank(model: nn.Module, who: str, rank: int) -> torch.Tensor:
    """Run a model, under DDP or not, on the samples that belong to a rank."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 4, generator=generator)
    return model(inputs.to(next(model.parameters()).device), is_user(who, rank))


def outcome_of_step(ddp_model: DistributedDataParallel, who: str) -> str:
    """Make a step on this rank; return MEAN, OWN or what the error says."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_model.zero_grad()
    try:
        loss_of_rank(ddp_model, who, rank).backward()
    except RuntimeError as error:
        return str(error)
    for outcome, ranks in ((MEAN, range(world_size)), (OWN, [rank])):
        alone = Detour().to(next(ddp_model.parameters()).device)
        torch.stack([loss_of_rank(alone, who, r) for r in ranks]).mean().backward()
        found, wanted = flat_gradients(ddp_model), flat_gradients(alone)
        # NaN equals NaN here: what has no gradient without DDP must have none with it.
        if torch.allclose(found, wanted, rtol=1e-5, atol=1e-7, equal_nan=True):
            return outcome
    return "neither of the two"


def wrap_with(setting: str, model: nn.Module, device: torch.device, group: Any = None):
    """Put a model under DDP with one setting switched on, or none."""
    return DistributedDataParallel(
        model.to(device),
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=group,
        find_unused_parameters=setting == FIND,
        static_graph=setting == "static_graph",
    )


def play(setting: str, steps: Steps, device: torch.device) -> list[str]:
    """Make the steps of an act; return this rank's outcomes, at most one an error."""
    group = None
    if any(IN_VAIN in step for step in steps):
        # NCCL would end the process of a rank that waits in vain; gloo raises an error.
        device, group = torch.device("cpu"), dist.new_group(None, HANG, "gloo")
    ddp_model = wrap_with(setting, Detour(), device, group)
    dist.barrier()
    outcomes: list[str] = []
    for who, _, _ in steps:
        outcomes.append(outcome_of_step(ddp_model, who))
        if outcomes[-1] not in (MEAN, OWN):
            break
    dist.barrier()
    return outcomes


def describe_steps(steps: Steps, by_rank: list[list[str]]) -> list[str]:
    """Write out an act: a line for each outcome of a step, and the ranks it befell."""
    lines = []
    for number, (who, _, _) in enumerate(steps):
        ranks: dict[str, list[str]] = {}
        for rank, outcomes in enumerate(by_rank):
            for text in outcomes[number : number + 1]:
                if re.search(IN_VAIN, text):
                    text = f"waits in vain for {HANG.seconds} s"
                text = re.split(r"\. |, e\.g\.| before ", text)[0]
                ranks.setdefault(text, []).append(str(rank))
        for text, found in ranks.items():
            names = "all" if len(found) == len(by_rank) else ", ".join(found)
            lines.append(f"  step {number}, {who:6} | {names:4} | {text}")
    return lines


def unexpected(steps: Steps, rank: int, outcomes: list[str]) -> list[str]:
    """Return a rank's outcomes if they are not those of the act."""
    wanted = [x for who, use, no in steps if (x := use if is_user(who, rank) else no)]
    if len(wanted) == len(outcomes) and all(map(re.search, wanted, outcomes)):
        return []
    return [f"{outcomes}, not {wanted}"]


def measure_cost(device: torch.device) -> list[str]:
    """Time the steps of a model of many small layers, with each setting in turn."""
    settings = ["", FIND, "static_graph"]
    chains = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)]) for _ in settings]
    models = [wrap_with(*pair, device) for pair in zip(settings, chains, strict=True)]
    seconds: list[list[float]] = [[] for _ in models]
    inputs = torch.ones(4, 16, device=device)
    for number in range(ROUNDS * len(models)):
        # In turn, so that a slow moment of the machine meets all of them.
        model = models[number % len(models)]
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        model(inputs).mean().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds[number % len(models)].append(time.perf_counter() - start)
    medians = [statistics.median(own[3:]) for own in seconds]
    names = ["DDP as it comes", *(f"{setting}=True" for setting in settings[1:])]
    return [
        f"  {n:27} {m / medians[0]:.2f}" for n, m in zip(names, medians, strict=True)
    ]


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
    """Play the acts, hold every rank's outcomes against the expected, take times."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Leave parts of a model unused.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("needs 2 ranks or more; start it with torchrun --nproc-per-node=2")
    local_rank = int(os.environ["LOCAL_RANK"])
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=1))
    rank, faults = dist.get_rank(), []
    lines = ["step, used by | on ranks | gradients, or the error"]
    say = print if rank == 0 else lambda *_, **__: None
    say(f"device: {device.type} with {backend} ({reason})", flush=True)
    for setting, steps in ACTS:
        outcomes = play(setting, steps, device)
        title = f"{setting}=True" if setting else "DDP as it comes"
        faults += [f"{title}: {text}" for text in unexpected(steps, rank, outcomes)]
        by_rank: list[list[str]] = [[]] * world_size
        dist.all_gather_object(by_rank, outcomes)
        lines += [title, *describe_steps(steps, by_rank)]
    say("\n".join([*lines, "time of a step that uses all", *measure_cost(device)]))
    raise_on_all_ranks(faults)
    say(f"check: the steps of {len(ACTS)} acts came out so on {world_size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
