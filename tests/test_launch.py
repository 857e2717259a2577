"""The launch helper: real processes, every one of them accounted for."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import launch
from launch import (
    ROOT,
    LaunchLeak,
    LaunchTimeout,
    clean_environment,
    deepspeed,
    free_port,
    python,
    run,
    torchrun,
)

# What tests are made with is tested where that is changed: with `make test-all`.
pytestmark = pytest.mark.slow

# Generous, for machines that do much else: how long killing may take.
SLACK = 15.0

DEFAULT_PORT = 29500  # allowed port: the tests hold it to see that no launch needs it

# Both launchers start Python with -u, under which print writes each of its arguments
# by itself and the lines of two ranks can mix: a line is written in one piece here.
SHOW_RANK = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
words = [f"{name}={os.environ.get(name)}" for name in names]
sys.stdout.write(" ".join([*sys.argv[1:], *words]) + "\\n")
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "a script.py"
    path.write_text(text)
    return path


def marked() -> list[psutil.Process]:
    """Return what lives and carries the mark of this session's launches."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(launch.MARK, "")
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
        except psutil.Error:
            continue
        if mark.startswith(launch.SESSION):
            found.append(process)
    return found


def wait_for(pid: int, seconds: float = SLACK) -> bool:
    """Say whether the process `pid` ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.timeout(30)
def test_result_holds_streams_code_and_time(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import os, sys, time
for number in range(3):
    print("out", number, flush=True); time.sleep(0.2)
    print("err", number, file=sys.stderr, flush=True); time.sleep(0.2)
os.write(1, b"\\xff no newline")
sys.exit(3)
""",
    )
    result = python(path)
    assert result.returncode == 3
    assert result.stdout == "out 0\nout 1\nout 2\n\ufffd no newline"
    assert result.stderr == "err 0\nerr 1\nerr 2\n"
    ordered = "out 0\nerr 0\nout 1\nerr 1\nout 2\nerr 2\n\ufffd no newline"
    assert result.output == ordered
    assert 1.2 < result.seconds < 1.2 + SLACK
    assert marked() == []


@pytest.mark.timeout(30)
def test_lines_are_whole_where_streams_meet(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import sys, time
print("begin", end="", flush=True); time.sleep(0.3)
print("between", file=sys.stderr, flush=True); time.sleep(0.3)
print(" end")
""",
    )
    assert python(path).output == "between\nbegin end\n"


@pytest.mark.timeout(30)
def test_arguments_input_folder_and_environment(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, sys; print(sys.argv[1:], input(), os.getcwd(), os.environ['X'])",
    )
    folder = tmp_path / "other folder"
    folder.mkdir()
    env = clean_environment(X="given")
    result = python(path, "a b", 3, cwd=folder, env=env, input="typed\n")
    assert result.output == f"['a b', '3'] typed {folder.resolve()} given\n"
    code = "import os, sys; print(os.getcwd(), repr(sys.stdin.read()))"
    result = run(["python", "-c", code])
    assert result.output == f"{ROOT} ''\n"


@pytest.mark.timeout(30)
def test_big_output_and_input_do_not_block(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import sys
line = "x" * 99 + "\\n"
for _ in range(100):
    sys.stderr.write(line * 200)
    sys.stdout.write(line * 200)
print(len(sys.stdin.read()))
""",
    )
    result = python(path, input="y" * 3_000_000)
    assert len(result.stderr) == 100 * 200 * 100
    assert result.stdout == result.stderr + "3000000\n"
    assert len(result.output) == len(result.stdout) + len(result.stderr)


def test_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
        *("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK"),
        *("ROLE_RANK", "PET_NNODES", "PYTEST_CURRENT_TEST", "PYTHONPATH"),
        *("PYTHONWARNINGS", "LC_ALL", "COLUMNS", "TORCH_DISTRIBUTED_DEBUG"),
        "DS_ACCELERATOR",
    }
    assert len(dropped) == 18
    for name in dropped:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/kept")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = clean_environment(EXTRA="yes", RANK="5")
    assert dropped & set(environment) == {"RANK"}
    assert environment["RANK"] == "5"
    assert environment["EXTRA"] == "yes"
    assert environment["LD_LIBRARY_PATH"] == "/kept"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["LANG"] == "C.UTF-8"
    assert environment["HOME"]
    first = environment["PATH"].split(os.pathsep)[0]
    assert first == str(Path(sys.executable).parent)
    code = "import sys; print(sys.prefix)"
    assert run(["python", "-c", code]).output == f"{sys.prefix}\n"


