"""The compiled SGD of DistributedOptimizer takes no lock, and loses updates.

Run: python 04_rpc_parameter_server/staleness/lost_updates.py
Expect: two trainers' steps under `torch.optim.SGD` undo each other where they write to
    the same rows; a dense gradient writes to all. Under a subclass, which
    DistributedOptimizer does not know and runs under a lock, none is lost.
"""

import os
import socket
import tempfile
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import embedding

from classifier import EagerSGD
from ranks import fail, number, read_options

STEPS, ROWS, WIDTH = 50, 1000, 1000
LOWER, UPPER = torch.arange(ROWS).chunk(2)  # row numbers


def be_trainer(
    optimizer_class: type[torch.optim.Optimizer],
    is_sparse: bool,
    table: rpc.RRef,
    barrier: threading.Barrier,
    rows: torch.Tensor,
) -> None:
    """Take steps that add 1 to every entry of these rows, so that the sum is known."""
    optimizer = DistributedOptimizer(optimizer_class, [table], lr=1.0)
    for _ in range(STEPS):
        barrier.wait()  # between all steps, and still two run at the same time
        with dist_autograd.context() as context_id:
            used = embedding(rows, table.to_here(), sparse=is_sparse)
            dist_autograd.backward(context_id, [-used.sum()])
            optimizer.step(context_id)


def lost_entries(
    optimizer_class: type[torch.optim.Optimizer],
    is_sparse: bool,
    rows_of_each: tuple[torch.Tensor, torch.Tensor],
    most: int,
) -> tuple[int, int]:
    """Let two trainers step; return how often it took until an update was lost."""
    wanted = torch.zeros(ROWS, WIDTH)
    for rows in rows_of_each:
        wanted[rows] += STEPS
    for tried in range(1, most + 1):
        table = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
        common = optimizer_class, is_sparse, rpc.RRef(table), threading.Barrier(2)
        trainers = [
            threading.Thread(target=be_trainer, args=(*common, rows))
            for rows in rows_of_each
        ]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
        if lost := int((table != wanted).sum()):
            return tried, lost
    return most, 0


def main() -> None:
    """Be the server and, in two threads, both trainers: all happens on the server."""
    options = read_options(most={"type": number(1, 1000), "default": 200})
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    warnings.showwarning = lambda *_, **__: None  # that TorchScript is deprecated
    with tempfile.TemporaryDirectory() as folder:
        at = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/rendezvous", _transports=["uv"]
        )
        rpc.init_rpc("server", rank=0, world_size=1, rpc_backend_options=at)
        as_expected = []
        for optimizer_class, is_sparse, rows, most, loses in (
            (torch.optim.SGD, False, (LOWER, UPPER), options.most, True),
            (torch.optim.SGD, True, (LOWER, UPPER), 2, False),
            (torch.optim.SGD, True, (LOWER, LOWER), options.most, True),
            (EagerSGD, True, (LOWER, LOWER), 2, False),
            (EagerSGD, False, (LOWER, LOWER), 2, False),
        ):
            tried, lost = lost_entries(optimizer_class, is_sparse, rows, most)
            kind = "sparse" if is_sparse else "dense"
            whose = "same" if rows[0] is rows[1] else "other"
            text = f"{optimizer_class.__name__:8} | {kind:6} gradient | {whose:5} rows"
            found = f"try {tried}: {lost:,} entries lack updates"
            found = found if lost else f"{tried} tries: no entry lacks updates"
            print(f"{text} | {found}", flush=True)
            as_expected.append((lost > 0) == loses)
        rpc.shutdown()
    if not all(as_expected):
        fail(f"not as expected: {as_expected}")
    print("check: no call has failed; only the table's values tell of the loss")


if __name__ == "__main__":
    main()
