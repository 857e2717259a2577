"""Start a process for each name on this machine, and let none outlive the others."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch.distributed as dist

from meeting import LOOPBACK, NAMED, host_store, joined, reach_store, spoken


def be_launched(
    body: Callable[..., object], name: str, names: list[str], port: int, args: Any
) -> None:
    """Be one of the processes that `launch` starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        store = reach_store(LOOPBACK, port, 5)
        store.set("fork server", str(os.getppid()))
        with joined(name, names, store, LOOPBACK):
            body(name, store, *args)
    except (TimeoutError, dist.DistError):
        os._exit(NAMED)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until all processes have been started.

    In the middle of it there would be a process that nobody knows yet, and an import
    that Python reports with a traceback.
    """
    came: list[int] = []
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    old = {n: signal.signal(n, lambda got, _: came.append(got)) for n in numbers}
    # Who is started inherits this, and keeps it until it is ready to end. The process
    # that Python starts first lifts the block again: it has to be there already.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for number, handler in old.items():
            signal.signal(number, handler)
    if came:
        sys.exit(128 + came[0])


def launch(names: list[str], body: Callable[..., object], *args: Any) -> None:
    """Run `body(name, store, *args)` in a process for each name, on this machine.

    Returns when all have ended well. If one ends otherwise, it is named, the rest is
    killed, and this process exits with status 1. On Ctrl-C or SIGTERM all processes
    get SIGTERM and 5 seconds to save what they have.
    """
    # Each process shares the cores with all the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Or each process would report every connection that ends, in its own long words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    store = host_store(LOOPBACK)
    # The fork server imports torch once; each process is a fork of it, ready at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.nn", "torch.distributed.optim"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes = {
        name: context.Process(
            target=be_launched, args=(body, name, names, store.port, args), daemon=True
        )
        for name in names
    }
    try:
        with signals_wait():
            for process in processes.values():
                process.start()
        alive = {process.sentinel: name for name, process in processes.items()}
        while alive:
            for sentinel in wait(list(alive)):
                name = alive.pop(sentinel)  # pyright: ignore[reportArgumentType]
                processes[name].join()
                if processes[name].exitcode != 0:
                    end_all(name, processes[name].exitcode, store)
    except (KeyboardInterrupt, SystemExit) as reason:
        for process in processes.values():
            if process.pid is not None:
                process.terminate()
        deadline = time.monotonic() + 5
        for process in processes.values():
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
        sys.exit(reason.code if isinstance(reason, SystemExit) else 130)
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join()
        if store.check(["fork server"]):
            # It would end by itself, but take its time, with all of torch to tidy up.
            fork_server = int(store.get("fork server"))
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(fork_server, signal.SIGKILL)
                os.waitpid(fork_server, 0)


def end_all(name: str, exitcode: int | None, store: dist.Store) -> NoReturn:
    """Say who ended the run, and how; the caller kills the rest."""
    if exitcode == NAMED and store.check(["missing"]):
        name = store.get("missing").decode()
        how = "has given no sign of life"
    elif exitcode is not None and exitcode < 0:
        how = f"was killed by {signal.Signals(-exitcode).name}"
    else:
        how = f"ended with status {exitcode}"
    print(f"{spoken(name)} {how}; ending all others", file=sys.stderr, flush=True)
    sys.exit(1)
