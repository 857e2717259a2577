"""What MYTHS.md says and no chapter's own test shows."""

import importlib.util
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDescGenerator
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.run import get_args_parser
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from launch import ROOT, clean_environment, deepspeed, free_port, python, run
from scripts import load_chapter
from worker_pool import WorkerPool

LAB = ROOT / "03_ddp_torchrun" / "cluster" / "lab.py"

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
    # Python 3.13 goes on: "Did you mean 'object_gather_list'?"
    assert [text[: len(message)] for text, _ in refused] == [message] * 2
    assert [gathered for _, gathered in refused] == [[None, None], None]
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


class AnotherVendor(NamedTuple):
    """How PyTorch calls a backend that no package has registered."""

    error: str
    warnings: list[str]


def group_of_another_vendor(backend: str) -> AnotherVendor:
    """Ask for a backend that comes with a package of its own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            dist.new_group(backend=backend)
        except AssertionError as error:
            return AnotherVendor(str(error), [str(one.message) for one in caught])
    return AnotherVendor("", [])


def test_hccl_is_unknown_without_its_package(worker_pool: WorkerPool) -> None:
    ((error, warned),) = worker_pool.run(group_of_another_vendor, "hccl", world_size=1)
    assert error == "Unknown backend type hccl"
    assert any("Device capability of hccl unknown" in text for text in warned)


# --- 02 and 03: data. ----------

VOCABULARY = 16


class Drawn(Dataset):
    """Eight tokens at each index, drawn anew whenever one asks, or once for all."""

    def __init__(self, is_anew: bool, length: int) -> None:
        """Draw all samples, for the case that they are to stay."""
        self.is_anew = is_anew
        self.samples = torch.randint(VOCABULARY, (length, 8))

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the tokens of one sample."""
        if self.is_anew:
            return torch.randint(VOCABULARY, (8,))
        return self.samples[index]


class DrawnByIndex(Drawn):
    """Eight tokens that the index alone decides, whenever and wherever one asks."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the tokens of one sample."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (8,), generator=generator)


def seen_by_this_rank(dataset_class: Any, seed_by_rank: bool) -> list[Any]:
    """Return the samples of this rank's shard, in two passes."""
    torch.manual_seed(dist.get_rank() if seed_by_rank else 0)
    dataset = dataset_class(True, length=8)
    shard = list(DistributedSampler(dataset, shuffle=False))
    return [[dataset[index].tolist() for index in shard] for _ in range(2)]


def test_index_names_a_sample_only_if_it_seeds_the_draw(
    worker_pool: WorkerPool,
) -> None:
    for dataset_class, seed_by_rank, is_kept, is_alike in (
        (Drawn, True, False, False),
        (Drawn, False, False, True),  # both ranks train on the same samples
        (DrawnByIndex, True, True, False),
    ):
        zero, one = worker_pool.run(seen_by_this_rank, dataset_class, seed_by_rank)
        assert len(zero[0]) == len(one[0]) == 4
        assert [rank[0] == rank[1] for rank in (zero, one)] == [is_kept] * 2
        assert (zero == one) is is_alike


