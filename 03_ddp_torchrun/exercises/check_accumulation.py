"""Check the gradient of every optimizer step against one process's, right or wrong."""

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ask_ranks import ask_ranks, in_words
from ranks import read_options

WORLD_SIZE = 2
EPOCHS = [
    (10, 4),
    (6, 3),
    (7, 3),
]  # the batches of each, and how many of them are in a step
Batches = list[
    tuple[torch.Tensor, torch.Tensor]
]  # of inputs, (4, 8), and labels, (4, 1)
TrainEpoch = Callable[
    [DistributedDataParallel, torch.optim.Optimizer, Batches, int], None
]


def check_accumulation(answer: TrainEpoch) -> None:
    """Start the ranks, and let each of them train for some epochs."""
    read_options()
    steps = sum(-(-batches // k) for batches, k in EPOCHS)
    claim = f"{steps} gradients on {WORLD_SIZE} ranks are those of one process"
    ask_ranks(try_epochs, answer, WORLD_SIZE, f"{claim}, each all-reduced once")


def try_epochs(answer: TrainEpoch) -> str:
    """Train for some epochs; say what is wrong on this rank, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13. So it gets a
    # group of its own, and so does the checker's own talk.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp: Any = dist.new_group(timeout=timedelta(seconds=10))
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    ddp_model = DistributedDataParallel(model, process_group=for_ddp)
    sent = []  # a bucket's bytes for each all-reduce; the model fits into one bucket

    def note_and_reduce(
        _: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(for_ddp, bucket)

    ddp_model.register_comm_hook(None, note_and_reduce)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    told = [""] * WORLD_SIZE
    for epoch, (count, k) in enumerate(EPOCHS):
        sent.clear()
        mine = try_epoch(answer, ddp_model, optimizer, count, k, sent)
        dist.all_gather_object(told, mine, group=aside)
        if any(told):
            where = f"in an epoch of {count} batches, {k} in a step: " if epoch else ""
            return f"{where}{mine or 'this rank is right'}"
    return ""


def try_epoch(
    answer: TrainEpoch,
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    count: int,
    k: int,
    sent: list[int],
) -> str:
    """Train on `count` batches, `k` in a step; say what is wrong on this rank."""
    model, needed, reduced, kept = ddp_model.module, -(-count // k), [], []
    watched, all_reduce = WatchedSteps(model, count, k), dist.all_reduce

    def note_and_send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.nbytes)  # those of `sent` too
        return all_reduce(tensor, *args, **kwargs)

    def note_pass(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        kept.append(1)  # 1 graph more, until backward has come back to it
        if output.requires_grad:
            output.register_hook(lambda _: kept.append(-1))

    looking = optimizer.register_step_pre_hook(watched.look)
    counting = model.register_forward_hook(note_pass)
    no_sync = mock.Mock(side_effect=ddp_model.no_sync)
    try:
        with (
            mock.patch.object(ddp_model, "no_sync", no_sync),
            mock.patch.object(dist, "all_reduce", note_and_send),
        ):
            answer(ddp_model, optimizer, draw_batches(dist.get_rank(), count), k)
    except Exception as error:
        return in_words(error)
    finally:
        looking.remove()
        counting.remove()
    if watched.steps > needed:
        return f"{watched.steps} steps, where {needed} are due"
    if watched.wrong:
        return watched.wrong
    if watched.steps < needed:
        left = count - watched.steps * k
        return f"{watched.steps} steps, and the last {left} batches are left over"
    if kept.count(1) != count:
        text = f"right, but with {kept.count(1)} forward passes for {count} batches"
        return f"{text}: one for each, or a step needs the memory of all"
    if (most := max(accumulate(kept))) > 1:
        text = f"right, but with the graphs of {most} batches at once"
        return f"{text}: call backward for each, or a step needs the memory of all"
    times = round(sum(reduced) / sum(p.nbytes for p in model.parameters()))
    if times > needed:
        text = f"right, but with {times} all-reduces, where {needed} do"
        if no_sync.called and len(sent) > needed:
            return f"{text}: DDP must be in no_sync in the forward pass already"
        return f"{text}: only the last backward of a step has to synchronise"
    return ""


def draw_batches(rank: int, count: int) -> Batches:
    """Draw a rank's batches of 4 samples; every rank can draw every rank's."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, 4, 8, generator=generator)
    return list(zip(x, x.sum(-1, keepdim=True).sin() + rank, strict=True))


def batch_gradient(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Return the gradient of the mean loss over some batches as one flat tensor."""
    inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    # Layer by layer, for whoever counts the model's forward passes.
    outputs = reduce(lambda x, layer: layer(x), model.children(), inputs)
    loss = mse_loss(outputs, labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest entry of `right`."""
    return ((found - right).abs().max() / right.abs().max()).item()


class WatchedSteps:
    """Looks at the gradients whenever the optimizer is about to step."""

    def __init__(self, model: nn.Module, count: int, k: int) -> None:
        """Take the model whose gradients are looked at, `k` of `count` batches each."""
        self.model, self.count, self.k = model, count, k
        self.by_rank = [draw_batches(rank, count) for rank in range(WORLD_SIZE)]
        # What an epoch before may have left.
        left = [p.grad for p in model.parameters() if p.grad is not None]
        self.previous = torch.cat([g.flatten() for g in left or [torch.zeros(1)]])
        self.steps = 0
        self.wrong = ""  # the first thing that is wrong with a gradient

    def look(self, *_: object) -> None:
        """Compare the gradient with those of one process, right and wrong ones."""
        start = self.k * self.steps
        self.steps += 1
        if start < self.count and not self.wrong:
            self.wrong = self.explain(start, min(start + self.k, self.count))

    def explain(self, start: int, end: int) -> str:
        """Say what is wrong with the gradient of batches `start` to `end`."""
        name, count = f"the gradient of step {self.steps}", end - start
        grads = [
            p.grad.flatten() for p in self.model.parameters() if p.grad is not None
        ]
        if not grads:
            return f"{name} is missing"
        found = torch.cat(grads)
        all_ranks = [pair for batches in self.by_rank for pair in batches[start:end]]
        right = batch_gradient(self.model, all_ranks)
        local = batch_gradient(self.model, self.by_rank[dist.get_rank()][start:end])
        last = batch_gradient(
            self.model, [batches[end - 1] for batches in self.by_rank]
        )
        k = self.k
        guesses = {
            "": right,
            f" is {count} times too large: add up losses that are divided": right
            * count,
            f" is divided by {k}, but this step has {count} batches": right * count / k,
            " is local: it has not been all-reduced": local,
            " is local, and not divided": local * count,
            f" is local, and divided by {k}": local * count / k,
            " is that of its last batch alone: cleared too often?": last,
            " is that of its last batch alone, divided": last / count,
            " still holds that of the step before it": right + self.previous,
        }
        self.previous = found
        for meaning, gradient in guesses.items():
            if error_of(found, gradient) < 1e-4:
                return name + meaning if meaning else ""
        return f"{name} is {error_of(found, right):.1f} off, by its largest entry"
