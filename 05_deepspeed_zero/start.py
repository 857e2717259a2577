"""How a rank starts: its options, device and group, and what DeepSpeed compiles."""

import argparse
import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil
import torch
import torch.distributed as dist

MOST_RANKS = 16  # on one machine; more are a typing error


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def positive_int(text: str) -> int:
    """Parse a whole number of 1 or more, for argparse."""
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")


def stage_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that the four stage scripts take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--steps", type=positive_int, default=10, help="optimizer steps")
    add("--model", metavar="PATH_OR_NAME", help="a Hugging Face checkpoint to train")
    add("--text", type=Path, help="a text file of your own")
    add("--fused", action="store_true", help="compile DeepSpeed's C++ parts first")
    # The deepspeed launcher passes the first spelling, torch.distributed.launch the
    # second. The environment's LOCAL_RANK says the same under every launcher.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def choose_device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Give each rank an accelerator of its own, or every rank the CPU; say why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "no accelerator found"
    kind, found = accelerator.type, torch.accelerator.device_count()
    if dist.get_default_backend_for_device(kind) == "gloo":
        return torch.device("cpu"), f"no backend connects {kind} devices"
    if found < local_world_size:
        return torch.device("cpu"), f"{found} {kind} for {local_world_size} local ranks"
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank), f"{found} {kind}, one for each local rank"


def print_once(text: str) -> None:
    """Print from rank zero only, at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def seconds_since_start() -> float:
    """Return how long ago this process was started, imports included."""
    return time.time() - psutil.Process().create_time()


def leave_with_the_launcher() -> None:
    """End this rank when its launcher is gone, even if that was killed by force."""
    parents = [psutil.Process(os.getppid())]
    if "CROSS_SIZE" in os.environ:
        # Under `deepspeed` the parent has a parent that belongs to the job as well.
        parents += [parent for parent in [parents[0].parent()] if parent is not None]

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            # A zombie has ended, and nobody has asked how yet.
            while all(p.is_running() for p in parents) and not any(
                p.status() == psutil.STATUS_ZOMBIE for p in parents
            ):
                time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def meeting_place() -> str:
    """Name a file that the ranks of this launch share, and no other launch.

    The deepspeed launcher tells all jobs on a machine the same TCP port, 29500, unless
    --master_port names another. Ranks of one machine need no port at all.
    """
    launcher = psutil.Process(os.getppid())
    name = f"zero-{os.getuid()}-{launcher.pid}-{launcher.create_time():.2f}"
    return os.path.join(tempfile.gettempdir(), name)


def ranks_on_this_machine() -> int:
    """Return how many there are; torchrun and deepspeed have different names for it."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    return int(next(os.environ[name] for name in names if os.environ.get(name)))


def find_place() -> tuple[torch.device, str]:
    """Find out who this rank is and choose its device; return that and why.

    Without a launcher this is a world of one rank. Nothing is waited for here, so what
    the user got wrong can still be said before the ranks meet.
    """
    # Ctrl-C ends a rank at once and in silence; no file is ever half written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env = os.environ
    if "RANK" in env and "MASTER_ADDR" not in env:
        refuse("RANK is set but MASTER_ADDR is not; start this with deepspeed")
    if "RANK" in env:
        leave_with_the_launcher()
    for name, alone in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        env.setdefault(name, alone)
    local = ranks_on_this_machine()
    if local > MOST_RANKS:
        refuse(f"{local} ranks are too many for one machine; start two, --num_gpus=2")
    device, reason = torch.device("cpu"), "as DS_ACCELERATOR says"
    if env.get("DS_ACCELERATOR") != "cpu":
        device, reason = choose_device(int(env["LOCAL_RANK"]), local)
    if "OMP_NUM_THREADS" not in env:
        # torchrun sets it to 1. Under deepspeed each rank would take all the cores,
        # and its threads would wait for those of the other ranks.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    # DeepSpeed chooses a device for itself when it is imported; it must be the same.
    env["DS_ACCELERATOR"] = device.type
    return device, reason


def join_group(device: torch.device) -> None:
    """Meet the other ranks; every rank must call this."""
    backend = dist.get_default_backend_for_device(device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("CROSS_SIZE") == "1":
        store = dist.FileStore(meeting_place(), world_size)
    elif "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    else:
        store = None  # the launcher has set MASTER_ADDR and MASTER_PORT
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),  # a rank that waits longer ends with an error
    )


def leave_group() -> NoReturn:
    """Leave the process group and end this process with status 0.

    DeepSpeed holds on to the group, so gloo's threads live on after
    destroy_process_group. If one of them lets go of a tensor while Python takes itself
    apart, the process aborts: "terminate called without an active exception", in 4 of
    23 runs on three ranks. So Python is not taken apart.
    """
    dist.barrier()
    dist.destroy_process_group()
    if os.environ.get("CROSS_SIZE") == "1":
        with contextlib.suppress(OSError):
            os.unlink(meeting_place())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def missing_compiler(device: torch.device) -> str:
    """Name what is missing to compile DeepSpeed's parts for a device, or return ''."""
    from torch.utils.cpp_extension import CUDA_HOME

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return "no ninja"
    if device.type == "cuda" and CUDA_HOME is None:
        return "no nvcc"
    return ""


def missing_libaio(device: torch.device) -> str:
    """Name what is missing to compile DeepSpeed's disk access, or return ''."""
    if missing := missing_compiler(device):
        return missing
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore

    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "no libaio.h; on Debian: apt-get install libaio-dev"
    return ""


def choose_parts(config: dict[str, Any], device: torch.device, fused: bool) -> str:
    """Decide whether DeepSpeed compiles C++ before the first step; say what was chosen.

    By itself DeepSpeed compiles two things when they are first used, which takes a
    compiler and more than a minute: its own Adam, and on the CPU an exchange through
    shared memory. Neither changes a result. So the default is PyTorch's Adam, by the
    public setting "torch_adam", and gloo alone.

    Args:
        config: the DeepSpeed config; its optimizer is changed where need be.
        device: where this rank computes.
        fused: whether the reader asked for the compiled parts.
    """
    import deepspeed
    import deepspeed.ops

    # DeepSpeed imports an optimizer named Muon to see whether it is ours, and three
    # functions in that file ask to be compiled: loading PyTorch's compiler takes two
    # seconds. We do not use Muon, so they may stay as they are.
    with mock.patch("torch.compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # DeepSpeed 0.19 calls collectives by names that PyTorch 2.13 has renamed, and
    # every rank would say so. Other warnings still come through.
    warnings.filterwarnings(
        "ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning
    )
    missing = missing_compiler(device) if fused else ""
    compiles = fused and not missing
    config["optimizer"]["params"]["torch_adam"] = not compiles
    if compiles:
        return "compiled: DeepSpeed's Adam, kept in the user's cache (--fused)"
    # There is no public setting for this one. Found in deepspeed/comm/torch.py, which
    # asks this table whether the part may be built.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # type: ignore
    if missing:
        return f"compiled: nothing, because there is {missing}; PyTorch's Adam instead"
    return "compiled: nothing, PyTorch's Adam (--fused compiles DeepSpeed's)"