@pytest.mark.timeout(60)
def test_torchrun_starts_ranks_while_the_default_port_is_taken(tmp_path: Path) -> None:
    path = script(tmp_path, SHOW_RANK)
    with socket.socket() as taken:
        try:
            taken.bind(("", DEFAULT_PORT))
            taken.listen()
        except OSError:
            pass  # Another job holds it, which is the case to test.
        result = torchrun(path, nproc=2)
    assert result.returncode == 0, result.output
    lines = sorted(result.stdout.splitlines())
    assert len(lines) == 2
    ports = set()
    for rank, line in enumerate(lines):
        start, port = line.rsplit("=", 1)
        ports.add(int(port))
        expected = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
        assert start == f"{expected} MASTER_PORT"
    assert len(ports) == 1
    assert ports != {DEFAULT_PORT}
    # The threads per rank are set, so torchrun has nothing to warn of.
    assert result.stderr == ""


@pytest.mark.timeout(90)
def test_deepspeed_starts_ranks_on_a_free_port(tmp_path: Path) -> None:
    path = script(tmp_path, SHOW_RANK)
    result = deepspeed(path, "--x", num_ranks=2)
    assert result.returncode == 0, result.output
    lines = sorted(line for line in result.stdout.splitlines() if " RANK=" in line)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        ranks = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2"
        assert line.startswith(f"--local_rank={rank} --x {ranks} ")
        assert not line.endswith(f"MASTER_PORT={DEFAULT_PORT}")


@pytest.mark.timeout(60)
def test_hung_rank_is_named_and_killed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import os, signal, time
def wait_for_ever():
    time.sleep(1000)
if os.environ["RANK"] != "1":
    os.write(1, f"rank {os.environ['RANK']} is done\\n".encode())
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_ever()
""",
    )
    start = time.monotonic()
    with pytest.raises(LaunchTimeout) as caught:
        torchrun(path, nproc=3, timeout=10)
    assert 10 < time.monotonic() - start < 10 + SLACK
    message = str(caught.value)
    assert message.startswith("no end after 10 s: ")
    assert "\nrank 1 (pid " in message
    assert "ranks 0, 2 exited\n" in message
    assert re.search(r"\n--- stack of rank 1 \(pid \d+\) ---\nFatal", message)
    assert "rank 0 (pid" not in message
    assert 'a script.py", line 4 in wait_for_ever' in message
    printed = sorted(caught.value.output.splitlines())
    assert printed == ["rank 0 is done", "rank 2 is done"]
    assert marked() == []


@pytest.mark.timeout(30)
def test_a_process_without_a_rank_is_named_by_its_pid(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\nprint('so far', flush=True)\ntime.sleep(99)")
    with pytest.raises(
        LaunchTimeout, match=r"pid \d+ still running: .*a script.py"
    ) as (caught):
        python(path, timeout=1.5)
    assert 'a script.py", line 3 in <module>' in str(caught.value)
    assert caught.value.output == "so far\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("streams", ["inherited", "closed"])
def test_a_process_left_behind_is_reported_and_killed(
    tmp_path: Path, streams: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 1.0)
    where = "" if streams == "inherited" else "stdout=DEVNULL, stderr=DEVNULL, "
    path = script(
        tmp_path,
        f"""
from subprocess import DEVNULL, Popen
child = Popen(["sleep", "333"], {where}start_new_session=True)
print(child.pid)
""",
    )
    with pytest.raises(LaunchLeak) as caught:
        python(path)
    pid = int(caught.value.output)
    assert f"exit code 0:\npid {pid} still running: sleep 333" in str(caught.value)
    assert wait_for(pid)


@pytest.mark.timeout(30)
def test_a_short_lived_descendant_is_waited_for(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "from subprocess import Popen; Popen('sleep 0.5; echo late', shell=True)",
    )
    assert python(path).output == "late\n"


@pytest.mark.timeout(60)
def test_an_interrupt_kills_the_tree(tmp_path: Path) -> None:
    path = script(tmp_path, "import time; time.sleep(1000)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # Early enough to meet torchrun before and late enough after it starts its ranks.
    signal.setitimer(signal.ITIMER_REAL, 6)
    try:
        with pytest.raises(KeyboardInterrupt):
            torchrun(path, timeout=50)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert marked() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_killed_test_run(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    inner = "import os, time; print(os.getpid(), file=open('pid', 'w')); time.sleep(99)"
    (tmp_path / "inner.py").write_text(inner)
    outer = script(
        tmp_path,
        f"""
import sys
sys.path.insert(0, {str(Path(launch.__file__).parent)!r})
from launch import python
python("inner.py", cwd={str(tmp_path)!r})
""",
    )
    pid_file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, outer]) as process:
        deadline = time.monotonic() + 20
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = int(pid_file.read_text())
        assert psutil.pid_exists(pid)
        process.send_signal(signal_number)
    assert process.returncode == -signal_number
    assert wait_for(pid)


def test_free_ports_can_be_bound() -> None:
    ports = [free_port() for _ in range(5)]
    assert len(ports) == 5
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            assert 1024 <= port < 65536
