"""What is counted and checked: alone, on every rank, and on a model that was saved."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from terrain import Terrain

# Of the largest entry. Sums of float32 in another order differ by about 1e-7 of it.
TOLERANCE = 1e-5


@torch.no_grad()
def rmse_in_metres(
    model: nn.Module, held_out: TensorDataset, terrain: Terrain
) -> float:
    """Root of the mean squared error on places that no rank trained on, in metres.

    Give this the plain model. DDP is for training; here nobody else needs to call.
    """
    device = next(model.parameters()).device
    places, heights = (tensor.to(device) for tensor in held_out.tensors)
    return mse_loss(model(places), heights).sqrt().item() * terrain.std


def batch_gradient(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the gradient of the mean loss on a batch, as one row of numbers."""
    places, heights = batch
    loss = mse_loss(model(places), heights)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def check_shares(model: nn.Module, held_out: TensorDataset) -> str:
    """Compare the gradient of a batch with the mean of those of its two halves.

    Raises:
        RuntimeError: they differ. Then no data parallelism would be possible.
    """
    device = next(model.parameters()).device
    places, heights = (tensor[:64].to(device) for tensor in held_out.tensors)
    whole = batch_gradient(model, (places, heights))
    halves = zip(places.chunk(2), heights.chunk(2), strict=True)
    mean = torch.stack([batch_gradient(model, half) for half in halves]).mean(dim=0)
    error = ((mean - whole).abs().max() / whole.abs().max()).item()
    result = (
        f"mean gradient of two half batches {error:.0e} from that of the whole "
        f"(limit {TOLERANCE:.0e})"
    )
    if not error < TOLERANCE:
        raise RuntimeError(f"no longer true: {result}")
    return result


def count_epoch(
    batch_size: int, seen: list[torch.Tensor], losses: torch.Tensor
) -> list[str]:
    """Tell what every rank did in an epoch; every rank must call this.

    Args:
        batch_size: points in one batch of one rank.
        seen: the places in each batch that this rank trained on, each (B, 2).
        losses: this rank's own mean loss of each step, shape (steps,).

    Returns:
        One line a rank, in rank order, and two about all of them.

    Raises:
        RuntimeError: a place was seen twice, or there were more or fewer of them than
            batch size x steps x ranks.
    """
    world_size, steps = dist.get_world_size(), len(losses)
    mine = (torch.cat(seen).tolist(), losses.mean().item())
    by_rank: list[tuple[list[list[float]], float]] = [mine] * world_size
    dist.all_gather_object(by_rank, mine)
    everything = [(x, y) for places, _ in by_rank for x, y in places]
    expected = batch_size * steps * world_size
    if len(everything) != expected or len(set(everything)) != expected:
        raise RuntimeError(
            f"the ranks saw {len(everything)} points, {len(set(everything))} of them "
            f"different; batch size x steps x ranks is {expected}"
        )
    lines = [
        f"rank {rank} | batch size {batch_size} | steps {steps} | own loss {loss:.3f}"
        for rank, (_, loss) in enumerate(by_rank)
    ]
    product = f"{batch_size} x {steps} x {world_size} = {expected} different points"
    mean = sum(loss for _, loss in by_rank) / world_size
    return [
        *lines,
        f"batch size x steps x ranks = {product}",
        f"mean loss over ranks {mean:.3f}",
    ]


def different_weights(module: torch.nn.Module) -> int:
    """Count this rank's weights that are not, bit for bit, those of rank zero."""
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    of_rank_zero = mine.clone()
    dist.broadcast(of_rank_zero, src=0)
    # Compared as integers, so that every bit counts: -0.0 equals 0.0, and NaN nothing.
    return int((mine.view(torch.int32) != of_rank_zero.view(torch.int32)).sum())


def check_ranks(ddp_model: nn.Module, model: nn.Module, held_out: TensorDataset) -> str:
    """Check a trained model on this rank, and by agreement on all of them.

    Args:
        ddp_model: what makes the mean of the gradients; they are overwritten.
        model: the plain model inside it.
        held_out: a rank takes 32 of these points, the next 32 belong to the next rank.

    Returns:
        What was compared and how close it was, for the `check:` line.

    Raises:
        RuntimeError: the lesson has gone wrong on this rank or another.
    """
    different = different_weights(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    places, heights = (t[: 32 * world_size].to(device) for t in held_out.tensors)
    alone = batch_gradient(model, (places, heights))
    ddp_model.zero_grad()
    own_places, own_heights = (t.chunk(world_size)[rank] for t in (places, heights))
    mse_loss(ddp_model(own_places), own_heights).backward()
    together = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    error = (torch.cat(together) - alone).abs().max() / alone.abs().max()
    # Every rank learns the worst of all ranks, so that all of them stop together.
    worst = torch.stack([torch.tensor(float(different), device=device), error])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    result = (
        f"{int(worst[0])} weights differ on {world_size} rank(s), gradient "
        f"{worst[1]:.0e} from one process's (limit {TOLERANCE:.0e})"
    )
    if worst[0] != 0 or not worst[1] < TOLERANCE:
        raise RuntimeError(f"the ranks do not agree: {result}")
    return result
