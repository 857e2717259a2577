"""The room about bandwidth: what is timed and how, the line, the ring with pieces."""

import contextlib
import importlib
import io
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, torchrun
from lessons import run_lesson
from scripts import load_chapter
from worker_pool import RankError, WorkerPool

ROOM = "01_communication/bandwidth"
MODULES = load_chapter(ROOM)
BANDWIDTH, RING, TIMING = (
    MODULES[name] for name in ("bandwidth", "pipelined_ring", "timing")
)


def drawing(name: str) -> Any:
    """Import one module of assets/ and what it needs itself.

    `load_chapter` would import them all, and with them matplotlib, in every worker.
    """
    with mock.patch.object(sys, "path", [str(ROOT / "assets"), *sys.path]):
        return importlib.import_module(name)


def run_to_its_end(script: str, *words: str, **patches: Any) -> tuple[int, str, str]:
    """Be one rank of a lesson, with functions replaced; return status and output."""
    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name, function in patches.items():
            patch = mock.patch.object(MODULES[script], name, function)
            stack.enter_context(patch)
        stack.enter_context(contextlib.redirect_stderr(errors))
        try:
            return 0, run_lesson(ROOM, script, *words), errors.getvalue()
        except SystemExit as end:
            return int(end.code or 0), "", errors.getvalue()


# --- How a call is timed. ----------


def late_rank() -> list[tuple[float, bool]]:
    """Time a call that takes rank 1 a tenth of a second, and a collective after it."""

    def wait(_: torch.Tensor) -> None:
        time.sleep(0.1 * dist.get_rank())

    one = torch.ones(1)
    calls = {
        "late": TIMING.Call(wait, one, start=one),
        "all_reduce": TIMING.Call(dist.all_reduce, 2 * one, start=one),
    }
    timings = TIMING.time_in_turn(calls, rounds=5)
    return [(seconds, right) for seconds, right in timings.values()]


