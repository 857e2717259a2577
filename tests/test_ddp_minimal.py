"""The minimal.py of chapters 03, 05 and 06: few lines that train like one process."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from launch import ROOT, deepspeed
from scripts import load_apart, load_chapter
from worker_pool import WorkerPool
from zero_ranks import Pools, forget_earlier_group

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


def with_zero(folder: str, stage: int, lost: str) -> tuple[float, str, str, int]:
    """Train chapter 05's loop and in one process; return what `both_ways` returns.

    The weights are those that all ranks together have saved.
    """
    alone, said_alone = train("one_process")
    forget_earlier_group()
    module: Any = load_apart()
    from deepspeed.utils import zero_to_fp32

    module.CONFIG["zero_optimization"]["stage"] = stage
    dataset, output, apart = module.WindowDataset, io.StringIO(), []
    module.WindowDataset = lambda text, block_size, samples: dataset(text, 128, 256)
    if lost == "sampler":
        module.DistributedSampler = lambda data, drop_last: None
    if lost == "clipping":
        del module.CONFIG["gradient_clipping"]
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        stack.enter_context(contextlib.redirect_stdout(output))
        module.main()
    if torch.distributed.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            saved: Any = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                f"{folder}/saved/minimal"
            )
        apart = [(saved[name] - alone[name]).abs().max().item() for name in alone]
    return max(apart, default=0.0), said_alone, output.getvalue(), len(apart)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_of_zero_trains_as_one_process(
    zero_pools: Pools, tmp_path: Path, stage: int
) -> None:
    (apart, said_alone, said, tensors), other = zero_pools(2).run(
        with_zero, str(tmp_path), stage, "", world_size=2
    )
    assert tensors == 25
    assert apart < 1e-5
    assert said.splitlines()[0].startswith("step  4 | loss 3.")
    assert said == said_alone
    assert other[2] == ""


@pytest.mark.parametrize("lost", ["sampler", "clipping"])
def test_a_line_that_is_missing_with_zero_shows(
    zero_pools: Pools, tmp_path: Path, lost: str
) -> None:
    (apart, *_), _ = zero_pools(2).run(with_zero, str(tmp_path), 2, lost, world_size=2)
    assert apart > 1e-3


@pytest.mark.slow
def test_deepspeed_starts_its_minimal_script(tmp_path: Path) -> None:
    script = ROOT / "05_deepspeed_zero" / "minimal.py"
    result = deepspeed(script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [line for line in result.stdout.splitlines() if line.startswith("step")]
    assert [line[:15] for line in losses] == [
        f"step {n:2} | loss " for n in (4, 8, 12, 16)
    ]
    assert (tmp_path / "saved" / "minimal" / "latest").read_text() == "global_step16"
