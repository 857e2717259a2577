"""The layers of one stage of a GPT, and what concerns the gradients of several stages.

Shapes: B samples of a micro-batch, T tokens, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from model import GPT, GPTConfig

# With the model, for scripts that cut it.
__all__ = ["GPT", "GPTConfig", "Part", "add_tied_gradients", "clip_grad_norm"]
__all__ += ["even_cut"]


def even_cut(layers: int, stages: int) -> list[int]:
    """Return how many blocks each stage gets: as equal as can be, the first ones more.

    Raises ValueError if a stage would get none.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} stages")
    return [len(part) for part in torch.arange(layers).tensor_split(stages)]


class Part(nn.Module):
    """The layers of one stage, taken out of a GPT; parameters keep their names."""

    def __init__(self, model: GPT, index: int, cut: Sequence[int]) -> None:
        """Take the blocks of stage `index`; `cut` says how many each stage has."""
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = index == 0, index == len(cut) - 1
        numbers = range(sum(cut[:index]), sum(cut[: index + 1]))
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in numbers})
        if self.is_first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
        if self.is_last:
            self.final_norm, self.head = model.final_norm, model.head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map (B, T) tokens or (B, T, D) activations to what the next stage takes.

        The last stage returns (B, T, V) logits, or with labels (B, T) the mean loss.
        """
        if self.is_first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(places)
        for block in self.blocks.values():
            x = block(x)
        if not self.is_last:
            return x
        logits = self.head(self.final_norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def tied_weight(self) -> Tensor | None:
        """Return the matrix that the other end of the pipeline holds too, if any."""
        if not self.config.tied or self.is_first == self.is_last:
            return None  # not tied; or in the middle; or both ends are on this stage
        return (self.token_embedding if self.is_first else self.head).weight


def add_tied_gradients(part: Any, ends: Any) -> None:
    """Let embedding and head, one matrix on two stages, have the sum of both gradients.

    Both hold the same values, get the same gradient, and so stay the same matrix. Call
    this once a step, after all backward passes: a second call adds up sums.
    """
    if (tied := part.tied_weight()) is not None and tied.requires_grad:
        dist.all_reduce(tied.grad, group=ends)


def clip_grad_norm(part: Any, max_norm: float) -> Tensor:
    """Clip by the norm of the gradients of all stages; every rank calls this.

    A tied matrix is one parameter: the last stage's copy of it does not count.
    """
    copy = part.tied_weight() if part.is_last else None
    own = [p.grad for p in part.parameters() if p is not copy and p.grad is not None]
    norm = get_total_norm(own)
    # At least in float32: in float16 the square of 256 is infinite.
    squares = norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    clip_grads_with_norm_(part.parameters(), max_norm, norm)
    return norm
