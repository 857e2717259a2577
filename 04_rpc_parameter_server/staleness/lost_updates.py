"""The compiled SGD of DistributedOptimizer takes no lock, and loses updates.

Run: python 04_rpc_parameter_server/staleness/lost_updates.py
Expect: two trainers' steps under `torch.optim.SGD` undo each other; under a subclass,
    which DistributedOptimizer does not know and runs under a lock, none is lost.
"""

import logging
import os
import socket
import tempfile
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

from ranks import fail, number, read_options

STEPS, ENTRIES = 50, 1_000_000


class EagerSGD(torch.optim.SGD):
    """SGD under a name for which DistributedOptimizer has no compiled copy."""


def be_trainer(
    optimizer_class: type[torch.optim.Optimizer],
    table: rpc.RRef,
    ready: threading.Barrier,
) -> None:
    """Take steps that add 1 to every entry of the table, so that the sum is known."""
    optimizer = DistributedOptimizer(optimizer_class, [table], lr=1.0)
    ready.wait()
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [-table.to_here().sum()])
            optimizer.step(context_id)


def lost_entries(optimizer_class: type[torch.optim.Optimizer], most: int) -> tuple:
    """Let two trainers step; return how often it took until an update was lost."""
    for tried in range(1, most + 1):
        table = torch.nn.Parameter(torch.zeros(ENTRIES))
        common = optimizer_class, rpc.RRef(table), threading.Barrier(2)
        trainers = [threading.Thread(target=be_trainer, args=common) for _ in range(2)]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
        if lost := int((table < 2 * STEPS).sum()):
            return tried, lost
    return most, 0


def main() -> None:
    """Be the server and, in two threads, both trainers: all happens on the server."""
    options = read_options(most={"type": number(1, 1000), "default": 200})
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    warnings.showwarning = lambda *_, **__: None  # that TorchScript is deprecated
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        at = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rendezvous")
        rpc.init_rpc("server", rank=0, world_size=1, rpc_backend_options=at)
        tried, lost = lost_entries(torch.optim.SGD, options.most)
        print(
            f"torch.optim.SGD: {lost:,} of {ENTRIES:,} entries lack some, try {tried}"
        )
        tries, none_lost = lost_entries(EagerSGD, 2)
        print(f"EagerSGD:        {none_lost} of {ENTRIES:,} entries, in {tries} tries")
        rpc.shutdown()
    if not lost or none_lost:
        fail(f"{lost} and {none_lost} entries lack updates")
    print("check: no call has failed; only the table's values tell of the loss")


if __name__ == "__main__":
    main()
