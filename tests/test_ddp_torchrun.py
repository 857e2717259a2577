"""Chapter 03: what DDP promises, held against one process that sees every sample."""

import contextlib
import io
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from launch import ROOT, clean_environment, python, torchrun
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

CHAPTER = "03_ddp_torchrun"
TRAIN = ROOT / CHAPTER / "train.py"
GENERATE = ROOT / CHAPTER / "generate.py"
# A model and an epoch that take milliseconds: 48 samples of 16 bytes.
TINY = ["--layers=1", "--width=16", "--heads=2", "--block-size=16", "--samples=48"]
BATCH = 4
T = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text of 20,000 bytes in a folder with a space in its name."""
    path = tmp_path_factory.mktemp("a folder") / "text.txt"
    words = random.Random(0).choices(["rank", "ring", "send", "receive", "\n"], k=4000)
    path.write_text(" ".join(words))
    return path


# --- What runs on each rank. ----------


def tiny_model(dtype: torch.dtype) -> Any:
    """Build the chapter's model at a size that trains in milliseconds."""
    model = load_chapter(CHAPTER)["model"]
    torch.manual_seed(7)
    config = model.GPTConfig(block_size=T, width=16, layers=1, heads=2)
    return model.GPT(config).to(dtype)


def make_batches(count: int, samples: int) -> list[list[torch.Tensor]]:
    """Draw `count` batches of (indices, inputs, labels), the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    windows = torch.randint(256, (count, samples, T + 1), generator=generator)
    return [[torch.arange(samples), w[:, :-1], w[:, 1:]] for w in windows]


def share(batch: list[torch.Tensor], rank: int, world_size: int) -> list[torch.Tensor]:
    """Take a rank's part of a batch."""
    return [part.chunk(world_size)[rank] for part in batch]