def losses_on(is_anew: bool, dataset_class: Any = Drawn) -> tuple[bool, list[float]]:
    """Predict next tokens by a table under DDP, 40 epochs of four steps.

    Returns:
        Whether this rank's sample of one index is the same in two epochs, and the mean
        loss over ranks in each step.
    """
    torch.manual_seed(dist.get_rank() if is_anew else 0)
    dataset = dataset_class(is_anew, length=64)
    sampler = DistributedSampler(dataset, shuffle=False)
    model = DistributedDataParallel(nn.Embedding(VOCABULARY, VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first, losses = [], []
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for step, tokens in enumerate(DataLoader(dataset, 8, sampler=sampler)):
            if step == 0:
                first.append(tokens[0])
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
            losses.append(mean.item())
    return all(torch.equal(first[0], one) for one in first), losses


def test_samples_drawn_anew_stay_above_the_loss_of_a_guess(
    worker_pool: WorkerPool,
) -> None:
    guess = math.log(VOCABULARY)
    anew = worker_pool.run(losses_on, True)
    once = worker_pool.run(losses_on, False)
    assert len(anew) == len(once) == 2
    for is_same, losses in anew:
        assert not is_same and len(losses) == 160
        # It falls at first, to the guess from above, and then no further.
        late = sum(losses[80:]) / 80
        assert losses[0] - 0.2 > late > guess
    for is_same, losses in once:
        assert is_same and losses[-1] < guess - 0.2


def test_samples_drawn_anew_teach_a_rule(worker_pool: WorkerPool) -> None:
    ruled = worker_pool.run(losses_on, True, DrawnByARule)
    assert len(ruled) == 2
    for is_same, losses in ruled:
        assert not is_same and losses[0] > math.log(VOCABULARY)
        assert losses[-1] < 0.1


class DrawnByARule(Drawn):
    """A sequence at each index that is drawn anew, and follows one rule."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Count on, modulo the size of the vocabulary, from a number drawn."""
        return (super().__getitem__(index)[0] + torch.arange(8)) % VOCABULARY


def sent_in_a_step(samples: int) -> tuple[int, float | None]:
    """Return what DDP all-reduces, and TCP sends, for a step of all samples."""
    sent_bytes = load_chapter("03_ddp_torchrun/rules")["sent_bytes"]
    model = DistributedDataParallel(nn.Linear(100, 100))
    buckets = sent_bytes.note_buckets(model)
    shard = torch.ones(samples // dist.get_world_size(), 100)
    model(shard).sum().backward()  # DDP settles its buckets
    buckets.clear()
    sent = sent_bytes.sent_by_a_rank(lambda: model(shard).sum().backward())
    return sum(buckets), sent


def test_a_step_sends_gradients_and_no_samples(worker_pool: WorkerPool) -> None:
    few, many = (worker_pool.run(sent_in_a_step, n) for n in (8, 8_000))
    gradients = 4 * (100 * 100 + 100)
    # The samples of a rank have 1,600 bytes, then 1,600,000.
    found = few + many
    assert len(found) == 4 and {buckets for buckets, _ in found} == {gradients}
    for _, sent in found:
        # On two ranks each sends as much as it has; and messages have headers.
        assert sent is None or gradients <= sent < 1.1 * gradients


def test_port_0_is_chosen_by_the_system_and_told_to_nobody() -> None:
    host: Any = {"is_master": True, "wait_for_workers": False}
    store = dist.TCPStore("127.0.0.1", 0, **host)
    assert store.port > 0
    joined = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    joined.set("key", "value")
    assert store.get("key") == b"value"
    # What the other ranks of a job with MASTER_PORT=0 do.
    limit = timedelta(seconds=1)
    with pytest.raises(dist.DistError, match=r"127\.0\.0\.1, 0"):
        dist.TCPStore("127.0.0.1", 0, is_master=False, timeout=limit)


def test_decoder_only_models_of_hugging_face_shift_the_labels() -> None:
    # They want a copy of the inputs, where chapter 03's GPT wants the next tokens. So
    # do the decoders that are cut from an encoder-decoder.
    import transformers

    tokens, counted = torch.arange(12).view(2, 6), 0
    ends: Any = {"vocab_size": 16, "bos_token_id": None, "eos_token_id": None}
    widths: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1}
    configs = [
        transformers.GPT2Config(**ends, n_embd=8, n_layer=1, n_head=2),
        transformers.Qwen2Config(**ends, **widths, **heads),
    ]
    cut: Any = {"is_decoder": True, "decoder_layers": 1, "decoder_attention_heads": 2}
    cut |= {"vocab_size": 16, "d_model": 8, "decoder_ffn_dim": 8}
    for kind in (transformers.BartConfig, transformers.WhisperConfig):
        configs.append(kind(**cut, pad_token_id=0))
    # And one that is no such decoder; and BERT as a decoder, which shifts them.
    ant: Any = {"vocab_size": 16, "hidden_size": 8, "dim_head": 4, "dim_ff": 8}
    ant |= {"num_attention_heads": 2, "num_hidden_layers": 1, "prompt_length": 2}
    configs.append(transformers.CpmAntConfig(**ant, prompt_types=8, segment_types=8))
    bert: Any = {"is_decoder": True, "sep_token_id": None, "num_attention_heads": 2}
    configs.append(transformers.BertConfig(**ends, **widths, **bert))
    for config in configs:
        model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
        found = model(input_ids=tokens, labels=tokens)
        logits, labels = found.logits, tokens
        if counted in (0, 1, 5):
            logits, labels = logits[:, :-1], labels[:, 1:]
        due = cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(found.loss, due)
        counted += 1
    assert counted == 6


# --- 03: older texts. ----------


def test_torchrun_knows_no_master_address(capsys: pytest.CaptureFixture[str]) -> None:
    parser = get_args_parser()
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--master_address=10.0.0.1", "train.py"])
    assert end.value.code == 2
    words = "error: unrecognized arguments: --master_address=10.0.0.1"
    assert words in capsys.readouterr().err
    # An underscore is as good as a hyphen.
    for right in ("--master_addr=10.0.0.1", "--master-addr=10.0.0.1"):
        assert parser.parse_args([right, "train.py"]).master_addr == "10.0.0.1"


def test_c10d_has_a_port_of_its_own_only_if_told() -> None:
    assert c10d.DEFAULT_PORT == 29400
    with mock.patch.object(c10d, "DEFAULT_PORT", free_port()):
        stores: dict[str, list[Any]] = {
            endpoint: [
                c10d.create_backend(
                    RendezvousParameters("c10d", endpoint, "none", 1, 1)
                )[1]
                for _ in range(2)
            ]
            for endpoint in ("", "localhost:0")
        }
        found = {e: len({s.port for s in both}) for e, both in stores.items()}
    assert found == {"": 1, "localhost:0": 2}


def test_torchrun_s_options_stand_before_the_script() -> None:
    # Page 03's table says so: after it, they are the script's, and one rank is started.
    parsed = get_args_parser().parse_args(["minimal.py", "--nproc-per-node=2"])
    assert parsed.nproc_per_node == "1"
    assert parsed.training_script_args == ["--nproc-per-node=2"]
    assert "`--nproc-per-node=2` *before* the script's name" in (
        ROOT / "03_ddp_torchrun/README.md"
    ).read_text("utf-8")


MEET = """
import sys
from datetime import timedelta
import torch.distributed as dist

limit = timedelta(seconds=1)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for name in ("both", "ipv6"):
    print(name, file=sys.stderr, flush=True)
    try:
        dist.TCPStore(name, store.port, is_master=False, timeout=limit)
        print("joined", file=sys.stderr, flush=True)
    except dist.DistError as error:
        print(error, file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_name_that_leads_to_ipv6_where_there_is_none(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost both\nfd99::5 both\nfd99::5 ipv6\n")
    mount = f"mount --bind '{hosts}' /etc/hosts && ip link set lo up"
    # The right to do so is asked for in the same way as on the page.
    if (
        shutil.which("unshare") is None
        or run(["unshare", "-rmn", "sh", "-c", mount]).returncode
    ):
        pytest.skip("no laboratory here: a file cannot be mounted")
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    command = f"{mount} && exec '{sys.executable}' '{script}'"
    result = run(["unshare", "-rmn", "sh", "-c", command])
    assert result.returncode == 0, result.output
    both, ipv6 = result.stderr.partition("both\n")[2].split("\nipv6\n")
    # One of its two addresses answers: there is not a word about the other.
    assert "joined" in both and "failed to connect" not in both
    words = "[c10d] The client socket has failed to connect to"
    (first, *_) = [line for line in ipv6.splitlines() if words in line]
    assert first.endswith("(errno: 101 - Network is unreachable).")
    # torch 2.13.0 prints some other address in place of the right one.
    assert "fd99" not in first
    assert "The client socket has timed out after 1000ms" in ipv6


def test_torchelastic_is_in_pytorch_and_reads_no_home() -> None:
    assert importlib.util.find_spec("torchelastic") is None
    folder = Path(dist.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py")]
    assert len(sources) > 100
    assert any('"TORCHELASTIC_RUN_ID"' in source for source in sources)
    assert not any("TORCHELASTIC_HOME" in source for source in sources)


# --- 03: several machines. ----------


@pytest.mark.parametrize(
    ("named", "endpoint", "is_known"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("127.0.1.1", "10.0.0.1", False),  # as Debian sets /etc/hosts up
        ("192.168.0.1", "10.0.0.1", False),  # the other of two interfaces
        ("192.168.0.1", "here", True),  # the host's own name, wherever it leads
        ("192.168.0.1", "localhost", True),
    ],
)
def test_a_host_does_not_know_an_address_that_its_name_does_not_lead_to(
    monkeypatch: pytest.MonkeyPatch, named: str, endpoint: str, is_known: bool
) -> None:
    def look_up(name: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (named if name == "here" else name, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert _matches_machine_hostname(endpoint) is is_known


def test_c10d_sorts_names_and_addresses_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = _NodeDescGenerator()
    given = [generator.generate(f"10.0.0.{number}") for number in (9, 10)]
    assert [node.addr for node in sorted(given)] == ["10.0.0.10", "10.0.0.9"]
    # Without --local-addr it is the full name.
    monkeypatch.setattr(socket, "getfqdn", lambda: "host0.example.org")
    assert generator.generate().addr == "host0.example.org"


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
    result = python("-c", TWO_AGENTS, free_port())
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
    result = python(LAB, "--", "sh", "-c", command)
    assert result.returncode == status, result.output
    assert [text for text in texts if text not in result.output] == [], result.output
    assert ("rank 0 of 2" in result.output) is (status == 0)


# --- 06: FSDP. ----------


def moments_loaded_from_ddp() -> dict[str, tuple[int, int]]:
    """Load a plain AdamW's state into a sharded one; count moments that are right."""
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def new_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    plain = new_model()
    adam = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(3, 4)).sum().backward()
    adam.step()
    numbered, names = adam.state_dict(), [name for name, _ in plain.named_parameters()]
    named = {
        "state": {names[i]: state for i, state in numbered["state"].items()},
        "param_groups": [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in numbered["param_groups"]
        ],
    }
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    found, mesh = {}, init_device_mesh("cpu", (dist.get_world_size(),))
    for way, saved in (("numbers", numbered), ("names", named)):
        model: Any = fully_shard(new_model(), mesh=mesh)
        sharded = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            on_rank_0: Any = saved if dist.get_rank() == 0 else {}
            states.set_optimizer_state_dict(model, sharded, on_rank_0, options=options)
        right = [
            torch.equal(sharded.state[p]["exp_avg"].full_tensor(), state["exp_avg"])
            for p, state in zip(
                model.parameters(), numbered["state"].values(), strict=True
            )
            if "exp_avg" in sharded.state[p]
        ]
        found[way] = (sum(right), len(numbered["state"]))
    # Where every rank brings the whole, the numbers are missed.
    options, model = states.StateDictOptions(full_state_dict=True), new_model()
    fully_shard(model, mesh=mesh)
    sharded = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyError, match=r"state\.0\.step"):
        states.set_optimizer_state_dict(model, sharded, numbered, options=options)
    # Without options whole tensors become the state, and no step can be taken.
    for saved in (numbered, named):
        fully_shard(model := new_model(), mesh=mesh)
        sharded = torch.optim.AdamW(model.parameters())
        states.set_optimizer_state_dict(model, sharded, saved)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            sharded.step()
    return found


