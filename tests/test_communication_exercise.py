"""The exercises of chapter 01: a right answer passes, a wrong one is told why.

The many answers to the other exercise are in test_exercises.py.
"""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import answers.reduce_scatter
import answers.uneven_mean
from answers.reduce_scatter import reduce_scatter
from launch import ROOT, python
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "01_communication/exercises"
MODULES = load_chapter(ROOM)
CHECK = MODULES["check_reduce_scatter"]
Send = Callable[[torch.Tensor, int], dist.Work]
NO_RING = "the sum is right, but not by the ring: it"


def with_start(
    tensor: torch.Tensor, isend: Send, first: int, steps: int
) -> torch.Tensor:
    """Go round the ring from chunk rank + `first`; return the chunk that came last."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor[0])
    for step in range(steps):
        sending = isend(
            tensor[(rank + first - step) % world_size], (rank + 1) % world_size
        )
        dist.recv(received, (rank - 1) % world_size)
        tensor[(rank + first - step - 1) % world_size] += received
        sending.wait()
    return tensor[(rank + first - steps) % world_size]


def starts_as_the_ring_does(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return with_start(tensor, isend, 0, dist.get_world_size() - 1)


def stops_too_early(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return with_start(tensor, isend, -1, dist.get_world_size() - 2)


def goes_on_too_long(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return with_start(tensor, isend, -1, dist.get_world_size())


def returns_its_own_number(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    """Start as the ring does, and return another chunk than the one that is whole."""
    starts_as_the_ring_does(tensor, isend)
    return tensor[dist.get_rank()]


def copies_what_arrives(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for hop in range(1, world_size):
        sending = isend(tensor[(rank - hop) % world_size], (rank + 1) % world_size)
        dist.recv(tensor[(rank - hop - 1) % world_size], (rank - 1) % world_size)
        sending.wait()
    return tensor[rank]


def sends_straight_to_the_owner(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    """Send n-1 chunks, each to the rank that is to have its sum: there is no ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [(rank + i) % world_size for i in range(1, world_size)]
    sends = [isend(tensor[other], other) for other in others]
    total, received = tensor[rank].clone(), torch.empty_like(tensor[0])
    for other in reversed(others):
        dist.recv(received, other)
        total += received
    for send in sends:
        send.wait()
    return total


def goes_round_to_the_left(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor[0])
    for hop in range(1, world_size):
        sending = isend(tensor[(rank + hop) % world_size], (rank - 1) % world_size)
        dist.recv(received, (rank + 1) % world_size)
        tensor[(rank + hop + 1) % world_size] += received
        sending.wait()
    return tensor[rank]


