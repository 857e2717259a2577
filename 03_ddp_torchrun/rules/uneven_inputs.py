"""Train on unequal numbers of batches: the hang, `join`, and stopping together.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/uneven_inputs.py
Expect: a rank with more batches waits in vain; after `join` the weights diverge in the
    next step; where all ranks stop together, they are those of one process.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from ranks import check, gather, join, leave, same_on_all_ranks, say


def train_batches(model: torch.nn.Module, optimizer: SGD, batches: Iterable) -> None:
    """Train on all batches. Under DDP each step needs all ranks."""
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()


def train_joined(ddp_model: DDP, optimizer: SGD, batches: Iterable) -> None:
    """Let ranks that have run out add zeros, and get the weights of the last one."""
    with ddp_model.join():
        train_batches(ddp_model, optimizer, batches)


def train_together(ddp_model: DDP, optimizer: SGD, batches: Iterable) -> None:
    """End the epoch on all ranks as soon as one of them has no batch left."""
    train_batches(ddp_model, optimizer, while_all_have(batches, ddp_model.device))


def while_all_have(batches: Iterable, device: torch.device) -> Iterator:
    """Yield this rank's batches as long as every rank has one; all must ask."""
    for batch in chain(batches, [None]):
        has_batch = torch.tensor(int(batch is not None), device=device)
        dist.all_reduce(has_batch, op=dist.ReduceOp.MIN)
        if not has_batch:
            return
        yield batch


def batches_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw a rank's batches of 4 samples: rank 0 has 3, each next rank has 2 more."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(4, 8, generator=generator) for _ in range(3 + 2 * rank)]
    return [(inputs, inputs.sum(1, keepdim=True) + rank) for inputs in drawn]


def linear_model() -> tuple[torch.nn.Linear, SGD]:
    """Make the same model and optimizer every time."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, bias=False)
    return model, SGD(model.parameters(), lr=0.05, momentum=0.9)


def wait_in_vain(batches: list) -> list[str]:
    """Train with no care and a timeout of 3 s; return the error of each rank."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model, optimizer = linear_model()
    try:
        train_batches(DDP(model, process_group=group), optimizer, batches)
    except RuntimeError as timeout:
        return gather(str(timeout).split("] ", 1)[-1])  # what follows gloo's file, line
    return gather("")


def main() -> None:
    """Train an epoch in each way, take a step more, and compare with one process."""
    join(at_least=2, only_cpu=True)
    everyone = [batches_of(rank) for rank in range(dist.get_world_size())]
    batches = everyone[dist.get_rank()]
    say(f"train_batches  | rank 1, step 4: {wait_in_vain(batches)[1]}")
    for loop in (train_joined, train_together):
        model, optimizer = linear_model()
        loop(ddp_model := DDP(model), optimizer, batches)
        before = same_on_all_ranks(model.parameters())
        train_batches(ddp_model, optimizer, batches[:1])
        after = same_on_all_ranks(model.parameters())
        say(f"{loop.__name__:14} | equal weights: {before}, a step later: {after}")

    # One process takes those steps with the samples of all ranks.
    alone, optimizer = linear_model()
    shared = zip(*everyone, strict=False)
    merged = [[torch.cat(x) for x in zip(*step, strict=True)] for step in shared]
    train_batches(alone, optimizer, [*merged, merged[0]])
    is_same = after and torch.allclose(model.weight, alone.weight, atol=1e-6)
    check(is_same, "after train_together all ranks hold the weights of one process")
    leave()


if __name__ == "__main__":
    main()
