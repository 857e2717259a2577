"""Imported by every Python process of the READMEs' commands: watches how it ends.

A thread of gloo that is alive when Python ends may abort the process, in a few runs of
many. So that no such run is waited for, one line on standard error tells of the threads
themselves; the README's block then fails.
"""

import atexit
import os
from pathlib import Path


def report_threads() -> None:
    """Tell if threads of gloo have outlived the process groups (on Linux)."""
    names = [
        file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")
    ]
    left = sorted(name for name in names if "gloo" in name)
    if left:
        line = f"threads outlive destroy_process_group: {', '.join(left)}\n"
        os.write(2, line.encode())


atexit.register(report_threads)
