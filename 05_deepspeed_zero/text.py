"""Real text with no download, as tokens; every rank takes its own rows of a batch."""

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

LONGEST = 1_000_000  # bytes of text; more would only take longer to read


def read_text(path: Path | None) -> bytes:
    """Read a file; without one, the source files of Python's own standard library.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is no text.
    """
    if path is not None:
        try:
            text = path.read_bytes()[:LONGEST]
        except OSError as error:
            raise ValueError(f"--text {path}: {error.strerror}") from error
        if b"\0" in text:
            raise ValueError(f"--text {path} is not a text file")
        return text
    folder = Path(sysconfig.get_paths()["stdlib"])
    # The names Python itself lists leave out installed packages. They are sorted, so
    # that every rank reads the same text.
    names = [
        n for n in sorted(sys.stdlib_module_names) if (folder / f"{n}.py").exists()
    ]
    return b"".join((folder / f"{name}.py").read_bytes() for name in names)[:LONGEST]


def to_tokens(text: bytes, tokenizer: Any, block_size: int) -> torch.Tensor:
    """Turn text into token numbers, shape (tokens,); without a tokenizer, its bytes.

    Raises:
        ValueError: the text is shorter than one sample of `block_size` tokens.
    """
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    else:
        # A checkpoint's tokenizer may be slow, and some steps need no more than this.
        numbers = tokenizer(text[:100_000].decode(errors="replace"))["input_ids"]
        tokens = torch.tensor(numbers, dtype=torch.long)
    if len(tokens) <= block_size:
        raise ValueError(
            f"the text has {len(tokens)} tokens and a sample takes {block_size}: give "
            "more text"
        )
    return tokens


def global_batch(
    tokens: torch.Tensor, step: int, samples: int, block_size: int
) -> torch.Tensor:
    """Cut the samples of one step, for all ranks together, at random places.

    The places depend on the step alone. So every rank finds the same batch without
    asking, whatever the number of ranks.

    Returns:
        Token numbers of shape (samples, block_size).
    """
    generator = torch.Generator().manual_seed(step)
    last = len(tokens) - block_size
    starts = torch.randint(last + 1, (samples,), generator=generator).tolist()
    return torch.stack([tokens[start : start + block_size] for start in starts])


def own_rows(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the rows of this rank: no other rank has them, and together it is all."""
    if len(batch) % world_size:
        raise ValueError(f"{len(batch)} samples cannot be shared out evenly")
    return batch.chunk(world_size)[rank]
