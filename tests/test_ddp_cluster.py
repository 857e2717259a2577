"""Chapter 03, cluster/: what is said of several machines, tried on several hosts."""

import contextlib
import io
import logging
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
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import determine_local_world_size

from launch import ROOT, Result, clean_environment, free_port, python, run
from lessons import run_lesson
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = ROOT / "03_ddp_torchrun"
ROOM = CHAPTER / "cluster"
LAB = ROOM / "lab.py"
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
        return list(pool.map(lambda one: run(one), words))


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

    ports = [str(free_port()) for _ in range(10)]
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
    right = [static(f"--master-port={ports[8]}", "--rdzv-conf=timeout=60")] * 2
    endpoint = ["--nnodes=2", f"--rdzv-endpoint=localhost:{ports[9]}"]
    right += [[*endpoint, "--rdzv-conf=timeout=60"]] * 2
    right = [[*words, f"--node-rank={i % 2}"] for i, words in enumerate(right)]
    everybody = [words for words, _ in cases.values() for words in words]
    assert len(everybody) == 12
    *results, one, two, three, four = agents(*everybody, *right)
    check = "check: 2 rank(s) hold the same bits"
    for first, second in ((one, two), (three, four)):
        assert first.returncode == second.returncode == 0, (first, second)
        assert check in first.stdout and check not in second.stdout
    for name, (words, texts) in cases.items():
        mine, results = results[: len(words)], results[len(words) :]
        assert len(mine) == len(words)
        if name == "--nnodes differs" and not any(one.returncode for one in mine):
            # The agent that asks for two came last and found one waiting: a good run.
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
def test_three_hosts_send_what_a_ring_must_though_a_link_is_down_for_3_s(
    laboratory: None,
) -> None:
    down = ["--down-when=step   5", "--up-after=3"]
    result = lab("--hosts=3", *down, "--", TRAIN, "--max-steps=10")
    assert result.returncode == 0, result.output
    order = [
        result.stdout.index(text)
        for text in (
            "step   5 of 10",
            "the link of host2 is down",
            "the link of host2 is up again",
            "step  10 of 10",
            "check: 3 rank(s) hold the same bits",
        )
    ]
    assert order == sorted(order)
    assert "ranks: 3" in result.stdout
    assert len(re.findall(r"host\d \| \$ torchrun", result.stdout)) == 2
    counts = re.findall(r"^host(\d) sent ([\d.]+) MB", result.stdout, re.M)
    assert [host for host, _ in counts] == ["0", "1", "2"]
    # Ten steps and two gradients of the closing check; at host 0, the weights too.
    ring = 12 * 2 * (3 - 1) / 3 * GRADIENT_BYTES / 1e6
    for host, sent in counts:
        extra = 0 if host != "0" else 4 * GRADIENT_BYTES / 1e6
        assert 0.99 * ring < float(sent) < 1.1 * ring + extra, (host, sent, ring)
    assert re.search(r"^check: of [\d.]+ MB sent, 0\.\d% was lost", result.stdout, re.M)


def test_losses_are_judged_only_if_enough_was_sent() -> None:
    judge = load_chapter("03_ddp_torchrun/cluster")["laboratory"].judge_losses
    assert judge(10**8, 981 * 10**5) == "of 100.0 MB sent, 1.9% was lost (limit 2%)"
    with pytest.raises(RuntimeError, match=r"2\.1% of what was sent has not arrived"):
        judge(10**8, 979 * 10**5)
    assert judge(10**6, 0).endswith("it sent too little to count losses")


def resumed_after_a_long_link_down(folder: Path) -> Result:
    """Train in a copy of the chapter whose groups wait for ten seconds only."""
    copy = folder / "impatient"
    shutil.copytree(CHAPTER, copy, symlinks=True)
    ranks = (copy / "ranks.py").read_text()
    assert ranks.count("timedelta(minutes=5)") == 1
    short = ranks.replace("timedelta(minutes=5)", "timedelta(seconds=10)")
    (copy / "ranks.py").write_text(short)
    down = ["--down-when=step  10", "--up-after=30", "--max-restarts=3"]
    saves = [f"--checkpoint={folder / 'run.pt'}", "--checkpoint-every=8"]
    return lab(*down, "--", copy / "train.py", "--max-steps=20", *saves)


