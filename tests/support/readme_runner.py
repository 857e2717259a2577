"""Run what the READMEs show, and compare it with what they say.

How to write blocks
-------------------
Every fenced block must start in the first column. Three kinds are checked.

``console`` blocks are run. A line that starts with ``$ `` is a command for bash; it
goes on over the next line where it ends with a backslash or where the next line
starts with ``> ``. The lines up to the next command are what it must print, standard
output and standard error together::

    # numbers within 10 %
    $ python 03_ddp_torchrun/train.py \\
          --max-steps=2
    epoch 0 | loss 5.61
    ...

* The commands run in the root of a fresh copy of the repository whose path holds a
  space, in the environment of a newly opened terminal. All blocks of one README share
  one copy, in order: files, ``export`` and ``cd`` last until its end, so run a whole
  README rather than one of its blocks. What is not exported is forgotten.
* A command that leaves a process behind in the background fails, and so does one that
  takes longer than SECONDS_PER_COMMAND.
* A command that ends with an error stands last in its block, and the block begins with
  the comment line ``# exit status 1``: just that status, and no other command may fail.
  Or it is followed by ``$ echo $?``, which shows its status.
* ``...`` stands for any text, also over several lines. White space at line ends and
  empty lines at the end of an output do not count; all else is compared exactly.
* The block may start with comment lines. One that reads ``# needs: COMMAND`` skips the
  block, visibly, where that command fails: on machines without root, say. It is never
  shown to be right there, so CI has to be a machine where it succeeds.
* One that reads ``# numbers within 10 %`` allows each number that the README writes
  with a decimal point to be off by that much. Whole numbers stay exact.
* The comment ``<!-- slow -->`` right above a block marks it as a slow test is marked:
  ``make test-all`` runs it, ``make pages`` does not. No later block may need it.
* An output cannot hold a line that starts with ``$ ``, nor start with ``> ``.

``diff`` blocks are generated from the files named by a comment right above them::

    <!-- diff: 02_ddp_mp/one.py 02_ddp_mp/two.py -->
    <!-- diff: 02_ddp_mp/one.py 02_ddp_mp/two.py hunks 2-3 context 2 -->

Without ``hunks`` all of them are shown. ``context`` is the number of unchanged lines
around a change, 1 if not given.

``python`` blocks are taken from the file named by a comment right above them::

    <!-- code: 02_ddp_mp/naive.py NaiveDDP main -->
    <!-- code: 02_ddp_mp/naive.py NaiveDDP.forward LIMIT without docstrings -->

* A name is that of a function, a class or a variable at the file's top level, or of one
  in a class, which then stands below the class's first line. They are shown in the
  order in which the comment names them. ``__main__`` is what runs as a script, and
  ``__imports__`` are the lines from the file's first import to its last.
* Their lines are the file's, with decorators and with the comments right above them.
  ``without docstrings`` leaves out the docstrings of all that is shown.
* A ``python`` block without such a comment is refused.

``python tests/support/readme_runner.py --update [README ...]`` runs the blocks and
rewrites those that no longer agree. Write the commands (or an empty ``diff`` or
``python`` block) and let it fill in the rest. A ``...`` stays where the new output
allows it; numbers within the tolerance stay as they are. Without ``--update`` it only
reports.
"""

import argparse
import ast
import copy
import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from doctest import (
    DONT_ACCEPT_BLANKLINE,
    DONT_ACCEPT_TRUE_FOR_1,
    ELLIPSIS,
    OutputChecker,
)
from pathlib import Path
from typing import Any
from unittest import SkipTest

from sybil import Document, Example, Sybil
from sybil.parsers.abstract import AbstractCodeBlockParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from launch import ROOT, LaunchError, Result, clean_environment, run

