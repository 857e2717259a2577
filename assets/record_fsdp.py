"""Record in which order FSDP2 gathers, computes, frees and reduces a GPT's units.

Run: torchrun --nproc-per-node=2 assets/record_fsdp.py
Expect: 06_fsdp.json, which draw_fsdp.py draws, and a `check:` that both ranks did the
    same.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pictures import ASSETS, chapter_module

MODEL = chapter_module("06_fsdp/model.py")
RANKS = chapter_module("06_fsdp/ranks.py")
ROOT = "R"
Event = tuple[str, str]  # what happens, and the unit: ROOT or a block's number


@contextlib.contextmanager
def listening(group: Any, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Let `note` hear of what FSDPParamGroup, a unit's own class, does to its streams.

    On a GPU messages and computation are in streams of their own. At "copy out" the
    computation waits for a gather; "hold" lets later gathers wait for a copy out.
    """
    real = dict(vars(group))
    last: list[Any] = [None]  # the unit that was copied out last, in forward

    def unshard(unit: Any, *settings: Any) -> None:
        is_new = unit._all_gather_result is None and not unit.is_unsharded
        real["unshard"](unit, *settings)
        if is_new:
            note("gather", unit)

    def wait_for_unshard(unit: Any) -> None:
        is_waiting = unit._all_gather_result is not None
        if is_waiting:
            note("copy out", unit)
        real["wait_for_unshard"](unit)
        if is_waiting:
            last[:] = [unit]

    def _wait_all_gather_streams_on_event(unit: Any, event: Any) -> None:
        kept = unit.comm_ctx.all_gather_state
        note("hold", last[0] if kept and kept.event is event else unit)
        real["_wait_all_gather_streams_on_event"](unit, event)

    def reshard(unit: Any) -> None:
        was_whole = unit.is_unsharded
        real["reshard"](unit)
        if was_whole and unit.is_sharded:
            note("free", unit)

    def pre_backward(unit: Any, *rest: Any) -> None:
        real["pre_backward"](unit, *rest)
        note("backward", unit)

    def post_backward(unit: Any, *rest: Any) -> None:
        real["post_backward"](unit, *rest)
        note("reduce-scatter", unit)

    functions = (unshard, wait_for_unshard, _wait_all_gather_streams_on_event)
    with contextlib.ExitStack() as stack:
        for one in (*functions, reshard, pre_backward, post_backward):
            stack.enter_context(mock.patch.object(group, one.__name__, one))
        yield


def record_step() -> list[Event]:
    """Train two steps on this rank; return in order what it did in the second."""
    model: Any = MODEL.GPT(MODEL.GPTConfig(layers=3, width=16, heads=1, block_size=8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = {str(n): block for n, block in enumerate(model.blocks, 1)} | {ROOT: model}
    groups: dict[Any, str] = {}
    for name, module in units.items():
        fully_shard(module, mesh=mesh)
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        groups[group] = name
    log: list[Event] = []

    def note_embedding(embedding: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: log.append(("backward", ROOT)))

    # The root computes twice in either pass: the embeddings, and norm and head.
    for name, module in units.items():
        part = model.token_embedding if name == ROOT else module
        part.register_forward_pre_hook(lambda *_, n=name: log.append(("forward", n)))
    model.final_norm.register_forward_pre_hook(lambda *_: log.append(("forward", ROOT)))
    model.token_embedding.register_forward_hook(note_embedding)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    unit_class = type(next(iter(groups)))
    with listening(unit_class, lambda event, of: log.append((event, groups[of]))):
        for _ in range(2):
            log.clear()
            loss = model(tokens, tokens)
            log.append(("loss", ROOT))
            loss.backward()
    return log


def main() -> None:
    """Record every rank, and save it from rank 0."""
    RANKS.join(at_least=2, at_most=2, only_cpu=True)
    by_rank = RANKS.gather(record_step())
    if dist.get_rank() == 0:
        Path(ASSETS, "06_fsdp.json").write_text(json.dumps(by_rank) + "\n")
    is_same = by_rank == [by_rank[0]] * 2
    RANKS.check(is_same, f"{len(by_rank[0])} events, in the same order on both ranks")
    RANKS.leave()


if __name__ == "__main__":
    main()
