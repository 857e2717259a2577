"""An exercise: a training loop that runs, learns, and is wrong in four places.

Run: python 03_ddp_torchrun/exercise_broken_training.py
Needs: this folder and an editor. Repair `train_and_save`. Runs on the CPU, by gloo.
Expect: for every rank the first thing that is wrong with what was done there; at last
    a `check:`. Until then the script exits with status 1.
Before: 03_ddp_torchrun/train.py, where all four are done right.
Next: 03_ddp_torchrun/exercise_accumulation.py
"""

import math
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from all_ranks import flat_copy
from ask_ranks import ask_every_rank, in_words
from options import OneLineParser, fail

WORLD_SIZE, EPOCHS = 2, 3


def train_and_save(
    ddp_model: DistributedDataParallel, dataset: Dataset, path: Path
) -> Any:
    """Train for EPOCHS epochs, save the weights, return a list of losses.

    Each loss is the mean over all ranks' samples of an epoch, and the same on every
    rank. The file holds the weights for a model that knows nothing of DDP. The samples
    come in another order in every epoch, and each sample once.
    """
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    losses = []
    for _ in range(EPOCHS):
        total = torch.zeros(())
        for inputs, labels in loader:
            loss = F.mse_loss(ddp_model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append((total / len(loader)).item())
    torch.save(ddp_model.state_dict(), path)
    return losses


# What follows checks it.
PATIENCE = timedelta(seconds=10)  # of a rank whose gradients others are to exchange


class NotedDataset(Dataset):
    """24 samples of which it is noted who asked for which, and when."""

    def __init__(self) -> None:
        """Draw the same samples on every rank."""
        self.inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
        self.seen: list[int] = []

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an input, (8,), and its label, (1,)."""
        self.seen.append(index)
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True).sin()


def plain_model() -> torch.nn.Module:
    """Make the same small model on every rank."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)]
    return torch.nn.Sequential(*layers)


def parts(many: list[Any]) -> list[list[Any]]:
    """Cut what was noted during a run into one part for each epoch."""
    length = len(many) // EPOCHS
    return [many[length * epoch : length * (epoch + 1)] for epoch in range(EPOCHS)]


def explain_samples(rank: int, seen: list[list[int]]) -> str:
    """Say what is wrong with the samples that the ranks saw, or nothing."""
    by_epoch = zip(*map(parts, seen), strict=True)
    for epoch, by_rank in enumerate(by_epoch):
        together = sorted(index for own in by_rank for index in own)
        if together != list(range(24)):
            twice = len(together) - len(set(together))
            return (
                f"in epoch {epoch} the ranks saw {len(together)} samples, {twice} of "
                "them again: who deals them out?"
            )
    orders = parts(seen[rank])
    for epoch in range(1, EPOCHS):
        if orders[epoch] in orders[:epoch]:
            return (
                f"epoch {epoch} has the order of an epoch before: what does the "
                "sampler know of epochs?"
            )
    return ""


def explain_losses(rank: int, told: Any, noted: list[list[float]]) -> str:
    """Say what is wrong with the losses that `train_and_save` returned, or nothing."""
    if not isinstance(told, list) or len(told) != EPOCHS:
        return f"it returned {told!r:.40}, not a list of {EPOCHS} losses"
    by_rank = [[sum(own) / len(own) for own in parts(losses)] for losses in noted]
    for epoch, found in enumerate(map(float, told)):
        own = by_rank[rank][epoch]
        mean = sum(losses[epoch] for losses in by_rank) / WORLD_SIZE
        text = f"the loss of epoch {epoch} is {found:.3f}, over all ranks {mean:.3f}: "
        if math.isclose(found, mean, rel_tol=1e-4):
            continue
        if math.isclose(found, own, rel_tol=1e-4):
            return text + "it is this rank's own"
        if math.isclose(found, mean * WORLD_SIZE, rel_tol=1e-4):
            return text + "it is the sum over the ranks"
        return text + "it is neither this rank's nor the mean"
    return ""


def explain_file(rank: int, path: Path, writes: int, weights: torch.Tensor) -> str:
    """Say what is wrong with the file and who wrote it, or nothing."""
    if rank > 0 and writes:
        return "this rank writes the file too: two at once may leave a broken one"
    if not path.exists():
        return "nobody has saved the weights at `path`"
    try:
        saved = torch.load(path, weights_only=True)
    except Exception:  # what it raises is no public promise
        return "the file holds something else than weights: save a state_dict"
    if any(name.startswith("module.") for name in saved):
        return "the names in the file begin with `module.`: a plain model has no such"
    model = plain_model()
    model.load_state_dict(saved)
    if not torch.equal(flat_copy(model.parameters()), weights):
        return "the file does not hold the weights at the end"
    return ""


def judge_training(rank: int) -> str:
    """Run `train_and_save`; say what is wrong on this rank, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13. So it gets a
    # group of its own, and so does the checker's talk.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp = dist.new_group(timeout=PATIENCE)
    aside = dist.new_group(timeout=timedelta(minutes=1))
    dataset, model = NotedDataset(), plain_model()
    ddp_model = DistributedDataParallel(model, process_group=for_ddp)
    noted, mse_loss, failed, told = [], F.mse_loss, "", None

    def note_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = mse_loss(*args, **kwargs)
        noted.append(loss.item())
        return loss

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder] * WORLD_SIZE
        dist.all_gather_object(folders, folder, group=aside)
        path = Path(folders[0], "weights.pt")
        save = mock.Mock(side_effect=torch.save)
        try:
            with (
                mock.patch.multiple(torch, save=save),
                mock.patch.object(F, "mse_loss", note_loss),
            ):
                told = train_and_save(ddp_model, dataset, path)
        except RuntimeError as error:
            failed = in_words(error)
        weights = flat_copy(model.parameters())
        mine = failed, dataset.seen, noted, weights
        everyone = [mine] * WORLD_SIZE
        dist.all_gather_object(everyone, mine, group=aside)
        if any(one[0] for one in everyone):
            return failed or "this rank went on; another waited for it"
        text = (
            explain_samples(rank, [one[1] for one in everyone])
            or explain_losses(rank, told, [one[2] for one in everyone])
            or explain_file(rank, path, save.call_count, everyone[0][3])
        )
        dist.all_gather_object(folders, folder, group=aside)  # none removes it earlier
    if not text and not torch.equal(weights, everyone[0][3]):
        return "its weights are not those of rank 0: did DDP see the forward pass?"
    return text


def main() -> None:
    """Try the exercise on every rank; say what each of them has got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    OneLineParser(description="Check your training loop.").parse_args()
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    ask_every_rank(judge_training, WORLD_SIZE)
    print(f"check: {WORLD_SIZE} ranks trained, reported and saved as one")


if __name__ == "__main__":
    main()
