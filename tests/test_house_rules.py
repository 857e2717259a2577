"""What holds for every file of the repository, whichever lesson it belongs to.

A rule is a function from a tree (path to text) to the list of its violations. Each
rule is held against this repository, and against small samples that break it, so that
a rule that has stopped finding anything is noticed.
"""

import ast
import html.parser
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from launch import ROOT
from readme_runner import ReadmeRunner, parse_block, repository_files

Tree = Mapping[str, str]
Rule = Callable[[Tree], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

LONGEST_SCRIPT = 250
LONGEST_COPY = 15
WIDEST_BLOCK = 88
# The default port of the launchers: a lesson that needs it fails beside another job.
FORBIDDEN_PORT = 29500  # allowed port: the rule itself has to name it
ALLOWED_PORT = "# allowed port: "
# Its functions have the process group that exists at its import as a default argument.
HOLDER = "torch.distributed.nn"
DOCSTRING_PARTS = ("Run:", "Needs:", "Expect:", "Before:", "Next:")
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "common"}
# Each with the name to use in its place.
FORBIDDEN_NAMES = {
    "gpu_id": "rank or local_rank",
    "size": "world_size, or what it is the size of",
    "master_process": "is_rank_zero",
}
LANGUAGES = {"console", "diff", "python", "text", "sh", "bash"}
# The shell blocks that the tests do not run, and why, by file. The list has to match
# the READMEs exactly, so that a further exemption is a change to this file.
NOT_RUN: dict[str, list[str]] = {
    "README.md": [
        "these two install everything anew; the project's CI runs them",
        "installs into a new environment; make train does the same",
    ],
    "CONTRIBUTING.md": [
        "it rewrites the pages; the tests run the same code on copies",
    ],
    "03_ddp_torchrun/MACHINES.md": [
        "it needs a cluster; tests/test_machines.py runs the script",
    ],
}


# What the rules look at.


@cache
def repository() -> Tree:
    """Return this repository; files that are not text count as empty."""
    tree = {}
    for name in repository_files():
        try:
            tree[name] = (ROOT / name).read_text("utf-8")
        except UnicodeDecodeError:
            tree[name] = ""
    return tree


def python_files(tree: Tree) -> dict[str, ast.Module]:
    """Return all Python files, parsed."""
    return {name: ast.parse(tree[name]) for name in tree if name.endswith(".py")}


def lesson_files(tree: Tree) -> dict[str, ast.Module]:
    """Return the Python files of the chapters."""
    files = python_files(tree)
    return {name: files[name] for name in files if re.match(r"0\d_\w+/", name)}


def is_main_guard(node: ast.stmt) -> bool:
    """Tell whether a statement is ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def scripts(tree: Tree) -> dict[str, ast.Module]:
    """Return the chapters' Python files that can be started."""
    files = lesson_files(tree)
    return {
        name: files[name] for name in files if any(map(is_main_guard, files[name].body))
    }


def markdown(tree: Tree) -> dict[str, list[Token]]:
    """Return the tokens of all Markdown files."""
    parser = MarkdownIt("commonmark").enable("table")
    return {name: parser.parse(tree[name]) for name in tree if name.endswith(".md")}


def commands(tree: Tree) -> Iterator[str]:
    """Yield the commands of all console blocks, each on one line."""
    for tokens in markdown(tree).values():
        for token in tokens:
            if token.type == "fence" and token.info == "console":
                for step in parse_block(token.content).steps:
                    yield step.command.replace("\\\n", " ")


# Rules about the lessons.


def every_script_is_run(tree: Tree) -> list[str]:
    """A README command starts each script, by ``python`` or by a launcher."""
    launched = r"\b(python3?|torchrun|deepspeed)\b[^;|&\n]*?(?<![\w./-]){}(?![\w./-])"
    run = list(commands(tree))
    return [
        f"{name}: no console block runs it"
        for name in scripts(tree)
        if not any(re.search(launched.format(re.escape(name)), line) for line in run)
    ]


def scripts_are_short(tree: Tree) -> list[str]:
    """No Python file of a chapter is longer than LONGEST_SCRIPT lines."""
    lengths = {name: len(tree[name].splitlines()) for name in lesson_files(tree)}
    return [f"{n}: {k} lines" for n, k in lengths.items() if k > LONGEST_SCRIPT]


