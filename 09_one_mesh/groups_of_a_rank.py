"""The groups of a rank on a mesh: who is in them, by arithmetic, and what they share.

`sizes` are the lengths of the axes, by name; the last axis varies fastest.
"""

import math
from itertools import combinations
from typing import Any

import torch.distributed as dist

from ranks import gather

BATCH = "data x context"
# What the ranks of a group share, and what they send each other.
SHARED = {
    "tensor": "same layers, same tokens; all-reduce activations, 4 times a block",
    "context": "same weights, same samples, other tokens; send keys and values",
    "pipeline": "same tokens, other layers; send activations and their gradients",
    "data": "same weights, other samples; reduce gradients, shard by ZeRO or FSDP",
    BATCH: "same weights, other tokens; reduce gradients, shard by ZeRO or FSDP",
    "expert": "other experts, else the same weights; send tokens there and back",
    "copies of the experts": "same experts; reduce their gradients",
}


def members(rank: int, sizes: dict[str, int], *axes: str) -> list[int]:
    """Return the ranks that differ from `rank` in their place on these axes alone.

    rank = ((d * P + p) * C + c) * T + t: on the last axis neighbours are 1 apart, on
    the one before it T, then C * T, then P * C * T.
    """
    found, stride = [rank], 1
    for axis, length in reversed(sizes.items()):
        place = rank // stride % length
        if axis in axes:
            found = [r + (i - place) * stride for r in found for i in range(length)]
        stride *= length
    return sorted(found)


def groups_are_right(groups: Any, sizes: dict[str, int], is_real: bool) -> bool:
    """Compare this rank's groups with arithmetic; real ranks all call this."""
    rank, world_size, is_right = dist.get_rank(), math.prod(sizes.values()), True
    for name, group in groups.items():
        axes = name.split(" x ")
        mine = members(rank, sizes, *axes)
        is_right &= dist.get_process_group_ranks(group) == mine
        is_right &= not is_real or gather(rank, group) == mine
        in_groups: list[int] = []
        seen: set[int] = set()
        for other in range(world_size):
            if other not in seen:  # one call for each group: an axis may be long
                in_groups += members(other, sizes, *axes)
                seen.update(in_groups[-len(mine) :])
        is_right &= sorted(in_groups) == list(range(world_size))  # each rank, once
    for one, other in combinations(sizes, 2):
        both = {*members(rank, sizes, one)} & {*members(rank, sizes, other)}
        is_right &= both == {rank}
    return is_right


def told(name: str, group: list[int]) -> str:
    """Return two lines about a group: its ranks, and what they do with each other."""
    some = group if len(group) < 5 else [*group[:2], "...", group[-1]]
    return f"{name}, {len(group)} ranks: {' '.join(map(str, some))}\n    {SHARED[name]}"


def report(rank: int, groups: dict[str, list[int]], expert_ranks: int) -> list[str]:
    """Return two lines for each group of a rank that has other ranks in it.

    `groups` are those along the axes, and of data x context. So many ranks of the
    latter share the experts; ranks with one place in their groups have the same ones.
    """
    shown, batch, e = dict(groups), groups[BATCH], expert_ranks
    if len(groups["context"]) == 1:
        del shown[BATCH]  # it is the group of the data axis
    i = batch.index(rank)
    shown["expert"] = batch[i // e * e :][:e]
    shown["copies of the experts"] = batch[i % e :: e] if e > 1 else []
    return [told(n, shown[n]) for n in SHARED if len(shown.get(n, "")) > 1]
