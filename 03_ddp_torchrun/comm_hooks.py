"""Communication hooks: send less of the gradients, and see what that does to the loss.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/comm_hooks.py
Needs: this folder. Bytes are counted with gloo on Linux only.
Expect: the same training four times, with kilobytes and loss. A `check:` of both.
Before: 03_ddp_torchrun/rank_zero.py
Next: 03_ddp_torchrun/train.py
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from all_ranks import apart, count_models, flat_copy, raise_on_all_ranks
from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import join, leave, number, read_options, say
from sent_bytes import sent_by_a_rank

compress_by_power_sgd = powerSGD_hook.powerSGD_hook
BLOCK_SIZE, BATCH_SIZE = 64, 16
POWER_SGD_RANK = 4  # columns kept of a matrix: nothing to do with the rank of a process
START_POWER_SGD = 10  # steps with the whole gradients first
Gradients = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, dist.GradBucket], Gradients] | None


def mean_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Gradients:
    """Average a bucket over all ranks with half of the bytes, on any backend."""
    # DDP calls this as soon as a bucket is full, and copies the result into it later.
    halves = bucket.buffer().to(torch.bfloat16) / group.size()
    work = dist.all_reduce(halves, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0].to(torch.float32))


def try_bf16_compress_hook(device: torch.device) -> str:
    """Register PyTorch's own bf16 hook; return why DDP refuses it, or nothing."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    try:
        ddp_model.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
    except TypeError as error:
        return str(error)
    return ""


# With each, how far the gradient may be off, as a share of its largest entry: sums of
# float32 in another order differ by 1e-7; fp16 keeps 11 bits and bf16 keeps 8.
HOOKS: dict[str, tuple[Hook, float]] = {
    "no hook": (None, 1e-5),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, 2**-10),
    "mean_in_bf16": (mean_in_bf16, 2**-7),
    "powerSGD_hook": (compress_by_power_sgd, 1.0),
}


def bytes_in_messages(hook: Hook, model: torch.nn.Module) -> int:
    """Work out how many bytes a hook has to all-reduce in one step.

    PowerSGD sends n x r and r x m in place of n x m, if that is less than half of it
    (Vogels et al., 2019, algorithm 1).
    """
    values, r = 0, POWER_SGD_RANK
    for parameter in model.parameters():
        n, m = parameter.shape[0], parameter.numel() // parameter.shape[0]
        is_cut = hook is compress_by_power_sgd and (n + m) * min(n, m, r) * 2 < n * m
        values += (n + m) * min(n, m, r) if is_cut else n * m
    halved = (default_hooks.fp16_compress_hook, mean_in_bf16)
    return values * (2 if hook in halved else 4)


def train_with(
    hook: Hook, text: torch.Tensor, steps: int, device: torch.device
) -> tuple[DistributedDataParallel, float | None, float]:
    """Train the GPT; return it, the bytes a rank sent in the last step, and seconds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(
        GPT(GPTConfig(BLOCK_SIZE, width=64)).to(device),
        bucket_cap_mb=25,
    )
    state: Any = dist.group.WORLD  # what DDP hands to the hook first
    if hook is compress_by_power_sgd:
        state = powerSGD_hook.PowerSGDState(state, POWER_SGD_RANK, START_POWER_SGD)
    if hook is not None:
        ddp_model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=3e-3)
    dataset = WindowDataset(text, BLOCK_SIZE, (steps + 1) * BATCH_SIZE * world_size)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))

    def take_step(step: int) -> None:
        start = (step * world_size + rank) * BATCH_SIZE % (len(dataset) - BATCH_SIZE)
        inputs, labels = dataset.batch(order[start : start + BATCH_SIZE].tolist())
        optimizer.zero_grad()
        ddp_model(inputs.to(device), labels.to(device)).backward()
        optimizer.step()

    dist.barrier()
    started = time.perf_counter()
    for step in range(steps - 1):
        take_step(step)
    dist.barrier()
    seconds = time.perf_counter() - started
    sent = sent_by_a_rank(partial(take_step, steps - 1))
    return ddp_model, sent, seconds


def gradients_that_arrive(hook: Hook, device: torch.device) -> list[float]:
    """Send three gradients through a hook: a large, a small, and one near 1."""
    values = torch.tensor([[1e5, 1e-8, 1.001]], device=device)
    layer = torch.nn.Linear(3, 1, bias=False).to(device)
    ddp_model = DistributedDataParallel(
        layer, device_ids=None if device.type == "cpu" else [device.index]
    )
    if hook is not None:
        ddp_model.register_comm_hook(dist.group.WORLD, hook)
    ddp_model(values).sum().backward()  # the gradient of w * x is x, on every rank
    return flat_copy(p.grad for p in ddp_model.parameters()).tolist()


def gradient_off_by(
    ddp_model: DistributedDataParallel, text: torch.Tensor, device: torch.device
) -> float:
    """Compare a gradient that the hook has sent with one process's, in full."""
    first, samples = 4 * dist.get_rank(), 4 * dist.get_world_size()
    dataset = WindowDataset(text, BLOCK_SIZE, samples)
    inputs, labels = (one.to(device) for one in dataset.batch(range(samples)))
    loss = ddp_model.module(inputs, labels)
    alone = flat_copy(torch.autograd.grad(loss, list(ddp_model.module.parameters())))
    ddp_model.zero_grad()
    ddp_model(inputs[first : first + 4], labels[first : first + 4]).backward()
    return apart(flat_copy(p.grad for p in ddp_model.parameters()), alone)