def test_numbered_optimizer_state_is_not_found_and_nobody_is_told(
    worker_pool: WorkerPool,
) -> None:
    found = worker_pool.run(moments_loaded_from_ddp)
    assert found == [{"numbers": (0, 4), "names": (4, 4)}] * 2


# --- 04: RPC. ----------


def cpu_time_while_idle(transports: list[str] | None) -> float:
    """Be alone in RPC for a second; return the seconds of all threads on a core."""
    import torch.distributed.rpc as rpc

    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/rpc", _transports=transports
        )
        with mock.patch.dict(os.environ, TP_SOCKET_IFNAME="lo"):
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        started = time.process_time()
        time.sleep(1)
        spent = time.process_time() - started
        rpc.shutdown()
    return spent


@pytest.mark.skipif(sys.platform != "linux", reason="its shared memory is Linux's")
def test_an_idle_rpc_process_keeps_a_core_busy_unless_over_tcp(
    worker_pool: WorkerPool,
) -> None:
    polling, waiting = (
        worker_pool.run(cpu_time_while_idle, transports, world_size=1)[0]
        for transports in (None, ["uv"])
    )
    # A second, or what others have left of it; and next to nothing.
    assert polling > 0.1 and waiting < polling / 10


BOTH = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

rank_of_rpc, ranks_of_rpc, rank, ranks = map(int, sys.argv[1:5])
for_rpc, for_group = sys.argv[5:7]
os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
options = rpc.TensorPipeRpcBackendOptions(init_method=for_rpc)
rpc.init_rpc(
    f"rank{rank_of_rpc}",
    rank=rank_of_rpc,
    world_size=ranks_of_rpc,
    rpc_backend_options=options,
)
if rank >= 0:
    try:
        dist.init_process_group("gloo", for_group, rank=rank, world_size=ranks)
    except dist.DistError as error:
        print(str(error), flush=True)
        os._exit(1)
    dist.all_reduce(total := torch.ones(1))
    peer = f"rank{1 - rank_of_rpc}"
    answer = rpc.rpc_sync(peer, torch.add, (total, total)).item()
    os.write(1, f"answer {answer}\\n".encode())
rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_shared, by_file", [(True, 0), (False, 0), (False, 1)])
def test_rpc_and_the_group_share_a_port_if_they_share_rank_zero(
    is_shared: bool, by_file: bool, tmp_path: Path
) -> None:
    # Rank of RPC and of the group: the same two ranks, or the second one alone.
    ranks = [(0, 2, 0, 2), (1, 2, 1, 2)] if is_shared else [(0, 2, -1, 1), (1, 2, 0, 1)]
    stores = [f"tcp://127.0.0.1:{free_port()}"] * 2
    if by_file:
        stores = [f"file://{tmp_path}/{name}" for name in ("rpc", "group")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BOTH, *map(str, one), *stores],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )
        for one in ranks
    ]
    try:
        if is_shared:
            printed = [process.communicate(timeout=120) for process in processes]
            assert [out for out, _ in printed] == ["answer 4.0\n"] * 2, printed
            assert [process.returncode for process in processes] == [0, 0]
        elif by_file:
            printed = [process.communicate(timeout=120) for process in processes]
            # The group's only rank adds up a single 1.
            assert [out for out, _ in printed] == ["", "answer 2.0\n"], printed
        else:
            out, error = processes[1].communicate(timeout=120)
            assert "EADDRINUSE" in out and processes[1].returncode == 1, error
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# --- 04: what a table elsewhere saves. ----------


