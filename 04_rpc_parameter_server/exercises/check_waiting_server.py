"""Check a server that waits for all trainers, and say in words what is wrong."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ask_ranks import ask_ranks
from ranks import read_options
from rpc_between_ranks import open_rpc

# One process plays all trainers; the server cannot tell.
NAMES = ["server", "trainers"]
TRAINERS, STEPS, LR, PATIENCE = 3, 3, 0.5, 3.0
START = torch.tensor([10.0, 20.0])


def check_waiting_server(answer: type) -> None:
    """Start a server and a process that plays all trainers."""
    read_options()
    claim = f"{STEPS} steps, each by the mean of {TRAINERS} gradients, for everyone"
    ask_ranks(try_with_rpc, answer, len(NAMES), claim)


def try_with_rpc(answer: type) -> str:
    """Join RPC, and try the answer."""
    rank = dist.get_rank()
    open_rpc(NAMES[rank], rank, len(NAMES))
    return try_by_rpc(answer)


class Served:
    """What the process that serves has: a server, and a note for each push."""

    server: Any = None
    notes: tuple[bool, ...] = ()


def push_to_server(gradient: torch.Tensor) -> Any:
    """Push a gradient as a trainer does; return the future of the answer."""
    return rpc.rpc_async("server", push_here, args=(gradient,), timeout=3)


@rpc.functions.async_execution
def push_here(gradient: torch.Tensor) -> Any:
    """Give a gradient to the server of this process, by a call of RPC."""
    return push_and_note(Served, gradient)


def pushed_gradient(step: int, trainer: int) -> torch.Tensor:
    """Return what a trainer pushes; every sum of these is another one."""
    return torch.tensor([4.0**trainer, 100.0**step])


def push_and_note(served: Any, gradient: torch.Tensor) -> Any:
    """Call `push`; note, when it has returned, whether it was answered by then."""
    answered = False
    try:
        future = served.server.push(gradient)
        answered = isinstance(future, torch.futures.Future) and future.done()
    finally:
        served.notes += (answered,)
    return future


def notes_here() -> tuple[bool, ...]:
    """Tell for each push so far whether it was answered at once."""
    return Served.notes


def times_locked_here() -> int:
    """Tell how often the server's lock was taken."""
    return Served.server.lock.times


def explain_answer(found: object, step: int, before: torch.Tensor) -> str:
    """Say what is wrong with the weights that a trainer got, or nothing."""
    if not isinstance(found, torch.Tensor):
        return f"got {type(found).__name__}, not the weights"
    gradients = [pushed_gradient(step, trainer) for trainer in range(TRAINERS)]
    total = torch.stack(gradients).sum(0)
    earlier = torch.stack(
        [pushed_gradient(s, t) for s in range(step) for t in range(TRAINERS)]
        or [total * 0]
    ).sum(0)
    guesses = {
        "": total / TRAINERS,
        "got weights that have not changed": total * 0,
        "got weights that moved by the sum of the gradients, not the mean": total,
        "got weights that moved the wrong way": -total / TRAINERS,
        "got weights that only the last gradient has moved": gradients[-1] / TRAINERS,
        "got weights that the gradients of earlier steps have moved again": (
            total + earlier
        )
        / TRAINERS,
    }
    for meaning, gradient in guesses.items():
        if torch.allclose(found, before - LR * gradient):
            return meaning
    return f"got {found.tolist()}, not {(before - LR * total / TRAINERS).tolist()}"


def try_server(
    send: Callable[[torch.Tensor], Any],
    notes: Callable[[], Sequence[bool]],
    times_locked: Callable[[], int],
) -> str:
    """Push for all trainers, some steps long; say what is wrong, or nothing.

    Args:
        send: pushes a gradient, and returns something to `wait` for.
        notes: tells for each push that has returned whether it was answered then.
        times_locked: tells how often the lock was taken.
    """
    weights = START.clone()
    for step in range(STEPS):
        name, sent = f"step {step + 1}", []
        for trainer in range(TRAINERS):
            sent.append(send(pushed_gradient(step, trainer)))
            deadline = time.monotonic() + PATIENCE
            while len(notes()) < step * TRAINERS + trainer + 1:
                if time.monotonic() > deadline:
                    return (
                        f"{name}: push has not returned to trainer {trainer} after "
                        f"{PATIENCE:g} s: does it wait, or hold its lock?"
                    )
                time.sleep(0.01)
            if notes()[-1] and trainer < TRAINERS - 1:
                return (
                    f"{name}: trainer {trainer} was answered before trainer "
                    f"{trainer + 1} had pushed"
                )
        for trainer, future in enumerate(sent):
            try:
                found = future.wait()
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                if "timeout" in reason:
                    reason = "its future never got a result"
                return f"{name}: trainer {trainer} got no answer: {reason}"
            if text := explain_answer(found, step, weights):
                return f"{name}: trainer {trainer} {text}"
        total = sum(pushed_gradient(step, trainer) for trainer in range(TRAINERS))
        weights = weights - LR * total / TRAINERS
    if times_locked() < STEPS * TRAINERS:
        return "right this time, but not every push has taken the lock"
    return ""


def try_by_rpc(answer: type) -> str:
    """Be the server, or all trainers."""
    if dist.get_rank() == 0:
        Served.server, Served.notes = answer(START.clone(), TRAINERS, LR), ()
        dist.barrier()
        dist.barrier()  # the trainers are done
        return ""
    dist.barrier()
    told = try_server(
        push_to_server,
        lambda: rpc.rpc_sync("server", notes_here),
        lambda: rpc.rpc_sync("server", times_locked_here),
    )
    dist.barrier()
    return told
