"""Try each call of gloo on tensors that are not contiguous: which results are right?

Run: torchrun --nproc-per-node=2 01_communication/failures/strides_table.py
Expect: each call is right, refused (an error) or wrong (without one). Where your
    PyTorch does otherwise than the table in this script says, the check fails.
"""

from typing import Any

import torch
import torch.distributed as dist

from ranks import check, gather, join, leave, say

TABLE = """\
which tensors:         all .t()  some .t()  all [:, ::2]  inputs .t()  outputs .t()
all_reduce             right     wrong      wrong         -            -
broadcast              right     wrong      wrong         -            -
reduce                 right     wrong      wrong         -            -
scatter                right     wrong      wrong         wrong        wrong
gather                 right     right      right         right        right
all_gather             right     right      right         right        right
all_gather_single      right     right      right         right        right
reduce_scatter         right     wrong      wrong         wrong        wrong
reduce_scatter_single  right     wrong      right         right        right
all_to_all             right     right      right         right        right
all_to_all_single      refused   refused    refused       refused      wrong
isend                  refused   refused    refused       refused      -
irecv                  refused   refused    refused       -            refused
all_to_all_single: Tensors must be contiguous
irecv: input tensor has to be contiguous
isend: input tensor has to be contiguous"""
# For each column: how inputs and outputs lie in memory on rank 0, then on the others.
# r is row by row, t column by column, g with gaps. Only r is contiguous.
LAYOUTS = ("tt tt", "rr tt", "gg gg", "tr tr", "rt rt")


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of these values that lies in memory as LAYOUTS says."""
    by_columns = values.t().contiguous().t()
    with_gaps = torch.stack([values, -values], dim=2).flatten(1)[:, ::2]
    return {"r": values.clone(), "t": by_columns, "g": with_gaps}[layout]


def try_call(name: str, given: str, taken: str) -> str:
    """Make a call, with inputs and outputs in these layouts; say what came of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    side, is_root, ranks = 2 * world_size, rank == 0, range(world_size)
    # What rank a has for rank b: a table of side x side numbers of its own.
    base = torch.arange(1.0, side**2 + 1).view(side, side)
    data = [[base + 100 * a + 1000 * b for b in ranks] for a in ranks]
    to_0, to_me = [row[0] for row in data], [row[rank] for row in data]
    my_rows = [table[2 * rank : 2 * rank + 2] for table in to_0]
    inputs = [lay_out(table, given) for table in data[rank]]
    outputs = [lay_out(torch.zeros(side, side), taken) for _ in ranks]
    mine, out = inputs[0], outputs[0]
    long, short = (lay_out(torch.zeros(n, side), taken) for n in (side * world_size, 2))
    send = dist.P2POp(dist.isend, mine, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, out, (rank - 1) % world_size)
    # The arguments, where the result is then, and what one process knows it has to be.
    calls: dict[str, tuple[list[Any], list[torch.Tensor], list[Any]]] = {
        "all_reduce": ([mine], [mine], [sum(to_0)]),
        "broadcast": ([mine, 0], [mine], [to_0[0]]),
        "reduce": ([mine, 0], [mine] * is_root, [sum(to_0)]),
        "scatter": ([out, inputs if is_root else None, 0], [out], [to_me[0]]),
        "gather": ([mine, outputs if is_root else None, 0], outputs * is_root, to_0),
        "all_gather": ([outputs, mine], outputs, to_0),
        "all_gather_single": ([long, mine], [long], [torch.cat(to_0)]),
        "reduce_scatter": ([out, inputs], [out], [sum(to_me)]),
        "reduce_scatter_single": ([short, mine], [short], [sum(my_rows)]),
        "all_to_all": ([outputs, inputs], outputs, to_me),
        "all_to_all_single": ([out, mine], [out], [torch.cat(my_rows)]),
        "isend": ([[send, receive]], [out], [to_0[rank - 1]]),
        "irecv": ([[receive, send]], [out], [to_0[rank - 1]]),
    }
    arguments, results, wanted = calls[name]
    is_batch = name in ("isend", "irecv")
    call = dist.batch_isend_irecv if is_batch else getattr(dist, name)
    try:
        for work in call(*arguments) or []:
            work.wait()
    except (RuntimeError, ValueError) as error:
        # Others may wait in this call: take part after all, with contiguous tensors.
        if given + taken != "rr":
            try_call(name, "r", "r")
        return str(error)
    return "right" if all(map(torch.equal, results, wanted)) else "wrong"


def main() -> None:
    """Make each call with each pair of layouts; fill a table and compare it."""
    join(at_least=2, only_cpu=True)
    header, *rows = TABLE.splitlines()
    refusals, lines = set(), [header]
    for name, *cells in (row.split() for row in rows if ":" not in row):
        for column, layouts in enumerate(LAYOUTS):
            if cells[column] != "-":  # this call has no such tensors
                found = gather(try_call(name, *layouts.split()[dist.get_rank() > 0]))
                errors = set(found) - {"right", "wrong"}
                refusals |= {f"{name}: {error}" for error in errors}
                cells[column] = "refused" if errors else max(found)  # wrong > right
        lines.append("{:22} {:9} {:10} {:13} {:12} {}".format(name, *cells))
    table = "\n".join(lines + sorted(refusals))
    say(table)
    check(table == TABLE, "every call does what the table in the script says")
    leave()


if __name__ == "__main__":
    main()
