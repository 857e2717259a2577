"""Chapter 04: a model in three kinds of process, held against one process alone."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import socket
import sys
import textwrap
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from launch import ROOT, LaunchTimeout, Result, free_port, python, torchrun
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "04_rpc_parameter_server"
TRAIN = ROOT / CHAPTER / "train.py"

# A run of train.py's own processes in which every step of every trainer is recorded.
RECORDER = """
import contextlib
import hashlib
import io
import json
import sys
from argparse import Namespace

sys.path.insert(0, {chapter!r})
import torch
import roles
import served_table
import supervised_roles
import train

original = train.hybrid_step


def recording_step(model, optimizer, batch):
    loss = original(model, optimizer, batch)
    record = {{"loss": loss.item()}}
    weights = [p.detach().numpy().tobytes() for p in model.dense.parameters()]
    record["dense"] = hashlib.sha256(b"".join(weights)).hexdigest()
    record["parts"] = [hashlib.sha256(one).hexdigest() for one in weights]
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


def recording_trainer(*arguments):
    train.hybrid_step = recording_step
    call, numbers = train.rpc.rpc_sync, []

    def recording_call(*args, **kwargs):
        answer = call(*args, **kwargs)
        parts = answer if isinstance(answer, tuple) else (answer,)
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        numbers.append(sum(tensor.numel() for tensor in tensors))
        return answer

    accuracy, judged = train.accuracy, []

    def recording_accuracy(model, samples):
        judged.append(len(samples))
        return accuracy(model, samples)

    train.rpc.rpc_sync, train.accuracy = recording_call, recording_accuracy
    result = original_trainer(*arguments)
    with open(f"{folder}/answers{{train.dist.get_rank()}}", "w") as out:
        json.dump([numbers, judged], out)
    return result


original_trainer, train.be_trainer = train.be_trainer, recording_trainer


if __name__ == "__main__":
    options = Namespace(
        trainers=2, rows=2**15, batch_size=16, epochs=2, max_steps=10**9, lr=0.1,
        seed=0, table=None,
    )
    bodies = {{"master": train.be_master, train.SERVER: served_table.serve}}
    supervised_roles.launch(roles.names_of_roles(2), bodies, options)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any, Any]:
    """Run two epochs of `train.py`; return the run and what each trainer recorded.

    That is a record of each step, and how many numbers each call has brought it.
    """
    folder = tmp_path_factory.mktemp("a folder")
    script = folder / "recorder.py"
    text = RECORDER.format(chapter=str(ROOT / CHAPTER), folder=str(folder))
    script.write_text(textwrap.dedent(text))
    result = python(script)
    assert result.returncode == 0, result.output
    files = [folder / f"trainer{rank}" for rank in range(2)]
    steps = [list(map(json.loads, f.read_text().splitlines())) for f in files]
    answers = [json.loads((folder / f"answers{rank}").read_text()) for rank in range(2)]
    return result, steps, answers


def steps_in_epoch() -> int:
    """Count the steps of two trainers with 16 samples each."""
    training, _ = load_chapter(CHAPTER)["classifier"].load_samples()
    return len(training) // 32


@pytest.mark.smoke
def test_dense_part_is_the_same_on_both_trainers_after_every_step(
    recorded: tuple[Result, Any, Any],
) -> None:
    of_zero, of_one = ([step["dense"] for step in one] for one in recorded[1])
    assert len(of_zero) == 2 * steps_in_epoch()
    assert of_zero == of_one
    assert len(set(of_zero)) == len(of_zero)  # and each step changes it


def test_each_step_changes_every_part_of_the_dense_part(
    recorded: tuple[Result, Any, Any],
) -> None:
    parts = list(zip(*(step["parts"] for step in recorded[1][0]), strict=True))
    assert len(parts) == 6
    for digests in parts:
        assert len(set(digests)) == len(digests) == 2 * steps_in_epoch()


def test_trainers_never_share_a_batch(recorded: tuple[Result, Any, Any]) -> None:
    batches = [step["looked_up"] for one in recorded[1] for step in one]
    assert len(batches) == len(set(batches)) == 4 * steps_in_epoch()


def test_the_whole_table_comes_to_no_trainer(
    recorded: tuple[Result, Any, Any],
) -> None:
    # For the checks: the rows that have moved, and of one batch gradients and rows.
    numbers = [brought for brought, _ in recorded[2]]
    assert len(numbers) == 2
    assert min(map(len, numbers)) >= 3
    assert max(map(max, numbers)) < 2**15 * 32 / 10


def test_printed_loss_is_the_mean_over_trainers(
    recorded: tuple[Result, Any, Any],
) -> None:
    (result, trainers, _), steps = recorded, steps_in_epoch()
    printed = [float(x) for x in re.findall(r"mean loss (\d\.\d+)", result.stdout)]
    assert len(printed) == 2
    for epoch in range(2):
        own = [
            sum(step["loss"] for step in one[steps * epoch :][:steps]) / steps
            for one in trainers
        ]
        assert printed[epoch] == pytest.approx(sum(own) / 2, abs=1e-3)
        assert own[0] != own[1]


