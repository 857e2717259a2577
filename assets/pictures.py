"""What all pictures have in common: their width, their letters, where they are written.

The scripts beside this file draw from the numbers beside it. One that needs a chapter's
module asks `chapter_module` for it; a chapter needs nothing from here.
"""

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Inches, and dots in each of them: nearly twice as many as a page shows, so that
# letters are sharp on fine displays too.
WIDTH, DPI = 10, 150
# Sizes in points. A page shows the 10 inches on about 840 dots: 11 points are as high
# as 13 dots, a little less than the page's own words.
LETTERS: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "text.color": "#222222",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
ASSETS = Path(__file__).resolve().parent


def chapter_module(path: str) -> ModuleType:
    """Import a module of a chapter or a room by its path, "02_ddp_mp/terrain.py".

    The path is from the repository's root. The module finds its neighbours by their
    plain names, as when it is run. They are not left in `sys.modules`, since another
    chapter may have others of the same names.
    """
    file = ASSETS.parent / path
    neighbours = {one.stem for one in file.parent.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in neighbours & set(sys.modules)}
    sys.path.insert(0, str(file.parent))
    try:
        return importlib.import_module(file.stem)
    finally:
        sys.path.remove(str(file.parent))
        for name in neighbours:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def refuse(message: str) -> NoReturn:
    """Say in one line what is wrong; exit with status 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def writable_folder(text: str) -> Path:
    """Take the name of a folder that one can write to, for argparse."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    try:
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        message = f"cannot write to {text}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from None
    return Path(text)


def read_json(text: str) -> Any:
    """Read a JSON file, which must hold something, for argparse."""
    try:
        content = json.loads(Path(text).read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not JSON") from None
    if not content:
        raise argparse.ArgumentTypeError(f"{text} is empty")
    return content


def picture_parser(description: str, numbers: str = "") -> argparse.ArgumentParser:
    """Make a parser with --out, a folder, and with --numbers if the picture has any.

    Args:
        description: what --help says first.
        numbers: the file under assets/ that --numbers reads if nothing else is asked.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.error = refuse  # type: ignore[method-assign]
    add, assets = parser.add_argument, str(ASSETS)
    add("--out", type=writable_folder, default=assets, help="folder to write to")
    if numbers:
        default = str(ASSETS / numbers)
        add("--numbers", type=read_json, default=default, help="JSON file to draw")
    return parser


@contextlib.contextmanager
def numbers_from(script: str) -> Iterator[None]:
    """Refuse numbers in which a drawing does not find what `script` writes."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError):
        refuse(f"these are not the numbers that {script} writes")


def new_picture(height: float, rows: int = 1, columns: int = 1, **more: Any) -> Any:
    """Make an empty picture with rows x columns of axes, as pyplot's `subplots` does.

    Args:
        height: in inches; the width is the same for all.
        rows: one above the other.
        columns: side by side.
        more: what else `subplots` and `figure` take.

    Returns:
        The picture, and its axes: one, or an array of them.
    """
    # Imported here: record_ring.py imports this file on every rank, and draws nothing.
    import matplotlib

    matplotlib.use("Agg")  # draw into a file; no window, no display needed
    import matplotlib.pyplot as plt

    plt.rcParams.update(LETTERS)
    look = {"figsize": (WIDTH, height), "dpi": DPI, "facecolor": "white"}
    return plt.subplots(rows, columns, **look, **more)


def new_drawing(height: float, x: tuple[float, float], y: tuple[float, float]) -> Any:
    """Make a picture that is one field without axes, from x[0] to x[1], y[0] to y[1].

    Returns:
        The picture, and the axes to draw on.
    """
    picture, axes = new_picture(height)
    axes.set(xlim=x, ylim=y, position=(0, 0, 1, 1))
    axes.axis("off")
    return picture, axes


def save_picture(picture: Any, folder: Path, name: str) -> None:
    """Write a picture to `name` in a folder, without the version that drew it."""
    picture.savefig(folder / name, metadata={"Software": None})
