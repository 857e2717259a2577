"""Four ways in which several trainers can use the table of one server."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bags import bag_of_each
from classifier import ROWS, WIDTH, Batch, HybridModel, dense_part
from roles import SERVER
from row_server import RowServer


def call_alone(name: str, method: str, *args: object) -> torch.Tensor | None:
    """Do what a trainer asks of a `RowServer` in this process; let other calls wait.

    Calls are answered by several threads, and a tensor operation runs without Python's
    lock. Two that add to one row at the same time could lose what one has added.
    """
    with RowServer.one_at_a_time:
        return getattr(RowServer.by_name[name], method)(*args)


def changes_of(weight: rpc.RRef) -> int:
    """Count how often a tensor of this process has been changed in place."""
    # PyTorch counts this itself, to notice when autograd needs a value that is gone.
    return weight.local_value()._version


def changes_of_rows(name: str) -> int:
    """Count the same for the table of a `RowServer`."""
    return RowServer.by_name[name].weight._version


def hide_torchscript() -> None:
    """Let this process print no warning that `DistributedOptimizer` uses TorchScript.

    It is right, and would come from each process; one way is kept as it is often
    written. A filter does not help: where it is given, all filters are switched off.
    """
    show = warnings.showwarning

    def show_others(message: Warning | str, *where: Any) -> None:
        if "`TorchScript` support for functional optimizers" not in str(message):
            show(message, *where)

    warnings.showwarning = show_others


LR = 0.1


class Way:
    """A trainer's copy of the dense part, under DDP, and its use of a table."""

    def __init__(self) -> None:
        """Make the dense part, the same for all trainers and all ways."""
        dense = dense_part()
        self.dense = DistributedDataParallel(dense, gradient_as_bucket_view=True)
        # The gradients of the bags' sums, step by step: the proof adds them up.
        self.sent: list[torch.Tensor] = []
        # The hook must not hold `self`, which holds it: DDP would outlive its group.
        sent = self.sent

        def record(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            inputs[0].register_hook(sent.append)

        self.dense.register_forward_pre_hook(record)

    def steps(self, batches: list[Batch]) -> Iterator[torch.Tensor]:
        """Take a step for each batch, and yield its loss."""
        raise NotImplementedError

    def sum_of_all_updates(self, batches: list[Batch]) -> torch.Tensor:
        """Add up the table's gradients that all trainers have sent, (rows, D).

        All trainers must call this, each with all batches of its steps until now.
        """
        total = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for (indices, offsets, _), gradient in zip(batches, self.sent, strict=True):
            # Each row of a bag has the gradient of the bag's sum.
            of_rows = gradient.double()[bag_of_each(indices, offsets)]
            total.index_add_(0, indices, of_rows)
        dist.all_reduce(total)
        return total

    def weight(self) -> torch.Tensor:
        """Fetch the whole table."""
        raise NotImplementedError

    def changes(self) -> int:
        """Ask the server how often the table has been changed."""
        raise NotImplementedError


class ByAutograd(Way):
    """Three calls in a step, one after another: look up, go back, step."""

    def __init__(
        self, table: RemoteModule, optimizer_class: type[torch.optim.Optimizer]
    ) -> None:
        """Make an optimizer in each process that owns parameters."""
        super().__init__()
        self.table = table
        parameters = table.remote_parameters()
        parameters += [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        self.optimizer = DistributedOptimizer(optimizer_class, parameters, lr=LR)

    def steps(self, batches: list[Batch]) -> Iterator[torch.Tensor]:
        """Take the steps of `train.py`."""
        model = HybridModel(self.table, self.dense)
        for indices, offsets, labels in batches:
            with dist_autograd.context() as context_id:
                loss = cross_entropy(model(indices, offsets), labels)
                dist_autograd.backward(context_id, [loss])
                self.optimizer.step(context_id)
            yield loss.detach()

    def weight(self) -> torch.Tensor:
        """Fetch the whole table."""
        return self.table.remote_parameters()[0].to_here().detach()

    def changes(self) -> int:
        """Ask the server how often the table has been changed."""
        return rpc.rpc_sync(SERVER, changes_of, (self.table.remote_parameters()[0],))


class ByOneCall(Way):
    """One call in a step: it brings this batch's gradients and looks up the next."""

    def __init__(self, name: str) -> None:
        """Use the table of this name, which the server has made."""
        super().__init__()
        self.name = name
        # An ordinary one, for the dense part alone: the server does its own steps.
        self.optimizer = torch.optim.SGD(self.dense.parameters(), LR)

    def ask(self, method: str, *args: object) -> torch.futures.Future:
        """Send a call, without waiting for the answer."""
        return rpc.rpc_async(SERVER, call_alone, (self.name, method, *args))

    def number(self, step: int) -> int:
        """Number a step so that no other trainer has the same one."""
        return step * dist.get_world_size() + dist.get_rank()

    def exchange(
        self,
        batches: list[Batch],
        done: int,
        gradient: torch.Tensor | None,
        wanted: int,
    ) -> torch.futures.Future:
        """Send the gradients of one step and the bags of another, in one call.

        Args:
            batches: of all steps.
            done: the step that the gradients are of.
            gradient: of the sums of its bags, (B, D); None before the first.
            wanted: the step to look up for; none if it is beyond the last.
        """
        bags = [(self.number(wanted), *b[:2]) for b in batches[wanted : wanted + 1]]
        return self.ask("update_then_sums", self.number(done), gradient, *bags)

    def learn(self, sums: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Step the dense part, with all trainers; return the loss."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.dense(sums.requires_grad_()), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, batches: list[Batch]) -> Iterator[torch.Tensor]:
        """Send the call as soon as there are gradients to send."""
        answers = [self.exchange(batches, -1, None, 0)]
        for step, (_, _, labels) in enumerate(batches):
            sums = answers.pop().wait().requires_grad_()

            def send(gradient: torch.Tensor, step: int = step) -> None:
                answers.append(self.exchange(batches, step, gradient, step + 1))

            # It runs within `backward`, while DDP still waits for the other trainers:
            # the call and the all-reduce are under way at the same time.
            sums.register_hook(send)
            yield self.learn(sums, labels)
        answers.pop().wait()

    def weight(self) -> torch.Tensor:
        """Fetch the whole table."""
        return self.ask("all_rows").wait()

    def changes(self) -> int:
        """Ask the server how often the table has been changed."""
        return rpc.rpc_sync(SERVER, changes_of_rows, (self.name,))


class Ahead(ByOneCall):
    """The same call, sent a batch earlier.

    What it finds lacks this trainer's last update, and one or two of each other one.
    """

    def steps(self, batches: list[Batch]) -> Iterator[torch.Tensor]:
        """Send the call, do the dense part's step, then wait for the answer."""
        gradient = None
        sums = self.exchange(batches, -1, None, 0).wait()
        for step, (_, _, labels) in enumerate(batches):
            answer = self.exchange(batches, step - 1, gradient, step + 1)
            yield self.learn(sums, labels)
            gradient, sums = sums.grad, answer.wait()
        self.exchange(batches, len(batches) - 1, gradient, len(batches)).wait()
