"""How fast the ranks talk: the bandwidth of each collective, by the message's size.

Run: OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 01_communication/bandwidth.py
Needs: requirements.txt. Uses the CPU and gloo, with 2 ranks or more, and an idle core
    for each of them; anything else that runs spoils the figures.
Expect: a row for each size, then the line through each column, latency + size /
    bandwidth, and a `check:` that what was timed also gave the right values.
Before: 01_communication/ring_all_reduce.py, where the factors 2 (n-1)/n come from.
Next: 01_communication/goes_wrong.py, which shows what else can happen.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist


class Collective(NamedTuple):
    """A call that can be timed again and again.

    `prepare` refills the tensors, `call` is what is timed, `result` and `expected` are
    compared after the last call.
    """

    factor: float
    prepare: Callable[[], object]
    call: Callable[[], object]
    result: torch.Tensor
    expected: torch.Tensor


class Line(NamedTuple):
    """The time of a call is `latency` seconds + bytes / `bandwidth`."""

    latency: float
    bandwidth: float
    worst: float  # largest relative distance of a measured time from the line


def collectives(numel: int) -> dict[str, Collective]:
    """Make all of them for messages of `numel` float32, a multiple of the world size.

    The message is the whole tensor: what all ranks together end with in an all-gather,
    what each rank starts with in a reduce-scatter. The factors turn algorithm bandwidth
    (bytes / time) into bus bandwidth, which no longer depends on the number of ranks;
    both as defined for the NCCL tests:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    share = (world_size - 1) / world_size
    # Small whole numbers: their sums are exact, and each place has one of its own.
    pattern = torch.arange(numel).remainder(997).float()
    mine = pattern + rank
    total = pattern * world_size + sum(range(world_size))
    parts = slice(rank * numel // world_size, (rank + 1) * numel // world_size)
    summed, gathered, copied, swapped, passed = mine.new_zeros(5, numel)
    part_of_sum = mine.new_zeros(numel // world_size)
    by_source = pattern.view(world_size, -1)[rank] + torch.arange(world_size)[:, None]

    def send_receive() -> None:
        """Send to the right and receive from the left, both at once."""
        works = [dist.isend(mine, right), dist.irecv(passed, left)]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    return {
        "all_reduce": Collective(
            2 * share,
            lambda: summed.copy_(mine),
            lambda: dist.all_reduce(summed),
            summed,
            total,
        ),
        "all_gather": Collective(
            share,
            gathered.zero_,
            lambda: dist.all_gather_single(gathered, pattern[parts]),
            gathered,
            pattern,
        ),
        "reduce_scatter": Collective(
            share,
            part_of_sum.zero_,
            lambda: dist.reduce_scatter_single(part_of_sum, mine),
            part_of_sum,
            total[parts],
        ),
        "broadcast": Collective(
            1.0,
            lambda: copied.copy_(mine),
            lambda: dist.broadcast(copied, 0),
            copied,
            pattern,
        ),
        "all_to_all": Collective(
            share,
            swapped.zero_,
            lambda: dist.all_to_all_single(swapped, mine),
            swapped,
            by_source.flatten(),
        ),
        "send/recv": Collective(
            1.0, passed.zero_, send_receive, passed, pattern + left
        ),
    }


def median_seconds(ways: dict[str, Collective], rounds: int) -> dict[str, float]:
    """Time all calls in turn; a call takes as long as its slowest rank."""
    times = torch.zeros(rounds, len(ways), dtype=torch.float64)
    for number in range(-2, rounds):  # two rounds to warm up
        for column, way in enumerate(ways.values()):
            way.prepare()
            dist.barrier()
            started = time.perf_counter()
            way.call()
            if number >= 0:
                times[number, column] = time.perf_counter() - started
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    for name, way in ways.items():
        if not torch.equal(way.result, way.expected):
            raise RuntimeError(f"{name} of {way.result.nbytes} bytes: wrong values")
    medians = [statistics.median(column) for column in times.T.tolist()]
    return dict(zip(ways, medians, strict=True))


def copy_bandwidth(numel: int, rounds: int) -> float:
    """Return the bytes per second that a rank copies while all ranks copy."""
    source, copy = torch.ones(numel), torch.zeros(numel)
    way = Collective(1.0, copy.zero_, lambda: copy.copy_(source), copy, source)
    return source.nbytes / median_seconds({"copy": way}, rounds)["copy"]


def fit_line(message_bytes: list[int], seconds: list[float]) -> Line:
    """Fit a line by least squares on the relative errors.

    On absolute errors the largest message would outweigh all the others, and the
    latency could come out as anything.
    """
    x = torch.tensor(message_bytes, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    # Both columns scaled to about 1, or the solver would take the smaller for noise.
    scale = torch.stack([y.min(), y.max() / x.max()])
    matrix = torch.stack([torch.ones_like(x), x], dim=1) * scale / y[:, None]
    solution = torch.linalg.lstsq(matrix, torch.ones(len(x), 1).double()).solution
    latency, per_byte = (solution[:, 0] * scale).tolist()
    worst = (latency + per_byte * x - y).abs().div(y).max().item()
    return Line(latency, 1 / per_byte, worst)


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    """Read the command line and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Measure all collectives.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--max-bytes", type=int, default=2**26, help="largest message")
    parser.add_argument("--json", type=Path, help="file for draw_bandwidth.py")
    args = parser.parse_args()
    if not 4096 <= args.max_bytes <= 2**30:
        refuse(f"--max-bytes must be from 4096 to {2**30}, not {args.max_bytes}")
    if args.json and args.json.is_dir():
        refuse(f"--json {args.json}: this is a folder")
    if args.json and not args.json.parent.is_dir():
        refuse(f"--json {args.json}: there is no folder {args.json.parent}")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        refuse("needs 2 ranks or more; start it with torchrun --nproc-per-node=2")
    return args


def main() -> None:
    """Measure size by size, fit, print, save."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world_size = dist.get_world_size()

    def say(text: str) -> None:
        """Print from rank 0 only, at once."""
        if dist.get_rank() == 0:
            print(text, flush=True)

    message_bytes, table = [], []
    say("bus bandwidth in GB/s")
    for power in range(10, args.max_bytes.bit_length(), 2):
        # A multiple of what every rank can have an equal part of.
        numel = 2**power // 4 // world_size * world_size
        ways = collectives(numel)
        if not table:
            say("  message" + "".join(f"  {name}" for name in ways))
        rounds = min(40, max(5, 2**26 // 2**power))
        medians = median_seconds(ways, rounds)
        message_bytes.append(4 * numel)
        table.append(medians)
        rates = [ways[name].factor * 4 * numel / medians[name] / 1e9 for name in ways]
        length = f"{2**power >> 10:,} KB"
        row = zip(rates, ways, strict=True)
        say(f"{length:>9}" + "".join(f"{r:{len(name) + 2}.3f}" for r, name in row))
    copy = copy_bandwidth(max(message_bytes) // 4, rounds=9)
    measured: dict = {"ranks": world_size, "bytes": message_bytes}
    measured |= {"copy_bytes_per_second": copy, "collectives": {}}
    say(f"a plain memory copy: {copy / 1e9:.2f} GB/s on each rank, all ranks at once")
    say(
        "latency + size / bandwidth  latency   bus bandwidth   of a copy   off by up to"
    )
    for name, way in collectives(world_size).items():
        seconds = [medians[name] for medians in table]
        line = fit_line(message_bytes, seconds)
        bus = way.factor * line.bandwidth
        say(
            f"  {name:21}{line.latency * 1e6:7.0f} us {bus / 1e9:10.2f} GB/s"
            f"{bus / copy:12.0%}{line.worst:15.0%}"
        )
        one = {"factor": way.factor, "seconds": seconds, **line._asdict()}
        measured["collectives"][name] = one
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    checked = len(table) * len(measured["collectives"])
    say(f"check: {checked} timed results on {world_size} ranks have the right values")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
