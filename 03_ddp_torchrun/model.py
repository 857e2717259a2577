"""A small GPT over bytes: the model that this chapter trains.

Shapes in the comments: B batch, T tokens, D width, H heads, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; `vocabulary` is 256 because every byte is a token."""

    block_size: int = 128  # the longest T the model can read
    width: int = 128
    layers: int = 2
    heads: int = 4
    vocabulary: int = 256
    dropout: float = 0.0  # the share of each block's output that training sets to 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be (ValueError)."""
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a share below 1, not {self.dropout}")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide by {self.heads} heads; "
                f"try --width {self.heads * max(1, self.width // self.heads)}"
            )


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer perceptron."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the four weight matrices; none has a bias."""
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(D)
        self.query_key_value = nn.Linear(D, 3 * D, bias=False)
        self.attention_out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.LayerNorm(D)
        self.mlp_in = nn.Linear(D, 4 * D, bias=False)
        self.mlp_out = nn.Linear(4 * D, D, bias=False)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        B, T, D = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        # (B, T, 3D) -> three tensors of (B, H, T, D / H).
        q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Causal: the token at position t reads positions 0..t and no later one.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(B, T, D)
        x = x + self.drop(self.attention_out(mixed))
        return x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Decoder-only transformer that predicts the next byte at every position."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the model with fresh weights from torch's global generator."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        # Weight tying: one (V, D) matrix reads bytes in and scores bytes out.
        self.head.weight = self.token_embedding.weight
        # GPT-2 draws from N(0, 0.02) at width 768; 0.55 / sqrt(D) is the same rule
        # at any width. What is added to the residual stream starts smaller, so that
        # the stream's variance does not grow with depth (GPT-2 paper, section 2.3).
        std = 0.55 / math.sqrt(config.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = 1 / math.sqrt(2 * config.layers) if into_stream else 1.0
                nn.init.normal_(parameter, std=std * scale)

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, T, V) logits, or with labels (B, T) the mean loss in nats."""
        positions = self.position_embedding.weight[: inputs.shape[1]]
        x = self.token_embedding(inputs) + positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float, seed: int
    ) -> str:
        """Continue `prompt` (at least one byte) by `length` sampled bytes."""
        device = self.token_embedding.weight.device
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.config.block_size :])[0, -1].float().cpu()
            chances = torch.softmax(logits / temperature, dim=0)
            token = torch.multinomial(chances, 1, generator=draw).to(device)
            tokens = torch.cat([tokens, token[None]], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")
