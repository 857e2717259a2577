"""What ranks begin with, and what each collective must make of it, without PyTorch.

A rank's numbers are a list, and those of all ranks a list of such lists in rank order.
"""

import math
from collections.abc import Callable, Sequence

Row = list[float]
Rows = list[Row]


def numbers_before(places: int | None, world_size: int) -> Rows:
    """Give every rank its numbers: 1, 2, 3 on rank 0, 10, 20, 30 on rank 1, and so on.

    So one sees where a number comes from, even in a sum. `places` is how many numbers
    a rank gets; None stands for as many as there are ranks.
    """
    count = world_size if places is None else places
    return [
        [float(10**rank * (place + 1)) for place in range(count)]
        for rank in range(world_size)
    ]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Write the numbers of each row into columns of one width."""
    width = max((len(f"{n:.10g}") for row in rows for n in row), default=0)
    return [" ".join(f"{n:{width}.10g}" for n in row) or "(nothing)" for row in rows]


def agrees(after: Row, expected: Row | None) -> bool:
    """Compare up to rounding: for a mean, some backends divide before they sum."""
    if expected is None:
        return True
    return len(after) == len(expected) and all(map(math.isclose, after, expected))


def each_place(function: Callable[[Row], float]) -> Callable[[Rows, int, int], Row]:
    """Apply `function` to what all ranks hold at a place, for one place at a time."""
    return lambda rows, rank, root: [function(list(c)) for c in zip(*rows, strict=True)]


def all_rows(rows: Rows, rank: int, root: int) -> Row:
    """Put the ranks' numbers one after the other."""
    return [number for row in rows for number in row]


def own_column(rows: Rows, rank: int, root: int) -> Row:
    """Take the number at this rank's place from every rank."""
    return [row[rank] for row in rows]


def own_sum(rows: Rows, rank: int, root: int) -> Row:
    """Sum what all ranks hold at this rank's place."""
    return [sum(own_column(rows, rank, root))]


sums = each_place(sum)

# From what all ranks hold before, a rank and the root to what that rank holds after.
# None stands for a tensor about which nothing is promised.
EXPECTED: dict[str, Callable[[Rows, int, int], Row | None]] = {
    "scatter": lambda rows, rank, root: [rows[root][rank]],
    "gather": lambda rows, rank, root: all_rows(rows, 0, 0) if rank == root else [],
    "broadcast": lambda rows, rank, root: rows[root],
    "reduce": lambda rows, rank, root: sums(rows, 0, 0) if rank == root else None,
    "all_reduce SUM": sums,
    "all_reduce AVG": each_place(lambda numbers: sum(numbers) / len(numbers)),
    "all_reduce PRODUCT": each_place(math.prod),
    "all_reduce MIN": each_place(min),
    "all_reduce MAX": each_place(max),
    "all_reduce by pieces": sums,
    "all_reduce by root": sums,
    "all_gather": all_rows,
    "all_gather_single": all_rows,
    "reduce_scatter": own_sum,
    "reduce_scatter_single": own_sum,
    "all_to_all": own_column,
    "all_to_all_single": own_column,
    "barrier": lambda rows, rank, root: [len(rows)],
}
