"""A snapshot is written whole or not at all, and read without running its code."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from model import GPT, GPTConfig


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new.

    The bytes go to a second file in the same folder and onto the disk; only then does
    one rename put it in place, which the file system does entirely or not at all.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def save_snapshot(
    path: Path,
    weights: dict[str, torch.Tensor],
    config: GPTConfig,
    validation_loss: float,
    text: Path | None,
) -> None:
    """Write a model, whole or not at all.

    Args:
        path: where the snapshot shall stand.
        weights: the plain model's `state_dict`, without DDP's "module." prefix.
        config: what `load_snapshot` builds the model from.
        validation_loss: nats per byte on the held-out part of `text`.
        text: the corpus; None for the standard library.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    snapshot = {
        "config": asdict(config),
        "model": weights,
        "validation_loss": validation_loss,
        "text": None if text is None else str(text.resolve()),
    }
    write_whole(path, snapshot)


def load_snapshot(path: Path) -> tuple[GPT, dict[str, Any]]:
    """Build the model that a snapshot holds, on the CPU.

    Returns:
        The model with its weights, and the snapshot's dictionary.

    Raises:
        ValueError: the file is missing, damaged, or holds something else.
    """
    if not path.is_file():
        raise ValueError(
            f"no snapshot at {path}; train.py --snapshot {path} writes one"
        )
    try:
        # weights_only: tensors, numbers and text are read; nothing in the file can run.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged archive raises any of half a dozen types, none of them public.
        raise ValueError(f"{path} is damaged or is no snapshot") from error
    try:
        model = GPT(GPTConfig(**snapshot["config"]))
        model.load_state_dict(snapshot["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} holds another model than this GPT") from error
    return model, snapshot


def check_writable(path: Path) -> None:
    """Find out whether a file can be written at `path` (ValueError if not)."""
    if not path.parent.is_dir():
        raise ValueError(f"--snapshot {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--snapshot {path}: no permission to write in {path.parent}")
    if path.is_dir():
        raise ValueError(f"--snapshot {path} is a folder; name a file in it")


def check_destination(path: Path, config: GPTConfig) -> None:
    """Find out before training whether a snapshot can be written to `path` after it.

    Raises:
        ValueError: `path` cannot be written, or holds something that must not be
            overwritten: anything but a snapshot of this very model.
    """
    check_writable(path)
    if path.exists():
        try:
            model, _ = load_snapshot(path)
        except ValueError as error:
            raise ValueError(f"{error}; --snapshot will not overwrite it") from error
        if model.config != config:
            raise ValueError(
                f"{path} belongs to a model of {model.config}; "
                "--snapshot will not overwrite it"
            )
