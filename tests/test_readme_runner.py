"""The README runner finds what is wrong in small READMEs written for the purpose."""

import ast
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil.example import SybilFailure

from launch import clean_environment, run
from readme_runner import ReadmeRunner, Terminal, agrees, refreshed, repository_files

TESTS = Path(__file__).parent
TENTH = Decimal("0.1")


def console(text: str) -> str:
    """Return a README with one console block."""
    return f"# Title\n\n```console\n{text}```\n\nThe end.\n"


def check(root: Path, text: str) -> list[str]:
    """Write a README and return what the runner finds wrong with it."""
    readme = root / "README.md"
    readme.write_text(text, "utf-8")
    return ReadmeRunner(root).check(readme)


def update(root: Path, text: str) -> str:
    """Write a README, update it and return its new text."""
    readme = root / "README.md"
    readme.write_text(text, "utf-8")
    assert ReadmeRunner(root).check(readme, update=True) == []
    return readme.read_text("utf-8")


def test_block_is_skipped_where_what_it_needs_fails(tmp_path: Path) -> None:
    runner = ReadmeRunner(tmp_path)
    wrong = "$ echo here\nthere\n"
    document = tmp_path / "README.md"
    document.write_text(console(f"# needs: test -e nothing\n{wrong}"), "utf-8")
    assert runner.check(document) == []
    (example,) = runner.sybil.parse(document).examples()
    with pytest.raises(SkipTest, match="this succeeds: test -e nothing"):
        runner.problems(example)
    # Where it succeeds the block is run like any other.
    assert "there" in "".join(check(tmp_path, console(f"# needs: true\n{wrong}")))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            "$ for i in 1 2; do echo $i; echo e$i >&2; done\n1\ne1\n2\ne2\n",
            id="both streams in order",
        ),
        pytest.param("$ true\n$ echo done\ndone\n", id="no output"),
        pytest.param("$ echo a \\\n    b\na b\n", id="backslash"),
        pytest.param("$ cat <<E\n> a\n>\n> b\n> E\na\n\nb\n", id="here document"),
        pytest.param("$ echo 'a  '; echo\na\n\n", id="white space at line ends"),
        pytest.param("$ seq 1 9\n1\n...\n9\n", id="ellipsis over lines"),
        pytest.param("$ echo took 5.1 s\ntook ... s\n", id="ellipsis in a line"),
        pytest.param("$ (exit 3)\n$ echo $?\n3\n", id="announced status"),
        pytest.param("$ exit 3\n$ echo $?\n3\n", id="shell that exits"),
        pytest.param(
            "# exit status 3\n$ echo a\na\n$ echo b; exit 3\nb\n",
            id="status in a comment",
        ),
        pytest.param(
            "# any comment\n# exit status 3 \n$ (exit 2)\n$ echo $?\n2\n$ exit 3\n",
            id="status of the last command",
        ),
        pytest.param("$ export A='x\n> y'\n$ echo \"$A\"\nx\ny\n", id="export"),
        pytest.param("$ cd sub\n$ cat file\ntext\n", id="cd"),
        pytest.param("$ pwd | grep -c ' '\n1\n", id="space in the path"),
        pytest.param(
            "# any comment\n# numbers within 10 %\n$ echo loss 2.20, 7 steps\n"
            "loss 2.0, 7 steps\n",
            id="within tolerance",
        ),
        pytest.param(
            "# numbers within 10 %\n$ printf ' 10.1 s\\na\\nb\\n1,000.5 x\\n'\n"
            "  9.9 s\n...\n990.0 x\n",
            id="tolerance and ellipsis",
        ),
    ],
)
def test_right_block_passes(tmp_path: Path, block: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("text\n")
    assert check(tmp_path, console(block)) == []


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        pytest.param("$ echo one\ntwo\n", "-two\n+one", id="wrong output"),
        pytest.param("$ echo one\n", "+one", id="output not shown"),
        pytest.param("$ true\none\n", "-one", id="output not there"),
        pytest.param("$ echo ' a'\na\n", "-a\n+ a", id="indentation"),
        pytest.param("$ echo 1\nTrue\n", "-True\n+1", id="doctest's True for 1"),
        pytest.param("$ seq 1 9\n1\n...\n8\n", "-8\n+9", id="after an ellipsis"),
        pytest.param("$ echo a; exit 3\na\n", "ended with status 3", id="status"),
        pytest.param(
            "$ false\n$ true\n$ echo $?\n0\n", "ended with status 1", id="late echo"
        ),
        pytest.param("$ false\n$ echo $?\n2\n", "-2\n+1", id="wrong status"),
        pytest.param(
            "# exit status 3\n$ exit 1\n", "status 1, not 3", id="another status"
        ),
        pytest.param(
            "# exit status 3\n$ true\n", "status 0, not 3", id="no error after all"
        ),
        pytest.param(
            "# exit status 3\n$ exit 3\n$ true\n$ exit 3\n",
            "status 3, not 0",
            id="not the last command",
        ),
        pytest.param(
            "# exit status 3\n$ exit 3\n$ echo $?\n3\n",
            "status 0, not 3",
            id="status said twice",
        ),
        pytest.param(
            "# exit status 3\n$ echo a; exit 3\nb\n", "-b\n+a", id="output of a failure"
        ),
        pytest.param("# exit status 0\n$ true\n", "from 1 on", id="status zero"),
        pytest.param("# exit status one\n$ exit 1\n", "from 1 on", id="status a word"),
        pytest.param("$ if\n", "syntax error", id="syntax error"),
        pytest.param("echo one\n", "before the first `$ command`", id="no prompt"),
        pytest.param("# nothing\n", "needs a line", id="comment only"),
        pytest.param("$ A=1\n$ echo ${A-none}\n1\n", "+none", id="not exported"),
        pytest.param("$ echo 2.2\n2.0\n", "-2.0\n+2.2", id="no tolerance"),
        pytest.param(
            "# numbers within 10 %\n$ echo a 2.21, b 1.99\na 2.0, b 2.0\n",
            "-a 2.0, b 2.0\n+a 2.21, b 1.99",
            id="outside tolerance",
        ),
        pytest.param(
            "# numbers within 10 %\n$ echo 101 of 2.0\n100 of 2.0\n",
            "-100 of 2.0\n+101 of 2.0",
            id="whole number",
        ),
        pytest.param(
            "# numbers within 10 %\n$ echo torch 2.13.1 v2.1\ntorch 2.13.0 v2.1\n",
            "+torch 2.13.1",
            id="version",
        ),
        pytest.param(
            "# numbers within 10 %\n$ echo 2.0; echo nan\n2.0\n2.0\n",
            "+nan",
            id="not a number",
        ),
    ],
)
def test_wrong_block_fails(tmp_path: Path, block: str, problem: str) -> None:
    (found,) = check(tmp_path, console(block))
    assert problem in found
    assert found.startswith(f"{tmp_path / 'README.md'}:3: ")


