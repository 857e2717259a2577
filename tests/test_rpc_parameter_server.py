"""Chapter 04: a model in three kinds of process, held against one process alone."""

import hashlib
import json
import os
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from launch import ROOT, Result, free_port, python
from scripts import load_chapter

CHAPTER = "04_rpc_parameter_server"
TRAIN = ROOT / CHAPTER / "train.py"

# A run of train.py's own processes in which every step of every trainer is recorded.
RECORDER = """
import hashlib
import json
import sys

sys.path.insert(0, {chapter!r})
import torch
import train
import trainer
import world

original = trainer.hybrid_step


def recording_step(model, optimizer, batch):
    loss = original(model, optimizer, batch)
    record = {{"loss": loss.item()}}
    weights = [p.detach().numpy().tobytes() for p in model.dense.parameters()]
    record["dense"] = hashlib.sha256(b"".join(weights)).hexdigest()
    record["looked_up"] = hashlib.sha256(batch[0].numpy().tobytes()).hexdigest()
    if not recording_step.called:
        recording_step.called = True
        try:
            model.table(batch[0], batch[1])
        except AttributeError as error:
            record["calling"] = str(error)
    rank = train.dist.get_rank()
    with open(f"{folder}/trainer{{rank}}", "a") as out:
        print(json.dumps(record), file=out)
    return loss


recording_step.called = False


def body(name, store, settings, file):
    trainer.hybrid_step = recording_step
    train.be_one(name, store, settings, file)


if __name__ == "__main__":
    settings = trainer.Settings(2, 2**15, 16, 3, None, 0.1, 0)
    names = ["master", trainer.SERVER, "trainer0", "trainer1"]
    world.launch(names, body, settings, None)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[Any]]:
    """Make the default run of `train.py`; return it and what each trainer recorded."""
    folder = tmp_path_factory.mktemp("a folder")
    script = folder / "recorder.py"
    text = RECORDER.format(chapter=str(ROOT / CHAPTER), folder=str(folder))
    script.write_text(textwrap.dedent(text))
    result = python(script, timeout=120)
    assert result.returncode == 0, result.output
    files = [folder / f"trainer{rank}" for rank in range(2)]
    return result, [list(map(json.loads, f.read_text().splitlines())) for f in files]


def steps_in_epoch() -> int:
    """Count the steps of two trainers with 16 samples each."""
    training, _ = load_chapter(CHAPTER)["data"].load_samples()
    return len(training) // 32


@pytest.mark.smoke
def test_dense_part_is_the_same_on_both_trainers_after_every_step(
    recorded: tuple[Result, list[Any]],
) -> None:
    of_zero, of_one = ([step["dense"] for step in one] for one in recorded[1])
    assert len(of_zero) == 3 * steps_in_epoch()
    assert of_zero == of_one
    assert len(set(of_zero)) == len(of_zero)  # and each step changes it


def test_trainers_never_share_a_batch(recorded: tuple[Result, list[Any]]) -> None:
    batches = [step["looked_up"] for one in recorded[1] for step in one]
    assert len(batches) == len(set(batches)) == 6 * steps_in_epoch()


def test_printed_loss_is_the_mean_over_trainers(
    recorded: tuple[Result, list[Any]],
) -> None:
    (result, trainers), steps = recorded, steps_in_epoch()
    printed = [float(x) for x in re.findall(r"mean loss (\d\.\d+)", result.stdout)]
    assert len(printed) == 3
    for epoch in range(3):
        own = [
            sum(step["loss"] for step in one[steps * epoch :][:steps]) / steps
            for one in trainers
        ]
        assert printed[epoch] == pytest.approx(sum(own) / 2, abs=1e-3)
        assert own[0] != own[1]


def test_accuracy_on_held_out_files_is_far_above_chance(
    recorded: tuple[Result, list[Any]],
) -> None:
    chance, untrained = map(
        float,
        re.findall(r"chance (.*)%, untrained (.*)% right", recorded[0].stdout)[0],
    )
    right = [float(x) for x in re.findall(r"held out (\S+)% right", recorded[0].stdout)]
    assert chance == pytest.approx(100 / 6, abs=0.1)
    assert untrained < 1.5 * chance
    assert len(right) == 3
    assert right[-1] > 2.5 * chance


def test_every_line_says_who_speaks_and_nothing_else_is_printed(
    recorded: tuple[Result, list[Any]],
) -> None:
    lines = recorded[0].output.splitlines()
    assert len(lines) == 11
    speakers = ("master: ", "parameter server: ", "trainer 0: ")
    assert [line for line in lines if not line.startswith(speakers)] == []
    assert len([line for line in lines if line.startswith("master: check: ")]) == 3


def test_a_remote_module_that_has_travelled_cannot_be_called(
    recorded: tuple[Result, list[Any]],
) -> None:
    errors = [one[0]["calling"] for one in recorded[1]]
    assert len(errors) == 2
    for error in errors:
        assert "'RemoteModule' object has no attribute '_backward_hooks'" in error


def test_one_trainer_equals_local_training_also_when_resumed(
    tmp_path: Path,
) -> None:
    steps, path = 120, tmp_path / "a table_1.pt"
    start = 0.1 * torch.randn(2**15, 32, generator=torch.Generator().manual_seed(5))
    torch.save({"table": start}, path)
    # The table's name keeps its underscore; an option may have one for a hyphen.
    words = ["--trainers=1", f"--max_steps={steps}", f"--table={path}"]
    result = python(TRAIN, *words, timeout=120)
    assert result.returncode == 0, result.output
    ended = torch.load(path, weights_only=True)["table"]
    # The same in one process, without a line of the chapter's training code.
    modules = load_chapter(CHAPTER)
    training, _ = modules["data"].load_samples(2**15)
    dense = modules["model"].dense_part(32, 6, 0)
    bag = torch.nn.EmbeddingBag(2**15, 32, mode="sum", _weight=start.clone())
    optimizer = torch.optim.SGD([*bag.parameters(), *dense.parameters()], lr=0.1)
    batches = training.batches(0, 16)
    seen = torch.zeros(2**15, dtype=torch.bool)
    for _ in range(steps):
        indices, offsets, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(dense(bag(indices, offsets)), labels).backward()
        optimizer.step()
        seen[indices] = True
    assert (ended - bag.weight.detach()).abs().max() < 1e-5
    # Rows never looked up are those of the file, so the run did start from it.
    assert 1000 < int(seen.sum()) < 2**15
    assert torch.equal(ended[~seen], start[~seen])
    assert bool((ended[seen] != start[seen]).any(dim=1).all())
    assert not path.with_name(path.name + ".tmp").exists()


def test_samples_are_balanced_and_no_file_is_on_both_sides() -> None:
    data = load_chapter(CHAPTER)["data"]
    training, held_out = data.load_samples()
    for samples in (training, held_out):
        counts = samples.labels.bincount()
        assert len(counts) == 6
        assert counts.min() == counts.max() > 100
        assert samples.starts[-1] == len(samples.indices)
        assert 0 <= samples.indices.min() <= samples.indices.max() < data.ROWS
    assert len(data.PACKAGES) == 6
    for package in data.PACKAGES:
        train_files, held_files = map(set, data.find_sources(package))
        assert train_files
        assert held_files
        assert not train_files & held_files
    assert data.row_of("import", 2**15) == 19997  # on every machine, in every process


def test_batches_hold_whole_samples_with_their_labels() -> None:
    data = load_chapter(CHAPTER)["data"]
    training, _ = data.load_samples()
    numbers = torch.tensor([7, 0, 4000])
    indices, offsets, labels = training.batch(numbers)
    starts, ends = offsets.tolist(), [*offsets.tolist()[1:], len(indices)]
    assert len(starts) == 3
    for bag, number in enumerate([7, 0, 4000]):
        begin, end = training.starts[number], training.starts[number + 1]
        assert torch.equal(
            indices[starts[bag] : ends[bag]], training.indices[begin:end]
        )
        assert labels[bag] == training.labels[number]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which train.py refuses these words."""
    options = load_chapter(CHAPTER)["options"]
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.dict(os.environ, environment, clear=True),
        pytest.raises(SystemExit) as stop,
    ):
        options.parse_args()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


