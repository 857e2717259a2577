"""Where a step's time goes, in four ways to average gradients: side by side, traced.

Run: python 02_ddp_mp/timeline.py
Needs: by_hand.py and tracing.py beside it, two idle cores. It uses the CPU and gloo.
Expect: after a minute the time of a step in each way, and how many all-reduces are
    called before backward is over; a `check:` that all find the same gradients.
Before: 02_ddp_mp/by_hand.py, which holds three of the ways.
Next: 02_ddp_mp/draw_timeline.py, which draws what --json has saved.
"""

import argparse
import copy
import functools
import json
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from by_hand import BucketedDDP, FlatDDP, NaiveDDP
from options import positive_float, positive_int, refuse
from tracing import is_possible, middle_step, summarise, trace, whole_steps

LAYERS = 8
# How to wrap a model, given the MB of a bucket. The first is the machine's limit.
WAYS: dict[str, Callable[[nn.Module, float], nn.Module]] = {
    "no exchange": lambda model, _: model,
    "naive": lambda model, _: NaiveDDP(model),
    "flat": lambda model, _: FlatDDP(model),
    "overlapped": lambda model, megabytes: BucketedDDP(model, megabytes),
    "DDP": lambda model, megabytes: DistributedDataParallel(
        model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True
    ),
}
OVERLAP = ["overlapped", "DDP"]
# The largest difference of a gradient that rounding may make, next to the largest.
LIMIT = 1e-5


