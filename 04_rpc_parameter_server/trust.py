"""Whoever can connect can run anything: what RPC trusts, and where it listens.

Run: python 04_rpc_parameter_server/trust.py
Needs: nothing but requirements.txt. The list of ports needs Linux.
Expect: a stranger makes a server work out a sum that the server never offered; then
    where each process listens; then a `check:`.
Before: 04_rpc_parameter_server/train.py
Next: 04_rpc_parameter_server/README.md
"""

import argparse
import ipaddress
import os
import socket
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.rpc as rpc

from options import refuse
from world import launch

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


def be_server_or_stranger(name: str, _: dist.Store) -> None:
    """Be the server, which does nothing, or the stranger, who only needed the port."""
    if name == "server":
        return
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
    print(f"check: {len(right)} statements, {right.count(False)} wrong", flush=True)
    if not all(right):
        sys.exit(1)


def main() -> None:
    """Start both."""
    parser = argparse.ArgumentParser(description="Show what RPC trusts.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    launch(["server", "stranger"], be_server_or_stranger)


if __name__ == "__main__":
    main()
