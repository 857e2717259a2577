"""Chapter 03: a run that was killed ends with the bits of an uninterrupted one."""

import contextlib
import copy
import errno
import inspect
import io
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import ZipFile

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import run as torchrun_module
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerState
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
    StaticTCPRendezvous,
)
from torch.utils.data import DistributedSampler, TensorDataset

from launch import ROOT, clean_environment, python, run
from lessons import run_lesson
from pages import words_of
from scripts import importable, load_chapter
from worker_pool import WorkerPool

PLACE = "03_ddp_torchrun/fault_tolerance"
ROOM = load_chapter(PLACE)
TRAIN, CHECKPOINT, DATA, MODEL, RANKS = (
    ROOM[name] for name in ("train", "checkpoint", "data", "model", "ranks")
)
CRASHES, WORLD_CHANGES = ROOM["crashes"], ROOM["world_changes"]
# Two epochs of 6 steps of 8 samples, with a model that takes milliseconds.
TINY = [
    *("--layers=1", "--width=16", "--heads=2", "--block-size=16", "--samples=48"),
    *("--max-epochs=2", "--dropout=0.1", "--checkpoint-every=2"),
]


class Stop(BaseException):
    """Ends a run in the middle, past every `except Exception`."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a folder") / "text.txt"
    words = random.Random(0).choices(["rank", "ring", "send", "receive", "\n"], k=4000)
    path.write_text(" ".join(words))
    return path


@pytest.fixture(scope="module", autouse=True)
def import_before_forks() -> None:
    """Import what an optimizer imports late, once for all children."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()


def words_for(text: Path, path: Path, ranks: int, *more: str) -> list[str]:
    """Return the command line of a small run whose steps take 8 samples."""
    files = [f"--text={text}", f"--checkpoint={path}"]
    return [*TINY, *files, f"--batch-size={-(-8 // ranks)}", *more]


@contextlib.contextmanager
def on_a_rank(words: list[str], join: Callable[[], Any]) -> Iterator[Any]:
    """Let train.py join the ranks by `join`; yield its options."""
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.object(RANKS, "join", join),
        mock.patch.object(RANKS, "leave"),
        # To write text takes longer than all else, and is no part of the training.
        mock.patch.object(MODEL.GPT, "generate", return_value="text"),
    ):
        yield RANKS.read_options(**TRAIN.OPTIONS)


def train(
    words: list[str],
    stop_after: int | None = None,
    signals: Sequence[tuple[int, int]] = (),
) -> str:
    """Be a rank of the pool, perhaps for some steps only; return what it printed.

    With `signals`, (rank, step), that rank gets SIGUSR1 in the middle of that step.
    """
    output, taken, add_gradients = io.StringIO(), 0, TRAIN.add_gradients

    def count_and_add(*arguments: Any) -> torch.Tensor:
        nonlocal taken
        if taken == stop_after:
            raise Stop
        taken += 1
        if (dist.get_rank(), taken) in signals:
            os.kill(os.getpid(), signal.SIGUSR1)
        return add_gradients(*arguments)

    with (
        on_a_rank(words, lambda: torch.device("cpu")) as options,
        importable(PLACE),  # for workers that load data
        mock.patch.object(TRAIN, "add_gradients", count_and_add),
        contextlib.redirect_stdout(output),
        contextlib.suppress(Stop),
    ):
        TRAIN.main(options)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return output.getvalue()


