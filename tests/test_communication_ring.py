"""The ring all-reduce of chapter 01: sums on all ranks, and bytes.

Its picture, the ring with pieces and times are in test_communication_bandwidth.py.
"""

import contextlib
import inspect
import io
import re
import sys
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, torchrun
from lessons import run_lesson
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

CHAPTER = "01_communication"
RING = load_chapter(CHAPTER)["ring_all_reduce"]


# What runs on the ranks.


def ring_beside_built_in(lengths: list[int]) -> list[tuple[bool, int, int]]:
    """Return for each length: whether all elements agree, bytes of ring and naive."""
    results = []
    for numel in lengths:
        mine = torch.randint(-99, 100, (numel,)) * (dist.get_rank() + 1)
        built_in, by_ring, naive = mine.clone(), mine.clone(), mine.clone()
        dist.all_reduce(built_in)
        sent = RING.ring_all_reduce(by_ring), RING.naive_all_reduce(naive)
        equal = torch.equal(by_ring, built_in) and torch.equal(naive, built_in)
        results.append((equal, *sent))
    return results


def ring_of_fractions() -> tuple[torch.Tensor, torch.Tensor]:
    """Sum up 1001 fractions by the ring and by gloo."""
    by_ring = torch.rand(
        7, 11, 13, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    built_in = by_ring.clone()
    RING.ring_all_reduce(by_ring)
    dist.all_reduce(built_in)
    return by_ring, built_in


def sent_for_a_sum(is_sparse: bool) -> tuple[bool, float | None]:
    """All-reduce 100,000 ones; return if the sum is right, and sizes sent by a rank."""
    sent_bytes = load_chapter("03_ddp_torchrun/rules")["sent_bytes"]
    values = torch.ones(100_000)
    nbytes = values.nbytes
    if is_sparse:
        values = values.to_sparse()
        nbytes += values.indices().nbytes
    dist.all_reduce(values.clone())  # it connects the ranks
    sent = sent_bytes.sent_by_a_rank(lambda: dist.all_reduce(values))
    is_right = bool(values.to_dense().eq(dist.get_world_size()).all())
    return is_right, None if sent is None else sent / nbytes


def sent_for_a_reduce_scatter() -> list[float | None]:
    """Reduce-scatter 240,000 ones in both ways; return sizes sent by a rank."""
    sent_bytes = load_chapter("03_ddp_torchrun/rules")["sent_bytes"]
    world_size, found = dist.get_world_size(), []
    ones = torch.ones(240_000)
    parts, received = list(ones.chunk(world_size)), ones[: len(ones) // world_size] * 0
    for call in (
        lambda: dist.reduce_scatter(received, parts),
        lambda: dist.reduce_scatter_single(received, ones),
    ):
        call()  # it connects the ranks
        sent = sent_bytes.sent_by_a_rank(call)
        assert received.unique().tolist() == [world_size]
        found.append(None if sent is None else sent / ones.nbytes)
    return found


def ring_of_a_transposed_matrix() -> None:
    """Hand the ring a tensor that does not lie in one piece."""
    RING.ring_all_reduce(torch.ones(2, 3).T)


def wait_for_a_send_that_nobody_receives() -> str:
    """Wait half a second for it, and return how that ends."""
    work = dist.isend(torch.ones(8), 1 - dist.get_rank())
    try:
        work.wait(timedelta(seconds=0.5))  # type: ignore[union-attr]
    except RuntimeError as error:
        return str(error)
    return "sent"


def send_to_a_late_receiver(numel: int) -> tuple[float, list[float]]:
    """Send ones to a rank that receives later, and that waits later still.

    Returns:
        When the sender's wait returned, or the receive began; and what has arrived.
    """
    if dist.get_rank() == 0:
        x = torch.ones(numel)
        work = dist.isend(x, 1)
        dist.barrier()
        work.wait()  # type: ignore[union-attr]
        returned = time.monotonic()
        x.fill_(7)
        dist.barrier()
        return returned, []
    x = torch.zeros(numel)
    dist.barrier()
    time.sleep(0.3)  # for a wait that would return at once
    began = time.monotonic()
    work = dist.irecv(x, 0)
    dist.barrier()  # the sender has waited, and nobody here
    work.wait()  # type: ignore[union-attr]
    return began, x.unique().tolist()


def overwrite_what_is_being_sent(numel: int) -> list[float]:
    """Send ones, overwrite them before the other side receives; return what arrives."""
    x = torch.ones(numel)
    if dist.get_rank() == 0:
        work = dist.isend(x, 1)
        x.fill_(7)
        dist.barrier()
        work.wait()  # type: ignore[union-attr]
        return []
    dist.barrier()
    dist.recv(x, 0)
    return x.unique().tolist()


# The ring.


def ring_bytes(numel: int, itemsize: int, rank: int, world_size: int) -> int:
    """Return what a rank sends: everything twice, but for two chunks.

    It never sends the chunk that its right neighbour completes, nor in the all-gather
    the one that its right neighbour has first.
    """
    chunks = torch.empty(numel, device="meta").tensor_split(world_size)
    spared = [len(chunks[(rank + hop) % world_size]) for hop in (1, 2)]
    return (2 * numel - sum(spared)) * itemsize


@pytest.mark.parametrize(
    "world_size",
    [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7, 8))],
)
def test_ring_is_the_built_in_sum(worker_pool: WorkerPool, world_size: int) -> None:
    n = world_size
    lengths = sorted({0, 1, 2, n - 1, n, n + 1, 3 * n, 97, 100 * n})
    ranks = worker_pool.run(ring_beside_built_in, lengths, world_size=n)
    assert len(ranks) == n and len(lengths) >= 6
    for rank, results in enumerate(ranks):
        assert len(results) == len(lengths)
        for numel, (equal, by_ring, naive) in zip(lengths, results, strict=True):
            assert equal, (rank, numel)
            assert by_ring == ring_bytes(numel, 8, rank, n) * (n > 1)
            assert naive == 8 * numel * (1 if rank else n - 1)
    for i, numel in enumerate(lengths):
        sent = [results[i][1] for results in ranks]
        assert sum(sent) == 2 * (n - 1) * numel * 8
        if numel % n == 0:
            assert sent == [2 * (n - 1) * numel * 8 // n] * n
            assert max(sent) < 2 * numel * 8 or numel == 0
        if numel == 1:
            # One number makes one chunk, which two ranks send once and the rest twice.
            assert sorted(sent) == sorted([8 * (n > 1)] * min(n, 2) + [16] * (n - 2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_sparse_sum_sends_all_to_all(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n = world_size
    for is_sparse, expected in ((False, 2 * (n - 1) / n), (True, n - 1)):
        found = worker_pool.run(sent_for_a_sum, is_sparse, world_size=n)
        assert len(found) == n
        for is_right, sent in found:
            assert is_right
            assert (sent is not None) == (sys.platform == "linux")
            assert sent is None or sent == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reduce_scatter_sends_as_much_as_an_all_reduce(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n = world_size
    found = worker_pool.run(sent_for_a_reduce_scatter, world_size=n)
    sent_in_all = [sent for ways in found for sent in ways]
    assert len(sent_in_all) == 2 * n
    # A reduce-scatter alone would need half of it: (n - 1) / n.
    expected = pytest.approx(2 * (n - 1) / n, rel=0.03)
    for sent in sent_in_all:
        assert (sent is not None) == (sys.platform == "linux")
        assert sent is None or sent == expected
    page = (ROOT / CHAPTER / "bandwidth" / "README.md").read_text("utf-8")
    assert "Gloo's reduce-scatter is an all-reduce of which" in " ".join(page.split())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_hold_the_same_bits(worker_pool: WorkerPool, world_size: int) -> None:
    ranks = worker_pool.run(ring_of_fractions, world_size=world_size)
    assert len(ranks) == world_size
    for by_ring, built_in in ranks:
        assert torch.equal(by_ring, ranks[0][0])
        assert torch.equal(built_in, ranks[0][1])
        # Two numbers have one sum, three have one for each order of adding.
        assert torch.equal(by_ring, built_in) == (world_size == 2)
        torch.testing.assert_close(by_ring, built_in)
        assert by_ring.shape == (7, 11, 13)


def test_ring_refuses_a_tensor_that_is_not_contiguous(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="view size is not compatible"):
        worker_pool.run(ring_of_a_transposed_matrix)


def test_a_send_ends_only_when_it_is_received(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run(wait_for_a_send_that_nobody_receives)
    assert len(ranks) == 2
    # The rank that runs out of time first closes its connections. If the other has
    # not run out by then, it is told of that instead; neither send has ended.
    assert "sent" not in ranks
    timed_out = "Timed out waiting 500ms for send operation to complete"
    assert any(timed_out in text for text in ranks)
    for text in ranks:
        assert timed_out in text or re.search("closed by peer|reset by peer", text)


@pytest.mark.parametrize("numel", [1, 1_000_000])
def test_wait_on_a_send_returns_once_the_other_side_receives(
    worker_pool: WorkerPool, numel: int
) -> None:
    (returned, _), (began, arrived) = worker_pool.run(send_to_a_late_receiver, numel)
    assert returned > began
    # The bytes were taken before: the sender has overwritten its tensor since.
    assert arrived == [1.0]


@pytest.mark.parametrize("numel", [1, 1_000_000])
def test_isend_copies_nothing(worker_pool: WorkerPool, numel: int) -> None:
    assert worker_pool.run(overwrite_what_is_being_sent, numel) == [[], [7.0]]


def test_ring_is_short_enough_to_read() -> None:
    text = (ROOT / CHAPTER / "ring_all_reduce.py").read_text()
    body = text.split("def ring_all_reduce", 1)[1].split("\n\n\ndef ", 1)[0]
    code = body.split('"""', 2)[2].splitlines()
    assert 10 <= len(code) <= 16


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ring_script(worker_pool: WorkerPool, world_size: int) -> None:
    n = world_size
    ranks = worker_pool.run(run_lesson, CHAPTER, "ring_all_reduce", world_size=n)
    assert ranks[1:] == [""] * (n - 1)
    ring = 480_000 * 2 * (n - 1) // n
    lines = [f"bytes sent for a message of 480,000; 2 (n-1)/n of it is {ring:,}"]
    for rank in range(n):
        naive = 480_000 * (1 if rank else n - 1)
        row = f"  rank {rank} | ring {ring:9,} | through rank 0 {naive:9,}"
        lines.append(row)
    lines.append("check: 4 lengths: ring = through rank 0 = built-in; bytes by formula")
    assert ranks[0].splitlines() == lines


def ring_lesson_with(fault: str) -> tuple[Any, str]:
    """Run the lesson with a wrong function; return exit code and last words."""
    naive, errors = RING.naive_all_reduce, io.StringIO()
    name, function = {
        # Both bring as many bytes as they should, and no sum.
        "no ring": ("ring_all_reduce", lambda tensor: tensor.nbytes),
        "no root": ("naive_all_reduce", lambda tensor: tensor.nbytes),
        # On two ranks this is right on rank 0, and one byte too many on rank 1.
        "bytes": ("ring_all_reduce", lambda tensor: naive(tensor) + dist.get_rank()),
    }[fault]
    with mock.patch.object(RING, name, function), contextlib.redirect_stderr(errors):
        try:
            return 0, run_lesson(CHAPTER, "ring_all_reduce")
        except SystemExit as end:
            return end.code, errors.getvalue()


@pytest.mark.parametrize(
    ("fault", "failed"), [("no ring", [0, 1]), ("no root", [0, 1]), ("bytes", [1])]
)
def test_ring_lesson_notices_wrong_sums_and_bytes(
    worker_pool: WorkerPool, fault: str, failed: list[int]
) -> None:
    claim = "4 lengths: ring = through rank 0 = built-in; bytes by formula"
    assert worker_pool.run(ring_lesson_with, fault) == [
        (1, f"check failed on ranks {failed}, not so: {claim}\n"),
        (1, ""),
    ]


@pytest.mark.slow
def test_ring_script_on_ranks_that_do_not_divide_its_longest_message() -> None:
    result = torchrun(f"{CHAPTER}/ring_all_reduce.py", nproc=7)
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].endswith("479,976; 2 (n-1)/n of it is 822,816")
    assert sum("ring   822,816 |" in line for line in lines) == 7
    assert lines[-1].startswith("check: 4 lengths: ")


def ring_that_adds_before_it_waits() -> list[bool]:
    """Change the ring as exercise 2 of the page says; return which sums are right."""
    source = inspect.getsource(RING.ring_all_reduce)
    early = (
        "        for work in dist.batch_isend_irecv([receive, send]):\n"
        "            work.wait()\n"
    )
    late = source[source.index("        target.copy_(") : source.index("    return")]
    assert source.count(early) == late.count("\n") == 1
    source = source.replace(
        early, "        works = dist.batch_isend_irecv([receive, send])\n"
    )
    changed = late + "        for work in works:\n            work.wait()\n"
    scope = dict(vars(RING))
    exec(compile(source.replace(late, changed), "changed.py", "exec"), scope)
    results = []
    for numel in (8, 1000, 120_000):
        by_ring = torch.full((numel,), float(dist.get_rank() + 1))
        built_in = by_ring.clone()
        dist.all_reduce(built_in)
        scope["ring_all_reduce"](by_ring)
        results.append(torch.equal(by_ring, built_in))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_adding_before_waiting_gives_wrong_sums(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ranks = worker_pool.run(ring_that_adds_before_it_waits, world_size=world_size)
    assert len(ranks) == world_size
    # The largest message cannot have arrived by the next line of Python.
    assert not all(results[2] for results in ranks)
