"""Run small functions on several gloo ranks without paying for an import each time.

A `WorkerPool` keeps processes that have imported torch. `pool.run(function)`
gives each of them a rank in a fresh process group and returns what the ranks return.

The function must be importable: defined at the top level of a test file or of a
module on `sys.path`. It is pickled by name, and each worker imports that module
with the parent's `sys.path`, once; the module's globals live as long as the worker,
so a function should not leave anything there. A chapter's module that a test file
loads by path is loaded again in the worker when it imports the test file. Results
travel by pickle: return tensors, numbers, lists and dicts rather than objects whose
class the parent cannot import.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from launch import clean_environment

# Seconds for a worker to import torch, and then for a job to import its module, on a
# machine with much else to do.
START_TIMEOUT = 120.0
# Seconds that the other ranks get to end by themselves after one has failed.
GRACE = 3.0
# Seconds to leave a process group and put everything back.
LEAVE_TIMEOUT = 30.0
# A collective gives up before the run does: then the ranks that only waited have
# ended with an error, and those still running are the ones that hang.
GROUP_TIMEOUT_SHARE = 0.7
# What gloo and the store say to a rank whose peer failed, left or never came.
CONSEQUENCES = (
    *("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting"),
    *("monitoredBarrier", "wait timeout", "Wait timeout"),
)


# All workers are forked from one process, which has imported these for them.
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["torch.distributed.nn", "torch._dynamo", "deepspeed"]
IMPORTED += ["deepspeed.runtime.zero.muon.muon_optimizer"]
IMPORTED += ["transformers.models.qwen2.modeling_qwen2"]
# And these, since every worker imports the test files.
IMPORTED += ["pytest", "markdown_it", "matplotlib.pyplot", "torch.utils.tensorboard"]
IMPORTED += ["torch.distributed.optim", "torch.distributed.pipelining"]
IMPORTED += ["torch.distributed.tensor.debug"]
if sys.platform == "linux":  # elsewhere some libraries do not survive a fork
    FORKS.set_forkserver_preload(IMPORTED)


class RankFailure(Exception):
    """Something went wrong on at least one rank."""


class RankError(RankFailure):
    """A rank raised; `rank` is the first, `traceback` its traceback as text."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        """Keep the rank and its traceback beside the message."""
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


class RankTimeout(RankFailure):
    """The ranks in `ranks` did not end in time; the message holds their stacks."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        """Keep the ranks beside the message."""
        super().__init__(message)
        self.ranks = ranks


class RankDied(RankFailure):
    """The process of `rank` ended; a negative `exitcode` is a signal's number."""

    def __init__(self, message: str, rank: int, exitcode: int) -> None:
        """Keep the rank and its exit code beside the message."""
        super().__init__(message)
        self.rank, self.exitcode = rank, exitcode


class Job(NamedTuple):
    """What a worker needs to know for one run."""

    rank: int
    world_size: int
    store: str
    group_timeout: float
    path: list[str]
    call: bytes


class Reply(NamedTuple):
    """What became of a job: `kind` is result, error, died or, before it runs, idle.

    `value` is a pickled result, a traceback or an exit code. `when` is the
    machine's monotonic clock, which all ranks share.
    """

    kind: str
    value: Any = None
    is_consequence: bool = False
    when: float = 0.0


