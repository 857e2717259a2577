"""One table on several parameter servers: each holds some rows and sums up its own.

Run: python 04_rpc_parameter_server/several_servers.py --parameter-servers=2
Needs: this folder and requirements.txt. Runs on the CPU.
Expect: what each server holds; the time of a step with one server and with several,
    taken in turn; and a `check:` that both end with the table of one process alone.
Before: 04_rpc_parameter_server/train.py
Next: 04_rpc_parameter_server/lookup_cost.py
"""

import argparse
import logging
import math
import os
import statistics
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from data import PACKAGES, ROWS, Batch, load_samples
from model import WIDTH, HybridModel, dense_part
from one_process import batches_without_end, join_batches, train_in_one_process
from options import check_samples, positive_float, positive_int, refuse
from split_table import SplitTable, TablePart
from trainer import EagerSGD
from world import launch

LIMIT = 1e-5  # float32 sums in another order differ by less


def deal_batches(args: argparse.Namespace) -> list[list[Batch]]:
    """Return the batches of each trainer."""
    training, _ = load_samples(args.rows)
    n = args.trainers
    dealt = [batches_without_end(training, args.batch_size, i, n) for i in range(n)]
    return [list(islice(batches, args.steps)) for batches in dealt]


def train_in_turn(
    tables: list[list[RemoteModule]], trainer: int, args: argparse.Namespace
) -> list[tuple[float, torch.Tensor]]:
    """Be one trainer: train a model on each of the tables, a step of each in turn.

    Returns:
        For each table the median of the seconds of a step, and the dense part's
        parameters in one row.
    """
    # `EagerSGD` says why there is something to be silenced.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    models, optimizers = [], []
    for parts in tables:
        dense = DistributedDataParallel(dense_part(WIDTH, len(PACKAGES), seed=0))
        models.append(HybridModel(SplitTable(parts), dense))
        # The steps of all trainers add up in the table, while DDP takes the mean.
        rows = [rref for part in parts for rref in part.remote_parameters()]
        rate = args.lr / args.trainers
        optimizers.append(
            (
                DistributedOptimizer(EagerSGD, rows, rate),
                EagerSGD(dense.parameters(), args.lr),
            )
        )
    seconds: list[list[float]] = [[] for _ in tables]
    for indices, offsets, labels in deal_batches(args)[trainer]:
        for number, (model, (rows, dense)) in enumerate(
            zip(models, optimizers, strict=True)
        ):
            started = time.perf_counter()
            with dist_autograd.context() as context:
                loss = cross_entropy(model(indices, offsets), labels)
                # All trainers have looked up when DDP's all-reduce in here is done: no
                # step can come between.
                dist_autograd.backward(context, [loss])
                gradients = dist_autograd.get_gradients(context)
                for parameter in model.dense.parameters():
                    parameter.grad = gradients[parameter]
                dense.step()
                rows.step(context)  # on all servers at once
            # Nobody looks up again before all have made their step. (While two tables
            # take turns, the all-reduce for the other one would see to that as well.)
            dist.barrier()
            seconds[number].append(time.perf_counter() - started)
    return [
        (
            statistics.median(each),
            torch.nn.utils.parameters_to_vector(model.dense.parameters()).detach(),
        )
        for each, model in zip(seconds, models, strict=True)
    ]


def resident_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def place_part(
    owner: int, args: argparse.Namespace, n: int
) -> tuple[RemoteModule, str]:
    """Let a server make its part of a table; return the part, and a line about it."""
    server = f"server{owner}"
    before = rpc.rpc_sync(server, resident_bytes)
    part = RemoteModule(server, TablePart, (args.rows, WIDTH, 0, owner, n))
    shape = part.remote_parameters()[0].to_here().shape
    grown = rpc.rpc_sync(server, resident_bytes) - before
    line = f"{server} holds {shape[0]:,} rows, {shape.numel() * 4:,} bytes"
    return part, f"{line}; its process grew by {grown / 2**20:.0f} MB"


def direct(args: argparse.Namespace) -> float:
    """Be trainer 0: place the tables, start all trainers, compare what comes out."""
    tables = []
    for n in (1, args.parameter_servers):
        placed = [place_part(owner, args, n) for owner in range(n)]
        print(f"{n} server(s)", *(line for _, line in placed), sep="\n  ", flush=True)
        tables.append([part for part, _ in placed])
    others = [
        # No time-out for this one call, which lasts as long as the training.
        rpc.rpc_async(f"trainer{i}", train_in_turn, (tables, i, args), timeout=0)
        for i in range(1, args.trainers)
    ]
    results = [train_in_turn(tables, 0, args), *(other.wait() for other in others)]
    batches = map(join_batches, zip(*deal_batches(args), strict=True))
    alone = train_in_one_process(batches, args.rows, args.lr)
    dense = torch.nn.utils.parameters_to_vector(alone.dense.parameters())
    distance = 0.0
    for number, parts in enumerate(tables):
        whole = torch.full_like(alone.get_parameter("table.weight"), math.nan)
        for owner, part in enumerate(parts):
            whole[owner :: len(parts)] = part.remote_parameters()[0].to_here()
        pairs = [(whole, alone.get_parameter("table.weight"))]
        pairs += [(result[number][1], dense) for result in results]
        apart = max((got - wanted).abs().max().item() for got, wanted in pairs)
        distance = max(distance, math.inf if math.isnan(apart) else apart)
        milliseconds = 1e3 * results[0][number][0]
        print(f"with {len(parts)} server(s), a step takes {milliseconds:.1f} ms")
    print(
        f"check: after {args.steps} steps, 1 and {args.parameter_servers} server(s) "
        f"and one process: {distance:.0e} apart (limit {LIMIT:.0e})",
        flush=True,
    )
    return distance


def trainer_or_server(name: str, store: dist.Store, args: argparse.Namespace) -> None:
    """Be a trainer or a server; RPC is open already, and is closed afterwards."""
    torch.set_num_threads(1)
    if not name.startswith("trainer"):
        return  # a server does nothing but answer calls until all are done
    rank = int(name.removeprefix("trainer"))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("trainers", store),
        rank=rank,
        world_size=args.trainers,
        timeout=timedelta(seconds=60),
    )
    if rank == 0 and not direct(args) <= LIMIT:
        raise RuntimeError("the servers' table is not what one process ends with")


def parse_args() -> argparse.Namespace:
    """Read the command line, and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Split a table over several servers.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--parameter-servers", type=positive_int, default=2, help="parts of the table")
    add("--trainers", type=positive_int, default=2, help="trainers in the run")
    add("--steps", type=positive_int, default=50, help="of each trainer")
    add("--batch-size", type=positive_int, default=32, help="samples per trainer")
    add("--rows", type=positive_int, default=ROWS, help="of the whole table")
    add("--lr", type=positive_float, default=0.1, help="learning rate")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if args.parameter_servers > min(16, args.rows) or args.trainers > 16:
        refuse("--parameter-servers and --trainers are at most 16, and a row for each")
    check_samples("--trainers", args.trainers, args.batch_size, args.rows)
    return args


def main() -> None:
    """Start all processes; all of them end if one does."""
    args = parse_args()
    names = [f"trainer{i}" for i in range(args.trainers)]
    names += [f"server{i}" for i in range(args.parameter_servers)]
    launch(names, trainer_or_server, args)


if __name__ == "__main__":
    main()
