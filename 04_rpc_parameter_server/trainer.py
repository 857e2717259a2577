"""What a trainer does: look up, compute, send gradients back, let everyone step."""

import logging
import socket
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from data import PACKAGES, Batch, Samples, load_samples
from meeting import say, wait_for_the_watch
from model import WIDTH, HybridModel, dense_part
from proof import check_trainer
from table import whole_table

SERVER = "parameter_server"
# This process's own, for the call that will come from the master.
used_devices: list[torch.device] = []
first_line: list[str] = []  # said when the master has asked for training
in_group = threading.Event()


@dataclass(frozen=True)
class Settings:
    """What the master decides and every trainer is told."""

    trainers: int
    rows: int
    batch_size: int  # bags in a step of one trainer
    epochs: int
    max_steps: int | None
    lr: float
    seed: int


class EagerSGD(torch.optim.SGD):
    """SGD under a name that `DistributedOptimizer` does not know.

    For the optimizers that it knows it compiles a copy by TorchScript, which is
    deprecated: every process would print a warning. It takes others as they are, and
    says at each start that this "might result in slow computation"; it is faster here.
    """


def local_rank_of(rank: int, trainers: int, store: dist.Store) -> tuple[int, int]:
    """Count the trainers on this machine: those before this one, and all."""
    store.set(f"machine {rank}", socket.gethostname())
    machines = [store.get(f"machine {other}") for other in range(trainers)]
    mine = machines[rank]
    return machines[:rank].count(mine), machines.count(mine)


def wait_for_the_group() -> None:
    """Wait until this process is in the trainers' group; calls may arrive before."""
    if not in_group.wait(timeout=60):
        raise TimeoutError("not in the trainers' group after 60 s")


def distributed_sgd(model: HybridModel, lr: float) -> DistributedOptimizer:
    """Make one optimizer for parameters here and elsewhere."""
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    parameters = model.table.remote_parameters()  # pyright: ignore[reportCallIssue]
    parameters += [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    return DistributedOptimizer(EagerSGD, parameters, lr=lr)


def hybrid_step(
    model: HybridModel, optimizer: DistributedOptimizer, batch: Batch
) -> torch.Tensor:
    """Take one step of a model whose parts live in several processes.

    Returns:
        This trainer's own loss, a scalar.
    """
    indices, offsets, labels = batch
    # The gradients of this step are kept under this number, in every process that
    # takes part. So trainers do not mix up theirs, and there is nothing to zero.
    with dist_autograd.context() as context_id:
        # One call to the server: row numbers go there, a sum of rows per bag returns.
        scores = model(indices, offsets)
        loss = cross_entropy(scores, labels.to(scores.device))
        # The second call carries the gradient of those sums. What stays here goes
        # through DDP, which waits for all trainers; the server waits for nobody.
        dist_autograd.backward(context_id, [loss])
        # The third: each process steps the parameters that it holds.
        optimizer.step(context_id)
    return loss.detach()


def mean_over_trainers(value: torch.Tensor) -> float:
    """Average a number over all trainers; every trainer must call this."""
    mean = value.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


@torch.no_grad()
def accuracy(model: HybridModel, samples: Samples) -> float:
    """Tell which share of the samples is right; every trainer takes its part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(rank, len(samples), world_size)
    counts = torch.zeros(2, device=model.device)  # right ones; all
    for numbers in own.split(256):
        indices, offsets, labels = samples.batch(numbers)
        scores = model(indices, offsets)
        counts[0] += (scores.argmax(1) == labels.to(scores.device)).sum()
        counts[1] += len(numbers)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def run_trainer(table: RemoteModule, settings: Settings) -> list[str]:
    """Train, or find out that somebody has died. The master calls this by RPC."""
    try:
        wait_for_the_group()
        return train_here(table, settings)
    except Exception:
        wait_for_the_watch()
        raise


def train_here(table: RemoteModule, settings: Settings) -> list[str]:
    """Train the model's dense part here and its table on the server.

    Args:
        table: stands for the table; what is called on it runs on the server.
        settings: the same for all trainers.

    Returns:
        What was checked on all trainers, for the `check:` lines.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name, device = f"trainer{rank}", used_devices[0]
    training, held_out = load_samples(settings.rows)
    before = rpc.rpc_sync(SERVER, whole_table)
    dense = dense_part(WIDTH, len(PACKAGES), settings.seed).to(device)
    ddp = DistributedDataParallel(dense, gradient_as_bucket_view=True)
    model = HybridModel(table, ddp, device)
    optimizer = distributed_sgd(model, settings.lr)
    untrained = accuracy(model, held_out)
    if rank == 0:
        for line in first_line:
            say(name, line)
        say(name, f"{len(training)} samples from {training.files} files to train on")
        say(name, f"{len(held_out)} from {held_out.files} other files held out")
        say(name, f"chance {1 / len(PACKAGES):.1%}, untrained {untrained:.1%} right")
    step = 0
    for epoch in range(settings.epochs):
        losses: list[torch.Tensor] = []
        started = time.perf_counter()
        for batch in training.batches(epoch, settings.batch_size, rank, world_size):
            if step == settings.max_steps:
                break
            losses.append(hybrid_step(model, optimizer, batch))
            step += 1
        if not losses:
            break
        rate = len(losses) / (time.perf_counter() - started)
        loss = mean_over_trainers(torch.stack(losses).mean())
        right = accuracy(model, held_out)
        if rank == 0:
            say(
                name,
                f"epoch {epoch} | step {step:3} | mean loss {loss:.3f} | "
                f"held out {right:.1%} right | {rate:.0f} steps/s",
            )
    return check_trainer(model, settings, training, held_out, before, step)
