"""Compute a GPT's gradients on a sequence of which each rank holds a part.

Run: torchrun --nproc-per-node=4 09_one_mesh/context/context_parallel.py
Expect: loss and gradients of one process. Cut in contiguous order, the last rank
    computes most; by zigzag all compute nearly as much in each step of the ring.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from context_comparison import (
    GPT,
    Counted,
    T,
    gradients_of_one_process,
    slowest_to_mean,
    work_of_all_ranks,
)
from ranks import check, gather, join, leave, say
from ring_attention import ring_attention, zigzag


def loss_of_shard(
    model: GPT, inputs: Tensor, labels: Tensor, shards: Sequence[Tensor]
) -> Tensor:
    """Return this rank's term of the mean loss; inputs and labels are whole, (B, T)."""
    mine = shards[dist.get_rank()]  # positions, of which few are 0, 1, 2, ...
    x = model.token_embedding(inputs[:, mine])
    x = x + model.position_embedding(mine.to(inputs.device))
    for block in model.blocks:
        x = run_block(block, x, shards)
    logits = model.head(model.final_norm(x))
    own = labels[:, mine].flatten()
    return F.cross_entropy(logits.flatten(0, 1), own, reduction="sum") / labels.numel()


def run_block(block: Any, x: Tensor, shards: Sequence[Tensor]) -> Tensor:
    """Do what `Block.forward` does: only attention reads tokens of other ranks."""
    y = block.attention_norm(x)
    q, k, v = (block.split_heads(f(y)) for f in (block.query, block.key, block.value))
    y = ring_attention(q, k, v, shards)
    x = x + block.drop(block.attention_out(y.transpose(1, 2).flatten(2)))
    return x + block.drop(block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(x)))))


def add_up_gradients(model: nn.Module) -> None:
    """Sum over the ranks: each has the whole weights, and its tokens' gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)


def main() -> None:
    """Cut the sequence in two ways; count, and compare with one process."""
    device = join(at_most=8)
    n = dist.get_world_size()
    model, inputs, labels, right = gradients_of_one_process(device)
    errors, ratios, sent = [], [], []
    ways = {"contiguous": torch.arange(T).tensor_split(n), "zigzag": zigzag(T, n)}
    for name, shards in ways.items():
        model.zero_grad()
        with Counted() as calls:
            loss = loss_of_shard(model, inputs, labels, shards)
            loss.backward()
        add_up_gradients(model)
        ours = [sum(gather(loss.detach())), *(p.grad for p in model.parameters())]
        errors += [torch.dist(*pair).item() for pair in zip(ours, right, strict=True)]
        work = work_of_all_ranks(calls.products)
        ratios.append(slowest_to_mean(work))
        first, last = (" ".join(f"{x:.1f}" for x in work[r]) for r in (0, -1))
        by_rank = f"rank 0: {first} | rank {n - 1}: {last}"
        say(f"{name:10} | {by_rank} | slowest {ratios[-1]:.2f} x mean")
        sent.append(calls.activations_sent())
    formula = 6 * (n - 1) / n  # 2 of them in forward, 4 in backward
    say(f"sent in a layer | {sent[-1]:.2f} x (B, T, D), by formula {formula:.2f}")
    is_formula = abs(sent[-1] - formula) < 0.05 and ratios[-1] < 1.1
    check(
        all(e < 1e-12 for e in errors) and len(errors) == 2 * len(right) and is_formula,
        f"loss and {len(right) - 1} gradients are one process's to {max(errors):.0e}",
    )
    leave()


if __name__ == "__main__":
    main()
