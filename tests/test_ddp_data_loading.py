"""Chapter 03, data loading: seeds, memory and shards of the workers of all ranks."""

import contextlib
import io
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from launch import ROOT, Result, python, run, torchrun
from lessons import run_lesson
from pages import words_of
from scripts import importable, load_chapter
from worker_pool import WorkerPool

ROOM = "03_ddp_torchrun/data_loading"


def script(name: str) -> Any:
    """Import one of the room's scripts."""
    return load_chapter(ROOM)[name]


def end_of_lesson(name: str) -> tuple[int, str]:
    """Run a lesson; return its exit status and errors."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), importable(ROOM):
        try:
            run_lesson(ROOM, name)
        except SystemExit as end:
            return int(end.code or 0), errors.getvalue()
    return 0, errors.getvalue()


# --- worker_seeds.py. ----------


def all_draws() -> dict[str, list[list[float]]]:
    """Return what this rank's samples are augmented by, in two epochs, in each way."""
    seeds = script("worker_seeds")
    with importable(ROOM):
        ways = {name: seeds.two_epochs(name) for name in seeds.WAYS}
    return {name: [list(e.values()) for e in epochs] for name, epochs in ways.items()}


def test_without_workers_a_loaders_generator_seeds_nothing() -> None:
    class Drawn(Dataset):
        def __getitem__(self, index: int) -> float:
            return torch.rand(()).item()

        def __len__(self) -> int:
            return 2

    drawn = []
    for rank in (0, 1):
        generator = torch.Generator().manual_seed(rank)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn.append(list(DataLoader(Drawn(), None, generator=generator)))
    assert len(drawn[0]) == 2 and drawn[0] == drawn[1]
    assert "**Without workers it seeds nothing**: seed the rank itself." in words_of(
        ROOM
    )


def seed_by_worker(worker: int) -> None:
    """Forget the rank."""
    torch.manual_seed(worker)


@pytest.mark.parametrize("init_fn", [None, seed_by_worker])
def test_a_worker_init_fn_that_seeds_overrules_a_generator(init_fn: Any) -> None:
    dataset = script("worker_seeds").Augmented("global")
    more: dict[str, Any] = {"worker_init_fn": init_fn, "num_workers": 2}
    drawn = []
    for rank in (0, 1):
        more["generator"] = torch.Generator().manual_seed(rank)
        loader = DataLoader(dataset, multiprocessing_context="fork", **more)
        drawn.append([number.item() for _, number in loader])
    assert len(drawn[0]) == len(set(drawn[0])) == 8
    assert (drawn[0] == drawn[1]) is (init_fn is not None)


@pytest.mark.slow
def test_workers_draw_alike_unless_the_rank_is_in_their_seed(
    worker_pool: WorkerPool,
) -> None:
    ranks = worker_pool.run(all_draws)
    assert len(ranks) == 2
    zero, one = ranks
    name = "manual_seed on all ranks"
    assert zero[name] == one[name] and zero[name][0] != zero[name][1]
    name = "init_fn: rank + worker"
    # Worker 1 of rank 0 has every other sample, beginning with the second.
    assert zero[name][0][1::2] == one[name][0][0::2]
    assert zero[name][0] == zero[name][1]
    name = "kept in the data set"
    assert zero[name] == one[name] and len(set(zero[name][0])) == 2
    for name in ("a generator by rank", "by epoch and index"):
        values = [n for rank in ranks for epoch in rank[name] for n in epoch]
        assert len(set(values)) == len(values) == 16


@pytest.mark.slow
def test_seeds_are_shown_and_workers_counted() -> None:
    output = torchrun(f"{ROOM}/worker_seeds.py", nproc=3).stdout
    assert output.startswith("3 ranks + 6 workers\n")
    assert "check: 8 samples in 2 epochs are augmented as in one process" in output


def forget_the_rank() -> tuple[int, str]:
    """Seed the generators of all ranks alike."""
    seeds = script("worker_seeds")
    entry = {"generator": torch.Generator}
    ways = seeds.WAYS | {"a generator by rank": ("global", entry, 8)}
    with mock.patch.object(seeds, "WAYS", ways):
        return end_of_lesson("worker_seeds")


def forget_the_epoch() -> tuple[int, str]:
    """Let the one process of the comparison draw for the first epoch only."""
    seeds = script("worker_seeds")
    right = seeds.two_epochs
    with mock.patch.object(seeds, "two_epochs", lambda name: right(name)[:1] * 2):
        return end_of_lesson("worker_seeds")


