"""What a link costs in each step: its bytes over its rate, and three ways to pay less.

Run: python 03_ddp_torchrun/lab.py -- 03_ddp_torchrun/slow_link.py
Needs: the laboratory (lab.py); idle cores if the times are to mean anything.
Expect: for each rate the bytes that cross the link and the time that a batch takes,
    held against bytes / rate; then a `check:` of bytes, times and gradients.
Before: 03_ddp_torchrun/lab.py
Next: 03_ddp_torchrun/draw_slow_link.py, which draws these numbers.
"""

import json
import os
import statistics
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from link_rows import WAYS, Row, check_rows
from model import GPT, GPTConfig
from network import check_rate, own_bytes_sent, set_own_rate
from ranks import fail, join, leave, number, read_options, say


def as_bfloat16(
    _: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket's gradients at half their length; a DDP communication hook.

    PyTorch's own `bf16_compress_hook` does the same, but DDP refuses it in the CPU
    build. Rounding comes before the sum, so a little of each rank's is lost.
    """
    buffer = bucket.buffer()
    half = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


class Trainer:
    """The GPT under DDP in one bucket, with or without rounding on the way."""

    def __init__(self, samples: int, bytes_each: int) -> None:
        """Build the model; draw `samples` windows of bytes that only this rank has."""
        torch.manual_seed(0)
        self.model = GPT(GPTConfig())
        self.ddp_model = DistributedDataParallel(
            self.model, bucket_cap_mb=25, gradient_as_bucket_view=True
        )
        if bytes_each == 2:
            self.ddp_model.register_comm_hook(None, as_bfloat16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(256, (samples, 128), generator=generator)

    def backward(self) -> None:
        """Add one batch's gradients to those that are there."""
        self.ddp_model(self.tokens, self.tokens.roll(-1, dims=1)).backward()

    def step(self, batches: int, exchange: bool) -> None:
        """Train on some batches; exchange gradients in the last one, or never."""
        with self.ddp_model.no_sync():
            for _ in range(batches - exchange):
                self.backward()
        if exchange:
            self.backward()
        else:
            dist.barrier()  # one waits for the other, as an exchange does
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_error(self) -> float:
        """Compare the exchanged gradient with the mean of what the ranks find alone."""
        parameters = list(self.model.parameters())
        loss = self.model(self.tokens, self.tokens.roll(-1, dims=1))
        parts = torch.autograd.grad(loss, parameters)
        mean = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        self.backward()
        got = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        self.optimizer.zero_grad()
        return ((got - mean).abs().max() / mean.abs().max()).item()


def timed(trainer: Trainer, batches: int, exchange: bool, steps: int) -> float:
    """Return the milliseconds that one batch takes, as the slowest rank finds it."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step(batches, exchange)
    dist.barrier()
    ms = torch.tensor(1e3 * (time.perf_counter() - started) / steps / batches)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return ms.item()


def measure_rate(
    rate: str, trainers: dict[int, Trainer], rounds: int, steps: int
) -> list[Row]:
    """Measure every way at one rate, in turn; medians over the rounds."""
    if int(os.environ["LOCAL_RANK"]) == 0:
        set_own_rate(rate)  # once on each host, for what that host sends
    ranks, hosts = dist.get_world_size(), int(os.environ["GROUP_WORLD_SIZE"])
    times: dict[str, list[float]] = {"compute": [], **{way: [] for way in WAYS}}
    sent: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        times["compute"].append(timed(trainers[4], 1, False, steps))
        for way, (batches, bytes_each) in WAYS.items():
            before = own_bytes_sent()
            times[way].append(timed(trainers[bytes_each], batches, True, steps))
            sent[way].append((own_bytes_sent() - before) / steps)
    rows = []
    for way, (_, bytes_each) in WAYS.items():
        numbers = sum(p.numel() for p in trainers[4].model.parameters())
        # A ring: each rank sends that much to its neighbour, which sits elsewhere.
        expected = 2 * (ranks - 1) / ranks * numbers * bytes_each if hosts > 1 else 0.0
        compute = statistics.median(times["compute"])
        row = Row(rate, way, statistics.median(sent[way]), expected, compute)
        row.measured_ms = statistics.median(times[way])
        rows.append(row)
    return rows


def parse_args() -> Namespace:
    """Read the command line."""
    count = {"type": number(1, 10**6)}
    rates = "unlimited,1gbit,300mbit,100mbit"
    args = read_options(
        rates={"default": rates, "help": "one after the other"},
        samples={**count, "default": 8, "help": "in a batch of one rank"},
        rounds={**count, "default": 5, "help": "medians are over these"},
        steps={**count, "default": 3, "help": "steps in a round"},
        json={"type": Path, "help": "file for the numbers"},
    )
    if "RANK" not in os.environ or "LAB_HOST" not in os.environ:
        fail(
            "start it in the laboratory: python 03_ddp_torchrun/lab.py -- "
            "03_ddp_torchrun/slow_link.py"
        )
    try:
        args.rates = [
            r if r == "unlimited" else check_rate(r) for r in args.rates.split(",")
        ]
    except ValueError as error:
        fail(f"--rates: {error}")
    return args


def main() -> None:
    """Measure at each rate, print a table, check it."""
    args = parse_args()
    join(only_cpu=True)
    trainers = {each: Trainer(args.samples, each) for each in (4, 2)}
    errors = {each: trainer.gradient_error() for each, trainer in trainers.items()}
    for each in trainers:
        timed(trainers[each], 1, True, steps=3)  # DDP settles its buckets
    if dist.get_rank() == 0:
        hosts = os.environ["GROUP_WORLD_SIZE"]
        print(f"{dist.get_world_size()} ranks on {hosts} host(s), times of one batch")
        heads = f"{'rate':9} {'way':10} {'MB a step':>10} {'compute':>8}"
        print(f"{heads} {'predicted':>10} {'measured':>9}", flush=True)
    rows = []
    for rate in args.rates:
        for row in measure_rate(rate, trainers, args.rounds, args.steps):
            rows.append(row)
            if dist.get_rank() == 0:
                print(
                    f"{row.rate:9} {row.way:10} {row.counted / 1e6:10.3f} "
                    f"{row.compute_ms:5.0f} ms {row.predicted_ms:7.0f} ms "
                    f"{row.measured_ms:6.0f} ms",
                    flush=True,
                )
    result = check_rows(rows, errors)
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    say(f"check: {result}")
    leave()


if __name__ == "__main__":
    main()