ADDRESS = ("--master-addr=127.0.0.1", "--master-port=1234")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--trainers=0"], "'0' is not a whole number of 1 or more"),
        (["--lr=-1"], "'-1' is not a number above 0"),
        (["--role=boss"], "invalid choice"),
        (["--role=master"], "--role master needs --master-addr"),
        (["--role=trainer", ADDRESS[0]], "--role trainer needs --master-port"),
        (["--role=trainer", *ADDRESS], "--role trainer needs --rank"),
        (["--role=master", "--rank=0", *ADDRESS], "no other role takes it"),
        (["--role=trainer", "--rank=2", *ADDRESS], "--rank must be 0 to 1"),
        (["--role=master", *ADDRESS, "--table=x"], "belongs to --role parameter"),
        (["--master-port=1234"], "goes with --role"),
        (["--role=master", ADDRESS[0], "--master-port=70000"], "1 to 65535"),
        (["--table=/no/such/folder/x"], "there is no folder"),
        (["--batch-size=5000"], "--trainers times --batch-size is at most "),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], answer: str
) -> None:
    assert answer in refusal(capsys, *words)


def test_a_damaged_table_is_refused_and_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, table = tmp_path / "table.pt", load_chapter(CHAPTER)["table"]
    table.save_table(path, torch.ones(2**15, 32))
    assert torch.equal(table.load_table(path), torch.ones(2**15, 32))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is damaged or is no table" in refusal(capsys, f"--table={path}")
    assert path.read_bytes() == whole[: len(whole) // 2]
    table.save_table(path, torch.ones(8, 32))
    assert "holds a table of (8, 32)" in refusal(capsys, f"--table={path}")


def test_who_saves_second_waits_and_has_nothing_to_do(tmp_path: Path) -> None:
    modules, path = load_chapter(CHAPTER), tmp_path / "table.pt"
    table, begun, may_end = modules["table"], threading.Event(), threading.Event()
    write = table.save_table

    def slow_save(*args: Any) -> None:
        begun.set()
        assert may_end.wait(30)
        write(*args)

    with (
        mock.patch.object(table, "file", [path]),
        mock.patch.object(table, "held", [modules["model"].Table(4, 32, 0)]),
        mock.patch.object(table, "save_table", side_effect=slow_save) as save,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(table.save_once)
        assert begun.wait(30)
        second = pool.submit(table.save_once)
        time.sleep(0.2)
        assert not second.done()  # or it would let the process end, in mid-file
        may_end.set()
        assert (first.result(), second.result()) == (path, None)
    assert save.call_count == 1
    assert table.load_table(path).shape == (4, 32)


def test_a_call_that_comes_too_soon_waits_for_the_servers_file(tmp_path: Path) -> None:
    table, path = load_chapter(CHAPTER)["table"], tmp_path / "table.pt"
    table.save_table(path, torch.ones(4, 32))
    with (
        mock.patch.object(table, "file", []) as file,
        mock.patch.object(table, "ready", threading.Event()) as ready,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(table.shape_in_file)
        time.sleep(0.2)
        assert not answer.done()
        file.append(path)
        ready.set()
        assert answer.result() == (4, 32)


def test_a_crash_while_saving_leaves_the_old_table(tmp_path: Path) -> None:
    path, table = tmp_path / "table.pt", load_chapter(CHAPTER)["table"]
    table.save_table(path, torch.ones(4, 32))
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    for name in ("fsync", "replace"):
        with (
            mock.patch.object(table.os, name, side_effect=OSError("power cut")),
            pytest.raises(OSError, match="power cut"),
        ):
            table.save_table(path, torch.zeros(4, 32))
        assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_the_size_of_a_table_is_the_masters_to_decide(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    modules, path = load_chapter(CHAPTER), tmp_path / "table.pt"
    options, table, train = (modules[name] for name in ("options", "table", "train"))
    table.save_table(path, torch.ones(8, 32))
    # The server is not told how many rows there are to be, nor how large a batch is.
    words = ["train.py", "--role=parameter_server", *ADDRESS, f"--table={path}"]
    with (
        mock.patch.object(sys, "argv", [*words, "--trainers=4000"]),
        mock.patch.dict(os.environ) as environment,
    ):
        environment.pop("RANK", None)
        assert options.parse_args().table == path
    # The master asks for it before anything is made.
    calls: list[str] = []

    def call_here(to: str, function: Any) -> Any:
        assert to == "parameter_server"
        calls.append(function.__name__)
        return function()

    settings = modules["trainer"].Settings(2, 2**15, 16, 3, None, 0.1, 0)
    with (
        mock.patch.object(table, "file", [path]),
        mock.patch.object(table, "ready", threading.Event()) as ready,
        mock.patch.object(table, "nobody_needs_it", threading.Event()) as over,
        mock.patch.object(train.rpc, "rpc_sync", call_here),
        mock.patch.object(train, "RemoteModule", side_effect=AssertionError),
    ):
        ready.set()
        assert not train.be_master(settings)
        assert over.is_set()
    assert calls == ["shape_in_file", "release"]
    assert capsys.readouterr().out == (
        "master: the server's file holds a table of (8, 32), not (32768, 32); give "
        "--rows as then, or the server another --table\n"
    )
    assert torch.equal(table.load_table(path), torch.ones(8, 32))


def group_of_trainer_zero(
    body: Callable[..., None], *more: Any
) -> tuple[str, list[torch.device], list[str]]:
    """Let a script form its group as if there were two GPUs.

    Returns:
        The backend, the devices that are used, and what is going to be said of them.
    """
    modules = load_chapter(CHAPTER)
    store = modules["meeting"].host_store("127.0.0.1")
    store.set("machine 1", socket.gethostname())
    settings = modules["trainer"].Settings(2, 2**15, 16, 3, None, 0.1, 0)
    cuda, devices, lines = torch.device("cuda"), [], []
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=cuda),
        mock.patch.object(torch.accelerator, "device_count", return_value=2),
        mock.patch.object(torch.accelerator, "set_device_index"),
        mock.patch.object(modules["train"], "used_devices", devices),
        mock.patch.object(modules["train"], "first_line", lines),
        mock.patch.object(modules["train"], "in_group", threading.Event()) as in_group,
        mock.patch.object(dist, "init_process_group") as form,
    ):
        body("trainer0", store, settings, *more)
        assert in_group.is_set()
    (backend,) = form.call_args.args
    return backend, devices, lines


def test_what_stays_on_the_cpu_meets_by_gloo_also_where_there_are_gpus() -> None:
    modules = load_chapter(CHAPTER)
    group = group_of_trainer_zero(modules["train"].be_one, None)
    line = "device: cuda with nccl (2 cuda, one for each local rank)"
    assert group == ("nccl", [torch.device("cuda", 0)], [line])
    # `asynchronous.py` makes its dense part on the CPU, and says nothing of devices.
    group = group_of_trainer_zero(modules["asynchronous"].be_one_of_them)
    assert group == ("gloo", [torch.device("cpu")], [])


def test_two_meeting_points_need_two_ports() -> None:
    meeting, port = load_chapter(CHAPTER)["meeting"], free_port()
    first = meeting.host_store("127.0.0.1", port)
    assert first.port == port
    with pytest.raises(meeting.PortTaken, match="Address already in use"):
        meeting.host_store("127.0.0.1", port)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
