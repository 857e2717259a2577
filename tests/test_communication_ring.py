"""The ring all-reduce and the bandwidth of the collectives: values, bytes, messages."""

import json
import re
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, python, torchrun
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

CHAPTER = "01_communication"
MODULES = load_chapter(CHAPTER)
RING, BANDWIDTH = MODULES["ring_all_reduce"], MODULES["bandwidth"]


# What runs on the ranks.


def ring_beside_built_in(lengths: list[int], piece: int) -> list[tuple[bool, int, int]]:
    """Return for each length: whether all elements agree, bytes of ring and naive."""
    results = []
    with mock.patch.object(RING, "PIECE", piece):
        for numel in lengths:
            mine = torch.randint(-99, 100, (numel,)) * (dist.get_rank() + 1)
            built_in, by_ring, by_hub = mine.clone(), mine.clone(), mine.clone()
            ring_send, hub_send = RING.CountingSend(), RING.CountingSend()
            dist.all_reduce(built_in)
            RING.ring_all_reduce(by_ring, ring_send)
            RING.naive_all_reduce(by_hub, hub_send)
            equal = torch.equal(by_ring, built_in) and torch.equal(by_hub, built_in)
            results.append((equal, ring_send.sent, hub_send.sent))
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


def ring_of_a_transposed_matrix() -> None:
    """Hand the ring a tensor that does not lie in one piece."""
    RING.ring_all_reduce(torch.ones(2, 3).T)


def chunks_sent() -> list[int]:
    """Return which chunks a rank sends, in order, if each is one element."""
    tensor, chunks = torch.ones(dist.get_world_size()), []

    def isend(piece: torch.Tensor, to: int) -> dist.Work | None:
        chunks.append(piece.storage_offset())
        return dist.isend(piece, to)

    RING.ring_all_reduce(tensor, isend)
    return chunks


def order_of_posting(numel: int) -> str:
    """Return R for each receive and S for each send, as the ring starts them."""
    order = []

    def isend(piece: torch.Tensor, to: int) -> dist.Work | None:
        order.append("S")
        return dist.isend(piece, to)

    def irecv(piece: torch.Tensor, source: int) -> dist.Work | None:
        order.append("R")
        return real_irecv(piece, source)

    real_irecv = dist.irecv
    with (
        mock.patch.object(RING, "PIECE", 2),
        mock.patch.object(RING.dist, "irecv", irecv),
    ):
        RING.ring_all_reduce(torch.ones(numel), isend)
    return "".join(order)


def wait_for_a_send_that_nobody_receives() -> str:
    """Wait half a second for it, and return how that ends."""
    work = dist.isend(torch.ones(8), 1 - dist.get_rank())
    try:
        work.wait(timedelta(seconds=0.5))  # type: ignore[union-attr]
    except RuntimeError as error:
        return str(error)
    return "sent"


def call_each(numel: int) -> dict[str, tuple[float, list[float]]]:
    """Return the factor and the result of every collective that is timed."""
    answers = {}
    ways = BANDWIDTH.collectives(numel)
    assert len(ways) == 6
    for name, way in ways.items():
        way.prepare()
        way.call()
        assert torch.equal(way.result, way.expected), name
        answers[name] = (way.factor, way.result.tolist())
    return answers


def time_a_call_that_does_nothing() -> None:
    """Time something that leaves zeros where ones should be."""
    wrong = BANDWIDTH.Collective(
        1.0, lambda: None, lambda: None, torch.zeros(2), torch.ones(2)
    )
    BANDWIDTH.median_seconds({"nothing": wrong}, rounds=1)