def content_of(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def values_in(content: Any) -> Iterator[Any]:
    """Yield all that a checkpoint holds, tensors as their bytes."""
    if isinstance(content, torch.Tensor):
        yield content.dtype, content.shape, content.numpy().tobytes()
    elif isinstance(content, dict):
        for name in sorted(content, key=str):
            yield name
            yield from values_in(content[name])
    elif isinstance(content, list | tuple):
        yield len(content)
        for one in content:
            yield from values_in(one)
    else:
        yield content


def all_in(path: Path) -> list[Any]:
    """Return a checkpoint as one list that can be compared, bit for bit."""
    return list(values_in(content_of(path)))


def weights_in(path: Path) -> torch.Tensor:
    """Return all weights of a checkpoint as one tensor."""
    model, _ = CHECKPOINT.load_checkpoint(path)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def steps_resumed_from(output: str) -> list[int]:
    """Return the step that a run says it resumes from, if it says so."""
    found = re.findall(
        r"^checkpoint: resuming from .*, step (\d+), global batch size 8$", output, re.M
    )
    assert len(found) + output.count("checkpoint: none yet\n") == 1
    return [int(step) for step in found]


# --- Bit for bit. ----------

ACCUMULATED = ["--grad-accum-steps=2"]


# Four ranks add up in an order that depends on where a value stands in a bucket; with
# two, a + b is b + a, and that DDP rebuilds its buckets could not be seen.
@pytest.mark.parametrize(
    ("world_size", "more", "stops"),
    [
        (2, [], [1, 6]),
        pytest.param(2, [], [2, 3, 4, 5, 7, 8, 9, 10, 11], marks=pytest.mark.slow),
        pytest.param(2, ["--workers=2"], [3, 7], marks=pytest.mark.slow),
        pytest.param(
            2, [*ACCUMULATED, "--batch-size=2"], [3, 8], marks=pytest.mark.slow
        ),
        pytest.param(4, [], [3, 8], marks=pytest.mark.slow),
        pytest.param(
            *(4, [*ACCUMULATED, "--batch-size=1", "--workers=1"], [7]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "2 ranks",
        "other steps",
        "workers",
        "accumulation",
        "4 ranks",
        "4 ranks, all of it",
    ],
)
def test_run_stopped_anywhere_ends_with_the_same_bits(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    world_size: int,
    more: list[str],
    stops: list[int],
) -> None:
    def run(name: str, stop_after: int | None = None) -> str:
        words = words_for(text, tmp_path / name, world_size, *more)
        args = (words, stop_after)
        return worker_pool.run(train, *args, world_size=world_size)[0]

    run("uninterrupted.pt")
    uninterrupted = all_in(tmp_path / "uninterrupted.pt")
    for stop in stops:
        name = f"{stop}.pt"
        run(name, stop)
        output = run(name)
        # Up to the first checkpoint there is nothing to resume from.
        assert steps_resumed_from(output) == ([stop // 2 * 2] if stop >= 2 else [])
        assert "global batch size x steps = 8 x 6 = 48 different samples" in output
        assert all_in(tmp_path / name) == uninterrupted, stop
    assert len(list(tmp_path.glob("[0-9]*.pt"))) == len(stops) >= 1


def losses_and_weights(words: list[str]) -> tuple[list[str], list[torch.Tensor]]:
    """Train on a rank of the pool; return what it said of losses, and the weights."""
    caught: list[torch.Tensor] = []

    def catch(parameters: Any) -> bool:
        caught.extend(parameter.detach().clone() for parameter in parameters)
        return True

    with mock.patch.object(RANKS, "same_on_all_ranks", catch):
        output = train(words)
    return re.findall(r"^validation.*|.* loss \d.*?(?= \||$)", output, re.M), caught


def test_checkpoints_change_nothing(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    words = words_for(text, tmp_path / "gpt.pt", 2)
    without = [word for word in words if not word.startswith("--checkpoint")]
    assert len(words) - len(without) == 2
    both = [worker_pool.run(losses_and_weights, each) for each in (words, without)]
    assert len(both[0][0][0]) == 9 and len(both[0][0][1]) > 10
    for (told, weights), (told_without, weights_without) in zip(*both, strict=True):
        assert told == told_without
        assert all(map(torch.equal, weights, weights_without))


def test_snapshot_is_another_name_of_the_option(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    options = []
    for name in ("--checkpoint", "--snapshot"):
        with on_a_rank([f"{name}={path}"], mock.Mock()) as read:
            options.append(read)
    assert options[0] == options[1] and options[0].checkpoint == path


# --- What a checkpoint holds. ----------


def without(entry: str, content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint one entry of which is as it was when the run began."""
    content = copy.deepcopy(content)
    training = content["training"]
    torch.manual_seed(0)
    model = MODEL.GPT(MODEL.GPTConfig(**content["config"]))
    at_the_beginning = {
        "optimizer": training["optimizer"] | {"state": {}},
        "schedule": training["schedule"] | {"last_epoch": 0, "_step_count": 1},
        "step": 0,
        "seen": torch.zeros_like(training["seen"]),
        "random": [],
        "settings": {},
    }
    if entry == "model":
        content["model"] = model.state_dict()
    else:
        training[entry] = at_the_beginning[entry]
    return content


@pytest.fixture(scope="module")
def in_the_middle(
    worker_pool: WorkerPool, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[Any]]:
    """Return the checkpoint of step 4 of a run, and all that its last one holds."""
    path = tmp_path_factory.mktemp("middle") / "gpt.pt"
    worker_pool.run(train, words_for(text, path, 2), 5)
    content = content_of(path)
    assert content["training"]["step"] == 4
    worker_pool.run(train, words_for(text, path, 2))
    return content, all_in(path)


def train_or_error(words: list[str]) -> str:
    """Be a rank of the pool; return the error that it ends with, if there is one."""
    try:
        train(words)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "entry",
    [
        *("nothing", "more", "model", "optimizer", "schedule", "step", "seen"),
        *("random", "settings"),
    ],
)
def test_each_entry_of_a_checkpoint_is_needed(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    entry: str,
) -> None:
    content, end = in_the_middle
    path = tmp_path / "gpt.pt"
    if entry == "more":  # written on GPUs, whose random numbers CPUs do not have
        content = copy.deepcopy(content)
        for states in content["training"]["random"]:
            states.append(torch.zeros(16, dtype=torch.uint8))
    elif entry != "nothing":
        content = without(entry, content, path)
    torch.save(content, path)
    if entry == "settings":
        words = words_for(text, path, 2, "--lr=0.1")
        assert worker_pool.run(train_or_error, words) == ["", ""]  # not refused
    else:
        errors = worker_pool.run(train_or_error, words_for(text, path, 2))
        expected = {
            "step": "6 steps of 8 samples saw 80, 48 of them different",
            "seen": "6 steps of 8 samples saw 16, 16 of them different",
        }
        assert errors == [expected.get(entry, "")] * 2
    if entry not in {"step", "seen"}:
        assert (all_in(path) == end) == (entry in {"nothing", "more"})


def test_without_the_global_batch_size_other_ranks_take_other_steps(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
) -> None:
    content = copy.deepcopy(in_the_middle[0])
    # What three ranks with the batch size of the two would have.
    content["training"]["global_batch_size"] = 12
    path = tmp_path / "gpt.pt"
    torch.save(content, path)
    words = words_for(text, path, 2)
    errors = worker_pool.run(train_or_error, words, world_size=3)
    assert errors == ["4 steps of 12 samples saw 80, 48 of them different"] * 3


def train_by_numpy(words: list[str], stop_after: int | None = None) -> str:
    """Be a rank of the pool whose learning rates come from NumPy."""
    factor = TRAIN.lr_factor

    def by_numpy(*given: Any, **named: Any) -> Any:
        return np.float64(factor(*given, **named))

    with mock.patch.object(TRAIN, "lr_factor", by_numpy):
        return train(words, stop_after)


def test_learning_rates_from_numpy_are_saved_as_numbers(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
) -> None:
    words = words_for(text, tmp_path / "gpt.pt", 2)
    worker_pool.run(train_by_numpy, words, 5)
    assert steps_resumed_from(worker_pool.run(train_by_numpy, words)[0]) == [4]
    assert all_in(tmp_path / "gpt.pt") == in_the_middle[1]


def test_numbers_of_numpy_can_stand_anywhere_in_a_checkpoint(tmp_path: Path) -> None:
    given: Any = {"lr": np.float32(0.5), "betas": (np.float64(0.5), 0.75)}
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], **given)
    steps: Any = np.array([2, 2, 5])
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps)
    content = {
        "optimizer": optimizer.state_dict(),
        "schedule": milestones.state_dict(),
        "validation_loss": np.mean([1.0, 2.0]),
        "settings": {"amp": np.bool_(True), "text": None},
    }
    CHECKPOINT.write_whole(tmp_path / "a.pt", CHECKPOINT.gathered(content))
    read = content_of(tmp_path / "a.pt")
    assert read == content and type(read["validation_loss"]) is float
    assert read["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.75)
    # MultiStepLR needs more of it than a dict has.
    assert sorted(read["schedule"]["milestones"].elements()) == [2, 2, 5]


class Normalised(torch.nn.Module):
    """BatchNorm, which refuses to learn from one value, and a part in eval()."""

    def __init__(self) -> None:
        """Begin alike on all ranks."""
        super().__init__()
        self.norm, self.frozen = torch.nn.BatchNorm1d(1), torch.nn.Dropout().eval()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a loss; both are (B, 1)."""
        return (self.frozen(self.norm(inputs)) - labels).square().mean()


def traces_of_settling() -> tuple[int, list[bool], list[Any]]:
    """Let DDP arrange its buckets by one sample; return what that has changed.

    It is BatchNorm's count of batches, all modes, and the gradients.
    """
    model = torch.nn.parallel.DistributedDataParallel(Normalised())
    CHECKPOINT.settle_buckets(model, torch.ones(1, 1), torch.zeros(1, 1))
    modes = [module.training for module in model.modules()]
    gradients = [p.grad for p in model.parameters()]
    return int(model.module.norm.num_batches_tracked), modes, gradients


def test_arranging_buckets_leaves_no_trace_in_the_model(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(traces_of_settling, world_size=2)
    assert by_rank == [(0, [True, True, True, False], [None, None])] * 2


def memory_of_start(path: Path) -> tuple[int, int]:
    """Return how many entries a rank holds before and after it has taken them over."""
    run, start = mock.Mock(), CHECKPOINT.Start(8, 4, path, content_of(path))
    run.options.checkpoint, run.tally.seen = path, torch.zeros(48, dtype=torch.int32)
    run.tally.sampler.group = None
    run.model, _ = CHECKPOINT.load_checkpoint(path)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    before = len(start.content)
    CHECKPOINT.TrainingState.restore(run, start)
    return before, len(start.content)


def test_checkpoint_does_not_stay_in_memory(
    worker_pool: WorkerPool,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
) -> None:
    torch.save(in_the_middle[0], tmp_path / "gpt.pt")
    assert worker_pool.run(memory_of_start, tmp_path / "gpt.pt") == [(5, 0)] * 2


# --- Killed by a signal, at known moments of a write and at random ones. ----------


def in_child(function: Callable[..., object], *arguments: Any) -> int:
    """Fork, run `function` in the child, return how the child ended."""
    return os.waitpid(fork(function, *arguments), 0)[1]


def fork(function: Callable[..., object], *arguments: Any) -> int:
    """Call `function` in a new process, which ends with status 1 if it raises."""
    if child := os.fork():
        return child
    with contextlib.suppress(BaseException):
        torch.set_num_threads(1)
        function(*arguments)
        os._exit(0)
    os._exit(1)


def join_alone() -> torch.device:
    """Be a world of one rank, with no launcher."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cpu")


def train_alone(words: list[str], output: Path | None = None) -> None:
    """Train as a world of one rank; write down what it says."""
    with (
        mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}),
        on_a_rank(words, join_alone) as options,
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        TRAIN.main(options)
    if output is not None:
        output.write_text(said.getvalue())


def kill_me(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_save(content: Any, file: Any) -> None:
    """Write half of a checkpoint's bytes; then be killed."""
    whole = io.BytesIO()
    torch.serialization.save(content, whole)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    kill_me()


# By the name of a moment: whose attribute is called then, and what kills a run there.
MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "step": (TRAIN, "add_gradients", kill_me),
    "gathering": (CHECKPOINT, "gather", kill_me),
    "before the first byte": (torch, "save", kill_me),
    "in the middle": (torch, "save", half_a_save),
    "before the bytes are on the disk": (os, "fsync", kill_me),
    "rename": (os, "replace", kill_me),
}


def train_until_killed(words: list[str], moment: str, call: int) -> None:
    """Train as a world of one rank, to be killed at the n-th call of something."""
    owner, name, kill = MOMENTS[moment]
    function, calls = getattr(owner, name), 0

    def count(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += not keywords  # torch pickles a tensor by torch.save, with a keyword
        return (kill if calls == call else function)(*arguments, **keywords)

    with mock.patch.object(owner, name, count):
        train_alone(words)


# Each with the step that is resumed from. Checkpoints are written after steps 2, 4, 6
# and so on. The first takes one rename, the others two: the newest becomes the one
# before it, and the new one the newest. Before the third there is no newest at all.
@pytest.mark.parametrize(
    ("moment", "call", "resumed_from"),
    [
        ("step", 7, [6]),
        ("gathering", 6, [4]),
        ("before the first byte", 3, [4]),
        *(("in the middle", 1, []), ("in the middle", 5, [8])),
        ("before the bytes are on the disk", 2, [2]),
        *(("rename", 1, []), ("rename", 4, [4]), ("rename", 5, [4])),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("step", 1, []), ("gathering", 2, [])),
                *(("before the first byte", 1, []), ("in the middle", 2, [2])),
                ("before the bytes are on the disk", 1, []),
                *(("rename", 2, [2]), ("rename", 3, [2])),
            )
        ),
    ],
)
def test_run_killed_in_mid_write_ends_with_the_same_bits(
    uninterrupted: list[Any],
    text: Path,
    tmp_path: Path,
    moment: str,
    call: int,
    resumed_from: list[int],
) -> None:
    path, said = tmp_path / "gpt.pt", tmp_path / "said"
    words = words_for(text, path, 1)
    end = in_child(train_until_killed, words, moment, call)
    assert os.WTERMSIG(end) == signal.SIGKILL
    assert in_child(train_alone, words, said) == 0
    assert steps_resumed_from(said.read_text()) == resumed_from
    assert all_in(path) == uninterrupted
    names = {one.name for one in tmp_path.glob("gpt.pt*")}
    assert names == {"gpt.pt", "gpt.pt.previous"}


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return all that the last checkpoint of a world of one rank holds."""
    path = tmp_path_factory.mktemp("uninterrupted") / "gpt.pt"
    assert in_child(train_alone, words_for(text, path, 1)) == 0
    return all_in(path)


def be_launcher(words: list[str], pipe: int) -> None:
    """Start two ranks, as torchrun does; end the other when one has ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [fork(be_rank, words, rank, store.port, pipe) for rank in (0, 1)]
    _, status = os.wait()
    if status:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        os._exit(1)
    assert os.wait()[1] == 0


def be_rank(words: list[str], rank: int, port: int, pipe: int) -> None:
    """Be one of two ranks, by the real `join`; rank 0 writes a byte at each step."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    add_gradients = TRAIN.add_gradients

    def tell_and_add(*arguments: Any) -> torch.Tensor:
        if rank == 0:
            os.write(pipe, b".")
        return add_gradients(*arguments)

    with (
        on_a_rank(words, RANKS.join) as options,
        mock.patch.object(TRAIN, "add_gradients", tell_and_add),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        TRAIN.main(options)


def kill_one(words: list[str], victim: int, steps: int, wait: float) -> bool:
    """Start a run; kill rank `victim`, or with 2 the launcher.

    This is done a moment after the beginning of a step, so within one or in a write.

    Returns whether it still ran.
    """
    at_parent, at_child = os.pipe()
    launcher = fork(be_launcher, words, at_child)
    os.close(at_child)
    with open(at_parent, "rb") as pipe:
        taken = pipe.read(steps)  # fewer, if the run ends before
        processes = psutil.Process(launcher).children()
        time.sleep(wait)
        try:
            pids = [process.pid for process in processes] + [launcher]
            os.kill(pids[victim], signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            taken = b""
        _, status = os.waitpid(launcher, 0)
    # A rank whose launcher has been killed ends by itself.
    assert psutil.wait_procs(processes, timeout=45)[1] == []
    return len(taken) == steps and status != 0


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_run_killed_at_random_again_and_again_ends_with_the_same_bits(
    worker_pool: WorkerPool, text: Path, tmp_path: Path, kills: int
) -> None:
    def words(name: str) -> list[str]:
        more = ["--checkpoint-every=1", f"--max-epochs={3 * kills}"]
        return words_for(text, tmp_path / name, 2, *more)

    worker_pool.run(train, words("uninterrupted.pt"))
    path, found, in_a_write = tmp_path / "killed.pt", [0], 0
    for kill in range(kills):
        wait = random.uniform(0, 0.03)
        # Rank 0 writes; 2 is the launcher.
        assert kill_one(words("killed.pt"), (0, 2, 1, 0)[kill % 4], 4, wait)
        in_a_write += path.with_name("killed.pt.tmp").exists()
        whole = [one for one in (path, CHECKPOINT.previous(path)) if one.exists()]
        found.append(content_of(whole[0])["training"]["step"] if whole else 0)
    assert found == sorted(found) and found[-1] > kills
    print(f"{kills} kills, {in_a_write} in a write; resumed from steps {found}")
    assert in_a_write > 0 or kills < 40
    nowhere = os.open(os.devnull, os.O_WRONLY)
    assert in_child(be_launcher, words("killed.pt"), nowhere) == 0
    assert all_in(path) == all_in(tmp_path / "uninterrupted.pt")


# --- A signal before the time limit. ----------


# A rank that gets the signal in a step tells the others after it, and they stop after
# the next. Whoever gets it in the last step trains to the end.
@pytest.mark.parametrize(
    ("signals", "stopped_after"),
    [
        ([(0, 4)], 5),
        ([(1, 4), (0, 5)], 5),
        ([(1, 11)], 12),
        ([(0, 12)], None),
    ],
    ids=["one rank", "one rank a step earlier", "last step", "too late"],
)
def test_signal_to_any_rank_stops_all_after_the_same_step(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    signals: list[tuple[int, int]],
    stopped_after: int | None,
) -> None:
    path, marker = tmp_path / "gpt.pt", tmp_path / "gpt.pt.requeue"
    words = words_for(text, path, 2)
    marker.touch()  # of a run before
    output, silence = worker_pool.run(train, words, None, signals)
    assert silence == ""
    said = re.findall(r"^checkpoint: stopped by .*", output, re.M)
    if stopped_after is None:
        assert said == [] and not marker.exists() and "validation" in output
    else:
        line = f"checkpoint: stopped by a signal after step {stopped_after}"
        assert said == [f"{line}; see {marker}"] and output.endswith(f"{said[0]}\n")
        assert marker.exists() and "validation" not in output
        assert content_of(path)["training"]["step"] == stopped_after
        output = worker_pool.run(train, words)[0]
        assert steps_resumed_from(output) == [stopped_after]
        assert not marker.exists()
    assert all_in(path) == in_the_middle[1]


def is_written_when_this_rank_leaves(words: list[str], path: Path) -> bool:
    """Stop after two steps; a checkpoint takes its time."""
    write_whole = CHECKPOINT.write_whole

    def write_slowly(*arguments: Any) -> None:
        time.sleep(0.3)
        write_whole(*arguments)

    with mock.patch.object(CHECKPOINT, "write_whole", write_slowly):
        train(words, None, [(0, 1)])
    return path.exists() and CHECKPOINT.requeue_marker(path).exists()


def test_no_rank_leaves_before_the_last_checkpoint_is_written(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gpt.pt"
    words = words_for(text, path, 2)
    written = worker_pool.run(is_written_when_this_rank_leaves, words, path)
    assert written == [True, True]


def agree(noted: list[int], backend: str) -> tuple[int, bool]:
    """Ask five times, as after five steps; return how often all went on, and the end.

    A rank notes the signal before the call with its number in `noted`.
    """
    with mock.patch.object(dist, "get_backend", return_value=backend):
        stop = CHECKPOINT.StopSignal()
    assert (stop.group is None) is (backend == "gloo")
    try:
        for call in range(5):
            if call == noted[dist.get_rank()]:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop.is_agreed():
                return call, True
        return 5, False
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def signals_noted_at_the_start() -> list[int]:
    """Get the signal while the server of the data loaders' workers starts."""
    start = mock.Mock(side_effect=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        with mock.patch.object(CHECKPOINT.forkserver, "ensure_running", start):
            noted = CHECKPOINT.StopSignal(has_workers=True).noted
        assert start.call_count == 1
        return noted
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


# PyTorch gives forked workers a handler of SIGTERM, and the start of Python's resource
# tracker unblocks it.
BY_SIGTERM = f"""
import multiprocessing, os, signal, sys
sys.path.insert(0, {str(ROOT / PLACE)!r})
import torch.distributed as dist
from torch.utils.data import DataLoader
from checkpoint import StopSignal

def ignore(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stop = StopSignal(signal.SIGTERM, has_workers=True)
for init, patience in ((None, 60), (ignore, 1)):
    words = dict(multiprocessing_context="fork", worker_init_fn=init)
    batches = iter(DataLoader(range(9), num_workers=1, **words))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # of a dead worker it would raise
    next(batches)
    worker = batches._workers[0]
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(patience)
    print("lives" if worker.exitcode is None else "is dead")
    worker.kill()
one = multiprocessing.get_context("forkserver").Process(
    target=signal.raise_signal, args=(signal.SIGTERM,)
)
one.start()
one.join()
print(one.exitcode, flush=True)
os._exit(0)
"""


def test_only_blocked_or_ignored_sigterm_spares_workers() -> None:
    result = python("-c", BY_SIGTERM)
    assert result.stdout == "is dead\nlives\n0\n", result.output


BY_SIGUSR1 = """
import os, signal
from torch.utils.data import DataLoader

signal.signal(signal.SIGUSR1, lambda *_: None)
for way, patience in (("fork", 1), ("forkserver", 60)):
    batches = iter(DataLoader(range(9), num_workers=1, multiprocessing_context=way))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # of a dead worker it would raise
    next(batches)
    worker = batches._workers[0]
    os.kill(worker.pid, signal.SIGUSR1)
    worker.join(patience)
    print("lives" if worker.exitcode is None else "is dead", flush=True)
    worker.kill()
os._exit(0)
"""


def test_a_noted_signal_kills_workers_that_are_not_forked() -> None:
    result = python("-c", BY_SIGUSR1)
    assert result.stdout == "lives\nis dead\n", result.output
    page = words_of(PLACE)
    assert "(forked workers note it too, [others die]" in page


OF_IGNORING_WORKERS = """
import signal, sys
from torch.utils.data import DataLoader

def ignore(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def train(loader):
    try:
        for _ in loader:
            raise ValueError("a fault of the loop")
    finally:
        if "train" in sys.argv:
            del loader

def main():
    words = dict(multiprocessing_context="fork", worker_init_fn=ignore)
    loader = DataLoader(range(9), num_workers=1, persistent_workers=True, **words)
    try:
        train(loader)
    finally:
        if "main" in sys.argv:
            del loader

main()
"""


@pytest.mark.parametrize(
    ("where", "ends"), [(["train", "main"], True), (["main"], False)]
)
def test_a_rank_that_fails_waits_for_workers_that_ignore_sigterm(
    where: list[str], ends: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OF_IGNORING_WORKERS, *where]
    with open(tmp_path / "said", "w+") as said:
        one = subprocess.Popen(command, stderr=said, start_new_session=True)
        try:
            give_up = time.monotonic() + 60
            while "a fault of the loop" not in (tmp_path / "said").read_text():
                assert time.monotonic() < give_up
                time.sleep(0.05)
            if ends:
                assert one.wait(60) == 1
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    one.wait(3)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


# torchrun sends SIGUSR1 to the tracker too, which ignores SIGTERM and SIGINT alone.
TO_THE_TRACKER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT / PLACE)!r})
import torch.distributed as dist
from checkpoint import StopSignal, resource_tracker

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stop = StopSignal(has_workers=True)
tracker = resource_tracker._resource_tracker._pid
os.kill(tracker, signal.SIGUSR1)
time.sleep(0.5)
print(os.waitpid(tracker, os.WNOHANG)[0], flush=True)
"""


def test_the_signal_spares_python_s_resource_tracker() -> None:
    result = python("-c", TO_THE_TRACKER)
    assert result.stdout == "0\n", result.output


def test_signal_at_the_start_is_not_lost(worker_pool: WorkerPool) -> None:
    noted = worker_pool.run(signals_noted_at_the_start)
    assert noted == [[signal.SIGUSR1]] * 2


# Beside NCCL, which knows GPUs alone, the ranks agree in a group of gloo.
@pytest.mark.parametrize(
    ("noted", "backend", "answer"),
    [
        ([9, 9, 9], "gloo", (5, False)),
        ([9, 2, 9], "gloo", (3, True)),
        ([3, 2, 1], "gloo", (2, True)),
        ([9, 9, 0], "nccl", (1, True)),
    ],
)
def test_ranks_agree_one_step_after_the_first_signal(
    worker_pool: WorkerPool, noted: list[int], backend: str, answer: tuple[int, bool]
) -> None:
    assert worker_pool.run(agree, noted, backend, world_size=3) == [answer] * 3


# train.py, a tenth of a second slower in each step.
SLOW_TRAIN = f"""
import sys, time
sys.path.insert(0, {str(ROOT / PLACE)!r})
import ranks, train
add_gradients = train.add_gradients
def slowly(*arguments):
    time.sleep(0.1)
    return add_gradients(*arguments)
train.add_gradients = slowly
if __name__ == "__main__":
    ranks.start_ranks(train.main, 1, ranks.read_options(**train.OPTIONS))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_forwarded", [True, False])
def test_signal_to_torchrun_stops_a_run_that_resumes_alike(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    is_forwarded: bool,
) -> None:
    path, package = tmp_path / "gpt.pt", tmp_path / "package"
    # A process that loads data is of torchrun's process group, and gets the signal too.
    words = [*words_for(text, path, 2), "--workers=1"]
    package.mkdir()
    (package / "slow_train.py").write_text(SLOW_TRAIN)
    handled = "SIGTERM,SIGINT,SIGHUP,SIGQUIT" + ",SIGUSR1" * is_forwarded
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2", f"--signals-to-handle={handled}"]
    torchrun = subprocess.Popen(
        [*launcher, "-m", "package.slow_train", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
    )
    started: list[psutil.Process] = []
    try:
        give_up = time.monotonic() + 60
        while not path.exists() and time.monotonic() < give_up:
            time.sleep(0.02)
        started = psutil.Process(torchrun.pid).children(recursive=True)
        # Of each rank: itself, Python's resource tracker, the server, and its worker.
        assert len(started) == 2 * 4
        torchrun.send_signal(signal.SIGUSR1)
        torchrun.wait(timeout=60)
        # Nothing waits for ranks whose torchrun is dead, but they end by themselves.
        assert psutil.wait_procs(started, timeout=45)[1] == []
        output = torchrun.communicate(timeout=10)[0]
    finally:
        for one in [*started, torchrun]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        torchrun.communicate()
    marker = tmp_path / "gpt.pt.requeue"
    assert marker.exists() is is_forwarded
    if not is_forwarded:
        assert torchrun.returncode == -signal.SIGUSR1
        return
    # The status would be the same if a rank had failed: hence the marker.
    assert torchrun.returncode == 1, output
    (step,) = re.findall(
        r"^checkpoint: stopped by a signal after step (\d+)", output, re.M
    )
    assert 2 < int(step) < 12 and content_of(path)["training"]["step"] == int(step)
    assert steps_resumed_from(worker_pool.run(train, words)[0]) == [int(step)]
    assert all_in(path) == in_the_middle[1] and not marker.exists()


# What the job script calls in the place of Slurm's.
SRUN = """#!/bin/sh
[ -e run.pt.requeue ] && echo stale
echo started
$ENDING
"""
SCONTROL = """#!/bin/sh
[ "$1" = requeue ] && echo "scontrol $@" || echo localhost
"""


@pytest.mark.parametrize(
    "words",
    [["--checkpoint=run.pt"], ["--checkpoint", "run.pt"], ["--snapshot=run.pt"]],
)
@pytest.mark.parametrize(
    ("ending", "is_requeued", "status"),
    [
        ("touch run.pt.requeue; exit 1", True, 0),
        ("exit 0", False, 0),
        ("exit 3", False, 3),
    ],
    ids=["signal", "done", "failed"],
)
def test_job_script_requeues_only_a_run_that_left_its_marker(
    tmp_path: Path, words: list[str], ending: str, is_requeued: bool, status: int
) -> None:
    script = (ROOT / PLACE).parent / "cluster" / "slurm.sbatch"
    stand_ins = {"srun": SRUN.replace("$ENDING", ending), "scontrol": SCONTROL}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    marker = tmp_path / "run.pt.requeue"
    marker.touch()  # of a run before
    environment = clean_environment(
        SLURM_JOB_ID="7", SLURM_JOB_NODELIST="localhost", SLURM_CPUS_PER_TASK="2"
    )
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    command = ["bash", script, "train.py", *words]
    result = run(command, cwd=tmp_path, env=environment)
    assert result.returncode == status, result.output
    assert result.stdout.splitlines() == [
        "started",
        *["scontrol requeue 7"] * is_requeued,
    ]
    # The file of minimal_resumable.py, which has no such option.
    (tmp_path / "srun").write_text("#!/bin/sh\ntouch resumable.pt.requeue\n")
    again = run(["bash", script, "minimal_resumable.py"], cwd=tmp_path, env=environment)
    assert again.stdout == "scontrol requeue 7\n" and again.returncode == 0
    (tmp_path / "srun").write_text(stand_ins["srun"])
    # Without a checkpoint nothing can have been saved.
    marker.unlink(missing_ok=True)
    plain = run(["bash", script, "train.py"], cwd=tmp_path, env=environment)
    assert plain.returncode == (1 if is_requeued else status), plain.output
    assert plain.stdout == "started\n"
    for line in ("--requeue", "--signal=USR1@120", "--open-mode=append"):
        assert f"\n#SBATCH {line}\n" in script.read_text()


def test_old_launcher_with_use_env_adds_no_words(tmp_path: Path) -> None:
    script = tmp_path / "words.py"
    # In one write: the launcher's ranks are unbuffered, and two might mix theirs.
    code = "import os, sys\nline = f\"{sys.argv[1:]} {os.environ['LOCAL_RANK']}\\n\"\n"
    script.write_text(code + "os.write(1, line.encode())\n")
    launcher = ["-m", "torch.distributed.launch", "--use-env", "--nproc-per-node=2"]
    result = run([sys.executable, *launcher, script, "--mine"])
    assert result.returncode == 0, result.output
    lines = [f"['--mine'] {rank}" for rank in (0, 1)]
    assert sorted(result.stdout.splitlines()) == lines


# --- Who takes which sample: on any number of ranks, from any step. ----------


def sampled(
    samples: int, global_batch_size: int, batch_size: int, start: tuple[int, int]
) -> list[list[int]]:
    """Return the micro-batches of this rank, from a step to the end of its epoch."""
    sampler = DATA.StepSampler(samples, global_batch_size, batch_size, seed=5)
    sampler.start_at(*start)
    return list(sampler)


def sampled_by_torch(samples: int, batch_size: int, epoch: int) -> list[list[int]]:
    """Return what `DistributedSampler` assigns to this rank."""
    dataset = TensorDataset(torch.zeros(samples))
    sampler = DistributedSampler(dataset, seed=5, drop_last=True)
    sampler.set_epoch(epoch)
    mine = list(sampler)
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_are_those_of_distributed_sampler(
    worker_pool: WorkerPool, world_size: int
) -> None:
    for epoch in (0, 3):
        args = (48, 4 * world_size, 4, (epoch, 0))
        ours = worker_pool.run(sampled, *args, world_size=world_size)
        args = (48, 4, epoch)
        theirs = worker_pool.run(sampled_by_torch, *args, world_size=world_size)
        assert len(ours) == world_size and len(ours[0]) == 12 // world_size
        assert ours == theirs


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_keeps_its_samples_on_any_number_of_ranks(
    worker_pool: WorkerPool, world_size: int
) -> None:
    args = (40, 10, 10, (1, 0))
    (alone,) = worker_pool.run(sampled, *args, world_size=1)
    args = (40, 10, 3, (1, 0))
    by_rank = worker_pool.run(sampled, *args, world_size=world_size)
    assert len(alone) == 4 and len(by_rank) == world_size
    assert len({len(batches) for batches in by_rank}) == 1  # FSDP would hang else
    found, sizes = [], []
    for step in range(4):
        everything = []
        for batches in by_rank:
            count = len(batches) // 4
            mine = batches[step * count : (step + 1) * count]
            sizes += [len(batch) for batch in mine]
            everything += [index for batch in mine for index in batch]
        found.append(sorted(everything))
    assert found == [sorted(batch) for batch in alone]
    assert sum(sizes) == 40 and set(sizes) <= {1, 2, 3}
    # Of one sample at most: no rank may have a micro-batch more, or an empty one.
    by_rank = worker_pool.run(sampled, 40, 10, 1, (1, 0), world_size=world_size)
    assert {len(batches) for batches in by_rank} == {4 * (10 // world_size)}
    assert sorted(i for b in by_rank for batch in b for i in batch) == list(range(40))
    assert all(batch for batches in by_rank for batch in batches)


def test_sampler_begins_at_any_step(worker_pool: WorkerPool) -> None:
    whole = worker_pool.run(sampled, 42, 8, 2, (1, 0))
    # Two micro-batches of 2 samples each in a step; two samples are left out.
    assert [len(batches) for batches in whole] == [5 * 2] * 2
    for step in range(5):
        rest = worker_pool.run(sampled, 42, 8, 2, (1, step))
        assert rest == [batches[2 * step :] for batches in whole]
    assert worker_pool.run(sampled, 42, 8, 2, (2, 0)) != whole


def test_membership_changes_and_the_steps_stay_the_same(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    def words(name: str) -> list[str]:
        options = words_for(text, tmp_path / name, 2)
        return [one for one in options if "dropout" not in one]

    worker_pool.run(train, words("uninterrupted.pt"), world_size=2)
    # 8 samples over 3 ranks are 3, 3 and 2.
    for ranks, stop, step in ((2, 3, []), (3, 4, [2]), (1, 3, [6]), (4, None, [8])):
        outputs = worker_pool.run(train, words("a.pt"), stop, world_size=ranks)
        assert steps_resumed_from(outputs[0]) == step
    counted = "epoch 1 | global batch size x steps = 8 x 6 = 48 different samples"
    assert counted in outputs[0]
    same, changed = (
        weights_in(tmp_path / "uninterrupted.pt"),
        weights_in(tmp_path / "a.pt"),
    )
    # The same sums in another order, passed twelve times through AdamW, which divides
    # small gradients by themselves; a wrong weight of a shard is off by far more.
    assert not torch.equal(same, changed)
    assert (same - changed).abs().max() < 2e-4
    told = [
        content_of(tmp_path / name)["validation_loss"]
        for name in ("uninterrupted.pt", "a.pt")
    ]
    assert told[0] == pytest.approx(told[1], abs=1e-4)


def end_of_epoch(by_rank: list[list[int]]) -> str:
    """End an epoch in which each rank has seen some samples; return what is said."""
    sampler = DATA.StepSampler(8, 4, 2, seed=0)
    tally = DATA.Tally(range(8), sampler)
    tally.seen += torch.tensor(by_rank[dist.get_rank()])
    tally.sums = [torch.ones(()), torch.ones(())]
    try:
        return tally.end(2)[-1]
    except RuntimeError as error:
        return str(error)


def test_a_sample_lost_or_counted_twice_is_found(worker_pool: WorkerPool) -> None:
    sound = [[1, 0, 1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1]]
    lost = [sound[0], [0] * 8]
    twice = [sound[0], [1, 1, 0, 1, 0, 1, 0, 0]]
    said = [worker_pool.run(end_of_epoch, one) for one in (sound, lost, twice)]
    assert said[0] == ["global batch size x steps = 4 x 2 = 8 different samples"] * 2
    assert said[1] == ["2 steps of 4 samples saw 4, 4 of them different"] * 2
    assert said[2] == ["2 steps of 4 samples saw 8, 7 of them different"] * 2


def complaint_of_steps(steps: list[int]) -> str:
    """Agree on the step of this rank; return what is said if that cannot be."""
    errors = io.StringIO()
    with (
        mock.patch.object(RANKS.time, "sleep"),
        mock.patch.object(sys, "argv", ["train.py"]),
        contextlib.redirect_stderr(errors),
        contextlib.suppress(SystemExit),
    ):
        CHECKPOINT.agree_on_step(steps[dist.get_rank()])
    return errors.getvalue()


def test_ranks_that_find_different_checkpoints_stop(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(complaint_of_steps, [4, 4]) == ["", ""]
    said = worker_pool.run(complaint_of_steps, [4, 0])
    line = (
        "train.py: the ranks find checkpoints of steps [4, 0]: --checkpoint must name "
        "a file that all machines share\n"
    )
    assert said == [line, line]


def step_to_agree_on(words: list[str]) -> int:
    """Begin a run whose ranks do not agree; return the step that this one names."""
    agree = mock.Mock(side_effect=Stop)
    with mock.patch.object(CHECKPOINT, "agree_on_step", agree):
        train(words)
    return agree.call_args.args[0]


def test_each_rank_names_the_step_of_its_own_checkpoint(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
) -> None:
    path = tmp_path / "gpt.pt"
    torch.save(in_the_middle[0], path)
    assert worker_pool.run(step_to_agree_on, words_for(text, path, 2)) == [4, 4]


# --- Damaged, foreign and other bad input: one line, status 2. ----------


def complaint(words: list[str], world_size: int = 1) -> str:
    """Start train.py up to its refusal; return the one line that it printed."""
    errors = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": str(world_size)}),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as stopped,
        on_a_rank(words, mock.Mock(side_effect=AssertionError)) as options,
    ):
        inspect.unwrap(TRAIN.main)(options)
    assert stopped.value.code == 2
    line, end = errors.getvalue().split("\n", 1)
    assert end == "" and line.startswith("train.py: ")
    return line.removeprefix("train.py: ")


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    with ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    middle = largest.header_offset + largest.file_size // 2
    flipped = bytes([whole[middle] ^ 1])
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "other": b"x" * 99,
            "one bit": whole[:middle] + flipped + whole[middle + 1 :],
        }[how]
    )


@pytest.mark.parametrize("how", ["cut", "empty", "other", "one bit"])
def test_damaged_newest_checkpoint_makes_way_for_the_one_before(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    how: str,
) -> None:
    path = tmp_path / "gpt.pt"
    words = words_for(text, path, 2)
    worker_pool.run(train, words, 8)
    damage(path, how)
    output, silence = worker_pool.run(train, words)
    damaged = f"checkpoint: {path} is damaged and now called {path}.damaged\n"
    resuming = f"resuming from {path}.previous, step 6, global batch size 8\n"
    assert f"{damaged}checkpoint: {resuming}" in output and silence == ""
    assert all_in(path) == in_the_middle[1]
    assert {one.name for one in tmp_path.glob("*")} == {
        *("gpt.pt", "gpt.pt.previous", "gpt.pt.damaged")
    }


def test_what_cannot_be_resumed_is_refused(
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
) -> None:
    path = tmp_path / "gpt.pt"
    words = words_for(text, path, 1)
    path.write_bytes(b"no checkpoint")
    way_out = "damaged, or no checkpoint; move it away to train from the beginning"
    assert complaint(words) == f"{path}: {way_out}"
    (tmp_path / "gpt.pt.previous").write_bytes(b"")
    assert complaint(words) == f"{path} and {path}.previous: {way_out}"
    assert path.read_bytes() == b"no checkpoint"  # nothing was moved or written
    weights_alone = {k: v for k, v in in_the_middle[0].items() if k != "training"}
    torch.save(weights_alone, path)
    assert complaint(words) == (
        f"{path} holds weights alone, which is too little to resume; give --checkpoint "
        "another name"
    )
    torch.save({"model": {}}, path)
    assert complaint(words) == f"{path} and {path}.previous: {way_out}"
    torch.save(in_the_middle[0], path)
    assert complaint([*words, "--batch-size=4"], 9) == (
        "9 rank(s) with a global batch size of 8, and an epoch of 48 samples: use "
        "fewer ranks or a smaller --batch-size"
    )


def test_path_that_cannot_be_written_is_refused(text: Path, tmp_path: Path) -> None:
    words = [*TINY, f"--text={text}"]
    missing = "--checkpoint=missing/gpt.pt"
    assert complaint([*words, missing]) == f"{missing}: there is no folder missing"
    folder = f"--checkpoint={tmp_path}"
    assert complaint([*words, folder]) == f"{folder} is a folder; name a file in it"
    with mock.patch.object(os, "access", return_value=False):
        path = f"--checkpoint={tmp_path / 'gpt.pt'}"
        assert complaint([*words, path]) == f"{path}: cannot write in {tmp_path}"
    assert complaint(["--checkpoint-every=0"]) == (
        "argument --checkpoint-every/--checkpoint_every: '0' is no number from 1 to "
        "1000000000"
    )


class FullDisk(io.FileIO):
    """A file on a disk with room for ten thousand bytes."""

    def write(self, data: Any) -> int:
        """Write, or say that there is no space left."""
        if self.tell() + len(data) > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


# Where a disk can turn out to be full, and as what that arrives.
@pytest.mark.parametrize(
    ("owner", "name", "stand_in", "error"),
    [
        (CHECKPOINT, "open", FullDisk, RuntimeError),  # of torch.save
        (os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")), OSError),
    ],
    ids=["writing", "fsync"],
)
def test_disk_that_is_full_leaves_both_checkpoints(
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    owner: Any,
    name: str,
    stand_in: Any,
    error: type[Exception],
) -> None:
    path = tmp_path / "gpt.pt"
    for step in (2, 4):
        CHECKPOINT.write_whole(path, {"step": step})
    with mock.patch.object(owner, name, stand_in, create=True), pytest.raises(error):
        CHECKPOINT.write_whole(path, in_the_middle[0])
    assert content_of(path) == {"step": 4}
    assert content_of(CHECKPOINT.previous(path)) == {"step": 2}
    # What was written in vain must not keep the disk full.
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), MemoryError("no memory")]
)
def test_checkpoint_that_cannot_be_read_now_does_not_count_as_damaged(
    tmp_path: Path, in_the_middle: tuple[dict[str, Any], list[Any]], error: Exception
) -> None:
    path = tmp_path / "gpt.pt"
    CHECKPOINT.write_whole(path, in_the_middle[0])
    for owner, name in ((ZipFile, "testzip"), (torch, "load")):
        with (
            mock.patch.object(owner, name, side_effect=error),
            pytest.raises(type(error)),
        ):
            CHECKPOINT.load_checkpoint(path)
        # By this error a damaged archive can end a look at a place that it has not.
        invalid = OSError(errno.EINVAL, "Invalid argument")
        with (
            mock.patch.object(owner, name, side_effect=invalid),
            pytest.raises(ValueError, match="is damaged"),
        ):
            CHECKPOINT.load_checkpoint(path)


@pytest.mark.parametrize(
    ("shared", "restarts", "is_refused"),
    [("True", "3", True), ("True", "0", False), ("False", "3", False)],
)
def test_restarts_that_would_meet_dead_ranks_are_refused(
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared: str,
    restarts: str,
    is_refused: bool,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    if not is_refused:
        CHECKPOINT.check_restarts()
        return
    assert complaint([*TINY, f"--text={text}"]) == (
        "ranks that are started again would find the addresses of dead ones; first "
        "type: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun "
        "--rdzv-backend=c10d in place of --master-port"
    )
    # If torch has changed this, the script need not refuse any more.
    source = inspect.getsource(DynamicRendezvousHandler.next_rendezvous)
    assert "self._bootstrap_store_info is None or" in source


def test_static_rendezvous_needs_more_than_the_variable_to_restart_ranks(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    static = StaticTCPRendezvous("localhost", 0, 0, 1, "job", 1)
    c10d = DynamicRendezvousHandler.__new__(DynamicRendezvousHandler)
    # What the agent tells its ranks.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(static.use_agent_store))
    assert "--rdzv-backend=c10d" in complaint([*TINY, f"--text={text}"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(c10d.use_agent_store))
    CHECKPOINT.check_restarts()


def rendezvous_of(*words: str) -> str:
    """Return the rendezvous that torchrun would choose, given these options."""
    arguments = torchrun_module.parse_args([*words, "script.py"])
    with mock.patch.object(torchrun_module, "elastic_launch") as launch:
        torchrun_module.run(arguments)
    return launch.call_args.kwargs["config"].rdzv_backend


def test_c10d_is_the_default_only_on_one_machine_without_an_address() -> None:
    assert rendezvous_of("--nproc-per-node=2") == "c10d"
    assert rendezvous_of("--nnodes=2") == "static"
    for address in ("--master-port=1", "--rdzv-endpoint=localhost:1"):
        assert rendezvous_of(address) == "static"
        assert rendezvous_of(address, "--rdzv-backend=c10d") == "c10d"
    page = words_of(PLACE)
    assert "on one machine without `--master-port` and `--rdzv-endpoint`" in page
    assert "`static`, the default on several machines" in page


def test_each_agent_counts_only_the_failures_of_its_own_ranks() -> None:
    # Four times another agent restarts the ranks, and then one of this agent's fails.
    states = [WorkerState.HEALTHY, WorkerState.FAILED] * 4
    agent = mock.Mock(_remaining_restarts=3)
    agent._worker_group.spec.monitor_interval = 0
    agent._worker_group.spec.rdzv_handler.num_nodes_waiting.return_value = 1
    agent._monitor_workers.side_effect = [mock.Mock(state=state) for state in states]
    ended = SimpleElasticAgent._invoke_run(agent, "default")
    assert ended.state == WorkerState.FAILED
    assert agent._monitor_workers.call_count == 8
    assert agent._restart_workers.call_count == 4 + 3
    assert "up to three times for each `torchrun`" in words_of(PLACE)


def test_a_missing_heartbeat_alone_restarts_nothing() -> None:
    now, state = datetime.now(timezone.utc), _RendezvousState()
    alive, dead = _NodeDesc("alive", 1, 0), _NodeDesc("dead", 1, 0)
    state.complete, state.participants = True, {alive: 0, dead: 1}
    old = now - timedelta(seconds=60)
    state.last_heartbeats = {alive: now, dead: old}
    settings = RendezvousSettings(
        *("job", 1, 2, RendezvousTimeout(), timedelta(seconds=5), 3)
    )
    backend = mock.Mock(get_state=mock.Mock(return_value=(pickle.dumps(state), 1)))
    handler = DynamicRendezvousHandler.__new__(DynamicRendezvousHandler)
    handler._state_holder = _BackendRendezvousStateHolder(backend, settings)
    handler._heartbeat_lock = threading.Lock()
    handler._this_node = alive
    # The dead agent is given up, and yet there is nobody to restart the ranks for.
    assert handler.num_nodes_waiting() == 0
    assert list(handler._state_holder.state.participants) == [alive]
    # What the agent does with that answer while its own ranks have not failed.
    healthy, done = mock.Mock(state=WorkerState.HEALTHY), mock.Mock()
    done.state = WorkerState.SUCCEEDED
    agent = mock.Mock(_remaining_restarts=3)
    agent._worker_group.spec.monitor_interval = 0
    agent._worker_group.spec.rdzv_handler = handler
    agent._monitor_workers.side_effect = [healthy] * 5 + [done]
    assert SimpleElasticAgent._invoke_run(agent, "default") is done
    assert agent._monitor_workers.call_count == 6
    assert agent._restart_workers.call_count == 0
    page = words_of(PLACE)
    assert "the ranks first wait for the group's timeout" in page


@pytest.mark.parametrize(
    ("option", "had"),
    [
        *(("--lr=0.1", "0.003"), ("--seed=3", "0"), ("--samples=40", "48")),
        *(("--max-epochs=9", "2"), ("--max-steps=5", "1000000000")),
        *(("--amp", "False"), ("--text=tests/test_ddp_fault_tolerance.py", "{text}")),
    ],
)
def test_run_with_other_settings_is_not_resumed(
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    had: str,
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "gpt.pt"
    torch.save(in_the_middle[0], path)
    before = path.read_bytes()
    name, _, value = option.partition("=")
    assert complaint([*words_for(text, path, 1), option]) == (
        f"{path} comes from a run with {name}={had.format(text=text)}, this one has "
        f"{value or True}; move it away to train from the beginning"
    )
    assert path.read_bytes() == before


def test_run_of_another_model_is_not_resumed(
    text: Path, tmp_path: Path, in_the_middle: tuple[dict[str, Any], list[Any]]
) -> None:
    path = tmp_path / "gpt.pt"
    torch.save(in_the_middle[0], path)
    line = complaint([*words_for(text, path, 1), "--width=32"])
    assert line.startswith(f"{path} belongs to a model of GPTConfig(block_size=16, ")
    assert line.endswith("give --checkpoint another name")


def test_what_may_differ_when_a_run_is_resumed(
    worker_pool: WorkerPool,
    text: Path,
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
) -> None:
    path = tmp_path / "gpt.pt"
    torch.save(in_the_middle[0], path)
    more = ["--batch-size=3", "--workers=1", "--checkpoint-every=5"]
    output = worker_pool.run(train, words_for(text, path, 2, *more))[0]
    assert steps_resumed_from(output) == [4]
    assert "global batch size x steps = 8 x 6 = 48 different samples" in output


def test_middle_of_a_run_writes_text_and_has_no_loss_to_compare(
    tmp_path: Path,
    in_the_middle: tuple[dict[str, Any], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "gpt.pt"
    torch.save(in_the_middle[0], path)
    assert in_the_middle[0]["validation_loss"] is None
    generate = load_chapter("03_ddp_torchrun")["generate"]
    words = ["generate.py", f"--checkpoint={path}", "--length=9"]
    monkeypatch.setattr(sys, "argv", words)
    generate.main()
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{path} comes from the middle of a run: no validation loss to compare with"
    )


# --- The scripts of the room. ----------


def test_left_out_py_shows_what_each_entry_is_for(worker_pool: WorkerPool) -> None:
    world_size = 3  # the page shows two
    printed, *silence = worker_pool.run(
        run_lesson, PLACE, "left_out", world_size=world_size
    )
    assert silence == [""] * (world_size - 1)
    table = dict(
        (entry, (float(off), samples))
        for entry, off, samples in re.findall(
            r"^(\w+) +([\d.]+e[+-]\d+)  (.+)$", printed, re.M
        )
    )
    everything = 64 * world_size
    per_step = everything // 8
    sound = (
        f"global batch size x steps = {per_step} x 8 = {everything} different samples"
    )
    saw = f"8 steps of {per_step} samples saw"
    half = everything // 2
    expected = dict.fromkeys(["model", "optimizer", "schedule", "random"], sound)
    expected["step"] = f"{saw} {everything + half}, {everything} of them different"
    assert table.pop("nothing") == (0, sound)
    assert table.pop("seen") == (0, f"{saw} {half}, {half} of them different")
    assert {entry: samples for entry, (_, samples) in table.items()} == expected
    assert min(off for off, _ in table.values()) > 1e-4
    same = "check: the same with all 6 entries"
    assert printed.endswith(f"{same}, other weights or samples without any one\n")


def left_out_without_dropout() -> Any:
    """Run the lesson where no random number is drawn; return how it ends."""
    config = TRAIN.GPTConfig
    with (
        mock.patch.object(TRAIN, "GPTConfig", lambda **s: config(**s | {"dropout": 0})),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit) as end,
    ):
        run_lesson(PLACE, "left_out")
    return end.value.code


def test_left_out_py_fails_if_an_entry_is_not_needed(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(left_out_without_dropout) == [1, 1]


def lost_by_the_renewal_formula(interval: float, save: float, between: float) -> float:
    """Return the share lost if failures are exponential: Daly (2006), no restart time.

    Between two failures the intervals that are finished are geometrically distributed.
    """
    finished = 1 / math.expm1((interval + save) / between)
    return 1 - finished * interval / between


def test_no_interval_loses_less_than_the_one_that_how_often_py_names() -> None:
    lesson: Any = load_chapter(PLACE)["how_often"]
    for save, between in ((60.0, 3 * 3600.0), (0.2, 3600.0), (600.0, 24 * 3600.0)):
        best = lesson.best_interval(save, between)
        assert best == pytest.approx((2 * save * between) ** 0.5)
        lost = [lesson.share_lost(best * f, save, between) for f in (0.9, 1, 1.1)]
        assert lost[1] < min(lost[0], lost[2])
        # Half of it goes to saving.
        assert lost[1] == pytest.approx(2 * save / best)
        exact = lost_by_the_renewal_formula(best, save, between)
        assert exact == pytest.approx(lost[1], rel=0.1)
        simulated = lesson.simulate(best, save, between)
        assert simulated == pytest.approx(exact, abs=0.01)
    # The page's rows, worked out by hand.
    assert round(lesson.best_interval(60, 10_800) / 60, 1) == 19.0
    assert round(lesson.best_interval(60, 86_400) / 60, 1) == 53.7
    assert pytest.approx(54, rel=0.05) == 419 * 3 / 24  # Llama 3: stops, hours, days


@pytest.mark.parametrize("fault", ["", "as often as it fails", "nothing is lost"])
def test_how_often_py_fails_if_another_interval_loses_less(
    capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    lesson: Any = load_chapter(PLACE)["how_often"]
    faults: dict[str, Any] = {
        "as often as it fails": {"best_interval": lambda save, between: between},
        "nothing is lost": {"simulate": lambda *_: 0.0},
    }
    with (
        mock.patch("sys.argv", ["how_often.py"]),
        mock.patch.multiple(
            lesson, seconds_to_save=lambda: 0.2, **faults.get(fault, {})
        ),
    ):
        if fault:
            with pytest.raises(SystemExit, match="check failed"):
                lesson.main()
        else:
            lesson.main()
    assert ("check: 4 times as often" in capsys.readouterr().out) is (not fault)


@pytest.mark.parametrize("script", ["crashes", "world_changes", "who_may_die"])
def test_what_starts_ranks_refuses_to_be_one(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stopped:
        ROOM[script].main()
    assert stopped.value.code == 2
    start = "start it with python, not torchrun: it starts its own processes"
    assert capsys.readouterr().err == f"{script}.py: {start}\n"


def test_a_rank_is_killed_and_none_of_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchruns = ROOM["torchruns"]
    # Workers inherit RANK, and come later in the list.
    names = ["rank 0", "rank 1", "worker of rank 0", "worker of rank 1"]
    processes = {name: mock.Mock() for name in names}
    for name, process in processes.items():
        process.environ.return_value = {"RANK": name[-1]}

    def children(recursive: bool = False) -> list[Any]:
        return list(processes.values())[: 4 if recursive else 2]

    parent = mock.Mock(children=children)
    monkeypatch.setattr(torchruns.psutil, "Process", lambda _: parent)
    runs = mock.Mock(running={"A": mock.Mock()})
    torchruns.Torchruns.kill(runs, "A", rank=1)
    killed = [name for name, process in processes.items() if process.kill.called]
    assert killed == ["rank 1"]


def test_crashes_py_refuses_more_kills_than_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["crashes.py", "--kills=4"])
    with pytest.raises(SystemExit) as stopped:
        CRASHES.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "crashes.py: 4 kills take 75 steps or more; give more --steps\n"
    )


def test_crashes_py_counts_what_differs(
    tmp_path: Path, in_the_middle: tuple[dict[str, Any], list[Any]]
) -> None:
    content, paths = in_the_middle[0], (tmp_path / "a.pt", tmp_path / "b.pt")
    everything = sum(
        one[1].numel() for one in values_in(content) if isinstance(one, tuple)
    )
    for path in paths:
        torch.save(content, path)
    assert CRASHES.different_values(*paths) == (0, everything)
    changed = copy.deepcopy(content)
    changed["model"]["final_norm.bias"][3] += 1 / 3  # in all four bytes
    changed["training"]["optimizer"]["state"][0]["step"] += 1
    changed["training"]["random"][1][0][7] += 1
    torch.save(changed, paths[1])
    assert CRASHES.different_values(*paths) == (3, everything)
    changed["training"]["random"].pop()
    torch.save(changed, paths[1])
    with pytest.raises(ValueError, match="shorter"):
        CRASHES.different_values(*paths)


def test_crashes_py_fails_if_a_value_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["crashes.py", "--kills=1", "--steps=30"])
    monkeypatch.setattr(CRASHES, "Torchruns", mock.MagicMock())
    monkeypatch.setattr(CRASHES, "different_values", lambda *_: (0, 9000))
    CRASHES.main()
    result = "killed 1 times, 0 of 9,000 values differ"
    said = capsys.readouterr().out
    assert said.endswith(f"check: {result} from the uninterrupted run's\n")
    monkeypatch.setattr(CRASHES, "different_values", lambda *_: (1, 9000))
    with pytest.raises(SystemExit, match="killed 1 times, 1 of 9,000 values differ"):
        CRASHES.main()


LINES = ["ranks: 2, threads for each: 1", "checkpoint: none yet"]
LINES += ["ranks: 3, threads for each: 1"]
LINES += ["checkpoint: resuming from run.pt, step 16, global batch size 64"]
LINES += ["epoch 0 | global batch size x steps = 64 x 32 = 2048 different samples"]
LINES += ["ranks: 2, threads for each: 1"]
LINES += ["checkpoint: resuming from run.pt, step 40, global batch size 64"]
LINES += ["epoch 1 | global batch size x steps = 64 x 32 = 2048 different samples"]


@pytest.mark.parametrize(
    ("broken", "is_right"),
    [
        (LINES, True),
        (LINES[:4] + LINES[5:], False),
        (LINES[:4] + LINES[5:7], False),
        (LINES[:5], False),
        (LINES[:2] + LINES[5:], False),
        (
            [
                line.replace("40, global batch size 64", "40, global batch size 96")
                for line in LINES
            ],
            False,
        ),
        ([line.replace("64 x 32", "96 x 32") for line in LINES], False),
        ([line.replace("2048", "2047") for line in LINES], False),
    ],
    ids=[
        *("sound", "an epoch lost", "no epoch", "nobody left", "nobody came"),
        *("batch size", "batch size of an epoch", "a sample lost"),
    ],
)
def test_world_changes_py_finds_what_is_wrong(
    broken: list[str], is_right: bool
) -> None:
    found, result = WORLD_CHANGES.what_ranks_said(broken)
    assert found == is_right
    if is_right:
        assert result == (
            "worlds of 2, 3, 2 ranks, global batch size 64, 2 epoch(s) of 2048 "
            "different samples"
        )


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_script(end: signal.Signals, tmp_path: Path) -> None:
    # Killed, the script ends its torchrun by setpriv; interrupted, by itself.
    path = {"PATH": os.environ["PATH"] if end == signal.SIGKILL else ""}
    process = subprocess.Popen(
        [sys.executable, ROOT / PLACE / "crashes.py", "--kills=5", "--steps=2000"],
        stdout=subprocess.PIPE,
        env=clean_environment(TMPDIR=str(tmp_path), **path),
        start_new_session=True,
        # What a script starts in the background ignores Ctrl-C; here it must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    started: list[psutil.Process] = []
    try:
        give_up = time.monotonic() + 60
        while not list(tmp_path.glob("*/*.pt")) and time.monotonic() < give_up:
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 3  # torchrun and two ranks
        process.send_signal(end)
        assert process.wait(timeout=120) == (130 if end == signal.SIGINT else -end)
        assert psutil.wait_procs(started, timeout=45)[1] == []
        # Only a script that ends by itself can clear away its folder.
        assert len(list(tmp_path.iterdir())) == (end == signal.SIGKILL)
    finally:
        for one in [*started, process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_a_store_outlives_the_ranks_with_etcd_too(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the backend: both make this handler, and only the variable is asked.
    create = rendezvous_api.rendezvous_handler_registry._registry[backend]
    assert "create_handler" in inspect.getsource(create)
    shares: Any = DynamicRendezvousHandler.use_agent_store
    assert shares.fget(None)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not shares.fget(None)
    page = words_of("03_ddp_torchrun/fault_tolerance")
    assert "need two things (with etcd only the first)" in page
