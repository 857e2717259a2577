"""A Qwen2 small enough to make here, as a checkpoint on disk, and a text for it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from data import load_text
from qwen import small_config


def write_checkpoint(folder: str, tied: bool = True) -> None:
    """Save a Qwen2 of 427,136 parameters that reads bytes; `tied` as the small ones."""
    config = small_config()
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def load_alone(name: str, device: torch.device) -> Any:
    """Load a checkpoint whole, as one process does."""
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device).train()


def load_tokenizer(name: str) -> Any:
    """Load a checkpoint's tokenizer. Raises ValueError if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        _ = tokenizer("a")["input_ids"][0]  # without its files it knows no token
        return tokenizer
    except Exception as error:  # whatever its class trips over
        said = "no tokenizer there; tokenizer.save_pretrained writes one"
        raise ValueError(f"{name}: {said}") from error


def read_batches(text: Path | None, tokenizer: Any, *sizes: int) -> list[Tensor]:
    """Cut batches out of a text; `sizes` are how many, samples and tokens of a sample.

    Without a tokenizer tokens are bytes. Raises OSError or ValueError if the text
    cannot be read or is too short.
    """
    needed = torch.Size(sizes).numel()
    tokens, _ = load_text(text, sizes[-1])
    if tokenizer:
        start = bytes(tokens[: 20 * needed].tolist()).decode(errors="replace")
        tokens = torch.tensor(tokenizer(start)["input_ids"])
    if len(tokens) < needed:
        raise ValueError(f"the text has {len(tokens)} of {needed} tokens: give more")
    return list(tokens[:needed].long().view(sizes))
