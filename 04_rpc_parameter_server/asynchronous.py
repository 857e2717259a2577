"""Trainers that do not wait for each other miss each other's last steps.

Run: python 04_rpc_parameter_server/asynchronous.py
Expect: losses like those of one process, and the share of rows that were stale.
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

import classifier
from classifier import ROWS, WIDTH, Batch, EagerSGD, HybridModel, Table, dense_part
from ranks import check, gather, number, read_options, say
from roles import SERVER, names_of_roles, on_all_trainers, start_roles

LR = 0.1
LIMIT = 1e-3  # of the largest entry, after all steps: float32 in another order


def rows_now(weight: rpc.RRef, numbers: torch.Tensor) -> torch.Tensor:
    """Return some rows as they are at this moment; runs on the server."""
    return weight.local_value().detach()[numbers]


def run_steps(
    table: RemoteModule, batches: list[Batch], is_synchronous: bool, late: float
) -> tuple:
    """Take a step for each batch; return the losses, and the share of stale rows.

    The last trainer waits `late` ms before each of its steps.
    """
    dense, (weight,) = DistributedDataParallel(dense_part()), table.remote_parameters()
    model = HybridModel(table, dense)  # classifier.py's: it is given its dense part
    parameters = [weight, *map(rpc.RRef, dense.parameters())]
    optimizer = DistributedOptimizer(EagerSGD, parameters, lr=LR)
    is_late = dist.get_rank() == dist.get_world_size() - 1
    losses, changed, seen = [], 0, 0
    for indices, offsets, labels in batches:
        numbers = indices.unique()
        before = rpc.rpc_sync(SERVER, rows_now, args=(weight, numbers))
        with dist_autograd.context() as context_id:
            loss = cross_entropy(model(indices, offsets), labels)
            dist_autograd.backward(context_id, [loss])
            # DDP's all-reduce is over: every trainer has taken its previous step.
            now = rpc.rpc_sync(SERVER, rows_now, args=(weight, numbers))
            changed += int((now != before).any(dim=1).sum())
            seen += len(numbers)
            dist.barrier()  # for the count: nobody has taken this step yet
            time.sleep(late / 1000 if is_late else 0)
            optimizer.step(context_id)
            if is_synchronous:
                dist.barrier()  # all have stepped: the next lookup sees it all
        losses.append(loss.item())
    return losses, changed / seen


def compare(tables: list[RemoteModule], late: float) -> None:
    """Be a trainer: train for an epoch with barriers, without, and alone."""
    samples, trainers = classifier.load_samples()[0], dist.get_world_size()
    length = len(samples) // (16 * trainers)  # steps of an epoch
    place = [(16, rank, trainers) for rank in range(trainers)]
    batches = [list(islice(samples.batches(*one), length)) for one in place]
    alone = HybridModel(Table(ROWS, WIDTH, seed=0), dense_part())
    # DDP takes the mean of the trainers' gradients. In the table their steps add up.
    rounds = zip(*batches, strict=True)
    losses = [classifier.train_in_one_process(alone, rounds, LR, trainers * LR)]
    stale = []
    for table, is_synchronous in zip(tables, (True, False), strict=True):
        own = batches[dist.get_rank()]
        of_rank, share = run_steps(table, own, is_synchronous, late)
        losses.append(torch.tensor(gather(of_rank)).mean(0).tolist())
        stale.append(sum(gather(share)) / trainers)
    say("            one process  synchronous  asynchronous")
    means = [sum(one) / length for one in losses]
    say(f"mean loss   {means[0]:11.3f}  {means[1]:11.3f}  {means[2]:12.3f}")
    say(f"stale rows               {stale[0]:11.1%}  {stale[1]:12.1%}")
    wanted = alone.get_parameter("table.weight").detach()
    end = tables[0].remote_parameters()[0].to_here().detach()
    error = ((end - wanted).abs().max() / wanted.abs().max()).item()
    has_late = trainers > 1 and late > 0  # without one it is a matter of luck
    is_right = error < LIMIT and stale[0] == 0 and (stale[1] > 0 or not has_late)
    claim = f"synchronous trainers end {error:.0e} from one process (limit {LIMIT:.0e})"
    check(is_right, claim)


def be_master(options: Namespace) -> None:
    """Have the server make two equal tables, and the trainers use them."""
    tables = [RemoteModule(SERVER, Table, (ROWS, WIDTH, 0)) for _ in range(2)]
    on_all_trainers(options.trainers, compare, tables, options.late)


if __name__ == "__main__":
    options = read_options(
        trainers={"type": number(1, 16), "default": 2},
        late={"type": number(0.0, 1e3), "default": 5.0, "help": "ms, the last trainer"},
    )
    start_roles(names_of_roles(options.trainers), be_master, options)
