"""Three ways for two processes to find each other, before they can call by RPC.

Run: python 04_rpc_parameter_server/supervision/rendezvous.py
Expect: in each of the ways, both processes are named and one calls the other.
"""

import os
import socket
import tempfile
import warnings

import torch.distributed.rpc as rpc

from ranks import fail, read_options, start_ranks


def by_environment(_: str, __: int) -> str:
    """Take MASTER_ADDR and MASTER_PORT, where the launcher's store is: the default."""
    return "env://"


def by_address(_: str, port: int) -> str:
    """Name an address and a free port that all can reach; rank 0 opens it."""
    # Or rank 0 would believe that the launcher has opened it.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    return f"tcp://127.0.0.1:{port}"


def by_file(folder: str, _: int) -> str:
    """Name a file that all can write and that does not exist: no port to choose."""
    return f"file://{folder}/rendezvous"


def main(folder: str, port: int) -> None:
    """Join RPC in each way; let alice ask bob for his name, and leave."""
    # RPC would listen where this host's name points to. Interface 1 is loopback.
    os.environ["TP_SOCKET_IFNAME"] = dict(socket.if_nameindex())[1]
    # init_rpc itself calls torch.distributed in a way that torch.distributed warns of.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    rank = int(os.environ["RANK"])
    for way in (by_environment, by_address, by_file):
        options = rpc.TensorPipeRpcBackendOptions(init_method=way(folder, port))
        name = ["alice", "bob"][rank]
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0 and rpc.rpc_sync("bob", os.getpid) == os.getpid():
            fail(f"{way.__name__}: alice has answered herself")
        if rank == 0:
            text = f"{way.__name__:14} | {options.init_method} | bob answers"
            print(text, flush=True)
        rpc.shutdown()
    if rank == 0:
        print("check: alice has called bob after each of 3 rendezvous")


if __name__ == "__main__":
    read_options()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(main, 2, folder, port)
