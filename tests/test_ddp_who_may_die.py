"""Chapter 03: what a job does when a part of it is killed, by rendezvous."""

import importlib.util
import re
import shutil
import sys
from unittest import mock

import pytest

from launch import ROOT, python
from scripts import load_chapter

PLACE = "03_ddp_torchrun/fault_tolerance"
SCRIPT = load_chapter(PLACE)["who_may_die"]
RANK_LOST = r".*(closed|reset) by peer"
STORE_LOST = "The connection to the C10d store has failed"
ETCD_LOST = "The connection to etcd has failed"
TWO, ONE, END = "2 ranks resume", "1 rank resumes", "ends"
# What happens by rendezvous and victim, and the last error of those that survive.
CASES = {
    ("static", "rank"): (END, RANK_LOST),
    ("static", "agent"): (END, RANK_LOST),
    ("static", "host 1"): (END, RANK_LOST),
    ("static", "host 0"): (END, RANK_LOST),
    ("c10d", "rank"): (TWO, ""),
    ("c10d", "agent"): (ONE, ""),
    ("c10d", "host 1"): (ONE, ""),
    ("c10d", "host 0"): (END, STORE_LOST),
    ("etcd", "rank"): (TWO, ""),
    ("etcd", "agent"): (ONE, ""),
    ("etcd", "host 1"): (ONE, ""),
    ("etcd", "host 0"): (ONE, ""),
    ("etcd", "etcd"): (END, ETCD_LOST),
}


# The page runs one of these; each takes half a minute.
@pytest.mark.slow
@pytest.mark.parametrize(("rendezvous", "victim"), CASES)
def test_job_when_a_part_of_it_is_killed(rendezvous: str, victim: str) -> None:
    if rendezvous == "etcd" and not shutil.which("etcd"):
        pytest.skip("etcd is not installed")
    if rendezvous == "etcd" and importlib.util.find_spec("etcd") is None:
        pytest.skip("python-etcd is not installed")
    words = [f"--rendezvous={rendezvous}", f"--victim={victim}"]
    result = python(ROOT / PLACE / "who_may_die.py", *words)
    assert result.returncode == 0, result.output
    _, line, check = result.stdout.splitlines()
    happens, text = CASES[rendezvous, victim]
    found = re.match(rf"{rendezvous} +{victim} +{happens} +(\d+) s(.*)$", line)
    assert found and re.match(rf"  {text}" if text else "$", found[2]), line
    # A heartbeat comes each second; by default it would take three of five seconds.
    assert int(found[1]) < 60
    assert check == "check: 1 of 1 kills ended as expected"


def test_table_of_the_page_is_what_the_runs_show() -> None:
    page = (ROOT / PLACE / "README.md").read_text()
    row = r"^(static|c10d|etcd) +(rank|agent|host 1|host 0|etcd) +(.*?) +\d+ s\b(.*)$"
    (block,) = re.findall(r"^```text\n(rendezvous .*?)^```", page, re.M | re.S)
    told = {
        (kind, who): (does, why)
        for kind, who, does, why in re.findall(row, block, re.M)
    }
    assert {case: does for case, (does, _) in told.items()} == {
        case: happens for case, (happens, _) in CASES.items()
    }
    pairs = [(text, told[case][1]) for case, (_, text) in CASES.items()]
    assert [bool(re.match(rf"  {a}" if a else "$", b)) for a, b in pairs] == [True] * 13
    by_script = {
        (kind, victim): happens
        for kind, row in SCRIPT.EXPECTED.items()
        for victim, happens in zip(SCRIPT.VICTIMS, row, strict=False)
    }
    assert by_script == {case: happens for case, (happens, _) in CASES.items()}


@pytest.mark.parametrize(
    ("happens", "status"),
    [("ends", 0), ("1 rank resumes", "0 of 1 kills ended as expected")],
)
def test_script_fails_if_the_job_does_something_else(
    happens: str,
    status: int | str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["who_may_die.py", "--rendezvous=c10d", "--victim=host 0"]
    monkeypatch.setattr(sys, "argv", words)
    fake = mock.Mock(return_value=(happens, 2.0, "why"))
    monkeypatch.setattr(SCRIPT, "kill_and_see", fake)
    if status:
        with pytest.raises(SystemExit) as stopped:
            SCRIPT.main()
        assert stopped.value.code == status
    else:
        SCRIPT.main()
    said = capsys.readouterr().out.splitlines()
    assert said[1] == f"c10d        host 0  {happens:14}    2 s  why"
    assert len(said) == (2 if status else 3)
    fake.assert_called_once_with("c10d", "host 0")


def test_script_says_that_there_is_no_etcd(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["who_may_die.py", "--rendezvous=etcd"])
    monkeypatch.setattr(SCRIPT.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit) as stopped:
        SCRIPT.main()
    assert stopped.value.code == "0 of 0 kills ended as expected"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "etcd        skipped: etcd or python-etcd is not installed"
