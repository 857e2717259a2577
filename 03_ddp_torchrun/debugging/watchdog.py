"""A watchdog for a training loop: it notices a hang, writes it down, ends the run."""

import faulthandler
import os
import pickle
import socket
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d


def flight_record() -> bytes:
    """Return this rank's last collectives, pickled as `torchfrtrace` wants them.

    TORCH_FR_BUFFER_SIZE, in the environment when the group is made, says how many are
    kept (by default 2,000, with 0 none). No public function returns them.
    """
    # NCCL has a recorder of its own, which a CPU build of torch lacks. (Not run.)
    has_nccl = "nccl" in dist.get_backend_config()
    name = "_dump_nccl_trace" if has_nccl else "_dump_fr_trace"
    record = pickle.loads(getattr(_distributed_c10d, name)())
    # torch 2.13 lists all of gloo's groups under one name, "", and keeps one of them;
    # torchfrtrace needs each.
    groups = record["pg_config"]
    if groups.pop("", None):
        for one in dist.distributed_c10d._get_all_pg_configs():
            name, ranks = one["pg_name"], str(one["ranks"])
            groups[name] = {"name": name, "desc": one["pg_desc"], "ranks": ranks}
        # Calls in groups that are gone must stay: it counts them. List such a group as
        # one of this rank alone.
        for name, desc in (call["process_group"] for call in record["entries"]):
            gone = {"name": name, "desc": desc, "ranks": str([dist.get_rank()])}
            groups.setdefault(name, gone)
    return pickle.dumps(record)


class Watchdog:
    """Write down where this rank is, and what it has called, when its steps stop.

    Make one on every rank, with a process group, and call `step` in the loop. If no
    step comes for `seconds`, two files appear in `folder`: stack_RANK.txt, which says
    in which line each thread is, and record_RANK, for `torchfrtrace`. An earlier run's
    are renamed to old-... at the start. After `grace` further seconds the process
    ends, and its launcher ends the others. If the hang keeps Python's lock (GIL),
    without which no thread of Python runs, a timer in C prints the stacks to stderr,
    and ends the process after `grace` seconds more.
    """

    def __init__(self, seconds: float, folder: Path, grace: float = 60.0) -> None:
        """Say which process this rank is, and begin to watch."""
        folder.mkdir(exist_ok=True)
        self.seconds, self.folder, self.grace = seconds, folder, grace
        self.rank, self.has_stepped = dist.get_rank(), threading.Event()
        self.is_stopped = False
        for name in (f"stack_{self.rank}.txt", f"record_{self.rank}"):
            if (folder / name).exists():  # an earlier run's; torchfrtrace finds record_
                (folder / name).replace(folder / f"old-{name.replace('_', '-')}")
        self.say(f"is process {os.getpid()} on {socket.gethostname()}")
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        self.step()

    def say(self, text: str) -> None:
        """Print a line by one write, or lines of several ranks would run together."""
        print(f"rank {self.rank} {text}\n", end="", flush=True)

    def step(self) -> None:
        """Tell the watchdog that the loop makes progress."""
        self.has_stepped.set()
        # A timer in C, put off by each step, needs no GIL.
        faulthandler.dump_traceback_later(self.seconds + 2 * self.grace, exit=True)

    def stop(self) -> None:
        """Stop for good: what comes after the last step may take long."""
        faulthandler.cancel_dump_traceback_later()
        self.is_stopped = True
        self.has_stepped.set()

    def watch(self) -> None:
        """Wait for a step, again and again; write and end when none comes in time."""
        while self.has_stepped.wait(self.seconds):
            self.has_stepped.clear()  # before the look: stop() may come in between
            if self.is_stopped:
                return
        try:
            with open(self.folder / f"stack_{self.rank}.txt", "w") as file:
                faulthandler.dump_traceback(file)
            (self.folder / f"record_{self.rank}").write_bytes(flight_record())
            self.say(f"made no step for {self.seconds:g} s, see {self.folder}/")
        except Exception as error:
            self.say(f"made no step, and could not write: {error}")
        finally:
            time.sleep(self.grace)
            os._exit(1)