def test_accuracy_on_held_out_files_is_far_above_chance(
    recorded: tuple[Result, Any, Any],
) -> None:
    untrained, chance = map(
        float,
        re.findall(r"untrained (.*)% right, by chance (.*)%", recorded[0].stdout)[0],
    )
    right = [float(x) for x in re.findall(r"\| (\S+)% right", recorded[0].stdout)]
    assert chance == pytest.approx(100 / 6, abs=0.1)
    assert untrained < 1.5 * chance
    assert len(right) == 2
    assert right[-1] > 2.5 * chance
    held_out = len(load_chapter(CHAPTER)["classifier"].load_samples()[1])
    assert [judged for _, judged in recorded[2]] == [[held_out] * 3] * 2


def test_every_line_says_who_speaks_and_nothing_else_is_printed(
    recorded: tuple[Result, Any, Any],
) -> None:
    lines = recorded[0].output.splitlines()
    assert len(lines) == 9
    speakers = ("master: ", "parameter server: ", "trainer 0: ")
    assert [line for line in lines if not line.startswith(speakers)] == []
    assert len([line for line in lines if line.startswith("master: check: ")]) == 3


def test_a_remote_module_that_has_travelled_cannot_be_called(
    recorded: tuple[Result, Any, Any],
) -> None:
    errors = [one[0]["calling"] for one in recorded[1]]
    assert len(errors) == 2
    for error in errors:
        assert "'RemoteModule' object has no attribute '_backward_hooks'" in error


@pytest.mark.slow
def test_one_trainer_equals_local_training_also_when_resumed(
    tmp_path: Path,
) -> None:
    steps, path = 120, tmp_path / "a table_1.pt"
    start = 0.1 * torch.randn(2**15, 32, generator=torch.Generator().manual_seed(5))
    torch.save({"table": start}, path)
    # The table's name keeps its underscore; an option may have one for a hyphen.
    words = ["--trainers=1", f"--max_steps={steps}", f"--table={path}"]
    result = python(TRAIN, *words)
    assert result.returncode == 0, result.output
    ended = torch.load(path, weights_only=True)["table"]
    # The same in one process, without a line of the chapter's training code.
    modules = load_chapter(CHAPTER)
    training, _ = modules["classifier"].load_samples(2**15)
    dense = modules["classifier"].dense_part()
    bag = torch.nn.EmbeddingBag(2**15, 32, mode="sum", _weight=start.clone())
    optimizer = torch.optim.SGD([*bag.parameters(), *dense.parameters()], lr=0.1)
    batches = training.batches(16)
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
    data = load_chapter(CHAPTER)["classifier"]
    training, held_out = data.load_samples()
    for samples in (training, held_out):
        counts = samples.labels.bincount()
        assert len(counts) == 6
        assert counts.min() == counts.max() > 100
        assert len(samples.bags) == len(samples.labels)
        assert min(map(len, samples.bags)) > 0
        indices = torch.cat(samples.bags)
        assert 0 <= indices.min() <= indices.max() < data.ROWS
    assert len(data.PACKAGES) == 6
    for package in data.PACKAGES:
        train_files, held_files = map(set, data.find_sources(package))
        assert train_files
        assert held_files
        assert not train_files & held_files


def test_batches_hold_whole_samples_with_their_labels() -> None:
    data = load_chapter(CHAPTER)["classifier"]
    training, _ = data.load_samples()
    numbers = torch.tensor([7, 0, 4000])
    indices, offsets, labels = training.batch(numbers)
    starts, ends = offsets.tolist(), [*offsets.tolist()[1:], len(indices)]
    assert len(starts) == 3
    for bag, number in enumerate([7, 0, 4000]):
        assert torch.equal(indices[starts[bag] : ends[bag]], training.bags[number])
        assert labels[bag] == training.labels[number]