@pytest.mark.slow
def test_training_resumes_after_a_link_was_down_for_longer_than_the_timeout(
    laboratory: None, tmp_path: Path
) -> None:
    result = resumed_after_a_long_link_down(tmp_path)
    assert result.returncode == 0, result.output
    # A rank says it in gloo's words for the call that timed out, or for the others.
    gave_up = r"Timed out waiting 10000ms|Application timeout caused pair closure"
    first = re.search(gave_up, result.stdout)
    texts = (
        "step  10 of 20",
        "lab   | the link of host1 is down",
        first.group() if first else "an error",
        "lab   | the link of host1 is up again",
        "resuming from",
        "step  20 of 20",
        "check: 2 rank(s) hold the same bits",
    )
    places = [result.stdout.find(text) for text in texts]
    assert places == sorted(places) and places[0] >= 0, (places, result.stdout)
    # Both ranks wait in vain, and neither knows whose link it was.
    waited = re.findall(rf"(host\d) \|.*(?:{gave_up})", result.stdout)
    assert sorted(set(waited)) == ["host0", "host1"]
    assert "run.pt, step 8, global batch size 64" in result.stdout


@pytest.mark.slow
def test_run_only_waits_for_a_link_that_is_back_before_the_timeout(
    laboratory: None,
) -> None:
    down = ["--down-when=step 3", "--up-after=3", "--max-restarts=1"]
    result = lab(*down, "--", ROOM / "link_down.py", "--timeout=60", timeout=120)
    assert result.returncode == 0, result.output
    assert "the link of host1 is up again" in result.stdout
    steps = re.findall(r"attempt (\d) \| step (\d)( \| waited)?", result.stdout)
    assert [(attempt, step) for attempt, step, _ in steps] == [
        ("1", str(step)) for step in range(1, 7)
    ]
    # The link may go down before or after the next all-reduce has begun.
    assert [step for _, step, waited in steps if waited][:1] in (["4"], ["5"])
    assert "check: 6 sums are right in attempt 1" in result.stdout


@pytest.mark.slow
def test_bandwidth_is_that_of_the_link(laboratory: None) -> None:
    script = ROOT / "01_communication" / "bandwidth" / "bandwidth.py"
    words = ["--link-rate=100mbit", "--", script, "--max-bytes=1048576"]
    result = lab(*words, timeout=300)
    assert result.returncode == 0, result.output
    (row,) = re.findall(r"1,024 KB +(.*)", result.stdout)
    all_reduce, *others = map(float, row.split())
    # 100 Mbit/s are 0.0125 GB/s; the first 64 kB of a message pass at once.
    assert 0.6 * 0.0125 < all_reduce < 1.1 * 0.0125
    assert len(others) == 5


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
        status = process.wait(timeout=120)
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
    words = ["--", "sh", "-c", script, sys.executable, ROOM / "can_reach.py"]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: lab(*words), range(2)))
    assert len(results) == 2
    for result in results:
        assert result.returncode == 0, result.output
        assert "host1 | from 10.0.0.2 (eth0) to 10.0.0.1" in result.stdout
        assert "host0 | 10.0.0.2 has reached us" in result.stdout


