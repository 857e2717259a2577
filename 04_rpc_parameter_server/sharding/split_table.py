"""A table sharded by rows over several servers: its shards, and how to train."""

import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import classifier
from bags import shard_bags
from classifier import WIDTH, Batch, EagerSGD, HybridModel, dense_part, draw_shard
from ranks import check, gather, say

LR = 0.1


class TableShard(nn.EmbeddingBag):
    """The rows of a table that one of n servers holds; the whole is never in memory."""

    def __init__(self, rows: int, shard: int, n: int) -> None:
        """Keep every n-th row, beginning with `shard`."""
        own = draw_shard(rows, shard, n)
        # No other mode: `SplitTable` adds up the servers' parts of a bag.
        super().__init__(len(own), WIDTH, mode="sum", sparse=True, _weight=own)


class SplitTable(nn.Module):
    """A table whose rows are sharded over several servers; called with `offsets`.

    They stay there: its `state_dict()` and `parameters()` are empty.
    """

    def __init__(self, shards: list[RemoteModule]) -> None:
        """Take the shards in their order."""
        super().__init__()
        self.shards: Any = shards

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sum up the rows of each bag, wherever they are: (words,), (B,) to (B, D)."""
        # All requests leave before the first answer is waited for. Each server answers
        # with a sum for every bag, which is zero where a bag has none of its rows.
        parts = shard_bags(indices, offsets, len(self.shards))
        answers = [
            shard.forward_async(numbers, counts.cumsum(0) - counts)
            for shard, (numbers, counts) in zip(self.shards, parts, strict=True)
        ]
        return torch.stack([answer.wait() for answer in answers]).sum(0)


def synchronous_step(
    model: HybridModel,
    of_table: DistributedOptimizer,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
) -> None:
    """Step the table on all servers and the dense part here, together with all."""
    indices, offsets, labels = batch
    with dist_autograd.context() as context_id:
        loss = cross_entropy(model(indices, offsets), labels)
        # All trainers have looked up when DDP's all-reduce in here is done.
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
        for parameter in model.dense.parameters():
            parameter.grad = gradients[parameter]
        optimizer.step()
        of_table.step(context_id)  # on all servers at once
    dist.barrier()  # nobody looks up again before all have stepped


def train_in_turn(
    tables: list[list[RemoteModule]], batches: list[Batch]
) -> list[tuple[torch.Tensor, float]]:
    """Train a model on each table, a step of each in turn.

    Returns for each the dense weights, flattened, and the median seconds of a step.
    """
    runs = []
    for shards in tables:
        dense = DistributedDataParallel(dense_part())
        weights = [weight for shard in shards for weight in shard.remote_parameters()]
        # The steps of all trainers add up in the table, while DDP takes the mean.
        of_table = DistributedOptimizer(EagerSGD, weights, LR / dist.get_world_size())
        optimizer = torch.optim.SGD(dense.parameters(), LR)
        runs.append((HybridModel(SplitTable(shards), dense), of_table, optimizer))
    seconds: list[list[float]] = [[] for _ in runs]
    for batch in batches:
        for (model, of_table, optimizer), times in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            synchronous_step(model, of_table, optimizer, batch)
            times.append(time.perf_counter() - began)
    flatten = torch.nn.utils.parameters_to_vector
    return [
        (flatten(run[0].dense.parameters()).detach(), sorted(times)[len(times) // 2])
        for run, times in zip(runs, seconds, strict=True)
    ]


def compare(tables: list[list[RemoteModule]], steps: int, rows: int) -> None:
    """Be a trainer: train on all tables, and compare with one process."""
    n, samples = dist.get_world_size(), classifier.load_samples(rows)[0]
    batches = [list(islice(samples.batches(32, r, n), steps)) for r in range(n)]
    alone = HybridModel(classifier.Table(rows, WIDTH, seed=0), dense_part())
    classifier.train_in_one_process(alone, zip(*batches, strict=True), LR, LR)
    wanted = torch.nn.utils.parameters_to_vector(alone.dense.parameters())
    apart = []
    results = train_in_turn(tables, batches[dist.get_rank()])
    for shards, (dense, seconds) in zip(tables, results, strict=True):
        apart.append((dense - wanted).abs().max().item())
        table = alone.get_parameter("table.weight")
        for number, shard in enumerate(shards):
            end = shard.remote_parameters()[0].to_here()
            apart.append((end - table[number :: len(shards)]).abs().max().item())
        say(f"with {len(shards)} server(s), a step takes {1e3 * seconds:.1f} ms")
    worst = torch.tensor(gather(apart)).max()  # max() would drop a NaN
    claim = f"{len(tables)} tables are within {worst:.0e} of one process's"
    check(worst < 1e-5, f"{claim} (limit 1e-05)")
