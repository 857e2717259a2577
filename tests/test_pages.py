"""The pages of the root folder: what they quote was printed, what they list is proven.

A quotation in WHEN_IT_GOES_WRONG.md is a ``text`` block with a comment right above it
that names where its lines come from. There are three kinds of source::

    <!-- from: 01_communication/README.md -->       an output shown in that page
    <!-- from: tests/test_pages.py, cut_file -->    what that function below returns
    <!-- from: tests/test_x.py, test_y -->          a text that this test asserts

Outputs in pages are compared with real ones by the README runner. The functions below
provoke their error anew in each session. A quoted line is a line of the source, from
some word on to its end, and ``...`` stands for any text within the line. A line that is
only ``...`` stands for lines left out.

In MYTHS.md, what proves that a claim is wrong stands at the end of its row, after a
``<br>``: one or several of these::

    [`test_x[case]`](tests/test_file.py)        a test that pytest collects there
    [`script.py --c=1`](01_a/room/script.py)    a script that a page runs with that
"""

import argparse
import ast
import multiprocessing
import os
import pickle
import posixpath
import pydoc
import re
import signal
import socket
import tempfile
import time
import traceback
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path, PosixPath
from queue import Empty
from subprocess import TimeoutExpired
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from markdown_it.token import Token
from torch.amp import GradScaler
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.checkpoint import checkpoint

from launch import ROOT, clean_environment, deepspeed, free_port, python
from readme_runner import parse_block
from test_house_rules import fences, links_and_anchors, markdown, repository
from worker_pool import WorkerPool

HELP = "WHEN_IT_GOES_WRONG.md"
HERE = "tests/test_pages.py"
SOURCE = re.compile(r"<!-- from: (\S+?)(?:, (\w+))? -->")
SHORTEST_QUOTATION = 10  # characters; a shorter one would be found anywhere
# Each entry says these four things, in this order.
PARTS = ["- **Why:**", "- **To find it:**", "- **To mend it:**", "- **Seen in:**"]
LONGEST_ENTRY = 26  # lines, its block and its heading included

MYTHS = "MYTHS.md"
FEWEST_MYTHS = 99
# The name of a test is one long word, and a column is as wide as its longest word: in a
# column of its own it would leave no room for the others. It stands below a <br>.
COLUMNS = ["claim", "what really happens, and what shows it"]
PROOF = re.compile(r"\[`([^`]+)`\]\(([^()#\s]+)\)")

Tree = Mapping[str, str]


class Quotation(NamedTuple):
    """A block that quotes, the line where it stands, and its source."""

    place: str
    lines: list[str]
    file: str
    name: str


def quotations(tree: Tree) -> Iterator[Quotation]:
    """Yield the quotations of HELP; a block that says no source has an empty file."""
    for place, token, above in fences({HELP: tree[HELP]}):
        if token.info == "text":
            file, name = (
                match.groups() if (match := SOURCE.fullmatch(above)) else ("", "")
            )
            yield Quotation(place, token.content.splitlines(), file, name or "")


# What the sources say.


def outputs(text: str) -> list[list[str]]:
    """Return the lines that each console block of a page promises."""
    return [
        [line for step in parse_block(token.content).steps for line in step.wanted]
        for _, token, _ in fences({"page.md": text})
        if token.info == "console"
    ]


def asserted(text: str, name: str) -> list[str]:
    """Return the strings in a test, or in the value of a name, of a Python file."""
    found = []
    for node in ast.parse(text).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
        if name in names:
            found += [
                part.value
                for part in ast.walk(node)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, False):
                found.remove(ast.get_docstring(node, False) or "")
    return found


def is_quoted_from(lines: Sequence[str], source: Sequence[str]) -> bool:
    """Tell whether each line is the end of a line of the source, in their order."""
    rest = iter(source)
    for line in lines:
        if line.strip() == "...":
            continue
        pattern = ".*".join(map(re.escape, line.strip().split("...")))
        if len(line.replace(".", "").strip()) < SHORTEST_QUOTATION:
            return False
        if not any(re.search(rf"(?:^|\s){pattern}$", one.rstrip()) for one in rest):
            return False
    return any(line.strip() != "..." for line in lines)


def fault(quotation: Quotation, tree: Tree, provoked: str = "") -> str:
    """Say what is wrong with a quotation; nothing if all is well."""
    place, lines, file, name = quotation
    if file not in tree:
        return f"{place}: no comment names the source: <!-- from: FILE -->"
    if file == HERE:
        found = is_quoted_from(lines, provoked.splitlines())
    elif file.endswith(".md"):
        found = any(is_quoted_from(lines, output) for output in outputs(tree[file]))
    else:
        texts = asserted(tree[file], name)
        found = bool(lines) and all(
            len(line) >= SHORTEST_QUOTATION and any(line in text for text in texts)
            for line in lines
        )
    return "" if found else f"{place}: {' '.join([file, name])} says no such thing"


# Errors that are provoked here, because no page shows them. Each function returns what
# a reader would see of it.


EXPECTED = (
    *(RuntimeError, ValueError, pickle.UnpicklingError, AssertionError),
    AttributeError,
    IndexError,
)


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that a call ends with."""
    try:
        result = call()
    except EXPECTED as error:
        return str(error)
    return f"no error, but {result!r}"


def no_launcher() -> str:
    """Join a group by the environment, in which nobody has set anything."""
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    rest = {name: value for name, value in os.environ.items() if name not in launched}
    said = []
    for more in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        with mock.patch.dict(os.environ, rest | more, clear=True):
            # The first thing that init_process_group does.
            said.append(error_of(lambda: next(iter(dist.rendezvous("env://")))))
    return "\n".join(said)


def nobody_listens() -> str:
    """Be rank 0 under `torchrun`, with a script that sets a port itself."""
    # There was a store a moment ago.
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    _store, launched = under_torchrun(0, 1)
    url = {"init_method": f"tcp://127.0.0.1:{port}", "rank": 0, "world_size": 1}
    ways: list[Any] = [({"MASTER_PORT": str(port)}, {}), ({}, url)]
    dist.destroy_process_group()
    said, patience = [], timedelta(seconds=1)
    for settings, options in ways:
        join = partial(dist.init_process_group, "gloo", timeout=patience, **options)
        with mock.patch.dict(os.environ, launched | settings):
            said.append(error_of(join))
            # Without `torchrun` the same call opens the store.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            join()
            dist.destroy_process_group()
    with mock.patch.dict(os.environ, launched):
        os.environ.setdefault("MASTER_PORT", str(port))
        dist.init_process_group("gloo")
    words = "The client socket has timed out after 1000ms"
    assert [text.startswith(words) for text in said] == [True] * 2
    return said[0]


def under_torchrun(rank: int, world_size: int) -> tuple[dist.Store, dict[str, str]]:
    """Open the store that `torchrun` holds; return it and what it tells a rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    launched |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    launched["TORCHELASTIC_RESTART_COUNT"] = "0"
    launched["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return store, launched


def one_host_missing() -> str:
    """Wait as one of two for the other, as the one child of `mp.spawn` may."""
    url, patience = f"tcp://127.0.0.1:{free_port()}", timedelta(seconds=1)
    ranks: Any = {"init_method": url, "rank": 0, "world_size": 2}
    dist.destroy_process_group()
    return error_of(partial(dist.init_process_group, timeout=patience, **ranks))


def rank_missing() -> str:
    """Join a group as rank 0 of three, under `torchrun`, when nobody else comes."""
    _store, launched = under_torchrun(0, 3)
    dist.destroy_process_group()
    patience = timedelta(seconds=1)
    with mock.patch.dict(os.environ, launched):
        return error_of(lambda: dist.init_process_group("gloo", timeout=patience))


def port_taken() -> str:
    """Open a store where there is one already; also where a connection begins."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_connection(("127.0.0.1", store.port)) as connection:
        ports = (connection.getsockname()[1], store.port)
        one, other = (
            error_of(
                lambda port=port: dist.TCPStore(
                    "127.0.0.1", port, is_master=True, wait_for_workers=False
                )
            )
            for port in ports
        )
    assert "name: EADDRINUSE, message: address already in use" in one
    return other


def no_nccl() -> str:
    """Ask for NCCL where PyTorch was built without it."""
    with mock.patch.object(dist.distributed_c10d, "_NCCL_AVAILABLE", False):
        assert dist.get_default_backend_for_device("cuda") == "nccl"
        return error_of(lambda: dist.new_group(backend="nccl"))


def fewer_devices() -> str:
    """Apply the device rule of ranks.py to two ranks on a machine with one GPU."""
    source = ast.parse((ROOT / "01_communication/ranks.py").read_text("utf-8"))
    rule = [n for n in source.body if getattr(n, "name", "") == "choose_device"]
    scope: dict[str, Any] = {"torch": torch, "dist": dist}
    exec(compile(ast.Module(rule, []), "ranks.py", "exec"), scope)
    cuda = torch.device("cuda")
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=cuda),
        mock.patch.object(torch.accelerator, "device_count", return_value=1),
    ):
        device, reason = scope["choose_device"](local_rank=1, local_world_size=2)
    backend = dist.get_default_backend_for_device(device)
    return f"device: {device.type} with {backend} ({reason})"


def forked_cuda() -> str:
    """Use a GPU, which is pretended, in a process that its user has forked."""
    with mock.patch.object(torch.cuda, "_is_in_bad_fork", lambda: True):
        return error_of(torch.cuda.init)


def closed_rendezvous() -> str:
    """Join a job that another agent of torchrun has declared to be over."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
    )

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = c10d.C10dRendezvousBackend(store, "job")
    first, late = (
        DynamicRendezvousHandler.from_backend("job", store, backend, 1, 2)
        for _ in range(2)
    )
    first.set_closed()
    try:
        late.next_rendezvous()
    except RendezvousClosedError as error:
        return "".join(traceback.format_exception_only(error))
    return "no error"


