"""What it costs to have the table elsewhere: bytes on the wire, and time spent waiting.

Run: python 04_rpc_parameter_server/lookup_cost/lookup_cost.py
Expect: for each batch size a row for each way to use the table, with the bytes and the
    milliseconds of a step. (Bytes on the wire need Linux; times, two idle cores.)
"""

import json
import math
import os
import socket
import warnings
from argparse import Namespace
from itertools import islice
from pathlib import Path

from torch.distributed import rpc

from classifier import load_samples
from measured_costs import (
    LIMIT,
    MOST_AROUND,
    OTHER_ORDER,
    ROUGH_LIMIT,
    cost_of_each_way,
    print_costs,
)
from ranks import fail, number, read_options, start_ranks


def open_rpc_by_tcp(name: str, rank: int) -> None:
    """Join RPC as one of two processes that talk by TCP, as between machines.

    On one machine they would use shared memory, where nobody counts the bytes. The two
    options that choose this are not public.
    """
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=60, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def compare_batch_sizes(options: Namespace) -> None:
    """Measure batch size by batch size; end unless every way trains as one process."""
    table, worst, rough, odd = [], 0.0, 0.0, 0
    for batch_size in options.batch_sizes:
        count = options.steps * (options.rounds + 1)  # the first round is to warm up
        batches = list(islice(load_samples()[0].batches(batch_size), count))
        starts = range(0, count, options.steps)
        rounds = [batches[start : start + options.steps] for start in starts]
        costs, alone_ms, apart = cost_of_each_way(rounds, options.latency / 1e3)
        rough = max(rough, *(apart.pop(way) for way in OTHER_ORDER))
        worst = max(worst, *apart.values())
        print_costs(batch_size, rounds, costs)
        print(f"  in one process, without a server: {alone_ms:.2f} ms/step", flush=True)
        for cost in costs.values():
            around = (cost.wire_bytes or math.nan) - cost.tensor_bytes
            odd += cost.wire_bytes is not None and not 0 < around <= MOST_AROUND
        named = {way: cost._asdict() for way, cost in costs.items()}
        table.append({"batch_size": batch_size, "ways": named, "alone_ms": alone_ms})
    if options.json:
        numbers = {"latency_ms": options.latency, "sizes": table}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if odd or not (worst <= LIMIT and rough <= ROUGH_LIMIT):
        fail(f"{worst} and {rough} from one process; {odd} odd counts of bytes")
    print(
        f"check: {len(table)} sizes: {worst:.0e} from one process (limit {LIMIT:.0e})"
    )
    print(f"check: {rough:.0e} where sums have another order (limit {ROUGH_LIMIT:.0e})")
    print(f"check: tensors are all of the bytes but for 1 to {MOST_AROUND:,} a step")


def main(options: Namespace) -> None:
    """Be the trainer or the server."""
    rank = int(os.environ["RANK"])
    open_rpc_by_tcp(["trainer", "server"][rank], rank)
    if rank == 0:
        compare_batch_sizes(options)
    rpc.shutdown()


def read_sizes() -> Namespace:
    """Read the options."""
    sizes = {"nargs": "+", "default": [8, 32, 128, 512], "help": "in bags"}
    return read_options(
        batch_sizes={"type": number(1, 512), **sizes},
        rounds={"type": number(1, 100), "default": 9},
        steps={"type": number(2, 100), "default": 10},
        latency={
            "type": number(0.0, 1000.0),
            "default": 0.0,
            "help": "of answers, in ms",
        },
        json={"type": Path, "help": "file for the numbers"},
    )


if __name__ == "__main__":
    # Or a connection that ends would be reported by both ends, in many words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_ranks(main, 2, read_sizes())
