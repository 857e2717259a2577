"""Real text with no download: bytes as tokens, batches of them, and the loss."""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

LONGEST = 1_000_000  # bytes of text; more would only take longer to read


def read_tokens() -> Tensor:
    """Read the source of Python's own standard library as bytes, shape (tokens,)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # The names Python itself lists leave out installed packages. They are sorted, so
    # that every rank reads the same text.
    names = [
        n for n in sorted(sys.stdlib_module_names) if (folder / f"{n}.py").exists()
    ]
    text = b"".join((folder / f"{name}.py").read_bytes() for name in names)[:LONGEST]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def global_batch(tokens: Tensor, step: int, samples: int, block_size: int) -> Tensor:
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


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Let a GPT, or an engine that holds one, predict each token from those before it.

    Returns:
        The mean over the samples (B, T + 1), in float32: bf16 has no number between
        5.50 and 5.53.
    """
    logits = model(tokens[:, :-1]).float()  # (B, T, V)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
