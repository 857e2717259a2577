"""The most that a rank holds in a step, which is for a moment only: worked out.

After the last gradient a step takes more before it takes less. Gradients are copied
into one row, to be sent or for Adam, and Adam needs room to compute in. Found by
reading DeepSpeed 0.19.8 and PyTorch 2.13.0; held.py compares it with what it counts.
"""

from collections.abc import Mapping

from paper import KINDS, bytes_for_each, values_added

# Float32 values that Adam needs for a moment, for each value that it steps: PyTorch's
# as it is on a CPU, one tensor after the other; PyTorch's as it is on a GPU, all
# tensors at once; and DeepSpeed's own, which is one compiled function.
ADAMS = {"single": 2, "foreach": 1, "deepspeed": 0}
# Stage 0 copies this many values together to send them, whatever the config says.
STAGE_0_BUCKET = 500_000_000
SUB_GROUP = 1_000_000_000  # sub_group_size: stage 3 steps so many values at a time


def values_sent_together(sizes: list[int]) -> int:
    """Return the values in the longest row that stage 0 copies gradients into."""
    longest = row = 0
    for n in sizes:
        row += n
        longest = max(longest, row)
        row = 0 if row > STAGE_0_BUCKET else row
    return longest


def most_in_step(
    held: Mapping[str, float],
    sizes: list[int],
    stage: int,
    rank: int,
    world_size: int,
    precision: str,
    adam: str,
) -> float:
    """Return the most bytes that a rank holds between its last gradient and the next.

    In stage 1 ranks after the first may hold up to a tenth less: they have let go of
    other gradients before they copy their own.

    Args:
        held: bytes of KINDS and of the buckets at the last gradient.
        sizes: the number of values in each tensor of the model.
        stage: the ZeRO stage.
        rank: this rank.
        world_size: the number of ranks.
        precision: "fp32" or "bf16".
        adam: one of ADAMS.
    """
    weights, gradients, states = (held[kind] for kind in KINDS)
    total, each = sum(sizes), bytes_for_each(precision, stage)
    # In bfloat16 Adam's gradients are a copy in float32.
    cast = 0 if precision == "fp32" else 4
    if stage == 0:
        # The last tensor's room is given back when the next one's is there.
        room = 3 * max(sizes) if adam == "single" else ADAMS[adam] * total
        on_top = [each.gradient * values_sent_together(sizes), cast * total + 4 * room]
        return weights + gradients + states + max(on_top)
    stepped = states / each.states  # the values of this rank's share
    if stage == 3:
        # The share's gradients stay. A part at a time is copied for Adam.
        stepped = min(stepped, SUB_GROUP)
        kept = gradients + held["buckets"]
        on_top = [kept + each.gradient * stepped + cast * stepped]
    else:
        # Gradients that belong to other ranks are let go, and so are the buckets.
        added = values_added(sizes, 2, rank, world_size, 0)["gradients"]
        own = each.gradient * (total / world_size + added)
        kept = 0.0
        on_top = [own + each.gradient * stepped + cast * stepped]
        if stage == 1:
            # Before that its own are copied, when a bucket's are in the bucket.
            on_top.append(max(gradients, held["buckets"]) + own)
    on_top.append(kept + 4 * (1 + ADAMS[adam]) * stepped)
    return weights + states + max(on_top)
