"""`make gpu`: what it runs, what it concludes from an output, and what it writes."""

import json
from pathlib import Path

import pytest

import gpu_report
from gpu_cases import CASES, Case, command_of, lesson_of, lessons
from gpu_report import front_page_row, judge_output, main, missing, run_limited, table
from launch import ROOT, python

SCRIPT = ROOT / "tests/gpu/gpu_report.py"
SAMPLE = ROOT / "tests/gpu/sample_report.json"  # recorded by --rehearse=2
NOT_RUN_ROW = "GPUs, NCCL, several real machines | **written for, not run** |"
LESSON = Case("a lesson", "a.py", is_lesson=True, expect=r"(?m)^check: ")


# --- What is run. ----------


def test_every_lesson_that_takes_an_accelerator_is_found() -> None:
    found = {case.name: case for case in lessons()}
    assert len(found) >= 20
    for name in (
        "01_communication/collectives.py",
        "02_ddp_mp/naive.py",
        "03_ddp_torchrun/train.py",
        "05_deepspeed_zero/stage_1.py",
        "05_deepspeed_zero/recipe.py",
    ):
        assert name in found
    # It insists on the CPU, as it measures what gloo costs beside computing.
    assert "03_ddp_torchrun/scaling/speed.py" not in found
    assert not [name for name in found if "/exercises/" in name or "/failures/" in name]


def test_run_line_says_how_a_lesson_is_started() -> None:
    text = '"""Idea.\n\nRun: {}\n"""\njoin({})\n'
    run = "OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 x.py --steps=3"
    case = lesson_of("x.py", text.format(run, ""))
    assert case and case.options == ("--steps=3",)
    words = command_of(case, devices=4)
    assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", words[4]]
    assert words[4:] == ["--nproc-per-node=4", str(ROOT / "x.py"), "--steps=3"]
    case = lesson_of("x.py", text.format("deepspeed --num_gpus=2 x.py", "at_least=2"))
    assert case and "--num_gpus=3" in command_of(case, devices=3)
    # On the CPU alone, by another script, in a second terminal, or not at all.
    assert lesson_of("x.py", text.format(run, "only_cpu=True")) is None
    assert lesson_of("x.py", text.format("python lab.py -- y.py", "")) is None
    assert lesson_of("x.py", text.format("python x.py", "")) is None
    assert lesson_of("x.py", '"""No launcher."""\njoin()\n') is None


def test_folder_of_a_lesson_is_a_new_one() -> None:
    case = LESSON._replace(options=("--checkpoints=FOLDER",))
    first, second = (command_of(case, 1)[-1].split("=")[1] for _ in range(2))
    assert first != second
    assert Path(first).is_dir() and Path(second).is_dir()


def test_cases_have_scripts_and_names_of_their_own() -> None:
    cases = [*CASES, *lessons()]
    assert len({case.name for case in cases}) == len(cases)
    assert [case.script for case in cases if not (ROOT / case.script).is_file()] == []


def test_texts_of_nccl_are_those_that_pages_cite() -> None:
    pages = "".join(
        path.read_text("utf-8").replace("\n  ", " ")
        for path in [*ROOT.glob("*.md"), *ROOT.glob("0*/**/*.md")]
    )
    cited = [case for case in CASES if case.name.startswith("NCCL")]
    assert len(cited) == 4
    assert [case.expect for case in cited if case.expect not in pages] == []


# --- What an output means. ----------


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "device: cuda with nccl (...)\ncheck: right", ["passed", ""]),
        (0, "device: cuda with nccl (...)", ["failed", "the output lacks"]),
        (0, "device: cpu with gloo (no accelerator found)\ncheck: x",
         ["failed", "not on cuda"]),
        (0, "device: cpu with gloo (1 cuda for 2 local ranks)\ncheck: x",
         ["skipped", "wants 2 devices"]),
        (2, "x.py: not with 1 rank(s); start it with torchrun --nproc-per-node=3 x.py",
         ["skipped", "wants 3 ranks"]),
        (1, "RuntimeError: CUDA out of memory\nbye", ["failed", "CUDA out of memory"]),
        (None, "", ["failed", "not done after"]),
    ],
)  # fmt: skip
def test_outcome_of_a_lesson(
    status: int | None, output: str, expected: list[str]
) -> None:
    outcome, why = judge_output(LESSON, status, output, "cuda")
    assert outcome == expected[0]
    assert expected[1] in why


