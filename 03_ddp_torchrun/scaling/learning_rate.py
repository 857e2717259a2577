"""Four times the ranks, each with the batch it had: which learning rate?

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/scaling/learning_rate.py
Expect: the validation loss, by global batch size, steps and rate. After one epoch the
    large batch is behind at all three; after as many steps it is ahead.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import check, join, leave, say

SAMPLES, T, WARM_UP = 2048, 32, 0.1  # the part of the steps in which the rate rises
SMALL, LARGE = 8, 32  # global batch sizes: of some ranks, and of four times as many
# For the small batch about the best, over two seeds, of rates a factor of two apart.
TUNED = {"AdamW": 8e-3, "SGD": 0.06}
# The batch, its rate as a multiple of that, and how often it sees the samples.
CASES = [(SMALL, 1, 1), (LARGE, 1, 1), (LARGE, 2, 1), (LARGE, 4, 1), (LARGE, 2, 4)]


def rate_of(step: int, steps: int, scale: float) -> float:
    """Rise for a tenth of all steps, nearly to `scale`, then fall by a cosine."""
    rises = min(1.0, (step + 1) / (WARM_UP * steps))
    return scale * rises * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def train_at(rate: float, name: str, samples: Any, batch_size: int, epochs: int) -> Any:
    """Train, each rank on its part of each global batch; return the model."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=T, width=32, layers=1, heads=2))
    model.to(samples[0].device)
    ddp_model = DistributedDataParallel(model)
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=rate, **momentum)
    order = torch.cat([torch.randperm(SAMPLES) for _ in range(epochs)])
    batches = order.split(batch_size)  # on all ranks the same
    for step, batch in enumerate(batches):
        mine = batch[dist.get_rank() :: dist.get_world_size()]
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, len(batches), rate)
        optimizer.zero_grad()
        ddp_model(*(part[mine] for part in samples)).backward()
        optimizer.step()
    return model


def main() -> None:
    """Train in five ways with each optimizer; compare the validation losses."""
    device = join(at_most=2)
    texts = zip(load_text(None, T), (SAMPLES, 256), strict=True)
    sets = [WindowDataset(text, T, samples) for text, samples in texts]
    samples, held_out = (
        [part.to(device) for part in one.batch(range(len(one)))] for one in sets
    )
    is_right = []
    say("       batch  steps  epochs  rate          loss")
    for name, tuned in TUNED.items():
        found = []
        for batch_size, factor, epochs in CASES:
            model = train_at(factor * tuned, name, samples, batch_size, epochs)
            found.append(model(*held_out).item())
            steps = SAMPLES * epochs // batch_size
            text = f"{name:5} {batch_size:6} {steps:6} {epochs:7}"
            say(f"{text}  {factor} x {tuned:<6} {found[-1]:7.3f}")
        small, kept, doubled, _, as_long = found
        is_right += [
            small < min(found[1:4]) - 0.1,
            doubled < kept - 0.005,
            as_long < small - 0.005,
        ]
    claim = "after an epoch none of 3 rates makes up for fewer steps; twice helps"
    check(all(is_right), claim)
    leave()


if __name__ == "__main__":
    main()