def scripts_say_how_to_run_them(tree: Tree) -> list[str]:
    """The docstring of a script has the parts that STYLE asks for."""
    return [
        f"{name}: its docstring has no `{part}`"
        for name, module in scripts(tree).items()
        for part in DOCSTRING_PARTS
        if not re.search(rf"^{part} \S", ast.get_docstring(module) or "", re.M)
    ]


def code_lines(function: Function, text: str) -> int:
    """Count a function's lines without docstring, comments and empty lines."""
    body = (
        function.body[1:] if ast.get_docstring(function) is not None else function.body
    )
    head = range(function.lineno, function.body[0].lineno)
    first = body[0].lineno if body else function.end_lineno or 0
    counted = {*head, *range(first, (function.end_lineno or 0) + 1)}
    lines = text.splitlines()
    code = (lines[number - 1].strip() for number in counted)
    return sum(bool(line) and not line.startswith("#") for line in code)


def copies_are_equal_and_short(tree: Tree) -> list[str]:
    """Functions of one name are equal, byte by byte, and few lines long.

    This concerns the functions at the top level of the chapters' files, except
    ``main`` and ``parse_args``. Those that do different things have different names;
    one that is too long to be copied belongs in a module of its chapter. Docstring,
    comments and empty lines do not count towards the length.
    """
    places: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for name, module in lesson_files(tree).items():
        for node in module.body:
            if isinstance(node, Function) and node.name not in {"main", "parse_args"}:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                source = tree[name].splitlines()[first - 1 : node.end_lineno]
                length = code_lines(node, tree[name])
                places[node.name].append((name, "\n".join(source), length))
    violations = []
    for function, copies in places.items():
        files = ", ".join(name for name, _, _ in copies)
        if len({source for _, source, _ in copies}) > 1:
            violations.append(f"{function} differs between {files}")
        elif len(copies) > 1 and copies[0][2] > LONGEST_COPY:
            violations.append(f"{function} is too long to stand in {files}")
    return violations


def names_are_the_fields_own(tree: Tree) -> list[str]:
    """No variable, parameter or function has one of FORBIDDEN_NAMES.

    Attributes and keyword arguments are free: ``x.size()`` and ``f(size=3)`` are
    other people's names.
    """
    violations = []
    for file, module in python_files(tree).items():
        for node in ast.walk(module):
            name = getattr(node, "id", getattr(node, "arg", getattr(node, "name", "")))
            if name in FORBIDDEN_NAMES and not isinstance(node, ast.keyword):
                use = FORBIDDEN_NAMES[name]
                line = getattr(node, "lineno", 0)
                violations.append(f"{file}:{line}: {name} (say {use})")
    return violations


# Rules about all Python files.


def docstrings(module: ast.Module) -> set[ast.expr]:
    """Return the nodes of all docstrings."""
    return {
        node.body[0].value
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | Function)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }


def no_fixed_port(tree: Tree) -> list[str]:
    """The default port stands in no code, in no string and in no README command.

    Docstrings and comments may speak of it. A test that holds the port on purpose says
    so at the end of the line: ``# allowed port: why``.
    """
    port = str(FORBIDDEN_PORT)
    violations = [f"a README runs: {line}" for line in commands(tree) if port in line]
    for name, module in python_files(tree).items():
        lines, text_only = tree[name].splitlines(), docstrings(module)
        violations += [
            f"{name}:{node.lineno}: port {port}"
            for node in ast.walk(module)
            if isinstance(node, ast.Constant)
            and node not in text_only
            and port in str(node.value)
            and ALLOWED_PORT not in lines[node.lineno - 1]
        ]
    return violations


def only_safe_loads(tree: Tree) -> list[str]:
    """No call passes ``weights_only=False``: such a file can run any code."""
    return [
        f"{name}:{node.value.lineno}: weights_only=False"
        for name, module in python_files(tree).items()
        for node in ast.walk(module)
        if isinstance(node, ast.keyword)
        and node.arg == "weights_only"
        and isinstance(node.value, ast.Constant)
        and not node.value.value
    ]


