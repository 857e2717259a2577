"""`LOCAL_RANK == 0` is the first rank of a machine; the main process has rank 0.

Run: with two agents, as the page shows, on one machine or on two:
    torchrun --nnodes=2 --nproc-per-node=1 ... 03_ddp_torchrun/rules/main_process.py
Expect: where the first rank of each machine writes the log, it has a line too many;
    where rank 0 does, it is the log of one process.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ranks import check, gather, join, leave, say

LINE = "step 1 | loss 0.5"


def is_first_on_its_machine() -> bool:
    """Tell who may do what is needed once on each machine, such as a download."""
    return int(os.environ["LOCAL_RANK"]) == 0


def is_rank_zero() -> bool:
    """Tell who may do what is needed once in the whole job: a log, wandb.init()."""
    return dist.get_rank() == 0


def prepare_once(folder: Path) -> None:
    """Make a folder on each machine's own disk, download: one rank does, all wait."""
    if is_first_on_its_machine():
        folder.mkdir(exist_ok=True)  # it is there if the run has been restarted
    dist.barrier()  # fails after the group's timeout: give the group a longer one


def write_log(folder: Path, is_main_process: Callable[[], bool]) -> str:
    """Write a line, and return what every rank reads in the file afterwards."""
    path = folder / is_main_process.__name__
    if is_main_process():
        with path.open("a") as log:
            log.write(f"{LINE}\n")
    dist.barrier()  # no rank reads before the writers have written
    return path.read_text()


def main() -> None:
    """Let each kind of main process write to one folder that all ranks see."""
    join(only_cpu=True)
    places = gather((dist.get_rank(), int(os.environ["LOCAL_RANK"])))
    machines = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    say("  ".join("rank {}, LOCAL_RANK {}".format(*place) for place in places))
    with tempfile.TemporaryDirectory() as own_folder:
        shared = Path(gather(own_folder)[0])  # in a real job on a network file system
        machine = dist.get_rank() // int(os.environ["LOCAL_WORLD_SIZE"])
        own_disk = shared / f"machine {machine}"
        prepare_once(own_disk)
        by_local_rank = write_log(shared, is_first_on_its_machine)
        by_rank = write_log(shared, is_rank_zero)
        say(f"is_first_on_its_machine | lines in the log: {by_local_rank.count(LINE)}")
        say(f"is_rank_zero            | lines in the log: {by_rank.count(LINE)}")
        check(
            own_disk.is_dir()
            and by_rank == f"{LINE}\n"
            and by_local_rank == f"{LINE}\n" * machines,
            "is_rank_zero writes the log of one process, LOCAL_RANK one a machine",
        )
    leave()


if __name__ == "__main__":
    main()
