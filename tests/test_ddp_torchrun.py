"""Chapter 03: what train.py promises, held against one process that sees it all."""

import contextlib
import csv
import io
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from launch import ROOT, clean_environment, python, torchrun
from lessons import in_the_pool
from scripts import importable
from tiny_gpt import CHAPTER, T, make_batches, module, tiny_model, write_text
from worker_pool import RankError, WorkerPool

TRAIN = ROOT / CHAPTER / "train.py"
GENERATE = ROOT / CHAPTER / "generate.py"
# A model and an epoch that take milliseconds: 48 samples of 16 bytes.
TINY = ["--layers=1", "--width=16", "--heads=2", "--block-size=16", "--samples=48"]
FLOAT64 = torch.float64

# @record, around main(), has faulthandler write to a stderr that pytest has taken.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text in a folder with a space in its name."""
    return write_text(tmp_path_factory.mktemp("a folder") / "text.txt")


# --- What runs on each rank. ----------


def flat(tensors: Iterable[Any]) -> torch.Tensor:
    """Copy tensors into one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def note_all_reduces(ddp_model: DistributedDataParallel) -> list[int]:
    """Return a list to which each of DDP's all-reduces adds its bytes."""
    noted = []

    def hook(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        noted.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    ddp_model.register_comm_hook(dist.group.WORLD, hook)
    return noted


class Run(NamedTuple):
    """What a rank of train.py printed, its samples in each step, and how it ended."""

    output: str
    errors: str
    steps: list[list[int]]
    status: int


def run_train(*words: str) -> Run:
    """Be a rank of train.py in the pool's group, from the command line to the end."""
    train, gpt, steps = module("train"), module("model").GPT, []
    status: Any = 0
    output, errors = io.StringIO(), io.StringIO()
    add = train.data.Tally.add

    def note_samples(tally: Any, micro_batches: Any, loss: torch.Tensor) -> None:
        steps.append([i for batch in micro_batches for i in batch[0].tolist()])
        add(tally, micro_batches, loss)

    with (
        warnings.catch_warnings(),
        in_the_pool(train.ranks, *words),
        importable(CHAPTER),  # for workers that load data
        mock.patch.object(train.data.Tally, "add", note_samples),
        mock.patch.object(gpt, "generate", return_value="..."),  # it is slow
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        # @record wants a stderr that has a file; a process is told so once.
        warnings.filterwarnings("ignore", "Unable to enable fault handler")
        try:
            train.main(train.ranks.read_options(**train.OPTIONS))
        except SystemExit as end:
            status = end.code
    return Run(output.getvalue(), errors.getvalue(), steps, status)


# --- The same gradients and weights as one process. ----------


SAMPLES = 13  # of all ranks: no number of them above 1 has equal shards
Step = tuple[torch.Tensor, float, int]


def steps_under_ddp(
    dtype: torch.dtype, steps: int, grad_accum_steps: int
) -> tuple[list[Step], torch.Tensor]:
    """Train with `add_gradients`; of each step return gradient, loss, all-reduces."""
    train, found = module("train"), []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_model = DistributedDataParallel(tiny_model(dtype), gradient_as_bucket_view=True)
    noted = note_all_reduces(ddp_model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.5)
    for batch in make_batches(steps, SAMPLES):
        noted.clear()
        parts = [
            part[rank::world_size].tensor_split(grad_accum_steps) for part in batch
        ]
        micro_batches = list(zip(*parts, strict=True))
        loss_sum = train.add_gradients(
            ddp_model, ddp_model, micro_batches, SAMPLES, amp=False
        )
        gradient = flat(p.grad for p in ddp_model.parameters())
        found.append((gradient, loss_sum.item(), len(noted)))
        optimizer.step()
        optimizer.zero_grad()
    return found, flat(ddp_model.parameters())


def steps_alone(dtype: torch.dtype, steps: int) -> tuple[list[Step], torch.Tensor]:
    """Train one plain model, no DDP and no group, on whole batches."""
    model, found = tiny_model(dtype), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _, inputs, labels in make_batches(steps, SAMPLES):
        optimizer.zero_grad()
        loss = model(inputs, labels)
        loss.backward()
        found.append((flat(p.grad for p in model.parameters()), loss.item(), 0))
        optimizer.step()
    return found, flat(model.parameters())


# SGD, because Adam divides a gradient by its own size and would hide a wrong factor.
# What is left is rounding, of sums in another order; that it shrinks with the dtype's
# last digit shows that nothing else is behind it.
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("grad_accum_steps", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (FLOAT64, 1e-14)]
)
def test_gradients_equal_one_process_and_are_synchronised_once_a_step(
    worker_pool: WorkerPool,
    world_size: int,
    grad_accum_steps: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    steps = 5
    results = worker_pool.run(
        steps_under_ddp, dtype, steps, grad_accum_steps, world_size=world_size
    )
    alone, weights = steps_alone(dtype, steps)
    assert (weights - flat(tiny_model(dtype).parameters())).abs().max() > 0.05
    checked = 0
    assert len(results) == world_size
    for found, rank_weights in results:
        assert len(found) == len(alone) == steps
        assert (rank_weights - weights).abs().max() < tolerance
        # Between ranks there is no tolerance: every bit is the same.
        assert torch.equal(rank_weights, results[0][1])
        for step, (gradient, _, count) in enumerate(found):
            assert (gradient - alone[step][0]).abs().max() < tolerance
            assert torch.equal(gradient, results[0][0][step][0])
            assert count == 1  # one bucket, once a step, however many micro-batches
            checked += 1
    assert checked == steps * world_size
    for step, (_, loss, _) in enumerate(alone):
        sums = [found[step][1] for found, _ in results]
        assert len(set(sums)) == world_size  # the local losses differ
        # They are added up in float32, whatever the model is in.
        assert sum(sums) / SAMPLES == pytest.approx(loss, rel=1e-6)


def train_by_hand(
    text: Path, optimizer: Any, lr: float, steps: int, batch_size: int
) -> tuple[dict[str, torch.Tensor], list[list[int]], list[float]]:
    """Train as train.py shall, in one process; return weights, samples, norms."""
    train, data, gpt = module("train"), module("data"), module("model")
    train_text, _ = data.load_text(text, T)
    train_set = data.WindowDataset(train_text, T, 48)
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(T, width=16, layers=1, heads=2))
    trainer = optimizer(model.parameters(), lr)
    seen, norms = [], []
    for step in range(steps):
        epoch, in_epoch = divmod(step, 48 // batch_size)
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(48, generator=generator).split(batch_size)
        seen.append(order[in_epoch].tolist())
        trainer.param_groups[0]["lr"] = lr * train.lr_factor(step, steps)
        trainer.zero_grad()
        model(*train_set.batch(seen[-1])).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        trainer.step()
    return model.state_dict(), seen, norms


def plain_sgd(parameters: Any, lr: float, **_: Any) -> torch.optim.Optimizer:
    """Take AdamW's place: after a wrong factor AdamW takes nearly the same steps."""
    return torch.optim.SGD(parameters, lr)


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer of train.py."""
    return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1)


def run_in_float64(by_sgd: bool, words: list[str]) -> Run:
    """Be a rank of train.py, in a precision that leaves rounding no room."""
    torch.set_default_dtype(FLOAT64)
    optimizer = plain_sgd if by_sgd else torch.optim.AdamW
    with mock.patch.object(torch.optim, "AdamW", optimizer):
        return run_train(*words)


@pytest.mark.parametrize("by_sgd", [True, False], ids=["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("world_size", "batch_size", "grad_accum_steps"),
    [
        (2, 2, 3),
        (3, 4, 1),
        pytest.param(1, 12, 1, marks=pytest.mark.slow),
        pytest.param(4, 3, 1, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_takes_the_steps_of_one_process(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    by_sgd: bool,
    world_size: int,
    batch_size: int,
    grad_accum_steps: int,
) -> None:
    lr, path = 0.5 if by_sgd else 0.03, tmp_path / "gpt.pt"
    words = [*TINY, "--max-epochs=5", f"--lr={lr}", f"--text={text}"]
    words += [f"--batch-size={batch_size}", f"--grad-accum-steps={grad_accum_steps}"]
    words += [f"--checkpoint={path}"]
    runs = worker_pool.run(run_in_float64, by_sgd, words, world_size=world_size)
    torch.set_default_dtype(FLOAT64)
    try:
        optimizer = plain_sgd if by_sgd else adamw
        weights, seen, norms = train_by_hand(text, optimizer, lr, 20, 12)
    finally:
        torch.set_default_dtype(torch.float32)
    assert min(norms) < 1 < max(norms)  # some steps are clipped and some are not
    found = torch.load(path, weights_only=True)["model"]
    assert found.keys() == weights.keys() and len(weights) == 15
    for name, tensor in weights.items():
        assert (found[name] - tensor).abs().max() < 1e-12, name
    assert len(runs) == world_size and len(seen) == 20
    for step, indices in enumerate(seen):
        assert sorted(i for run in runs for i in run.steps[step]) == sorted(indices)


# --- The run as a whole. ----------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_is_seen_by_one_rank_and_the_order_changes(
    worker_pool: WorkerPool, text: Path, world_size: int
) -> None:
    words = [*TINY, "--batch-size=4", "--max_epochs=3", f"--text={text}"]
    runs = worker_pool.run(run_train, *words, world_size=world_size)
    output, steps = runs[0].output, 12 // world_size
    assert len(runs) == world_size
    assert all(run.output == "" for run in runs[1:])
    orders = []
    for epoch in range(3):
        in_epoch = slice(epoch * steps, (epoch + 1) * steps)
        shards = [list(chain(*run.steps[in_epoch])) for run in runs]
        assert [len(shard) for shard in shards] == [4 * steps] * world_size
        assert sorted(chain(*shards)) == list(range(48))
        orders.append(shards)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    lines = re.findall(
        r"epoch (\d) \| rank (\d) \| batch size 4 \| steps (\d+)", output
    )
    assert lines == [
        (str(epoch), str(rank), str(steps))
        for epoch in range(3)
        for rank in range(world_size)
    ]
    products = re.findall(r"x steps = (\d+) x (\d+) = (\d+) different", output)
    assert products == [(str(4 * world_size), str(steps), "48")] * 3
    assert f"check: {world_size} rank(s) hold the same bits" in output


def test_held_out_text_may_be_too_short_to_share(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("a short text\n" * 85)
    words = [*TINY, "--batch-size=4", "--max-steps=2", f"--text={tmp_path}"]
    # 56 bytes of it are held out: three windows of 16, for four ranks.
    runs = worker_pool.run(run_train, *words, world_size=4)
    assert len(runs) == 4
    assert "check: 4 rank(s) hold the same bits" in runs[0].output


class Shifted(torch.nn.Module):
    """Has a loss that is a buffer, as if it were a running mean."""

    mean: torch.Tensor

    def __init__(self) -> None:
        """Begin with the number of the rank."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        # A column, and a mask that is all zeros in memory of one number.
        self.register_buffer("mean", torch.full((2, 2), 5.0 + dist.get_rank())[:, 0])
        self.register_buffer("mask", torch.zeros(1).expand(4, 4))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the loss."""
        return self.weight + self.mean.mean()


def loss_of_buffers() -> list[float]:
    """Evaluate alone, and together, when each rank has statistics of its own."""
    data = module("data")
    dataset = data.WindowDataset(torch.zeros(3 * T + 1, dtype=torch.uint8), T, 3)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return [
        data.evaluate(Shifted(), dataset, group=groups[dist.get_rank()]),
        data.evaluate(Shifted(), dataset),
    ]


def test_validation_is_by_the_running_statistics_that_rank_zero_saves(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(loss_of_buffers, world_size=2)
    assert by_rank == [[5.0, 5.0], [6.0, 5.0]]


def test_printed_loss_is_the_mean_over_ranks(
    worker_pool: WorkerPool, text: Path
) -> None:
    words = [*TINY, "--batch-size=4", "--max-epochs=1", f"--text={text}"]
    output = worker_pool.run(run_train, *words)[0].output
    halves = [float(loss) for loss in re.findall(r"mean loss (\d\.\d+)", output)]
    local = [float(loss) for loss in re.findall(r"local loss (\d\.\d+)", output)]
    assert len(halves) == 2 and len(local) == 2
    assert local[0] != local[1]
    # Both are rounded to three digits after the point.
    assert sum(halves) / 2 == pytest.approx(sum(local) / 2, abs=1.1e-3)


def tally_of_two_steps() -> list[tuple[float, float]]:
    """Take steps at known times with known losses; return loss and tokens a second."""
    data, rank = module("data"), dist.get_rank()
    dataset = data.WindowDataset(torch.zeros(2000, dtype=torch.uint8), T, 48)
    sampler = data.StepSampler(48, 2 * dist.get_world_size(), batch_size=2, seed=0)
    with mock.patch.object(data.time, "perf_counter", side_effect=[10.0, 12.0, 12.5]):
        tally, found = data.Tally(dataset, sampler), []
        for step in range(2):
            indices = torch.tensor([4 * step + 2 * rank, 4 * step + 2 * rank + 1])
            tally.add([(indices, None, None)], torch.tensor(2.0 + rank + 4 * step))
            found.append(tally.recent())
    return found


def test_tokens_per_second_and_loss_are_those_since_the_last_line(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(tally_of_two_steps)
    # Sums of 2 and 3 over 4 samples in 2 s, then of 6 and 7 in half a second.
    expected = [(5 / 4, 4 * T / 2.0), (13 / 4, 4 * T / 0.5)]
    assert len(results) == 2 and results[0] == results[1] == expected


def run_noting_autocast(*words: str) -> tuple[Run, set[bool]]:
    """Be a rank of train.py; return with what `amp` it calls `add_gradients`."""
    train, amp = module("train"), set()

    def note(*args: Any) -> torch.Tensor:
        amp.add(args[-1])
        return add_gradients(*args)

    add_gradients = train.add_gradients
    with mock.patch.object(train, "add_gradients", note):
        return run_train(*words), amp


def test_options_of_a_run_reach_it(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    words = [*TINY, "--batch-size=3", "--grad_accum_steps=2", "--amp", "--seed=5"]
    words += ["--max-steps=11", "--lr=0.01", f"--text={text}", "--workers=2"]
    words += ["--vocabulary=300", "--local-rank=0", f"--checkpoint={tmp_path / 'a'}"]
    results = worker_pool.run(run_noting_autocast, *words)
    assert [amp for _, amp in results] == [{True}] * 2
    (run, _), (other, _) = results
    # 48 samples are 4 steps of 2 ranks x 2 micro-batches x 3; for the last epoch 3 are
    # left of the 11.
    steps = re.findall(r"rank 0 \| batch size 3 \| steps (\d+) \|", run.output)
    assert steps == ["4", "4", "3"]
    order = torch.randperm(48, generator=torch.Generator().manual_seed(5))[:12]
    assert (run.steps[0], other.steps[0]) == (order[::2].tolist(), order[1::2].tolist())
    assert [len(indices) for indices in run.steps] == [6] * 11
    # (V + T) D of the embeddings, 12 D^2 + 4 D of the block, 2 D of the last norm.
    assert f"model: {316 * 16 + 12 * 256 + 64 + 32:,} parameters\n" in run.output
    before, after = map(float, re.findall(r"(\d\.\d\d) (?:nats|after)", run.output))
    assert after < before - 0.5
    (bits,) = re.findall(r"after \((\d\.\d\d) bits per byte\)", run.output)
    assert float(bits) == pytest.approx(math.log2(math.exp(after)), abs=0.013)
    content = torch.load(tmp_path / "a", weights_only=True)
    assert content["training"]["schedule"]["base_lrs"] == [0.01]
    assert content["training"]["step"] == 11


def autocast_in_add_gradients(amp: bool) -> tuple[set[bool], set[bool]]:
    """Say whether autocast was on in the forward passes, and in the backwards."""
    ddp_model = DistributedDataParallel(tiny_model())
    forward: set[bool] = set()
    backward: set[bool] = set()
    ddp_model.module.register_forward_hook(
        lambda *_: forward.add(torch.is_autocast_enabled("cpu"))
    )
    for parameter in ddp_model.parameters():
        parameter.register_hook(
            lambda _: backward.add(torch.is_autocast_enabled("cpu"))
        )
    batches = make_batches(2, 4)
    module("train").add_gradients(ddp_model, ddp_model, batches, 8, amp)
    return forward, backward


@pytest.mark.parametrize("amp", [True, False])
def test_autocast_is_on_in_the_forward_pass_alone(
    worker_pool: WorkerPool, amp: bool
) -> None:
    found = worker_pool.run(autocast_in_add_gradients, amp, world_size=1)
    assert found == [({amp}, {False})]


# --- Random numbers: the same weights, another dropout on each rank. ----------


def weights_and_dropout(*words: str) -> tuple[torch.Tensor, list[torch.Tensor], Run]:
    """Be a rank; return the weights before DDP copies any, and what dropout zeroes."""
    train, masks, weights = module("train"), [], []

    def note_mask(drop: Any, _: Any, output: torch.Tensor) -> None:
        if drop.training:
            masks.append(output.detach() == 0)

    def wrap(model: Any, **options: Any) -> DistributedDataParallel:
        weights.append(flat(model.parameters()))
        model.blocks[0].drop.register_forward_hook(note_mask)
        return DistributedDataParallel(model, **options)

    with mock.patch.object(train, "DDP", wrap):
        run = run_train(*words)
    (before_ddp,) = weights
    return before_ddp, masks, run


def test_ranks_draw_the_same_weights_and_other_dropout(
    worker_pool: WorkerPool, text: Path
) -> None:
    words = [*TINY, "--batch-size=4", "--max-epochs=1", f"--text={text}"]
    results = worker_pool.run(
        weights_and_dropout, *words, "--dropout=0.5", world_size=3
    )
    assert len(results) == 3
    for weights, masks, _ in results:
        assert torch.equal(weights, results[0][0])
        assert len(masks) == 2 * 4  # two dropouts in each of four steps
        share = torch.stack(masks).double().mean().item()
        assert share == pytest.approx(0.5, abs=0.05)
    for step in range(8):
        for one, other in ((0, 1), (0, 2), (1, 2)):
            pair = [results[rank][1][step] for rank in (one, other)]
            assert not torch.equal(*pair)
    # Dropout is off wherever something is measured, the closing check included.
    assert "check: 3 rank(s) hold the same bits" in results[0][2].output


# --- The schedule. ----------


def test_learning_rate_warms_up_and_falls_on_a_cosine() -> None:
    lr_factor = module("train").lr_factor
    factors = [lr_factor(step, 100) for step in range(101)]
    assert factors[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(0.55)  # half way between 1 and 0.1
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[25] == pytest.approx(0.55 + 0.45 * math.cos(math.pi / 6))
    short = [lr_factor(step, n) for n in (1, 2, 5) for step in range(n)]
    assert len(short) == 8 and 0.1 <= min(short) <= max(short) <= 1


# --- The log. ----------

WITHOUT_TENSORBOARD = {"torch.utils.tensorboard": None}


def rate_of_each(_: Any, tokens_per_second: float, __: torch.device) -> str:
    """Show the rate that the utilisation of one device is computed from."""
    return f" | {tokens_per_second:.3f} each"


def run_logging(words: list[str], hidden: dict[str, None]) -> str:
    """Be a rank of train.py, with or without TensorBoard; return what it printed."""
    utilisation = mock.patch.object(module("train").GPT, "utilisation", rate_of_each)
    with utilisation, mock.patch.dict(sys.modules, hidden):  # None: an import fails
        return run_train(*words).output


def log_twice(folder: Path, hidden: dict[str, None]) -> None:
    """Log steps 3, 6 and 9, and after resuming at step 6 log 9 and 12 again."""
    open_log = module("checkpoint").open_log
    with mock.patch.dict(sys.modules, hidden):
        for start, steps in ((0, (3, 6, 9)), (6, (9, 12))):
            log = open_log(folder, start)
            for step in steps:
                log(step, loss=float(start + step), lr=0.5)


def read_table(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return from a CSV table what `read_events` returns from event files."""
    with open(folder / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "step"]
    return {n: [(int(row["step"]), float(row[n])) for row in rows] for n in names}


def test_table_keeps_values_under_their_names(tmp_path: Path) -> None:
    open_csv, path = module("checkpoint").open_csv, tmp_path / "log.csv"
    log = open_csv(path, 0)
    log(1, loss=5.5, lr=0.5)
    log(2, lr=0.25, loss=4.5)
    log = open_csv(path, 2)  # a run that resumes
    log(3, lr=0.125)
    for write in (log, open_csv(path, 3)):
        with pytest.raises(ValueError, match="validation"):
            write(3, validation=4.0)
    assert path.read_text() == "step,loss,lr\n1,5.5,0.5\n2,4.5,0.25\n3,,0.125\n"


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return by name what TensorBoard would draw: steps and values."""
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    return {n: [(one.step, one.value) for one in events.Scalars(n)] for n in names}


LOGS = pytest.mark.parametrize(
    ("hidden", "read", "files"),
    [(WITHOUT_TENSORBOARD, read_table, ["log.csv"]), ({}, read_events, ["events"])],
    ids=["CSV", "TensorBoard"],
)


@LOGS
def test_log_holds_what_is_printed(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    hidden: dict[str, None],
    read: Any,
    files: list[str],
) -> None:
    folder = tmp_path / "a new" / "log"
    words = [*TINY, "--batch-size=4", f"--text={text}", "--max-epochs=2", "--lr=0.01"]
    outputs = worker_pool.run(run_logging, [*words, f"--log-to={folder}"], hidden)
    log = read(folder)
    # Rank 1 has written nothing.
    assert [one.name.split(".out")[0] for one in folder.iterdir()] == files
    assert list(log) == ["loss", "lr", "tokens_per_second"]
    printed = re.findall(r"step +(\d+) of 12 \| mean loss (\S+) \|", outputs[0])
    assert [step for step, _ in log["loss"]] == [3, 6, 9, 12]
    # What is printed is rounded.
    losses = [float(loss) for _, loss in printed]
    assert [loss for _, loss in log["loss"]] == pytest.approx(losses, abs=6e-4)
    lr_factor = module("train").lr_factor
    assert [lr for _, lr in log["lr"]] == pytest.approx(
        [0.01 * lr_factor(step, 12) for step in (3, 6, 9, 12)]
    )
    rates = re.findall(r"([\d,]+) tokens/s", outputs[0])
    rates = [float(rate.replace(",", "")) for rate in rates]
    logged = [rate for _, rate in log["tokens_per_second"]]
    assert logged == pytest.approx(rates, abs=1)
    of_each = re.findall(r"([\d.]+) each$", outputs[0], re.M)  # of two ranks
    assert [2 * float(rate) for rate in of_each] == pytest.approx(logged, abs=0.01)


@LOGS
def test_resumed_run_drops_from_the_log_what_it_does_again(
    worker_pool: WorkerPool, tmp_path: Path, hidden: Any, read: Any, files: list[str]
) -> None:
    worker_pool.run(log_twice, tmp_path, hidden)
    log = read(tmp_path)
    assert log["loss"] == [(3, 3.0), (6, 6.0), (9, 15.0), (12, 18.0)]
    assert [step for step, _ in log["lr"]] == [3, 6, 9, 12]


class Terminal(io.StringIO):
    """Standard error of somebody who looks at it."""

    def isatty(self) -> bool:
        """Say that it is a terminal."""
        return True


def bar_of(*words: str) -> tuple[str, str]:
    """Run train.py at a terminal, then into a file; return what tqdm drew on each."""
    train, drawn = module("train"), []
    plain = train.tqdm
    for stream in (Terminal(), io.StringIO()):
        with mock.patch.object(train, "tqdm", partial(plain, file=stream)):
            run_train(*words)
        drawn.append(stream.getvalue())
    return drawn[0], drawn[1]


def test_one_rank_draws_a_bar_and_only_at_a_terminal(
    worker_pool: WorkerPool, text: Path
) -> None:
    words = [*TINY, "--batch-size=4", f"--text={text}", "--max-epochs=1"]
    (seen, in_a_file), other = worker_pool.run(bar_of, *words)
    assert "6/6" in seen and in_a_file == ""
    assert other == ("", "")


# --- Proofs that can fail. ----------


def run_with_a_fault(fault: str, *words: str) -> Run:
    """Be a rank of a run in which one thing is broken."""
    train = module("train")
    gradient_error, add_gradients = train.data.gradient_error, train.add_gradients

    def faulty_error(ddp_model: DistributedDataParallel, *rest: Any) -> float:
        if fault == "local gradient":
            with ddp_model.no_sync():
                return gradient_error(ddp_model, *rest)
        error = gradient_error(ddp_model, *rest)
        if fault == "one weight on one rank" and dist.get_rank() == 1:
            with torch.no_grad():
                next(ddp_model.parameters()).view(-1)[3] += 1e-7
        if fault == "NaN on one rank" and dist.get_rank() == 1:
            return math.nan
        return error

    def bypass_ddp(forward: Any, ddp_model: Any, *rest: Any) -> torch.Tensor:
        model = ddp_model.module if fault == "model called past DDP" else forward
        return add_gradients(model, ddp_model, *rest)

    def build(config: Any) -> Any:
        model = gpt(config)
        model.token_embedding.requires_grad_(fault != "none, a layer frozen")
        return model

    gpt = train.GPT
    with (
        mock.patch.object(train, "GPT", build),
        mock.patch.object(train.data, "gradient_error", faulty_error),
        mock.patch.object(train, "add_gradients", bypass_ddp),
    ):
        return run_train(*words)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("none", r"\de-0[678]"),
        ("none, a layer frozen", r"\de-0[678]"),
        ("one weight on one rank", r"\de-0[678]"),
        ("NaN on one rank", "nan"),
        ("local gradient", r"\de[-+]0[012]"),
        ("model called past DDP", r"\de[-+]\d\d"),
    ],
)
def test_closing_check_accepts_a_sound_model_and_no_other(
    worker_pool: WorkerPool, text: Path, fault: str, error: str
) -> None:
    words = [*TINY, "--batch-size=4", "--max-steps=3", f"--text={text}"]
    runs = worker_pool.run(run_with_a_fault, fault, *words)
    claim = f"2 rank\\(s\\) hold the same bits, and a gradient within {error} of one"
    if fault.startswith("none"):
        assert [(run.status, run.errors) for run in runs] == [(0, "")] * 2
        assert re.search(f"\ncheck: {claim}", runs[0].output)
    else:
        assert [run.status for run in runs] == [1, 1]
        failed = rf"check failed on ranks \[0, 1\], not so: {claim}"
        assert re.match(failed, runs[0].errors), runs[0].errors
        assert all("check:" not in run.output for run in runs)


def end_an_epoch(counts: list[list[int]], step: int = 4, most: int = 2) -> list[str]:
    """Claim that this rank has trained on some samples, in one step of all ranks'.

    `step` is the global batch size, and `most` the largest micro-batch.
    """
    data = module("data")
    dataset = data.WindowDataset(torch.zeros(2000, dtype=torch.uint8), T, 48)
    sampler = data.StepSampler(48, step, batch_size=most, seed=0)
    tally = data.Tally(dataset, sampler)
    indices = torch.tensor(counts[dist.get_rank()])
    tally.add([(indices, None, None)], torch.tensor(2.0 * (1 + dist.get_rank())))
    return tally.end(steps=1)


def test_sample_seen_twice_or_not_at_all_is_found(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(end_an_epoch, [[0, 1], [2, 3]])[0] == [
        "rank 0 | batch size 2 | steps 1 | local loss 1.000",
        "rank 1 | batch size 2 | steps 1 | local loss 2.000",
        "global batch size x steps = 4 x 1 = 4 different samples",
    ]
    for step, most, expected in ((5, 32, [3, 2]), (12, 4, [3, 3]), (7, 2, [2, 2])):
        # As after a resume on a number of ranks that does not divide the step.
        counts = [list(range(rank, step, 2)) for rank in (0, 1)]
        *lines, _ = worker_pool.run(end_an_epoch, counts, step, most)[0]
        batch_sizes = re.findall(r"\| batch size (\d+) \|", "\n".join(lines))
        assert [int(text) for text in batch_sizes] == expected
    for wrong, found in (
        ([[0, 1], [0, 2]], "1 steps of 4 samples saw 4, 3 of them different"),
        ([[0, 1], [2]], "1 steps of 4 samples saw 3, 3 of them different"),
        ([[0, 1], [2, 3, 4]], "1 steps of 4 samples saw 5, 5 of them different"),
    ):
        with pytest.raises(RankError, match=found):
            worker_pool.run(end_an_epoch, wrong)


# --- Checkpoints: written whole, and never over something else. ----------


def save(path: Path, value: float) -> None:
    """Write a checkpoint whose weights are all `value`."""
    model = tiny_model()
    weights = {k: torch.full_like(v, value) for k, v in model.state_dict().items()}
    content = {"config": asdict(model.config), "model": weights}
    module("checkpoint").write_whole(path, content | {"validation_loss": value})


def value_in(path: Path) -> float:
    """Load what a kill has left; return the one value that all weights must have."""
    checkpoint = module("checkpoint")
    left = [one for one in (path, checkpoint.previous(path)) if one.exists()]
    found = []
    for one in left:
        model, content = checkpoint.load_checkpoint(one)
        values = {value for p in model.parameters() for value in p.flatten().tolist()}
        assert values == {content["validation_loss"]}
        found.append(values.pop())
    assert len(found) in (1, 2)
    return found[0]


def in_child(function: Any, *args: Any) -> int:
    """Fork, run `function` in the child, return the child's process id at once."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function(*args)
        os._exit(1)
    return child


MOMENTS = {  # a name for each, and what the newest whole checkpoint then holds
    "before the first byte": 1.0,
    "in the middle": 1.0,
    "before the bytes are on the disk": 1.0,
    "before the renames": 1.0,
    "between the renames": 1.0,
    "after the renames": 2.0,
}


def die_during_save(path: Path, moment: str) -> None:
    """Save, but be killed at a chosen moment."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half_a_save(content: Any, file: Any) -> None:
        buffer = io.BytesIO()
        real_save(content, buffer)
        file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        file.flush()
        die()

    def replace_and_die(source: Any, target: Any) -> None:
        real_replace(source, target)
        if "between" in moment or target == path:
            die()

    checkpoint, real_save, real_replace = module("checkpoint"), torch.save, os.replace
    fakes = [(torch, "save", die), (torch, "save", half_a_save), (os, "fsync", die)]
    fakes += [(os, "replace", die), *[(os, "replace", replace_and_die)] * 2]
    owner, name, fake = dict(zip(MOMENTS, fakes, strict=True))[moment]
    assert getattr(checkpoint, owner.__name__) is owner
    with mock.patch.object(owner, name, fake):
        save(path, 2.0)


@pytest.mark.parametrize(("moment", "left"), MOMENTS.items())
def test_kill_at_a_known_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: str, left: float
) -> None:
    path = tmp_path / "gpt.pt"
    save(path, 1.0)
    _, status = os.waitpid(in_child(die_during_save, path, moment), 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert value_in(path) == left
    save(path, 3.0)  # what the dead process left does not stand in the way
    assert value_in(path) == 3.0
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["gpt.pt", "gpt.pt.previous"]


def save_for_ever(path: Path) -> None:
    """Write one checkpoint after the other, 1.0, 2.0, 1.0, ..."""
    while True:
        save(path, 1.0)
        save(path, 2.0)


@pytest.mark.slow
def test_kill_at_random_moments_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    save(path, 1.0)
    values: list[float] = []
    # At least 20 times, and until kills have left either value: a busy machine is slow.
    while len(values) < 20 or set(values) != {1.0, 2.0}:
        child = in_child(save_for_ever, path)
        time.sleep(random.uniform(0.01, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        values.append(value_in(path))
        assert len(values) < 300 and set(values) <= {1.0, 2.0}


def generate(*words: str) -> str:
    """Run generate.py in this process; return what it printed."""
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["generate.py", *words]),
        contextlib.redirect_stdout(output),
    ):
        module("generate").main()
    return output.getvalue()


def test_one_process_reads_what_two_ranks_wrote(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gpt.pt"
    words = [*TINY, "--batch-size=4", f"--text={text}", f"--snapshot={path}"]
    run = worker_pool.run(run_train, *words)[0]
    assert f"\ncheckpoint: {path}\n" in run.output
    content = torch.load(path, weights_only=True)
    assert len(content["model"]) == 15
    assert not any(name.startswith("module.") for name in content["model"])
    output = generate(f"--checkpoint={path}", "--length=20")
    assert generate(f"--snapshot={path}", "--length=20") == output
    (told,) = re.findall(r"check: validation loss (.+) in one process", output)
    (after,) = re.findall(r"(\d\.\d\d) after", run.output)
    assert float(told) == pytest.approx(float(after), abs=0.006)
    # A loss that is not the ranks' is an error.
    torch.save(content | {"validation_loss": content["validation_loss"] + 1e-3}, path)
    with pytest.raises(SystemExit, match="the text is not the one it was trained on"):
        generate(f"--checkpoint={path}")


# --- Bad input: one line, status 2, no group, nothing written. ----------


def complaint(*words: str, **environment: str) -> str:
    """Run train.py in this process up to its refusal; return what it printed."""
    train, errors = module("train"), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["a folder/train.py", *words]),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group") as joined,
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        train.main(train.ranks.read_options(**train.OPTIONS))
    assert end.value.code == 2
    assert not joined.called
    (line,) = errors.getvalue().splitlines()
    assert line.startswith("train.py: ")
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-size=0", "--batch-size/--batch_size: '0' is no number from 1 to"),
        ("--batch_size=many", "'many' is no number from 1 to"),
        ("--max-steps=-3", "'-3' is no number from 1 to"),
        ("--max_epochs=1.5", "'1.5' is no number from 1 to"),
        ("--workers=-1", "--workers: '-1' is no number from 0 to"),
        ("--seed=99999999999999999999", "99999' is no number from 0 to"),
        ("--lr=nan", "--lr: 'nan' is no number from 1e-09 to"),
        ("--heads=two", "--heads: invalid int value: 'two'"),
        ("--colour=red", "unrecognized arguments: --colour=red"),
        ("--heads=3", "width 128 does not divide by 3 heads; try --width=126"),
        ("--width=10 --heads=4", "width 10 does not divide by 4 heads; try --width=8"),
        ("--heads=0", "block size, width, layers and heads are 1 or more"),
        ("--block-size=-5", "block size, width, layers and heads are 1 or more"),
        ("--dropout=1", "dropout is a probability below 1, not 1.0"),
        ("--dropout=-0.1", "dropout is a probability below 1, not -0.1"),
        ("--vocabulary=9", "bytes need a vocabulary of 256, not 9"),
        ("--text=nowhere", "--text nowhere: no such file or folder"),
        ("--checkpoint=missing/gpt.pt", "there is no folder missing"),
        ("--snapshot=.", "--checkpoint=. is a folder; name a file in it"),
        ("--log-to=README.md/log", "--log-to/--log_to: [Errno 20] Not a directory"),
        ("--samples=31", "global batch size of 32, and an epoch of 31 samples: use"),
    ],
)
def test_bad_words_get_one_clear_line(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in complaint(*words.split())


def test_more_ranks_than_samples(text: Path) -> None:
    words = [*TINY, "--batch-size=1", f"--text={text}"]
    line = complaint(*words, RANK="0", WORLD_SIZE="64")
    assert "64 rank(s) with a global batch size of 64, and an epoch of 48" in line


def test_half_a_launcher(text: Path) -> None:
    line = complaint(*TINY, f"--text={text}", RANK="0")
    assert line.endswith(
        " start it with torchrun --nproc-per-node=2 'a folder/train.py'"
    )


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no text below" in complaint(f"--text={tmp_path / 'empty'}")
    (tmp_path / "short.txt").write_text("too short")
    line = complaint(f"--text={tmp_path / 'short.txt'}")
    assert "holds 9 bytes of text" in line and "at least 2581" in line
    # Links that lead round in a circle cannot be read by anybody, not even by root.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").symlink_to(tmp_path / "folder" / "a")
    assert "no text below" in complaint(f"--text={tmp_path / 'folder'}")
    with mock.patch.object(Path, "read_bytes", side_effect=PermissionError(13, "No")):
        assert "No" in complaint(f"--text={tmp_path / 'short.txt'}")


def test_checkpoint_that_must_not_be_overwritten(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    words = [f"--text={text}", f"--checkpoint={path}"]
    save(path, 1.0)
    whole, other = path.read_bytes(), io.BytesIO()
    other_model = f"{path} belongs to a model of GPTConfig(block_size=16, width=16"
    assert other_model in complaint(*words)
    torch.save({"weights": 1}, other)
    checked = 0
    for content in (whole[: len(whole) // 2], b"", b"no checkpoint", other.getvalue()):
        path.write_bytes(content)
        assert f"{path}: damaged, or no checkpoint; move it away" in complaint(*words)
        assert path.read_bytes() == content
        checked += 1
    assert checked == 4
    assert [file.name for file in tmp_path.iterdir()] == ["gpt.pt"]


def test_checkpoint_folder_without_permission(text: Path, tmp_path: Path) -> None:
    with mock.patch.object(os, "access", return_value=False):
        line = complaint(f"--text={text}", f"--checkpoint={tmp_path / 'gpt.pt'}")
    assert f"gpt.pt: cannot write in {tmp_path}" in line


def test_generate_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    missing = python(GENERATE, "--checkpoint", tmp_path / "gpt.pt")
    assert missing.returncode == 2
    assert missing.output.startswith(f"generate.py: no checkpoint at {tmp_path}/gpt.pt")
    assert missing.output.count("\n") == 1


# --- Real launches. ----------


@pytest.mark.slow
def test_mistake_under_torchrun_is_said_once(tmp_path: Path) -> None:
    result = torchrun(TRAIN, "--batch-size=0", nproc=3, cwd=tmp_path)
    assert result.returncode == 1
    said = "train.py: argument --batch-size/--batch_size: '0' is no number"
    assert result.stderr.count(said) == 1
    assert "exitcode  : 2" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.smoke
def test_three_ranks_from_another_folder_while_29500_is_taken(
    text: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "a path with spaces" / CHAPTER
    shutil.copytree(ROOT / CHAPTER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with socket.socket() as held:
        with contextlib.suppress(OSError):  # somebody else may hold it already
            held.bind(("", 29500))  # allowed port: it is held so that none can use it
            held.listen()
        words = [*TINY, "--batch-size=4", "--max-epochs=1", "--text", text]
        result = torchrun(copy / "train.py", *words, nproc=3, cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert "global batch size x steps = 12 x 4 = 48 different" in result.stdout
    assert "check: 3 rank(s) hold the same bits" in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_compiled_run_works_or_says_why_not(text: Path, tmp_path: Path) -> None:
    words = [*TINY, "--batch-size=4", "--max-steps=2", "--compile", "--text", text]
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    # PyTorch hands the compiler its own folder unquoted: a space in it is fatal.
    can_compile = any(map(shutil.which, compilers)) and " " not in sys.prefix
    if can_compile:
        result = python(TRAIN, *words, cwd=tmp_path)
        assert result.returncode == 0, result.output
        assert "check: 1 rank(s) hold the same bits" in result.stdout
    # Where nothing on the PATH compiles, nothing is found in a cache either.
    (tmp_path / "python").symlink_to(sys.executable)
    bare = clean_environment(PATH=str(tmp_path))
    bare.pop("CXX", None)
    bare["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    result = python(TRAIN, *words, cwd=tmp_path, env=bare)
    assert result.returncode == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("train.py: ") and "C++ compiler" in line


def start(words: list[Any], **options: Any) -> subprocess.Popen[str]:
    """Start a long run in the background and wait until it trains."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*command, TRAIN, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        **options,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 0"):
            return process
    raise AssertionError("the run ended before it began to train")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["ctrl-c", "launcher killed"])
