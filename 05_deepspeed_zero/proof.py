"""What the ranks find out together about a ZeRO engine, and hold it against."""

import math
import sys
from typing import Any

import torch
import torch.distributed as dist

from data import global_batch

# Larger models are not trained a second time in one process, only to compare.
LARGEST_COPY = 20_000_000  # parameters

# Sums of float32 in another order differ by 1e-7 of the largest; Adam divides by what
# may be nearly zero, and every step builds on the last.
LOSS_LIMIT = 1e-4
WEIGHT_LIMIT = 1e-3


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a scalar over all ranks; every rank must call this, and all get it."""
    mean = value.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def expected_count(sizes: list[int], stage: int, world_size: int) -> int:
    """Return how many parameters the optimizer of one rank holds.

    Stage 0 keeps all on every rank. Stages 1 and 2 lay all tensors end to end and cut
    that into equal shares, padded with zeros to a multiple of twice the ranks, so that
    a share begins where NCCL likes messages to begin. Stage 3 cuts every tensor by
    itself and pads each.

    Args:
        sizes: the number of values in each tensor of the model.
        stage: the ZeRO stage.
        world_size: the number of ranks.
    """
    if stage == 0:
        return sum(sizes)
    if stage == 3:
        return sum(math.ceil(numbers / world_size) for numbers in sizes)
    return math.ceil(sum(sizes) / (2 * world_size)) * 2


def optimizer_count(engine: Any) -> int:
    """Count the parameters that this rank's optimizer holds, from the live tensors."""
    if engine.zero_optimization_stage() < 3:
        groups = engine.optimizer.param_groups
        return sum(p.numel() for group in groups for p in group["params"])
    # In stage 3 the groups are filled during a step only. This is what is put there.
    return sum(p.numel() for p in engine.optimizer.fp32_partitioned_groups_flat)


def adam_count(engine: Any) -> int:
    """Count this rank's second moments: what Adam really keeps, once it has stepped."""
    # In stages 1 to 3 the engine's optimizer wraps the one that does the arithmetic.
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sum(state["exp_avg_sq"].numel() for state in adam.state.values())


def describe_ranks(engine: Any) -> list[str]:
    """Return a line for each rank, in rank order, and one that explains the count.

    Every rank must call this.
    """
    stage, world_size = engine.zero_optimization_stage(), dist.get_world_size()
    settings = engine.optimizer.param_groups[0]
    own = (
        f"stage {stage} | lr {settings['lr']}, betas {settings['betas']}, eps "
        f"{settings['eps']} | parameter count {optimizer_count(engine):,}"
    )
    by_rank = [""] * world_size
    dist.all_gather_object(by_rank, own)
    lines = [f"rank {rank} | {line}" for rank, line in enumerate(by_rank)]
    sizes = tensor_sizes(engine)
    total, share = sum(sizes), expected_count(sizes, stage, world_size)
    if world_size == 1:
        return [
            *lines,
            "one rank: nothing can be divided; this starts two:",
            f"  deepspeed --num_gpus=2 {sys.argv[0]}",
        ]
    if stage == 0:
        return [*lines, f"all {total:,} parameters on each rank: nothing is divided"]
    how = f"each of {len(sizes)} tensors" if stage == 3 else f"{total:,} parameters"
    padding = share * world_size - total
    zeros = f", with {padding} zeros to make the shares equal" if padding else ""
    return [*lines, f"{how} divided by {world_size} ranks is {share:,}{zeros}"]


def tensor_sizes(engine: Any) -> list[int]:
    """Return the number of values in each tensor of the model, wherever they are."""
    # Stage 3 leaves an empty tensor in the model and keeps the true number aside.
    return [getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()]


def whole_weights(engine: Any) -> list[torch.Tensor]:
    """Return copies of all weights; in stage 3 every rank must call this."""
    import deepspeed

    copies = []
    for parameter in engine.module.parameters():
        # In stage 3 this gathers one tensor from all ranks; else it does nothing.
        with deepspeed.zero.GatheredParameters([parameter]):
            copies.append(parameter.detach().clone())
    return copies


