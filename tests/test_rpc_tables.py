"""The table on several servers, what a lookup costs, and the table with no server."""

import contextlib
import copy
import importlib
import inspect
import io
import json
import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launch import MARK, ROOT, clean_environment, python
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "04_rpc_parameter_server"
CLASSIFIER = load_chapter(CHAPTER)["classifier"]
BAGS, SHARDED = (load_chapter(CHAPTER)[name] for name in ("bags", "sharded_tables"))
ROOM = load_chapter(f"{CHAPTER}/lookup_cost")
WIRE, LOOKUPS, COST = ROOM["wire"], ROOM["lookups"], ROOM["measured_costs"]
SPLIT = load_chapter(f"{CHAPTER}/sharding")["split_table"]
# What RPC sends it sends by the names of these.
BY_NAME = {"split_table": SPLIT, "row_server": ROOM["row_server"]}
BY_NAME |= {"classifier": ROOM["classifier"]}
# Each room has loaded its own; by name there is one.
vars(SPLIT)["EagerSGD"] = ROOM["classifier"].EagerSGD
TABLE = CLASSIFIER.Table
ROWS, STEPS = 3001, 12


# What runs on the ranks.


NAMES = ["trainer0", "trainer1", "server0", "server1"]


@contextmanager
def open_rpc(folder: str) -> Iterator[str]:
    """Let the pool's ranks call each other by RPC; yield the name of this one.

    RPC finds functions by the name of their module, which `load_chapter` has hidden.
    """
    rank = dist.get_rank()
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    kept = dict(sys.modules)
    sys.modules.update(BY_NAME)
    # TCP, so that there is something to count.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc",
        rpc_timeout=120,
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(
        NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options
    )
    try:
        yield NAMES[rank]
        ended = dist.FileStore(f"{folder}/ended", len(NAMES))
        ended.set(NAMES[rank], "")
        ended.wait(list(NAMES))
        # A graceful end would wait two minutes for backward passes that still wait.
        rpc.shutdown(graceful=False)
    finally:
        for name in BY_NAME:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def batches_of_both(steps: int = STEPS, trainers: int = 2) -> list[list[Any]]:
    """Return the batches of each trainer."""
    samples = CLASSIFIER.load_samples(ROWS)[0]
    each = [samples.batches(16, i, trainers) for i in range(trainers)]
    return [list(islice(batches, steps)) for batches in each]


def train_with_servers() -> tuple[Any, ...]:
    """Train with synchronous updates; return the parts and every dense part."""
    shards = [
        SPLIT.RemoteModule(f"server{i}", SPLIT.TableShard, (ROWS, i, 2))
        for i in range(2)
    ]
    mine, others = batches_of_both()
    other = rpc.rpc_async(
        "trainer1", SPLIT.train_in_turn, ([shards], others), timeout=0
    )
    results = [SPLIT.train_in_turn([shards], mine)[0], other.wait()[0]]
    parts = [shard.remote_parameters()[0].to_here().detach() for shard in shards]
    return parts, [dense for dense, _ in results]


class LargestTensor(TorchDispatchMode):
    """Note how many numbers the largest tensor has that any operation returns."""

    largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make the call, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def train_without_servers(steps: int) -> tuple[Any, ...]:
    """Train with the table sharded.

    Returns the rows here, the dense part, and the size of the largest tensor.
    """
    batches = batches_of_both(steps, dist.get_world_size())
    with LargestTensor() as seen:
        model, _ = SHARDED.train_sharded(batches[dist.get_rank()], ROWS)
    dense = torch.nn.utils.parameters_to_vector(model.dense.parameters())
    return model.table.own.weight.detach(), dense.detach(), seen.largest


def train_alone(steps: int = STEPS, trainers: int = 2) -> tuple[Any, ...]:
    """Do the same in this process; return the whole table, and the dense part."""
    model = CLASSIFIER.HybridModel(TABLE(ROWS, 32, 0), CLASSIFIER.dense_part())
    rounds = zip(*batches_of_both(steps, trainers), strict=True)
    CLASSIFIER.train_in_one_process(model, rounds, 0.1, 0.1)
    dense = torch.nn.utils.parameters_to_vector(model.dense.parameters())
    return model.table.weight.detach(), dense.detach()