def skipped_step() -> str:
    """Step a schedule after GradScaler has skipped the optimizer's first step."""
    model = torch.nn.Linear(1, 1)
    sgd, scaler = torch.optim.SGD(model.parameters(), lr=1.0), GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=1)
    before = model.weight.item()
    scaler.scale(model(torch.full((1, 1), torch.inf)).sum()).backward()
    scaler.step(sgd)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        schedule.step()
        assert model.weight.item() == before and len(warned) == 1
        # The same words, if the schedule steps in each micro-batch.
        early = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(early, step_size=1, gamma=0.5)
        for micro_batch in range(4):
            if micro_batch % 2:
                early.step()
            schedule.step()
        # And if a resumed run steps a new schedule to where it was.
        resumed = torch.optim.SGD(model.parameters(), lr=1.0)
        resumed.load_state_dict(sgd.state_dict())
        schedule = torch.optim.lr_scheduler.StepLR(resumed, step_size=1)
        schedule.step()
    first, second = {str(one.message) for one in warned}, early.param_groups[0]["lr"]
    assert len(warned) == 3 and len(first) == 1 and second == 0.5**4
    return "\n".join(first)


def too_large() -> str:
    """Ask for more memory than any machine has."""
    return error_of(lambda: torch.empty(10**15))


def half_weights() -> str:
    """Let GradScaler step weights that are in fp16."""
    model = torch.nn.Linear(1, 1).half()
    sgd, scaler = torch.optim.SGD(model.parameters(), lr=1.0), GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 1).half()).sum()).backward()
    return error_of(lambda: scaler.step(sgd))


def no_such_row() -> str:
    """Look up an id, and a class, that is not there."""
    embedding, scores = torch.nn.Embedding(3, 2), torch.ones(1, 3)
    cross_entropy = torch.nn.functional.cross_entropy
    said = [error_of(lambda: embedding(torch.tensor([3])))]
    for label in (3, -1):
        labels = torch.tensor([label])
        said.append(error_of(partial(cross_entropy, scores, labels)))
    # The class that counts for nothing; it is a mean over no samples.
    assert cross_entropy(scores, torch.tensor([-100])).isnan()
    return "\n".join(said)


def two_devices() -> str:
    """Move a model that keeps a tensor as an attribute, then one with a buffer."""

    class Scaled(torch.nn.Linear):
        scale: torch.Tensor

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.scale

    said, meta = [], torch.device("meta")  # the one other device that every machine has
    for is_buffer in (False, True):
        model: Any = Scaled(2, 2)
        if is_buffer:
            model.register_buffer("scale", torch.ones(2))
        else:
            model.scale = torch.ones(2)
        model.to(meta)
        said.append(error_of(partial(model, torch.ones(1, 2, device=meta))))
    assert said.pop().startswith("no error, but tensor(..., device='meta'")
    weights = {"weight": torch.eye(2), "bias": torch.zeros(2), "scale": torch.ones(2)}
    assert "Cannot copy out of meta tensor; no data!" in error_of(model.cpu)
    model.to_empty(device="cpu").load_state_dict(weights)
    assert model(torch.ones(1, 2)).tolist() == [[1, 1]]
    return "\n".join(said)


def carry_a_state(way: str) -> None:
    """Take three steps, each with a state of the step before."""
    layer = torch.nn.Linear(2, 2)
    sgd, state = torch.optim.SGD(layer.parameters(), lr=0.1), torch.ones(1, 2)
    for _ in range(3):
        state = torch.tanh(layer(state))
        state.sum().backward(retain_graph=way == "retain_graph")
        sgd.step()
        if way == "detached":
            state = state.detach()


def gradients_of_a_gan(way: str) -> list[bool]:
    """Go backward from two losses; are generator's and discriminator's gradients right?

    The discriminator is to give 1 for 2, and 0 for what the generator makes of 1.
    """
    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    one, two = torch.ones(1, 1), torch.full((1, 1), 2.0)

    def losses(fake_of_theirs: Any, fake: Any) -> tuple[Any, Any]:
        theirs = discriminator(fake_of_theirs) - discriminator(two)
        return -discriminator(fake).sum(), theirs.sum()

    models: Any = generator, discriminator
    pairs = zip(losses(*[generator(one)] * 2), models, strict=True)
    due = [torch.autograd.grad(x, m.weight, retain_graph=True)[0] for x, m in pairs]
    fake = generator(one)
    ours, theirs = losses(fake if way == "sum" else fake.detach(), fake)
    if way != "each":
        (ours + theirs).backward()
    else:
        theirs.backward()
        discriminator.requires_grad_(False)
        (-discriminator(fake).sum()).backward()
    found = zip(models, due, strict=True)
    return [torch.allclose(model.weight.grad, right) for model, right in found]


def second_backward() -> str:
    """Carry a state as it is, with its graph, and without."""
    ways = ("as it is", "retain_graph", "detached")
    *said, last = [error_of(partial(carry_a_state, way)) for way in ways]
    assert last == "no error, but None"
    assert said[1].startswith("one of the variables needed for gradient computation")
    assert gradients_of_a_gan("sum") == [False, False]
    assert gradients_of_a_gan("detached, and summed") == [True, False]
    assert gradients_of_a_gan("each") == [True, True]
    return "\n".join(said)


def written_over() -> str:
    """Write into an activation that backward needs."""
    hidden = torch.sigmoid(torch.nn.Linear(3, 3)(torch.ones(1, 3)))
    hidden += 1
    return error_of(hidden.sum().backward)


def frozen_inputs() -> str:
    """Recompute a layer behind a frozen embedding in both ways, of which one works."""
    embedding = torch.nn.Embedding(2, 2).requires_grad_(False)
    layer, said = torch.nn.Linear(2, 2), []
    for reentrant in (True, False):
        hidden = embedding(torch.ones(1, dtype=torch.long))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = checkpoint(layer, hidden, use_reentrant=reentrant)
        said += [str(one.message) for one in warned]
        said.append(error_of(result.sum().backward))
    assert layer.weight.grad is not None and said.pop() == "no error, but None"
    # The same without recomputation: what has no graph.
    with torch.no_grad():
        ways = [layer(torch.ones(1, 2)).sum()]
    ways.append(layer(torch.ones(1, 2)).detach().sum())
    ways.append((layer(torch.ones(1, 2)).argmax(-1) == 0).float().mean())
    ways.append(torch.tensor(layer(torch.ones(1, 2)).sum().item()))
    assert [loss.grad_fn for loss in ways] == [None] * 4
    assert {error_of(loss.backward) for loss in ways} == {said[-1]}
    return "\n".join(said)


def shared_tensors() -> str:
    """Save a tensor that has two names; then by safetensors' other function."""
    from safetensors.torch import load_model, save_file, save_model

    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight, model = first.weight, torch.nn.Sequential(first, second)
    with scratch_file() as path:
        said = error_of(lambda: save_file(model.state_dict(), path))
        save_model(model, path)
        before = first.weight.detach().clone()
        torch.nn.init.zeros_(first.weight)
        load_model(model, path)
    assert torch.equal(second.weight, before)
    return said


@contextmanager
def scratch_file() -> Iterator[str]:
    """Give a path in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "checkpoint.pt")


class LoadedInBetween:
    """A value that is pickled when `torch.save` has opened the file."""

    def __init__(self, path: str) -> None:
        """Note the file."""
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Load the file that is being written."""
        with pytest.raises(EOFError):
            torch.load(self.path)
        return OrderedDict, ()


