"""Chapter 06, its rooms: the table of all ways, the dictionary, mistakes, exercises."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from markdown_it import MarkdownIt
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from launch import ROOT, python
from lessons import run_lesson
from scripts import load_chapter
from worker_pool import WorkerPool

TABLE = "06_fsdp/side_by_side"
MISTAKES = "06_fsdp/mistakes"
EXERCISES = "06_fsdp/exercises"


def script(room: str, name: str) -> Any:
    """Return a module of a room."""
    return load_chapter(room)[name]


# --- The table of all ways. ----------


def forget_the_last_group() -> None:
    """Let DeepSpeed begin anew: it keeps the group that it has first seen."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(groups)


def error_of_two_micro_batches(stage: int) -> float:
    """Add up two backward passes in a step by hand; return how far a weight is."""
    by_hand = script(TABLE, "zero_by_hand")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    zero = by_hand.ZeRO(model, [model[0]], stage, lr=0.01)
    for x in torch.randn(2, 6, 4).split(3, dim=1):
        rank = dist.get_rank()
        zero.model(x[rank]).square().mean().backward()
        (alone(x).square().mean(dim=(1, 2)).mean()).backward()
    if stage == 1:
        zero.average_gradients()
    zero.step()
    optimizer.step()
    found = zero.whole_parameters()
    assert len(found) == 4
    return max((found[n] - p).abs().max().item() for n, p in alone.named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_by_hand_add_up_micro_batches(
    worker_pool: WorkerPool, stage: int
) -> None:
    errors = worker_pool.run(error_of_two_micro_batches, stage)
    assert len(errors) == 2 and max(errors) < 1e-9


def run_table(pattern: str, fault: str | None = None) -> tuple[Any, str]:
    """Run the lesson with the ways that match; return its exit code, and what it said.

    With a fault, or "" for none, the GPT is small, and its text drawn.
    """
    ways, by_hand = script(TABLE, "ways"), script(TABLE, "zero_by_hand")
    chosen = {n: way for n, way in ways.WAYS.items() if re.fullmatch(pattern, n)}
    if fault == "kept":
        chosen = {n: w._replace(kept=lambda _: 12.0) for n, w in chosen.items()}
    with_deepspeed = any("DeepSpeed" in name for name in chosen)
    if with_deepspeed:
        forget_the_last_group()
    right, errors = by_hand.ZeRO.reduce_scatter, io.StringIO()

    def summed(self: Any, p: Tensor) -> None:
        right(self, p)
        self.shards[p].grad *= dist.get_world_size()

    patches = {
        "not sharded": mock.patch.object(ways, "fully_shard", lambda *_, **__: None),
        "sum": mock.patch.object(by_hand.ZeRO, "reduce_scatter", summed),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(script(TABLE, "side_by_side"), "WAYS", chosen)
        )
        stack.enter_context(contextlib.redirect_stderr(errors))
        if fault is not None:
            small = ways.GPTConfig(block_size=32, width=32, layers=1)
            stack.enter_context(mock.patch.object(ways, "CONFIG", small))
            draw = torch.Generator().manual_seed(0)
            text = torch.randint(256, (ways.STEPS, ways.SAMPLES, 33), generator=draw)
            drawn = [(tokens[:, :-1], tokens[:, 1:]) for tokens in text]
            lesson = script(TABLE, "side_by_side")
            stack.enter_context(
                mock.patch.object(lesson, "global_batches", lambda _: drawn)
            )
        # A check that fails leaves the group, which the next run needs.
        stack.enter_context(mock.patch.object(script(TABLE, "ranks"), "leave"))
        if fault in patches:
            stack.enter_context(patches[fault])
        try:
            return 0, run_lesson(TABLE, "side_by_side")
        except SystemExit as end:
            return end.code, errors.getvalue().strip()
        finally:
            if with_deepspeed:
                forget_the_last_group()


# What stands behind the name of a way: a loss, a distance and five numbers.
ROW = re.compile(r"^(.{29}) +([\d.]+) +(\S+)((?: +[\d.]+){5})$", re.M)
Row = dict[str, float]


def rows_of(text: str) -> dict[str, Row]:
    """Return the table by the name of each way."""
    names = ("kept", "peak", "calls", "sent", "ms")
    rows = {}
    for name, loss, apart, numbers in ROW.findall(text):
        row = dict(zip(names, map(float, numbers.split()), strict=True))
        rows[name.strip()] = {"loss": float(loss), "apart": float(apart), **row}
    return rows


CLAIM = "losses, parameters and what is kept are as they should"
KEPT = {
    "one process": 16,
    "DDP": 16,
    "ZeRO 1 by hand": 12,
    "ZeRO 2 by hand": 10,
    "ZeRO 3 by hand": 8,
    "FSDP2": 8,
    "the root alone": 8,
    "reshard_after_forward=False": 8,
    "computes in bf16": 8,
    "recomputes activations": 8,
}
BY_DEEPSPEED = {
    "one process": 16,
    "DeepSpeed, stage 0": 16,
    "DeepSpeed, stage 1": 12,
    "DeepSpeed, stage 2": 12,
    "DeepSpeed, stage 3": 11,
}


def test_what_each_way_is_to_keep_follows_from_what_it_shards() -> None:
    # In fp32: 4 bytes of a weight, 4 of its gradient, 8 of Adam's moments (ZeRO paper,
    # section 3.1). From stage 1 on DeepSpeed keeps 4 of a master weight as well, and
    # stage 3 a bucket of a quarter of the values. Stages 1 and 2 keep whole gradients
    # of all parameters that a shard has a part of.
    ways = script(TABLE, "ways")
    kept = {name.strip(): way.kept for name, way in ways.WAYS.items()}
    parts = [p.numel() * [i] for i, p in enumerate(ways.GPT(ways.CONFIG).parameters())]
    of = torch.tensor([i for part in parts for i in part])  # each value's parameter
    for n, rank in ((2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)):
        mine = of.chunk(n)[rank].unique()
        gradients = 4 * torch.isin(of, mine).sum().item() / len(of)
        whole = dict.fromkeys(["DDP", "DeepSpeed, stage 0"], 4 + 4 + 8)
        whole |= {"ZeRO 1 by hand": 4 + 4 + 8 / n, "ZeRO 2 by hand": 4 + (4 + 8) / n}
        shards = [*list(KEPT)[5:], "ZeRO 3 by hand"]
        whole |= dict.fromkeys(shards, (4 + 4 + 8) / n)
        whole |= {"2 replicas (HSDP)": (4 + 4 + 8) / (n / 2)}
        for stage in (1, 2):
            whole[f"DeepSpeed, stage {stage}"] = 4 + (4 + 8) / n + gradients
        whole["DeepSpeed, stage 3"] = (4 + 4 + 4 + 8) / n + 4 / 4
        with mock.patch.object(dist, "get_rank", return_value=rank):
            assert {name: each(n) for name, each in kept.items()} == whole
        assert len(whole) == 14


def calls_of_each_kind() -> list[tuple[str, int, float]]:
    """Log three collectives of 48 float32; return kinds, bytes, and bytes sent."""
    n = dist.get_world_size()
    whole, shard = torch.ones(48), torch.ones(48 // n)
    with script(TABLE, "counters").CollectiveLog() as log:
        dist.all_gather_single(whole, shard)
        dist.reduce_scatter_single(shard, whole)
        dist.all_reduce(whole)
    # Of a DTensor the shard is followed, and of a view what it shows.
    mesh = init_device_mesh("cpu", (n,))
    with script(TABLE, "counters").PeakMemory() as memory:
        memory.follow(DTensor.from_local(shard, mesh))
        assert memory.peak == shard.nbytes
        whole.view(2, 24)
    assert memory.peak == shard.nbytes + whole.nbytes
    return [(call.name, call.nbytes, call.sent) for call in log.calls]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_call_sends_what_a_ring_sends(
    worker_pool: WorkerPool, world_size: int
) -> None:
    # n - 1 messages of an n-th each; an all-reduce is both of the others (Thakur,
    # Rabenseifner and Gropp, 2005, section 4.4).
    once = (world_size - 1) * 4 * 48 / world_size
    due = [("all-gather", once), ("reduce-scatter", once), ("all-reduce", 2 * once)]
    found = worker_pool.run(calls_of_each_kind, world_size=world_size)
    expected = [(name, 4 * 48, pytest.approx(sent)) for name, sent in due]
    assert found == [expected] * world_size


@pytest.fixture(scope="module")
def table(worker_pool: WorkerPool) -> dict[str, Row]:
    """Run all ways but DeepSpeed's on two ranks, once for all tests."""
    ends = worker_pool.run(run_table, "(?!DeepSpeed).*")
    assert [code for code, _ in ends] == [0, 0], ends
    assert ends[0][1].splitlines()[-1] == f"check: 9 ways: {CLAIM}"
    rows = rows_of(ends[0][1])
    assert list(rows) == list(KEPT)
    return rows


@pytest.mark.slow
def test_every_way_is_one_process_s(table: dict[str, Row]) -> None:
    low = table["computes in bf16"]
    exact = [row for name, row in table.items() if name != "computes in bf16"]
    losses = [row["loss"] for row in exact]
    assert losses == pytest.approx([losses[0]] * 9, abs=1e-4)
    assert max(row["apart"] for row in exact) < 1e-5
    assert 1e-5 < low["apart"] < 2e-2
    assert low["loss"] == pytest.approx(losses[0], abs=2e-2)


@pytest.mark.slow
def test_kept_is_what_the_formulas_say(table: dict[str, Row]) -> None:
    kept = {name: row["kept"] for name, row in table.items()}
    assert kept == pytest.approx(KEPT, rel=0.03)


@pytest.mark.slow
def test_deepspeed_is_one_process_s_too(worker_pool: WorkerPool) -> None:
    ends = worker_pool.run(run_table, "DeepSpeed.*")
    assert [code for code, _ in ends] == [0, 0], ends
    rows = rows_of(ends[0][1])
    kept = {name: row["kept"] for name, row in rows.items()}
    assert kept == pytest.approx(BY_DEEPSPEED, rel=0.05)
    losses = [row["loss"] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-4)
    # An all-reduce and an all-gather, where stage 2 by hand has a reduce-scatter.
    sent = [rows[f"DeepSpeed, stage {stage}"]["sent"] for stage in (0, 1, 2)]
    assert sent == pytest.approx([4, 6, 6], rel=0.01)


@pytest.mark.slow
def test_root_alone_gathers_the_whole_model(table: dict[str, Row]) -> None:
    blocks, root = table["FSDP2"], table["the root alone"]
    assert root["calls"] == 2 < blocks["calls"]
    assert root["kept"] == pytest.approx(blocks["kept"], rel=0.01)
    # Nearly all of the weights, where there was one block of four.
    assert root["peak"] > blocks["peak"] + 2


@pytest.mark.slow
def test_without_resharding_fsdp_sends_what_ddp_sends(table: dict[str, Row]) -> None:
    ddp, kept = table["DDP"]["sent"], table["reshard_after_forward=False"]
    assert ddp == pytest.approx(4, rel=0.01)
    assert kept["sent"] == pytest.approx(ddp, rel=0.01)
    # By default the blocks are gathered twice: half as much again, but for the root.
    assert 5.5 < table["FSDP2"]["sent"] < 6
    assert table["FSDP2"]["peak"] < kept["peak"] < table["DDP"]["peak"]


@pytest.mark.slow
def test_bf16_halves_what_is_gathered_and_nothing_kept(table: dict[str, Row]) -> None:
    full, low = table["FSDP2"], table["computes in bf16"]
    assert low["kept"] == pytest.approx(full["kept"], rel=0.01)
    # Of the messages, the reduce-scatter in fp32 is a third.
    assert low["sent"] - 2 == pytest.approx((full["sent"] - 2) / 2, rel=0.01)


@pytest.mark.slow
def test_two_replicas_on_four_ranks(worker_pool: WorkerPool) -> None:
    pattern = "FSDP2|.*HSDP.*|DeepSpeed, stage [12]"
    ends = worker_pool.run(run_table, pattern, world_size=4)
    assert [code for code, _ in ends] == [0] * 4, ends
    rows = rows_of(ends[0][1])
    names = [f"DeepSpeed, stage {stage}" for stage in (1, 2)]
    assert list(rows) == ["one process", "FSDP2", "2 replicas (HSDP)", *names]
    kept = [row["kept"] for row in rows.values()]
    assert kept == pytest.approx([16, 4, 8, 8, 8], rel=0.03)
    assert rows["2 replicas (HSDP)"]["sent"] < rows["FSDP2"]["sent"]


FAULTS = {
    "": "DDP|ZeRO 3.*|FSDP2",
    "not sharded": "FSDP2",
    "sum": "ZeRO 3.*",
    "kept": "DDP",
}


def run_with_faults() -> list[tuple[Any, str]]:
    """Run the table with none of the faults, and with each."""
    return [run_table(pattern, fault) for fault, pattern in FAULTS.items()]


@pytest.mark.slow
def test_table_notices_what_is_wrong(worker_pool: WorkerPool) -> None:
    first, second = worker_pool.run(run_with_faults)
    assert [code for code, _ in first + second] == [0, 1, 1, 1] * 2, first
    complaints = [said for _, said in first[1:]]
    assert len(complaints) == 3
    for said in complaints:
        assert said.startswith("check failed on ranks [0, 1], not so: ")


def judged(loss: float, apart: float, kept: float, name: str) -> int:
    """Run the table with one way, off by so much; return the exit code."""
    ways, lesson = script(TABLE, "ways"), script(TABLE, "side_by_side")
    whole = torch.zeros(100)

    def known(prepare: Any, _: Any) -> Any:
        off, far, share = (
            (loss, apart, kept) if prepare is not ways.alone else [0.0] * 3
        )
        held = round(16 * 100 * (1 + share))
        return ways.Run([4.0 * (1 + off)], [whole + far], held, held, 0, 0.0, 1.0)

    way = ways.WAYS[name]._replace(kept=lambda _: 16)
    faults = {"train_and_count": known, "WAYS": {name: way}}
    with (
        mock.patch.multiple(lesson, global_batches=lambda _: [], **faults),
        mock.patch.object(script(TABLE, "ranks"), "leave"),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            run_lesson(TABLE, "side_by_side")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def ends_of_what_is_off() -> list[tuple[int, ...]]:
    """Judge each number of a way just within its limit, then just outside."""
    cases = [("DDP", 1e-5), ("  computes in bf16", 2e-2)]
    ends = []
    for name, limit in cases:
        for share in (0.9, 1.1):
            off = share * limit
            ends.append((judged(off, 0, 0, name), judged(0, off, 0, name)))
    ends.append((judged(0, 0, 0.9 * 0.05, "DDP"), judged(0, 0, 1.1 * 0.05, "DDP")))
    return ends


def test_limits_are_rounding_s_of_fp32_and_bf16_and_a_twentieth_of_the_bytes(
    worker_pool: WorkerPool,
) -> None:
    # Losses and parameters of fp32 to five digits, of bf16 (8 bits) to two.
    expected = [(0, 0), (1, 1)] * 2 + [(0, 1)]
    assert worker_pool.run(ends_of_what_is_off) == [expected] * 2


def test_settings_of_the_table_let_a_wrong_gradient_show() -> None:
    # Adam divides a gradient by its size plus eps: at PyTorch's default a sum in place
    # of a mean would cancel. The last step is the one that is counted.
    ways = script(TABLE, "ways")
    usual = inspect.signature(torch.optim.AdamW).parameters["eps"].default
    assert usual == 1e-8 and ways.SETTINGS["eps"] == 1e-3
    assert ways.COUNTED == ways.STEPS - 1 == 3


# --- The dictionary. ----------


def tables_of(page: str) -> list[list[list[str]]]:
    """Return the tables of a page: rows of cells, without the head."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())
    tables: list[list[list[str]]] = []
    is_body = False
    for before, token in itertools.pairwise(tokens):
        if token.type == "tbody_open":
            tables.append([])
        is_body = token.type == "tbody_open" or (
            is_body and token.type != "tbody_close"
        )
        if token.type == "tr_open" and is_body:
            tables[-1].append([])
        elif before.type == "td_open":
            tables[-1][-1].append(token.content)
    return tables


def places() -> dict[str, list[Any]]:
    """Return, for each column of the dictionary, where its names may be found.

    That is a class, a module, or a function, whose parameters count.
    """
    import accelerate
    import deepspeed.runtime.constants
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.tensor import DTensor

    return {
        "FSDP2": [
            *(fsdp, fsdp.FSDPModule, fsdp.fully_shard, fsdp.MixedPrecisionPolicy),
            *(state_dict.StateDictOptions, DTensor, nn.utils, nn.Module),
        ],
        "DeepSpeed": [deepspeed],
        "accelerate": [
            *(FullyShardedDataParallelPlugin, ParallelismConfig),
            accelerate.Accelerator,
        ],
    }


def is_known(name: str, found_in: list[Any]) -> bool:
    """Tell whether a name, perhaps with dots, is an attribute or a parameter there."""
    first, *rest = name.split(".")
    for place in found_in:
        # Python does not know the parameters of every class that C made.
        with contextlib.suppress(ValueError):
            if (
                not rest
                and callable(place)
                and first in inspect.signature(place).parameters
            ):
                return True
        if hasattr(place, first):
            found = getattr(place, first)
            return not rest or is_known(".".join(rest), [found])
    return False


def unknown_names(
    cells: list[list[str]], column: int, found_in: list[Any]
) -> list[str]:
    """Return the names of a column that are nowhere; at least ten are looked at."""
    spans = [s for row in cells for s in re.findall("`([^`]+)`", row[column])]
    assert len(spans) >= 10
    names = [re.split(r"[(=:]", span)[0] for span in spans]
    return [name for name in names if not is_known(name, found_in)]


def faults_of_dictionary() -> list[str]:
    """Look up every name of the dictionary; return what was not found."""
    from accelerate.utils import FullyShardedDataParallelPlugin as Plugin
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import (
        DeepSpeedConfigError,
        _reject_removed_config_keys,
    )
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    first, second = tables_of(f"{TABLE}/README.md")
    assert [row[1] for row in first] == [row[0] for row in second]
    assert len(first) == 10
    where = places()
    faults = unknown_names(first, 1, where["FSDP2"])
    faults += unknown_names(second, 1, where["accelerate"])
    # DeepSpeed: a setting of the section zero_optimization with a value, a key of the
    # config's top level, or something that is called.
    keys = {v for k, v in vars(constants).items() if isinstance(v, str)} | {"bf16"}
    seen = 0
    for span in (s for row in first for s in re.findall("`([^`]+)`", row[2])):
        name, _, value = span.partition(": ")
        if value:
            try:
                config = DeepSpeedZeroConfig(**{name: json.loads(value)})
            except ValueError as error:
                faults.append(f"{span}: {error}")
            else:
                # An offload section that names no device offloads nothing.
                if "offload" in name and getattr(config, name).device == "none":
                    faults.append(f"{span}: stays")
                # A layer has more than 10,000 values; the default is a billion.
                if config.max_reuse_distance < 10**9:
                    faults.append(f"{span}: gathers again for backward")
        elif "(" in span:
            faults += [] if is_known(name.strip("()"), where["DeepSpeed"]) else [span]
        else:
            faults += [] if name in keys else [span]
        seen += 1
    assert seen == 10
    # What the page says of MiCS, and why it names no prefetch of accelerate's.
    with pytest.raises(DeepSpeedConfigError, match="MiCS ZeRO-3 sharding has been rem"):
        _reject_removed_config_keys({"zero_optimization": {"mics_shard_size": 2}})
    with pytest.raises(ValueError, match="forward_prefetch is not yet implemented"):
        Plugin(fsdp_version=2, forward_prefetch=True)
    assert (
        Plugin(fsdp_version=2, backward_prefetch="BACKWARD_PRE").backward_prefetch
        is None
    )
    plugin = Plugin(fsdp_version=2, reshard_after_forward=False, cpu_offload=True)
    assert type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    return faults


def test_every_name_of_the_dictionary_is_there(worker_pool: WorkerPool) -> None:
    # In a worker, which has imported DeepSpeed already.
    assert worker_pool.run(faults_of_dictionary, world_size=1) == [[]]


def test_dictionary_notices_a_wrong_name() -> None:
    found_in = [fsdp, fully_shard]
    assert is_known("ShardingStrategy.FULL_SHARD", found_in)
    assert is_known("reshard_after_forward", found_in)
    assert not is_known("ShardingStrategy.FULL_SHARDS", found_in)
    assert not is_known("reshard", found_in)


def test_no_argument_of_fsdp1_is_left_out() -> None:
    tables = tables_of("06_fsdp/settings/README.md")
    (rows,) = [rows for rows in tables if len(rows) > 10]
    fsdp1 = fsdp.FullyShardedDataParallel
    names = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    parameters = set(inspect.signature(fsdp1.__init__).parameters) - {"self", "module"}
    assert len(parameters) == 15 and names >= parameters
    strategies = {one.name for one in fsdp.ShardingStrategy}
    precision = {f.name for f in dataclasses.fields(fsdp.MixedPrecision)}
    assert names >= strategies | {one for one in precision if one[0] != "_"}
    # The methods, and members of two more enumerations.
    others = names - parameters - strategies - precision - {"None"}
    enumerations = [fsdp1, fsdp.BackwardPrefetch, fsdp.StateDictType]
    assert len(others) == 10
    assert [name for name in others if not is_known(name, enumerations)] == []
    # First, as a tensor has another `dist`.
    second = [
        SimpleNamespace(dist=dist, nn=nn),
        nn.Linear,
        state_dict,
        *places()["FSDP2"],
    ]
    assert unknown_names(rows, 1, second) == []


def test_what_fsdp2_does_by_default_of_fsdp1s_arguments() -> None:
    settings = inspect.signature(fully_shard).parameters
    # On all but the root, as FULL_SHARD does.
    assert settings["reshard_after_forward"].default is None
    assert fsdp.MixedPrecisionPolicy().cast_forward_inputs
    assert not fsdp.MixedPrecision().cast_forward_inputs
    assert fsdp.MixedPrecision().cast_root_forward_inputs
    source = inspect.getsource(fsdp.FullyShardedDataParallel.__init__)
    assert (
        "backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKW" in source
    )


# --- What people get wrong. ----------


def rows_and_gradients() -> dict[str, Any]:
    """Shard a weight of one row, and leave a gradient unreduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    row = nn.Linear(100, 1)
    fully_shard(row, mesh=mesh)
    kept = sum(p.to_local().numel() for p in row.parameters())  # type: ignore
    ways, counters = script(TABLE, "ways"), script(TABLE, "counters")
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh)
    calls, whole = [], []
    with ways.only_new_objects():
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            with counters.CollectiveLog() as log:
                model(torch.ones(2, 64)).sum().backward()
            calls.append([call.name for call in log.calls])
            time.sleep(0.1)  # gloo's threads free what they have sent a little later
            sizes = [t.untyped_storage().nbytes() for t in ways.live_tensors()]
            whole.append(max(sizes, default=0) >= 4 * 64 * 64)
    gradient = model.weight.grad.full_tensor()
    ignores: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    fully_shard(ignores, mesh=mesh, ignored_params={ignores[0].weight})
    ignores(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return {
        "kept": kept,
        "no_sync": hasattr(FSDPModule, "no_sync"),
        "calls": calls,
        "whole": whole,
        "gradient": gradient[0, 0].item(),
        "ignored": ignores[0].weight.grad.abs().sum().item(),
    }


def late_calls() -> list[str]:
    """Save, and load, an optimizer that was built first; shard the root first.

    Return what is said.
    """
    mesh, said = init_device_mesh("cpu", (dist.get_world_size(),)), []
    first, second = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    early = torch.optim.AdamW(first.parameters())
    fully_shard(first, mesh=mesh)
    fully_shard(second, mesh=mesh)
    _, right = get_state_dict(first, torch.optim.AdamW(first.parameters()))
    for call in (
        lambda: get_optimizer_state_dict(first, early),
        lambda: set_optimizer_state_dict(first, early, right),
        lambda: get_state_dict(first, early),
        lambda: set_state_dict(
            first, early, model_state_dict={}, optim_state_dict=right
        ),
        lambda: fully_shard(second[0], mesh=mesh),
    ):
        with pytest.raises((KeyError, TypeError)) as refused:
            call()
        said.append(repr(refused.value))
    return said


def test_an_early_optimizer_is_not_saved_and_a_root_comes_last(
    worker_pool: WorkerPool,
) -> None:
    invariant = "Invariant encountered: value was None when it should not be"
    (*calls, root), *other = worker_pool.run(late_calls)
    assert other == [[*calls, root]] and root == f"TypeError('{invariant}')"
    assert len(calls) == 4
    for saved, loaded in (calls[:2], calls[2:]):
        assert saved == "KeyError(0)"
        assert loaded.startswith("KeyError(Parameter containing:")


def gradient_after_zero_grad() -> tuple[bool, float]:
    """Accumulate without reducing, throw that away, and accumulate once more."""
    model: Any = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    has_none = model.weight.grad is None
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    return has_none, model.weight.grad.full_tensor().max().item()


def test_zero_grad_does_not_drop_what_was_not_reduced(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(gradient_after_zero_grad) == [(True, 2.0)] * 2


def test_rows_are_sharded_and_no_sync_is_a_setter(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(rows_and_gradients)
    assert [found["kept"] for found in by_rank] == [101, 0]
    assert [found["no_sync"] for found in by_rank] == [False, False]
    calls = [["all-gather"], ["all-gather", "reduce-scatter"]]
    assert [found["calls"] for found in by_rank] == [calls, calls]
    # Until the last micro-batch every rank has the whole gradient.
    assert [found["whole"] for found in by_rank] == [[True, False]] * 2
    # What is ignored is not reduced: the inputs of rank 1 are twice those of rank 0.
    ignored = [found["ignored"] for found in by_rank]
    assert 0 < ignored[0] == pytest.approx(ignored[1] / 2)
    # Two samples of ones in each of two micro-batches.
    assert [found["gradient"] for found in by_rank] == [4.0, 4.0]


def values_of_fsdp1() -> int:
    """Wrap a layer of one row in FSDP's first version; return what this rank keeps."""
    row = fsdp.FullyShardedDataParallel(
        nn.Linear(100, 1), device_id=torch.device("cpu")
    )
    return sum(p.numel() for p in row.parameters())


def test_first_version_cuts_rows_and_every_rank_keeps_as_much(
    worker_pool: WorkerPool,
) -> None:
    # It flattens a unit: 100 weights, a bias, and a value to make them even.
    assert worker_pool.run(values_of_fsdp1) == [51, 51]


# --- Mistakes. ----------

MIXED = (
    r"RuntimeError: \S+ got mixed torch\.Tensor and DTensor, need to convert all "
    r"torch\.Tensor to DTensor before calling distributed operators!.*"
)
TIMED_OUT = (
    r"RuntimeError: \[\S+\] Timed out waiting 3000ms for (recv|send) operation .*"
)
WHOLE = r"by clip_grad_norm_ 5\.0 placed \(Partial\(sum\),\), and \(Replicate\(\),\)"
FORMAT = r"TypeError: unsupported format string passed to DTensor\.__format__"
# What the ranks of each script print, as a pattern for the whole, and their exit codes.
ENDS: dict[str, tuple[Any, ...]] = {
    "optimizer_first": (r"loss 16\.0, a weight 1\.0",) * 2 + (0, 0),
    "evaluated_first": (r"block 0\.\d, root 1\.0",) * 2 + (0, 0),
    "seeded_by_rank": (r"weight \[\[1\.0, 1\.0, 1\.0\], \[2\.0, 2\.0, 2\.0\]\]",) * 2
    + (0, 0),
    "norm_by_hand": (r"by hand 3\.0, " + WHOLE, r"by hand 4\.0, " + WHOLE, 0, 0),
    "formatted_norm": (FORMAT, FORMAT, 1, 1),
    "plain_average": (MIXED, MIXED, 1, 1),
    "calls_forward": (MIXED, MIXED, 1, 1),
    "tied_weights": (
        r"ValueError: Parameter '2\.weight' is shared with a parameter already managed "
        r"by another FSDP group\. .*",
    )
    * 2
    + (1, 1),
    "saved_by_rank_zero": (TIMED_OUT, "", 1, 0),
    "unequal_steps": (TIMED_OUT, "took 2 steps", 1, 0),
}


@pytest.fixture(scope="module")
def shown() -> dict[str, list[tuple[str, int]]]:
    """Run all mistakes at once; return what each rank printed, and its exit code."""
    result = python(f"{MISTAKES}/show.py", *ENDS)
    assert result.returncode == 0, result.output
    found: dict[str, list[tuple[str, int]]] = {}
    for part in result.stdout.split("--- ")[1:]:
        name, lines = part.splitlines()[0], part.splitlines()[1:]
        ranks = []
        for rank in (0, 1):
            said = [x[9:] for x in lines if x.startswith(f"rank {rank} | ")]
            (end,) = [x for x in lines if x.startswith(f"rank {rank}: ")]
            code = int(end.split()[-1]) if "exit code" in end else -1
            ranks.append((" ".join(" ".join(said).split()), code))
        found[name] = ranks
    assert list(found) == list(ENDS)
    return found


@pytest.mark.parametrize("name", ENDS)
def test_mistake_ends_as_described(
    shown: dict[str, list[tuple[str, int]]], name: str
) -> None:
    first, second, *codes = ENDS[name]
    said = shown[name]
    assert [code for _, code in said] == codes
    for pattern, (text, _) in zip((first, second), said, strict=True):
        assert re.fullmatch(pattern, text), text
    assert len(said) == 2


def scaled_step(optimizer_first: bool) -> str:
    """Step through a GradScaler; return what it says."""
    model: Any = nn.Linear(4, 2, bias=False)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    try:
        scaler.step(early if optimizer_first else late)
    except AssertionError as error:
        return str(error)
    return "no error"


def test_a_grad_scaler_notices_an_optimizer_that_was_built_first(
    worker_pool: WorkerPool,
) -> None:
    said = "No inf checks were recorded for this optimizer."
    assert worker_pool.run(scaled_step, True) == [said] * 2
    assert worker_pool.run(scaled_step, False) == ["no error"] * 2


def moved_by_an_early_optimizer(way: str) -> list[float]:
    """Build SGD, shard, and step; return how far each parameter has moved at most."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "ignored":
        fully_shard(model, mesh=mesh, ignored_params={model[1].bias})
        whole = contextlib.nullcontext
    elif way == "fully_shard":
        fully_shard(model, mesh=mesh)
        whole = contextlib.nullcontext
    else:
        model = fsdp.FullyShardedDataParallel(
            model,
            use_orig_params=way == "first version, original parameters",
            device_id=torch.device("cpu"),
        )
        whole = functools.partial(model.summon_full_params, model)

    def values() -> list[Tensor]:
        with whole():
            parameters: Any = [p.detach() for p in model.parameters()]
            return [
                (p.full_tensor() if isinstance(p, DTensor) else p).clone()
                for p in parameters
            ]

    before = values()
    model(torch.ones(1, 4)).sum().backward()
    early.step()
    pairs = zip(values(), before, strict=True)
    return [(new - old).abs().max().item() for new, old in pairs]


def test_an_early_optimizer_moves_what_keeps_its_parameters(
    worker_pool: WorkerPool,
) -> None:
    moved = {
        way: worker_pool.run(moved_by_an_early_optimizer, way)
        for way in (
            *("fully_shard", "ignored"),
            *("first version", "first version, original parameters"),
        )
    }
    assert moved["fully_shard"] == [[0.0] * 4] * 2
    # The gradient of the last bias is 1.
    assert moved["ignored"] == [[0.0, 0.0, 0.0, pytest.approx(0.1)]] * 2
    assert {sum(one) for one in moved["first version"]} == {0.0}
    kept = moved["first version, original parameters"]
    assert kept[0] == kept[1] and len(kept[0]) == 4
    assert min(kept[0]) > 0.01 and kept[0][3] == pytest.approx(0.1)


def test_every_mistake_is_shown() -> None:
    files = {path.stem for path in (ROOT / MISTAKES).glob("*.py")} - {"show"}
    assert files == set(ENDS)


# --- Exercises. ----------

CHECK_LOOP = load_chapter(EXERCISES)["check_your_own_loop"]
LOOP = load_chapter(EXERCISES)["your_own_loop"]
CHECK_BROKEN = load_chapter(EXERCISES)["check_broken_fsdp"]
BROKEN = load_chapter(EXERCISES)["broken_fsdp"]

from answers import broken_fsdp, your_own_loop  # noqa: E402


def prepare_with(flaw: str, model: Any) -> Any:
    """Prepare the model with one flaw."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if flaw == "no broadcast":
        fully_shard(model, mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    if flaw == "root alone":
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    if flaw in ("one layer", "stay whole"):
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)
        settings: Any = {"reshard_after_forward": False} if flaw == "stay whole" else {}
        layers = model.layers if flaw == "stay whole" else [model.layers[2]]
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, **settings)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    if flaw == "one call":
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)
        fully_shard([*model.layers], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    if flaw == "another model":
        model = LOOP.Curve()
    if flaw == "optimizer first":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return your_own_loop.prepare(model)[0], optimizer
    model, optimizer = your_own_loop.prepare(model)
    if flaw == "doubled rate":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return model, optimizer


def step_with_local_norm(model: Any, optimizer: Any, *batch: Tensor) -> Any:
    """Take a step, and compute the norm of this rank's shards."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    squares = [p.grad.square().sum().item() for p in model.parameters()]
    optimizer.step()
    return loss.detach(), sum(squares) ** 0.5


def step_with_dtensor(model: Any, optimizer: Any, *batch: Tensor) -> Any:
    """Take a step, and return the norm as it is."""
    loss, _ = your_own_loop.train_one_batch(model, optimizer, *batch)
    return loss, nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def save_a_shard(model: Any, path: Any) -> None:
    """Write what rank 0 has."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)


def save_on_all_ranks(model: Any, path: Any) -> None:
    """Let every rank write the file."""
    torch.save({n: p.full_tensor() for n, p in model.state_dict().items()}, path)


def save_what_was_pickled(model: Any, path: Any) -> None:
    """Gather the shards as Python objects: right, though each rank pickles tensors."""
    whole: dict[str, Tensor] = {}
    for name, p in model.state_dict().items():
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, p.to_local())
        whole[name] = torch.cat(shards)
    if dist.get_rank() == 0:
        torch.save(whole, path)


def save_nothing(model: Any, path: Any) -> None:
    """Forget to write."""


Loop = tuple[Callable, Callable, Callable, Callable]
RIGHT = (your_own_loop.prepare, your_own_loop.train_one_batch, your_own_loop.save_whole)


def loops() -> list[tuple[Loop, list[str]]]:
    """Return answers, and how each rank's hint begins."""
    flawed = functools.partial
    cases: list[tuple[tuple[Callable, Callable, Callable], list[str]]] = [
        (RIGHT, ["", ""]),
        (
            (LOOP.prepare, LOOP.train_one_batch, LOOP.save_whole),
            ["right, but this rank keeps 1185 of 1185 weights: nothing is sharded"] * 2,
        ),
        (
            (flawed(prepare_with, "no broadcast"), *RIGHT[1:]),
            ["before training layers.0.weight is not rank 0's: who gives it to rank 1?"]
            * 2,
        ),
        (
            (flawed(prepare_with, "root alone"), *RIGHT[1:]),
            ["right, but no layer is sharded by itself: the root gathers all 1185 wei"]
            * 2,
        ),
        (
            (flawed(prepare_with, "one layer"), *RIGHT[1:]),
            ["right, but the root gathers layers.0 with what else is left"] * 2,
        ),
        (
            (flawed(prepare_with, "stay whole"), *RIGHT[1:]),
            ["right, but layers stay whole after their forward pass"] * 2,
        ),
        (
            (flawed(prepare_with, "one call"), *RIGHT[1:]),
            ["right, but several layers are gathered at once: one call of fully_shard"]
            * 2,
        ),
        (
            (flawed(prepare_with, "another model"), *RIGHT[1:]),
            ["it ended with: prepare() returns another model: train the given one"] * 2,
        ),
        (
            (flawed(prepare_with, "optimizer first"), *RIGHT[1:]),
            ["after step 1: layers.0.weight moved {0: 0.0, 1: 0.0} times as far: whose"]
            * 2,
        ),
        (
            (flawed(prepare_with, "doubled rate"), *RIGHT[1:]),
            ["after step 1: layers.0.weight moved {0: 2.0, 1: 2.0} times as far: is "]
            * 2,
        ),
        ((RIGHT[0], step_with_local_norm, RIGHT[2]), ["in step 1 the norm is "] * 2),
        (
            (RIGHT[0], step_with_dtensor, RIGHT[2]),
            ["in step 1 the norm is a DTensor, no number"] * 2,
        ),
        (
            (RIGHT[0], RIGHT[1], save_a_shard),
            ["the file holds a shard of layers.0.weight"] * 2,
        ),
        ((RIGHT[0], RIGHT[1], save_on_all_ranks), ["2 ranks save: one is enough"] * 2),
        ((RIGHT[0], RIGHT[1], save_what_was_pickled), ["", ""]),
        ((RIGHT[0], RIGHT[1], save_nothing), ["save_whole() writes no file"] * 2),
    ]
    return [((LOOP.Curve, *functions), hints) for functions, hints in cases]


def try_loops() -> list[str]:
    """Let the checker try all loops on this rank."""
    return [CHECK_LOOP.try_loop(answer) for answer, _ in loops()]


def test_your_own_loop(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(try_loops)
    expected = [hints for _, hints in loops()]
    assert len(expected) == 16
    for rank, told in enumerate(by_rank):
        for text, hints in zip(told, expected, strict=True):
            assert text.startswith(hints[rank]) and bool(text) == bool(hints[rank]), (
                text
            )
    assert len(by_rank) == 2


def train_with(flaw: str, model: Any, mesh: Any, steps: Any) -> Any:
    """Train as the answer does, but for one flaw."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"root alone": [], "one block": [model.blocks[0]]}
    settings: Any = {"reshard_after_forward": False} if flaw == "stay whole" else {}
    modules = [*parts.get(flaw, model.blocks), model]
    for module in modules if flaw != "not sharded" else []:
        fully_shard(module, mesh=mesh, **settings)
    if flaw != "optimizer first":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        total = torch.zeros(())
        if flaw == "one backward":  # it takes more memory, and is right
            each = [nn.functional.mse_loss(model(x), y) for x, y in step]
            total = torch.stack(each).mean()
            total.backward()
            step, total = [], total.detach()
        if flaw == "joined":
            step = [tuple(torch.cat(part) for part in zip(*step, strict=True))]
        for number, (inputs, labels) in enumerate(step, start=1):
            if flaw not in ("every micro-batch", "not sharded"):
                is_last = number == len(step) and flaw != "never reduced"
                model.set_requires_gradient_sync(is_last)
            if flaw == "whole between":
                model.set_reshard_after_backward(number == len(step))
            loss = nn.functional.mse_loss(model(inputs), labels)
            loss = loss if flaw == "not divided" else loss / len(step)
            loss.backward()
            total += loss.detach()
        if flaw == "not sharded":
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        if flaw != "local loss":
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    return None if flaw == "returns nothing" else losses


TRAININGS: dict[str, str] = {
    "": "",
    "optimizer first": "no weight has moved: which parameters does the optimizer",
    "never reduced": "no weight has moved: which parameters does the optimizer have, o",
    "root alone": "right, but all 768 weights are gathered at once",
    "one block": "right, but 512 of 768 weights are gathered at once",
    "stay whole": "right, but blocks stay whole after their forward pass",
    "whole between": "right, but blocks are whole before their forward pass",
    "one backward": "",
    "every micro-batch": "right, but in each step the gradients are sent 2 times",
    "not divided": "the weights moved ",
    "local loss": "the losses are [",
    "returns nothing": "it returned None, not a list of 3 losses",
    "not sharded": "nothing is gathered: are the parameters sharded?",
    "joined": "right, but a pass sees 16 samples; a micro-batch has 8",
}


def try_trainings() -> list[str]:
    """Let the checker try all trainings on this rank, the untouched and the answer."""
    answers = [functools.partial(train_with, flaw) for flaw in TRAININGS]
    answers += [BROKEN.train_in_fsdp, broken_fsdp.train_in_fsdp]
    return [CHECK_BROKEN.try_training(answer) for answer in answers]


def test_broken_fsdp(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(try_trainings)
    expected = [*TRAININGS.values(), TRAININGS["optimizer first"], ""]
    assert len(expected) == 16
    for told in by_rank:
        for text, hint in zip(told, expected, strict=True):
            assert text.startswith(hint) and bool(text) == bool(hint), text
    assert len(by_rank) == 2
