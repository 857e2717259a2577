"""One run of the laboratory: a command on all hosts, and the bytes on their links."""

import os
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from network import Host, build_hosts, bytes_at_switch, check_rate
from watch import Watch

# Once a host has ended with an error the others have so long to notice.
GRACE = 90.0
LOST = 0.02  # of what was sent; a full queue drops packets, and TCP sends them again

# What torchrun is told on the host of this number, among hosts of these addresses.
Compose = Callable[[int, list[str], Namespace], list[str]]


def check_options(options: Namespace) -> None:
    """Raise a ValueError if the options make no sense."""
    if "RANK" in os.environ:
        raise ValueError("start it with python, not torchrun: it starts processes")
    if not 1 <= options.hosts <= 16:
        raise ValueError(f"--hosts must be 1 to 16, not {options.hosts}")
    if not 0 <= options.down_host < options.hosts:
        most = options.hosts - 1
        raise ValueError(f"--down-host must be 0 to {most}, not {options.down_host}")
    if options.nproc_per_node < 1 or (options.up_after or 0) < 0:
        raise ValueError("--nproc-per-node must be 1 or more, --up-after 0 or more")
    script = options.command[0]
    if script.endswith(".py") and not Path(script).is_file():
        raise ValueError(f"there is no script {script}")
    if options.link_rate:
        check_rate(options.link_rate)


def fold(words: list[str]) -> list[str]:
    """Break a command into lines that fit a page."""
    return textwrap.wrap(
        shlex.join(words),
        width=72,
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def environment_of(host: Host, options: Namespace) -> dict[str, str]:
    """Return what the processes on a host find in their environment."""
    return os.environ | {
        "GLOO_SOCKET_IFNAME": options.interface,
        "CUDA_VISIBLE_DEVICES": "",  # this is about the network between the ranks
        "LAB_HOST": str(host.number),
        "LAB_LINK_RATE": options.link_rate or "",
        # Ranks that are started again must not meet the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def run_on_all(
    hosts: list[Host], options: Namespace, torchrun_command: Compose
) -> list[int]:
    """Run the command on all hosts at once; return how each of them ended."""
    watch, processes, threads = Watch(hosts, options), [], []
    for host in hosts:
        words = options.command
        if words[0].endswith(".py"):
            addresses = [other.address for other in hosts]
            words = torchrun_command(host.number, addresses, options)
            if host.number < 2:  # the others' are like that of host1
                watch.say(host.name, "$ " + " \\\n".join(fold(words)))
            words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        process = subprocess.Popen(
            host.words(*words),
            env=environment_of(host, options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        processes.append(process)
        threads.append(threading.Thread(target=watch.follow, args=(host, process)))
        threads[-1].start()
    deadline = float("inf")
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for host, process in zip(hosts, processes, strict=True):
                if process.poll() is None:
                    watch.say("lab  ", f"{host.name} still runs; it is ended")
                    process.kill()
        time.sleep(0.1)
    if deadline == float("inf"):
        for thread in threads:
            thread.join()
    return [process.wait() for process in processes]


def run_laboratory(options: Namespace, torchrun_command: Compose) -> int:
    """Build the hosts, run the command on them, count; return the exit status."""
    hosts = build_hosts(options.hosts, options.link_rate)
    names = ", ".join(f"{host.name} at {host.address}" for host in hosts)
    print(f"lab: {names}; links of {options.link_rate or 'no set rate'}", flush=True)
    before = bytes_at_switch(hosts)
    statuses = run_on_all(hosts, options, torchrun_command)
    after = bytes_at_switch(hosts)
    sent = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    received = [b[1] - a[1] for a, b in zip(before, after, strict=True)]
    for host, out, back in zip(hosts, sent, received, strict=True):
        print(f"{host.name} sent {out / 1e6:.1f} MB, received {back / 1e6:.1f} MB")
    if any(statuses):
        failed = ", ".join(h.name for h, s in zip(hosts, statuses, strict=True) if s)
        print(f"lab: ended with an error: {failed}", file=sys.stderr, flush=True)
        return 1
    print(f"check: {judge_losses(sum(sent), sum(received))}")
    return 0


def judge_losses(sent: int, received: int) -> str:
    """Say what share of the bytes was lost on the links.

    Raises:
        RuntimeError: more than LOST of them.
    """
    if sent <= 1e6:  # the hosts' own traffic may outweigh the command's
        return "the command ended on all hosts; it sent too little to count losses"
    # Now and then a host asks all others at once for an address: a copy for each.
    lost = 1 - received / sent
    if abs(lost) > LOST:
        raise RuntimeError(f"{lost:.1%} of what was sent has not arrived")
    total, share = f"{sent / 1e6:.1f} MB", max(0.0, lost)
    return f"of {total} sent, {share:.1%} was lost (limit {LOST:.0%})"
