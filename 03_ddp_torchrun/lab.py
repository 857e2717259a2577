"""Run a script on several hosts that are all made inside one Linux machine.

Run: python 03_ddp_torchrun/lab.py --link-rate=100mbit -- 03_ddp_torchrun/train.py
Needs: Linux with iproute2 and util-linux, as root or where the kernel lets every user
    make namespaces. The ranks use the CPU: this is about the network between them.
Expect: the torchrun command of each host, what each host prints, what crossed the
    links, and a `check:` that all that was sent has arrived.
Before: 03_ddp_torchrun/fault_tolerance/world_changes.py
Next: 03_ddp_torchrun/slow_link.py, which measures what a slow link costs.
"""

import argparse
import os
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import NoReturn

from network import (
    INTERFACE,
    Host,
    build_hosts,
    bytes_at_switch,
    check_rate,
    is_own_world,
    run_in_own_world,
    set_cable,
)

# In a world of its own a port cannot be taken by anyone else.
PORT = 4000
# Once a host has ended with an error the others have so long to notice.
GRACE = 90.0
LOST = 0.02  # of what was sent; a full queue drops packets, and TCP sends them again


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def torchrun_words(
    host: Host, hosts: list[Host], args: argparse.Namespace
) -> list[str]:
    """Compose the command that one types on `host`; all but two words are the same."""
    return [
        "torchrun",
        f"--nnodes={args.nnodes or len(hosts)}",
        f"--nproc-per-node={args.nproc_per_node}",
        *([f"--max-restarts={args.max_restarts}"] if args.max_restarts else []),
        "--rdzv-backend=c10d",
        "--rdzv-id=lab",
        f"--rdzv-endpoint={hosts[0].address}:{PORT}",
        # The first host keeps the store in which all of them meet.
        f"--rdzv-conf=is_host={int(host is hosts[0])},{args.rdzv_conf}".rstrip(","),
        # How the others reach this host.
        f"--local-addr={host.address}",
        *args.command,
    ]


def fold(words: list[str]) -> list[str]:
    """Break a command into lines that fit a page."""
    return textwrap.wrap(
        shlex.join(words),
        width=72,
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )


class Watch:
    """Prints what the hosts print, and pulls a cable at the right moment."""

    def __init__(self, hosts: list[Host], args: argparse.Namespace) -> None:
        """Read from `args` which cable to pull, and when."""
        self.hosts, self.args = hosts, args
        self.lock = threading.Lock()
        self.is_cut = args.cut_when is None

    def say(self, name: str, text: str) -> None:
        """Print one line behind its name."""
        with self.lock:
            try:
                for line in text.split("\n"):
                    print(f"{name} | {line}", flush=True)
            except BrokenPipeError:
                os._exit(1)  # nobody reads any more; all hosts end with this process

    def follow(self, host: Host, process: subprocess.Popen[str]) -> None:
        """Print what runs on one host, to its end."""
        assert process.stdout is not None
        for line in process.stdout:
            self.say(host.name, line.rstrip("\n"))
            if not self.is_cut and self.args.cut_when in line:
                self.is_cut = True
                threading.Thread(target=self.cut, daemon=True).start()

    def cut(self) -> None:
        """Pull the cable; put it back later if that was asked for."""
        host = self.hosts[self.args.cut_host]
        set_cable(host, "down")
        self.say("lab  ", f"the cable of {host.name} is pulled")
        if self.args.mend_after is not None:
            time.sleep(self.args.mend_after)
            set_cable(host, "up")
            self.say("lab  ", f"the cable of {host.name} is back")