def test_a_words_row_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "lines.py"
    path.write_text("import torch\n" * 5)
    # zlib.crc32(b"import") % 2**15: Python's own hash differs between processes.
    assert load_chapter(CHAPTER)["classifier"].cut([path], 2**15)[0][0] == 19997


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which train.py refuses these words."""
    train = load_chapter(CHAPTER)["train"]
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.dict(os.environ, environment, clear=True),
        pytest.raises(SystemExit) as stop,
    ):
        train.main()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


ADDRESS = ("--master-addr=127.0.0.1", "--master-port=1234")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--trainers=0"], "'0' is no number from 1 to 62"),
        (["--lr=-1"], "'-1' is no number from "),
        (["--role=boss"], "invalid choice"),
        (["--role=master"], "--role master needs --master-addr"),
        (["--role=trainer", ADDRESS[0]], "--role trainer needs --master-port"),
        (["--role=trainer", *ADDRESS], "--role trainer needs --rank"),
        (["--role=master", "--rank=0", *ADDRESS], "no other role takes it"),
        (["--role=trainer", "--rank=2", *ADDRESS], "--rank is at most 1"),
        (["--role=master", *ADDRESS, "--table=x"], "belongs to --role parameter"),
        (["--master-port=1234"], "goes with --role"),
        (["--role=master", ADDRESS[0], "--master-port=70000"], "1 to 65535"),
        (["--table=/no/such/folder/x"], "is no folder that one can write to"),
        (["--batch-size=5000"], "a step of all trainers takes 10000 of "),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], answer: str
) -> None:
    assert answer in refusal(capsys, *words)


def test_it_refuses_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    modules, refused = load_chapter(CHAPTER), 0
    for start in (modules["roles"].start_roles, modules["supervised_roles"].launch):
        with pytest.raises(SystemExit) as stop:
            start(["one"], {})
        assert stop.value.code == 2
        assert "start it with python, not torchrun" in capsys.readouterr().err
        refused += 1
    assert refused == 2


def test_a_damaged_table_is_refused_and_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, table = tmp_path / "table.pt", load_chapter(CHAPTER)["table_file"]
    table.save_table(path, torch.ones(2**15, 32))
    assert torch.equal(table.load_table(path), torch.ones(2**15, 32))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is damaged or is no table" in refusal(capsys, f"--table={path}")
    assert path.read_bytes() == whole[: len(whole) // 2]


def test_who_saves_second_waits_and_has_nothing_to_do(tmp_path: Path) -> None:
    modules, path = load_chapter(CHAPTER), tmp_path / "table.pt"
    served, begun, may_end = (
        modules["served_table"],
        threading.Event(),
        threading.Event(),
    )
    write = served.save_table

    def slow_save(*args: Any) -> None:
        begun.set()
        assert may_end.wait(30)
        write(*args)

    server = served.TableServer()
    server.file, server.table = path, modules["classifier"].Table(4, 32, 0)
    with (
        mock.patch.object(served, "HERE", server),
        mock.patch.object(served, "save_table", side_effect=slow_save) as save,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(server.save_once)
        assert begun.wait(30)
        second = pool.submit(server.save_once)
        time.sleep(0.2)
        assert not second.done()  # or it would let the process end, in mid-file
        may_end.set()
        assert (first.result(), second.result()) == (None, None)
    assert save.call_count == 1
    assert modules["table_file"].load_table(path).shape == (4, 32)


def test_a_call_that_comes_too_soon_waits_for_the_servers_file(tmp_path: Path) -> None:
    modules, path = load_chapter(CHAPTER), tmp_path / "table.pt"
    served = modules["served_table"]
    modules["table_file"].save_table(path, torch.ones(4, 32))
    server = served.TableServer()
    with mock.patch.object(served, "HERE", server), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.other_shape, 8)
        time.sleep(0.2)
        assert not answer.done()
        server.file = path
        server.is_ready.set()
        assert "holds a table of (4, 32), not (8, 32)" in answer.result()


def test_a_digest_changes_with_any_bit_of_its_row() -> None:
    digests = load_chapter(CHAPTER)["served_table"].row_digests
    weights = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    before = digests(weights)
    assert len(set(before.tolist())) == 3
    for bit in range(32):
        for column in range(32):
            changed = weights.clone()
            changed.view(torch.int32)[1, column] ^= -(2**31) if bit == 31 else 2**bit
            is_equal = (digests(changed) == before).tolist()
            assert is_equal == [True, False, True]
    # Nor do two changes that cancel out in a sum hide each other.
    assert digests(weights.roll(1, dims=1))[0] != before[0]


def test_a_crash_while_saving_leaves_the_old_table(tmp_path: Path) -> None:
    path, table = tmp_path / "table.pt", load_chapter(CHAPTER)["table_file"]
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
    roles, served, train = (
        modules[name] for name in ("supervised_roles", "served_table", "train")
    )
    modules["table_file"].save_table(path, torch.ones(8, 32))
    # The server is not told how many rows there are to be, nor how large a batch is.
    words = ["train.py", "--role=parameter_server", *ADDRESS, f"--table={path}"]
    with (
        mock.patch.object(sys, "argv", [*words, "--trainers=62"]),
        mock.patch.object(train, "run_roles") as run_roles,
    ):
        train.main()
    options = run_roles.call_args.args[1]
    roles.check_role(options)
    assert options.role == "parameter_server"
    assert options.table == path
    # The master asks for it before anything is made.
    calls: list[str] = []

    def call_here(to: str, function: Any, args: Any = ()) -> Any:
        assert to == "parameter_server"
        calls.append(function.__name__)
        return function(*args)

    server = served.TableServer()
    server.file = path
    server.is_ready.set()
    with (
        mock.patch.object(served, "HERE", server),
        mock.patch.object(train.rpc, "rpc_sync", call_here),
        mock.patch.object(train, "RemoteModule", side_effect=AssertionError),
        pytest.raises(SystemExit) as stop,
    ):
        train.be_master(("127.0.0.1", 1234), options)
    assert (stop.value.code, calls) == (2, ["other_shape"])
    assert server.is_over.is_set()  # the server ends too
    refused = "the server's file holds a table of (8, 32), not (32768, 32); give --rows"
    assert refused in capsys.readouterr().err
    assert torch.equal(modules["table_file"].load_table(path), torch.ones(8, 32))


def group_of_a_trainer(
    join: Callable[[str, int], Any], devices: int = 2, other: str = ""
) -> tuple[Any, ...]:
    """Let a trainer form its group as if there were GPUs, and the other one on `other`.

    Returns the backend, what `join` returns, what is said of them, and the timeout.
    """
    store = load_chapter(CHAPTER)["heartbeats"].host_store("127.0.0.1")
    trainers = dist.PrefixStore("trainers", store)
    trainers.set("host 1", other or socket.gethostname())
    cuda, printed = torch.device("cuda"), io.StringIO()
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=cuda),
        mock.patch.object(torch.accelerator, "device_count", return_value=devices),
        mock.patch.object(torch.accelerator, "set_device_index"),
        mock.patch.object(dist, "init_process_group") as form,
        mock.patch.object(dist, "destroy_process_group") as leave,
        contextlib.redirect_stdout(printed),
    ):
        joined = join("127.0.0.1", store.port)
    assert leave.call_count == 1
    (backend,) = form.call_args.args
    return backend, joined, printed.getvalue(), form.call_args.kwargs.get("timeout")


def test_what_stays_on_the_cpu_uses_gloo_also_where_there_are_gpus() -> None:
    modules = load_chapter(CHAPTER)
    supervised, roles = modules["supervised_roles"], modules["roles"]
    line = "trainer 0: device: cuda with nccl (2 cuda, one for each local rank)\n"

    def of_two(*place: Any) -> torch.device:
        return supervised.run_trainer(0, 2, place, lambda device: device)

    due = "nccl", torch.device("cuda", 0), line, timedelta(minutes=5)
    assert group_of_a_trainer(of_two) == due
    # A GPU on each of two hosts is enough, and one for both on one host is not.
    found = group_of_a_trainer(of_two, devices=1, other="another host")
    assert found == (*due[:2], line.replace("2 cuda", "1 cuda"), due[3])
    assert group_of_a_trainer(of_two, devices=1)[:2] == ("gloo", torch.device("cpu"))

    # `asynchronous.py` makes its dense part on the CPU, and says nothing of devices.
    def be_trainer(address: str, port: int) -> None:
        here = {"RANK": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        with (
            mock.patch.dict(os.environ, here),
            mock.patch.object(roles, "rpc") as rpc,
            mock.patch.object(roles, "tie_to_launcher"),
        ):
            roles.be_role(roles.names_of_roles(2), None, None)
        # Not over shared memory, whose polling keeps a core busy.
        (call,) = rpc.TensorPipeRpcBackendOptions.call_args_list
        assert call.kwargs["_transports"] == ["uv"]

    assert group_of_a_trainer(be_trainer) == ("gloo", None, "", None)


BOTH_UNDER_TORCHRUN = """
import os, torch.distributed as dist
from torch.distributed import rpc