class WaitsForTheOther(torch.nn.Module):
    """Part of a table that answers only when the other part has been asked too."""

    def __init__(self, folder: str, number: int) -> None:
        """Note where it is written down that a part was asked."""
        super().__init__()
        self.mine = Path(folder, f"asked {number}")
        self.other = Path(folder, f"asked {1 - number}")

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return ones."""
        self.mine.touch()
        deadline = time.monotonic() + 15
        while not self.other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the other was not asked")
            time.sleep(0.01)
        return torch.ones(len(offsets), 1)


def ask_two_that_wait_for_each_other(folder: str) -> list[float]:
    """Look up in two parts that would never answer one after the other."""
    parts = [
        SPLIT.RemoteModule(f"server{i}", WaitsForTheOther, (folder, i))
        for i in range(2)
    ]
    indices, offsets = torch.tensor([4, 5, 6]), torch.tensor([0, 2])
    return SPLIT.SplitTable(parts)(indices, offsets).flatten().tolist()


def use_every_way(batches: Any) -> dict[str, tuple[Any, ...]]:
    """Train in each way; return bytes in tensors, on the wire, and all parameters."""
    answers = {}
    for way, train in LOOKUPS.WAYS.items():
        line = LOOKUPS.Line(way, server="server0")
        train(line, batches[:1])  # opens the connections
        rpc.rpc_sync("server0", os.getpid)
        line.bytes, before = 0, WIRE.wire_bytes()
        train(line, batches[1:])
        rpc.rpc_sync("server0", os.getpid)
        counted, now = line.bytes, WIRE.wire_bytes()
        on_wire = None if before is None or now is None else now - before
        answers[way] = (
            counted,
            on_wire,
            line.waited,
            ROOM["one_process"].flat(line.weight(), line.dense),
        )
    return answers


class LongToPickle:
    """An argument that is ready for the wire only when an earlier call has answered."""

    def __init__(self, earlier: Any) -> None:
        """Keep the future of the earlier call."""
        self.earlier = earlier

    def __reduce__(self) -> tuple[Any, ...]:
        """Wait, and send 2."""
        deadline = time.monotonic() + 15
        while not self.earlier.done():
            if time.monotonic() > deadline:
                raise TimeoutError("the earlier call has not answered")
            time.sleep(0.01)
        return int, (2,)


def ask_when_the_first_has_answered() -> list[int]:
    """Ask two servers; the second is asked only after the first has answered."""
    first = rpc.rpc_async("server0", operator.add, (1, 1))
    second = rpc.rpc_async("server1", operator.add, (1, LongToPickle(first)))
    return [first.done(), first.wait(), second.wait()]


def read_while_it_is_sent() -> float:
    """Overwrite an argument right after a call; return the largest sum that came."""
    sums = []
    for _ in range(5):
        argument = torch.zeros(5_000_000)
        future = rpc.rpc_async("server0", torch.sum, args=(argument,))
        argument.fill_(1)
        sums.append(future.wait().item())
        if sums[-1]:
            break
    return max(sums)


def value_of_another() -> str:
    """Ask for the value of a reference that server 0 owns; return the error."""
    reference = rpc.remote("server0", torch.arange, args=(2.0,))
    with pytest.raises(RuntimeError) as error:
        reference.local_value()
    assert (reference.owner().name, reference.is_owner()) == ("server0", False)
    return str(error.value)


class NoMoreThanSGD(torch.optim.SGD):
    """A class that `DistributedOptimizer` does not know."""


def stepped_by_old_gradients() -> list[list[float]]:
    """Step by two weights, then by the second alone, with each optimizer.

    At the end there are two: one for each weight, both for both, one for both and one
    for the second.
    """
    ends, eager, both, one, two = [], ROOM["classifier"].EagerSGD, [0, 1], [0], [1]
    for kind, *of_each in (
        *((kind, both) for kind in (torch.optim.SGD, NoMoreThanSGD, eager)),
        *((eager, *of_each) for of_each in ((one, two), (both, both), (both, two))),
    ):
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        parts = [[rpc.RRef(weights[i]) for i in numbers] for numbers in of_each]
        optimizers = [DistributedOptimizer(kind, part, lr=1.0) for part in parts]
        for used in (weights, weights[1:]):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [sum(used, torch.zeros(1)).sum()])
                assert used is not weights or [w.grad for w in used] == [None, None]
                for optimizer in optimizers:
                    optimizer.step(context)
        ends.append([weight.item() for weight in weights])
    return ends


def stepped_in_contexts_of_their_own() -> list[list[float]]:
    """Give each of two weights an optimizer; go backward and step by one at a time."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    eager, ends = ROOM["classifier"].EagerSGD, []
    optimizers = [DistributedOptimizer(eager, [rpc.RRef(w)], lr=1.0) for w in weights]
    for used in (0, 1, 1, 0):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [weights[used].sum()])
            optimizers[used].step(context)
        ends.append([weight.item() for weight in weights])
    return ends


def moved_by_adagrad(trainers: int) -> float:
    """Let each trainer step a weight twice by a gradient of 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizers = [
        DistributedOptimizer(torch.optim.Adagrad, [rpc.RRef(weight)], lr=1.0)
        for _ in range(trainers)
    ]
    for one in [*optimizers, *optimizers]:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [weight.sum()])
            one.step(context)
    return weight.item()


def commented(start: str) -> str:
    """Return the code in the comments of chapter 04's minimal.py that begin so."""
    lines = (ROOT / CHAPTER / "minimal.py").read_text().splitlines()
    begins = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
    found = []
    for begin in begins:
        rest = (line.strip() for line in lines[begin + 1 :])
        found += takewhile(lambda line: line.startswith("#   "), rest)
    return "\n".join(line.removeprefix("#   ") for line in found)


