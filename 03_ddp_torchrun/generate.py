"""Read a snapshot in one ordinary process: no launcher, no group, no DDP.

Run: python 03_ddp_torchrun/generate.py --snapshot gpt.pt
Needs: a snapshot that 03_ddp_torchrun/train.py --snapshot gpt.pt has written.
Expect: text in the style of the corpus, and a `check:` that one process finds the same
    validation loss as the ranks that trained the model found together.
Before: 03_ddp_torchrun/train.py
Next: 03_ddp_torchrun/speed.py, what training on several ranks costs.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from data import WindowDataset, load_text
from options import OneLineParser, fail
from snapshot import load_snapshot

TOLERANCE = 1e-4  # nats: the same bytes, but summed in another order


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser(description="Write text with a trained model.")
    parser.add_argument("--snapshot", type=Path, required=True, help="file to read")
    parser.add_argument("--prompt", default="import ", help="the text to go on from")
    parser.add_argument("--length", type=int, default=300, help="bytes to write")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="lower is duller"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, another text"
    )
    args = parser.parse_args()
    if not args.prompt or args.length < 0 or not 0 < args.temperature < math.inf:
        fail("--prompt needs a character, --length 0 or more, --temperature > 0")
    return args


@torch.no_grad()
def main() -> None:
    """Load, write text, and recompute what train.py printed."""
    args = parse_args()
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it is one process")
    try:
        model, snapshot = load_snapshot(args.snapshot)
        corpus = Path(snapshot["text"]) if snapshot["text"] else None
        _, held_out_text = load_text(corpus, model.config.block_size)
    except (OSError, ValueError) as error:
        fail(str(error))
    prompt = args.prompt.encode()
    model.eval()  # dropout is for training alone
    print(model.generate(prompt, args.length, args.temperature, args.seed))
    held_out = WindowDataset(held_out_text, model.config.block_size, samples=256)
    loss = model(*held_out.batch(range(len(held_out)))).item()
    told = snapshot["validation_loss"]
    if told is None:
        middle = f"{args.snapshot} comes from the middle of a run"
        print(f"{middle}: no validation loss to compare with")
        return
    result = f"validation loss {loss:.4f} in one process, {told:.4f} in the snapshot"
    if not abs(loss - told) < TOLERANCE:
        sys.exit(f"generate.py: {result}: the text is not the one it was trained on")
    print(f"check: {result} (limit {TOLERANCE:.0e})")


if __name__ == "__main__":
    main()
