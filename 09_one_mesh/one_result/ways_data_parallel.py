"""Ways in which each rank holds all of the model, and computes on its own samples."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import GPT
from training import CONFIG, Trained

FOLDER = "ONE_RESULT_FOLDER"  # in a rank's environment: where all hand in their runs
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started all anew
SAVED, KILLED = 4, 7  # steps done when a checkpoint is written, and when a rank dies
BUCKET_BYTES = 100_000


def with_adamw(
    forward: Any, model: nn.Module, settings: Any, finish: Callable = lambda: None
) -> Trained:
    """Step for all weights of `model`; `finish` comes between backward and the step."""
    adamw = torch.optim.AdamW(model.parameters(), **settings)

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = forward(inputs, labels)
        loss.backward()
        finish()
        return loss.detach()

    def step() -> None:
        adamw.step()
        adamw.zero_grad()

    return Trained(backward, step, lambda: named_weights(model), adamw)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by name, a matrix with two names twice; all ranks call it."""
    named = model.named_parameters(remove_duplicate=False)
    # A DTensor is whole once all its shards have been gathered.
    return {name: getattr(p, "full_tensor", p.detach)() for name, p in named}


def alone(settings: Any) -> Trained:
    """Send nothing."""
    model = GPT(CONFIG)
    return with_adamw(model, model, settings)


def naive(settings: Any, op: Any = dist.ReduceOp.AVG) -> Trained:
    """All-reduce one gradient after another when backward is over."""
    model = GPT(CONFIG)

    def average() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, op)

    return with_adamw(model, model, settings, average)


def flat(settings: Any) -> Trained:
    """All-reduce one flat buffer for all gradients when backward is over."""
    model = GPT(CONFIG)

    def average() -> None:
        all_reduced_together([p.grad for p in model.parameters()])()

    return with_adamw(model, model, settings, average)


def all_reduced_together(gradients: list[Any]) -> Callable[[], None]:
    """Begin to all-reduce gradients as one message; return what waits for the end."""
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    work: Any = dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True)

    def finish() -> None:
        work.wait()
        parts = buffer.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    return finish


def bucketed(settings: Any) -> Trained:
    """All-reduce a bucket as soon as hooks have filled it, while backward goes on."""
    model = GPT(CONFIG)
    bucket, in_flight = [], []

    def on_gradient(p: Tensor) -> None:
        bucket.append(p.grad)
        if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
            in_flight.append(all_reduced_together([*bucket]))
            bucket.clear()

    def finish() -> None:
        in_flight.append(all_reduced_together([*bucket]))  # what is left: never nothing
        bucket.clear()
        while in_flight:
            in_flight.pop(0)()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return with_adamw(model, model, settings, finish)


def in_ddp(settings: Any) -> Trained:
    """Let the gradients live in DDP's buckets: Python would not see a second copy."""
    model = GPT(CONFIG)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return with_adamw(ddp, model, settings)


def in_ddp_accumulating(settings: Any) -> Trained:
    """Add up two micro-batches; all-reduce once."""
    model = GPT(CONFIG)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        halves = list(zip(inputs.chunk(2), labels.chunk(2), strict=True))
        total = torch.zeros(())
        for number, half in enumerate(halves):
            is_last = number == len(halves) - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss = ddp(*half) / len(halves)
                loss.backward()
            total += loss.detach()
        return total

    trained = with_adamw(ddp, model, settings)
    trained.backward = backward
    return trained


def in_ddp_killed(settings: Any) -> Trained:
    """Save after SAVED steps; after KILLED, kill the last rank, once. Then resume."""
    model, path = GPT(CONFIG), Path(os.environ[FOLDER]) / "checkpoint"
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    trained = with_adamw(ddp, model, settings)
    adamw, add_gradients = trained.optimizer, trained.backward
    is_first, last = os.environ[RESTARTS] == "0", dist.get_world_size() - 1
    if not is_first:
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        adamw.load_state_dict(found["adamw"])
        trained.losses, trained.began = found["losses"], found["began"]

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        done = len(trained.losses)
        if is_first and done == SAVED and dist.get_rank() == 0:
            states = {"model": model.state_dict(), "adamw": adamw.state_dict()}
            states |= {"losses": trained.losses, "began": trained.began}
            torch.save(states, path)
        if is_first and done == KILLED and dist.get_rank() == last:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first and done == KILLED + 1:
            path.unlink(missing_ok=True)  # torchrun tries again, and that must fail too
            raise RuntimeError("no rank was killed")
        return add_gradients(inputs, labels)

    trained.backward = backward
    return trained
