"""Write it: average the gradients in a few buckets, not in one message for each.

Run: python 02_ddp_mp/exercises/buckets.py
Expect: a line for each of three ranks that says what is still wrong with its gradients
    or its messages, and status 1; once the function is right, a `check:`.
"""

import torch
import torch.distributed as dist  # noqa: F401 (for your answer)

from check_buckets import check_buckets


def average_in_buckets(parameters: list[torch.nn.Parameter], cap: int) -> None:
    """Replace each gradient by its mean over the ranks; yours to write.

    Put as many gradients into one flat buffer as fit, in the order of the list, and
    call `dist.all_reduce` once for each buffer.

    Args:
        parameters: of the same shapes on every rank. Where a rank has None for a
            gradient it counts as zeros, and afterwards the mean is there too.
        cap: how many numbers fit into a buffer. A gradient that is larger goes alone,
            and ends the buffer before it.
    """


if __name__ == "__main__":
    check_buckets(average_in_buckets)