@pytest.mark.slow
def test_a_firewall_that_opens_only_the_rendezvous_port(
    laboratory: None, tmp_path: Path
) -> None:
    (tmp_path / "join.py").write_text(
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        'dist.init_process_group("gloo", timeout=timedelta(seconds=8))\n'
    )
    # The kernel drops what is neither for port 4000 nor from it, and soon gives up.
    firewall = (
        "ip rule add pref 100 lookup local; ip rule del pref 0; "
        "ip rule add pref 10 dev eth0 ipproto tcp dport 4000 lookup local; "
        "ip rule add pref 11 dev eth0 ipproto tcp sport 4000 lookup local; "
        "ip rule add pref 12 dev eth0 ipproto tcp dport 1024-65534 blackhole; "
        "sysctl -qw net.ipv4.tcp_syn_retries=1; "
    )
    common = f"{firewall} torchrun --nnodes=2 --nproc-per-node=1"
    ends = {
        "--rdzv-backend=c10d --rdzv-endpoint=host0:4000": [
            r"The client socket has timed out after 8000ms while .*\(host0, (?!4000)",
            "waiting for clients. 1/2 clients joined",
        ],
        "--node-rank=$LAB_HOST --master-addr=host0 --master-port=4000": [
            "Gloo connectFullMesh failed with .* Connect timeout"
        ],
    }
    for options, texts in ends.items():
        words = f"{common} {options} '{tmp_path}/join.py'"
        result = lab("--", "sh", "-c", words)
        assert result.returncode == 1
        found = [bool(re.search(text, result.output)) for text in texts]
        assert found == [True] * len(texts), result.output
    assert len(ends) == 2


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
        # Without the variable gloo takes the interface that the host's name leads to,
        # which on Debian is the loopback interface.
        "by name": f"unset GLOO_SOCKET_IFNAME; {common} {tail}",
        "name of the loopback interface": "unset GLOO_SOCKET_IFNAME; umount /etc/hosts;"
        # torchrun looks localhost up as well, and ends if it is not there.
        f"{{ echo 127.0.0.1 localhost; echo 127.0.1.1 host$LAB_HOST; }} "
        f"> '{tmp_path}'/hosts$LAB_HOST; "
        f"unshare --mount sh -c \"mount --bind '{tmp_path}'/hosts$LAB_HOST /etc/hosts; "
        f"timeout 60 {common} --rdzv-conf=is_host=$((1 - LAB_HOST)) "
        f'--local-addr=10.0.0.$((LAB_HOST + 1)) {tail}"',
    }
    with ThreadPoolExecutor(len(cases)) as pool:
        started = [
            pool.submit(lab, "--", "sh", "-c", words) for words in cases.values()
        ]
    results = {name: one.result() for name, one in zip(cases, started, strict=True)}
    assert len(results) == 6
    assert results["no is_host"].returncode == 1
    assert "gaierror" in results["no is_host"].output
    assert results["no local-addr"].returncode == 1
    lost = r"network addresses of \(box0, \d+\) cannot be retrieved"
    assert re.search(lost, results["no local-addr"].output), results["no local-addr"]
    assert results["wrong interface"].returncode == 1
    assert "Unable to find address for: eth9" in results["wrong interface"].output
    for name in ("names", "by name"):
        assert results[name].returncode == 0, results[name].output
        assert "check: 2 rank(s) hold the same bits" in results[name].output
    alone = results["name of the loopback interface"]
    assert alone.returncode == 1, alone.output
    assert "device: cpu with gloo" not in alone.output
    assert "Connection refused, remote=[127.0.1.1]:" in alone.output, alone.output


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    module = load_chapter("03_ddp_torchrun/cluster")["who_is_where"]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def places(*numbers: tuple[int, int, int]) -> list[dict[str, int]]:
        return [dict(zip(names, (*three, 3, 2), strict=True)) for three in numbers]

    # Two ranks on one node and one on another, as when nodes have unequal numbers.
    good = places((0, 0, 0), (1, 1, 0), (2, 0, 1))
    good[2]["LOCAL_WORLD_SIZE"] = 1
    assert module.fit_together(good)
    drawn = module.draw_nodes(good)
    assert len(drawn) == 4 and {len(line) for line in drawn[:3]} == {66}
    assert drawn[2].count("rank 1 ") == 2  # its rank, and its local rank
    assert not module.fit_together(places((0, 0, 0), (1, 1, 0), (1, 0, 1)))
    assert not module.fit_together(places((0, 0, 0), (1, 0, 0), (2, 0, 1)))