def test_no_rank_outlives_its_launcher(text: Path, ending: str) -> None:
    words = [*TINY, "--batch-size=4", "--max-epochs=1000000", "--text", text]
    launcher = start(words, start_new_session=True)
    assert launcher.stdout is not None
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    try:
        assert len(ranks) == 2
        if ending == "ctrl-c":
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            launcher.kill()
        output = launcher.stdout.read()
        _, alive = psutil.wait_procs(ranks, timeout=45)
        assert alive == []
        assert launcher.wait(timeout=120) != 0
        # The launcher explains itself; our ranks add no traceback of their own. Without
        # a launcher, a rank that has not looked yet may see the other one's end first.
        if ending == "ctrl-c":
            assert 'train.py", line' not in output
    finally:
        launcher.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


@pytest.mark.slow
def test_full_run_of_the_front_page_keeps_its_promise(tmp_path: Path) -> None:
    result = torchrun(TRAIN, nproc=2, cwd=tmp_path, timeout=500)
    assert result.returncode == 0, result.output
    ((before, after),) = re.findall(
        r"(\d\.\d\d) nats per byte before, (\d\.\d\d) after", result.stdout
    )
    assert 5.2 < float(before) < 6.0  # a guess among 256 bytes costs log(256) = 5.55
    assert float(after) < 2.0
    products = re.findall(r"x steps = (.*) different samples", result.stdout)
    assert products == ["64 x 64 = 4096"] * 4
    assert re.search("check: 2 rank.* gradient within .e-0[678] of one", result.stdout)
    assert list(tmp_path.iterdir()) == []