class WorkerPool:
    """Warm processes, started when first needed, that run functions on gloo ranks.

    `max_ranks` workers are kept between runs. A larger world starts the others for
    that run only.
    """

    def __init__(self, max_ranks: int = 4) -> None:
        """Start nothing yet."""
        self.max_ranks = max_ranks
        self._folder = Path(tempfile.mkdtemp(prefix="worker_pool_"))
        self._workers: list[_Worker] = []
        self._runs = 0

    def __enter__(self) -> "WorkerPool":
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in the order of the ranks they are given."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers and remove their files."""
        self._stop(self._workers)
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 300,
    ) -> list[Any]:
        """Run `function(*args)` on every rank and return the results in rank order.

        Each rank has a fresh default process group on gloo, RANK, WORLD_SIZE,
        LOCAL_RANK and LOCAL_WORLD_SIZE in its environment, one thread and seed 0.
        A collective that waits for more than 0.7 of `timeout` fails. The time begins
        when every rank has imported the function's module. What the ranks print is
        printed here, with the rank in front of each line.

        Raises:
            RankError: A rank raised; the first to do so is named.
            RankDied: The process of a rank ended, also while it left the group.
            RankTimeout: A rank did not end within `timeout` seconds.
        """
        call = pickle.dumps((function, args))
        workers = self._warm(world_size)
        try:
            results = self._run(workers, call, timeout)
        finally:
            # Also after an interrupt: whoever still has a job must not keep it.
            extra = self._workers[self.max_ranks :]
            self._stop([one for one in workers if one.is_busy or one in extra])
        return results

    def _warm(self, world_size: int) -> list["_Worker"]:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self._stop([one for one in self._workers if one.exit_code is not None])
        self._runs += 1
        while len(self._workers) < world_size:
            name = f"worker-{self._runs}-{len(self._workers)}.log"
            self._workers.append(_Worker(self._folder / name))
        workers = self._workers[:world_size]
        for worker in workers:
            if not worker.wait_until_idle(START_TIMEOUT):
                raise RankFailure(f"a worker did not start:\n{worker.take_output()}")
        return workers

    def _stop(self, workers: list["_Worker"]) -> None:
        for worker in workers:
            worker.kill()
        self._workers = [one for one in self._workers if one not in workers]

    def _run(self, workers: list["_Worker"], call: bytes, timeout: float) -> list[Any]:
        store = str(self._folder / f"store-{self._runs}")
        limit = GROUP_TIMEOUT_SHARE * timeout
        for rank, worker in enumerate(workers):
            worker.send(Job(rank, len(workers), store, limit, sys.path, call))
        for rank, worker in enumerate(workers):
            # A worker that died meanwhile is found when the replies are.
            if not worker.wait_until_idle(START_TIMEOUT) and worker.exit_code is None:
                self._stop(workers)
                raise RankFailure(f"rank {rank} did not import its function in time")
        for worker in workers:
            worker.send(None)
        replies = _collect(workers, time.monotonic() + timeout)
        hung = {rank: one for rank, one in enumerate(workers) if rank not in replies}
        for worker in hung.values():
            worker.dump_stacks()
            worker.kill()
        # Ranks that returned still hold their group, because a rank that leaves
        # early makes errors for the others. Now all may leave.
        for rank in replies:
            workers[rank].send(None)
        for rank, reply in replies.items():
            if not workers[rank].wait_until_idle(LEAVE_TIMEOUT):
                replies[rank] = workers[rank].failure_to_leave(reply)
        output = _labelled_output(workers)
        failure = _failure(replies, sorted(hung), timeout, output)
        if failure is not None:
            raise failure
        print(output, end="")
        return [pickle.loads(replies[rank].value) for rank in range(len(workers))]


