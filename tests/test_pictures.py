"""All pictures: drawn again they are the committed ones, and of one family."""

import contextlib
import io
import json
import re
import signal
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from launch import ROOT, python
from scripts import load_chapter

pictures = load_chapter("assets")["pictures"]
# In assets/, and in the chapters whose drawings have not moved there yet.
SCRIPTS = sorted(path.relative_to(ROOT) for path in ROOT.glob("*/draw_*.py"))
COMMITTED = sorted((ROOT / "assets").glob("*.png"))
PINS = (ROOT / "requirements.txt").read_text()
(DRAWN_WITH,) = re.findall(r"^matplotlib==(\S+) ; python_version >= ", PINS, re.M)
# This one trains before it draws; the others only read or work out numbers.
TRAINS = "draw_west_east.py"
PRINTED = {
    "draw_bandwidth.py": "6 collectives of 9 sizes; wrote 01_bandwidth.png",
    "draw_collectives.py": "9 pictures, 108 numbers, which fit together",
    "draw_fsdp.py": "4 of 7 gathers while a unit computes, the root's once, 4 units "
    "whole at most; wrote 06_fsdp.png",
    "draw_ring.py": "12 recorded messages add up to the sum; wrote 01_ring.png",
    "draw_zero_3.py": "6 of 8 gathers while a module computes, 2 modules whole at "
    "most; wrote 05_zero_3.png",
}
WITH_NUMBERS = [
    script for script in SCRIPTS if "numbers_from" in (ROOT / script).read_text()
]


@cache
def chapter(folder: str) -> dict[str, ModuleType]:
    return load_chapter(folder)


def draw(script: Path, *words: str) -> str:
    """Run a script's `main` in this process; return what it printed."""
    module = chapter(script.parent.name)[script.stem]
    printed, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    try:
        with (
            mock.patch.object(sys, "argv", [str(script), *words]),
            contextlib.redirect_stdout(printed),
        ):
            module.main()
    finally:
        signal.signal(signal.SIGINT, handler)  # some put the system's in its place
        plt.close("all")
    return printed.getvalue()


def assert_are_committed(folder: Path) -> None:
    """Compare with the committed pictures, but for the edges of letters and lines.

    A word that is another, in the smallest letters, changes one dot in a thousand. The
    older matplotlib that Python 3.10 gets sets all letters a dot or two elsewhere.
    """
    exact = matplotlib.__version__ == DRAWN_WITH
    drawn = list(folder.glob("*.png"))
    assert len(drawn) in (1, 2, 9)
    for path in drawn:
        committed = matplotlib.image.imread(ROOT / "assets" / path.name)
        difference = abs(matplotlib.image.imread(path) - committed)
        changed = (difference.max(axis=-1) > 0.25).mean()
        assert changed < (0.0002 if exact else 0.08), path.name


@pytest.mark.parametrize(
    "script", [one for one in SCRIPTS if one.name != TRAINS], ids=str
)
def test_a_script_draws_what_is_committed(script: Path, tmp_path: Path) -> None:
    printed = draw(script, f"--out={tmp_path}")
    assert printed.startswith("check: ") and printed.count("\n") == 1
    assert_are_committed(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    several = {"draw_collectives.py": 9, "draw_one_result.py": 2}
    assert len(names) == several.get(script.name, 1)
    if script.name in PRINTED:
        assert printed == f"check: {PRINTED[script.name]}\n"


def test_a_script_runs_by_itself_from_anywhere(tmp_path: Path) -> None:
    # The others are called in this process, where more can be imported.
    script = ROOT / "assets" / "draw_bandwidth.py"
    result = python(script, f"--out={tmp_path}", cwd=tmp_path)
    assert result.output == f"check: {PRINTED[script.name]}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["01_bandwidth.png"]


def test_a_chapters_module_is_imported_without_a_trace() -> None:
    path, modules = list(sys.path), dict(sys.modules)
    timing = pictures.chapter_module("01_communication/bandwidth/timing.py")
    spine = pictures.chapter_module("01_communication/ring_all_reduce.py")
    ddp = pictures.chapter_module("02_ddp_mp/terrain.py")
    assert timing.fit_line([1, 2], [1.0, 2.0]).latency == pytest.approx(0, abs=1e-9)
    files = [Path(str(one.__file__)) for one in (timing, spine, ddp)]
    assert [file.relative_to(ROOT).parts[0] for file in files] == [
        *("01_communication", "01_communication", "02_ddp_mp")
    ]
    assert sys.path == path
    here = {"ranks", "timing", "bandwidth", "pipelined_ring", "terrain"}
    assert {name: sys.modules.get(name) for name in here} == {
        name: modules.get(name) for name in here
    }
    with pytest.raises(ModuleNotFoundError):
        pictures.chapter_module("01_communication/nothing.py")
    assert sys.path == path


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_pictures_are_of_one_family(path: Path) -> None:
    picture = Image.open(path).convert("RGB")
    assert picture.width == 1500
    assert path.stat().st_size <= 400_000
    # A light ground of their own, on which dark letters are read in dark mode too.
    edges = np.asarray(picture)[[0, -1]][:, [0, -1]]
    assert (edges == 255).all()


def test_each_script_draws_with_the_shared_letters() -> None:
    for script in SCRIPTS:
        text = (ROOT / script).read_text()
        assert "from pictures import" in text and "dpi=" not in text, script
    assert len(SCRIPTS) == 27 and len(COMMITTED) == 36


# --- What cannot work. ----------


def complaint_of(script: Path, *words: str) -> str:
    """Return the one line with which a script refuses, without its name."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        draw(script, *words)
    assert ended.value.code == 2
    name, _, complaint = said.getvalue().partition(": ")
    assert name == script.name and complaint.count("\n") == 1
    return complaint.strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_folder_that_is_none_is_refused(script: Path) -> None:
    assert complaint_of(script, "--out=no") == "argument --out: there is no folder no"
    assert complaint_of(script, "--in=x") == "unrecognized arguments: --in=x"


def test_a_folder_that_cannot_be_written_to_is_refused() -> None:
    said = complaint_of(SCRIPTS[0], "--out=/proc")
    assert said.startswith("argument --out: cannot write to /proc: ")


@pytest.mark.parametrize("script", WITH_NUMBERS, ids=str)
def test_numbers_that_are_none_are_refused(script: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "numbers.json", f"--out={tmp_path}"
    here = f"argument --numbers: {path}"
    words = f"--numbers={path}", out
    assert complaint_of(script, *words) == f"{here}: No such file or directory"
    path.write_text("[1, 2")
    assert complaint_of(script, *words) == f"{here} is not JSON"
    path.write_text("{}")
    assert complaint_of(script, *words) == f"{here} is empty"
    others = 0
    for other in ([1], {"a": 1}, {"a": {"rows": []}}, {"steps": {}}, "text"):
        path.write_text(json.dumps(other))
        said = complaint_of(script, *words)
        assert said.startswith("these are not the numbers that ")
        others += 1
    assert others == 5
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