def test_a_token_uses_every_weight_outside_the_table_of_tokens() -> None:
    chapter: Any = load_chapter("03_ddp_torchrun")["model"]
    torch.manual_seed(0)
    model = chapter.GPT(chapter.GPTConfig(tied=False))
    inputs = torch.full((1, 128), 101)  # one token, wherever it may stand
    model(inputs, inputs).backward()
    used = {name: (p.grad != 0).double().mean() for name, p in model.named_parameters()}
    assert used.pop("token_embedding.weight") == 1 / 256  # one row
    assert len(used) == 24 and min(used.values()) > 0.99


# --- 05: ZeRO. ----------

INITIALIZE = """
import torch
import torch.distributed as dist
import deepspeed, deepspeed.ops

deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # compile nothing
print("before:", dist.is_initialized())
model = torch.nn.Linear(2, 1)
adam = {"type": "Adam", "params": {"torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam}
deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
print("after:", dist.is_initialized(), dist.get_backend(), dist.get_world_size())
"""


@pytest.mark.slow
def test_initialize_makes_the_process_group(tmp_path: Path) -> None:
    script = tmp_path / "initialize.py"
    script.write_text(INITIALIZE)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = clean_environment(**ranks, DS_ACCELERATOR="cpu")
    result = python(script, env=environment)
    assert result.returncode == 0, result.output
    assert "before: False\n" in result.stdout
    assert "after: True gloo 1\n" in result.stdout


