"""Run scripts of this room one after the other, as they are or mended.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/show.py dropout_differs
Expect: what each rank prints, first with the line marked as wrong, then with the line
    that the comment says to write.
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py"))}
WRONG_LINE = re.compile(r"( *)# Write: (.*)\n.*\n")


def mended(code: str) -> str:
    """Put what stands behind `# Write:` in the place of the line below it."""
    return WRONG_LINE.sub(r"\1\2\n", code)


def what_it_prints(code: str) -> str:
    """Run a script in the group that is there already."""
    output = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(output),
    ):
        exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def main() -> None:
    """Run the named scripts in both ways; rank 0 prints what all of them print."""
    known = {name: FILES[name].read_text() for name in FILES if name != "show"}
    names = sys.argv[1:]
    wrong = "".join(f"there is no {name}; " for name in names if name not in known)
    if wrong or not names:
        sys.exit(f"show.py: {wrong}choose from {', '.join(known)}")
    dist.init_process_group("gloo")
    for name in names:
        for way, change in (("wrong", str), ("mended", mended)):
            printed = [""] * dist.get_world_size()
            dist.all_gather_object(printed, what_it_prints(change(known[name])))
            if dist.get_rank() == 0:
                print(f"--- {name}, {way}", flush=True)
                for rank, text in enumerate(printed):
                    for line in text.splitlines():
                        print(f"rank {rank} | {line}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
