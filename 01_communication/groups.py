"""Some of the ranks among themselves: groups, a mesh, and messages with tags.

Run: torchrun --nproc-per-node=4 01_communication/groups.py
Expect: sums over the rows and the columns of a 2 x 2 table of ranks, made in two ways;
    two messages taken in the other order.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import check, gather, join, leave, say

ROWS = [[0, 1], [2, 3]]
COLUMNS = [[0, 2], [1, 3]]


def my_group(members: list[list[int]]) -> dist.ProcessGroup:
    """Make a group of each list of ranks; return the one that this rank is in.

    Every rank calls `new_group` for every group, also for those it is not in, and in
    the same order: by default it is a collective of the world.
    """
    groups = [dist.new_group(ranks) for ranks in members]
    # For a group that this rank is not in, new_group returns no ProcessGroup.
    (mine,) = [g for g in groups if isinstance(g, dist.ProcessGroup)]
    return mine


def who_is_in(group: dist.ProcessGroup) -> str:
    """Sum 10 to the power of the rank over a group: the digits say who took part."""
    total = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    return f"{total.item():04}"


def second_message_first() -> list[float]:
    """Rank 0 sends 1, then 2; rank 1 takes them in the other order, by their tags."""
    messages, received = torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)
    if dist.get_rank() == 0:
        works = [dist.isend(messages[i], dst=1, tag=i) for i in (0, 1)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
    elif dist.get_rank() == 1:
        dist.recv(received[0], src=0, tag=1)
        dist.recv(received[1], src=0, tag=0)
    return received.flatten().tolist()


def main() -> None:
    """Make the groups in two ways, and use tags."""
    join(at_least=4, at_most=4, only_cpu=True)
    rank = dist.get_rank()
    row, column = my_group(ROWS), my_group(COLUMNS)
    # A dimension of a mesh is named for the index that changes along it: ranks in one
    # row differ in their place across, ranks in one column in their place down.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("down", "across"))
    groups = (row, mesh.get_group("across"), column, mesh.get_group("down"))
    members = [who_is_in(group) for group in groups]
    say("       | row: new_group, mesh | column: new_group, mesh")
    for other, (a, b, c, d) in enumerate(gather(members)):
        say(f"rank {other} | {a:>14}, {b:>4} | {c:>17}, {d:>4}")
    tagged = second_message_first()
    say(f"tags: rank 1 has received {gather(tagged)[1]}")

    digits = [
        f"{sum(10**r for r in ranks):04}"
        for lists in (ROWS, ROWS, COLUMNS, COLUMNS)
        for ranks in lists
        if rank in ranks
    ]
    in_order = tagged == ([2.0, 1.0] if rank == 1 else [0.0, 0.0])
    is_right = members == digits and in_order
    check(is_right, "the members of 4 groups, and 2 tagged messages")
    leave()


if __name__ == "__main__":
    main()
