"""Let some of the ranks talk among themselves, and compute while a message travels.

Run: torchrun --nproc-per-node=4 01_communication/groups.py
Needs: requirements.txt, and exactly 4 ranks. Uses the CPU and gloo: it shows who talks
    to whom, and what `wait` promises on a CPU.
Expect: sums over the rows and the columns of a 2 x 2 table of ranks, made in two ways;
    a message that is not there before its last sender has called; and the time of
    communication before a computation against communication during it.
Before: 01_communication/collectives.py, where all ranks take part.
Next: 01_communication/ring_all_reduce.py, an all-reduce made of sends.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROWS = [[0, 1], [2, 3]]
COLUMNS = [[0, 2], [1, 3]]


def make_groups(members: list[list[int]]) -> dist.ProcessGroup:
    """Make a group of each list of ranks; return the one that holds this rank.

    Every rank must call this, with the same lists in the same order: `new_group` is
    itself a collective of the whole world, also for the ranks that stay outside.
    """
    mine = None
    for ranks in members:
        group = dist.new_group(ranks)
        # A rank that is not in the list gets a mark instead of a group.
        if isinstance(group, dist.ProcessGroup):
            mine = group
    assert mine is not None
    return mine


def total(group: dist.ProcessGroup) -> int:
    """Add up 10 to the power of the rank in a group: its digits say who took part."""
    x = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(x, group=group)
    return int(x)


def is_done_early(group: dist.ProcessGroup) -> bool | None:
    """Ask a handle whether it is done while the last rank of `group` has not called.

    Returns None on that last rank. On the others the answer cannot be yes.
    """
    x = torch.ones(1)
    is_last = (
        dist.get_group_rank(group, dist.get_rank()) == dist.get_world_size(group) - 1
    )
    work = None if is_last else dist.all_reduce(x, group=group, async_op=True)
    early = work.is_completed() if work else None
    # The barrier belongs to another group, the world, whose calls have an order of
    # their own. The last rank joins the sum only when the others have asked.
    dist.barrier()
    if is_last:
        dist.all_reduce(x, group=group)
    if work:
        # Until this returns, x may hold anything. Then it holds the sum: on a CPU the
        # process itself is made to wait.
        work.wait()
    assert x.item() == dist.get_world_size(group)
    return early


def seconds_for(message: torch.Tensor, matrix: torch.Tensor, overlap: bool) -> float:
    """Time one all-reduce of `message` and one product, one after or beside the other.

    The product does not need the message. `message` is overwritten by the sum.
    """
    dist.barrier()
    start = time.perf_counter()
    work = dist.all_reduce(message, async_op=overlap)
    torch.mm(matrix, matrix)
    if work:
        work.wait()
    return time.perf_counter() - start


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Make the groups in two ways, look at a handle, measure the overlap."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Show groups, and work meanwhile.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        refuse("needs 4 ranks; start it with torchrun --nproc-per-node=4")
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank = dist.get_rank()
    row, column = make_groups(ROWS), make_groups(COLUMNS)
    by_hand = {"row": total(row), "column": total(column)}
    # A mesh dimension is named for the index that changes along it: ranks in one row
    # differ in their place across, ranks in one column in their place down.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("down", "across"))
    by_mesh = {
        "row": total(mesh.get_group("across")),
        "column": total(mesh.get_group("down")),
    }
    expected = {
        name: sum(10**r for ranks in lists if rank in ranks for r in ranks)
        for name, lists in {"row": ROWS, "column": COLUMNS}.items()
    }
    early = is_done_early(row)
    matrix, sums_are_right = torch.ones(400, 400), True
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(12):
        message = torch.full((1 << 20,), float(rank))
        seconds[repeat % 2 == 1].append(seconds_for(message, matrix, repeat % 2 == 1))
        sums_are_right &= bool((message == 0 + 1 + 2 + 3).all())
    is_right = by_hand == by_mesh == expected and not early and sums_are_right
    by_rank: list[Any] = [None] * 4
    dist.all_gather_object(by_rank, (by_hand, by_mesh, early, is_right))
    if rank == 0:
        print("sum of 10 to the power of the rank; the digits say who took part")
        print("       | row: by new_group, by mesh | column: by new_group, by mesh")
        for r, (hand, meshed, _, _) in enumerate(by_rank):
            cells = [hand["row"], meshed["row"], hand["column"], meshed["column"]]
            a, b, c, d = (f"{cell:04}" for cell in cells)
            print(f"rank {r} | {a:>17}, {b:>7} | {c:>20}, {d:>7}")
        print("is the sum over the row done before its last rank has called?")
        for r, (_, _, answer, _) in enumerate(by_rank):
            print(f"rank {r} | {'the last to call' if answer is None else answer}")
        apart, beside = (statistics.median(seconds[how]) for how in (False, True))
        print(
            f"all-reduce of 4 MB, and a product: {apart * 1e3:.1f} ms in turn, "
            f"{beside * 1e3:.1f} ms overlapped, ratio {beside / apart:.2f}"
        )
    dist.destroy_process_group()
    wrong = [r for r, (_, _, _, right) in enumerate(by_rank) if not right]
    if wrong:
        sys.exit(f"not what one process computes, on ranks {wrong}" if rank == 0 else 1)
    if rank == 0:
        print(
            "check: sums of rows and columns equal by new_group, by mesh and by hand, "
            "on 4 ranks"
        )


if __name__ == "__main__":
    main()
