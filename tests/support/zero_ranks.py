"""Run DeepSpeed on ranks that are there already: the worker pool's."""

import argparse
import contextlib
import importlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from lessons import in_the_pool
from scripts import load_chapter
from worker_pool import WorkerPool

Pools = Callable[[int], WorkerPool]


@contextlib.contextmanager
def pools_by_size() -> Iterator[Pools]:
    """Return warm workers for a number of ranks.

    DeepSpeed remembers how many ranks there were. A process that has been the only rank
    averages wrongly as one of two, so that each number has processes of its own.
    """
    with contextlib.ExitStack() as stack:
        pools: dict[int, WorkerPool] = {}

        def pool_of(ranks: int) -> WorkerPool:
            if ranks not in pools:
                pools[ranks] = stack.enter_context(WorkerPool(ranks))
            return pools[ranks]

        yield pool_of


def forget_earlier_group() -> None:
    """Let DeepSpeed forget an earlier job's process group; every rank calls this."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(groups)


def run_zero_lesson(folder: str, script: str, /, **options: Any) -> str:
    """Be one rank of a lesson that uses DeepSpeed; return what it printed here.

    Args:
        folder: the room: "05_deepspeed_zero/offload".
        script: its name without `.py`.
        options: what its command line would say.
    """
    forget_earlier_group()
    module: Any = load_chapter(folder)[script]
    output, given = io.StringIO(), argparse.Namespace(**options)
    with in_the_pool(module), contextlib.redirect_stdout(output):
        module.main(given)
    return output.getvalue()
