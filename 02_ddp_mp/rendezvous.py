"""Three ways in which the ranks of a group find each other.

Run: python 02_ddp_mp/rendezvous.py
Expect: the same two ranks join three times, by environment variables, by an address and
    by a store, and each time count two ranks.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

from ranks import check, gather, say

WORLD_SIZE = 2
LIMIT = timedelta(seconds=60)  # a rank that waits longer for the others fails


def by_environment(rank: int, port: int) -> None:
    """Read everything from four variables, which torchrun sets for its ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    dist.init_process_group("gloo", timeout=LIMIT)


def by_address(rank: int, port: int) -> None:
    """Name the place where rank 0 opens a store, and say who this is."""
    me = {"rank": rank, "world_size": WORLD_SIZE, "timeout": LIMIT}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **me)


def by_store(rank: int, port: int) -> None:
    """Use a store that is there already and holds a port that the system chose."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    me = {"rank": rank, "world_size": WORLD_SIZE, "timeout": LIMIT}
    dist.init_process_group("gloo", store=store, **me)


def main(rank: int, ports: list[int]) -> None:
    """Join in each way, count the ranks, leave."""
    counts = []
    for way, port in zip((by_environment, by_address, by_store), ports, strict=True):
        way(rank, port)
        counts.append(len(gather(rank)))
        say(f"{way.__name__:14} | {counts[-1]} ranks")
        if way == by_store:
            check(counts == [WORLD_SIZE] * 3, f"{WORLD_SIZE} ranks joined in 3 ways")
        dist.destroy_process_group()


def free_port() -> int:
    """Ask the system for a port; another process may take it before the ranks do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, ([free_port(), free_port(), store.port],), nprocs=WORLD_SIZE)
