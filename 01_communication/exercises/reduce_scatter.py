"""Write it: the reduce-scatter with which a ring all-reduce begins, for any world size.

Run: python 01_communication/exercises/reduce_scatter.py [--nprocs=3]
Expect: a line for each rank that says what is still wrong with what it returns, and
    status 1; once the function is right, a `check:`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from check_reduce_scatter import check_reduce_scatter

Send = Callable[[torch.Tensor, int], dist.Work]


def reduce_scatter(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    """Return chunk number `rank` of the sum over all ranks; yours to write.

    Each rank sends n-1 chunks, all to its right neighbour.

    Args:
        tensor: (chunks, columns), as many chunks as ranks; it may be overwritten.
        isend: `dist.isend` that counts. `isend(chunk, to)` starts to send a chunk to a
            rank and returns a handle to wait for. Receive with `dist.recv`.
    """
    return tensor[dist.get_rank()]


if __name__ == "__main__":
    check_reduce_scatter(reduce_scatter)
