"""Six ways in which a trainer can use a table that is in another process."""

import time
from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy, embedding_bag

from classifier import ROWS, WIDTH, Batch, EagerSGD, Table, dense_part
from row_server import call, make

LR = 0.1


class Line:
    """The trainer's end of the line to the server: calls, counted and timed."""

    def __init__(self, name: str, latency: float = 0.0, server: str = "server") -> None:
        """Have the server make a table; it will wait before each of its answers."""
        self.server, self.name = server, name
        self.bytes, self.waited = 0, 0.0  # the second in seconds
        self.dense = dense_part()
        self.optimizer = torch.optim.SGD(self.dense.parameters(), LR)
        rpc.rpc_sync(server, make, (name, ROWS, WIDTH, LR, latency))

    @cached_property
    def module(self) -> RemoteModule:
        """Another table on the server, for distributed autograd."""
        return RemoteModule(self.server, Table, (ROWS, WIDTH, 0))

    @cached_property
    def rows_optimizer(self) -> DistributedOptimizer:
        """What takes the steps of that table."""
        return DistributedOptimizer(EagerSGD, self.module.remote_parameters(), LR)

    def weight(self) -> torch.Tensor:
        """Fetch the table that was trained."""
        if "module" in vars(self):
            return self.module.remote_parameters()[0].to_here().detach()
        return self.wait(self.ask("all_rows"))

    def ask(self, method: str, *args: object) -> torch.futures.Future:
        """Send a call, without waiting for the answer."""
        for argument in args:
            parts = argument if isinstance(argument, tuple) else (argument,)
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return rpc.rpc_async(self.server, call, (self.name, method, *args))

    def wait(self, answer: torch.futures.Future) -> torch.Tensor:
        """Wait for an answer, and count for how long."""
        started = time.perf_counter()
        value = answer.wait()
        self.waited += time.perf_counter() - started
        self.bytes += value.nbytes if isinstance(value, torch.Tensor) else 0
        return value

    def learn(self, sums: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Do the trainer's own part of a step; return the loss."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.dense(sums), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def by_sums(line: Line, batches: list[Batch]) -> list[torch.Tensor]:
    """Let the server sum up each bag, and send it the gradients of these sums."""
    losses = []
    for step, (indices, offsets, labels) in enumerate(batches):
        sums = line.wait(line.ask("sums", step, indices, offsets)).requires_grad_()
        losses.append(line.learn(sums, labels))
        line.wait(line.ask("update_sums", step, sums.grad))
    return losses


def one_call(line: Line, batches: list[Batch]) -> list[torch.Tensor]:
    """Let one call carry the update of this batch and the lookup of the next."""
    losses = []
    sums = line.wait(line.ask("sums", 0, *batches[0][:2]))
    for step, (_, _, labels) in enumerate(batches):
        losses.append(line.learn(sums.requires_grad_(), labels))
        next_bags = [(step + 1, *batch[:2]) for batch in batches[step + 1 : step + 2]]
        sums = line.wait(line.ask("update_then_sums", step, sums.grad, *next_bags))
    return losses


def ahead(line: Line, batches: list[Batch]) -> list[torch.Tensor]:
    """Send that call a batch earlier, and compute while it is on its way."""
    losses, gradient = [], None
    sums = line.wait(line.ask("sums", 0, *batches[0][:2]))
    for step, (_, _, labels) in enumerate(batches):
        # It carries the gradients of the batch before and looks up for the batch after.
        # The update by this batch, whose gradients come below, is not in what it finds.
        next_bags = [(step + 1, *batch[:2]) for batch in batches[step + 1 : step + 2]]
        answer = line.ask("update_then_sums", step - 1, gradient, *next_bags)
        losses.append(line.learn(sums.requires_grad_(), labels))
        gradient = sums.grad
        sums = line.wait(answer)
    line.wait(line.ask("update_sums", len(batches) - 1, gradient))
    return losses


def by_rows(line: Line, batches: list[Batch]) -> list[torch.Tensor]:
    """Fetch each row that is needed once, and send its gradient back."""
    losses = []
    for indices, offsets, labels in batches:
        numbers, places = indices.unique(return_inverse=True)
        rows = line.wait(line.ask("some_rows", numbers)).requires_grad_()
        losses.append(
            line.learn(embedding_bag(places, rows, offsets, mode="sum"), labels)
        )
        line.wait(line.ask("update_rows", numbers, rows.grad))
    return losses


def by_table(line: Line, batches: list[Batch]) -> list[torch.Tensor]:
    """Fetch the whole table, and send back the gradients of the rows that have one."""
    losses = []
    for indices, offsets, labels in batches:
        table = line.wait(line.ask("all_rows")).requires_grad_()
        sums = embedding_bag(indices, table, offsets, mode="sum", sparse=True)
        losses.append(line.learn(sums, labels))
        assert table.grad is not None
        gradient = table.grad.coalesce()
        line.wait(line.ask("update_rows", gradient.indices()[0], gradient.values()))
    return losses


def by_autograd(line: Line, batches: list[Batch]) -> list[torch.Tensor]:
    """Leave everything to distributed autograd and the distributed optimizer."""
    losses = []
    for indices, offsets, labels in batches:
        marks = [time.perf_counter()]
        with dist_autograd.context() as context:
            sums = line.module(indices, offsets)
            marks.append(time.perf_counter())
            # When the gradient of the sums is there, the trainer's own part is done.
            sums.register_hook(lambda _, marks=marks: marks.append(time.perf_counter()))
            loss = cross_entropy(line.dense(sums), labels)
            dist_autograd.backward(context, [loss])
            gradients = dist_autograd.get_gradients(context)
            marks.append(time.perf_counter())
            for parameter in line.dense.parameters():
                parameter.grad = gradients[parameter]
            line.optimizer.step()
            marks.append(time.perf_counter())
            line.rows_optimizer.step(context)
            marks.append(time.perf_counter())
        line.waited += marks[1] - marks[0] + marks[3] - marks[2] + marks[5] - marks[4]
        line.bytes += indices.nbytes + offsets.nbytes + 2 * sums.nbytes
        losses.append(loss.detach())
    return losses


WAYS: dict[str, Callable[[Line, list[Batch]], list[torch.Tensor]]] = {
    "whole table": by_table,
    "rows": by_rows,
    "sums": by_sums,
    "autograd": by_autograd,
    "one call": one_call,
    "ahead": ahead,
}
