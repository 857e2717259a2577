"""Train a table that the last rank serves to the others, its trainers.

Run: torchrun --nproc-per-node=3 04_rpc_parameter_server/minimal.py
Expect: falling losses, those of one process that takes the same batches.
"""

import gc
import logging
import os
import warnings
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# Yours: `samples.batches` yields (indices, offsets, labels) of one trainer, for ever.
from classifier import load_samples

ROWS, WIDTH, EPOCHS, BATCH_SIZE, LR = 2**15, 32, 2, 32, 0.1
# It would warn in each process that `EagerSGD` may be slow.
logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)


class EagerSGD(torch.optim.SGD):
    """A subclass of SGD: of these `DistributedOptimizer` has no compiled copy."""

    # DistributedOptimizer replaces torch.optim.SGD by a compiled copy, which runs
    # without a lock and may lose updates. Of a subclass it has none.
    def step(self, closure: Any = None) -> Any:
        """Step, and forget: gradients that stay would step again.

        They still may with two such optimizers in a process, unless both have the
        same parameters: each sets all `.grad`.
        """
        loss = super().step(closure)
        self.zero_grad()  # or a weight that the next batch misses would step again
        return loss


class HybridModel(nn.Module):
    """The whole model, wherever its table may live. Yours."""

    def __init__(self, table: nn.Module) -> None:
        """Take the table; make the dense part."""
        super().__init__()
        self.table = table
        layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 6)
        self.dense: nn.Module = nn.Sequential(*layers)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Score each bag for each label: (words,), (B,) to (B, 6)."""
        # `.forward`: a `RemoteModule` that has travelled by RPC has lost what a plain
        # call needs, and would raise AttributeError.
        pooled = self.table.forward(indices, offsets)  # 1.
        return self.dense(pooled)  # 2.


# To set a rate, call this where the optimizer is; RPC sends no local function:
#   def set_rate(one: rpc.RRef, rate: float) -> None:
#       one.local_value().optim.param_groups[0]["lr"] = rate
def train_with_server(table: RemoteModule) -> dict[str, torch.Tensor]:
    """Be a trainer, as the server asks by RPC; return the dense part's weights."""
    rank, trainers = dist.get_rank(), dist.get_world_size() - 1
    # The server makes no collective; by this argument only members make the call.
    # Without it gloo waits for nobody either, unless TORCH_DIST_INIT_BARRIER=1 is set:
    # then for the server, in vain, for 30 minutes.
    group: Any = dist.new_group(range(trainers), use_local_synchronization=True)
    model = HybridModel(table)
    ddp = model.dense = DistributedDataParallel(model.dense, process_group=group)
    dense = [rpc.RRef(parameter) for parameter in ddp.parameters()]
    # DDP averages the trainers' gradients. In the table their steps add up, so each
    # takes an n-th of the rate.
    of_dense = DistributedOptimizer(EagerSGD, dense, LR)
    of_table = DistributedOptimizer(EagerSGD, table.remote_parameters(), LR / trainers)
    # To set a rate by the function above, say before each epoch:
    #   for one in of_table.remote_optimizers:
    #       rpc.rpc_sync(one.owner(), set_rate, (one, rate))
    samples, _ = load_samples(ROWS)
    batches = samples.batches(BATCH_SIZE, rank, trainers)
    steps = len(samples) // (BATCH_SIZE * trainers)
    if not steps:
        raise ValueError(f"{len(samples)} samples are too few for one step of all")
    for epoch in range(EPOCHS):
        total = torch.zeros(())
        for indices, offsets, labels in islice(batches, steps):
            with dist_autograd.context() as context_id:
                loss = cross_entropy(model(indices, offsets), labels)  # 1. and 2.
                dist_autograd.backward(context_id, [loss])  # 3.
                # To clip the dense part's gradients, here to a norm of 1:
                #   own = dist_autograd.get_gradients(context_id).values()
                #   factor = (1 / nn.utils.get_total_norm(own)).clamp(max=1)
                #   for gradient in own:
                #       gradient.mul_(factor)
                of_dense.step(context_id)  # 4.
                # All have gone backward. A bag's sum needs no rows there; but put a
                # Linear on the server: it needs its weights as they were in forward.
                dist.barrier(group)  # 5.
                of_table.step(context_id)  # 6.
            # 7. All have stepped: the next lookup sees every step.
            dist.barrier(group)  # without: asynchronous
            total += loss.detach() / steps
        dist.all_reduce(total, group=group)
        if rank == 0:
            print(f"epoch {epoch} | loss {total.item() / trainers:.3f}", flush=True)
    return ddp.module.state_dict()


def be_server(trainers: list[str]) -> None:
    """Make the table, have the trainers train it, save the whole model."""
    arguments = (ROWS, WIDTH), {"mode": "sum", "sparse": True}
    table = RemoteModule("server", nn.EmbeddingBag, *arguments)
    weight = table.get_module_rref().local_value().weight
    nn.init.normal_(weight, std=0.1)
    # Each call returns at once, with a future, and may then take any time.
    calls = [rpc.rpc_async(t, train_with_server, (table,), timeout=0) for t in trainers]
    dense = torch.futures.wait_all(calls)[0]  # an error on a trainer is raised here
    state = {f"dense.{name}": value for name, value in dense.items()}
    torch.save({"table.weight": weight.detach(), **state}, "hybrid.pt")


def main() -> None:
    """Be the server or a trainer, which answers calls until all are done."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise SystemExit("start a server and trainers: torchrun --nproc-per-node=3")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = [*(f"trainer{r}" for r in range(world_size - 1)), "server"]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    # By default RPC polls shared memory, and keeps a core busy even while it waits.
    tcp = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc(names[rank], None, rank, world_size, tcp)
    if names[rank] == "server":
        be_server(names[:-1])
    rpc.shutdown()  # waits until nobody has anything more to ask
    gc.collect()  # now the model is gone, even one in a reference cycle
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
