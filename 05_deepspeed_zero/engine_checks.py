"""What a ZeRO engine holds on each rank, and what one process alone comes to."""

import math
import shlex
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import gather
from text import next_token_loss

# How far the losses, and the last gradient norm and the weights, may be from one
# process's after ten steps: the weights as a part of the way they have come. Sums in
# another order are rounded otherwise, Adam divides by what may be nearly zero, and
# every step builds on the last.
LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (2e-3, 3e-2)}


def mean_over_ranks(value: Tensor) -> float:
    """All-reduce a scalar; every rank must call this, and all get the mean."""
    mean = value.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def tensor_sizes(engine: Any) -> list[int]:
    """Return the number of values in each tensor of the model, wherever they are."""
    # Stage 3 leaves an empty tensor in the model and keeps the true number aside.
    return [getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()]


def expected_count(sizes: list[int], stage: int, world_size: int) -> int:
    """Return how many parameters the optimizer of one rank holds.

    Stage 0 keeps all on every rank. Stages 1 and 2 lay all tensors end to end and cut
    that into equal partitions, padded with zeros to a multiple of twice the ranks, so
    that each begins where NCCL likes messages to begin. Stage 3 partitions every tensor
    by itself and pads each.

    Args:
        sizes: the number of values in each tensor of the model.
        stage: the ZeRO stage.
        world_size: the number of ranks.
    """
    if stage == 0:
        return sum(sizes)
    if stage == 3:
        return sum(math.ceil(length / world_size) for length in sizes)
    return math.ceil(sum(sizes) / (2 * world_size)) * 2


def optimizer_count(engine: Any) -> int:
    """Count the parameters that this rank's optimizer holds, from the live tensors."""
    if engine.zero_optimization_stage() < 3:
        groups = engine.optimizer.param_groups
        return sum(p.numel() for group in groups for p in group["params"])
    # In stage 3 the groups are filled during a step only. This is what is put there.
    return sum(p.numel() for p in engine.optimizer.fp32_partitioned_groups_flat)


def moment_count(engine: Any) -> int:
    """Count this rank's second moments: what Adam really keeps, once it has stepped."""
    # The engine's optimizer may wrap the one that does the arithmetic.
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sum(state["exp_avg_sq"].numel() for state in adam.state.values())


def describe_ranks(engine: Any) -> list[str]:
    """Return a line for each rank, and what explains them; every rank calls this."""
    stage, world_size = engine.zero_optimization_stage(), dist.get_world_size()
    settings = engine.optimizer.param_groups[0]
    mine = (
        f"stage {stage} | lr {settings['lr']}, betas {settings['betas']}, eps "
        f"{settings['eps']} | parameter count {optimizer_count(engine):,}"
    )
    lines = [f"rank {rank} | {line}" for rank, line in enumerate(gather(mine))]
    sizes = tensor_sizes(engine)
    total, partition = sum(sizes), expected_count(sizes, stage, world_size)
    if world_size == 1:
        start = f"  deepspeed --num_gpus=2 {shlex.quote(sys.argv[0])}"
        return [*lines, "one rank: nothing can be partitioned; this starts two:", start]
    if stage == 0:
        return [*lines, f"all {total:,} parameters on each rank: none is partitioned"]
    what = f"each of {len(sizes)} tensors" if stage == 3 else f"{total:,} parameters"
    padding = partition * world_size - total
    zeros = f", with {padding} zeros as padding" if padding else ""
    return [*lines, f"{what} partitioned among {world_size}: {partition:,}{zeros}"]


def whole_weights(engine: Any) -> list[Tensor]:
    """Return copies of all weights; in stage 3 every rank must call this."""
    import deepspeed

    copies = []
    for parameter in engine.module.parameters():
        # In stage 3 this gathers one tensor from all ranks; else it does nothing.
        with deepspeed.zero.GatheredParameters([parameter]):
            copies.append(parameter.detach().clone())
    return copies


def whole_count(engine: Any) -> tuple[int, int]:
    """Count the weights that are whole after a step; also as the config has it."""
    # After `whole_weights` this would be none: it also frees what should stay whole.
    weights = [p.numel() for p in engine.module.parameters()]
    sizes, most = tensor_sizes(engine), engine.zero_param_persistence_threshold()
    if engine.zero_optimization_stage() == 3:
        sizes = [n for n in sizes if n <= most]
    return sum(weights), sum(sizes)


