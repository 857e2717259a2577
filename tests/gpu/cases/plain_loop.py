"""The fastest plain loop that we can write for GPT-2's shape: the limit for train.py.

Run: torchrun --standalone --nproc-per-node=1 tests/gpu/cases/plain_loop.py --layers=12
Expect: `figures:` with tokens per second and MFU. One process, no DDP: the text lies on
    the device, bf16 autocast, torch.compile, fused AdamW, nothing is read back.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

CHAPTER = Path(__file__).resolve().parents[3] / "03_ddp_torchrun"
sys.path.insert(0, str(CHAPTER))  # a case is no lesson: it reaches into a chapter
WARM_UP, STEPS = 15, 60


def main() -> None:
    """Train on random windows of the text; time the steps after the first ones."""
    from data import load_text
    from model import GPT, GPTConfig

    parser = argparse.ArgumentParser()
    names = {"layers": 2, "width": 128, "heads": 4, "block_size": 128}
    names |= {"vocabulary": 50257, "batch_size": 32}
    for name, default in names.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    sizes = vars(parser.parse_args())
    batch_size = sizes.pop("batch_size")
    device = torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig(**sizes)).to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, fused=True)
    block = sizes["block_size"]
    text = load_text(None, block)[0].to(device)
    offsets = torch.arange(block + 1, device=device)

    def step() -> None:
        starts = torch.randint(len(text) - block - 1, (batch_size, 1), device=device)
        windows = text[starts + offsets].long()
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(windows[:, :-1], windows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.accelerator.synchronize()
    rate = STEPS * batch_size * block / (time.perf_counter() - started)
    mfu = model.utilisation(rate, device).removeprefix(" | MFU ").rstrip("%") or "0"
    figures = {"tokens/s": round(rate), "MFU %": float(mfu)}
    print(f"figures: {json.dumps(figures)}")
    print(f"check: {STEPS} steps of {batch_size} x {block} tokens")


if __name__ == "__main__":
    main()