def clipped_in_a_context() -> list[float]:
    """Clip before steps by a gradient of 4, as usual, and as minimal.py's comment does.

    Return the norm that was found, and how far each step goes.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    eager = ROOM["classifier"].EagerSGD
    optimizer = DistributedOptimizer(eager, [rpc.RRef(weight)], lr=1.0)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [4 * weight.sum()])
        norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        optimizer.step(context)
    far = weight.item()
    for slope in (4, 0.5):  # only the first is longer than 1
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [slope * weight.sum()])
            names = {"dist_autograd": dist_autograd, "nn": torch.nn}
            exec(commented("# To clip"), {**names, "context_id": context})
            optimizer.step(context)
    return [norm.item(), far, weight.item() - far]


NO_TASK = "graphTask_ INTERNAL ASSERT FAILED"


def went_back_by_plain_backward() -> list[Any]:
    """Call a server outside a context, then in one; let plain `backward` go back.

    Return the gradient of a weight that only this process uses, whether it knows one
    of the weight that it sent, and what the second says.
    """
    here, sent = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    returned = rpc.rpc_sync("server0", torch.add, args=(sent, 1))
    (here + returned).sum().backward()
    assert here.grad is not None
    found: list[Any] = [here.grad.item(), sent.grad]
    with dist_autograd.context():
        returned = rpc.rpc_sync("server0", torch.add, args=(sent, 1))
        try:
            (here + returned).sum().backward()
        except RuntimeError as error:
            found.append(str(error))
    return found


def went_back_in_contexts() -> dict[str, Any]:
    """Call a server and go back, in several orders; return gradients, or who waits."""
    sent = torch.nn.Parameter(torch.zeros(1))
    weight = rpc.remote("server0", torch.nn.Parameter, args=(torch.zeros(1),))

    def call() -> torch.Tensor:
        return rpc.rpc_sync("server0", torch.mul, args=(sent, 3)).sum()

    def one_call_twice(context: int) -> None:
        loss = call()
        dist_autograd.backward(context, [loss], retain_graph=True)
        dist_autograd.backward(context, [loss])

    def the_sum_of_two(context: int) -> None:
        dist_autograd.backward(context, [call() + call()])

    def unused_afterwards(context: int) -> None:
        dist_autograd.backward(context, [call()])
        call()

    def a_new_call(context: int) -> None:
        dist_autograd.backward(context, [call()])
        dist_autograd.backward(context, [call()])

    def unused_before(context: int) -> None:
        call()
        dist_autograd.backward(context, [call()])

    def unused_before_without_grad(context: int) -> None:
        with torch.no_grad():  # which does not reach a weight on the server
            weight.rpc_sync().sum()
        dist_autograd.backward(context, [call()])

    found = {}

    def try_in_a_context(steps: Any) -> None:
        with dist_autograd.context() as context:
            steps(context)
            found[steps.__name__] = dist_autograd.get_gradients(context)[sent].item()

    for steps in (one_call_twice, the_sum_of_two, unused_afterwards):
        try_in_a_context(steps)
    for steps in (a_new_call, unused_before, unused_before_without_grad):
        # It may wait for as long as this process lives.
        thread = threading.Thread(target=try_in_a_context, args=(steps,), daemon=True)
        thread.start()
        thread.join(1)
        found |= {steps.__name__: "waits"} if thread.is_alive() else {}
    return found


NOT_IN_CONTEXT = "it != accumulatedGrads_.end() INTERNAL ASSERT FAILED"


class HalfUsed(torch.nn.Module):
    """Two layers, of which `forward` uses one."""

    def __init__(self) -> None:
        """Make both."""
        super().__init__()
        self.used, self.unused = (torch.nn.Linear(2, 2) for _ in range(2))

    def zero(self) -> torch.Tensor:
        """Return what the other layer is needed for, times 0."""
        return torch.stack([0 * p.sum() for p in self.unused.parameters()]).sum()

    def forward(self, x: torch.Tensor, with_zero: bool) -> torch.Tensor:
        """Leave one layer out, or only its value."""
        return self.used(x) + self.zero() if with_zero else self.used(x)


def went_back_past_a_layer() -> dict[str, Any]:
    """Go back through DDP twice, both trainers; return errors, or mean gradients.

    The first is without an option, and after its first step come the names of the
    parameters that have no gradient in the context.
    """

    def went_back(zero: str = "", freeze: bool = False, **options: Any) -> Any:
        model, found = HalfUsed(), {}
        model.unused.requires_grad_(not freeze)
        ddp = torch.nn.parallel.DistributedDataParallel(model, **options)
        x = torch.full((1, 2), dist.get_rank() + 1.0)
        try:
            for _ in range(2):
                with dist_autograd.context() as context:
                    loss = ddp(x, zero == "forward").sum()
                    if zero == "loss":
                        loss = loss + model.zero()
                    dist_autograd.backward(context, [loss])
                    own = dist_autograd.get_gradients(context)
                    for name, weight in model.named_parameters():
                        found[name] = own[weight].tolist() if weight in own else None
        except RuntimeError as error:
            return [name for name in found if found[name] is None], str(error)
        return found

    return {
        "plain": went_back(),
        "find": went_back(find_unused_parameters=True),
        "static": went_back(static_graph=True),
        "find, zero": went_back("loss", find_unused_parameters=True),
        "zero": went_back("loss"),
        "static, zero": went_back("loss", static_graph=True),
        "find, zero in forward": went_back("forward", find_unused_parameters=True),
        "frozen": went_back(freeze=True),
    }


def is_training(module: rpc.RRef) -> bool:
    """Tell in which mode a module is that lives here."""
    return module.local_value().training


def end_training(module: rpc.RRef) -> None:
    """Put a module that lives here in eval mode; unlike `eval()`, return nothing."""
    module.local_value().eval()


def sizes_of_answers() -> list[int | None]:
    """Change the mode of a table on a server; return how many weights came back."""
    remote = SPLIT.RemoteModule("server0", torch.nn.EmbeddingBag, (1000, 4))
    there = remote.get_module_rref()
    model = torch.nn.Sequential(remote)
    with mock.patch.object(type(remote), "train", autospec=True) as asked:
        model.train()
        model.eval()  # both ask the table alike, and drop its answer
    assert [call.args[1:] for call in asked.call_args_list] == [(True,), (False,)]
    answers = [remote.train(), remote.train(False), remote.eval()]
    remote.train()
    answers.append(rpc.rpc_sync(there.owner(), end_training, args=(there,)))
    assert not rpc.rpc_sync(there.owner(), is_training, args=(there,))
    return [one if one is None else one.weight.numel() for one in answers]


def add_one(weight: torch.Tensor, lock: threading.Lock) -> None:
    """Change a weight as the page's rule has it: under a lock of one's own."""
    with lock, torch.no_grad():
        weight += 1


class OvertakenSGD(ROOM["classifier"].EagerSGD):
    """In each of its steps another thread changes the weight, under its own lock."""

    weights: ClassVar[list[float]] = []  # at the start of a step, and during it

    def step(self, closure: Any = None) -> Any:
        """Let the other thread change the weight, then step."""
        (weight,) = self.param_groups[0]["params"]
        self.weights.append(weight.item())
        other = threading.Thread(target=add_one, args=(weight, threading.Lock()))
        other.start()
        other.join(10)
        self.weights.append(weight.item())
        return super().step(closure)


def overtaken_step() -> list[float]:
    """Step a weight that lives here by 1; return it before, during and after that."""
    weight = rpc.RRef(torch.nn.Parameter(torch.zeros(1)))
    optimizer: Any = DistributedOptimizer(OvertakenSGD, [weight], lr=1.0)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [weight.local_value().sum()])
        optimizer.step(context)
    return [*OvertakenSGD.weights, weight.local_value().item()]


def evaluated_model() -> list[bool]:
    """Put a model whose dropout lives on a server in eval mode; tell both modes."""
    remote = SPLIT.RemoteModule("server0", torch.nn.Dropout, (0.5,))
    model = torch.nn.Sequential(remote, torch.nn.Dropout(0.5)).eval()
    there = remote.get_module_rref()
    asked = rpc.rpc_sync(there.owner(), is_training, args=(there,))
    # Its own eval() reaches it, and the model's then turns that round.
    remote.eval()
    reached = rpc.rpc_sync(there.owner(), is_training, args=(there,))
    model.eval()
    again = rpc.rpc_sync(there.owner(), is_training, args=(there,))
    for call in (model.parameters, model.state_dict):
        with pytest.raises(ValueError, match="not supported for RemoteModule"):
            list(call())
    return [model[1].training, asked, reached, again]


def set_rate(one: rpc.RRef, rate: float) -> None:
    """Set the rate of an optimizer that lives here, as minimal.py's comment does."""
    one.local_value().optim.param_groups[0]["lr"] = rate