def cut_file() -> str:
    """Load a checkpoint that is still being saved, half of it, and mixtures."""
    with scratch_file() as path:
        torch.save({"weight": torch.ones(1000)}, path)
        saved = {"weight": torch.ones(100_000), "in between": LoadedInBetween(path)}
        torch.save(saved, path)
        assert torch.load(path)["in between"] == {}
        whole = os.path.getsize(path)
        os.truncate(path, whole // 2)
        load = partial(torch.load, path, weights_only=True)
        said = [error_of(load)]
        os.truncate(path, whole)  # now its second half is zeros
        assert error_of(load) == said[0]
        # Two ranks wrote it: the first so many bytes are the shorter one's.
        for seen, length, end in [(1000, 1000, None), (0, 1300, 1024)]:
            torch.save({"seen": list(range(seen)), "w": torch.ones(length)}, path)
            longer = Path(path).read_bytes()
            torch.save({"seen": [], "w": torch.ones(1000)}, path)
            shorter = Path(path).read_bytes()[:end]
            Path(path).write_bytes(shorter + longer[len(shorter) :])
            said.append(error_of(load))
        return "\n".join(said)


def foreign_object() -> str:
    """Load a checkpoint that holds more than tensors and plain values."""
    from safetensors.torch import load_file, save_file

    with scratch_file() as path:
        found = {"options": argparse.Namespace(lr=0.1), "data": Path("data")}
        torch.save(found, path)
        said = [error_of(lambda: torch.load(path))]
        listed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        names = {name.rpartition(".")[-1] for name in listed}
        assert names == {"Namespace", "PosixPath"}
        with torch.serialization.safe_globals([argparse.Namespace, PosixPath]):
            assert torch.load(path) == found
        # Of a NumPy value one class is not listed, but named by the next error.
        torch.save(np.float64(0.5), path)
        listed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        classes: list[Any] = [pydoc.locate(name) for name in listed]
        with torch.serialization.safe_globals(classes):
            assert "<class 'numpy.dtypes.Float64DType'>" in error_of(
                lambda: torch.load(path)
            )
        with torch.serialization.safe_globals([*classes, np.dtypes.Float64DType]):
            assert torch.load(path) == 0.5
        # What Git LFS leaves in place of a file.
        Path(path).write_text("version https://git-lfs.github.com/spec/v1")
        said.append(error_of(lambda: torch.load(path)))
        trusted = mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
        with trusted:
            said.append(error_of(lambda: torch.load(path)))
        # A good file of another kind.
        save_file({"weight": torch.ones(3)}, path)
        assert "Unsupported operand 64\n" in error_of(lambda: torch.load(path))
        with trusted:
            assert "invalid load key, '@'" in error_of(lambda: torch.load(path))
        assert load_file(path)["weight"].tolist() == [1, 1, 1]
        # These it refuses even where all their classes are allowed.
        kept: list[Any] = [deque([1]), defaultdict(list, {"loss": [0.5]})]
        with torch.serialization.safe_globals([deque, defaultdict, list]):
            torch.save(kept[0], path)
            assert "Can only append to lists" in error_of(lambda: torch.load(path))
            torch.save(kept[1], path)
            assert "Can only SETITEM for dict" in error_of(lambda: torch.load(path))
        torch.save([dict(kept[1]), list(kept[0])], path)
        assert torch.load(path) == [kept[1], [1]]
        # And any plain values that are pickled by a newer protocol.
        torch.save(found := {"epoch": 3}, path, pickle_protocol=4)
        newer = [error_of(lambda: torch.load(path))]
        with trusted:
            assert torch.load(path) == found
        with open(path, "wb") as file:
            pickle.dump(found, file, protocol=4)
        newer.append(error_of(lambda: torch.load(path)))
        assert pickle.loads(Path(path).read_bytes()) == found
        assert ["Unsupported operand 149\n" in text for text in newer] == [True] * 2
        return "\n".join(said)


def two_writers() -> str:
    """Load a checkpoint that two ranks wrote at the same time, taking turns."""
    with scratch_file() as path:
        bytes_of = []
        for rank in (0, 1):
            torch.save({"weight": torch.full((1000,), float(rank))}, path)
            with open(path, "rb") as file:
                bytes_of.append(file.read())
        half = len(bytes_of[0]) // 2
        with open(path, "wb") as first, open(path, "wb") as second:
            first.write(bytes_of[0][:half])
            first.flush()
            second.write(bytes_of[1][:half])
            second.flush()
            first.write(bytes_of[0][half:])
        weight = torch.load(path, weights_only=True)["weight"].tolist()
    return f"loaded without an error: first weight {weight[0]}, last {weight[-1]}"


def wrapped_names() -> str:
    """Load what DDP's own state_dict holds into the plain model."""
    model = torch.nn.Linear(2, 1)
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)
    said = [error_of(lambda: model.load_state_dict(ddp_model.state_dict()))]
    said.append(error_of(lambda: ddp_model.load_state_dict(model.state_dict())))
    ddp_model.module.load_state_dict(model.state_dict())
    compiled: Any = torch.compile(model)
    said.append(error_of(lambda: model.load_state_dict(compiled.state_dict())))
    model.load_state_dict(compiled._orig_mod.state_dict())
    compiled = torch.compile(ddp_model)
    names = [name.removeprefix("_orig_mod.module.") for name in compiled.state_dict()]
    assert names == list(compiled.module.state_dict()) == ["weight", "bias"]
    checkpoint = {"model": model.state_dict(), "optimizer": {}, "epoch": 3}
    said.append(error_of(lambda: model.load_state_dict(checkpoint)))
    model.load_state_dict(checkpoint["model"])
    other = torch.nn.Linear(2, 1)
    other.compile()
    assert list(other.state_dict()) == ["weight", "bias"]
    return "\n".join(said)


def not_joined() -> str:
    """Ask for a rank outside of any group; join a group that is there already."""
    dist.destroy_process_group()
    before = error_of(dist.get_rank)
    with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT="0"):
        dist.device_mesh.init_device_mesh("cpu", (1,))
    settings = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    after = error_of(lambda: dist.init_process_group(**settings))
    dist.destroy_process_group()
    dist.init_process_group(**settings)
    assert error_of(lambda: dist.init_process_group(**settings)) == after
    return f"{before}\n{after}"


def local_function() -> str:
    """Pickle a function that is defined in another, as `mp.spawn` would."""

    def train(rank: int) -> None: ...

    said = error_of(lambda: ForkingPickler.dumps(train))
    model: Any = torch.nn.Linear(1, 1)
    model.activation = train
    with scratch_file() as path:
        assert error_of(lambda: torch.save(model, path)) == said
        torch.save(model.state_dict(), path)
    assert error_of(lambda: dist.all_gather_object([None], train)) == said
    # From Python 3.13 on.
    return said.replace("Can't get local object", "Can't pickle local object")


def wrapper_and_model() -> str:
    """Ask DDP's wrapper for a method of the model."""
    ddp_model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    return error_of(lambda: ddp_model.generate)


def all_frozen() -> str:
    """Wrap a model of which nothing is trained."""
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    return error_of(lambda: torch.nn.parallel.DistributedDataParallel(model))


def mesh_too_large() -> str:
    """Make a mesh of two ranks where there is one."""
    return error_of(lambda: dist.device_mesh.init_device_mesh("cpu", (2,)))


def own_divisor() -> str:
    """Divide gradients under FSDP2 by a number that is not that of the ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model: Any = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    model.set_gradient_divide_factor(4.0)
    loss = model(torch.ones(1, 2)).sum()
    return error_of(loss.backward)


def two_dtypes() -> str:
    """Shard, as one unit, a model with weights of two dtypes."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(torch.bfloat16)]
    model: Any = fully_shard(torch.nn.Sequential(*layers), mesh=mesh)
    return error_of(lambda: model(torch.ones(1, 2)))


def no_strategy() -> str:
    """Call operators whose results DTensor cannot shard, or not of these inputs."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(6, 3), mesh, [Shard(0)])
    said = [error_of(lambda: x @ x)]
    # The same text below mistakes of other kinds.
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    y = distribute_tensor(torch.ones(9), grid, [Shard(0), Replicate()])
    said.append(error_of(lambda: y.view(3, 3)))
    whole: Any = y.redistribute(placements=[Replicate()] * y.device_mesh.ndim)
    assert whole.view(3, 3).full_tensor().sum() == 9
    x = distribute_tensor(whole := torch.arange(18.0).view(2, 9), mesh, [Shard(0)])
    y.requires_grad_()
    meshes = error_of(lambda: x * y)
    assert "Cannot run aten.mul.Tensor on inputs with different meshes" in meshes
    everywhere = [Replicate()] * x.device_mesh.ndim
    moved = DTensor.from_local(y.full_tensor(), x.device_mesh, everywhere)
    product: Any = x * moved
    assert product.full_tensor().equal(whole)
    product.sum().full_tensor().backward()
    assert y.grad.full_tensor().equal(whole.sum(0))  # type: ignore
    numbers = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    calls: list[Any] = [torch.bincount, torch.nonzero, lambda x: x[x > 0], torch.unique]
    calls.append(lambda x: torch.allclose(x, x))
    said += [error_of(lambda call=call: call(numbers)) for call in calls]
    names = [text.split(maxsplit=1)[0] for text in said[2:]]
    called = ["bincount", "nonzero", "nonzero", "_unique2", "allclose"]
    assert names == [f"aten.{name}.default" for name in called]
    counts = [text.count("Sharding propagation failed") for text in (*said, meshes)]
    assert counts == [1] * 8
    # Another text, and not this one, for an operator without a rule.
    points = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    text = error_of(lambda: torch.cdist(points, points))
    assert "aten._cdist_forward.default does not have a sharding strategy" in text
    assert "Sharding propagation failed" not in text
    return "\n".join(said)


def viewed_output() -> str:
    """Return a view from a module that FSDP2 shards."""
    from torch.distributed.fsdp import fully_shard

    class Flat(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).flatten()

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    layer: Any = fully_shard(Flat(2, 2), mesh=mesh)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        layer(torch.ones(2, 2)).sum().backward()
    return "".join(f"{w.category.__name__}: {w.message}\n" for w in warned)


def few_samples() -> str:
    """Cut three samples into four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    return error_of(lambda: schedule.step(torch.ones(3, 2), target=torch.ones(3, 2)))


def fixed_heads() -> str:
    """Cut a query by columns in a model that knows how many heads it has."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    class Query(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x).view(2, 8, 4, 16)

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = parallelize_module(Query(), mesh, {"query": ColwiseParallel()})
    return error_of(lambda: model(torch.ones(2, 8, 64)))


def more_ranks() -> str:
    """Train for one epoch on 1, 2 and 4 ranks, with one batch size a rank."""
    said = []
    for ranks in (1, 2, 4):
        group = dist.new_group(range(ranks))
        if dist.get_rank() < ranks:
            said.append(one_epoch(ranks, group))
    return "\n".join(said)


def one_epoch(ranks: int, group: Any) -> str:
    """Fit a line, 8 samples of 256 a rank in each step, at one learning rate."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 4)
    labels = inputs.sum(1, keepdim=True) + 1
    model = torch.nn.Linear(4, 1)
    ddp_model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 256 // (8 * ranks)
    for step in range(steps):
        mine = slice((step * ranks + dist.get_rank()) * 8, None)
        sgd.zero_grad()
        loss = (ddp_model(inputs[mine][:8]) - labels[mine][:8]).square().mean()
        loss.backward()
        sgd.step()
    error = (model(inputs) - labels).square().mean().sqrt().item()
    return f"{ranks} rank(s): {steps:2} steps, then RMSE {error:.2f}"


# These need processes of their own, since some of them have to end.
DEAD_ADDRESS = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist

def join(rank, seconds):
    store = dist.FileStore(sys.argv[1], 2)
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))

rank_zero = os.fork()
if not rank_zero:
    group = join(0, 30)
    signal.pause()  # until it is killed
group = join(1, 30)
os.kill(rank_zero, signal.SIGKILL)
os.wait()
# Its address is still in the store. Of two ranks of gloo one calls and the other one
# waits to be called. That depends on their addresses, and each try takes a new one.
for _ in range(4):
    try:
        join(1, 0.3)
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
        if "refused" in str(error):
            break
os._exit(0)
"""

LEFT_EARLY = """
import os, signal, sys, time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def be_rank(rank, waits):
    os.dup2(1, 2)
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    own = dist.PrefixStore(str(tries), own)
    try:
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
        if waits:
            dist.barrier()
        print(f"rank {rank} leaves", flush=True)
        dist.destroy_process_group()
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
        os._exit(1)
    os._exit(0)

