"""Find out in seconds whether hosts can meet, before torchrun waits for minutes.

Run: python 03_ddp_torchrun/can_reach.py --listen=PORT --callers=1, on the host that is
         to keep the store; python 03_ddp_torchrun/can_reach.py HOST:PORT, on each other
Needs: nothing but Python; it does not import torch.
Expect: the address and the interface that this host uses to get there, then a `check:`
    that the one who answers is our own listener; or one line that says what is wrong.
Before: 03_ddp_torchrun/lab.py
Next: 03_ddp_torchrun/listening.py, which shows who else can get there.
"""

import argparse
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

GREETING = b"can_reach.py listens here\n"


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_interface(name: str) -> None:
    """Refuse if the backend is told to use an interface that this host does not have.

    NCCL takes a list of beginnings of names, gloo a list of whole names.
    """
    wanted = os.environ.get(name, "")
    have = [own for _, own in socket.if_nameindex()]
    for word in filter(None, wanted.removeprefix("^").removeprefix("=").split(",")):
        is_there = word in have or (
            name == "NCCL_SOCKET_IFNAME" and any(own.startswith(word) for own in have)
        )
        if not is_there:
            refuse(
                f"{name}={wanted}: there is no {word} here; there is {', '.join(have)}"
            )


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to any address of `host`, and tell apart the ways in which that fails."""
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the second for no name at all: a..b
        refuse(f"no address is known for {host}; use its IP address, or mend DNS")
    address = ", ".join(dict.fromkeys(str(one[4][0]) for one in found))
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return socket.create_connection((host, port), timeout=left)
        except ConnectionRefusedError:
            # The host is there and says no. The listener may only be late.
            if time.monotonic() > deadline:
                refuse(f"{where} ({address}) is up, but nobody listens at that port")
        except TimeoutError:
            refuse(
                f"{where} ({address}) does not answer: a firewall, or a wrong address"
            )
        except OSError as error:
            refuse(f"{where} ({address}) cannot be reached: {error.strerror}")
        time.sleep(0.2)


def interface_of(address: str) -> str:
    """Name the interface that has `address`, where the system says so (Linux)."""
    if ":" in address and Path("/proc/net/if_inet6").exists():
        number = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(number):
                return line.split()[-1]
    elif sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                try:  # 0x8915 asks for the address of an interface
                    packed = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))
                except OSError:
                    continue  # it has none
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return "an unknown interface"


def listen(port: int, seconds: float, callers: int) -> None:
    """Answer so many callers, at every address of this host, as the store will."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    deadline = time.monotonic() + seconds
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        refuse(f"cannot listen at port {port}: {reason}; take another")
    with listener:
        print(f"listening at port {listener.getsockname()[1]}", flush=True)
        for number in range(callers):
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                caller, address = listener.accept()
            except TimeoutError:
                refuse(f"{number} of {callers} have called within {seconds:g} s")
            with caller:
                caller.sendall(GREETING)
            print(f"{address[0].removeprefix('::ffff:')} has reached us", flush=True)
    print(f"check: answered {callers} of {callers}")


def main() -> None:
    """Listen or call."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Try a connection between two hosts.")
    add = parser.add_argument
    add("endpoint", nargs="?", help="HOST:PORT, as for torchrun's --rdzv-endpoint")
    add("--listen", type=int, metavar="PORT", help="answer callers; 0: a free port")
    add("--callers", type=int, default=1, help="how many to wait for (1)")
    add("--seconds", type=float, help="how long to try (5; --listen: 60)")
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = 5 if args.listen is None else 60
    if args.callers < 1:
        refuse(f"--callers must be 1 or more, not {args.callers}")
    if not 0 < args.seconds <= 86400:
        refuse(f"--seconds must be above 0, and a day at most, not {args.seconds:g}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        check_interface(name)
    if args.listen is not None:
        if not 0 <= args.listen < 65536:
            refuse(f"--listen must be 0 to 65535, not {args.listen}")
        listen(args.listen, args.seconds, args.callers)
        return
    match = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})", args.endpoint or "")
    if not match or not 0 < int(match[2]) < 65536:
        refuse(f"expected HOST:PORT, not {args.endpoint!r}; or --listen=PORT")
    with connect(match[1].strip("[]"), int(match[2]), args.seconds) as call:
        own, other = call.getsockname()[0], call.getpeername()[0]
        print(f"from {own} ({interface_of(own)}) to {other}", flush=True)
        call.settimeout(1)
        try:
            greeted = call.recv(len(GREETING)) == GREETING
        except OSError:
            greeted = False
    who = "can_reach.py" if greeted else "something else"
    print(f"check: reached port {match[2]}, where {who} listens")


if __name__ == "__main__":
    main()
