"""Import a chapter's script although its folder's name begins with a digit."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from launch import ROOT

# DeepSpeed chooses its device when it is imported, and this script imports it first.
APART = ROOT / "05_deepspeed_zero" / "minimal.py"


@cache
def load_chapter(folder: str) -> dict[str, ModuleType]:
    """Import every module of a chapter or of a room, without a trace in `sys`.

    Two chapters may both have a `train.py` or a `model.py`; each is imported by its
    plain name while its own folder comes first, then taken out of `sys.modules` again.
    A room such as "02_ddp_mp/timeline" is loaded in the same way. What it has of its
    chapter are links, and they are among its modules: the functions of its `ranks` are
    not the same objects as those of the chapter's.

    What is APART is left out; see `load_apart`.

    Raises FileNotFoundError if there is no module in the folder.
    """
    paths = [path for path in sorted((ROOT / folder).glob("*.py")) if path != APART]
    names = [path.stem for path in paths]
    if not names:
        raise FileNotFoundError(f"no Python file in {ROOT / folder}")
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(ROOT / folder))
    try:
        if "data" in names:  # before others take functions from it
            keep_library(importlib.import_module("data"))
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def keep_library(data: ModuleType) -> None:
    """Let a process read the standard library's thousand files only once."""
    read = data.load_text
    library = cache(partial(read, None))

    @wraps(read)
    def load_text(text: Path | None, block_size: int) -> Any:
        return library(block_size) if text is None else read(text, block_size)

    data.load_text = load_text  # pyright: ignore


@contextlib.contextmanager
def importable(folder: str) -> Iterator[None]:
    """Let processes that this one starts import a chapter's modules by their names."""
    modules = load_chapter(folder)
    hidden = {name: sys.modules[name] for name in modules if name in sys.modules}
    # What else is imported meanwhile stays: half of torch is imported when needed.
    sys.modules.update(modules)
    sys.path.insert(0, str(ROOT / folder))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT / folder))
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def load_apart() -> ModuleType:
    """Import the script that `load_chapter` leaves out, anew each time."""
    spec: Any = importlib.util.spec_from_file_location(APART.stem, APART)
    module = importlib.util.module_from_spec(spec)
    with importable(APART.parent.name):
        spec.loader.exec_module(module)
    return module