class _Worker:
    """The parent's side of one process: jobs go in, replies come out."""

    def __init__(self, log: Path) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.is_busy = True
        self._log = log
        log.touch()
        # For the process from which all workers are forked, when it starts, and so for
        # them. DeepSpeed looks for an accelerator while it is imported.
        environment = clean_environment(DS_ACCELERATOR="cpu")
        with mock.patch.dict(os.environ, environment, clear=True):
            forkserver.ensure_running()
        with theirs:
            self.process = FORKS.Process(target=serve, args=(theirs, log))
            self.process.start()
        self.pid: Any = self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process lives."""
        return self.process.exitcode

    def send(self, message: Job | None) -> None:
        # A worker that has just died is noticed when its reply is read.
        with contextlib.suppress(OSError):
            self.is_busy = True
            self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> Reply | None:
        """Return what has arrived, if anything; the end of the process counts."""
        # In this order: a reply written just before the end is still read.
        ended = self.exit_code is not None
        try:
            if self.pipe.poll():
                return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            ended = True
        if not ended:
            return None
        self.process.join()
        return Reply("died", self.exit_code, when=time.monotonic())

    def wait_until_idle(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_busy and time.monotonic() < deadline:
            wait([self.pipe], timeout=0.05)
            reply = self.receive()
            if reply is not None and reply.kind == "died":
                return False
            self.is_busy = reply is None
        return not self.is_busy

    def failure_to_leave(self, reply: Reply) -> Reply:
        """Return what failed if the group could not be left: first of all the job."""
        if reply.kind != "result":
            return reply
        if self.exit_code is not None:
            return Reply("died", self.exit_code, when=time.monotonic())
        self.dump_stacks()
        text = f"still leaving its group after {LEAVE_TIMEOUT:g} s"
        return Reply("error", text, when=time.monotonic())

    def dump_stacks(self) -> None:
        """Make faulthandler write where every thread of the worker is."""
        before = self._log.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        written = before
        # The writing takes a moment and has no end mark.
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, written = written, self._log.stat().st_size
            if before < last == written:
                return

    def take_output(self) -> str:
        text = self._log.read_bytes().decode(errors="replace")
        # The worker appends, so it goes on at the new beginning.
        os.truncate(self._log, 0)
        return text

    def kill(self) -> None:
        # The group is gone if the worker and all its children have ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # it may not yet have made its group
        self.process.join()
        self.pipe.close()


def _collect(workers: list[_Worker], deadline: float) -> dict[int, Reply]:
    """Return one reply per rank; a rank that still ran at the end has none."""
    replies: dict[int, Reply] = {}
    while len(replies) < len(workers) and time.monotonic() < deadline:
        waiting = {rank: one for rank, one in enumerate(workers) if rank not in replies}
        wait([worker.pipe for worker in waiting.values()], timeout=0.05)
        for rank, worker in waiting.items():
            reply = worker.receive()
            if reply is None:
                continue
            replies[rank] = reply
            # A rank that failed by itself ends the run soon. One that only lost
            # its peers does not: the peer may still hang, and is then to be named.
            if reply.kind != "result" and not reply.is_consequence:
                deadline = min(deadline, time.monotonic() + GRACE)
    return replies


def _failure(
    replies: dict[int, Reply], hung: list[int], timeout: float, output: str
) -> RankFailure | None:
    """Return the exception for a run, or None if every rank returned a result.

    The first own error comes before a death, a death before a hang, and all of
    them before the errors of ranks that only waited for the others.
    """
    failed = {rank: one for rank, one in replies.items() if one.kind != "result"}
    if not failed and not hung:
        return None

    def importance(rank: int) -> tuple[bool, bool, float]:
        reply = failed[rank]
        return reply.is_consequence, reply.kind == "died", reply.when

    order = sorted(failed, key=importance)
    notes = [f"rank {rank} {_summary(failed[rank])}" for rank in order]
    notes += [f"rank {rank} was still running and was killed" for rank in hung]
    first = failed[order[0]] if order else None
    if first is None or (first.is_consequence and hung):
        ranks = " and ".join(f"rank {rank}" for rank in hung)
        head = f"{ranks} did not end within {timeout:g} s"
        return RankTimeout("\n".join([head, *notes, output]), hung)
    rest = "\n".join([*notes[1:], output])
    if first.kind == "died":
        head = f"rank {order[0]} {_summary(first)}"
        return RankDied(f"{head}\n{rest}", order[0], first.value)
    head = f"rank {order[0]} raised\n{first.value}"
    return RankError(f"{head}\n{rest}", order[0], first.value)


def _summary(reply: Reply) -> str:
    if reply.kind == "error":
        how = "failed as a consequence" if reply.is_consequence else "raised"
        return f"{how}: {reply.value.strip().splitlines()[-1]}"
    if reply.value < 0:
        return f"died of signal {signal.Signals(-reply.value).name}"
    return f"died with exit code {reply.value}"


def _labelled_output(workers: list[_Worker]) -> str:
    return "".join(
        f"[rank {rank}] {line}\n"
        for rank, worker in enumerate(workers)
        for line in worker.take_output().splitlines()
    )


# What follows runs in the workers.


def serve(pipe: Connection, log: Path) -> None:
    """Do one job after another until the parent kills this process or dies."""
    # Its own process group, so that its children are killed with it.
    os.setsid()
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
            # Otherwise what a rank printed would be lost when it dies.
            stream.reconfigure(line_buffering=True)  # pyright: ignore
    faulthandler.register(signal.SIGUSR1)
    del os.environ["DS_ACCELERATOR"]
    # What a job starts, it starts as its script would.
    multiprocessing.set_start_method(None, force=True)
    # Ranks on one machine need no more, and a network's name service may fail.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    # Imports make no garbage, and searches for it take a sixth of their time.
    gc.disable()
    # If a job imported it, it would keep that job's group as a default argument, for
    # the jobs that follow.
    import torch.distributed.nn  # noqa: F401

    modules = 0
    while True:
        # Each job ends with a search for garbage. It need not look at all of torch.
        if len(sys.modules) > modules:
            gc.freeze()
            modules = len(sys.modules)
        pipe.send_bytes(pickle.dumps(Reply("idle")))
        job: Job = pickle.loads(pipe.recv_bytes())
        with _fresh_state(job):
            # Here only for its imports: what it raises, it will raise in the job.
            with contextlib.suppress(BaseException):
                pickle.loads(job.call)
            pipe.send_bytes(pickle.dumps(Reply("idle")))
            pipe.recv_bytes()
            gc.enable()
            reply = _answer(job)
            gc.disable()
            pipe.send_bytes(pickle.dumps(reply))
            if reply.kind == "result":
                pipe.recv_bytes()
            _leave_all_groups()
        if reply.kind != "result":
            pipe.recv_bytes()


def _die_with_the_parent() -> None:
    """Wait for the end of the parent.

    A thread does it, for the main thread may be held in a collective.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _fresh_state(job: Job) -> Iterator[None]:
    """Give a job the same start as every other and undo what it changed."""
    import torch
    import torch.distributed as dist

    environment, folder = dict(os.environ), os.getcwd()
    sys.path[:] = job.path
    ranks = {"RANK": job.rank, "LOCAL_RANK": job.rank}
    sizes = {"WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": job.world_size}
    os.environ |= {name: str(number) for name, number in (ranks | sizes).items()}
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        dist.set_debug_level_from_env()


