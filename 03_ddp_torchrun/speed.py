"""What exchanging gradients costs, against the same ranks working alone side by side.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 03_ddp_torchrun/speed.py
Needs: an idle core for every rank; anything else that runs spoils the figures.
Expect: tables of tokens per second. "Alone" is the most that these ranks can do: they
    share the machine but wait for nobody. Then a `check:` that every way of running
    DDP gives the mean of the gradients that the ranks find alone.
Before: 03_ddp_torchrun/generate.py
Next: 03_ddp_torchrun/sampler.py, the first of the rules of DDP.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig
from ranks import check, join, leave, number, read_options

LIMIT = "alone, no exchange"
# The ranks wait for each other after every step, but send nothing: what waiting costs.
IN_STEP = "alone, in step"
# From no exchange to what train.py does, by way of DDP when it is told nothing.
WAYS: dict[str, dict[str, Any] | None] = {
    LIMIT: None,
    IN_STEP: None,
    "DDP as it comes": {},
    "+ bucket views": {"gradient_as_bucket_view": True},
    "+ one bucket": {"gradient_as_bucket_view": True, "bucket_cap_mb": 25},
}
TOLERANCE = 1e-5  # of the largest entry: float32 sums in another order differ by 1e-7


def build(way: str) -> tuple[torch.nn.Module, Callable[[torch.Tensor], None]]:
    """Make a model, and the function that trains it for one step on (B, T) bytes."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(GPTConfig())
    ddp_arguments = WAYS[way]
    if ddp_arguments is not None:
        model = DistributedDataParallel(model, **ddp_arguments)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(tokens, tokens.roll(-1, dims=1)).backward()
        if way == IN_STEP:
            dist.barrier()  # where DDP would wait for the last gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

    return model, step


def flat_gradient(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return what a backward pass over (B, T) bytes leaves on this rank, (entries,)."""
    model.zero_grad()
    model(tokens, tokens.roll(-1, dims=1)).backward()
    return torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


def tokens_per_second(
    step: Callable[[torch.Tensor], None], tokens: torch.Tensor, steps: int
) -> float:
    """Run `steps` steps on all ranks at once and add up what each of them got done."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step(tokens)
    rate = steps * tokens.numel() / (time.perf_counter() - started)
    total = torch.tensor(rate)
    dist.all_reduce(total)
    return total.item()


def measure(batch_size: int, threads: int, rounds: int, steps: int) -> float:
    """Print the speed of every way, and return how far off their gradients are."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(
        dist.get_rank()
    )  # each rank its own bytes
    tokens = torch.randint(256, (batch_size, 128), generator=generator)
    ways = {way: build(way) for way in WAYS}
    mean = flat_gradient(ways[LIMIT][0], tokens)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    errors = [
        (flat_gradient(model, tokens) - mean).abs().max() / mean.abs().max()
        for way, (model, _) in ways.items()
        if WAYS[way] is not None
    ]
    for _, step in ways.values():
        tokens_per_second(step, tokens, steps=3)  # warm up; DDP settles its buckets
    rates: dict[str, list[float]] = {name: [] for name in ways}
    # In turn, so that a machine that slows down for a while does so for all of them.
    for _ in range(rounds):
        for name, (_, step) in ways.items():
            rates[name].append(tokens_per_second(step, tokens, steps))
    if dist.get_rank() == 0:
        print(f"{batch_size} samples and {threads} thread(s) a rank", flush=True)
        for name, measured in rates.items():
            shares = [a / b for a, b in zip(measured, rates[LIMIT], strict=True)]
            print(
                f"  {name:20}{statistics.median(measured):9,.0f} tokens/s"
                f"{statistics.median(shares):7.2f} of the limit",
                flush=True,
            )
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def main() -> None:
    """Measure three settings, one after the other."""
    positive = {"type": number(1, 10**6)}
    args = read_options(
        rounds={**positive, "default": 7, "help": "medians are over these"},
        steps={**positive, "default": 4, "help": "steps in a round"},
    )
    join(only_cpu=True)
    threads = torch.get_num_threads()
    settings = [(8, threads), (32, threads), (32, 2 * threads)]
    worst = max(measure(*each, args.rounds, args.steps) for each in settings)
    count = sum(way is not None for way in WAYS.values()) * len(settings)
    check(
        worst < TOLERANCE,
        f"{count} DDP gradients are the mean of the ranks' own, "
        f"{worst:.0e} apart (limit {TOLERANCE:.0e})",
    )
    leave()


if __name__ == "__main__":
    main()
