"""Train a GPT whose every layer is split over the ranks, and compare with one process.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/by_hand.py
Expect: four all-reduces of (B, T, D) a block and step; after 50 steps the loss, the
    gradients and the weights of one process.
"""

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import GPT, GPTConfig
from parallel_gpt import ParallelGPT, shard_like
from ranks import check, fail, gather, join, leave, say
from sent_and_kept import Collectives

B, T, STEPS = 4, 32, 50
CONFIG = GPTConfig(block_size=T, width=64)
# A module of Python's library that versions 3.10 to 3.13 have alike.
SOURCE = Path(sysconfig.get_paths()["stdlib"]) / "xml/dom/domreg.py"


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut inputs and labels, (B, T), out of SOURCE: the same ones on every rank."""
    text = torch.tensor(list(SOURCE.read_bytes()), device=device)
    starts = torch.arange(B, device=device)[:, None] * 500 + step * 9
    tokens = text[starts + torch.arange(T + 1, device=device)]
    return tokens[:, :-1], tokens[:, 1:]


def train_by_adam(model: GPT, device: torch.device) -> Tensor:
    """Take STEPS steps; return their losses."""
    adam, losses = torch.optim.AdamW(model.parameters(), 1e-3, fused=True), []
    for step in range(STEPS):
        adam.zero_grad()
        loss = model(*batch(step, device))
        loss.backward()
        adam.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    """Train twice in float64: on all ranks together, and on each rank as if alone."""
    if CONFIG.heads % int(os.environ.get("WORLD_SIZE", 1)):
        fail(f"{CONFIG.heads} heads take 1, 2 or 4 ranks; type --nproc-per-node=2")
    device = join()
    torch.manual_seed(0)
    alone = GPT(CONFIG).to(device, torch.float64)
    torch.manual_seed(0)
    ours = ParallelGPT(CONFIG).to(device, torch.float64)
    pairs: list[Any] = [
        (train_by_adam(alone, device), losses := train_by_adam(ours, device))
    ]
    for name, p in ours.named_parameters():
        right = alone.get_parameter(name)
        pairs += [(shard_like(right, p), p.detach())]
        pairs += [(shard_like(right.grad, p), p.grad)]  # type: ignore
    apart = torch.tensor([torch.dist(*pair).item() for pair in pairs]).max()  # or NaN
    counts = [sum(p.numel() for p in m.parameters()) for m in (alone, ours)]
    say(f"parameters | {counts[0]:,} in one process, here {gather(counts[1])}")
    with Collectives() as calls:
        ours(*batch(STEPS, device)).backward()
    whole, given = B * T * CONFIG.width * 8, [nbytes for _, nbytes in calls.noted]
    big, small = given.count(whole), sum(given) - given.count(whole) * whole
    say(f"all-reduced in a step | {big} x {whole:,} bytes, and {small:,} for the loss")
    say(f"sent by each rank in a step | {calls.sent_on_a_ring():,} bytes")
    say(f"loss | {losses[0]:.3f} before, {losses[-1]:.3f} after {STEPS} steps")
    is_formula = (big, small) == (4 * CONFIG.layers + 2, 3 * B * T * 8)
    is_same = len(pairs) == 49 and apart < 1e-9
    check(is_same and is_formula, f"losses, weights, gradients within {apart:.0e}")
    leave()


if __name__ == "__main__":
    main()
