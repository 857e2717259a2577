"""What goes wrong in which case; read this file after you have found it."""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nightly import ENTRIES, Files
from ranks import fail, number

RANKS, CASES = 3, 99
OPTIONS: dict[str, dict[str, Any]] = {
    "case": {
        "type": number(1, CASES),
        "default": 1,
        "help": "another one, another fault",
    },
    "rank": {"type": number(0, RANKS - 1), "help": "your answer: the rank"},
    "line": {"type": number(1, 999), "help": "your answer: the line of nightly.py"},
}


def draw(kind: str, case: int) -> tuple[int, str, int]:
    """Return the rank with the fault, the file that it is about, and the line."""
    chance = random.Random(f"{kind} {case}")
    rank, name = chance.randrange(RANKS), chance.choice(list(ENTRIES))
    wanted = f'files.lock["{name}"]' if kind == "hang" else f'files.entries["{name}"]'
    lines = Path(__file__).with_name("nightly.py").read_text().splitlines()
    (line,) = (at for at, text in enumerate(lines, start=1) if wanted in text)
    return rank, name, line


def strike(kind: str, case: int, files: Files) -> None:
    """On one rank, hold a lock that nobody will release, or make a file long."""
    rank, name, _ = draw(kind, case)
    if dist.get_rank() == rank and kind == "hang":
        files.lock[name].acquire()
    elif dist.get_rank() == rank:
        files.entries[name] *= 2000


def check_answer(kind: str, answer: argparse.Namespace, hint: str) -> None:
    """Say in words whether the rank and the line are right; if not, exit with 1."""
    if answer.rank is None or answer.line is None:
        fail("an answer has both --rank and --line")
    rank, name, line = draw(kind, answer.case)
    if answer.rank != rank:
        sys.exit(f"not rank {answer.rank}: {hint}")
    if answer.line != line:
        sys.exit(f"rank {rank} is right, line {answer.line} of nightly.py is not")
    print(f"check: rank {rank}, line {line} of nightly.py: the file {name!r}")