def start(rank, waits):
    return os.fork() or be_rank(rank, waits)

# In half of the tries the early rank has to wait for the late one, and nothing can go
# wrong: hence as many tries as it takes.
waits = sys.argv[1] == "barrier"
for tries in range(int(sys.argv[2])):
    known = store.num_keys()
    late = start(0, waits)
    while store.num_keys() == known:  # then it waits for the other's address
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(late, signal.SIGSTOP)
    early = start(1, waits)
    limit = time.monotonic() + 0.3
    while not (ended := os.waitpid(early, os.WNOHANG)[0]) and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(late, signal.SIGCONT)
    if any([os.waitpid(p, 0)[1] for p in (late, *([] if ended else [early]))]):
        break
os._exit(0)
"""

PEER_GONE = """
import multiprocessing, os, sys, time
import torch.distributed.rpc as rpc

def join(name, rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

def bob():
    join("bob", 1)
    time.sleep(60)

process = multiprocessing.get_context("fork").Process(target=bob, daemon=True)
process.start()
join("alice", 0)
for call in [
    lambda: rpc.rpc_sync("bob", time.sleep, (60,), timeout=0.2),
    lambda: rpc.remote("bob", time.sleep, (60,), timeout=60).to_here(timeout=0.2),
    lambda: rpc.rpc_sync("bob", os._exit, (9,)),
]:
    try:
        call()
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
process.join()
os._exit(0)
"""

STORE_GONE = """
import subprocess, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

KEEPS_STORE = "from torch.distributed import TCPStore as Store; store = Store("
KEEPS_STORE += "'localhost', 0, is_master=True); print(store.port, flush=True); input()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
other = subprocess.Popen([sys.executable, "-c", KEEPS_STORE], text=True, **pipes)
endpoint = f"localhost:{int(other.stdout.readline())}"
settings = RendezvousParameters("c10d", endpoint, "job", 2, 2, is_host=False)
backend, store = create_backend(settings)
agent = create_handler(store, backend, settings)
other.communicate("all is done\\n")
agent.shutdown()
"""

# A thread of gloo waits for Python's lock, to let go of a tensor, when Python ends. By
# itself that is rare: here the main thread keeps the lock for that long, to the end.
THREAD_LEFT = """
import resource, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort leaves no core file
store, groups = dist.HashStore(), {}

def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

ranks = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
options, tensor = dist.AllreduceOptions(), torch.ones(1)
options.timeout = timedelta(seconds=0.5)
work = groups[0].allreduce([tensor], options)  # nobody else calls: it times out
del work, tensor
print("the last line of the script", flush=True)
sys.setswitchinterval(1000)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""


UNKNOWN_NAME = """
from datetime import timedelta
from torch.distributed import DistNetworkError, TCPStore

try:
    TCPStore("node0.invalid", 4000, is_master=False, timeout=timedelta(seconds=1))
except DistNetworkError as error:
    print(error)
"""

# Errors under DeepSpeed and one of transformers', in one process for all.
UNDER_DEEPSPEED = """
import os, sys
import torch
import torch.distributed as dist
import deepspeed
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

def show(call, *args):
    try:
        print("no error, but", call(*args))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)

show(deepspeed.init_distributed, "gloo")
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = torch.nn.Embedding(10, 4)
show(model, torch.tensor([[1, 2]]))
show(model.load_state_dict, {"weight": torch.ones(10, 4)})
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to=[])
settings = HfTrainerDeepSpeedConfig(config)
settings.trainer_config_process(arguments)
show(settings.trainer_config_finalize, arguments, 4, 10)
from deepspeed.ops.op_builder import builder
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
import torch.utils.cpp_extension
torch.utils.cpp_extension.CUDA_HOME = None  # where it is not found
show(builder.installed_cuda_version)
bf16 = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
for layer in (torch.nn.Conv2d(3, 4, 1), torch.nn.Linear(3, 4)):
    inputs = torch.ones(4, 3, *layer.weight.shape[2:])
    show(deepspeed.initialize(model=layer, config=bf16)[0], inputs)
class Added(torch.nn.Module):
    def __init__(self, is_cast):
        super().__init__()
        self.is_cast, self.rows = is_cast, torch.nn.Embedding(2, 4)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("positions", torch.ones(4))
    def forward(self, ids):
        x, added = self.rows(ids), self.positions
        return self.head(x + (added.to(x.dtype) if self.is_cast else added)).dtype
for is_cast in (False, True):
    engine = deepspeed.initialize(model=Added(is_cast), config=bf16)[0]
    show(engine, torch.ones(4, dtype=int))
def engine_of(layer, stage):
    plain = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    adam = torch.optim.AdamW(p for p in layer.parameters() if p.requires_grad)
    return deepspeed.initialize(model=layer, optimizer=adam, config=plain)[0]
engine_of(torch.nn.Linear(3, 4), 2).save_checkpoint(sys.argv[1], "saved")
show(engine_of(torch.nn.Linear(3, 4), 0).load_checkpoint, sys.argv[1], "saved")
(less := torch.nn.Linear(3, 4)).weight.requires_grad = False
show((half := engine_of(less, 2)).load_checkpoint, sys.argv[1], "saved")
half.save_checkpoint(sys.argv[1], "half")
show(engine_of(torch.nn.Linear(3, 4), 2).load_checkpoint, sys.argv[1], "half")
scaler = DynamicLossScaler(2.0, 1000, 1.0, 1, False)
scaler.update_scale(overflow=True)
show(scaler.update_scale, True)
os._exit(0)
"""

KILLED = """
import os, signal, time
if os.environ["RANK"] == "0":
    time.sleep(60)  # until the launcher sends SIGTERM
for name in ("RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
    print(name, "is set" if name in os.environ else "is not set", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def unknown_name() -> str:
    """Look for a store on a host whose name nobody knows."""
    return python("-c", UNKNOWN_NAME).output


@cache
def mistakes_with_deepspeed() -> str:
    """Run UNDER_DEEPSPEED, once for all that quote it."""
    environment = clean_environment(DS_ACCELERATOR="cpu")
    with tempfile.TemporaryDirectory() as folder:
        words = ["-c", UNDER_DEEPSPEED, folder]
        output = python(*words, env=environment).output
    assert "no error, but torch.bfloat16\n" in output  # where the buffer was cast
    return output


def under_deepspeed() -> str:
    """Make mistakes with DeepSpeed."""
    return mistakes_with_deepspeed()


def killed_under_deepspeed() -> str:
    """Kill a rank that DeepSpeed's launcher has started."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "killed.py")
        script.write_text(KILLED)
        environment = clean_environment(DS_ACCELERATOR="cpu")
        output = deepspeed(script, num_ranks=2, env=environment).output
    assert "return code = -15" not in output
    assert "RANK is set\nLOCAL_SIZE is set\nLOCAL_WORLD_SIZE is not set\n" in output
    return output


def store_gone() -> str:
    """End an agent of torchrun when the one that keeps the store has left."""
    return python("-c", STORE_GONE).output


def dead_address() -> str:
    """Join a group whose store still holds the address of a rank that has gone."""
    output = ""
    for _ in range(10):
        with scratch_file() as path:
            output = python("-c", DEAD_ADDRESS, path).output
        if "refused" in output:
            break
    return output


def left_early() -> str:
    """Leave a group while another rank still connects."""
    # Of two ranks of gloo one calls and the other one waits to be called. That depends
    # on their addresses. Who calls is done before the other has noticed.
    return python("-c", LEFT_EARLY, "no barrier", 60).output


DDP_WARNS = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left_out = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, skips):
        return self.used(x), None if skips else self.left_out(x)

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return nn.functional.linear(x, self.conv.weight.flatten(1), self.conv.bias)

os.dup2(1, 2)  # warnings come in their place among the prints
child = os.fork()  # each process warns once
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if child:
    os.waitpid(child, 0)
    ddp = DistributedDataParallel(Pixels(), find_unused_parameters=True)
    ddp(torch.ones(2, 8)).sum().backward()
else:
    for looks in (True, False):
        ddp = DistributedDataParallel(Heads(), find_unused_parameters=looks)
        try:
            for step in range(3):
                ddp(torch.ones(2, 8), looks and step == 0)[0].sum().backward()
                print("a step went well", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
dist.destroy_process_group()
"""
OPEN_FILES = """
import resource, torch
from torch.utils.data import DataLoader, TensorDataset
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
loader = DataLoader(TensorDataset(torch.ones(200, 3)), num_workers=1)
print(len([batch.clone() for batch, in loader]), "batches were copied")
kept = [batch for batch, in loader]
"""
LEAKED = """
import multiprocessing, os, signal
queue = multiprocessing.get_context("spawn").Queue()
os.kill(os.getpid(), signal.SIGKILL)
"""


@cache
def ddp_warns() -> str:
    """Train with a gradient of other strides; look for unused parameters in vain."""
    output = python("-c", DDP_WARNS).output
    # It comes in the first pass without unused parameters. Of the loops that is the
    # second. Where the loss leaves out an output, they end well only if DDP looks.
    assert output.count("find_unused_parameters=True was specified in DDP") == 2
    order = re.findall("a step went well|parameters=True was specified", output)
    assert [text[0] for text in order[:3]] == ["a", "p", "a"], output
    assert output.count("a step went well") == 3 + 1
    assert output.count("Expected to have finished reduction in the prior") == 1
    return output


def open_files() -> str:
    """Keep the batches of a worker where few files may be open."""
    output = python("-c", OPEN_FILES).output
    assert "200 batches were copied" in output
    return output


def leaked_semaphores() -> str:
    """Kill a process that has a queue."""
    return python("-c", LEAKED).output


TERMINAL_CLOSED = """
import os, signal, subprocess, sys
command = ["nohup", sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]]
script = "echo ready; sleep 3; echo done"
process = subprocess.Popen(
    [*command, "--no-python", "sh", "-c", script],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    text=True, start_new_session=True,
)
for line in process.stdout:
    print(line, end="")
    if line == "ready\\n":
        os.killpg(process.pid, signal.SIGHUP)
