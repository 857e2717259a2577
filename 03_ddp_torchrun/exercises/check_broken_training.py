"""Check a training loop on two ranks: its samples, its losses and the file it saves."""

import math
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from ask_ranks import ask_ranks, in_words
from noted_samples import (
    NotedDataset,
    by_epoch,
    explain_order,
    explain_samples,
    explain_state,
    files_written,
)
from ranks import read_options

WORLD_SIZE, EPOCHS, SAMPLES, BATCH_SIZE = 2, 3, 24, 4
PATIENCE = timedelta(seconds=10)  # how long DDP waits for another rank's gradients
Train = Callable[[DistributedDataParallel, Dataset, int, Path], Any]


def check_training(answer: Train) -> None:
    """Start the ranks, and let each of them train."""
    read_options()
    claim = f"{WORLD_SIZE} ranks trained, reported and saved as one"
    ask_ranks(try_training, answer, WORLD_SIZE, claim)


def draw_samples() -> TensorDataset:
    """Draw the same inputs, (8,), and labels, (1,), on every rank."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, label_of(inputs))


def label_of(inputs: torch.Tensor) -> torch.Tensor:
    """Return what is to be learned of inputs, (B, 8): (B, 1)."""
    return inputs.sum(dim=1, keepdim=True).sin()


def plain_model() -> nn.Module:
    """Make the same small model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def try_training(answer: Train) -> str:
    """Run the loop; say what is wrong on this rank, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13. So it gets a
    # group of its own, and so does the checker's own talk.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp: Any = dist.new_group(timeout=PATIENCE)
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    rank, dataset, model = dist.get_rank(), NotedDataset(draw_samples()), plain_model()
    error, told = "", None
    losses: list[float] = []
    model.register_forward_hook(partial(note_loss, losses))
    ddp_model = DistributedDataParallel(model, process_group=for_ddp)
    with tempfile.TemporaryDirectory() as folder:
        everyone: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, folder, group=aside)
        path = Path(everyone[0], "weights.pt")
        save = mock.Mock(side_effect=torch.save)
        try:
            with mock.patch.object(torch, "save", save):
                told = answer(ddp_model, dataset, EPOCHS, path)
        except Exception as failure:
            error = in_words(failure)
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        mine = error, dataset.seen, losses, weights, files_written(save)
        dist.all_gather_object(everyone, mine, group=aside)
        errors, seen, noted, by_rank, writes = zip(*everyone, strict=True)
        if any(errors):
            return error or "this rank went on; another waited for it"
        text = (
            explain_samples(seen, SAMPLES, EPOCHS)
            or explain_order(seen[rank], EPOCHS)
            or explain_losses(rank, told, noted)
            or explain_file(path, sum(map(bool, writes)), by_rank[0])
        )
        dist.barrier(group=aside)  # nobody removes the file while others read it
    if not text and not torch.equal(weights, by_rank[0]):
        return "its weights are not those of rank 0: did DDP see the forward pass?"
    if text or any(not torch.equal(weights, other) for other in by_rank):
        return text
    samples, alone = dataset.samples, plain_model()
    return explain_state(model.state_dict(), alone, samples, seen, BATCH_SIZE)


def note_loss(
    losses: list[float], _: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
) -> None:
    """Be a forward hook: add this rank's loss of a batch to `losses`."""
    losses.append(mse_loss(output, label_of(inputs[0])).item())


def explain_losses(rank: int, told: Any, noted: tuple[list[float], ...]) -> str:
    """Say what is wrong with the losses that were returned, or nothing."""
    if not isinstance(told, list) or len(told) != EPOCHS:
        return f"it returned {told!r:.40}, not a list of {EPOCHS} losses"
    local = [
        [sum(part) / len(part) for part in by_epoch(losses, EPOCHS)] for losses in noted
    ]
    for epoch, found in enumerate(map(float, told)):
        mean = sum(losses[epoch] for losses in local) / WORLD_SIZE
        text = f"the loss of epoch {epoch} is {found:.3f}, over all ranks {mean:.3f}: "
        if math.isclose(found, mean, rel_tol=1e-4):
            continue
        if math.isclose(found, local[rank][epoch], rel_tol=1e-4):
            return text + "it is this rank's local loss"
        if math.isclose(found, mean * WORLD_SIZE, rel_tol=1e-4):
            return text + "it is the sum over the ranks"
        return text + "it is neither local nor the mean"
    return ""


def explain_file(path: Path, writers: int, weights: torch.Tensor) -> str:
    """Say what is wrong with the file and how many wrote it, or nothing."""
    if writers > 1:
        return (
            f"{writers} ranks save: one is enough, and two at once may break the file"
        )
    if not path.exists():
        return "nobody has saved the weights at `path`"
    try:
        saved = torch.load(path, weights_only=True)
    except Exception:  # what it raises is no public promise
        saved = None
    if not isinstance(saved, dict):
        return "the file holds something else than weights: save a state_dict"
    if any(name.startswith("module.") for name in saved):
        return "the names in the file begin with `module.`: a plain model has none"
    model = plain_model()
    if set(saved) != set(model.state_dict()):
        return f"the file holds {', '.join(saved)}: save the state_dict itself"
    model.load_state_dict(saved)
    if not torch.equal(nn.utils.parameters_to_vector(model.parameters()), weights):
        return "the file does not hold the weights at the end"
    return ""
