"""An exercise: two trainers change one table, and some of their steps are lost.

Run: python 04_rpc_parameter_server/exercise_lost_steps.py
Needs: this folder and an editor. Repair `step_on_server`, with a function of
    your own that runs on the server. It runs on the CPU.
Expect: for each trainer a line about the steps that are missing in the table; at last
    a `check:`. Until then the script exits with status 1.
Before: 04_rpc_parameter_server/asynchronous.py
Next: 04_rpc_parameter_server/several_servers.py
"""

import argparse
import os
import signal
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ask_by_rpc import NotedLock, ask_every_process
from options import refuse

LR = 0.5
# These two are the server's. RPC serves calls in several threads at once; who changes
# the table in one of them says so: `with table_lock:`.
table = torch.zeros(3, 4)
table_lock = NotedLock()


def read_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Return some rows; runs on the server."""
    return table[numbers]


def write_rows(numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite some rows; runs on the server."""
    with table_lock:
        table[numbers] = rows


def step_on_server(numbers: torch.Tensor, gradient: torch.Tensor) -> None:
    """Take a step by SGD with some rows of the server's table; runs on a trainer.

    Args:
        numbers: row numbers, (n,). A row that is named twice gets both gradients.
        gradient: for each of these numbers, (n, 4).
    """
    rows = rpc.rpc_sync("server", read_rows, args=(numbers,))
    rpc.rpc_sync("server", write_rows, args=(numbers, rows - LR * gradient))


# What follows checks it. Both trainers change row 0, and each a row of its own, which
# it names twice. A step adds 1 to a row each time the row is named.
NAMES = ["server", "trainer0", "trainer1"]
STEPS = 20


def table_at_the_end() -> torch.Tensor:
    """Return the table; runs on the server."""
    return table


def times_locked() -> int:
    """Tell how often the table was locked; runs on the server."""
    return table_lock.times


def meet(store: dist.Store, place: str) -> None:
    """Wait until both trainers are here."""
    if store.add(place, 1) == 2:
        store.set(f"{place}, both", "")
    store.wait([f"{place}, both"])


def explain_table(found: torch.Tensor, own: int) -> str:
    """Say in words which steps are missing, or nothing."""
    rows = [set(row) for row in found.tolist()]
    if any(len(row) > 1 for row in rows):
        return "the numbers in a row differ, though all get the same gradient"
    shared, mine = rows[0].pop(), rows[own].pop()
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


def judge_steps(name: str, store: dist.Store) -> str:
    """Be the server, or a trainer that takes its steps; say what came of them."""
    if name == "server":
        return ""
    own = NAMES.index(name)
    numbers, call, calls = torch.tensor([0, own, own]), rpc.rpc_sync, 0

    def call_and_meet(*args: Any, **kwargs: Any) -> Any:
        """Let no trainer make its second call before both have made their first."""
        nonlocal calls
        answer = call(*args, **kwargs)
        calls += 1
        if calls == 1:
            meet(store, "first call")
        return answer

    try:
        with mock.patch.object(rpc, "rpc_sync", call_and_meet):
            for _ in range(STEPS):
                step_on_server(numbers, torch.full((3, 4), -1 / LR))
        failed = ""
    except RuntimeError as error:
        failed = f"a call ended with: {str(error).splitlines()[0]}"
    if calls == 0:
        meet(store, "first call")
    meet(store, "last step")
    if failed:
        return failed
    text = explain_table(call("server", table_at_the_end), own)
    if not text and call("server", times_locked) < 2 * STEPS:
        text = "no step is missing this time, but not every one has locked the table"
    meet(store, "looked")
    return text


def main() -> None:
    """Try the exercise with two trainers; say what each of them finds."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your step on the server.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    ask_every_process(judge_steps, NAMES)
    print(f"check: all {2 * STEPS} steps of two trainers are in the table")


if __name__ == "__main__":
    main()
