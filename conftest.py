"""Make the READMEs' blocks test items, and let no test be skipped unnoticed.

This file stands in the root because pytest asks a conftest.py only about files in
its own folder and below, and ``README.md`` is in the root.
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sybil.integration.pytest import SybilFile, SybilItem

from readme_runner import ReadmeRunner, is_slow

if TYPE_CHECKING:
    from worker_pool import WorkerPool
    from zero_ranks import Pools

# The reasons for which a test may be skipped. The key is a regular expression that
# matches the whole reason, the value says why the skip cannot be avoided.
ALLOWED_SKIPS = {
    "no laboratory here: .*": "network namespaces need Linux, and root or its consent",
    "the block needs a machine where this succeeds: .*": "the same, for the pages",
    "python-etcd is not installed": "etcd is a server that few laptops have",
    "etcd is not installed": "the same",
    "py-spy is not installed": "needs requirements-dev.txt",
    "py-spy may not trace processes": "the kernel allows it to root, or to nobody",
    "async_io is not compiled: .*": "compiling it takes two cores for five minutes",
}

# What pytest has collected, with what `-m` then leaves out.
COLLECTED = pytest.StashKey[set[str]]()

# Until all is imported, searches for garbage find nothing and take a sixth of the time.
gc.disable()

readmes = ReadmeRunner()
markdown_files = set(readmes.markdown_files())
collect_blocks = readmes.sybil.pytest()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> SybilFile | None:
    """Collect the blocks of the repository's own Markdown files."""
    return collect_blocks(file_path, parent) if file_path in markdown_files else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note a test that will run or may; lift the time limit of blocks.

    Each command of a block has its own; some are slow.
    """
    if not any(item.get_closest_marker(name) for name in ("skip", "xfail")):
        item.config.stash.setdefault(COLLECTED, set()).add(item.nodeid)
    if isinstance(item, SybilItem):
        item.add_marker(pytest.mark.timeout(0))
        if is_slow(item.example):
            item.add_marker(pytest.mark.slow)


def unknown_skips(config: pytest.Config) -> list[str]:
    """Return the tests and files that were skipped for a reason not allowed above."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(allowed, reason) for allowed in ALLOWED_SKIPS):
            skipped.append(f"{report.nodeid}: {reason}")
    return skipped


def pytest_collection_finish() -> None:
    """Spare each later search for garbage the millions of objects imported so far."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a test was skipped for an unknown reason."""
    if session.exitstatus == pytest.ExitCode.OK and unknown_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the tests that were skipped for an unknown reason."""
    for skip in unknown_skips(config):
        terminalreporter.write_line(
            f"FAILED: skipped for a reason that is not in ALLOWED_SKIPS: {skip}"
        )


@pytest.fixture(scope="session")
def worker_pool() -> "Iterator[WorkerPool]":
    """Return the gloo workers that all tests of the session share."""
    # Imported here so that a session that needs no workers need not import torch.
    from worker_pool import WorkerPool

    with WorkerPool(max_ranks=4) as pool:
        yield pool


@pytest.fixture(scope="session")
def zero_pools() -> "Iterator[Pools]":
    """Return workers that have imported DeepSpeed, by their number."""
    from zero_ranks import pools_by_size

    with pools_by_size() as pools:
        yield pools


@pytest.fixture(scope="session")
def laboratory() -> None:
    """Skip what needs network namespaces where there can be none."""
    from scripts import load_chapter

    try:
        load_chapter("03_ddp_torchrun/cluster")["namespaces"].command_prefix()
    except OSError as error:
        pytest.skip(f"no laboratory here: {error}")