def _answer(job: Job) -> Reply:
    """Join the group and call the function; whatever it raises is a reply too."""
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            # A file needs no port.
            store=dist.FileStore(job.store, job.world_size),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.group_timeout),
        )
        # The function may leave the group, and others may still be connecting.
        dist.barrier()
        function, args = pickle.loads(job.call)
        return Reply("result", pickle.dumps(function(*args)))
    # SystemExit too: a function that exits has not returned a result.
    except BaseException as error:
        when = time.monotonic()
        waited = any(words in str(error) for words in CONSEQUENCES)
        is_consequence = isinstance(error, RuntimeError) and waited
        return Reply("error", traceback.format_exc(), is_consequence, when)


def _leave_all_groups() -> None:
    import torch.distributed as dist

    forget_meshes()
    # Collects what still refers to the group, such as a model under DDP.
    gc.collect()
    # A group that a rank failed to join counts all the same, and the next group of
    # this process would have another name than on other ranks, so that they would
    # wait for each other. Leaving a default group resets the count.
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


def forget_meshes() -> None:
    """Empty DTensor's caches: they keep meshes, and a mesh its groups.

    A later job with an equal mesh would get the groups of the job before.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    for one in gc.get_objects():
        if type(one).__name__ == "DeviceMesh":
            one._pg_registry.clear()
