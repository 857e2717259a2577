"""The roles of `train.py`, on one machine or several, which end together.

No lesson needs it to be read; the page of supervision/ explains it. `run_roles` starts
all roles here, or is the one that `--role` names.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing import connection, resource_tracker
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc

from heartbeats import (
    LAUNCHER,
    STATUS,
    TIME_TO_SAVE,
    Heartbeat,
    host_store,
    reach_store,
    roll_call,
    say_as,
    spoken,
    wait_to_be_ended,
)
from ranks import choose_device, fail, number
from roles import MASTER, SERVER, names_of_roles, stay_on_loopback

LOOPBACK = "127.0.0.1"
SIGNALS = signal.SIGINT, signal.SIGTERM
TIME_TO_END = 5.0  # seconds for all but the server, which has TIME_TO_SAVE
# What a process does, once it has joined: it is given the address and the port of the
# store, and the options. A role without a body only answers calls.
Bodies = Mapping[str, Callable[[tuple[str, int], Any], None]]
ROLE_OPTIONS: dict[str, dict[str, Any]] = {
    "role": {"choices": (MASTER, SERVER, "trainer"), "help": "be this one only"},
    "master_addr": {"help": "where the master listens"},
    "master_port": {"type": number(1, 65535), "help": "and its port"},
    "rank": {"type": number(0, 61), "help": "which trainer, from 0"},
    "patience": {"type": number(0.1, 3600.0), "default": 60.0, "help": "for others, s"},
}


def run_trainer(
    rank: int,
    world_size: int,
    place: tuple[str, int],
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Call `function(device, *arguments)` in the process group of all trainers.

    `place` is the host and the port of RPC's store.
    """
    try:
        # A prefix keeps apart what RPC and this group write there: one port is enough.
        store = dist.PrefixStore("trainers", dist.TCPStore(*place, is_master=False))
        store.set(f"host {rank}", socket.gethostname())
        hosts = [store.get(f"host {other}") for other in range(world_size)]
        host = hosts[rank]
        device, reason = choose_device(hosts[:rank].count(host), hosts.count(host))
        backend = dist.get_default_backend_for_device(device)
        options = {"rank": rank, "world_size": world_size, "store": store}
        dist.init_process_group(backend, timeout=timedelta(minutes=5), **options)
        if rank == 0:
            say_as("trainer0", f"device: {device.type} with {backend} ({reason})")
        result = function(device, *arguments)
        gc.collect()  # DDP, if it is part of a cycle, must not be freed after its group
        dist.destroy_process_group()
        return result
    except Exception:
        wait_to_be_ended()  # it may come of the death of another
        raise


def join_rpc(name: str, names: list[str], store: dist.TCPStore) -> None:
    """Join RPC at a store; the order of `names` is that of RPC's ranks."""
    if ip_address(socket.gethostbyname(store.host)).is_loopback:
        stay_on_loopback()
    rank, world_size = names.index(name), len(names)
    place = dist.PrefixStore("rpc", store), rank, world_size
    # init_rpc wants an address for its rendezvous: hand it the store that is there.
    dist.register_rendezvous_handler("store", lambda *_, **__: iter([place]))
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # By default RPC polls shared memory, and keeps a core busy even while it waits.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="store://", num_worker_threads=4, _transports=["uv"]
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def run_role(
    bodies: Bodies,
    name: str,
    names: list[str],
    store: dist.TCPStore,
    host: str,
    patience: float,
    options: Any,
) -> None:
    """Be `name` among `names`: join, do what its body says, and leave with all others.

    Leaving waits until all want to leave, also for a process that calls `sys.exit`:
    that is its status at the end.
    """
    status = None
    roll_call(store, name, names, patience)
    own_store = reach_store(store.host, store.port, 5)
    heartbeat = Heartbeat(name, names, own_store, host)
    heartbeat.start()
    try:
        join_rpc(name, names, store)
        try:
            if name in bodies:
                bodies[name]((store.host, store.port), options)
        except SystemExit as end:
            status = end.code
        rpc.shutdown()
    except Exception:
        wait_to_be_ended()
        traceback.print_exc()
        os._exit(1)
    keys = [f"beat {other}" for other in heartbeat.others]
    # The store ends with its host, and the others still look into it. One of them may
    # die even now: so the host's heartbeat goes on.
    while host == name and set(store.multi_get(keys)) != {b"done"}:
        time.sleep(0.05)
    heartbeat.over.set()
    heartbeat.join()
    store.set(f"beat {name}", "done")
    sys.exit(status)


