"""Chapter 03, MACHINES.md: what is said of several machines, tried on several hosts."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import ROOT, Result, clean_environment, free_port, python, run
from scripts import load_chapter

CHAPTER = ROOT / "03_ddp_torchrun"
LAB = CHAPTER / "lab.py"
TRAIN = CHAPTER / "train.py"
TINY = ["--max-steps=2", "--layers=1", "--width=32", "--heads=2", "--block-size=32"]
GRADIENT_BYTES = 443_648 * 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def lab(*words: Any, **options: Any) -> Result:
    """Run lab.py to its end."""
    return python(LAB, *words, **options)


# --- Two agents on one machine. ----------


def agents(*each: list[str], script: Path = TRAIN) -> list[Result]:
    """Run several torchruns at once, each with options of its own, to their ends."""
    with ThreadPoolExecutor(len(each)) as pool:
        words = [[*TORCHRUN, "--nproc-per-node=1", *one, script, *TINY] for one in each]
        return list(pool.map(lambda one: run(one, timeout=180), words))


@pytest.mark.slow
def test_what_goes_wrong_without_each_option() -> None:
    def c10d(*words: str) -> list[str]:
        conf = "--rdzv-conf=join_timeout=4,read_timeout=4"
        return ["--nnodes=2", "--rdzv-backend=c10d", conf, *words]

    def static(*words: str) -> list[str]:
        return [
            "--nnodes=2",
            "--master-addr=localhost",
            "--rdzv-conf=timeout=5",
            *words,
        ]

    ports = [str(free_port()) for _ in range(8)]
    same = f"--rdzv-endpoint=localhost:{ports[0]}"
    no_timeouts = "Rendezvous(Timeout|Closed|Connection)Error"
    cases = {
        "--nnodes differs": (
            [c10d(same, "--nnodes=2"), c10d(same, "--nnodes=3")],
            ["RendezvousTimeoutError", no_timeouts],
        ),
        "no --node-rank": (
            [static(f"--master-port={ports[1]}", "--rdzv-conf=timeout=20")] * 2,
            ["EADDRINUSE", "1/2 clients joined"],
        ),
        "--master-port differs": (
            [
                static(f"--master-port={ports[2]}", "--node-rank=0"),
                static(f"--master-port={ports[3]}", "--node-rank=1"),
            ],
            ["1/2 clients joined", "The client socket has timed out"],
        ),
        "--rdzv-endpoint differs": (
            [c10d(f"--rdzv-endpoint=localhost:{port}") for port in ports[4:6]],
            ["RendezvousTimeoutError"] * 2,
        ),
        "--rdzv-id differs": (
            [
                c10d(f"--rdzv-endpoint=localhost:{ports[6]}", f"--rdzv-id={name}")
                for name in ("one", "two")
            ],
            ["RendezvousTimeoutError", no_timeouts],
        ),
        "nobody keeps the store": (
            [
                [
                    *c10d(f"--rdzv-endpoint=localhost:{ports[7]}"),
                    "--rdzv-conf=is_host=0,read_timeout=3",
                ]
            ],
            ["The client socket has timed out"],
        ),
        "--master_adderss": (
            [static("--master_adderss=localhost")],
            ["unrecognized arguments: --master_adderss=localhost"],
        ),
    }
    everybody = [words for words, _ in cases.values() for words in words]
    assert len(everybody) == 12
    results = agents(*everybody)
    for name, (words, texts) in cases.items():
        mine, results = results[: len(words)], results[len(words) :]
        assert len(mine) == len(words)
        if name == "--nnodes differs" and not any(one.returncode for one in mine):
            # The agent that asks for two came last and found one waiting: a good run.
            check = "check: 2 rank(s) hold the same bits"
            assert any(check in one.stdout for one in mine), mine
            continue
        assert all(result.returncode for result in mine), name
        assert len(texts) in (1, 2)
        # Which of the two says what is a matter of who came first.
        for text in texts:
            hits = [result for result in mine if re.search(text, result.output)]
            assert hits, (name, text, [result.output[-600:] for result in mine])
    assert len(cases) == 7


# --- The laboratory. ----------


@pytest.mark.slow
def test_three_hosts_send_what_a_ring_must_in_spite_of_a_short_cut(
    laboratory: None,
) -> None:
    cut = ["--cut-when=step   5", "--mend-after=3"]
    result = lab("--hosts=3", *cut, "--", TRAIN, "--max-steps=10", timeout=180)
    assert result.returncode == 0, result.output
    order = [
        result.stdout.index(text)
        for text in (
            "step   5 of 10",
            "the cable of host2 is pulled",
            "the cable of host2 is back",
            "step  10 of 10",
            "check: 3 rank(s) hold the same bits",
        )
    ]
    assert order == sorted(order)
    assert "ranks: 3" in result.stdout
    assert len(re.findall(r"host\d \| \$ torchrun", result.stdout)) == 2
    counts = re.findall(r"^host(\d) sent ([\d.]+) MB", result.stdout, re.M)
    assert [host for host, _ in counts] == ["0", "1", "2"]
    # Ten steps and the gradient of the closing check; at host 0, the weights too.
    ring = 11 * 2 * (3 - 1) / 3 * GRADIENT_BYTES / 1e6
    for host, sent in counts:
        extra = 0 if host != "0" else 4 * GRADIENT_BYTES / 1e6
        assert 0.99 * ring < float(sent) < 1.1 * ring + extra, (host, sent, ring)
    assert re.search(r"^check: of [\d.]+ MB sent, 0\.\d% was lost", result.stdout, re.M)


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Find the living processes whose environment holds a variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(name) == value:
                found.append(process)
    return found


def wait_until_none(name: str, value: str) -> list[psutil.Process]:
    """Give processes ten seconds to go; return those that are left."""
    deadline = time.monotonic() + 10
    while (left := processes_with(name, value)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_lab_leaves_nothing(name: str, laboratory: None) -> None:
    interfaces = sorted(path.name for path in Path("/sys/class/net").iterdir())
    number, mark = signal.Signals[name], f"{os.getpid()} {name}"
    process = subprocess.Popen(
        [sys.executable, LAB, "--", "sh", "-c", "echo up; exec sleep 600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(LAB_TEST=mark),
        # Started in the background, a process may have been told to ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        seen = [process.stdout.readline() for _ in range(3)]
        assert sorted(seen[1:]) == ["host0 | up\n", "host1 | up\n"], seen
        # The two that sleep, the two that hold a host, and what started them.
        assert len(processes_with("LAB_TEST", mark)) >= 6
        process.send_signal(number)
        status = process.wait(timeout=20)
        # Told to end, it ends the others first. Killed, it leaves that to the kernel.
        if name != "SIGKILL":
            assert processes_with("LAB_TEST", mark) == []
        assert wait_until_none("LAB_TEST", mark) == []
    finally:
        for left in processes_with("LAB_TEST", mark):
            left.kill()
        process.wait()
    rest = process.stdout.read()
    process.stdout.close()
    assert status == (-9 if name == "SIGKILL" else 128 + number), rest
    assert rest == ""
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == interfaces


def test_two_labs_have_the_same_addresses_and_never_meet(laboratory: None) -> None:
    # Each of them listens at one port of one address and calls there.
    script = (
        'case $LAB_HOST in 0) exec "$0" "$1" --listen=4000 --seconds=20 ;; '
        '*) exec "$0" "$1" 10.0.0.1:4000 --seconds=20 ;; esac'
    )
    words = ["--", "sh", "-c", script, sys.executable, CHAPTER / "can_reach.py"]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: lab(*words), range(2)))
    assert len(results) == 2
    for result in results:
        assert result.returncode == 0, result.output
        assert "host1 | from 10.0.0.2 (eth0) to 10.0.0.1" in result.stdout
        assert "host0 | 10.0.0.2 has reached us" in result.stdout


@pytest.mark.slow
def test_names_that_nobody_can_resolve(laboratory: None, tmp_path: Path) -> None:
    # As on hosts without DNS. With names, neither option is needed: the third case.
    common = "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"
    common += " --rdzv-endpoint=10.0.0.1:4000"
    rename = "hostname box$LAB_HOST; "
    tail = f"'{TRAIN}' {' '.join(TINY)}"
    # Both would wait for ever; both end once one of them has complained.
    find = f"grep -h 'box0.*retrieved' '{tmp_path}'/*"
    cases = {
        "no is_host": f"{rename} {common} --local-addr=10.0.0.$((LAB_HOST + 1)) {tail}",
        "no local-addr": f"{rename} {common} --rdzv-conf=is_host=$((1 - LAB_HOST)) "
        f"{tail} > '{tmp_path}'/$LAB_HOST 2>&1 & "
        f"for _ in $(seq 90); do sleep 1; {find} && exit 1; done",
        "names": f"{common} {tail}",
        "wrong interface": f"GLOO_SOCKET_IFNAME=eth9 {common} {tail}",
    }
    with ThreadPoolExecutor(len(cases)) as pool:
        started = [
            pool.submit(lab, "--", "sh", "-c", words, timeout=180)
            for words in cases.values()
        ]
    results = {name: one.result() for name, one in zip(cases, started, strict=True)}
    assert len(results) == 4
    assert results["no is_host"].returncode == 1
    assert "gaierror" in results["no is_host"].output
    assert results["no local-addr"].returncode == 1
    lost = r"network addresses of \(box0, \d+\) cannot be retrieved"
    assert re.search(lost, results["no local-addr"].output), results["no local-addr"]
    assert results["wrong interface"].returncode == 1
    assert "Unable to find address for: eth9" in results["wrong interface"].output
    assert results["names"].returncode == 0, results["names"].output
    assert "check: 2 rank(s) hold the same bits" in results["names"].output


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    module = load_chapter("03_ddp_torchrun")["who_is_where"]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def places(*numbers: tuple[int, int, int]) -> list[dict[str, int]]:
        return [dict(zip(names, (*three, 3, 2), strict=True)) for three in numbers]

    # Two ranks on one node and one on another, as when nodes have unequal numbers.
    good = places((0, 0, 0), (1, 1, 0), (2, 0, 1))
    good[2]["LOCAL_WORLD_SIZE"] = 1
    assert module.check_places(good).startswith("3 ranks are numbered from 0")
    drawn = module.draw_nodes(good)
    assert len(drawn) == 4 and {len(line) for line in drawn[:3]} == {66}
    assert drawn[2].count("rank 1 ") == 2  # its rank, and its local rank
    with pytest.raises(RuntimeError, match="or there twice"):
        module.check_places(places((0, 0, 0), (1, 1, 0), (1, 0, 1)))
    with pytest.raises(RuntimeError, match="node 0 has the local ranks"):
        module.check_places(places((0, 0, 0), (1, 0, 0), (2, 0, 1)))


# --- Slurm. ----------


def is_free(job: int) -> bool:
    """Tell whether the port that slurm.sbatch makes of a job's number is free."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 20000 + job)) != 0


