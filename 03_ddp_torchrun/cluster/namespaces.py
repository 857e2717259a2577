"""Start a command in Linux namespaces of its own, and leave nothing behind.

A *namespace* is the part of the system that some processes see for themselves: here
network interfaces, a host name, process numbers and mounts. None of it has a name or an
address that anything outside can see, and the kernel removes a namespace with the last
process in it: there is nothing to clean up.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

INSIDE = "LAB_INSIDE"  # set in the processes of a laboratory
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # tc is there; Debian lets only root's PATH name it
# What `unshare` gives a process of its own: interfaces, name, process numbers, mounts.
NEW = ["--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
# The whole journey on a small scale: a bridge, a rate on it, a veth pair.
TRIAL = (
    "ip link add lab0 type bridge && tc qdisc add dev lab0 root tbf rate 1mbit "
    "burst 64kb latency 1s && ip link add lab1 type veth peer name lab2"
)


def command_prefix() -> list[str]:
    """Return the words in front of a command that put it in namespaces of its own.

    All that it starts there is killed when it ends, and it is killed when the calling
    process ends, in whatever way that happens. The tools' folders are added to PATH,
    for this process and all that it starts.

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
    # Who is not root can be root in a namespace, if the system allows it.
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    prefix = ["setpriv", "--pdeathsig=KILL", "unshare", *as_root, *NEW]
    trial = subprocess.run(
        [*prefix, "sh", "-c", TRIAL], capture_output=True, text=True, check=False
    )
    if trial.returncode:
        reason = " ".join(trial.stderr.split()) or f"status {trial.returncode}"
        raise OSError(f"needs root, or a kernel that lets others do this ({reason})")
    return prefix


def is_inside() -> bool:
    """Tell whether this process is the first one in namespaces of its own."""
    return INSIDE in os.environ and os.getpid() == 1


def stop(number: int, _: FrameType | None) -> NoReturn:
    """Turn a signal into an exit, so that what was started is ended first."""
    sys.exit(128 + number)


def run_inside(command: list[str]) -> int:
    """Run a command in namespaces; return its status when all in there has ended.

    Raises:
        OSError: this machine cannot do that.
    """
    prefix = command_prefix()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # In a session of its own, so that Ctrl-C reaches this process only, which then
    # ends all of them at once. Killed itself, it takes them along as well.
    process = subprocess.Popen(
        [*prefix, *command],
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
