"""The GPT and its text, model.py and data.py, which chapters from 03 on share."""

import os
import sysconfig
from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset, get_worker_info

from scripts import importable
from tiny_gpt import T, make_batches, module, tiny_model, write_text
from worker_pool import WorkerPool

# --- Text. ----------


def test_labels_are_the_next_bytes_and_held_out_text_is_unseen(tmp_path: Path) -> None:
    data, text = module("data"), write_text(tmp_path / "text.txt")
    train_text, held_out_text = data.load_text(text, block_size=T)
    whole = text.read_bytes()
    assert bytes(train_text.tolist()) + bytes(held_out_text.tolist()) == whole
    assert len(held_out_text) == pytest.approx(0.05 * len(whole), abs=1)
    dataset = data.WindowDataset(train_text, T, samples=48)
    starts = dataset.starts
    assert len(starts) == len(dataset) == 48
    for index, start in enumerate(starts):
        got, inputs, labels = dataset[index]
        assert got == index and len(labels) == T
        assert bytes(inputs.tolist()) == whole[start : start + T]
        assert bytes(labels.tolist()) == whole[start + 1 : start + T + 1]


def test_windows_never_overlap_in_a_short_text() -> None:
    data = module("data")
    lengths = range(T + 1, 5 * T)
    counts = []
    for length in lengths:
        dataset = data.WindowDataset(torch.zeros(length, dtype=torch.uint8), T, 48)
        starts = torch.tensor(dataset.starts)
        assert bool((starts.diff() >= T).all())
        assert len(dataset[len(dataset) - 1][2]) == T
        counts.append(len(dataset))
    assert len(counts) == len(lengths) and sorted(set(counts)) == [1, 2, 3, 4]


def test_standard_library_is_the_corpus_in_a_fixed_order() -> None:
    data = module("data")
    files = data.find_files(None)
    names = [path.name for path in files]
    assert files == data.find_files(None)
    assert "argparse.py" in names and "threading.py" in names
    assert len(files) > 300
    assert "site-packages" not in {part for path in files for part in path.parts}
    assert "test_argparse.py" not in names


def test_installed_packages_are_not_searched_for_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages" / "torch").mkdir(parents=True)
    (tmp_path / "json" / "sub").mkdir(parents=True)
    for name in ("abc.py", "other.py", "json/sub/z.py", "site-packages/torch/t.py"):
        (tmp_path / name).touch()
    searched, rglob = [], Path.rglob

    def noted(folder: Path, pattern: str) -> Any:
        searched.append(folder)
        return rglob(folder, pattern)

    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(Path, "rglob", noted)
    files = module("data").find_files(None)
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "abc.py",
        "json/sub/z.py",
    ]
    # Below it lie a hundred times as many files.
    assert searched == [tmp_path / "json"]


def test_folder_of_text_leaves_out_binary_and_hidden_files(tmp_path: Path) -> None:
    data = module("data")
    (tmp_path / "b.txt").write_bytes(b"b" * 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"a" * 1000)
    (tmp_path / "picture.png").write_bytes(b"\x89\0" * 500)
    (tmp_path / ".hidden").write_bytes(b"h" * 1000)
    parts = data.load_text(tmp_path, T)
    assert bytes(torch.cat(parts).tolist()) == b"a" * 1000 + b"b" * 1000


def test_shortest_text_that_the_message_names_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 2581)
    _, held_out_text = module("data").load_text(path, block_size=128)
    assert len(held_out_text) >= 129


# --- On several ranks: worker processes, and the mean over samples. ----------


class WorkerSeeds(Dataset):
    """Its labels are the seed of the process that loads them."""

    def __init__(self) -> None:
        """Note the process that is a rank."""
        self.rank = os.getpid()

    def __len__(self) -> int:
        """Count the samples."""
        return 16

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """Return the index, which worker this is, and the worker's seed."""
        info = get_worker_info()
        assert info is not None
        assert os.getppid() != self.rank  # forked from a rank, a worker may hang
        return index, info.id, info.seed


def load_in_workers() -> tuple[set[tuple[int, int]], list[list[Any]]]:
    """Return the seeds of two workers, and an epoch loaded by 0 and by 2 workers."""
    data, cpu = module("data"), torch.device("cpu")
    torch.manual_seed(0)  # alike on every rank, as in train.py
    options = Namespace(batch_size=2, seed=0, workers=2)
    loader = data.StepLoader(WorkerSeeds(), 8, options, cpu)
    with importable("03_ddp_torchrun"):
        seeds = {
            (worker, seed)
            for batches in loader.steps(0, 0, 2)
            for _, workers, its_seeds in batches
            for worker, seed in zip(workers.tolist(), its_seeds.tolist(), strict=True)
        }
    text = torch.arange(2000).to(torch.uint8)
    epochs = []
    for workers in (0, 2):
        options.workers = workers
        dataset = data.WindowDataset(text, T, 48)
        loader = data.StepLoader(dataset, 8, options, cpu)
        # From the middle of the second epoch, as a run that resumes.
        with importable("03_ddp_torchrun"):
            epochs.append([*loader.steps(0, 0, 6), *loader.steps(1, 4, 6)])
    return seeds, epochs