def stepped_at_two_rates() -> list[Any]:
    """Ask a schedule; step weights here and on a server at rate 1, then at 0.25."""
    weights = [
        rpc.RRef(torch.nn.Parameter(torch.zeros(1))),
        rpc.remote("server0", torch.nn.Parameter, args=(torch.zeros(1),)),
    ]
    eager = ROOM["classifier"].EagerSGD
    optimizer: Any = DistributedOptimizer(eager, weights, lr=1.0)
    with pytest.raises(AttributeError, match="param_groups"):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    found = []
    for rate in (None, 0.25):
        if rate is not None:
            # A function that can be sent: one that the servers can import.
            body, loop = commented("# To set a rate").split("for one", maxsplit=1)
            assert body.splitlines()[1] in inspect.getsource(set_rate).splitlines()
            names = {"rpc": rpc, "set_rate": set_rate, "rate": rate}
            exec(f"for one{loop}", {**names, "of_table": optimizer})
        with dist_autograd.context() as context:
            loss = weights[0].local_value().sum() + weights[1].rpc_sync().sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        found.append([weight.to_here().item() for weight in weights])
    with pytest.raises(TypeError, match="is not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compiled = DistributedOptimizer(torch.optim.SGD, weights[:1], lr=1.0)
    (local,) = (one.local_value().optim for one in compiled.remote_optimizers)
    return [*found, hasattr(local, "param_groups")]


def rpc_session(folder: str, batches: Any) -> dict[str, Any]:
    """Do all that needs RPC: the second time in a process, its RRefs do not work."""
    with open_rpc(folder) as name:
        dist.destroy_process_group()  # the pool's, which servers are in as well
        if name.startswith("server"):
            return {}
        rank, store = NAMES.index(name), dist.FileStore(f"{folder}/trainers", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        past_a_layer = went_back_past_a_layer()
        if rank == 1:
            return {}
        return {
            "past a layer": past_a_layer,
            "value": value_of_another(),
            "asked": ask_two_that_wait_for_each_other(folder),
            "asked late": ask_when_the_first_has_answered(),
            "overwritten": read_while_it_is_sent(),
            "stepped": stepped_by_old_gradients(),
            "stepped apart": stepped_in_contexts_of_their_own(),
            "by Adagrad": [moved_by_adagrad(trainers) for trainers in (1, 2, 3)],
            "clipped": clipped_in_a_context(),
            "two rates": stepped_at_two_rates(),
            "plain": went_back_by_plain_backward(),
            "modes": evaluated_model(),
            "copied": sizes_of_answers(),
            "overtaken": overtaken_step(),
            "orders": went_back_in_contexts(),
            "ways": use_every_way(batches),
            "table": train_with_servers(),
        }


# One session of RPC, in workers of its own, for the tests below.


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Return workers in which nobody has opened RPC before."""
    with WorkerPool(max_ranks=4) as workers:
        yield workers


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    """Return five batches of 16 bags."""
    return list(islice(CLASSIFIER.load_samples()[0].batches(16), 5))


@pytest.fixture(scope="module")
def session(
    pool: WorkerPool, batches: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return what trainer 0 found."""
    folder = str(tmp_path_factory.mktemp("rpc"))
    ranks = pool.run(rpc_session, folder, batches, world_size=4)
    assert ranks[1:] == [{}] * 3
    return ranks[0]


# Tables cut up by rows.


def random_bags(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bags of 3, 0, 20 and 1 numbers, some of them twice."""
    indices = torch.randint(rows, (24,), generator=torch.Generator().manual_seed(1))
    indices[4] = indices[5]
    return indices, torch.tensor([0, 3, 3, 23])


@pytest.mark.parametrize("owners", [1, 2, 3, 5])
def test_the_parts_of_a_bag_add_up_to_its_sum(owners: int) -> None:
    rows = 2 * CLASSIFIER.BLOCK + 77  # two whole blocks and a piece
    whole = TABLE(rows, 32, 0).weight.detach()
    indices, offsets = random_bags(rows)
    shares = BAGS.shard_bags(indices, offsets, owners)
    assert len(shares) == owners
    total, seen = torch.zeros(4, 32), 0
    for owner, (numbers, counts) in enumerate(shares):
        part = SPLIT.TableShard(rows, owner, owners)
        assert torch.equal(part.weight, whole[owner::owners])
        total += part(numbers, counts.cumsum(0) - counts).detach()
        seen += len(numbers)
    assert seen == len(indices)
    expected = torch.nn.functional.embedding_bag(indices, whole, offsets, mode="sum")
    torch.testing.assert_close(total, expected)


def test_only_the_owner_of_a_reference_has_its_value(session: dict[str, Any]) -> None:
    assert "can't call localValue() on user" in session["value"]


def test_all_servers_are_asked_before_one_has_answered(session: dict[str, Any]) -> None:
    assert session["asked"] == [2.0, 2.0]


def test_rpc_async_returns_when_its_arguments_are_pickled(
    session: dict[str, Any],
) -> None:
    assert session["asked late"] == [True, 2, 3]


def test_rpc_async_reads_a_tensor_after_it_has_returned(
    session: dict[str, Any],
) -> None:
    assert session["overwritten"] > 0


def test_only_an_eager_optimizer_steps_by_an_old_gradient(
    session: dict[str, Any],
) -> None:
    # `EagerSGD` forgets the gradient that it has stepped by; a second optimizer in the
    # process gives it back, unless it is one of the same weights.
    again, not_again = [-2.0, -2.0], [-1.0, -2.0]
    of_one = [not_again, again, not_again]
    assert session["stepped"][:3] == of_one
    # Of the same, each has taken its steps; of some, the first weight's is taken again.
    assert session["stepped"][3:] == [again, [-2.0, -4.0], [-1.0 - 1.0, -4.0]]
    # In a context that has gradients of one of them alone, nothing is given back.
    due = [[-1.0, 0.0], [-1.0, -1.0], [-1.0, -2.0], [-2.0, -2.0]]
    assert session["stepped apart"] == due
    for file in ("classifier.py", "minimal.py"):
        text = " ".join((ROOT / CHAPTER / file).read_text().split())
        assert "unless both have the same parameters: each sets all `.grad`" in text


def test_each_trainer_has_a_state_of_its_own_for_a_row(session: dict[str, Any]) -> None:
    # A trainer's second step is divided by the root of 1 + 1, whoever else has stepped.
    alone = -1 - 2**-0.5
    assert session["by Adagrad"] == pytest.approx([alone, 2 * alone, 3 * alone])


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
def test_steps_by_states_of_their_own_have_no_bound(kind: Any) -> None:
    """One large gradient, at trainer 0, makes only its own later steps small."""
    alone, shared = torch.zeros(1), torch.zeros(1)
    optimizer, *of_trainers = [kind([row], lr=0.1) for row in (alone, shared, shared)]
    for gradients in [(1000.0, 0.0), *[(0.0, 1.0)] * 99]:
        alone.grad = torch.tensor([sum(gradients) / 2])
        optimizer.step()
        for one, gradient in zip(of_trainers, gradients, strict=True):
            shared.grad = torch.tensor([gradient])
            one.step()
    assert shared.item() / alone.item() > 10  # and there are two trainers


def test_a_rate_is_set_at_each_owner(session: dict[str, Any]) -> None:
    assert session["two rates"] == [[-1.0, -1.0], [-1.25, -1.25], False]


def test_clipping_sees_no_gradient_of_a_context(session: dict[str, Any]) -> None:
    assert session["clipped"] == pytest.approx([0, -4, -1.5])


def test_plain_backward_does_not_reach_a_server(session: dict[str, Any]) -> None:
    # Outside a context without a word, and in one with an error.
    here, sent, said = session["plain"]
    assert (here, sent) == (1, None)
    assert said.startswith(NO_TASK)


def test_a_loss_uses_the_whole_dense_part(session: dict[str, Any]) -> None:
    said, names = session["past a layer"], ["unused.weight", "unused.bias"]
    missing, error = said.pop("plain")
    assert missing == names  # after the first step, which nothing has stopped
    assert "Expected to have finished reduction in the prior iteration" in error
    for option in ("find", "static", "find, zero"):
        missing, error = said.pop(option)
        assert missing == [] and NOT_IN_CONTEXT in error  # in the first step
    means = {"used.weight": [[1.5, 1.5]] * 2, "used.bias": [1.0, 1.0]}
    zeros = {"unused.weight": [[0.0, 0.0]] * 2, "unused.bias": [0.0, 0.0]}
    assert said.pop("frozen") == means | dict.fromkeys(names)
    mends = "zero", "static, zero", "find, zero in forward"
    assert said == dict.fromkeys(mends, means | zeros)
    page = words_of(CHAPTER)
    assert "Each trainer's [loss must use the whole dense part](" in page


def test_backward_waits_for_gradients_of_all_calls_before_it(
    session: dict[str, Any],
) -> None:
    # A call counts once, unless a backward pass has been there.
    assert session["orders"] == {
        "one_call_twice": 6,
        "the_sum_of_two": 6,
        "unused_afterwards": 3,
        "a_new_call": "waits",
        "unused_before": "waits",
        "unused_before_without_grad": "waits",
    }
    page = words_of(CHAPTER)
    rule = "go backward once, through all its calls**, or `backward` may wait forever"
    assert f"**In a context {rule} for an earlier call's gradients." in page


def test_eval_does_not_reach_a_module_on_a_server(session: dict[str, Any]) -> None:
    assert session["modes"] == [False, True, False, True]


def test_changing_its_mode_copies_a_table_to_the_trainer(
    session: dict[str, Any],
) -> None:
    assert session["copied"] == [4000, 4000, 4000, None]
    page = words_of(CHAPTER)
    assert "`model.train()` and `model.eval()` **copy the whole table here**" in page


def test_a_lock_of_one_s_own_is_not_that_of_the_optimizer(
    session: dict[str, Any],
) -> None:
    assert session["overtaken"] == [0, 1, 0]
    page = words_of(f"{CHAPTER}/staleness")
    assert "`EagerSGD.step` has to take the same one" in page


def test_servers_and_shards_end_with_the_table_of_one_process(
    session: dict[str, Any], pool: WorkerPool
) -> None:
    table, dense = train_alone()
    start = TABLE(ROWS, 32, 0).weight
    assert (table - start).abs().max() > 1e-3  # or all would be equal for nothing
    limit = {"rtol": 0, "atol": 1e-5}
    parts, of_trainers = session["table"]
    assert len(parts) == len(of_trainers) == 2
    assert torch.equal(of_trainers[0], of_trainers[1])
    torch.testing.assert_close(of_trainers[0], dense, **limit)
    shards = pool.run(train_without_servers, STEPS)
    assert len(shards) == 2
    for rank, (own, of_rank, _) in enumerate(shards):
        torch.testing.assert_close(own, table[rank::2], **limit)
        torch.testing.assert_close(parts[rank], table[rank::2], **limit)
        torch.testing.assert_close(own, parts[rank], **limit)
        torch.testing.assert_close(of_rank, dense, **limit)


@pytest.mark.parametrize(
    "nprocs", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_shards_are_right_on_other_numbers_of_ranks(
    pool: WorkerPool, nprocs: int
) -> None:
    ranks = pool.run(train_without_servers, 4, world_size=nprocs)
    assert len(ranks) == nprocs
    table, dense = train_alone(4, nprocs)
    for rank, (own, of_rank, largest) in enumerate(ranks):
        assert len(own) == len(range(rank, ROWS, nprocs))
        # With several ranks nobody has ever had the whole table.
        assert own.numel() <= largest
        assert nprocs == 1 or largest < ROWS * 32 / 2
        torch.testing.assert_close(own, table[rank::nprocs], rtol=0, atol=1e-5)
        torch.testing.assert_close(of_rank, dense, rtol=0, atol=1e-5)


def looked_up_by(mode: str) -> str:
    """Look up in a sharded table that pools its rows so; return the error."""
    table = SHARDED.ShardedTable(torch.ones(4, 2))
    table.own.mode = mode
    try:
        table(torch.tensor([0, 1, 2]), torch.tensor([0, 1]))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_only_sums_are_sharded(pool: WorkerPool, mode: str) -> None:
    said = 'owners\' parts of a bag add up only with mode="sum"'
    due = "" if mode == "sum" else said
    assert pool.run(looked_up_by, mode, world_size=2) == [due] * 2


def gradient_of_a_gradient() -> str:
    """Differentiate a gradient that `AllToAll` has computed; return the error."""
    sent = torch.ones(dist.get_world_size(), 1, requires_grad=True)
    loss = SHARDED.AllToAll.apply(sent).square().sum()
    (gradient,) = torch.autograd.grad(loss, sent, create_graph=True)
    try:
        (loss + gradient.square().sum()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_no_gradient_is_left_out_of_a_gradient(pool: WorkerPool) -> None:
    zero, one = pool.run(gradient_of_a_gradient, world_size=2)
    assert "once_differentiable" in zero and "once_differentiable" in one


def small_parts(is_sparse: bool) -> tuple[Any, Any, Any, Any]:
    """Make a sharded table of 8 rows with a dense part, and both for one process."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole, dense = torch.randn(8, 4), torch.nn.Linear(4, 3)
    table = SHARDED.ShardedTable(whole[rank::n].clone())
    table.own.sparse = is_sparse
    bag = torch.nn.EmbeddingBag.from_pretrained(
        whole.clone(), False, mode="sum", sparse=is_sparse
    )
    ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(dense))
    return table, ddp, bag, dense


def apart_by(kind: str, is_sparse: bool, settings: dict[str, float]) -> float:
    """Train both for six steps by a schedule, one group each; return the distance."""
    table, ddp, bag, dense = small_parts(is_sparse)
    rank, n = dist.get_rank(), dist.get_world_size()
    ours = [*table.parameters(), *ddp.parameters()]
    alone = [*bag.parameters(), *dense.parameters()]
    optimizers = [getattr(torch.optim, kind)(p, 0.1, **settings) for p in (ours, alone)]
    cycle = partial(
        torch.optim.lr_scheduler.OneCycleLR,
        max_lr=0.2,
        total_steps=7,
        cycle_momentum=False,
    )
    schedules = [cycle(one) for one in optimizers]
    offsets, score = torch.tensor([0, 3]), torch.nn.functional.cross_entropy
    for _ in range(6):
        rows, labels = torch.randint(8, (n, 6)), torch.randint(3, (n, 2))
        score(ddp(table(rows[rank], offsets)), labels[rank]).backward()
        each = [score(dense(bag(rows[r], offsets)), labels[r]) for r in range(n)]
        torch.stack(each).mean().backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    alone[0] = alone[0][rank::n]
    pairs = zip(ours, alone, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    ("kind", "is_sparse", "settings"),
    [
        ("SGD", True, {"momentum": 0.9}),
        ("SGD", False, {"weight_decay": 0.1}),
        ("AdamW", False, {"weight_decay": 0.1}),
        ("Adagrad", True, {}),
    ],
    ids=["momentum", "weight decay", "AdamW", "Adagrad"],
)
def test_one_group_steps_shards_and_dense_part(
    pool: WorkerPool, kind: str, is_sparse: bool, settings: dict[str, float]
) -> None:
    apart = pool.run(apart_by, kind, is_sparse, settings, world_size=2)
    assert max(apart) < 1e-5 and len(apart) == 2


def clipped_with_a_shard(is_sparse: bool) -> float | str:
    """Clip as one would without shards; return the norm, or the error."""
    table, ddp, *_ = small_parts(is_sparse)
    ddp(table(torch.tensor([0, 2, 5]), torch.tensor([0]))).sum().backward()
    try:
        parameters = [*table.parameters(), *ddp.parameters()]
        return torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
    except NotImplementedError as error:
        return str(error)


def test_ranks_with_shards_clip_by_norms_of_their_own(pool: WorkerPool) -> None:
    first, second = pool.run(clipped_with_a_shard, False, world_size=2)
    assert abs(first - second) > 0.01
    refused = pool.run(clipped_with_a_shard, True, world_size=2)
    missing = "aten::linalg_vector_norm"
    assert [missing in said and "SparseCPU" in said for said in refused] == [True] * 2


# What a lookup costs.


def test_every_way_moves_the_bytes_of_its_formula_and_trains_alike(
    session: dict[str, Any], batches: list[Any]
) -> None:
    answers, rows, width = session["ways"], CLASSIFIER.ROWS, 32
    assert len(answers) == len(LOOKUPS.WAYS) == 6
    words = sum(len(indices) for indices, _, _ in batches[1:])
    different = sum(len(indices.unique()) for indices, _, _ in batches[1:])
    # Numbers of 8 bytes: words, and where each bag begins. Sums out, gradients back.
    by_sums = 8 * words + 4 * 16 * (8 + 2 * 4 * width)
    formulas = {
        "whole table": 4 * rows * 4 * width + different * (8 + 4 * width),
        "rows": different * (2 * 8 + 2 * 4 * width),
        **dict.fromkeys(("sums", "autograd", "one call", "ahead"), by_sums),
    }
    rounds = [batches[:1], batches[1:]]
    on_time, _ = ROOM["one_process"].train_in_rounds(rounds, LOOKUPS.LR, late=False)
    late, _ = ROOM["one_process"].train_in_rounds(rounds, LOOKUPS.LR, late=True)
    assert (on_time - late).abs().max() > 1e-4  # the old numbers do matter
    assert len(formulas) == 6
    for way, formula in formulas.items():
        counted, on_wire, waited, end = answers[way]
        assert counted == formula, way
        assert waited > 0
        if on_wire is not None:
            assert counted < on_wire < counted + 4 * COST.MOST_AROUND, way
        wanted = late if way == "ahead" else on_time
        torch.testing.assert_close(end, wanted, rtol=0, atol=1e-5, msg=way)


def test_the_wire_count_sees_every_byte_and_no_other_socket() -> None:
    with (
        WIRE.socket.create_server(("127.0.0.1", 0)) as listener,
        WIRE.socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        before = WIRE.wire_bytes()
        if before is None:
            pytest.skip("this system does not count the bytes of a connection")
        one.sendall(bytes(1000))
        assert len(other.recv(1000, WIRE.socket.MSG_WAITALL)) == 1000
        # Sent by this process, and received by it.
        assert WIRE.wire_bytes() - before == 2000
        # At each end by itself; what is acknowledged is no byte received.
        assert [WIRE.tcp_bytes(end.fileno()) for end in (one, other)] == [1000, 1000]
        left, right = WIRE.socket.socketpair()
        with left, right:
            left.sendall(bytes(500))
            assert len(right.recv(500)) == 500
            assert WIRE.wire_bytes() - before == 2000


def test_waiting_is_the_sum_of_all_waits_and_of_nothing_else() -> None:
    line = SimpleNamespace(waited=1.0, bytes=500)
    clock = mock.Mock(side_effect=[10.0, 13.0, 20.0, 24.0])
    with mock.patch.object(LOOKUPS, "time", SimpleNamespace(perf_counter=clock)):
        for value in (torch.zeros(25), None):
            answer = SimpleNamespace(wait=lambda value=value: value)
            assert LOOKUPS.Line.wait(line, answer) is value
    assert (line.waited, line.bytes) == (1 + 3 + 4, 500 + 4 * 25)


def test_costs_are_of_one_step_and_times_in_milliseconds() -> None:
    line = SimpleNamespace(bytes=0, waited=0.0, weight=lambda: 0, dense=None)

    def train(line: Any, batches: list[Any]) -> list[torch.Tensor]:
        line.bytes, line.waited = 3000, 0.004
        return [torch.tensor(2.0), torch.tensor(4.0)]

    # Rounds of two steps: one to warm up, then 10 and 6 ms; 4,000 bytes on the wire.
    clock, wire = [0.0, 9.0, 10.0, 10.010, 20.0, 20.006], [0, 9, 10, 4010, 5000, 9000]
    times = SimpleNamespace(perf_counter=mock.Mock(side_effect=clock))
    fakes: dict[str, Any] = {
        "WAYS": {"sums": train},
        "Line": lambda way, latency: line,
        "wire_bytes": mock.Mock(side_effect=wire),
        "time": times,
        "rpc": mock.Mock(),
        "flat": lambda *_: torch.ones(1),
        "train_in_rounds": lambda *_, late: (torch.ones(1), 0.002),
    }
    with mock.patch.multiple(COST, **fakes):
        costs, alone_ms, _ = COST.cost_of_each_way([[0, 0]] * 3, 0.0)
    assert costs["sums"] == pytest.approx((1500, 2000, 3.0, 2.0, 3.0))
    assert alone_ms == 2.0


def test_each_way_is_compared_with_its_own_twin_as_a_share_of_the_way_gone() -> None:
    # Here a parameter begins at 1 and gains 1 in each round: in one process, as long
    # as no lookup is late. Of late lookups it gains 10.
    def in_rounds(rounds: list[Any], _: float, late: bool) -> tuple[Any, float]:
        return torch.tensor([1.0 + len(rounds) * (10 if late else 1)]), 0.002

    # By way what it gains; "rows", which adds in another order, by its first round.
    gains = {"sums": [0, 0, 3.5], "ahead": [0, 0, 33], "rows": [0.75, 9, 9]}
    gains["one call"] = [0, 0, math.nan]

    def line(way: str, _: float) -> SimpleNamespace:
        ends = (1.0 + gain for gain in gains[way])
        counts: Any = {"dense": way, "bytes": 0, "waited": 0.0}
        return SimpleNamespace(weight=lambda: next(ends), **counts)

    fakes: dict[str, Any] = {
        "WAYS": dict.fromkeys(gains, lambda *_: [torch.tensor(0.0)]),
        "Line": line,
        "wire_bytes": lambda: None,
        "rpc": mock.Mock(),
        "flat": lambda weight, dense: torch.tensor([weight if dense in gains else 1.0]),
        "train_in_rounds": in_rounds,
    }
    with (
        mock.patch.multiple(COST, **fakes),
        mock.patch.object(COST, "dense_part", return_value="the start"),
    ):
        _, _, apart = COST.cost_of_each_way([[0]] * 3, 0.0)
    expected = {"sums": 0.5 / 3, "ahead": 3 / 30, "one call": math.inf}
    assert {way: apart[way] for way in expected} == pytest.approx(expected)
    assert apart["rows"] == pytest.approx(0.25)


def test_stale_rows_are_those_of_a_batch_that_were_in_the_one_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Three rows, then two, of which one was there: a half. The first round warms up.
    words = torch.tensor([1, 2, 3, 3]), torch.tensor([3, 4])
    rounds: list[Any] = [[], [(indices, None, None) for indices in words]]
    COST.print_costs(2, rounds, {"sums": COST.Cost(1500.0, 2000.0, 3.0, 2.0, 0.5)})
    lines = capsys.readouterr().out.splitlines()
    head = "2 bags: 3 words in 2 rows of 32,768, 50% of them in the batch before too"
    assert lines[0] == head
    assert lines[2].split() == ["sums", "1,500", "2,000", "3.00", "2.00", "0.500"]


def test_a_rate_leaves_the_first_fifth_out() -> None:
    module, clock = ROOM["comparison"], [0.0, 10.0, 12.0]
    way = SimpleNamespace(steps=lambda batches: iter(batches))
    times = SimpleNamespace(perf_counter=mock.Mock(side_effect=clock))
    with (
        mock.patch.object(module, "time", times),
        mock.patch.object(module.dist, "barrier"),
        mock.patch.object(module.dist, "all_reduce"),
    ):
        # Of five steps one is left out; the others take two seconds.
        assert module.rate_of_a_round(way, [0] * 5) == 4 / 2


def test_times_are_those_of_the_first_way() -> None:
    module, said = ROOM["steps_per_second"], []
    rates = {module.OFTEN: [9.0, 2.0, 1.0, 3.0], "one call": [9.0, 5.0, 4.0, 6.0]}
    found = dict.fromkeys(rates, SimpleNamespace(lost=3, moved=4000))
    with mock.patch.object(module, "say", said.append):
        module.print_rates(rates, found)
    assert [line.split()[-8:-4] for line in said[1:]] == [
        ["2.0", "1.0", "3.0", "1.00"],
        ["5.0", "4.0", "6.0", "2.50"],
    ]


def test_one_call_updates_before_it_looks_up() -> None:
    server = ROOM["row_server"].RowServer(8, 4, lr=1.0, latency=0.0)
    bags = torch.tensor([3, 3]), torch.tensor([0])
    before = server.sums(0, *bags)
    after = server.update_then_sums(0, torch.ones(1, 4), (1, *bags))
    # Row 3 is in the bag twice: it takes two steps, and is counted twice.
    torch.testing.assert_close(after, before - 4)
    assert server.update_then_sums(1, torch.ones(1, 4)) is None and not server.bags


# The picture.


def test_committed_numbers_are_those_of_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "assets")
    draw = importlib.import_module("draw_lookup_cost")
    near = json.loads((ROOT / "assets" / "04_lookup_cost.json").read_text())
    far = json.loads((ROOT / "assets" / "04_lookup_cost_5ms.json").read_text())
    assert [one["batch_size"] for one in near["sizes"]] == [8, 32, 128, 512]
    assert (near["latency_ms"], far["latency_ms"]) == (0, 5)
    counts = 0
    for run in (near, far):
        for one in run["sizes"]:
            for cost in one["ways"].values():
                around = cost["wire_bytes"] - cost["tensor_bytes"]
                assert 0 < around < COST.MOST_AROUND
                counts += 1
    assert counts == 4 * 6 + 4 * 5
    # What the page says: a second call's time, and what prefetching gains.
    costs = [run["sizes"][1]["ways"] for run in (near, far)]
    ms = [one[way]["ms"] for one in costs for way in ("one call", "sums")]
    assert ms == pytest.approx([1.1, 1.5, 6.8, 11.9], abs=0.06)
    ways = [one["ways"] for one in near["sizes"]]
    gains = [1 - one["ahead"]["ms"] / one["one call"]["ms"] for one in ways]
    assert 0.075 < min(gains) < max(gains) < 0.135
    assert costs[1]["ahead"]["ms"] > costs[1]["one call"]["ms"]
    _, impossible = draw.draw_costs(near, far)
    near["sizes"][1]["ways"]["rows"]["wire_bytes"] = 5
    assert (impossible, draw.draw_costs(near, far)[1]) == (0, 1)
    assert (ROOT / "assets" / "04_lookup_cost.png").stat().st_size > 10_000


# Bad input, and bad ends.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-sizes=1000"], "'1000' is no number from 1 to 512"),
        (["--steps=1"], "'1' is no number from 2 to 100"),  # what would it repeat?
        (["--latency=-1"], "'-1' is no number from 0.0 to 1000.0"),
    ],
)
def test_lookup_cost_refuses_in_one_line(words: list[str], message: str) -> None:
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["lookup_cost.py", *words]),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as refusal,
    ):
        ROOM["lookup_cost"].read_sizes()
    assert refusal.value.code == 2
    assert printed.getvalue().startswith("lookup_cost.py: argument ")
    assert message in printed.getvalue()
    assert printed.getvalue().count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "most", "others"),
    [
        ("sharded_tables", 200, ["--nprocs=3"]),
        ("sharding/several_servers", 100, ["--rows=16"]),
    ],
)
def test_no_run_is_so_long_that_rounding_alone_fails_it(
    script: str, most: int, others: list[str]
) -> None:
    path = f"{CHAPTER}/{script}.py"
    assert python(path, f"--steps={most}", *others).returncode == 0
    refused = python(path, f"--steps={most + 1}")
    assert refused.returncode == 2
    assert f"'{most + 1}' is no number from 1 to {most}" in refused.stderr


