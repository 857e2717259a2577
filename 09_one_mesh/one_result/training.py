"""One GPT, one batch for each step, one optimizer; and what a rank counts of a step.

Shapes: B samples, T tokens.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from counters import PeakMemory
from model import GPTConfig
from text import global_batch
from traffic import tcp_bytes_sent, times_sent_by_gloo

CONFIG = GPTConfig(block_size=32, width=64, layers=2, heads=4)
SAMPLES = 16  # B of a step, all ranks together
STEPS = 12
COUNTED = 9  # the step in which bytes are counted, from 0
# Adam divides a gradient's mean by its size plus eps. Beside the usual eps of 1e-8 most
# gradients here are large: their size cancels, and a sum in place of a mean would not
# show. And one that is nearly zero would pass on its rounding error at full step
# length. With 1e-3 neither is so, and the model learns about as well.
EPS, USUAL_EPS = 1e-3, 1e-8
SETTINGS: dict[str, Any] = {"lr": 3e-3, "eps": EPS, "weight_decay": 0.01}


@dataclass
class Trained:
    """A model as one rank trains it."""

    backward: Callable[[Tensor, Tensor], Tensor]  # takes (B, T) twice, returns a loss
    step: Callable[[], Any]  # also forgets the gradients
    whole: Callable[[], dict[str, Tensor]]  # all weights by name; all ranks call it
    optimizer: Any = None
    losses: list[float] = field(default_factory=list)  # of the steps that are done
    began: float = field(default_factory=time.time)


class Way(NamedTuple):
    """How a model is made ready, and who trains it."""

    prepare: Callable[[dict[str, Any]], Trained]  # takes AdamW's settings
    kept: Callable[[int], float]  # bytes that a rank is to keep
    ranks: int = 2
    start: str = "spawn"  # or torchrun, or deepspeed; "" for this process
    shards: int = 0  # of a batch: each rank has its own if this is 0
    eps: float = EPS
    alone: str = "one process"  # the way to compare with


class Run(NamedTuple):
    """What one rank brings back from one way."""

    losses: list[float]  # of each step, the mean over all samples
    weights: Tensor  # at the end, flattened and concatenated in the order of names
    seconds: float  # for all steps but the one in which bytes are counted
    sent: float  # bytes that left this rank over TCP in that step; nan if not known
    due: float  # bytes that gloo should send for the messages of that step
    kept: int  # bytes of all tensors when backward has ended
    peak: int  # bytes of all tensors, at the most, in that step


# What PyTorch's dispatcher calls the collectives, and what they are known as.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
}


class Messages(TorchDispatchMode):
    """While it is active, adds up what gloo has to send for this rank's messages."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.due = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a message, and let it and everything else go on."""
        if DTensor in types:  # comes again, with the shards
            return NotImplemented
        name = COLLECTIVES.get(func.overloadpacket.__name__)
        if name and "c10d" in func.namespace:
            group = group_of(args)
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            n, nbytes = group.size(), max(t.nbytes for t in tensors)
            if func.namespace != "c10d" and name == "all_gather":
                nbytes *= n  # what a rank gives; else it is what it gets
            if name == "send":
                self.due += nbytes
            elif name == "all_to_all":
                rows = args[4] or [1] * n  # of what it gives, for each rank
                self.due += tensors[1].nbytes * (
                    1 - rows[group.rank()] / max(1, sum(rows))
                )
            else:
                self.due += times_sent_by_gloo(name, n) * nbytes * (n - 1) / n
        return func(*args, **(kwargs or {}))


def group_of(args: Any) -> ProcessGroup:
    """Return the group that a collective was called with."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a ReduceOp is one too
                return ProcessGroup.unbox(one)
    return _resolve_process_group(args[-1])


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let `gc` show nothing that was there before: it is slow, and not this way's."""
    gc.collect()  # the last engine, or model with hooks, refers to itself
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_tensors() -> list[Tensor]:
    """Return all tensors that `gc` shows, and that somebody could still reach."""
    gc.collect()
    # type() and not isinstance: some objects import a library when asked what they are.
    seen = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    return [one for one in seen if type(one) is not DTensor]


def batch_of(tokens: Tensor, step: int, shards: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a step, (B, T), or this rank's shard of them.

    Ranks that follow one another have the same shard if there are more of them.
    """
    samples = global_batch(tokens, step, SAMPLES, CONFIG.block_size + 1)
    if dist.is_initialized():
        shards = shards or dist.get_world_size()
        shard = dist.get_rank() * shards // dist.get_world_size()
        samples = samples.chunk(shards)[shard]
    return samples[:, :-1], samples[:, 1:]


def mean_over_ranks(loss: Tensor) -> float:
    """All-reduce a loss; every rank calls this, and all get the mean."""
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def counted_step(trained: Trained, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict]:
    """Take a step; return its loss, and bytes by their names in Run."""
    is_alone = not dist.is_initialized()
    before = 0 if is_alone else tcp_bytes_sent()
    with Messages() as messages, PeakMemory() as memory:
        memory.follow(*live_tensors())
        loss = trained.backward(*batch)
        time.sleep(0.1)  # gloo's threads free what they have sent a little later
        memory.follow(*live_tensors())  # gradients that no operator has returned
        kept = sum(storage.nbytes() for storage in memory.storages)
        trained.step()
    sent = 0.0 if is_alone else tcp_bytes_sent() - before
    return loss, {"sent": sent, "due": messages.due, "kept": kept, "peak": memory.peak}


def train_in_way(way: Way, tokens: Tensor) -> Run:
    """Train in one way; every rank calls this. Count one step, time the others."""
    with only_new_objects():
        torch.manual_seed(0)  # all draw the same first weights
        trained, counted, pause = way.prepare(SETTINGS | {"eps": way.eps}), {}, 0.0
        for step in range(len(trained.losses), STEPS):
            batch = batch_of(tokens, step, way.shards)
            if step == COUNTED:
                pause = time.time()
                loss, counted = counted_step(trained, batch)
                pause = time.time() - pause
            else:
                loss = trained.backward(*batch)
                trained.step()
            trained.losses.append(mean_over_ranks(loss))
        seconds = time.time() - trained.began - pause
        weights = sorted(trained.whole().items())
    flat = torch.cat([value.detach().flatten() for _, value in weights])
    return Run(trained.losses, flat, seconds, **counted)
