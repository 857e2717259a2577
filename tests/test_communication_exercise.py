"""The reduce-scatter exercise: its checker refuses what is wrong and says why."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from answers.reduce_scatter import reduce_scatter
from launch import ROOT, python
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "01_communication"
EXERCISE = load_chapter(CHAPTER)["exercise_reduce_scatter"]
SCRIPT = ROOT / CHAPTER / "exercise_reduce_scatter.py"
Send = Callable[[torch.Tensor, int], dist.Work | None]


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
        sending.wait()  # type: ignore[union-attr]
    return tensor[(rank + first - steps) % world_size]


def starts_as_the_ring_does(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return with_start(tensor, isend, 0, dist.get_world_size() - 1)


def stops_too_early(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return with_start(tensor, isend, -1, dist.get_world_size() - 2)


def goes_on_too_long(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    return with_start(tensor, isend, -1, dist.get_world_size())


def sends_everything(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own, received = tensor.clone(), torch.empty_like(tensor)
    sends = [isend(own, (rank + i) % world_size) for i in range(1, world_size)]
    for i in range(1, world_size):
        dist.recv(received, (rank - i) % world_size)
        tensor += received
    for send in sends:
        send.wait()  # type: ignore[union-attr]
    return tensor[rank]


def returns_everything(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    reduce_scatter(tensor, isend)
    return tensor


def returns_nothing(tensor: torch.Tensor, isend: Send) -> None:
    reduce_scatter(tensor, isend)


def sends_first_and_waits(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sending = isend(tensor[rank], (rank + 1) % world_size)
    assert sending is not None
    sending.wait()  # every rank waits here, and nobody comes to its recv
    dist.recv(tensor[rank - 1], (rank - 1) % world_size)
    return tensor[rank]


def waits_for_no_send(tensor: torch.Tensor, isend: Send) -> torch.Tensor:
    def not_waited_for(piece: torch.Tensor, to: int) -> mock.Mock:
        isend(piece, to)
        return mock.Mock()

    return reduce_scatter(tensor, not_waited_for)  # type: ignore[arg-type]


def try_answer(answer: Callable[[torch.Tensor, Send], torch.Tensor]) -> str:
    """Let the checker judge an answer on this rank."""
    stub = EXERCISE.reduce_scatter
    vars(EXERCISE)["reduce_scatter"] = answer
    try:
        return EXERCISE.judge_reduce_scatter(dist.get_rank())
    finally:
        vars(EXERCISE)["reduce_scatter"] = stub


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
                f"the part of rank {rank} is missing: too few steps?"
                for rank in (1, 2, 0)
            ],
        ),
        (goes_on_too_long, ["its sum is "] * 3),
        (
            sends_everything,
            ["the sum is right, but 24 numbers were sent; 2 chunks"] * 3,
        ),
        (
            waits_for_no_send,
            ["the sum is right, but a send was not waited for: it could get lost"] * 3,
        ),
        (returns_everything, ["it returned 12 numbers; a chunk has 4"] * 3),
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
        assert text.startswith(hint), text


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--nprocs=1"], "--nprocs must be 2 to 8, not 1"), (["--n=x"], "argument --n")],
)
def test_exercise_refuses(words: list[str], message: str) -> None:
    result = python(SCRIPT, *words, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"exercise_reduce_scatter.py: {message}")
    assert result.stderr.count("\n") == 1
