"""Run a whole lesson on ranks that are there already: the worker pool's.

A launch costs two seconds of `import torch` for each rank; this costs none. What a
launch alone can show (joining, leaving, the command line) is tested with real launches.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch

from scripts import load_chapter

CPU = torch.device("cpu")


@contextlib.contextmanager
def in_the_pool(module: ModuleType, *words: str) -> Iterator[None]:
    """Let a lesson's `join` and `leave` do nothing: its rank is in a group already.

    A check that fails leaves too. Were it to destroy the group here, gloo's threads
    would end whenever the last model is freed, and may then wait for each other.
    """
    name = f"{module.__name__}.py"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [name, *words]))
        for function, answer in (("join", CPU), ("leave", None)):
            if hasattr(module, function):
                fake = mock.Mock(return_value=answer)
                stack.enter_context(mock.patch.object(module, function, fake))
        check = getattr(module, "check", None)
        if isinstance(check, FunctionType):
            fake = {"leave": mock.Mock(return_value=None)}
            stack.enter_context(mock.patch.dict(check.__globals__, fake))
        yield


def run_lesson(folder: str, script: str, *words: str) -> str:
    """Be one rank of a lesson; return what it printed here.

    Pass this to `worker_pool.run`: `run(run_lesson, "01_communication", "groups")`.

    Args:
        folder: the chapter, or the room: "01_communication/bandwidth".
        script: its name without `.py`.
        words: of the command line.
    """
    module: Any = load_chapter(folder)[script]
    output = io.StringIO()
    with in_the_pool(module, *words), contextlib.redirect_stdout(output):
        module.main()
    return output.getvalue()