print("status", process.wait())
"""


@cache
def terminal_closed(*options: str) -> str:
    """Close the terminal in which `nohup torchrun` was started."""
    return python("-c", TERMINAL_CLOSED, *options).output


def peer_gone() -> str:
    """Call a process that does not answer in time, then one that ends instead."""
    with scratch_file() as path:
        output = python("-c", PEER_GONE, path).output
    assert output.count("RPC ran for more than set timeout (200 ms)") == 2
    return output


def thread_left() -> str:
    """End Python while a thread of gloo lives."""
    for patience in (1, 4, 16):  # seconds; the first is enough unless cores are scarce
        result = python("-c", THREAD_LEFT, patience)
        if result.returncode:
            break
    return result.output


IN_A_WORKER = [
    *(no_launcher, nobody_listens, one_host_missing, port_taken, no_nccl),
    rank_missing,
    *(fewer_devices, cut_file, foreign_object, two_writers, wrapped_names),
    *(not_joined, local_function, wrapper_and_model, all_frozen, mesh_too_large),
    *(own_divisor, two_dtypes, no_strategy, few_samples, fixed_heads, more_ranks),
    *(forked_cuda, closed_rendezvous, skipped_step, half_weights, frozen_inputs),
    *(shared_tensors, too_large, viewed_output, no_such_row, two_devices),
    *(second_backward, written_over),
]
IN_A_PROCESS = [
    *(unknown_name, dead_address, left_early, peer_gone, store_gone, thread_left),
    *(terminal_closed, ddp_warns, open_files, leaked_semaphores),
]
# These import DeepSpeed, which takes long.
SLOWLY = {f.__name__: f for f in (under_deepspeed, killed_under_deepspeed)}
PROVOKED = {f.__name__: f for f in (*IN_A_WORKER, *IN_A_PROCESS)} | SLOWLY
# Of the others one is enough.
RANKS = {"fixed_heads": 2, "more_ranks": 4, "own_divisor": 2, "no_strategy": 2}


# WHEN_IT_GOES_WRONG.md.

QUOTATIONS = list(quotations(repository()))


def title(quotation: Quotation) -> str:
    """Name a quotation in a test's identifier."""
    return f"{quotation.place.split(':')[1]}-{quotation.name or quotation.file}"


def with_marks(quotation: Quotation) -> Any:
    """Mark what takes long."""
    is_slow = quotation.file == HERE and quotation.name in SLOWLY
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(quotation, marks=marks, id=title(quotation))


@pytest.mark.parametrize("quotation", [with_marks(one) for one in QUOTATIONS])
def test_quotation_is_what_its_source_says(
    quotation: Quotation, worker_pool: WorkerPool
) -> None:
    provoked = ""
    if quotation.file == HERE:
        provoke = PROVOKED[quotation.name]
        if provoke in IN_A_WORKER:
            ranks = RANKS.get(quotation.name, 1)
            provoked, *_ = worker_pool.run(provoke, world_size=ranks)
        else:
            provoked = provoke()
    assert fault(quotation, repository(), provoked) == "", provoked


def test_nohup_does_not_save_torchrun_from_a_closed_terminal() -> None:
    *_, status = terminal_closed().splitlines()
    assert status == "status 1"
    lines = terminal_closed("--signals-to-handle=SIGTERM,SIGINT,SIGQUIT").splitlines()
    assert lines[-2:] == ["done", "status 0"]


def test_torchrun_kills_a_rank_that_heeds_no_signal_after_half_a_minute() -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    # What it does to the other ranks of one that has failed.
    rank, context = mock.Mock(), object.__new__(SubprocessContext)
    rank.proc.poll.return_value = None
    rank.proc.wait.side_effect = TimeoutExpired("", 30)
    context.subprocess_handlers = {1: rank}
    agent = object.__new__(local_elastic_agent.LocalElasticAgent)
    agent._worker_watchdog = agent._health_check_server = None
    agent._pcontext = mock.Mock(close=context._close)
    agent._shutdown()
    sent = [call.kwargs["death_sig"].name for call in rank.close.call_args_list]
    assert sent == ["SIGTERM", "SIGKILL"]
    assert rank.proc.wait.call_args_list[0].args[0] == pytest.approx(30, abs=1)


def end_one_of_two() -> tuple[dict[int, int], list[str]]:
    """Send SIGTERM to the second of two ranks of torchrun's; return codes and text."""
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        SubprocessContext,
    )

    ranks = {rank: {} for rank in (0, 1)}
    sleep: Any = {rank: ("60",) for rank in ranks}
    context = SubprocessContext("x", "sleep", sleep, ranks, DefaultLogsSpecs())
    with mock.patch("signal.signal"):  # which torchrun ends by are not tried here
        context.start()
    os.kill(context.pids()[1], signal.SIGTERM)
    while not (ended := context.wait(timeout=0.1)):
        pass
    text = ChildFailedError("x", ended.failures).format_msg().splitlines()
    codes = {rank: failure.exitcode for rank, failure in ended.failures.items()}
    return codes, [line.strip() for line in text]


def test_who_was_ended_first_is_the_root_cause(worker_pool: WorkerPool) -> None:
    ((codes, lines),) = worker_pool.run(end_one_of_two, world_size=1)
    assert codes == {1: -15, 0: -15}
    failures, root = lines.index("Failures:"), lines.index(ROOT_CAUSE)
    ranks = [line for line in lines if line.startswith("rank ")]
    assert failures < lines.index(ranks[0]) < root < lines.index(ranks[1])
    assert [re.findall(r"\d", line)[0] for line in ranks] == ["0", "1"]


ROOT_CAUSE = "Root Cause (first observed failure):"


def test_a_parameter_is_written_to_under_no_grad() -> None:
    layer = torch.nn.Linear(2, 2)
    ways: list[Any] = [
        lambda: layer.weight.mul_(0.9),
        lambda: layer.weight.clamp_(0, 1),
        lambda: layer.weight.__setitem__(0, 0.0),
    ]
    said = [error_of(way) for way in ways]
    words = "a leaf Variable that requires grad is being used in an in-place operation."
    assert [words in text for text in said] == [True] * 3
    with torch.no_grad():
        assert [error_of(way)[:8] for way in ways] == ["no error"] * 3


def tensors_kept(keeps_graphs: bool, goes_back: bool) -> list[int]:
    """Add up losses of five batches; after each count the tensors kept for backward."""

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> Kept:
        alive.add(kept := Kept(tensor))
        return kept

    layer, total, counts = torch.nn.Linear(2, 2), 0.0, []
    for _ in range(5):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            loss = layer(torch.ones(1, 2)).square().mean()
        if goes_back:
            loss.backward()
        total = total + (loss if keeps_graphs else loss.item())
        del loss
        counts.append(len(alive))
    return counts


def test_a_sum_of_losses_keeps_the_graphs_that_nothing_went_back_through() -> None:
    first, *counts = tensors_kept(keeps_graphs=True, goes_back=False)
    assert counts == [2 * first, 3 * first, 4 * first, 5 * first] and first > 0
    for settings in ((False, False), (False, True), (True, True)):
        assert tensors_kept(*settings) == [0] * 5


def steps_that_differ(way: str) -> tuple[list[Any], list[float], list[Any]]:
    """Return gradients and learning rates of four steps, and the last weights."""
    seeds = {"other seeds": dist.get_rank()}
    torch.manual_seed(seeds.get(way, 0))
    model = torch.nn.Linear(2, 1)
    ddp_model = torch.nn.parallel.DistributedDataParallel(
        model, init_sync=way not in seeds
    )
    if way == "weights loaded" and dist.get_rank() == 0:
        model.load_state_dict(torch.nn.Linear(2, 1).state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0)
    if way == "state loaded" and dist.get_rank() == 0:
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        sgd.load_state_dict(other.state_dict())
    samples = torch.Generator().manual_seed(6 + dist.get_rank())
    gradients, rates = [], []
    for _ in range(4):
        sgd.zero_grad()
        x, y = torch.randn(2, 8, 2, generator=samples)
        loss = (ddp_model(x) - y.sum(1, keepdim=True)).square().mean()
        loss.backward()
        gradients.append(model.weight.grad.tolist())  # type: ignore
        if way == "mean loss":
            dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.AVG)
        if way != "step skipped" or loss < 2.5:  # of rank 0 alone
            sgd.step()
        if way in ("local loss", "mean loss"):
            plateau.step(loss.item())
        rates.append(sgd.param_groups[0]["lr"])
    return gradients, rates, model.weight.tolist()


@pytest.mark.parametrize(
    ("way", "equal"),
    [
        ("mean loss", [True, True]),
        ("local loss", [False, False]),
        ("state loaded", [False, False]),
        # DDP averages gradients, whatever weights they are of.
        ("other seeds", [True, False]),
        ("weights loaded", [True, False]),
        ("step skipped", [True, False]),
    ],
)
def test_with_equal_gradients_weights_and_steps_may_differ(
    worker_pool: WorkerPool, way: str, equal: list[bool]
) -> None:
    ours, theirs = worker_pool.run(steps_that_differ, way)
    assert ours[0] == theirs[0] and len(ours[0]) == 4
    # The learning rates, and the last weights.
    assert [a == b for a, b in zip(ours[1:], theirs[1:], strict=True)] == equal