def be_launched(names: list[str], port: int, bodies: Bodies, options: Any) -> None:
    """Be one of the processes that `launch` starts."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    name = multiprocessing.current_process().name
    try:
        store = reach_store(LOOPBACK, port, 5)
        store.set("fork server", str(os.getppid()))
        run_role(bodies, name, names, store, LAUNCHER, 60, options)
    except (TimeoutError, dist.DistError):
        os._exit(STATUS)


def wait_for(processes: list[Any]) -> None:
    """Wait until all have ended well; if one has not, name it, and exit."""
    alive = {process.sentinel: process for process in processes}
    while alive:
        for sentinel in connection.wait(list(alive)):
            process = alive.pop(sentinel)  # pyright: ignore[reportArgumentType]
            process.join()
            if status := process.exitcode:
                how = f"ended with status {status}"
                if status < 0:
                    how = f"was killed by {signal.Signals(-status).name}"
                text = f"{spoken(process.name)} {how}; ending all others"
                print(text, file=sys.stderr, flush=True)
                sys.exit(1)


def end(processes: list[Any]) -> None:
    """End those that have been started; the server, which may save, has longest."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    began = time.monotonic()
    # The server comes last, so that the others do not live as long as it does.
    for process in sorted(started, key=lambda process: process.name == SERVER):
        is_server = process.name == SERVER
        limit = TIME_TO_SAVE if is_server else TIME_TO_END
        process.join(max(0.0, began + limit - time.monotonic()))
        if is_server and process.is_alive():
            text = f"{spoken(SERVER)} has not ended within {limit:g} s: killed, what it"
            print(f"{text} had not saved is lost", file=sys.stderr, flush=True)
        process.kill()
        process.join()


def launch(names: list[str], bodies: Bodies, options: Any = None) -> None:
    """Start a process for each name, on this machine, and wait for all.

    If one does not end well, or this one is ended by Ctrl-C or SIGTERM, all end.
    """
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    # Each process shares the cores with all the others, and would report every
    # connection that ends in long words of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    store = host_store(LOOPBACK)
    # The fork server imports torch once; each process is a fork of it, ready at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.nn", "torch.distributed.optim"])
    work = {"target": be_launched, "args": (names, store.port, bodies, options)}
    processes = [context.Process(name=name, daemon=True, **work) for name in names]
    for signum in SIGNALS:
        signal.signal(signum, lambda got, _: sys.exit(128 + got))
    # They wait until all have been started: before, there would be a process that
    # nobody knows. Python's tracker lifts such a block, so it has to be there already.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        wait_for(processes)
    finally:
        end(processes)
        if store.check(["fork server"]):
            # It would end by itself, but take its time, with all of torch to tidy up.
            fork_server = int(store.get("fork server"))
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(fork_server, signal.SIGKILL)
                os.waitpid(fork_server, 0)


def check_role(options: Namespace) -> None:
    """Refuse a role without what it needs, or with what it cannot have."""
    role, place = options.role, ("master_addr", "master_port")
    for name in (*place, "rank"):
        is_given, option = getattr(options, name) is not None, name.replace("_", "-")
        if role is None and is_given:
            fail(f"--{option} goes with --role; alone, this script finds its own")
        if role is not None and name in place and not is_given:
            fail(f"--role {role} needs --{option}, the same in each terminal")
    if (role == "trainer") != (options.rank is not None):
        fail("--role trainer needs --rank, and no other role takes it")
    if role == "trainer" and options.rank >= options.trainers:
        fail(f"--rank is at most {options.trainers - 1} with that many --trainers")


def run_roles(bodies: Bodies, options: Namespace) -> None:
    """Start all roles here, or be the one that `--role` names."""
    check_role(options)
    names = names_of_roles(options.trainers)
    if options.role is None:
        return launch(names, bodies, options)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = f"trainer{options.rank}" if options.role == "trainer" else options.role
    address, port, patience = options.master_addr, options.master_port, options.patience
    try:
        if name == MASTER:
            store = host_store(address, port)
        else:
            store = reach_store(address, port, patience)
    except TimeoutError:
        fail(f"no master at {address}:{port} after {patience:g} s")
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        text = f"cannot listen at {address}:{port}: {reason}; check --master-addr, "
        fail(f"{text}or choose another --master-port")
    try:
        run_role(bodies, name, names, store, MASTER, patience, options)
    except TimeoutError as missing:
        say_as(name, f"{missing} did not come within {patience:g} s; ending")
    except dist.DistError:
        say_as(name, "master has died or cannot be reached; ending")
    os._exit(STATUS)
