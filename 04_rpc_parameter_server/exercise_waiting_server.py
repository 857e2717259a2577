"""An exercise: a server that answers only when all trainers have sent their gradients.

Run: python 04_rpc_parameter_server/exercise_waiting_server.py
Needs: this folder and an editor. Fill in `Server.push`. It runs on the CPU.
Expect: one line that says what is still wrong with the answers; at last a `check:`.
    Until then the script exits with status 1.
Before: 04_rpc_parameter_server/rpc_in_four_calls.py
Next: 04_rpc_parameter_server/asynchronous.py
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from ask_by_rpc import NotedLock, ask_every_process
from options import refuse

Weights = torch.futures.Future[torch.Tensor]


class Server:
    """The weights, and what has come in for the step that is being collected."""

    def __init__(self, weights: torch.Tensor, trainers: int, lr: float) -> None:
        """Start with these weights, and nothing collected."""
        self.weights, self.trainers, self.lr = weights, trainers, lr
        self.lock = NotedLock()
        self.sum, self.count = torch.zeros_like(weights), 0
        self.answer: Weights = torch.futures.Future()

    def push(self, gradient: torch.Tensor) -> Weights:
        """Take in one trainer's gradient, and return a future at once; yours to write.

        When every trainer has pushed, take one step by the mean of the gradients, and
        answer all of them with a copy of the new weights: `future.set_result(...)`. The
        next push belongs to the next step.

        RPC calls this in several threads at once: `with self.lock:` around what must
        not be disturbed. It sends the answer when the future has its result, so nobody
        has to wait in here.
        """
        answer: Weights = torch.futures.Future()
        answer.set_result(self.weights.clone())
        return answer


# What follows checks it. One process plays all trainers; the server cannot tell.
TRAINERS, STEPS, LR, PATIENCE = 3, 3, 0.5, 3.0
START = torch.tensor([10.0, 20.0])


def pushed_gradient(step: int, trainer: int) -> torch.Tensor:
    """Return what a trainer pushes; every sum of these is another one."""
    return torch.tensor([4.0**trainer, 100.0**step])


def push_and_note(server: Server, notes: list[bool], gradient: torch.Tensor) -> Any:
    """Call `push`; note, when it has returned, whether it was answered by then."""
    answered = False
    try:
        future = server.push(gradient)
        answered = isinstance(future, torch.futures.Future) and future.done()
    finally:
        notes.append(answered)
    return future


# Of the process that serves.
server = Server(START.clone(), TRAINERS, LR)
noted: list[bool] = []


@rpc.functions.async_execution
def push_here(gradient: torch.Tensor) -> Any:
    """Let the server of this process have a gradient."""
    return push_and_note(server, noted, gradient)


def notes_here() -> list[bool]:
    """Tell for each push so far whether it was answered at once."""
    return noted


def times_locked_here() -> int:
    """Tell how often the server's lock was taken."""
    return server.lock.times


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
    notes: Callable[[], list[bool]],
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


def judge_server(name: str, _: dist.Store) -> str:
    """Be the server, or all trainers."""
    if name == "server":
        return ""
    return try_server(
        lambda gradient: rpc.rpc_async("server", push_here, (gradient,), timeout=3),
        lambda: rpc.rpc_sync("server", notes_here),
        lambda: rpc.rpc_sync("server", times_locked_here),
    )


def main() -> None:
    """Try the exercise; say what the trainers got."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Check your waiting server.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    ask_every_process(judge_server, ["server", "trainers"])
    print(
        f"check: {STEPS} steps, each by the mean of {TRAINERS} gradients, for everyone"
    )


if __name__ == "__main__":
    main()
