"""The table's file: always a whole one, whatever dies while it is written."""

import argparse
import os
from pathlib import Path

import torch


def save_table(path: Path, weights: torch.Tensor) -> None:
    """Write the table so that a crash at any moment leaves the old file or the new.

    Trainers may be stepping meanwhile: the last steps may be there for some rows only.
    """
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as out:
        torch.save({"table": weights}, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished, path)


def load_table(path: Path) -> torch.Tensor:
    """Read a table, (rows, width), or raise ValueError if the file is damaged."""
    try:
        # weights_only: numbers and text are read; nothing in the file can run.
        weights = torch.load(path, map_location="cpu", weights_only=True)["table"]
        assert weights.dim() == 2
    except Exception as error:
        # A damaged archive raises any of half a dozen types, none of them public.
        raise ValueError(f"{path} is damaged or is no table") from error
    return weights


def table_file(text: str) -> Path:
    """Take the path of a file that one can write, for argparse; it need not exist."""
    path = Path(text)
    try:
        if path.exists():
            load_table(path)
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"{path.parent} is no folder that one can write to")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path
