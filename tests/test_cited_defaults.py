"""Defaults of PyTorch and DeepSpeed that a page cites: they are still the defaults.

A page's number is typed by hand, and no command of the page prints it. So each stands
here with the words of the page and with where PyTorch says it. A default that only NCCL
has is not here: the CPU build does not know it.
"""

import inspect
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.amp.grad_scaler import GradScaler
from torch.distributed import HashStore, barrier
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.rpc import TensorPipeRpcBackendOptions
from torch.distributed.run import get_args_parser
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException
from torch.utils.data import DataLoader, DistributedSampler

from launch import ROOT, clean_environment, python
from scripts import load_chapter
from worker_pool import WorkerPool


def default_of(function: Callable[..., object], name: str) -> object:
    """Return the default of a function's argument."""
    return inspect.signature(function).parameters[name].default


def rendezvous() -> RendezvousSettings:
    """Return the settings of a c10d rendezvous of which nothing is said."""
    backend = C10dRendezvousBackend(HashStore(), "job")
    handler = DynamicRendezvousHandler.from_backend("job", HashStore(), backend, 1, 1)
    return handler.settings


def prefetch_factor() -> object:
    """Return how many batches a worker loads ahead."""
    return DataLoader(range(1), num_workers=1).prefetch_factor  # type: ignore


def torchrun_default(name: str) -> object:
    """Return what torchrun takes for an option that is not given."""
    return get_args_parser().get_default(name)


def how_spawn_ends_a_rank() -> list[object]:
    """Let a rank fail beside one that heeds no signal; return what is done to that."""
    (failed, end), (busy, other_end) = (socket.socketpair() for _ in range(2))
    with failed, busy, other_end:
        end.close()  # of a process that has ended, the sentinel can be read
        processes = [
            mock.Mock(sentinel=failed.fileno(), exitcode=1, error_file=None),
            mock.Mock(sentinel=busy.fileno(), exitcode=None),
        ]
        processes[0].is_alive.return_value = False
        context, done = ProcessContext(processes, ["", ""]), []
        processes[1].terminate.side_effect = lambda: done.append("SIGTERM")
        processes[1].kill.side_effect = lambda: done.append("SIGKILL")
        wait = mock.patch.object(context, "_join_procs_with_timeout", done.append)
        with wait, pytest.raises(ProcessExitedException):
            context.join()
    return done


FAULTS, CLUSTER = "03_ddp_torchrun/fault_tolerance", "03_ddp_torchrun/cluster"
# A page, words of it, the number that they say, and who knows it.
CITED: list[tuple[str, str, object, Callable[[], object]]] = [
    (
        "WHEN_IT_GOES_WRONG.md",
        "Gloo waits half an hour by default",
        30 * 60.0,
        default_pg_timeout.total_seconds,
    ),
    (
        "01_communication/failures/README.md",
        "gloo's default is 30 minutes",
        30 * 60.0,
        default_pg_timeout.total_seconds,
    ),
    (
        "WHEN_IT_GOES_WRONG.md",
        "Ten minutes pass before the error",
        10 * 60.0,
        lambda: RendezvousTimeout().join.total_seconds(),
    ),
    (
        "02_ddp_mp/spawn/README.md",
        "ends the others (SIGTERM, 30 s later SIGKILL) and raises an error",
        ["SIGTERM", 30, "SIGKILL"],
        how_spawn_ends_a_rank,
    ),
    (
        f"{FAULTS}/README.md",
        "heartbeats of `keep_alive_interval` (here 1 s, by default 5)",
        5.0,
        lambda: rendezvous().keep_alive_interval.total_seconds(),
    ),
    (
        f"{FAULTS}/README.md",
        "three heartbeats of",
        3,
        lambda: rendezvous().keep_alive_max_attempt,
    ),
    (
        f"{FAULTS}/README.md",
        "for another host (here 4 s, by default 30)",
        30.0,
        lambda: RendezvousTimeout().last_call.total_seconds(),
    ),
    (
        f"{FAULTS}/README.md",
        "`torchrun` kills the ranks 30 s after",
        30,
        lambda: default_of(PContext.close, "timeout"),
    ),
    (
        f"{FAULTS}/README.md",
        "up to three times for each `torchrun`; the default is 0",
        0,
        lambda: torchrun_default("max_restarts"),
    ),
    (
        f"{CLUSTER}/README.md",
        "default is `static`, not `c10d`",
        "static",
        lambda: torchrun_default("rdzv_backend"),
    ),
    (
        "03_ddp_torchrun/fault_tolerance/README.md",
        "wait `last_call_timeout` for another host (here 4 s, by default 30)",
        30.0,
        lambda: RendezvousTimeout().last_call.total_seconds(),
    ),
    (
        "03_ddp_torchrun/data_loading/README.md",
        "(`prefetch_factor`, 2 by default)",
        2,
        prefetch_factor,
    ),
    (
        "03_ddp_torchrun/mixed_precision/README.md",
        "Its first steps send everything (10 here, 1,000 by default)",
        1000,
        lambda: default_of(PowerSGDState, "start_powerSGD_iter"),
    ),
    (
        "03_ddp_torchrun/mixed_precision/README.md",
        "sends two thin matrices for one of more than twice their size",
        2,
        lambda: default_of(PowerSGDState, "min_compression_rate"),
    ),
    (
        "04_rpc_parameter_server/README.md",
        "After `timeout` seconds, by default 60, `wait()` raises an error",
        60.0,
        lambda: TensorPipeRpcBackendOptions().rpc_timeout,
    ),
    (
        "WHEN_IT_GOES_WRONG.md",
        "`DistributedSampler` shuffles by default",
        True,
        lambda: default_of(DistributedSampler, "shuffle"),
    ),
]


