"""What train_stages.py compares: a GPT and its batches, two schedules, one process."""

from typing import Any

import torch
from torch import Tensor

from gpipe import gpipe
from model import GPT, GPTConfig
from one_f_one_b import one_f_one_b

SCHEDULES = {"gpipe.py": gpipe, "one_f_one_b.py": one_f_one_b}
CONFIG = GPTConfig(block_size=16, width=32, layers=5, heads=2)
STEPS, SAMPLES, MICRO_BATCH_SIZE = 3, 30, 4  # 8 micro-batches, the last of 2 samples
MAX_NORM = 0.5


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
