"""What all ranks find out together, and what they check it against."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import WindowDataset
from model import GPT

TOLERANCE = 1e-5  # of the largest entry: float32 sums in another order differ by 1e-7


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a scalar over all ranks; every rank must call this, and all get it."""
    mean = value.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


@torch.no_grad()
def validate(model: GPT, held_out: WindowDataset, device: torch.device) -> float:
    """Mean loss in nats per byte on unseen text; every rank must call it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(2, device=device)  # the loss summed over samples; samples
    for start in range(rank, len(held_out), 32 * world_size):
        indices = range(start, len(held_out), world_size)[:32]
        inputs, labels = held_out.batch(indices)
        total[0] += model(inputs.to(device), labels.to(device)) * len(indices)
        total[1] += len(indices)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def epoch_report(
    batch_size: int, grad_accum_steps: int, seen: list[int], losses: torch.Tensor
) -> list[str]:
    """Tell what every rank did in an epoch; every rank must call this.

    Args:
        batch_size: samples in one batch of one rank.
        grad_accum_steps: batches in one step of one rank.
        seen: the indices of the samples that this rank trained on.
        losses: this rank's own mean loss of each step, shape (steps,).

    Returns:
        One line a rank, in rank order, and one about their sum.

    Raises:
        RuntimeError: a sample was seen twice, or there were more or fewer of them than
            batch size x batches x ranks.
    """
    world_size, batches = dist.get_world_size(), len(losses) * grad_accum_steps
    by_rank: list[tuple[list[int], float]] = [([], 0.0)] * world_size
    dist.all_gather_object(by_rank, (seen, losses.mean().item()))
    expected = batch_size * batches * world_size
    everything = [index for indices, _ in by_rank for index in indices]
    if len(everything) != expected or len(set(everything)) != expected:
        raise RuntimeError(
            f"the ranks saw {len(everything)} samples, {len(set(everything))} of them "
            f"different; batch size x batches x ranks is {expected}"
        )
    counted = f"steps {len(losses)}"
    if grad_accum_steps > 1:
        counted += f" of {grad_accum_steps} batches"
    lines = [
        f"rank {rank} | batch size {batch_size} | {counted} | own loss {loss:.3f}"
        for rank, (_, loss) in enumerate(by_rank)
    ]
    product = f"{batch_size} x {batches} x {world_size} = {expected}"
    return [*lines, f"batch size x batches x ranks = {product} different samples"]


def different_weights(module: torch.nn.Module) -> int:
    """Count this rank's weights that are not, bit for bit, those of rank zero."""
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    of_rank_zero = mine.clone()
    dist.broadcast(of_rank_zero, src=0)
    # Compared as integers, so that every bit counts: -0.0 equals 0.0, and NaN nothing.
    return int((mine.view(torch.int32) != of_rank_zero.view(torch.int32)).sum())


def gradient_error(
    ddp_model: DistributedDataParallel, inputs: torch.Tensor, labels: torch.Tensor
) -> float:
    """Compare DDP's gradient with one process's on everybody's samples at once.

    Args:
        ddp_model: the model, whose gradients are overwritten.
        inputs: (samples x ranks, T), the same on every rank. A rank takes its own part.
        labels: as `inputs`.

    Returns:
        The largest difference, as a share of the largest entry of the gradient.
    """
    model = ddp_model.module
    parameters = list(model.parameters())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = torch.autograd.grad(model(inputs, labels), parameters)
    ddp_model.zero_grad()
    own_inputs = inputs.chunk(world_size)[rank]
    own_labels = labels.chunk(world_size)[rank]
    ddp_model(own_inputs, own_labels).backward()
    error, largest = 0.0, 0.0
    for parameter, reference in zip(parameters, alone, strict=True):
        assert parameter.grad is not None
        error = max(error, (parameter.grad - reference).abs().max().item())
        largest = max(largest, reference.abs().max().item())
    return error / largest


def check_run(
    ddp_model: DistributedDataParallel, inputs: torch.Tensor, labels: torch.Tensor
) -> str:
    """Check a trained model on this rank, and by agreement on all of them.

    Returns:
        What was compared and how close it was, for the `check:` line.

    Raises:
        RuntimeError: the lesson has gone wrong on this rank or another.
    """
    different = different_weights(ddp_model.module)
    error = gradient_error(ddp_model, inputs, labels)
    # Every rank learns the worst of all ranks, so that all of them stop together.
    worst = torch.tensor([float(different), error], device=inputs.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    result = (
        f"{int(worst[0])} weights differ on {dist.get_world_size()} rank(s), gradient "
        f"{worst[1]:.0e} from one process's (limit {TOLERANCE:.0e})"
    )
    if worst[0] != 0 or not worst[1] < TOLERANCE:
        raise RuntimeError(f"the ranks do not agree: {result}")
    return result