def test_a_call_takes_as_long_as_on_its_slowest_rank(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run(late_rank)
    assert len(ranks) == 2 and ranks[0] == ranks[1]
    (late, late_is_right), (all_reduce, all_reduce_is_right) = ranks[0]
    assert len(late) == len(all_reduce) == 5
    assert min(late) >= 0.1
    # Rank 0's clock does not run while it waits for rank 1 to be there.
    assert statistics.median(all_reduce) < 0.05
    assert late_is_right and all_reduce_is_right


def order_of_calls(rounds: int) -> str:
    """Return the letters of the calls, as they are made."""
    made = []
    zero = torch.zeros(1)
    calls = {
        letter: TIMING.Call(lambda _, letter=letter: made.append(letter), zero)
        for letter in "abc"
    }
    TIMING.time_in_turn(calls, rounds)
    return "".join(made)


def test_calls_take_turns_and_warm_up_first(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(order_of_calls, 4) == ["bcacab" + "abcbcacababc"] * 2


def wrong_at_times() -> list[bool]:
    """Time calls that are wrong: always, on rank 1, in the second of three rounds."""
    made = []

    def second(tensor: torch.Tensor) -> None:
        made.append(None)
        tensor += len(made) != 2 + 2  # two rounds warm up

    calls = {
        "right": TIMING.Call(lambda tensor: tensor.add_(1), torch.ones(2)),
        "never": TIMING.Call(lambda tensor: None, torch.ones(2)),
        "on rank 0": TIMING.Call(
            lambda tensor: tensor.add_(dist.get_rank() == 0), torch.ones(2)
        ),
        "not in the second": TIMING.Call(second, torch.ones(2)),
    }
    return [one.is_right for one in TIMING.time_in_turn(calls, rounds=3).values()]


def test_values_of_every_round_are_compared(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(wrong_at_times) == [
        [True, False, True, False],
        [True, False, False, False],
    ]


# --- What is timed. ----------


def call_each(numel: int) -> dict[str, list[float]]:
    """Return the result of every collective that is timed."""
    answers = {}
    ways = BANDWIDTH.collectives(numel)
    assert len(ways) == 6
    for name, way in ways.items():
        result = torch.empty_like(way.expected).copy_(way.start)
        way.function(result)
        assert torch.equal(result, way.expected), name
        answers[name] = result.tolist()
    return answers


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
        assert answers == {
            "all_reduce": total,
            "all_gather": list(range(numel)),
            "reduce_scatter": total[2 * rank : 2 * rank + 2],
            "broadcast": list(range(numel)),
            "all_to_all": [s + i for s in range(n) for i in (2 * rank, 2 * rank + 1)],
            "send/recv": [left + i for i in range(numel)],
        }
    part = (n - 1) / n
    assert BANDWIDTH.bus_factors(n) == {
        "all_reduce": 2 * part,
        "all_gather": part,
        "reduce_scatter": part,
        "broadcast": 1.0,
        "all_to_all": part,
        "send/recv": 1.0,
    }


# --- The line. ----------


def test_line_is_found_and_small_messages_count() -> None:
    sizes = [2**power for power in range(10, 27, 2)]
    exact = [100e-6 + count / 1e9 for count in sizes]
    line = TIMING.fit_line(sizes, exact)
    assert line.latency == pytest.approx(100e-6, rel=1e-6)
    assert line.bandwidth == pytest.approx(1e9, rel=1e-6)
    assert line.worst < 1e-6
    # The largest message took 20 % longer. On absolute errors that would move the
    # latency by more than its own size.
    slower = [*exact[:-1], 1.2 * exact[-1]]
    line = TIMING.fit_line(sizes, slower)
    assert line.latency == pytest.approx(100e-6, rel=0.05)
    plain = statistics.linear_regression(sizes, slower)
    assert abs(plain.intercept - 100e-6) > 100e-6


def test_speed_of_a_copy_is_that_of_the_median_round() -> None:
    timing = TIMING.Timing([1.0, 2.0, 9.0], True)
    timed = mock.Mock(return_value={"copy": timing})
    with mock.patch.object(TIMING, "time_in_turn", timed):
        assert TIMING.copy_bandwidth(100) == 400 / 2.0  # bytes in 2 s
    copied = torch.zeros(100)
    timed.call_args.args[0]["copy"].function(copied)
    assert torch.equal(copied, torch.ones(100))


# --- bandwidth.py. ----------


def bandwidth_in_three_rounds(*words: str) -> tuple[int, str, str]:
    """Run the lesson, but time each call three times only.

    Two rounds more, one in no time and one in a minute, leave the median as it is.
    """

    def three_times(calls: dict[str, Any], rounds: int) -> dict[str, Any]:
        assert rounds >= 5
        return {
            name: timing._replace(seconds=[0.0, *timing.seconds, 60.0])
            for name, timing in TIMING.time_in_turn(calls, 3).items()
        }

    return run_to_its_end("bandwidth", *words, time_in_turn=three_times)


def test_bandwidth_lesson_and_its_numbers(
    worker_pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "numbers.json"
    words = f"--max-bytes={2**20}", f"--json={numbers}"
    ranks = worker_pool.run(bandwidth_in_three_rounds, *words, world_size=3)
    assert ranks[1:] == [(0, "", "")] * 2
    assert ranks[0][0] == 0
    lines = ranks[0][1].splitlines()
    check = "check: 36 timed results have the right values on all ranks"
    assert len(lines) == 2 + 6 + 1 + 1 + 6 + 1 and lines[-1] == check
    measured = json.loads(numbers.read_text())
    # Cut down to what divides by 3 ranks.
    sizes = [4 * (4**i // 3 * 3) for i in range(4, 10)]
    assert sizes[:2] == [1020, 4092]
    assert measured["ranks"] == 3 and measured["bytes"] == sizes
    names = list(BANDWIDTH.bus_factors(3))
    assert measured["factors"] == BANDWIDTH.bus_factors(3)
    assert list(measured["seconds"]) == names and len(names) == 6
    medians = [seconds for row in measured["seconds"].values() for seconds in row]
    assert len(medians) == 6 * 6 and min(medians) > 0 and max(medians) < 10
    # What is printed follows from what is saved.
    assert len(sizes) == 6
    for i, count in enumerate(sizes):
        rates = [
            measured["factors"][name] * count / measured["seconds"][name][i] / 1e9
            for name in names
        ]
        assert lines[2 + i].split() == [
            *(f"{4**i:,}", "KB"),
            *(f"{rate:.3f}" for rate in rates),
        ]
    copy = measured["copy_bytes_per_second"]
    assert lines[8].startswith(f"a plain memory copy: {copy / 1e9:.2f} GB/s")
    for row, name in zip(lines[10:16], names, strict=True):
        line = TIMING.fit_line(sizes, measured["seconds"][name])
        bus = measured["factors"][name] * line.bandwidth
        assert row.split() == [
            *(name, f"{line.latency * 1e6:.0f}", "us", f"{bus / 1e9:.2f}", "GB/s"),
            *(f"{bus / copy:.0%}", f"{line.worst:.0%}"),
        ]
    capsys.readouterr()
    words = "draw_bandwidth.py", f"--numbers={numbers}", f"--out={tmp_path}"
    with mock.patch.object(sys, "argv", list(words)):
        drawing("draw_bandwidth").main()
    assert capsys.readouterr().out == (
        "check: 6 collectives of 6 sizes; wrote 01_bandwidth.png\n"
    )
    assert (tmp_path / "01_bandwidth.png").stat().st_size > 10_000


def broadcast_nothing(tensor: torch.Tensor, _: int) -> None:
    """Stand in for a broadcast that leaves the tensors alone."""


def bandwidth_without_a_broadcast() -> tuple[int, str, str]:
    with mock.patch.object(dist, "broadcast", broadcast_nothing):
        return bandwidth_in_three_rounds(f"--max-bytes={2**20}")


def test_wrong_values_are_not_timed_in_silence(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run(bandwidth_without_a_broadcast)
    assert [status for status, _, _ in ranks] == [1, 1]
    # Rank 0 is the one that broadcasts.
    claim = "36 timed results have the right values on all ranks"
    assert [error for _, _, error in ranks] == [
        f"check failed on ranks [1], not so: {claim}\n",
        "",
    ]


@pytest.mark.slow
def test_bandwidth_script() -> None:
    result = torchrun(f"{ROOM}/bandwidth.py", f"--max-bytes={2**20}")
    assert result.returncode == 0, result.output
    check = "check: 36 timed results have the right values on all ranks"
    assert result.stdout.splitlines()[-1] == check
    assert "FutureWarning" not in result.stderr


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("bandwidth", [], "start it with torchrun --nproc-per-node=2 bandwidth.py"),
        (
            "bandwidth",
            ["--max-bytes=9"],
            "argument --max-bytes/--max_bytes: '9' is no number from 1048576 to 10737",
        ),
        ("bandwidth", ["--json=no/x"], "--json=no/x: there is no folder no"),
        ("pipelined_ring", [], "start it with torchrun --nproc-per-node=2 pipelined"),
        ("pipelined_ring", ["--rounds=0"], "argument --rounds: '0' is no number from"),
        ("pipelined_ring", ["--sizes", "-1"], "argument --sizes: "),
        ("pipelined_ring", ["--sizes=nan"], "argument --sizes: 'nan' is no number fr"),
        ("pipelined_ring", ["--sizes=big"], "argument --sizes: 'big' is no number fr"),
        ("pipelined_ring", ["--sizes"], "argument --sizes: expected at least one arg"),
    ],
)
def test_scripts_refuse(
    capsys: pytest.CaptureFixture[str], script: str, words: list[str], message: str
) -> None:
    with (
        mock.patch.object(sys, "argv", [f"{script}.py", *words]),
        pytest.raises(SystemExit) as ended,
    ):
        MODULES[script].main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"{script}.py: {message}") and err.count("\n") == 1


def test_page_shows_the_committed_numbers() -> None:
    measured = json.loads((ROOT / "assets" / "01_bandwidth.json").read_text())
    sizes, seconds = measured["bytes"], measured["seconds"]
    assert sizes == [2**power for power in range(10, 27, 2)]
    assert measured["factors"] == BANDWIDTH.bus_factors(measured["ranks"])
    # The page quotes what the run that wrote the numbers has printed.
    page = (ROOT / ROOM / "README.md").read_text()
    copy = measured["copy_bytes_per_second"]
    rows = [f"copy: {copy / 1e9:.2f} GB/s on each rank"]
    for i, count in enumerate(sizes):
        row = f"{count >> 10:6,} KB"
        for name, factor in measured["factors"].items():
            rate = factor * count / seconds[name][i] / 1e9
            row += f"{rate:{len(name) + 2}.3f}"
        rows.append(f"{row}\n")
    for name, factor in measured["factors"].items():
        line = TIMING.fit_line(sizes, seconds[name])
        bus = factor * line.bandwidth
        row = f"  {name:22}{line.latency * 1e6:8.0f} us {bus / 1e9:9.2f} GB/s"
        rows.append(f"{row}{bus / copy:11.0%}{line.worst:14.0%}\n")
    assert len(rows) == 1 + 9 + 6
    assert [row for row in rows if row not in page] == []


# --- The ring with several pieces in flight. ----------


def counting(call: Any, sent: list[int]) -> Any:
    """Return `dist.send` or `dist.isend` as one that notes the bytes it is given."""

    def counted(tensor: torch.Tensor, to: int) -> Any:
        sent.append(tensor.nbytes)
        return call(tensor, to)

    return counted


def irecv_that_spoils(
    irecv: Any, scratch: torch.Tensor, buffer: torch.Tensor, peer: int
) -> Any:
    """Receive, but overwrite a part of `scratch` at once, as gloo may at any time."""
    if buffer.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr():
        buffer.fill_(54321)
    return irecv(buffer, peer)


def all_reduces_of(lengths: list[int], piece: int) -> list[tuple[bool, int, int]]:
    """Return for each length: whether all elements agree, bytes of ring and naive."""
    results = []
    with mock.patch.object(RING, "PIECE", piece):
        for numel in lengths:
            mine = torch.randint(-99, 100, (numel,)) * (dist.get_rank() + 1)
            built_in = mine.clone()
            dist.all_reduce(built_in)
            scratch = torch.full((RING.IN_FLIGHT * piece,), 12345)
            receive = partial(irecv_that_spoils, dist.irecv, scratch)
            equal, sent = [], []
            for way in (
                partial(RING.pipelined_all_reduce, scratch=scratch),
                partial(RING.all_reduce_through_rank_zero, received=mine.clone()),
            ):
                tensor, by_way = mine.clone(), []
                with (
                    mock.patch.object(dist, "send", counting(dist.send, by_way)),
                    mock.patch.object(dist, "isend", counting(dist.isend, by_way)),
                    mock.patch.object(dist, "irecv", receive),
                ):
                    way(tensor)
                equal.append(torch.equal(tensor, built_in))
                sent.append(sum(by_way))
            results.append((all(equal), *sent))
    return results


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
def test_pipelined_ring_is_the_sum_and_sends_what_it_must(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n = world_size
    lengths = sorted({0, 1, 2, n - 1, n, n + 1, 3 * n, 97, 100 * n})
    # Pieces of 4 elements: chunks of none, one and several pieces, and odd ends.
    ranks = worker_pool.run(all_reduces_of, lengths, 4, world_size=n)
    assert len(ranks) == n and len(lengths) >= 6
    for rank, results in enumerate(ranks):
        assert len(results) == len(lengths)
        for numel, (equal, by_ring, naive) in zip(lengths, results, strict=True):
            assert equal, (rank, numel)
            assert by_ring == ring_bytes(numel, 8, rank, n)
            assert naive == 8 * numel * (1 if rank else n - 1) * (n > 1)
    for i, numel in enumerate(lengths):
        sent = [results[i][1] for results in ranks]
        assert sum(sent) == 2 * (n - 1) * numel * 8
        if numel % n == 0:
            assert sent == [2 * (n - 1) * numel * 8 // n] * n


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_pipelined_ring_in_pieces_of_the_real_size(
    worker_pool: WorkerPool, world_size: int
) -> None:
    length = 2 * world_size * RING.PIECE + 1
    ranks = worker_pool.run(all_reduces_of, [length], RING.PIECE, world_size=world_size)
    assert [equal for ((equal, _, _),) in ranks] == [True] * world_size


def sum_of_fractions() -> tuple[torch.Tensor, torch.Tensor]:
    """Sum up 1001 fractions by the ring and by gloo."""
    by_ring = torch.rand(
        7, 11, 13, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    built_in = by_ring.clone()
    RING.pipelined_all_reduce(by_ring, torch.empty(RING.IN_FLIGHT * RING.PIECE))
    dist.all_reduce(built_in)
    return by_ring, built_in


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_of_the_pipelined_ring_hold_the_same_bits(
    worker_pool: WorkerPool, world_size: int
) -> None:
    ranks = worker_pool.run(sum_of_fractions, world_size=world_size)
    assert len(ranks) == world_size
    for by_ring, built_in in ranks:
        assert torch.equal(by_ring, ranks[0][0])
        torch.testing.assert_close(by_ring, built_in)
        assert by_ring.shape == (7, 11, 13)


def ring_of_a_transposed_matrix() -> None:
    """Hand the ring a tensor that does not lie in one piece."""
    RING.pipelined_all_reduce(torch.ones(2, 3).T, torch.empty(RING.IN_FLIGHT))


def test_ring_refuses_a_tensor_that_is_not_contiguous(worker_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="view size is not compatible"):
        worker_pool.run(ring_of_a_transposed_matrix)


def order_of_posting(numel: int) -> str:
    """Return R for each receive and S for each send, as the ring starts them."""
    order = []
    starts = {"isend": dist.isend, "irecv": dist.irecv}

    def noting(name: str) -> Any:
        def start(tensor: torch.Tensor, peer: int) -> Any:
            order.append(name[1].upper())
            return starts[name](tensor, peer)

        return start

    with (
        mock.patch.object(RING, "PIECE", 2),
        mock.patch.object(dist, "isend", noting("isend")),
        mock.patch.object(dist, "irecv", noting("irecv")),
    ):
        RING.pipelined_all_reduce(torch.ones(numel), torch.empty(2 * RING.IN_FLIGHT))
    return "".join(order)


def test_receives_are_posted_before_anything_is_sent(worker_pool: WorkerPool) -> None:
    # Two chunks of four pieces each, three receives at a time. Sends first, the ring
    # took half as long again between two hosts.
    ranks = worker_pool.run(order_of_posting, 16)
    assert ranks == ["RRR" + "SSSS" + "RS" * 4 + "R"] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring_lesson(worker_pool: WorkerPool, world_size: int) -> None:
    words = "--sizes", "0.01", "0.5", "--rounds=2"
    ranks = worker_pool.run(
        run_lesson, ROOM, "pipelined_ring", *words, world_size=world_size
    )
    assert ranks[1:] == [""] * (world_size - 1)
    lines = ranks[0].splitlines()
    assert lines[0] == "0.01 MB, median of 2 (middle half)"
    assert lines[4] == "0.5 MB, median of 2 (middle half)"
    assert lines[8:] == ["check: ring = naive = gloo = the sum in 2 sizes"]
    rows = [line.split() for line in lines[1:4] + lines[5:8]]
    assert [row[0] for row in rows] == ["ring", "naive", "gloo"] * 2
    assert len(rows) == 6
    for i, row in enumerate(rows):
        gloo = rows[2 if i < 3 else 5]
        middle, low, high = (float(row[k].strip("(),")) for k in (1, 3, 5))
        assert 0 < low <= middle <= high and row[7:] == ["of", "gloo's", "speed"]
        ratio = float(gloo[1]) / middle
        assert float(row[6]) == pytest.approx(ratio, rel=0.1, abs=0.02)


def ring_without_a_root() -> tuple[int, str, str]:
    """Run the lesson with a naive way in which rank 0 adds nothing."""
    return run_to_its_end(
        "pipelined_ring",
        *("--sizes", "0.01", "--rounds=2"),
        all_reduce_through_rank_zero=lambda tensor, received: None,
    )


def test_ring_lesson_notices_a_wrong_sum(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run(ring_without_a_root)
    assert [(status, out) for status, out, _ in ranks] == [(1, "")] * 2
    claim = "ring = naive = gloo = the sum in 1 sizes"
    assert ranks[0][2] == f"check failed on ranks [0, 1], not so: {claim}\n"


# --- The picture of the ring. ----------


def record_both() -> list[dict[str, Any]]:
    """Record the chapter's ring, and this room's with a piece for each chunk."""
    chapter = load_chapter("01_communication")["ring_all_reduce"].ring_all_reduce
    scratch = torch.empty(RING.IN_FLIGHT * RING.PIECE, dtype=torch.int64)
    pipelined = partial(RING.pipelined_all_reduce, scratch=scratch)
    record = drawing("record_ring").record
    return [record(ring) for ring in (chapter, pipelined)]


def test_drawn_messages_are_those_of_both_rings(worker_pool: WorkerPool) -> None:
    drawn = json.loads((ROOT / "assets" / "01_ring.json").read_text())
    assert [len(one["sent"]) for one in drawn] == [4, 4, 4]
    ranks = worker_pool.run(record_both, world_size=3)
    assert [chapter for chapter, _ in ranks] == drawn
    assert [pipelined for _, pipelined in ranks] == drawn


@pytest.mark.parametrize("world_size", [3, 4])
def test_exercise_which_chunk_a_rank_completes(
    worker_pool: WorkerPool, world_size: int
) -> None:
    n = world_size
    ranks = worker_pool.run(record_both, world_size=n)
    assert len(ranks) == n
    for rank, (by_chapter, pipelined) in enumerate(ranks):
        chunks = [chunk for chunk, _ in by_chapter["sent"]]
        assert len(chunks) == 2 * (n - 1)
        # The all-gather begins with the chunk that the reduce-scatter completed.
        assert chunks[n - 1] == (rank + 1) % n
        assert pipelined == by_chapter


def test_replay_rejects_a_message_that_was_not_held() -> None:
    with pytest.raises(RuntimeError, match="rank 1 sent 9, which it did not hold"):
        drawing("draw_ring").replay([[(1, 0, 9)]])
