"""What a step all-reduces and how long that takes: by formula, in float32.

`tokens` are those of all ranks together: B samples of T. D is the width, L the layers;
sizes are in bytes, times in seconds, rates in bits a second.
"""

from collections.abc import Mapping
from itertools import pairwise

# Of 1514 bytes of an Ethernet frame 1448 are data; the rest says where they belong.
FRAME = 1514 / 1448


def data_parallel_bytes(parameters: int) -> int:
    """Return the bytes of the gradient, whatever the batch is."""
    return 4 * parameters


def tensor_parallel_bytes(tokens: int, width: int, layers: int) -> int:
    """Return the bytes of the activations that a step sums, whatever the ranks are.

    Two of (B, T, D) a block in forward and two in backward, one each for embedding and
    head, and three numbers a token for the loss.
    """
    return 4 * ((4 * layers + 2) * tokens * width + 3 * tokens)


def sent_by_a_rank(nbytes: float, world_size: int) -> float:
    """Return what each rank sends for an all-reduce that is a ring."""
    return 2 * (world_size - 1) / world_size * nbytes


def seconds_on_link(nbytes: float, rate: float) -> float:
    """Return how long a link is busy with so many bytes, headers included."""
    return nbytes * FRAME * 8 / rate


def break_even_rate(nbytes: float, saved: float) -> float:
    """Return the rate at which sending takes as long as the computation it saves."""
    return nbytes * FRAME * 8 / saved


def crossing(difference: Mapping[float, float]) -> float | None:
    """Return where a piecewise linear function, given by points, is zero first."""
    for (x, y), (next_x, next_y) in pairwise(sorted(difference.items())):
        if y * next_y <= 0:
            return x + (next_x - x) * y / (y - next_y or 1.0)  # 0 all along: at x
    return None
