"""What more ranks bring, and what a model of the step says about far more of them.

Run: torchrun --nproc-per-node=4 03_ddp_torchrun/scaling.py
Needs: this folder and requirements.txt. In the laboratory (lab.py) each rank has a link
    of its own; idle cores if the times are to mean anything.
Expect: tokens per second and efficiency of 1, 2, ... ranks, first with as many samples
    for each rank (weak scaling), then with as many for all (strong); each step beside
    what two ranks let one predict; 8, 64 and 1024 ranks, not run; a `check:`.
Before: 03_ddp_torchrun/listening.py
Next: 03_ddp_torchrun/draw_scaling.py, which draws these numbers.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig
from ranks import fail, join, leave, number, read_options, say
from scaling_rows import judge_predictions, lines_of_teams
from step_model import fit_link, step_ms

MESSAGES = (250_000, 500_000, 1_000_000, 2_000_000)  # bytes, for the fit
# What DDP puts into one bucket, in MiB: all of the gradient, or a part that can leave
# while backward goes on.
CAPS = {"weak": 25, "strong": 25, "overlap": 0.4}


class Exchange:
    """What the hook below has to know, and what it notes."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Start with exchanges that take place."""
        self.group, self.takes_place = group, True
        self.started = 0.0
        self.buckets: list[tuple[float, int]] = []


def hand_over(
    exchange: Exchange, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket's gradients off, or note when it was ready and keep them."""
    gradients = bucket.buffer()
    if exchange.takes_place:
        work = dist.all_reduce(gradients, group=exchange.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])
    ready = clock_ms(gradients.device) - exchange.started
    exchange.buckets.append((ready, gradients.nbytes))
    kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    kept.set_result(gradients)
    return kept


def clock_ms(device: torch.device) -> float:
    """Return the milliseconds on the clock, once the device has caught up."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


class Team:
    """The first ranks of the world, with a model under DDP; the others look on."""

    def __init__(self, ranks: int, bucket_cap_mb: float, device: torch.device) -> None:
        """Form a group; every rank of the world must call this."""
        self.device = device
        group = dist.new_group(list(range(ranks)))
        self.group = group if isinstance(group, dist.ProcessGroup) else None
        self.is_in = dist.get_rank() < ranks
        self.exchange = Exchange(self.group)
        torch.manual_seed(0)
        self.model = GPT(GPTConfig()).to(device)
        if self.is_in:
            self.ddp_model = DistributedDataParallel(
                self.model,
                device_ids=None if device.type == "cpu" else [device],
                process_group=self.group,
                bucket_cap_mb=bucket_cap_mb,  # type: ignore[arg-type]
                gradient_as_bucket_view=True,
            )
            self.ddp_model.register_comm_hook(self.exchange, hand_over)

    def step(self, samples: int, exchanges: bool) -> None:
        """Find a gradient of `samples` windows a rank; exchange it or keep it."""
        self.exchange.takes_place, self.exchange.buckets = exchanges, []
        tokens = torch.full((samples, 128), 7, device=self.device)
        self.exchange.started = clock_ms(self.device)
        self.ddp_model(tokens, tokens).backward()
        if not exchanges:
            dist.barrier(self.group)  # one waits for the other, as an exchange does
        self.ddp_model.zero_grad()

    def all_reduce(self, count: int) -> None:
        """Add up that many bytes of float32."""
        dist.all_reduce(torch.ones(count // 4, device=self.device), group=self.group)

    def ms(self, work: Any, *args: Any, times: int) -> float:
        """Return the milliseconds of one call; every rank of the world calls this."""
        dist.barrier()
        started = clock_ms(self.device)
        if self.is_in:
            for _ in range(times):
                work(*args)
        taken = torch.tensor((clock_ms(self.device) - started) / times)
        taken = taken.to(self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item()


def measure_teams(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time all teams in turn, and the messages for the fit."""
    world_size = dist.get_world_size()
    sizes = [n for n in (1, 2, 3, 4, 8) if n <= world_size]
    teams = {(n, cap): Team(n, cap, device) for n in sizes for cap in CAPS.values()}
    keys = [(kind, n) for kind in CAPS for n in sizes]
    kept: dict[Any, list[list[tuple[float, int]]]] = {key: [] for key in keys}
    alone: dict[Any, list[float]] = {key: [] for key in keys}
    steps: dict[Any, list[float]] = {key: [] for key in keys}
    messages: dict[int, list[float]] = {count: [] for count in MESSAGES}
    for turn in range(args.rounds + 1):
        for kind, n in keys:
            team = teams[n, CAPS[kind]]
            samples = args.total // n if kind == "strong" else args.samples
            # The memory of these sizes has to be found before time is taken.
            team.ms(team.step, samples, False, times=1)
            one = team.ms(team.step, samples, False, times=args.steps)
            buckets = team.exchange.buckets
            other = team.ms(team.step, samples, True, times=args.steps)
            if turn:  # the first round is for warming up
                alone[kind, n].append(one)
                steps[kind, n].append(other)
                kept[kind, n].append(buckets)
        for count in MESSAGES:
            pair = teams[2, CAPS["weak"]]
            taken = pair.ms(pair.all_reduce, count, times=args.steps)
            if turn:
                messages[count].append(taken)
    # All ranks are to judge the same numbers: those of rank 0, which is in every team.
    shared = [kept]
    dist.broadcast_object_list(shared)
    medians = {count: statistics.median(ms) for count, ms in messages.items()}
    latency, bandwidth = fit_link(medians)
    rows = []
    for kind, n in keys:
        computing = statistics.median(alone[kind, n])
        rounds = zip(*shared[0][kind, n], strict=True)
        buckets = [(statistics.median(t for t, _ in b), b[0][1]) for b in rounds]
        row = {"kind": kind, "ranks": n, "buckets": buckets, "alone_ms": computing}
        row["samples"] = args.total // n if kind == "strong" else args.samples
        row["ms"] = statistics.median(steps[kind, n])
        row["predicted_ms"] = step_ms(computing, buckets, n, latency, bandwidth)
        rows.append(row)
    link = {"latency_ms": latency, "bytes_per_ms": bandwidth}
    return {"where": args.where, "messages": medians, "rows": rows} | link


def main() -> None:
    """Measure, fit, predict, print."""
    count = {"type": number(1, 10**6)}
    args = read_options(
        samples={**count, "default": 16, "help": "of each rank, weak scaling"},
        total={**count, "default": 48, "help": "of all ranks, strong scaling"},
        rounds={**count, "default": 3, "help": "medians are over these"},
        steps={**count, "default": 3, "help": "steps in a round"},
        limit={"type": number(1e-9, 1e9), "help": "of a prediction's error: 0.25"},
        where={"default": "this machine", "help": "name of this run, for the picture"},
        json={"type": Path, "help": "file to add the numbers to"},
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.total < world_size:
        fail(f"--total={args.total} leaves a rank without a sample: {world_size} ranks")
    if args.json and not args.json.resolve().parent.is_dir():
        fail(f"--json {args.json}: there is no folder {args.json.parent}")
    device = join(at_least=2)  # the link is measured between two ranks
    found = measure_teams(args, device)
    result = judge_predictions(found, args.limit)
    say("\n".join(lines_of_teams(found)))
    if dist.get_rank() == 0 and args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        known[args.where] = found
        args.json.write_text(json.dumps(known, indent=1) + "\n")
    say(f"check: {result}")
    leave()


if __name__ == "__main__":
    main()
