"""A Qwen2 small enough to make here, as a checkpoint on disk, and a text for it."""

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from data import load_text
from qwen import small_config


def write_checkpoint(folder: str, tied: bool = True) -> None:
    """Save a Qwen2 of 427,136 parameters that reads bytes; `tied` as the small ones."""
    config = small_config()
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def read_batches(steps: int, samples: int, length: int) -> list[Tensor]:
    """Cut global batches (samples, length) out of the text; tokens are its bytes.

    For another checkpoint, put the numbers of its tokenizer here.
    """
    text, _ = load_text(None, length)
    return list(text[: steps * samples * length].long().view(steps, samples, length))
