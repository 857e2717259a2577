"""Gather the chapters' tables "What people get wrong" on one page, MYTHS.md.

``python tests/gather_claims.py`` writes the page anew. The tables themselves stay
in the chapters, next to what shows them. Here the names of what shows them become
links, and a row that names nothing which exists is an error.
"""

import ast
import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token

from launch import ROOT
from readme_runner import repository_files

Tree = Mapping[str, str]

PAGE = "MYTHS.md"
TABLE_TITLE = "What people get wrong"
# The name of a test is one long word, and a column is as wide as its longest word: in a
# column of its own it would leave no room for the others. It stands below a <br>.
COLUMNS = ["claim", "what really happens, and what shows it"]
# What stands there if it is the same as in the row above.
AGAIN = "the same test"

HEADER = f"| {' | '.join(COLUMNS)} |\n| --- | --- |\n"

INTRODUCTION = """\
# What the notes and the web get wrong

{total} claims about training on several processes that sound right and are not, or not
always: from the notes that this repository began with, from tutorials and answers.
Beside each stands what really happens on torch {torch} and DeepSpeed {deepspeed}, and
the test or the script that shows it. `make test-all` runs them all;
`.venv/bin/python -m pytest -k NAME` runs one test. The rows are the last tables of the
chapters, put together by `python tests/gather_claims.py`: change them there. What to do
about an error on your screen stands on [another page](WHEN_IT_GOES_WRONG.md).
"""


def parse(text: str) -> list[Token]:
    """Return the tokens of a Markdown text."""
    return MarkdownIt("commonmark").enable("table").parse(text)


@cache
def headings(text: str) -> list[str]:
    """Return the headings of a Markdown text."""
    tokens = parse(text)
    return [
        tokens[index + 1].content
        for index, token in enumerate(tokens)
        if token.type == "heading_open"
    ]


def table_rows(text: str) -> list[list[str]]:
    """Return the rows of the table under TABLE_TITLE, a list of cells each.

    The header is left out. Raises ValueError if its columns are not COLUMNS.
    """
    rows: list[list[str]] = []
    is_here, previous = False, ""
    for token in parse(text):
        if token.type == "inline" and previous == "heading_open":
            is_here = token.content == TABLE_TITLE
        elif token.type == "tr_open" and is_here:
            rows.append([])
        elif token.type == "inline" and previous in ("th_open", "td_open") and is_here:
            rows[-1].append(token.content)
        previous = token.type
    if rows and rows[0] != COLUMNS:
        raise ValueError(f"the columns are {rows[0]} and not {COLUMNS}")
    return rows[1:]


def pages(tree: Tree) -> list[str]:
    """Return the pages with such a table: by chapter, in the order of its README."""
    found = [
        name
        for name in sorted(tree)
        if re.fullmatch(r"0\d_\w+/\w+\.md", name)
        and TABLE_TITLE in headings(tree[name])
    ]

    def place(name: str) -> tuple[str, int]:
        folder, file = posixpath.split(name)
        if file == "README.md":
            return folder, -1
        position = tree.get(f"{folder}/README.md", "").find(f"({file})")
        return folder, position if position >= 0 else sys.maxsize

    return sorted(found, key=place)


def defined_tests(tree: Tree) -> dict[str, list[str]]:
    """Return the files that define each test function."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, text in tree.items():
        if re.fullmatch(r"tests/test_\w+\.py", name):
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    places[node.name].append(name)
    return places


def moved_links(text: str, page: str) -> str:
    """Make the links of a chapter's page right in the root folder."""

    def moved(match: re.Match[str]) -> str:
        target = match[1]
        if re.match(r"\w+:", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        return f"]({path if target[0] != '#' else page}{mark}{anchor})"

    return re.sub(r"\]\(([^()\s]+)\)", moved, text)


def evidence(
    cell: str, page: str, tree: Tree, functions: Mapping[str, list[str]]
) -> str:
    """Turn what a cell names, tests, scripts or blocks, into links.

    Raises ValueError if it names nothing, something that does not exist, or a test
    function of which there are two.
    """
    folder = posixpath.dirname(page)
    links = 0

    def link_code(match: re.Match[str]) -> str:
        nonlocal links
        word = match[1]
        if word.startswith("test_"):
            files = functions.get(word.partition("[")[0], [])
            if len(files) != 1:
                raise ValueError(f"{page}: {len(files)} test functions are {word}")
            path = files[0]
        elif re.match(r"\w+\.py\b", word):
            path = f"{folder}/{word.split()[0]}"
            if path not in tree:
                raise ValueError(f"{page}: there is no {path}")
        else:
            return match[0]
        links += 1
        return f"[{match[0]}]({path})"

    def link_block(match: re.Match[str]) -> str:
        nonlocal links
        if match[1] not in headings(tree[page]):
            raise ValueError(f"{page}: no heading is {match[1]!r}")
        links += 1
        kept = re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-")
        return f"[{match[1]}]({page}#{kept})"

    result = re.sub(r'"([^"]+)"', link_block, re.sub(r"`([^`]+)`", link_code, cell))
    if not links:
        raise ValueError(f"{page}: names no test, no script and no block: {cell!r}")
    return result


def claims(page: str, tree: Tree) -> Iterator[str]:
    """Yield the claims of a page, each a row of the new table."""
    functions = defined_tests(tree)
    shown_by = ""
    for claim, cell in table_rows(tree[page]):
        truth, _, named = cell.rpartition("<br>")
        if not truth:
            raise ValueError(f"{page}: no <br> stands before what shows it: {cell!r}")
        if named != AGAIN:
            shown_by = evidence(named, page, tree, functions)
        elif not shown_by:
            raise ValueError(f"{page}: {AGAIN!r} in the first row")
        row = moved_links(f"{claim} | {truth}", page) + f"<br>{shown_by}"
        # Markdown knows no other bar than one that ends a cell.
        if row.count("|") > 1:
            raise ValueError(f"{page}: a cell holds a bar: {row}")
        yield f"| {row} |\n"


def gather(tree: Tree) -> str:
    """Return the text of PAGE."""
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", tree["requirements.txt"], re.M))
    rows = {page: list(claims(page, tree)) for page in pages(tree)}
    total = sum(map(len, rows.values()))
    tables = [
        f"\n## [{headings(tree[page])[0]}]({page})\n\n{HEADER}{''.join(rows[page])}"
        for page in rows
    ]
    return INTRODUCTION.format(total=total, **pins) + "".join(tables)


def read_tree() -> dict[str, str]:
    """Return what the page is made of: Markdown, Python and the pins."""
    return {
        name: (ROOT / name).read_text("utf-8")
        for name in repository_files()
        if name.endswith((".md", ".py")) or name == "requirements.txt"
    }


if __name__ == "__main__":
    (ROOT / PAGE).write_text(gather(read_tree()), "utf-8")
