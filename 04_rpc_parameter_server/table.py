"""The table on the parameter server: who holds it, and its file on disk."""

import os
import threading
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd

from model import Table

# The parameter server's own: RPC calls that arrive there find them here.
held: list["ServedTable"] = []
file: list[Path] = []
ready = threading.Event()  # the file is known; calls may arrive before
nobody_needs_it = threading.Event()
saving = threading.Lock()


class ServedTable(Table):
    """A table that starts from the server's file, where there is one.

    Its constructor is called by the master and runs on the parameter server: the
    master never sees the numbers.
    """

    def __init__(self, rows: int, width: int, seed: int) -> None:
        """Make or load the numbers, and let this process's other functions find them.

        Raises:
            ValueError: the file holds a table of another shape.
        """
        super().__init__(rows, width, seed)
        if file and file[0].exists():
            weights = load_table(file[0])
            if weights.shape != self.weight.shape:
                raise ValueError(f"{file[0]} holds a table of {tuple(weights.shape)}")
            with torch.no_grad():
                self.weight.copy_(weights)
        held.append(self)


def shape_in_file() -> tuple[int, ...] | None:
    """Return the shape of the table in the server's file, or None if there is none."""
    if not ready.wait(timeout=60):
        raise TimeoutError("the server does not know its file after 60 s")
    return tuple(load_table(file[0]).shape) if file and file[0].exists() else None


def whole_table() -> torch.Tensor:
    """Return all rows. Called by RPC, the whole table travels to the caller."""
    return held[0].weight.detach().clone()


def release() -> None:
    """Tell this process that nobody needs the table any more."""
    nobody_needs_it.set()


def table_gradient(context_id: int) -> torch.Tensor:
    """Return the gradient that waits here in a context of distributed autograd."""
    return dist_autograd.get_gradients(context_id)[held[0].weight].to_dense()


def save_table(path: Path, weights: torch.Tensor) -> None:
    """Write the table so that a crash at any moment leaves the old file or the new.

    Trainers may be changing rows meanwhile. That is what asynchronous means: there is
    no moment at which everybody has just finished a step.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as out:
        torch.save({"table": weights}, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished, path)


def save_once() -> Path | None:
    """Write the table that is held here to the server's file, and tell which it is.

    The main thread does so at the end, and the watch if another process has died. Who
    comes second waits until the first is done, and then has nothing to do.
    """
    with saving:
        if not (file and held):
            return None
        save_table(file[0], whole_table())
        return file.pop()


def load_table(path: Path) -> torch.Tensor:
    """Read a table, shape (rows, width).

    Raises:
        ValueError: the file is damaged or holds something else.
    """
    try:
        # weights_only: numbers and text are read; nothing in the file can run.
        weights = torch.load(path, map_location="cpu", weights_only=True)["table"]
        assert weights.dim() == 2
    except Exception as error:
        # A damaged archive raises any of half a dozen types, none of them public.
        raise ValueError(f"--table {path} is damaged or is no table") from error
    return weights
