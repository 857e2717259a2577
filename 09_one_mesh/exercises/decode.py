"""Write it: attend from one new token to keys on all ranks, without sending the keys.

Run: python 09_one_mesh/exercises/decode.py
Expect: a line for each of three ranks that says what is still wrong with its result, or
    with what it sends; once nothing is, a `check:`.
"""

import torch  # noqa: F401 (for your answer)
import torch.distributed as dist  # noqa: F401 (for your answer)
from torch import Tensor

from check_decode import check_decode


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what one process with all keys returns; yours to rewrite.

    Now each rank attends to its own keys alone.

    Args:
        q: (H, 1, D), the query of the newest token, the same on every rank.
        k: (H, keys, D), those of this rank; a rank may hold more keys than another.
        v: (H, keys, D), their values.
    """
    scores = q @ k.mT * q.shape[-1] ** -0.5  # (H, 1, keys)
    return scores.softmax(dim=-1) @ v


if __name__ == "__main__":
    check_decode(attend_to_all)
