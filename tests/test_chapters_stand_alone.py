"""A chapter can be taken away whole, a room finds its chapter, copies are copies."""

import shutil
import sys
from pathlib import Path

import pytest

import scripts
from copies import COPIES, write_copies
from launch import ROOT, run

# Those of the second edition: each holds its own `ranks.py`, and its pictures are drawn
# by scripts in assets/, which stay behind.
CHAPTERS = sorted(
    path.parent.name
    for path in ROOT.glob("0[0-9]_*/ranks.py")
    if not any(path.parent.glob("draw_*.py"))
)

# Runs each file named on the command line as Python runs a script, but for its last
# lines, which ask for the name `__main__`. All share one process, for importing torch
# takes longer than the rest. After an error the next chapter has its turn.
LOADER = """
import gc, os, runpy, sys, traceback

gc.disable()  # imports make no garbage, and searches for it take time
folder, failed = os.path.realpath(os.curdir), []
for name in sys.argv[1:]:
    chapter, _, file = name.partition("/")
    if chapter in failed:
        continue
    here = os.path.join(folder, chapter)
    os.chdir(here)
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    try:
        runpy.run_path(file, run_name="not main")
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None) or ""
            # A link that leads out of the chapter would find nothing elsewhere.
            if path.startswith(folder):
                assert os.path.realpath(path).startswith(here), path
        print("loaded", name, flush=True)
    except Exception:
        traceback.print_exc()
        failed.append(chapter)
    for module in [*sys.modules.values()]:
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[module.__name__]
sys.exit(len(failed))
"""


def files_of(chapter: Path) -> list[str]:
    """Return the Python files of a chapter and its rooms, as paths from its folder."""
    files = [path for path in chapter.rglob("*.py") if not path.is_symlink()]
    return sorted(path.relative_to(chapter).as_posix() for path in files)


def load_copies(chapters: list[Path], folder: Path) -> tuple[int, list[str]]:
    """Copy chapters into an empty folder and load all of each there.

    Returns how many failed, and the lines that were printed.
    """
    files = []
    for chapter in chapters:
        copy = folder / "a folder" / chapter.name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(chapter, copy, symlinks=True, ignore=ignored)
        files += [f"{chapter.name}/{file}" for file in files_of(copy)]
    command = [sys.executable, "-B", "-c", LOADER, *files]
    result = run(command, cwd=folder / "a folder")
    return result.returncode, result.output.splitlines()


def test_the_chapters_of_this_edition_are_looked_at() -> None:
    assert {"01_communication", "02_ddp_mp"} <= set(CHAPTERS)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what loading a copy of each chapter, away from the others, has printed."""
    folder = tmp_path_factory.mktemp("copies")
    return load_copies([ROOT / name for name in CHAPTERS], folder)[1]


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_can_be_taken_away_whole(name: str, loaded: list[str]) -> None:
    files = files_of(ROOT / name)
    assert len(files) > 5 and any("/" in file for file in files)
    # A warning of torch may stand between them.
    lines = [line for line in loaded if line.startswith(f"loaded {name}/")]
    assert lines == [f"loaded {name}/{file}" for file in files], "\n".join(loaded)


@pytest.fixture
def small_chapter(tmp_path: Path) -> Path:
    """Return a chapter with a script, a room, and a link in the room."""
    chapter = tmp_path / "01_a"
    (chapter / "room").mkdir(parents=True)
    (chapter / "ranks.py").write_text("place = 'chapter'\n")
    (chapter / "train.py").write_text("import ranks\n\nplace = ranks.place\n")
    (chapter / "room/ranks.py").symlink_to("../ranks.py")
    script = "import ranks\nimport train\n\nplace = [ranks.place, train.__name__]\n"
    (chapter / "room/script.py").write_text(script)
    (chapter / "room/train.py").write_text("")
    return chapter


def test_a_chapter_that_cannot_be_taken_away_is_found(
    small_chapter: Path, tmp_path: Path
) -> None:
    everything = ["ranks.py", "room/script.py", "room/train.py", "train.py"]
    loaded = [f"loaded 01_a/{file}" for file in everything]
    assert load_copies([small_chapter], tmp_path / "1") == (0, loaded)

    other = tmp_path / "02_b"
    shutil.copytree(small_chapter, other, symlinks=True)
    link = small_chapter / "room/ranks.py"
    link.unlink()
    status, lines = load_copies([small_chapter, other], tmp_path / "2")
    assert status == 1
    assert loaded[0] in lines and not set(loaded[1:]) & set(lines)
    assert "ModuleNotFoundError: No module named 'ranks'" in lines
    # What the one has loaded is not there for the other, which is loaded all the same.
    assert {f"loaded 02_b/{file}" for file in everything} < set(lines)

    link.symlink_to(other / "ranks.py")
    status, lines = load_copies([other, small_chapter], tmp_path / "3")
    assert status == 1
    wrong = [line for line in lines if line.startswith("AssertionError: ")]
    assert len(wrong) == 1 and wrong[0].endswith("/01_a/room/ranks.py")


def test_a_room_is_loaded_by_plain_names(
    small_chapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "ROOT", small_chapter.parent)
    before = dict(sys.modules), list(sys.path)
    room = scripts.load_chapter.__wrapped__("01_a/room")
    assert sorted(room) == ["ranks", "script", "train"]
    assert room["script"].place == ["chapter", "train"]
    assert room["train"].__file__ == str(small_chapter / "room/train.py")
    chapter = scripts.load_chapter.__wrapped__("01_a")
    assert sorted(chapter) == ["ranks", "train"]
    assert chapter["train"].place == "chapter"
    assert chapter["ranks"] is not room["ranks"]
    assert (dict(sys.modules), list(sys.path)) == before
    with pytest.raises(FileNotFoundError, match="01_a/gone"):
        scripts.load_chapter.__wrapped__("01_a/gone")


def test_copies_are_written(tmp_path: Path) -> None:
    copies = {"a/x.py": ("b/x.py", "c/x.py", "c/r/x.py"), "a/y.py": ("b/y.py",)}
    for folder in "abc":
        (tmp_path / folder).mkdir()
    (tmp_path / "a/x.py").write_bytes(b"x\r\n")
    (tmp_path / "b/x.py").write_bytes(b"x\n")
    (tmp_path / "c/x.py").symlink_to("../a/x.py")
    with pytest.raises(FileNotFoundError, match=r"a/y\.py"):
        write_copies(tmp_path, copies)
    assert (tmp_path / "b/x.py").read_bytes() == b"x\n"

    (tmp_path / "a/y.py").write_bytes(b"y")
    (tmp_path / "b/y.py").write_bytes(b"y")
    assert write_copies(tmp_path, copies) == ["b/x.py", "c/x.py", "c/r/x.py"]
    for name in ("a/x.py", "b/x.py", "c/x.py", "c/r/x.py"):
        assert (tmp_path / name).read_bytes() == b"x\r\n"
        assert not (tmp_path / name).is_symlink()
    assert write_copies(tmp_path, copies) == []


def test_no_copy_is_a_source() -> None:
    names = [name for source in COPIES for name in (source, *COPIES[source])]
    assert len(names) == len(set(names)) > len(COPIES)