TELL = """
import os

told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")]
os.write(1, f"rank {' '.join(told)}\\n".encode())
"""


@pytest.mark.slow
def test_deepspeed_ignores_visible_devices_beside_a_number(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    environment = clean_environment(CUDA_VISIBLE_DEVICES="2,3", DS_ACCELERATOR="cpu")
    result = deepspeed(script, env=environment)
    assert result.returncode == 0, result.output
    assert "Detected VISIBLE_DEVICES=2,3 but ignoring it" in result.output
    ranks = [line for line in result.stdout.splitlines() if line.startswith("rank")]
    assert sorted(ranks) == ["rank 0 2 0,1", "rank 1 2 0,1"]
    # Alone the variable says which devices, and here there is but one slot, 0.
    runner = ["-m", "deepspeed.launcher.runner", f"--master_port={free_port()}"]
    alone = run([sys.executable, *runner, script], env=environment)
    assert alone.returncode == 1
    assert (
        "Detected VISIBLE_DEVICES=2,3: setting --include=localhost:2,3" in alone.output
    )
    assert "ValueError: No slot '2' specified on host 'localhost'" in alone.output
    # With a hostfile it does not count, and one names devices with --include.
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n")
    listed = [f"--hostfile={hosts}", "--no_ssh_check", "--master_addr=127.0.0.1"]
    for option, devices in (((), "0,1,2,3"), (("--include=localhost:2,3",), "2,3")):
        result = run(
            [sys.executable, *runner, *listed, *option, script], env=environment
        )
        assert result.returncode == 0, result.output
        ranks = [line for line in result.stdout.splitlines() if line.startswith("rank")]
        number = len(devices.split(","))
        assert sorted(ranks) == [f"rank {i} {number} {devices}" for i in range(number)]


FOUR_STAGES = """
import deepspeed, deepspeed.ops
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # compile nothing
STEPS = 10

ADAM = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}

def train(stage, bf16, optimizer=ADAM):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": optimizer,
            "zero_allow_untested_optimizer": True,
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
for stage in range(4):
    train(stage, True, SGD)
"""


@pytest.mark.slow
def test_all_stages_agree_in_float32_and_not_in_bfloat16(tmp_path: Path) -> None:
    script = tmp_path / "four_stages.py"
    script.write_text(FOUR_STAGES)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment = clean_environment(**ranks, DS_ACCELERATOR="cpu")
    result = python(script, env=environment)
    assert result.returncode == 0, result.output
    lines = re.findall(r"^stage (\d) ([\d.]+) (\d+)$", result.stdout, re.M)
    by_sgd = re.findall(r"^stage \d ([\d.]+)$", result.stdout, re.M)
    assert len(by_sgd) == 4 and len(set(by_sgd)) == 1
    assert [int(stage) for stage, _, _ in lines] == [0, 1, 2, 3] * 2
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[1:4] == pytest.approx(losses[:1] * 3, rel=1e-6)
    assert losses[5:7] == losses[6:8]
    assert abs(losses[4] / losses[5] - 1) > 1e-2
    # In bfloat16, stage 0 gives Adam one step more: with gradients of zero, to make its
    # state. So its bias correction is that of a later step.
    assert [int(steps) for _, _, steps in lines] == [10, 10, 10, 10, 11, 10, 10, 10]