def groups_can_end(tree: Tree) -> list[str]:
    """A script that trains in a process group imports torch.distributed.nn beforehand.

    An optimizer or DDP would import it later, and its functions would then hold the
    group for good: see `test_a_group_ends_only_with_its_last_reference`.
    """
    violations = []
    for name, module in lesson_files(tree).items():
        words = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(module)
            if isinstance(node, ast.Attribute | ast.Name)
        }
        imported = [
            alias.name if isinstance(node, ast.Import) else f"{node.module}"
            for node in module.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        trains = words & {"optim", "DistributedDataParallel"}
        if "init_process_group" in words and trains and HOLDER not in imported:
            violations.append(f"{name}: does not import {HOLDER}")
    return violations


def modules_are_named_for_what_they_hold(tree: Tree) -> list[str]:
    """No module's name contains one of VAGUE_WORDS."""
    return [
        f"{name}: name it for what it holds"
        for name in python_files(tree)
        if VAGUE_WORDS & set(PurePosixPath(name).stem.lower().split("_"))
    ]


# The rule about loops in tests.


def names_in(node: ast.AST) -> set[str]:
    """Return the variables that a piece of code mentions, without what it calls."""
    called = {n.func for n in ast.walk(node) if isinstance(n, ast.Call)}
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and n not in called)
    return {name.id for name in names}


def is_written_out(node: ast.expr) -> bool:
    """Tell whether one can read off the source how often a loop over this runs."""
    match node:
        case ast.List() | ast.Tuple() | ast.Set():
            return bool(node.elts)
        case ast.Call(func=ast.Name("range"), args=arguments):
            return all(isinstance(argument, ast.Constant) for argument in arguments)
        case ast.Call(func=ast.Name("enumerate" | "sorted"), args=[argument]):
            return is_written_out(argument)
        case ast.Call(func=ast.Attribute(value=ast.Dict(keys=keys)), args=[]):
            return bool(keys)
    return False


def changed_in(loop: ast.AST) -> set[str]:
    """Return the counters and the collections that grow inside a loop."""
    counters = {
        name
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign)
        for name in names_in(node.target)
    }
    grown = {
        name
        for node in ast.walk(loop)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"append", "add", "extend", "update"}
        for name in names_in(node.func.value)
    }
    return counters | grown


def asserts_amount(statement: ast.Assert, source: ast.expr, loop: ast.AST) -> bool:
    """Tell whether an assert says how much a loop over ``source`` looked at.

    It does if it mentions what the loop goes over, together with ``len`` or compared
    with something written out and not empty; or if it compares a counter or a
    collection that the loop changed.
    """
    counted = changed_in(loop)
    for node in ast.walk(statement.test):
        calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
        amount = any(ast.unparse(call.func) == "len" for call in calls)
        if isinstance(node, ast.Compare):
            if names_in(node) & counted:
                return True
            # ``xs[0] == [1]`` says something about an item, not about the amount.
            items = any(isinstance(child, ast.Subscript) for child in ast.walk(node))
            sides = [node.left, *node.comparators]
            amount |= not items and any(map(is_written_out, sides))
        elif not isinstance(node, ast.Call):
            continue
        if amount and names_in(node) & names_in(source):
            return True
    return False


