"""What it costs to have the table elsewhere: bytes on the wire, and time spent waiting.

Run: python 04_rpc_parameter_server/lookup_cost.py
Needs: this folder and requirements.txt. Runs on the CPU; the bytes on the wire can be
    read on Linux only. Times mean something while two cores are idle.
Expect: for each batch size a row for each way to use the table, with the bytes and the
    milliseconds of a step; then a `check:` that every way trains as one process does.
Before: 04_rpc_parameter_server/several_servers.py
Next: 04_rpc_parameter_server/steps_per_second.py
"""

import argparse
import itertools
import json
import math
import os
import signal
import socket
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc

from data import PACKAGES, ROWS, Batch, load_samples
from lookups import LR, WAYS, Line
from model import WIDTH, Table, dense_part
from one_process import batches_without_end, flat, train_in_rounds
from options import positive_int, refuse
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
    # What distributed autograd does on the server cannot be made to wait.
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
    start = flat(Table(ROWS, WIDTH, 0).weight, dense_part(WIDTH, len(PACKAGES), 0))
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


def compare_batch_sizes(args: argparse.Namespace) -> bool:
    """Be the trainer: measure batch size by batch size; tell whether all is right."""
    training, _ = load_samples()
    table: list[dict] = []
    worst, rough, odd = 0.0, 0.0, 0
    for batch_size in args.batch_sizes:
        batches = batches_without_end(training, batch_size)
        rounds = [
            list(itertools.islice(batches, args.steps)) for _ in range(args.rounds + 1)
        ]
        seen = [batch[0].unique() for part in rounds[1:] for batch in part]
        tokens = statistics.mean(len(batch[0]) for part in rounds[1:] for batch in part)
        stale = [
            torch.isin(rows, before).float().mean().item()
            for before, rows in itertools.pairwise(seen)
        ]
        costs, alone_ms, apart = cost_of_each_way(rounds, args.latency / 1e3)
        rough = max(rough, *(apart.pop(way) for way in OTHER_ORDER))
        worst = max(worst, *apart.values())
        rows = statistics.mean(map(len, seen))
        print(
            f"{batch_size} bags: {tokens:,.0f} words in {rows:,.0f} rows of {ROWS:,}, "
            f"{statistics.mean(stale):.0%} of them in the batch before too"
        )
        print(f"  {'':12}  in tensors     on wire  ms/step  waiting   loss")
        for way, cost in costs.items():
            on_wire = (
                "unknown" if cost.wire_bytes is None else f"{cost.wire_bytes:,.0f}"
            )
            print(
                f"  {way:12}{cost.tensor_bytes:12,.0f}{on_wire:>12}{cost.ms:9.2f}"
                f"{cost.waiting_ms:9.2f}{cost.loss:7.3f}"
            )
            more = (cost.wire_bytes or math.nan) - cost.tensor_bytes
            odd += cost.wire_bytes is not None and not 0 < more <= MOST_AROUND
        print(f"  in one process, without a server: {alone_ms:.2f} ms/step", flush=True)
        named = {way: cost._asdict() for way, cost in costs.items()}
        table.append({"batch_size": batch_size, "ways": named, "alone_ms": alone_ms})
    if args.json:
        args.json.write_text(
            json.dumps({"latency_ms": args.latency, "sizes": table}, indent=1) + "\n"
        )
    counted = all(cost["wire_bytes"] for one in table for cost in one["ways"].values())
    print(
        f"check: {len(table)} batch size(s), {len(table[0]['ways'])} ways: "
        f"{worst:.0e} from one process (limit {LIMIT:.0e})\n"
        f"check: {rough:.0e} where sums have another order (limit {ROUGH_LIMIT:.0e})"
    )
    if counted:
        print(
            f"check: tensors are all of the bytes but for 1 to {MOST_AROUND:,} a step"
        )
    sys.stdout.flush()
    return worst <= LIMIT and rough <= ROUGH_LIMIT and not odd


def one_end(rank: int, port: int, args: argparse.Namespace) -> None:
    """Be the trainer, rank 0, or the server."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process in silence
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # init_rpc wants an address to meet at. We have met already: hand it our store.
    dist.register_rendezvous_handler("met", lambda *_, **__: iter([(store, rank, 2)]))
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # Processes of one machine talk through shared memory, where nobody counts. Between
    # machines it would be TCP: these two options, which are not public, choose that.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="met://", rpc_timeout=60, _transports=["uv"], _channels=["basic"]
    )
    name = ("trainer", "server")[rank]
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    is_right = rank == 1 or compare_batch_sizes(args)
    rpc.shutdown()
    if not is_right:
        sys.exit(1)


def parse_args() -> argparse.Namespace:
    """Read the command line, and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Measure what a lookup costs.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    sizes = [8, 32, 128, 512]
    add("--batch-sizes", type=positive_int, nargs="+", default=sizes, help="in bags")
    add("--rounds", type=positive_int, default=9, help="the fastest one counts")
    add("--steps", type=positive_int, default=10, help="of each way in a round")
    add("--latency", type=float, default=0.0, help="ms that each answer is held back")
    add("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if max(args.batch_sizes) > 512 or args.steps > 100 or args.rounds > 100:
        refuse("--batch-sizes are at most 512, --steps and --rounds at most 100")
    if not 0 <= args.latency <= 1000:
        refuse(f"--latency must be from 0 to 1000, not {args.latency:g}")
    if args.json and not args.json.parent.is_dir():
        refuse(f"there is no folder {args.json.parent}")
    return args


def main() -> None:
    """Start both processes, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = parse_args()
    # Or a connection that ends would be reported by both ends, in many words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # TensorPipe would listen where the host's name points to, for all to call.
    names = [name for _, name in socket.if_nameindex()]
    os.environ["TP_SOCKET_IFNAME"] = next(n for n in names if n in ("lo", "lo0"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(one_end, args=(store.port, args), nprocs=2)


if __name__ == "__main__":
    main()