dist.init_process_group("gloo")
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:PORT")
rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
rpc.shutdown()
dist.destroy_process_group()
try:
    dist.init_process_group("gloo")
except dist.DistNetworkError as error:
    print(f"both; a group later: {error}")
"""


def test_after_the_pop_a_rank_opens_the_launcher_s_port_itself(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(BOTH_UNDER_TORCHRUN.replace("PORT", str(free_port())))
    result = torchrun(script, nproc=1)
    assert result.returncode == 0, result.output
    assert re.search(r"^both; a group later: .*EADDRINUSE", result.stdout, re.M)
    page = words_of(f"{CHAPTER}/supervision")
    assert "what `torchrun` sets (join a process group before it);" in page


def test_two_stores_need_two_ports() -> None:
    heartbeats, port = load_chapter(CHAPTER)["heartbeats"], free_port()
    first = heartbeats.host_store("127.0.0.1", port)
    assert first.port == port
    with pytest.raises(OSError, match="Address already in use"):
        heartbeats.host_store("127.0.0.1", port)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    shared: Any = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    port = free_port()
    one, two = (dist.TCPStore("127.0.0.1", port, **shared) for _ in range(2))
    one.set("key", "value")
    assert two.get("key") == b"value"
    # Two addresses of one host have a port of one number each.
    with socket.create_server(("127.0.0.1", 0)) as near:
        port = near.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)) as other:
            given = [near.detach(), other.detach()]
    stores = [
        dist.TCPStore(
            f"127.0.0.{i}",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        for i, descriptor in enumerate(given, 1)
    ]
    for i, store in enumerate(stores):
        store.set("key", str(i))
    assert [store.get("key") for store in stores] == [b"0", b"1"]


def minimal_with(folder: Path, old: str, new: str) -> Path:
    """Copy the chapter, change its minimal.py in one place, and return that."""
    copy = folder / CHAPTER
    shutil.copytree(ROOT / CHAPTER, copy, symlinks=True)
    text = (copy / "minimal.py").read_text()
    assert text.count(old) == 1
    (copy / "minimal.py").write_text(text.replace(old, new))
    return copy / "minimal.py"


@pytest.fixture
def fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# A module of a reader's own: its backward pass needs weights that a step changes.
TOWER = """
class Tower(nn.EmbeddingBag):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.layer = nn.Linear(self.embedding_dim, self.embedding_dim)

    def forward(self, indices, offsets):
        return self.layer(super().forward(indices, offsets))

