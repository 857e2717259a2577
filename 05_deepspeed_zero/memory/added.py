"""What DeepSpeed keeps on a rank beyond the ZeRO paper's formula.

Found by reading 0.19.8; memory_per_rank.py compares it with what it counts.
"""

from typing import NamedTuple

from paper import FLOAT32, KINDS, MIXED, Bytes, divide, paper_bytes


def bytes_for_each(precision: str, stage: int, accumulate: str = "") -> Bytes:
    """Return DeepSpeed's bytes for a parameter, before anything is divided.

    In float32 it keeps master weights too, in stages 1 to 3, although the weights are
    their own. With gradients accumulated in "fp32" (`grad_accum_dtype`), stage 1 keeps
    a buffer for all of them beside those that backward computes in bf16. In stages 2
    and 3 it is the divided gradients that are in fp32.
    """
    if precision == "fp32":
        return FLOAT32._replace(states=12 if stage else 8)
    if accumulate != "fp32":
        return MIXED
    return MIXED._replace(gradient=2 + 4 if stage == 1 else 4)


def bytes_held(
    parameters: int, stage: int, world_size: int, precision: str, accumulate: str = ""
) -> dict[str, float]:
    """Return DeepSpeed's bytes of each kind, as if every tensor could be divided."""
    each = bytes_for_each(precision, stage, accumulate)
    return divide(each, parameters, stage, world_size)


def shard_length(total: int, world_size: int) -> int:
    """Return the values in a rank's shard in stages 1 and 2, an even number."""
    return -(-total // (2 * world_size)) * 2


def own_tensors(sizes: list[int], rank: int, world_size: int) -> list[int]:
    """Return the sizes of the tensors that a rank's shard has a part of.

    Stages 1 and 2 lay all tensors end to end and divide the whole.
    """
    shard, place, own = shard_length(sum(sizes), world_size), 0, []
    for n in sizes:
        if place < (rank + 1) * shard and place + n > rank * shard:
            own.append(n)
        place += n
    return own


def fullest_rank(sizes: list[int], world_size: int) -> int:
    """Return the rank whose `own_tensors` have the most values: it needs the most."""
    shard, place, values = shard_length(sum(sizes), world_size), 0, [0] * world_size
    for n in sizes:
        for rank in range(place // shard, -(-(place + n) // shard)):
            values[rank] += n
        place += n
    return values.index(max(values))


def values_added(
    sizes: list[int], stage: int, rank: int, world_size: int, threshold: int
) -> dict[str, float]:
    """Return how many values more a rank has, since tensors are of the sizes they are.

    Args:
        sizes: the number of values in each tensor of the model.
        stage: the ZeRO stage.
        rank: this rank.
        world_size: the number of ranks.
        threshold: tensors of up to so many values stay whole in stage 3.
    """
    total = sum(sizes)
    none: dict[str, float] = dict.fromkeys((*KINDS, "gathered"), 0.0)
    if stage == 0:
        return none
    if stage == 3:
        # Every tensor is divided by itself, so each may need some zeros at its end.
        padding = sum(-(-n // world_size) for n in sizes) - total / world_size
        small = sum(n for n in sizes if n <= threshold)
        return {**dict.fromkeys(KINDS, padding), "gathered": small}
    shard = shard_length(total, world_size)
    added = {"parameters": shard * world_size - total, "gradients": 0.0}
    if stage == 2:
        # A tensor that two shards meet in leaves its whole gradient on both ranks.
        own = own_tensors(sizes, rank, world_size)
        added["gradients"] = sum(own) - total / world_size
    return {**none, **added, "optimizer": shard - total / world_size}


class Run(NamedTuple):
    """What decides what DeepSpeed adds on a rank."""

    sizes: list[int]  # values in each tensor of the model
    stage: int
    rank: int
    world_size: int
    precision: str
    accumulate: str = ""  # "fp32": gradients are accumulated in it
    threshold: int = 100_000  # stage 3: tensors of up to so many stay whole
    bucket: int = 500_000_000  # tensors of more values are reduced by themselves


def bytes_added(run: Run) -> dict[str, float]:
    """Return what DeepSpeed keeps beyond the paper's formula, in bytes by kind.

    Weights that are "gathered" are the small tensors of stage 3; what else is gathered
    when it is needed, and the buckets, depend on the settings.
    """
    sizes, stage, rank, world_size, precision, accumulate = run[:6]
    total, each = sum(sizes), bytes_for_each(precision, stage, accumulate)
    more = values_added(sizes, stage, rank, world_size, run.threshold)
    paper = paper_bytes(total, stage, world_size, precision)
    held = bytes_held(total, stage, world_size, precision, accumulate)
    added = {
        kind: held[kind] + number * more[kind] - paper[kind]
        for kind, number in zip(KINDS, each, strict=True)
    }
    if accumulate and stage == 2:
        # An fp32 shard. What has gone through a bucket is nowhere else; a tensor that
        # is larger than a bucket leaves its gradient in bf16, until the last one.
        alone = sum(n for n in own_tensors(sizes, rank, world_size) if n > run.bucket)
        shard = 4 * shard_length(total, world_size)
        added["gradients"] = shard + 2 * alone - paper["gradients"]
    return {**added, "gathered": each.weight * more["gathered"]}


def bucket_bytes(run: Run) -> int:
    """Return the bytes of the buffer from which a rank reduces gradients.

    It is as large as it is set, also if the whole model would fit into it. Stage 0 has
    none, nor has stage 1 if it accumulates in float32.
    """
    if run.stage == 0 or (run.stage == 1 and run.accumulate):
        return 0
    return run.bucket * bytes_for_each(run.precision, run.stage).weight
