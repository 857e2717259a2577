"""Data parallelism by hand in one message: a flat buffer for all gradients.

Run: python 02_ddp_mp/flat.py
Expect: the same weights as `naive.py`, with one all-reduce in place of six.
"""

from typing import Any

import torch
import torch.distributed as dist

from naive import NaiveDDP, main
from ranks import start_ranks


class FlatDDP(NaiveDDP):
    """One all-reduce for everything, when backward is over."""

    def average_gradients(self) -> None:
        """Copy all gradients into one flat buffer, all-reduce it, copy them back."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients: Any = [parameter.grad for parameter in trainable]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    start_ranks(main, 2, FlatDDP)