@pytest.mark.parametrize(
    "fence",
    [
        "  ```console\n  $ echo one\n  ```\n",
        "- ```python\n  one = 1\n  ```\n",
        "> ```diff\n> -one\n> ```\n",
    ],
)
def test_block_that_is_not_plainly_visible_fails(tmp_path: Path, fence: str) -> None:
    (found,) = check(tmp_path, fence)
    assert "does not start in the first column" in found


def test_comment_is_no_block(tmp_path: Path) -> None:
    # Sybil's own parser would run the first, and look for the end of the second.
    hidden = "<!-- code: console\n$ echo one\n-->\n\n<!-- code: console -->\n"
    readme = tmp_path / "README.md"
    readme.write_text(hidden)
    assert list(ReadmeRunner(tmp_path).sybil.parse(readme)) == []
    assert check(tmp_path, hidden) == []


def test_state_lasts_through_one_readme_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What pytest's own environment holds must not reach the commands.
    monkeypatch.setenv("RANK", "3")
    make = "$ mkdir new && cd new && touch made && export RANK=1\n"
    look = "$ ls -d ../new made\n../new\nmade\n$ echo $RANK\n1\n"
    fresh = "$ ls\nREADME.md\n$ echo ${RANK-none}\nnone\n"
    assert check(tmp_path, console(fresh + make) + console(look)) == []
    assert check(tmp_path, console(fresh)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md"]


def test_slow_command_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readme_runner.SECONDS_PER_COMMAND", 0.5)
    (found,) = check(tmp_path, console("$ echo begun; sleep 60\n"))
    assert "$ echo begun; sleep 60\n" in found
    assert "no end after 0.5 s" in found
    assert "begun" in found.split("last output")[1]


def test_process_left_behind_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.GRACE", 0.5)
    (found,) = check(tmp_path, console("$ sleep 60 >/dev/null 2>&1 &\n"))
    assert "left behind" in found
    assert "still running: sleep 60" in found


def test_copy_holds_what_git_tracks_or_would_track(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written = [".gitignore", "ignored", "kept", "sub/new"]
    for name in written:
        (tmp_path / name).write_text("ignored\n")
    assert repository_files(tmp_path) == written
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "kept"], cwd=tmp_path, check=True)
    assert repository_files(tmp_path) == [".gitignore", "kept", "sub/new"]
    terminal = Terminal(tmp_path)
    try:
        assert terminal.run("cat sub/new").output == "ignored\n"
        assert terminal.run("ls").output == "kept\nsub\n"
    finally:
        terminal.close()
    assert not terminal.cwd.exists()


