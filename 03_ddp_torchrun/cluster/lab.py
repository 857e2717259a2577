"""Run a script, or any command, on several hosts made inside one Linux machine.

Run: python 03_ddp_torchrun/cluster/lab.py --link-rate=100mbit --
    03_ddp_torchrun/train.py --max-steps=20
Expect: the torchrun command of each host, what each host prints, what crossed the
    links, and a `check:` that all that was sent has arrived.
"""

# Neither this file nor its modules import torch: only the ranks have to wait for that.
import argparse
import sys

from laboratory import check_options, run_laboratory
from namespaces import is_inside, run_inside

PORT = 4000  # with interfaces of its own a laboratory shares its ports with nobody


def torchrun_command(
    host: int, addresses: list[str], options: argparse.Namespace
) -> list[str]:
    """Compose what one types on host number `host`; all but two words are the same."""
    return [
        "torchrun",
        f"--nnodes={options.nnodes or len(addresses)}",
        f"--nproc-per-node={options.nproc_per_node}",
        *([f"--max-restarts={options.max_restarts}"] if options.max_restarts else []),
        "--rdzv-backend=c10d",
        "--rdzv-id=lab",
        f"--rdzv-endpoint={addresses[0]}:{PORT}",
        # The first host keeps the store in which all of them meet.
        f"--rdzv-conf=is_host={int(host == 0)},{options.rdzv_conf}".rstrip(","),
        # How the others reach this host.
        f"--local-addr={addresses[host]}",
        *options.command,
    ]


def parser_of_options() -> argparse.ArgumentParser:
    """Describe the command line; what stands after `--` is for the hosts."""
    parser = argparse.ArgumentParser(
        description="Run a command on hosts made of network namespaces.",
        usage="lab.py [options] -- SCRIPT.py [...] | COMMAND [...]",
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="how many (2)")
    add("--link-rate", metavar="RATE", help="such as 100mbit; none: as fast as it gets")
    add("--nproc-per-node", type=int, default=1, help="ranks on each host (1)")
    add("--nnodes", help="MIN:MAX hosts; all of them are needed if not given")
    add("--max-restarts", type=int, default=0, help="torchrun's (0)")
    add("--rdzv-conf", default="", help="added to torchrun's, KEY=VALUE,...")
    add("--interface", default="eth0", help="the value of GLOO_SOCKET_IFNAME")
    add("--down-host", type=int, help="whose link goes down (the last host's)")
    add("--down-when", metavar="TEXT", help="it does when a host prints this")
    add(
        "--up-after", type=float, metavar="SECONDS", help="it is up again so much later"
    )
    add("command", nargs="+", help="a script for torchrun, or any other command")
    parser.error = lambda message: parser.exit(  # type: ignore[method-assign]
        2, f"lab.py: {message}; the command for the hosts stands after --\n"
    )
    return parser


def main() -> None:
    """Go into namespaces, build the laboratory there, and leave nothing."""
    parser = parser_of_options()
    options = parser.parse_args()
    if options.down_host is None:
        options.down_host = options.hosts - 1
    try:
        check_options(options)
        if not is_inside():
            sys.exit(run_inside([sys.executable, *sys.argv]))
    except (OSError, ValueError) as error:
        parser.exit(2, f"lab.py: {error}\n")
    sys.exit(run_laboratory(options, torchrun_command))


if __name__ == "__main__":
    main()
