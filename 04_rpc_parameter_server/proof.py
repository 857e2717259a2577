"""What the trainers find out together when they are done, and hold it against."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.nn.functional import cross_entropy

from data import PACKAGES, Batch, Samples
from model import WIDTH, HybridModel, Table, dense_part
from table import table_gradient, whole_table

if TYPE_CHECKING:
    from trainer import Settings

TOLERANCE = 1e-5  # of the largest entry; sums of float32 in another order: 1e-7


def table_of(weights: torch.Tensor) -> Table:
    """Make a local table with these rows."""
    table = Table(*weights.shape, seed=0)
    with torch.no_grad():
        table.weight.copy_(weights)
    return table


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference, as a share of the reference's largest entry."""
    return ((value - reference).abs().max() / reference.abs().max()).item()


def gradient_error_of_table(model: HybridModel, batch: Batch) -> float:
    """Compare the gradient that arrives on the server with local autograd's.

    Every trainer must call this, and none may be stepping meanwhile.
    """
    indices, offsets, labels = batch
    labels = labels.to(model.device)
    with dist_autograd.context() as context_id:
        loss = cross_entropy(model(indices, offsets), labels)
        dist_autograd.backward(context_id, [loss])
        arrived = rpc.rpc_sync("parameter_server", table_gradient, args=(context_id,))
        table = table_of(rpc.rpc_sync("parameter_server", whole_table))
    dense = getattr(model.dense, "module", model.dense)  # without DDP
    assert isinstance(dense, torch.nn.Module)
    local = HybridModel(table, dense, model.device)
    loss = cross_entropy(local(indices, offsets), labels)
    (expected,) = torch.autograd.grad(loss, table.weight)
    return relative_error(arrived, expected.to_dense())


def different_dense_weights(model: HybridModel) -> int:
    """Count this trainer's dense weights that are not, bit for bit, trainer 0's."""
    mine = torch.cat([p.detach().flatten() for p in model.dense.parameters()])
    of_trainer_zero = mine.clone()
    dist.broadcast(of_trainer_zero, src=0)
    # Compared as integers, so that every bit counts: NaN equals nothing, not itself.
    return int((mine.view(torch.int32) != of_trainer_zero.view(torch.int32)).sum())


def train_locally(
    before: torch.Tensor, training: Samples, settings: "Settings", steps: int
) -> HybridModel:
    """Do one trainer's work in this process alone: no RPC, no DDP, a plain SGD."""
    dense = dense_part(WIDTH, len(PACKAGES), settings.seed)
    model = HybridModel(table_of(before), dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    done = 0
    for epoch in range(settings.epochs):
        for indices, offsets, labels in training.batches(epoch, settings.batch_size):
            if done == steps:
                return model
            optimizer.zero_grad()
            cross_entropy(model(indices, offsets), labels).backward()
            optimizer.step()
            done += 1
    return model


def check_trainer(
    model: HybridModel,
    settings: "Settings",
    training: Samples,
    held_out: Samples,
    before: torch.Tensor,
    steps: int,
) -> list[str]:
    """Check what this trainer can see; every trainer calls this after its last step.

    Args:
        model: trained.
        settings: of the run.
        training: the samples trained on.
        held_out: samples of other files.
        before: the table before the first step.
        steps: how many were taken.

    Returns:
        What was compared on all trainers and how close it was.

    Raises:
        RuntimeError: the lesson has gone wrong, on this trainer or another.
    """
    dist.barrier()  # nobody steps any more
    rank = dist.get_rank()
    after = rpc.rpc_sync("parameter_server", whole_table)
    looked_up = torch.zeros(len(before), dtype=torch.bool)
    looked_up[training.indices] = True
    moved = int((after != before)[~looked_up].any(dim=1).sum())
    touched = int((after != before).any(dim=1).sum())
    different = different_dense_weights(model)
    batch = held_out.batch(torch.arange(rank, len(held_out), 64))
    error = gradient_error_of_table(model, batch)
    local = 0.0
    if settings.trainers == 1:
        alone = train_locally(before, training, settings, steps)
        local = relative_error(after, next(alone.table.parameters()).detach())
        for mine, theirs in zip(
            model.dense.parameters(), alone.dense.parameters(), strict=True
        ):
            local = max(local, relative_error(mine.detach().cpu(), theirs.detach()))
    # Every trainer learns the worst of all, so that all of them agree.
    worst = torch.tensor([different, moved, error, local], device=model.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    lines = [
        f"{int(worst[0])} dense weights differ on {dist.get_world_size()} trainer(s)",
        f"the table's gradient is {worst[2]:.0e} from local autograd's "
        f"(limit {TOLERANCE:.0e})",
        f"{touched} of {len(before)} rows have moved, {int(worst[1])} of them "
        "never looked up",
    ]
    if settings.trainers == 1:
        lines.append(
            f"{steps} steps end {worst[3]:.0e} from those of one process alone "
            f"(limit {TOLERANCE:.0e})"
        )
    wrong = worst[0] > 0 or worst[1] > 0 or touched == 0
    if wrong or not worst[2] < TOLERANCE or not worst[3] < TOLERANCE:
        raise RuntimeError(f"the lesson has gone wrong: {'; '.join(lines)}")
    return lines