def stores_without_libuv(folder: str) -> list[bool | str]:
    """Set USE_LIBUV=0; say which stores nevertheless use it, or which kind they are."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousParameters,
        c10d_rendezvous_backend,
        static_tcp_rendezvous,
    )

    settings = {"is_host": True, "rank": 0}
    static = RendezvousParameters("static", "127.0.0.1:0", "job", 1, 1, **settings)
    with mock.patch.dict(os.environ, USE_LIBUV="0"):
        plain, *_ = next(
            iter(dist.rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1))
        )
        stores: list[Any] = [
            plain,
            static_tcp_rendezvous.create_rdzv_handler(static).next_rendezvous().store,
        ]
        for endpoint, kind in (("127.0.0.1:0", "tcp"), (f"{folder}/store", "file")):
            c10d = RendezvousParameters("c10d", endpoint, "job", 1, 1, store_type=kind)
            stores.append(c10d_rendezvous_backend.create_backend(c10d)[1])
    inner = [getattr(store, "underlying_store", store) for store in stores]
    return [getattr(store, "libuvBackend", type(store).__name__) for store in inner]


def test_torchrun_does_not_ask_whether_to_use_libuv(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (found,) = worker_pool.run(stores_without_libuv, str(tmp_path), world_size=1)
    # Plain python; torchrun's static, c10d, and c10d with a file.
    assert found == [False, True, True, "FileStore"]


def put(queue: Any, value: str, has_put: Any) -> None:
    """Put a value on a queue, and tell that `put` has returned."""
    queue.put(value)
    has_put.set()


def test_a_child_that_fills_a_queue_does_not_end_before_it_is_read() -> None:
    context = multiprocessing.get_context("fork")
    for kind in (context.Queue, context.SimpleQueue):
        ended = []
        for length in (1000, 100_000):  # a pipe holds 64 KiB
            queue, has_put = kind(), context.Event()
            child = context.Process(target=put, args=(queue, "x" * length, has_put))
            child.start()
            child.join(1 if ended else None)
            ended.append((child.exitcode, has_put.is_set()))
            assert len(queue.get()) == length
            child.join()
            assert child.exitcode == 0
        # A simple queue's child waits in `put`, the other one at its end.
        assert ended == [(0, True), (None, kind == context.Queue)]
    with pytest.raises(TypeError, match="timeout"):
        cast(Any, context.SimpleQueue()).get(timeout=60)
    # They all write to one pipe.
    queue = context.Queue()
    start = partial(context.Process, target=queue.put, args=("x" * 30_000,))
    children = [start() for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(1)
    assert None in [child.exitcode for child in children]
    assert [len(queue.get()) for _ in children] == [30_000] * 3
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 3


def test_a_tensor_in_a_queue_is_lost_with_the_child_that_put_it() -> None:
    context, got = torch.multiprocessing.get_context("fork"), []
    for value in (np.ones(3), torch.ones(3)):
        queue = context.Queue()
        child = context.Process(target=queue.put, args=(value,))
        child.start()
        child.join()
        assert child.exitcode == 0
        try:
            got.append(queue.get(timeout=60).tolist())
        except (OSError, EOFError):
            got.append(None)
    assert got == [[1, 1, 1], None]


def fail_or_put(rank: int, queue: Any) -> None:
    """Put the rank on a queue, but fail on rank 1."""
    if rank == 1:
        raise ValueError("failed before it put anything")
    queue.put(rank)


def test_who_waits_for_a_queue_asks_whether_a_child_has_failed() -> None:
    from torch.multiprocessing.spawn import (
        ProcessExitedException,
        ProcessRaisedException,
    )

    queue = torch.multiprocessing.get_context("fork").Queue()
    start: Any = torch.multiprocessing.start_processes
    # `spawn` needs one of its own context, which is not the default on Linux. Python
    # 3.11.2 does not look, and the child crashes.
    refused = "SemLock created in a fork context|terminated with signal SIGSEGV"
    with pytest.raises((RuntimeError, ProcessExitedException), match=refused):
        start(fail_or_put, (queue,), nprocs=1, start_method="spawn")
    context = start(fail_or_put, (queue,), nprocs=2, join=False, start_method="fork")
    got, empty = [queue.get(timeout=60)], []
    with pytest.raises(ProcessRaisedException, match="failed before it put anything"):
        while True:
            try:
                got.append(queue.get(timeout=0.2))
            except Empty as error:
                empty.append(error)
                assert not context.join(timeout=0)
    assert got == [0] and len(empty) >= 1
    ended = start(abs, (), nprocs=1, join=False, start_method="fork")
    ended.processes[0].join(60)
    assert ended.join(timeout=0)


def test_a_lock_that_is_left_stops_who_compiles_an_extension(tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    (tmp_path / "lock").touch()
    (tmp_path / "code.cpp").touch()
    waits = mock.patch.object(cpp_extension.FileBaton, "wait", side_effect=ValueError)
    with waits, pytest.raises(ValueError):
        cpp_extension.load("code", [f"{tmp_path}/code.cpp"], build_directory=tmp_path)


def fail_for_two(gradient: torch.Tensor) -> None:
    """Raise in the backward pass of a batch of two."""
    if len(gradient) == 2:
        raise RuntimeError("pretend to be out of memory")


def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Have the gradient of a layer's output looked at."""
    output.register_hook(fail_for_two)


def take_a_step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Compute gradients."""
    model(batch).sum().backward()


def skip_a_batch(settings: dict[str, Any]) -> list[str]:
    """Catch what backward raises for the second of three batches, and go on.

    Then make DDP anew, first beside the old one and then in its place.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].register_forward_hook(watch)
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp_model = ddp(model, **settings)
    said = [error_of(partial(take_a_step, ddp_model, x)) for x in BATCHES]
    beside = ddp(model, **settings)
    said.append(error_of(partial(take_a_step, beside, BATCHES[0])))
    del beside
    ddp_model = ddp(model, **settings)
    steps = [error_of(partial(take_a_step, ddp_model, BATCHES[0])) for _ in range(2)]
    return [*said, *steps]


BATCHES = [torch.ones(length, 2) for length in (1, 2, 1)]


def fail_at(layers: list[int]) -> list[str]:
    """Raise in the second backward pass, then make DDP anew on all ranks.

    Each rank raises at a layer of its own, or with -1 at none.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    if (own := layers[dist.get_rank()]) >= 0:
        model[own].register_forward_hook(watch)
    # The buckets hold a parameter each.
    settings: dict[str, Any] = {"bucket_cap_mb": 1e-6}
    settings["process_group"] = dist.new_group(timeout=timedelta(seconds=1))
    ddp = partial(torch.nn.parallel.DistributedDataParallel, model, **settings)
    ddp_model = ddp()
    said = [error_of(partial(take_a_step, ddp_model, x)) for x in BATCHES[:2]]
    return [*said, error_of(lambda: ddp() and None)]


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
def test_ddp_goes_on_after_no_backward_that_has_raised(
    worker_pool: WorkerPool, settings: dict[str, Any]
) -> None:
    said, other = worker_pool.run(skip_a_batch, settings)
    first, second, third, beside, *anew = said
    well = "no error, but None"
    assert (first, second) == (well, "pretend to be out of memory")
    assert third.startswith("Expected to have finished reduction")
    assert beside.startswith("Expected to mark a variable ready only once")
    assert anew == other[4:] == [well] * 2


@pytest.mark.parametrize("layers", [[-1, 0], [1, 0], [0, 0]])
def test_ddp_is_made_anew_only_if_all_ranks_have_raised_at_one_layer(
    worker_pool: WorkerPool, layers: list[int]
) -> None:
    well, lost = "no error, but None", r"Timed out waiting|pair closure|by peer|Broken"
    found = worker_pool.run(fail_at, layers)
    assert len(found) == 2
    for own, (first, second, anew) in zip(layers, found, strict=True):
        assert first == well
        if own >= 0:
            assert second == "pretend to be out of memory"
        else:
            assert re.search(lost, second)
        assert anew == well if layers == [0, 0] else re.search(lost, anew)


def test_only_a_barrier_says_that_all_ranks_have_joined() -> None:
    joined = [
        python("-c", LEFT_EARLY, waits, tries, env=clean_environment(**settings)).output
        for waits, tries, settings in [
            ("no barrier", 60, {}),
            ("barrier", 5, {}),
            ("no barrier", 5, {"TORCH_DIST_INIT_BARRIER": "1"}),
        ]
    ]
    # Both ranks leave in each try but the last, in which one alone does.
    assert joined[0].count("leaves") % 2 == 1 and "RuntimeError: " in joined[0]
    assert [output.count("leaves") for output in joined[1:]] == [10, 10]


def others_that_have_begun(folder: str) -> list[str]:
    """Join a new group, each rank a second after the one before; return who came."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    time.sleep(rank)
    Path(folder, f"rank {rank}").touch()
    files = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size)
    return sorted(path.name for path in Path(folder).glob("rank *"))