SECONDS_PER_COMMAND = 300
ASK_STATUS = "echo $?"
COMPARISON = ELLIPSIS | DONT_ACCEPT_BLANKLINE | DONT_ACCEPT_TRUE_FOR_1
NEEDS = re.compile(r"# needs: (.+)")
STATUS = re.compile(r"# exit status ([1-9]\d*)")
TOLERANCE = re.compile(r"# numbers within (\d+(?:\.\d+)?) ?%")
# A number with a decimal point that is not part of a word or of a version such as
# 2.13.0. The spaces before it belong to it because columns shift with its width.
NUMBER = r" *(?<![\w.])-?\d[\d,]*\.\d+(?:[eE][-+]?\d+)?(?!\d)(?!\.\d)"
DIFF_COMMENT = re.compile(
    r"<!-- diff: (?P<old>\S+) (?P<new>\S+)"
    r"(?: hunks (?P<first>\d+)(?:-(?P<last>\d+))?)?"
    r"(?: context (?P<context>\d+))? -->\s*\Z"
)
CODE_COMMENT = re.compile(
    r"<!-- code: (?P<file>\S+) (?P<names>[\w.]+(?: [\w.]+)*?)"
    r"(?P<bare> without docstrings)? -->\s*\Z"
)
SLOW_COMMENT = re.compile(r"<!-- slow -->\s*\Z")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Import = ast.Import | ast.ImportFrom
NOT_PART_OF_THE_REPOSITORY = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache"
)


def repository_files(root: Path = ROOT) -> list[str]:
    """Return the paths, relative to ``root``, that belong to the repository.

    These are the files and symbolic links that git tracks or would offer to track.
    Where git does not answer, as in an unpacked archive, they are all but those of a
    few known folders.
    """
    listing = b""
    if shutil.which("git"):
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=False,
        ).stdout
    names = {name for name in os.fsdecode(listing).split("\0") if name}
    if not names:
        for folder, folders, files in os.walk(root):
            ignored = NOT_PART_OF_THE_REPOSITORY(folder, folders + files)
            folders[:] = [name for name in folders if name not in ignored]
            names |= {
                Path(folder, name).relative_to(root).as_posix()
                for name in files
                if name not in ignored
            }
    # Git also lists files that were deleted and not yet committed. A link counts even
    # if it leads nowhere, so that whoever uses it finds out.
    paths = {name: root / name for name in names}
    return sorted(n for n, path in paths.items() if path.is_file() or path.is_symlink())


def is_slow(example: Example) -> bool:
    """Tell whether the comment above a block says that it takes long."""
    return bool(SLOW_COMMENT.search(example.document.text[: example.start]))


class Terminal:
    """A shell session that starts in a fresh copy of the repository.

    Each command is a bash process of its own, so that each has a time limit. The
    working directory, the exported variables and the exit status are carried over.
    """

    def __init__(self, root: Path) -> None:
        """Copy the repository to a folder whose path holds a space."""
        self._folder = tempfile.TemporaryDirectory(prefix="readme copy ")
        self._state = Path(self._folder.name, "environment")
        self.cwd = Path(self._folder.name, "checkout")
        # A crash prints what a reader sees, without the stack that tests ask for.
        self.environment = clean_environment(
            PYTHONFAULTHANDLER="", PYTHONPATH=str(ROOT / "tests/support/endings")
        )
        self.status = 0
        self.cwd.mkdir()
        for name in repository_files(root):
            copy = self.cwd / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            # A link stays one, and leads to the copy of what it led to.
            shutil.copy2(root / name, copy, follow_symlinks=False)

    def run(self, command: str) -> Result:
        """Run one command and remember the state in which it leaves the shell."""
        self._state.unlink(missing_ok=True)
        save_state = f"env -0 >{shlex.quote(str(self._state))}"
        # Both streams go into one pipe, which keeps their order as a terminal does.
        script = (
            f"exec 2>&1\ntrap {shlex.quote(save_state)} EXIT\n"
            f"(exit {self.status})\n{command}\n"
        )
        result = run(
            ["bash", "--noprofile", "--norc", "-c", script],
            timeout=SECONDS_PER_COMMAND,
            cwd=self.cwd,
            env=self.environment,
        )
        self.status = result.returncode
        # A command that replaces or kills its shell leaves no state behind.
        if self._state.exists():
            entries = os.fsdecode(self._state.read_bytes()).split("\0")
            self.environment = dict(entry.split("=", 1) for entry in entries if entry)
            self.cwd = Path(self.environment["PWD"])
        return result

    def close(self) -> None:
        """Delete the copy."""
        self._folder.cleanup()


