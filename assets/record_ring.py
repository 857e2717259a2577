"""Record what three ranks send each other in a ring all-reduce.

Run: torchrun --nproc-per-node=3 assets/record_ring.py
Expect: 01_ring.json, which draw_ring.py draws, and a `check:` that all got the sum.
"""

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from pictures import ASSETS, chapter_module

RANKS = chapter_module("01_communication/ranks.py")
RING = chapter_module("01_communication/ring_all_reduce.py")


def record(all_reduce: Callable[[torch.Tensor], object]) -> dict[str, list]:
    """Sum up a tensor with one element for each chunk; return what this rank did.

    Rank r puts 2**r everywhere, so the bits of a sum tell whose numbers are in it.

    Returns:
        `sent`, its messages in order, each the chunk's number and its value, and
        `after`, what it ended with.
    """
    tensor = torch.full((dist.get_world_size(),), 2 ** dist.get_rank())
    sent = []

    def isend(piece: torch.Tensor, *arguments, **options) -> dist.Work | None:
        sent.append([int(piece.storage_offset()), int(piece)])
        return real_isend(piece, *arguments, **options)

    real_isend = dist.isend
    # batch_isend_irecv looks for it in the module in which it is defined.
    with (
        mock.patch.object(dist, "isend", isend),
        mock.patch.object(dist.distributed_c10d, "isend", isend),
    ):
        all_reduce(tensor)
    return {"sent": sent, "after": tensor.tolist()}


def main() -> None:
    """Record every rank, and save it from rank 0."""
    RANKS.join(at_least=3, at_most=3, only_cpu=True)
    by_rank = RANKS.gather(record(RING.ring_all_reduce))
    if dist.get_rank() == 0:
        Path(ASSETS, "01_ring.json").write_text(json.dumps(by_rank) + "\n")
    is_sum = all(one["after"] == [7, 7, 7] for one in by_rank)
    RANKS.check(is_sum, f"{len(by_rank)} ranks recorded, all with the sum")
    RANKS.leave()


if __name__ == "__main__":
    main()
