"""One GPT, one batch, one optimizer, and all ways to keep and send what it needs."""

import contextlib
import gc
import importlib
import os
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ranks
from counters import CollectiveLog, PeakMemory
from data import load_sets, whole
from model import GPT, Block, GPTConfig
from zero_by_hand import ZeRO

CONFIG = GPTConfig(block_size=32, width=128, layers=3)
STEPS, SAMPLES = 4, 8  # samples of a step, of all ranks together
COUNTED = STEPS - 1  # the step in which memory and messages are counted, from 0
# With eps=1e-8 a gradient that is nearly zero would pass on its rounding error at full
# step length, and a sum in place of a mean would not show.
SETTINGS: dict[str, Any] = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.01}
EXACT, BF16 = 1e-5, 2e-2  # how far a parameter may be from one process's


class Trained(NamedTuple):
    """A model as one rank trains it."""

    backward: Callable[[Tensor, Tensor], Tensor]  # takes a batch, returns its loss
    step: Callable[[], Any]  # also forgets the gradients
    whole: Callable[[], Iterable[Tensor]]  # all parameters; every rank calls it


class Way(NamedTuple):
    """How a model is made ready, and what that is to keep."""

    prepare: Callable[[GPT], Trained]
    kept: Callable[[int], float]  # bytes for each parameter, on so many ranks
    limit: float = EXACT


class Run(NamedTuple):
    """What one rank brings back."""

    losses: list[float]
    parameters: list[Tensor]
    kept: int  # bytes when backward has ended
    peak: int  # in a step
    calls: int  # collectives in a step
    sent: float  # bytes that a rank has to send for them
    milliseconds: float  # for a step, the median


def with_adamw(model: Any, original: nn.Module) -> Trained:
    """Step by PyTorch's AdamW on the parameters of a model."""
    adamw = torch.optim.AdamW(original.parameters(), **SETTINGS)

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = model(inputs, labels)
        loss.backward()
        return loss.detach()

    def step() -> None:
        adamw.step()
        adamw.zero_grad()

    return Trained(backward, step, lambda: map(whole, original.parameters()))


def alone(model: GPT) -> Trained:
    """Send nothing."""
    return with_adamw(model, model)


def in_ddp(model: GPT) -> Trained:
    """Let the gradients live in DDP's buckets: Python would not see a second copy."""
    device = next(model.parameters()).device
    ids = None if device.type == "cpu" else [device.index]
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return with_adamw(ddp, model)


def by_hand(stage: int, model: GPT) -> Trained:
    """Shard by this room's own ZeRO."""
    zero = ZeRO(model, model.blocks, stage, **SETTINGS)

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = model(inputs, labels)
        loss.backward()
        if stage == 1:
            zero.average_gradients()
        return loss.detach()

    return Trained(backward, zero.step, lambda: zero.whole_parameters().values())


