"""What holds for every file of the repository, whichever lesson it belongs to.

A rule is a function from a tree (path to text) to the list of its violations, each of
which begins with the path of a file. Each rule is held against this repository, and
against small samples that break it, so that a rule that has stopped finding anything is
noticed.
"""

import ast
import html.parser
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from copies import COPIES
from launch import ROOT
from readme_runner import ReadmeRunner, parse_block, repository_files

Tree = Mapping[str, str]
Rule = Callable[[Tree], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Lines of a script, and of a module that several chapters share.
LONGEST_SCRIPT = 110
LONGEST_SHARED_MODULE = 200
# Chapter 03 explains these two, and its `train.py`, which later chapters change.
LONGER_SHARED_MODULES = {"03_ddp_torchrun/data.py", "03_ddp_torchrun/checkpoint.py"}
TRAIN = "03_ddp_torchrun/train.py"
LIKE_TRAIN = {
    f"{chapter}/train.py"
    for chapter in ("06_fsdp", "07_tensor_parallel", "08_pipeline_parallel")
}
# The heading in CONTRIBUTING.md below which the longer scripts are named.
LONG_SCRIPTS = "Scripts of more than 110 lines"
# Words of prose on a chapter's first page, and on its other pages.
LONGEST_CHAPTER_PAGE = 2000
LONGEST_PAGE = 1200
LATEST_CODE = 60  # the line by which a chapter's first page shows Python
LARGEST_FOLDER = 10
# How many modules of its chapter a script may import, beside `ranks`. In some rooms it
# imports nothing of ours, nor does the smallest script of a chapter.
MOST_IMPORTS = 2
# FSDP's leaves by ranks.py, which frees what DTensor keeps of a group; DeepSpeed's by
# deepspeed_setup.py, which ends whatever threads the engine keeps.
MINIMAL_IMPORTS = {
    "04_rpc_parameter_server/minimal.py": {"classifier"},
    "05_deepspeed_zero/minimal.py": {"model", "data", "deepspeed_setup"},
    "05_deepspeed_zero/checkpoints/minimal_resumable.py": {
        *("model", "data", "deepspeed_setup"),
    },
    "06_fsdp/minimal.py": {"model", "data", "ranks"},
    "06_fsdp/minimal_resumable.py": {"model", "data", "ranks"},
    "07_tensor_parallel/minimal.py": {"model", "data", "ranks"},
    "09_one_mesh/minimal.py": {"model", "data", "ranks"},
}
MOST_IMPORTS_BY_NAME = {"train.py": 3}
# What many scripts import and a reader reads once: how ranks start, with DeepSpeed too,
# the GPT of chapter 03, and that of chapter 07.
READ_ONCE = {"ranks", "deepspeed_setup", "model", "parallel_gpt"}
ROOMS_WITHOUT_IMPORTS = {"failures", "mistakes"}
WIDEST_BLOCK = 88
# The default port of the launchers: a lesson that needs it fails beside another job.
FORBIDDEN_PORT = 29500  # allowed port: the rule itself has to name it
ALLOWED_PORT = "# allowed port: "
# Its functions have the process group that exists at its import as a default argument.
HOLDER = "torch.distributed.nn"
# What imports it too.
IMPORT_HOLDER = {"ranks", "torch.distributed.pipelining"}
# What exchanges tensors, so that nobody has done so before all have joined; modules and
# functions that do it themselves; and scripts in which a rank leaves too early anyhow.
EXCHANGES = re.compile(
    r"dist\.(all_|barrier|broadcast|gather|reduce|scatter|i?send|i?recv)"
)
WRAPPERS = {"DistributedDataParallel", "fully_shard", "gather", "check", "initialize"}
LEAVES_ANYHOW = {
    # Its point is a rank that waits in vain; the others sleep until then.
    "09_one_mesh/mistakes/rank_zero_alone.py",
}
DOCSTRING_PARTS = ("Run:", "Expect:")
# The order of reading stands on the page, and so does what a script needs.
FORMER_DOCSTRING_PARTS = ("Needs:", "Before:", "Next:")
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "common"}
# Each with the name to use in its place.
FORBIDDEN_NAMES = {
    "gpu_id": "rank or local_rank",
    "size": "world_size, or what it is the size of",
    "master_process": "is_rank_zero",
}
# The words of a language that only we speak, below those that documentation and papers
# use for the same thing. In code they are free.
PRIVATE_WORDS: dict[str, tuple[str, ...]] = {
    "flat buffer, flattened gradient buffer or bucket": (
        "a row to send",
        "into one row",
    ),
    "peak memory, transient or temporaries": ("for a moment", "the most in a step"),
    "sharded, partitioned or split": (
        "shared out",
        "parted",
        "part a model",
        "dealt out",
    ),
    "local loss": ("own loss",),
    "computes": ("finds its gradient", "finds a gradient"),
    "optimizer state, or first and second moments": (
        "Adam's states",
        "the optimizer's numbers",
        "two running means",
    ),
    "fp32 master weights": ("a copy in float32",),
    "freed or released": ("let go", "given away"),
    "gathered or all-gathered": ("fetched",),
    "memory per rank, or allocated": ("what each rank holds", "held by a rank"),
    "communication volume": ("what each stage sends",),
    "offloaded": ("moved elsewhere",),
    "consolidated checkpoint": ("joined weights",),
    "resuming from": ("going on from", "go on from"),
    "elastic membership, scale up or scale down": ("ranks that come and go",),
    "checkpointing and fault tolerance": ("crashes survived",),
    "uninterrupted": ("in peace",),
    "diverge": ("drift apart", "the ranks part", "weights that part"),
    "garbage (undefined) values, or partial sums": (
        "rubbish",
        "scrap",
        "half-made sums",
    ),
    "root, star topology, or naive (through rank 0)": (
        "instead of a hub",
        "the hub sends",
    ),
    "buffered, or eager protocol": ("put aside",),
    "in flight": ("has in hand",),
    "RMSE": ("metres off",),
    "held-out points": ("unseen places",),
    "predicting the mean, or baseline": ("a flat map",),
    "seen half, unseen half": ("at home", "abroad"),
    "rendezvous": ("meeting place", "meeting points", "meeting"),
    "heartbeat": ("sign of life",),
    "embedding table": ("a table of words",),
    "pooled embeddings": ("a sum of rows", "bag sums"),
    "lost updates": ("entries lost",),
    "scenarios or cases": ("acts", "plays"),
    "checker or comparison": ("judge", "verdict"),
    "security": ("whom you trust", "whom RPC trusts"),
    "network namespace": ("own world",),
    "network partition, or link down": ("a cable is pulled",),
    "default DDP": ("DDP as it comes",),
    "gradient compression": ("send less",),
    "rebuilds its buckets": ("lays out its message anew",),
    "bypass the wrapper": ("walk past DDP",),
    "timeout": ("time-out",),
    "temporary file, atomic rename": ("beside its place, then renamed",),
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
    "03_ddp_torchrun/cluster/README.md": [
        "it needs a cluster",
        "it needs GPUs; chapter 03's page runs it on a CPU",
        "it needs two machines; the next block runs it on one",
        "it needs a cluster; tests/test_ddp_cluster.py runs the script",
        "it needs GPUs",
        "it needs a cluster; the answers are those that the sources name",
    ],
    "04_rpc_parameter_server/README.md": [
        "it takes four terminals; tests/test_rpc_failures.py runs these commands",
    ],
    "05_deepspeed_zero/README.md": ["it takes two machines"],
    "05_deepspeed_zero/huggingface/README.md": [
        "it takes two GPUs; the last section runs it on a CPU",
    ],
}


