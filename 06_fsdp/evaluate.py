"""Evaluate and generate in shards: every rank makes every forward pass.

Run: torchrun --nproc-per-node=2 06_fsdp/evaluate.py, after minimal.py
Expect: the validation loss of one process, though the ranks have unequally many
    samples, and the text that it generates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zipfile import is_zipfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from data import WindowDataset, load_text
from finetune import FILE, load_in_shards
from model import GPT, GPTConfig
from ranks import check, fail, join, leave, say

BATCH_SIZE, SAMPLES = 16, 50
PROMPT = b"def ", 40, 0.7, 0  # 40 bytes more, at this temperature, from this seed


def free_gathered(model: Any) -> None:
    """Let all units have shards alone; after a forward pass the root stays whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # of this unit, and none within it


@torch.no_grad()
def validation_loss(model: Any, samples: WindowDataset, device: torch.device) -> float:
    """Return the mean loss of samples with equally many labels; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(2, device=device)  # the sum of the losses, and their number
    training = [module for module in model.modules() if module.training]
    model.eval()
    for start in range(0, len(samples), world_size * BATCH_SIZE):
        first = start + rank * BATCH_SIZE
        mine = range(first, min(first + BATCH_SIZE, len(samples)))
        # A rank that has none left runs sample 0, uncounted: others need its shards.
        inputs, labels = (part.to(device) for part in samples.batch(mine or [0]))
        logits = model(inputs).float()
        if mine:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            total += torch.stack([loss * len(mine), loss.new_tensor(len(mine))])
    for module in training:  # a frozen part may have been in eval() before
        module.training = True
    free_gathered(model)  # as a backward pass would
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@contextmanager
def gathered_once(model: Any) -> Iterator[None]:
    """Keep weights whole after their first use, for many forward passes in a row."""
    for block in model.blocks:
        block.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for block in model.blocks:
            block.set_reshard_after_forward(True)  # the default, whatever was before
        free_gathered(model)


def main() -> None:
    """Evaluate a file of weights and go on with a text; do the same in one process."""
    if not is_zipfile(FILE):  # as `torch.save` writes it, to the end
        fail(f"there is no whole {FILE}: run 06_fsdp/minimal.py first")
    device = join()
    samples = WindowDataset(load_text(None, 128)[1], block_size=128, samples=SAMPLES)
    model = load_in_shards(device)
    loss = validation_loss(model, samples, device)
    with gathered_once(model):
        text = model.generate(*PROMPT)
    say(f"validation loss {loss:.3f}\n{text!r}")
    # One process, in the policy's dtype.
    alone: Any = GPT(GPTConfig()).to(device, torch.bfloat16)
    alone.load_state_dict(torch.load(FILE))
    inputs, labels = (part.to(device) for part in samples.batch(range(SAMPLES)))
    with torch.no_grad():
        logits = alone(inputs).float().flatten(0, 1)
    due = F.cross_entropy(logits, labels.flatten()).item()
    most = 1e-5 if device.type == "cpu" else 1e-3  # a GPU has kernels for each size
    is_right = abs(loss - due) < most and text == alone.generate(*PROMPT)
    check(is_right, f"the mean loss of {SAMPLES} samples, and the text, of one process")
    leave()


if __name__ == "__main__":
    main()