def checking_loops(
    function: Function,
) -> Iterator[tuple[ast.For | ast.Assert, ast.expr]]:
    """Yield a function's loops that hold an assert, with what they go over.

    ``assert all(... for x in xs)`` is such a loop too: it passes if xs is empty.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            if any(isinstance(child, ast.Assert) for child in ast.walk(node)):
                yield node, node.iter
        elif isinstance(node, ast.Assert):
            for call in ast.walk(node.test):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "all":
                    for part in ast.walk(call):
                        if isinstance(part, ast.comprehension):
                            yield node, part.iter


def loops_assert_how_much_they_saw(tree: Tree) -> list[str]:
    """A test that checks in a loop also asserts what the loop looked at.

    Otherwise the test passes when there is nothing to look at. Loops over something
    written out in place, ``for x in (1, 2)`` or ``range(4)``, need no assert. The
    assert must stand outside the loop; see ``asserts_amount`` for its form.
    """
    violations = []
    for name, module in python_files(tree).items():
        if not PurePosixPath(name).match("tests/test_*.py"):
            continue
        for function in (n for n in ast.walk(module) if isinstance(n, Function)):
            asserts = [n for n in ast.walk(function) if isinstance(n, ast.Assert)]
            for loop, source in checking_loops(function):
                inside = set(ast.walk(loop))
                outside = [
                    statement for statement in asserts if statement not in inside
                ]
                if not is_written_out(source) and not any(
                    asserts_amount(statement, source, loop) for statement in outside
                ):
                    violations.append(
                        f"{name}:{loop.lineno}: {function.name} does not assert how "
                        f"much it looped over: {ast.unparse(source)}"
                    )
    return violations


# Rules about Markdown.


def fences(tree: Tree) -> Iterator[tuple[str, Token, str]]:
    """Yield each code block, with its place and the HTML comment right above it."""
    for name, tokens in markdown(tree).items():
        above = ""
        for token in tokens:
            if token.type in {"fence", "code_block"}:
                line = token.map[0] + 1 if token.map else 0
                yield f"{name}:{line}", token, above
            above = token.content.strip() if token.type == "html_block" else ""


def blocks_fit_the_page(tree: Tree) -> list[str]:
    """No line of a code block is wider than WIDEST_BLOCK columns.

    In a diff, the column of the plus and minus signs does not count.
    """
    return [
        f"{place}: {len(line)} columns: {line}"
        for place, token, _ in fences(tree)
        for line in token.content.splitlines()
        if len(line) > WIDEST_BLOCK + (token.info == "diff")
    ]


def unbroken(cell: Token) -> list[str]:
    """Return the words of a table's cell, which a browser does not break."""
    parts = cell.children or []
    text = "".join(
        " " if "break" in p.type or "html" in p.type else p.content for p in parts
    )
    # It may begin a new line after a hyphen.
    return re.split(r"\s+|(?<=-)(?=\w)", text)


def tables_fit_the_page(tree: Tree) -> list[str]:
    """The longest words of a table's columns have room beside each other.

    A column is at least as wide as its longest word. A page on GitHub has room for
    about as many characters as for columns in a block; a wider table is cut off.
    """
    violations = []
    for name, tokens in markdown(tree).items():
        line, column, longest = 0, 0, dict[int, str]()
        for before, token in pairwise(tokens):
            if before.type == "table_open":
                line, longest = (before.map or [0])[0] + 1, {}
            elif before.type == "tr_open":
                column = 0
            if before.type in {"th_open", "td_open"}:
                words = [longest.get(column, ""), *unbroken(token)]
                longest[column], column = max(words, key=len), column + 1
            elif (
                token.type == "table_close"
                and len("".join(longest.values())) > WIDEST_BLOCK
            ):
                violations.append(
                    f"{name}:{line}: too wide: {' '.join(longest.values())}"
                )
    return violations


def commands_suit_other_shells(tree: Tree) -> list[str]:
    """No command counts on its shell to part a variable into words.

    bash does, but zsh, which macOS starts, does not: `torchrun $OPTIONS` gets one word.
    A function serves both: `host() { torchrun --nnodes=2 ...; }`.
    """
    whole = list(commands(tree))
    long = {
        match[1]
        for command in whole
        for match in re.finditer(r"""\b(\w+)=(["'])[^"']* [^"']*\2""", command)
    }
    return [
        f"${{{name}}} holds several words: {command}"
        for command in whole
        for name in re.findall(r"\$\{?(\w+)", re.sub(r'"[^"]*"', "", command))
        if name in long
    ]


def numbered_lines_are_items(tree: Tree) -> list[str]:
    """No line of a paragraph begins with a number and a point.

    Markdown takes it for an item of a list only below an empty line, or if it is 1.
    """
    return [
        f"{name}:{(token.map or [0])[0] + row + 1}: runs on in its paragraph: {line}"
        for name, tokens in markdown(tree).items()
        for token in tokens
        if token.type == "inline"
        for row, line in enumerate(token.content.splitlines())
        if row and re.match(r" *\d+\. ", line)
    ]