"""
# Trainer 1 sends its gradients to the server later than trainer 0.
LATE = """
        delay = lambda _: __import__("time").sleep(0.1 * dist.get_rank())
        pooled.register_hook(delay) if pooled.requires_grad else None
        return self.dense(pooled)  # 2.
"""


@pytest.mark.usefixtures("fp64")
def test_one_file_trains_as_one_process_does(tmp_path: Path) -> None:
    large = "2**15, 32, 2, 32, 0.1", "2**15, 32, 1, 256, 0.3"
    changed = minimal_with(tmp_path, *large)
    # In fp32 a ReLU whose input is next to zero may fall to the other side.
    in_fp64 = "    torch.set_default_dtype(torch.float64)\n    torch.manual_seed(0)\n"
    text = changed.read_text().replace("    torch.manual_seed(0)\n", in_fp64)
    for old, new in (
        ("\nclass HybridModel", f"{TOWER}\nclass HybridModel"),
        ('"server", nn.EmbeddingBag', '"server", Tower'),
        ("\n        return self.dense(pooled)  # 2.\n", LATE),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    changed.write_text(text)
    result = torchrun(changed, nproc=3, cwd=tmp_path)
    assert result.returncode == 0, result.output
    saved = torch.load(tmp_path / "hybrid.pt")
    minimal = load_chapter(CHAPTER)["minimal"]
    samples, _ = load_chapter(CHAPTER)["classifier"].load_samples()
    torch.manual_seed(0)
    dense = minimal.HybridModel(torch.nn.Identity()).dense
    torch.manual_seed(0)
    exec(TOWER, names := {"nn": torch.nn})
    table = names["Tower"](2**15, 32, mode="sum")
    torch.nn.init.normal_(table.weight, std=0.1)
    start = table.weight.detach().clone()
    optimizer = torch.optim.SGD([*table.parameters(), *dense.parameters()], lr=0.3)
    batches, losses = [samples.batches(256, rank, 2) for rank in range(2)], []
    for _ in range(len(samples) // 512):
        step = [next(batch) for batch in batches]
        each = [cross_entropy(dense(table(i, at)), y) for i, at, y in step]
        optimizer.zero_grad()
        torch.stack(each).mean().backward()
        optimizer.step()
        losses.append(torch.stack(each).mean().item())
    assert len(losses) == 9
    mean = sum(losses) / len(losses)
    assert result.stdout == f"epoch 0 | loss {mean:.3f}\n"
    wanted = {f"dense.{name}": value for name, value in dense.state_dict().items()}
    wanted["table.weight"] = table.weight.detach()
    assert saved.keys() == wanted.keys()
    errors = [(saved[name] - wanted[name]).abs().max().item() for name in wanted]
    assert len(errors) == 7
    assert max(errors) < 1e-12
    assert (saved["table.weight"] - start).abs().max() > 1e-2


BACKWARD = "                dist_autograd.backward(context_id, [loss])  # 3.\n"
ENTER = "            with dist_autograd.context() as context_id:\n"
MORE = "model(indices, offsets).sum()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "waits"),
    [
        (BACKWARD, BACKWARD + BACKWARD.replace("loss", MORE), True),
        (BACKWARD, BACKWARD.replace("loss", f"loss + 0 * {MORE}"), False),
        (BACKWARD, f"                {MORE}\n{BACKWARD}", True),
        (ENTER, f"            {MORE}\n{ENTER}", False),
    ],
    ids=["two backwards", "of the sum", "a lookup for the log", "outside"],
)
def test_what_is_looked_up_in_a_context_is_waited_for(
    tmp_path: Path, old: str, new: str, waits: bool
) -> None:
    changed = minimal_with(tmp_path, old, new)
    text = changed.read_text().replace("2, 32, 0.1", "1, 1000, 0.1")  # two steps
    changed.write_text(text)
    if not waits:
        assert torchrun(changed, nproc=3, cwd=tmp_path, timeout=120).returncode == 0
        return
    with pytest.raises(LaunchTimeout) as hung:
        torchrun(changed, nproc=3, cwd=tmp_path, timeout=60)
    assert "epoch" not in hung.value.output and "Error" not in hung.value.output


@pytest.mark.slow
def test_a_rate_is_set_by_the_comments_as_they_stand(tmp_path: Path) -> None:
    changed = minimal_with(tmp_path, "2, 32, 0.1", "1, 1000, 0.1")  # two steps
    lines, inside = changed.read_text().splitlines(keepends=True), False
    for number, line in enumerate(lines):
        text = line.lstrip()
        inside = text.startswith("# To set a rate") or (inside and text[:1] == "#")
        if inside and text.startswith("#   "):
            lines[number] = line.replace("#   ", "", 1)
    text = "".join(lines)
    assert text.count("set_rate, (one, rate)") == 1
    changed.write_text(text.replace("set_rate, (one, rate)", "set_rate, (one, 0.0)"))
    result = torchrun(changed, nproc=3, cwd=tmp_path, timeout=120)
    assert result.returncode == 0, result.output
    torch.manual_seed(0)
    start = torch.nn.EmbeddingBag(2**15, 32).weight
    torch.nn.init.normal_(start, std=0.1)
    assert torch.equal(torch.load(tmp_path / "hybrid.pt")["table.weight"], start)


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}])
def test_a_server_without_a_trainer_is_refused_in_a_line(
    environment: dict[str, str],
) -> None:
    minimal = load_chapter(CHAPTER)["minimal"]
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        pytest.raises(SystemExit, match="start a server and trainers: torchrun --np"),
    ):
        minimal.main()


@pytest.mark.slow
def test_too_few_samples_for_a_step_are_an_error(tmp_path: Path) -> None:
    changed = minimal_with(tmp_path, "2**15, 32, 2, 32, 0.1", "2**15, 32, 2, 5000, 0.1")
    result = torchrun(changed, nproc=3, cwd=tmp_path, timeout=60)
    assert result.returncode == 1
    assert "4776 samples are too few for one step of all" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ['raise ValueError("a bad batch")', "__import__('os')._exit(3)"]
)
def test_a_failed_trainer_ends_server_and_trainers(tmp_path: Path, end: str) -> None:
    step = "dist.barrier(group)  # without: asynchronous"
    changed = minimal_with(tmp_path, step, f"if rank == 1: {end}\n" + " " * 12 + step)
    result = torchrun(changed, nproc=3, cwd=tmp_path, timeout=60)
    assert result.returncode == 1
    assert ("a bad batch" in result.output) == ("bad" in end)
    assert not (tmp_path / "hybrid.pt").exists()


# The sizes of the tutorial that many start from: six trainers, a table of 30 rows of 8
# numbers, a dense part of 8-16-4.
SMALL = """
import sys
from argparse import Namespace

