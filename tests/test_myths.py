"""What MYTHS.md says and no chapter's own test shows."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, clean_environment, free_port, python
from worker_pool import WorkerPool

LAB = ROOT / "03_ddp_torchrun" / "lab.py"

# --- 01: collectives. ----------


def gather_objects_by(keyword: str) -> tuple[str, Any]:
    """Gather each rank's number on rank 0; return the error's text and the list."""
    is_rank_zero = dist.get_rank() == 0
    gathered = [None] * dist.get_world_size() if is_rank_zero else None
    # What a type checker would refuse is what the test is about.
    gather: Any = dist.gather_object
    try:
        gather(dist.get_rank(), **{keyword: gathered})
    except TypeError as error:
        return str(error), gathered
    return "", gathered


def test_gather_object_has_another_keyword(worker_pool: WorkerPool) -> None:
    refused = worker_pool.run(gather_objects_by, "obj_gather_list")
    message = "gather_object() got an unexpected keyword argument 'obj_gather_list'"
    assert refused == [(message, [None, None]), (message, None)]
    accepted = worker_pool.run(gather_objects_by, "object_gather_list")
    assert accepted == [("", [0, 1]), ("", None)]


def sums_through_contiguous() -> dict[str, list[list[float]]]:
    """All-reduce ``x.contiguous()``; return ``x`` afterwards, for three kinds of use.

    Each rank's ``x`` is [[1, 2], [3, 4]] times the power of ten of its rank.
    """
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * 10 ** dist.get_rank()
    contiguous = values.clone()
    # The same values, columns first.
    transposed, copied_back = [values.t().contiguous().t() for _ in range(2)]
    dist.all_reduce(contiguous.contiguous())
    dist.all_reduce(transposed.contiguous())
    buffer = copied_back.contiguous()
    dist.all_reduce(buffer)
    copied_back.copy_(buffer)
    return {
        "contiguous": contiguous.tolist(),
        "transposed": transposed.tolist(),
        "copied back": copied_back.tolist(),
    }


def test_all_reduce_of_a_contiguous_copy_leaves_the_tensor_alone(
    worker_pool: WorkerPool,
) -> None:
    by_rank = worker_pool.run(sums_through_contiguous, world_size=3)
    total = [[111.0, 222.0], [333.0, 444.0]]
    assert [found["contiguous"] for found in by_rank] == [total] * 3
    assert [found["transposed"] for found in by_rank] == [
        [[1.0, 2.0], [3.0, 4.0]],
        [[10.0, 20.0], [30.0, 40.0]],
        [[100.0, 200.0], [300.0, 400.0]],
    ]
    assert [found["copied back"] for found in by_rank] == [total] * 3


# --- 03: several machines. ----------

TWO_AGENTS = """
import socket, subprocess, sys, time

# The rank of an agent that is killed is ended by nobody: it has to look after itself.
RANK = '''
import os, time
print("node", os.environ["GROUP_RANK"], flush=True)
agent = os.getppid()
while os.getppid() == agent:
    time.sleep(0.1)
'''

def start(address, is_host):
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    conf = f"--rdzv-conf=is_host={is_host},keep_alive_interval=1"
    command = [sys.executable, "-m", "torch.distributed.run", *words, conf]
    command += [f"--local-addr={address}", "--no-python", sys.executable, "-c", RANK]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

port = int(sys.argv[1])
first = start("127.0.0.2", 1)
while True:  # until the first one has opened its store
    try:
        socket.create_connection(("localhost", port)).close()
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
second = start("127.0.0.1", 0)
print("started first:", first.stdout.readline().strip(), flush=True)
print("started second:", second.stdout.readline().strip(), flush=True)
first.kill()
killed = time.monotonic()
print("status of the second:", second.wait(), flush=True)
print("seconds:", time.monotonic() - killed, flush=True)
first.wait()
"""


@pytest.fixture(scope="module")
def two_agents() -> tuple[str, str]:
    """Return what two agents and their driver said; the first, with the store, died."""
    result = python("-c", TWO_AGENTS, free_port(), timeout=100)
    assert result.returncode == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.slow
def test_c10d_numbers_the_hosts_by_their_addresses(
    two_agents: tuple[str, str],
) -> None:
    lines = two_agents[0].splitlines()
    # The one with the lower address, although it came second and keeps no store.
    assert lines[:2] == ["started first: node 1", "started second: node 0"]


@pytest.mark.slow
def test_job_ends_with_the_host_of_its_c10d_store(two_agents: tuple[str, str]) -> None:
    output, errors = two_agents
    assert "status of the second: 1\n" in output
    assert "RendezvousConnectionError: The connection to the C10d store has" in errors
    (seconds,) = re.findall(r"^seconds: ([\d.]+)$", output, re.M)
    # A heartbeat each second finds it. The default is five seconds.
    assert float(seconds) < 30


HELLO = 'import os; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "patience", "status", "texts"),
    [
        ("10.0.0.1", 60, 0, ["host0 | rank 0 of 2", "host1 | rank 1 of 2"]),
        (
            "10.0.0.$((LAB_HOST + 1))",
            2,
            1,
            [
                "host0 | torch.distributed.DistStoreError: Timed out after",
                "1/2 clients joined",
                "host1 | torch.distributed.DistNetworkError: The client socket has "
                "timed out after 2000ms while trying to connect to (10.0.0.2, 4000)",
            ],
        ),
    ],
    ids=["that of host 0", "each host its own"],
)
def test_master_addr_is_that_of_host_0_on_every_host(
    laboratory: None, address: str, patience: int, status: int, texts: list[str]
) -> None:
    command = (
        f"torchrun --nnodes=2 --node-rank=$LAB_HOST --master-addr={address} "
        f"--master-port=4000 --rdzv-conf=timeout={patience} --no-python "
        f"python -c '{HELLO}'"
    )
    result = python(LAB, "--", "sh", "-c", command, timeout=120)
    assert result.returncode == status, result.output
    assert [text for text in texts if text not in result.output] == [], result.output
    assert ("rank 0 of 2" in result.output) is (status == 0)


# --- 04: steps on a server. ----------

TWO_TRAINERS = """
import sys, threading
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