def download_slowly(folder: str, is_shared: bool) -> tuple[list[int], int]:
    """Be one of two ranks on one of two nodes; say who downloaded, and what it saw."""
    rank, done = dist.get_rank(), list[int]()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    place = Path(folder, "shared" if is_shared else f"node {rank // 2}")

    def download() -> None:
        time.sleep(0.3)
        done.append(rank)
        place.write_text("weights")

    once_per_disk = load_chapter("03_ddp_torchrun/cluster")[
        "who_is_where"
    ].once_per_disk
    once_per_disk(download, is_shared)
    return done, len(place.read_text())  # it is there for those who waited, too


@pytest.mark.parametrize(("is_shared", "first"), [(False, [0, 2]), (True, [0])])
def test_one_rank_downloads_to_each_disk_and_the_others_wait(
    worker_pool: WorkerPool, tmp_path: Path, is_shared: bool, first: list[int]
) -> None:
    found = worker_pool.run(download_slowly, str(tmp_path), is_shared, world_size=4)
    assert [done for done, _ in found] == [
        [rank] if rank in first else [] for rank in range(4)
    ]
    assert [seen for _, seen in found] == [len("weights")] * 4
    assert len(list(tmp_path.iterdir())) == len(first)


def everybody_downloads() -> Any:
    """Run the lesson with a download on every rank; return how it ends."""
    module = load_chapter("03_ddp_torchrun/cluster")["who_is_where"]
    with (
        mock.patch.dict(os.environ, GROUP_RANK="0"),
        mock.patch.object(module, "once_per_disk", lambda download, _: download()),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit) as end,
    ):
        run_lesson("03_ddp_torchrun/cluster", "who_is_where")
    return end.value.code


