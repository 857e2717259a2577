"""Whoever can connect can run anything: what RPC trusts, and where it listens.

Run: python 04_rpc_parameter_server/supervision/trust.py
Expect: a stranger makes a server compute what the server never offered; then where both
    processes listen. (The list of addresses needs Linux.)
"""

import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc

from ranks import fail, read_options
from roles import start_roles

EXPRESSION = "(sum(range(10)), __import__('os').getpid())"


def listening() -> list[str]:
    """List the addresses at which this process listens, one for each port (Linux)."""
    links = (
        os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()
    )
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:  # 0A: listens
                words = bytes.fromhex(fields[1].split(":")[0])
                # Each group of four bytes is in the machine's own order.
                parts = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                addresses.append(str(ipaddress.ip_address(b"".join(parts))))
    return addresses


def be_stranger(_: Any) -> None:
    """Call the server; all that a stranger needs for that is the port."""
    total, pid = rpc.rpc_sync("server", eval, args=(EXPRESSION,))
    is_server = pid == rpc.rpc_sync("server", os.getpid) and pid != os.getpid()
    print(f"stranger: server, evaluate {EXPRESSION}")
    print(f"server  : {total}, in the server's own process: {is_server}")
    right = [total == 45, is_server]
    if sys.platform == "linux":
        at_server = rpc.rpc_sync("server", listening)
        addresses = sorted(set(at_server) | set(listening()))
        print(f"server and stranger listen at {', '.join(addresses)} only")
        right += [bool(at_server), addresses == ["127.0.0.1"]]
        before = len(listening())
        plain = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        everywhere = listening()[before:] or listening()
        addresses = sorted(set(everywhere) - {"127.0.0.1"})
        print(f"a TCPStore made for 127.0.0.1 listens at {', '.join(addresses)}: all")
        with socket.create_connection((plain.host, plain.port)):
            right.append(addresses == ["::"] or addresses == ["0.0.0.0"])
    if not all(right):
        fail(f"not so: {right}")
    print(f"check: {len(right)} statements about RPC and its store", flush=True)


if __name__ == "__main__":
    read_options()
    start_roles(["stranger", "server"], be_stranger)