def processes_with(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "number"),
    # All but the second would last for minutes; it is ended at its first line.
    [
        pytest.param(
            "lookup_cost/lookup_cost",
            ["--rounds=30", "--batch-sizes", "1", *["512"] * 8],
            signal.SIGKILL,
            marks=pytest.mark.slow,
        ),
        ("sharded_tables", ["--steps=200"], signal.SIGINT),
        # These start processes with names, by `roles.start_roles`.
        ("lookup_cost/steps_per_second", ["--rounds=100"], signal.SIGKILL),
        ("lookup_cost/steps_per_second", ["--rounds=100"], signal.SIGINT),
    ],
)
def test_nothing_outlives_the_launcher(
    script: str, options: list[str], number: int
) -> None:
    mark = f"{os.environ.get(MARK, '')}{Path(script).name}-{os.getpid()}/"
    with subprocess.Popen(
        [sys.executable, f"{CHAPTER}/{script}.py", *options],
        cwd=ROOT,
        env=clean_environment(**{MARK: mark}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background has Ctrl-C switched off; a reader has not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as launcher:
        try:
            assert launcher.stdout is not None and launcher.stderr is not None
            assert launcher.stdout.readline()  # all processes have met by then
            assert launcher.poll() is None
            assert len(processes_with(mark)) >= 3
            launcher.send_signal(number)
            deadline = time.monotonic() + 20
            while processes_with(mark) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert processes_with(mark) == []
            assert launcher.wait() == -number
            assert launcher.stderr.read() == ""
        finally:
            for process in processes_with(mark):
                process.kill()