@dataclass
class Step:
    """A command as the README shows it, and the output that the README promises."""

    shown: list[str]
    wanted: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The text for bash: without the prompts."""
        first, *others = self.shown
        return "\n".join(
            [first.removeprefix("$ "), *(re.sub(r"^> ?", "", line) for line in others)]
        )


@dataclass
class Block:
    """The content of one ``console`` block."""

    comments: list[str]
    steps: list[Step]

    @property
    def tolerance(self) -> Decimal:
        """The relative difference that numbers with a decimal point may have."""
        for comment in self.comments:
            if match := TOLERANCE.fullmatch(comment.rstrip()):
                return Decimal(match[1]) / 100
        return Decimal(0)

    @property
    def needs(self) -> str:
        """The command without whose success the block cannot be run; empty if none."""
        found = (NEEDS.fullmatch(comment.rstrip()) for comment in self.comments)
        return next((match[1] for match in found if match), "")

    @property
    def status(self) -> int:
        """The exit status of the last command, of which a comment may say it fails."""
        found = (STATUS.fullmatch(comment.rstrip()) for comment in self.comments)
        return next((int(match[1]) for match in found if match), 0)


@dataclass
class Outcome:
    """What came of one block.

    ``errors`` have to be put right by hand, ``drift`` is what an update removes by
    replacing the block's text with ``source``.
    """

    source: str
    errors: list[str] = field(default_factory=list)
    drift: list[str] = field(default_factory=list)
    skipped: str = ""


def parse_block(source: str) -> Block:
    """Split a ``console`` block into its commands and their outputs.

    Raises ValueError if there is no command, text that belongs to none, or a comment
    that announces no status.
    """
    block = Block([], [])
    for line in source.splitlines():
        step = block.steps[-1] if block.steps else None
        if step and not step.wanted and step.shown[-1].endswith("\\"):
            step.shown.append(line)
        elif line.startswith("$ "):
            block.steps.append(Step([line]))
        elif step is None and line.startswith("#"):
            if line.startswith("# exit status") and not STATUS.fullmatch(line.rstrip()):
                raise ValueError(f"a status is a number from 1 on, not: {line}")
            block.comments.append(line)
        elif step is None:
            raise ValueError(f"this line stands before the first `$ command`: {line}")
        elif not step.wanted and (line == ">" or line.startswith("> ")):
            step.shown.append(line)
        else:
            step.wanted.append(line)
    if not block.steps:
        raise ValueError("a console block needs a line that starts with `$ `")
    return block


def tidy(text: str) -> str:
    """Remove what no reader sees: white space at line ends, empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n")


def within_tolerance(
    match: re.Match[str], wanted: Sequence[str], tolerance: Decimal
) -> bool:
    """Tell whether each number of ``match`` is near enough to the wanted one."""
    pairs = [
        (Decimal(got.replace(",", "").strip()), Decimal(want.replace(",", "").strip()))
        for got, want in zip(match.groups(), wanted, strict=True)
    ]
    return all(abs(got - want) <= tolerance * abs(want) for got, want in pairs)


def with_wanted_numbers(want: str, got: str, tolerance: Decimal) -> str:
    """Return ``got`` with the wanted spelling of the numbers that are near enough.

    The texts between two ``...`` are looked for one after the other, as doctest does
    it. If they are not all found, ``got`` is returned as it is.
    """
    pieces = want.split("...")
    result, position = "", 0
    for index, piece in enumerate(pieces):
        wanted = re.findall(NUMBER, piece)
        words = map(re.escape, re.split(NUMBER, piece))
        first = r"\A" if index == 0 else ""
        last = r"\Z" if index == len(pieces) - 1 else ""
        pattern = re.compile(first + f"({NUMBER})".join(words) + last)
        for match in pattern.finditer(got, position):
            if within_tolerance(match, wanted, tolerance):
                break
        else:
            return got
        result += got[position : match.start()] + piece
        position = match.end()
    return result