def in_fsdp(
    model: GPT,
    units: bool = True,
    recompute: bool = False,
    replicas: int = 1,
    **settings: Any,
) -> Trained:
    """Shard by FSDP2: each block, then the root, or the root alone."""
    device, n = next(model.parameters()).device.type, dist.get_world_size()
    mesh = init_device_mesh(device, (n,))
    if replicas > 1:
        names = ("replicas", "shards")
        mesh = init_device_mesh(device, (replicas, n // replicas), mesh_dim_names=names)
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    for module in [*(model.blocks if units else []), model]:
        fully_shard(module, mesh=mesh, **settings)
    return with_adamw(model, model)


def in_deepspeed(stage: int, model: GPT) -> Trained:
    """Let DeepSpeed do it, by a config."""
    deepspeed = import_deepspeed(next(model.parameters()).device)
    few = sum(p.numel() for p in model.parameters()) // 4
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "optimizer": {"type": "Adam", "params": {**SETTINGS, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            # The defaults are for models a thousand times as large: the first would
            # be 2 GB, and with the others stage 3 would free nothing.
            "reduce_bucket_size": few,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": few,
            "stage3_max_live_parameters": few,
            "stage3_max_reuse_distance": 0,
        },
    }
    parameters: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config
    )

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = engine(inputs, labels)
        engine.backward(loss)
        return loss.detach()

    def whole_parameters() -> Iterable[Tensor]:
        for p in model.parameters():
            with deepspeed.zero.GatheredParameters([p]):  # below stage 3, does nothing
                yield p.detach().clone()
        engine.destroy()

    return Trained(backward, engine.step, whole_parameters)


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for ranks that have joined, so that it compiles nothing."""
    os.environ["DS_ACCELERATOR"] = device.type
    # It calls collectives by names that PyTorch 2.13 has renamed: all ranks would say.
    renamed = r"`torch.distributed.\w+` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    import deepspeed.ops

    # A file of an optimizer that nobody uses here loads PyTorch's compiler: 2 seconds.
    with mock.patch("torch.compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    return deepspeed


def leave_deepspeed() -> NoReturn:
    """Leave the process group and end this process with status 0; all ranks call this.

    An engine holds on to the group, so gloo's threads outlive destroy_process_group. If
    one of them frees a tensor while Python takes itself apart, the process aborts.
    """
    dist.barrier()
    ranks.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def kept_by_stages_1_and_2(n: int) -> float:
    """Return what DeepSpeed keeps on this rank of n, in bytes a parameter.

    Weights, shards of two moments and master weights, and whole gradients of all
    parameters that have a part in this rank's shard.
    """
    with torch.device("meta"):
        sizes = [p.numel() for p in GPT(CONFIG).parameters()]
    ends, shard = list(accumulate(sizes)), sum(sizes) / n
    first = dist.get_rank() * shard
    pairs = zip(sizes, ends, strict=True)
    ours = [s for s, end in pairs if first < end and end - s < first + shard]
    return 4 + 12 / n + 4 * sum(ours) / sum(sizes)


LOW: dict[str, Any] = {
    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
}
# Weights, gradients and Adam's two moments take 4 bytes each. Above stage 0, DeepSpeed
# keeps fp32 master weights although the weights are fp32 themselves. Stage 3 keeps its
# bucket as well, for a quarter of the parameters here.
WAYS: dict[str, Way] = {
    "DDP": Way(in_ddp, lambda n: 16),
    "ZeRO 1 by hand": Way(partial(by_hand, 1), lambda n: 8 + 8 / n),
    "ZeRO 2 by hand": Way(partial(by_hand, 2), lambda n: 4 + 12 / n),
    "ZeRO 3 by hand": Way(partial(by_hand, 3), lambda n: 16 / n),
    "FSDP2": Way(in_fsdp, lambda n: 16 / n),
    "  the root alone": Way(partial(in_fsdp, units=False), lambda n: 16 / n),
    "  reshard_after_forward=False": Way(
        partial(in_fsdp, reshard_after_forward=False), lambda n: 16 / n
    ),
    "  computes in bf16": Way(partial(in_fsdp, **LOW), lambda n: 16 / n, BF16),
    "  recomputes activations": Way(partial(in_fsdp, recompute=True), lambda n: 16 / n),
    "  2 replicas (HSDP)": Way(partial(in_fsdp, replicas=2), lambda n: 32 / n),
    "DeepSpeed, stage 0": Way(partial(in_deepspeed, 0), lambda n: 16),
    "DeepSpeed, stage 1": Way(partial(in_deepspeed, 1), kept_by_stages_1_and_2),
    "DeepSpeed, stage 2": Way(partial(in_deepspeed, 2), kept_by_stages_1_and_2),
    "DeepSpeed, stage 3": Way(partial(in_deepspeed, 3), lambda n: 20 / n + 1),
}


def global_batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels of each step, (SAMPLES, T) each, alike everywhere."""
    wanted = Namespace(text=None, block_size=CONFIG.block_size, samples=STEPS * SAMPLES)
    dataset, _ = load_sets(wanted)
    steps = torch.arange(STEPS * SAMPLES).split(SAMPLES)
    batches = [dataset.batch(indices.tolist()) for indices in steps]
    return [(inputs.to(device), labels.to(device)) for inputs, labels in batches]


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let `gc` show nothing that was there before: it is slow, and not this way's."""
    gc.collect()  # the last engine, or model with hooks, refers to itself
    gc.freeze()
    yield
    gc.unfreeze()


def live_tensors() -> list[Tensor]:
    """Return all tensors that `gc` shows, and that somebody could still reach."""
    gc.collect()
    # type() and not isinstance: some objects import a library when asked what they are.
    seen = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    return [one for one in seen if type(one) is not DTensor]


def train_and_count(
    prepare: Callable[[GPT], Trained], batches: list[tuple[Tensor, Tensor]]
) -> Run:
    """Train from the same first weights in one way; count one step, time the others."""
    losses, seconds = [], []
    with only_new_objects():
        torch.manual_seed(0)
        trained = prepare(GPT(CONFIG).to(batches[0][0].device))
        for inputs, labels in batches[:COUNTED]:
            began = time.perf_counter()
            losses.append(trained.backward(inputs, labels).item())
            trained.step()
            seconds.append(time.perf_counter() - began)
        with CollectiveLog() as log, PeakMemory() as memory:
            memory.follow(*live_tensors())
            losses.append(trained.backward(*batches[COUNTED]).item())
            time.sleep(0.1)  # gloo's threads free what they have sent a little later
            memory.follow(*live_tensors())  # gradients that no operator has returned
            kept = sum(storage.nbytes() for storage in memory.storages)
            trained.step()
    return Run(
        losses,
        [p.detach().clone() for p in trained.whole()],
        kept,
        memory.peak,
        len(log.calls),
        sum(call.sent for call in log.calls),
        1000 * statistics.median(seconds),
    )