# The ring.


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "world_size",
    [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7)), 8],
)
def test_ring_is_the_built_in_sum(worker_pool: WorkerPool, world_size: int) -> None:
    n = world_size
    lengths = sorted({0, 1, 2, n - 1, n, n + 1, 3 * n, 97, 100 * n})
    # Pieces of 4 elements: chunks of none, one and several pieces, and odd ends.
    ranks = worker_pool.run(ring_beside_built_in, lengths, 4, world_size=n, timeout=100)
    assert len(ranks) == n and len(lengths) >= 6
    for rank, results in enumerate(ranks):
        assert len(results) == len(lengths)
        for numel, (equal, by_ring, by_hub) in zip(lengths, results, strict=True):
            assert equal, (rank, numel)
            assert by_ring == RING.ring_bytes(numel, 8, rank, n)
            assert by_hub == 8 * numel * (1 if rank else n - 1) * (n > 1)
    for i, numel in enumerate(lengths):
        sent = [results[i][1] for results in ranks]
        assert sum(sent) == 2 * (n - 1) * numel * 8
        if numel % n == 0:
            assert sent == [2 * (n - 1) * numel * 8 // n] * n


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ring_in_pieces_of_the_real_size(
    worker_pool: WorkerPool, world_size: int
) -> None:
    length = 2 * world_size * RING.PIECE + 1
    ranks = worker_pool.run(
        ring_beside_built_in, [length], RING.PIECE, world_size=world_size
    )
    assert [equal for ((equal, _, _),) in ranks] == [True] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_hold_the_same_bits(worker_pool: WorkerPool, world_size: int) -> None:
    ranks = worker_pool.run(ring_of_fractions, world_size=world_size)
    assert len(ranks) == world_size
    for by_ring, built_in in ranks:
        assert torch.equal(by_ring, ranks[0][0])
        torch.testing.assert_close(by_ring, built_in)
        assert by_ring.shape == (7, 11, 13)


def test_ring_refuses_a_tensor_that_is_not_contiguous(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="view size is not compatible"):
        worker_pool.run(ring_of_a_transposed_matrix)


@pytest.mark.parametrize("world_size", [3, 4])
def test_exercise_which_chunk_a_rank_completes(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n = world_size
    ranks = worker_pool.run(chunks_sent, world_size=n)
    assert len(ranks) == n
    for rank, chunks in enumerate(ranks):
        assert len(chunks) == 2 * (n - 1)
        # The all-gather begins with the chunk that the reduce-scatter completed.
        assert chunks[n - 1] == (rank + 1) % n


def test_room_is_made_before_anything_is_sent(worker_pool: WorkerPool) -> None:
    # Two chunks of four pieces each, three receives at a time. Sends first, the ring
    # took half as long again between two hosts.
    ranks = worker_pool.run(order_of_posting, 16)
    assert ranks == ["RRR" + "SSSS" + "RS" * 4 + "R"] * 2


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


def test_ring_is_short_enough_to_read() -> None:
    text = (ROOT / CHAPTER / "ring_all_reduce.py").read_text()
    body = text.split("def ring_all_reduce", 1)[1].split("\n\n\ndef ", 1)[0]
    code = body.split('"""', 2)[2].splitlines()
    assert 20 < len(code) <= 40


@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ring_script(nproc: int) -> None:
    result = torchrun(
        f"{CHAPTER}/ring_all_reduce.py", "--sizes", 0.01, "--rounds=2", nproc=nproc
    )
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    share = 480_000 * 2 * (nproc - 1) // nproc
    assert lines[0].endswith(f"of which is {share:,}")
    ranks = range(nproc)
    assert len(lines) == 1 + len(ranks) + 5
    for rank in ranks:
        hub = 480_000 * (1 if rank else nproc - 1)
        assert lines[1 + rank].split() == [
            *("rank", str(rank), "ring", f"{share:,}", "naive", f"{hub:,}")
        ]
    assert [line.split()[0] for line in lines[nproc + 2 : -1]] == [
        *("ring", "naive", "built-in")
    ]
    assert lines[-1] == (
        "check: ring = naive = built-in = the sum, 7 lengths; bytes as computed"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "start it with torchrun --nproc-per-node=2"),
        (["--rounds=0"], "--rounds must be 1 or more, --sizes from 0 to 1024"),
        (["--sizes", "-1"], "--rounds must be 1 or more, --sizes from 0 to 1024"),
        (["--sizes", "nan"], "--rounds must be 1 or more, --sizes from 0 to 1024"),
        (["--sizes=big"], "argument --sizes: invalid float value: 'big'"),
    ],
)
def test_ring_script_refuses(arguments: list[str], message: str) -> None:
    result = python(f"{CHAPTER}/ring_all_reduce.py", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"ring_all_reduce.py: {message}")
    assert result.stderr.count("\n") == 1


# The picture of the ring.


def test_replay_rejects_a_message_that_was_not_held() -> None:
    with pytest.raises(RuntimeError, match="rank 1 sent 9, which it did not hold"):
        MODULES["draw_ring"].replay([[(1, 0, 9)]])


