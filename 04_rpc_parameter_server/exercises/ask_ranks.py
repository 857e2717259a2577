"""Start the ranks of an exercise, and let each say what is wrong with the answer.

The exercises of all chapters share this file.
"""

import logging
import os
import re
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ranks import end_with_launcher, fail, start_ranks

# Tries an answer on one rank; says what is wrong there, and "" if nothing is.
Checker = Callable[[Any], str]


# What torch says of a call: its name, and the shape and dtype of its tensor, if any.
CALL = r"OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\], TensorDtypes=(\w*))?"


def in_words(error: BaseException) -> str:
    """Say in one line what an answer has raised, and in which line of its script."""
    text = str(error)
    if "Detected mismatch" in text:
        first, second = re.findall(CALL, text)[:2]
        mine, other = (
            f"{name} of shape [{shape}]"
            # The dtype says something only if all else is the same.
            + (f" in {dtype}" if dtype and first[:2] == second[:2] else "")
            for name, shape, dtype in (first, second)
        )
        return f"this rank calls {mine}, another rank {other}"
    if missing := re.search(r"Ranks ([\d, ]+) failed to pass", text):
        return f"waited in a collective for rank {missing[1]}, who did not come"
    if "monitoredBarrier" in text:
        return "waited in a collective, to which not all ranks came"
    lines = text.split("] ", 1)[-1].splitlines() or [""]
    # "Error(s) in loading state_dict:" says nothing without the line below it.
    said = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if frame.filename == script]
    name = os.path.basename(script)
    place = f" (line {numbers[-1]} of {name})" if numbers else ""
    kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return f"it ended with: {kind}{said}{place}"


def ask_ranks(checker: Checker, answer: Any, nprocs: int, claim: str) -> None:
    """Let `checker(answer)` look on every rank; print what each says, or the claim.

    Unless nothing is wrong on any rank, this ends the process with status 1. Both
    functions are sent to the ranks by name: they stand at the top level of a module.
    """
    if "RANK" in os.environ:
        fail("start it with python, not torchrun: it starts its own ranks")
    # Ranks that make different calls shall be told so, and not wait or abort. What the
    # C++ part of torch says to that as well is left out.
    os.environ |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    # Nor need anybody know that rank 0 may end with its status before another is gone.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    start_ranks(be_asked, nprocs, checker, answer, claim)


def be_asked(checker: Checker, answer: Any, claim: str) -> None:
    """Be one rank: join, try the answer; rank 0 prints what all ranks have found."""
    threading.Thread(target=end_with_launcher, daemon=True).start()
    limit = timedelta(minutes=2)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    # The seconds of the group's timeout are counted once all have started.
    everyone = range(world_size)
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in everyone])
    timeout = timedelta(seconds=10)
    place = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timeout, **place)
    try:
        own = checker(answer)
    except (Exception, SystemExit) as error:
        own = in_words(error)
    store.set(f"found {rank}", own or "right")
    status = 0
    if rank == 0:
        found = [store.get(f"found {other}").decode() for other in everyone]
        if any(text != "right" for text in found):
            for other, text in enumerate(found):
                line = f"rank {other}: {text}"
                print(textwrap.fill(line, 88, subsequent_indent=" " * 8))
            status = 1
        else:
            print(f"check: {claim}")
    # A wrong answer may have left calls under way. Tidying up would wait for them.
    sys.stdout.flush()
    os._exit(status)