def draw_other_numbers() -> tuple[int, str]:
    """Augment by half of what one process draws: distinct numbers, but not its."""
    seeds = script("worker_seeds")
    right = seeds.two_epochs

    def halved(name: str) -> list[dict[int, float]]:
        return [{i: n / 2 for i, n in epoch.items()} for epoch in right(name)]

    with mock.patch.object(seeds, "two_epochs", halved):
        return end_of_lesson("worker_seeds")


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [forget_the_rank, forget_the_epoch, draw_other_numbers]
)
def test_wrong_seeds_are_found(worker_pool: WorkerPool, broken: Any) -> None:
    results = worker_pool.run(broken)
    assert [status for status, _ in results] == [1, 1]
    assert "check failed on ranks [0, 1]" in results[0][1]


class WorkerSeed(Dataset):
    """Samples that say what their worker was seeded with, and its epoch."""

    epoch = 0

    def __len__(self) -> int:
        """Count the samples."""
        return 2

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the seed of this worker, and the epoch that it knows of."""
        info: Any = torch.utils.data.get_worker_info()
        return info.seed, self.epoch


def seeds_of_two_epochs() -> dict[tuple[bool, bool], list[list[tuple[int, int]]]]:
    """Return seeds and epochs, by whether workers persist and a generator is given."""
    found = {}
    for persists, has_generator in product([False, True], repeat=2):
        torch.manual_seed(1)
        more: dict[str, Any] = {"num_workers": 2, "persistent_workers": persists}
        if has_generator:
            more["generator"] = script("worker_seeds").own_generator()
        dataset, epochs = WorkerSeed(), []
        loader = DataLoader(dataset, multiprocessing_context="fork", **more)
        for dataset.epoch in range(2):
            epochs.append([(int(seed), int(epoch)) for seed, epoch in loader])
        found[persists, has_generator] = epochs
    return found


def test_persistent_workers_get_no_new_seed_and_no_new_epoch(
    worker_pool: WorkerPool,
) -> None:
    ranks = worker_pool.run(seeds_of_two_epochs)
    assert [len(found) for found in ranks] == [4, 4]
    for found in ranks:
        for (persists, _), (first, second) in found.items():
            seeds = [[seed for seed, _ in samples] for samples in (first, second)]
            assert [b - a for a, b in seeds] == [1, 1]
            assert (seeds[0] == seeds[1]) is persists
            known = [epoch for _, epoch in first + second]
            assert known == ([0] * 4 if persists else [0, 0, 1, 1])
    for persists, has_generator in ranks[0]:
        way = persists, has_generator
        assert (ranks[0][way] == ranks[1][way]) is not has_generator
    said = "Before each epoch (with `persistent_workers`, only the first)"
    assert said in words_of(ROOM)
    assert "Persistent workers stay at the first epoch." in words_of(ROOM)


# --- workers.py. ----------

# Free wherever this file is imported, and locked in a copy of a process that holds it.
LOCK = threading.Lock()


class Locked(Dataset):
    """Samples that need a lock, as many of C's and Python's functions do."""

    def __len__(self) -> int:
        """Count the samples."""
        return 1

    def __getitem__(self, index: int) -> int:
        """Return who is this process's parent."""
        with LOCK:
            return os.getppid()


def load_while_a_thread_holds_a_lock(by_fork: bool) -> str:
    """Start a worker while a thread of this process holds a lock; say what comes."""
    locked, may_end = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with LOCK:
            locked.set()
            may_end.wait()

    thread = threading.Thread(target=hold_the_lock)
    thread.start()
    locked.wait()
    try:
        if by_fork:
            # The right one has started the server, and imported, before the limit.
            told = {"multiprocessing_context": "fork", "timeout": 2}
            loader = DataLoader(Locked(), num_workers=1, **told)
        else:
            loader = script("workers").new_loader(Locked())
        (parent,) = [int(number) for number in loader]
        return "this rank's child" if parent == os.getpid() else "another's child"
    except RuntimeError as error:
        return str(error)
    finally:
        may_end.set()
        thread.join()


@pytest.mark.slow
def test_a_forked_worker_waits_for_a_lock_that_a_thread_of_its_rank_held(
    worker_pool: WorkerPool,
) -> None:
    (found,) = worker_pool.run(load_while_a_thread_holds_a_lock, True, world_size=1)
    assert found == "DataLoader timed out after 2 seconds"
    (found,) = worker_pool.run(load_while_a_thread_holds_a_lock, False, world_size=1)
    assert found == "another's child"


