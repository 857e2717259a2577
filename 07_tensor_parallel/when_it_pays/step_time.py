"""Time a step of one rank, of data-parallel and of tensor-parallel ranks, over a link.

Run: python 03_ddp_torchrun/cluster/lab.py --link-rate=300mbit --
    07_tensor_parallel/when_it_pays/step_time.py
Expect: for each way the megabytes that a rank sends in a step, and the milliseconds it
    takes, beside computation + bytes / rate; a `check:` of gradients.
"""

import json
import os
from pathlib import Path
from statistics import median

import torch.distributed as dist

import step_cost
from ranks import check, fail, join, leave, number, read_options, say
from three_ways import LAYERS, D, T, Ways, seconds

UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def main() -> None:
    """Time each way in turn, with and without its messages."""
    options = read_options(
        samples={
            "type": number(2, 999),
            "default": 16,
            "help": "of all ranks together",
        },
        rounds={"type": number(1, 999), "default": 3, "help": "medians are over these"},
        json={"type": Path, "help": "file to add the numbers to"},
    )
    if "LAB_HOST" not in os.environ or "RANK" not in os.environ:
        lab, script = "03_ddp_torchrun/cluster/lab.py", os.path.relpath(__file__)
        fail(f"start it in the laboratory: python {lab} -- {script}")
    n = int(os.environ["WORLD_SIZE"])
    if options.samples % n:
        fail(f"{n} ranks cannot share {options.samples} samples evenly")
    join(at_least=2, only_cpu=True)
    link = os.environ["LAB_LINK_RATE"] or "100gbit"
    rate = float(link[:-4]) * UNITS[link[-4]]
    ways = Ways(options.samples)
    error = ways.largest_error()
    parameters = sum(p.numel() for p in ways.whole.parameters())
    tokens = options.samples * T
    sent = {
        "alone": 0,
        "data": step_cost.data_parallel_bytes(parameters),
        "tensor": step_cost.tensor_parallel_bytes(tokens, D, LAYERS),
    }
    say(f"{options.samples} samples on {n} ranks, links of {link}; milliseconds")
    say("way     MB sent  computation  predicted  measured")
    times = {way: [[], []] for way in sent}
    for _ in range(options.rounds):
        for way in sent:
            for is_silent, noted in zip((True, False), times[way], strict=True):
                noted.append(seconds(getattr(ways, way), is_silent))
    found = {}
    for way, nbytes in sent.items():
        compute, whole = map(median, times[way])
        nbytes = step_cost.sent_by_a_rank(nbytes, n)
        predicted = compute + step_cost.seconds_on_link(nbytes, rate)
        row = f"{1e3 * compute:13.0f}{1e3 * predicted:11.0f}{1e3 * whole:10.0f}"
        say(f"{way:6}{nbytes / 1e6:9.2f}{row}")
        found[way] = [compute, whole, nbytes]
    if options.json and dist.get_rank() == 0:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known.setdefault(str(options.samples), {})[f"{rate:.0f}"] = found
        options.json.write_text(json.dumps(known) + "\n")
    check(error < 1e-4, f"both ways give one rank's gradient, {error:.0e} off")
    leave()


if __name__ == "__main__":
    main()
