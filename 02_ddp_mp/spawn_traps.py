"""What `mp.spawn` does with your script: five traps, each sprung and then checked.

Run: python 02_ddp_mp/spawn_traps.py
Needs: requirements.txt. No process group is made, and no GPU used.
Expect: five short acts with the real error texts, and a `check:` that each happened.
Before: 02_ddp_mp/train.py
Next: 03_ddp_torchrun/train.py, where a launcher starts the ranks instead.
"""

import argparse
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.multiprocessing as mp

# A spawned process is a new Python, which imports this file to find its function. So
# these two lines run in the parent, and once more in each child.
IMPORTED_BY = os.getpid()
SETTING = "as the file says"

WITHOUT_GUARD = """\
import torch.multiprocessing as mp

def one_rank(rank):
    print("rank", rank)

mp.spawn(one_rank, nprocs=1)
"""


def imports_again(rank: int, folder: str, shared: torch.Tensor) -> None:
    """Write down what this child finds in the module, and write into the tensor."""
    Path(folder, str(rank)).write_text(f"{IMPORTED_BY} {os.getpid()} {SETTING}")
    shared[rank] = 1


def import_level_runs_again(folder: str) -> list[bool]:
    """Let two children tell which process ran the top of this file for them."""
    global SETTING
    SETTING = "changed by main()"
    tensor = torch.zeros(2)
    mp.spawn(imports_again, (folder, tensor), nprocs=2)
    found = [Path(folder, str(rank)).read_text().split(" ", 2) for rank in range(2)]
    print(f"    parent  SETTING is {SETTING!r}")
    for rank, (_, _, setting) in enumerate(found):
        print(f"    rank {rank}  SETTING is {setting!r}")
    processes = {IMPORTED_BY, *(int(imported_by) for imported_by, _, _ in found)}
    print(f"    {len(processes)} processes have run the top of this file")
    print("  a tensor among the arguments is shared and not copied")
    print(f"    parent  passed [0.0, 0.0], now has {tensor.tolist()}")
    return [
        len(processes) == 3,
        all(imported_by == own for imported_by, own, _ in found),
        all(setting == "as the file says" for _, _, setting in found),
        tensor.tolist() == [1.0, 1.0],
    ]


def print_wrapped(text: str) -> None:
    """Print a text, cut into lines of the width of a page."""
    lines = textwrap.wrap(text, width=75, break_on_hyphens=False)
    print("\n".join(["    " + lines[0], *("      " + line for line in lines[1:])]))


def never_runs(rank: int, argument: Any) -> None:
    """Stand for a rank; what is passed to it cannot be pickled."""
    raise AssertionError("this rank should never have started")


def arguments_are_pickled() -> list[bool]:
    """Pass things that have no meaning in another process; Python refuses them."""
    happened = []
    with open(__file__) as file:
        for name, argument, expected in [
            ("a lambda", lambda x: x, "Can't .*<lambda>"),
            ("an open file", file, "cannot pickle .*TextIOWrapper"),
        ]:
            try:
                mp.spawn(never_runs, (argument,), nprocs=2)
            except Exception as error:
                # The exception and its words have changed between versions of Python.
                print_wrapped(f"{name}: {type(error).__name__}: {error}")
                happened.append(bool(re.match(expected, str(error))))
    return [*happened, len(happened) == 2]


def one_raises(rank: int, folder: str) -> None:
    """Fail on rank 1, once rank 0 is there; rank 0 has no reason to end."""
    parent = multiprocessing.parent_process()
    if rank == 0 and parent is not None:
        Path(folder, "rank 0").write_text(str(os.getpid()))
        parent.join(timeout=3600)  # an hour, or as long as the parent lives
    while not Path(folder, "rank 0").exists():
        time.sleep(0.01)
    raise ValueError("rank 1 does not like its data")


def one_exception_ends_all(folder: str) -> list[bool]:
    """Let one child fail and look at what becomes of the other, and of the parent."""
    # It logs whom it terminates, with the time and the process: different every time.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        mp.spawn(one_raises, (folder,), nprocs=2)
    except mp.ProcessRaisedException as error:
        # The child's own traceback, as text; the parent's would say nothing.
        text, rank = str(error).strip(), error.error_index
    else:
        return [False]
    lines = [line for line in text.splitlines() if not set(line) <= set(" ^~")]
    for line in [lines[0], lines[1], *lines[-3:]]:
        print("    " + re.sub(r'".*/', '".../', line))
    try:
        os.kill(int(Path(folder, "rank 0").read_text()), 0)
        is_over = False
    except ProcessLookupError:
        is_over = True
    print(f"    rank 0, which meant to stay for an hour, is over: {is_over}")
    return [rank == 1, "does not like its data" in text, is_over]


def without_a_guard(folder: str) -> list[bool]:
    """Run a script that spawns at its top level and not below `__main__`."""
    script = Path(folder, "no_guard.py")
    script.write_text(WITHOUT_GUARD)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    (reason,) = re.findall(r"RuntimeError: *\n\s*(.*?\n.*?)\n", done.stderr) or ["?"]
    print(textwrap.indent(WITHOUT_GUARD.rstrip().splitlines()[-1], "    "))
    print_wrapped("RuntimeError: " + " ".join(reason.split()))
    print(f"    exit status {done.returncode}; lines printed by its ranks: ", end="")
    print(done.stdout.count("rank"))
    return ["bootstrapping phase" in reason, done.returncode == 1, not done.stdout]


def refuse(message: str) -> NoReturn:
    """Say in one line, from one rank only, what is wrong; exit with status 2."""
    # The exit of rank 0 makes the launcher stop the other ranks while they sleep.
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(3)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    """Perform the acts, and stop at the end if one went otherwise than described."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it in silence
    parser = argparse.ArgumentParser(description="Show what mp.spawn does.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args()
    if "RANK" in os.environ:
        refuse("start it with python, not torchrun: it starts its own processes")
    happened = []
    with tempfile.TemporaryDirectory() as folder:
        print("the top of a script runs again in every child, main() does not")
        happened += import_level_runs_again(folder)
        print("arguments are pickled")
        happened += arguments_are_pickled()
        print("an exception in one child ends the others; its traceback is shown")
        happened += one_exception_ends_all(folder)
        print('without `if __name__ == "__main__":` a child would spawn children')
        happened += without_a_guard(folder)
    if not all(happened):
        sys.exit(f"not as described: {happened}")
    print(f"check: {len(happened)} observations, all as described")


if __name__ == "__main__":
    main()
