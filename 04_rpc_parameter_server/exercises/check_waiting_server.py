"""Check a server that waits for all trainers, and say in words what is wrong."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ask_ranks import ask_ranks
from ranks import read_options
from rpc_between_ranks import open_rpc

# One process plays all trainers; the server cannot tell.
NAMES = ["server", "trainers"]
CASES = (3, 2)  # so many trainers
STEPS, LR, PATIENCE, PAUSE = 3, 0.5, 3.0, 0.05
START = torch.tensor([10.0, 20.0])


def check_waiting_server(answer: type) -> None:
    """Start a server and a process that plays all trainers."""
    read_options()
    claim = f"{STEPS} steps by the mean of all gradients, of 3 trainers and of 2"
    ask_ranks(try_with_rpc, answer, len(NAMES), claim)


def try_with_rpc(answer: type) -> str:
    """Join RPC, and try the answer."""
    rank = dist.get_rank()
    open_rpc(NAMES[rank], rank, len(NAMES))
    aside: Any = dist.new_group(timeout=timedelta(minutes=1))
    if rank == 0:
        # The first optimizer of a process imports much: no push shall be slow by that.
        torch.optim.SGD([torch.nn.Parameter(START.clone())], LR)
    dist.barrier(group=aside)
    return try_by_rpc(answer)


class Served:
    """What the process that serves has: a server, and a note for each push."""

    server: Any = None
    notes: tuple[bool, ...] = ()
    given: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # answers, and copies


def serve(answer: type, trainers: int) -> None:
    """Start a server for so many; who has released its lock waits for a moment."""
    Served.server = answer(START.clone(), trainers, LR)
    Served.server.lock.pause = PAUSE
    Served.notes = Served.given = ()


def push_to_server(gradient: torch.Tensor) -> Any:
    """Push a gradient as a trainer does; return the future of the answer."""
    return rpc.rpc_async("server", push_here, args=(gradient,), timeout=3)


@rpc.functions.async_execution
def push_here(gradient: torch.Tensor) -> Any:
    """Call `push`; note, when it has returned, whether it was answered by then."""
    answered = False
    try:
        future = Served.server.push(gradient)
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"push returned {type(future).__name__}, not a future")
        answered = future.done()
        if answered and isinstance(future.value(), torch.Tensor):
            Served.given += ((future.value(), future.value().clone()),)
    except Exception as error:
        future = torch.futures.Future()
        future.set_result(error)
    Served.notes += (answered,)
    return future


def notes_here() -> tuple[bool, ...]:
    """Tell for each push so far whether it was answered at once."""
    return Served.notes


def risk_here() -> str:
    """Say what went well only this time, or nothing."""
    if Served.server.lock.times < len(Served.notes):
        return "right this time, but not every push has taken the lock"
    if not all(torch.equal(given, copy) for given, copy in Served.given):
        return "right this time, but a later step changes what was answered: no copy?"
    return ""


def pushed_gradient(step: int, trainer: int) -> torch.Tensor:
    """Return what a trainer pushes; every sum of these is another one."""
    return torch.tensor([4.0**trainer, 100.0**step])


def explain_answer(
    found: object, step: int, before: torch.Tensor, trainers: int
) -> str:
    """Say what is wrong with the weights that a trainer got, or nothing."""
    if isinstance(found, Exception):
        return f"got no answer: {found!r}"
    if not isinstance(found, torch.Tensor):
        return f"got {type(found).__name__}, not the weights"
    totals = [
        torch.stack([pushed_gradient(s, trainer) for trainer in range(trainers)]).sum(0)
        for s in range(step + 1)
    ]
    total, last = totals[-1], pushed_gradient(step, trainers - 1)
    guesses = {
        "": total / trainers,
        "got weights that have not changed": total * 0,
        "got weights that moved by the sum of the gradients, not the mean": total,
        "got weights that moved the wrong way": -total / trainers,
        "got weights that only the last gradient has moved": last / trainers,
        "got weights that the gradients of earlier steps have moved again": (
            torch.stack(totals).sum(0) / trainers
        ),
    }
    for meaning, gradient in guesses.items():
        if torch.allclose(found, before - LR * gradient):
            return meaning
    return f"got {found.tolist()}, not {(before - LR * total / trainers).tolist()}"


def try_server(
    send: Callable[[torch.Tensor], Any], ask: Callable[[Callable], Any], trainers: int
) -> str:
    """Push for all trainers, some steps long; say what is wrong, or nothing.

    Args:
        send: pushes a gradient, and returns something to `wait` for.
        ask: calls a function of the server's process.
        trainers: how many the server waits for.
    """
    weights = START.clone()
    for step in range(STEPS):
        name, sent = f"{trainers} trainers, step {step + 1}", []
        if step == STEPS - 1 and (risk := ask(risk_here)):
            return risk
        for trainer in range(trainers):
            sent.append(send(pushed_gradient(step, trainer)))
            if step == STEPS - 1:
                continue  # now all at once
            deadline = time.monotonic() + PATIENCE
            while len(ask(notes_here)) < step * trainers + trainer + 1:
                if time.monotonic() > deadline:
                    return (
                        f"{name}: push has not returned to trainer {trainer} after "
                        f"{PATIENCE:g} s: does it wait, or hold its lock?"
                    )
                time.sleep(0.01)
            if ask(notes_here)[-1] and trainer < trainers - 1:
                return (
                    f"{name}: trainer {trainer} was answered before trainer "
                    f"{trainer + 1} had pushed"
                )
        if step == STEPS - 1:
            name += ", all at once"
        for trainer, future in enumerate(sent):
            try:
                found = future.wait()
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                if "timeout" in reason:
                    reason = "its future never got a result"
                return f"{name}: trainer {trainer} got no answer: {reason}"
            if text := explain_answer(found, step, weights, trainers):
                return f"{name}: trainer {trainer} {text}"
        total = sum(pushed_gradient(step, trainer) for trainer in range(trainers))
        weights = weights - LR * total / trainers
    return ""


def try_by_rpc(answer: type) -> str:
    """Be the server, or all trainers."""
    told = ""
    for trainers in CASES:
        if dist.get_rank() == 0:
            serve(answer, trainers)
        dist.barrier()
        if dist.get_rank() == 1 and not told:
            told = try_server(
                push_to_server, lambda asked: rpc.rpc_sync("server", asked), trainers
            )
        dist.barrier()  # the trainers are done
    return told
