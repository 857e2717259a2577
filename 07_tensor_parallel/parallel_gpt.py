"""The GPT of model.py with every matrix split over n ranks: heads, MLP, vocabulary.

Shapes: B batch, T tokens, D width, V vocabulary. All ranks must see the same samples.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT, Block, GPTConfig
from parallel_layers import (
    ColumnParallelLinear,
    CopyToRanks,
    RowParallelLinear,
    SumOverRanks,
    all_reduced,
    shard_of,
)


class VocabularyParallelEmbedding(nn.Module):
    """`nn.Embedding` of whose V rows each rank holds an n-th."""

    def __init__(self, vocabulary: int, width: int, group: Any = None) -> None:
        """Keep a shard of the rows that `nn.Embedding` draws."""
        super().__init__()
        whole = nn.Embedding(vocabulary, width)
        self.weight, self.group = nn.Parameter(shard_of(whole.weight, 0, group)), group

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (...) to (..., width): one rank has the row, the others add zeros.

        Not checked: a token that is none of the V gets zeros.
        """
        row, is_here = local_index(tokens, len(self.weight), self.group)
        term = F.embedding(row, self.weight).masked_fill(~is_here[..., None], 0)
        return SumOverRanks.apply(term, self.group)


def local_index(tokens: Tensor, rows: int, group: Any) -> tuple[Tensor, Tensor]:
    """Return where each token stands in this rank's `rows`, and whether it does."""
    row = tokens - dist.get_rank(group) * rows
    is_here = (row >= 0) & (row < rows)
    return row * is_here, is_here


def vocabulary_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: Any = None
) -> Tensor:
    """Return the mean loss of logits (N, V / n) and labels (N,); gather no logits.

    Labels are from 0 to V - 1, which nobody checks: there is no `ignore_index`.
    """
    # Subtracting a row's largest logit changes nothing, and no exponential overflows.
    largest = all_reduced(logits.max(dim=1).values, group, dist.ReduceOp.MAX)
    logits = logits - largest[:, None]
    column, is_here = local_index(labels, logits.shape[1], group)
    of_label = logits.gather(1, column[:, None])[:, 0].masked_fill(~is_here, 0)
    # Two numbers for each token, in one message.
    terms = torch.stack([logits.exp().sum(dim=1), of_label])
    exp_sum, of_label = SumOverRanks.apply(terms, group)
    return (exp_sum.log() - of_label).mean()  # ignored labels count too


class ParallelBlock(Block):
    """A block of which each rank has some heads and some columns of the MLP."""

    def __init__(self, config: GPTConfig) -> None:
        """Replace the six matrices; the norms stay whole on every rank."""
        super().__init__(config)
        D = config.width
        self.query = ColumnParallelLinear(D, D, bias=False)
        self.key = ColumnParallelLinear(D, D, bias=False)
        self.value = ColumnParallelLinear(D, D, bias=False)
        self.attention_out = RowParallelLinear(D, D, bias=False)
        self.mlp_in = ColumnParallelLinear(D, 4 * D, bias=False)
        self.mlp_out = RowParallelLinear(4 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D), equal on all ranks."""
        y = CopyToRanks.apply(self.attention_norm(x))  # once, and not in each of three
        columns = (self.query.weight, self.key.weight, self.value.weight)
        q, k, v = (self.split_heads(F.linear(y, weight)) for weight in columns)
        # A head reads no other head: until attention_out nothing has to be sent.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.attention_out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))


class ParallelGPT(GPT):
    """The GPT of model.py, tensor-parallel; its logits are never gathered."""

    def __init__(self, config: GPTConfig) -> None:
        """Draw what GPT draws from the same seed, and keep this rank's shards."""
        super().__init__(config)
        drawn = dict(self.named_parameters())
        V, D = config.vocabulary, config.width
        self.token_embedding = VocabularyParallelEmbedding(V, D)
        self.blocks = nn.ModuleList(ParallelBlock(config) for _ in range(config.layers))
        self.head = ColumnParallelLinear(D, V, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        for name, p in self.named_parameters():
            p.detach().copy_(shard_like(drawn[name], p))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return (B, T, V / n) logits, or with labels (B, T) the mean loss."""
        logits = super().forward(inputs)
        if labels is None:
            return logits
        return vocabulary_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten())


def shard_like(whole: Tensor, mine: Tensor) -> Tensor:
    """Return the part of a tensor that a rank holds, told by the shape of its own."""
    for dim, length in enumerate(mine.shape):
        if length < whole.shape[dim]:
            return shard_of(whole, dim)
    return whole.detach()