def train_alone(
    model: Any, settings: dict[str, Any], tokens: torch.Tensor, batches: list[int]
) -> list[float]:
    """Train in this process alone, on the samples of all ranks at once.

    Args:
        model: the model before its first step; it is changed.
        settings: Adam's options, and in max_norm the gradient's largest norm or 0.
        tokens: the text.
        batches: how many samples each step takes, and how long they are.

    Returns:
        The loss of each step.
    """
    names = ("lr", "betas", "eps", "weight_decay")
    adam = torch.optim.AdamW(model.parameters(), **{n: settings[n] for n in names})
    steps, samples, block_size = batches
    device, losses = next(model.parameters()).device, []
    for step in range(steps):
        inputs = global_batch(tokens, step, samples, block_size).to(device)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        if settings["max_norm"] > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def check_engine(
    engine: Any,
    untrained: Any,
    tokens: torch.Tensor,
    block_size: int,
    losses: list[float],
) -> str:
    """Check a trained engine on this rank, and by agreement on all of them.

    Args:
        engine: as it is after the last step.
        untrained: a copy of the model as it was before the first step, on the engine's
            device, or None to leave out the comparison with one process.
        tokens: the text.
        block_size: tokens in a sample.
        losses: the mean loss over all ranks of each step.

    Returns:
        What was compared and how close it was, for the `check:` line.

    Raises:
        RuntimeError: the lesson has gone wrong on this rank or another.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stage, sizes = engine.zero_optimization_stage(), tensor_sizes(engine)
    expected = expected_count(sizes, stage, world_size)
    miscounted = float({optimizer_count(engine), adam_count(engine)} != {expected})
    weights = torch.cat([one.flatten() for one in whole_weights(engine)]).float()
    of_rank_zero = weights.clone()
    dist.broadcast(of_rank_zero, src=0)
    # Compared as integers, so that every bit counts: -0.0 equals 0.0, and NaN nothing.
    different = weights.view(torch.int32) != of_rank_zero.view(torch.int32)
    loss_error = weight_error = torch.zeros(())
    if untrained is not None:
        before = torch.nn.utils.parameters_to_vector(untrained.parameters()).detach()
        alone, alone_losses = before.clone(), torch.zeros(len(losses))
        if rank == 0:
            samples = engine.train_micro_batch_size_per_gpu() * world_size
            shape = [len(losses), samples, block_size]
            settings = dict(engine.optimizer.param_groups[0])
            settings["max_norm"] = engine.gradient_clipping()
            alone_losses += torch.tensor(
                train_alone(untrained, settings, tokens, shape)
            )
            alone = torch.nn.utils.parameters_to_vector(untrained.parameters()).detach()
        alone_losses = alone_losses.to(alone.device)
        dist.broadcast(alone, src=0)
        dist.broadcast(alone_losses, src=0)
        own_losses = torch.tensor(losses, device=alone.device)
        loss_error = (own_losses - alone_losses).abs().max()
        weight_error = (weights - alone).norm() / (alone - before).norm()
    # Every rank learns the worst of all ranks, so that all of them stop together.
    worst = torch.tensor(
        [miscounted, float(different.sum()), float(loss_error), float(weight_error)],
        device=weights.device,
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    count, bits, loss_error, weight_error = worst.tolist()
    result = (
        f"{expected:,} Adam states on each of {world_size} rank(s), {bits:.0f} weights "
        "differ between ranks"
    )
    if untrained is not None:
        result += (
            f"\ncheck: losses {loss_error:.0e} from one process's (limit "
            f"{LOSS_LIMIT:.0e}), "
            f"weights {weight_error:.0e} (limit {WEIGHT_LIMIT:.0e})"
        )
    close = loss_error < LOSS_LIMIT and weight_error < WEIGHT_LIMIT
    if count or bits or not close:
        found = result.replace("\ncheck:", ",")
        raise RuntimeError(f"not what one process computes: {found}")
    return result
