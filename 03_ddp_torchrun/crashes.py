"""Kill a training run again and again: it ends with the weights of one left in peace.

Run: python 03_ddp_torchrun/crashes.py
Needs: this folder and requirements.txt; Linux or macOS.
Expect: one run of train_elastic.py in peace, then one that is killed by SIGKILL at
    random moments, now a rank and now the launcher, and started again each time; a
    `check:` that both ended with the same weights, bit for bit.
Before: 03_ddp_torchrun/train_elastic.py
Next: 03_ddp_torchrun/world_changes.py, ranks that leave and others that come.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from options import OneLineParser, fail, positive_int
from resume import previous
from snapshot import load_snapshot

PATIENCE = 300.0  # seconds for a run to write its next snapshot


def torchrun_command(args: argparse.Namespace, snapshot: Path) -> list[str]:
    """Return what a reader would type; it is the same for every start."""
    script = Path(__file__).with_name("train_elastic.py")
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={args.ranks}", str(script)),
        *(f"--snapshot={snapshot}", f"--snapshot-every={args.snapshot_every}"),
        *(f"--max-steps={args.steps}", "--batch-size=16", "--dropout=0.1"),
    ]


def step_of(snapshot: Path) -> int:
    """Return how far a run has come, by its newest snapshot; 0 if there is none."""
    # Between two renames there is no newest, but the one before it.
    for path in (snapshot, previous(snapshot)):
        if path.exists():
            return torch.load(path, weights_only=True)["training"]["step"]
    return 0


def run_until_killed(command: list[str], snapshot: Path, victim: int) -> bool:
    """Start a run and kill one of its processes soon after its next snapshot.

    Args:
        command: starts the launcher.
        snapshot: the file that it writes.
        victim: number of the rank to kill, or -1 for the launcher.

    Returns:
        Whether it could be killed before it was through.
    """
    written = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
    launcher = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    ranks: list[psutil.Process] = []
    give_up = time.monotonic() + PATIENCE
    try:
        while not snapshot.exists() or snapshot.stat().st_mtime_ns == written:
            if launcher.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"no snapshot; by hand: {' '.join(command)}")
            time.sleep(0.01)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        time.sleep(random.uniform(0, 0.5))  # in a step, or while the next is written
        by_number = {one.environ().get("RANK"): one for one in ranks}
        target = launcher if victim < 0 else by_number[str(victim)]
        target.kill()
    except (psutil.NoSuchProcess, KeyError):
        return False  # the run has just ended by itself
    finally:
        # A launcher ends the ranks that are left when one has died; ranks without a
        # launcher end themselves.
        _, alive = psutil.wait_procs(ranks, timeout=60)
        for process in [*alive, launcher]:
            process.kill()
        launcher.wait()
    return True


def different_values(one: Path, other: Path) -> tuple[int, int]:
    """Compare two snapshots bit for bit; return how many weights differ, and of all."""
    weights = [
        torch.cat([p.detach().flatten() for p in load_snapshot(path)[0].parameters()])
        for path in (one, other)
    ]
    first, second = (each.view(torch.int32) for each in weights)
    return int((first != second).sum()), len(first)


def main() -> None:
    """Train in peace, train under fire, compare."""
    parser = OneLineParser(
        description="Kill a training run; compare what it ends with."
    )
    add = parser.add_argument
    add("--kills", type=positive_int, default=3, help="how often to kill")
    add("--ranks", type=positive_int, default=2, help="of each run")
    add("--steps", type=positive_int, default=60, help="of the whole training")
    add("--snapshot-every", type=positive_int, default=5, help="steps between two")
    add("--seed", type=int, default=0, help="of the moments and victims")
    args = parser.parse_args()
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own processes")
    # Ctrl-C becomes an exit, so that what was started is ended first.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if args.snapshot_every * (args.kills + 1) >= args.steps:
        fail(f"--steps={args.steps} ends before {args.kills} kills; give more steps")
    random.seed(args.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun says that it does so
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder, "calm.pt"), Path(folder, "killed.pt")
        subprocess.run(
            torchrun_command(args, calm), check=True, stdout=subprocess.DEVNULL
        )
        print(f"in peace: {step_of(calm)} steps", flush=True)
        command, kills = torchrun_command(args, killed), 0
        while kills < args.kills:
            victim = random.randrange(-1, args.ranks)
            if not run_until_killed(command, killed, victim):
                break
            kills += 1
            name = "the launcher" if victim < 0 else f"rank {victim}"
            print(f"killed {name}; newest snapshot: step {step_of(killed)}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        different, all_of_them = different_values(calm, killed)
        result = f"killed {kills} times, {different} of {all_of_them:,} weights differ"
        if different or kills == 0 or step_of(killed) != step_of(calm):
            raise RuntimeError(result)
    print(f"check: {result} from those of a run in peace")


if __name__ == "__main__":
    main()