def agrees(want: str, got: str, tolerance: Decimal) -> bool:
    """Tell whether an output is the wanted one."""
    if tolerance:
        got = with_wanted_numbers(want, got, tolerance)
    return OutputChecker().check_output(want, got, COMPARISON)


def shape(line: str) -> str:
    """Return a line without its numbers and its spacing."""
    return re.sub(r"\s*\d[\d.,]*\s*|\s+", "0", line)


def pair_lines(
    wanted: Sequence[str], new: Sequence[str], tolerance: Decimal
) -> list[list[int]]:
    """Find for each wanted line the new lines that stand in its place.

    It is the pairing with the fewest lines left over: an edit distance in which a line
    that agrees is free, one of the same shape costs a half, and ``...`` takes any
    number of lines for nothing. A wanted line left over costs two, so that ``...``
    does not swallow the lines that could be paired.
    """
    i_end, j_end = len(wanted), len(new)
    cost = [[0.0] * (j_end + 1) for _ in range(i_end + 1)]
    move = [[(0, 0, False)] * (j_end + 1) for _ in range(i_end + 1)]
    for i in range(i_end, -1, -1):
        for j in range(j_end, -1, -1):
            # Each choice: its cost, the steps in both texts, whether they are paired.
            choices: list[tuple[float, int, int, bool]] = []
            if i < i_end and j < j_end:
                want, got = wanted[i], new[j]
                if want == "...":
                    choices += [(0.0, 0, 1, True), (0.0, 1, 1, True)]
                elif agrees(want, got, tolerance):
                    choices.append((0.0, 1, 1, True))
                elif shape(want) == shape(got):
                    choices.append((0.5, 1, 1, True))
            if i < i_end:
                choices.append((2.0, 1, 0, False))
            if j < j_end:
                choices.append((1.0, 0, 1, False))
            if choices:
                totals = [c + cost[i + di][j + dj] for c, di, dj, _ in choices]
                cost[i][j] = min(totals)
                move[i][j] = choices[totals.index(cost[i][j])][1:]
    pairs: list[list[int]] = [[] for _ in wanted]
    i = j = 0
    while (i, j) != (i_end, j_end):
        di, dj, paired = move[i][j]
        if paired:
            pairs[i].append(j)
        i, j = i + di, j + dj
    return pairs


def refreshed(want: str, got: str, tolerance: Decimal) -> str:
    """Return ``got`` abbreviated by those ``...`` of ``want`` that still fit.

    A line of dots stays only if the lines above and below it are still there.
    """
    wanted, new = want.splitlines(), got.splitlines()
    pairs = pair_lines(wanted, new, tolerance)
    lines: list[str | None] = list(new)
    for i, (line, taken) in enumerate(zip(wanted, pairs, strict=True)):
        if line == "..." and taken and all(pairs[max(i - 1, 0) : i + 2]):
            lines[taken[0] : taken[-1] + 1] = ["...", *[None] * (len(taken) - 1)]
        elif taken and agrees(line, new[taken[0]], tolerance) and line != "...":
            lines[taken[0]] = line
    result = "\n".join(line for line in lines if line is not None)
    return result if agrees(result, got, tolerance) else got