def test_lesson_notices_that_every_rank_downloads(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(everybody_downloads) == [1, 1]


def test_ranks_for_each_device_are_refused_or_those_of_the_cores(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # Where there is no GPU, or none that works. With `auto` nobody notices.
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    with pytest.raises(ValueError, match="Cuda is not available"):
        determine_local_world_size("gpu")
    # Not those of the machine: as many as this process may use.
    for cores in ({0}, {4, 5, 6}):
        with mock.patch.object(
            os, "sched_getaffinity", lambda _, c=cores: c, create=True
        ):
            assert determine_local_world_size("auto") == len(cores)
    # It is logged, below the level that is shown.
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


# --- Slurm. ----------


SLURM = ROOM / "slurm.sbatch"

# What Slurm's commands do, as far as the script can tell. `srun` starts one task on
# each node; since 22.05 it gives a task one core, if not told by a variable of its own.
STAND_INS = {
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] || exit 9\n'
    'printf "localhost\\nx\\n"',
    "srun": '[ "$1" = --kill-on-bad-exit=1 ] || exit 9; shift\n'
    "export SLURM_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-1}\n"
    "for node in 0 1; do\n"
    '    SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &\n'
    'done\nwait -n && wait -n && echo "both tasks have ended"',
}


def is_free(job: int) -> bool:
    """Tell whether the port that slurm.sbatch makes of a job's number is free."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 20000 + job)) != 0


def asked_for(text: str) -> dict[str, str]:
    """Read what a batch script asks Slurm for; the last of two equal options counts."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))


def submit(
    folder: Path, text: str, words: list, torchrun: str = "", **more: str
) -> Result:
    """Run a batch script as `sbatch` would, with the variables that it would set."""
    stand_ins = STAND_INS | ({"torchrun": torchrun} if torchrun else {})
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    asked = asked_for(text)
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("2", "1")
    # The script makes a port of the job's number: take a number whose port is free.
    job = next(number for number in random.sample(range(9000), 100) if is_free(number))
    variables = {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NUM_NODES": asked["nodes"],
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
        **more,
    }
    if gpus := asked.get("gpus-per-node"):
        variables["SLURM_GPUS_ON_NODE"] = gpus
    environment = clean_environment(**variables)
    del environment["OMP_NUM_THREADS"]
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    script = folder / "job.sbatch"
    script.write_text(text)
    result = run(["bash", script, *words], env=environment, cwd=folder)
    assert result.returncode == 0, result.output
    assert "both tasks have ended" in result.stdout
    return result


@pytest.mark.slow
def test_slurm_script_starts_one_agent_on_each_node(tmp_path: Path) -> None:
    script = [ROOM / "who_is_where.py"]
    result = submit(tmp_path, SLURM.read_text(), script, RANKS="1")
    assert "world: 2 ranks in one process group" in result.stdout
    assert "│ rank 0   local rank 0        │  │ rank 1   local rank 0" in result.stdout
    assert "rank 0: check: 2 ranks are numbered from 0" in result.stdout
    # Both nodes are called localhost here, and each has a folder of its own.
    logs = sorted(tmp_path.glob("logs/*/localhost/*/attempt_0/0/stdout.log"))
    assert len(logs) == 2
    said = sorted(path.read_text().count("check: 2 ranks") for path in logs)
    assert said == [0, 1]


@pytest.mark.parametrize(
    ("with_gpus", "more", "ranks", "threads"),
    [
        (False, {}, 2, 4),
        (False, {"RANKS": "4"}, 4, 2),
        (False, {"RANKS": "16"}, 16, 1),
        (True, {}, 8, 8),
        (True, {"RANKS": "1"}, 1, 64),
    ],
)
def test_slurm_script_starts_as_many_ranks_as_it_asks_for(
    tmp_path: Path, with_gpus: bool, more: dict[str, str], ranks: int, threads: int
) -> None:
    text = SLURM.read_text()
    assert text.count("\n##SBATCH --") == 2
    if with_gpus:  # as the comment above these two lines says
        text = re.sub(r"^##(SBATCH --(gpus|cpus))", r"#\1", text, flags=re.M)
        assert "##SBATCH" not in text
        assert asked_for(text)["gpus-per-node"] == "8"
    say = 'echo "$OMP_NUM_THREADS of $SLURM_CPUS_PER_TASK | $*"'
    result = submit(tmp_path, text, ["my.py", "--a=b c"], torchrun=say, **more)
    said = sorted(line for line in result.stdout.splitlines() if " | " in line)
    assert len(said) == 2
    for node, line in enumerate(reversed(said)):  # is_host=0 sorts before is_host=1
        assert line.startswith(f"{threads} of {asked_for(text)['cpus-per-task']} | ")
        assert f" --nnodes=2 --nproc-per-node={ranks} --rdzv-backend=c10d " in line
        assert f"--rdzv-conf=is_host={1 - node},join_timeout=300 " in line
        assert re.search(r"--rdzv-endpoint=localhost:2\d{4} ", line)
        assert re.search(r" --log-dir=logs/\d+/localhost --tee=3 ", line)
        signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        assert line.endswith(
            f" --local-addr=localhost --signals-to-handle={signals}"
            " --shutdown-timeout=100 my.py --a=b c"
        )


REHEARSE = ROOM / "rehearse.sh"


def rehearse(folder: Path, torchrun: str, **more: str) -> Result:
    """Rehearse slurm.sbatch with a stand-in for torchrun."""
    stand_in = folder / "torchrun"
    stand_in.write_text(f"#!/bin/bash\n{torchrun}\n")
    stand_in.chmod(0o755)
    environment = clean_environment(RANKS="1", **more)
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    words = [REHEARSE, SLURM, "my.py", "--checkpoint=my.pt"]
    return run(["bash", *words], env=environment, cwd=folder)


def test_rehearsed_job_starts_on_both_nodes_and_again_when_told(tmp_path: Path) -> None:
    body = 'echo "task | $*"\n[ -e once ] || touch my.pt.requeue\nsleep 1\ntouch once'
    result = rehearse(tmp_path, body)
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[2] == "rehearse: queued again" and len(lines) == 5
    for pair in (lines[:2], lines[3:]):
        second, first = sorted(pair, key=lambda line: "is_host=1" in line)
        assert " --nnodes=2 --nproc-per-node=1 " in first and "is_host=0" in second
        assert first.endswith(" my.py --checkpoint=my.pt")
        assert " --local-addr=localhost " in first
        assert " --local-addr=127.0.0.1 " in second
        port = r"--rdzv-endpoint=localhost:(2\d{4}) "
        assert re.findall(port, first) == re.findall(port, second) != []


def test_rehearsed_time_limit_is_a_signal_to_both_nodes(tmp_path: Path) -> None:
    # The second time there is no limit left to wait for.
    body = """[ -e node0 ] && [ -e node1 ] && exit
stop() {
    touch my.pt.requeue "node$SLURM_NODEID"
    until [ -e node0 ] && [ -e node1 ]; do sleep 0.05; done
    exit 1
}
trap stop USR1
for _ in {1..100}; do sleep 0.1; done"""
    result = rehearse(tmp_path, body, LIMIT="1")
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines() == ["rehearse: queued again"]
    assert (tmp_path / "node0").exists() and (tmp_path / "node1").exists()


@pytest.mark.parametrize("words", [[], ["nothing.sbatch", "my.py"]])
def test_rehearsal_without_a_job_script_is_refused_in_a_line(words: list[str]) -> None:
    result = run(["bash", REHEARSE, *words])
    line = f"rehearse.sh: no job script {''.join(words[:1])!r}; see its first lines\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


def test_rehearsed_node_that_fails_ends_the_other(tmp_path: Path) -> None:
    body = '[ "$SLURM_NODEID" = 0 ] || exit 3\nsleep 1\nexec sleep 60'
    begin = time.monotonic()
    assert rehearse(tmp_path, body).returncode == 3
    assert time.monotonic() - begin < 30


# --- One line for each mistake. ----------


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        ("lab", ["--link-rate=fast", "--", "x"], "'fast' is no rate from 1mbit"),
        ("lab", ["--link-rate=1kbit", "--", "x"], "'1kbit' is no rate from 1mbit"),
        ("lab", ["--hosts=0", "--", "x"], "--hosts must be 1 to 16, not 0"),
        ("lab", ["--down-host=2", "--", "x"], "--down-host must be 0 to 1, not 2"),
        ("lab", ["--", "no.py"], "there is no script no.py"),
        ("lab", [], "the following arguments are required: command"),
        ("lab", [str(TRAIN), "--max-steps=2"], "for the hosts stands after --"),
        ("lab", ["--up-after=-1", "--", "x"], "--up-after 0 or more"),
        ("with_etcd", ["no.py"], "expected a script to run, not ['no.py']"),
        ("with_etcd", [], "expected a script to run, not []"),
        ("who_is_where", [], "start it with torchrun --nproc-per-node=2"),
        ("can_reach", ["localhost"], "expected HOST:PORT, not 'localhost'"),
        ("can_reach", ["localhost:99999"], "expected HOST:PORT, not 'localhost:99999'"),
        ("can_reach", ["--listen=-1"], "port must be 0-65535"),
        ("can_reach", ["a..b:4000"], "no address is known for a..b"),
        ("can_reach", ["--listen=0", "--seconds=0.5"], "0 of 1 have called in time"),
        ("can_reach", [], "expected HOST:PORT, not ''; or --listen"),
    ],
)
def test_a_mistake_is_one_line(script: str, words: list[str], line: str) -> None:
    result = python(ROOM / f"{script}.py", *words)
    assert result.returncode == 2
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"{script}.py: ")
    assert line in said


