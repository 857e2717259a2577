"""What every script needs once: options, a device, a process group, one voice.

01's send_recv.py and 02's train.py show in the open what `join` and `start_ranks` do.
"""

import argparse
import atexit
import contextlib
import gc
import hashlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it too late: gloo might abort at the end
import torch.multiprocessing as mp

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
has_options = False  # until a script reads some; one that has none refuses all


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong; exit with status 2."""
    # One rank speaks. When it has ended, the launcher stops the others, which sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def number(low: float, high: float) -> Callable[[str], Any]:
    """Make a converter for numbers from `low` to `high`, whole if `low` is an int."""

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= (value := type(low)(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {low} to {high}")

    return convert


def read_options(**options: dict[str, Any]) -> argparse.Namespace:
    """Read `--name=value` by argparse's settings; a name may have - or _ in it."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.error = fail  # type: ignore[method-assign]
    global has_options
    has_options = True
    for name, settings in options.items():
        spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        parser.add_argument(*spellings, **settings)
    return parser.parse_args()


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


def agree_on_device(store: dist.Store, rank: int, ranks: int, choice: str) -> None:
    """End the run in one line if the ranks' choices differ in their first word."""
    # Ranks on NCCL and ranks on gloo would wait for each other until the timeout.
    store.set(f"device {rank}", choice)
    if rank == 0:
        choices = [store.get(f"device {other}").decode() for other in range(ranks)]
        by_kind = {choice.split()[0]: choice for choice in choices}
        store.set("dissent", " but ".join(by_kind.values()) if len(by_kind) > 1 else "")
    if dissent := store.get("dissent").decode():
        fail(f"all nodes need the same kind of device, not {dissent}")


def join(at_least: int = 1, at_most: int = 2**20, only_cpu: bool = False):
    """Join the process group of all ranks; return this rank's device.

    Every rank calls this first, as torchrun or `start_ranks` has started it, and waits
    five minutes at most for each of the others. The lesson needs `at_least` ranks and
    can show `at_most`; with `only_cpu` it uses the CPU and gloo even if there are GPUs.
    """
    if not has_options and mp.parent_process() is None:
        read_options()
    path, nproc = os.path.relpath(sys.argv[0]), min(max(2, at_least), at_most)
    start = f"start it with torchrun --nproc-per-node={nproc} {shlex.quote(path)}"
    if any(name not in os.environ for name in ENVIRONMENT):
        fail(start)
    rank, world_size, local_rank, local_size = (int(os.environ[n]) for n in ENVIRONMENT)
    if not at_least <= world_size <= at_most:
        fail(f"not with {world_size} rank(s); {start}")
    tie_to_launcher()
    cpu = torch.device("cpu"), "this lesson is about the CPU"
    device, reason = cpu if only_cpu else choose_device(local_rank, local_size)
    backend, timeout = dist.get_default_backend_for_device(device), timedelta(minutes=5)
    store = next(dist.rendezvous("env://", timeout=timeout))[0]
    choice = f"{device.type} on {os.uname().nodename} ({reason})"
    agree_on_device(store, rank, world_size, choice)
    place = {"store": store, "rank": rank, "world_size": world_size}
    own = None if device.type == "cpu" else device
    dist.init_process_group(backend, timeout=timeout, device_id=own, **place)
    # If DDP freed the group last, it would join gloo's threads while it holds the GIL.
    atexit.register(lambda held: (gc.collect(), held.clear()), [dist.group.WORLD])
    if not only_cpu:
        say(f"device: {device.type} with {backend} ({reason})")
    return device


def leave() -> None:
    """Leave the process group; every rank calls this last."""
    if "torch.distributed.tensor" in sys.modules:  # it keeps meshes, and they groups
        gc.collect()
        for mesh in [x for x in gc.get_objects() if type(x).__name__ == "DeviceMesh"]:
            mesh._pg_registry.clear()
    dist.destroy_process_group()


def tie_to_launcher() -> None:
    """Let this rank end by Ctrl-C, in silence, and soon after its launcher's end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=end_with_launcher, daemon=True).start()


def end_with_launcher() -> None:
    """Wait until the process that started this rank has ended, then end too."""
    launcher = getattr(mp.parent_process(), "pid", None) or os.getppid()
    with contextlib.suppress(ConnectionRefusedError):
        # If the launcher held the store, and ended before this line, nothing answers.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place).close()
        while os.getppid() == launcher:
            time.sleep(0.5)
    os._exit(1)


def say(text: str, file: Any = None) -> None:
    """Print from rank 0 only, at once."""
    if dist.get_rank() == 0:
        print(text, file=file, flush=True)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks (of a group), in order; every rank calls this."""
    dist.all_gather_object(values := [None] * dist.get_world_size(group), value, group)
    return values


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether all ranks hold the same bits; every rank calls this."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes(tensor.detach().cpu().flatten().view(torch.uint8).numpy()))
    return len(set(gather(digest.digest()))) == 1


def check(is_right: bool | torch.Tensor, claim: str) -> None:
    """Print the claim if every rank found it true, else end; every rank calls this."""
    if wrong := [r for r, right in enumerate(gather(bool(is_right))) if not right]:
        say(f"check failed on ranks {wrong}, not so: {claim}", file=sys.stderr)
        leave()
        sys.exit(1)
    say(f"check: {claim}")


def start_ranks(main: Callable[..., None], nprocs: int, *arguments: Any) -> None:
    """Call `main(*arguments)` on local ranks; if torchrun has started them, on this."""
    if "RANK" in os.environ:
        return main(*arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # With port 0 the system chooses one that is free. The store holds it from now on.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.spawn(be_local_rank, (nprocs, store.port, main, arguments), nprocs=nprocs)
    except mp.ProcessExitedException as end:
        sys.exit(str(end) if end.signal_name else end.exit_code)  # it has said why


def be_local_rank(rank: int, ranks: int, port: int, main: Any, arguments: Any) -> None:
    """Be one of the ranks of `start_ranks`: set what torchrun sets, then begin."""
    os.environ |= dict(zip(ENVIRONMENT, map(str, (rank, ranks) * 2), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent holds the store
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    main(*arguments)
