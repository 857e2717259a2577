"""Two stages that really compute, on two cores: who waits, and what autograd keeps.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/bubble/two_real_stages.py
Expect: idle shares of a GPT by GPipe and by 1F1B; the bytes that autograd keeps for
    backward are proportional to the micro-batches in flight.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import check, gather, join, leave, say
from timed_stages import BY_HAND, GPT, Clock, GPTConfig, Part, TimedStage, run_twice
from timelines import idle_share

CONFIG = GPTConfig(block_size=128, width=256, layers=4, heads=4, tied=False)
MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 4


class SavedBytes:
    """Counts the bytes that autograd keeps from forward passes for backward passes.

    Tensors with one storage count once; parameters and tokens, which are there anyhow,
    do not count.
    """

    def __init__(self, *not_these: Tensor) -> None:
        """Count nothing yet."""
        self.not_these = {tensor.untyped_storage().data_ptr() for tensor in not_these}
        self.holders, self.now, self.peak = Counter[int](), 0, 0

    def hooks(self) -> Any:
        """Return a context for the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Saved(tensor, self), lambda saved: saved.tensor
        )


class Saved:
    """A tensor that autograd keeps; it has gone when autograd forgets this."""

    def __init__(self, tensor: Tensor, count: SavedBytes) -> None:
        """Count the storage if it is new."""
        self.tensor, self.count, storage = tensor, count, tensor.untyped_storage()
        self.place, self.bytes = storage.data_ptr(), storage.nbytes()
        if self.place not in count.not_these:
            count.holders[self.place] += 1
            count.now += self.bytes * (count.holders[self.place] == 1)
            count.peak = max(count.peak, count.now)

    def __del__(self) -> None:
        """Take the storage off if this was the last holder."""
        if self.place not in self.count.not_these:
            self.count.holders[self.place] -= 1
            self.count.now -= self.bytes * (self.count.holders[self.place] == 0)


class CountedStage(TimedStage):
    """A stage that notes when it computes and what its forward passes leave behind."""

    saved: SavedBytes

    def compute_forward(self, i: int, x: Tensor, labels: Tensor) -> Tensor:
        """Count what is kept for the backward pass."""
        with self.saved.hooks():
            return super().compute_forward(i, x, labels)


def run_real(schedule: Callable, tokens: Tensor) -> tuple[float, list[int]]:
    """Return the idle share of a step, and the peak bytes of each stage."""
    torch.manual_seed(0)
    part, clock = Part(GPT(CONFIG), dist.get_rank(), [2, 2]), Clock()
    stage = CountedStage(part, clock)
    stage.saved = SavedBytes(tokens, *part.parameters())
    batch = tokens[:, :-1], tokens[:, 1:], MICRO_BATCH_SIZE
    spans = run_twice(lambda: stage.run(schedule, *batch), clock, unit=0.0)
    assert stage.saved.now == 0  # all backward passes are over
    return idle_share(gather(spans)), gather(stage.saved.peak)


def main() -> None:
    """Run both schedules; compare what they keep with the micro-batches in flight."""
    join(at_least=2, at_most=2, only_cpu=True)
    torch.set_num_threads(1)
    samples = MICRO_BATCHES * MICRO_BATCH_SIZE
    tokens = torch.randint(256, (samples, CONFIG.block_size + 1))
    peaks = {}
    for name, schedule in BY_HAND.items():
        idle, peaks[name] = run_real(schedule, tokens)
        kept = " and ".join(f"{peak / 2**20:.1f}" for peak in peaks[name])
        say(f"{name:11} | idle {idle:.1%} | kept for backward: {kept} MiB")
    say(f"formula     | idle {1 / (MICRO_BATCHES + 1):.1%}")
    (all_0, all_1), (two, one) = peaks.values()
    right = all_0 * 2 == two * MICRO_BATCHES and all_1 == one * MICRO_BATCHES
    check(right, "GPipe keeps 8 micro-batches, 1F1B keeps 2 and 1, to the byte")
    leave()


if __name__ == "__main__":
    main()
