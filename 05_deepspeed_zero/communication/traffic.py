"""What a rank sends: by PyTorch's dispatcher, by DeepSpeed's logger, and by TCP."""

import math
import os
import socket
import stat
import struct
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What PyTorch's dispatcher calls the collectives, and what the calls are known as. The
# second part is where the message is among the arguments: for an all-gather that is
# what all end with, for a reduce-scatter what each starts with.
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
}
# Where Linux keeps these two in what it tells of a TCP connection (struct tcp_info).
BYTES_SENT, BYTES_SENT_AGAIN = 200, 208


class CollectiveCounter(TorchDispatchMode):
    """While it is active, notes this thread's collectives, whoever calls them.

    It misses functional collectives, which DTensor and `torch.compile` use, and does
    not know those of `_coalescing_manager`, which it counts by another size. So it sees
    FSDP's collectives, but not those of tensor parallelism or of FSDP2's gradient norm.

    `calls` maps the name of a collective to the bytes of each message, where a message
    is the whole tensor: what all ranks together end with in an all-gather, what each
    starts with in a reduce-scatter.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.calls: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a collective, and let it and everything else go on."""
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            known, position = COLLECTIVES.get(name, (name, 0))
            tensors = tree_leaves(args[position] if args else [])
            count = sum(one.nbytes for one in tensors if torch.is_tensor(one))
            self.calls.setdefault(known, []).append(count)
        return func(*args, **(kwargs or {}))


def times_sent(call: str) -> int:
    """Return how often a rank has to send a message, where (n - 1) / n counts as once.

    An all-gather brings every rank the n - 1 shares that it does not have. A
    reduce-scatter is the same backwards, and an all-reduce is both. For a reduce, all
    ranks but one pass the whole message on.
    """
    return 2 if call == "all_reduce" else 1


def times_sent_by_gloo(call: str, world_size: int) -> float:
    """Return how often gloo sends it, as measured: two calls do more than they must."""
    if call == "reduce_scatter":
        return 2  # an all-reduce, of which each rank keeps its share
    # A reduce-scatter, after which all but one send their sums to that one.
    return 1 + 1 / world_size if call == "reduce" else times_sent(call)


def bytes_due(
    calls: dict[str, tuple[int, int]], world_size: int, by_gloo: bool = False
) -> float:
    """Return what a rank sends for some collectives, where (n - 1)/n counts as 1.

    Args:
        calls: the number of calls of each collective, and the bytes of their messages.
        world_size: the number of ranks.
        by_gloo: return what gloo sends, and not what has to be sent.
    """
    return sum(
        total * (times_sent_by_gloo(call, world_size) if by_gloo else times_sent(call))
        for call, (_, total) in calls.items()
    )


def logged_calls() -> dict[str, tuple[int, int]]:
    """Return calls and bytes by DeepSpeed's comms_logger, and let it begin again.

    Its times are left alone: the k-th latency of a collective is the sum of the first
    k, since `timed_op` reads its timer without a reset (deepspeed/comm/comm.py).
    """
    from deepspeed.comm.comm import comms_logger

    found = {}
    for name, by_bytes in comms_logger.get_raw_data().items():
        call = name.replace("_into_tensor", "").replace("_tensor", "")
        # Of an all-gather it counts what one rank gives. Here it is the whole tensor.
        ranks = dist.get_world_size() if call == "all_gather" else 1
        calls = {nbytes: entry[0] for nbytes, entry in by_bytes.items()}
        total = sum(nbytes * number for nbytes, number in calls.items())
        found[call] = (sum(calls.values()), ranks * total)
    comms_logger.reset_data()
    return found


def tcp_bytes_sent() -> float:
    """Return what this process has sent over all its TCP connections; all ranks call.

    Linux counts it for each connection. Gloo uses TCP between any two ranks, also on
    one machine. With other backends and systems it is nan: not known.
    """
    dist.barrier()  # all that was to be received has been sent
    total = 0 if dist.get_backend() == "gloo" else math.nan
    try:
        for name in os.listdir("/proc/self/fd"):
            # The folder that is being listed is itself open, and then no more.
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    total += sent_by(int(name))
    except (OSError, struct.error):
        return math.nan
    return total


def sent_by(descriptor: int) -> int:
    """Return what went out over one socket without repetitions; 0 if it is not TCP."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in {
            socket.AF_INET,
            socket.AF_INET6,
        }:
            return 0
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, again = struct.unpack_from("QQ", told, BYTES_SENT)
    return sent - again