# What the rules look at.


class Link(str):
    """A symbolic link in a tree: the text of the file that it leads to."""

    def __new__(cls, text: str, leads_to: str) -> "Link":
        """Remember what the link itself says: mostly a path from its own folder."""
        link = super().__new__(cls, text)
        link.leads_to = leads_to
        return link

    leads_to: str


@cache
def repository() -> Tree:
    """Return this repository; files that are not text count as empty."""
    tree = {}
    for name in repository_files():
        path = ROOT / name
        try:
            text = path.read_text("utf-8") if path.is_file() else ""
        except UnicodeDecodeError:
            text = ""
        tree[name] = Link(text, os.readlink(path)) if path.is_symlink() else text
    return tree


@cache
def parsed(text: str) -> ast.Module:
    """Parse a Python file, once for all rules."""
    return ast.parse(text)


def python_files(tree: Tree) -> dict[str, ast.Module]:
    """Return all Python files, parsed. What a link leads to is not looked at twice."""
    return {
        name: parsed(text)
        for name, text in tree.items()
        if name.endswith(".py") and not isinstance(text, Link)
    }


def is_in_a_chapter(name: str) -> bool:
    """Tell whether a path leads into a chapter's folder, or into a room of one."""
    return bool(re.match(r"0\d_\w+/", name))


def lesson_files(tree: Tree) -> dict[str, ast.Module]:
    """Return the Python files of the chapters and of their rooms."""
    files = python_files(tree)
    return {name: files[name] for name in files if is_in_a_chapter(name)}


def is_main_guard(node: ast.stmt) -> bool:
    """Tell whether a statement is ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def scripts(tree: Tree) -> dict[str, ast.Module]:
    """Return the chapters' Python files that can be started."""
    files = lesson_files(tree)
    return {
        name: files[name] for name in files if any(map(is_main_guard, files[name].body))
    }


