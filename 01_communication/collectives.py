"""A collective is a call that all ranks make together: here is each one, with numbers.

Run: torchrun --nproc-per-node=3 01_communication/collectives.py
Needs: expected.py beside it. A GPU for every rank is used if there is one.
Expect: for each collective, what every rank holds before and after it, in rank order;
    then a `check:` that plain Python finds the same for every rank.
Before: 01_communication/send_recv.py
Next: 01_communication/objects.py, the same with what is no tensor.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from expected import EXPECTED, Row, agrees, aligned, numbers_before

# Each call takes this rank's tensor and the root's rank; it returns what the rank holds
# afterwards. All ranks must make the same calls in the same order. What is to be filled
# is made beforehand, of the right shape; NaN would show what was not filled.


def try_scatter(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Get a piece of the root's tensor; only the root says which pieces there are."""
    received = torch.full_like(mine[:1], math.nan)
    pieces = list(mine.chunk(dist.get_world_size()))
    dist.scatter(received, pieces if dist.get_rank() == root else None, src=root)
    return received


def try_gather(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Collect everybody's tensor on the root; the other ranks get nothing."""
    if dist.get_rank() != root:
        dist.gather(mine, None, dst=root)
        return mine[:0]
    received = [torch.full_like(mine, math.nan) for _ in range(dist.get_world_size())]
    dist.gather(mine, received, dst=root)
    return torch.cat(received)


def try_broadcast(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Overwrite everybody's tensor with the root's."""
    dist.broadcast(mine, src=root)
    return mine


def try_reduce(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Overwrite the root's tensor with the sum of all; the others may become scrap."""
    dist.reduce(mine, dst=root, op=dist.ReduceOp.SUM)
    return mine


def try_all_reduce(
    mine: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Overwrite everybody's tensor with the sum of all, or what else `op` makes."""
    dist.all_reduce(mine, op=op)
    return mine


def try_all_gather(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Collect everybody's tensor on every rank; all must have one shape."""
    received = [torch.full_like(mine, math.nan) for _ in range(dist.get_world_size())]
    dist.all_gather(received, mine)
    return torch.cat(received)


def try_reduce_scatter(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Sum all tensors; each rank gets the piece of the sum at its own place."""
    received = torch.full_like(mine[:1], math.nan)
    dist.reduce_scatter(received, list(mine.chunk(dist.get_world_size())))
    return received


def try_all_to_all(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Deal a piece to each rank and get one from each: rows become columns."""
    pieces = list(mine.chunk(dist.get_world_size()))
    received = [torch.full_like(piece, math.nan) for piece in pieces]
    dist.all_to_all(received, pieces)
    return torch.cat(received)


def try_barrier(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Wait for all; count the ranks that had called when this one was let go."""
    # The processes of one machine read one and the same monotonic clock.
    called = mine.new_full((1,), time.monotonic())
    dist.barrier()
    let_go = time.monotonic()
    return (try_all_gather(called, root) <= let_go).sum(dim=0, keepdim=True)


# The `_single` forms cut one tensor into equal parts where the others take a list. Two
# of them have older names that now warn: all_gather_into_tensor, reduce_scatter_tensor.


def try_all_gather_single(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Do what all_gather does, into one tensor."""
    received = torch.full_like(mine, math.nan).repeat(dist.get_world_size())
    dist.all_gather_single(received, mine)
    return received


def try_reduce_scatter_single(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Do what reduce_scatter does, from one tensor."""
    received = torch.full_like(mine[:1], math.nan)
    dist.reduce_scatter_single(received, mine)
    return received


def try_all_to_all_single(mine: torch.Tensor, root: int) -> torch.Tensor:
    """Do what all_to_all does, from one tensor into one."""
    received = torch.full_like(mine, math.nan)
    dist.all_to_all_single(received, mine)
    return received


def by_pieces(mine: torch.Tensor, root: int) -> torch.Tensor:
    """All-reduce as the fast ones do it: each rank sums one piece, then all share."""
    return try_all_gather(try_reduce_scatter(mine, root), root)


def by_root(mine: torch.Tensor, root: int) -> torch.Tensor:
    """All-reduce through one rank, which does all the sums and then tells everybody."""
    return try_broadcast(try_reduce(mine, root), root)


OPS = {
    "SUM": (dist.ReduceOp.SUM, "sums"),
    "AVG": (dist.ReduceOp.AVG, "means"),
    "PRODUCT": (dist.ReduceOp.PRODUCT, "products"),
    "MIN": (dist.ReduceOp.MIN, "smallest"),
    "MAX": (dist.ReduceOp.MAX, "largest"),
}
# What is called, how many numbers a rank brings (None: one for each rank), in words.
CALLS: dict[str, tuple[Callable[..., torch.Tensor], int | None, str]] = {
    "scatter": (try_scatter, None, "the root deals its numbers, one to each rank"),
    "gather": (try_gather, 1, "the root collects everybody's number"),
    "broadcast": (try_broadcast, None, "all get what the root has"),
    "reduce": (try_reduce, None, "the root gets the sums; nobody else should look"),
    **{
        f"all_reduce {name}": (
            partial(try_all_reduce, op=op),
            None,
            f"all get the {word}",
        )
        for name, (op, word) in OPS.items()
    },
    "all_reduce by pieces": (by_pieces, None, "= reduce_scatter, then all_gather"),
    "all_reduce by root": (by_root, None, "= reduce, then broadcast"),
    "all_gather": (try_all_gather, 1, "all get everybody's number"),
    "all_gather_single": (try_all_gather_single, 1, "the same, into one tensor"),
    "reduce_scatter": (try_reduce_scatter, None, "each gets the sum at its own place"),
    "reduce_scatter_single": (try_reduce_scatter_single, None, "from one tensor"),
    "all_to_all": (try_all_to_all, None, "each gets one number from everybody"),
    "all_to_all_single": (try_all_to_all_single, None, "from one tensor to another"),
    "barrier": (try_barrier, 0, "none goes on before all of them have called it"),
}
NAMES = list(dict.fromkeys(title.split()[0] for title in CALLS))


def make_call(title: str, device: torch.device) -> tuple[Row, Row, bool]:
    """Return what this rank holds before and after a call, and if that is right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    call, places, _ = CALLS[title]
    rows = numbers_before(places, world_size)
    # Sums of eight digits would not be exact in float32.
    mine = torch.tensor(rows[rank], dtype=torch.float64, device=device)
    after = call(mine, world_size - 1).tolist()
    is_right = agrees(after, EXPECTED[title](rows, rank, world_size - 1))
    return rows[rank], after, is_right


def choose_device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Give each rank an accelerator of its own, or every rank the CPU; say why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "no accelerator found"
    kind, found = accelerator.type, torch.accelerator.device_count()
    if dist.get_default_backend_for_device(kind) == "gloo":
        return torch.device("cpu"), f"no backend connects {kind} devices"
    if found < local_world_size:
        return torch.device("cpu"), f"{found} {kind} for {local_world_size} local ranks"
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank), f"{found} {kind}, one for each local rank"


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Make each call once, check it on every rank, print all of it from rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    parser = argparse.ArgumentParser(description="Show collectives, before and after.")
    parser.add_argument("--only", action="append", metavar="NAME", help="repeatable")
    parser.error = refuse  # type: ignore[method-assign]
    wanted = parser.parse_args().only or NAMES
    if unknown := [name for name in wanted if name not in NAMES]:
        refuse(f"no collective is called {unknown[0]!r}; known: {', '.join(NAMES)}")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        refuse("start it with torchrun --nproc-per-node=3")
    local_rank, world_size = (int(os.environ[k]) for k in ("LOCAL_RANK", "WORLD_SIZE"))
    if world_size > 8:
        refuse("the numbers of more than 8 ranks have too many digits to show")
    device, reason = choose_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    backend = dist.get_default_backend_for_device(device)
    # A rank that waits longer than this for the others ends with an error.
    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    titles = [title for title in CALLS if title.split()[0] in wanted]
    results = [make_call(title, device) for title in titles]
    is_rank_zero = dist.get_rank() == 0
    by_rank = [results] * world_size
    dist.all_gather_object(by_rank, results)
    dist.destroy_process_group()
    say = print if is_rank_zero else lambda text: None
    say(f"device: {device.type} with {backend} ({reason})")
    say(f"the root is rank {world_size - 1}; ranks 0, 1, 2 hold ones, tens, hundreds")
    wrong = 0
    for title, found in zip(titles, zip(*by_rank, strict=True), strict=True):
        say(f"{title}: {CALLS[title][2]}")
        before, after, right = zip(*found, strict=True)
        pairs = zip(aligned(before), aligned(after), strict=True)
        for rank, pair in enumerate(pairs):
            say(f"  rank {rank} | {pair[0]} -> {pair[1]}")
        wrong += right.count(False)
    if wrong:
        sys.exit(f"{wrong} of these are wrong" if is_rank_zero else 1)
    say(f"check: {len(titles)} calls on {world_size} ranks agree with plain Python")


if __name__ == "__main__":
    main()
