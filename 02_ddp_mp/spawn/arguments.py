"""What reaches a rank that `mp.spawn` starts: the file as it is, and the arguments.

Run: python 02_ddp_mp/spawn/arguments.py
Expect: a global that `main` has changed is unchanged on the ranks; an argument arrives;
    a tensor among the arguments is the parent's own; a lambda cannot be an argument.
"""

import os
import re
import sys
from typing import Any

import torch
import torch.multiprocessing as mp

# A rank is a new Python process. It imports this file to find its function, so these
# two lines run in the parent, and once more on every rank; `main` runs in the parent.
LEARNING_RATE = 0.1
IMPORTED_BY = os.getpid()


def be_rank(rank: int, learning_rate: float, seen: torch.Tensor) -> None:
    """Write into this rank's row of `seen` what reached it."""
    is_imported_here = os.getpid() == IMPORTED_BY
    seen[rank] = torch.tensor([LEARNING_RATE, learning_rate, is_imported_here])


def refusal(argument: Any) -> str:
    """Return the error with which `mp.spawn` refuses an argument, "" if it does not."""
    try:
        mp.spawn(be_rank, (argument, torch.zeros(2, 3)), nprocs=2)
    except Exception as error:
        # Which exception it is differs between the versions of Python.
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Change the global, start two ranks, read what they have seen."""
    global LEARNING_RATE
    LEARNING_RATE = 0.5
    seen = torch.zeros(2, 3)
    mp.spawn(be_rank, (LEARNING_RATE, seen), nprocs=2)
    print(f"parent | global {LEARNING_RATE}")
    for rank, (global_, argument, is_imported_here) in enumerate(seen.tolist()):
        row = f"rank {rank} | global {global_:.1f} | argument {argument:.1f}"
        print(f"{row} | file imported here: {bool(is_imported_here)}")
    with open(__file__) as file:
        refused = {"a lambda": refusal(lambda x: x), "an open file": refusal(file)}
    for name, error in refused.items():
        print(f"{name} | {error}")
    check(seen, refused)


def check(seen: torch.Tensor, refused: dict[str, str]) -> None:
    """End with an error unless all was seen and refused as the docstring says."""
    words = ("(pickle|get) local object .*<lambda>", "cannot pickle .*TextIOWrapper")
    found = zip(words, refused.values(), strict=True)
    is_seen = torch.equal(seen, torch.tensor([[0.1, 0.5, True]] * 2))
    if not is_seen or not all(re.search(*pair) for pair in found):
        sys.exit(f"not as described: {seen.tolist()}, {refused}")
    print("check: 2 ranks have the file's global, main's argument, the parent's tensor")


if __name__ == "__main__":
    main()
