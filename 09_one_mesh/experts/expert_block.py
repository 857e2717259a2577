"""A GPT's block with a mixture of experts."""

import torch.nn.functional as F
from torch import Tensor

from mixture import Mixture
from model import Block, GPTConfig


class ExpertBlock(Block):
    """A GPT's block whose MLP is a mixture of experts."""

    def __init__(self, config: GPTConfig, mixture: Mixture) -> None:
        """Build a block, and put the mixture in the place of its MLP."""
        super().__init__(config)
        del self.mlp_in, self.mlp_out
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y = self.attention_norm(x)
        q, k, v = (self.split_heads(f(y)) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.attention_out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mixture(self.mlp_norm(x)))