# Bandwidth.


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_timed_collectives_give_the_right_values(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n, numel = world_size, 2 * world_size
    ranks = worker_pool.run(call_each, numel, world_size=n)
    assert len(ranks) == n
    for rank, answers in enumerate(ranks):
        # Rank r starts with r, r+1, r+2 and so on.
        total = [sum(range(n)) + n * i for i in range(numel)]
        left = (rank - 1) % n
        swapped = [s + i for s in range(n) for i in (2 * rank, 2 * rank + 1)]
        share = (n - 1) / n
        assert answers == {
            "all_reduce": (2 * share, total),
            "all_gather": (share, list(range(numel))),
            "reduce_scatter": (share, total[2 * rank : 2 * rank + 2]),
            "broadcast": (1.0, list(range(numel))),
            "all_to_all": (share, swapped),
            "send/recv": (1.0, [left + i for i in range(numel)]),
        }


def test_wrong_values_are_not_timed_in_silence(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="nothing of 8 bytes: wrong values"):
        worker_pool.run(time_a_call_that_does_nothing)


def test_line_is_found_and_small_messages_count() -> None:
    sizes = [2**power for power in range(10, 27, 2)]
    exact = [100e-6 + count / 1e9 for count in sizes]
    line = BANDWIDTH.fit_line(sizes, exact)
    assert line.latency == pytest.approx(100e-6, rel=1e-6)
    assert line.bandwidth == pytest.approx(1e9, rel=1e-6)
    assert line.worst < 1e-6
    # The largest message took 20 % longer. On absolute errors that would move the
    # latency by more than its own size.
    line = BANDWIDTH.fit_line(sizes, [*exact[:-1], 1.2 * exact[-1]])
    assert line.latency == pytest.approx(100e-6, rel=0.05)


def test_bandwidth_script_and_its_numbers(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = ["--max-bytes=4096", f"--json={numbers}"]
    result = torchrun(f"{CHAPTER}/bandwidth.py", *arguments, nproc=3)
    assert result.returncode == 0, result.output
    check = "check: 12 timed results on 3 ranks have the right values"
    assert result.stdout.splitlines()[-1] == check
    assert "FutureWarning" not in result.stderr
    measured = json.loads(numbers.read_text())
    # Cut down to what divides by 3 ranks.
    assert measured["ranks"] == 3 and measured["bytes"] == [1020, 4092]
    assert len(measured["collectives"]) == 6
    for one in measured["collectives"].values():
        line = BANDWIDTH.fit_line(measured["bytes"], one["seconds"])
        assert line.bandwidth == pytest.approx(one["bandwidth"])
        assert min(one["seconds"]) > 0
    drawn = python(
        *(f"{CHAPTER}/draw_bandwidth.py", f"--numbers={numbers}", f"--out={tmp_path}")
    )
    assert drawn.stdout == (
        "check: 6 lines fit their points best; wrote 01_bandwidth.png\n"
    )
    measured["collectives"]["broadcast"]["bandwidth"] *= 2
    numbers.write_text(json.dumps(measured))
    drawn = python(
        *(f"{CHAPTER}/draw_bandwidth.py", f"--numbers={numbers}", f"--out={tmp_path}")
    )
    assert drawn.returncode == 1
    assert "the line of broadcast does not belong to its points" in drawn.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs 2 ranks or more; start it with torchrun --nproc-per-node=2"),
        (["--max-bytes=9"], "--max-bytes must be from 4096 to 1073741824, not 9"),
        (["--json=nowhere/x"], "--json nowhere/x: there is no folder nowhere"),
        (["--json=tests"], "--json tests: this is a folder"),
    ],
)
def test_bandwidth_script_refuses(arguments: list[str], message: str) -> None:
    result = python(f"{CHAPTER}/bandwidth.py", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == f"bandwidth.py: {message}\n"


def test_page_shows_the_committed_numbers() -> None:
    measured = json.loads((ROOT / "assets" / "01_bandwidth.json").read_text())
    assert measured["bytes"] == [2**power for power in range(10, 27, 2)]
    ways = measured["collectives"]
    # The page quotes what the run that wrote the numbers has printed.
    page = (ROOT / CHAPTER / "README.md").read_text()
    rows = [f"copy: {measured['copy_bytes_per_second'] / 1e9:.2f} GB/s on each rank"]
    for i, count in enumerate(measured["bytes"]):
        rates = [
            one["factor"] * count / one["seconds"][i] / 1e9 for one in ways.values()
        ]
        columns = zip(rates, ways, strict=True)
        row = "".join(f"{rate:{len(name) + 2}.3f}" for rate, name in columns)
        rows.append(f"{count >> 10:,} KB{row}\n")
    for name, one in ways.items():
        bus = one["factor"] * one["bandwidth"] / 1e9
        rows.append(f"  {name:21}{one['latency'] * 1e6:7.0f} us {bus:10.2f} GB/s")
    assert len(rows) == 1 + 9 + 6
    assert [row for row in rows if row not in page] == []
