"""Check a loop under FSDP2: what it trains, what it gathers, how often it sends."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

from ask_ranks import ask_ranks, in_words
from ranks import read_options

WORLD_SIZE, STEPS, MICRO_BATCHES, SAMPLES, WIDTH, BLOCKS = 2, 3, 2, 8, 16, 3
FAULTS = (RuntimeError, AttributeError, AssertionError, ValueError, TypeError)


class Blocks(nn.Module):
    """Three blocks of one layer each."""

    def __init__(self) -> None:
        """Build the blocks."""
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(layers)
        self.most_samples = 0  # of a forward pass so far
        self.whole = ""  # when all blocks should have been shards, and were not

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, WIDTH) to (B, WIDTH)."""
        self.most_samples = max(self.most_samples, len(x))
        self.note_whole("are whole before")
        for block in self.blocks:
            x = x + block(x).tanh()
        self.note_whole("stay whole after")
        return x

    def note_whole(self, when: str) -> None:
        """Note whether a block is whole, though none is at work."""
        if not all(isinstance(block.weight, DTensor) for block in self.blocks):
            self.whole = self.whole or when


class NotedMessages(TorchDispatchMode):
    """While it is active, notes the sizes of what is gathered and reduce-scattered."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.gathered, self.reduced = list[int](), list[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a message, and let it and everything else go on."""
        if DTensor in types:
            return NotImplemented
        name = func.overloadpacket.__name__ if func.namespace == "c10d" else ""
        if name == "_allgather_base_":
            self.gathered.append(args[0].numel())
        if name == "_reduce_scatter_base_":
            self.reduced.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def check_training(answer: Callable) -> None:
    """Start the ranks, and let each of them try the loop."""
    read_options()
    claim = "one process's weights, block by block, sent once a step"
    ask_ranks(try_training, answer, WORLD_SIZE, claim)


def draw_steps() -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the micro-batches of all ranks for each step, the same on every rank."""
    generator, steps = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        shape = (MICRO_BATCHES, WORLD_SIZE * SAMPLES, WIDTH)
        inputs = torch.randn(shape, generator=generator)
        steps.append([(x, x.flip(dims=[1])) for x in inputs])
    return steps


def train_one_process(model: nn.Module) -> list[float]:
    """Train as one process does on all samples; return the loss of each step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for micro_batches in draw_steps():
        inputs, labels = (torch.cat(part) for part in zip(*micro_batches, strict=True))
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def try_training(answer: Callable) -> str:
    """Try the loop; say what is wrong on this rank, or nothing."""
    torch.manual_seed(0)
    model = Blocks()
    first = [p.detach().clone() for p in model.parameters()]
    mesh, rank = init_device_mesh("cpu", (WORLD_SIZE,)), dist.get_rank()
    steps = [
        [(x.chunk(WORLD_SIZE)[rank], y.chunk(WORLD_SIZE)[rank]) for x, y in step]
        for step in draw_steps()
    ]
    try:
        with NotedMessages() as noted:
            losses = answer(model, mesh, steps)
        whole = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    except FAULTS as error:
        return in_words(error)
    torch.manual_seed(0)
    alone = Blocks()
    due = train_one_process(alone)
    return (
        explain_moves(whole, list(alone.parameters()), first)
        or explain_mean_losses(losses, due)
        or explain_samples(model.most_samples)
        or explain_gathers(noted, sum(p.numel() for p in first), model.whole)
    )


def explain_moves(ours: list[Tensor], right: list[Any], first: list[Tensor]) -> str:
    """Say what is wrong with the weights at the end, or nothing."""
    pairs = zip(ours, right, strict=True)
    if all(torch.allclose(a, b.detach(), atol=1e-5) for a, b in pairs):
        return ""
    if all(map(torch.equal, ours, first)):
        return (
            "no weight has moved: which parameters does the optimizer have, or was no "
            "gradient reduced?"
        )
    moved = sum(torch.dist(a, b).item() for a, b in zip(ours, first, strict=True))
    should = sum(torch.dist(a, b).item() for a, b in zip(right, first, strict=True))
    times = moved / should
    return f"the weights moved {times:.2f} times as far as in one process"


def explain_mean_losses(told: Any, right: list[float]) -> str:
    """Say what is wrong with the losses that were returned, or nothing."""
    if not isinstance(told, list) or len(told) != STEPS:
        return f"it returned {told!r:.40}, not a list of {STEPS} losses"
    if torch.allclose(torch.tensor(told), torch.tensor(right), atol=1e-4):
        return ""
    return f"the losses are {told}, and those of all ranks {right}"


def explain_samples(most: int) -> str:
    """Say that micro-batches were joined, or nothing."""
    if most <= SAMPLES:
        return ""
    return f"right, but a pass sees {most} samples; a micro-batch has {SAMPLES}"


def explain_gathers(noted: NotedMessages, parameters: int, whole: str) -> str:
    """Say what is wrong with what was sent, or nothing."""
    if not noted.gathered:
        return "nothing is gathered: are the parameters sharded?"
    if (most := max(noted.gathered)) > WIDTH**2:
        some = "all" if most == parameters else f"{most} of"
        return f"right, but {some} {parameters} weights are gathered at once"
    if whole:
        return f"right, but blocks {whole} their forward pass"
    times = sum(noted.reduced) / parameters / STEPS
    if times > 1:
        return f"right, but in each step the gradients are sent {times:g} times"
    return ""