def seeds_by_epoch(starts: bool) -> list[int]:
    """Return what the workers' seed is of in three epochs, with one loader or three."""
    data, text = module("data"), torch.arange(2000).to(torch.uint8)
    options = Namespace(batch_size=2, seed=5, workers=0)
    seeds, loader = [], None
    for epoch in range(3):
        if loader is None or starts:  # a run that resumes at this epoch
            dataset = data.WindowDataset(text, T, 48)
            loader = data.StepLoader(dataset, 8, options, torch.device("cpu"))
        next(loader.steps(epoch, 0, 1))
        seeds.append(loader.loader.generator.get_state().tolist())
    return seeds


def test_a_resumed_run_seeds_its_workers_by_the_epoch(
    worker_pool: WorkerPool,
) -> None:
    uninterrupted, resumed = (worker_pool.run(seeds_by_epoch, s) for s in (False, True))
    assert uninterrupted == resumed
    distinct = {tuple(seed) for seeds in resumed for seed in seeds}
    assert len(distinct) == 2 * 3


def test_workers_of_all_ranks_have_seeds_of_their_own_and_load_what_none_does(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(load_in_workers)
    assert len(results) == 2
    seeds = [seed for found, _ in results for _, seed in found]
    workers = [{worker for worker, _ in found} for found, _ in results]
    assert workers == [{0, 1}] * 2
    assert len(seeds) == len(set(seeds)) == 4
    compared = 0
    for _, (by_none, by_workers) in results:
        assert len(by_none) == len(by_workers) == 8
        for one, other in zip(by_none, by_workers, strict=True):
            assert len(one) == len(other) == 2  # micro-batches of 2
            for tensors in zip(chain(*one), chain(*other), strict=True):
                assert torch.equal(*tensors)
                compared += 1
    assert compared == 2 * 8 * 2 * 3


def evaluate_on_uneven_shards(windows: int) -> tuple[float, float, float, bool]:
    """Return what evaluate() says; the mean over samples; the mean of ranks' means."""
    data = module("data")
    text = torch.randint(256, (T * windows + 1,)).to(torch.uint8)
    dataset = data.WindowDataset(text, T, windows)
    assert len(dataset) == windows
    model = tiny_model(torch.float64, dropout=0.5)
    loss = data.evaluate(model, dataset, batch_size=2)
    was_training = model.training
    with torch.no_grad():
        losses = [model.eval()(*dataset.batch([i])).item() for i in range(windows)]
    data.evaluate(model, dataset)
    assert not model.training  # as it was left
    world_size = dist.get_world_size()
    shards = [losses[rank::world_size] for rank in range(world_size)]
    means = [sum(shard) / len(shard) for shard in shards if shard]
    by_sample = sum(losses) / windows
    # Each forward pass all-gathers, so all ranks have to make equally many.
    for part in (*model.blocks, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world_size,)))
    assert data.evaluate(model, dataset, batch_size=2) == pytest.approx(loss, rel=1e-6)
    return loss, by_sample, sum(means) / len(means), was_training


@pytest.mark.parametrize("windows", [7, 2])
def test_evaluation_is_the_mean_over_samples(
    worker_pool: WorkerPool, windows: int
) -> None:
    results = worker_pool.run(
        evaluate_on_uneven_shards, windows, world_size=3, timeout=30
    )
    assert len(results) == 3
    for loss, by_sample, by_rank, was_training in results:
        # The losses are summed in float32, whatever the model is in.
        assert loss == pytest.approx(by_sample, rel=1e-6)
        assert windows == 2 or abs(by_rank - by_sample) > 1e-4
        assert was_training and loss == results[0][0]


# --- The model. ----------


def test_attention_of_each_head_reads_no_later_token() -> None:
    block = tiny_model(torch.float64).blocks[0]
    x = torch.randn(2, T, 16, dtype=torch.float64)
    with torch.no_grad():
        y = block.attention_norm(x)
        query, key, value = (f(y) for f in (block.query, block.key, block.value))
        mixed = torch.zeros_like(x)
        for t in range(T):
            for head in (slice(0, 8), slice(8, 16)):
                scores = key[:, : t + 1, head] @ query[:, t, head, None] / 8**0.5
                weights = torch.softmax(scores, dim=1)
                mixed[:, t, head] = (weights * value[:, : t + 1, head]).sum(dim=1)
        x_out = x + block.attention_out(mixed)
        inner = torch.nn.functional.gelu(block.mlp_in(block.mlp_norm(x_out)))
        assert (block(x) - (x_out + block.mlp_out(inner))).abs().max() < 1e-14


