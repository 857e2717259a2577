"""Check a loop that was turned into FSDP2: its training, its shards, its file."""

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ask_ranks import ask_ranks, in_words
from ranks import read_options
from same_as_one_process import same_as_one_process

WORLD_SIZE, STEPS, SAMPLES, LR = 2, 3, 32, 0.1
FAULTS = (RuntimeError, AttributeError, AssertionError, ValueError, TypeError)
# The model's class, and the three functions of the loop.
Answer = tuple[Callable[[], nn.Module], Callable, Callable, Callable]


class Noted(NamedTuple):
    """What the checker has seen of a run."""

    model: list[Any]  # what `prepare` has made
    norms: list[Any]  # what `train_one_batch` has returned


class NotedGathers(TorchDispatchMode):
    """While it is active, notes the size of the largest all-gather."""

    largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note an all-gather, and let it and everything else go on."""
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d" and "_allgather_base_" in str(func):
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


def check_loop(answer: Answer) -> None:
    """Start the ranks, and let each of them run the loop."""
    read_options()
    claim = f"{WORLD_SIZE} ranks with half of the weights train as one process does"
    ask_ranks(try_loop, answer, WORLD_SIZE, claim)


def draw_surface() -> list[tuple[Tensor, Tensor]]:
    """Draw inputs (SAMPLES, 2) and labels of each step, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    inputs = 2 * torch.rand(STEPS, SAMPLES, 2, generator=generator) - 1
    return [(x, (3 * x.prod(dim=1, keepdim=True)).sin()) for x in inputs]


def try_loop(answer: Answer) -> str:
    """Run the loop; say what is wrong on this rank, or nothing."""
    # DDP in a group that reports mismatched calls crashes on torch 2.13. So it gets a
    # group of its own.
    dist.set_debug_level(dist.DebugLevel.OFF)
    for_ddp: Any = dist.new_group(timeout=timedelta(seconds=10))
    init = DistributedDataParallel.__init__

    def init_in_group(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **({"process_group": for_ddp} | kwargs))

    with mock.patch.object(DistributedDataParallel, "__init__", init_in_group):
        try:
            return explain_loop(answer)
        except FAULTS as error:
            return in_words(error)


def build_unlike(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Make the model with other weights on every rank."""
    torch.manual_seed(dist.get_rank())
    return build_model()


def explain_loop(answer: Answer) -> str:
    """Run the loop beside one process; say what differs, or nothing."""
    build_model, prepare, train_step, save = answer
    noted, batches = Noted([], []), draw_surface()
    optimizers: list[Any] = []

    def wrap(model: nn.Module) -> Any:
        prepared, optimizer = prepare(model)
        if {*map(id, prepared.parameters())} != {*map(id, model.parameters())}:
            raise RuntimeError("prepare() returns another model: train the given one")
        noted.model.append(prepared)
        optimizers.append(optimizer)
        return prepared

    def take_step(model: Any, _: Any, __: Any, batch: Any) -> Tensor:
        loss, norm = train_step(model, optimizers[0], *batch)
        noted.norms.append(norm)
        return loss

    is_same, line = same_as_one_process(
        lambda: build_unlike(build_model), loss_of, wrap, batches, take_step, lr=LR
    )
    if not is_same:
        return explain_difference(line)
    return (
        explain_norms(noted.norms, train_first_rank(build_model, batches)[1])
        or explain_shards(noted.model[0], batches[0][0])
        or explain_file(answer, noted.model[0], save, batches)
    )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared error of a batch."""
    return mse_loss(model(batch[0]), batch[1])


def train_first_rank(
    build_model: Callable[[], nn.Module], batches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[float]]:
    """Train rank 0's model as one process; return it, and the gradients' norms."""
    torch.manual_seed(0)
    model, norms = build_model(), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        optimizer.step()
    return model, norms


def explain_difference(line: str) -> str:
    """Say what may be the reason for a difference from one process."""
    line = line.removeprefix("differs ")
    if line.startswith("before training: "):
        name = line.split()[2]
        return f"before training {name} is not rank 0's: who gives it to rank 1?"
    if "loss" in line:
        return f"{line}: is it the mean over this rank's samples?"
    if "0: 0.0," in line:
        return f"{line}: whose parameters does the optimizer have?"
    return f"{line}: is the gradient the mean over the ranks?"


def explain_norms(told: list[Any], right: list[float]) -> str:
    """Say what is wrong with the norms that were returned, or nothing."""
    for step, (norm, due) in enumerate(zip(told, right, strict=True), start=1):
        if not isinstance(norm, float | int):
            return f"in step {step} the norm is a {type(norm).__name__}, no number"
        if not math.isclose(norm, due, rel_tol=1e-3):
            return (
                f"in step {step} the norm is {norm:.3f}, and that of the whole "
                f"gradient {due:.3f}: is it this rank's part?"
            )
    return ""


def explain_shards(model: Any, inputs: Tensor) -> str:
    """Say whether this rank keeps or gathers more than it needs, or nothing."""
    parameters = list(model.parameters())
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    total, kept = sum(p.numel() for p in parameters), sum(p.numel() for p in local)
    if kept > 1.1 * total / WORLD_SIZE:
        return (
            f"right, but this rank keeps {kept} of {total} weights: nothing is sharded"
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if units == [model]:
        return (
            f"right, but no layer is sharded by itself: the root gathers all {total} "
            "weights at once"
        )
    for name, layer in model.named_modules():
        if [*layer.parameters(recurse=False)] and not isinstance(layer, FSDPModule):
            return f"right, but the root gathers {name} with what else is left"
    largest = max(
        sum(p.numel() for p in module.parameters(recurse=False))
        for module in model.modules()
    )
    with NotedGathers() as noted:
        model(inputs)
    if noted.largest > largest:
        return (
            "right, but several layers are gathered at once: one call of fully_shard "
            "makes one unit"
        )
    if any(not isinstance(p, DTensor) for p in model.parameters()):
        return "right, but layers stay whole after their forward pass"
    return ""


def explain_file(answer: Answer, model: Any, save: Callable, batches: Any) -> str:
    """Say what is wrong with the file that was written, or nothing."""
    with one_folder() as folder:
        path = folder / "model.pt"
        noted = mock.Mock(side_effect=torch.save)
        with mock.patch.object(torch, "save", noted):
            save(model, path)
        # Who pickles a tensor saves it too, in memory.
        given = [[*args, *words.values()] for args, words in noted.call_args_list]
        is_writer = not all(any(isinstance(a, BytesIO) for a in one) for one in given)
        dist.all_reduce(writers := torch.tensor(int(is_writer)))
        if writers > 1:
            return f"{writers} ranks save: one is enough, and two may break the file"
        if not path.exists():
            return "save_whole() writes no file"
        content = torch.load(path, weights_only=True)
    alone, _ = train_first_rank(answer[0], batches)
    parts = [name for name, value in content.items() if isinstance(value, DTensor)]
    if parts:
        return f"the file holds a shard of {parts[0]}: who gathers it?"
    plain = copy.deepcopy(alone)
    plain.load_state_dict(content)
    pairs = zip(plain.parameters(), alone.parameters(), strict=True)
    if all(torch.allclose(a, b, atol=1e-5) for a, b in pairs):
        return ""
    return "the file holds other weights than those that were trained"


@contextlib.contextmanager
def one_folder() -> Iterator[Path]:
    """Make a folder that all ranks know, and remove it."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    folder = Path(names[0])
    yield folder
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
