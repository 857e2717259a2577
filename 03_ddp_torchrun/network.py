"""Hosts with an address, a name and a link of a chosen rate, made by the Linux kernel.

A *network namespace* is a set of network interfaces that only the processes inside it
see. A *veth pair* is a cable: what goes in at one end comes out at the other. Each host
is a namespace; its cable leads to a bridge, which passes packets on as a switch does.

Nothing here has a name or an address that anything outside can see, and the kernel
removes it with the last process inside: there is nothing to clean up.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

INSIDE = "LAB_INSIDE"  # set in the processes of a laboratory
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # tc is there; Debian lets only root's PATH name it
INTERFACE = "eth0"  # every host's end of its cable
# What `unshare` gives a process of its own: interfaces, name, process numbers, mounts.
OWN = ["--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]


@dataclass
class Host:
    """One host; `holder` is a process that does nothing but keep it in being."""

    number: int
    holder: subprocess.Popen[str]

    @property
    def name(self) -> str:
        """Its host name, which all hosts can resolve."""
        return f"host{self.number}"

    @property
    def address(self) -> str:
        """Its address at its end of the cable."""
        return f"10.0.0.{self.number + 1}"

    def words(self, *command: str) -> list[str]:
        """Return what starts `command` on this host."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--uts", *command]


def check_rate(rate: str) -> str:
    """Return a link rate if `tc` takes it and it is neither zero nor absurd.

    Raises:
        ValueError: it is written in another way.
    """
    match = re.fullmatch(r"([1-9]\d{0,4})(kbit|mbit|gbit)", rate)
    if not match or not 1e6 <= bits_per_second(rate) <= 1e11:
        raise ValueError(
            f"{rate!r} is no rate from 1mbit to 100gbit; 100mbit and 1gbit are"
        )
    return rate


def bits_per_second(rate: str) -> float:
    """Read `100mbit` as a number."""
    return float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


def own_world() -> list[str]:
    """Return the words in front of a command that put it in a world of its own.

    The tools' folders are added to PATH, for this process and all that it starts.

    All that it starts there is killed when it ends, and it is killed when the calling
    process ends, in whatever way that happens.

    Raises:
        OSError: this machine cannot do that.
    """
    if sys.platform != "linux":
        raise OSError("a laboratory is made of Linux namespaces")
    path = os.environ.get("PATH", os.defpath)
    if SYSTEM_FOLDERS not in path:
        os.environ["PATH"] = f"{path}:{SYSTEM_FOLDERS}"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise OSError(f"not found: {', '.join(missing)}; apt install iproute2")
    # Who is not root can be root in a world of their own, if the system allows it.
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    words = ["setpriv", "--pdeathsig=KILL", "unshare", *as_root, *OWN]
    # The whole journey on a small scale: a bridge, and a rate on it.
    attempt = (
        "ip link add lab0 type bridge && tc qdisc add dev lab0 root tbf rate 1mbit "
        "burst 64kb latency 1s && ip link add lab1 type veth peer name lab2"
    )
    trial = subprocess.run(
        [*words, "sh", "-c", attempt], capture_output=True, text=True, check=False
    )
    if trial.returncode:
        reason = " ".join(trial.stderr.split()) or f"status {trial.returncode}"
        raise OSError(f"needs root, or a kernel that lets others do this ({reason})")
    return words


def is_own_world() -> bool:
    """Tell whether this process is the first one in a world of its own."""
    return INSIDE in os.environ and os.getpid() == 1


def run_in_own_world(command: list[str]) -> int:
    """Run a command in a world of its own; return its status when all there has ended.

    Raises:
        OSError: this machine cannot do that.
    """
    words = own_world()

    def stop(number: int, _: FrameType | None) -> NoReturn:
        """Turn a signal into an exit, so that the world is ended first."""
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # In a session of its own, so that Ctrl-C reaches this process only, which then
    # ends the whole world at once. Killed itself, it takes the world along as well.
    process = subprocess.Popen(
        [*words, *command],
        env=os.environ | {INSIDE: "yes"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            ends = [os.pidfd_open(int(pid)) for pid in children.read_text().split()]
        except OSError:
            ends = []  # it has ended by itself
        process.kill()
        process.wait()
        for end in ends:  # wait until the last process in there is gone
            select.select([end], [], [], 10)
            os.close(end)


def run_tool(*words: str) -> str:
    """Run a tool of the system; return what it prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def limit_words(device: str, rate: str) -> list[str]:
    """Return the command that lets `device` send no faster than `rate`."""
    # A token bucket: 64 kB may pass at once, all else at the rate, and what waits for
    # longer than the latency is dropped, as in a switch with a small memory.
    bucket = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
    return ["tc", "qdisc", "replace", "dev", device, *bucket]


def build_hosts(count: int, rate: str | None) -> list[Host]:
    """Make hosts and join them; without a rate the links are as fast as memory."""
    run_tool("ip", "link", "add", "switch", "type", "bridge")
    run_tool("ip", "link", "set", "switch", "up")
    hosts = []
    for number in range(count):
        start = ["unshare", "--net", "--uts", "sh", "-c", "echo up; exec sleep inf"]
        holder = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        holder.stdout.readline()  # the host is there
        host = Host(number, holder)
        hosts.append(host)
        port, namespace = f"port{number}", str(holder.pid)
        cable = ["type", "veth", "peer", INTERFACE, "netns", namespace]
        run_tool("ip", "link", "add", port, *cable)
        run_tool("ip", "link", "set", port, "master", "switch", "up")
        run_tool(*host.words("hostname", host.name))
        run_tool(*host.words("ip", "link", "set", "lo", "up"))
        run_tool(
            *host.words("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
        )
        run_tool(*host.words("ip", "link", "set", INTERFACE, "up"))
        if rate:
            run_tool(*limit_words(port, rate))
            run_tool(*host.words(*limit_words(INTERFACE, rate)))
    # All of them know each other's names, here and nowhere else. Sockets for both kinds
    # of addresses look up the longer form.
    names = [f"{a}{h.address} {h.name}" for h in hosts for a in ("", "::ffff:")]
    with tempfile.NamedTemporaryFile("w", prefix="hosts") as file:
        file.write("\n".join(["127.0.0.1 localhost", *names, ""]))
        file.flush()
        run_tool("mount", "--bind", file.name, "/etc/hosts")
    return hosts


def set_cable(host: Host, state: str) -> None:
    """Pull the cable of a host out of the switch ("down"), or put it back ("up")."""
    run_tool("ip", "link", "set", f"port{host.number}", state)


def bytes_at_switch(hosts: list[Host]) -> list[tuple[int, int]]:
    """Count what each host has sent and received, at the switch."""
    ports = {
        port["ifname"]: port["stats64"]
        for port in json.loads(run_tool("ip", "-statistics", "-json", "link", "show"))
    }
    counts = [ports[f"port{host.number}"] for host in hosts]
    return [(count["rx"]["bytes"], count["tx"]["bytes"]) for count in counts]


# What a process on one of the hosts can find out and change.


def set_own_rate(rate: str) -> None:
    """Limit what this host sends; "unlimited" lifts it."""
    at = ["dev", INTERFACE, "root"]
    subprocess.run(["tc", "qdisc", "del", *at], capture_output=True, check=False)
    if rate != "unlimited":
        run_tool(*limit_words(INTERFACE, rate))


def own_bytes_sent() -> int:
    """Count what this host has put on its cable since it exists."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (own,) = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
    return int(own.split(":")[1].split()[8])
