"""train.py itself at GPT-2's shape: its rate when it has warmed up, from its own lines.

Run: torchrun --standalone --nproc-per-node=1 tests/gpu/cases/train_speed.py --layers=12
Expect: what train.py prints, then `figures:` with tokens per second and MFU of the
    second half of its steps, in which nothing is compiled any more.
"""

import io
import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

CHAPTER = Path(__file__).resolve().parents[3] / "03_ddp_torchrun"
OPTIONS = ("--amp", "--compile", "--samples=4096", "--max-epochs=1", "--lr=6e-4")


def main() -> None:
    """Run train.py in this process, with options of its own and those given."""
    given = sys.argv[1:]
    if not any(word.startswith("--vocabulary") for word in given):
        given.append("--vocabulary=50257")
    sys.argv = ["train.py", *OPTIONS, *given]
    sys.path.insert(0, str(CHAPTER))
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(CHAPTER / "train.py"), run_name="__main__")
    print(printed.getvalue())
    rates = re.findall(r"([\d,]+) tokens/s(?: \| MFU ([\d.]+)%)?", printed.getvalue())
    rate, mfu = rates[-1]
    figures = {"tokens/s": int(rate.replace(",", "")), "MFU %": float(mfu or 0)}
    print(f"figures: {json.dumps(figures)}")


if __name__ == "__main__":
    main()
