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
import signal
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig
from options import OneLineParser, fail, positive_float, positive_int
from train import choose_device

MESSAGES = (250_000, 500_000, 1_000_000, 2_000_000)  # bytes, for the fit
FAR = (8, 64, 1024)  # ranks, for which there is a prediction alone
TOKENS = 128e3  # in a sample, times the milliseconds in a second


class Team:
    """The first ranks of the world, with a model under DDP; the others look on."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        """Form a group; every rank of the world must call this."""
        self.ranks, self.device = ranks, device
        group = dist.new_group(list(range(ranks)))
        self.group = group if isinstance(group, dist.ProcessGroup) else None
        self.is_in = dist.get_rank() < ranks
        torch.manual_seed(0)
        self.model = GPT(GPTConfig()).to(device)
        if self.is_in:
            self.ddp_model = DistributedDataParallel(
                self.model,
                device_ids=None if device.type == "cpu" else [device],
                process_group=self.group,
                bucket_cap_mb=25,
                gradient_as_bucket_view=True,
            )

    def step(self, samples: int, exchange: bool) -> None:
        """Find a gradient of `samples` windows a rank; exchange it or keep it."""
        tokens = torch.full((samples, 128), 7, device=self.device)
        if exchange:
            self.ddp_model(tokens, tokens).backward()
        else:
            with self.ddp_model.no_sync():
                self.ddp_model(tokens, tokens).backward()
            dist.barrier(self.group)  # one waits for the other, as an exchange does
        self.ddp_model.zero_grad()

    def all_reduce(self, count: int) -> None:
        """Add up that many bytes of float32."""
        dist.all_reduce(torch.ones(count // 4, device=self.device), group=self.group)

    def ms(self, work: Any, *args: Any, times: int) -> float:
        """Return the milliseconds of one call; every rank of the world calls this."""
        dist.barrier()
        started = time.perf_counter()
        if self.is_in:
            for _ in range(times):
                work(*args)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        taken = torch.tensor(1e3 * (time.perf_counter() - started) / times)
        taken = taken.to(self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item()


def fit_link(times: dict[int, float]) -> tuple[float, float]:
    """Fit latency and bandwidth to all-reduces of two ranks.

    A ring over n ranks takes 2 (n - 1) messages, one after the other, of 1 / n of the
    bytes each (Thakur, Rabenseifner and Gropp, 2005, section 4.4). For two ranks that
    is t = 2 latency + bytes / bandwidth.

    Args:
        times: milliseconds by bytes.

    Returns:
        Milliseconds for a message, and bytes in a millisecond.
    """
    slope, start = np.polyfit(list(times), list(times.values()), 1)
    return max(0.0, float(start)) / 2, 1 / max(float(slope), 1e-12)


def exchange_ms(ranks: int, count: int, latency: float, bandwidth: float) -> float:
    """Return what a ring all-reduce of `count` bytes takes, in milliseconds."""
    return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * count / bandwidth


def measure_teams(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time all teams in turn, and the messages for the fit."""
    world_size = dist.get_world_size()
    sizes = [n for n in (1, 2, 3, 4, 8) if n <= world_size]
    teams = {n: Team(n, device) for n in sizes}
    kinds = {"weak": lambda _: args.samples, "strong": lambda n: args.total // n}
    keys = [(kind, n) for kind in kinds for n in sizes]
    alone: dict[Any, list[float]] = {key: [] for key in keys}
    steps: dict[Any, list[float]] = {key: [] for key in keys}
    messages: dict[int, list[float]] = {count: [] for count in MESSAGES}
    for number in range(args.rounds + 1):
        for kind, n in keys:
            team, samples = teams[n], kinds[kind](n)
            one = team.ms(team.step, samples, False, times=args.steps)
            other = team.ms(team.step, samples, True, times=args.steps)
            if number:  # the first round is for warming up
                alone[kind, n].append(one)
                steps[kind, n].append(other)
        for count in MESSAGES:
            taken = teams[2].ms(teams[2].all_reduce, count, times=args.steps)
            if number:
                messages[count].append(taken)
    medians = {count: statistics.median(ms) for count, ms in messages.items()}
    count = sum(p.numel() * p.element_size() for p in teams[1].model.parameters())
    latency, bandwidth = fit_link(medians)
    rows = []
    for kind, n in keys:
        samples, ms = kinds[kind](n), statistics.median(steps[kind, n])
        computing = statistics.median(alone[kind, n])
        expected = exchange_ms(n, count, latency, bandwidth)
        rows.append(
            {"kind": kind, "ranks": n, "samples": samples, "ms": ms}
            | {"alone_ms": computing, "predicted_ms": computing + expected}
        )
    return {
        "where": args.where,
        "latency_ms": latency,
        "bytes_per_ms": bandwidth,
        "gradient_bytes": count,
        "messages": medians,
        "rows": rows,
    }


def lines_of_teams(found: dict[str, Any]) -> list[str]:
    """Return the lines of measured teams, then those of teams that nobody has run."""
    lines = [
        f"link: {found['latency_ms']:.2f} ms a message, "
        f"{8 * found['bytes_per_ms'] / 1e3:,.0f} Mbit/s, from all-reduces of 2 ranks",
        "       ranks samples  tokens/s efficient exchange  step ms predicted",
    ]
    first = {row["kind"]: row for row in found["rows"] if row["ranks"] == 1}
    for row in found["rows"]:
        kind, n, samples, ms = (row[k] for k in ("kind", "ranks", "samples", "ms"))
        one, rate = first[kind], n * samples * TOKENS / ms
        efficiency = rate / n / (one["samples"] * TOKENS / one["ms"])
        share = max(0.0, 1 - row["alone_ms"] / ms)
        lines.append(
            f"{kind:6} {n:5} {samples:7} {rate:9,.0f} {efficiency:9.0%} {share:8.0%} "
            f"{ms:8.1f} {row['predicted_ms']:9.1f}"
        )
    one = first["weak"]
    for n in FAR:
        ms = one["ms"] + exchange_ms(
            n, found["gradient_bytes"], found["latency_ms"], found["bytes_per_ms"]
        )
        share, rate = 1 - one["ms"] / ms, n * one["samples"] * TOKENS / ms
        lines.append(
            f"{'far':6} {n:5} {one['samples']:7} {rate:9,.0f} {1 - share:9.0%} "
            f"{share:8.0%} {'not run':>8} {ms:9.1f}"
        )
    return lines


def judge_predictions(found: dict[str, Any], limit: float | None) -> str:
    """Hold the predictions against the teams that the fit has not seen.

    Raises:
        RuntimeError: one is further off than `limit`.
    """
    unseen = [row for row in found["rows"] if row["ranks"] > 2]
    off = [row["predicted_ms"] / row["ms"] - 1 for row in unseen]
    if not off:
        return "no team of more than 2 ranks to hold the prediction against"
    worst = max(off, key=abs)
    result = f"{len(off)} steps of 3 ranks or more, predicted from 2, {worst:+.0%} off"
    if limit is None:
        return f"{result} at worst"
    if abs(worst) > limit:
        raise RuntimeError(f"{result} (limit {limit:.0%})")
    return f"{result} at worst (limit {limit:.0%})"


def main() -> None:
    """Measure, fit, predict, print."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = OneLineParser(description="Measure how training scales.")
    add = parser.add_argument
    add("--samples", type=positive_int, default=16, help="of each rank, weak scaling")
    add("--total", type=positive_int, default=48, help="of all ranks, strong scaling")
    add("--rounds", type=positive_int, default=3, help="medians are over these")
    add("--steps", type=positive_int, default=3, help="steps in a round")
    add("--limit", type=positive_float, help="how far off a prediction may be: 0.25")
    add("--where", default="this machine", help="name of this run, for the picture")
    add("--json", type=Path, help="file to add the numbers to")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        fail("type: torchrun --nproc-per-node=4 03_ddp_torchrun/scaling.py")
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size < 2:
        fail("the link is measured between two ranks; use --nproc-per-node=2 or more")
    if args.total < world_size:
        fail(f"--total={args.total} leaves a rank without a sample: {world_size} ranks")
    if args.json and not args.json.resolve().parent.is_dir():
        fail(f"--json {args.json}: there is no folder {args.json.parent}")
    local_rank, local = (
        int(os.environ["LOCAL_RANK"]),
        int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    device, reason = choose_device(local_rank, local)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    found = measure_teams(args, device)
    result = judge_predictions(found, args.limit)
    if dist.get_rank() == 0:
        print(f"device: {device.type} with {backend} ({reason})")
        print("\n".join(lines_of_teams(found)))
        if args.json:
            known = json.loads(args.json.read_text()) if args.json.exists() else {}
            known[args.where] = found
            args.json.write_text(json.dumps(known, indent=1) + "\n")
        print(f"check: {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
