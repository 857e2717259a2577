"""Processes with names: they meet, call each other by RPC, and end together."""

import contextlib
import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
import torch.distributed.rpc as rpc

BEAT = 0.5  # seconds between two signs of life of a process
DEAD_AFTER = 10.0  # a process that gave none for so many seconds counts as dead
NAMED = 3  # exit status of a process that has said, or noted, who is missing
FAREWELL = 3.0  # seconds that the store's host stays, so that all hear who is missing
TIME_TO_SAVE = 30.0  # seconds that a process has for what it does before that end
LOOPBACK = "127.0.0.1"
watches: list["Watch"] = []  # this process's own, once it has joined
# What this process still does when its watch is about to end it.
before_the_end: list[Callable[[], None]] = []


class PortTaken(OSError):
    """Somebody else listens where we wanted to."""


def spoken(name: str) -> str:
    """Write a process's RPC name for people: `trainer0` is trainer 0."""
    return name.replace("_", " ").replace("trainer", "trainer ")


def say(name: str, text: str) -> None:
    """Print a line that says who speaks."""
    print(f"{spoken(name)}: {text}", flush=True)


def host_store(address: str, port: int = 0) -> dist.TCPStore:
    """Start a store, a small server of names and values, at one address only.

    `TCPStore` by itself would listen on every network of the machine. It takes a
    socket that already listens, and this one listens at `address` alone. With port 0
    the system chooses a free one, and nobody can take it in between.
    """
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise PortTaken(f"cannot listen at {address}:{port}: {reason}") from None
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, patience: float) -> dist.TCPStore:
    """Connect to another process's store; `patience` in seconds.

    Raises:
        TimeoutError: nobody listened there for that long.
    """
    # A plain socket knocks first: TCPStore fills the screen while it waits.
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, port), timeout=2).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.2)
    return dist.TCPStore(
        address, port, is_master=False, timeout=timedelta(seconds=DEAD_AFTER)
    )


def own_address(store: dist.TCPStore) -> str:
    """Return this machine's address as seen on the way to a store."""
    with socket.create_connection((store.host, store.port)) as connection:
        return connection.getsockname()[0]


def roll_call(store: dist.Store, name: str, names: list[str], patience: float) -> None:
    """Say that `name` is here and wait for all others.

    Raises:
        TimeoutError: with the names of those who did not come.
    """
    store.set(f"beat {name}", "0")
    deadline = time.monotonic() + patience
    while missing := [n for n in names if not store.check([f"beat {n}"])]:
        if time.monotonic() > deadline:
            raise TimeoutError(", ".join(map(spoken, missing)))
        time.sleep(0.1)


class Watch(threading.Thread):
    """Give signs of life, and end this process when another one has stopped to.

    RPC itself does not tell that a process has died, only that some call failed. Who
    waits for a process that lives on after such a failure, or for a machine that has
    vanished, waits for minutes. A thread can end this process whatever its others are
    waiting for.
    """

    def __init__(
        self, name: str, names: list[str], store: dist.TCPStore, host: str, quiet: bool
    ) -> None:
        """Take the store, which must be a connection of this thread's own."""
        super().__init__(daemon=True)
        self.me, self.store, self.host, self.quiet = name, store, host, quiet
        self.others = [other for other in names if other != name]
        self.over = threading.Event()

    def run(self) -> None:
        """Write this process's count, read the others', see whose stands still."""
        parent = os.getppid()
        heard = {other: ("", time.monotonic()) for other in self.others}
        count = 0
        while not self.over.wait(BEAT):
            count += 1
            try:
                self.store.set(f"beat {self.me}", str(count))
                beats = self.store.multi_get([f"beat {name}" for name in self.others])
                if not self.quiet and self.store.check(["missing"]):
                    self.end(self.store.get("missing").decode())
            except RuntimeError:
                self.end(self.host)
            if self.quiet and os.getppid() != parent:
                self.end(self.host)
            now = time.monotonic()
            for other, beat in zip(self.others, map(bytes.decode, beats), strict=True):
                if beat != heard[other][0]:
                    heard[other] = (beat, now)
                elif beat != "done" and now - heard[other][1] > DEAD_AFTER:
                    self.end(other)

    def end(self, missing: str) -> NoReturn:
        """Name who is missing, and leave, whatever this process is waiting for."""
        with contextlib.suppress(RuntimeError):
            self.store.set("missing", missing)
        if not self.quiet:  # or else the launcher speaks for everybody
            say(self.me, f"{spoken(missing)} has died or cannot be reached; ending")
        for act in before_the_end:
            # In a thread of its own: a disk that hangs must not keep this process.
            last = threading.Thread(target=act, daemon=True)
            last.start()
            last.join(TIME_TO_SAVE)
        if self.me == self.host:
            # The store ends with this process. Nobody shall name the wrong one.
            time.sleep(FAREWELL)
        os._exit(NAMED)


def wait_for_the_watch() -> None:
    """Sleep long enough to be ended, if somebody else has died.

    Call this where an exception arrives: most likely it comes of that death, and the
    launcher is about to end this process, or the watch to say who it was.
    """
    for watch in watches:
        watch.join(3.0 if watch.quiet else DEAD_AFTER + FAREWELL + 4 * BEAT)


@contextlib.contextmanager
def joined(
    name: str,
    names: list[str],
    store: dist.TCPStore,
    address: str,
    host: str = "the launcher",
    patience: float = 60.0,
) -> Iterator[None]:
    """Be `name` among `names`, which is also the order of their RPC ranks.

    Inside, all of them can call each other. Leaving waits until all want to leave.

    Args:
        name: this process.
        names: all processes, the same list in each.
        store: where they meet.
        address: where `store` listens. If it is loopback, RPC stays there too.
        host: who holds the store.
        patience: seconds to wait for the others to come.

    Raises:
        TimeoutError: with the names of those who did not come.
    """
    if address == LOOPBACK:
        # Without these, both would listen at whatever address the host name has.
        loopback = next(n for _, n in socket.if_nameindex() if n in ("lo", "lo0"))
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    roll_call(store, name, names, patience)
    launched = host == "the launcher"
    watch = Watch(name, names, reach_store(address, store.port, 5), host, launched)
    watches.append(watch)
    watch.start()
    rank, world_size = names.index(name), len(names)
    # init_rpc wants an address to meet at. We have met already: hand it our store.
    dist.register_rendezvous_handler(
        "store",
        lambda *_, **__: iter([(dist.PrefixStore("rpc", store), rank, world_size)]),
    )
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="store://", num_worker_threads=4, rpc_timeout=60
    )
    try:
        rpc.init_rpc(
            name, rank=rank, world_size=world_size, rpc_backend_options=options
        )
        yield
        rpc.shutdown()
        if dist.is_initialized():  # trainers are in a group besides
            dist.destroy_process_group()
    except Exception:
        wait_for_the_watch()
        traceback.print_exc()
        os._exit(1)
    watch.over.set()
    watch.join()
    store.set(f"beat {name}", "done")
    if host == name:
        # The store ends with this process, and the others still look into it.
        with contextlib.suppress(RuntimeError):
            while watch.store.multi_get([f"beat {n}" for n in watch.others]) != [
                b"done"
            ] * len(watch.others):
                time.sleep(0.05)