class Slow(Dataset):
    """Eight samples, each of which takes a tenth of a second."""

    def __len__(self) -> int:
        """Count the samples."""
        return 8

    def __getitem__(self, index: int) -> int:
        """Wait, then return the index."""
        time.sleep(0.1)
        return index


def slow_batches() -> list[int | str]:
    """Load batches that take 0.4 s; count them, or return the error."""
    ends: list[int | str] = []
    for workers, patience in [(1, 0.2), (4, 0.2), (1, 60)]:
        loader: Any = DataLoader(*(Slow(), 4), num_workers=workers, timeout=patience)
        try:
            ends.append(len(list(loader)))
        except RuntimeError as error:
            ends.append(str(error))
    return ends


def test_a_longer_timeout_and_not_more_workers_waits_for_a_slow_batch(
    worker_pool: WorkerPool,
) -> None:
    (ends,) = worker_pool.run(slow_batches, world_size=1)
    assert ends == ["DataLoader timed out after 0.2 seconds"] * 2 + [2]


GENERATOR = """
import sys
import torch
from torch.utils.data import DataLoader

class Generating:
    def __init__(self):
        self.generator = torch.Generator()

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return index

class Sharing(Generating):
    def __init__(self):
        pass

    def __getitem__(self, index):
        return torch.multiprocessing.get_sharing_strategy()

if __name__ == "__main__":
    for kind in sys.argv[1:]:
        try:
            told = {"num_workers": 1, "multiprocessing_context": kind}
            print(kind, len(list(DataLoader(Generating(), **told))))
        except RuntimeError as error:
            print(kind, error)
    torch.multiprocessing.set_sharing_strategy("file_system")
    for kind in sys.argv[1:]:
        print(kind, *DataLoader(Sharing(), num_workers=1, multiprocessing_context=kind))
"""


