"""Chapter 03: `same_as_one_process` accepts what is right, and says what is wrong."""

import contextlib
import importlib.util
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from launch import ROOT
from lessons import run_lesson
from scripts import load_chapter
from worker_pool import WorkerPool

FILE = ROOT / "03_ddp_torchrun" / "same_as_one_process.py"
# Loaded as readers use it: alone, without the other files of its chapter.
SPEC = importlib.util.spec_from_file_location("same_as_one_process", FILE)
assert SPEC is not None and SPEC.loader is not None
LESSON: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(LESSON)

Case = dict[str, Any]  # arguments of `same_as_one_process` that are not the usual ones
CORRECT = (
    r"same as one process: 3 steps, loss and (\d+) tensors within (\S+), moved (\S+)"
)


# --- What is trained. ----------


class Net(nn.Module):
    """Layers with tied and with strided weights, and an integer for a buffer."""

    calls: torch.Tensor

    def __init__(self, counts: bool = False) -> None:
        """Draw the weights from the default generator."""
        super().__init__()
        self.counts = counts
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)
        self.mixed, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.mixed.weight
        self.turned = nn.Parameter(torch.randn(8, 3).t())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (B, 6) to (B, 1)."""
        self.calls += self.counts
        x = torch.tanh(self.up(x))
        x = torch.tanh(self.again(torch.tanh(self.mixed(x))))
        return self.down(x) + (x @ self.turned.t()).mean(dim=1, keepdim=True)


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which is a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        """Draw the weights; the mean begins with zeros."""
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (B, 6) to (B, 1); the next batch is centred by this one as well."""
        centred = x - self.mean
        self.mean.lerp_(x.mean(dim=0), 0.1)
        return self.linear(centred)


class Complex(nn.Module):
    """A weight whose imaginary part gets the gradient of the real one."""

    def __init__(self) -> None:
        """Draw the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (B, 6) to (B, 1)."""
        return x @ self.weight.real + x @ self.weight.imag


class Spare(Net):
    """Counts its calls, and has a buffer that it does not use."""

    spare: torch.Tensor

    def __init__(self) -> None:
        """Add the buffer to a Net."""
        super().__init__(counts=True)
        self.register_buffer("spare", torch.zeros(()))


