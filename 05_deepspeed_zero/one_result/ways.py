"""One small GPT, trained in every way of chapters 02 to 05, and what each rank needs.

Each way has the same first weights, the same 16 samples in a step and the same
optimizer. What differs is who computes what, what is sent, and where things are kept.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepspeed_setup import prepare
from engine_checks import mean_over_ranks, whole_weights
from live_tensors import bytes_by_kind, live_storages
from model import GPT, GPTConfig
from text import global_batch
from traffic import CollectiveCounter, tcp_bytes_sent
from train_and_compare import average_gradients, whole_parameters
from zero_1 import ShardedOptimizer
from zero_2 import ShardedGradients
from zero_3 import FullySharded

BLOCK_SIZE = 32  # bytes of a sample that the model reads; it predicts as many
SAMPLES = 16  # in one step, of all ranks together
STEPS = 24
COUNTED = 20  # the step in which bytes are counted, from 0
SAVED, KILLED = (
    10,
    14,
)  # steps done when the checkpoint is written, and when a rank dies
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started all anew
# Adam divides a gradient's mean by its size plus eps. Beside the usual eps of 1e-8 no
# gradient here is small: their size then cancels, and a sum in place of a mean would
# not show. And a gradient that is nearly zero would pass on its rounding error at full
# step length. With 1e-3 neither is so, and the model learns about as well.
EPS, USUAL_EPS = 1e-3, 1e-8
SETTINGS: dict[str, Any] = {"lr": 3e-3, "eps": EPS, "weight_decay": 0.01}


class Way(NamedTuple):
    """A model as one rank trains it."""

    model: Any  # takes inputs and labels, returns the loss
    optimizer: torch.optim.Optimizer
    finish: Callable[[], Any]  # between the last backward and the step
    held: Any  # has a `module` and an `optimizer`, whose tensors are counted
    last: Any  # the last to get its gradient: those of the positions


Wrap = Callable[[GPT, dict[str, Any]], Way]


def train_alone(model: GPT, settings: dict[str, Any]) -> Way:
    """Do not communicate."""
    return with_adamw(model, model, settings, lambda: None)


def average_by_hand(model: GPT, settings: dict[str, Any]) -> Way:
    """All-reduce each gradient when backward is over, as chapter 02's first step."""
    return with_adamw(model, model, settings, lambda: average_gradients(model))


def sum_by_hand(model: GPT, settings: dict[str, Any]) -> Way:
    """Make the mistake that has to be found: sum the gradients, do not average them."""

    def sum_gradients() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return with_adamw(model, model, settings, sum_gradients)


def wrap_in_ddp(model: GPT, settings: dict[str, Any]) -> Way:
    """Let the gradients live in DDP's buckets: Python would not see a second copy."""
    device = next(model.parameters()).device
    ids = None if device.type == "cpu" else [device.index]
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return with_adamw(ddp, model, settings, lambda: None)


def with_adamw(
    trained: Any, model: GPT, settings: dict[str, Any], finish: Callable[[], Any]
) -> Way:
    """Step for all weights on each rank."""
    adamw = torch.optim.AdamW(model.parameters(), **settings)
    held = SimpleNamespace(module=model, optimizer=adamw)
    return Way(trained, adamw, finish, held, model.position_embedding.weight)


def shard_by_hand(stage: int, model: GPT, settings: dict[str, Any]) -> Way:
    """Train with a stage of this chapter's by_hand/, in float32."""
    last = model.position_embedding.weight
    if stage == 3:
        sharded = FullySharded(model)
        optimizer = adamw = torch.optim.AdamW(sharded.parameters(), **settings)
        whole = [part.whole for part in sharded.parts]
        for part in sharded.parts:
            # As DeepSpeed names a rank's shard; live_tensors looks for it there.
            part.whole.ds_tensor = part.shard  # type: ignore[attr-defined]
        weights = [*whole, *sharded.parameters()]
        trained, finish = sharded, sharded.finish_gradient_sync
        last = sharded.parts_of[model.position_embedding]["weight"].whole
    else:
        kind = {1: ShardedOptimizer, 2: ShardedGradients}[stage]
        optimizer = kind(model.parameters(), torch.optim.AdamW, **settings)
        trained, adamw = model, optimizer.local
        weights = [*model.parameters(), *optimizer.shards.values()]
        finish = partial(average_gradients, model) if stage == 1 else lambda: None
    module = SimpleNamespace(parameters=lambda: weights)
    held = SimpleNamespace(module=module, optimizer=adamw)
    return Way(trained, optimizer, finish, held, last)


class Run(NamedTuple):
    """What one rank brings back from one way."""

    losses: list[float]  # of each step, the mean over the samples of all ranks
    weights: torch.Tensor  # at the end, flattened and concatenated
    seconds: float  # for all steps but the one in which bytes are counted
    calls: dict[str, list[int]]  # bytes of each collective in that step, by its name
    sent: float  # bytes that left this rank over TCP in it; nan if not known
    held: dict[str, int]  # bytes at the end of its backward, by live_tensors' kinds