def make_model(width: int) -> nn.Sequential:
    """Stack equal layers: there is as much to send from each of them."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def find_gradients(model: nn.Module, inputs: torch.Tensor) -> None:
    """Go forward, backward and exchange; name each part for the profiler."""
    with record_function("part: forward"):
        loss = model(inputs).square().mean()
    with record_function("part: backward"):
        loss.backward()
    with record_function("part: finish"):
        # The wrappers made by hand need this call. DDP makes it within backward.
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()  # type: ignore[operator]


def take_step(model: nn.Module, inputs: torch.Tensor) -> None:
    """Take a whole step."""
    find_gradients(model, inputs)
    with record_function("part: optimizer"):
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        model.zero_grad()


def gradient_errors(
    plain: nn.Module, ways: dict[str, nn.Module], both: torch.Tensor
) -> dict[str, float]:
    """Hold each way's gradients against those that one process finds on all samples.

    Of each way this returns the largest difference, divided by the largest gradient.
    The ways wrap copies of `plain`; the ranks' inputs are `both`, (ranks, B, width).
    """

    def take_gradients(model: nn.Module) -> torch.Tensor:
        row = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return torch.cat(row)

    find_gradients(plain, both.flatten(0, 1))
    expected, errors = take_gradients(plain), {}
    for name, model in ways.items():
        for _ in range(2):  # DDP sorts its buckets anew after its first backward
            find_gradients(model, both[dist.get_rank()])
            difference = (take_gradients(model) - expected).abs().max()
            errors[name] = (difference / expected.abs().max()).item()
    return errors


def measure_ways(width: int, batch_size: int, bucket_mb: float, rounds: int) -> dict:
    """Let all ways take turns on two ranks, three timed steps and a traced one each.

    Returns:
        The same on both ranks. `seconds`: for each way, a step's time on the slower
        rank, round by round. `errors`: for each way, that of each rank's gradients.
        `traces`: for each way and each rank, the summaries of its traced steps.
    """
    plain = make_model(width)
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, batch_size, width, generator=generator)
    mine = both[dist.get_rank()]
    ways = {name: wrap(copy.deepcopy(plain), bucket_mb) for name, wrap in WAYS.items()}
    errors = gradient_errors(plain, ways, both)
    seconds = torch.zeros(len(ways), rounds, dtype=torch.float64)
    traces: dict[str, list[dict]] = {name: [] for name in ways}
    for number in range(rounds):
        for row, (name, model) in enumerate(ways.items()):
            step = functools.partial(take_step, model, mine)
            dist.barrier()
            started = time.perf_counter()
            for _ in range(3):
                step()
            seconds[row, number] = (time.perf_counter() - started) / 3
            traces[name].append(summarise(trace(step)))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    ranks = [(errors, traces)] * 2
    dist.all_gather_object(ranks, (errors, traces))
    return {
        "seconds": dict(zip(ways, seconds.tolist(), strict=True)),
        "errors": {name: [of_rank[name] for of_rank, _ in ranks] for name in ways},
        "traces": {name: [of_rank[name] for _, of_rank in ranks] for name in ways},
    }


def find_faults(measured: dict) -> list[str]:
    """Name all that is not as this lesson says."""
    faults = []
    for name, ranks in measured["traces"].items():
        error = max(measured["errors"][name])
        if (error < LIMIT) == (name == "no exchange"):
            faults.append(f"{name}: gradients {error:.0e} from one process's")
        steps = whole_steps(ranks)
        if not steps:
            faults.append(f"{name}: no step was traced without a gap")
        for step in steps:
            if not is_possible(step):
                faults.append(f"{name}: an all-reduce ended before it had begun")
            for calls, early in [(rank["calls"], rank["early"]) for rank in step]:
                # The last bucket is full when the last gradient has been computed.
                if early != (calls - 1 if name in OVERLAP else 0):
                    faults.append(f"{name}: {early} of {calls} calls in backward")
    return faults


def show_ways(measured: dict, saved: Path | None) -> None:
    """Print the table; save it together with a step of each way, if asked to."""
    ms = {n: 1000 * statistics.median(s) for n, s in measured["seconds"].items()}
    print("             ms a step   speed   all-reduces   called during backward")
    for name, [steps, _] in measured["traces"].items():
        speed, calls, early = ms["DDP"] / ms[name], steps[0]["calls"], steps[0]["early"]
        print(f"{name:12}{ms[name]:10.1f}{speed:8.2f}{calls:14}{early:25}")
    if saved:
        traces = measured["traces"].items()
        steps = {name: middle_step(whole_steps(ranks)) for name, ranks in traces}
        saved.write_text(json.dumps({"ms": ms, "steps": steps}) + "\n")


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def timeline_rank(rank: int, port: int, args: argparse.Namespace) -> None:
    """Be one of the two ranks; rank 0 prints, both check."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)  # otherwise each rank would start a thread for every core
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=1))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1)
    )
    if rank == 0:
        print(f"2 ranks, {LAYERS} layers of {args.width} x {args.width}", flush=True)
    measured = measure_ways(args.width, args.batch_size, args.bucket_mb, args.rounds)
    if faults := find_faults(measured):
        raise RuntimeError("not as it should be: " + "; ".join(dict.fromkeys(faults)))
    if rank == 0:
        show_ways(measured, args.json)
        errors = [
            e
            for name in WAYS
            if name != "no exchange"
            for e in measured["errors"][name]
        ]
        print(
            f"check: {len(errors)} gradients on 2 ranks, up to {max(errors):.0e} from "
            f"one process's (limit {LIMIT:.0e})"
        )
    dist.destroy_process_group()


def main() -> None:
    """Read the command line, start the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Time and trace ways to be parallel.")
    add = parser.add_argument
    add("--width", type=positive_int, default=1024, help="of each of the 8 layers")
    add("--batch-size", type=positive_int, default=64, help="samples on each rank")
    add("--bucket-mb", type=positive_float, default=8.0, help="MB in a bucket")
    add("--rounds", type=positive_int, default=15, help="turns that each way takes")
    add("--json", type=Path, help="file for the numbers")
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own two ranks")
    megabytes = LAYERS * (args.width + 1) * args.width * 4 / 2**20
    if args.width > 8192 or args.bucket_mb > megabytes / 2:
        refuse(
            f"{megabytes:.1f} MB of gradients: --bucket-mb must be at most half of "
            "that, and --width at most 8192"
        )
    if args.json and not os.access(args.json.resolve().parent, os.W_OK):
        refuse(f"cannot write into the folder {args.json.parent}")
    # The profiler's C++ part says on every start that it has started.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # The ranks meet at this store. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(timeline_rank, (store.port, args), nprocs=2)


if __name__ == "__main__":
    main()
