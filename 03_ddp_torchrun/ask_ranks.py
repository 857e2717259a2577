"""Start the ranks of an exercise, and ask each of them what is wrong with an answer.

The exercises of a chapter share this; other chapters have the same file.
"""

import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

Judge = Callable[[int], str]  # tells what is wrong on a rank, "" for nothing


def in_words(error: RuntimeError) -> str:
    """Say in one line what a call that failed among the ranks says at length."""
    text = str(error)
    if "Detected mismatch" in text:
        calls = re.findall(r"OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\])?", text)
        mine, other = (f"{name} of shape [{shape}]" for name, shape in calls[:2])
        return f"this rank calls {mine}, another rank {other}"
    if missing := re.search(r"Ranks ([\d, ]+) failed to pass", text):
        return f"waited in a collective for rank {missing[1]}, who did not come"
    if "monitoredBarrier" in text:
        return "waited in a collective, to which not all ranks came"
    return f"it ended with: {text.split('] ', 1)[-1].splitlines()[0]}"


def end_with_the_parent() -> None:
    """End this rank as soon as the process that started it has ended, however it did.

    `mp.spawn` sees to this itself on Linux, once a rank runs. This also holds on other
    systems and while a rank is still being started.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def join_others(rank: int, world_size: int, port: int) -> dist.TCPStore:
    """Meet the other ranks at the parent's store, and be in a group with them."""
    limit = timedelta(minutes=1)  # to meet
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    # Seconds are counted once all have started.
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(world_size)])
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10),
    )
    return store


def be_one_rank(rank: int, world_size: int, port: int, judge: Judge) -> None:
    """Be one rank: join, let `judge` look, leave its words at the store."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank in silence
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    store = join_others(rank, world_size, port)
    store.set(f"rank {rank}", judge(rank) or "right")
    # A wrong answer may have left calls under way. Tidying up would wait for them.
    sys.stdout.flush()
    os._exit(0)


def ask_every_rank(judge: Judge, world_size: int) -> None:
    """Let `judge` look at the answer on every rank; unless all say nothing, end."""
    # Ranks that make different calls shall be told so, and not wait or abort. What the
    # C++ part of torch says to that as well is left out.
    os.environ |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(be_one_rank, (world_size, store.port, judge), nprocs=world_size)
    found = [store.get(f"rank {rank}").decode() for rank in range(world_size)]
    if any(text != "right" for text in found):
        for rank, text in enumerate(found):
            print(textwrap.fill(f"rank {rank}: {text}", 88, subsequent_indent=" " * 8))
        sys.exit(1)