class StepCounter:
    """Counts what one rank sends in a step, and what it holds; all ranks enter it."""

    def __init__(self, held: Any, last: Any, before: dict[int, Any]) -> None:
        """Take what `Way` says of a model, and `live_storages` before there was one."""
        self.last, self.holder, self.before = last, held, before
        self.collectives, self.sent, self.seconds = CollectiveCounter(), 0.0, 0.0
        self.held: dict[str, int] = {}

    def tcp_bytes(self) -> float:
        """Return what this rank has sent so far when nothing is in flight."""
        return tcp_bytes_sent() if dist.is_initialized() else 0

    def note_held(self, _: torch.Tensor) -> None:
        """Count when the last gradient has come, before the step."""
        self.held = bytes_by_kind(self.holder, self.before)

    def __enter__(self) -> None:
        """Begin to count."""
        self.began, self.sent_before = time.time(), self.tcp_bytes()
        self.hook = self.last.register_post_accumulate_grad_hook(self.note_held)
        self.collectives.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        self.collectives.__exit__(*error)
        self.hook.remove()
        self.sent = self.tcp_bytes() - self.sent_before
        self.seconds = time.time() - self.began

    def run(self, losses: list[float], weights: list[Any], began: float) -> Run:
        """Put together what a rank brings back."""
        flat = torch.cat([one.detach().flatten() for one in weights]).cpu()
        seconds = time.time() - began - self.seconds
        calls = self.collectives.calls
        return Run(losses, flat, seconds, calls, self.sent, self.held)


def fresh_gpt(device: torch.device) -> GPT:
    """Build the GPT of chapter 03, only smaller, with the same weights on all ranks."""
    torch.manual_seed(0)
    config = GPTConfig(block_size=BLOCK_SIZE, width=64, layers=2, heads=4)
    return GPT(config).to(device)


def samples_of_step(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Return this rank's samples of a step; without a process group, all of them."""
    batch = global_batch(tokens, step, SAMPLES, BLOCK_SIZE + 1)
    if not dist.is_initialized():
        return batch
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def save_or_die(path: Path, step: int, progress: dict[str, Any]) -> None:
    """Write a checkpoint after SAVED steps; after KILLED, kill the last rank, once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if step == SAVED and rank == 0 and not path.exists():
        torch.save(progress, path)
    if step == KILLED and rank == last and os.environ[RESTARTS] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def train_in_torch(
    tokens: torch.Tensor,
    device: torch.device,
    wrap: Wrap,
    parts: int = 1,
    eps: float = EPS,
    checkpoint: Path | None = None,
) -> Run:
    """Train by PyTorch alone; every rank calls this.

    Args:
        tokens: the text.
        device: where this rank computes.
        wrap: makes of the model what a rank trains.
        parts: micro-batches in a step; with more than one, `wrap` makes DDP of it.
        eps: Adam's.
        checkpoint: a file to write and resume from; a rank is killed on the way.
    """
    before = live_storages([])
    way = wrap(fresh_gpt(device), SETTINGS | {"eps": eps})
    model, adam = way.model, way.optimizer
    counter, began = StepCounter(way.held, way.last, before), time.time()
    losses: list[float] = []
    if checkpoint is not None and checkpoint.exists():
        found = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(found["model"])
        adam.load_state_dict(found["adam"])
        losses, began = found["losses"], found["began"]
        del found  # a second copy of the weights
    for step in range(len(losses), STEPS):
        if checkpoint is not None:
            progress = {"model": model.state_dict(), "adam": adam.state_dict()}
            progress |= {"losses": losses, "began": began}
            save_or_die(checkpoint, step, progress)
        with counter if step == COUNTED else contextlib.nullcontext():
            total = torch.zeros((), device=device)
            micro_batches = samples_of_step(tokens, step).to(device).chunk(parts)
            for number, rows in enumerate(micro_batches, start=1):
                is_last = number == parts
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = model(rows[:, :-1], rows[:, 1:]) / parts
                    loss.backward()
                total += loss.detach()
            way.finish()
            adam.step()
            adam.zero_grad()
        is_alone = not dist.is_initialized()
        losses.append(total.item() if is_alone else mean_over_ranks(total))
    return counter.run(losses, list(whole_parameters(model).values()), began)


def train_in_deepspeed(tokens: torch.Tensor, device: torch.device, stage: int) -> Run:
    """Train with a stage of ZeRO; every rank calls this."""
    import deepspeed

    before = live_storages([])
    model = fresh_gpt(device)
    few = sum(p.numel() for p in model.parameters()) // 4
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "optimizer": {"type": "Adam", "params": dict(SETTINGS)},
        # Nobody clips here: a gradient twice too large would be clipped to the same.
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            # The defaults are for models a thousand times as large: the first would
            # be 2 GB, and with the others stage 3 would give no tensor away.
            "reduce_bucket_size": few,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": few,
            "stage3_max_live_parameters": few,
            "stage3_max_reuse_distance": 0,
        },
    }
    prepare({"optimizer": config["optimizer"]})
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=weights, config=config
    )
    last = model.position_embedding.weight
    counter, began = StepCounter(engine, last, before), time.time()
    losses = []
    for step in range(STEPS):
        rows = samples_of_step(tokens, step).to(device)
        with counter if step == COUNTED else contextlib.nullcontext():
            loss = engine(rows[:, :-1], rows[:, 1:])
            engine.backward(loss)
            engine.step()
        losses.append(mean_over_ranks(loss))
    result = counter.run(losses, whole_weights(engine), began)
    engine.destroy()
    return result
