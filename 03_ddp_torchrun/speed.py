"""What synchronising gradients costs, beside the same ranks training without it.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 03_ddp_torchrun/speed.py
Expect: tokens per second of all ranks together. Ranks that share the machine and wait
    for nobody show the most that it can do; nothing else may run meanwhile. A `check:`
    that the ways of running DDP give the mean of the ranks' gradients.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import train
from ranks import check, gather, join, leave, number, read_options, say

ALONE, IN_STEP, DEFAULT, TRAIN = WAYS = (
    *("no synchronisation", "a barrier in each step"),
    *("default DDP", "train.py"),
)
LIMIT = 1e-5  # of the largest entry: sums of float32 in another order are 1e-7 apart


def build(way: str, options: Namespace) -> tuple[Any, Callable[[], None]]:
    """Make a model of train.py's, and a function that trains it for one step."""
    torch.manual_seed(0)
    model: Any = train.GPT(train.GPTConfig())
    if way == DEFAULT:
        model = DDP(model)
    elif way == TRAIN:
        model = DDP(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    train_set, _ = train.data.load_sets(options)
    batch_size = options.batch_size * dist.get_world_size()
    loader = train.data.StepLoader(train_set, batch_size, options, torch.device("cpu"))
    epoch_steps = len(train_set) // batch_size
    batches = chain.from_iterable(loader.steps(n, 0, epoch_steps) for n in count())
    tally = train.data.Tally(train_set, loader.sampler)

    def step() -> None:
        micro_batches = next(batches)
        if way == TRAIN:
            loss = train.add_gradients(model, model, micro_batches, batch_size, False)
            tally.add(micro_batches, loss)
        else:
            _, inputs, labels = micro_batches[0]
            model(inputs, labels).backward()
        if way == IN_STEP:
            dist.barrier()  # where DDP would wait for the last gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def tokens_per_second(step: Callable[[], None], steps: int, tokens: int) -> float:
    """Take steps of so many tokens a rank; sum the ranks' rates. All ranks call it."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return sum(gather(steps * tokens / (time.perf_counter() - started)))


def gradient(model: Any, options: Namespace) -> torch.Tensor:
    """Return what a backward pass over this rank's samples leaves, (parameters,)."""
    rank = dist.get_rank()
    inputs, labels = train.data.load_sets(options)[0].batch([2 * rank, 2 * rank + 1])
    model.zero_grad()
    model(inputs, labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    """Let each way take steps in turn, and compare their rates and gradients."""
    options = read_options(
        rounds={"type": number(1, 999), "default": 9, "help": "medians are over these"},
        steps={"type": number(1, 999), "default": 4, "help": "steps in a round"},
        batch_size={"type": number(1, 9999), "default": 32, "help": "samples a rank"},
    )
    defaults = {name: option.get("default") for name, option in train.OPTIONS.items()}
    options = Namespace(**defaults | vars(options))
    join(at_least=2, only_cpu=True)
    built = {way: build(way, options) for way in WAYS}
    mean = gradient(built[ALONE][0], options)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    found = [gradient(built[way][0], options) for way in (DEFAULT, TRAIN)]
    error = (torch.stack(found) - mean).abs().max().item() / mean.abs().max().item()

    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    # In turn, so that a machine that slows down for a while does so for all of them.
    for i in range(options.rounds + 1):
        for way, (_, step) in built.items():
            tokens = options.batch_size * options.block_size
            rate = tokens_per_second(step, options.steps, tokens)
            if i > 0:  # the first round warms up; DDP settles its buckets
                rates[way].append(rate)
    for way, measured in rates.items():
        shares = [a / b for a, b in zip(measured, rates[ALONE], strict=True)]
        share, rate = statistics.median(shares), statistics.median(measured)
        say(f"{way:23}{rate:9,.0f} tokens/s{share:7.2f} of no synchronisation")
    claim = f"2 ways of DDP give the mean of the ranks' gradients, {error:.0e} apart"
    check(error < LIMIT, f"{claim} (limit {LIMIT:.0e})")
    leave()


if __name__ == "__main__":
    main()
