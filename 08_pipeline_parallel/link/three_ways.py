"""A step by data, tensor and pipeline parallelism: what each rank sends, and the time.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/link/three_ways.py --samples=8
Expect: the bytes counted are those worked out. Few samples: the pipeline sends least.
    Many: data parallelism does. Loss and gradients are one process's.
"""

import copy
import time
from typing import Any

import torch
import torch.distributed as dist

from counted_sends import CountedSends
from ranks import check, gather, join, leave, number, read_options, say
from ways import GPT, MICRO_BATCHES, WAYS, GPTConfig

CONFIG = GPTConfig(block_size=64, width=128, layers=2, heads=4, tied=False)


def expected_bytes(way: str, samples: int, parameters: int) -> float:
    """Work out what a rank of two sends in a step, in float32, at most."""
    activations = 4 * samples * CONFIG.block_size * CONFIG.width
    if way == "data":  # a ring all-reduce sends 2 (n - 1) / n of a tensor
        return 4 * parameters
    if way == "tensor":  # an all-reduce after attention and MLP, forward and backward
        return 4 * CONFIG.layers * activations
    return activations  # forward, and as much backward, from another rank


def distance_from(model: Any, alone: Any) -> float:
    """Return how far this rank's gradients that are whole are from one process's."""
    errors = []
    for name, p in model.named_parameters():
        one = alone.get_parameter(name).grad
        if p.grad is not None and p.shape == one.shape:
            errors.append(torch.dist(p.grad, one))
    return torch.stack(errors).max().item()  # max() would drop a NaN


def main() -> None:
    """Take a step each way; compare bytes, losses and gradients; show times."""
    options = read_options(
        samples={"type": number(4, 4096), "default": 8, "help": "in a step"}
    )
    join(at_least=2, at_most=2, only_cpu=True)
    torch.set_num_threads(1)
    samples = -(-options.samples // MICRO_BATCHES) * MICRO_BATCHES
    torch.manual_seed(0)
    model = GPT(CONFIG)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(256, (samples, CONFIG.block_size + 1))
    alone = copy.deepcopy(model)
    loss = alone(tokens[:, :-1], tokens[:, 1:])  # one process's
    loss.backward()
    say(f"{parameters:,} parameters, {samples} samples of {CONFIG.block_size} tokens")
    right = []
    for way, build in WAYS.items():
        step = build(own := copy.deepcopy(model))
        step(tokens)  # the first connects
        own.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        with CountedSends() as sent:
            part = step(tokens)
        ms = 1000 * max(gather(time.perf_counter() - start))
        most = max(gather(sent.bytes))
        say(f"{way:8} | a rank sends {most / 1e6:6.2f} MB | {ms:6.0f} ms")
        right.append(most == expected_bytes(way, samples, parameters))
        right.append(abs(sum(gather(part.item())) - loss.item()) < 1e-5)
        right.append(distance_from(own, alone) < 1e-5)
    claim = "loss and gradients are one process's, and the bytes those worked out"
    check(all(right), f"{len(WAYS)} ways: {claim}")
    leave()


if __name__ == "__main__":
    main()
