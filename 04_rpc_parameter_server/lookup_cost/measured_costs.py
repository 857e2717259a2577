"""Bytes and time of a step in each of the ways of `lookups.py`, and the proof."""

import itertools
import math
import os
import statistics
import time
from typing import NamedTuple

import torch
from torch.distributed import rpc

from classifier import ROWS, WIDTH, Batch, Table, dense_part
from lookups import LR, WAYS, Line
from one_process import flat, train_in_rounds
from wire import wire_bytes

# How far a parameter may end from where it does in one process, as a share of the
# longest way that one has gone. Two ways add up gradients in an order of their own. Now
# and then this makes a ReLU tip over, and then it grows: so they are compared after the
# first round, the others after the last.
LIMIT, ROUGH_LIMIT = 1e-5, 1e-2
OTHER_ORDER = ("whole table", "rows")
MOST_AROUND = 6000  # bytes of a step that are in no tensor


class Cost(NamedTuple):
    """What a step costs: bytes as means of all rounds, times of the fastest round."""

    tensor_bytes: float
    wire_bytes: float | None
    ms: float
    waiting_ms: float
    loss: float  # mean over the last round


def cost_of_each_way(
    rounds: list[list[Batch]], latency: float
) -> tuple[dict[str, Cost], float, dict[str, float]]:
    """Train in every way, a round of each in turn; the first round is for warming up.

    Returns:
        The costs by way, the milliseconds of a step in one process, and by way how far
        it ends from one process: a share of the way that training has gone.
    """
    # What distributed autograd does on the server is not made to wait here.
    lines = {
        way: Line(way, latency) for way in WAYS if not (latency and way == "autograd")
    }
    measured: dict[str, list[tuple[float, ...]]] = {way: [] for way in lines}
    ends: dict[str, torch.Tensor] = {}
    for batches in rounds:
        steps = len(batches)
        for way, line in lines.items():
            # The answer shows that the messages before it have gone.
            rpc.rpc_sync("server", os.getpid)
            wire, line.bytes, line.waited = wire_bytes(), 0, 0.0
            started = time.perf_counter()
            losses = WAYS[way](line, batches)
            seconds = time.perf_counter() - started
            rpc.rpc_sync("server", os.getpid)
            now = wire_bytes()
            on_wire = math.nan if wire is None or now is None else now - wire
            loss = torch.stack(losses).mean().item()
            totals = (line.bytes, on_wire, 1e3 * seconds, 1e3 * line.waited)
            measured[way].append((*(total / steps for total in totals), loss))
            if not (way in OTHER_ORDER and way in ends):
                ends[way] = flat(line.weight(), line.dense)
    costs = {}
    for way, rows in measured.items():
        in_tensors, on_wire, _, _, losses = zip(*rows[1:], strict=True)
        # The fastest round is the one in which other programs disturbed least.
        ms, waiting_ms = min(row[2:4] for row in rows[1:])
        costs[way] = Cost(
            statistics.mean(in_tensors),
            None if math.isnan(on_wire[0]) else statistics.mean(on_wire),
            ms,
            waiting_ms,
            losses[-1],
        )
    start = flat(Table(ROWS, WIDTH, 0).weight, dense_part())
    on_time, seconds = train_in_rounds(rounds, LR, late=False)
    wanted = dict.fromkeys(lines, on_time)
    wanted |= {"ahead": train_in_rounds(rounds, LR, late=True)[0]}
    for way in OTHER_ORDER:
        wanted[way] = train_in_rounds(rounds[:1], LR, late=False)[0]
    apart = {}
    for way, end in ends.items():
        gone = (wanted[way] - start).abs().max()
        distance = (end - wanted[way]).abs().max() / gone
        apart[way] = math.inf if distance.isnan() else distance.item()
    return costs, 1e3 * seconds, apart


def print_costs(
    batch_size: int, rounds: list[list[Batch]], costs: dict[str, Cost]
) -> None:
    """Print what a batch holds, and a row for each way."""
    seen = [indices for part in rounds[1:] for indices, _, _ in part]
    rows = [indices.unique() for indices in seen]
    shares = [torch.isin(b, a).float().mean() for a, b in itertools.pairwise(rows)]
    words, different = (statistics.mean(map(len, one)) for one in (seen, rows))
    print(
        f"{batch_size} bags: {words:,.0f} words in {different:,.0f} rows of {ROWS:,}, "
        f"{torch.stack(shares).mean():.0%} of them in the batch before too"
    )
    print(f"  {'':12}  in tensors     on wire  ms/step  waiting   loss")
    for way, (in_tensors, wire, ms, waiting, loss) in costs.items():
        on_wire = "unknown" if wire is None else f"{wire:,.0f}"
        times = f"{ms:9.2f}{waiting:9.2f}{loss:7.3f}"
        print(f"  {way:12}{in_tensors:12,.0f}{on_wire:>12}{times}", flush=True)