# --- What people get wrong: MYTHS.md points here. ----------


def test_labels_that_copy_the_inputs_teach_nothing(text: Path) -> None:
    data = module("data")
    train_text, _ = data.load_text(text, T)
    inputs, labels = data.WindowDataset(train_text, T, 64).batch(range(64))
    next_byte_loss = {}
    for name, targets in {"next byte": labels, "copy": inputs}.items():
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            model(inputs, targets).backward()
            optimizer.step()
        assert model(inputs, targets) < 1.5  # in both cases it looks like learning
        next_byte_loss[name] = model(inputs, labels).item()
    guess = math.log(256)
    assert next_byte_loss["next byte"] < 1.5
    assert next_byte_loss["copy"] > guess


def weights_after_wrapping() -> tuple[torch.Tensor, torch.Tensor]:
    """Build from a seed of this rank's own, then wrap."""
    torch.manual_seed(dist.get_rank())
    linear = torch.nn.Linear(3, 3)
    before = flat(linear.parameters())
    DistributedDataParallel(linear)
    return before, flat(linear.parameters())


def test_ddp_gives_every_rank_the_weights_of_rank_zero(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(weights_after_wrapping, world_size=3)
    first = results[0][0]
    assert len(results) == 3
    assert not torch.equal(results[1][0], first)
    assert all(torch.equal(after, first) for _, after in results)


def all_reduces_with_no_sync_around(part: str) -> int:
    """Count the all-reduces of one backward pass."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(3, 3))
    noted = note_all_reduces(ddp_model)
    if part == "both":
        with ddp_model.no_sync():
            ddp_model(torch.ones(1, 3)).sum().backward()
    else:
        output = ddp_model(torch.ones(1, 3)).sum()
        with ddp_model.no_sync():
            output.backward()
    return len(noted)


def test_no_sync_around_backward_alone_saves_nothing(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(all_reduces_with_no_sync_around, "both") == [0, 0]
    assert worker_pool.run(all_reduces_with_no_sync_around, "backward") == [1, 1]


def test_torchrun_restarts_nothing_by_default() -> None:
    from torch.distributed.launcher import LaunchConfig
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(["script.py"]).max_restarts == 0
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).max_restarts == 3


@pytest.mark.slow
def test_old_launcher_passes_local_rank_with_a_hyphen(tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    # In one write: the launcher's ranks are unbuffered, and two might mix theirs.
    code = "import os, sys\nline = f\"{sys.argv[1:]} {os.environ['LOCAL_RANK']}\\n\"\n"
    script.write_text(code + "os.write(1, line.encode())\n")
    result = python("-m", "torch.distributed.launch", "--nproc-per-node=2", script)
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.splitlines()) == [
        "['--local-rank=0'] 0",
        "['--local-rank=1'] 1",
    ]


NEVER_ENDING = """
import faulthandler
import sys
import torch
import torch.distributed as dist
import torch.distributed.nn

def step():
    ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    ddp_model(torch.randn(32, 8)).sum().backward()
    return ddp_model

def join_and_leave(store):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    {line}
    print("{said}", flush=True)
    dist.destroy_process_group()

rank, whole = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
for time in range(40):
    faulthandler.dump_traceback_later({limit}, exit=True)
    join_and_leave(dist.PrefixStore(str(time), whole))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "limit", "ends"),
    [
        ("ddp_model = step()", 12, False),
        ("step()", 120, True),
        ("ddp_model = step(); del ddp_model", 120, True),
    ],
)
def test_a_model_that_outlives_its_group_may_never_end(
    tmp_path: Path, line: str, limit: int, ends: bool
) -> None:
    script = tmp_path / "ending.py"
    said = "the last line of the script"
    script.write_text(NEVER_ENDING.format(line=line, limit=limit, said=said))
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda r: python(script, r, tmp_path / "s"), range(2)))
    assert [result.returncode for result in both] == [int(not ends)] * 2
    times = [result.stdout.splitlines().count(said) for result in both]
    assert times == [40, 40] if ends else max(times) < 40
    # The stack of one ends where `join_and_leave` has returned: at its caller.
    stacks = [r.stderr.split("(most recent call first):\n")[-1] for r in both]
    assert ends or any(re.match(".*in <module>", stack) for stack in stacks), stacks