def test_gpt_2_has_124_million_parameters() -> None:
    gpt = module("model")
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(1024, 768, 12, 12, vocabulary=50257))
        untied = gpt.GPT(gpt.GPTConfig(1024, 768, 12, 12, 50257, tied=False))
    count, more = (sum(p.numel() for p in m.parameters()) for m in (model, untied))
    blocks, norms = 12 * 12 * 768**2, (12 * 2 + 1) * 2 * 768
    assert count == (50257 + 1024) * 768 + blocks + norms
    assert round(count / 1e6) == 124
    assert more == count + 50257 * 768


def test_weights_begin_as_gpt_2_s_do() -> None:
    # GPT-2: N(0, 0.02) at width 768, and what is added to the residual stream divided
    # by the root of its 2 x 12 summands (Radford et al., 2019, section 2.3).
    gpt = module("model")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(1024, 768, 12, 12, vocabulary=50257))
    with mock.patch.object(torch.nn.init, "normal_") as draw:
        model.init_weights()
    names = [name for name, p in model.named_parameters() if p.ndim == 2]
    drawn = [call.kwargs["std"] for call in draw.mock_calls]
    assert len(names) == len(drawn) == 2 + 12 * 6
    for name, std in zip(names, drawn, strict=True):
        is_out = name.endswith(("attention_out.weight", "mlp_out.weight"))
        assert std == pytest.approx(0.02 / 24**0.5 if is_out else 0.02, rel=0.01), name


def test_generated_text_is_bytes_and_depends_on_its_seed_alone() -> None:
    model = tiny_model(vocabulary=300, dropout=0.5)
    texts = [model.generate(b"ab", 30, temperature=1.0, seed=n) for n in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert [one[:2] for one in texts] == ["ab"] * 3
    # A model that would rather write what is no byte.
    logits = torch.cat([torch.zeros(256), torch.full((44,), 1e3)]).view(1, 1, 300)
    with mock.patch.object(model, "forward", return_value=logits) as forward:
        model.generate(b"ab", 30, temperature=1.0, seed=0)
    lengths = [call.args[0].shape[1] for call in forward.mock_calls]
    assert lengths == [*range(2, T), *[T] * (32 - T)]  # it reads T tokens at most


def test_a_text_leaves_each_part_in_the_mode_that_it_was_in() -> None:
    model, during = tiny_model(dropout=0.5), []
    model.final_norm.eval()
    before = [part.training for part in model.modules()]
    assert {*before} == {False, True}
    model.head.register_forward_hook(
        lambda *_: during.extend(part.training for part in model.modules())
    )
    model.generate(b"ab", 2, temperature=1.0, seed=0)
    assert during == [False] * 2 * len(before)
    assert [part.training for part in model.modules()] == before


def test_operations_are_those_of_the_formula_and_of_a_counter() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # 6 x (12 L D^2 + V D) + 12 L D T, with L = 1, D = 16, V = 256 and T = 16.
    by_hand = 6 * (12 * 16**2 + 256 * 16) + 12 * 16 * T
    checked = 0
    for tied in (True, False):
        model = tiny_model(tied=tied)
        assert model.flops_per_token() == by_hand
        _, inputs, labels = make_batches(1, 4)[0]
        # As plain matrix products the counter sees attention's as well.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(inputs, labels).backward()
        assert counter.get_total_flops() == by_hand * inputs.numel()
        checked += 1
    assert checked == 2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        # Dense bfloat16 by NVIDIA's data sheets: 989.5 TFLOP/s on H100 SXM and H200,
        # 835 on their NVL, 756 on H100 PCIe, 312 on A100, 2,250 on B200. With sparsity
        # they print twice as much.
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
        # Other devices, whose names have one of these in a longer word.
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_utilisation_is_a_part_of_the_peak(name: str, peak: float | None) -> None:
    model, cuda = tiny_model(), torch.device("cuda", 0)
    rate = 0.25 * (peak or 1e12) / model.flops_per_token()  # tokens per second
    with mock.patch.object(torch.cuda, "get_device_name", return_value=name) as asked:
        shown = model.utilisation(rate, cuda)
    asked.assert_called_once_with(cuda)
    assert shown == ("" if peak is None else " | MFU 25.0%")
    assert model.utilisation(rate, torch.device("cpu")) == ""
