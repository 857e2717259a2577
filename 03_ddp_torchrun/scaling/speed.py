"""What synchronising gradients costs, beside the same ranks training without it.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 03_ddp_torchrun/scaling/speed.py
Expect: tokens per second of all ranks together, and the speed beside ranks that wait
    for nobody, by the clock and by the CPU time that a step takes. A `check:` that the
    ways of running DDP give the mean of the ranks' gradients.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import train
from ranks import check, gather, join, leave, number, read_options, say

WAYS = "no synchronisation", "a barrier in each step", "default DDP", "train.py"
ALONE, IN_STEP, DEFAULT, TRAIN = WAYS
WARM_UP = 4  # steps; DDP rebuilds its buckets
LIMIT = 1e-5  # of the largest entry: sums of float32 in another order are 1e-7 apart


def build(way: str, batch: list[Any]) -> tuple[Any, Callable[[], None]]:
    """Make a model of train.py's, and a function that trains it for one step."""
    torch.manual_seed(0)
    model: Any = train.GPT(train.GPTConfig())
    if way == DEFAULT:
        model = DDP(model)
    elif way == TRAIN:
        model = DDP(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    global_batch_size = dist.get_world_size() * len(batch[0])

    def step() -> None:
        if way == TRAIN:
            train.add_gradients(model, model, [batch], global_batch_size, False)
        else:
            _, inputs, labels = batch
            model(inputs, labels).backward()
        if way == IN_STEP:
            dist.barrier()  # where DDP would wait for the last gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Take one step with all ranks; return this rank's seconds and CPU seconds."""
    dist.barrier()
    started, used = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - started, time.process_time() - used


def gradient(model: Any, batch: list[Any]) -> torch.Tensor:
    """Return what a backward pass over this rank's batch leaves, (parameters,)."""
    _, inputs, labels = batch
    model(inputs, labels).backward()
    grads = [p.grad.flatten() for p in model.parameters()]
    model.zero_grad()
    return torch.cat(grads)


def main() -> None:
    """Let all ways take a step in turn; compare their times and gradients."""
    options = read_options(
        steps={"type": number(1, 9999), "default": 40, "help": "of each way"},
        batch_size={"type": number(1, 512), "default": 32, "help": "samples a rank"},
    )
    defaults = {name: option.get("default") for name, option in train.OPTIONS.items()}
    settings = Namespace(**defaults | vars(options))
    join(at_least=2, only_cpu=True)
    first = dist.get_rank() * options.batch_size
    indices = list(range(first, first + options.batch_size))
    batch = [indices, *train.data.load_sets(settings)[0].batch(indices)]
    built = {way: build(way, batch) for way in WAYS}
    mean = gradient(built[ALONE][0], batch)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    ddp = torch.stack([gradient(built[way][0], batch) for way in (DEFAULT, TRAIN)])
    error = (ddp - mean).abs().max().item() / mean.abs().max().item()

    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    # Step by step in turn: a machine that slows down does so for all of them.
    for _ in range(WARM_UP + options.steps):
        for way, (_, step) in built.items():
            times[way].append(timed(step))
    # (ranks, ways, steps, wall and CPU seconds)
    found = torch.tensor([list(one.values()) for one in gather(times)])[:, :, WARM_UP:]
    # Ranks that wait for each other are as slow as the slowest.
    wall = torch.cat([found[:, :1, :, 0].mean(0), found[:, 1:, :, 0].amax(0)])
    cpu = found[..., 1].mean(0)
    tokens = len(found) * batch[1].numel()
    say(f"{'':25}tokens/s  speed  by CPU time")
    for i, way in enumerate(WAYS):
        speeds = [(seconds[0] / seconds[i]).median() for seconds in (wall, cpu)]
        rate = f"{tokens / wall[i].median():8,.0f}"
        say(f"{way:25}{rate}{speeds[0]:7.2f}{speeds[1]:13.2f}")
    claim = f"2 ways of DDP give the mean of the ranks' gradients, {error:.0e} apart"
    check(error < LIMIT, f"{claim} (limit {LIMIT:.0e})")
    leave()


if __name__ == "__main__":
    main()
