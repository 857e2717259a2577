"""Train in one process: minimal.py before anything is distributed.

Run: python 02_ddp_mp/one_process.py
Expect: the mean loss of each epoch; the weights in minimal.pt.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS, BATCH_SIZE = 3, 64


def make_dataset() -> TensorDataset:
    """Draw places and heights."""
    places = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(places, torch.sin(6 * places).prod(dim=1, keepdim=True))


def main(device: torch.device) -> None:
    """Train on all samples, print and save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset, order = make_dataset(), torch.Generator()
    sampler = RandomSampler(dataset, generator=order)  # as shuffle=True, and seeded
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        order.manual_seed(epoch)
        losses = []
        for places, heights in loader:
            outputs = model(places.to(device))
            loss = nn.functional.mse_loss(outputs, heights.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        print(f"epoch {epoch} | mean loss {mean.item():.5f}")
    torch.save(model.state_dict(), "minimal.pt")


if __name__ == "__main__":
    # True: one that is there, not only one that this torch is built for.
    main(torch.accelerator.current_accelerator(True) or torch.device("cpu"))
