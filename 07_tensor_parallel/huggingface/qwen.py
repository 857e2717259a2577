"""Qwen2's architecture from transformers, small and fresh."""

import torch

# The file of the one model, not `from transformers import ...`: the short form would
# look through every model that transformers knows.
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM


def small_config() -> Qwen2Config:
    """Describe a Qwen2 of 427,136 parameters that reads bytes.

    It has all that the large ones have: grouped heads, biases on query, key and value,
    rotary positions, a gated MLP, one matrix for embedding and output (as Qwen2-1.5B).
    """
    return Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # Neither token exists in a text of bytes.
        bos_token_id=None,
        eos_token_id=None,
    )


def small_model(seed: int = 0) -> Qwen2ForCausalLM:
    """Build the small model; the same seed gives the same weights on every rank."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(small_config())