@pytest.mark.parametrize("has_git", [True, False])
def test_links_of_a_room_work_in_the_copy(tmp_path: Path, has_git: bool) -> None:
    root = tmp_path / "repository"
    room = root / "01_a" / "room"
    room.mkdir(parents=True)
    (room.parent / "ranks.py").write_text("names = ['rank 0']\n")
    (room / "ranks.py").symlink_to("../ranks.py")
    (room / "lost.py").symlink_to("../lost.py")
    (room / "script.py").write_text("import ranks\n\nprint(*ranks.names)\n")
    page = room / "README.md"
    shown = (
        console("$ python 01_a/room/script.py\n{}")
        + console("$ echo 'names = [1]' >01_a/ranks.py\n")
        + console("$ python 01_a/room/script.py\n1\n")
    )
    page.write_text(shown.format("rank 1\n"))
    if has_git:
        subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
        subprocess.run(["git", "add", "01_a/room"], cwd=root, check=True)
    names = ["01_a/ranks.py"]
    names += [f"01_a/room/{n}" for n in ("README.md", "lost.py", "ranks.py")]
    assert repository_files(root) == [*names, "01_a/room/script.py"]
    assert ReadmeRunner(root).check(page, update=True) == []
    assert page.read_text() == shown.format("rank 0\n")
    assert ReadmeRunner(root).check(page) == []
    # What a command writes into the copy does not reach the original.
    assert (room.parent / "ranks.py").read_text() == "names = ['rank 0']\n"
    terminal = Terminal(root)
    try:
        assert (terminal.cwd / "01_a/room/ranks.py").readlink() == Path("../ranks.py")
        assert "No such file" in terminal.run("cat 01_a/room/lost.py").output
    finally:
        terminal.close()


def test_ellipsis_is_looked_for_in_order() -> None:
    assert agrees("a 1.0\n...\nb 1.0", "a 1.05\nb 3.0\nx\nb 1.05", TENTH)
    assert not agrees("a\n...\nb 1.0\n...\nc", "a\nx\nc\nb 1.0", TENTH)


