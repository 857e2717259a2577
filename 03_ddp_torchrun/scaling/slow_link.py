"""Pay less for a slow link: all-reduce bfloat16, or once for several micro-batches.

Run: python 03_ddp_torchrun/cluster/lab.py --link-rate=100mbit --
    03_ddp_torchrun/scaling/slow_link.py
Expect: for each way the bytes that cross the link in a step, and the milliseconds of a
    micro-batch beside computation + bytes / rate; a `check:` of these and of gradients.
"""

import os
import re
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ranks import check, fail, join, leave, number, read_options, say
from team import Team, add_to_file, distance_from, json_path

# By name: micro-batches in a step, and bytes that a number of the gradient takes.
WAYS = {"float32": (1, 4), "bfloat16": (1, 2), "accumulation": (4, 4)}
# Of 1514 bytes of an Ethernet frame 1448 are data; the rest says where they belong.
FRAME = 1514 / 1448
BYTES_LIMIT, TIME_LIMIT, GRADIENT_LIMITS = 0.10, 0.25, {4: 1e-5, 2: 2e-2}


def bfloat16_hook(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket's gradients in half their bytes; a DDP communication hook.

    PyTorch's own `bf16_compress_hook` does the same, but DDP refuses it in the CPU
    build. Rounding comes before the sum, so a little of each rank's is lost. Register
    it with DDP's `process_group`, where it has one.
    """
    gradients = bucket.buffer()
    half = gradients.to(torch.bfloat16).div_(dist.get_world_size(group))
    work: Any = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def bytes_sent() -> int:
    """Return what this host has put on its link so far, as Linux counts it."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    (counts,) = re.findall(rf"{interface}:(.*)", Path("/proc/net/dev").read_text())
    return int(counts.split()[8])


def measure_ways(teams: dict[int, Team], samples: int, rounds: int) -> dict[str, list]:
    """Take steps in each way in turn; return medians: computation, seconds, bytes."""
    noted: dict[str, list] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, (micro_batches, nbytes) in WAYS.items():
            compute = teams[4].seconds(teams[4].step, samples, "never")
            team, before = teams[nbytes], bytes_sent()
            arguments = samples, "during backward", micro_batches
            seconds = team.seconds(team.step, *arguments) / micro_batches
            noted[way].append((compute, seconds, bytes_sent() - before))
    return {
        way: [median(values) for values in zip(*rows, strict=True)]
        for way, rows in noted.items()
    }


def link_seconds(nbytes: float, rate: str) -> float:
    """Return what a link of a rate such as "100mbit" takes for so many bytes."""
    bits = {"k": 1e3, "m": 1e6, "g": 1e9}
    return nbytes * FRAME * 8 / (float(rate[:-4]) * bits[rate[-4]]) if rate else 0.0


def main() -> None:
    """Hold the bytes and the times of each way against the link's rate."""
    options = read_options(
        samples={"type": number(1, 9999), "default": 8, "help": "in a micro-batch"},
        rounds={"type": number(1, 999), "default": 5, "help": "medians are over these"},
        json={"type": json_path, "help": "file to add the numbers to"},
    )
    if "LAB_HOST" not in os.environ or "RANK" not in os.environ:
        lab, script = "03_ddp_torchrun/cluster/lab.py", os.path.relpath(__file__)
        fail(f"start it in the laboratory: python {lab} -- {script}")
    device, rate = join(at_least=2, only_cpu=True), os.environ["LAB_LINK_RATE"]
    n, hosts = dist.get_world_size(), int(os.environ["GROUP_WORLD_SIZE"])
    teams = {4: Team(n, 25, device), 2: Team(n, 25, device, bfloat16_hook)}
    errors = {b: distance_from(teams[b], "during backward", teams[4]) for b in teams}
    right = all(errors[nbytes] < limit for nbytes, limit in GRADIENT_LIMITS.items())
    elements = sum(p.numel() for p in teams[4].model.parameters())

    say(f"{n} ranks on {hosts} host(s), links of {rate or 'no set rate'}; milliseconds")
    say("way            MB a step  computation  predicted  measured")
    found = measure_ways(teams, options.samples, options.rounds)
    for way, (compute, seconds, sent) in found.items():
        micro_batches, nbytes = WAYS[way]
        # Each rank of a ring sends that much to the next one, on another host.
        expected = 2 * (n - 1) / n * elements * nbytes if hosts > 1 else 0.0
        predicted = compute + link_seconds(expected, rate) / micro_batches
        right &= abs(sent - expected) < BYTES_LIMIT * max(expected, 1e6)
        if predicted > 4 * compute:  # else computation says more than the link
            right &= abs(seconds / predicted - 1) < TIME_LIMIT
        times = f"{1e3 * compute:13.0f}{1e3 * predicted:11.0f}{1e3 * seconds:10.0f}"
        say(f"{way:14}{sent / 1e6:10.3f}{times}")
        found[way] = [compute, seconds, sent, expected]
    add_to_file(options.json, rate, found)
    ends = " and ".join(f"{error:.0e}" for error in errors.values())
    check(right, f"bytes and times as the rate says, gradients {ends} off")
    leave()


if __name__ == "__main__":
    main()
