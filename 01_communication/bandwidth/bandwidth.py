"""How fast the ranks talk: the bus bandwidth of each collective, by message size.

Run: torchrun --nproc-per-node=2 01_communication/bandwidth/bandwidth.py
Expect: a row for each size; the line latency + size / bandwidth through each column;
    a `check:` that every timed call gave the right values.
"""

import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import check, fail, join, leave, number, read_options, say
from timing import Call, copy_bandwidth, fit_line, time_in_turn


def bus_factors(world_size: int) -> dict[str, float]:
    """Return how much the busiest rank has to send, as a part of the message."""
    part = (world_size - 1) / world_size
    return {
        "all_reduce": 2 * part,
        "all_gather": part,
        "reduce_scatter": part,
        "broadcast": 1.0,
        "all_to_all": part,
        "send/recv": 1.0,
    }


def collectives(numel: int) -> dict[str, Call]:
    """Make a call of each kind for a message of `numel` float32.

    The message is the whole tensor: what every rank ends with in an all-gather, what
    each starts with in a reduce-scatter. `numel` is a multiple of the world size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # Small whole numbers: their sums are exact, in whatever order they are added.
    pattern = torch.arange(numel).remainder(997).float()
    mine, total = pattern + rank, pattern * world_size + sum(range(world_size))
    part, sum_part = (tensor.chunk(world_size)[rank] for tensor in (pattern, total))
    swapped = (part + torch.arange(world_size)[:, None]).flatten()

    def pass_on(received: torch.Tensor) -> None:
        works: list = [dist.irecv(received, left), dist.isend(mine, right)]
        for work in works:
            work.wait()

    return {
        "all_reduce": Call(dist.all_reduce, total, start=mine),
        "all_gather": Call(lambda out: dist.all_gather_single(out, part), pattern),
        "reduce_scatter": Call(
            lambda out: dist.reduce_scatter_single(out, mine), sum_part
        ),
        "broadcast": Call(lambda out: dist.broadcast(out, 0), pattern, start=mine),
        "all_to_all": Call(lambda out: dist.all_to_all_single(out, mine), swapped),
        "send/recv": Call(pass_on, pattern + left),
    }


def measure(max_bytes: int) -> tuple[list[int], dict[str, list[float]], list[bool]]:
    """Return sizes in bytes, each collective's median seconds, and what was right."""
    world_size = dist.get_world_size()
    factors, sizes, right = bus_factors(world_size), [], []
    medians: dict[str, list[float]] = {name: [] for name in factors}
    say("bus bandwidth in GB/s\n  message" + "".join(f"  {name}" for name in factors))
    for power in range(10, max_bytes.bit_length(), 2):
        numel = 2**power // 4 // world_size * world_size
        row, rounds = f"{2**power >> 10:6,} KB", min(40, max(5, 2**26 >> power))
        for name, timing in time_in_turn(collectives(numel), rounds).items():
            medians[name].append(statistics.median(timing.seconds))
            bus = factors[name] * 4 * numel / medians[name][-1]
            row += f"{bus / 1e9:{len(name) + 2}.3f}"
            right.append(timing.is_right)
        sizes.append(4 * numel)
        say(row)
    return sizes, medians, right


def main() -> None:
    """Time size by size, fit a line to each collective, save the numbers."""
    largest = {"type": number(2**20, 2**30), "default": 2**26, "help": "in bytes"}
    file = {"type": Path, "help": "save the numbers here"}
    options = read_options(max_bytes=largest, json=file)
    if options.json and not options.json.parent.is_dir():
        fail(f"--json={options.json}: there is no folder {options.json.parent}")
    join(at_least=2, only_cpu=True)
    factors = bus_factors(dist.get_world_size())
    sizes, medians, right = measure(options.max_bytes)
    copy = copy_bandwidth(sizes[-1] // 4)
    say(f"a plain memory copy: {copy / 1e9:.2f} GB/s on each rank, all ranks at once")
    say("latency + size / bandwidth   latency  bus bandwidth  of a copy  off by up to")
    for name, factor in factors.items():
        line = fit_line(sizes, medians[name])
        bus = factor * line.bandwidth
        row = f"  {name:22}{line.latency * 1e6:8.0f} us {bus / 1e9:9.2f} GB/s"
        say(f"{row}{bus / copy:11.0%}{line.worst:14.0%}")

    if options.json and dist.get_rank() == 0:
        found = {"ranks": dist.get_world_size(), "bytes": sizes, "factors": factors}
        found |= {"seconds": medians, "copy_bytes_per_second": copy}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    check(all(right), f"{len(right)} timed results have the right values on all ranks")
    leave()


if __name__ == "__main__":
    main()