@pytest.mark.parametrize(
    ("want", "got", "new"),
    [
        ("a\n...\nz 1", "a\nb\nc\nz 2", "a\n...\nz 2"),
        ("took ... s, 1 step", "took 3 s, 1 step", "took ... s, 1 step"),
        ("a 1\ntook ... s", "a 2\ntook 3 s", "a 2\ntook ... s"),
        ("a\n...\nb\nz", "y\na\n1\nnew\nb\nz\nx", "y\na\n...\nb\nz\nx"),
        ("a\n...\nold", "b\nc", "b\nc"),
        ("", "a", "a"),
    ],
)
def test_update_keeps_the_ellipses_that_fit(want: str, got: str, new: str) -> None:
    assert refreshed(want, got, Decimal(0)) == new


def test_update_rewrites_and_is_idempotent(tmp_path: Path) -> None:
    old = (
        console("$ seq 1 9\n1\n...\n8\n$ echo right\nright\n")
        + console("# numbers within 10 %\n$ echo 2.1; echo 5.0\n2.0\n4.0\n")
        + console("$ echo new")
        + "```text\n$ echo not run\n```\n"
    ).replace("new```", "new\n```")
    new = (
        console("$ seq 1 9\n1\n...\n9\n$ echo right\nright\n")
        + console("# numbers within 10 %\n$ echo 2.1; echo 5.0\n2.0\n5.0\n")
        + console("$ echo new\nnew\n")
        + "```text\n$ echo not run\n```\n"
    )
    assert update(tmp_path, old) == new
    assert update(tmp_path, new) == new


def test_update_leaves_a_failing_block_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    text = console("$ echo a; false\nb\n")
    readme.write_text(text)
    (problem,) = ReadmeRunner(tmp_path).check(readme, update=True)
    assert "ended with status 1" in problem
    assert readme.read_text() == text


def write_scripts(root: Path) -> None:
    """Write two scripts that differ in their second and their last line."""
    lines = [f"line_{n} = {n}" for n in range(9)]
    (root / "old.py").write_text("\n".join(lines) + "\n")
    lines[1], lines[8] = "second = 1", "last = 8"
    (root / "new.py").write_text("\n".join(lines) + "\n")


HEADER = "--- old.py\n+++ new.py\n"
FIRST = "@@ -1,3 +1,3 @@\n line_0 = 0\n-line_1 = 1\n+second = 1\n line_2 = 2\n"
SECOND = "@@ -8,2 +8,2 @@\n line_7 = 7\n-line_8 = 8\n+last = 8\n"
SECOND_BARE = "@@ -9 +9 @@\n-line_8 = 8\n+last = 8\n"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", FIRST + SECOND),
        (" hunks 1", FIRST),
        (" hunks 1-2", FIRST + SECOND),
        (" hunks 2 context 0", SECOND_BARE),
    ],
)
def test_diff_is_generated_and_checked(
    tmp_path: Path, options: str, shown: str
) -> None:
    write_scripts(tmp_path)
    comment = f"Text.\n\n<!-- diff: old.py new.py{options} -->\n"
    right = f"{comment}```diff\n{HEADER}{shown}```\n"
    assert check(tmp_path, right) == []
    assert update(tmp_path, right) == right
    assert update(tmp_path, f"{comment}```diff\n```\n") == right
    for name in ("old.py", "new.py"):
        script = tmp_path / name
        script.write_text(script.read_text().replace("= 1", "= 2").replace("8", "5"))
    assert "\n--line" in check(tmp_path, right)[0]


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("", "needs a comment right above it"),
        ("<!-- diff: old.py new.py -->\n\nText.", "needs a comment right above it"),
        ("<!-- diff: old.py newer.py -->", "no such file: newer.py"),
        ("<!-- diff: old.py new.py hunks 3 -->", "2 hunks: hunks 3-3 cannot"),
        ("<!-- diff: old.py old.py -->", "0 hunks"),
        ("<!-- diff: old.py new.py -->", "-+second\n++second = 1"),
    ],
)
def test_wrong_diff_fails(tmp_path: Path, comment: str, problem: str) -> None:
    write_scripts(tmp_path)
    shown = HEADER + (FIRST + SECOND).replace("+second = 1", "+second")
    (found,) = check(tmp_path, f"{comment}\n```diff\n{shown}```\n")
    assert problem in found


