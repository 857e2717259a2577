"""Weights on disk: written whole or not at all, and read in any number of processes."""

import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from proof import rmse_in_metres
from terrain import Terrain, TerrainModel


def save_weights(path: Path, model: TerrainModel, error: float) -> None:
    """Write the plain model's weights, and the error in metres that it has with them.

    The bytes go to a second file in the same folder and onto the disk; only then does
    one rename put it in place. A crash leaves the old file or the new, never a half.
    """
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as file:
        torch.save({"model": model.state_dict(), "error": error}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def load_weights(path: Path) -> tuple[TerrainModel, float]:
    """Read what `save_weights` wrote, on the CPU.

    Raises:
        ValueError: the file is damaged or holds something else.
    """
    model = TerrainModel()
    try:
        # weights_only: tensors and numbers are read; nothing in the file can run.
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        return model, float(saved["error"])
    except Exception as error:
        # A file that is something else raises any of half a dozen types.
        raise ValueError(f"{path} does not hold this model's weights") from error


def check_place(path: Path) -> None:
    """Find out before training whether weights can be written to `path` after it.

    Raises:
        ValueError: the folder is missing or closed to us, or `path` holds something
            that must not be overwritten: anything but weights of this model.
    """
    if not path.parent.is_dir():
        raise ValueError(f"--save {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--save {path}: no permission to write in {path.parent}")
    if path.exists():
        try:
            load_weights(path)
        except ValueError as error:
            raise ValueError(f"{error}; --save will not overwrite it") from error


def check_saved(path: Path, held_out: TensorDataset, terrain: Terrain) -> str:
    """Load weights in this process and compare their error with that of the ranks.

    Raises:
        RuntimeError: it is another.
    """
    model, error = load_weights(path)
    here = rmse_in_metres(model, held_out, terrain)
    result = f"error {here:.1f} m in one process, {error:.1f} m on the ranks"
    # An accelerator adds in another order than the CPU, so the last digits may differ.
    if not abs(here - error) < 0.01:
        raise RuntimeError(f"these are not the weights that were trained: {result}")
    return f"{result} (limit 0.01 m)"