def build(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    """Make a model from a seed."""
    torch.manual_seed(seed)
    return kind()


def build_normalised() -> nn.Module:
    """Make a model with BatchNorm, whose statistics are each rank's own under DDP."""
    return build(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    )


def build_mlp() -> nn.Module:
    """Make the model that tensor parallelism cuts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1))


def build_double() -> nn.Module:
    """Make a model in float64, whose state needs no other dtype to be compared in."""
    return build().double()


def build_with_a_buffer_of_the_rank() -> nn.Module:
    """Make a model that has another buffer on each rank."""
    model: Any = build()
    model.calls += dist.get_rank()
    return model


def build_by_rank(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    """Make a model that is another one on each rank."""
    return build(kind, seed=dist.get_rank())


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Mean squared error of a batch: inputs, (B, 6), and labels, (B, 1)."""
    inputs, labels = batch
    return mse_loss(model(inputs), labels)


def loss_of_inputs(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean square of a batch that is its inputs, (B, 6)."""
    return model(batch).square().mean()


def loss_by_name(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error of a batch whose tensors have names."""
    return mse_loss(model(batch["x"]), batch["y"])


def batches_of(samples: int = 24) -> list[list[torch.Tensor]]:
    """Make three global batches, the same on every rank; the inputs' mean is not 0."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, samples, 6, generator=generator) + 0.5
    return [[x, x.sum(dim=1, keepdim=True).sin()] for x in inputs]


# --- Ways to wrap. ----------


class ByHand(nn.Module):
    """All-reduces gradients after backward, and does what one is told besides."""

    def __init__(
        self,
        module: nn.Module,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
        averages_buffers: bool = False,
        deaf_rank: int | None = None,
    ) -> None:
        """Take a module as it is: nothing is broadcast."""
        super().__init__()
        self.module, self.op, self.deaf_rank = module, op, deaf_rank
        self.averages_buffers = averages_buffers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        return self.module(x)

    def finish_gradient_sync(self) -> None:
        """All-reduce every gradient; the deaf rank does not take the result."""
        for parameter in self.module.parameters():
            reduced = torch.as_tensor(parameter.grad).clone()
            dist.all_reduce(reduced, op=self.op)
            if dist.get_rank() != self.deaf_rank:
                parameter.grad = reduced
        for buffer in self.module.buffers() if self.averages_buffers else []:
            dist.all_reduce(buffer, op=dist.ReduceOp.AVG)


def average_real_parts(model: nn.Module) -> nn.Module:
    """All-reduce the real part of each gradient, and leave the imaginary one."""

    def average(parameter: torch.Tensor) -> None:
        gradient = torch.as_tensor(parameter.grad)
        real = gradient.real.contiguous()
        dist.all_reduce(real, op=dist.ReduceOp.AVG)
        gradient.real = real

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def by_chapter_02(file: str, name: str, model: nn.Module, **options: Any) -> Any:
    """Wrap in one of the classes that chapter 02 makes by hand."""
    return getattr(load_chapter("02_ddp_mp")[file], name)(model, **options)


def shard_parameters(model: nn.Module) -> Any:
    """FSDP2: each layer of the model, then what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpoint_and_shard(model: Any) -> Any:
    """Activation checkpointing, then FSDP2; the wrappers rename parameters."""
    for i in (0, 2):
        model[i] = checkpoint_wrapper(model[i])
    return shard_parameters(model)


def cut_matrices(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Tensor parallelism: the first matrix by columns, the second by rows."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def shard_and_cut(model: nn.Module) -> Any:
    """Tensor parallelism on pairs of ranks, and FSDP2 over the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(cut_matrices(model, mesh["tp"]), mesh=mesh["dp"])


def disturb_rank(rank: int, model: nn.Module) -> nn.Module:
    """Change a weight of one rank, which nobody puts right."""
    if dist.get_rank() == rank:
        with torch.no_grad():
            next(model.parameters())[2, 1] += 0.01
    return ByHand(model)


def enlarge_gradients(model: nn.Module) -> nn.Module:
    """Let DDP average gradients that are 0.1 percent too large."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.001)
    return DistributedDataParallel(model)


# --- Steps: a batch of a rank in two micro-batches. ----------


def accumulate(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss_of: Any,
    batch: list[torch.Tensor],
    forward: str = "0",
    backward: str = "0",
    divisor: int = 2,
) -> torch.Tensor:
    """Add up the gradients of micro-batches 0 and 1.

    `forward` and `backward` name those whose passes stand inside `no_sync()`.
    """
    optimizer.zero_grad()
    losses = []
    for number, part in enumerate(zip(*(t.chunk(2) for t in batch), strict=True)):
        nothing = contextlib.nullcontext()
        with model.no_sync() if str(number) in forward else nothing:
            losses.append(loss_of(model, part))
        with model.no_sync() if str(number) in backward else nothing:
            (losses[-1] / divisor).backward()
    optimizer.step()
    return (losses[0] + losses[1]) / 2


def bypass_wrapper(model: Any, *arguments: Any) -> torch.Tensor:
    """Call the module inside DDP."""
    return LESSON.plain_step(model.module, *arguments)


def off_after_step_1(model: Any, *arguments: Any) -> torch.Tensor:
    """Change the buffer that nobody uses, by less than is allowed, and set it back."""
    loss = LESSON.plain_step(model, *arguments)
    model.module.spare.fill_(9e-7 if model.module.calls == 1 else 0)
    return loss


def keep_gradients(
    model: Any, optimizer: Any, loss_of: Any, batch: Any
) -> torch.Tensor:
    """Forget `zero_grad`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "zero_grad", lambda: None)
        return LESSON.plain_step(model, optimizer, loss_of, batch)


def sum_of_losses(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Sum over the samples, where a mean is due."""
    inputs, labels = batch
    return mse_loss(model(inputs), labels, reduction="sum") / 24


def contrastive_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Tell each sample's label from those of the others."""
    inputs, labels = batch
    return cross_entropy(model(inputs) @ labels.T, torch.arange(len(inputs)))


def loss_that_is_nan(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Divide nothing by nothing."""
    return loss_of(model, batch) * 0 / 0


# --- Run on every rank. ----------


def ask(cases: dict[str, Case]) -> dict[str, tuple[bool, str]]:
    """Ask `same_as_one_process` about each case."""
    answers = {}
    for name, case in cases.items():
        usual: Case = {"build": build, "loss_of": loss_of, "batches": batches_of()}
        options = usual | {"wrap": DistributedDataParallel} | case
        if "shards" in options:
            options["shards"] = options["shards"](options["batches"])
        answers[name] = LESSON.same_as_one_process(**options)
    return answers


def all_of(batches: list[Any]) -> list[Any]:
    """Let a rank take everything, as in tensor parallelism."""
    return batches


def half_of_a_pair(batches: list[Any]) -> list[Any]:
    """Let ranks 0 and 1 take the first half of everything, 2 and 3 the second."""
    return [[t.chunk(2)[dist.get_rank() // 2] for t in batch] for batch in batches]


def answers_of(
    worker_pool: WorkerPool, cases: dict[str, Case], world_size: int = 2
) -> dict[str, tuple[bool, str]]:
    """Return the answers, which have to be equal on all ranks."""
    by_rank = worker_pool.run(ask, cases, world_size=world_size)
    assert len(by_rank) == world_size
    for answers in by_rank:
        assert answers == by_rank[0]
    assert len(by_rank[0]) == len(cases) > 0
    return by_rank[0]


# --- What is the same. ----------

TENSOR_PARALLEL: Case = {"build": build_mlp, "wrap": cut_matrices, "shards": all_of}
RIGHT: dict[str, Case] = {
    "DDP": {},
    "DDP, calls counted": {"build": partial(build, partial(Net, counts=True))},
    "DDP, each rank has a seed of its own": {"build": build_by_rank},
    "DDP, each rank has a buffer": {"build": build_with_a_buffer_of_the_rank},
    "float64": {
        "build": build_double,
        "batches": [[t.double() for t in batch] for batch in batches_of()],
    },
    "complex weights": {"build": partial(build, Complex)},
    "NaiveDDP": {"wrap": partial(by_chapter_02, "naive", "NaiveDDP")},
    "FlatDDP": {"wrap": partial(by_chapter_02, "flat", "FlatDDP")},
    "BucketedDDP": {"wrap": partial(by_chapter_02, "bucketed", "BucketedDDP")},
    "FSDP2": {"build": build_mlp, "wrap": shard_parameters},
    "FSDP2, activations": {"build": build_mlp, "wrap": checkpoint_and_shard},
    "tensor parallel": TENSOR_PARALLEL,
    "by hand": {"wrap": ByHand},
    "by hand, buffers too": {
        "build": partial(build, Centred),
        "wrap": partial(ByHand, averages_buffers=True),
    },
    "a batch is one tensor": {
        "loss_of": loss_of_inputs,
        "batches": [batch[0] for batch in batches_of()],
    },
    "a batch is a dict": {
        "loss_of": loss_by_name,
        "batches": [dict(zip("xy", batch, strict=True)) for batch in batches_of()],
    },
    "no_sync": {"train_step": accumulate},
    # Right, although these send more than they need.
    "no no_sync": {"train_step": partial(accumulate, forward="", backward="")},
    "no_sync too late": {"train_step": partial(accumulate, forward="")},
    # DDP looks in the forward pass only.
    "no_sync left early": {"train_step": partial(accumulate, backward="")},
}


def check_right(answers: dict[str, tuple[bool, str]], tensors: dict[str, int]) -> None:
    """All lines say how many tensors were compared, and how far they moved."""
    checked = 0
    for name, (is_same, line) in answers.items():
        assert is_same, f"{name}: {line}"
        match = re.fullmatch(CORRECT, line)
        assert match, f"{name}: {line}"
        assert int(match[1]) == tensors.get(name, 9), name
        assert float(match[2]) < 1e-5 < 0.01 < float(match[3]), line
        checked += 1
    assert checked == len(answers) > 0


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_trains_as_one_process_does_is_accepted(
    worker_pool: WorkerPool, world_size: int
) -> None:
    answers = answers_of(worker_pool, RIGHT, world_size)
    mlp = dict.fromkeys(["FSDP2", "FSDP2, activations", "tensor parallel"], 4)
    check_right(answers, mlp | {"by hand, buffers too": 3, "complex weights": 1})


def test_sharding_over_tensor_parallelism_is_accepted(worker_pool: WorkerPool) -> None:
    case = {"build": build_mlp, "wrap": shard_and_cut, "shards": half_of_a_pair}
    answers = answers_of(worker_pool, {"2 x 2": case}, world_size=4)
    check_right(answers, {"2 x 2": 4})


def test_the_largest_distance_of_all_steps_is_told(worker_pool: WorkerPool) -> None:
    case = {"build": partial(build, Spare), "train_step": off_after_step_1}
    answers = answers_of(worker_pool, {"spare": case})
    check_right(answers, {"spare": 10})
    within = re.fullmatch(CORRECT, answers["spare"][1])
    assert within and float(within[2]) >= 9e-7


def test_weights_that_hardly_moved_tell_nothing(worker_pool: WorkerPool) -> None:
    answers = answers_of(worker_pool, {"lr": {"lr": 1e-6}})
    is_same, line = answers["lr"]
    said = r"tells nothing: 3 steps, loss and 9 tensors within \S+, moved \de-0[56]"
    assert not is_same and re.fullmatch(said, line), line


# --- What is not. ----------

CENTRED = partial(build, Centred)
# With the beginning of the line. Where ranks were averaged, they moved alike; where
# each has gone its own way, they did not.
ALIKE, APART = r"\{0: (\S+), 1: \1\}", r"\{0: (\S+), 1: (?!\1)\S+\}"
WRONG: dict[str, tuple[Case, str | None]] = {
    "sum for mean": (
        {"wrap": partial(ByHand, op=dist.ReduceOp.SUM)},
        r"after step 1: turned moved \{0: 2.0, 1: 2.0\} times as far",
    ),
    "0.1 percent too much": (
        {"wrap": enlarge_gradients},
        r"after step 1: turned moved \{0: 1.001, 1: 1.001\} times as far",
    ),
    "missing all-reduce": (
        {"wrap": nn.Module.train},
        rf"after step 1: turned moved {APART} times as far",
    ),
    "unequal seeds": (
        {"build": build_by_rank, "wrap": ByHand},
        r"before training: turned moved \{1: inf\} times as far",
    ),
    "forgotten buffer": (
        {"build": CENTRED, "wrap": ByHand},
        rf"after step 1: mean moved {APART} times as far",
    ),
    "buffers that DDP broadcasts": (
        {"build": CENTRED},
        rf"after step 1: mean moved {APART} times as far",
    ),
    "no_sync for all micro-batches": (
        {"train_step": partial(accumulate, forward="01", backward="01")},
        rf"after step 1: turned moved {APART} times as far",
    ),
    "no_sync for the last instead of the first": (
        {"train_step": partial(accumulate, forward="1", backward="1")},
        rf"after step 1: turned moved {APART} times as far",
    ),
    "no_sync left between the last forward and backward": (
        {"train_step": partial(accumulate, forward="01", backward="0")},
        rf"after step 1: turned moved {APART} times as far",
    ),
    "micro-batches not divided": (
        {"train_step": partial(accumulate, divisor=1)},
        r"after step 1: turned moved \{0: 2.0, 1: 2.0\} times as far",
    ),
    "imaginary parts not averaged": (
        {"build": partial(build, Complex), "wrap": average_real_parts},
        rf"after step 1: weight moved {APART} times as far",
    ),
    "wrapper bypassed": (
        {"train_step": bypass_wrapper},
        rf"after step 1: turned moved {APART} times as far",
    ),
    "rank 1 keeps its gradient": (
        {"wrap": partial(ByHand, deaf_rank=1)},
        r"after step 1: turned moved \{1: \S+\} times as far",
    ),
    "another weight on rank 1": (
        {"wrap": partial(disturb_rank, 1)},
        r"before training: turned moved \{1: inf\} times as far",
    ),
    "gradients kept": (
        {"train_step": keep_gradients},
        rf"after step 2: turned moved {ALIKE} times as far",
    ),
    "sum of losses": (
        {"loss_of": sum_of_losses},
        r"after step 1: loss moved \{0: 0.5, 1: 0.5\} times as far",
    ),
    "BatchNorm": (
        {"build": build_normalised},
        rf"after step 1: loss moved {ALIKE} times as far",
    ),
    "contrastive loss": (
        {"loss_of": contrastive_loss},
        r"after step 1: loss moved \{0: 0\.\d+, 1: 0\.\d+\} times as far",
    ),
    "tensor parallel on shards": (
        {"build": build_mlp, "wrap": cut_matrices},
        rf"after step 1: loss moved {ALIKE} times as far",
    ),
    "calls counted in micro-batches": (
        {
            "build": partial(build, partial(Net, counts=True)),
            "train_step": accumulate,
        },
        r"after step 1: calls moved \{0: 2.0, 1: 2.0\} times as far",
    ),
    "NaN": (
        {"loss_of": loss_that_is_nan},
        r"after step 1: loss moved \{0: nan, 1: nan\} times as far",
    ),
    # Nothing differs, but where nothing moves this is no evidence.
    "lr 0": ({"lr": 0.0}, None),
    "no batches": ({"batches": []}, None),
}


def test_what_differs_is_named(worker_pool: WorkerPool) -> None:
    cases = {name: case for name, (case, _) in WRONG.items()}
    answers = answers_of(worker_pool, cases)
    checked = 0
    for name, (is_same, line) in answers.items():
        expected = WRONG[name][1]
        assert is_same is False, name
        if expected is None:
            assert line.endswith(", moved 0e+00"), f"{name}: {line}"
        else:
            assert re.fullmatch(f"differs {expected}", line), f"{name}: {line}"
        checked += 1
    assert checked == len(WRONG)


def test_ranks_other_than_0_and_1_are_compared(worker_pool: WorkerPool) -> None:
    cases: dict[str, Case] = {
        "weight": {"wrap": partial(disturb_rank, 2)},
        "gradient": {"wrap": partial(ByHand, deaf_rank=2)},
        "sum": {"wrap": partial(ByHand, op=dist.ReduceOp.SUM)},
    }
    answers = answers_of(worker_pool, cases, world_size=3)
    moved = r"differs {}: turned moved \{{{}\}} times as far"
    expected = {
        "weight": moved.format("before training", "2: inf"),
        "gradient": moved.format("after step 1", r"2: \S+"),
        "sum": moved.format("after step 1", "0: 3.0, 1: 3.0, 2: 3.0"),
    }
    assert len(answers) == len(expected)
    for name, (is_same, line) in answers.items():
        assert not is_same and re.fullmatch(expected[name], line), f"{name}: {line}"


def mean_output(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return a loss that needs no labels."""
    return model(*batch).mean()


def uneven_batches() -> list[str]:
    """Say what three samples on two ranks raise; shards of them are compared."""
    batch, own = [torch.ones(3, 1)], [torch.ones(2 - dist.get_rank(), 1)]
    ask_about = partial(
        LESSON.same_as_one_process,
        build=lambda: nn.Linear(1, 1),
        loss_of=mean_output,
        wrap=DistributedDataParallel,
        batches=[batch],
    )
    # All samples are alike, so that a mean of shards' means is the batch's.
    is_same, line = ask_about(shards=[own])
    assert is_same, line
    said = []
    for one in (batch, batch[0], {"x": batch[0]}):
        with pytest.raises(ValueError, match="cannot share") as raised:
            ask_about(batches=[one])
        said.append(str(raised.value))
    return said


def test_a_batch_that_ranks_cannot_share_evenly_is_refused(
    worker_pool: WorkerPool,
) -> None:
    said = worker_pool.run(uneven_batches)
    assert said == [["2 ranks cannot share a batch evenly: use shards="] * 3] * 2


def half_precision(dtype: torch.dtype) -> str:
    """Ask about a model in 16 bits, and about the same in 32."""
    ask_about = partial(
        LESSON.same_as_one_process,
        loss_of=loss_of,
        wrap=DistributedDataParallel,
        batches=batches_of(),
    )
    is_same, line = ask_about(build=lambda: build().to(dtype).float())
    assert is_same, line
    with pytest.raises(AssertionError) as raised:
        ask_about(build=lambda: build().to(dtype))
    return str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits_is_refused(
    worker_pool: WorkerPool, dtype: torch.dtype
) -> None:
    said = worker_pool.run(half_precision, dtype)
    assert said == ["16 bits: build().float()"] * 2


# --- The file, which others are to carry away. ----------


def test_it_is_short_and_needs_torch_alone() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 64
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    assert imported == ["copy", "torch", "torch", "torch"]


def test_your_model(worker_pool: WorkerPool) -> None:
    outputs = worker_pool.run(run_lesson, "03_ddp_torchrun", "your_model")
    assert len(outputs) == 2 and outputs[1] == ""
    ddp, summed, check = outputs[0].splitlines()
    assert ddp.startswith("DDP | same as one process: 3 steps, loss and 4 tensors")
    moved = "moved {0: 2.0, 1: 2.0} times as far"
    assert summed == f"sum | differs after step 1: 0.weight {moved}"
    assert check == "check: DDP trains as one process does, a sum does not"
