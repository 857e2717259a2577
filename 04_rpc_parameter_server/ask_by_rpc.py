"""Start the processes of an exercise, and ask each what is wrong with an answer.

It is simpler than `world.py`, and ends even where calls hang: nobody says good-bye.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

Judge = Callable[[str, dist.Store], str]


class NotedLock:
    """A lock that counts how often it was taken."""

    def __init__(self) -> None:
        """Make it; nobody holds it."""
        self.lock, self.times = threading.Lock(), 0

    def __enter__(self) -> "NotedLock":
        """Wait for it, and count."""
        self.lock.acquire()
        self.times += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Let it go."""
        self.lock.release()


def open_loopback_rpc(number: int, names: list[str], folder: str) -> None:
    """Meet the others at a file, and stay at 127.0.0.1."""
    os.environ["TP_SOCKET_IFNAME"] = next(
        name for _, name in socket.if_nameindex() if name in ("lo", "lo0")
    )
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc", num_worker_threads=8, rpc_timeout=5
    )
    name, world_size = names[number], len(names)
    rpc.init_rpc(name, rank=number, world_size=world_size, rpc_backend_options=options)


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def be_one_process(
    number: int, names: list[str], port: int, folder: str, judge: Judge
) -> None:
    """Be one process: join, let `judge` look, leave its words at the store."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    limit = timedelta(minutes=1)  # to meet
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    open_loopback_rpc(number, names, folder)
    store.set(names[number], judge(names[number], store) or "right")
    store.wait(names)  # until then the others may call
    # rpc.shutdown would wait for calls that a wrong answer has left under way.
    sys.stdout.flush()
    os._exit(0)


def ask_every_process(judge: Judge, names: list[str]) -> None:
    """Let `judge` look at the answer in every process; unless all say nothing, end."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # connections end without farewell
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = names, store.port, folder, judge
        mp.spawn(be_one_process, arguments, nprocs=len(names))
    found = {name: store.get(name).decode() for name in names}
    wrong = {name: text for name, text in found.items() if text != "right"}
    for name, text in wrong.items():
        print(textwrap.fill(f"{name}: {text}", 88, subsequent_indent="    "))
    if wrong:
        sys.exit(1)
