"""Run on this machine's accelerators whatever takes one, and write down what came out.

Run: make gpu, or without .venv: python tests/gpu/gpu_report.py
Expect: a line for each case, passed, failed, or skipped and why; a report in assets/.
    The same command goes on where it stopped, so a machine that is lent for minutes
    at a time will do. Without an accelerator: one line.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpu_cases import CASES, ROOT, Case, command_of, lessons

OUTCOMES = ("passed", "failed", "skipped")
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "triton")
# A script that has too few devices for its ranks says so, or refuses to begin.
TOO_FEW = re.compile(r"device: cpu.*\((\d+) \w+ for (\d+) local ranks\)")
REFUSED = re.compile(r"not with \d+ rank\(s\); .*--nproc-per-node=(\d+)")
FIGURES = re.compile(r"^figures: (\{.*\})$", re.MULTILINE)


def describe_machine(kind: str) -> dict[str, Any]:
    """Return hardware, driver and versions; `kind` is "cuda", another or "cpu"."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    machine: dict[str, Any] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "kind": kind,
        "devices": [],
        "versions": versions,
    }
    if kind == "cuda":
        machine["devices"] = [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ]
        machine["cuda"] = torch.version.cuda
        version = torch.cuda.nccl.version()  # type: ignore
        machine["nccl"] = ".".join(map(str, version))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
            machine["driver"] = answer.stdout.split("\n")[0]
        except (OSError, subprocess.TimeoutExpired):
            machine["driver"] = "unknown"
    elif kind != "cpu":
        machine["devices"] = [kind] * torch.accelerator.device_count()
    return machine


def run_limited(command: list[str], seconds: float, env: dict[str, str]):
    """Run a command; return its exit status, None if it took too long, and its output.

    It gets a process group of its own, and nothing of that outlives this call.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired as end:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0] or str(end.stdout or ""), None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return status, output


def judge_output(case: Case, status: int | None, output: str, kind: str) -> list[str]:
    """Return the outcome of a case, and for what is no success the reason."""
    if status is None:
        return ["failed", f"not done after {case.seconds} s"]
    if few := TOO_FEW.search(output):
        return ["skipped", f"wants {few[2]} devices, one for each rank"]
    if status == 2 and (few := REFUSED.search(output)):
        return ["skipped", f"wants {few[1]} ranks, each with a device"]
    if (status == 0) != case.succeeds:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"Error\b|check failed", line)]
        last = (errors or lines or ["no output"])[-1].strip()
        return ["failed", f"status {status}: {last[:200]}"]
    if not re.search(case.expect, output):
        return ["failed", f"the output lacks {case.expect!r}"]
    if case.is_lesson and kind != "cpu" and f"device: {kind}" not in output:
        return ["failed", f"it ran, but not on {kind}"]
    return ["passed", ""]


def missing(case: Case, machine: dict[str, Any], devices: int) -> str:
    """Tell what a case lacks on this machine, or return ''."""
    for package in case.packages:
        if machine["versions"].get(package) is None:
            return f"{package} is not installed"
    if case.only_on and machine["kind"] != case.only_on:
        return f"only on {case.only_on}"
    if case.devices > devices:
        return f"wants {case.devices} devices"
    return ""


def run_case(case: Case, machine: dict[str, Any], devices: int) -> dict[str, Any]:
    """Run one case; return its line of the report."""
    line: dict[str, Any] = {"name": case.name, "outcome": "skipped", "figures": {}}
    line["why"] = missing(case, machine, devices)
    if line["why"]:
        return line
    command, started = command_of(case, devices), time.perf_counter()
    status, output = run_limited(command, case.seconds, case.env)
    line["outcome"], line["why"] = judge_output(case, status, output, machine["kind"])
    line["seconds"] = round(time.perf_counter() - started, 1)
    for found in FIGURES.findall(output):
        line["figures"] |= json.loads(found)
    # What NCCL or PyTorch said, for those who compare it with our pages.
    if case.succeeds is False and (said := re.search(case.expect, output)):
        line["said"] = said[0]
    if line["outcome"] == "failed":
        line["output"] = output[-3000:]
    return line


def table(report: dict[str, Any]) -> str:
    """Format a report for reading."""
    machine = report["machine"]
    devices = ", ".join(machine["devices"]) or "the CPU, as a rehearsal"
    heads = [f"{machine['date']}: {devices}", f"torch {machine['versions']['torch']}"]
    if "driver" in machine:
        heads.append(f"driver {machine['driver']}, NCCL {machine['nccl']}")
    lines = ["; ".join(heads)]
    for line in report["cases"]:
        figures = ", ".join(f"{k} {v:g}" for k, v in line["figures"].items())
        rest = line["why"] or figures or line.get("said", "")
        lines.append(f"{line['outcome']:8} {line['name']:52} {rest}")
    counts = {o: sum(c["outcome"] == o for c in report["cases"]) for o in OUTCOMES}
    lines.append(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    return "\n".join(lines)


def front_page_row(report: dict[str, Any]) -> str:
    """Return the row of the front page's table of what was run."""
    machine, cases = report["machine"], report["cases"]
    counts = {o: sum(c["outcome"] == o for c in cases) for o in OUTCOMES}
    name, count = machine["devices"][0], len(machine["devices"])
    where = f"{count} x {name}, NCCL, torch {machine['versions']['torch']}"
    what = f"`make gpu` on {machine['date']}: {counts['passed']} of {len(cases)} passed"
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"| {where} | {what}{failed}, {counts['skipped']} skipped |"


def write_whole(path: Path, report: dict[str, Any]) -> None:
    """Write the report by a temporary file and an atomic rename."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def main() -> None:
    """Run what is not in the report yet, for as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: assets/gpu_NAME.json")
    parser.add_argument("--minutes", type=float, default=9.0, help="then stop")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--again", action="store_true", help="what failed, once more")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--rehearse", type=int, default=0, metavar="RANKS",
                        help="take the CPU for so many devices")  # fmt: skip
    options = parser.parse_args()
    cases = [case for case in (*CASES, *lessons()) if options.only in case.name]
    if options.list:
        return print("\n".join(case.name for case in cases))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and not options.rehearse:
        return print("nothing to run: PyTorch finds no accelerator on this machine")
    kind = "cpu" if options.rehearse or accelerator is None else accelerator.type
    devices = options.rehearse or torch.accelerator.device_count()
    machine = describe_machine(kind)
    short = re.sub(r"\W+", "_", (machine["devices"] or ["rehearsal"])[0]).lower()
    path = options.out or ROOT / "assets" / f"gpu_{devices}_{short}.json"
    report = {"machine": machine, "cases": []}
    if path.exists():
        report["cases"] = json.loads(path.read_text())["cases"]
        if options.again:
            keep = [line for line in report["cases"] if line["outcome"] == "passed"]
            report["cases"] = keep
    known = {line["name"] for line in report["cases"]}
    stop = time.monotonic() + 60 * options.minutes
    for case in cases:
        if case.name in known:
            continue
        if time.monotonic() + case.seconds / 4 > stop:
            print("out of time: the same command goes on from here", flush=True)
            break
        line = run_case(case, machine, devices)
        print(f"{line['outcome']:8} {line['name']}  {line['why']}", flush=True)
        report["cases"].append(line)
        write_whole(path, report)
    print(table(report))
    print(f"wrote {path}")
    sys.exit(any(line["outcome"] == "failed" for line in report["cases"]))


if __name__ == "__main__":
    main()