def partitioned_evenly(engine: Any) -> tuple[bool, str]:
    """Compare what this rank holds with the formulas, for `ranks.check`."""
    stage, world_size = engine.zero_optimization_stage(), dist.get_world_size()
    expected = expected_count(tensor_sizes(engine), stage, world_size)
    whole, expected_whole = whole_count(engine)
    is_right = optimizer_count(engine) == moment_count(engine) == expected
    claim = (
        f"optimizer state of {expected:,} parameters, {expected_whole:,} whole "
        f"weights on each of {world_size} rank(s)"
    )
    return is_right and whole == expected_whole, claim


def train_alone(
    model: Any,
    dtype: torch.dtype,
    settings: dict[str, Any],
    batches: list[tuple[Tensor, ...]],
) -> tuple[list[float], float]:
    """Train in this process alone, on the micro-batch of each rank in turn.

    Weights and gradients are of `dtype`; Adam steps on fp32 master weights.

    Args:
        model: the model before its first step; it is changed.
        dtype: in which it computes.
        settings: Adam's options, and in max_norm the gradient's largest norm.
        batches: the micro-batches of each step.

    Returns:
        The mean loss of each step, and the gradient's norm in the last one.
    """
    parameters, losses, norm = list(model.parameters()), [], 0.0
    for p in parameters:
        p.data = p.data.to(dtype)
    masters = [p.detach().clone().float() for p in parameters]
    names = ("lr", "betas", "eps", "weight_decay")
    adam = torch.optim.AdamW(masters, **{name: settings[name] for name in names})
    for micro_batches in batches:
        losses.append(0.0)
        for inputs in micro_batches:
            loss = next_token_loss(model, inputs)
            loss.backward()  # gradients add up
            losses[-1] += loss.item() / len(micro_batches)
        for p, master in zip(parameters, masters, strict=True):
            master.grad, p.grad = (p.grad / len(micro_batches)).float(), None
        norm = nn.utils.clip_grad_norm_(masters, settings["max_norm"]).item()
        adam.step()
        for p, master in zip(parameters, masters, strict=True):
            p.data.copy_(master)
    return losses, norm


def same_as_one_process(
    engine: Any,
    untrained: Any,
    batch_of: Callable[[int], Tensor],
    losses: list[float],
) -> tuple[bool, str]:
    """Compare a trained engine with one process, for `ranks.check`; all ranks call it.

    Args:
        engine: as it is after the last step.
        untrained: a copy of the model as it was before the first step.
        batch_of: returns the global batch of a step.
        losses: the mean loss over all ranks of each step.
    """
    weights = torch.cat([one.flatten() for one in whole_weights(engine)])
    untrained = untrained.to(weights.device)
    before = nn.utils.parameters_to_vector(untrained.parameters()).detach()
    settings = dict(engine.optimizer.param_groups[0])
    settings["max_norm"] = engine.gradient_clipping() or math.inf
    batches = [
        batch_of(step).to(weights.device).chunk(dist.get_world_size())
        for step in range(len(losses))
    ]
    expected, norm = train_alone(untrained, weights.dtype, settings, batches)
    alone = nn.utils.parameters_to_vector(untrained.parameters()).detach()
    pairs = torch.tensor([losses, expected], dtype=torch.float64)
    loss_error = (pairs[0] - pairs[1]).abs().max().item()  # max() would drop a NaN
    # Adam takes the same step for a sum of gradients as for their mean, but their norms
    # differ. Only stage 0 in fp32 does not tell its own.
    norm_error = abs(float(engine.get_global_grad_norm() or norm) / norm - 1)
    way = (alone.float() - before).norm()
    weight_error = ((weights.float() - alone.float()).norm() / way).item()
    longer = max(1, len(losses) / 10)
    loss_limit, weight_limit = (limit * longer for limit in LIMITS[weights.dtype])
    claim = (
        f"losses {loss_error:.0e} from one process's (limit {loss_limit:.0e}), "
        f"gradient norm {norm_error:.0e}, weights {weight_error:.0e} (limit "
        f"{weight_limit:.0e})"
    )
    is_close = norm_error < weight_limit and weight_error < weight_limit
    return loss_error < loss_limit and is_close, claim