def test_every_caller_is_answered_at_every_address_of_the_host() -> None:
    script = ROOM / "can_reach.py"
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
        said, _ = listener.communicate(timeout=120)
    finally:
        listener.kill()
    assert len(answers) == len(hosts) >= 2
    end = f"check: reached port {port}, where can_reach.py listens\n"
    assert all(answer.endswith(end) for answer in answers)
    assert said.count(" has reached us\n") == len(hosts)
    assert said.endswith(f"\ncheck: answered {len(hosts)} of {len(hosts)}\n")
    assert listener.returncode == 0


def test_an_address_is_shown_as_ip_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    # A host of the laboratory has this second address, and the first may be refused.
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as one:
        answered = one.submit(lambda: server.accept()[0].close())
        can_reach = load_chapter("03_ddp_torchrun/cluster")["can_reach"]
        can_reach.call("::ffff:127.0.0.1", server.getsockname()[1], 5)
        answered.result()
    words = capsys.readouterr().out.splitlines()[0].split()
    assert words[:2] + words[-2:] == ["from", "127.0.0.1", "to", "127.0.0.1"]
    assert words[2] == ("(lo)" if shutil.which("ip") else "(an")


@pytest.mark.parametrize("greeting", [b"SSH-2.0\n", b""])
def test_whoever_else_answers_is_no_listener_of_ours(
    capsys: pytest.CaptureFixture[str], greeting: bytes
) -> None:
    def answer() -> None:
        with server.accept()[0] as caller:
            caller.sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as one:
        answered = one.submit(answer)
        port = server.getsockname()[1]
        can_reach = load_chapter("03_ddp_torchrun/cluster")["can_reach"]
        can_reach.call("127.0.0.1", port, 5)
        answered.result()
    end = f"check: reached port {port}, where something else listens\n"
    assert capsys.readouterr().out.endswith(end)


