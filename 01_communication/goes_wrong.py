"""Provoke the classic failures of communication, and see which tool finds each.

Run: python 01_communication/goes_wrong.py --case=dtype
Needs: requirements.txt. Uses the CPU and gloo: every text below is that backend's.
Expect: what each rank printed and how it ended; then the same failure under a tool. The
    `check:` line says that the failure really happened. `--case=list` lists the cases.
Before: 01_communication/bandwidth.py
Next: 02_ddp_mp/one_process.py, on the way to ranks that exchange gradients.
"""

import argparse
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import textwrap
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from failures import CASES, TIMEOUT

# Whatever still runs after this many seconds is killed, and the lesson has failed.
LIMIT = 30.0


def rank_main(case: str, number: int, rank: int, folder: str) -> None:
    """Be one rank of one act; what it prints goes to a file of its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if not os.path.isdir(folder):
        return  # Ctrl-C came while this rank was being started
    # The C++ part of torch writes past Python, so the streams themselves are turned.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort leaves no core file
    text = os.open(f"{folder}/text{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(text, 1)
    os.dup2(text, 2)
    act = CASES[case][number]
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = act.debug
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # calls that the flight recorder keeps
    dist.set_debug_level_from_env()
    store = dist.FileStore(f"{folder}/store", len(act.ends))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=len(act.ends), timeout=TIMEOUT
    )
    # Nothing goes wrong before all have joined. A barrier would count as a collective.
    store.set(f"joined {rank}", "yes")
    store.wait([f"joined {other}" for other in act.ends])
    try:
        act.run(rank)
    except RuntimeError as error:
        print(f"RuntimeError: {error}")
        sys.exit(1)
    dist.destroy_process_group()


def start_all(processes: list[ForkServerProcess]) -> None:
    """Start them; a Ctrl-C that comes meanwhile waits until all have begun.

    Before its first line a rank would answer it with a traceback.
    """
    # Python starts this one first, and it lifts the block: it has to be there already.
    resource_tracker.ensure_running()
    # Who is started inherits the block; `rank_main` lifts it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for process in processes:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def perform(case: str, number: int) -> dict[int, tuple[int | None, str]]:
    """Run one act on ranks of its own; return each one's exit code and text."""
    # The fork server imports torch once; each rank is a fork of it, ready at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ranks = {
            rank: context.Process(
                target=rank_main, args=(case, number, rank, folder), daemon=True
            )
            for rank in CASES[case][number].ends
        }
        try:
            start_all(list(ranks.values()))
            deadline = time.monotonic() + LIMIT
            for process in ranks.values():
                process.join(max(0, deadline - time.monotonic()))
        finally:
            # This also runs on Ctrl-C, before the folder disappears.
            for process in ranks.values():
                if process.pid is not None:
                    process.kill()
                    process.join()
        return {
            rank: (process.exitcode, Path(folder, f"text{rank}").read_text())
            for rank, process in ranks.items()
        }


def describe(code: int | None) -> str:
    """Say what an exit code means."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def show(rank: int, text: str) -> None:
    """Print a rank's text behind its name, wrapped to the width of a page."""
    # Of a stack, the frames that led to the failure's own function are left out.
    text = re.sub(r"(\n  File .*failures.py.*)(\n  File .*)*", r"\1", text)
    for line in text.splitlines():
        wrapped = textwrap.wrap(
            line, width=79, break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(f"rank {rank} | {part}" for part in wrapped))


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Run the acts of one case, show them, and check that each went wrong as meant."""
    parser = argparse.ArgumentParser(description="Provoke a failure of communication.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--case", default="", help=", ".join(CASES))
    case = parser.parse_args().case
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    if case not in CASES:
        refuse(f"--case is one of {', '.join(CASES)}")
    acts, surprises = CASES[case], []
    print(f"{case}: {acts[0].run.__doc__}")
    for number, act in enumerate(acts):
        print(f"--- {act.title}", flush=True)
        for rank, (code, text) in perform(case, number).items():
            show(rank, text)
            print(f"rank {rank} : {describe(code)}", flush=True)
            expected_code, pattern = act.ends[rank]
            # White space is one, because the patterns must not hang on line ends.
            if code != expected_code or not re.search(pattern, " ".join(text.split())):
                surprises.append(f"{act.title}, rank {rank}")
    # The fork server would end by itself, but on a busy machine some seconds after this
    # script; Python has no public function that waits for it.
    forkserver._forkserver._stop()  # pyright: ignore
    if surprises:
        sys.exit(f"did not go wrong as described: {'; '.join(surprises)}")
    print(
        f"check: {case}: exit code and text of all {len(acts[0].ends)} ranks are as "
        f"described, in {len(acts)} runs"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
