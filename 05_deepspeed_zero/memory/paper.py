"""What a rank keeps, by the ZeRO paper's formula.

Run: python 05_deepspeed_zero/memory/paper.py --parameters=7.5e9 --ranks=64
Expect: GB of each kind on a rank, for each stage. With these numbers the sums are those
    of the paper's figure 1.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020, https://arxiv.org/abs/1910.02054: section 3.1, figure 1 and table 1.
"""

import argparse
from typing import NamedTuple

from ranks import number, read_options


class Bytes(NamedTuple):
    """Bytes for each parameter: of its weight, its gradient, its optimizer state."""

    weight: int
    gradient: int
    states: int


# In mixed precision the optimizer state is the fp32 master weight and Adam's two
# moments, 4 bytes each. In float32 the weight is its own master: two moments.
MIXED, FLOAT32 = Bytes(2, 2, 12), Bytes(4, 4, 8)
KINDS = ("parameters", "gradients", "optimizer")


def divide(each: Bytes, parameters: int, stage: int, world_size: int):
    """Return the bytes of each kind on one rank, by ZeRO's three divisions.

    Stage 1 divides the optimizer state by the ranks, stage 2 the gradients too, and
    stage 3 the weights too.
    """
    is_divided = {"parameters": stage >= 3, "gradients": stage >= 2, "optimizer": stage}
    return {
        kind: parameters * number / (world_size if is_divided[kind] else 1)
        for kind, number in zip(KINDS, each, strict=True)
    }


def paper_bytes(
    parameters: int, stage: int, world_size: int, precision: str
) -> dict[str, float]:
    """Return the bytes of each kind that the paper's formula gives one rank."""
    each = MIXED if precision == "bf16" else FLOAT32
    return divide(each, parameters, stage, world_size)


def main(options: argparse.Namespace) -> None:
    """Print a row for each stage."""
    parameters, n = options.parameters, options.ranks
    print(f"{parameters / 1e9:g} billion parameters in bf16 on {n} rank(s), GB of each")
    print("stage" + "".join(f"{kind:>12}" for kind in (*KINDS, "together")))
    for stage in range(4):
        kept = list(paper_bytes(parameters, stage, n, "bf16").values())
        print(f"{stage:5}" + "".join(f"{x / 1e9:12.1f}" for x in (*kept, sum(kept))))


if __name__ == "__main__":
    parameters = {"type": number(1.0, 1e15), "default": 7.5e9}
    ranks = {"type": number(1, 1 << 20), "default": 64, "help": "that share the state"}
    main(read_options(parameters=parameters, ranks=ranks))