def show_training(device: torch.device, steps: int) -> None:
    """Train with each hook, print what came of it, check it on all ranks."""
    world_size, faults = dist.get_world_size(), []
    text, held_out = load_text(None, BLOCK_SIZE)
    unseen = WindowDataset(held_out, BLOCK_SIZE, samples=64).batch(range(64))
    say(
        f"{steps} steps each   kB sent   time  gradient off by    loss  against no hook"
    )
    first: tuple[float, ...] = ()
    for name, (hook, limit) in HOOKS.items():
        ddp_model, sent, seconds = train_with(hook, text, steps, device)
        with torch.no_grad():
            loss = ddp_model.module(*(one.to(device) for one in unseen)).item()
        models = count_models(ddp_model.module)
        error = gradient_off_by(ddp_model, text, device)
        first = first or (loss, seconds)
        shown = "-" if sent is None else f"{sent / 1e3:.1f}"
        say(
            f"{name:18}{shown:>7}{seconds / first[1]:7.2f}{error:17.0e}"
            f"{loss:8.3f}{loss - first[0]:+17.3f}"
        )
        # An all-reduce sends each number on 2 (n - 1) times, in n-th parts. To each of
        # the messages, 3 in PowerSGD, gloo adds some 600 bytes for each other rank.
        expected = bytes_in_messages(hook, ddp_model.module) * 2 / world_size
        added = 1000 * (3 if hook is compress_by_power_sgd else 1)
        if sent is not None and not 0 <= sent / (world_size - 1) - expected < added:
            faults.append(
                f"{name}: {sent:,.0f} bytes, not {world_size - 1} x {expected}"
            )
        if models != 1 or not error < limit:
            faults.append(f"{name}: {models} models, gradient off by {error:.0e}")
        if not abs(loss - first[0]) < (0.5 if name == "powerSGD_hook" else 0.05):
            faults.append(f"{name}: the loss is {loss:.3f}, without it {first[0]:.3f}")
    raise_on_all_ranks(faults)


def show_precision(device: torch.device) -> None:
    """Print and check what becomes of a large, a small and an ordinary gradient."""
    faults = []
    say(f"gradients of {'1e5':>17}{'1e-8':>9}{'1.001':>9}")
    for name in ("no hook", "fp16_compress_hook", "mean_in_bf16"):
        large, small, near = gradients_that_arrive(HOOKS[name][0], device)
        say(f"{name:20} {large:>9.3g}{small:>9.1g}{near:>9.4f}")
        lost = [large == float("inf"), small == 0]
        if lost != [name == "fp16_compress_hook"] * 2:
            faults.append(f"{name}: {large} and {small} arrived")
    raise_on_all_ranks(faults)


def main() -> None:
    """Join the group, train with each hook, check it."""
    steps = {"type": number(START_POWER_SGD + 1, 500), "default": 40}
    args = read_options(steps={**steps, "help": "of each training"})
    device = join(at_least=2)
    refused = try_bf16_compress_hook(device)
    say(f"bf16_compress_hook\n  {refused or 'is accepted'}")
    show_training(device, args.steps)
    show_precision(device)
    claim = f"{len(HOOKS)} trainings on {dist.get_world_size()} ranks"
    say(f"check: {claim}, with bytes and gradients")
    leave()


if __name__ == "__main__":
    main()