def run_block(source: str, terminal: Terminal) -> Outcome:
    """Run a ``console`` block's commands and compare their outputs."""
    outcome = Outcome(source)
    try:
        block = parse_block(source)
    except ValueError as error:
        outcome.errors.append(str(error))
        return outcome
    if block.needs and terminal.run(block.needs).returncode:
        outcome.skipped = (
            f"the block needs a machine where this succeeds: {block.needs}"
        )
        return outcome
    lines = list(block.comments)
    for index, step in enumerate(block.steps):
        command = "\n".join(step.shown)
        try:
            result = terminal.run(step.command)
        except LaunchError as error:
            outcome.errors.append(f"{command}\n{error}")
            return outcome
        want, got = tidy("\n".join(step.wanted)), tidy(result.output)
        announced = [s.command.strip() for s in block.steps[index + 1 : index + 2]]
        expected = block.status if index == len(block.steps) - 1 else 0
        if result.returncode != expected and announced != [ASK_STATUS]:
            outcome.errors.append(
                f"{command}\n{got}\nended with status {result.returncode}, not "
                f"{expected}; a command that fails stands last in its block, whose "
                "first line says `# exit status 1`"
            )
            continue
        lines += step.shown
        if agrees(want, got, block.tolerance):
            lines += step.wanted
        else:
            new = refreshed(want, got, block.tolerance)
            lines += new.splitlines()
            outcome.drift.append(f"{command}\n{show_difference(want, new)}")
    outcome.source = "".join(line + "\n" for line in lines)
    return outcome


def show_difference(want: str, got: str) -> str:
    """Return a unified diff from the README's text to the real one."""
    return "\n".join(
        difflib.unified_diff(
            want.splitlines(), got.splitlines(), "README", "this run", lineterm=""
        )
    )


def compare_files(source: str, text_above: str, root: Path) -> Outcome:
    """Generate a ``diff`` block and compare it with the one in the README."""
    outcome = Outcome(source)
    options = DIFF_COMMENT.search(text_above)
    if options is None:
        outcome.errors.append(
            "a diff block needs a comment right above it: "
            "<!-- diff: old.py new.py --> (see tests/support/readme_runner.py)"
        )
        return outcome
    paths = [options["old"], options["new"]]
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        outcome.errors.append(f"no such file: {', '.join(missing)}")
        return outcome
    old, new = ((root / path).read_text("utf-8").splitlines() for path in paths)
    context = int(options["context"] or 1)
    lines = list(difflib.unified_diff(old, new, *paths, n=context, lineterm=""))
    starts = [n for n, line in enumerate(lines) if line.startswith("@@")]
    first = int(options["first"] or 1)
    last = int(options["last"] or options["first"] or len(starts))
    if not 1 <= first <= last <= len(starts):
        outcome.errors.append(
            f"the diff of {' and '.join(paths)} has {len(starts)} hunks: "
            f"hunks {first}-{last} cannot be shown"
        )
        return outcome
    ends = [*starts[1:], len(lines)]
    shown = lines[: starts[0]] + lines[starts[first - 1] : ends[last - 1]]
    compare_generated(outcome, "\n".join(shown))
    return outcome


def compare_generated(outcome: Outcome, generated: str) -> None:
    """Note in the outcome if a block is not the text that was generated for it."""
    want, new = tidy(outcome.source), tidy(generated)
    if want != new:
        outcome.source = generated + "\n"
        outcome.drift.append(show_difference(want, new))


# What a `python` block shows.


def defined_names(node: ast.stmt) -> set[str]:
    """Return the names that a definition or an assignment introduces.

    ``if __name__ == "__main__":`` introduces ``__main__``.
    """
    if isinstance(node, ast.If) and "'__main__'" in ast.unparse(node.test):
        return {"__main__"}
    if isinstance(node, Definition):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    found = (child for target in targets for child in ast.walk(target))
    stored = (c for c in found if isinstance(getattr(c, "ctx", None), ast.Store))
    return {child.id for child in stored if isinstance(child, ast.Name)}