SOURCE = '''"""Show one thing."""

import torch  # by its own name only

# Ranks that wait.
LIMIT = 2  # how many

LOSSES: list[float] = [
    1.0,
]
FIRST, (SECOND, *_) = 1, (2, 3)

# A section.


# What it does.
# And why.
@torch.no_grad()
@cached
def mean(x):  # once
    """Return the mean.

    Of all ranks.
    """

    def part(y):
        """Return y."""
        return y  # \f as it is

    return part(x)
    # It is a sum.


@final
class Model(
    Module,
    final=True,
):  # of one rank
    """Learns."""

    width: int = 3
    depth = 2

    def forward(self, x):
        """Do nothing."""

    # Behind a comment.
    @property
    def loss(self):
        "Return it."
        return 0


async def later(): ...


def twice(): ...


def twice(): ...


if LIMIT:
    hidden = 1

if __name__ == "__main__":
    # Two ranks.
    start(2)
'''
MEAN = """\
# What it does.
# And why.
@torch.no_grad()
@cached
def mean(x):  # once
    \"\"\"Return the mean.

    Of all ranks.
    \"\"\"

    def part(y):
        \"\"\"Return y.\"\"\"
        return y  # \f as it is

    return part(x)
    # It is a sum.
"""
MEAN_BARE = """\
# What it does.
# And why.
@torch.no_grad()
@cached
def mean(x):  # once
    def part(y):
        return y  # \f as it is

    return part(x)
    # It is a sum.
"""
MODEL_HEAD = """\
@final
class Model(
    Module,
    final=True,
):  # of one rank
"""
LOSS = """\
    # Behind a comment.
    @property
    def loss(self):
        return 0
"""
FORWARD = """\
    def forward(self, x):
        \"\"\"Do nothing.\"\"\"
"""
MODEL_BARE = f"""\
{MODEL_HEAD}\
    width: int = 3
    depth = 2

    def forward(self, x):
        ...

{LOSS}"""


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("mean", MEAN),
        ("mean without docstrings", MEAN_BARE),
        ("Model without docstrings", MODEL_BARE),
        ("LIMIT", "# Ranks that wait.\nLIMIT = 2  # how many\n"),
        (
            "SECOND LOSSES later",
            "FIRST, (SECOND, *_) = 1, (2, 3)\nLOSSES: list[float] = [\n    1.0,\n]\n"
            "\n\nasync def later(): ...\n",
        ),
        (
            "later mean LIMIT",
            f"async def later(): ...\n\n\n{MEAN}\n\n# Ranks that wait.\n"
            "LIMIT = 2  # how many\n",
        ),
        ("Model.forward", f"{MODEL_HEAD}{FORWARD}"),
        (
            "later __main__",
            "async def later(): ...\n\n\n"
            'if __name__ == "__main__":\n    # Two ranks.\n    start(2)\n',
        ),
        (
            "__imports__ LIMIT",
            "import torch  # by its own name only\n\n"
            "# Ranks that wait.\nLIMIT = 2  # how many\n",
        ),
        (
            "Model.loss Model.forward without docstrings",
            f"{MODEL_HEAD}{LOSS}\n    def forward(self, x):\n        ...\n",
        ),
        (
            "Model.depth Model.width Model.forward later",
            f"{MODEL_HEAD}    depth = 2\n    width: int = 3\n\n{FORWARD}\n\n"
            "async def later(): ...\n",
        ),
    ],
)
def test_code_is_taken_from_the_file_and_checked(
    tmp_path: Path, names: str, shown: str
) -> None:
    script = tmp_path / "01_a.py"
    script.write_text(SOURCE)
    comment = f"Text.\n\n<!-- code: 01_a.py {names} -->\n"
    right = f"{comment}```python\n{shown}```\n"
    ast.parse(shown)
    assert check(tmp_path, right) == []
    assert update(tmp_path, f"{comment}```python\n```\n") == right
    assert update(tmp_path, f"{comment}```python\nold\n```\n") == right
    first = shown.splitlines()[0]
    (problem,) = check(tmp_path, right.replace(first, f"{first}  # no", 1))
    assert f"-{first}  # no\n+{first}" in problem
    # A page that was right is no longer when the file has changed.
    last = shown.splitlines()[-1]
    script.write_text(SOURCE.replace(f"{last}\n", f"{last}  # new\n"))
    assert ("  # new" in "".join(check(tmp_path, right))) is (last in SOURCE)


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("", "needs a comment right above it"),
        ("<!-- code: a.py mean -->\n\nText.", "needs a comment right above it"),
        ("<!-- code: a.py -->", "needs a comment right above it"),
        ("<!-- diff: a.py b.py -->", "needs a comment right above it"),
        ("<!-- code: b.py mean -->", "no such file: b.py"),
        ("<!-- code: a.py mean gone -->", "a.py: there is no function, class or var"),
        ("<!-- code: a.py gone -->", "variable gone"),
        ("<!-- code: a.py hidden -->", "variable hidden"),
        ("<!-- code: a.py torch -->", "variable torch"),
        ("<!-- code: a.py part -->", "variable part"),
        ("<!-- code: a.py Model.gone -->", "variable Model.gone"),
        ("<!-- code: a.py Gone.forward -->", "variable Gone"),
        ("<!-- code: a.py mean.part -->", "mean is no class: mean.part"),
        ("<!-- code: a.py twice -->", "twice is defined 2 times"),
        ("<!-- code: broken.py x -->", "broken.py: invalid syntax"),
        ("<!-- code: a.py LIMIT -->", "-old\n+# Ranks that wait.\n+LIMIT = 2"),
    ],
)
def test_wrong_code_fails(tmp_path: Path, comment: str, problem: str) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("x = = 1\n")
    page = f"{comment}\n```python\nold\n```\n"
    (found,) = check(tmp_path, page)
    assert problem in found
    # An error is left to a person, and an update leaves the block alone.
    if "-old" not in problem:
        readme = tmp_path / "README.md"
        assert problem in "".join(ReadmeRunner(tmp_path).check(readme, update=True))
        assert readme.read_text() == page


