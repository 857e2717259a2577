"""The same model with no server: each trainer holds a part of the table's rows.

Run: python 04_rpc_parameter_server/sharded_tables.py
Needs: this folder and requirements.txt. Runs on the CPU, by gloo.
Expect: what each rank holds and sends; the loss and the held-out accuracy; and a
    `check:` that table and dense part are those of one process that trains alone.
Before: 04_rpc_parameter_server/steps_per_second.py; several_servers.py splits the table
    in this way.
Next: 05_deepspeed_zero/README.md, where all parameters are split among the ranks.
"""

import argparse
import os
import signal
import sys
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: MYTHS.md, chapter 03.
import torch.distributed.nn
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from data import PACKAGES, ROWS, load_samples
from model import WIDTH, HybridModel, Table, dense_part
from one_process import batches_without_end, join_batches, train_in_one_process
from options import check_samples, positive_float, positive_int, refuse
from split_table import split_bags

LIMIT = 1e-5  # float32 sums in another order differ by less


class AllToAll(torch.autograd.Function):
    """`all_to_all` with a gradient: what a rank has sent is what it gets one for."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, sent: torch.Tensor
    ) -> torch.Tensor:
        """Send the first of n equal parts to rank 0, the second to rank 1, and so on.

        Returns:
            The part for this rank from rank 0, that from rank 1, and so on.
        """
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous())
        return received

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grad_outputs: torch.Tensor
    ) -> torch.Tensor:
        """Send each part's gradient back to the rank that the part came from."""
        return AllToAll.forward(ctx, grad_outputs[0])


class ShardedTable(nn.Module):
    """One rank's rows of the table, and the exchange that lets it use all of them.

    All ranks make each call together, with equally many bags.
    """

    def __init__(self, table: Table) -> None:
        """Keep every n-th row of a table, beginning with the row of this rank."""
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.own = nn.EmbeddingBag.from_pretrained(
            table.weight.detach()[self.rank :: self.world_size].clone(),
            freeze=False,
            mode="sum",
            sparse=True,
        )
        self.sent_bytes = 0  # to other ranks, in the last forward pass

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sum up the rows of each bag, wherever they are: (tokens,), (B,) to (B, D)."""
        shares = split_bags(indices, offsets, self.world_size)
        # 1. How many rows of mine does each of your bags ask for?
        asked = torch.stack([counts for _, counts in shares])
        lengths = torch.empty_like(asked)
        dist.all_to_all_single(lengths, asked)
        # 2. Which ones? Unequal parts, whose lengths both sides know by now.
        to_send, to_receive = asked.sum(1).tolist(), lengths.sum(1).tolist()
        wanted = indices.new_empty(sum(to_receive))
        numbers = torch.cat([numbers for numbers, _ in shares])
        dist.all_to_all_single(wanted, numbers, to_receive, to_send)
        # 3. Each owner sums up its rows of everybody's bags and sends these sums back.
        flat = lengths.flatten()
        sums = self.own(wanted, flat.cumsum(0) - flat)
        parts = AllToAll.apply(sums).view(self.world_size, len(offsets), -1)
        away = sum(to_send) - to_send[self.rank]
        others = (self.world_size - 1) / self.world_size
        self.sent_bytes = away * 8 + int(others * (asked.nbytes + sums.nbytes))
        return parts.sum(0)


def train_sharded(args: argparse.Namespace) -> tuple[float, HybridModel]:
    """Train on every rank; return how far all end from one process, and the model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, held_out = load_samples(args.rows)
    table = ShardedTable(Table(args.rows, WIDTH, seed=0))
    if rank == 0:
        print(f"{world_size} rank(s) share {args.rows:,} rows", flush=True)
    dense = DistributedDataParallel(dense_part(WIDTH, len(PACKAGES), seed=0))
    model = HybridModel(table, dense)
    # DDP takes the mean of the ranks' gradients. The table's come from all ranks too,
    # and are added up by the exchange: an n-th of the rate makes a mean of that.
    optimizer = torch.optim.SGD(
        [
            {"params": table.parameters(), "lr": args.lr / world_size},
            {"params": dense.parameters(), "lr": args.lr},
        ]
    )
    dealt = [
        list(islice(batches, args.steps))
        for batches in (
            batches_without_end(training, args.batch_size, r, world_size)
            for r in range(world_size)
        )
    ]
    for step, (indices, offsets, labels) in enumerate(dealt[rank], start=1):
        optimizer.zero_grad()
        loss = cross_entropy(model(indices, offsets), labels)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if rank == 0 and step % max(1, args.steps // 3) == 0:
            print(f"step {step:3} | mean loss {loss:.3f}", flush=True)
    held: list[tuple[int, int]] = [(0, 0)] * world_size
    dist.all_gather_object(held, (len(table.own.weight), table.sent_bytes))
    together = map(join_batches, zip(*dealt, strict=True))
    alone = train_in_one_process(together, args.rows, args.lr)
    pairs = [(table.own.weight, alone.get_parameter("table.weight")[rank::world_size])]
    pairs += zip(dense.parameters(), alone.dense.parameters(), strict=True)
    distance = max((own - other).abs().max() for own, other in pairs).detach()
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    indices, offsets, labels = held_out.batch(torch.arange(len(held_out)))
    with torch.no_grad():
        right = model(indices, offsets).argmax(1) == labels
    if rank == 0:
        for owner, (rows, sent) in enumerate(held):
            print(f"rank {owner} holds {rows:,} rows, sent {sent:,} bytes to look up")
        chance = 1 / len(PACKAGES)
        print(f"held-out accuracy {right.float().mean():.2f}, by chance {chance:.2f}")
        print(
            f"check: {args.steps} steps on {world_size} rank(s): {distance:.0e} from "
            f"where one process ends (limit {LIMIT:.0e})",
            flush=True,
        )
    return distance.item(), model


def one_shard(rank: int, port: int, args: argparse.Namespace) -> None:
    """Be one rank: join, train, leave; all know it if one has a wrong table."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # A rank that waits longer than this for another ends with an error.
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=args.nprocs,
        timeout=timedelta(seconds=60),
    )
    # DDP, in the model, holds on to the group, which has to go last. So it is not kept.
    distance = train_sharded(args)[0]
    dist.destroy_process_group()
    if not distance <= LIMIT:
        sys.exit(1)


def parse_args() -> argparse.Namespace:
    """Read the command line, and refuse what cannot work."""
    parser = argparse.ArgumentParser(description="Train with a table split by rows.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--nprocs", type=positive_int, default=2, help="ranks to start")
    add("--steps", type=positive_int, default=140, help="optimizer steps")
    add("--batch-size", type=positive_int, default=16, help="samples per rank")
    add("--rows", type=positive_int, default=ROWS, help="of the whole table")
    add("--lr", type=positive_float, default=0.1, help="learning rate")
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if args.nprocs > min(16, args.rows):
        refuse(f"--nprocs is at most 16, and a row for each, not {args.nprocs}")
    check_samples("--nprocs", args.nprocs, args.batch_size, args.rows)
    return args


def main() -> None:
    """Start the ranks, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = parse_args()
    # The ranks meet at this store. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(one_shard, args=(store.port, args), nprocs=args.nprocs)


if __name__ == "__main__":
    main()