def test_outcome_of_what_has_to_fail() -> None:
    case = Case("NCCL", "x.py", expect="Duplicate GPU", succeeds=False)
    said = "ncclInvalidUsage ... Duplicate GPU detected"
    assert judge_output(case, 1, said, "cuda")[0] == "passed"
    assert judge_output(case, 1, "Segmentation fault", "cuda")[0] == "failed"
    assert judge_output(case, 0, said, "cuda")[0] == "failed"


def test_what_is_missing_is_named() -> None:
    machine = {"kind": "xpu", "versions": {"deepspeed": None}}
    assert missing(LESSON, machine, 1) == ""
    assert missing(LESSON._replace(devices=2), machine, 1) == "wants 2 devices"
    assert missing(LESSON._replace(only_on="cuda"), machine, 1) == "only on cuda"
    case = LESSON._replace(packages=("deepspeed",))
    assert missing(case, machine, 1) == "deepspeed is not installed"


def test_command_that_hangs_is_ended_with_its_children() -> None:
    status, output = run_limited(["sh", "-c", "echo begun; sleep 600 & wait"], 1.0, {})
    assert (status, output) == (None, "begun\n")


# --- The report. ----------


def test_recorded_report_is_read() -> None:
    report = json.loads(SAMPLE.read_text())
    lines = table(report).splitlines()
    assert len(lines) == len(report["cases"]) + 2
    outcomes = [case["outcome"] for case in report["cases"]]
    counts = [f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "skipped")]
    assert lines[-1] == ", ".join(counts)
    assert {"passed", "skipped"} <= set(outcomes)
    report["machine"]["devices"] = ["NVIDIA H200"]
    report["cases"] = [{**case, "outcome": "passed"} for case in report["cases"][:3]]
    assert front_page_row(report).startswith("| 1 x NVIDIA H200, NCCL, torch ")
    assert "3 of 3 passed, 0 skipped |" in front_page_row(report)


def test_front_page_says_what_was_run() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    reports = sorted(ROOT.glob("assets/gpu_*.json"))
    rows = [front_page_row(json.loads(path.read_text())) for path in reports]
    assert [row in page for row in rows] == [True] * len(reports)
    assert (NOT_RUN_ROW in page) == (not reports)


def test_stopped_run_goes_on_and_a_failure_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('RuntimeError: no')")
    (tmp_path / "works.py").write_text(
        f"open({str(tmp_path / 'count')!r}, 'a').write('x')\n"
        "print('figures: {\"GB\": 1.5}')\nprint('check: right')"
    )
    case = Case("fails", str(tmp_path / "fails.py"), launcher="python")
    fails = case._replace(expect=r"(?m)^check: ")
    works = fails._replace(name="works", script=str(tmp_path / "works.py"))
    monkeypatch.setattr(gpu_report, "CASES", (fails, works))
    monkeypatch.setattr(gpu_report, "lessons", list)
    out = tmp_path / "report.json"
    words = ["gpu_report.py", "--rehearse=1", f"--out={out}"]
    for more, runs in (["--minutes=0"], 0), ([], 1), ([], 1), (["--again"], 1):
        monkeypatch.setattr("sys.argv", [*words, *more])
        with pytest.raises(SystemExit):
            main()
        count = tmp_path / "count"
        assert (count.read_text() if count.exists() else "") == "x" * runs
    cases = {case["name"]: case for case in json.loads(out.read_text())["cases"]}
    assert cases["works"]["figures"] == {"GB": 1.5}
    assert cases["fails"]["outcome"] == "failed"
    assert "RuntimeError: no" in cases["fails"]["why"]
    assert "1 passed, 1 failed, 0 skipped" in capsys.readouterr().out


def test_machine_without_an_accelerator_gets_one_line(tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    result = python(SCRIPT, f"--out={tmp_path / 'report.json'}")
    assert result.returncode == 0
    assert result.stdout == (
        "nothing to run: PyTorch finds no accelerator on this machine\n"
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_rehearsal_on_the_cpu_runs_the_cases_that_it_can(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    for only in ("FSDP2", "gloo", "NCCL", "your_model.py"):
        result = python(SCRIPT, "--rehearse=2", f"--only={only}", f"--out={out}")
        assert result.returncode == 0, result.stdout + result.stderr
    outcomes = [case["outcome"] for case in json.loads(out.read_text())["cases"]]
    assert outcomes == ["passed"] * 2 + ["skipped"] * 4 + ["passed"]
