"""What the ranks begin with, and what each collective makes of it, in plain Python.

`rows` is what all ranks have, in rank order; `rows[rank]` is a list of numbers.
"""

import math
from collections.abc import Callable, Sequence

Row = list[float]
Rows = list[Row]


def numbers_before(world_size: int) -> Rows:
    """Give rank 0 the numbers 1, 2, 3, rank 1 10, 20, 30, and so on.

    So one sees where a number comes from, even in a sum.
    """
    places = range(1, world_size + 1)
    return [[float(10**rank * place) for place in places] for rank in range(world_size)]


def first(rows: Rows, rank: int, root: int) -> Row:
    """Return every rank's first number."""
    return [row[0] for row in rows]


def own_column(rows: Rows, rank: int, root: int) -> Row:
    """Return what every rank has at this rank's place."""
    return [row[rank] for row in rows]


def own_sum(rows: Rows, rank: int, root: int) -> Row:
    """Return the sum over the ranks at this rank's place."""
    return [sum(row[rank] for row in rows)]


def by_place(function: Callable[[Sequence[float]], float]) -> Callable:
    """Apply `function` to what all ranks have at a place, for one place at a time."""
    return lambda rows, rank, root: [function(c) for c in zip(*rows, strict=True)]


# What `rank` must have after a call. None stands for undefined numbers.
EXPECTED: dict[str, Callable[[Rows, int, int], Row | None]] = {
    "broadcast": lambda rows, rank, root: rows[root],
    "scatter": lambda rows, rank, root: [rows[root][rank]],
    "gather": lambda rows, rank, root: first(rows, 0, 0) if rank == root else None,
    "all_gather": first,
    "reduce_scatter": own_sum,
    "all_reduce": by_place(sum),
    "reduce": lambda rows, rank, root: (
        by_place(sum)(rows, 0, 0) if rank == root else None
    ),
    "all_to_all": own_column,
    "barrier": lambda rows, rank, root: [len(rows)],
    "all_reduce AVG": by_place(lambda numbers: sum(numbers) / len(numbers)),
    "all_reduce PRODUCT": by_place(math.prod),
    "all_reduce MIN": by_place(min),
    "all_reduce MAX": by_place(max),
    "all_gather_single": first,
    "reduce_scatter_single": own_sum,
    "all_to_all_single": own_column,
}


def agrees(name: str, after: Row, rows: Rows, rank: int, root: int) -> bool:
    """Compare up to rounding: for a mean, some backends divide before they add.

    `name` may go on after " = " with the calls that one call equals.
    """
    expected = EXPECTED[name.split(" = ")[0]](rows, rank, root)
    if expected is None:
        return True
    return len(after) == len(expected) and all(map(math.isclose, after, expected))


def table(name: str, before: Rows, after: Rows) -> str:
    """Write what every rank has before and after a call, in columns."""
    columns = []
    for rows in (before, after):
        width = max((len(f"{n:.10g}") for row in rows for n in row), default=0)
        columns.append([" ".join(f"{n:{width}.10g}" for n in row) for row in rows])
    pairs = enumerate(zip(*columns, strict=True))
    lines = [f"  rank {rank} | {old} -> {new}" for rank, (old, new) in pairs]
    return "\n".join([name, *lines])
