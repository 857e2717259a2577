"""Does minimal.py train the model that one process would? Ask that of a model of yours.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/balance/check_minimal.py
Expect: a `check:` that counts the tensors compared after an epoch, or a line that names
    one that differs.
"""

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

import minimal
from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import check, leave


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Step by the gradient, whatever Adam's `lr`: Adam would hide a wrong factor.

    What your optimizer does by groups of parameters is not checked.
    """
    return torch.optim.SGD(parameters, lr=0.02)


def train_without_stages() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train without stages, on whole batches; return the weights before and after."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())  # yours: float32, no dropout or BatchNorm
    before = copy.deepcopy(model.state_dict())
    train = WindowDataset(load_text(None, 128)[0], 128, 1024)  # yours
    sampler = RandomSampler(train, generator=torch.Generator().manual_seed(0))
    samples = minimal.MICRO_BATCHES * minimal.MICRO_BATCH_SIZE
    loader = DataLoader(train, samples, sampler=sampler, drop_last=True)
    optimizer = sgd(model.parameters(), lr=0)
    for _, inputs, labels in loader:  # yours
        model(inputs, labels).backward()  # yours: the mean loss of the batch
        optimizer.step()
        optimizer.zero_grad()
    return before, model.state_dict()


def train_in_stages() -> dict[str, Tensor]:
    """Run minimal.py; return what it saves, on every rank."""
    minimal.MAX_NORM = float("inf")  # clipping hides a factor too
    with tempfile.TemporaryDirectory() as folder:
        minimal.main(sgd, f"{folder}/model.pt")
        is_first = dist.get_rank() == 0
        saved: Any = [torch.load(f"{folder}/model.pt") if is_first else None]
    dist.broadcast_object_list(saved)
    return saved[0]


def compare_weights(before: dict, alone: dict, ours: dict) -> tuple[bool, str]:
    """Tell whether every tensor is where one process moved it, and say so in a line."""
    if alone.keys() != ours.keys():
        return False, f"in one of the two only: {sorted(alone.keys() ^ ours.keys())}"
    trained = 0
    for name in alone:
        start, due, found = (one[name].double() for one in (before, alone, ours))
        far = torch.dist(due, start).item()
        trained += far > 0
        if not torch.dist(found, due) <= 1e-2 * far:  # or it is no number
            # Infinite for a frozen tensor.
            times, off = (torch.dist(found, one) / far for one in (start, due))
            said = f"it moved {times:.3g} times as far, and is {off:.3g} times that off"
            return False, f"{name} differs: {said}"
    said = f"{len(alone)} tensors, {trained} of them trained, are one process's"
    return trained > 0, said


def main() -> None:
    """Train both ways, compare, check, leave."""
    before, alone = train_without_stages()
    check(*compare_weights(before, alone, train_in_stages()))
    leave()


if __name__ == "__main__":
    main()