def test_sybil_items_report_the_problem(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(console("$ echo one\none\n") + console("$ echo one\ntwo\n"))
    runner = ReadmeRunner(tmp_path)
    document = runner.sybil.parse(readme)
    right, wrong = document.examples()
    right.evaluate()
    terminal = document.namespace["terminal"]
    with pytest.raises(SybilFailure, match=r"(?s)line 11.*-two\n\+one"):
        wrong.evaluate()
    assert document.namespace["terminal"] is terminal
    runner.close_terminal(document.namespace)
    assert not terminal.cwd.exists()


@pytest.fixture
def small_repository(tmp_path: Path) -> Path:
    """Return a folder with this repository's test machinery and one passing test."""
    root = tmp_path / "small repository"
    (root / "tests").mkdir(parents=True)
    shutil.copy(TESTS.parent / "conftest.py", root)
    shutil.copy(TESTS.parent / "pyproject.toml", root)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TESTS / "support", root / "tests" / "support", ignore=ignored)
    (root / "tests" / "test_passing.py").write_text("def test_passing(): pass\n")
    (root / "README.md").write_text(console("$ pwd | grep -c readme\n1\n"))
    return root


def pytest_session(root: Path, *options: str) -> tuple[int, str]:
    """Run a repository's whole suite."""
    result = run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=root,
        env=clean_environment(TMPDIR=str(root.parent)),
    )
    return result.returncode, result.output