# A reference cycle of the model and its hook, as in a Trainer's method; and the one of
# torch.compile.
HOOKED = "ddp_model.register_forward_hook(ddp_model.train)"
COMPILED = "torch.compile(ddp_model, backend='eager')(torch.ones(1, 2))"
ENDING = """
{early}
import psutil
import torch
import torch.distributed as dist

before = psutil.Process().num_threads()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
torch.optim.AdamW(model.parameters())
ddp_model = torch.nn.parallel.DistributedDataParallel(model)
{late}
dist.destroy_process_group()
print(psutil.Process().num_threads() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("early", "late", "ends"),
    [
        ("", "del ddp_model", False),
        ("import torch.distributed.nn", "", False),
        ("import torch.distributed.nn", "del ddp_model", True),
        ("import torch.distributed.nn", f"{HOOKED}; del ddp_model", False),
        (
            "import gc, torch.distributed.nn",
            f"{HOOKED}; del ddp_model; gc.collect()",
            True,
        ),
        ("import torch.distributed.nn", f"{COMPILED}; del ddp_model", False),
        (
            "import gc, torch.distributed.nn",
            f"{COMPILED}; del ddp_model; gc.collect()",
            True,
        ),
    ],
    ids=[
        *("held by default arguments", "held by DDP", "held by nobody"),
        *("in a cycle with a hook", "collected", "compiled", "compiled, collected"),
    ],
)
def test_a_group_ends_only_with_its_last_reference(
    tmp_path: Path, early: str, late: str, ends: bool
) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING.format(early=early, late=late))
    result = python(script)
    assert result.returncode in (0, -signal.SIGABRT), result.stderr
    assert (int(result.stdout) == 0) is ends