def test_an_address_that_no_host_has(laboratory: None) -> None:
    # The system takes three seconds to find that out.
    script = f"exec '{sys.executable}' '{ROOM}/can_reach.py' 10.0.0.9:4000 --seconds"
    result = lab("--", "sh", "-c", f'{script}="$((1 + LAB_HOST * 9))"')
    assert result.returncode == 1
    where = "can_reach.py: 10.0.0.9:4000 (10.0.0.9)"
    assert f"host0 | {where} does not answer: a firewall, or" in result.output
    assert f"host1 | {where} cannot be reached: No route to host" in result.output


def test_a_port_where_nobody_listens_may_be_behind_a_firewall() -> None:
    connect = load_chapter("03_ddp_torchrun/cluster")["can_reach"].connect
    port = free_port()
    with pytest.raises(OSError) as refusal:
        connect("127.0.0.1", port, 0)
    where = f"127.0.0.1:{port} (127.0.0.1)"
    why = "refuses: nobody listens at that port, or a firewall rejects"
    assert str(refusal.value) == f"{where} {why}"


def test_port_of_another_job_is_taken() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        result = python(ROOM / "can_reach.py", f"--listen={port}")
    assert result.returncode == 2
    said = "can_reach.py: Address already in use (while attempting to bind on address"
    assert result.stderr.startswith(said) and str(port) in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variable", "value", "is_there"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("GLOO_SOCKET_IFNAME", "lo,eth9", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=lo", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "eth9", False),
        ("NCCL_SOCKET_IFNAME", "^eth9,docker", True),
        ("NCCL_SOCKET_IFNAME", "", True),
    ],
)
def test_interfaces_are_named_as_each_backend_takes_them(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_there: bool
) -> None:
    check = load_chapter("03_ddp_torchrun/cluster")["can_reach"].check_interface
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    monkeypatch.setenv(variable, value)
    with (
        contextlib.nullcontext()
        if is_there
        else pytest.raises(OSError, match="lo, ib0")
    ):
        check(variable)


def test_a_lab_finds_tools_that_only_root_has_on_the_path(laboratory: None) -> None:
    environment = clean_environment()
    folders = environment["PATH"].split(os.pathsep)
    ours = [folder for folder in folders if not folder.rstrip("/").endswith("sbin")]
    environment["PATH"] = os.pathsep.join(ours)
    result = lab("--", "true", env=environment)
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("check: the command ended on")


def test_a_lab_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    environment = clean_environment(PATH=str(tmp_path))
    result = run([sys.executable, LAB, "--", "true"], env=environment)
    assert result.returncode == 2
    (said,) = result.stderr.splitlines()
    missing = "lab.py: not found: unshare, nsenter, setpriv"
    assert said.startswith(missing if sys.platform == "linux" else "lab.py: a laborato")