def calls_the_collective(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    received = torch.empty_like(tensor[0])
    dist.reduce_scatter(received, list(tensor.unbind()))
    return received


def goes_round_and_calls_a_collective(
    tensor: torch.Tensor, isend: Send
) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor[0])
    for _ in range(1, world_size):
        sending = isend(tensor[rank], (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        sending.wait()
    dist.all_reduce(tensor)
    return tensor[rank]


def goes_round_in_halves(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    def in_halves(chunk: torch.Tensor, to: int) -> mock.Mock:
        sends = [isend(half, to) for half in chunk.chunk(2)]
        return mock.Mock(wait=lambda: [send.wait() for send in sends])

    def receive(chunk: torch.Tensor, source: int) -> None:
        for half in chunk.chunk(2):
            receives(half, source)

    receives = dist.recv
    with mock.patch.object(dist, "recv", receive):
        return reduce_scatter(tensor, in_halves)


def does_nothing(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return tensor[dist.get_rank()]


def sends_everything(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own, received = tensor.clone(), torch.empty_like(tensor)
    sends = [isend(own, (rank + i) % world_size) for i in range(1, world_size)]
    for i in range(1, world_size):
        dist.recv(received, (rank - i) % world_size)
        tensor += received
    for send in sends:
        send.wait()
    return tensor[rank]


def returns_everything(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    reduce_scatter(tensor, isend)
    return tensor


def returns_nothing(tensor: torch.Tensor, isend: Send) -> None:
    reduce_scatter(tensor, isend)


def sends_first_and_waits(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sending = isend(tensor[rank], (rank + 1) % world_size)
    sending.wait()  # every rank waits here, and nobody comes to its recv
    dist.recv(tensor[rank - 1], (rank - 1) % world_size)
    return tensor[rank]


def waits_for_no_send(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    def not_waited_for(piece: torch.Tensor, to: int) -> mock.Mock:
        isend(piece, to)
        return mock.Mock()

    return reduce_scatter(tensor, not_waited_for)


def receives_into_what_it_sends(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunk = tensor[rank - 1]
    for hop in range(1, world_size):
        sending = isend(chunk, (rank + 1) % world_size)
        dist.recv(chunk, (rank - 1) % world_size)
        chunk += tensor[(rank - hop - 1) % world_size]
        sending.wait()
    return chunk


def sends_past_the_last_rank(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    isend(tensor[0], dist.get_rank() + dist.get_world_size())
    return tensor[0]


def asks_for_a_chunk_too_many(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return tensor[len(tensor)]


def try_answer(answer: Callable[[torch.Tensor, Send], torch.Tensor]) -> str:
    """Let the checker try an answer on this rank."""
    return CHECK.try_reduce_scatter(answer)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_answer_passes(worker_pool: WorkerPool, world_size: int) -> None:
    found = worker_pool.run(try_answer, reduce_scatter, world_size=world_size)
    assert found == [""] * world_size


@pytest.mark.parametrize(
    ("answer", "hints"),
    [
        (
            starts_as_the_ring_does,
            [
                f"it holds the whole sum of chunk {(rank + 1) % 3}, and should hold "
                f"chunk {rank}: let every rank start with another chunk"
                for rank in range(3)
            ],
        ),
        (
            stops_too_early,
            [
                f"the part of rank {missing} is missing; it sent 4 numbers to rank "
                f"{missing}: too few steps?"
                for missing in (1, 2, 0)
            ],
        ),
        (
            does_nothing,
            [
                f"the part of rank {missing} is missing; it sent nothing by isend: "
                "too few steps?"
                for missing in ("1, 2", "0, 2", "0, 1")
            ],
        ),
        (
            returns_its_own_number,
            [
                f"the part of rank {missing} is missing; it sent 8 numbers to rank "
                f"{right}: is what arrives waited for and added, and the first chunk "
                "right?"
                for missing, right in (("1, 2", 1), ("0, 2", 2), ("0, 1", 0))
            ],
        ),
        (
            copies_what_arrives,
            [
                f"the part of rank {missing} is missing; it sent 8 numbers to rank "
                f"{right}: is what arrives waited for and added, and the first chunk "
                "right?"
                for missing, right in (("0, 2", 1), ("0, 1", 2), ("1, 2", 0))
            ],
        ),
        (goes_on_too_long, ["its sum is "] * 3),
        # The right sum without a ring: each rank is told what it sent, and where.
        (
            sends_straight_to_the_owner,
            [
                f"{NO_RING} sent 4 numbers to rank {low}, 4 numbers to rank {high}, "
                f"and should send 2 chunks of 4, to rank {right} only"
                for low, high, right in ((1, 2, 1), (0, 2, 2), (0, 1, 0))
            ],
        ),
        (
            sends_everything,
            [
                f"{NO_RING} sent 12 numbers to rank {low}, 12 numbers to rank {high}, "
                f"and should send 2 chunks of 4, to rank {right} only"
                for low, high, right in ((1, 2, 1), (0, 2, 2), (0, 1, 0))
            ],
        ),
        (
            goes_round_to_the_left,
            [
                f"{NO_RING} sent 8 numbers to rank {left}, and should send 2 chunks of "
                f"4, to rank {right} only"
                for left, right in ((2, 1), (0, 2), (1, 0))
            ],
        ),
        (
            calls_the_collective,
            [
                f"{NO_RING} sent nothing by isend, and should send 2 chunks of 4, to "
                f"rank {right} only"
                for right in (1, 2, 0)
            ],
        ),
        (
            goes_round_and_calls_a_collective,
            [f"{NO_RING} called more than isend and recv"] * 3,
        ),
        (goes_round_in_halves, [""] * 3),
        (
            waits_for_no_send,
            ["the sum is right, but a send was not waited for: it could get lost"] * 3,
        ),
        (returns_everything, ["it returned 12 numbers; a chunk has 4"] * 3),
        (
            receives_into_what_it_sends,
            ["a chunk changed before its send was waited for: is what arrives"] * 3,
        ),
        (asks_for_a_chunk_too_many, ["it ended with: IndexError: index 3 is out"] * 3),
        (
            sends_past_the_last_rank,
            [f"it ended with: ValueError: there is no rank {to}" for to in (3, 4, 5)],
        ),
        (returns_nothing, ["it returned NoneType, not a tensor"] * 3),
        # Whose time-out ends first is open; the others then lose their connection.
        (sends_first_and_waits, ["it ended with: "] * 3),
    ],
)
def test_wrong_answer_is_told_why(
    worker_pool: WorkerPool,
    answer: Callable[[torch.Tensor, Send], torch.Tensor],
    hints: list[str],
) -> None:
    found = worker_pool.run(try_answer, answer, world_size=3, timeout=4)
    assert len(found) == len(hints) == 3
    for text, hint in zip(found, hints, strict=True):
        assert text.startswith(hint) and bool(text) == bool(hint), text


def relative_error(everyones: torch.Tensor) -> float:
    """Return how far the answer's deviation of three ranks' numbers is off."""
    right = everyones.double().std(correction=0).item()
    mine = everyones.tensor_split(3)[dist.get_rank()]
    return abs(answers.uneven_mean.mean_and_std(mine)[1] / right - 1)


def relative_errors() -> tuple[float, float]:
    """Return the largest error of 40 deviations of 1, and that of a small one."""
    errors, generator = [], torch.Generator().manual_seed(0)
    for count in [*range(3, 22), *range(1000, 1021)]:
        numbers = torch.randn(count, generator=generator)
        numbers = 10_000 + (numbers - numbers.mean()) / numbers.std(correction=0)
        errors.append(relative_error(numbers))
    assert len(errors) == 40
    small = 10_000 + torch.arange(4) / 100
    return max(errors), relative_error(small)


def test_answer_rounds_away_no_deviation_of_1_or_more(worker_pool: WorkerPool) -> None:
    by_rank = worker_pool.run(relative_errors, world_size=3)
    assert len(by_rank) == 3
    for of_1, of_a_hundredth in by_rank:
        assert of_1 < 1e-3 < of_a_hundredth
    assert "near 10,000 a deviation of 1 or more is right within 0.1 %" in words_of(
        ROOM
    )


# As a reader starts them. The untouched scripts are run by the room's page.


def with_answer(exercise: str, answer: ModuleType, function: str) -> str:
    """Return an exercise's text with the answer's function in the place of its own."""
    stub = inspect.getsource(getattr(MODULES[exercise], function))
    text = inspect.getsource(MODULES[exercise])
    assert text.count(stub) == 1
    return text.replace(stub, inspect.getsource(getattr(answer, function)))


@pytest.mark.parametrize(
    ("exercise", "answer", "function", "words", "claim"),
    [
        (
            "reduce_scatter",
            answers.reduce_scatter,
            "reduce_scatter",
            ["--nprocs=2"],
            "2 ranks hold their chunk of the sum",
        ),
        pytest.param(
            "uneven_mean",
            answers.uneven_mean,
            "mean_and_std",
            [],
            "3 ranks agree with one process in 5 cases",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_script_with_the_answer_in_it_passes(
    tmp_path: Path,
    exercise: str,
    answer: ModuleType,
    function: str,
    words: list[str],
    claim: str,
) -> None:
    for module in (ROOT / ROOM).glob("*.py"):
        (tmp_path / module.name).write_bytes(module.read_bytes())
    # As the page allows: a copy of another name, beside the untouched script.
    script = tmp_path / f"my_{exercise}.py"
    script.write_text(with_answer(exercise, answer, function))
    result = python(script, *words)
    assert (result.returncode, result.output) == (0, f"check: {claim}\n")


def test_any_error_is_told_in_one_line(tmp_path: Path) -> None:
    for module in ("ask_ranks.py", "ranks.py"):
        (tmp_path / module).write_bytes((ROOT / ROOM / module).read_bytes())
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\n\nimport torch.distributed as dist\n\n"
        "from ask_ranks import ask_ranks\n\n"
        "def checker(answer):\n"
        "    return answer[0] if dist.get_rank() == 0 else sys.exit(3)\n\n"
        "if __name__ == '__main__':\n    ask_ranks(checker, [], 2, 'never')\n"
    )
    result = python(script)
    assert result.output == (
        "rank 0: it ended with: IndexError: list index out of range (line 8 of "
        "mine.py)\n"
        "rank 1: it ended with: SystemExit: 3 (line 8 of mine.py)\n"
    )
    assert result.returncode == 1


def test_what_follows_a_colon_at_the_end_of_a_line_is_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 1).load_state_dict({"weight": torch.zeros(1, 2)})
    assert MODULES["ask_ranks"].in_words(caught.value) == (
        "it ended with: Error(s) in loading state_dict for Linear: "
        'Missing key(s) in state_dict: "bias".'
    )


def test_no_answer_stands_in_the_room() -> None:
    scripts = [path.read_text() for path in (ROOT / ROOM).glob("*.py")]
    assert len(scripts) == 6
    for answer, line in (
        (answers.reduce_scatter, "tensor[(rank - hop - 1) % world_size] += received"),
        (answers.uneven_mean, "total = torch.stack([own.sum(), torch.tensor(float("),
    ):
        assert line in inspect.getsource(answer)
        assert not any(line in script for script in scripts)


@pytest.mark.parametrize(
    ("exercise", "words", "environment", "message"),
    [
        (
            "reduce_scatter",
            ["--nprocs=1"],
            {},
            "argument --nprocs: '1' is no number from 2 to 8",
        ),
        ("reduce_scatter", ["--n=x"], {}, "argument --nprocs: 'x' is no number from 2"),
        ("uneven_mean", ["now"], {}, "unrecognized arguments: now"),
        ("uneven_mean", [], {"RANK": "0"}, "start it with python, not torchrun: it "),
    ],
)
def test_exercise_refuses(
    capsys: pytest.CaptureFixture[str],
    exercise: str,
    words: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    check = getattr(MODULES[f"check_{exercise}"], f"check_{exercise}")
    with (
        mock.patch.object(sys, "argv", [f"{exercise}.py", *words]),
        mock.patch.dict(os.environ, environment),
        pytest.raises(SystemExit) as ended,
    ):
        check(None)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"{exercise}.py: {message}") and err.count("\n") == 1
