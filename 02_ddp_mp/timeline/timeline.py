"""Where a step's time goes, without synchronisation and in four ways with it: traced.

Run: python 02_ddp_mp/timeline/timeline.py
Expect: after a minute each way's step time, and how many all-reduces overlap.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import (
    check,
    fail,
    gather,
    join,
    leave,
    number,
    read_options,
    say,
    start_ranks,
)
from tracing import middle_step, summarise, trace, whole_steps
from ways import LIMIT, WAYS, find_faults, gradient_errors, make_models, take_step


def measure_ways(options: argparse.Namespace) -> dict[str, dict]:
    """Let all ways take turns: in each round three timed steps and a traced one.

    Returns for each way, the same on both ranks: `errors`, how far each rank's
    gradients are from one process's; `seconds`, the step time on the slower rank, round
    by round; `traces`, for each rank the summaries of its traced steps.
    """
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, options.batch_size, options.width, generator=generator)
    mine = both[dist.get_rank()]
    plain, models = make_models(options.width, options.bucket_mb)
    errors = gradient_errors(plain, models, both)
    seconds, traces = ({name: [] for name in models} for _ in range(2))
    for _ in range(options.rounds):
        for name, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(3):
                take_step(model, mine)
            seconds[name].append((time.perf_counter() - started) / 3)
            traces[name].append(summarise(trace(take_step, model, mine)))
    (errors, seconds, traces), other = gather((errors, seconds, traces))
    return {
        name: {
            "errors": [errors[name], other[0][name]],
            "seconds": list(map(max, seconds[name], other[1][name])),
            "traces": [traces[name], other[2][name]],
        }
        for name in models
    }


def show_ways(measured: dict) -> dict[str, float]:
    """Print what was counted in the first traced step, and the median times; in ms."""
    ms = {n: 1000 * statistics.median(measured[n]["seconds"]) for n in WAYS}
    say(f"{'':18}  ms a step  speed  all-reduces  started during backward")
    for name in WAYS:
        speed, step = f"{ms['DDP'] / ms[name]:7.2f}", measured[name]["traces"][0][0]
        say(f"{name:18}{ms[name]:11.1f}{speed}{step['calls']:13}{step['early']:25}")
    return ms


def main(options: argparse.Namespace) -> None:
    """Measure all ways on two ranks, show them, save them, check them."""
    join(at_least=2, at_most=2, only_cpu=True)
    torch.set_num_threads(1)  # otherwise the threads of both ranks share the cores
    say(f"2 ranks, 8 layers of {options.width} x {options.width}")
    measured = measure_ways(options)
    ms = show_ways(measured)
    faults = [fault for name in WAYS for fault in find_faults(name, **measured[name])]
    bad = ", ".join(dict.fromkeys(fault.split(":")[0] for fault in faults))
    errors = [max(measured[n]["errors"]) for n in WAYS if n != "no synchronisation"]
    claim = f"{len(errors)} ways' gradients up to {max(errors):.0e} from one process's"
    for fault in faults:
        say(f"not as described: {fault}")
    check(not bad, f"{bad} as described" if bad else f"{claim} (limit {LIMIT:.0e})")
    if options.json and dist.get_rank() == 0:
        steps = {n: middle_step(whole_steps(measured[n]["traces"])) for n in WAYS}
        options.json.write_text(json.dumps({"ms": ms, "steps": steps}) + "\n")
    leave()


def read_checked_options() -> argparse.Namespace:
    """Read the command line; refuse what would leave nothing to overlap."""
    options = read_options(
        width={"type": number(1, 8192), "default": 1024, "help": "of each layer"},
        batch_size={"type": number(1, 2**16), "default": 64, "help": "of each rank"},
        bucket_mb={"type": number(1e-3, 1024.0), "default": 8.0, "help": "of a bucket"},
        rounds={"type": number(1, 10**6), "default": 15, "help": "turns of each way"},
        json={"type": Path, "help": "file for the numbers"},
    )
    if options.bucket_mb > (megabytes := 8 * 4 * options.width**2 / 2**20) / 2:
        fail(f"--bucket-mb is more than half of {megabytes:.1f} MB of gradients")
    if options.json and not options.json.resolve().parent.is_dir():
        fail(f"--json: there is no folder {options.json.parent}")
    return options


if __name__ == "__main__":
    start_ranks(main, 2, read_checked_options())
