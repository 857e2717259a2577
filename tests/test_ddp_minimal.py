"""The minimal.py of chapters 03 and 06: few lines that train as one process does."""

import contextlib
import io
import os
from typing import Any
from unittest import mock

import pytest
import torch

from scripts import load_chapter
from worker_pool import WorkerPool

pytestmark = pytest.mark.filterwarnings("error")


def train(
    script: str, samples: int = 256, chapter: str = "03_ddp_torchrun"
) -> tuple[dict[str, torch.Tensor], str]:
    """Run a script on this rank of the pool; return what it saves and prints.

    It joins no group, since the pool has one, and sees fewer samples.
    """
    module: Any = load_chapter(chapter)[script]
    dataset, output, saved = module.WindowDataset, io.StringIO(), {}
    local_size = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    with (
        mock.patch.dict(os.environ, local_size),
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.object(torch.distributed, "destroy_process_group"),
        mock.patch.object(torch, "save", lambda state, path: saved.update(state)),
        mock.patch.object(
            module,
            "WindowDataset",
            lambda text, block_size, samples: dataset(text, 128, min(samples, 256)),
        ),
        contextlib.redirect_stdout(output),
    ):
        module.main()
    return {name: value.clone() for name, value in saved.items()}, output.getvalue()


def both_ways(chapter: str) -> tuple[float, str, str, int]:
    """Train in one process, then on all ranks; return how far apart they end."""
    alone, said_alone = train("one_process")
    together, said = train("minimal", chapter=chapter)
    apart = [(together[name] - alone[name]).abs().max().item() for name in together]
    return max(apart, default=0.0), said_alone, said, len(apart)


@pytest.mark.parametrize("chapter", ["03_ddp_torchrun", "06_fsdp"])
def test_two_ranks_train_as_one_process(worker_pool: WorkerPool, chapter: str) -> None:
    (apart, said_alone, said, tensors), other = worker_pool.run(
        both_ways, chapter, world_size=2
    )
    assert tensors == 25
    assert apart < 1e-5
    assert said.splitlines()[0].startswith("step  4 | loss 3.")
    assert said == said_alone
    # Rank 1 neither prints nor saves.
    assert (other[2], other[3]) == ("", 0)


def test_the_device_is_set_before_the_group_is_joined() -> None:
    calls = mock.Mock()
    calls.join.side_effect = InterruptedError
    cuda = torch.device("cuda", 1)
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}),
        mock.patch.object(torch.accelerator, "device_count", lambda: 2),
        mock.patch.object(torch.accelerator, "set_device_index", calls.set_device),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: cuda),
        mock.patch.object(torch.distributed, "init_process_group", calls.join),
        pytest.raises(InterruptedError),
    ):
        load_chapter("03_ddp_torchrun")["minimal"].main()
    assert calls.mock_calls == [mock.call.set_device(1), mock.call.join("nccl")]


@pytest.mark.parametrize("lost", ["all_reduce in backward", "sampler"])
def test_a_line_that_is_missing_shows(worker_pool: WorkerPool, lost: str) -> None:
    (apart, *_), _ = worker_pool.run(without, lost, world_size=2)
    assert apart > 1e-3


def without(lost: str) -> tuple[float, str, str, int]:
    """Train as `both_ways` does, with one line of minimal.py left out."""
    module: Any = load_chapter("03_ddp_torchrun")["minimal"]
    if lost == "sampler":
        name, replaced = "DistributedSampler", lambda data, drop_last: None
    else:
        name, replaced = "DistributedDataParallel", Unwrapped
    with mock.patch.object(module, name, replaced):
        return both_ways("03_ddp_torchrun")


class Unwrapped(torch.nn.Module):
    """A wrapper like DDP that communicates nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Keep the module under DDP's name for it."""
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        return self.module(*inputs)


def kept_by_fsdp() -> list[float]:
    """Train chapter 06's loop; return the parts of weights and state that are here."""
    made, real = [], torch.optim.AdamW

    def adamw(parameters: Any, **settings: Any) -> Any:
        made.append(real(parameters, **settings))
        return made[-1]

    with mock.patch.object(torch.optim, "AdamW", adamw):
        train("minimal", chapter="06_fsdp")
    (optimizer,) = made
    parts = []
    for kept in (optimizer.param_groups[0]["params"], optimizer.state.values()):
        tensors = [one["exp_avg"] if isinstance(one, dict) else one for one in kept]
        here = sum(one.to_local().numel() for one in tensors)
        parts.append(here / sum(one.numel() for one in tensors))
    return parts


def test_each_rank_keeps_half_of_weights_and_moments(worker_pool: WorkerPool) -> None:
    parts = worker_pool.run(kept_by_fsdp, world_size=2)
    assert parts == [pytest.approx([0.5, 0.5], abs=0.01)] * 2
