"""Elastic membership: ranks leave a run and others join; no sample is lost or repeated.

Run: python 03_ddp_torchrun/fault_tolerance/world_changes.py
Expect: two agents of torchrun train together, each with one rank, as two machines would
    do; a third joins; one of the first is killed; the others finish an epoch. A
    `check:` that the global batch size stayed, and that each sample was seen once.
"""

import re
import sys

from ranks import read_options
from torchruns import Torchruns, free_port

TRAIN = ["--batch-size=32", "--samples=2048", "--max-epochs=1000"]
TRAIN += ["--block-size=64", "--width=64"]
TRAIN += ["--checkpoint=run.pt", "--checkpoint-every=8"]


def agent_options(port: int, is_host: bool) -> list[str]:
    """Return torchrun's options on each machine; on one it holds the rendezvous."""
    # last_call_timeout: seconds to wait for more once there are enough (30 by default).
    conf = f"is_host={int(is_host)},last_call_timeout=1,keep_alive_interval=1"
    return [
        *("--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=world", "--local-addr=127.0.0.1", f"--rdzv-conf={conf}"),
    ]


def what_ranks_said(lines: list[str]) -> tuple[bool, str]:
    """Tell whether a run whose ranks said this is as it should be, and what it was."""
    text = "\n".join(lines)
    worlds = re.findall(r"^ranks: (\d)", text, re.M)
    batch_sizes = re.findall(r"global batch size (?:x steps = )?(\d+)", text)
    # A rank that finds a sample lost or seen twice ends with an error instead.
    pattern = r"^epoch (\d+) \| global .* = 2048 different samples$"
    epochs = {int(epoch) for epoch in re.findall(pattern, text, re.M)}
    # In between there may be smaller worlds, until the last rank has arrived.
    is_right = "3" in worlds and worlds[-1] == "2" and set(batch_sizes) == {"64"}
    is_right = is_right and epochs == set(range(max(epochs, default=0) + 1))
    batch_size, ranks = " or ".join(sorted(set(batch_sizes))), ", ".join(worlds)
    seen = f"{len(epochs)} epoch(s) of 2048 different samples"
    return is_right, f"worlds of {ranks} ranks, global batch size {batch_size}, {seen}"


def main() -> None:
    """Train with two ranks, then three, then two again."""
    read_options()
    port = free_port()
    heard: list[str] = []

    with Torchruns() as runs:

        def wait_for(pattern: str) -> None:
            lines = runs.wait_for(pattern)
            heard.extend(lines)
            for line in lines:
                if re.match(r"ranks|checkpoint: resuming|epoch \d+ \| global", line):
                    print(f"  {line}", flush=True)

        print("agents A and B start", flush=True)
        runs.start("A", agent_options(port, is_host=True), TRAIN)
        runs.start("B", agent_options(port, is_host=False), TRAIN)
        wait_for("ranks: 2")
        runs.wait_for_checkpoint("run.pt")
        print("agent C joins", flush=True)
        runs.start("C", agent_options(port, is_host=False), TRAIN)
        wait_for("ranks: 3")
        wait_for("checkpoint: resuming")
        runs.wait_for_checkpoint("run.pt")
        print("agent B is killed", flush=True)
        runs.kill("B")
        wait_for("ranks: 2")
        wait_for("checkpoint: resuming")
        wait_for("epoch .* different samples")
    is_right, result = what_ranks_said(heard)
    if not is_right:
        sys.exit(f"not what was expected: {result}")
    print(f"check: {result}")


if __name__ == "__main__":
    main()
