"""Processes with names that call each other by RPC, all on this machine."""

import gc
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ranks import fail, leave, start_ranks, tie_to_launcher

MASTER, SERVER = "master", "parameter_server"


def names_of_roles(trainers: int) -> list[str]:
    """Name the processes of a run; RPC's rank 0 is the master."""
    return [MASTER, SERVER, *(f"trainer{rank}" for rank in range(trainers))]


def stay_on_loopback() -> None:
    """Let RPC and gloo listen at 127.0.0.1, not where the host's name leads to."""
    loopback = dict(socket.if_nameindex())[1]
    os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def be_role(names: list[str], be_first: Callable[[Any], None], options: Any) -> None:
    """Be one of these processes; the first of them acts, the others answer calls."""
    tie_to_launcher()
    stay_on_loopback()
    rank = int(os.environ["RANK"])
    name, trainers = names[rank], [n for n in names if n.startswith("trainer")]
    if name in trainers:  # they have a process group too, for DDP
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore("trainers", dist.TCPStore(*place, is_master=False))
        own, n = trainers.index(name), len(trainers)
        dist.init_process_group("gloo", store=store, rank=own, world_size=n)
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # By default RPC polls shared memory, and keeps a core busy even while it waits.
    over_tcp = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, _transports=["uv"])
    rpc.init_rpc(name, rank=rank, world_size=len(names), rpc_backend_options=over_tcp)
    if rank == 0:
        be_first(options)
    rpc.shutdown()  # waits until all want to leave
    if name in trainers:
        gc.collect()  # DDP must not be freed after its group
        leave()


def start_roles(names: list[str], be_first: Callable, options: Any = None) -> None:
    """Start a process for each name; the end of one, or of this one, ends all."""
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_ranks(be_role, len(names), names, be_first, options)


def on_all_trainers(trainers: int, function: Callable, *arguments: Any) -> list[Any]:
    """Have every trainer call `function(*arguments)`, and wait for all."""
    calls = [(f"trainer{rank}", function, arguments) for rank in range(trainers)]
    return torch.futures.wait_all([rpc.rpc_async(*c, timeout=0) for c in calls])