def listeners_of(store: str, endpoint: str) -> tuple[int, str]:
    """Meet alone; return at how many ports this process listens, and the second end."""
    from torch.distributed.elastic import rendezvous

    def meet(endpoint: str) -> None:
        words: dict[str, Any] = {"run_id": "job", "store_type": store}
        sizes: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1}
        parameters = rendezvous.RendezvousParameters("c10d", endpoint, **words, **sizes)
        handler = rendezvous.registry.get_rendezvous_handler(parameters)
        handlers.append(handler)
        handler.next_rendezvous()

    handlers: list[Any] = []
    listening = load_chapter(str(ROOM.relative_to(ROOT)))["listening"].listeners
    before = len(listening().get(os.getpid(), []))
    meet(endpoint)
    count = len(listening().get(os.getpid(), [])) - before
    handlers.pop().shutdown()
    try:
        meet(endpoint)
    except rendezvous.RendezvousClosedError as error:
        return count, type(error).__name__
    handlers.pop().shutdown()
    return count, ""


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss")
def test_a_file_in_place_of_the_agent_s_store_leaves_one_that_listens(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    ends = worker_pool.run(listeners_of, "tcp", "localhost:0", world_size=1)
    assert ends == [(2, "")]
    # A file is still there when the job is over, and says that it is.
    ends = worker_pool.run(listeners_of, "file", str(tmp_path / "meet"), world_size=1)
    assert ends == [(1, "RendezvousClosedError")]


def test_etcd_that_is_not_running_is_reported_at_once() -> None:
    pytest.importorskip("etcd", reason="python-etcd is not installed")
    conf = ["--nnodes=1:4", "--rdzv-backend=etcd-v2", "--rdzv-id=job"]
    (result,) = agents([*conf, f"--rdzv-endpoint=localhost:{free_port()}"])
    assert result.returncode == 1
    assert "The connection to etcd has failed" in result.stderr
    assert result.seconds < 60  # it takes one, where other stores are waited for


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_of_another_address_serves_both_backends(
    backend: str, tmp_path: Path
) -> None:
    pytest.importorskip("etcd", reason="python-etcd is not installed")
    if not shutil.which("etcd"):
        pytest.skip("etcd is not installed")
    clients, peers = free_port(), free_port()
    # As another host would see it: it listens at 127.0.0.2 too, and says so.
    words = ["etcd", f"--data-dir={tmp_path / 'data'}", "--enable-v2"]
    words += [f"--listen-client-urls=http://0.0.0.0:{clients}"]
    words += [f"--advertise-client-urls=http://127.0.0.2:{clients}"]
    for at in ("listen", "initial-advertise"):
        words += [f"--{at}-peer-urls=http://127.0.0.1:{peers}"]
    words += [f"--initial-cluster=default=http://127.0.0.1:{peers}"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(words, stdout=log, stderr=log) as server,
    ):
        try:
            ask = load_chapter("03_ddp_torchrun/cluster")["with_etcd"].ask
            give_up = time.monotonic() + 20
            while time.monotonic() < give_up:
                with contextlib.suppress(OSError):
                    ask(f"127.0.0.2:{clients}", "/")
                    break
                time.sleep(0.1)
            options = [f"--rdzv-backend={backend}", "--rdzv-id=job", "--nnodes=2"]
            options += [f"--rdzv-endpoint=127.0.0.2:{clients}"]
            first, second = agents(options, options)
        finally:
            server.kill()
    assert first.returncode == second.returncode == 0, (first, second)
    check = "check: 2 rank(s) hold the same bits"
    assert (check in first.stdout) is not (check in second.stdout)


@pytest.mark.slow
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
        [sys.executable, ROOM / "with_etcd.py", sleeper],
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
        status = process.wait(timeout=120)
        assert wait_until_none("ETCD_TEST", mark) == []
    finally:
        for left in processes_with("ETCD_TEST", mark):
            left.kill()
        process.communicate()
    assert status == (-9 if name == "SIGKILL" else 130)
