"""Real text with no download: Python's own standard library, read as bytes."""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

HELD_OUT = 0.05  # the last part of the text, which no rank trains on


def find_files(text: Path | None) -> list[Path]:
    """List the files of the corpus in an order that every rank agrees on.

    Without `text`, these are the source files of the standard library that runs this
    script. With it, the file itself or every file below the folder that is not hidden.

    Raises:
        FileNotFoundError: there is nothing at `text`, or no file in the folder.
    """
    if text is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        # The names Python itself lists leave out its test suite and installed packages.
        known = sys.stdlib_module_names
        files = [
            path
            for path in folder.rglob("*.py")
            if path.relative_to(folder).parts[0].removesuffix(".py") in known
        ]
    elif not text.exists():
        raise FileNotFoundError(f"--text {text}: no such file or folder")
    elif text.is_dir():
        folder = text
        files = [
            path
            for path in folder.rglob("*")
            if path.is_file()
            and not any(part[0] == "." for part in path.relative_to(folder).parts)
        ]
    else:
        return [text]
    if not files:
        raise FileNotFoundError(f"no text below {folder}; --text PATH names another")
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def load_text(text: Path | None, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the corpus and split it into a training and a held-out part.

    Returns:
        Two uint8 tensors of shape (bytes,).

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a part is too short for one window of `block_size` + 1 bytes, or
            the only file is not text.
    """
    contents = [path.read_bytes() for path in find_files(text)]
    # A file with a zero byte is not text; in a folder such files are passed over.
    data = b"".join(content for content in contents if b"\0" not in content)
    cut = int(len(data) * (1 - HELD_OUT))
    needed = block_size + 1
    if min(cut, len(data) - cut) < needed:
        raise ValueError(
            f"{text or 'the standard library'} holds {len(data)} bytes of text; "
            f"with windows of {needed} bytes and {HELD_OUT:.0%} held out it takes "
            f"at least {int(needed / HELD_OUT) + 1}: give more text or a smaller "
            "--block-size"
        )
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return whole[:cut], whole[cut:]


class WindowDataset(Dataset):
    """`samples` windows spread evenly over a text, and for each its next bytes.

    An item is (index, inputs, labels), the last two of shape (block_size,) and dtype
    int64. Label t is the byte after input t: a model that only copies its input learns
    nothing. The index tells a reader which rank saw which sample.
    """

    def __init__(self, text: torch.Tensor, block_size: int, samples: int) -> None:
        """Take at most `samples` windows, fewer where they would overlap."""
        self.text = text
        self.block_size = block_size
        last_start = len(text) - block_size - 1
        count = min(samples, last_start // block_size + 1)
        # Integers throughout: rounding in floating point could differ on another host.
        step = last_start // (count - 1) if count > 1 else 0
        self.starts = [i * step for i in range(count)]

    def __len__(self) -> int:
        """Count the windows: the samples in one epoch."""
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Cut one window out of the text."""
        start = self.starts[index]
        window = self.text[start : start + self.block_size + 1].long()
        return index, window[:-1], window[1:]

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Stack some items: inputs and labels, both of shape (len(indices), T)."""
        _, inputs, labels = zip(*(self[i] for i in indices), strict=True)
        return torch.stack(inputs), torch.stack(labels)
