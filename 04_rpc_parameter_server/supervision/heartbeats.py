"""Heartbeats: every process of a run learns when another one has died, and ends.

No lesson needs it to be read; the page of supervision/ explains it. Heartbeats are
counts in a store, a small server of names and values that one of the processes holds.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

LAUNCHER = "the launcher"  # holds the store where one command has started everything
BEAT = 0.5  # seconds between two heartbeats of a process
DEAD_AFTER = 10.0  # a process that gave none for so many seconds counts as dead
STATUS = 3  # exit status of a process that ends because another one is missing
FAREWELL = 3.0  # seconds that the store's host stays, so that all find who is missing
TIME_TO_SAVE = 30.0  # seconds that a process has to save, once another one is missing


def spoken(name: str) -> str:
    """Write a process's RPC name for people: `trainer0` is trainer 0."""
    return name.replace("_", " ").replace("trainer", "trainer ")


def say_as(name: str, text: str) -> None:
    """Print a line that says who speaks; whoever listened may be gone."""
    with contextlib.suppress(OSError):
        print(f"{spoken(name)}: {text}", flush=True)


def host_store(address: str, port: int = 0) -> dist.TCPStore:
    """Start a store at one address only; with port 0 the system chooses a free one.

    `TCPStore` by itself would listen on every network of the machine. It takes a socket
    that listens already, and this one listens at `address` alone.
    """
    listener = socket.create_server((address, port))
    port = listener.getsockname()[1]
    own: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(address, port, **own, master_listen_fd=listener.detach())


def reach_store(address: str, port: int, patience: float) -> dist.TCPStore:
    """Connect to another process's store, or raise TimeoutError after `patience` s.

    If what listens there is no store, and does not answer, this waits without an end.
    """
    deadline = time.monotonic() + patience
    while True:  # a plain socket knocks first: TCPStore fills the screen while it waits
        try:
            socket.create_connection((address, port), timeout=2).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.2)
    limit = timedelta(seconds=DEAD_AFTER)
    return dist.TCPStore(address, port, is_master=False, timeout=limit)


def roll_call(store: dist.Store, name: str, names: list[str], patience: float) -> None:
    """Wait for all others, or raise TimeoutError with those who did not come."""
    store.set(f"beat {name}", "0")
    deadline = time.monotonic() + patience
    while missing := [n for n in names if not store.check([f"beat {n}"])]:
        if time.monotonic() > deadline:
            raise TimeoutError(", ".join(map(spoken, missing)))
        time.sleep(0.1)


class Heartbeat(threading.Thread):
    """Give heartbeats, and end this process when another one has stopped to.

    RPC does not tell that a process has died, only that some call failed. Who waits for
    a process that lives on after such a failure, or for a machine that has vanished,
    waits for minutes; a thread can end it whatever it is waiting for.
    """

    def __init__(self, name: str, names: list[str], store: dist.TCPStore, host: str):
        """Use a store, a connection of this thread's own; `host` holds it."""
        super().__init__(daemon=True)
        self.me, self.store, self.host = name, store, host
        self.others = [other for other in names if other != name]
        self.over = threading.Event()
        self.last_act: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Write this process's count, read the others', see whose stands still."""
        heard = {other: (b"", 0.0) for other in self.others}  # and seconds of silence
        count, now = 0, time.monotonic()
        while not self.over.wait(BEAT):
            count += 1
            try:
                self.store.set(f"beat {self.me}", str(count))
                beats = self.store.multi_get([f"beat {name}" for name in self.others])
            except RuntimeError:
                self.end(self.host)
            # While this process, or the store, stood still, perhaps with the whole
            # machine, nobody could be heard: that is no silence of the others.
            before, now = now, time.monotonic()
            passed = min(now - before, 2 * BEAT)
            for other, beat in zip(self.others, beats, strict=True):
                known, silence = heard[other]
                heard[other] = beat, silence + passed if beat == known else 0.0
                if beat != b"done" and heard[other][1] > DEAD_AFTER:
                    self.end(other)

    def end(self, missing: str) -> NoReturn:
        """Name who is missing, save, and leave, whatever this process waits for."""
        say_as(self.me, f"{spoken(missing)} has died or cannot be reached; ending")
        # In a thread of its own: a disk that hangs must not keep this process.
        last = threading.Thread(target=self.last_act, daemon=True)
        last.start()
        last.join(TIME_TO_SAVE)
        if self.me == self.host:
            time.sleep(FAREWELL)  # the store ends with this process
        os._exit(STATUS)


def own_heartbeat() -> Heartbeat | None:
    """Return this process's heartbeat, if it is supervised."""
    threads = (t for t in threading.enumerate() if isinstance(t, Heartbeat))
    return next(threads, None)


def wait_to_be_ended() -> None:
    """Wait long enough to be ended, if what failed here failed because of a death."""
    if heartbeat := own_heartbeat():
        limit = DEAD_AFTER + FAREWELL + 4 * BEAT
        heartbeat.join(3.0 if heartbeat.host == LAUNCHER else limit)
