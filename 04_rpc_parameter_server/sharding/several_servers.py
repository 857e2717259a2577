"""One table on several parameter servers: each holds some rows and pools its own.

Run: python 04_rpc_parameter_server/sharding/several_servers.py --parameter-servers=2
Expect: what each server holds; the time of a step with one server and with several,
    taken in turn; both end with the table of one process.
"""

import os
from argparse import Namespace
from pathlib import Path

from torch.distributed import rpc
from torch.distributed.nn import RemoteModule

from ranks import number, read_options
from roles import on_all_trainers, start_roles
from split_table import TableShard, compare


def resident_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def place_shards(rows: int, n: int) -> list[RemoteModule]:
    """Let n servers make their rows of a table, and say what each then holds."""
    shards = []
    for shard in range(n):
        before = rpc.rpc_sync(f"server{shard}", resident_bytes)
        shards.append(RemoteModule(f"server{shard}", TableShard, (rows, shard, n)))
        shape = shards[-1].remote_parameters()[0].to_here().shape
        grown = (rpc.rpc_sync(f"server{shard}", resident_bytes) - before) / 2**20
        line = f"{n} server(s): server{shard} holds {shape[0]:,} rows, "
        print(
            f"{line}{shape.numel() * 4:,} bytes; its process: +{grown:.0f} MiB",
            flush=True,
        )
    return shards


def place_tables(options: Namespace) -> None:
    """Have the servers make one table, then another; the trainers use both."""
    tables = [place_shards(options.rows, n) for n in (1, options.parameter_servers)]
    work = tables, options.steps, options.rows
    on_all_trainers(options.trainers, compare, *work)


if __name__ == "__main__":
    options = read_options(
        parameter_servers={"type": number(1, 16), "default": 2},
        trainers={"type": number(1, 16), "default": 2},
        # In longer runs rounding alone makes a ReLU differ, and then all that follows.
        steps={"type": number(1, 100), "default": 50},
        rows={"type": number(16, 10**8), "default": 2**15},
    )
    names = ["master", *(f"trainer{rank}" for rank in range(options.trainers))]
    names += [f"server{shard}" for shard in range(options.parameter_servers)]
    start_roles(names, place_tables, options)
