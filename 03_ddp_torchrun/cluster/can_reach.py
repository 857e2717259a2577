"""Find out in seconds whether hosts can meet, before torchrun waits for minutes.

Run: python 03_ddp_torchrun/cluster/can_reach.py --listen=PORT, on the host that is to
    keep the store; python 03_ddp_torchrun/cluster/can_reach.py HOST:PORT, on each other
Expect: the address and the interface that this host uses to get there, then a `check:`
    that the one who answers is our own listener; or one line that says what is wrong.
"""

import argparse  # it needs Python alone, and does not wait for an import of torch
import contextlib
import os
import signal
import socket
import subprocess
import time

GREETING = b"can_reach.py listens here\n"


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to `host`, or raise an OSError that tells apart the ways to fail."""
    deadline = time.monotonic() + seconds
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the second for no name at all: a..b
        what = f"no address is known for {host}; use its IP address, or mend DNS"
        raise OSError(what) from None
    where = f"{host}:{port} ({', '.join(sorted({str(one[4][0]) for one in found}))})"
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return socket.create_connection((host, port), timeout=left)
        except ConnectionRefusedError:
            what = "refuses: nobody listens at that port, or a firewall rejects"
            if time.monotonic() < deadline:  # the listener may only be late
                time.sleep(0.2)
                continue
        except TimeoutError:
            what = "does not answer: a firewall, or a wrong address"
        except OSError as error:
            what = f"cannot be reached: {error.strerror}"
        raise OSError(f"{where} {what}")


def plain(address: tuple[str, int]) -> str:
    """Return the IP address alone; IPv4 inside IPv6 as the IPv4 that it is."""
    return address[0].removeprefix("::ffff:")


def interface_of(address: str) -> str:
    """Name the interface that has `address`, where `ip` can say it (Linux)."""
    with contextlib.suppress(OSError):
        listed = subprocess.check_output(["ip", "-brief", "address"], text=True)
        for line in listed.splitlines():
            if f" {address}/" in line:
                return line.split()[0].split("@")[0]
    return "an unknown interface"


def check_interface(variable: str) -> None:
    """Raise an OSError if the backend is told to use an interface that is not here."""
    wanted, have = os.environ.get(variable, ""), [n for _, n in socket.if_nameindex()]
    # NCCL takes beginnings of names, or whole ones behind "="; behind "^" stands what
    # it is not to use. gloo takes whole names.
    begins = variable.startswith("NCCL") and not wanted.startswith("=")
    for word in [] if wanted[:1] in ("", "^") else wanted.removeprefix("=").split(","):
        if not any(n.startswith(word) if begins else n == word for n in have):
            what = f"there is no {word} here; there is {', '.join(have)}"
            raise OSError(f"{variable}={wanted}: {what}")


def listen(port: int, callers: int, seconds: float) -> None:
    """Answer so many callers, at every address of this host, as the store will."""
    both, deadline = socket.has_dualstack_ipv6(), time.monotonic() + seconds
    family = socket.AF_INET6 if both else socket.AF_INET
    server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    print(f"listening at port {server.getsockname()[1]}", flush=True)
    for number in range(callers):
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            caller, address = server.accept()
        except TimeoutError:
            raise OSError(f"{number} of {callers} have called in time") from None
        with caller:
            caller.sendall(GREETING)
        print(f"{plain(address)} has reached us", flush=True)
    print(f"check: answered {callers} of {callers}")


def call(host: str, port: int, seconds: float) -> None:
    """Connect, say which way that went, and wait for the greeting."""
    greeting = b""
    with connect(host, port, seconds) as connection, contextlib.suppress(OSError):
        own, other = map(plain, (connection.getsockname(), connection.getpeername()))
        print(f"from {own} ({interface_of(own)}) to {other}", flush=True)
        connection.settimeout(1)
        greeting = connection.recv(len(GREETING))
    who = "can_reach.py" if greeting == GREETING else "something else"
    print(f"check: reached port {port}, where {who} listens")


def main() -> None:
    """Listen or call."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="Try a connection between two hosts.")
    add = parser.add_argument
    add("endpoint", nargs="?", default="", help="HOST:PORT, as for --rdzv-endpoint")
    add("--listen", type=int, metavar="PORT", help="answer callers; 0: a free port")
    add("--callers", type=int, default=1, help="how many to wait for (1)")
    add("--seconds", type=float, help="how long to try (5; --listen: 60)")
    options = parser.parse_args()
    host, _, port = options.endpoint.rpartition(":")
    try:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            check_interface(variable)
        if options.listen is not None:
            listen(options.listen, options.callers, options.seconds or 60)
        elif host and port.isdecimal() and 0 < int(port) < 65536:
            call(host.strip("[]"), int(port), options.seconds or 5)
        else:
            raise OSError(f"expected HOST:PORT, not {options.endpoint!r}; or --listen")
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        parser.exit(2, f"can_reach.py: {reason}\n")


if __name__ == "__main__":
    main()