@pytest.mark.parametrize(
    "kind", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_a_data_set_with_a_generator_reaches_only_forked_workers(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "generator.py"
    path.write_text(GENERATOR)
    result = python(path, "fork", kind)
    exited = r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"
    first, second, *sharing = result.stdout.splitlines()
    assert first == "fork 1" and re.fullmatch(f"{kind} {exited}", second)
    # Nor does a sharing strategy, which is set in the part that they do not run.
    assert sharing == ["fork ['file_system']", f"{kind} ['file_descriptor']"]
    words = "unable to resize file <filename not specified> to the right size"
    assert result.stderr.count(words) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_data_set_that_is_pickled_moves_its_tensor_to_dev_shm(
    tmp_path: Path,
) -> None:
    samples = torch.zeros(1_000_000)
    pickle = ForkingPickler.dumps  # as a loader starts workers that are no forks
    assert mappings_around(samples.data_ptr())[0][0] is False
    pickle(TensorDataset(samples))
    ((is_shared, nbytes),) = mappings_around(samples.data_ptr())
    assert is_shared and nbytes >= samples.nbytes
    array = np.zeros(1_000_000)
    np.save(tmp_path / "saved.npy", array)
    for one in (array, np.load(tmp_path / "saved.npy", mmap_mode="r")):
        assert len(pickle(one)) > array.nbytes  # so each worker gets a copy
    path = tmp_path / "samples"
    path.write_bytes(bytes(80))
    with mock.patch.multiple(script("copy_on_write"), SAMPLES=1, LENGTH=80):
        mapped = script("copy_on_write").hold(bytes(80), path, "mapped file")
    with pytest.raises(OSError, match="Bad file descriptor"):
        pickle(TensorDataset(mapped))
    # What augments a sample in place must not reach the file.
    mapped.fill_(7)
    assert path.read_bytes() == bytes(80)
    with pytest.raises(RuntimeError):  # nor make it, nor make it longer
        script("copy_on_write").hold(bytes(160), tmp_path / "none", "mapped file")
    with pytest.raises(RuntimeError):
        script("copy_on_write").hold(bytes(160), path, "mapped file")
    assert path.stat().st_size == 80 and not (tmp_path / "none").exists()
    page = words_of(ROOM)
    assert "nor a tensor of `torch.from_file` (`Bad file descriptor`)" in page
    said = "A list or NumPy array is copied; a tensor moves to `/dev/shm`, once for"
    assert f"{said} each rank." in page
    assert "bytes of the data set's tensors, unless workers are forked" in page


# --- iterable.py. ----------


# The page runs it on two ranks.
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_iterable_is_seen_once_if_sharded_by_rank_and_worker(world_size: int) -> None:
    output = torchrun(f"{ROOM}/iterable.py", nproc=world_size).stdout
    rows = re.findall(r"^(\S.*?)  +(\[.*\]) +(.*) times$", output, re.M)
    assert [(name, times) for name, _, times in rows] == [
        ("iterable, no shards", str(2 * world_size)),
        ("iterable, by rank", "2"),
        ("iterable, by worker", str(world_size)),
        ("iterable, by both", "1"),
        ("map-style, sampler", "1 or 2"),
    ]
    both = {2: "[6, 5]", 3: "[4, 4, 3]"}[world_size]
    assert [lengths for _, lengths, _ in rows][3:] == [
        both,
        {2: "[6, 6]", 3: "[4, 4, 4]"}[world_size],
    ]


def shards_of(workers: int) -> list[int]:
    """Return what this rank sees of a stream that is sharded by rank and worker."""
    stream = script("iterable").Stream(by_rank=True, by_worker=True)
    told = {"num_workers": workers, "batch_size": None}
    if workers:
        told["multiprocessing_context"] = "forkserver"
    with importable(ROOM):
        return [int(n) for n in DataLoader(stream, **told)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_shards_cover_the_stream_with_any_number_of_workers(
    worker_pool: WorkerPool, workers: int
) -> None:
    by_rank = worker_pool.run(shards_of, workers)
    times = Counter(sample for samples in by_rank for sample in samples)
    assert times == dict.fromkeys(range(11), 1)


@pytest.mark.slow
def test_forgotten_worker_is_found(tmp_path: Path) -> None:
    room = tmp_path / "room"
    shutil.copytree(ROOT / ROOM, room)
    path = room / "iterable.py"
    right = path.read_text()
    path.write_text(right.replace("torch.utils.data.get_worker_info()", "None"))
    assert path.read_text() != right
    result = torchrun(path, nproc=2)
    assert result.returncode == 1
    assert "check failed on ranks [0, 1]" in result.stderr


# --- copy_on_write.py. ----------


def grown_in_five_ways() -> tuple[str, float, float]:
    """Run the lesson, then read an array and a list, of an object for each sample."""
    output = run_lesson(ROOM, "copy_on_write")
    copy_on_write = script("copy_on_write")
    count, grown_in_a_worker = copy_on_write.SAMPLES, copy_on_write.grown_in_a_worker
    samples = [bytes(100) + bytes([i % 256]) for i in range(count)]
    of_an_array = grown_in_a_worker(np.array(samples, dtype=object))
    tensors = list(torch.zeros(count, 100, dtype=torch.uint8))
    return output, of_an_array, grown_in_a_worker(tensors)


def test_python_objects_are_copied_by_reading(
    worker_pool: WorkerPool,
) -> None:
    ran = worker_pool.run(grown_in_five_ways, world_size=1)
    ((output, of_an_array, of_tensors),) = ran
    rows = dict(re.findall(r"^(\w[a-z ]+?)  +(\d+) MB", output, re.M))
    assert int(rows["list of strings"]) >= 20
    assert max(int(rows[name]) for name in ("tensor", "mapped file")) <= 3
    assert of_an_array > 20 and of_tensors > 10
    said = "Keep all samples in one tensor or NumPy array of numbers"
    assert said in words_of(ROOM)
    assert "check: the list was copied" in output


@pytest.mark.parametrize(
    ("added", "is_right"),
    [
        *(([17, 3, 3], True), ([15, 0, 0], False)),
        *(([27, 4, 0], False), ([27, 0, 4], False)),
    ],
)
def test_copies_are_held_against_16_mb_of_text(
    monkeypatch: pytest.MonkeyPatch, added: list[float], is_right: bool
) -> None:
    module = script("copy_on_write")
    monkeypatch.setattr("sys.argv", ["copy_on_write.py"])
    monkeypatch.setattr(module, "hold", lambda *_: None)
    grown = mock.Mock(side_effect=added)
    monkeypatch.setattr(module, "grown_in_a_worker", grown)
    with contextlib.nullcontext() if is_right else pytest.raises(SystemExit):
        module.main()
    assert grown.call_count == 3


def test_pages_that_were_only_read_are_not_counted_as_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library's code, read in again from its file, is the worker's alone: clean."""
    rollup = tmp_path / "smaps_rollup"
    heading = "55d0-7ffc ---p 00000000 00:00 0 [rollup]\n"
    counts = "Rss: 9000 kB\nPrivate_Clean: 5000 kB\nPrivate_Dirty: 2000 kB\n"
    rollup.write_text(heading + counts)
    module = script("copy_on_write")
    monkeypatch.setattr(module, "ROLLUP", rollup)
    assert module.written_megabytes() == 2.0


def written_by_rank_zero(path: str) -> dict[str, list[int]]:
    """Change samples on rank 0; return what this rank has afterwards."""
    if dist.get_rank() == 0:
        Path(path).write_bytes(bytes(3))
    dist.barrier()
    read = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    mapped = torch.from_file(path, shared=True, size=3, dtype=torch.uint8)
    dist.barrier()  # all have read before one writes
    if dist.get_rank() == 0:
        read.fill_(7)
        mapped.fill_(7)
    dist.barrier()
    return {"read": read.tolist(), "mapped": mapped.tolist()}


def private_page(path: str) -> list[int]:
    """Map the file for this rank alone, write on rank 0; return what is here."""
    if dist.get_rank() == 0:
        Path(path).write_bytes(bytes(3))
    dist.barrier()
    samples = torch.from_file(path, shared=False, size=3, dtype=torch.uint8)
    dist.barrier()
    if dist.get_rank() == 0:
        samples.fill_(7)
    dist.barrier()
    return samples.tolist()


def test_ranks_share_no_samples_but_those_of_a_mapped_file(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    zero, one = worker_pool.run(written_by_rank_zero, str(tmp_path / "samples"))
    assert zero == {"read": [7, 7, 7], "mapped": [7, 7, 7]}
    assert one == {"read": [0, 0, 0], "mapped": [7, 7, 7]}
    private = worker_pool.run(private_page, str(tmp_path / "samples"))
    assert private == [[7, 7, 7], [0, 0, 0]]


def fill_with_sevens(_: int, samples: torch.Tensor) -> None:
    """Be a process that `mp.spawn` has given a tensor."""
    samples.fill_(7)


@pytest.mark.slow
def test_ranks_share_a_tensor_that_mp_spawn_gives_them() -> None:
    samples = torch.zeros(3)
    torch.multiprocessing.spawn(fill_with_sevens, (samples,), nprocs=1)
    # PyTorch moves a tensor to shared memory where others send a copy.
    assert samples.tolist() == [7, 7, 7] and samples.is_shared()


def kilobytes_of(path: str) -> tuple[int, int]:
    """Return how much of a mapped file is shared with others, and how much is not."""
    found, is_here = {"Shared": 0, "Private": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_here = path in line
        elif is_here and (own := re.match(r"(Shared|Private)_\w+: +(\d+) kB", line)):
            found[own[1]] += int(own[2])
    return found["Shared"], found["Private"]


def pages_before_and_after(path: str) -> list[tuple[int, int]]:
    """Map 4 MiB privately on all ranks; count pages, write half on rank 0, count."""
    if dist.get_rank() == 0:
        Path(path).write_bytes(bytes(4 << 20))
    dist.barrier()
    samples = torch.from_file(path, shared=False, size=4 << 20, dtype=torch.uint8)
    samples.sum()  # reads all pages
    dist.barrier()
    before = kilobytes_of(path)
    dist.barrier()
    if dist.get_rank() == 0:
        samples[: 2 << 20].fill_(7)
    dist.barrier()
    after = kilobytes_of(path)
    dist.barrier()
    return [before, after]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_mapped_pages_are_shared_until_a_rank_writes(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    by_rank = worker_pool.run(pages_before_and_after, str(tmp_path / "samples"))
    assert by_rank == [[(4096, 0), (2048, 2048)]] * 2


# --- shared_memory.py. ----------


def test_batches_in_flight_take_workers_times_prefetch(worker_pool: WorkerPool) -> None:
    words = (ROOM, "shared_memory", "--workers=3")
    (output,) = worker_pool.run(run_lesson, *words, world_size=1)
    assert "3 workers x 2 batches x 6.3 MB" in output
    (held,) = re.findall(r"in /dev/shm: ([\d.]+) MB", output)
    assert float(held) == pytest.approx(3 * 2 * 6.29, rel=0.1)


@pytest.mark.parametrize(("held", "is_right"), [(25.2, True), (20, False), (31, False)])
def test_what_waits_is_held_against_the_product(
    monkeypatch: pytest.MonkeyPatch, held: float, is_right: bool
) -> None:
    module = script("shared_memory")
    monkeypatch.setattr("sys.argv", ["shared_memory.py"])
    monkeypatch.setattr(module, "DataLoader", lambda *_, **__: range(2))
    monkeypatch.setattr(module, "wait_for", lambda _: held)
    with contextlib.nullcontext() if is_right else pytest.raises(SystemExit):
        module.main()


def mappings_around(address: int) -> list[tuple[bool, int]]:
    """Return what is mapped there: whether it is shared memory, and how many bytes."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            found.append(("/dev/shm/torch_" in line, high - low))
    return found


def held_once_one_waits(module: Any, batches: Any) -> float:
    """Return what a worker holds when the loop has one batch and the next is ready.

    It closes the first only after the loop has it: until then it may hold both, or
    none but that one, which is gone by the next look.
    """
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        is_ready = batches._worker_result_queue.qsize() == 1
        if is_ready and module.shared_megabytes() < 7:
            break
        time.sleep(0.01)
    return module.shared_megabytes()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_batch_in_the_loop_takes_shared_memory_beside_those_that_wait() -> None:
    module = script("shared_memory")
    loader = DataLoader(module.Images(), 8, num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    batch = next(batches)
    assert held_once_one_waits(module, batches) == pytest.approx(6.29, rel=0.1)
    ((is_shared, nbytes),) = mappings_around(batch.data_ptr())
    assert is_shared and nbytes >= batch.nbytes


def stack_as_numpy(batch: list[torch.Tensor]) -> np.ndarray:
    """Make a NumPy array of a batch."""
    return np.stack([image.numpy() for image in batch])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_only_tensors_come_through_shared_memory() -> None:
    module = script("shared_memory")
    told: Any = {"num_workers": 1, "prefetch_factor": 1, "collate_fn": stack_as_numpy}
    batches = iter(DataLoader(module.Images(), 8, **told))
    batch = next(batches)
    assert isinstance(batch, np.ndarray) and batch.nbytes == 8 * 3 * 256 * 256 * 4
    ((is_shared, _),) = mappings_around(batch.ctypes.data)
    assert not is_shared and module.shared_megabytes() == 0
    said = "A worker hands tensors to the rank through **shared memory**"
    assert said in words_of(ROOM)


def test_what_others_have_in_dev_shm_is_not_counted() -> None:
    shared = script("shared_memory").shared_megabytes
    before = shared()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(10**7))
        file.flush()
        assert Path(file.name).stat().st_blocks * 512 >= 10**7
        assert shared() == before


def with_small_shm(megabytes: int) -> Result:
    """Run shared_memory.py over a /dev/shm of its own."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm"
    lesson = f"exec python {ROOM}/shared_memory.py"
    command = ["unshare", "-rm", "sh", "-c", f"{mount} && {lesson}"]
    return run(command)


@pytest.mark.slow
def test_dev_shm_too_small_for_one_worker_is_an_error() -> None:
    # The only way to learn whether one may mount is to do it once.
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if shutil.which("unshare") is None or run(probe).returncode:
        pytest.skip("no laboratory here: a file system cannot be mounted")
    result = with_small_shm(4)
    assert result.returncode == 2, result.output
    assert "unable to allocate shared memory(shm) for file </torch_" in result.stdout
    assert "No space left on device (28)\n" in result.stdout
    assert "25.2 MB are needed, and 4.2 MB were free" in result.stderr


# --- Copied from elsewhere, and it fails. ----------


def error_of(call: Callable[[], object]) -> str:
    """Return an error as Python prints it; nothing if there was none."""
    try:
        call()
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# A worker looks for its parent each 5 s; here, to be quick, each 0.2 s.
KILLED = """\
import sys, time
import torch.utils.data._utils.worker as worker
from torch.utils.data import DataLoader

def look_often(number):
    worker.MP_STATUS_CHECK_INTERVAL = 0.2

if __name__ == "__main__":
    ways = dict(multiprocessing_context=sys.argv[1], worker_init_fn=look_often)
    batches = iter(DataLoader(range(1000), num_workers=1, **ways))
    next(batches)
    print(batches._workers[0].pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_only_forkserver_s_workers_outlive_a_killed_rank(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, tmp_path / "killed.py", way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        worker = psutil.Process(int(rank.stdout.readline()))
        rank.kill()
    _, alive = psutil.wait_procs([worker], timeout=60 if way != "forkserver" else 5)
    assert alive == [worker] * (way == "forkserver")
    page = words_of(ROOM)
    assert (
        "Such workers outlive a killed rank, unless `worker_init_fn` is `end_with"
        in page
    )
    if alive:
        worker.kill()


def on_two_gpus() -> torch.nn.Module:
    """Return a layer that says its parameters were on two GPUs."""
    layer = torch.nn.Linear(1, 1)
    devices = [torch.device("cuda", number) for number in range(2)]
    parameters = [(d.type, mock.Mock(device=d, requires_grad=True)) for d in devices]
    layer.named_parameters = mock.Mock(return_value=parameters)
    return layer


def copied_lines() -> dict[str, str]:
    """Return the errors of lines that are in many scripts, here without a GPU."""
    local_rank, layer = dist.get_rank(), torch.nn.Linear(1, 1)
    numbers: Any = range(3)
    sampler = SequentialSampler(numbers)
    stream: Any = script("iterable").Stream(False, False)
    lines: dict[str, Callable[[], object]] = {
        "to": lambda: layer.to(local_rank),
        "cuda": lambda: layer.to(f"cuda:{local_rank}"),
        "text": lambda: layer.to(str(local_rank)),
        "unset": lambda: torch.cuda.set_device(-1),
        "negative": lambda: torch.device("cuda", -1),
        "unset text": lambda: torch.cuda.set_device("-1"),
        "a text of it": lambda: torch.device("cuda:-1"),
        "to unset": lambda: torch.ones(1).to(-1),
        "device_ids": lambda: DistributedDataParallel(layer, [local_rank]),
        "two GPUs": lambda: DistributedDataParallel(on_two_gpus(), [local_rank]),
        "shuffle": lambda: DataLoader(numbers, sampler=sampler, shuffle=True),
        "sampler": lambda: DataLoader(stream, sampler=sampler),
        "shuffled stream": lambda: DataLoader(stream, shuffle=True),
    }
    return {name: error_of(line) for name, line in lines.items()}


def test_copied_lines_fail_without_a_gpu(worker_pool: WorkerPool) -> None:
    if torch.accelerator.is_available():
        pytest.fail("this test is about machines without a GPU")
    (found,) = worker_pool.run(copied_lines, world_size=1)
    no_driver = "Found no NVIDIA driver on your system."
    if torch.version.cuda:  # the build for CUDA, which pip takes on Linux
        assert no_driver in found["to"] and no_driver in found["cuda"]
    else:
        words = "Cannot access accelerator device when none is available."
        assert words in found["to"]
        assert "Torch not compiled with CUDA enabled" in found["cuda"]
    assert "RuntimeError: Invalid device string: '0'" in found["text"]
    # `--local_rank` with default=-1, which no launcher has passed: not a word.
    assert found["unset"] == ""
    assert found["negative"] == "RuntimeError: Device index must not be negative"
    assert found["unset text"] == "RuntimeError: Invalid device string: '-1'"
    assert found["a text of it"] == "RuntimeError: Invalid device string: 'cuda:-1'"
    assert found["to unset"] == "RuntimeError: Device index must not be negative"
    words = "ValueError: DistributedDataParallel device_ids and output_device arguments"
    for name in ("device_ids", "two GPUs"):
        assert found[name].startswith(words)
        assert (
            "only work with single-device/multiple-device GPU modules or CPU modules"
            in found[name]
        )
    assert "got device_ids [0], output_device None" in found["device_ids"]


def test_a_sampler_excludes_shuffle_and_an_iterable_both(
    worker_pool: WorkerPool,
) -> None:
    (found,) = worker_pool.run(copied_lines, world_size=1)
    words = "ValueError: sampler option is mutually exclusive with shuffle"
    assert found["shuffle"] == words
    words = "DataLoader with IterableDataset: expected unspecified sampler option"
    assert words in found["sampler"]
    words = "DataLoader with IterableDataset: expected unspecified shuffle option"
    assert words in found["shuffled stream"]


def with_output_device() -> str:
    """Name the rank as output device, on CPUs; 0 is taken for none."""
    layer, rank = torch.nn.Linear(1, 1), dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=1))
    options: Any = {"output_device": rank, "process_group": group}
    return error_of(lambda: DistributedDataParallel(layer, **options))


@pytest.mark.slow
def test_output_device_fails_on_all_ranks_but_the_first(
    worker_pool: WorkerPool,
) -> None:
    zero, one = worker_pool.run(with_output_device)
    assert "got device_ids None, output_device 1, and module parameters" in one
    # It went on, waited for rank 1 in the constructor, and lost it.
    assert zero and "output_device" not in zero


def different_models() -> str:
    """Wrap a layer that has a bias on rank 0 only."""
    layer = torch.nn.Linear(2, 1, bias=dist.get_rank() == 0)
    return error_of(lambda: DistributedDataParallel(layer))


def test_ranks_with_different_models_are_refused(worker_pool: WorkerPool) -> None:
    words = "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 "
    words += "params, while rank 1 has inconsistent 1 params."
    errors = worker_pool.run(different_models)
    assert words in errors


def one_model_after_a_call_of_one_rank() -> str:
    """Wrap one model on both ranks, after a collective that rank 1 alone makes."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        numbers = [torch.tensor([0]) for _ in range(2)]
        dist.all_gather(numbers, torch.tensor([0]), group=group)
    model = torch.nn.Linear(2, 1)
    return error_of(lambda: DistributedDataParallel(model, process_group=group))


def test_equal_models_seem_to_differ_where_ranks_are_out_of_step(
    worker_pool: WorkerPool,
) -> None:
    errors = worker_pool.run(one_model_after_a_call_of_one_rank)
    words = "Rank 0 has 2 params, while rank 1 has inconsistent 0 params."
    assert words in errors[0] and len(errors) == 2


def frozen_on_one_rank() -> tuple[list[bool], str]:
    """Freeze a bias on rank 1 only; say whether two lists tell the ranks apart."""
    layer = torch.nn.Linear(2, 1)
    layer.bias.requires_grad_(dist.get_rank() == 0)
    found = []
    for keys in (["shape"], ["shape", "requires_grad"]):
        mine = [
            [n, *(getattr(p, k) for k in keys)] for n, p in layer.named_parameters()
        ]
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, mine)
        found.append(others[0] != others[1])
    return found, error_of(lambda: DistributedDataParallel(layer))


def test_a_layer_frozen_on_one_rank_has_another_requires_grad(
    worker_pool: WorkerPool,
) -> None:
    (found, zero), (_, one) = worker_pool.run(frozen_on_one_rank)
    assert found == [False, True]
    words = "DDP expects same model across all ranks, but Rank 0 has 2 params"
    assert words in zero or words in one


def test_rank_is_no_variable_without_a_launcher() -> None:
    with mock.patch.dict("os.environ", clear=True):
        assert error_of(lambda: int(os.environ["RANK"])) == "KeyError: 'RANK'"
        # As chapter 03's minimal.py reads it.
        said = error_of(lambda: int(os.environ["LOCAL_WORLD_SIZE"]))
        assert said == "KeyError: 'LOCAL_WORLD_SIZE'"


FAILS = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise RuntimeError("what really happened")

main()
"""


def test_child_failed_error_names_the_first_error_below(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    result = torchrun(path, nproc=1)
    assert result.returncode == 1
    header = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    lines = iter(result.output.splitlines())
    expected = [header, "Root Cause (first observed failure):"]
    for words in [*expected, "RuntimeError: what really happened"]:
        assert any(words in line for line in lines), (words, result.output)


class Unmapped(Dataset):
    """Samples whose memory is gone, as when older versions found /dev/shm full."""

    def __len__(self) -> int:
        """Count the samples."""
        return 2

    def __getitem__(self, index: int) -> int:
        """Write to a page of a file that was cut."""
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            page[0] = 1
        return index


class Killed(Unmapped):
    """Samples for which there is not enough memory."""

    def __getitem__(self, index: int) -> int:
        """Do what Linux does when it runs out of memory."""
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def killed_in_a_worker(samples: Dataset) -> str:
    """Return what a rank prints whose worker a signal has ended."""
    loader = DataLoader(samples, num_workers=1, multiprocessing_context="fork")
    try:
        next(iter(loader))
    except RuntimeError:
        return traceback.format_exc()
    return ""


def test_bus_error_of_a_worker(worker_pool: WorkerPool) -> None:
    (text,) = worker_pool.run(killed_in_a_worker, Unmapped(), world_size=1)
    words = "is killed by signal: Bus error. It is possible that dataloader's workers "
    words += "are out of shared memory. Please try to raise your shared memory limit."
    assert words in text
    assert "DataLoader worker (pid" in text


def test_a_signal_that_ends_a_worker_is_named(worker_pool: WorkerPool) -> None:
    (text,) = worker_pool.run(killed_in_a_worker, Killed(), world_size=1)
    assert "is killed by signal: Killed" in text
