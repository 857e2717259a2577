"""Hosts with an address, a name and a link of a chosen rate, made by the Linux kernel.

Each host is a *network namespace*, a set of interfaces that only the processes in it
see. A *veth pair* is its link: what goes in at one end comes out at the other. The far
ends meet in a *bridge*, which passes packets on as a switch does.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass

INTERFACE = "eth0"  # every host's end of its link


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
        """Its address at its end of the link."""
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
        pair = ["type", "veth", "peer", INTERFACE, "netns", namespace]
        run_tool("ip", "link", "add", port, *pair)
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


def set_link(host: Host, state: str) -> None:
    """Take the link of a host "down" at the switch, or "up" again."""
    run_tool("ip", "link", "set", f"port{host.number}", state)


def bytes_at_switch(hosts: list[Host]) -> list[tuple[int, int]]:
    """Count what each host has sent and received, at the switch."""
    ports = {
        port["ifname"]: port["stats64"]
        for port in json.loads(run_tool("ip", "-statistics", "-json", "link", "show"))
    }
    counts = [ports[f"port{host.number}"] for host in hosts]
    return [(count["rx"]["bytes"], count["tx"]["bytes"]) for count in counts]