def commands_stand_in_console_blocks(tree: Tree) -> list[str]:
    """Every block says its language, and only console blocks hold commands.

    A block in ``sh`` or ``bash`` is not run: a comment above it says why.
    """
    violations = []
    for place, token, above in fences(tree):
        if token.info not in LANGUAGES:
            violations.append(f"{place}: language {token.info!r} is not one we use")
        if token.info in {"sh", "bash"} and not not_run_reason(above):
            violations.append(f"{place}: say why: <!-- not run: reason -->")
        if token.info != "console" and re.search(r"^\$ ", token.content, re.M):
            violations.append(f"{place}: a command that no test runs")
    return violations


def not_run_reason(comment: str) -> str:
    """Return the reason that a comment gives for not running a block."""
    match = re.fullmatch(r"<!-- not run: (.+) -->", comment)
    return match[1] if match else ""


class Attributes(html.parser.HTMLParser):
    """Collects the links and the anchors of HTML inside Markdown."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect one tag's links and anchors."""
        values = {key: value or "" for key, value in attrs}
        self.links += [values[key] for key in ("href", "src") if key in values]
        # A srcset holds addresses, each followed by a size, separated by commas.
        sets = values.get("srcset", "").split(",")
        self.links += [part.split()[0] for part in sets if part.strip()]
        self.anchors += [values[key] for key in ("id", "name") if key in values]


def all_tokens(tokens: list[Token]) -> Iterator[Token]:
    """Yield the tokens and those inside them."""
    for token in tokens:
        yield token
        yield from all_tokens(token.children or [])


def links_and_anchors(tokens: list[Token]) -> tuple[list[str], set[str]]:
    """Return where a Markdown file points to, and what one can point to in it.

    The anchor of a heading is made as GitHub makes it: lower case, punctuation
    removed, hyphens for spaces, and a number for repeated headings.
    """
    tags = Attributes()
    links: list[str] = []
    anchors: set[str] = set()
    for token in all_tokens(tokens):
        links += [
            str(token.attrs[key]) for key in ("href", "src") if key in token.attrs
        ]
        if token.type in {"html_block", "html_inline"}:
            tags.feed(token.content)
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            parts = [part.content for part in heading.children or []]
            kept = re.sub(r"[^\w\- ]", "", "".join(parts).lower())
            anchor = slug = kept.strip().replace(" ", "-")
            repeated = 0
            while anchor in anchors:
                repeated += 1
                anchor = f"{slug}-{repeated}"
            anchors.add(anchor)
    return links + tags.links, anchors | set(tags.anchors)


def links_lead_somewhere(tree: Tree) -> list[str]:
    """Links between files point to existing files and headings, others to https."""
    found = {name: links_and_anchors(tokens) for name, tokens in markdown(tree).items()}
    folders = {str(folder) for name in tree for folder in PurePosixPath(name).parents}
    violations = []
    for name, (links, _) in found.items():
        for link in links:
            parts = urlsplit(link)
            path = posixpath.join(posixpath.dirname(name), unquote(parts.path))
            target = posixpath.normpath(path) if parts.path else name
            if parts.scheme or parts.netloc:
                broken = parts.scheme != "https" or "." not in parts.netloc
            elif parts.fragment:
                broken = (
                    unquote(parts.fragment) not in found.get(target, ([], set()))[1]
                )
            else:
                broken = target not in tree and target not in folders
            if broken:
                violations.append(f"{name}: {link} leads nowhere")
    return violations


# The rules, held against small trees that break them or just keep them.

GUARD = 'if __name__ == "__main__":\n    main()\n'
PARTS = '"""Add.\n\nRun: x\nNeeds: x\nExpect: x\nBefore: x\nNext: x\n"""\n'
SHORT = "def f():\n    return 1\n"
# Fifteen lines of code, and others that do not count.
LONG = 'def f():\n    """Do.\n\n    It."""\n\n    # Why.\n' + "    x = 1\n" * 14


def readme(command: str, language: str = "console") -> str:
    """Return Markdown with one block, in a console block behind a prompt."""
    prompt = "$ " if language == "console" else ""
    return f"```{language}\n{prompt}{command}\n```\n"


