"""Train the GPT in one process: the loop before anything is distributed.

Run: python 03_ddp_torchrun/one_process.py
Expect: a loss that falls from 5.5 to 3 nats per byte in 16 steps.
"""

import torch
from torch.utils.data import DataLoader, RandomSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig


def main() -> None:
    """Train for one epoch on one device."""
    # True: one that is there, not only one that this torch is built for.
    device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        loss = model(inputs.to(device), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            print(f"step {step:2} | loss {loss.item():.3f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
