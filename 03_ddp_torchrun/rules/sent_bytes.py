"""What a rank sends: the buckets that DDP all-reduces, the bytes that TCP has sent."""

import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ranks import gather

# Where Linux keeps these two in what it tells of a TCP connection (struct tcp_info).
BYTES_SENT, BYTES_SENT_AGAIN = 200, 208


def tcp_bytes_sent() -> int | None:
    """Return what this process has sent over all its TCP connections.

    Linux counts it for each connection. Gloo uses TCP between any two ranks, also on
    one machine. None where the system does not tell.
    """
    total = 0
    try:
        for name in os.listdir("/proc/self/fd"):
            # The folder that is being listed is itself open, and then no more.
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    total += sent_by(int(name))
    except (OSError, struct.error):
        return None
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


def sent_by_a_rank(step: Callable[[], object]) -> float | None:
    """Run `step` and return what a rank has sent for it; every rank must call this.

    Returns:
        Bytes, the mean over ranks. None where nobody counts: not on gloo, or no Linux.
    """
    dist.barrier()  # before it, and at the end of the next one, nothing is under way
    before = tcp_bytes_sent() if dist.get_backend() == "gloo" else None
    step()
    dist.barrier()
    after = tcp_bytes_sent()
    sent = gather(None if before is None or after is None else after - before)
    known = [count for count in sent if count is not None]
    return sum(known) / len(known) if len(known) == len(sent) else None


def note_buckets(ddp_model: DistributedDataParallel) -> list[int]:
    """Return a list that will get the bytes of every bucket that DDP all-reduces."""
    noted: list[int] = []

    def note_and_all_reduce(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        noted.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    ddp_model.register_comm_hook(dist.group.WORLD, note_and_all_reduce)
    return noted