sys.path.insert(0, {chapter!r})
import torch
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

import classifier
import roles
import train
from ranks import gather, same_on_all_ranks

TRAINERS, STEPS = 6, 10


def be_trainer(table):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    dense = DistributedDataParallel(torch.nn.Sequential(*layers))
    model = classifier.HybridModel(table, dense)
    parameters = [*table.remote_parameters(), *map(rpc.RRef, dense.parameters())]
    optimizer = DistributedOptimizer(classifier.EagerSGD, parameters, lr=0.05)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        indices = torch.randint(30, (20,), generator=generator)
        labels = torch.randint(4, (5,), generator=generator)
        batch = indices, torch.arange(0, 20, 4), labels
        losses.append(train.hybrid_step(model, optimizer, batch).item())
    torch.distributed.barrier()
    end = table.remote_parameters()[0].to_here()
    same = same_on_all_ranks([*dense.parameters(), end])
    return rank, same, len(set(losses)), tuple(end.shape), float(end.detach().sum())


def be_master(_):
    table = RemoteModule(roles.SERVER, classifier.Table, (30, 8, 0))
    found = roles.on_all_trainers(TRAINERS, be_trainer, table)
    before = classifier.Table(30, 8, 0).weight
    print("moved", found[0][-1] != float(before.sum()))
    for line in found:
        print(*line[:3], line[3])


if __name__ == "__main__":
    roles.start_roles(roles.names_of_roles(TRAINERS), be_master)
"""


@pytest.mark.slow
def test_six_trainers_share_a_table_of_30_rows_of_8(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(chapter=str(ROOT / CHAPTER)))
    result = python(script)
    assert result.returncode == 0, result.output
    lines = [f"{rank} True 10 (30, 8)" for rank in range(6)]
    assert result.stdout.splitlines() == ["moved True", *lines]


# As supervision/README.md says: both parts are saved between two barriers.
SAVE_BOTH = """
import sys
from itertools import islice

sys.path.insert(0, {chapter!r})
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

import classifier
import roles
import train
from pathlib import Path
from ranks import gather
from table_file import load_table, save_table

FOLDER, LR, STEPS = Path({folder!r}), 0.1, 20


def save_here(weight):
    save_table(FOLDER / "table.pt", weight.local_value().detach())


def be_trainer(table):
    dense = DistributedDataParallel(classifier.dense_part())
    model = classifier.HybridModel(table, dense)
    (weight,) = table.remote_parameters()
    parameters = [weight, *map(rpc.RRef, dense.parameters())]
    optimizer = DistributedOptimizer(classifier.EagerSGD, parameters, lr=LR)
    samples, rank = classifier.load_samples()[0], dist.get_rank()
    for step, batch in enumerate(islice(samples.batches(16, rank, 2), STEPS)):
        train.hybrid_step(model, optimizer, batch)
        dist.barrier()  # synchronous, or the end would be a matter of luck
        if step == STEPS // 2 - 1:
            if rank == 0:
                torch.save(dense.module.state_dict(), FOLDER / "dense.pt")
                rpc.rpc_sync(roles.SERVER, save_here, args=(weight,))
            dist.barrier()
    return weight.to_here().detach()


