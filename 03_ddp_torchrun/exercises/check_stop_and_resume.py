"""Check on two ranks that a loop stops on a signal and resumes as if uninterrupted."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ask_ranks import ask_ranks, in_words
from check_broken_training import draw_samples, plain_model
from noted_samples import files_written
from ranks import read_options

WORLD_SIZE, STEPS = 2, 12
TOLD = 3  # after so many steps rank 0 is told to stop; after so many more, rank 1
LATEST = TOLD + 2
PATIENCE = timedelta(seconds=10)  # how long DDP waits for another rank's gradients
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Train = Callable[[DistributedDataParallel, Batches, Path, Callable[[], bool]], Any]


def check_stopping(answer: Train) -> None:
    """Start the ranks; let them train, stop and resume."""
    read_options()
    claim = f"{WORLD_SIZE} ranks stopped together, and twice resumed with the same bits"
    ask_ranks(try_stopping, answer, WORLD_SIZE, claim)


def try_stopping(answer: Train) -> str:
    """Run the loop uninterrupted, stopped, resumed; say what is wrong, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13. So it gets a
    # group of its own, and so does the checker's own talk.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp: Any = dist.new_group(timeout=PATIENCE)
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    rank = dist.get_rank()
    everyone: list[Any] = [None] * WORLD_SIZE

    def train(path: Path, told: int) -> tuple[list[Any], torch.Tensor]:
        """Return what the ranks did, by rank, and this one's weights."""
        model, taken, error = plain_model(), [0], ""
        ddp_model = DistributedDataParallel(model, process_group=for_ddp)
        ddp_model.register_forward_hook(lambda *_: taken.append(taken.pop() + 1))
        with mock.patch.object(torch, "save", side_effect=torch.save) as save:
            try:
                answer(ddp_model, batches_of(rank), path, lambda: taken[0] >= told)
            except Exception as failure:
                error = in_words(failure)
        # Also: nobody reads the file before it is written.
        mine = taken[0], error, files_written(save)
        dist.all_gather_object(everyone, mine, group=aside)
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        return list(everyone), weights

    with tempfile.TemporaryDirectory() as own:
        dist.all_gather_object(everyone, own, group=aside)
        folder = Path(everyone[0])
        did, uninterrupted = train(folder / "uninterrupted.pt", STEPS + 1)
        texts = [explain_steps(did[one], STEPS) for one in range(WORLD_SIZE)]
        if any(texts):
            return f"without a signal: {texts[rank] or 'another rank failed'}"
        path, stopped = folder / "stopped.pt", 0
        for told in range(WORLD_SIZE):
            did, _ = train(path, TOLD if rank == told else STEPS + 1)
            texts = [explain_stop(one, did, told) for one in range(WORLD_SIZE)]
            if any(texts):
                later = f"resumed after step {stopped}, counted from there: "
                return (later if stopped else "") + texts[rank]
            stopped += did[0][0]
        did, weights = train(path, STEPS + 1)
        text = explain_steps(did[rank], STEPS - stopped)
        dist.barrier(group=aside)  # nobody removes the folder while others read it
    if text:
        return (
            f"resumed after step {stopped}: {text}: what does the file know of steps?"
        )
    if not torch.equal(weights, uninterrupted):
        return (
            "its weights are not those of an uninterrupted run: what else than they "
            "changes in a step?"
        )
    return ""


def batches_of(rank: int) -> Batches:
    """Return this rank's batches, each of (2, 8) inputs and (2, 1) labels."""
    inputs, labels = (part.split(2) for part in draw_samples().tensors)
    return [(x + rank, y) for x, y in zip(inputs, labels, strict=True)]


def explain_steps(did: Any, due: int) -> str:
    """Say what is wrong with how many steps a rank took, or nothing."""
    taken, error, _ = did
    if error:
        return f"in step {taken}: {error}"
    return "" if taken == due else f"this rank took {taken} steps, where {due} are due"


def explain_stop(rank: int, did: list[Any], told: int) -> str:
    """Say what is wrong with how a rank stopped after one was told, or nothing."""
    (mine, error, _), (other, other_error, _) = did[rank], did[1 - rank]
    if error and (other_error or mine == other):
        return f"in step {mine}: {error}"
    if error:
        return (
            f"rank {1 - rank} left after step {other}, and this rank waited for it in "
            f"step {mine}: do all decide by the same value?"
        )
    if other_error:
        return f"this rank left after step {mine}, and another waited for it"
    if mine != other:
        return f"this rank left after step {mine}, the other after step {other}"
    if not TOLD <= mine <= LATEST:
        return f"it left after step {mine}; rank {told} was told to after step {TOLD}"
    files = [names for _, _, names in did]
    if set.intersection(*files):
        return (
            f"{len(did)} ranks save: one is enough, and two at once may break the file"
        )
    return "" if any(files) else "nobody has saved anything"