def test_on_gloo_a_rank_waits_until_the_others_have_begun_to_join(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    found = worker_pool.run(others_that_have_begun, str(tmp_path))
    assert found == [["rank 0", "rank 1"]] * 2


def alone_in_new_group() -> list[str]:
    """Let rank 0 alone make the second and third group of both; return what it says."""
    rank, both = dist.get_rank(), [0, 1]
    port = [free_port()]
    dist.broadcast_object_list(port)
    store = dist.TCPStore("127.0.0.1", port[0], 2, is_master=rank == 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.new_group(both)
    limit: dict[str, Any] = {"timeout": timedelta(seconds=1)}
    if rank == 1:
        return []
    said = [error_of(lambda: dist.new_group(both, **limit))]
    limit["use_local_synchronization"] = True
    return [*said, error_of(lambda: dist.new_group(both, **limit))]


def test_a_group_names_the_member_that_has_not_come(worker_pool: WorkerPool) -> None:
    (one, named_by_a_hash), nothing = worker_pool.run(alone_in_new_group)
    assert re.search(r"wait timeout after 1000ms, keys: .*//2//cpu//0/1$", one)
    assert re.search(r"//[0-9a-f]{40}//cpu//0/1$", named_by_a_hash)
    assert nothing == []


def sums_with_a_busy_rank() -> list[float | str]:
    """Be busy on rank 0, then sum in a group of a second's patience and one of more."""
    found: list[float | str] = []
    groups: Any = [dist.new_group(timeout=timedelta(seconds=s)) for s in (1, 120)]
    if dist.get_rank() == 0:
        time.sleep(1.5)
    for group in groups:
        total = torch.ones(1)
        try:
            dist.all_reduce(total, group=group)
            found.append(total.item())
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_longer_timeout_waits_for_a_rank_that_is_busy(
    worker_pool: WorkerPool,
) -> None:
    (_, zero), (waited, one) = worker_pool.run(sums_with_a_busy_rank)
    assert "Timed out waiting 1000ms for" in str(waited)
    assert (zero, one) == (2, 2)


def test_everything_provoked_is_quoted() -> None:
    quoted = {quotation.name for quotation in QUOTATIONS if quotation.file == HERE}
    assert quoted == set(PROVOKED)


SAMPLE = """
```console
$ x
rank 0 | a line that is shown
and another one, 3 ... of 4
```

```console
$ y
in another block
```
"""
TREE = {
    "a.md": SAMPLE,
    "tests/test_a.py": 'def test_b():\n    "what is said"\n    f("xx asserted xx")',
    HERE: "",
}


@pytest.mark.parametrize(
    ("source", "text", "is_right"),
    [
        ("a.md", "a line that is shown", True),
        ("a.md", "rank 0 | a line that is shown\n...\n  another one, 3 ... of 4", True),
        ("a.md", "a line ... is shown", True),
        ("a.md", "a line that is", False),
        ("a.md", "ne that is shown", False),
        ("a.md", "a line that is not shown", False),
        ("a.md", "and another one, 3 ... of 4\na line that is shown", False),
        ("a.md", "a line that is shown\nin another block", False),
        ("a.md", "is shown", False),
        ("a.md", "...", False),
        ("a.md", "", False),
        ("b.md", "a line that is shown", False),
        ("tests/test_a.py, test_b", "xx asserted", True),
        ("tests/test_a.py, test_b", "what is said", False),
        ("tests/test_a.py, test_c", "xx asserted", False),
        (f"{HERE}, cut_file", "an error of torch", True),
        (f"{HERE}, cut_file", "another error of torch", False),
    ],
)
def test_a_false_quotation_is_found(source: str, text: str, is_right: bool) -> None:
    page = f"# A\n\n<!-- from: {source} -->\n```text\n{text}\n```\n"
    (quotation,) = quotations({HELP: page})
    found = fault(quotation, TREE, "RuntimeError: an error of torch\nframe #0")
    assert (found == "") is is_right, found


def test_a_quotation_without_a_source_is_found() -> None:
    page = (
        "# A\n\n<!-- from: a.md -->\n\nWords.\n\n```text\na line that is shown\n```\n"
    )
    (quotation,) = quotations({HELP: page})
    assert "no comment names the source" in fault(quotation, TREE)


class Entry(NamedTuple):
    """What the page says of one symptom."""

    group: str
    anchor: str
    blocks: list[str]
    text: str


def entries(tree: Tree) -> list[Entry]:
    """Return the entries of HELP: its third headings, each with what is below it."""
    tokens = markdown({HELP: tree[HELP]})[HELP]
    lines = tree[HELP].splitlines()
    places = [n for n, t in enumerate(tokens) if t.type == "heading_open"]
    found, group = [], ""
    for start, end in zip(places, [*places[1:], len(tokens)], strict=True):
        part = tokens[start:end]
        if part[0].tag == "h2":
            group = part[1].content
        elif part[0].tag == "h3":
            first = (part[0].map or [0])[0]
            last = (tokens[end].map or [0])[0] if end < len(tokens) else len(lines)
            (anchor,) = links_and_anchors(part[:3])[1]
            blocks = [token.info for token in part if token.type == "fence"]
            text = "\n".join(lines[first:last]).strip()
            found.append(Entry(group, anchor, blocks, text))
    return found


def links_of_rows(tokens: list[Token]) -> Iterator[tuple[str, list[str]]]:
    """Yield the first cell and the links of each row of the tables among the tokens."""
    for n, token in enumerate(tokens):
        if token.type == "tr_open" and tokens[n + 1].type == "td_open":
            cells = [t for t in tokens[n : n + 8] if t.type == "inline"][:2]
            yield cells[0].content, links_and_anchors(cells)[0]


def test_every_entry_shows_what_is_seen_and_says_four_things() -> None:
    found = entries(repository())
    assert len(found) >= 20
    for entry in found:
        assert entry.blocks and entry.blocks[0] in ("text", "console"), entry.anchor
        # The heading, then the block: whoever searches finds the text first.
        after_heading = entry.text.partition("\n\n")[2]
        assert after_heading.startswith(("<!-- from: ", "```console")), entry.anchor
        positions = [entry.text.find(part) for part in PARTS]
        assert -1 not in positions and positions == sorted(positions), entry.anchor
        assert len(entry.text.splitlines()) <= LONGEST_ENTRY, entry.anchor
        # Something of this repository provokes it.
        seen_in = entry.text[positions[-1] :]
        link = r"\]\((0\d_\w+(/\w+)?|tests)/\w+\.\w+[#)]"
        assert re.search(link, seen_in), entry.anchor


def test_index_leads_to_every_entry_in_the_order_of_the_page() -> None:
    rows = list(links_of_rows(markdown(repository())[HELP]))
    assert len(rows) > 20
    assert all(len(links) == 1 for _, links in rows)
    here = [(when, links[0][1:]) for when, links in rows if links[0].startswith("#")]
    assert here == [(entry.group, entry.anchor) for entry in entries(repository())]


def test_commands_on_the_page_are_run_by_some_page() -> None:
    run = [
        re.sub(r"[\\\s]+", " ", step.command)
        for _, token, _ in fences(repository())
        if token.info == "console"
        for step in parse_block(token.content).steps
    ]
    named = re.findall(
        r"`((?:OMP_NUM_THREADS=1 )?(?:python|torchrun|deepspeed) [^`]*0\d_[^`]+)`",
        re.sub(r"\s+", " ", repository()[HELP]),
    )
    assert len(named) >= 10
    for command in named:
        assert any(command in line for line in run), command


# README.md.


def test_minutes_of_a_chapter_suffice_to_read_it() -> None:
    row = r"^\| \[0.*\]\((0\d_\w+)/README\.md\) .* (\d+) \|$"
    chapters = re.findall(row, repository()["README.md"], re.M)
    assert len(chapters) == 9
    for folder, minutes in chapters:
        page = repository()[f"{folder}/README.md"]
        text = re.sub(r"(?s)\]\(.*?\)|<!--.*?-->", " ", page)
        # Two readers who had not seen the pages took so long, code and output included.
        reading = len(re.findall(r"\w\S*", text)) / 100  # words a minute
        # Three who typed the commands, too, took about twice as long.
        assert 1.5 * reading <= int(minutes) <= 2.5 * reading, (folder, reading)


# MYTHS.md.


class Myth(NamedTuple):
    """A row of MYTHS.md: what is wrong, what is right, and what proves it."""

    place: str
    claim: str
    truth: str
    proof: str


def myths(tree: Tree) -> list[Myth]:
    """Return the rows of the tables of MYTHS.md.

    Raises ValueError if a table has other columns than COLUMNS.
    """
    found: list[Myth] = []
    tokens = markdown({MYTHS: tree[MYTHS]})[MYTHS]
    for n, token in enumerate(tokens):
        if token.type == "tr_open":
            kind = tokens[n + 1].type
            end = next(k for k in range(n, len(tokens)) if tokens[k].type == "tr_close")
            cells = [t.content for t in tokens[n:end] if t.type == "inline"]
            place = f"{MYTHS}:{(token.map or [0])[0] + 1}"
            if kind == "th_open" and cells != COLUMNS:
                raise ValueError(f"{place}: the columns are {cells}, not {COLUMNS}")
            if kind == "td_open":
                truth, _, proof = cells[1].rpartition("<br>")
                found.append(Myth(place, cells[0], truth, proof))
    return found


def launches(tree: Tree) -> list[list[str]]:
    """Return the words of each command, of a console block, that starts a script."""
    return [
        words.split()
        for _, token, _ in fences(tree)
        if token.info == "console"
        for step in parse_block(token.content).steps
        for words in re.findall(
            r"\b(?:python3?|torchrun|deepspeed)\b[^;|&\n]*",
            step.command.replace("\\\n", " "),
        )
    ]


@cache
def functions(text: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file by name: the first of each name."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return {node.name: node for node in reversed(found)}


def is_always_skipped(text: str, name: str) -> bool:
    """Tell whether a test function of a file can never get to its end.

    What is marked with ``skip`` is not among the tests that `collect` returns. This is
    about ``skipif(True)``, and about a ``pytest.skip()`` that stands in no branch.
    """
    if name not in functions(text):
        return False
    node = functions(text)[name]
    marks = [d for d in node.decorator_list if isinstance(d, ast.Call)]
    calls = [n.value for n in node.body if isinstance(n, ast.Expr)]
    return any(
        ast.unparse(mark.func).endswith("mark.skipif")
        and any(isinstance(a, ast.Constant) and a.value for a in mark.args)
        for mark in marks
    ) or any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("pytest.skip", "pytest.xfail")
        for call in calls
    )


def fault_of_proof(name: str, path: str, tree: Tree, collected: Container[str]) -> str:
    """Say why what a row names proves nothing; nothing if all is well.

    Args:
        name: of the test, or the script with options.
        path: where the link leads.
        collected: what pytest collects, ``path::name`` with and without a case.
    """
    if path not in tree:
        return f"there is no {path}"
    if name.startswith("test_"):
        if f"{path}::{name}" not in collected:
            function = name.partition("[")[0]
            places = [n for n in tree if f"\ndef {function}(" in f"\n{tree[n]}"]
            return f"pytest collects no {name} in {path}; defined in {places}"
        if is_always_skipped(tree[path], name.partition("[")[0]):
            return f"{name} is always skipped"
        return ""
    script, *options = name.split()
    if script != posixpath.basename(path) or not script.endswith(".py"):
        return f"{name} is no test, nor a script at {path}"
    if not any({path, *options} <= set(words) for words in launches(tree)):
        return f"no console block runs {' '.join([path, *options])}"
    return ""


def faults_of_myths(tree: Tree, collected: Container[str]) -> list[str]:
    """Say what is wrong with the proofs of MYTHS.md."""
    faults = []
    for myth in myths(tree):
        proofs = PROOF.findall(myth.proof)
        words = PROOF.sub("", myth.proof)
        found = [fault_of_proof(name, path, tree, collected) for name, path in proofs]
        if not myth.truth:
            found.append("no <br> stands between the truth and its proof")
        if not proofs:
            found.append("names no test and no script")
        if re.search(r"\]\(|`test_|\.py\b", words):
            found.append(f"what is no link to a test or a script: {words!r}")
        faults += [f"{myth.place}: {myth.claim}: {fault}" for fault in found if fault]
    return faults


def collect(files: Sequence[str], root: Path = ROOT) -> tuple[set[str], str]:
    """Let pytest collect test files, with the settings of the folder they are in.

    Returns ``path::name`` of each test that is neither marked to be skipped nor allowed
    to fail (of one with cases also without the case), and pytest's complaints.
    """
    words = ["--collect-only", "-q", "-m", "not skip and not xfail", "--rootdir=."]
    options = ["-p", "no:cacheprovider", *words]
    result = python("-m", "pytest", *options, *files, cwd=root)
    tests = re.findall(r"^(tests/\w+\.py::\w+)(\[.*\])?$", result.stdout, re.M)
    said = "\n".join(re.findall(r"^E(?: |RROR).*", result.output, re.M))
    return {test for name, case in tests for test in (name, name + case)}, said


def test_what_each_row_says_is_shown_by_something_that_runs(
    request: pytest.FixtureRequest,
) -> None:
    tree = repository()
    rows = myths(tree)
    assert len(rows) >= FEWEST_MYTHS
    named = {path for myth in rows for _, path in PROOF.findall(myth.proof)}
    files = [path for path in sorted(named & set(tree)) if path.startswith("tests/")]
    # In a run of all files pytest has done so already.
    conftest: Any = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    here = request.config.stash[conftest.COLLECTED]
    seen = {one for test in here for one in (test, test.partition("[")[0])}
    left = [file for file in files if not any(one.startswith(file) for one in seen)]
    collected, said = collect(left) if left else (set[str](), "")
    collected |= seen
    assert len(collected) > len(rows) / 2, said
    faults = faults_of_myths(tree, collected)
    assert faults == [], "\n".join([*faults, said])


def test_myths_are_counted_and_every_chapter_has_some() -> None:
    tree = repository()
    rows = myths(tree)
    assert f"\n{len(rows)} claims about" in tree[MYTHS]
    assert len({myth.claim for myth in rows}) == len(rows)
    parts = re.split(r"^## \[.*\]\((.*)\)$", tree[MYTHS], flags=re.M)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    chapters = {name for name in tree if re.fullmatch(r"0\d_\w+/README\.md", name)}
    assert len(chapters) >= 5 and chapters <= set(tables) <= set(tree)
    assert min(text.count("<br>") for text in tables.values()) >= 7


@pytest.mark.parametrize("page", [MYTHS, HELP])
def test_pages_name_the_versions_that_are_pinned(page: str) -> None:
    tree = repository()
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", tree["requirements.txt"], re.M))
    words = " ".join(tree[page].split())
    assert f" torch {pins['torch']} and DeepSpeed {pins['deepspeed']}" in words


MYTH_TREE = {
    MYTHS: (
        "# M\n\n## [A](01_a/README.md)\n\n"
        "| claim | what really happens, and what shows it |\n| --- | --- |\n"
        "| x | [y](02_b/README.md#z) `test_me` in `c.py`<br>SHOWN |\n"
    ),
    "01_a/README.md": (
        "```console\n"
        "$ python 01_a/b.py --c=1 --d=2 | grep 01_a/e.py\n"
        "$ torchrun --nproc-per-node=2 \\\n"
        "      01_a/f.py\n"
        "$ cat 01_a/h.py\n"
        "```\n"
        "```text\npython 01_a/g.py\n```\n"
    ),
    **dict.fromkeys([f"01_a/{letter}.py" for letter in "befgh"], ""),
    "tests/test_a.py": (
        "import pytest\n"
        "def test_x(): ...\n"
        "@pytest.mark.parametrize('case', ['one', 'two words'])\n"
        "def test_many(case): ...\n"
        "@pytest.mark.skip\n"
        "def test_mark(): ...\n"
        "@pytest.mark.skip(reason='x')\n"
        "@pytest.mark.parametrize('case', ['one'])\n"
        "def test_reason(case): ...\n"
        "@pytest.mark.xfail\n"
        "def test_may_fail(): ...\n"
        "@pytest.mark.skipif(True, reason='x')\n"
        "def test_if(): ...\n"
        "@pytest.mark.skipif('nt' in __name__, reason='x')\n"
        "def test_elsewhere(): ...\n"
        "def test_body():\n    pytest.skip('x')\n"
        "def test_branch():\n    if test_x():\n        pytest.skip('x')\n"
        "if not test_x:\n    def test_never(): ...\n"
        "def helper():\n    def test_inside(): ...\n"
    ),
    "tests/test_b.py": (
        "import pytest\npytestmark = pytest.mark.skip\ndef test_of_b(): ...\n"
    ),
    "tests/test_c.py": (
        "import pytest\npytest.skip('x', allow_module_level=True)\n"
        "def test_of_c(): ...\n"
    ),
    "tests/other.py": "def test_other(): ...\n",
}


@pytest.fixture(scope="module")
def collected_samples(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return what pytest collects of the sample's tests."""
    folder = tmp_path_factory.mktemp("myths")
    (folder / "tests").mkdir()
    files = [name for name in MYTH_TREE if name.startswith("tests/test_")]
    assert len(files) == 3
    for name in files:
        (folder / name).write_text(MYTH_TREE[name])
    return collect(files, folder)[0]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("[`test_x`](tests/test_a.py)", ""),
        ("[`test_many[one]`](tests/test_a.py), [`test_x`](tests/test_a.py)", ""),
        ("[`test_many[two words]`](tests/test_a.py)", ""),
        ("[`test_many`](tests/test_a.py)", ""),
        ("[`test_elsewhere`](tests/test_a.py)", ""),
        ("[`test_branch`](tests/test_a.py)", ""),
        ("the `check:` of [`b.py`](01_a/b.py)", ""),
        ("[`b.py --d=2`](01_a/b.py) and [`f.py`](01_a/f.py)", ""),
        ("", "names no test and no script"),
        ("the `check:`", "names no test and no script"),
        ("`test_x`", "names no test and no script"),
        ("[`test_x`](tests/test_a.py), `test_many`", "what is no link to a test"),
        ("[`test_x`](tests/test_a.py), b.py", "what is no link to a test"),
        ("[`test_x`](tests/test_a.py), [page](01_a/README.md)", "what is no link to"),
        ("[A block](01_a/README.md#a-block)", "names no test and no script"),
        ("[`test_gone`](tests/test_a.py)", "no test_gone in tests/test_a.py; defined"),
        (
            "[`test_x`](tests/test_b.py)",
            "in tests/test_b.py; defined in ['tests/test_a",
        ),
        ("[`test_x`](tests/test_gone.py)", "there is no tests/test_gone.py"),
        ("[`test_many[three]`](tests/test_a.py)", "collects no test_many[three]"),
        ("[`test_x[one]`](tests/test_a.py)", "collects no test_x[one]"),
        ("[`test_mark`](tests/test_a.py)", "collects no test_mark"),
        ("[`test_reason`](tests/test_a.py)", "collects no test_reason"),
        ("[`test_may_fail`](tests/test_a.py)", "collects no test_may_fail"),
        ("[`test_never`](tests/test_a.py)", "collects no test_never"),
        ("[`test_inside`](tests/test_a.py)", "collects no test_inside"),
        ("[`test_of_b`](tests/test_b.py)", "collects no test_of_b"),
        ("[`test_of_c`](tests/test_c.py)", "collects no test_of_c"),
        ("[`test_other`](tests/other.py)", "collects no test_other"),
        ("[`test_if`](tests/test_a.py)", "test_if is always skipped"),
        ("[`test_body`](tests/test_a.py)", "test_body is always skipped"),
        ("[`c.py`](01_a/c.py)", "there is no 01_a/c.py"),
        ("[`b.py`](01_a/f.py)", "b.py is no test, nor a script at 01_a/f.py"),
        ("[`b.py --c=3`](01_a/b.py)", "no console block runs 01_a/b.py --c=3"),
        ("[`e.py`](01_a/e.py)", "no console block runs 01_a/e.py"),
        ("[`g.py`](01_a/g.py)", "no console block runs 01_a/g.py"),
        ("[`h.py`](01_a/h.py)", "no console block runs 01_a/h.py"),
        ("[`README.md`](01_a/README.md)", "README.md is no test, nor a script at"),
        ("[`test_x`](tests/test_a.py) |\n| 2 | `test_x`", "2: no <br> stands between"),
    ],
)
def test_a_row_without_its_proof_is_found(
    shown: str, expected: str, collected_samples: set[str]
) -> None:
    page = MYTH_TREE[MYTHS].replace("SHOWN", shown)
    faults = faults_of_myths(MYTH_TREE | {MYTHS: page}, collected_samples)
    if expected:
        assert any(expected in fault for fault in faults), faults
    else:
        assert faults == []


def test_a_table_of_other_columns_is_found() -> None:
    assert [myth.claim for myth in myths(MYTH_TREE)] == ["x"]
    page = MYTH_TREE[MYTHS].replace("| claim", "| myth")
    with pytest.raises(ValueError, match="the columns are"):
        myths({MYTHS: page})
