"""A Qwen2 small enough to make here, as a checkpoint on disk, and a text for it."""

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from data import load_text


def write_checkpoint(folder: str, tied: bool = True) -> None:
    """Save a Qwen2 of 427,136 parameters that reads bytes; `tied` as the small ones."""
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,  # a text of bytes has no such tokens
        eos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def read_batches(steps: int, samples: int, length: int) -> list[Tensor]:
    """Cut global batches (samples, length) out of the text; tokens are its bytes.

    For another checkpoint, put the numbers of its tokenizer here.
    """
    text, _ = load_text(None, length)
    return list(text[: steps * samples * length].long().view(steps, samples, length))
