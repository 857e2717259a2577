"""The table in the parameter server's process, its file, and checks of what arrives.

Calls by RPC name a function; what it works on, it finds in `HERE`, the process's own.
"""

import os
import signal
import threading
from argparse import Namespace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.functional import cross_entropy

from classifier import (
    WIDTH,
    Batch,
    HybridModel,
    Samples,
    Table,
    dense_part,
    load_samples,
    train_in_one_process,
)
from heartbeats import own_heartbeat, say_as
from ranks import fail, gather, same_on_all_ranks
from roles import MASTER, SERVER
from table_file import load_table, save_table, table_file

TABLE_OPTION = {"table": {"type": table_file, "help": "to resume from, to save to"}}
LIMIT = 1e-5  # of the largest entry; sums of float32 in another order: 1e-7


class TableServer:
    """What a parameter server has: a table, the file to keep it in, and its end."""

    def __init__(self) -> None:
        """Have nothing yet; calls may arrive before the file is known."""
        self.file: Path | None = None
        self.table: ServedTable | None = None
        self.is_ready, self.is_over = threading.Event(), threading.Event()
        self.saving, self.signal = threading.Lock(), 0

    def serve(self, file: Path | None) -> None:
        """Answer calls until the master says that it is over, or a signal does."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        self.file = file
        if heartbeat := own_heartbeat():
            heartbeat.last_act = self.save_once
        self.is_ready.set()
        self.is_over.wait()  # RPC's own threads answer the calls
        self.save_once()
        if self.signal:
            say_as(SERVER, f"stopped by {signal.Signals(self.signal).name}")
            os._exit(128 + self.signal)

    def stop(self, number: int, _: object) -> None:
        """Note a signal; the main thread goes on from here."""
        self.signal = number
        self.is_over.set()

    def save_once(self) -> None:
        """Save the table, unless that is done or nobody has given a file.

        The main thread does so at the end, and the heartbeat if another process has
        died. Who comes second waits until the first is done, and has nothing to do.
        """
        with self.saving:
            if self.file and self.table is not None:
                save_table(self.file, self.table.weight.detach())
                say_as(SERVER, f"table saved to {self.file}")
                self.file = None


class ServedTable(Table):
    """A table that starts from the server's file; made by the master's call."""

    def __init__(self, rows: int, seed: int) -> None:
        """Make or load the numbers here, where the server's process can find them.

        Raises RuntimeError if it has a table: its file, and the checks, are of one.
        """
        if HERE.table is not None:
            raise RuntimeError(
                "the server has a table: a second one would not be saved"
            )
        super().__init__(rows, WIDTH, seed)
        if HERE.file and HERE.file.exists():
            with torch.no_grad():
                self.weight.copy_(load_table(HERE.file))
        # 8 bytes a row, by which the checks at the end find out what has moved.
        self.digests_at_start = row_digests(self.weight)
        HERE.table = self


HERE = TableServer()


def serve(_: tuple[str, int], options: Namespace) -> None:
    """Be the parameter server."""
    HERE.serve(options.table)


def check_options(options: Namespace) -> None:
    """Refuse a table for who has none, and steps of more samples than there are."""
    if options.table and options.role not in (None, SERVER):
        fail("--table belongs to --role parameter_server, which holds the table")
    # A role in a terminal of its own does not know what the master decides.
    if options.role in (None, MASTER):
        needed = options.trainers * options.batch_size
        if needed > (found := len(load_samples(options.rows)[0])):
            fail(f"a step of all trainers takes {needed} of {found} samples")


def other_shape(rows: int) -> str:
    """Say what is wrong, and end, if the server's file holds another number of rows."""
    if not HERE.is_ready.wait(timeout=60):
        raise TimeoutError("the server does not know its file after 60 s")
    if not (HERE.file and HERE.file.exists()):
        return ""
    shape = tuple(load_table(HERE.file).shape)
    if shape == (rows, WIDTH):
        return ""
    release()
    text = f"the server's file holds a table of {shape}, not {(rows, WIDTH)}"
    return f"{text}; give --rows as then"


@torch.no_grad()
def row_digests(weights: torch.Tensor) -> torch.Tensor:
    """Return a number for each row, (rows,), that changes if one of its bits does."""
    digests = torch.zeros(len(weights), dtype=torch.int64)
    for column in weights.view(torch.int32).unbind(1):
        digests = 1_000_003 * digests + column
    return digests


def moved_rows() -> torch.Tensor:
    """Return the numbers of the rows that are not as they were at the start."""
    assert HERE.table is not None
    now = row_digests(HERE.table.weight)
    return (now != HERE.table.digests_at_start).nonzero().flatten()


def some_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Return some of the table's rows, (numbers, WIDTH)."""
    assert HERE.table is not None
    return HERE.table.weight.detach()[numbers]