@pytest.mark.parametrize(
    ("page", "words", "value", "known"), CITED, ids=[words for _, words, _, _ in CITED]
)
def test_cited_default_is_the_default(
    page: str, words: str, value: object, known: Callable[[], object]
) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert words in " ".join(text.split()), page
    assert known() == value


def test_grad_scaler_begins_and_grows_as_the_lesson_says() -> None:
    scaler = load_chapter("03_ddp_torchrun/mixed_precision")["grad_scaler"]
    assert default_of(GradScaler, "init_scale") == scaler.SCALE
    assert "doubles it after 2000 good steps" in inspect.getsource(scaler.finish_step)
    assert default_of(GradScaler, "growth_interval") == 2000
    factors = [
        default_of(GradScaler, f"{name}_factor") for name in ("growth", "backoff")
    ]
    assert factors == [2, 0.5]


# --- The flight recorder. ----------

RECORD = """
import pickle
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2100):
    dist.all_reduce(torch.ones(1))
entries = pickle.loads(_distributed_c10d._dump_fr_trace())["entries"]
print(len(entries), entries[-1]["record_id"] - entries[0]["record_id"] + 1)
"""


@pytest.mark.slow
def test_flight_recorder_keeps_2000_collectives_by_default() -> None:
    environment = clean_environment()
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        environment.pop(name, None)
    result = python("-c", RECORD, env=environment)
    assert result.returncode == 0, result.output
    assert result.stdout.split() == ["2000", "2000"]
    page = (ROOT / "03_ddp_torchrun/debugging/README.md").read_text("utf-8")
    assert "(`TORCH_FR_BUFFER_SIZE`, by default 2,000)" in " ".join(page.split())


# --- The keys of DeepSpeed's config. ----------


class Noting(dict[str, Any]):
    """A config that notes which of its keys are asked for, also if they are not there.

    DeepSpeed makes a shallow copy of it: what has been asked for belongs to the class.
    """

    asked: set[str]

    def __getitem__(self, key: str) -> Any:
        """Note the key."""
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Note the key."""
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Note the key."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return what notes the question `key in config.keys()`."""
        return self

    def __iter__(self) -> Iterator[str]:
        """Refuse what would read all keys, whatever they are called."""
        raise NotImplementedError


# As `"name" in config`, `config["name"]` and `config.get("name"`.
LITERAL = (
    r"""["'](\w+)["'] in {0}\b(?!\[)|"""
    r"""\b{0}\[["'](\w+)["']\]|\b{0}\.get\(["'](\w+)["']"""
)


def keys_that_deepspeed_reads() -> tuple[set[str], set[str], set[str], list[str], int]:
    """Return what it reads, what it refuses, our keys, and how one refusal begins."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime import config, precision_config

    Noting.asked = set()
    config.DeepSpeedConfig(Noting(train_batch_size=1))
    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    # What is read elsewhere, or only if something else is so.
    folder = Path(deepspeed.__file__).parent
    for name, of in (
        ("__init__.py", "config"),
        ("runtime/config.py", "config"),
        ("runtime/config.py", "param_dict"),
        ("runtime/engine.py", r"self\.config"),
        ("runtime/tensor_parallel/init_utils.py", "config_dict"),
        ("compile/custom_ops/sp_dp_registry.py", "param_dict"),
    ):
        found = re.findall(LITERAL.format(of), (folder / name).read_text("utf-8"))
        assert found, name
        Noting.asked |= {key for keys in found for key in keys if key}
    known = load_chapter("05_deepspeed_zero/huggingface")["check_config"].KNOWN_KEYS
    said = []
    for key in sorted(removed):
        with pytest.raises(config.DeepSpeedConfigError) as refused:
            config.DeepSpeedConfig({"train_batch_size": 1, key: {}})
        said.append(str(refused.value))
    hysteresis = precision_config.DeepSpeedFP16Config().hysteresis
    return Noting.asked - removed, removed, known, said, hysteresis


def test_known_keys_are_what_deepspeed_reads_or_refuses(
    worker_pool: WorkerPool,
) -> None:
    # In a worker, which has imported DeepSpeed already.
    ((read, removed, known, said, hysteresis),) = worker_pool.run(
        keys_that_deepspeed_reads, world_size=1
    )
    assert len(read) > 50 and {"zero_optimization", "comet", "timers"} <= read
    # A key that it reads and we refuse, and one that it overlooks and we let pass.
    assert (read - known, known - read - removed) == (set(), set())
    assert removed <= known and "amp" in removed
    assert len(said) == len(removed) == 11
    assert [text for text in said if "removed" not in text] == []
    page = " ".join((ROOT / "WHEN_IT_GOES_WRONG.md").read_text("utf-8").split())
    assert hysteresis == 2 and "(`hysteresis`, 2 by default)" in page


def test_barrier_that_guesses_its_device_warns_in_these_words() -> None:
    # On a CPU it never guesses, so this reads the source.
    text = inspect.getsource(barrier)
    page = (ROOT / "WHEN_IT_GOES_WRONG.md").read_text("utf-8")
    for words in ("barrier(): using the device under current context", "`device_id`"):
        assert words in text
    assert "`barrier(): using the device under current context`" in page
