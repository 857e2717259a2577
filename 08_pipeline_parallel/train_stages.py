"""Train the GPT in stages, by GPipe and by 1F1B; compare with one process.

Run: torchrun --nproc-per-node=4 08_pipeline_parallel/train_stages.py
Expect: the micro-batches that were in flight; the weights of one process, with 5 blocks
    on 4 stages and a smaller last micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model import GPT, GPTConfig
from ranks import check, gather, join, leave, say
from schedules import SCHEDULES
from stage import Part, Stage, clip_grad_norm, even_cut

CONFIG = GPTConfig(block_size=16, width=32, layers=5, heads=2)
STEPS, SAMPLES, MICRO_BATCH_SIZE = 3, 30, 4  # 8 micro-batches, the last of 2 samples
MAX_NORM = 0.5


def train_by_schedule(stage: Stage, schedule: Callable, batches: Tensor) -> None:
    """Take a step for each batch of (samples, T + 1) tokens; every rank calls this."""
    optimizer = optimizer_of(stage.part)
    for batch in batches:
        stage.run(schedule, batch[:, :-1], batch[:, 1:], MICRO_BATCH_SIZE)
        clip_grad_norm(stage.part, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def model_and_batches(device: torch.device) -> tuple[GPT, Tensor]:
    """Return the GPT and (steps, samples, T + 1) tokens, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(CONFIG).double().to(device)
    return model, torch.randint(256, (STEPS, SAMPLES, CONFIG.block_size + 1)).to(device)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer; Adam would hide a wrong factor, SGD does not."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights_of_one_process(device: torch.device) -> dict[str, Tensor]:
    """Train the whole model on whole batches, without a message."""
    model, batches = model_and_batches(device)
    optimizer = optimizer_of(model)
    for batch in batches:
        model(batch[:, :-1], batch[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def main() -> None:
    """Train by each schedule, count what is in flight, compare with one process."""
    device = join(at_least=2, at_most=CONFIG.layers)
    alone, errors = weights_of_one_process(device), []
    for name, schedule in SCHEDULES.items():
        model, batches = model_and_batches(device)
        cut = even_cut(CONFIG.layers, dist.get_world_size())
        stage = Stage(Part(model, dist.get_rank(), cut))
        train_by_schedule(stage, schedule, batches)
        in_flight = gather(stage.most_in_flight)
        say(f"{name:11} | blocks {cut}, in flight at most {in_flight}, by stage")
        weights = stage.part.state_dict()
        errors += [torch.dist(p, alone[key]).item() for key, p in weights.items()]
    is_same, count = all(error < 1e-12 for error in errors), gather(len(errors))
    check(is_same, f"{sum(count)} tensors after {STEPS} steps are one process's")
    leave()


if __name__ == "__main__":
    main()