def flat(tensors: Any) -> torch.Tensor:
    """Join tensors into one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradient_and_weights(
    dtype: torch.dtype, steps: int, grad_accum_steps: int = 1
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Train with DDP; return a gradient, the last weights, exchanges in each step."""
    train = load_chapter(CHAPTER)["train"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_model = DistributedDataParallel(tiny_model(dtype), gradient_as_bucket_view=True)
    exchanges = 0

    def counting_hook(
        process_group: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        nonlocal exchanges
        exchanges += 1
        work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    ddp_model.register_comm_hook(None, counting_hook)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)
    batches = [
        share(batch, rank, world_size)
        for batch in make_batches(steps * grad_accum_steps, BATCH * world_size)
    ]
    _, inputs, labels = batches[0]
    ddp_model(inputs, labels).backward()
    gradient = flat(p.grad for p in ddp_model.parameters())
    optimizer.zero_grad()
    counts = []
    for start in range(0, len(batches), grad_accum_steps):
        exchanges = 0
        micro_batches = batches[start : start + grad_accum_steps]
        train.train_step(ddp_model, ddp_model, optimizer, micro_batches)
        counts.append(exchanges)
    return gradient, flat(ddp_model.module.parameters()), counts


def alone(
    dtype: torch.dtype, batches: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train one plain model, no DDP and no group, on whole batches."""
    model = tiny_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradient = torch.zeros(0)
    for number, (_, inputs, labels) in enumerate(batches):
        optimizer.zero_grad()
        model(inputs, labels).backward()
        if number == 0:
            gradient = flat(p.grad for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    return gradient, flat(model.parameters())


def run_main(words: list[str]) -> tuple[str, list[list[int]]]:
    """Run train.py's main() in the pool's group; return its output and its samples."""
    train = load_chapter(CHAPTER)["train"]
    seen_in_epoch = []

    def epoch_report(
        batch_size: int, grad_accum_steps: int, seen: list[int], losses: torch.Tensor
    ) -> list[str]:
        seen_in_epoch.append(seen)
        return original(batch_size, grad_accum_steps, seen, losses)

    original = train.epoch_report
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.dict(os.environ, {"MASTER_ADDR": "the pool has joined already"}),
        mock.patch.object(train.dist, "init_process_group"),
        mock.patch.object(train.dist, "destroy_process_group"),
        mock.patch.object(train, "epoch_report", epoch_report),
        mock.patch.object(train.signal, "signal"),
        contextlib.redirect_stdout(output),
    ):
        train.main()
    return output.getvalue(), seen_in_epoch


# --- The same gradients and weights as one process. ----------


# AdamW divides a gradient by its own size, so that an entry near zero passes its
# rounding error on nearly at full step length (1e-3). In float64 that error is 1e-16 of
# the gradient and nothing is left of it but the last digits; that is the proof that
# nothing but rounding is behind the larger figure for float32.
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "gradient_tolerance", "weight_tolerance"),
    [(torch.float32, 1e-6, 1e-4), (torch.float64, 1e-15, 1e-11)],
)
def test_ddp_equals_one_process_on_the_concatenated_batch(
    worker_pool: WorkerPool,
    world_size: int,
    dtype: torch.dtype,
    gradient_tolerance: float,
    weight_tolerance: float,
) -> None:
    steps = 5
    results = worker_pool.run(gradient_and_weights, dtype, steps, world_size=world_size)
    gradient, weights = alone(dtype, make_batches(steps, BATCH * world_size))
    assert len(results) == world_size
    assert (weights - flat(tiny_model(dtype).parameters())).abs().max() > 1e-3
    for rank_gradient, rank_weights, _ in results:
        assert (rank_gradient - gradient).abs().max() < gradient_tolerance
        assert (rank_weights - weights).abs().max() < weight_tolerance
        # Between ranks there is no tolerance: every bit is the same.
        assert torch.equal(rank_gradient, results[0][0])
        assert torch.equal(rank_weights, results[0][1])


def test_accumulation_equals_one_larger_batch_and_exchanges_once(
    worker_pool: WorkerPool,
) -> None:
    steps, k = 3, 4
    results = worker_pool.run(gradient_and_weights, torch.float64, steps, k)
    small = make_batches(steps * k, BATCH * 2)
    large = [
        [torch.cat(parts) for parts in zip(*small[i * k : i * k + k], strict=True)]
        for i in range(steps)
    ]
    assert [len(batch[1]) for batch in large] == [BATCH * 2 * k] * steps
    _, weights = alone(torch.float64, large)
    assert len(results) == 2
    for _, rank_weights, exchanges in results:
        assert (rank_weights - weights).abs().max() < 1e-11
        assert exchanges == [1] * steps  # one bucket, once a step, not k times


# --- The run as a whole. ----------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_is_seen_by_one_rank_and_the_order_changes(
    worker_pool: WorkerPool, text: Path, world_size: int
) -> None:
    words = [*TINY, "--batch-size=4", "--max_epochs=3", f"--text={text}"]
    results = worker_pool.run(run_main, words, world_size=world_size)
    output = results[0][0]
    assert len(results) == world_size
    assert all(other == "" for other, _ in results[1:])
    orders = []
    for epoch in range(3):
        dealt = [seen[epoch] for _, seen in results]
        assert [len(seen) for seen in dealt] == [48 // world_size] * world_size
        assert sorted(i for seen in dealt for i in seen) == list(range(48))
        orders.append(dealt)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    lines = re.findall(
        r"epoch (\d) \| rank (\d) \| batch size 4 \| steps (\d+)", output
    )
    assert lines == [
        (str(epoch), str(rank), str(12 // world_size))
        for epoch in range(3)
        for rank in range(world_size)
    ]
    products = re.findall(r"ranks = (\d+) x (\d+) x (\d+) = (\d+) different", output)
    assert products == [("4", str(12 // world_size), str(world_size), "48")] * 3
    assert f"check: 0 weights differ on {world_size} rank(s)" in output


def test_one_process_with_the_joint_batch_takes_the_same_steps(
    worker_pool: WorkerPool, text: Path
) -> None:
    words = [*TINY, "--max-epochs=2", f"--text={text}"]
    two = worker_pool.run(run_main, [*words, "--batch-size=4"], world_size=2)
    one = worker_pool.run(run_main, [*words, "--batch-size=8"], world_size=1)
    steps = range(6)
    assert len(steps) * 8 == 48
    for epoch in range(2):
        for step in steps:
            joint = [seen[epoch][4 * step : 4 * step + 4] for _, seen in two]
            alone = one[0][1][epoch][8 * step : 8 * step + 8]
            assert sorted(joint[0] + joint[1]) == sorted(alone)
    losses = [re.findall(r"mean loss (\S+)", run[0][0]) for run in (one, two)]
    assert len(losses[0]) == 4 and len(losses[1]) == 4
    for loss_of_one, loss_of_two in zip(*losses, strict=True):
        assert float(loss_of_one) == pytest.approx(float(loss_of_two), abs=1.1e-3)


def test_held_out_text_may_be_too_short_to_share(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("a short text\n" * 85)
    words = [*TINY, "--batch-size=4", "--max-steps=2", f"--text={tmp_path}"]
    # 56 bytes of it are held out: three windows of 16, for four ranks.
    results = worker_pool.run(run_main, words, world_size=4)
    assert len(results) == 4
    assert "check: 0 weights differ on 4 rank(s)" in results[0][0]


def test_printed_loss_is_the_mean_over_ranks(
    worker_pool: WorkerPool, text: Path
) -> None:
    words = [*TINY, "--batch-size=4", "--max-epochs=1", f"--text={text}"]
    (output, _), _ = worker_pool.run(run_main, words)
    halves = [float(loss) for loss in re.findall(r"mean loss (\d\.\d+)", output)]
    own = [float(loss) for loss in re.findall(r"own loss (\d\.\d+)", output)]
    assert len(halves) == 2 and len(own) == 2
    assert own[0] != own[1]
    # Both are rounded to three digits after the point.
    assert sum(halves) / 2 == pytest.approx(sum(own) / 2, abs=1.1e-3)


def test_options_of_a_run_reach_it(worker_pool: WorkerPool, text: Path) -> None:
    words = [*TINY, "--batch-size=3", "--grad_accum_steps=2", "--amp", "--seed=5"]
    words += ["--max-steps=11", "--lr=0.01", f"--text={text}"]
    (output, seen), _ = worker_pool.run(run_main, words)
    # 48 samples are 4 steps of 2 ranks x 2 batches x 3; the last epoch has 3 left.
    assert re.findall(r"rank 0 \| batch size 3 \| steps (.+?) \|", output) == [
        "4 of 2 batches",
        "4 of 2 batches",
        "3 of 2 batches",
    ]
    assert [len(indices) for indices in seen] == [24, 24, 18]
    before, after = map(float, re.findall(r"(\d\.\d\d) (?:nats|after)", output))
    assert after < before - 0.5


def autocast_during_step(name: str, *more: int) -> tuple[set[bool], set[bool]]:
    """Say whether autocast was on in the forward passes of a step, in the backwards."""
    module = load_chapter(CHAPTER)[name]
    step = module.elastic_step if name == "train_elastic" else module.train_step
    ddp_model = DistributedDataParallel(tiny_model(torch.float32))
    forward: set[bool] = set()
    backward: set[bool] = set()
    ddp_model.module.register_forward_hook(
        lambda *_: forward.add(torch.is_autocast_enabled("cpu"))
    )
    for parameter in ddp_model.parameters():
        parameter.register_hook(
            lambda _: backward.add(torch.is_autocast_enabled("cpu"))
        )
    optimizer = torch.optim.AdamW(ddp_model.parameters())
    step(ddp_model, ddp_model, optimizer, make_batches(2, 4), *more, True)
    return forward, backward


@pytest.mark.parametrize("script", [("train",), ("train_elastic", 8)])
def test_autocast_is_on_in_the_forward_pass_alone(
    worker_pool: WorkerPool, script: tuple[Any, ...]
) -> None:
    found = worker_pool.run(autocast_during_step, *script, world_size=1)
    assert found == [({True}, {False})]


# --- Proofs that can fail. ----------


def check_run_of_a_broken_model(fault: str) -> str:
    """Break one thing on one rank and let the closing check find it."""
    proof = load_chapter(CHAPTER)["proof"]
    ddp_model = DistributedDataParallel(tiny_model(torch.float32))
    _, inputs, labels = make_batches(1, 2 * dist.get_world_size())[0]
    if fault == "weight" and dist.get_rank() == 1:
        with torch.no_grad():
            next(ddp_model.parameters()).view(-1)[3] += 1e-7
    if fault == "gradient":
        with ddp_model.no_sync():
            return proof.check_run(ddp_model, inputs, labels)
    return proof.check_run(ddp_model, inputs, labels)


def test_closing_check_accepts_a_sound_model(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(check_run_of_a_broken_model, "none")
    assert len(results) == 2 and results[0] == results[1]
    assert results[0].startswith("0 weights differ on 2 rank(s)")


@pytest.mark.parametrize(
    ("fault", "found"),
    [("weight", "1 weights differ"), ("gradient", r"gradient \de-01 from")],
)
def test_closing_check_finds_what_is_broken(
    worker_pool: WorkerPool, fault: str, found: str
) -> None:
    with pytest.raises(RankError, match=f"the ranks do not agree: .*{found}"):
        worker_pool.run(check_run_of_a_broken_model, fault)


def report_overlapping_samples() -> list[str]:
    """Claim sample 0 on both ranks."""
    proof = load_chapter(CHAPTER)["proof"]
    return proof.epoch_report(2, 1, [0, 1 + dist.get_rank()], torch.ones(1))


def test_sample_seen_by_two_ranks_is_found(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="saw 4 samples, 3 of them different"):
        worker_pool.run(report_overlapping_samples)


# --- Text. ----------


def test_labels_are_the_next_bytes_and_held_out_text_is_unseen(text: Path) -> None:
    data = load_chapter(CHAPTER)["data"]
    train_text, held_out_text = data.load_text(text, block_size=T)
    whole = text.read_bytes()
    assert bytes(train_text.tolist()) + bytes(held_out_text.tolist()) == whole
    assert len(held_out_text) == pytest.approx(0.05 * len(whole), abs=1)
    dataset = data.WindowDataset(train_text, T, samples=48)
    starts = dataset.starts
    assert len(starts) == len(dataset) == 48
    for index, start in enumerate(starts):
        got, inputs, labels = dataset[index]
        assert got == index and len(labels) == T
        assert bytes(inputs.tolist()) == whole[start : start + T]
        assert bytes(labels.tolist()) == whole[start + 1 : start + T + 1]


def test_windows_never_overlap_in_a_short_text() -> None:
    data = load_chapter(CHAPTER)["data"]
    lengths = range(T + 1, 5 * T)
    counts = []
    for length in lengths:
        dataset = data.WindowDataset(torch.zeros(length, dtype=torch.uint8), T, 48)
        starts = torch.tensor(dataset.starts)
        assert bool((starts.diff() >= T).all())
        assert len(dataset[len(dataset) - 1][2]) == T
        counts.append(len(dataset))
    assert len(counts) == len(lengths) and sorted(set(counts)) == [1, 2, 3, 4]


def test_standard_library_is_the_corpus_in_a_fixed_order() -> None:
    data = load_chapter(CHAPTER)["data"]
    files = data.find_files(None)
    names = [path.name for path in files]
    assert files == data.find_files(None)
    assert "argparse.py" in names and "threading.py" in names
    assert len(files) > 300
    assert "site-packages" not in {part for path in files for part in path.parts}
    assert "test_argparse.py" not in names


def test_folder_of_text_leaves_out_binary_and_hidden_files(tmp_path: Path) -> None:
    data = load_chapter(CHAPTER)["data"]
    (tmp_path / "b.txt").write_bytes(b"b" * 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"a" * 1000)
    (tmp_path / "picture.png").write_bytes(b"\x89\0" * 500)
    (tmp_path / ".hidden").write_bytes(b"h" * 1000)
    parts = data.load_text(tmp_path, T)
    assert bytes(torch.cat(parts).tolist()) == b"a" * 1000 + b"b" * 1000


# --- Snapshots. ----------


def save(path: Path, value: float) -> None:
    """Write a snapshot whose weights are all `value`."""
    snapshot = load_chapter(CHAPTER)["snapshot"]
    model = tiny_model(torch.float32)
    weights = {k: torch.full_like(v, value) for k, v in model.state_dict().items()}
    snapshot.save_snapshot(path, weights, model.config, value, None)


def value_in(path: Path) -> float:
    """Load a snapshot and return the one value that all its weights must have."""
    model, content = load_chapter(CHAPTER)["snapshot"].load_snapshot(path)
    values = {value for p in model.parameters() for value in p.flatten().tolist()}
    assert values == {content["validation_loss"]}
    return values.pop()


def in_child(function: Any, *args: Any) -> int:
    """Fork, run `function` in the child, return the child's process id at once."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function(*args)
        os._exit(1)
    return child


def die_during_save(path: Path, moment: str) -> None:
    """Save, but be killed at a chosen moment."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    snapshot = load_chapter(CHAPTER)["snapshot"]
    real_save = torch.save

    def half_a_save(content: Any, file: Any) -> None:
        buffer = io.BytesIO()
        real_save(content, buffer)
        file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        file.flush()
        die()

    real_replace = os.replace
    patches = {
        "before the first byte": (snapshot.torch, "save", die),
        "in the middle": (snapshot.torch, "save", half_a_save),
        "before the bytes are on the disk": (snapshot.os, "fsync", die),
        "before the rename": (snapshot.os, "replace", die),
        "after the rename": (
            snapshot.os,
            "replace",
            lambda a, b: (real_replace(a, b), die()),
        ),
    }
    with mock.patch.object(*patches[moment]):
        save(path, 2.0)


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("before the first byte", 1.0),
        ("in the middle", 1.0),
        ("before the bytes are on the disk", 1.0),
        ("before the rename", 1.0),
        ("after the rename", 2.0),
    ],
)
def test_kill_at_a_known_moment_leaves_a_whole_snapshot(
    tmp_path: Path, moment: str, left: float
) -> None:
    path = tmp_path / "gpt.pt"
    save(path, 1.0)
    _, status = os.waitpid(in_child(die_during_save, path, moment), 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert value_in(path) == left
    save(path, 3.0)  # what the dead process left does not stand in the way
    assert value_in(path) == 3.0
    assert [file.name for file in tmp_path.iterdir()] == ["gpt.pt"]


def save_for_ever(path: Path) -> None:
    """Write one snapshot after the other, 1.0, 2.0, 1.0, ..."""
    while True:
        save(path, 1.0)
        save(path, 2.0)


def test_kill_at_random_moments_leaves_a_whole_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    save(path, 1.0)
    values = []
    for _ in range(20):
        child = in_child(save_for_ever, path)
        time.sleep(random.uniform(0.01, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        values.append(value_in(path))
    assert len(values) == 20 and set(values) == {1.0, 2.0}


def test_one_process_reads_what_two_ranks_wrote(
    worker_pool: WorkerPool, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gpt.pt"
    words = [*TINY, "--batch-size=4", f"--text={text}", f"--snapshot={path}"]
    (output, _), _ = worker_pool.run(run_main, words)
    content = torch.load(path, weights_only=True)
    names = list(content["model"])
    assert len(names) == 13
    assert not any(name.startswith("module.") for name in names)
    result = python(GENERATE, "--snapshot", path, "--length=20", timeout=60)
    assert result.returncode == 0, result.output
    told = re.findall(r"validation loss (\d\.\d+) in one process", result.stdout)
    (after,) = re.findall(r"(\d\.\d\d) after", output)
    assert len(told) == 1
    assert float(told[0]) == pytest.approx(float(after), abs=0.006)


# --- Bad input: one line, status 2, no group, nothing written. ----------


def complaint(words: list[str], environment: dict[str, str] | None = None) -> str:
    """Run main() in this process up to its refusal; return what it printed."""
    train = load_chapter(CHAPTER)["train"]
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.dict(os.environ, environment or {}),
        mock.patch.object(train.signal, "signal"),
        mock.patch.object(train.dist, "init_process_group") as joined,
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as stopped,
    ):
        train.main()
    assert stopped.value.code == 2
    assert not joined.called
    line, end = errors.getvalue().split("\n", 1)
    assert end == "" and line.startswith("train.py: ")
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size=0"], "--batch-size: '0' is not a whole number of 1 or more"),
        (["--batch_size=many"], "'many' is not a whole number of 1 or more"),
        (["--max-steps=-3"], "--max-steps: '-3' is not a whole number"),
        (["--max_epochs=1.5"], "--max-epochs: '1.5' is not a whole number"),
        (["--lr=nan"], "--lr: 'nan' is not a number above 0"),
        (["--colour=red"], "unrecognized arguments: --colour=red; see --help"),
        (["--heads=3"], "width 128 does not divide by 3 heads; try --width 126"),
        (["--text=no such file"], "--text no such file: no such file or folder"),
        (["--snapshot=missing/gpt.pt"], "there is no folder missing"),
        (["--snapshot=."], "--snapshot . is a folder; name a file in it"),
        (["--samples=31"], "takes 32 samples, an epoch has 31: use fewer ranks"),
    ],
)
def test_bad_words_get_one_clear_line(words: list[str], said: str) -> None:
    assert said in complaint(words)


def test_more_ranks_than_samples(text: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}
    line = complaint([*TINY, "--batch-size=1", f"--text={text}"], ranks)
    assert "a step of 64 rank(s) takes 64 samples, an epoch has 48" in line


def test_half_a_launcher() -> None:
    assert "RANK is set but MASTER_ADDR is not" in complaint([], {"RANK": "0"})


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no text below" in complaint([f"--text={tmp_path / 'empty'}"])
    (tmp_path / "short.txt").write_text("too short")
    line = complaint([f"--text={tmp_path / 'short.txt'}"])
    assert "holds 9 bytes of text" in line and "at least 2581" in line
    # Links that lead round in a circle cannot be read by anybody, not even by root.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").symlink_to(tmp_path / "folder" / "a")
    assert "no text below" in complaint([f"--text={tmp_path / 'folder'}"])
    with mock.patch.object(Path, "read_bytes", side_effect=PermissionError(13, "No")):
        assert "No" in complaint([f"--text={tmp_path / 'short.txt'}"])


def test_shortest_text_that_the_message_names_is_long_enough(tmp_path: Path) -> None:
    data = load_chapter(CHAPTER)["data"]
    path = tmp_path / "text"
    path.write_bytes(b"x" * 2581)
    _, held_out_text = data.load_text(path, block_size=128)
    assert len(held_out_text) >= 129


def test_snapshot_that_must_not_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "gpt.pt"
    save(path, 1.0)
    whole = path.read_bytes()
    assert "belongs to a model of GPTConfig(block_size=16" in complaint(
        [f"--snapshot={path}"]
    )
    damages = [whole[: len(whole) // 2], b"", b"not a snapshot"]
    assert len(damages) == 3
    for damaged in damages:
        path.write_bytes(damaged)
        line = complaint([f"--snapshot={path}"])
        assert "is damaged or is no snapshot; --snapshot will not overwrite" in line
        assert path.read_bytes() == damaged
    torch.save({"weights": 1}, path)
    assert "holds another model than this GPT" in complaint([f"--snapshot={path}"])
    assert [file.name for file in tmp_path.iterdir()] == ["gpt.pt"]


def test_snapshot_folder_without_permission(tmp_path: Path) -> None:
    with mock.patch.object(os, "access", return_value=False):
        line = complaint([f"--snapshot={tmp_path / 'gpt.pt'}"])
    assert f"no permission to write in {tmp_path}" in line


def test_options_that_cannot_work_here() -> None:
    failure = RuntimeError("no C++ compiler,\nalas\nand a long explanation")
    with mock.patch.object(torch, "compile", side_effect=failure):
        line = complaint(["--compile"])
    assert line == (
        "train.py: --compile does not work here (no C++ compiler, alas); leave it out"
    )
    with mock.patch.object(torch, "mm", side_effect=RuntimeError("no bfloat16")):
        assert "--amp does not work here (no bfloat16)" in complaint(["--amp"])


def test_generate_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    missing = python(GENERATE, "--snapshot", tmp_path / "gpt.pt", timeout=60)
    assert missing.returncode == 2
    assert missing.output.startswith(f"generate.py: no snapshot at {tmp_path}/gpt.pt")
    assert missing.output.count("\n") == 1


# --- Real launches. ----------


def test_mistake_under_torchrun_is_said_once(tmp_path: Path) -> None:
    result = torchrun(TRAIN, "--batch-size=0", nproc=3, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("train.py: argument --batch-size: '0' is not") == 1
    assert "exitcode  : 2" in result.stderr
    assert list(tmp_path.iterdir()) == []


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
    assert "batch size x batches x ranks = 4 x 4 x 3 = 48" in result.stdout
    assert "check: 0 weights differ on 3 rank(s)" in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_compiled_run_works_or_says_why_not(text: Path, tmp_path: Path) -> None:
    words = [*TINY, "--batch-size=4", "--max-steps=2", "--compile", "--text", text]
    compilers = [os.environ.get("CXX", ""), "g++", "clang++"]
    # PyTorch hands the compiler its own folder unquoted: a space in it is fatal.
    can_compile = any(map(shutil.which, compilers)) and " " not in sys.prefix
    if can_compile:
        result = python(TRAIN, *words, cwd=tmp_path, timeout=240)
        assert result.returncode == 0, result.output
        assert "check: 0 weights differ on 1 rank(s)" in result.stdout
    else:
        result = python(TRAIN, *words, cwd=tmp_path)
        assert result.returncode == 2
        assert result.stderr.startswith("train.py: --compile does not work here (")
        assert result.stderr.count("\n") == 1


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
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert alive == []
        assert launcher.wait(timeout=30) != 0
        if ending == "ctrl-c":
            # The launcher explains itself; our ranks add no traceback of their own.
            assert 'train.py", line' not in output
        else:
            # A rank that has not looked yet may see the other one's end before it does.
            assert "train.py: the launcher has died" in output
    finally:
        launcher.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


# --- What people get wrong: each row of the README's table. ----------


def test_labels_that_copy_the_inputs_teach_nothing(text: Path) -> None:
    data = load_chapter(CHAPTER)["data"]
    train_text, _ = data.load_text(text, T)
    inputs, labels = data.WindowDataset(train_text, T, 64).batch(range(64))
    next_byte_loss = {}
    for name, targets in {"next byte": labels, "copy": inputs}.items():
        model = tiny_model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            model(inputs, targets).backward()
            optimizer.step()
        assert model(inputs, targets) < 1.5  # in both cases it looks like learning
        next_byte_loss[name] = model(inputs, labels).item()
    guess = torch.log(torch.tensor(256.0)).item()
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


def exchanges_with_no_sync_around(part: str) -> int:
    """Count the all-reduces of one backward pass."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(3, 3))
    exchanges = 0

    def counting_hook(
        process_group: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        nonlocal exchanges
        exchanges += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp_model.register_comm_hook(None, counting_hook)
    if part == "both":
        with ddp_model.no_sync():
            ddp_model(torch.ones(1, 3)).sum().backward()
    else:
        output = ddp_model(torch.ones(1, 3)).sum()
        with ddp_model.no_sync():
            output.backward()
    return exchanges


def test_no_sync_around_backward_alone_saves_nothing(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(exchanges_with_no_sync_around, "both") == [0, 0]
    assert worker_pool.run(exchanges_with_no_sync_around, "backward") == [1, 1]


def test_torchrun_restarts_nothing_by_default() -> None:
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(["script.py"]).max_restarts == 0


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


def test_full_run_of_the_front_page_keeps_its_promise() -> None:
    # The README runner repeats that run and compares it with these figures.
    readme = (ROOT / "README.md").read_text()
    ((before, after),) = re.findall(
        r"(\d\.\d\d) nats per byte before, (\d\.\d\d)", readme
    )
    assert 5.2 < float(before) < 6.0  # a guess among 256 bytes costs log(256) = 5.55
    assert float(after) < 2.0  # 2.1 with the tolerance of the README


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


@pytest.mark.parametrize(
    ("early", "late", "ends"),
    [
        ("", "del ddp_model", False),
        ("import torch.distributed.nn", "", False),
        ("import torch.distributed.nn", "del ddp_model", True),
    ],
    ids=["held by default arguments", "held by DDP", "held by nobody"],
)
def test_a_group_ends_only_with_its_last_reference(
    tmp_path: Path, early: str, late: str, ends: bool
) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING.format(early=early, late=late))
    result = python(script)
    assert result.returncode in (0, -signal.SIGABRT), result.stderr
    assert (int(result.stdout) == 0) is ends
