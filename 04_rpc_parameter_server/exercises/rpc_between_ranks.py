"""What both exercises need: RPC between their ranks, and a lock that counts."""

import os
import socket
import threading
import warnings

import torch.distributed.rpc as rpc


class CountingLock:
    """A lock that counts how often it was taken."""

    def __init__(self) -> None:
        """Make it; nobody holds it."""
        self.lock, self.times = threading.Lock(), 0

    def __enter__(self) -> "CountingLock":
        """Wait for it, and count."""
        self.lock.acquire()
        self.times += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.lock.release()


def open_rpc(
    name: str, rank: int, world_size: int, init_method: str = "env://"
) -> None:
    """Join RPC at 127.0.0.1, with calls that fail after five seconds."""
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, num_worker_threads=8, rpc_timeout=5
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