def find_definition(body: Sequence[ast.stmt], name: str) -> ast.stmt:
    """Return the one statement of a body that defines ``name``'s last part.

    Raises ValueError if there is none, or more than one.
    """
    last_part = name.rpartition(".")[2]
    imports = [node for node in body if isinstance(node, Import)]
    if last_part == "__imports__" and imports:
        lines_of_all = copy.copy(imports[0])
        lines_of_all.end_lineno = imports[-1].end_lineno
        return lines_of_all
    found = [node for node in body if last_part in defined_names(node)]
    if len(found) != 1:
        raise ValueError(
            f"{name} is defined {len(found)} times"
            if found
            else f"there is no function, class or variable {name}"
        )
    return found[0]


def lines_of(node: ast.stmt, lines: Sequence[str]) -> range:
    """Return the numbers of a statement's lines, with its decorators and comments.

    The comments are those right above it, and those that end its last block.
    """
    decorators = node.decorator_list if isinstance(node, Definition) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    last = node.end_lineno or node.lineno
    margin = " " * node.col_offset
    while first > 1 and lines[first - 2].startswith(f"{margin}#"):
        first -= 1
    while last < len(lines) and re.match(rf"{margin} +#", lines[last]):
        last += 1
    return range(first, last + 1)


def head_of(node: ast.ClassDef, lines: Sequence[str]) -> range:
    """Return the numbers of the lines from a class's decorators to its colon."""
    bases = [*node.bases, *(keyword.value for keyword in node.keywords)]
    last = max([node.lineno, *(base.end_lineno or 0 for base in bases)])
    colon = re.compile(r":\s*(#.*)?$")
    while last < node.body[0].lineno and not colon.search(lines[last - 1]):
        last += 1
    return range(lines_of(node, lines).start, last + 1)


def without_docstrings(node: ast.stmt, lines: Sequence[str]) -> dict[int, str | None]:
    """Return what becomes of each line of a statement's docstrings; None if it goes.

    Where there is nothing but a docstring, `...` takes its place.
    """
    changed: dict[int, str | None] = {}
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner) is not None:
            docstring = inner.body[0]
            end = docstring.end_lineno or docstring.lineno
            while len(inner.body) > 1 and not lines[end].strip():
                end += 1
            changed |= dict.fromkeys(range(docstring.lineno, end + 1))
            if len(inner.body) == 1:
                changed[docstring.lineno] = " " * docstring.col_offset + "..."
    return changed


def code_of(text: str, names: Sequence[str], docstrings: bool = True) -> str:
    """Return the definitions of these names as they stand in a file's text.

    Raises ValueError if one is not there, and SyntaxError if the text is not Python.
    """
    # Not `splitlines`, which also parts at characters that Python does not count.
    lines, body = text.split("\n"), ast.parse(text).body
    shown, before, class_before = "", None, ""
    for name in names:
        class_name = name.rpartition(".")[0]
        head, inside = range(0), body
        if class_name:
            owner = find_definition(body, class_name)
            if not isinstance(owner, ast.ClassDef):
                raise ValueError(f"{class_name} is no class: {name}")
            head, inside = head_of(owner, lines), owner.body
        node = find_definition(inside, name)
        changed = {} if docstrings else without_docstrings(node, lines)
        numbers = [*lines_of(node, lines)]
        if class_name != class_before:
            numbers = [*head, *numbers]
        kept = (changed.get(number, lines[number - 1]) for number in numbers)
        # As the formatter spaces them: definitions stand apart, variables do not.
        apart = isinstance(node, Definition) or isinstance(before, Definition)
        if class_name != class_before:
            gap = 3
        else:
            gap = 1 if not apart else 2 if class_name else 3
            gap = max(gap, 2) if isinstance(before, Import) else gap
        shown += "\n" * gap if before else ""
        shown += "\n".join(line for line in kept if line is not None)
        before, class_before = node, class_name
    return shown


def compare_code(source: str, text_above: str, root: Path) -> Outcome:
    """Generate a ``python`` block and compare it with the one in the README."""
    outcome = Outcome(source)
    options = CODE_COMMENT.search(text_above)
    if options is None:
        outcome.errors.append(
            "a python block needs a comment right above it: "
            "<!-- code: file.py name --> (see tests/support/readme_runner.py)"
        )
        return outcome
    file = options["file"]
    if not (root / file).is_file():
        outcome.errors.append(f"no such file: {file}")
        return outcome
    text, names = (root / file).read_text("utf-8"), options["names"].split()
    try:
        compare_generated(outcome, code_of(text, names, not options["bare"]))
    except (ValueError, SyntaxError) as error:
        outcome.errors.append(f"{file}: {error}")
    return outcome


