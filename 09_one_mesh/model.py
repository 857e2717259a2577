"""A small GPT over bytes: the model that every chapter from here on trains.

Shapes in the comments: B batch, T tokens, D width, H heads, V vocabulary.
"""

import math
import re
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

# Dense bfloat16 FLOP/s by the data sheet: what the utilisation of a GPU is a part of.
# The first of these that is a word, or words, of a device's name is its peak.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    The defaults make a model that a laptop trains in a minute. GPT-2 (124 M) has
    block_size=1024, width=768, layers=12, heads=12, vocabulary=50257.
    """

    block_size: int = 128  # the longest T the model can read
    width: int = 128
    layers: int = 2
    heads: int = 4
    vocabulary: int = 256  # every byte is a token
    dropout: float = 0.0  # the probability with which training zeroes an activation
    tied: bool = True  # one (V, D) matrix embeds tokens and scores them

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be (ValueError)."""
        if min(self.block_size, self.width, self.layers, self.heads) < 1:
            raise ValueError("block size, width, layers and heads are 1 or more")
        if self.vocabulary < 256:
            raise ValueError(f"bytes need a vocabulary of 256, not {self.vocabulary}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a probability below 1, not {self.dropout}")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide by {self.heads} heads; "
                f"try --width={self.heads * max(1, self.width // self.heads)}"
            )


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer perceptron (MLP)."""

    def __init__(self, config: GPTConfig) -> None:
        """Build six weight matrices; none has a bias."""
        super().__init__()
        D = config.width
        self.head_size = D // config.heads
        self.attention_norm = nn.LayerNorm(D)
        # Three matrices and not one of 3D: each can be split by heads.
        self.query = nn.Linear(D, D, bias=False)
        self.key = nn.Linear(D, D, bias=False)
        self.value = nn.Linear(D, D, bias=False)
        self.attention_out = nn.Linear(D, D, bias=False)
        self.mlp_norm = nn.LayerNorm(D)
        self.mlp_in = nn.Linear(D, 4 * D, bias=False)
        self.mlp_out = nn.Linear(4 * D, D, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, H, T, D / H)."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y = self.attention_norm(x)
        q, k, v = (self.split_heads(f(y)) for f in (self.query, self.key, self.value))
        # Causal: the token at position t reads positions 0..t and no later one.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.attention_out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Decoder-only transformer that predicts the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the model with fresh weights from torch's global generator."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all matrices from normal distributions."""
        # GPT-2 draws from N(0, 0.02) at width 768; 0.55 / sqrt(D) is the same rule
        # at any width. What is added to the residual stream starts smaller, so that
        # the stream's variance does not grow with depth (GPT-2 paper, section 2.3).
        std = 0.55 / math.sqrt(self.config.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = 1 / math.sqrt(2 * self.config.layers) if into_stream else 1.0
                nn.init.normal_(parameter, std=std * scale)

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, T, V) logits, or with labels (B, T) the mean loss in nats."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        positions = self.position_embedding(places)
        x = self.token_embedding(inputs) + positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def flops_per_token(self) -> int:
        """Count a training step's floating-point operations for each token.

        Forward and backward take 6 for every weight of a matrix product, and 12 T D a
        layer for attention (Chowdhery et al., PaLM, 2022, appendix B).
        """
        weights = sum(m.weight.numel() for m in self.modules() if type(m) is nn.Linear)
        config = self.config
        return 6 * weights + 12 * config.layers * config.width * config.block_size

    def utilisation(self, tokens_per_second: float, device: torch.device) -> str:
        """Tell which part of a device's peak the model uses (MFU), if that is known."""
        if device.type != "cuda":
            return ""
        name = torch.cuda.get_device_name(device)
        known = [gpu for gpu in PEAK_FLOPS if re.search(rf"\b{gpu}\b", name)]
        flops = tokens_per_second * self.flops_per_token()
        return f" | MFU {flops / PEAK_FLOPS[known[0]]:.1%}" if known else ""

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float, seed: int
    ) -> str:
        """Continue `prompt` (at least one byte) by `length` sampled bytes."""
        training = [module for module in self.modules() if module.training]
        self.eval()  # dropout is for training alone
        device = next(self.parameters()).device
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.config.block_size :])[0, -1].float().cpu()
            chances = torch.softmax(logits[:256] / temperature, dim=0)  # bytes alone
            token = torch.multinomial(chances, 1, generator=draw).to(device)
            tokens = torch.cat([tokens, token[None]], dim=1)
        for module in training:  # a frozen part may have been in eval() before
            module.training = True
        return bytes(tokens[0].tolist()).decode(errors="replace")