def test_pytest_collects_the_readmes(small_repository: Path) -> None:
    chapter = small_repository / "01_a"
    chapter.mkdir()
    (chapter / "README.md").write_text(console("$ ls 01_a\nREADME.txt\n"))
    # A chapter's further pages are tests too; those of other folders are not.
    (chapter / "PAGE.md").write_text(console("$ echo page\npage\n"))
    (small_repository / "notes").mkdir()
    (small_repository / "notes" / "draft.md").write_text(console("$ false\n"))
    status, output = pytest_session(small_repository)
    assert "1 failed, 3 passed" in output
    assert "01_a/PAGE.md::line:3,column:1" not in output
    assert "01_a/README.md::line:3,column:1" in output
    assert "-README.txt\n+PAGE.md\n+README.md" in output
    assert status == pytest.ExitCode.TESTS_FAILED
    # The copies that the commands ran in are deleted.
    assert [path.name for path in small_repository.parent.iterdir()] == [
        small_repository.name
    ]


def test_blocks_marked_as_slow_are_left_out_where_slow_tests_are(
    small_repository: Path,
) -> None:
    quick, slow = console("$ echo one\none\n"), console("$ echo two\ntwice\n")
    page = small_repository / "README.md"
    marked = slow.replace("```console", "<!-- slow -->\n```console")
    assert marked != slow
    page.write_text(f"{quick}\n{marked}\n{quick}")
    status, output = pytest_session(small_repository, "-m", "not slow")
    assert "3 passed, 1 deselected" in output
    assert status == pytest.ExitCode.OK
    status, output = pytest_session(small_repository)
    assert "1 failed, 3 passed" in output and "-twice\n+two" in output
    assert status == pytest.ExitCode.TESTS_FAILED


def test_command_line_reports_and_updates(small_repository: Path) -> None:
    readme = small_repository / "README.md"
    old, new = console("$ echo one\ntwo\n"), console("$ echo one\none\n")
    readme.write_text(old)
    runner = [sys.executable, small_repository / "tests/support/readme_runner.py"]
    reported = run([*runner, "README.md"], cwd=small_repository)
    assert (reported.returncode, readme.read_text()) == (1, old)
    assert "README.md:3: $ echo one\n--- README\n" in reported.output
    updated = run([*runner, "--update"], cwd=small_repository.parent)
    assert (updated.returncode, readme.read_text()) == (0, new)
    assert "README.md: blocks rewritten: 1\nevery block agrees\n" in updated.output


@pytest.mark.parametrize(
    "skip",
    [
        "@pytest.mark.skip('no {reason}')\ndef test_it(): pass\n",
        "@pytest.mark.skipif(True, reason='no {reason}')\ndef test_it(): pass\n",
        "def test_it(): pytest.skip('no {reason}')\n",
        "pytest.skip('no {reason}', allow_module_level=True)\n",
    ],
)
def test_only_known_skips_pass(small_repository: Path, skip: str) -> None:
    sample = small_repository / "tests" / "test_sample.py"
    allow = "import conftest, pytest\nconftest.ALLOWED_SKIPS['no moon .*'] = 'why'\n"
    sample.write_text(allow + skip.format(reason="moon today"))
    status, output = pytest_session(small_repository)
    assert "2 passed, 1 skipped" in output
    assert "ALLOWED_SKIPS" not in output
    assert status == pytest.ExitCode.OK
    sample.write_text(allow + skip.format(reason="sun"))
    status, output = pytest_session(small_repository)
    assert "2 passed, 1 skipped" in output
    assert "is not in ALLOWED_SKIPS: tests/test_sample.py" in output
    assert "no sun" in output
    assert status == pytest.ExitCode.TESTS_FAILED
