"""Which rank runs where: the nodes of a job, the ranks on them, and who downloads.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/cluster/who_is_where.py
Expect: a box for each node, a line in it for each rank; which ranks download, where the
    nodes have disks of their own and where they share one.
"""

import os
from collections.abc import Callable
from itertools import zip_longest

import torch.distributed as dist

from ranks import check, gather, join, leave, say

WIDTH = 32


def own_place() -> dict[str, int]:
    """Return the numbers that torchrun has given to this rank."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {name: int(os.environ[name]) for name in names}


def once_per_disk(download: Callable[[], object], is_shared: bool) -> None:
    """Let one rank download to each disk while the others wait; every rank calls this.

    The disk is one that all nodes share, or each node has its own.
    """
    number = dist.get_rank() if is_shared else dist.get_node_local_rank()
    if number == 0:
        download()
    # All wait until the downloads are complete, or fail at the group's timeout.
    dist.barrier()


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


def fit_together(places: list[dict[str, int]]) -> bool:
    """Tell whether the ranks are numbered from 0, and those of each node as well."""
    right = [place["RANK"] for place in places] == list(range(places[0]["WORLD_SIZE"]))
    for node in {place["GROUP_RANK"] for place in places}:
        on_it = [place for place in places if place["GROUP_RANK"] == node]
        local_ranks = [place["LOCAL_RANK"] for place in on_it]
        right &= local_ranks == list(range(on_it[0]["LOCAL_WORLD_SIZE"]))
    return right


def main() -> None:
    """Gather the places of all ranks, draw them, download, check."""
    join(only_cpu=True)  # numbers alone are gathered, so that gloo will do anywhere
    places = gather(own_place() | {"RANK": dist.get_rank()})
    say(
        f"world: {len(places)} ranks in one process group, backend {dist.get_backend()}"
    )
    say("\n".join(draw_nodes(places)))

    downloaded: dict[bool, list[int]] = {}
    for is_shared in (False, True):
        done: list[bool] = []
        once_per_disk(lambda done=done: done.append(True), is_shared)
        downloaded[is_shared] = [rank for rank, d in enumerate(gather(done)) if d]
    say(f"a disk in each node | ranks {downloaded[False]} download")
    say(f"one disk for all    | ranks {downloaded[True]} download")

    firsts = [place["RANK"] for place in places if place["LOCAL_RANK"] == 0]
    check(
        fit_together(places) and downloaded == {False: firsts, True: [0]},
        f"{len(places)} ranks are numbered from 0, and so are those of each node",
    )
    leave()


if __name__ == "__main__":
    main()