def run_on_all(hosts: list[Host], args: argparse.Namespace) -> list[int]:
    """Run the command on all hosts at once; return how each of them ended."""
    watch, processes, threads = Watch(hosts, args), [], []
    is_script = args.command[0].endswith(".py")
    for host in hosts:
        words = torchrun_words(host, hosts, args) if is_script else args.command
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": args.interface,
            "CUDA_VISIBLE_DEVICES": "",
            "LAB_HOST": str(host.number),
            # Ranks that are started again must not meet the addresses of dead ones.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "LAB_LINK_RATE": args.link_rate or "",
        }
        if is_script:
            if host.number < 2:  # the others' are like that of host1
                watch.say(host.name, "$ " + " \\\n".join(fold(words)))
            words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        process = subprocess.Popen(
            host.words(*words),
            env=environment,
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


def run_lab(args: argparse.Namespace) -> int:
    """Build the hosts, run the command on them, count; return the exit status."""
    hosts = build_hosts(args.hosts, args.link_rate)
    names = ", ".join(f"{host.name} at {host.address}" for host in hosts)
    print(f"lab: {names}; links of {args.link_rate or 'no set rate'}", flush=True)
    before = bytes_at_switch(hosts)
    statuses = run_on_all(hosts, args)
    after = bytes_at_switch(hosts)
    sent = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    received = [b[1] - a[1] for a, b in zip(before, after, strict=True)]
    for host, out, back in zip(hosts, sent, received, strict=True):
        print(f"{host.name} sent {out / 1e6:.1f} MB, received {back / 1e6:.1f} MB")
    if any(statuses):
        failed = ", ".join(h.name for h, s in zip(hosts, statuses, strict=True) if s)
        print(f"lab: ended with an error: {failed}", file=sys.stderr, flush=True)
        return 1
    # Now and then a host asks all others at once for an address: a copy for each.
    lost = 1 - sum(received) / max(1, sum(sent))
    if abs(lost) > LOST and sum(sent) > 1e6:
        raise RuntimeError(f"{lost:.1%} of what was sent has not arrived")
    share = max(0.0, lost)
    total = f"{sum(sent) / 1e6:.1f} MB"
    print(f"check: of {total} sent, {share:.1%} was lost (limit {LOST:.0%})")
    return 0


def parse_args() -> argparse.Namespace:
    """Read the command line; what stands after `--` is the command for every host."""
    parser = argparse.ArgumentParser(
        description="Run a script on hosts made of network namespaces.",
        usage="lab.py [options] -- SCRIPT.py [...] | COMMAND [...]",
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="how many (2)")
    add("--link-rate", metavar="RATE", help="such as 100mbit; none: as fast as it gets")
    add("--nproc-per-node", type=int, default=1, help="ranks on each host (1)")
    add("--nnodes", help="MIN:MAX hosts; all of them are needed if not given")
    add("--max-restarts", type=int, default=0, help="torchrun's (0)")
    add("--rdzv-conf", default="", help="added to torchrun's, KEY=VALUE,...")
    add("--interface", default=INTERFACE, help="the value of GLOO_SOCKET_IFNAME")
    add("--cut-host", type=int, help="whose cable to pull (the last host's)")
    add("--cut-when", metavar="TEXT", help="pull it when a host prints this")
    add("--mend-after", type=float, metavar="SECONDS", help="put it back so much later")
    add("command", nargs="+", help="a script for torchrun, or any other command")
    parser.error = lambda message: refuse(  # type: ignore[method-assign]
        f"{message}; the command for the hosts stands after --"
    )
    args = parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if not 1 <= args.hosts <= 16:
        refuse(f"--hosts must be 1 to 16, not {args.hosts}")
    if args.nproc_per_node < 1 or (args.mend_after or 0) < 0:
        refuse("--nproc-per-node must be 1 or more, --mend-after 0 or more")
    if args.cut_host is None:
        args.cut_host = args.hosts - 1
    if not 0 <= args.cut_host < args.hosts:
        refuse(f"--cut-host must be 0 to {args.hosts - 1}, not {args.cut_host}")
    if args.command[0].endswith(".py") and not Path(args.command[0]).is_file():
        refuse(f"there is no script {args.command[0]}")
    try:
        args.link_rate = args.link_rate and check_rate(args.link_rate)
    except ValueError as error:
        refuse(f"--link-rate: {error}")
    return args


def main() -> None:
    """Go into a world of its own, build the laboratory there, and leave nothing."""
    args = parse_args()
    if is_own_world():
        sys.exit(run_lab(args))
    try:
        sys.exit(run_in_own_world([sys.executable, *sys.argv]))
    except OSError as error:
        refuse(str(error))


if __name__ == "__main__":
    main()