def test_slurm_script_starts_one_agent_on_each_node(tmp_path: Path) -> None:
    script = CHAPTER / "slurm.sbatch"
    assert run(["bash", "-n", script]).returncode == 0
    stand_ins = {
        "scontrol": '[ "$*" = "show hostnames node[1-2]" ] || exit 9\n'
        'printf "localhost\\nx\\n"',
        # What srun does with one task a node, as far as the script can tell.
        # Since 22.05 it gives a task one core, unless it is told by its own variable.
        "srun": '[ "$1" = --kill-on-bad-exit=1 ] || exit 9; shift\n'
        '[ "$SRUN_CPUS_PER_TASK" = 2 ] || exit 8\n'
        "for node in 0 1; do\n"
        '    SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &\n'
        'done\nwait -n && wait -n && echo "both tasks have ended"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert len(list(tmp_path.iterdir())) == 2
    # The script makes a port of the job's number: take a number whose port is free.
    job = next(number for number in random.sample(range(9000), 100) if is_free(number))
    environment = clean_environment(
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_JOB_ID=str(job),
        SLURM_JOB_NUM_NODES="2",
        SLURM_CPUS_PER_TASK="2",
        RANKS="1",
    )
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    result = run(["bash", script, TRAIN, *TINY], env=environment, timeout=180)
    assert result.returncode == 0, result.output
    threads = min(2, os.cpu_count() or 1)
    assert f"ranks: 2, threads for each: {threads}\n" in result.stdout
    assert "check: 2 rank(s) hold the same bits" in result.stdout
    assert "both tasks have ended" in result.stdout


# --- One line for each mistake. ----------


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        ("lab", ["--link-rate=fast", "--", "x"], "--link-rate: 'fast' is no rate from"),
        ("lab", ["--link-rate=1kbit", "--", "x"], "'1kbit' is no rate from 1mbit"),
        ("lab", ["--hosts=0", "--", "x"], "--hosts must be 1 to 16, not 0"),
        ("lab", ["--cut-host=2", "--", "x"], "--cut-host must be 0 to 1, not 2"),
        ("lab", ["--", "no.py"], "there is no script no.py"),
        ("lab", [], "the following arguments are required: command"),
        ("lab", [str(TRAIN), "--max-steps=2"], "for the hosts stands after --"),
        ("lab", ["--mend-after=-1", "--", "x"], "--mend-after 0 or more"),
        ("slow_link", [], "start it in the laboratory"),
        ("with_etcd", ["no.py"], "expected a script to run, not no.py"),
        ("with_etcd", ["--agents=9", str(TRAIN)], "--agents must be 1 to 4, not 9"),
        ("who_is_where", [], "start it with torchrun --nproc-per-node=2"),
        ("listening", [], "start it with torchrun --nproc-per-node=2"),
        ("can_reach", ["localhost"], "expected HOST:PORT, not 'localhost'"),
        ("can_reach", ["localhost:99999"], "expected HOST:PORT, not 'localhost:99999'"),
        ("can_reach", ["--listen=-1"], "--listen must be 0 to 65535, not -1"),
        ("can_reach", ["a..b:4000"], "no address is known for a..b"),
        ("can_reach", ["--listen=0", "--seconds=0"], "--seconds must be above 0"),
        ("can_reach", ["--listen=0", "--callers=0"], "--callers must be 1 or more"),
        (
            "can_reach",
            ["--listen=0", "--seconds=0.5"],
            "0 of 1 have called within 0.5 s",
        ),
    ],
)
def test_a_mistake_is_one_line(script: str, words: list[str], line: str) -> None:
    result = python(CHAPTER / f"{script}.py", *words, timeout=60)
    assert result.returncode == 2
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"{script}.py: ")
    assert line in said


