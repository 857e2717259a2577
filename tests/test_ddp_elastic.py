"""Chapter 03: a run that is killed ends with the weights of one left in peace."""

import contextlib
import inspect
import io
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
)

from launch import ROOT, python
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "03_ddp_torchrun"
# Two epochs of 6 steps of 8 samples, with a model that takes milliseconds.
TINY = [
    *("--layers=1", "--width=16", "--heads=2", "--block-size=16", "--samples=48"),
    *("--max-epochs=2", "--dropout=0.1", "--snapshot-every=2"),
]
STEPS = 12


class Stop(BaseException):
    """Ends a run in the middle, past every `except Exception`."""


def module(name: str) -> ModuleType:
    return load_chapter(CHAPTER)[name]


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


def words_for(text: Path, snapshot: Path, samples_per_step: int, ranks: int) -> Any:
    """Return the options of a small run."""
    batch_size = -(-samples_per_step // ranks)
    return [
        *TINY,
        f"--text={text}",
        f"--snapshot={snapshot}",
        f"--batch-size={batch_size}",
    ]


@contextlib.contextmanager
def patched(words: list[str]) -> Iterator[ModuleType]:
    """Let train_elastic.main() run in a group that is there already."""
    train = module("train_elastic")
    with (
        mock.patch.object(sys, "argv", ["train_elastic.py", *words]),
        mock.patch.dict(os.environ, {"MASTER_ADDR": "the pool has joined already"}),
        mock.patch.object(train.dist, "init_process_group"),
        mock.patch.object(train.dist, "destroy_process_group"),
        mock.patch.object(train.signal, "signal"),
    ):
        yield train


def run_elastic(words: list[str], stop_after: int | None = None) -> str:
    """Run main() on a rank of the pool, perhaps for some steps only."""
    output, taken = io.StringIO(), 0

    def counted_step(*args: Any) -> torch.Tensor:
        nonlocal taken
        if taken == stop_after:
            raise Stop
        taken += 1
        return real_step(*args)

    with patched(words) as train, contextlib.redirect_stdout(output):
        real_step = train.elastic_step
        with (
            mock.patch.object(train, "elastic_step", counted_step),
            contextlib.suppress(Stop),
        ):
            train.main()
    return output.getvalue()


def weights_in(path: Path) -> torch.Tensor:
    """Return all weights of a snapshot as one tensor."""
    model, _ = module("snapshot").load_snapshot(path)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def content_of(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


# --- Bit for bit. ----------


# Four ranks add up in an order that depends on where a value stands in a message; with
# two, a + b is b + a and DDP's rearranging could not be seen.
@pytest.mark.parametrize("world_size", [2, 4])
def test_run_stopped_anywhere_ends_with_the_same_weights(
    worker_pool: WorkerPool, text: Path, tmp_path: Path, world_size: int
) -> None:
    def run(name: str, stop_after: int | None = None) -> str:
        words = words_for(text, tmp_path / name, 8, world_size)
        args = (words, stop_after)
        return worker_pool.run(run_elastic, *args, world_size=world_size)[0]

    run("calm.pt")
    calm = weights_in(tmp_path / "calm.pt")
    stops = (1, 2, 3, 6, 7, 9, 11) if world_size == 2 else (3, 8)
    for stop in stops:
        name = f"{stop}.pt"
        run(name, stop)
        output = run(name)
        went_on = re.findall(r"going on from .*, step (\d+), 8 samples a step", output)
        # Up to the first snapshot there is nothing to go on from.
        assert went_on == ([str(stop // 2 * 2)] if stop >= 2 else [])
        assert output.count("6 steps x 8 samples = 48 different samples") >= 1
        assert torch.equal(weights_in(tmp_path / name), calm), stop
    assert len(list(tmp_path.glob("[0-9]*.pt"))) == len(stops) >= 2


def test_without_a_crash_it_is_train_py(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    words = [
        one for one in words_for(text, tmp_path / "a.pt", 8, 2) if "drop" not in one
    ]
    worker_pool.run(run_elastic, words)
    words = [one for one in words if "every" not in one and "--snapshot" not in one]
    worker_pool.run(run_train, [*words, f"--snapshot={tmp_path / 'b.pt'}"])
    assert torch.equal(weights_in(tmp_path / "a.pt"), weights_in(tmp_path / "b.pt"))
    first, second = (content_of(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert first["validation_loss"] == second["validation_loss"]


def run_train(words: list[str]) -> None:
    """Run train.py's main() on a rank of the pool."""
    with patched(words), contextlib.redirect_stdout(io.StringIO()):
        module("train").main()


# --- Killed by a signal, at known moments of a write and at random ones. ----------


def in_child(function: Any, *args: Any) -> int:
    """Fork, run `function` in the child, return how the child ended."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function(*args)
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def run_alone(words: list[str], killed: tuple[str, int] | None = None) -> None:
    """Run main() as a world of one rank, to be killed at the n-th call of something."""
    train, resume, calls = module("train_elastic"), module("resume"), 0

    def or_die(function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if killed and calls == killed[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return count

    moments = {
        "step": (train, "elastic_step"),
        "first byte": (module("snapshot").torch, "save"),
        "bytes on the disk": (os, "fsync"),
        "rename": (os, "replace"),
        "collecting": (resume.dist, "all_gather_object"),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(sys, "argv", ["train_elastic.py", *words])
        )
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if killed:
            owner, name = moments[killed[0]]
            stack.enter_context(
                mock.patch.object(owner, name, or_die(getattr(owner, name)))
            )
        train.main()


def test_run_killed_in_mid_write_ends_with_the_same_weights(
    text: Path, tmp_path: Path
) -> None:
    assert in_child(run_alone, words_for(text, tmp_path / "calm.pt", 8, 1)) == 0
    calm, kills = weights_in(tmp_path / "calm.pt"), 0
    moments = [("step", 1), ("step", 7), ("collecting", 4), ("first byte", 1)]
    moments += [("first byte", 3), ("bytes on the disk", 1), ("bytes on the disk", 2)]
    # The second snapshot takes two renames: the newest becomes the one before it, and
    # the new one the newest. At number 3 there is no newest for a moment.
    moments += [("rename", number) for number in range(1, 6)]
    for moment in moments:
        path = tmp_path / f"{moment[0]} {moment[1]}.pt"
        words = words_for(text, path, 8, 1)
        assert os.WTERMSIG(in_child(run_alone, words, moment)) == signal.SIGKILL, moment
        kills += 1
        assert in_child(run_alone, words) == 0, moment
        assert torch.equal(weights_in(path), calm), moment
        assert {one.name for one in tmp_path.glob(f"{path.name}*")} == {
            path.name,
            f"{path.name}.previous",
        }
    assert kills == len(moments) == 12


def run_alone_and_tell(words: list[str], pipe: int) -> None:
    """Run main() as a world of one rank; write to `pipe` when the first step begins."""
    train, told = module("train_elastic"), False
    step = train.elastic_step

    def tell(*args: Any) -> Any:
        nonlocal told
        if not told:
            os.write(pipe, b".")
            told = True
        return step(*args)

    with mock.patch.object(train, "elastic_step", tell):
        run_alone(words)


def kill_after(words: list[str], seconds: float | None) -> tuple[int, float]:
    """Kill a run so long after its first step has begun; return its end and its time.

    Its start takes longer than its steps, and how much longer differs from run to run.
    """
    at_parent, at_child = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            run_alone_and_tell(words, at_child)
            os._exit(0)
        os._exit(1)
    os.close(at_child)
    with open(at_parent, "rb") as pipe:
        pipe.read(1)  # nothing, if the run ends without a step
    started = time.perf_counter()
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status, time.perf_counter() - started


@pytest.mark.timeout(180)
def test_run_killed_at_random_again_and_again_ends_with_the_same_weights(
    text: Path, tmp_path: Path
) -> None:
    status, seconds = kill_after(words_for(text, tmp_path / "calm.pt", 8, 1), None)
    assert status == 0
    path, kills = tmp_path / "killed.pt", 0
    words = words_for(text, path, 8, 1)
    while kills < 5 or not path.exists():
        status, _ = kill_after(words, random.uniform(0, seconds / 3))
        if os.WIFSIGNALED(status):
            kills += 1
        else:  # through before the fifth kill: once more from the beginning, with less
            assert status == 0
            kills, seconds = 0, 0.7 * seconds
            for file in tmp_path.glob("killed.pt*"):
                file.unlink()
    assert in_child(run_alone, words) == 0
    assert torch.equal(weights_in(path), weights_in(tmp_path / "calm.pt"))


# --- Another number of ranks. ----------


def dealt(samples: int, samples_per_step: int, batch_size: int) -> list[list[int]]:
    """Return the batches that this rank gets in one epoch."""
    return list(
        module("elastic_batches").ElasticBatches(
            samples, samples_per_step, batch_size, 5
        )
    )


def dealt_by_torch(samples: int, batch_size: int) -> list[list[int]]:
    """Return what `DistributedSampler` deals to this rank."""
    dataset = torch.utils.data.TensorDataset(torch.zeros(samples))
    own = list(torch.utils.data.DistributedSampler(dataset, seed=5, drop_last=True))
    return [own[i : i + batch_size] for i in range(0, len(own), batch_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_are_those_of_distributed_sampler(
    worker_pool: WorkerPool, world_size: int
) -> None:
    args = (48, 4 * world_size, 4)
    ours = worker_pool.run(dealt, *args, world_size=world_size)
    theirs = worker_pool.run(dealt_by_torch, 48, 4, world_size=world_size)
    assert len(ours) == world_size and len(ours[0]) == 12 // world_size
    assert ours == theirs


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_keeps_its_samples_whoever_shares_it(
    worker_pool: WorkerPool, world_size: int
) -> None:
    (alone,) = worker_pool.run(dealt, 40, 10, 10, world_size=1)
    by_rank = worker_pool.run(dealt, 40, 10, 3, world_size=world_size)
    assert len(alone) == 4 and len(by_rank) == world_size
    found, sizes = [], []
    for step in range(4):
        everything = []
        for batches in by_rank:
            count = len(batches) // 4
            own = batches[step * count : (step + 1) * count]
            sizes += [len(batch) for batch in own]
            everything += [index for batch in own for index in batch]
        found.append(sorted(everything))
    assert found == [sorted(batch) for batch in alone]
    assert sum(sizes) == 40 and set(sizes) <= {1, 2, 3}


def test_ranks_come_and_go_and_the_steps_stay_the_same(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    def words(name: str) -> list[str]:
        options = words_for(text, tmp_path / name, 8, 2)
        return [one for one in options if "dropout" not in one]

    worker_pool.run(run_elastic, words("calm.pt"), world_size=2)
    # 8 samples over 3 ranks are 3, 3 and 2; one rank takes two batches of 4.
    for ranks, stop, step in ((2, 3, 0), (3, 4, 2), (1, 3, 6), (4, None, 8)):
        outputs = worker_pool.run(run_elastic, words("a.pt"), stop, world_size=ranks)
        found = re.findall(r"going on from .* step (\d+), 8 samples", outputs[0])
        assert found == ([str(step)] if step else [])
    assert "epoch 1 | 6 steps x 8 samples = 48 different samples" in outputs[0]
    calm, changed = weights_in(tmp_path / "calm.pt"), weights_in(tmp_path / "a.pt")
    # The same sums in another order, passed twelve times through AdamW, which divides
    # small gradients by themselves; a wrong weight of a share is off by far more.
    assert not torch.equal(calm, changed)
    assert (calm - changed).abs().max() < 2e-4
    told = [
        content_of(tmp_path / name)["validation_loss"] for name in ("calm.pt", "a.pt")
    ]
    assert told[0] == pytest.approx(told[1], abs=1e-4)


def report(counts: list[int]) -> str:
    """Report an epoch of which this rank has seen `counts`."""
    return module("elastic_batches").samples_report(torch.tensor(counts), 2, 4)


def report_fails(by_rank: list[list[int]]) -> str:
    try:
        return report(by_rank[dist.get_rank()])
    except RuntimeError as error:
        return str(error)


def test_a_sample_lost_or_counted_twice_is_found(worker_pool: WorkerPool) -> None:
    sound = [[1, 0, 1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1]]
    lost = [sound[0], [0] * 8]
    twice = [sound[0], [1, 1, 0, 1, 0, 1, 0, 0]]
    said = [worker_pool.run(report_fails, one) for one in (sound, lost, twice)]
    assert said[0] == ["2 steps x 4 samples = 8 different samples"] * 2
    assert said[1] == ["2 steps of 4 saw 4 samples, 4 of them different"] * 2
    assert said[2] == ["2 steps of 4 saw 8 samples, 7 of them different"] * 2


def steps_agreed_on(steps: list[int]) -> str | None:
    return module("resume").agree_on_step(steps[dist.get_rank()], torch.device("cpu"))


def test_ranks_that_find_different_snapshots_stop(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(steps_agreed_on, [4, 4]) == [None, None]
    said = worker_pool.run(steps_agreed_on, [4, 0])
    assert len(said) == 2
    assert all("steps [4, 0]: --snapshot must name a file" in str(one) for one in said)


# --- Damaged, foreign and other bad input: one line, status 2. ----------


def complaint(words: list[str]) -> str:
    """Run main() up to its refusal; return the one line that it printed."""
    errors = io.StringIO()
    with (
        patched(words) as train,
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as stopped,
    ):
        train.main()
    assert stopped.value.code == 2
    line, end = errors.getvalue().split("\n", 1)
    assert end == "" and line.startswith("train_elastic.py: ")
    return line


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "empty": b"", "other": b"x" * 99}[how]
    )


@pytest.mark.parametrize("how", ["cut", "empty", "other"])
def test_damaged_newest_snapshot_is_put_aside_for_the_one_before(
    worker_pool: WorkerPool, text: Path, tmp_path: Path, how: str
) -> None:
    path, calm = tmp_path / "gpt.pt", tmp_path / "calm.pt"
    worker_pool.run(run_elastic, words_for(text, calm, 8, 2))
    words = words_for(text, path, 8, 2)
    worker_pool.run(run_elastic, words, 8)
    damage(path, how)
    output, silent = worker_pool.run(run_elastic, words)
    damaged = f"snapshot: {path} is damaged and now called {path}.damaged\n"
    went_on = f"snapshot: going on from {path}.previous, step 6, 8 samples a step\n"
    assert damaged + went_on in output and silent == ""
    assert torch.equal(weights_in(path), weights_in(calm))
    assert (tmp_path / "gpt.pt.damaged").exists()


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_snapshot_that_cannot_be_gone_on_from(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    words = words_for(text, path, 8, 1)
    path.write_bytes(b"no snapshot")
    assert f"{path}: damaged, or no snapshot; move it away" in complaint(words)
    (tmp_path / "gpt.pt.previous").write_bytes(b"")
    assert f"{path} and {path}.previous: damaged" in complaint(words)
    assert path.read_bytes() == b"no snapshot"  # nothing was moved or written
    path.unlink()
    model = module("model")
    config = model.GPTConfig(16, 16, 1, 2, dropout=0.1)
    weights = model.GPT(config).state_dict()
    module("snapshot").save_snapshot(path, weights, config, 1.0, None)
    assert "holds weights alone: nothing to go on from" in complaint(words)
    path.unlink()
    assert "there is no folder" in complaint([*TINY, "--snapshot=missing/gpt.pt"])
    folder = complaint([*TINY, f"--snapshot={tmp_path}"])
    assert folder.endswith(f"--snapshot {tmp_path} is a folder; name a file in it")
    assert "dropout is a share below 1, not 1.0" in complaint(["--dropout=1"])
    assert "--snapshot-every: '0' is not a" in complaint(["--snapshot-every=0"])


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_restarts_that_would_meet_dead_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_restarts = module("resume").check_restarts
    for shared, restarts, is_refused in (
        ("True", "3", True),
        ("True", "0", False),
        ("False", "3", False),
    ):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        expected = pytest.raises(ValueError) if is_refused else contextlib.nullcontext()
        with expected:
            check_restarts()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    # If torch has changed this, the script need not refuse any more.
    source = inspect.getsource(DynamicRendezvousHandler.next_rendezvous)
    assert "self._bootstrap_store_info is None or" in source
    assert "type: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in complaint(
        ["--max-steps=1"]
    )


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_run_with_other_settings_does_not_go_on(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    words = words_for(text, path, 8, 1)
    assert in_child(run_alone, words) == 0
    before, checked = path.read_bytes(), 0
    for option, value, had in (
        ("--lr", "0.1", "0.003"),
        ("--seed", "3", "0"),
        ("--samples", "40", "48"),
        ("--max-epochs", "9", "2"),
        ("--max-steps", "5", "None"),
    ):
        line = complaint([*words, f"{option}={value}"])
        assert f"comes from a run with {option}={had}, this one has {value};" in line
        checked += 1
    assert checked == 5
    line = complaint([*words, "--amp"])
    assert "comes from a run with --amp=False, this one has True;" in line
    assert "belongs to a model of GPTConfig(block_size=16" in complaint(
        [*words, "--width=32"]
    )
    assert path.read_bytes() == before


def test_middle_of_a_run_writes_text_and_has_no_loss_to_compare(
    text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gpt.pt"
    assert in_child(run_alone, words_for(text, path, 8, 1), ("step", 4)) != 0
    assert content_of(path)["training"]["step"] == 2
    result = python(ROOT / CHAPTER / "generate.py", f"--snapshot={path}", timeout=60)
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines()[-1] == (
        f"{path} comes from the middle of a run: no validation loss to compare with"
    )


# --- The scripts that kill it. ----------


@pytest.mark.parametrize("name", ["crashes", "world_changes"])
def test_what_starts_ranks_refuses_to_be_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stopped:
        module(name).main()
    assert stopped.value.code == 2
    said = (
        f"{name}.py: start it with python, not torchrun: it starts its own processes\n"
    )
    assert capsys.readouterr().err == said


def test_crashes_py_counts_what_differs(text: Path, tmp_path: Path) -> None:
    crashes = module("crashes")
    assert in_child(run_alone, words_for(text, tmp_path / "a.pt", 8, 1)) == 0
    assert in_child(run_alone, words_for(text, tmp_path / "b.pt", 8, 1)) == 0
    same = crashes.different_values(tmp_path / "a.pt", tmp_path / "b.pt")
    content = content_of(tmp_path / "b.pt")
    content["model"]["final_norm.bias"][3] += 1e-7
    torch.save(content, tmp_path / "b.pt")
    changed = crashes.different_values(tmp_path / "a.pt", tmp_path / "b.pt")
    assert same[0] == 0 and changed[0] == 1
    assert same[1] == changed[1] == weights_in(tmp_path / "a.pt").numel()


def test_world_changes_py_finds_a_lost_epoch() -> None:
    conclusion = module("world_changes").judge_worlds
    epoch = "epoch {} | 64 steps x 64 samples = 4096 different samples"
    lines = ["ranks: 2, threads", "ranks: 3, threads", "ranks: 2, threads"]
    sound = [*lines, epoch.format(0), epoch.format(1)]
    assert conclusion(sound).startswith(
        "worlds of 2, 3, 2 ranks, 64 samples a step, 2 "
    )
    for broken in (
        [*lines, epoch.format(1)],
        [*lines[:2], epoch.format(0)],
        [*sound, "snapshot: going on from run.pt, step 3, 96 samples a step"],
    ):
        with pytest.raises(RuntimeError):
            conclusion(broken)
