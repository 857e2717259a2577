"""What `make gpu` runs: every lesson that takes an accelerator, and cases for it alone.

A lesson is found by itself: its docstring has a `Run:` line with a launcher, and it
joins the process group without insisting on the CPU.
"""

import ast
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# Rooms whose scripts are edited by readers, or fail on purpose.
NOT_LESSONS = ("exercises", "failures", "mistakes")
GPT2 = ("--layers=12", "--width=768", "--heads=12", "--block-size=1024")


class Case(NamedTuple):
    """One line of the report."""

    name: str
    script: str  # from the repository's root
    options: tuple[str, ...] = ()
    launcher: str = "torchrun"  # or "deepspeed", or "python"
    ranks: int = 0  # 0: one for each device
    devices: int = 1  # fewest devices that it makes sense on
    expect: str = r"^check: "  # a regular expression that the output must match
    succeeds: bool = True  # else it must fail, with the text that is expected
    only_on: str = ""  # a kind of device, such as "cuda"
    packages: tuple[str, ...] = ()
    seconds: int = 120
    env: dict[str, str] = {}  # noqa: RUF012  (nobody writes to it)
    is_lesson: bool = False  # it must say itself that it took the accelerator


def command_of(case: Case, devices: int) -> list[str]:
    """Return the words that start a case with one rank for each device."""
    ranks = case.ranks or devices
    # A script that keeps something asks for a FOLDER in its `Run:` line.
    folder = tempfile.mkdtemp()
    options = [option.replace("FOLDER", folder) for option in case.options]
    script = [str(ROOT / case.script), *options]
    if case.launcher == "python":
        return [sys.executable, *script]
    if case.launcher == "deepspeed":
        runner = [sys.executable, "-m", "deepspeed.launcher.runner"]
        return [*runner, f"--num_gpus={ranks}", *script]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={ranks}", *script]


def lesson_of(path: str, text: str) -> Case | None:
    """Return a script's case, or None if it takes no accelerator by itself."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    line = re.search(r"^Run: (.*)$", docstring, re.MULTILINE)
    joins = re.findall(r"(?<!def )\bjoin\(([^)]*)\)", text)
    if not line or not joins or all("only_cpu=True" in words for words in joins):
        return None
    words = [w for w in shlex.split(line[1]) if not re.fullmatch(r"[A-Z_]+=\S*", w)]
    if path not in words:  # another script starts it, or it needs a second terminal
        return None
    launcher, options = words[0], tuple(words[words.index(path) + 1 :])
    if launcher == "python" and "start_ranks(main" in text:
        launcher = "torchrun"  # what starts its own ranks can be started by it as well
    if launcher not in ("torchrun", "deepspeed") or any(w.isupper() for w in options):
        return None
    packages = () if launcher == "torchrun" else ("deepspeed", "transformers")
    if path.startswith("05_"):
        packages = ("deepspeed", "transformers")
    return Case(
        path, path, options, launcher, expect=r"(?m)^check: ", packages=packages,
        is_lesson=True,
    )  # fmt: skip


def lessons(root: Path = ROOT) -> list[Case]:
    """Find every lesson that takes an accelerator, in the order of the chapters."""
    found = []
    for path in sorted(root.glob("[0-9][0-9]_*/**/*.py")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or any(room in name for room in NOT_LESSONS):
            continue
        if case := lesson_of(name, path.read_text("utf-8")):
            found.append(case)
    return found


def of_ours(name: str, script: str, *options: str, **settings) -> Case:
    """Return a case whose script lies in cases/."""
    path = (HERE / "cases" / script).relative_to(ROOT).as_posix()
    settings = {"expect": r"(?m)^check: ", **settings}
    return Case(name, path, options, **settings)


def nccl(name: str, what: str, expect: str, **settings) -> Case:
    """Return a case that provokes a text of NCCL's, and fails with it."""
    settings = {"succeeds": False, "only_on": "cuda", **settings}
    return of_ours(f"NCCL: {name}", "nccl_says.py", what, expect=expect, **settings)


TRAIN = "03_ddp_torchrun/train.py"
DEEPSPEED = ("deepspeed", "transformers")
# The texts are those that the pages cite; tests/test_gpu_report.py holds them to that.
CASES = (
    nccl("two ranks on one device", "one_device", "Duplicate GPU detected", ranks=2),
    nccl("a tensor of the CPU", "cpu_tensor", "No backend type associated with device"),
    nccl("a strided tensor", "strides", "Tensors must be contiguous"),
    nccl("a collective that one rank skips", "skipped_call",
         "Watchdog caught collective operation timeout", devices=2, ranks=2),
    of_ours("gloo with tensors of the device", "gloo_on_device.py", ranks=2),
    of_ours("SyncBatchNorm's real layer", "real_sync_batch_norm.py", ranks=2,
            only_on="cuda"),
    of_ours("FSDP2, a rank for each device", "fsdp2.py"),
    of_ours("Adam's temporaries", "adam_temporaries.py", launcher="python",
            only_on="cuda"),
    *(of_ours(f"ZeRO stage {stage}: memory", "zero_memory.py", f"--stage={stage}",
              ranks=1, only_on="cuda", packages=DEEPSPEED, seconds=240)
      for stage in range(4)),
    *(of_ours(f"Qwen2-1.5B, stage {stage}: memory", "zero_memory.py",
              f"--stage={stage}", "--shape=1.5B", ranks=1, only_on="cuda",
              packages=DEEPSPEED, seconds=300) for stage in (0, 1, 3)),
    Case("train.py in bf16, compiled", TRAIN,
         ("--amp", "--compile", "--max-steps=40"), expect=r"(?m)^check: ",
         is_lesson=True, seconds=240),
    of_ours("speed: a plain loop, GPT-2 124 M", "plain_loop.py", *GPT2, ranks=1,
            only_on="cuda", seconds=240),
    of_ours("speed: train.py, GPT-2 124 M", "train_speed.py", *GPT2, ranks=1,
            only_on="cuda", seconds=240),
    of_ours("speed: train.py, vocabulary padded", "train_speed.py", *GPT2,
            "--vocabulary=50304", ranks=1, only_on="cuda", seconds=240),
)  # fmt: skip