class Unknown(torch.optim.SGD):
    '''SGD under a name for which DistributedOptimizer has no compiled copy.'''

def train(optimizer_class, table, ready):
    optimizer = DistributedOptimizer(optimizer_class, [table], lr=1.0)
    ready.wait()
    for _ in range(STEPS):
        with dist_autograd.context() as context:
            # Each step adds 1 to every entry, so that the sum of all is known.
            dist_autograd.backward(context, [-table.to_here().sum()])
            optimizer.step(context)

STEPS, ROUNDS = 50, {torch.optim.SGD: 100, Unknown: 5}
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
rpc.init_rpc("server", rank=0, world_size=1, rpc_backend_options=options)
for optimizer_class, rounds in ROUNDS.items():
    lost = 0
    for tried in range(1, rounds + 1):
        table = torch.nn.Parameter(torch.zeros(1_000_000))
        common = (optimizer_class, rpc.RRef(table), threading.Barrier(2))
        trainers = [threading.Thread(target=train, args=common) for _ in range(2)]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
        assert 1 <= table.min() and table.max() <= 2 * STEPS
        lost += int((table < 2 * STEPS).sum())
        if lost:
            break
    print(optimizer_class.__name__, tried, lost, flush=True)
rpc.shutdown()
"""


@pytest.mark.slow
def test_steps_of_two_trainers_undo_each_other_without_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous"
    result = python("-W", "ignore", "-c", TWO_TRAINERS, path, timeout=120)
    # No call has failed: nothing but the table itself tells of the loss.
    assert result.returncode == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [words[0] for words in lines] == ["SGD", "Unknown"]
    # The compiled SGD takes no lock. When it loses something is a matter of luck: here
    # it is nearly always the first of a hundred rounds.
    assert int(lines[0][2]) > 0
    # A class that is not compiled takes one.
    assert lines[1][1:] == ["5", "0"]


# --- 05: ZeRO. ----------

FOUR_STAGES = """
import deepspeed, deepspeed.ops
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # compile nothing
STEPS = 10

def train(stage, bf16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    adam = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": adam,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage},
        },
    )[0]
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    inputs = inputs.to(torch.bfloat16 if bf16 else torch.float32)
    for _ in range(STEPS):
        loss = ((engine(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        engine.backward(loss)
        engine.step()
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = {int(s["step"]) for s in optimizer.state.values() if "step" in s}
    print("stage", stage, loss.item(), *steps, flush=True)

for bf16 in (False, True):
    for stage in range(4):
        train(stage, bf16)
"""


@pytest.mark.slow
def test_all_stages_agree_in_float32_and_not_in_bfloat16(tmp_path: Path) -> None:
    script = tmp_path / "four_stages.py"
    script.write_text(FOUR_STAGES)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment = clean_environment(**ranks, DS_ACCELERATOR="cpu")
    result = python(script, env=environment, timeout=120)
    assert result.returncode == 0, result.output
    lines = re.findall(r"^stage (\d) ([\d.]+) (\d+)$", result.stdout, re.M)
    assert [int(stage) for stage, _, _ in lines] == [0, 1, 2, 3] * 2
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[1:4] == pytest.approx(losses[:1] * 3, rel=1e-6)
    assert losses[5:7] == losses[6:8]
    assert abs(losses[4] / losses[5] - 1) > 1e-2
    # In bfloat16, stage 0 gives Adam one step more: with gradients of zero, to make its
    # state. So its bias correction is that of a later step.
    assert [int(steps) for _, _, steps in lines] == [10, 10, 10, 10, 11, 10, 10, 10]