def loop(body: str) -> Tree:
    """Return a tree with one test function."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return {"tests/test_x.py": f"def test_x(xs, ys):\n{lines}"}


TRAINS = "dist.init_process_group()\noptimizer = torch.optim.SGD()\n"
LOOP = "for x in xs:\n    assert x"
BROKEN: list[tuple[Rule, Tree, str]] = [
    (every_script_is_run, {"01_a/b.py": GUARD}, "01_a/b.py: no console block"),
    (
        every_script_is_run,
        {"01_a/b.py": GUARD, "README.md": readme("cat 01_a/b.py; python 01_a/b.pyc")},
        "01_a/b.py: no console block",
    ),
    (
        every_script_is_run,
        {"01_a/b.py": GUARD, "README.md": readme("python 01_a/b.py", "sh")},
        "01_a/b.py: no console block",
    ),
    (scripts_are_short, {"01_a/b.py": "x = 1\n" * 251}, "251 lines"),
    (
        scripts_say_how_to_run_them,
        {"01_a/b.py": PARTS.replace("Expect:", "See:") + GUARD},
        "no `Expect:`",
    ),
    (
        copies_are_equal_and_short,
        {"01_a/b.py": SHORT, "02_b/b.py": SHORT.replace("1", "1  # One.")},
        "f differs between 01_a/b.py, 02_b/b.py",
    ),
    (
        copies_are_equal_and_short,
        {"01_a/b.py": SHORT, "01_a/c.py": "@cache\n" + SHORT},
        "f differs between",
    ),
    (
        copies_are_equal_and_short,
        {"01_a/b.py": LONG + "    x = 1\n", "01_a/c.py": LONG + "    x = 1\n"},
        "f is too long",
    ),
    (names_are_the_fields_own, {"01_a/b.py": "gpu_id = 0\n"}, "say rank"),
    (names_are_the_fields_own, {"tests/b.py": "def f(size): ...\n"}, "say world_size"),
    (names_are_the_fields_own, {"b.py": "def master_process(): ...\n"}, "is_rank_zero"),
    (no_fixed_port, {"01_a/b.py": f"port = {FORBIDDEN_PORT}\n"}, "01_a/b.py:1"),
    (no_fixed_port, {"tests/b.py": f"\nurl = f'{{x}}:{FORBIDDEN_PORT}'"}, "b.py:2"),
    (no_fixed_port, {"README.md": readme(f"x --port {FORBIDDEN_PORT}")}, "README runs"),
    (only_safe_loads, {"01_a/b.py": "load(path, weights_only=False)\n"}, "b.py:1"),
    (groups_can_end, {"01_a/b.py": TRAINS}, "b.py: does not import"),
    (
        groups_can_end,
        {"01_a/b.py": f"{TRAINS}def f():\n    import {HOLDER}\n"},
        "b.py: does not import",
    ),
    (modules_are_named_for_what_they_hold, {"01_a/data_utils.py": ""}, "data_utils"),
    (modules_are_named_for_what_they_hold, {"tests/helpers.py": ""}, "helpers"),
    (loops_assert_how_much_they_saw, loop(LOOP), "test_x does not assert how much"),
    (loops_assert_how_much_they_saw, loop(LOOP + "\nassert len(ys) == 2"), "over: xs"),
    (loops_assert_how_much_they_saw, loop(LOOP + "\n    assert len(xs)"), "over: xs"),
    (loops_assert_how_much_they_saw, loop("n = 0\n" + LOOP + "\nassert n == 0"), "xs"),
    (loops_assert_how_much_they_saw, loop("assert xs == []\n" + LOOP), "over: xs"),
    (loops_assert_how_much_they_saw, loop("assert xs[0] == [1]\n" + LOOP), "over: xs"),
    (
        loops_assert_how_much_they_saw,
        loop("assert len(ys)\nfor i in range(len(xs)):\n    assert xs[i]"),
        "over: range(len(xs))",
    ),
    (loops_assert_how_much_they_saw, loop("assert all(x for x in xs)"), "over: xs"),
    (
        loops_assert_how_much_they_saw,
        loop("assert len(xs) == 2\nfor x in xs:\n    for y in x:\n        assert y"),
        "over: x",
    ),
    (blocks_fit_the_page, {"README.md": readme("x" * 89, "text")}, "README.md:1: 89"),
    (blocks_fit_the_page, {"README.md": readme("x" * 90, "diff")}, "90 columns"),
    (tables_fit_the_page, {"a.md": f"|a|\n|-|\n|{'x' * 89}|\n"}, "a.md:1: too wide"),
    (
        tables_fit_the_page,
        {"a.md": f"\n|a|b|\n|-|-|\n|`{'x' * 45}`|b|\n|a|{'y' * 44}<br>|\n"},
        "a.md:2: too wide",
    ),
    (
        commands_suit_other_shells,
        {"a.md": readme("export A='b c'") + readme("x $A")},
        "${A} holds several words: x $A",
    ),
    (numbered_lines_are_items, {"a.md": "a\n\nb\n3. c\n"}, "a.md:4: runs on"),
    (commands_stand_in_console_blocks, {"a.md": readme("x", "")}, "language ''"),
    (
        commands_stand_in_console_blocks,
        {"a.md": readme("x", "console x")},
        "'console x'",
    ),
    (commands_stand_in_console_blocks, {"a.md": readme("$ x", "text")}, "no test runs"),
    (commands_stand_in_console_blocks, {"a.md": readme("x", "sh")}, "say why"),
    (
        commands_stand_in_console_blocks,
        {"a.md": "<!-- not run: installs -->\n\nText.\n\n" + readme("x", "bash")},
        "say why",
    ),
    (links_lead_somewhere, {"a/b.md": "[x](c.md)", "c.md": ""}, "a/b.md: c.md leads"),
    (links_lead_somewhere, {"a.md": "![x](x.png)"}, "x.png leads nowhere"),
    (links_lead_somewhere, {"a.md": "|x|\n|-|\n|[x](y)|\n"}, "y leads nowhere"),
    (links_lead_somewhere, {"a.md": "<p><img src='x.png'></p>"}, "x.png leads nowhere"),
    (links_lead_somewhere, {"a.md": "[x](#title)\n\n# The title"}, "#title leads"),
    (links_lead_somewhere, {"a.md": "[x](b.py#L1)", "b.py": ""}, "b.py#L1 leads"),
    (links_lead_somewhere, {"a.md": "[x](http://example.org)"}, "http://example.org"),
    (links_lead_somewhere, {"a.md": "[x](/b.md)", "b.md": ""}, "/b.md leads"),
]
KEPT: list[tuple[Rule, Tree]] = [
    (
        every_script_is_run,
        {
            "01_a/b.py": GUARD,
            "01_a/c.py": "x = 1\n",
            "01_a/README.md": readme(
                "X=1 torchrun --nproc-per-node=2 \\\n> 01_a/b.py x"
            ),
        },
    ),
    (scripts_are_short, {"01_a/b.py": "x = 1\n" * 250, "tests/b.py": "x = 1\n" * 251}),
    (scripts_say_how_to_run_them, {"01_a/b.py": PARTS + GUARD, "01_a/c.py": ""}),
    (copies_are_equal_and_short, {"01_a/b.py": LONG, "02_b/c.py": "x = 1\n" + LONG}),
    (
        copies_are_equal_and_short,
        {"01_a/b.py": "def main(): x\n", "02_b/c.py": "def main(): y\n"},
    ),
    (names_are_the_fields_own, {"b.py": "world_size = x.size(0) + f(size=1)\n"}),
    (
        no_fixed_port,
        {
            "01_a/b.py": f'"""Runs while {FORBIDDEN_PORT} is held."""\n',
            "tests/b.py": f"port = {FORBIDDEN_PORT}  {ALLOWED_PORT}it is held\n",
        },
    ),
    (only_safe_loads, {"01_a/b.py": "load(path, weights_only=True)\n"}),
    (groups_can_end, {"01_a/b.py": f"import {HOLDER}\n{TRAINS}"}),
    (groups_can_end, {"01_a/b.py": f"from {HOLDER} import RemoteModule\n{TRAINS}"}),
    (modules_are_named_for_what_they_hold, {"01_a/communication.py": ""}),
    (loops_assert_how_much_they_saw, loop(LOOP + "\nassert len(xs) == len(ys)")),
    (loops_assert_how_much_they_saw, loop("assert list(xs) == [1, 2]\n" + LOOP)),
    (loops_assert_how_much_they_saw, loop("for x in range(4):\n    assert x in xs")),
    (
        loops_assert_how_much_they_saw,
        loop("assert len(xs) == n\nfor i in range(n):\n    assert xs[i]"),
    ),
    (loops_assert_how_much_they_saw, loop("for x in (1, 2):\n    assert x in xs")),
    (
        loops_assert_how_much_they_saw,
        loop("for x, y in {'a': 1}.items():\n    assert xs[x] == y"),
    ),
    (loops_assert_how_much_they_saw, loop("for x in xs:\n    ys.append(x)")),
    (loops_assert_how_much_they_saw, loop(LOOP + "\n    n += 1\nassert n == 3")),
    (
        loops_assert_how_much_they_saw,
        loop("assert len(xs) == 3\nassert all(x for x, y in zip(xs, ys))"),
    ),
    (blocks_fit_the_page, {"a.md": "x" * 99 + "\n\n" + readme("+" + "x" * 88, "diff")}),
    (
        tables_fit_the_page,
        {
            "a.md": f"|a|\n|-|\n|{'x' * 88}|\n\n|a|b|\n|-|-|\n"
            f"|{'x' * 40}-{'x' * 9}|{'y' * 46} {'y' * 46}<br>{'y' * 46}|\n"
        },
    ),
    (
        commands_suit_other_shells,
        {"a.md": readme('A=\'b c\' B=d E="f"\n$ x "$A" $B $E $PORT')},
    ),
    (numbered_lines_are_items, {"a.md": "a\n1. b\n2. c\n\nd\n\n3. e\n   2 f\n4. g\n"}),
    (
        commands_stand_in_console_blocks,
        {"a.md": "<!-- not run: installs -->\n" + readme("x", "sh") + readme("x")},
    ),
    (
        links_lead_somewhere,
        {
            "a/b.md": "[1](../c.md#the-all_reduce-again-1) [2](#b) [3](https://x.org) "
            "[4](..) [5](../d%20e.png) <a id='b'></a>",
            "c.md": "# The `all_reduce`, *again*!\n\n## The all_reduce again\n",
            "d e.png": "",
        },
    ),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BROKEN))


def rule_name(value: object) -> str | None:
    """Name a rule in a test's identifier; pytest numbers the trees."""
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_repository_keeps_the_rule(rule: Rule) -> None:
    violations = rule(repository())
    assert violations == [], "\n".join(violations)


