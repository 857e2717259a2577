"""Where to cut a model into stages: by the time that each layer takes.

The layers here are the embeddings, each block, and the last norm with the head.
"""

import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from model import GPT, GPTConfig
from ranks import gather
from schedules import gpipe
from stage import Part, Stage, even_cut

# What balance.py needs besides this file.
__all__ = ["GPT", "GPTConfig", "even_cut"]


def best_cut(seconds: list[float], stages: int) -> list[int]:
    """Return how many layers each stage gets, so that the slowest is as fast as can be.

    Layers keep their order. The best cut of the first n layers into s stages is a best
    cut of fewer layers into s - 1 stages, and one stage more.
    """
    before = [0.0, *itertools.accumulate(seconds)]  # the time of the first n layers
    best = {n: (before[n], [n]) for n in range(1, len(before))}
    for stage in range(2, stages + 1):
        best = {
            n: min(
                (max(best[k][0], before[n] - before[k]), [*best[k][1], n - k])
                for k in range(stage - 1, n)
            )
            for n in range(stage, len(before))
        }
    return best[len(seconds)][1]


def all_cuts(layers: int, stages: int) -> Iterator[list[int]]:
    """Yield every way to cut so many layers into stages of one layer or more."""
    for places in itertools.combinations(range(1, layers), stages - 1):
        edges = [0, *places, layers]
        yield [end - start for start, end in itertools.pairwise(edges)]


def slowest_stage(seconds: list[float], cut: list[int]) -> float:
    """Return the time of the slowest stage: the pipeline waits for it each time."""
    layers = iter(seconds)
    return max(sum(itertools.islice(layers, number)) for number in cut)


def blocks_of(cut: list[int]) -> list[int]:
    """Return the blocks of each stage: embeddings and head are not blocks."""
    return [
        number - (stage == 0) - (stage == len(cut) - 1)
        for stage, number in enumerate(cut)
    ]


def layer_seconds(model: GPT, inputs: Tensor, labels: Tensor) -> list[float]:
    """Measure each layer's forward and backward pass on this CPU, at best of 10."""
    blocks = [0, *[1] * model.config.layers, 0]  # every layer is a stage
    parts = [Part(model, stage, blocks) for stage in range(len(blocks))]
    fastest = [float("inf")] * len(parts)
    for _ in range(10):
        x = inputs
        for stage, part in enumerate(parts):
            start = time.perf_counter()
            y = part(x, labels)
            y.backward(y if y.ndim else None)  # any gradient takes as long
            seconds = time.perf_counter() - start
            fastest[stage] = min(fastest[stage], seconds)
            x = y.detach().requires_grad_()
    model.zero_grad()
    return fastest


def step_seconds(
    config: GPTConfig, blocks: list[int], tokens: Tensor, micro_batch_size: int
) -> float:
    """Return the time of a step with so many blocks on each stage, at best of 3.

    Every rank calls this with the same (samples, T + 1) tokens.
    """
    torch.manual_seed(0)
    stage, seconds = Stage(Part(GPT(config), dist.get_rank(), blocks)), []
    for _ in range(4):  # the first is slower
        dist.barrier()
        start = time.perf_counter()
        stage.run(gpipe, tokens[:, :-1], tokens[:, 1:], micro_batch_size)
        seconds.append(max(gather(time.perf_counter() - start)))
    return min(seconds[1:])
