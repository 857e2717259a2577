"""A collective that does not wait: start an all-reduce, compute, then wait for it.

Run: torchrun --nproc-per-node=2 01_communication/async_all_reduce.py
Expect: rank 0's all-reduce is not done while rank 1 has not called, and its call has
    returned all the same; after `wait()` both ranks have the sum.
"""

from typing import Any

import torch
import torch.distributed as dist

from ranks import check, gather, join, leave, say


def all_reduce_later() -> tuple[bool | None, float]:
    """Sum 10 ** rank; return on rank 0 if it is done before rank 1 calls, and the sum.

    Two ranks call this. Rank 1 calls `all_reduce` when rank 0 has asked its handle.
    """
    x = torch.tensor([10.0 ** dist.get_rank()])
    has_asked, early = torch.ones(1), None
    if dist.get_rank() == 0:
        work: Any = dist.all_reduce(x, async_op=True)  # returns at once
        early = work.is_completed()
        dist.send(has_asked, dst=1)
    else:
        dist.recv(has_asked, src=0)  # wait until rank 0 has asked its handle
        work = dist.all_reduce(x, async_op=True)
    # Compute something else here, and leave x alone.
    work.wait()
    return early, x.item()


def main() -> None:
    """Start the all-reduce, show whether it is done, show the sum."""
    join(at_least=2, at_most=2, only_cpu=True)
    early, total = all_reduce_later()
    say(f"rank 0, before rank 1 calls | is_completed() {early}")
    for rank, each in enumerate(gather(total)):
        say(f"rank {rank}, after wait() | x {each:.0f}")
    is_first = dist.get_rank() == 0
    is_right = total == 11 and early is (False if is_first else None)
    check(is_right, "no result before rank 1 calls, and 11 after wait() on 2 ranks")
    leave()


if __name__ == "__main__":
    main()
