"""What the ZeRO paper says a rank holds and sends, and what DeepSpeed adds to it.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, https://arxiv.org/abs/1910.02054: section 3.1 and figure 1 for what is
held, section 7 for what is sent.
"""

from typing import NamedTuple


class Bytes(NamedTuple):
    """Bytes for each parameter: of its weight, its gradient, its optimizer states."""

    weight: int
    gradient: int
    states: int


# Mixed precision is the paper's 2 + 2 + 12: the states are a float32 copy of the weight
# and Adam's two averages. In float32 no copy is needed, so it is 4 + 4 + 8.
MIXED, FLOAT32 = Bytes(2, 2, 12), Bytes(4, 4, 8)
# But DeepSpeed keeps a copy of its share in stages 1 to 3, also in float32.
FLOAT32_COPY = Bytes(4, 4, 12)
PRECISIONS = ("fp32", "bf16")
KINDS = ("parameters", "gradients", "optimizer")


def bytes_for_each(precision: str, stage: int) -> Bytes:
    """Return what DeepSpeed keeps for a parameter, before anything is divided."""
    if precision == "bf16":
        return MIXED
    return FLOAT32_COPY if stage else FLOAT32


def bytes_held(
    parameters: int, stage: int, world_size: int, precision: str
) -> dict[str, float]:
    """Return the bytes of each kind on one rank, by the paper's three divisions.

    Stage 1 divides the optimizer's states by the ranks, stage 2 the gradients too, and
    stage 3 the parameters too.
    """
    each = bytes_for_each(precision, stage)
    divided = {"parameters": stage >= 3, "gradients": stage >= 2, "optimizer": stage}
    return {
        kind: parameters * number / (world_size if divided[kind] else 1)
        for kind, number in zip(KINDS, each, strict=True)
    }


def values_added(
    sizes: list[int], stage: int, rank: int, world_size: int, threshold: int
) -> dict[str, float]:
    """Return what DeepSpeed holds beyond the paper's formula, in values, by kind.

    Args:
        sizes: the number of values in each tensor of the model.
        stage: the ZeRO stage.
        rank: this rank.
        world_size: the number of ranks.
        threshold: tensors of fewer values are never given away in stage 3.
    """
    total = sum(sizes)
    none: dict[str, float] = dict.fromkeys((*KINDS, "gathered"), 0.0)
    if stage == 0:
        return none
    if stage == 3:
        # Every tensor is cut by itself, so each may need some zeros at its end.
        padding = sum(-(-n // world_size) for n in sizes) - total / world_size
        small = sum(n for n in sizes if n < threshold)
        return {**dict.fromkeys(KINDS, padding), "gathered": small}
    # All tensors end to end, cut into equal shares of an even number of values.
    share = -(-total // (2 * world_size)) * 2
    padding = share - total / world_size
    start, stop, place, kept = rank * share, (rank + 1) * share, 0, 0
    for n in sizes:
        # A tensor that is cut between two ranks leaves its whole gradient on both.
        kept += n if place < stop and place + n > start else 0
        place += n
    whole = kept - total / world_size if stage == 2 else 0.0
    zeros = share * world_size - total
    return {**none, "parameters": zeros, "gradients": whole, "optimizer": padding}


def values_sent(stage: int) -> int:
    """Return what a rank sends in one step, in values for each parameter.

    An all-reduce counts as two: it is a reduce-scatter and an all-gather, each of which
    sends (n - 1) / n values for each parameter, nearly one. Stages 1 and 2 leave the
    sums where they are needed and gather the new weights instead. Stage 3 gathers the
    weights for the forward pass and again for the backward pass.
    """
    return 3 if stage == 3 else 2
