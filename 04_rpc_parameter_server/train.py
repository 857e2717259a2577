"""Train one model whose parts live in three kinds of process.

Run: python 04_rpc_parameter_server/train.py
Expect: four processes; a model that tells six packages apart in files it has not seen.
"""

import time
from argparse import Namespace
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import served_table
from classifier import ROWS, Batch, EagerSGD, HybridModel, dense_part, load_samples
from ranks import fail, number, read_options, say
from served_table import accuracy
from supervised_roles import ROLE_OPTIONS, SERVER, run_roles, run_trainer


def hybrid_step(
    model: HybridModel, optimizer: DistributedOptimizer, batch: Batch
) -> torch.Tensor:
    """Take one step of a model whose parts live in several processes.

    Gradients are kept by context, and every parameter gets a new one in each step.
    """
    indices, offsets, labels = batch
    with dist_autograd.context() as context_id:
        # A call to the server: row numbers go there, a sum of rows per bag returns.
        scores = model(indices, offsets)
        loss = cross_entropy(scores, labels.to(scores.device))
        # A second call carries the gradients of these sums. The dense part's go
        # through DDP, which waits for all trainers; the server waits for nobody.
        dist_autograd.backward(context_id, [loss])
        # A third: each process steps the parameters that it owns.
        optimizer.step(context_id)
    return loss.detach()


def be_trainer(device: torch.device, table: RemoteModule, options: Namespace) -> list:
    """Be a trainer, as the master has asked by RPC; return what is right at the end."""
    training, held_out = load_samples(options.rows)
    dense = DistributedDataParallel(dense_part(options.seed).to(device))
    model = HybridModel(table, dense)
    parameters = [*table.remote_parameters(), *map(rpc.RRef, dense.parameters())]
    optimizer = DistributedOptimizer(EagerSGD, parameters, lr=options.lr)
    say(f"trainer 0: {len(training)} samples; {len(held_out)} held out, of other files")
    say(f"trainer 0: untrained {accuracy(model, held_out):.1%} right, by chance 16.7%")
    done, rank, world_size = 0, dist.get_rank(), dist.get_world_size()
    batches = training.batches(options.batch_size, rank, world_size)
    of_epoch = len(training) // (options.batch_size * world_size)
    for epoch in range(options.epochs):
        began = time.perf_counter()
        steps = islice(batches, min(of_epoch, options.max_steps - done))
        losses = [hybrid_step(model, optimizer, batch) for batch in steps]
        if not losses:
            break
        done, rate = done + len(losses), len(losses) / (time.perf_counter() - began)
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        text = f"trainer 0: epoch {epoch} | step {done:3} | mean loss {loss:.3f}"
        say(f"{text} | {accuracy(model, held_out):.1%} right | {rate:.0f} steps/s")
    return served_table.check_trainers(model, options, done)


def be_master(place: tuple[str, int], options: Namespace) -> None:
    """Have the server make the table, start the trainers, wait for them."""
    # The file that the server resumes from may hold a table of another size.
    if problem := rpc.rpc_sync(SERVER, served_table.other_shape, (options.rows,)):
        fail(problem)  # prints it, and ends
    print(f"master: asking for a table of {options.rows} rows", flush=True)
    table = RemoteModule(SERVER, served_table.ServedTable, (options.rows, options.seed))
    # Each call returns at once, with a future, and may then take any time. `place` is
    # the address of RPC's store, which the trainers' process group uses too.
    work = options.trainers, place, be_trainer, table, options
    futures = [
        rpc.rpc_async(f"trainer{rank}", run_trainer, (rank, *work), timeout=0)
        for rank in range(options.trainers)
    ]
    checks = torch.futures.wait_all(futures)[0]  # an error on a trainer is raised here
    rpc.rpc_sync(SERVER, served_table.release)  # the server may save, and end
    print("\n".join(f"master: check: {line}" for line in checks), flush=True)


def main() -> None:
    """Start all roles here, or be the one that `--role` names."""
    options = read_options(
        trainers={"type": number(1, 62), "default": 2},
        batch_size={"type": number(1, 10**6), "default": 16, "help": "of a trainer"},
        epochs={"type": number(1, 10**6), "default": 3},
        max_epochs={"type": number(1, 10**6), "dest": "epochs", "help": "the same"},
        max_steps={"type": number(1, 10**9), "default": 10**9},
        lr={"type": number(1e-9, 1e9), "default": 0.1},
        rows={"type": number(1, 10**8), "default": ROWS, "help": "of the table"},
        seed={"type": int, "default": 0},
        **ROLE_OPTIONS | served_table.TABLE_OPTION,
    )
    served_table.check_options(options)
    run_roles({"master": be_master, SERVER: served_table.serve}, options)


if __name__ == "__main__":
    main()
