"""What both exercises need: RPC between their ranks, and a lock that is watched."""

import os
import socket
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed.rpc as rpc


class CountingLock:
    """A lock that counts how often it was taken, and knows which thread holds it."""

    def __init__(self) -> None:
        """Make it; nobody holds it."""
        self.lock, self.times, self.holder = threading.Lock(), 0, 0
        # So many seconds who has released it waits, and others come between.
        self.pause = 0.0

    def acquire(self) -> bool:
        """Wait for it, and count."""
        self.lock.acquire()
        self.times, self.holder = self.times + 1, threading.get_ident()
        return True

    def release(self) -> None:
        """Release it."""
        self.holder = 0
        self.lock.release()
        time.sleep(self.pause)

    def __enter__(self) -> "CountingLock":
        """Acquire it."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.release()


SHAPE: Any = torch.Tensor.shape  # of a table, which may be read without its lock


class GuardedTable(torch.Tensor):
    """A tensor that counts its uses by threads which do not hold its lock."""

    lock, unlocked = CountingLock(), 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count, and call what was to be called; its shape is free to read."""
        is_locked = cls.lock.holder == threading.get_ident()
        cls.unlocked += not is_locked and func != SHAPE.__get__
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def open_rpc(
    name: str, rank: int, world_size: int, init_method: str = "env://"
) -> None:
    """Join RPC at 127.0.0.1, with calls that fail after five seconds."""
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method,
        num_worker_threads=8,
        rpc_timeout=5,
        _transports=["uv"],
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
