"""Check the steps of two trainers, and say in words which of them are lost."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ask_ranks import ask_ranks, in_words
from ranks import read_options
from rpc_between_ranks import GuardedTable, open_rpc

# Both trainers change row 0, and each a row of its own, which it names twice. A step
# adds 1 to a row each time the row is named.
NAMES = ["server", "trainer1", "trainer2"]
STEPS, LR = 20, 0.5
# These two are the server's. RPC serves calls in several threads at once; who changes
# the table in one of them says so: `with TABLE_LOCK:`.
ROWS = torch.zeros(3, 4)
TABLE, TABLE_LOCK = ROWS.as_subclass(GuardedTable), GuardedTable.lock
StepOnServer = Callable[[torch.Tensor, torch.Tensor], None]


def check_lost_steps(answer: StepOnServer) -> None:
    """Start a server and two trainers, and let both try the answer."""
    read_options()
    claim = f"all {2 * STEPS} steps of two trainers are in the table"
    ask_ranks(try_with_rpc, answer, len(NAMES), claim)


def try_with_rpc(answer: StepOnServer) -> str:
    """Join RPC, and try the answer."""
    rank = dist.get_rank()
    open_rpc(NAMES[rank], rank, len(NAMES))
    return try_steps(answer)


def table_at_the_end() -> torch.Tensor:
    """Return the table; runs on the server."""
    return ROWS


def unlocked_uses() -> int:
    """Tell how often the table was used without its lock; runs on the server."""
    return GuardedTable.unlocked


def explain_table(found: torch.Tensor, own: int) -> str:
    """Say in words which steps are missing, or nothing."""
    rows = [set(row) for row in found.tolist()]
    if any(len(row) > 1 for row in rows):
        return (
            "the numbers in a row differ, though all get the same gradient: did both "
            "trainers change it, without the lock?"
        )
    shared, mine = rows[0].pop(), rows[own].pop()
    if shared == mine == 0:
        return f"none of {2 * STEPS} steps has reached the server's table"
    if shared < 0:
        return "row 0 moved the wrong way: a step subtracts LR times the gradient"
    if shared < 2 * STEPS:
        return (
            f"row 0, which both trainers change, has {shared:g} of {2 * STEPS} steps: "
            "somebody read it, then the other wrote it, then the first overwrote that. "
            "A lock in a trainer's process would lock nobody else"
        )
    if mine == STEPS:
        return (
            f"row {own} has {mine:g} of {2 * STEPS} steps: its number comes twice in a "
            "call, and counts once"
        )
    if (shared, mine) != (2 * STEPS, 2 * STEPS):
        return f"rows 0 and {own} hold {shared:g} and {mine:g}, not {2 * STEPS} each"
    return ""


def try_steps(answer: StepOnServer) -> str:
    """Be the server, or a trainer that takes its steps; say what came of them."""
    own, call, calls, failed = dist.get_rank(), rpc.rpc_sync, 0, ""
    call_async, remote, to_here = rpc.rpc_async, rpc.remote, rpc.PyRRef.to_here
    futures, created = list[Any](), dict[int, Any]()
    trainers: Any = dist.new_group([1, 2])
    if own == 0:
        dist.barrier()  # the server answers calls until both trainers have looked
        return ""

    def call_and_wait(*args: Any, **kwargs: Any) -> Any:
        """Let no trainer make its second call before both have made their first."""
        nonlocal calls
        result = call(*args, **kwargs)
        calls += 1
        if calls == 1:
            dist.barrier(trainers)
        return result

    def call_and_keep(*args: Any, **kwargs: Any) -> Any:
        """Keep the future, to see whether anybody waits for it."""
        futures.append(call_async(*args, **kwargs))
        return futures[-1]

    def remote_and_keep(*args: Any, **kwargs: Any) -> Any:
        """Keep the future of a result that stays on the server."""
        rref = remote(*args, **kwargs)
        created[id(rref)] = rref._get_future()
        futures.append(created[id(rref)])
        return rref

    def to_here_and_wait(rref: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for that future too, whose message may come after the result."""
        result = to_here(rref, *args, **kwargs)
        if id(rref) in created:
            created[id(rref)].wait()
        return result

    numbers = torch.tensor([0, own, own])
    try:
        patched: Any = {"rpc_sync": call_and_wait, "rpc_async": call_and_keep}
        patched |= {"remote": remote_and_keep}
        with (
            mock.patch.multiple(rpc, **patched),
            mock.patch.object(rpc.PyRRef, "to_here", to_here_and_wait),
        ):
            for _ in range(STEPS):
                answer(numbers, torch.full((3, 4), -1 / LR))
                if not all(future.done() for future in futures):
                    failed = "a step returns before its call has: who waits for it?"
        torch.futures.wait_all(futures)
    except Exception as error:
        reason = str(error).partition(":\n")[2]  # RPC says first where it was
        failed = in_words(error)
        if "On WorkerInfo(" in str(error):
            failed = f"a call ended with: {reason.splitlines()[0]}"
    if calls == 0:
        dist.barrier(trainers)
    dist.barrier(trainers)  # both have taken their last step
    if not failed:
        failed = explain_table(call("server", table_at_the_end), own)
    if not failed and call("server", unlocked_uses):
        failed = (
            "no step is missing this time, but who uses the table has not locked it"
        )
    dist.barrier()
    return failed
