"""Read a checkpoint in one ordinary process: no launcher, no group, no DDP.

Run: python 03_ddp_torchrun/generate.py --checkpoint=gpt.pt
Expect: text in the style of the corpus, and a `check:` that one process computes the
    validation loss that the ranks which trained the model computed together.
"""

import os
import sys
from pathlib import Path

import torch

from checkpoint import load_checkpoint
from data import WindowDataset, load_text
from ranks import fail, number, read_options

LIMIT = 1e-4  # nats per byte: the same losses, added up in another order


@torch.no_grad()
def main() -> None:
    """Load, write text, and compute again what train.py printed."""
    options = read_options(
        checkpoint={"type": Path, "default": Path("gpt.pt"), "help": "file to read"},
        snapshot={"type": Path, "dest": "checkpoint", "help": "the same"},
        prompt={"default": "import ", "help": "text to continue"},
        length={"type": number(0, 10**6), "default": 300, "help": "bytes to write"},
        temperature={"type": number(1e-3, 1e3), "default": 0.8, "help": "low: duller"},
        seed={"type": int, "default": 0, "help": "another seed, another text"},
    )
    path = options.checkpoint
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it is one process")
    if not options.prompt:
        fail("--prompt needs at least one character")
    try:
        model, content = load_checkpoint(path)
        corpus = Path(content["text"]) if content["text"] else None
        _, held_out_text = load_text(corpus, model.config.block_size)
    except (OSError, ValueError) as error:
        fail(str(error))
    prompt, length = options.prompt.encode(), options.length
    print(model.generate(prompt, length, options.temperature, options.seed))
    told = content["validation_loss"]
    if told is None:
        middle = f"{path} comes from the middle of a run"
        print(f"{middle}: no validation loss to compare with")
        return
    held_out = WindowDataset(held_out_text, model.config.block_size, samples=256)
    losses = [model(*held_out.batch([i])) for i in range(len(held_out))]
    loss = torch.stack(losses).mean().item()
    result = f"validation loss {loss:.4f} in one process, {told:.4f} in the checkpoint"
    if not abs(loss - told) < LIMIT:
        sys.exit(f"generate.py: {result}: the text is not the one it was trained on")
    print(f"check: {result} (limit {LIMIT:.0e})")


if __name__ == "__main__":
    main()
