"""Import a chapter's script although its folder's name begins with a digit."""

import importlib
import sys
from functools import cache
from types import ModuleType

from launch import ROOT


@cache
def load_chapter(folder: str) -> dict[str, ModuleType]:
    """Import every module of a chapter, by plain name, without a trace in `sys`.

    Two chapters may both have a `train.py` or a `model.py`; each is imported while its
    own folder comes first, then taken out of `sys.modules` again.
    """
    names = [path.stem for path in sorted((ROOT / folder).glob("*.py"))]
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(ROOT / folder))
    try:
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
