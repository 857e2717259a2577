"""Normalise by the statistics of all ranks' samples, so that N ranks equal one process.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/sync_batch_norm.py
Needs: all_ranks.py beside it, and 2 ranks or more. PyTorch's own SyncBatchNorm needs an
    accelerator for each rank; without one the script shows its error and goes on.
Expect: a table of how far BatchNorm under DDP is from one process with the whole
    batch, and how far synchronised layers are; and what becomes of running statistics.
Before: 03_ddp_torchrun/sampler.py
Next: 03_ddp_torchrun/unused_parameters.py
"""

import argparse
import os
import signal
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

BATCH_SIZE = 8  # of one rank
FEATURES = 5
# Of the largest entry. Sums of float32 in another order differ by about 1e-7.
TOLERANCE = 1e-5


class SumOverRanks(torch.autograd.Function):
    """A sum that gradients can pass: every rank's loss depends on every rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts; every rank must call this."""
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' gradients; again every rank comes here."""
        return SumOverRanks.forward(ctx, grads[0])


class SummedBatchNorm(nn.BatchNorm1d):
    """BatchNorm whose statistics are those of all ranks' samples, for inputs (B, D)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; in training every rank must call this, and B may differ."""
        if not self.training:
            return super().forward(input)  # running statistics, no communication
        # The last column counts the samples.
        counted = torch.cat([input, input.new_ones(len(input), 1)], dim=1)
        sums = SumOverRanks.apply(counted.sum(dim=0))
        count, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        # Sums of squares could travel in the same message, but then the variance would
        # be a small difference of two large numbers.
        variance = SumOverRanks.apply((input - mean).square().sum(dim=0)) / count
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None
        unbiased = variance.detach() * count / (count - 1)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_(unbiased, self.momentum)
        normalised = (input - mean) / torch.sqrt(variance + self.eps)
        return normalised * self.weight + self.bias


def normed_model(norm: type[nn.BatchNorm1d]) -> nn.Sequential:
    """Build a small model with a normalisation; the same weights on every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, FEATURES), norm(FEATURES), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, 1))


def drifting_inputs(count: int) -> torch.Tensor:
    """Make inputs (count, 3) that drift, so that the ranks' shares are not alike."""
    generator = torch.Generator().manual_seed(1)
    drift = torch.linspace(-1, 1, count).unsqueeze(1)
    return torch.randn(count, 3, generator=generator) + drift


def under_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Put a model on this rank's device and under DDP."""
    device_ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(model.to(device), device_ids=device_ids)


def normed_step(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and running statistics of one forward and backward."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    outputs.square().mean().backward()
    gradients = [p.grad.flatten() for p in plain.parameters() if p.grad is not None]
    running = [b.flatten() for b in plain.buffers() if b.is_floating_point()]
    assert inputs.grad is not None
    return {
        "outputs": outputs.detach(),
        "input grads": inputs.grad,
        "weight grads": torch.cat(gradients),
        "running": torch.cat(running).clone(),
    }


def off_under_ddp(model: nn.Module, device: torch.device) -> dict[str, float]:
    """Hold a model under DDP against BatchNorm in one process; every rank calls this.

    Returns the largest on any rank, as a share of the largest entry.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = drifting_inputs(BATCH_SIZE * world_size).to(device)
    alone = normed_step(normed_model(nn.BatchNorm1d).to(device), samples)
    # A rank's loss is a mean over its own samples, one process's is over all of them.
    # DDP makes up for that in the gradients of weights; nobody does for the inputs.
    alone["input grads"] *= world_size
    found = normed_step(under_ddp(model, device), samples.chunk(world_size)[rank])
    errors = []
    for name, whole in alone.items():
        per_sample = name in ("outputs", "input grads")
        wanted = whole.chunk(world_size)[rank] if per_sample else whole
        errors.append((found[name] - wanted).abs().max() / wanted.abs().max())
    worst = torch.stack(errors)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(alone, worst.tolist(), strict=True))


def refusals_on_a_cpu() -> list[str]:
    """Ask PyTorch's layer to run on the CPU, first by itself, then under DDP."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed_model(nn.BatchNorm1d))
    said: list[str] = []
    for _ in range(2):
        try:
            DistributedDataParallel(model) if said else model(
                drifting_inputs(BATCH_SIZE)
            )
        except ValueError as error:
            said.append(str(error))
    return said


def running_means(device: torch.device) -> list[list[float]]:
    """List all ranks' running mean of a feature, after a step and the next forward."""
    world_size = dist.get_world_size()
    ddp_model = under_ddp(normed_model(nn.BatchNorm1d), device)
    samples = drifting_inputs(BATCH_SIZE * world_size).to(device)
    normed_step(ddp_model, samples.chunk(world_size)[dist.get_rank()])
    history = []
    for _ in range(2):
        mine = next(ddp_model.buffers())[:1].clone()
        everyone = [torch.zeros_like(mine) for _ in range(world_size)]
        dist.all_gather(everyone, mine)
        history.append([value.item() for value in everyone])
        # This changes no statistics, but begins with a broadcast of rank 0's buffers.
        ddp_model.eval()(samples[:1])
    return history


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
    """Compare the layers with one process, then follow the running statistics."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Hold SyncBatchNorm against one rank.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("needs 2 ranks or more; start it with torchrun --nproc-per-node=2")
    local_rank = int(os.environ["LOCAL_RANK"])
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=1))
    norms = (nn.BatchNorm1d, SummedBatchNorm)
    models: dict[str, nn.Module] = {n.__name__: normed_model(n) for n in norms}
    said = refusals_on_a_cpu() if device.type == "cpu" else []
    if device.type != "cpu":
        real = nn.SyncBatchNorm.convert_sync_batchnorm(normed_model(nn.BatchNorm1d))
        models["SyncBatchNorm"] = real
    rows = {layer: off_under_ddp(model, device) for layer, model in models.items()}
    faults = [
        f"{layer} is {error:.0e} from one process in {name}"
        for layer, errors in rows.items()
        for name, error in errors.items()
        if (not error < TOLERANCE) != (layer == "BatchNorm1d")
    ]
    if device.type == "cpu" and len(said) != 2:
        faults.append(f"SyncBatchNorm on a CPU has only said {said}")
    after_step, after_forward = running_means(device)
    if len(set(after_step)) < world_size or set(after_forward) != {after_step[0]}:
        faults.append(f"running means {after_step}, then {after_forward}")
    if dist.get_rank() == 0:
        print(f"device: {device.type} with {backend} ({reason})")
        print(f"largest difference from one process with the batch of all {world_size}")
        print(" " * 18 + " | ".join(f"{name:>12}" for name in rows["BatchNorm1d"]))
        for layer, errors in rows.items():
            cells = " | ".join(f"{error:12.0e}" for error in errors.values())
            print(f"  {layer:15} {cells}")
        if said:
            print("what SyncBatchNorm says on a CPU, by itself and under DDP")
            print(f"  {said[0]}\n  {said[1]}")
        print("running mean of one feature in BatchNorm1d, on each rank")
        print("  after a step          ", *(f"{mean:7.4f}" for mean in after_step))
        print("  after the next forward", *(f"{mean:7.4f}" for mean in after_forward))
    raise_on_all_ranks(faults)
    if dist.get_rank() == 0:
        layers = " and ".join(list(rows)[1:])
        print(f"check: {layers} within {TOLERANCE:.0e} of one process, on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