class ReadmeRunner:
    """Finds the blocks of a repository's Markdown files and checks them."""

    def __init__(self, root: Path = ROOT) -> None:
        """Look at the files below ``root``."""
        self.root = root
        fences = FencedCodeBlockLexer(
            ".+", mapping={"language": "arguments", "source": "source"}
        )
        self.sybil = Sybil(
            # Sybil's own parser for Markdown takes a comment that begins with `code:`
            # for a block.
            parsers=[
                AbstractCodeBlockParser([fences], language, self.problems)
                for language in ("console", "diff", "python")
            ],
            pattern="*.md",
            path=str(root),
            teardown=self.close_terminal,
        )

    def markdown_files(self) -> list[Path]:
        """Return the repository's Markdown files."""
        names = repository_files(self.root)
        return [self.root / name for name in names if name.endswith(".md")]

    def outcome(self, example: Example) -> Outcome:
        """Run or generate one block."""
        source: str = example.parsed
        # Sybil also finds blocks in lists and in quotations.
        if not example.document.text.startswith(("```", "~~~"), example.start):
            return Outcome(source, ["the block does not start in the first column"])
        generate = {"diff": compare_files, "python": compare_code}
        if compare := generate.get(example.region.lexemes["arguments"]):
            above = example.document.text[: example.start]
            return compare(source, above, self.root)
        if "terminal" not in example.namespace:
            example.namespace["terminal"] = Terminal(self.root)
        return run_block(source, example.namespace["terminal"])

    def problems(self, example: Example) -> str | None:
        """Return what is wrong with a block, or None: a Sybil evaluator."""
        outcome = self.outcome(example)
        if outcome.skipped:
            raise SkipTest(outcome.skipped)
        return "\n\n".join(outcome.errors + outcome.drift) or None

    @staticmethod
    def close_terminal(namespace: dict[str, Any]) -> None:
        """Delete the copy of the repository that a README's commands ran in."""
        if terminal := namespace.pop("terminal", None):
            terminal.close()

    def check(self, path: Path, update: bool = False) -> list[str]:
        """Check one file, or bring it up to date; return the problems that are left."""
        document: Document = self.sybil.parse(path)
        text, problems = document.text, []
        replacements: list[tuple[int, int, str]] = []
        try:
            for example in document.examples():
                outcome = self.outcome(example)
                if outcome.skipped:
                    print(f"{path}:{example.line}: skipped: {outcome.skipped}")
                left = outcome.errors if update else outcome.errors + outcome.drift
                problems += [f"{path}:{example.line}: {problem}" for problem in left]
                if outcome.drift and not outcome.errors:
                    start = example.start + example.region.lexemes["source"].offset
                    end = text.rfind("\n", start - 1, example.end) + 1
                    replacements.append((start, end, outcome.source))
        finally:
            self.close_terminal(document.namespace)
        if update and replacements:
            # From the last to the first, so that earlier positions stay valid.
            for start, end, source in reversed(replacements):
                text = text[:start] + source + text[end:]
            path.write_text(text, "utf-8")
            print(f"{path}: blocks rewritten: {len(replacements)}")
        return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or update the READMEs named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description="Check the READMEs' blocks.")
    parser.add_argument("--update", action="store_true", help="rewrite what drifted")
    parser.add_argument("readmes", nargs="*", type=Path, metavar="README")
    options = parser.parse_args(arguments)
    runner = ReadmeRunner()
    problems: list[str] = []
    for path in options.readmes or runner.markdown_files():
        problems += runner.check(path.resolve(), options.update)
    print("\n\n".join(problems) or "every block agrees")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
