"""One rank sends, another receives: all other communication is built from these two.

Run: python 01_communication/send_recv.py
Needs: nothing but requirements.txt. It runs on the CPU, by gloo: NCCL has no tags.
Expect: three processes pass numbers on in six ways; then two of them average their
    lists while the third keeps its own; then a `check:` of every number.
Before: README.md
Next: 01_communication/collectives.py, where all ranks make one call together.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Rows = list[list[float]]  # what each rank has, in rank order


def down_the_line() -> list[float]:
    """Receive a number from the rank before, add 1, send it to the rank after.

    `recv` returns when the number is there. Then the next rank can have it.
    """
    rank, number = dist.get_rank(), torch.tensor([100.0])
    if rank > 0:
        dist.recv(number, src=rank - 1)
        number += 1
    if rank < dist.get_world_size() - 1:
        dist.send(number, dst=rank + 1)
    return number.tolist()


# Three ways in which every rank sends to its right and receives from its left. If all
# of them simply sent first, none would come to receive: see --all-send-first.


def left_and_right() -> tuple[int, int]:
    """Return the rank to the left and the one to the right, in a circle."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world_size, (rank + 1) % world_size


def odd_ranks_receive_first(mine: torch.Tensor) -> torch.Tensor:
    """Break the circle: some ranks receive before they send."""
    (left, right), received = left_and_right(), torch.empty_like(mine)
    if dist.get_rank() % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(received, src=left)
    else:
        dist.recv(received, src=left)
        dist.send(mine, dst=right)
    return received


def isend_and_irecv(mine: torch.Tensor) -> torch.Tensor:
    """Start both without waiting, then wait for both.

    Until `wait` has returned, `mine` must not be changed and `received` not be read.
    """
    (left, right), received = left_and_right(), torch.empty_like(mine)
    sending = dist.isend(mine, dst=right)
    receiving = dist.irecv(received, src=left)
    for work in (sending, receiving):
        assert work is not None
        work.wait()
    return received


def batch_of_both(mine: torch.Tensor) -> torch.Tensor:
    """Hand over the whole exchange as one list; the backend puts it in order."""
    (left, right), received = left_and_right(), torch.empty_like(mine)
    operations = [
        dist.P2POp(dist.isend, mine, right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def second_message_first() -> list[float]:
    """Let rank 1 take rank 0's two messages in the other order, by their tags."""
    messages = torch.tensor([[1.0], [2.0]])
    if dist.get_rank() == 0:
        sent = [dist.isend(messages[i], dst=1, tag=i + 1) for i in range(2)]
        for work in sent:
            assert work is not None
            work.wait()
    elif dist.get_rank() == 1:
        received = torch.empty(2, 1)
        dist.recv(received[0], src=0, tag=2)
        dist.recv(received[1], src=0, tag=1)
        return received.flatten().tolist()
    return []


def mean_of_two_ranks() -> list[float]:
    """Average the lists of ranks 0 and 1; the others keep theirs."""
    rank = dist.get_rank()
    mine = torch.arange(3 * rank + 1, 3 * rank + 4, dtype=torch.float32)
    # Every rank has to make this call, members or not. Only members use the group.
    group = dist.new_group([0, 1])
    if rank in (0, 1):
        dist.all_reduce(mine, op=dist.ReduceOp.AVG, group=group)
    return mine.tolist()


def all_send_first(elements: int) -> list[str]:
    """Let every rank send before it receives; return the error, if there is one."""
    # A group of its own: after a time-out its connections cannot be used again.
    everybody = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(everybody, dist.ProcessGroup)  # and not the mark of an outsider
    (left, right), mine = left_and_right(), torch.ones(elements)
    try:
        dist.send(mine, dst=right, group=everybody)
        dist.recv(torch.empty_like(mine), src=left, group=everybody)
    except RuntimeError as error:
        # What follows gloo's file name and line number.
        return [str(error).split("] ", 1)[-1]]
    return []


def lessons(world_size: int) -> dict[str, tuple[Callable[[], list[float]], Rows]]:
    """Name each lesson, with what to call and what each rank must get from it."""
    ranks = range(world_size)
    mine = torch.tensor([float(dist.get_rank())])
    from_left = [[float((rank - 1) % world_size)] for rank in ranks]
    lists = [[3.0 * rank + i for i in (1, 2, 3)] for rank in ranks]
    mean = [(a + b) / 2 for a, b in zip(lists[0], lists[1], strict=True)]
    return {
        "send and recv, down the line": (
            down_the_line,
            [[100.0 + rank] for rank in ranks],
        ),
        "send and recv in a circle, odd ranks receive first": (
            lambda: odd_ranks_receive_first(mine).tolist(),
            from_left,
        ),
        "isend and irecv in a circle, then wait": (
            lambda: isend_and_irecv(mine).tolist(),
            from_left,
        ),
        "batch_isend_irecv in a circle": (
            lambda: batch_of_both(mine).tolist(),
            from_left,
        ),
        "rank 0 sends 1, then 2; rank 1 takes the tag of the second first": (
            second_message_first,
            [[2.0, 1.0] if rank == 1 else [] for rank in ranks],
        ),
        "all_reduce, the mean, in new_group([0, 1])": (
            mean_of_two_ranks,
            [mean if rank < 2 else lists[rank] for rank in ranks],
        ),
    }


def one_rank(rank: int, world_size: int, port: int, deadlock: bool) -> None:
    """Be one rank: join, take part in everything, let rank 0 print what all have."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # A rank that waits longer than this for another ends with an error.
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    show = show_deadlock if deadlock else show_lessons
    is_right = show(rank, world_size)
    dist.destroy_process_group()
    if not is_right:
        sys.exit(1)


def show_lessons(rank: int, world_size: int) -> bool:
    """Take part in each lesson; print from rank 0; tell whether all is right."""
    checked, wrong = 0, 0
    for title, (call, expected) in lessons(world_size).items():
        got: Rows = [[]] * world_size
        dist.all_gather_object(got, call())
        wrong += got != expected
        checked += world_size
        if rank == 0:
            print(title)
            for other, numbers in enumerate(got):
                text = ", ".join(f"{n:g}" for n in numbers)
                print(f"  rank {other} has {text or 'nothing'}")
    if rank == 0:
        print(f"check: {checked} results on {world_size} ranks, {wrong} lessons wrong")
    return not wrong


def show_deadlock(rank: int, world_size: int) -> bool:
    """Let all send first, a small and a large message; tell whether all got stuck."""
    stuck = 0
    for elements in (1, 1_000_000):
        errors: list[list[str]] = [[]] * world_size
        dist.all_gather_object(errors, all_send_first(elements))
        stuck += sum(map(len, errors))
        said = [error for one in errors for error in one]
        first = next((error for error in said if "Timed out" in error), "nothing")
        if rank == 0:
            print(f"all send {elements:,} number(s) first; gloo says:\n  {first}")
    if rank == 0:
        print(f"check: {stuck} of {2 * world_size} sends got stuck, whatever the size")
    return stuck == 2 * world_size


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Start the ranks, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Show send and receive.")
    add = parser.add_argument
    add("--nprocs", type=int, default=3, help="processes to start")
    add("--all-send-first", action="store_true", help="see how that gets stuck")
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if not 2 <= args.nprocs <= 16:
        refuse(f"--nprocs must be 2 to 16, not {args.nprocs}")
    # The ranks meet at this store. With port 0 the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (args.nprocs, store.port, args.all_send_first)
    mp.spawn(one_rank, args=arguments, nprocs=args.nprocs)


if __name__ == "__main__":
    main()