def error_of_resumed(expected, dense):
    alone = classifier.HybridModel(classifier.Table(2**15, 32, 0), dense)
    alone.table.load_state_dict(dict(weight=load_table(FOLDER / "table.pt")))
    samples = classifier.load_samples()[0]
    of_each = [islice(samples.batches(16, r, 2), STEPS // 2, STEPS) for r in range(2)]
    classifier.train_in_one_process(alone, zip(*of_each), LR, 2 * LR)
    return (alone.table.weight - expected).abs().max().item()


def be_master(_):
    table = RemoteModule(roles.SERVER, classifier.Table, (2**15, 32, 0))
    end = roles.on_all_trainers(2, be_trainer, table)[0]
    dense = classifier.dense_part()
    print(error_of_resumed(end, dense))
    dense = classifier.dense_part()
    dense.load_state_dict(torch.load(FOLDER / "dense.pt"))
    print(error_of_resumed(end, dense))


if __name__ == "__main__":
    roles.start_roles(roles.names_of_roles(2), be_master)
"""


@pytest.mark.slow
def test_both_parts_saved_between_two_barriers_resume_together(tmp_path: Path) -> None:
    script = tmp_path / "save_both.py"
    chapter = str(ROOT / CHAPTER)
    script.write_text(SAVE_BOTH.format(chapter=chapter, folder=str(tmp_path)))
    result = python(script)
    assert result.returncode == 0, result.output
    of_table_alone, of_both = map(float, result.stdout.splitlines())
    assert of_both < 1e-5
    assert of_table_alone > 1e-3  # the dense part of the start


@pytest.mark.slow
def test_a_dense_part_outside_ddp_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / CHAPTER
    shutil.copytree(ROOT / CHAPTER, copy, symlinks=True)
    train = (copy / "train.py").read_text()
    wrapped = "DistributedDataParallel(dense_part(options.seed).to(device))"
    assert train.count(wrapped) == 1
    bare = train.replace(wrapped, "dense_part(options.seed).to(device)")
    (copy / "train.py").write_text(bare)
    result = python(copy / "train.py", "--max-steps=5")
    assert result.returncode == 1
    wrong = "the lesson has gone wrong: the dense weights of 2 trainer(s) are NOT equal"
    assert wrong in result.output


def sleeps_and_steps(late: float, **more: Any) -> tuple[list[Any], str]:
    """Be a trainer of asynchronous.py with its server here, and `more` that is fake.

    Returns when it has slept and stepped, and what it has printed.
    """
    lesson, noted = load_chapter(CHAPTER)["asynchronous"], []
    samples = lesson.classifier.load_samples()[0]
    few = lesson.classifier.Samples(samples.bags[:96], samples.labels[:96])

    def owned_here(value: Any) -> SimpleNamespace:
        return SimpleNamespace(local_value=lambda: value, to_here=lambda: value)

    def made_here(_: str, kind: Any, arguments: tuple) -> SimpleNamespace:
        module = kind(*arguments)
        weights = [owned_here(module.weight)]
        return SimpleNamespace(
            forward=module.forward, remote_parameters=lambda: weights
        )

    fakes = {
        "check": mock.Mock(),  # no step is taken, so the table stays as it was
        "DistributedOptimizer": lambda *_, **__: SimpleNamespace(
            step=lambda _: noted.append("step")
        ),
        "RemoteModule": made_here,
        "dist_autograd": SimpleNamespace(
            context=contextlib.nullcontext,
            backward=lambda _, losses: losses[0].backward(),
        ),
        "on_all_trainers": lambda _, function, *arguments: function(*arguments),
        "rpc": SimpleNamespace(
            RRef=owned_here, rpc_sync=lambda _, function, args: function(*args)
        ),
        "time": SimpleNamespace(sleep=noted.append),
    }
    with (
        mock.patch.multiple(lesson, **(fakes | more)),
        mock.patch.object(lesson.classifier, "load_samples", return_value=(few, None)),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        lesson.be_master(Namespace(trainers=dist.get_world_size(), late=late))
    return [one for one in noted if one], output.getvalue()


@pytest.mark.slow
def test_the_last_trainer_alone_waits_before_each_step(
    worker_pool: WorkerPool,
) -> None:
    # Two steps of 16 samples for each of three trainers, synchronous and asynchronous.
    found = [noted for noted, _ in worker_pool.run(sleeps_and_steps, 7.0, world_size=3)]
    assert found == [["step"] * 4, ["step"] * 4, [0.007, "step"] * 4]
    found = [noted for noted, _ in worker_pool.run(sleeps_and_steps, 0.0)]
    assert found == [["step"] * 6] * 2


def looks_barriers_and_steps() -> list[str]:
    """Be the only trainer of asynchronous.py; return in which order it does these."""
    noted: list[str] = []

    def rows_now(_: Any, numbers: torch.Tensor) -> torch.Tensor:
        noted.append("look")
        return torch.zeros(len(numbers), 2)

    def step(_: Any) -> None:
        noted.append("step")

    fakes = {"rows_now": rows_now, "DistributedOptimizer": mock.Mock()}
    fakes["DistributedOptimizer"].return_value.step = step
    barrier = mock.Mock(side_effect=lambda: noted.append("barrier"))
    with mock.patch.object(dist, "barrier", barrier):
        sleeps_and_steps(0.0, **fakes)
    return noted


def test_nobody_steps_before_all_have_counted(worker_pool: WorkerPool) -> None:
    # Six steps, synchronous: others' steps are waited for as well. Then asynchronous.
    one = ["look", "look", "barrier", "step"]
    due = [*one, "barrier"] * 6 + one * 6
    assert worker_pool.run(looks_barriers_and_steps, world_size=1) == [due]


def with_two_stale_rows() -> tuple[list[float], str]:
    """Let two whole rows change in each step; return by how many rows, and the output.

    The lesson's own losses are replaced by 1 on rank 0 and 3 on rank 1.
    """
    lesson, seen = load_chapter(CHAPTER)["asynchronous"], []
    run_steps = lesson.run_steps

    def rows_now(_: Any, numbers: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(len(numbers), 2)
        seen.append(len(numbers))
        rows[:2] += (len(seen) + 1) % 2  # every second time
        return rows

    def own_losses(*arguments: Any) -> tuple[list[float], float]:
        losses, share = run_steps(*arguments)
        return [1.0 + 2 * dist.get_rank()] * len(losses), share

    _, output = sleeps_and_steps(0.0, rows_now=rows_now, run_steps=own_losses)
    half = len(seen) // 2  # of each table: three steps, and two looks in each
    assert half == 6
    return [6 / sum(seen[start : start + half : 2]) for start in (0, half)], output


def test_stale_rows_are_counted_once_and_losses_are_the_mean(
    worker_pool: WorkerPool,
) -> None:
    (first, printed), (second, nothing) = worker_pool.run(with_two_stale_rows)
    shares = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
    numbers = [re.findall(r"[\d.]+", line) for line in printed.splitlines()]
    assert numbers[1][1:] == ["2.000", "2.000"] and nothing == ""
    assert numbers[2] == [f"{100 * share:.1f}" for share in shares]


@pytest.mark.slow
def test_training_without_a_barrier_is_not_synchronous(tmp_path: Path) -> None:
    copy = tmp_path / CHAPTER
    shutil.copytree(ROOT / CHAPTER, copy, symlinks=True)
    lesson, barrier = (copy / "asynchronous.py").read_text(), "if is_synchronous:"
    assert lesson.count(barrier) == 1
    (copy / "asynchronous.py").write_text(lesson.replace(barrier, "if False:"))
    result = python(copy / "asynchronous.py")
    assert result.returncode == 1
    assert "not so: synchronous trainers end" in result.output


@pytest.mark.slow  # the room's page runs the script in CI as well
def test_steps_of_two_trainers_undo_each_other_without_a_lock() -> None:
    script = ROOT / CHAPTER / "staleness" / "lost_updates.py"
    result = python(script)
    # No call has failed: nothing but the table itself tells of the loss.
    assert result.returncode == 0, result.output
    *cases, _ = result.stdout.splitlines()
    line = r"(\w+) +\| (\w+) +gradient \| (\w+) +rows \| "
    line += r"(?:try )?(\d+)(?: tries)?: (\S+) .*"
    found = [re.fullmatch(line, case) for case in cases]
    rows = {one.groups()[:3]: one.groups()[3:] for one in found if one}
    assert len(rows) == len(cases) == 5
    # The compiled SGD takes no lock. When it loses something is a matter of luck: here
    # it is mostly in one of the first 5 of 200 tries. A dense gradient writes all rows.
    for case in (("SGD", "dense", "other"), ("SGD", "sparse", "same")):
        tried, lost = rows.pop(case)
        assert int(lost.replace(",", "")) > 0 and 1 <= int(tried) <= 200
    # No row in common, or a class that is not compiled, under a lock: nothing is lost.
    assert rows == {
        ("SGD", "sparse", "other"): ("2", "no"),
        ("EagerSGD", "sparse", "same"): ("2", "no"),
        ("EagerSGD", "dense", "same"): ("2", "no"),
    }
    assert result.stderr == ""


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--help-me",), marks=pytest.mark.slow)]
)
def test_program_of_four_calls_says_how_to_start_it(words: tuple[str, ...]) -> None:
    result = python(ROOT / CHAPTER / "rpc_in_four_calls.py", *words)
    assert result.returncode == 1
    assert result.stderr.startswith("start it with torchrun --nproc-per-node=2 ")
    assert result.stderr.endswith("rpc_in_four_calls.py\n")
    assert result.stderr.count("\n") == 1
