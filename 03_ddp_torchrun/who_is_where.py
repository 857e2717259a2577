"""Which rank runs where: one drawing of the nodes of a job and the ranks on them.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/who_is_where.py
Needs: this file. Several nodes make it worth looking at: the front page starts two.
Expect: a box for each node, a line in it for each rank; a `check:` that the numbers
    which torchrun gave to the ranks fit together.
Before: 02_ddp_mp/train.py
Next: 03_ddp_torchrun/train.py
"""

import os
from itertools import zip_longest

import torch.distributed as dist

from ranks import gather, join, leave, say

WIDTH = 32


def own_place() -> dict[str, int]:
    """Return the numbers that torchrun has given to this rank."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {name: int(os.environ[name]) for name in names}


def draw_nodes(places: list[dict[str, int]]) -> list[str]:
    """Draw the nodes, two in a row; `places` holds one entry a rank."""
    boxes = []
    for node in sorted({place["GROUP_RANK"] for place in places}):
        on_it = [place for place in places if place["GROUP_RANK"] == node]
        lines = [f"rank {p['RANK']}   local rank {p['LOCAL_RANK']}" for p in on_it]
        boxes.append(
            [f"┌─ node {node} ".ljust(WIDTH - 1, "─") + "┐"]
            + [f"│ {line}".ljust(WIDTH - 1) + "│" for line in lines]
            + ["└".ljust(WIDTH - 1, "─") + "┘"]
        )
    drawn = []
    for first in range(0, len(boxes), 2):
        pair = zip_longest(*boxes[first : first + 2], fillvalue=" " * WIDTH)
        drawn += ["  ".join(row).rstrip() for row in pair]
    return drawn


def check_places(places: list[dict[str, int]]) -> str:
    """Hold the ranks' numbers against each other.

    Raises:
        RuntimeError: they do not fit together.
    """
    nodes = sorted({place["GROUP_RANK"] for place in places})
    if [place["RANK"] for place in places] != list(range(places[0]["WORLD_SIZE"])):
        raise RuntimeError(f"ranks are missing, or there twice: {places}")
    for node in nodes:
        on_it = [place for place in places if place["GROUP_RANK"] == node]
        local_ranks = [place["LOCAL_RANK"] for place in on_it]
        if local_ranks != list(range(on_it[0]["LOCAL_WORLD_SIZE"])):
            raise RuntimeError(f"node {node} has the local ranks {local_ranks}")
    return f"{len(places)} ranks are numbered from 0, and so are those of each node"


def main() -> None:
    """Gather the places of all ranks, draw them, check them."""
    join(only_cpu=True)  # numbers alone are gathered, so that gloo will do anywhere
    places = gather(own_place() | {"RANK": dist.get_rank()})
    result = check_places(places)
    backend = dist.get_backend()
    say(f"world: {len(places)} ranks in one process group, backend {backend}")
    say("\n".join(draw_nodes(places)))
    say(f"check: {result}")
    leave()


if __name__ == "__main__":
    main()
