"""Exercise: a server that answers only when all trainers have sent their gradients.

Run: python 04_rpc_parameter_server/exercises/waiting_server.py
Expect: what is still wrong with the answers to the trainers; at last a `check:`.
"""

from typing import Any  # noqa: F401 (for your answer)

import torch

from check_waiting_server import check_waiting_server
from rpc_between_ranks import CountingLock

Weights = torch.futures.Future[torch.Tensor]


class Server:
    """The weights, and what has come in for the step that is being collected."""

    def __init__(self, weights: torch.Tensor, trainers: int, lr: float) -> None:
        """Start with these weights, and nothing collected."""
        self.weights, self.trainers, self.lr = weights, trainers, lr
        self.lock = CountingLock()
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


if __name__ == "__main__":
    check_waiting_server(Server)
