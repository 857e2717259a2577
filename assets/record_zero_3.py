"""Record in which order stage 3 by hand gathers, computes, frees and reduces.

Run: torchrun --nproc-per-node=2 assets/record_zero_3.py
Expect: 05_zero_3.json, which draw_zero_3.py draws, and a `check:` that both ranks did
    the same.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from pictures import ASSETS, chapter_module

ZERO_3 = chapter_module("05_deepspeed_zero/by_hand/zero_3.py")
RANKS = chapter_module("05_deepspeed_zero/by_hand/ranks.py")
MODULES = 4
Event = tuple[str, int]  # what happens, and the number of the module, from 1 on


@contextlib.contextmanager
def listening(zero_3: Any, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Let `note` hear of all that a FullySharded does, with the part or the module."""
    sharded, part_class = zero_3.FullySharded, zero_3.ShardedParameter
    real = {**vars(sharded), **vars(part_class)}  # both have a `free`: the part's
    real_reduce = dist.reduce_scatter_single
    sending: list[Any] = []  # the part whose gradient is reduced

    def start_gather(part: Any) -> None:
        if part.flat.untyped_storage().size() == 0:
            note("gather", part)
        real["start_gather"](part)

    def finish_gather(part: Any) -> None:
        is_waiting = part.gathering is not None
        real["finish_gather"](part)
        if is_waiting:
            note("gathered", part)

    def free(part: Any) -> None:
        if part.flat.untyped_storage().size():
            note("free", part)
        real["free"](part)

    def before_forward(model: Any, child: nn.Module, *inputs: Any) -> Any:
        called = real["before_forward"](model, child, *inputs)
        note("forward", child)
        return called

    def after_forward(model: Any, child: nn.Module, *rest: Any) -> None:
        note("forward ends", child)
        real["after_forward"](model, child, *rest)

    def before_backward(model: Any, used: list[nn.Module], i: int) -> None:
        real["before_backward"](model, used, i)
        note("backward", used[i])

    def reduce_scatter_gradient(model: Any, part: Any, whole: torch.Tensor) -> None:
        note("backward ends", part)
        sending[:] = [part]
        real["reduce_scatter_gradient"](model, part, whole)

    def reduce_scatter_single(*tensors: Any, **settings: Any) -> Any:
        (part,) = sending
        note("reduce-scatter", part)
        work: Any = real_reduce(*tensors, **settings)
        handle = mock.Mock(spec=["wait"])
        handle.wait.side_effect = lambda: (work.wait(), note("reduced", part))
        return handle

    of_part = (start_gather, finish_gather, free)
    of_model = (before_forward, after_forward, before_backward, reduce_scatter_gradient)
    with contextlib.ExitStack() as stack:
        for owner, functions in (
            (part_class, of_part),
            (sharded, of_model),
            (dist, [reduce_scatter_single]),
        ):
            for one in functions:
                patch = mock.patch.object(owner, one.__name__, one)
                stack.enter_context(patch)
        yield


def record_step(zero_3: Any) -> list[Event]:
    """Train two steps; return in order what this rank did in the second.

    In the first nobody knows yet which module comes next.
    """
    layers = [nn.Linear(8, 8, bias=False) for _ in range(MODULES)]
    numbers: dict[Any, int] = {layer: n for n, layer in enumerate(layers, 1)}
    log: list[Event] = []
    with listening(zero_3, lambda event, of: log.append((event, numbers.get(of, 0)))):
        model = zero_3.FullySharded(nn.Sequential(*layers))
        numbers |= {part: n for n, part in enumerate(model.parts, 1)}
        for _ in range(2):
            log.clear()
            model(torch.ones(2, 8)).sum().backward()
            model.finish_gradient_sync()
    return log


def main() -> None:
    """Record every rank, and save it from rank 0."""
    RANKS.join(at_least=2, at_most=2, only_cpu=True)
    by_rank = RANKS.gather(record_step(ZERO_3))
    if dist.get_rank() == 0:
        Path(ASSETS, "05_zero_3.json").write_text(json.dumps(by_rank) + "\n")
    is_same = by_rank == [by_rank[0]] * 2
    RANKS.check(is_same, f"{len(by_rank[0])} events, in the same order on both ranks")
    RANKS.leave()


if __name__ == "__main__":
    main()