def test_every_caller_is_answered_at_every_address_of_the_host() -> None:
    script = CHAPTER / "can_reach.py"
    hosts = ["localhost", "127.0.0.1"]
    with contextlib.suppress(OSError):  # a machine without IPv6
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        hosts.append("[::1]")
    listener = subprocess.Popen(
        [sys.executable, script, "--listen=0", f"--callers={len(hosts)}"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert listener.stdout is not None
    try:
        port = listener.stdout.readline().split()[-1]
        answers = [python(script, f"{host}:{port}").stdout for host in hosts]
        said, _ = listener.communicate(timeout=60)
    finally:
        listener.kill()
    assert len(answers) == len(hosts) >= 2
    end = f"check: reached port {port}, where can_reach.py listens\n"
    assert all(answer.endswith(end) for answer in answers)
    assert said.count(" has reached us\n") == len(hosts)
    assert said.endswith(f"\ncheck: answered {len(hosts)} of {len(hosts)}\n")
    assert listener.returncode == 0


def test_port_of_another_job_is_taken() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        result = python(CHAPTER / "can_reach.py", f"--listen={port}", timeout=60)
    assert result.returncode == 2
    said = f"can_reach.py: cannot listen at port {port}: Address already in use; "
    assert result.stderr == f"{said}take another\n"


def test_a_lab_finds_tools_that_only_root_has_on_the_path(laboratory: None) -> None:
    environment = clean_environment()
    folders = environment["PATH"].split(os.pathsep)
    ours = [folder for folder in folders if not folder.rstrip("/").endswith("sbin")]
    environment["PATH"] = os.pathsep.join(ours)
    result = lab("--", "true", env=environment, timeout=60)
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("check: of 0.0 MB sent")


def test_a_lab_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    environment = clean_environment(PATH=str(tmp_path))
    result = run([sys.executable, LAB, "--", "true"], env=environment)
    assert result.returncode == 2
    (said,) = result.stderr.splitlines()
    missing = "lab.py: not found: unshare, nsenter, setpriv"
    assert said.startswith(missing if sys.platform == "linux" else "lab.py: a laborato")


def test_etcd_that_is_not_running_is_reported_at_once() -> None:
    pytest.importorskip("etcd", reason="python-etcd is not installed")
    conf = ["--nnodes=1:4", "--rdzv-backend=etcd-v2", "--rdzv-id=job"]
    (result,) = agents([*conf, f"--rdzv-endpoint=localhost:{free_port()}"])
    assert result.returncode == 1
    assert "The connection to etcd has failed" in result.stderr
    assert result.seconds < 60  # it takes one, where other stores are waited for


@pytest.mark.parametrize(
    "name", [pytest.param("SIGINT", marks=pytest.mark.slow), "SIGKILL"]
)
def test_etcd_does_not_outlive_what_has_started_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("etcd", reason="python-etcd is not installed")
    if not shutil.which("etcd"):
        pytest.skip("etcd is not installed")
    sleeper = tmp_path / "sleeper.py"
    # In one write: torchrun's ranks are unbuffered, and two of them might mix theirs.
    sleeper.write_text("import os, time\nos.write(1, b'up\\n')\ntime.sleep(600)\n")
    number, mark = signal.Signals[name], f"{os.getpid()} etcd {name}"
    process = subprocess.Popen(
        [sys.executable, CHAPTER / "with_etcd.py", sleeper],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(ETCD_TEST=mark),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        # Not before both ranks run: while torchrun is starting one, a signal makes it
        # forget that one.
        for _ in range(2):
            assert "up\n" in iter(process.stdout.readline, "")
        running = processes_with("ETCD_TEST", mark)
        # This one, etcd, two agents and a rank of each.
        assert len(running) >= 6
        assert "etcd" in [one.name() for one in running]
        process.send_signal(number)
        status = process.wait(timeout=60)
        assert wait_until_none("ETCD_TEST", mark) == []
    finally:
        for left in processes_with("ETCD_TEST", mark):
            left.kill()
        process.communicate()
    assert status == (-9 if name == "SIGKILL" else 130)