def table_gradient(context_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient that waits here in a context of distributed autograd.

    That is the numbers of the rows that have one, in order, and the rows' gradients.
    """
    assert HERE.table is not None
    gradient = dist_autograd.get_gradients(context_id)[HERE.table.weight].coalesce()
    return gradient.indices()[0], gradient.values()


def error_of_one_trainer(
    options: Namespace, steps: int, dense: list[torch.Tensor]
) -> float:
    """Take a single trainer's steps once more, in the server's process alone.

    Returns how far the table, and the trainer's `dense` weights, are from their end.
    """
    assert HERE.table is not None
    table = Table(options.rows, WIDTH, options.seed)
    if HERE.file and HERE.file.exists():  # nobody has saved yet: it is as at the start
        table.load_state_dict({"weight": load_table(HERE.file)})
    alone = HybridModel(table, dense_part(options.seed))
    training = load_samples(options.rows)[0]
    batches = islice(training.batches(options.batch_size), steps)
    train_in_one_process(alone, ([b] for b in batches), options.lr, options.lr)
    pairs = [(HERE.table.weight, table.weight)]
    pairs += zip(dense, alone.dense.parameters(), strict=True)
    errors = [relative_error(a.detach(), b.detach()) for a, b in pairs]
    return torch.tensor(errors).max().item()  # max() would drop a NaN


def release() -> None:
    """Tell this process that nobody needs the table any more."""
    HERE.is_over.set()


@torch.no_grad()
def accuracy(model: HybridModel, samples: Samples) -> float:
    """Return the share of the samples that the model gets right."""
    right = 0
    for numbers in torch.arange(len(samples)).split(256):
        indices, offsets, labels = samples.batch(numbers)
        right += int((model(indices, offsets).argmax(1).cpu() == labels).sum())
    return right / len(samples)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference, as a share of the reference's largest entry."""
    return ((value - reference).abs().max() / reference.abs().max()).item()


def table_gradient_error(model: HybridModel, batch: Batch) -> float:
    """Compare the gradient that arrives on the server with local autograd's."""
    indices, offsets, labels = batch
    with dist_autograd.context() as context_id:
        loss = cross_entropy(model(indices, offsets), labels.to(model.device))
        dist_autograd.backward(context_id, [loss])
        has_gradient, arrived = rpc.rpc_sync(SERVER, table_gradient, args=(context_id,))
    # A small table here has the batch's rows alone, numbered from 0.
    numbers, indices = indices.unique(return_inverse=True)
    if not torch.equal(has_gradient, numbers):
        return float("inf")
    rows = rpc.rpc_sync(SERVER, some_rows, args=(numbers,))
    local = nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum")
    model = HybridModel(local, getattr(model.dense, "module", model.dense))
    loss = cross_entropy(model(indices, offsets), labels.to(model.device))
    (expected,) = torch.autograd.grad(loss, local.weight)
    return relative_error(arrived, expected)


def check_trainers(model: HybridModel, options: Namespace, steps: int) -> list[str]:
    """Compare, after the last step, all that the trainers can see; all call this.

    Returns what was compared, the same on all trainers; raises RuntimeError, on all, if
    one of them finds something wrong. No trainer asks for the whole table.
    """
    dist.barrier()  # nobody steps any more
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, held_out = load_samples(options.rows)
    moved = rpc.rpc_sync(SERVER, moved_rows)
    was_used = torch.isin(moved, torch.cat(training.bags))
    wrong = max(gather(int((~was_used).sum())))
    sample = held_out.batch(torch.arange(rank, len(held_out), 64))
    error = torch.tensor(gather(table_gradient_error(model, sample))).max().item()
    are_equal = same_on_all_ranks(model.dense.parameters())
    equal = "equal" if are_equal else "NOT equal"
    limit = f"(limit {LIMIT:.0e})"
    known = f"{wrong} of these had not" if wrong else "all of these had"
    lines = [
        f"the dense weights of {world_size} trainer(s) are {equal}",
        f"the table's gradient is within {error:.0e} of local autograd's {limit}",
        f"{len(moved)} of {options.rows} rows have moved; {known} been looked up",
    ]
    apart = 0.0
    if world_size == 1:
        dense = [weight.detach().cpu() for weight in model.dense.parameters()]
        again = options, steps, dense
        apart = rpc.rpc_sync(SERVER, error_of_one_trainer, again, timeout=0)
        text = (
            f"after {steps} steps all weights are within {apart:.0e} of one process's"
        )
        lines.append(f"{text} {limit}")
    is_right = are_equal and error < LIMIT and apart < LIMIT
    if not (is_right and len(moved) and not wrong):
        raise RuntimeError(f"the lesson has gone wrong: {'; '.join(lines)}")
    return lines