@pytest.mark.parametrize(("rule", "tree", "complaint"), BROKEN, ids=rule_name)
def test_rule_finds_what_breaks_it(rule: Rule, tree: Tree, complaint: str) -> None:
    (violation,) = rule(tree)
    assert complaint in violation


@pytest.mark.parametrize(("rule", "tree"), KEPT, ids=rule_name)
def test_rule_accepts_what_keeps_it(rule: Rule, tree: Tree) -> None:
    assert rule(tree) == []


def test_every_rule_is_tried_both_ways() -> None:
    functions = {
        node.name
        for node in ast.parse(repository()["tests/test_house_rules.py"]).body
        if isinstance(node, ast.FunctionDef)
        and ast.unparse(node.args) == "tree: Tree"
        and node.returns
        and ast.unparse(node.returns) == "list[str]"
    }
    assert functions == {rule.__name__ for rule in RULES}
    assert functions == {rule.__name__ for rule, _ in KEPT}


def test_rules_look_at_the_scripts() -> None:
    found = scripts(repository())
    assert "03_ddp_torchrun/train.py" in found
    assert (
        len(found) < len(lesson_files(repository())) < len(python_files(repository()))
    )


def test_every_block_is_a_test(pytestconfig: pytest.Config) -> None:
    # The tests find the blocks by one Markdown parser, this rule by another.
    runner = ReadmeRunner()
    collected = pytestconfig.getini("testpaths")
    seen = []
    for name, tokens in markdown(repository()).items():
        blocks = [
            t for t in tokens if t.type == "fence" and t.info in {"console", "diff"}
        ]
        assert len(list(runner.sybil.parse(ROOT / name))) == len(blocks)
        assert any(PurePosixPath("/", name).match(f"/{path}") for path in collected)
        seen.append(name)
    assert "README.md" in seen


def test_exemptions_are_the_listed_ones() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for place, token, above in fences(repository()):
        if token.info in {"sh", "bash"}:
            found[place.split(":")[0]].append(not_run_reason(above))
    assert found == NOT_RUN
