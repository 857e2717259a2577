"""What DeepSpeed needs to start anywhere; each workaround says what breaks without it.

Call `prepare` before DeepSpeed is imported, `join` where the ranks are to meet, and
`leave` last. On a machine with a GPU for each rank and a compiler, a script of your own
can do without all of this.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil
import torch
import torch.distributed as dist

import ranks

MOST_RANKS = 16  # on one machine; more are a typing error
DEFAULT_PORT = "29500"  # allowed port: the launcher's, which is replaced
# For `ranks.read_options`: the launcher adds it. LOCAL_RANK says the same everywhere.
SETUP_OPTIONS: Any = {"local_rank": {"type": int, "help": argparse.SUPPRESS}}
RECORD = "record.json"  # of a checkpoint: its ranks, and its files' sizes
settled: dict[str, Any] = {}  # what `prepare` has chosen, for `join`


def prepare(config: dict[str, Any]) -> torch.device:
    """Choose this rank's device, and let DeepSpeed compile nothing.

    By itself it compiles two things on first use, which takes a compiler and
    minutes: its own Adam, and on the CPU an exchange through shared memory. Results
    differ by rounding at most. Unless the config has "torch_adam", it gets PyTorch's.
    """
    env = os.environ
    if "LOCAL_SIZE" in env:  # the deepspeed launcher's name for it
        env.setdefault("LOCAL_WORLD_SIZE", env["LOCAL_SIZE"])
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if local_world_size > MOST_RANKS:
        ranks.fail(f"{local_world_size} local ranks are too many; try --num_gpus=2")
    device, reason = torch.device("cpu"), "as DS_ACCELERATOR says"
    if env.get("DS_ACCELERATOR") != "cpu":
        local_rank = int(env.get("LOCAL_RANK", "0"))
        device, reason = ranks.choose_device(local_rank, local_world_size)
    settled.update(device=device, reason=reason)
    # DeepSpeed chooses a device for itself when it is imported; it must be the same.
    env["DS_ACCELERATOR"] = device.type
    if "OMP_NUM_THREADS" not in env:
        # torchrun sets it to 1. Under deepspeed each rank would take all the cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    optimizer = config.get("optimizer", {})
    if optimizer.get("type", "").lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    import deepspeed.ops

    # No public setting turns off the exchange through shared memory;
    # deepspeed/comm/torch.py asks this table whether it may be built.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    # DeepSpeed imports an optimizer named Muon, of which three functions ask to be
    # compiled: loading PyTorch's compiler would take two seconds.
    with mock.patch("torch.compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # DeepSpeed 0.19 calls collectives by names that PyTorch 2.13 has renamed.
    renamed = r"`torch.distributed.\w+` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    return device


def save_shards(engine: Any, folder: Path, tag: str, **state: Any) -> None:
    """Save beside the older checkpoints, then name this one; every rank calls this.

    By default rank 0 writes `latest` when it is done, even if others are not. The
    record lets `latest_tag` find a shard that is lost or cut short later.

    Raises:
        ValueError: The newest checkpoint has this name, and would be gone meanwhile.
    """
    if newest_tag(folder) == tag:
        raise ValueError(f"{folder / tag} is the newest checkpoint: choose another tag")
    if dist.get_rank() == 0:  # what a run that broke off, or of more ranks, has left
        shutil.rmtree(folder / tag, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(folder, tag, client_state=state, save_latest=False)
    if dist.get_rank() == 0:  # all have saved: `save_checkpoint` ends with a barrier
        files = {path.name: path.stat().st_size for path in (folder / tag).iterdir()}
        record = {"ranks": dist.get_world_size(), "files": files}
        (folder / tag / RECORD).write_text(json.dumps(record))
        (folder / "latest.new").write_text(tag)
        (folder / "latest.new").replace(folder / "latest")  # the new name, or the old


def newest_tag(folder: Path) -> str:
    """Return the name of the checkpoint that was saved last, '' if there is none.

    Exits with one line if there are checkpoints and nothing says which is the newest.
    """
    if (latest := folder / "latest").exists():
        return latest.read_text().strip()
    if saved := sorted(folder.glob(f"*/{RECORD}")):
        ranks.fail(f"write a checkpoint's name to {latest}, as {saved[-1].parts[-2]}")
    return ""


def latest_tag(folder: Path) -> str:
    """Return the name of the checkpoint to load, '' if there is none.

    Exits with one line, before any shard is read, if one is missing or has another
    size, or if another number of ranks has saved them. A universal checkpoint has no
    such shards: any number of ranks reads it.
    """
    tag, latest = newest_tag(folder), folder / "latest"
    if not latest.exists() or (folder / tag / "zero").is_dir():
        return tag
    try:
        record = json.loads((folder / tag / RECORD).read_text())
    except (OSError, ValueError):  # not there, or cut short
        ranks.fail(f"no whole checkpoint in {folder / tag}; name another in latest")
    if fault := find_damage(folder / tag, record["files"]):
        ranks.fail(f"{fault}; name another checkpoint in {latest}")
    if record["ranks"] != int(os.environ.get("WORLD_SIZE", "1")):
        convert = "convert it as in 05_deepspeed_zero/checkpoints"
        ranks.fail(
            f"{folder / tag} is of {record['ranks']} ranks: start as many; or {convert}"
        )
    return tag


def find_damage(folder: Path, sizes: dict[str, int]) -> str:
    """Return what is wrong with a file's size in bytes, '' if all are as noted."""
    for name, expected in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != expected:
            return f"{path} has {found:,} bytes and was saved with {expected:,}"
    return ""


def join(at_least: int = 1) -> None:
    """Meet the other ranks; every rank calls this after `prepare`."""
    if "CROSS_SIZE" in os.environ:  # the number of hosts; only deepspeed sets this
        use_own_port()
        end_with_runner()
    only_cpu = settled["device"].type == "cpu"
    ranks.join(at_least=at_least, only_cpu=only_cpu)
    if only_cpu:
        ranks.say(f"device: cpu with gloo ({settled['reason']})")


def leave() -> NoReturn:
    """Leave the process group and end this process with status 0.

    An engine holds on to the group. If a thread of gloo's frees a tensor while Python
    takes itself apart, that aborts: "terminate called without an active exception".
    """
    dist.barrier()  # rank 0 may hold the store through which they found each other
    ranks.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def undo_step_of_zeros(engine: Any) -> None:
    """Let stage 0 in bf16 start where stages 1 to 3 start; call it before training.

    To allocate the optimizer state, DeepSpeed 0.19 takes a step there with gradients of
    zero (initialize_optimizer_states in runtime/fp16/*fused_optimizer.py). Adam's bias
    correction is then one step ahead: its first update is 0.744 of the learning rate.
    And weight decay has once shrunk the fp32 master weights.
    """
    if engine.bfloat16_enabled() and not engine.zero_optimization():
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()  # from the bf16 weights


def use_own_port() -> None:
    """Let each job on a host have a port of its own.

    The deepspeed launcher tells all the same, and the second job would die of it.
    """
    env = os.environ
    if env["CROSS_SIZE"] == "1" and env["MASTER_PORT"] == DEFAULT_PORT:
        # The launcher is the parent of this job's ranks alone.
        env["MASTER_PORT"] = str(10_000 + os.getppid() % 20_000)


def end_with_runner() -> None:
    """End this rank when the deepspeed command is gone, even if killed by force.

    `ranks.join` watches this rank's parent. Under deepspeed it has a parent in the job
    as well; killed, that would leave the two of us running.
    """
    launcher = psutil.Process(os.getppid())
    runner = launcher.ppid()

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            while launcher.ppid() == runner:
                time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
