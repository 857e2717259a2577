"""Four ways to step side by side: their rates, and the proof that none cheats."""

import time
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule

from classifier import ROWS, WIDTH, Batch, EagerSGD, Table, dense_part, load_samples
from one_process import flat, train_in_rounds
from ranks import same_on_all_ranks
from roles import SERVER
from row_server import make
from ways_to_step import LR, Ahead, ByAutograd, ByOneCall, Way, hide_torchscript

OFTEN, EARLY = "as often written", "ahead"  # two of the four ways
# Both are shares of the largest change. The first is for an entry of the table: the
# rounding of thousands of additions is 2e-5. The second: one process, the same steps.
SUM_LIMIT, ALONE_LIMIT = 1e-3, 1e-5


class Found(NamedTuple):
    """What the proof has found for one way, on whichever trainer it is worst."""

    different: int  # 1 if the trainers' dense weights are not equal
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
    different = int(not same_on_all_ranks(way.dense.parameters()))
    apart = 0.0
    if dist.get_world_size() == 1:
        alone, _ = train_in_rounds(rounds, LR, name == EARLY, sparse=name != OFTEN)
        gone = alone - flat(start, dense_part())
        distance = (flat(end, way.dense) - alone).abs().max() / gone.abs().max()
        apart = torch.nan_to_num(distance, nan=torch.inf).item()
    counts = (different, abs(missing), int(lost.sum()), int((end != start).sum()))
    # Every trainer learns the worst of all, so that all of them agree.
    worst = torch.tensor([*counts, apart], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Found(*(int(number) for number in worst[:4]), apart=worst[4].item())


def make_tables() -> list[RemoteModule]:
    """Have the server make a table for each way; return those that autograd uses."""
    rpc.rpc_sync(SERVER, hide_torchscript)
    for name in ("one call", EARLY):
        rpc.rpc_sync(SERVER, make, (name, ROWS, WIDTH, LR, 0.0))
    # A plain EmbeddingBag: its gradient has a number for each one of the table. It
    # would fill itself at random; it is to start where the others do.
    numbers = Table(ROWS, WIDTH, seed=0).weight.detach()
    options = {"mode": "sum", "_weight": numbers}
    often = RemoteModule(SERVER, nn.EmbeddingBag, (ROWS, WIDTH), options)
    return [often, RemoteModule(SERVER, Table, (ROWS, WIDTH, 0))]


def take_turns(
    remotes: list[RemoteModule], turns: int, steps: int, batch_size: int
) -> tuple[dict[str, list[float]], dict[str, Found]]:
    """Be a trainer: take turns at all ways; return the rates and what is proved."""
    count, place = turns * steps, (dist.get_rank(), dist.get_world_size())
    batches = list(islice(load_samples()[0].batches(batch_size, *place), count))
    rounds = [batches[start : start + steps] for start in range(0, count, steps)]
    hide_torchscript()
    ways: dict[str, Way] = {
        OFTEN: ByAutograd(remotes[0], torch.optim.SGD),
        "autograd": ByAutograd(remotes[1], EagerSGD),
        "one call": ByOneCall("one call"),
        EARLY: Ahead(EARLY),
    }
    before = {name: way.changes() for name, way in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for one_round in rounds:
        for name, way in ways.items():
            rates[name].append(rate_of_a_round(way, one_round))
    found = {name: prove(name, way, rounds, before[name]) for name, way in ways.items()}
    return rates, found