@cache
def nodes_of(module: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file, once for all rules."""
    return list(ast.walk(module))


@cache
def tokens_of(text: str) -> list[Token]:
    """Parse a Markdown file, once for all rules."""
    return MarkdownIt("commonmark").enable("table").parse(text)


def markdown(tree: Tree) -> dict[str, list[Token]]:
    """Return the tokens of all Markdown files."""
    return {name: tokens_of(tree[name]) for name in tree if name.endswith(".md")}


def chapter_pages(tree: Tree) -> dict[str, str]:
    """Return the text of the chapters' pages, those of their rooms included."""
    return {
        name: text
        for name, text in tree.items()
        if name.endswith(".md") and is_in_a_chapter(name)
    }


def is_first_page(name: str) -> bool:
    """Tell whether a path is that of a chapter's README.md, not of a room's."""
    return bool(re.fullmatch(r"0\d_\w+/README\.md", name))


def prose(text: str) -> str:
    """Return the words of a page, with one space between them.

    Blocks, code within a line, comments and the targets of links are no prose.
    """
    for not_prose in (r"(?ms)^[ >]*```.*?^[ >]*```", r"(?s)<!--.*?-->", r"`[^`\n]*`"):
        text = re.sub(not_prose, "", text)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def commands(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield the commands of all console blocks, each on one line, with its place."""
    for place, token, _ in fences(tree):
        if token.info == "console":
            for step in parse_block(token.content).steps:
                yield place, step.command.replace("\\\n", " ")


# Rules about the lessons.


def every_script_is_run(tree: Tree) -> list[str]:
    """A README command starts each script, by ``python`` or by a launcher.

    Those that draw are left out: ``make figures`` runs them, and a test. Where a
    ``show.py`` runs the scripts beside it, it may be told their names.
    """
    launchers = r"\b(python3?|torchrun|deepspeed|accelerate launch)\b"
    launched = launchers + r"[^;|&\n]*?(?<![\w./-]){}(?![\w./-])"
    run = [command for _, command in commands(tree)]
    violations = []
    for name in scripts(tree):
        path = PurePosixPath(name)
        patterns = {name: launched.format(re.escape(name))}
        show = str(path.parent / "show.py")
        if show in tree and path.name != "show.py":
            patterns[show] = rf"{re.escape(show)} .*\b{re.escape(path.stem)}\b"
        is_run = any(
            script in line and re.search(pattern, line)
            for script, pattern in patterns.items()
            for line in run
        )
        if not is_run and not path.name.startswith("draw_"):
            violations.append(f"{name}: no console block runs it")
    return violations


def long_scripts(tree: Tree) -> set[str]:
    """Return the scripts that CONTRIBUTING.md names, with its reason, as long ones."""
    page = tree.get("CONTRIBUTING.md", "")
    section = page.partition(f"\n## {LONG_SCRIPTS}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^- `(\S+)`: \S", section, re.M))


def spine_scripts_are_short(tree: Tree) -> list[str]:
    """No script, in a chapter or in a room, is longer than LONGEST_SCRIPT lines.

    CONTRIBUTING.md names those that are, and only those.
    """
    lengths = {name: len(tree[name].splitlines()) for name in scripts(tree)}
    long = {name for name, length in lengths.items() if length > LONGEST_SCRIPT}
    listed = long_scripts(tree)
    return [f"{name}: {lengths[name]} lines" for name in sorted(long - listed)] + [
        f"CONTRIBUTING.md: {name} is no script of more than {LONGEST_SCRIPT} lines"
        for name in sorted(listed - long)
    ]


def imports_of_ours(tree: Tree, name: str, module: ast.Module) -> set[str]:
    """Return the modules of its folder and of its chapter's that a file imports."""
    path = PurePosixPath(name)
    folders = (path.parent, PurePosixPath(path.parts[0]))
    imported = {
        part.split(".")[0]
        for node in nodes_of(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for part in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    return {m for m in imported if any(f"{f / m}.py" in tree for f in folders)}


def files_to_carry_away_stand_alone(tree: Tree) -> list[str]:
    """A file whose docstring says to carry it away imports nothing of ours."""
    return [
        f"{name}: is to be carried away, and imports {', '.join(sorted(ours))}"
        for name, module in lesson_files(tree).items()
        if "carry away this one file" in (ast.get_docstring(module) or "").lower()
        if (ours := imports_of_ours(tree, name, module))
    ]


def lessons_import_little(tree: Tree) -> list[str]:
    """A script makes a reader open few other files of its chapter.

    What is READ_ONCE does not count. In the rooms where each script shows one mistake
    it does: such a script needs nothing of ours, and a `minimal*.py` nothing but the
    model and the data, or what MINIMAL_IMPORTS says. A table of many cases,
    `x_table.py`, is no such script.
    """
    violations = []
    for name, module in scripts(tree).items():
        path, ours = PurePosixPath(name), imports_of_ours(tree, name, module)
        is_mistake = ROOMS_WITHOUT_IMPORTS & set(path.parts)
        is_mistake = is_mistake and not path.stem.endswith("_table")
        if is_mistake or path.stem.startswith("minimal"):
            most = 0
            ours -= (
                set() if is_mistake else MINIMAL_IMPORTS.get(name, {"model", "data"})
            )
        else:
            most = MOST_IMPORTS_BY_NAME.get(path.name, MOST_IMPORTS)
            ours -= READ_ONCE
        if len(ours) > most:
            imports = ", ".join(sorted(ours))
            violations.append(f"{name}: imports {imports}; {most} are allowed")
    return violations


def folders_are_small(tree: Tree) -> list[str]:
    """No folder of a chapter holds more than LARGEST_FOLDER Python files.

    Links do not count, nor do copies. What measures, breaks or exercises has a room of
    its own. A room of short mistakes may hold more.
    """
    copies = {copy for names in COPIES.values() for copy in names}
    own = [name for name in lesson_files(tree) if name not in copies]
    folders = [PurePosixPath(name).parent for name in own]
    numbers = Counter(str(f) for f in folders if f.name not in ROOMS_WITHOUT_IMPORTS)
    return [
        f"{folder}/: {number} Python files"
        for folder, number in numbers.items()
        if number > LARGEST_FOLDER
    ]


def links_stay_in_their_chapter(tree: Tree) -> list[str]:
    """A symbolic link stands in a room, for a module of its chapter of the same name.

    Its path is relative, so that it also leads there in a chapter taken away whole.
    """
    violations = []
    for name, text in tree.items():
        if isinstance(text, Link):
            path = PurePosixPath(name)
            target = posixpath.normpath(posixpath.join(path.parent, text.leads_to))
            is_right = (
                is_in_a_chapter(name)
                and target.startswith(f"{path.parts[0]}/")
                and not isinstance(tree.get(target, text), Link)
                and target != name
                and PurePosixPath(target).name == path.name
            )
            if not is_right:
                violations.append(
                    f"{name}: links to {text.leads_to}, which is no such module of its "
                    "chapter"
                )
    return violations


def no_path_surgery(tree: Tree) -> list[str]:
    """No file of a chapter changes where Python looks for modules: a room has links."""
    violations = []
    for name, module in lesson_files(tree).items():
        for node in nodes_of(module):
            match node:
                case ast.Attribute(value=ast.Name("sys"), attr="path"):
                    violations.append(f"{name}:{node.lineno}: sys.path")
                case ast.ImportFrom(module="sys", names=[*names]) if "path" in {
                    alias.name for alias in names
                }:
                    violations.append(f"{name}:{node.lineno}: from sys import path")
    return violations


def no_maximum_drops_a_nan(tree: Tree) -> list[str]:
    """Of errors a lesson takes the maximum of a tensor: `max()` may drop a NaN.

    `same_as_one_process.py` asks `allclose` before.
    """
    errors = re.compile(
        r"\.item\(\) for|torch\.dist\b|gather\(.*(error|apart|\.item\()"
    )
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, module in lesson_files(tree).items()
        if not name.endswith("/same_as_one_process.py")
        for node in nodes_of(module)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "max"
        and errors.search(ast.unparse(node))
    ]


def scripts_say_how_to_run_them(tree: Tree) -> list[str]:
    """The docstring of a script has the parts that STYLE asks for."""
    return [
        f"{name}: its docstring has no `{part}`"
        for name, module in scripts(tree).items()
        for part in DOCSTRING_PARTS
        if not re.search(rf"^{part} \S", ast.get_docstring(module) or "", re.M)
    ]


def pages_alone_say_the_order(tree: Tree) -> list[str]:
    """No docstring has one of FORMER_DOCSTRING_PARTS."""
    return [
        f"{name}: its docstring has `{part}`"
        for name, module in lesson_files(tree).items()
        for part in FORMER_DOCSTRING_PARTS
        if re.search(rf"^{part} ", ast.get_docstring(module) or "", re.M)
    ]


# The rules about what several files need.

SHARED_MODULES = {PurePosixPath(source).name: source for source in COPIES}


def shared_modules_are_equal(tree: Tree) -> list[str]:
    """A file named like a shared module is its source, or a copy, byte for byte.

    tests/support/copies.py says which copies there are, and writes them.
    """
    violations = []
    for name in lesson_files(tree):
        source = SHARED_MODULES.get(PurePosixPath(name).name, name)
        if name != source and name not in COPIES[source]:
            violations.append(f"{name}: tests/support/copies.py does not write it")
        elif name != source and tree[name] != tree.get(source):
            violations.append(f"{name}: run `python tests/support/copies.py`")
    return violations


def shared_modules_are_short(tree: Tree) -> list[str]:
    """Each source of copies is read once from top to bottom, so it is not long."""
    lengths = {source: len(tree.get(source, "").splitlines()) for source in COPIES}
    return [
        f"{source}: {length} lines"
        for source, length in lengths.items()
        if length > LONGEST_SHARED_MODULE and source not in LONGER_SHARED_MODULES
    ]


def functions_have_one_home(tree: Tree) -> list[str]:
    """No function but ``main`` is defined in more than two files of the chapters.

    This concerns the top level of the files. What a third file needs belongs into a
    module: into `ranks.py`, if three chapters need it. Equal copies of a shared module
    count as one file, and a file that defines again what one of these holds is the one
    to blame. Later chapters' `train.py` are chapter 03's with some lines changed.
    """
    homes: dict[str, list[str]] = defaultdict(list)
    for name, module in lesson_files(tree).items():
        for function in {n.name for n in module.body if isinstance(n, Function)}:
            homes[function].append(name)
    homes.pop("main", None)
    violations = []
    for function, names in homes.items():
        if TRAIN in names:
            names = [n for n in names if n not in LIKE_TRAIN]
        own = [n for n in names if PurePosixPath(n).name not in SHARED_MODULES]
        files = len(own) + len({tree[name] for name in names if name not in own})
        by_chapter: dict[str, list[str]] = defaultdict(list)
        for name in own if files > 2 else []:
            by_chapter[PurePosixPath(name).parts[0]].append(name)
        violations += [
            f"{', '.join(blamed)}: {function} is defined in {files} files"
            for blamed in by_chapter.values()
        ]
    return violations


def every_definition_is_used(tree: Tree) -> list[str]:
    """What stands on the top level of a chapter's file is named a second time there.

    Or in another of the chapters' files, or on a page. Equal copies count as one.
    """
    files = lesson_files(tree)
    texts = {tree[name] for name in (*files, *chapter_pages(tree))}
    count = Counter(word for text in texts for word in re.findall(r"\w+", text))
    return [
        f"{name}: nothing names {defined}"
        for name, module in files.items()
        for node in module.body
        for defined in defined_by(node)
        if count[defined] == 1
    ]


def defined_by(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def names_are_the_fields_own(tree: Tree) -> list[str]:
    """No variable, parameter or function has one of FORBIDDEN_NAMES.

    Attributes and keyword arguments are free: ``x.size()`` and ``f(size=3)`` are
    other people's names.
    """
    violations = []
    for file, module in python_files(tree).items():
        for node in nodes_of(module):
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
        for node in nodes_of(module)
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
    violations = [
        f"{place}: runs {line}" for place, line in commands(tree) if port in line
    ]
    for name, module in python_files(tree).items():
        lines, text_only = tree[name].splitlines(), docstrings(module)
        violations += [
            f"{name}:{node.lineno}: port {port}"
            for node in nodes_of(module)
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
        for node in nodes_of(module)
        if isinstance(node, ast.keyword)
        and node.arg == "weights_only"
        and isinstance(node.value, ast.Constant)
        and not node.value.value
    ]


def groups_can_end(tree: Tree) -> list[str]:
    """A script that trains in a process group imports torch.distributed.nn beforehand.

    An optimizer or DDP would import it later, and its functions would then hold the
    group for good: see `test_a_group_ends_only_with_its_last_reference`. To import one
    of IMPORT_HOLDER is enough: see `test_gloos_threads_end_with_the_pipeline`.
    """
    violations = []
    for name, module in lesson_files(tree).items():
        words = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in nodes_of(module)
            if isinstance(node, ast.Attribute | ast.Name)
        }
        imported = [
            alias.name if isinstance(node, ast.Import) else f"{node.module}"
            for node in module.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        trains = words & {"optim", "DistributedDataParallel"}
        is_for_all = PurePosixPath(name).name == "ranks.py"
        if (
            "init_process_group" in words
            and (trains or is_for_all)
            and not {HOLDER, *IMPORT_HOLDER} & set(imported)
        ):
            violations.append(f"{name}: does not import {HOLDER}")
    return violations


def nobody_leaves_before_all_have_joined(tree: Tree) -> list[str]:
    """Who makes and destroys a group calls something that waits for other ranks.

    It is enough if one function that exchanges tensors is called without a group, for
    then all take part: see `test_only_a_barrier_says_that_all_ranks_have_joined`.
    """
    violations = []
    for name, module in lesson_files(tree).items():
        calls = [node for node in nodes_of(module) if isinstance(node, ast.Call)]
        called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
        waits = WRAPPERS & called or any(
            "group" not in {keyword.arg for keyword in call.keywords}
            for call in calls
            if ast.unparse(call.func).startswith("dist.")
            and EXCHANGES.match(ast.unparse(call.func))
        )
        if (
            {"init_process_group", "destroy_process_group"} <= called
            and not waits
            and name not in LEAVES_ANYHOW
        ):
            violations.append(f"{name}: a rank may leave while others still connect")
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
        for function in (n for n in nodes_of(module) if isinstance(n, Function)):
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


# Rules about the pages.


def pages_are_short(tree: Tree) -> list[str]:
    """No page of a chapter or of a room has more words of prose than it may."""
    violations = []
    for name, text in chapter_pages(tree).items():
        most = LONGEST_CHAPTER_PAGE if is_first_page(name) else LONGEST_PAGE
        if (words := len(prose(text).split())) > most:
            violations.append(f"{name}: {words} words of prose; {most} are allowed")
    return violations


def chapter_pages_show_code_early(tree: Tree) -> list[str]:
    """A chapter's first page shows Python within its first LATEST_CODE lines."""
    early = {
        place.split(":")[0]
        for place, token, _ in fences(tree)
        if token.info == "python" and int(place.split(":")[1]) <= LATEST_CODE
    }
    return [
        f"{name}: no ```python block begins in its first {LATEST_CODE} lines"
        for name in chapter_pages(tree)
        if is_first_page(name) and name not in early
    ]


def pages_use_the_fields_words(tree: Tree) -> list[str]:
    """The prose of no page has one of PRIVATE_WORDS."""
    violations = []
    for name in markdown(tree):
        words = prose(tree[name])
        for standard, phrases in PRIVATE_WORDS.items():
            for phrase in phrases:
                whole = rf"(?i)(?<![\w-]){re.escape(phrase)}(?![\w-])"
                if number := len(re.findall(whole, words)):
                    times = f", {number} times" if number > 1 else ""
                    violations.append(f"{name}: {phrase!r}{times}; say {standard}")
    return violations


def every_room_has_a_page(tree: Tree) -> list[str]:
    """Each folder within a chapter has a README.md, which says what it is for."""
    rooms = {
        str(folder)
        for name in tree
        if is_in_a_chapter(name)
        for folder in list(PurePosixPath(name).parents)[:-2]
    }
    return [
        f"{room}/: no README.md" for room in rooms if f"{room}/README.md" not in tree
    ]


def pages_do_not_demonstrate_refusals(tree: Tree) -> list[str]:
    """No page of a chapter shows that an option is refused, or how a picture is drawn.

    The tests show the one, and CONTRIBUTING.md says the other.
    """
    unwanted = re.compile(r"echo \$\?|\bdraw_|\bassets/")
    return [
        f"{place}: {command}"
        for place, command in commands(tree)
        if is_in_a_chapter(place) and unwanted.search(command)
    ]


# Rules about all Markdown.


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


def commands_can_be_pasted(tree: Tree) -> list[str]:
    """A command goes on in the next line after a backslash, not after a prompt.

    With the shell's second prompt, `> train.py` pasted would overwrite that file.
    """
    return [
        f"{place}: end the line before with a backslash: {line}"
        for place, token, _ in fences(tree)
        if token.info == "console"
        for line in token.content.splitlines()
        if line.startswith("> ")
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
        for _, command in whole
        for match in re.finditer(r"""\b(\w+)=(["'])[^"']* [^"']*\2""", command)
    }
    return [
        f"{place}: ${{{name}}} holds several words: {command}"
        for place, command in whole
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


def comments_close_their_quotes(tree: Tree) -> list[str]:
    """A comment of commands, pasted into zsh, opens no string.

    At a prompt zsh reads comments as words, unless its `interactivecomments` is set: it
    would take the lines that follow as a part of the string.
    """
    return [
        f"{place}: an apostrophe in a comment: {comment[0]}"
        for place, token, _ in fences(tree)
        if token.info in {"sh", "bash", "console"}
        for line in token.content.splitlines()
        if token.info != "console" or line.startswith("$ ")
        if (comment := re.search(r"(?:^| )# .*", line)) and comment[0].count("'") % 2
    ]


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
PARTS = '"""Add.\n\nRun: x\nExpect: x\n"""\n'
# A script and a page that are just as long as they may be.
LONG = "x = 1\n" * (LONGEST_SCRIPT - 2) + GUARD
PAGE = "`a b` [c](d e) " * LONGEST_PAGE + "\n\n<!-- f\ng -->\n"
FIRST_PAGE = "f " * LONGEST_CHAPTER_PAGE
RANKS = next(iter(COPIES))
COPY = COPIES[RANKS][0]
F = "def f(): ...\n"
CODE = "```python\nx\n```\n"


def readme(command: str, language: str = "console") -> str:
    """Return Markdown with one block, in a console block behind a prompt."""
    prompt = "$ " if language == "console" else ""
    return f"```{language}\n{prompt}{command}\n```\n"


def listed(script: str) -> str:
    """Return a CONTRIBUTING.md with one line in its list of long scripts."""
    return f"# X\n\n## {LONG_SCRIPTS}\n\n- {script}\n\n## Y\n\n- `z.py`: z\n"


def loop(body: str) -> Tree:
    """Return a tree with one test function."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return {"tests/test_x.py": f"def test_x(xs, ys):\n{lines}"}


LEAVES = "dist.init_process_group()\ndist.destroy_process_group()\n"
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
    (
        every_script_is_run,
        {
            "01_a/r/b.py": GUARD,
            "01_a/r/show.py": GUARD,
            "README.md": readme("python 01_a/r/show.py bc"),
        },
        "01_a/r/b.py: no console block",
    ),
    (spine_scripts_are_short, {"01_a/b.py": f"\n{LONG}"}, "01_a/b.py: 111 lines"),
    (spine_scripts_are_short, {"01_a/b/c.py": f"\n{LONG}"}, "01_a/b/c.py: 111 lines"),
    (
        spine_scripts_are_short,
        {"01_a/b.py": f"\n{LONG}", "CONTRIBUTING.md": "# X\n\n- `01_a/b.py`: why\n"},
        "01_a/b.py: 111 lines",
    ),
    (
        spine_scripts_are_short,
        {"01_a/b.py": f"\n{LONG}", "CONTRIBUTING.md": listed("`01_a/b.py`:")},
        "01_a/b.py: 111 lines",
    ),
    (
        spine_scripts_are_short,
        {"01_a/b.py": LONG, "CONTRIBUTING.md": listed("`01_a/b.py`: it was")},
        "CONTRIBUTING.md: 01_a/b.py is no script of more",
    ),
    (
        spine_scripts_are_short,
        {"CONTRIBUTING.md": listed("`01_a/b.py`: it was")},
        "CONTRIBUTING.md: 01_a/b.py is no script of more",
    ),
    (
        lessons_import_little,
        {
            "01_a/b.py": f"import ranks, c\nfrom d import x\nimport e\n{GUARD}",
            **dict.fromkeys(["01_a/c.py", "01_a/d.py", "01_a/e.py"], ""),
        },
        "01_a/b.py: imports c, d, e; 2 are allowed",
    ),
    (
        lessons_import_little,
        {
            "01_a/r/b.py": f"import c, d\ndef f():\n    from e.g import h\n{GUARD}",
            "01_a/r/c.py": Link("", "../c.py"),
            **dict.fromkeys(["01_a/d.py", "01_a/r/e.py"], ""),
        },
        "01_a/r/b.py: imports c, d, e; 2 are allowed",
    ),
    (
        lessons_import_little,
        {
            "01_a/train.py": f"import c, d, e, g\n{GUARD}",
            **dict.fromkeys([f"01_a/{name}.py" for name in "cdeg"], ""),
        },
        "01_a/train.py: imports c, d, e, g; 3 are allowed",
    ),
    (
        lessons_import_little,
        {"01_a/failures/b.py": f"import ranks\n{GUARD}", "01_a/ranks.py": ""},
        "01_a/failures/b.py: imports ranks; 0 are allowed",
    ),
    (
        lessons_import_little,
        {"01_a/minimal.py": f"import ranks\n{GUARD}", "01_a/ranks.py": ""},
        "01_a/minimal.py: imports ranks; 0 are allowed",
    ),
    (
        files_to_carry_away_stand_alone,
        {
            "01_a/r/b.py": '"""Carry away this one file."""\nfrom c import d',
            "01_a/c.py": "",
        },
        "01_a/r/b.py: is to be carried away, and imports c",
    ),
    (
        folders_are_small,
        {f"01_a/r/{number}.py": "" for number in range(11)},
        "01_a/r/: 11 Python files",
    ),
    (
        links_stay_in_their_chapter,
        {"01_a/r/b.py": Link("", "../b.py")},
        "01_a/r/b.py: links to ../b.py, which is no such",
    ),
    (
        links_stay_in_their_chapter,
        {"01_a/r/b.py": Link("", "../c.py"), "01_a/c.py": ""},
        "01_a/r/b.py: links to ../c.py",
    ),
    (
        links_stay_in_their_chapter,
        {"02_b/r/b.py": Link("", "../../01_a/b.py"), "01_a/b.py": ""},
        "02_b/r/b.py: links to ../../01_a/b.py",
    ),
    (
        links_stay_in_their_chapter,
        {"01_a/r/b.py": Link("", "/x/01_a/b.py"), "01_a/b.py": ""},
        "links to /x/01_a/b.py",
    ),
    (
        links_stay_in_their_chapter,
        {"tests/b.py": Link("", "../01_a/b.py"), "01_a/b.py": ""},
        "tests/b.py: links to",
    ),
    (links_stay_in_their_chapter, {"01_a/b.py": Link("", "b.py")}, "01_a/b.py: links"),
    (no_path_surgery, {"01_a/r/b.py": "sys.path.insert(0, x)\n"}, "b.py:1: sys.path"),
    (
        no_path_surgery,
        {"01_a/b.py": "\nfrom sys import argv, path"},
        "b.py:2: from sys",
    ),
    (
        scripts_say_how_to_run_them,
        {"01_a/b.py": PARTS.replace("Expect:", "See:") + GUARD},
        "no `Expect:`",
    ),
    (
        pages_alone_say_the_order,
        {"01_a/r/b.py": '"""Add.\n\nBefore: c.py\n"""\n'},
        "01_a/r/b.py: its docstring has `Before:`",
    ),
    (shared_modules_are_equal, {RANKS: "x", COPY: "x\n"}, f"{COPY}: run `python"),
    (shared_modules_are_equal, {COPY: ""}, f"{COPY}: run `python"),
    (
        shared_modules_are_equal,
        {RANKS: "", "01_communication/r/ranks.py": ""},
        "01_communication/r/ranks.py: tests/support/copies.py does not write it",
    ),
    (shared_modules_are_short, {RANKS: "\n" * 201}, f"{RANKS}: 201 lines"),
    (every_definition_is_used, {"01_a/b.py": "def f():\n    return 1\n"}, "f"),
    (
        every_definition_is_used,
        {"01_a/b.py": "LEFT, USED = 1, 2\n", "01_a/c.py": "from b import USED\n"},
        "LEFT",
    ),
    (
        every_definition_is_used,
        {"01_a/b.py": "class A: ...\n", "tests/test_a.py": "from b import A\n"},
        "A",
    ),
    (
        functions_have_one_home,
        {"01_a/b.py": F, "01_a/c.py": F, "01_a/r/d.py": "def f(x): ...\n"},
        "01_a/b.py, 01_a/c.py, 01_a/r/d.py: f is defined in 3 files",
    ),
    (
        functions_have_one_home,
        {RANKS: F, COPY: F, "03_c/c.py": F, "03_c/d.py": f"async {F}"},
        "03_c/c.py, 03_c/d.py: f is defined in 3 files",
    ),
    (
        functions_have_one_home,
        {RANKS: F, COPY: F + F, "03_c/c.py": F},
        "03_c/c.py: f is defined in 3 files",
    ),
    (names_are_the_fields_own, {"01_a/b.py": "gpu_id = 0\n"}, "say rank"),
    (names_are_the_fields_own, {"tests/b.py": "def f(size): ...\n"}, "say world_size"),
    (names_are_the_fields_own, {"b.py": "def master_process(): ...\n"}, "is_rank_zero"),
    (no_maximum_drops_a_nan, {"01_a/b.py": "max(gather(error_of(x)))"}, "01_a/b.py:1"),
    (no_maximum_drops_a_nan, {"01_a/b.py": "max(x.item() for x in y)"}, "01_a/b.py:1"),
    (no_fixed_port, {"01_a/b.py": f"port = {FORBIDDEN_PORT}\n"}, "01_a/b.py:1"),
    (no_fixed_port, {"tests/b.py": f"\nurl = f'{{x}}:{FORBIDDEN_PORT}'"}, "b.py:2"),
    (
        no_fixed_port,
        {"README.md": readme(f"x --port {FORBIDDEN_PORT}")},
        "README.md:1: runs x",
    ),
    (only_safe_loads, {"01_a/b.py": "load(path, weights_only=False)\n"}, "b.py:1"),
    (groups_can_end, {"01_a/b.py": TRAINS}, "b.py: does not import"),
    (
        groups_can_end,
        {"01_a/b.py": f"{TRAINS}def f():\n    import {HOLDER}\n"},
        "b.py: does not import",
    ),
    (
        groups_can_end,
        {"01_a/b.py": f"{TRAINS}def f():\n    from ranks import join\n"},
        "b.py: does not import",
    ),
    (groups_can_end, {RANKS: "dist.init_process_group()\n"}, "ranks.py: does not"),
    (nobody_leaves_before_all_have_joined, {"01_a/b.py": LEAVES}, "b.py: a rank may"),
    (
        nobody_leaves_before_all_have_joined,
        {"01_a/b.py": f"{LEAVES}dist.all_reduce(x, group=some)\n"},
        "b.py: a rank may leave",
    ),
    (
        nobody_leaves_before_all_have_joined,
        {"01_a/b.py": f"{LEAVES}dist.get_world_size()\n"},
        "b.py: a rank may leave",
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
    (pages_are_short, {"01_a/README.md": FIRST_PAGE + "g"}, "README.md: 2001 words"),
    (pages_are_short, {"01_a/b.md": PAGE + "g"}, "01_a/b.md: 1201 words"),
    (pages_are_short, {"01_a/r/README.md": PAGE + "g"}, "r/README.md: 1201 words"),
    (chapter_pages_show_code_early, {"01_a/README.md": "x\n"}, "01_a/README.md: no"),
    (
        chapter_pages_show_code_early,
        {"01_a/README.md": "\n" * LATEST_CODE + CODE},
        "01_a/README.md: no ```python block begins in its first 60",
    ),
    (
        chapter_pages_show_code_early,
        {"01_a/README.md": CODE.replace("python", "text"), "01_a/b.md": CODE},
        "01_a/README.md: no",
    ),
    (
        pages_use_the_fields_words,
        {"a.md": "Rows [part\nA model](x), and\n> Part a  model."},
        "a.md: 'part a model', 2 times; say sharded, partitioned or split",
    ),
    (pages_use_the_fields_words, {"01_a/r/b.md": "| time-out |"}, "say timeout"),
    (every_room_has_a_page, {"01_a/README.md": "", "01_a/r/b.py": ""}, "01_a/r/: no"),
    (every_room_has_a_page, {"01_a/r/b.py": Link("", "../b.py")}, "01_a/r/: no README"),
    (
        pages_do_not_demonstrate_refusals,
        {"01_a/r/b.md": readme("x --y=0\n$ echo $?\n2")},
        "01_a/r/b.md:1: echo $?",
    ),
    (
        pages_do_not_demonstrate_refusals,
        {"01_a/README.md": readme("python 01_a/draw_ring.py")},
        "01_a/README.md:1: python 01_a/draw_ring.py",
    ),
    (
        pages_do_not_demonstrate_refusals,
        {"01_a/README.md": readme("x --to=assets/a.json")},
        "01_a/README.md:1: x",
    ),
    (blocks_fit_the_page, {"README.md": readme("x" * 89, "text")}, "README.md:1: 89"),
    (blocks_fit_the_page, {"README.md": readme("x" * 90, "diff")}, "90 columns"),
    (commands_can_be_pasted, {"a.md": readme("x \\\n> y.py")}, "a.md:1: end the line"),
    (tables_fit_the_page, {"a.md": f"|a|\n|-|\n|{'x' * 89}|\n"}, "a.md:1: too wide"),
    (
        tables_fit_the_page,
        {"a.md": f"\n|a|b|\n|-|-|\n|`{'x' * 45}`|b|\n|a|{'y' * 44}<br>|\n"},
        "a.md:2: too wide",
    ),
    (
        commands_suit_other_shells,
        {"a.md": readme("export A='b c'") + readme("x $A")},
        "a.md:4: ${A} holds several words: x $A",
    ),
    (numbered_lines_are_items, {"a.md": "a\n\nb\n3. c\n"}, "a.md:4: runs on"),
    (
        comments_close_their_quotes,
        {"a.md": readme("x  # it's", "sh")},
        "a comment:  # i",
    ),
    (comments_close_their_quotes, {"a.md": readme("x  # it's")}, "a comment:  # it's"),
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
    (
        every_script_is_run,
        {"01_a/r/b.py": GUARD, "01_a/r/README.md": readme("python 01_a/r/b.py")},
    ),
    (
        every_script_is_run,
        {
            "01_a/r/b.py": GUARD,
            "01_a/r/c.py": GUARD,
            "01_a/draw_d.py": GUARD,
            "01_a/r/show.py": GUARD,
            "README.md": readme("X=1 python 01_a/r/show.py c b"),
        },
    ),
    (
        lessons_import_little,
        {"01_a/failures/b_table.py": f"import ranks\n{GUARD}", "01_a/ranks.py": ""},
    ),
    (
        files_to_carry_away_stand_alone,
        {
            "01_a/r/b.py": '"""Carry away this one file."""\nfrom torch import nn',
            "01_a/r/d.py": '"""Stays here."""\nfrom c import d',
            "01_a/c.py": "",
        },
    ),
    (folders_are_small, {f"01_a/failures/{n}.py": "" for n in range(11)}),
    (
        spine_scripts_are_short,
        {
            "01_a/b.py": LONG,
            "01_a/r/c.py": LONG,
            "01_a/r/d.py": Link(f"\n{LONG}", "../d.py"),
            "01_a/d.py": f"\n{LONG}",
            "01_a/data.py": "\n" * 111,
            "tests/b.py": f"\n{LONG}",
            "CONTRIBUTING.md": listed("`01_a/d.py`: all of it is one thing"),
        },
    ),
    (spine_scripts_are_short, {"CONTRIBUTING.md": listed("none yet")}),
    (
        lessons_import_little,
        {
            "01_a/b.py": f"import torch, os\nfrom ranks import x\nimport c, d\n{GUARD}",
            "01_a/r/train.py": f"import c, d, e\n{GUARD}",
            "01_a/c.py": "import d, e, g",
            "01_a/failures/b.py": f"import torch, e\n{GUARD}",
            **dict.fromkeys([f"01_a/{name}.py" for name in ("ranks", *"dg")], ""),
            **dict.fromkeys(["01_a/r/e.py", "02_b/torch.py"], ""),
        },
    ),
    (
        folders_are_small,
        {
            **{f"01_a/{number}.py": "" for number in range(10)},
            **{f"01_a/r/{number}.py": "" for number in range(10)},
            **{f"01_a/r/{n}_link.py": Link("", f"../{n}.py") for n in range(10)},
            **{f"01_a/{number}.md": "" for number in range(10)},
            **{f"02_ddp_mp/{number}.py": "" for number in range(10)},
            "02_ddp_mp/ranks.py": "",
        },
    ),
    (
        links_stay_in_their_chapter,
        {
            "01_a/r/b.py": Link("", "../b.py"),
            "01_a/b.py": "",
            "01_a/s/c.py": Link("", "../r/c.py"),
            "01_a/r/c.py": "",
        },
    ),
    (
        no_path_surgery,
        {
            "01_a/b.py": '"""sys.path"""\nos.path.join(sys.argv)\n',
            "01_a/c.py": "from os import path\n",
            "tests/b.py": "sys.path.insert(0, x)\n",
        },
    ),
    (scripts_say_how_to_run_them, {"01_a/b.py": PARTS + GUARD, "01_a/c.py": ""}),
    (
        pages_alone_say_the_order,
        {
            "01_a/b.py": f"{PARTS}\nx = 'Next: c.py'\n",
            "tests/b.py": '"""Add.\n\nNext: c.py\n"""\n',
        },
    ),
    (
        shared_modules_are_equal,
        {RANKS: "x", COPY: "x", "02_ddp_mp/r/ranks.py": Link("x", "../ranks.py")},
    ),
    (shared_modules_are_equal, {RANKS: "", "tests/ranks.py": "x", "01_a/b.py": ""}),
    (shared_modules_are_short, {RANKS: "\n" * 200, "03_c/model.py": "\n" * 201}),
    (
        every_definition_is_used,
        {
            "01_a/b.py": "A: int = 1\nB = A\n\n\ndef f():\n    return B\n",
            "01_a/README.md": "`f` returns 1.",
            "tests/test_a.py": "def g(): ...\n",
        },
    ),
    (
        functions_have_one_home,
        {
            RANKS: F,
            COPY: F,
            "01_a/b.py": f"{F}def main(): ...\nclass A:\n    def g(): ...\n",
            "01_a/c.py": "def main(): ...\ndef g(): ...\n",
            "01_a/r/c.py": Link(F, "../b.py"),
            "02_b/c.py": "def main(): ...\ndef g():\n    def f(): ...\n",
            "assets/d.py": F,
        },
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
    *[
        (groups_can_end, {"01_a/b.py": f"from {module} import join\n{TRAINS}"})
        for module in sorted(IMPORT_HOLDER)
    ],
    (groups_can_end, {"01_a/b.py": "dist.init_process_group()\n"}),
    (groups_can_end, {RANKS: f"import {HOLDER}\ndist.init_process_group()\n"}),
    (
        nobody_leaves_before_all_have_joined,
        {"01_a/b.py": f"{LEAVES}dist.all_reduce(x)\ndist.send(x, 1, group=some)\n"},
    ),
    (
        nobody_leaves_before_all_have_joined,
        {"01_a/b.py": f"{LEAVES}model = fully_shard(model)\n"},
    ),
    (
        nobody_leaves_before_all_have_joined,
        {"01_a/b.py": "dist.init_process_group()\n"},
    ),
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
    (
        pages_are_short,
        {
            "01_a/README.md": f"{FIRST_PAGE}\n" + readme("f g"),
            "01_a/b.md": PAGE,
            "01_a/r/README.md": PAGE + "> ```text\n> f g\n> ```\n",
            "README.md": FIRST_PAGE * 2,
        },
    ),
    (
        chapter_pages_show_code_early,
        {
            "01_a/README.md": "\n" * (LATEST_CODE - 1) + CODE,
            "01_a/b.md": "",
            "01_a/r/README.md": "",
            "README.md": "",
        },
    ),
    (
        pages_use_the_fields_words,
        {
            "a.md": "`time-out` <!-- time-out --> [x](time-out) time-outs, departed\n\n"
            + readme("time-out", "text"),
            "a.py": "'time-out'\n",
        },
    ),
    (
        every_room_has_a_page,
        {
            "01_a/b.py": "",
            "01_a/r/b.py": "",
            "01_a/r/README.md": "",
            "tests/r/b.py": "",
        },
    ),
    (
        pages_do_not_demonstrate_refusals,
        {
            "01_a/README.md": readme("echo $HOME; withdraw_ my_assets/") + "`echo $?`",
            "README.md": readme("python assets/draw_x.py\n$ echo $?\n1"),
        },
    ),
    (commands_can_be_pasted, {"a.md": readme("x \\\n    y.py\nz > w")}),
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
    (
        no_maximum_drops_a_nan,
        {
            "01_a/b.py": "torch.tensor(gather(error_of(x))).max(); max(gather(s))",
            "01_a/same_as_one_process.py": "max(torch.dist(a, b) for a, b in pairs)",
        },
    ),
    (numbered_lines_are_items, {"a.md": "a\n1. b\n2. c\n\nd\n\n3. e\n   2 f\n4. g\n"}),
    (
        comments_close_their_quotes,
        {"a.md": readme("x 'a b'  # say 'c'\nit's # output's") + readme("# a", "sh")},
    ),
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


def test_every_complaint_begins_with_its_place() -> None:
    for rule, tree, _ in BROKEN:
        (violation,) = rule(tree)
        named = re.split("[/:]", violation)[0]
        assert named in {name.split("/")[0] for name in tree}, violation
    assert len(BROKEN) > len(RULES)


def test_rules_look_at_the_scripts() -> None:
    found = scripts(repository())
    assert "03_ddp_torchrun/train.py" in found
    assert "01_communication/bandwidth/bandwidth.py" in found
    assert (
        len(found) < len(lesson_files(repository())) < len(python_files(repository()))
    )
    links = [name for name, text in repository().items() if isinstance(text, Link)]
    assert "01_communication/bandwidth/ranks.py" in links
    assert not set(links) & set(python_files(repository()))


def test_copies_are_of_files_that_exist() -> None:
    names = {name for source in COPIES for name in (source, *COPIES[source])}
    assert names <= set(python_files(repository()))


def test_every_block_is_a_test(pytestconfig: pytest.Config) -> None:
    # The tests find the blocks by one Markdown parser, this rule by another.
    runner = ReadmeRunner()
    collected = pytestconfig.getini("testpaths")
    seen = []
    for name, tokens in markdown(repository()).items():
        blocks = [
            t
            for t in tokens
            if t.type == "fence" and t.info in {"console", "diff", "python"}
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
