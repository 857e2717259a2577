"""The same model with no server: each rank holds a shard of the table's rows.

Run: python 04_rpc_parameter_server/sharded_tables.py
Expect: what each rank holds; losses and weights that are those of one process.
"""

from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

import classifier
from bags import shard_bags
from classifier import ROWS, WIDTH, Batch, HybridModel, Table, dense_part, draw_shard
from ranks import check, gather, join, leave, number, read_options, say, start_ranks

LR = 0.1


class AllToAll(torch.autograd.Function):
    """`all_to_all` with a gradient: what a rank has sent is what it gets one for."""

    @staticmethod
    def forward(ctx, sent: torch.Tensor) -> torch.Tensor:
        """Send the r-th of n equal parts to rank r; return the parts for this rank."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous())
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        """Send each part's gradient back to the rank that the part came from."""
        # Owners add up what the ranks send. DDP takes the mean: an n-th of each.
        return AllToAll.forward(ctx, gradients[0] / dist.get_world_size())


class ShardedTable(nn.Module):
    """One rank's rows, all that its `state_dict()` has; all ranks call it together."""

    def __init__(self, own: torch.Tensor) -> None:
        """Take the rows of this rank r of n: r, r + n, r + 2n, and so on, (rows, D)."""
        super().__init__()
        self.world_size = dist.get_world_size()
        self.own = nn.EmbeddingBag.from_pretrained(own, False, mode="sum", sparse=True)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sum up each bag's rows: (words,), (B,) to (B, D); B is equal on all ranks."""
        if self.own.mode != "sum":
            raise ValueError('owners\' parts of a bag add up only with mode="sum"')
        shards = shard_bags(indices, offsets, self.world_size)
        # 1. How many of your rows does each of my bags want?
        asked = torch.stack([counts for _, counts in shards])
        dist.all_to_all_single(lengths := torch.empty_like(asked), asked)
        # 2. Which ones? Unequal parts, whose lengths both sides know by now.
        to_send, to_receive = asked.sum(1).tolist(), lengths.sum(1).tolist()
        wanted = indices.new_empty(sum(to_receive))
        numbers = torch.cat([numbers for numbers, _ in shards])
        dist.all_to_all_single(wanted, numbers, to_receive, to_send)
        # 3. Each owner sums up its rows of everybody's bags and sends these sums back.
        # With two bags each, lengths [[2, 0], [1, 3]] are 2 and 0 rows for rank 0's, 1
        # and 3 for rank 1's; they begin at [2, 2, 3, 6] - [2, 0, 1, 3] of `wanted`.
        flat = lengths.flatten()
        sums = self.own(wanted, flat.cumsum(0) - flat)
        # Part s holds owner s's sums for my bags: add the parts.
        return AllToAll.apply(sums).view(self.world_size, len(offsets), -1).sum(0)


def train_sharded(batches: list[Batch], rows: int) -> tuple[HybridModel, list[float]]:
    """Take a step for each of this rank's batches; return the model and the losses."""
    table = ShardedTable(draw_shard(rows, dist.get_rank(), dist.get_world_size()))
    dense = nn.parallel.DistributedDataParallel(dense_part())
    model, losses = HybridModel(table, dense), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for indices, offsets, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(indices, offsets), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def main(steps: int) -> None:
    """Train on every rank; compare with one process."""
    join(only_cpu=True)
    rank, n = dist.get_rank(), dist.get_world_size()
    samples, _ = classifier.load_samples()
    batches = [list(islice(samples.batches(16, r, n), steps)) for r in range(n)]
    say(f"{n} rank(s) share a table of {ROWS:,} rows")
    model, losses = train_sharded(batches[rank], ROWS)
    own, means = model.get_parameter("table.own.weight"), torch.tensor(gather(losses))
    first, last = means[:, :10].mean(), means[:, -10:].mean()
    say(f"rank 0 holds {len(own):,}; mean loss {first:.3f}, at last {last:.3f}")
    alone = HybridModel(Table(ROWS, WIDTH, seed=0), dense_part())
    classifier.train_in_one_process(alone, zip(*batches, strict=True), LR, LR)
    pairs = [(own, alone.get_parameter("table.weight")[rank::n])]
    pairs += zip(model.dense.parameters(), alone.dense.parameters(), strict=True)
    apart = torch.tensor(gather([(a - b).abs().max().item() for a, b in pairs])).max()
    within = f"within {apart:.0e} of one process's (limit 1e-05)"
    check(apart < 1e-5, f"after {steps} steps all weights are {within}")
    leave()


if __name__ == "__main__":
    steps = {"type": number(1, 200), "default": 140, "help": "later rounding counts"}
    options = read_options(nprocs={"type": number(1, 16), "default": 2}, steps=steps)
    start_ranks(main, options.nprocs, options.steps)
