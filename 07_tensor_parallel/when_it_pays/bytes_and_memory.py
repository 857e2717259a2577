"""Count what a rank keeps and sends in a step, data-parallel and tensor-parallel.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/when_it_pays/bytes_and_memory.py
Expect: for models of 1 and 2 blocks the megabytes of states, of activations and of
    all-reduces; a `check:` that they are the formulas'.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_gpt import GPT, GPTConfig, ParallelGPT
from ranks import check, fail, join, leave, say
from sent_and_kept import Collectives, kept_for_backward
from step_cost import data_parallel_bytes, tensor_parallel_bytes

B, T, D, LAYERS = 8, 64, 128, (1, 2)
# Weights, gradients and the two moments of Adam, each in float32.
STATES = 4 * 4


def all_reduced_bytes(model: nn.Module, samples: Tensor) -> int:
    """Run a step; return the bytes of its all-reduces."""
    with Collectives() as calls:
        model(samples, samples).backward()
    return sum(nbytes for _, nbytes in calls.noted)


def main() -> None:
    """Count for two depths, hold that against the formulas, show what a block adds."""
    if GPTConfig().heads % int(os.environ.get("WORLD_SIZE", 1)):
        fail(f"{GPTConfig().heads} heads take 2 or 4 ranks; type --nproc-per-node=2")
    device = join(at_least=2)
    n, is_right = dist.get_world_size(), []
    samples = torch.randint(256, (B, T), generator=torch.Generator().manual_seed(0))
    samples = samples.to(device)
    part = samples.chunk(n)[dist.get_rank()]
    say("MB on a rank    blocks  states  activations  all-reduced")
    for layers in LAYERS:
        config = GPTConfig(block_size=T, width=D, layers=layers)
        whole, split = (m(config).to(device) for m in (GPT, ParallelGPT))
        counts = [sum(p.numel() for p in m.parameters()) for m in (whole, split)]
        tensor_bytes = all_reduced_bytes(split, samples)
        rows = {
            "one process": (counts[0], kept_for_backward(whole, samples, samples), 0),
            "data-parallel": (
                counts[0],
                kept_for_backward(whole, part, part),
                data_parallel_bytes(counts[0]),
            ),
            "tensor-parallel": (
                counts[1],
                kept_for_backward(split, samples, samples),
                tensor_bytes,
            ),
        }
        for name, (count, kept, sent) in rows.items():
            states, kept, sent = (x / 1e6 for x in (STATES * count, kept, sent))
            say(f"{name:15}{layers:7}{states:8.2f}{kept:13.2f}{sent:13.2f}")
        # Position embedding and norms are whole on every rank, all else is cut.
        uncut = T * D + (2 * layers + 1) * 2 * D
        is_right.append(counts[1] == uncut + (counts[0] - uncut) // n)
        is_right.append(tensor_bytes == tensor_parallel_bytes(B * T, D, layers))
    block = 4 * B * T * D * 4 / 1e6
    claim = f"{len(is_right)} counts are the formulas'; a block sums {block:.2f} MB"
    check(all(is_right), claim)
    leave()


if __name__ == "__main__":
    main()
