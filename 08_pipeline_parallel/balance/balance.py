"""Cut a GPT so that its stages take equally long, by the measured time of each layer.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/balance/balance.py
Expect: the head takes as long as several blocks, so half of the blocks are not half of
    the time; the best cut gives the last stage fewer, and a step is shorter.
"""

import random

import torch

from cuts import (
    GPT,
    GPTConfig,
    all_cuts,
    best_cut,
    blocks_of,
    even_cut,
    layer_seconds,
    slowest_stage,
    step_seconds,
)
from ranks import check, gather, join, leave, say

CONFIG = GPTConfig(
    block_size=32, width=128, layers=8, heads=4, vocabulary=8192, tied=False
)
MICRO_BATCHES, MICRO_BATCH_SIZE = 4, 4


def is_best_of_all_cuts(lists: list[list[float]], stages: int) -> bool:
    """Compare the best cut of each list of times with all there are."""
    return all(
        slowest_stage(seconds, best_cut(seconds, stages))
        == min(slowest_stage(seconds, cut) for cut in all_cuts(len(seconds), stages))
        for seconds in lists
    )


def main() -> None:
    """Measure the layers, cut, run both cuts; compare best cuts with all cuts."""
    join(at_least=2, at_most=2, only_cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = MICRO_BATCHES * MICRO_BATCH_SIZE
    tokens = torch.randint(CONFIG.vocabulary, (samples, CONFIG.block_size + 1))
    micro_batch = tokens[:MICRO_BATCH_SIZE]
    # All ranks must choose the same cut: rank 0's times count.
    own = layer_seconds(GPT(CONFIG), micro_batch[:, :-1], micro_batch[:, 1:])
    seconds = gather(own)[0]
    embedding, *each, head = seconds
    block = sum(each) / len(each)
    say(f"embedding {embedding / block:.1f}, head {head / block:.1f} times a block")
    even, best = even_cut(CONFIG.layers, 2), blocks_of(best_cut(seconds, 2))
    for name, blocks in {"even": even, "best": best}.items():
        cut = [blocks[0] + 1, blocks[1] + 1]
        slowest = 1000 * slowest_stage(seconds, cut)
        step = 1000 * step_seconds(CONFIG, blocks, tokens, MICRO_BATCH_SIZE)
        say(f"{name}: blocks {blocks}, slowest stage {slowest:.1f} ms, step {step:.0f}")
    random.seed(0)
    lists = [[1.0 * random.randint(1, 9) for _ in range(10)] for _ in range(20)]
    right = all(is_best_of_all_cuts(lists, stages) for stages in (1, 2, 3, 4, 10))
    check(right, f"{5 * 20} best cuts are as good as the best of all cuts")
    leave()


if __name__ == "__main__":
    main()
