"""The first exception ends all ranks, and its traceback is the one that you see.

Run: python 02_ddp_mp/spawn/first_exception.py
Expect: rank 1's traceback, printed by the parent, and that rank 0 was ended by SIGTERM.
"""

import multiprocessing
import signal
import sys
import time
from typing import Any

import torch
import torch.multiprocessing as mp


def be_rank(rank: int, is_there: torch.Tensor) -> None:
    """Fail on rank 1, once rank 0 is there, which has no reason to end."""
    is_there[rank] = True
    parent = multiprocessing.parent_process()
    if rank == 0 and parent is not None:
        parent.join(timeout=3600)  # an hour, or as long as the parent lives
        return
    while not is_there.all():
        time.sleep(0.01)
    raise ValueError(f"rank {rank} got a broken sample")


def main() -> None:
    """Start two ranks; show the error of the one, and how the other has ended."""
    # With join=False the call returns at once, with what is needed to wait; by default
    # it waits itself.
    ranks: Any = mp.spawn(be_rank, (torch.zeros(2),), nprocs=2, join=False)
    try:
        while not ranks.join():
            pass
        sys.exit("no rank has failed")
    except mp.ProcessRaisedException as error:
        # The text is the rank's own traceback; that of the parent says nothing of it.
        print(str(error).strip())
    exit_codes = [process.exitcode for process in ranks.processes]
    print(f"exit codes of ranks 0 and 1: {exit_codes}")
    if exit_codes != [-signal.SIGTERM, 1]:
        sys.exit("not as described")
    print("check: rank 1's exception has ended rank 0, which meant to stay for an hour")


if __name__ == "__main__":
    main()
