"""Fewer calls in a step are more steps in a second: four ways, side by side.

Run: python 04_rpc_parameter_server/steps_per_second.py
Needs: this folder and requirements.txt. It runs on the CPU. Times mean something while
    nothing else runs.
Expect: how many steps a second the trainers make with one parameter server in each of
    four ways, in the same processes and with the same batches; then a `check:` that the
    dense parts are equal and the table has got what the trainers have sent.
Before: 04_rpc_parameter_server/lookup_cost.py
Next: 04_rpc_parameter_server/sharded_tables.py
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from datetime import timedelta
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.nn import RemoteModule

import table
from data import PACKAGES, ROWS, Batch, load_samples
from lookups import LR
from model import WIDTH, HybridModel, Table, dense_part
from one_process import batches_without_end, flat, train_in_rounds
from options import check_samples, positive_int, refuse
from proof import different_dense_weights
from row_server import make
from train import be_parameter_server
from trainer import SERVER, EagerSGD, in_group, wait_for_the_group
from ways_to_step import Ahead, ByAutograd, ByOneCall, Way, show_all_but_one
from world import launch

OFTEN, EARLY = "as often written", "ahead"  # two of the four ways
# Both are shares of the largest change. The first is for an entry of the table: the
# rounding of thousands of additions is 2e-5. The second: one process, the same steps.
SUM_LIMIT, ALONE_LIMIT = 1e-3, 1e-5


class Plan(NamedTuple):
    """What the master decides and every trainer is told."""

    trainers: int
    rounds: int
    steps: int
    batch_size: int


class Found(NamedTuple):
    """What the proof has found for one way, on whichever trainer it is worst."""

    different: int  # dense weights that are not those of trainer 0
    missing: int  # updates that the table should have had and has not
    lost: int  # entries of the table that are not what the updates add up to
    moved: int  # entries that are not what they were at the start
    apart: float  # from one process, with one trainer; else 0


def rate_of_a_round(way: Way, batches: list[Batch]) -> float:
    """Take a step for each batch, together with all other trainers.

    Returns:
        Steps in a second of the slowest trainer, the first fifth of them left out.
    """
    dist.barrier()
    left_out = len(batches) // 5
    started = time.perf_counter()
    for done, _ in enumerate(way.steps(batches), start=1):
        if done == left_out:
            started = time.perf_counter()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return (len(batches) - left_out) / seconds.item()


def prove(name: str, way: Way, rounds: list[list[Batch]], before: int) -> Found:
    """Find out whether a way has done what it was to do; all trainers call this.

    Args:
        name: of the way.
        way: that nobody uses any more.
        rounds: its batches, of this trainer.
        before: how often its table had been changed before the first step.
    """
    batches = list(chain(*rounds))
    start, end = Table(ROWS, WIDTH, seed=0).weight.detach(), way.weight()
    change = LR * way.sum_of_all_updates(batches)
    off = (end.double() - (start.double() - change)).abs()
    # Written so that what is not a number counts as lost.
    lost = ~(off <= SUM_LIMIT * change.abs().max())
    missing = dist.get_world_size() * len(batches) - (way.changes() - before)
    different = different_dense_weights(HybridModel(nn.Identity(), way.dense))
    apart = 0.0
    if dist.get_world_size() == 1:
        alone, _ = train_in_rounds(rounds, LR, name == EARLY, sparse=name != OFTEN)
        gone = alone - flat(start, dense_part(WIDTH, len(PACKAGES), seed=0))
        distance = (flat(end, way.dense) - alone).abs().max() / gone.abs().max()
        apart = torch.nan_to_num(distance, nan=torch.inf).item()
    counts = (different, abs(missing), int(lost.sum()), int((end != start).sum()))
    # Every trainer learns the worst of all, so that all of them agree.
    worst = torch.tensor([*counts, apart], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Found(*(int(number) for number in worst[:4]), apart=worst[4].item())


def print_rates(
    plan: Plan, rates: dict[str, list[float]], found: dict[str, Found]
) -> None:
    """Print a row for each way; the first of its rounds was for warming up."""
    print(
        f"{plan.trainers} trainer(s), 1 server, {plan.batch_size} bags in a batch; "
        f"{plan.rounds} round(s) of {plan.steps} steps\n"
        f"{'':16}  steps/s   from     to   times   entries lost"
    )
    first = statistics.median(rates[OFTEN][1:])
    for name, (_, *counted) in rates.items():
        median, one = statistics.median(counted), found[name]
        print(
            f"{name:16}{median:9.1f}{min(counted):7.1f}{max(counted):7.1f}"
            f"{median / first:8.2f}{one.lost:9,} of {one.moved:,}"
        )


def compare_four_ways(remotes: list[RemoteModule], plan: Plan) -> bool:
    """Take turns at all ways; print from trainer 0; tell whether all is right."""
    wait_for_the_group()
    rank, trainers = dist.get_rank(), plan.trainers
    training, _ = load_samples()
    batches = batches_without_end(training, plan.batch_size, rank, trainers)
    # One round more, the first, for warming up.
    rounds = [list(islice(batches, plan.steps)) for _ in range(plan.rounds + 1)]
    ways = {
        OFTEN: ByAutograd(remotes[0], torch.optim.SGD),
        "autograd": ByAutograd(remotes[1], EagerSGD),
        "one call": ByOneCall("one call"),
        EARLY: Ahead(EARLY),
    }
    before = {name: way.changes() for name, way in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for batches_of_round in rounds:
        for name, way in ways.items():
            rates[name].append(rate_of_a_round(way, batches_of_round))
    found = {name: prove(name, way, rounds, before[name]) for name, way in ways.items()}
    in_turn = [found[name] for name in ways if name != OFTEN or trainers == 1]
    different = sum(one.different for one in found.values())
    missing = sum(one.missing for one in found.values())
    lost = sum(one.lost for one in in_turn)
    apart = max(one.apart for one in found.values())
    if rank == 0:
        print_rates(plan, rates, found)
        updates = trainers * len(rounds) * plan.steps
        print(
            f"check: 4 ways: {different} dense weights differ between trainers\n"
            f"check: 4 ways: {missing} of {updates} updates of the table are missing\n"
            f"check: {len(in_turn)} ways: {lost} entries of the table are not the sum "
            f"of what was sent (limit {SUM_LIMIT:.0e})"
        )
        if trainers == 1:
            print(
                f"check: 4 ways: {apart:.0e} from one process alone "
                f"(limit {ALONE_LIMIT:.0e})"
            )
        sys.stdout.flush()
    moved = min(one.moved for one in found.values())
    right = different == missing == lost == 0
    return right and moved > 0 and apart <= ALONE_LIMIT


def have_it_measured(plan: Plan) -> None:
    """Be the master: make a table for each way, and let the trainers use them."""
    for name in ("one call", EARLY):
        rpc.rpc_sync(SERVER, make, (name, ROWS, WIDTH, LR, 0.0))
    # A plain EmbeddingBag: its gradient has a number for each one of the table. It
    # would fill itself at random; it is to start where the others do.
    numbers = Table(ROWS, WIDTH, seed=0).weight.detach()
    options = {"mode": "sum", "_weight": numbers}
    often = RemoteModule(SERVER, nn.EmbeddingBag, (ROWS, WIDTH), options)
    remotes = [often, RemoteModule(SERVER, Table, (ROWS, WIDTH, 0))]
    futures = [
        rpc.rpc_async(f"trainer{r}", compare_four_ways, (remotes, plan), timeout=0)
        for r in range(plan.trainers)
    ]
    if not all(torch.futures.wait_all(futures)):
        print("the lesson has gone wrong on a trainer", file=sys.stderr)
        os._exit(1)
    rpc.rpc_sync(SERVER, table.release)


def be_in_the_comparison(name: str, store: dist.TCPStore, plan: Plan) -> None:
    """Be the master, the server or a trainer."""
    warnings.showwarning = show_all_but_one
    if name == "master":
        have_it_measured(plan)
    elif name == SERVER:
        be_parameter_server(None)
    else:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("trainers", store),
            rank=int(name.removeprefix("trainer")),
            world_size=plan.trainers,
            timeout=timedelta(seconds=60),
        )
        in_group.set()


def parse_args() -> argparse.Namespace:
    """Read the command line, and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Count the steps in a second.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--trainers", type=positive_int, default=2, help="trainers (default 2)")
    add("--rounds", type=positive_int, default=9, help="the median counts (default 9)")
    add("--steps", type=positive_int, default=25, help="in a round (default 25)")
    add("--batch-size", type=positive_int, default=5, help="bags (default 5)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if args.trainers > 16 or max(args.rounds, args.steps) > 100:
        refuse("--rounds and --steps are at most 100, --trainers at most 16")
    check_samples("--trainers", args.trainers, args.batch_size)
    return args


def main() -> None:
    """Start all processes, and wait for them."""
    args = parse_args()
    plan = Plan(args.trainers, args.rounds, args.steps, args.batch_size)
    names = ["master", SERVER, *(f"trainer{rank}" for rank in range(args.trainers))]
    launch(names, be_in_the_comparison, plan)


if __name__ == "__main__":
    main()
