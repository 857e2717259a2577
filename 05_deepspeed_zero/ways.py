"""One small GPT, trained in every way of this repository, and what each rank needs.

Each way has the same first weights, the same 16 samples in a step and the same
optimizer. What differs is who computes what, what is sent, and where things are kept.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from data import global_batch, own_rows
from live_tensors import bytes_by_kind, live_storages
from proof import mean_over_ranks, whole_weights
from start import choose_parts
from traffic import CollectiveCounter, tcp_bytes_sent

CHAPTERS = Path(__file__).resolve().parent.parent
BLOCK_SIZE = 32  # bytes of a sample that the model reads; it predicts as many
SAMPLES = 16  # in one step, of all ranks together
STEPS = 24
COUNTED = 20  # the step in which bytes are counted, from 0
SAVED, KILLED = 10, 14  # steps done when the snapshot is written, and when a rank dies
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started all anew
# Adam divides a gradient's mean by its size plus eps. Beside the usual eps of 1e-8 no
# gradient here is small: their size then cancels, and a sum in place of a mean would
# not show. And a gradient that is nearly zero would pass on its rounding error at full
# step length. With 1e-3 neither is so, and the model learns about as well.
EPS, USUAL_EPS = 1e-3, 1e-8
SETTINGS: dict[str, Any] = {"lr": 3e-3, "eps": EPS, "weight_decay": 0.01}


def module_of(chapter: str, name: str) -> Any:
    """Load a module of another chapter, whose folder no import statement can name."""
    path = CHAPTERS / chapter / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{chapter}.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # where its own imports lie
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


# This script is about all chapters, so it takes what they really use.
NaiveDDP = module_of("02_ddp_mp", "naive").NaiveDDP
GPT_MODULE = module_of("03_ddp_torchrun", "model")


class SummedDDP(NaiveDDP):
    """The mistake that has to be found: gradients summed and not averaged."""

    def average_gradients(self) -> None:
        """Forget to divide by the number of ranks."""
        for parameter in self.trainable:
            dist.all_reduce(parameter.grad)


class Run(NamedTuple):
    """What one rank brings back from one way."""

    losses: list[float]  # of each step, the mean over the samples of all ranks
    weights: torch.Tensor  # at the end, in one row
    seconds: float  # for all steps but the one in which bytes are counted
    calls: dict[str, list[int]]  # bytes of each collective in that step, by its name
    sent: int | None  # bytes that left this rank over TCP in it; None if not known
    held: dict[str, int]  # bytes at the end of its backward, by live_tensors' kinds


class StepCounter:
    """Counts what one rank sends in a step, and what it holds; all ranks enter it."""

    def __init__(self, model: Any, holder: Any, before: dict[int, Any]) -> None:
        """Take the model, what has it as `module` and its `optimizer`, and what was.

        The last is `live_storages` before there was a model, which does not count.
        """
        self.model, self.holder, self.before = model, holder, before
        self.collectives, self.sent, self.seconds = CollectiveCounter(), None, 0.0
        self.held: dict[str, int] = {}

    def tcp_bytes(self) -> int | None:
        """Return what this rank has sent when nothing is under way, if that counts."""
        if not dist.is_initialized():
            return 0
        dist.barrier()
        return tcp_bytes_sent() if dist.get_backend() == "gloo" else None

    def note_held(self, _: torch.Tensor) -> None:
        """Count when the last gradient has come, and nothing has been let go yet."""
        self.held = bytes_by_kind(self.holder, self.before)

    def __enter__(self) -> None:
        """Begin to count."""
        self.began, self.sent_before = time.time(), self.tcp_bytes()
        # Backward ends at the positions, the first thing that forward looked up.
        last = self.model.position_embedding.weight
        self.hook = last.register_post_accumulate_grad_hook(self.note_held)
        self.collectives.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        self.collectives.__exit__(*error)
        self.hook.remove()
        after = self.tcp_bytes()
        if after is not None and self.sent_before is not None:
            self.sent = after - self.sent_before
        self.seconds = time.time() - self.began

    def run(self, losses: list[float], weights: list[Any], began: float) -> Run:
        """Put together what a rank brings back."""
        row = torch.cat([one.detach().flatten() for one in weights]).cpu()
        seconds = time.time() - began - self.seconds
        calls = self.collectives.calls
        return Run(losses, row, seconds, calls, self.sent, self.held)


def fresh_gpt(device: torch.device) -> Any:
    """Build the GPT of chapter 03, only smaller, with the same weights on all ranks."""
    torch.manual_seed(0)
    config = GPT_MODULE.GPTConfig(block_size=BLOCK_SIZE, width=64, layers=2, heads=4)
    return GPT_MODULE.GPT(config).to(device)


def samples_of_step(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Return this rank's samples of a step; without a process group, all of them."""
    batch = global_batch(tokens, step, SAMPLES, BLOCK_SIZE + 1)
    if not dist.is_initialized():
        return batch
    return own_rows(batch, dist.get_rank(), dist.get_world_size())


def save_or_die(path: Path, step: int, progress: dict[str, Any]) -> None:
    """Write a snapshot after SAVED steps; after KILLED, kill the last rank, once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if step == SAVED and rank == 0 and not path.exists():
        torch.save(progress, path)
    if step == KILLED and rank == last and os.environ[RESTARTS] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def train_in_torch(
    tokens: torch.Tensor,
    device: torch.device,
    wrap: Callable[..., Any],
    parts: int = 1,
    eps: float = EPS,
    snapshot: Path | None = None,
) -> Run:
    """Train by PyTorch alone; every rank calls this.

    Args:
        tokens: the text.
        device: where this rank computes.
        wrap: makes of the model what averages gradients over the ranks.
        parts: micro-batches in a step; gradients are exchanged after the last.
        eps: Adam's.
        snapshot: a file to write and go on from; a rank is killed on the way.
    """
    before = live_storages([])
    model = fresh_gpt(device)
    wrapped = wrap(model)
    adam = torch.optim.AdamW(model.parameters(), **{**SETTINGS, "eps": eps})
    holder = SimpleNamespace(module=model, optimizer=adam)
    counter, began = StepCounter(model, holder, before), time.time()
    losses: list[float] = []
    if snapshot is not None and snapshot.exists():
        found = torch.load(snapshot, map_location=device, weights_only=True)
        model.load_state_dict(found["model"])
        adam.load_state_dict(found["adam"])
        losses, began = found["losses"], found["began"]
        del found  # a second copy of the weights
    for step in range(len(losses), STEPS):
        if snapshot is not None:
            progress = {"model": model.state_dict(), "adam": adam.state_dict()}
            progress |= {"losses": losses, "began": began}
            save_or_die(snapshot, step, progress)
        with counter if step == COUNTED else contextlib.nullcontext():
            total = torch.zeros((), device=device)
            micro_batches = samples_of_step(tokens, step).to(device).chunk(parts)
            for number, rows in enumerate(micro_batches, start=1):
                is_last = number == parts
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    loss = wrapped(rows[:, :-1], rows[:, 1:]) / parts
                    loss.backward()
                total += loss.detach()
            if isinstance(wrapped, NaiveDDP):
                wrapped.finish_gradient_sync()
            adam.step()
            adam.zero_grad()
        is_alone = not dist.is_initialized()
        losses.append(total.item() if is_alone else mean_over_ranks(total))
    return counter.run(losses, list(model.parameters()), began)


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
    choose_parts(config, device, fused=False)
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=weights, config=config
    )
    counter, began = StepCounter(model, engine, before), time.time()
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
