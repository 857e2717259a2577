"""Chapter 03, mixed precision: autocast, scaled losses, and gradients sent in bf16."""

import contextlib
import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lessons import run_lesson
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "03_ddp_torchrun/mixed_precision"
CPU = torch.device("cpu")
Gradients = torch.futures.Future[torch.Tensor]


def script(name: str) -> Any:
    """Import one of the room's scripts."""
    return load_chapter(ROOM)[name]


def broken_lesson(name: str, attribute: str, replacement: Any) -> tuple[int, str]:
    """Replace something in a lesson and run it; return its exit status and errors."""
    errors = io.StringIO()
    with (
        mock.patch.object(script(name), attribute, replacement),
        # A failed check leaves the group, which is the pool's, and which a DDP in the
        # frames of the error would then be the last to hold.
        mock.patch.object(script("ranks"), "leave"),
        contextlib.redirect_stderr(errors),
    ):
        try:
            run_lesson(ROOM, name)
        except SystemExit as end:
            return int(end.code or 0), errors.getvalue()
    return 0, errors.getvalue()


# --- autocast.py. ----------


def test_autocast_leaves_gradients_and_messages_in_float32(
    worker_pool: WorkerPool,
) -> None:
    output = worker_pool.run(run_lesson, ROOM, "autocast")[0]
    rows = {line[:12].strip(): line[12:].split() for line in output.splitlines()}
    assert rows["float32"][:3] == ["float32"] * 3
    assert rows["autocast"][:3] == ["float32", "bfloat16", "float32"]
    assert rows["bf16 model"][:3] == ["bfloat16"] * 3
    sent = {name: float(rows[name][3]) for name in script("autocast").WAYS}
    assert sent["autocast"] == pytest.approx(sent["float32"], rel=0.01)
    assert sent["bf16 model"] == pytest.approx(sent["float32"] / 2, rel=0.01)
    assert rows["autocast"][5] == "100%"
    assert int(rows["bf16 model"][5].rstrip("%")) < 60
    assert "check: 3 ways" in output


def without_autocast(
    ddp_model: torch.nn.Module, tokens: torch.Tensor, autocast: bool
) -> None:
    """Add gradients, and forget the context."""
    ddp_model(tokens[:, :-1], tokens[:, 1:]).backward()


def sum_of_one_process(*arguments: Any) -> torch.Tensor:
    """Take the sum over the shards for their mean."""
    return 2 * script("autocast").__dict__["right"](*arguments)


def autocast_broken(attribute: str) -> tuple[int, str]:
    """Run autocast.py with one of its functions replaced."""
    autocast = script("autocast")
    autocast.right = autocast.by_one_process
    wrong = {
        "forward_backward": without_autocast,
        "by_one_process": sum_of_one_process,
    }
    return broken_lesson("autocast", attribute, wrong[attribute])


@pytest.mark.parametrize("attribute", ["forward_backward", "by_one_process"])
def test_broken_autocast_is_found(worker_pool: WorkerPool, attribute: str) -> None:
    results = worker_pool.run(autocast_broken, attribute)
    assert [status for status, _ in results] == [1, 1]
    assert "check failed on ranks [0, 1], not so: 3 ways" in results[0][1]


# --- grad_scaler.py. ----------


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp16_needs_a_scaled_loss_and_all_ranks_skip_a_step(
    worker_pool: WorkerPool, world_size: int
) -> None:
    output = worker_pool.run(run_lesson, ROOM, "grad_scaler", world_size=world_size)[0]
    rows = {line[:24].strip(): line[24:].split() for line in output.splitlines()}
    off_by = {name: float(rows[name][1]) for name in script("grad_scaler").WAYS}
    assert off_by["fp16"] > 0.3
    assert off_by["fp16, scaled"] < 0.002 < off_by["bf16"] < 0.02
    assert float(rows["in the right order"][0]) == 1e-3
    assert float(rows["clipped too early"][0]) == pytest.approx(1e-3 / 2**16, abs=5e-9)
    scales = {name: " ".join(rows[name][1:]) for name in script("grad_scaler").STEPS}
    others = ", 65536.0" * (world_size - 1)
    assert scales["rank 0 overflows"].startswith(str([32768.0] * world_size))
    assert scales["alone: overflows"].startswith(f"[32768.0{others}]")


def no_unscaling(model: torch.nn.Module, optimizer: Any, scaler: Any) -> None:
    """Clip gradients that are still scaled."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


def no_scaling(
    model: torch.nn.Module, tokens: torch.Tensor, scaler: Any, dtype: torch.dtype
) -> None:
    """Forget the scaler: it then knows no scale to undo."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    scaler.scale(loss.detach())
    (loss / 512).backward()


def grad_scaler_broken(attribute: str) -> tuple[int, str]:
    """Run grad_scaler.py with one of its functions replaced."""
    wrong = {"finish_step": no_unscaling, "add_scaled": no_scaling}[attribute]
    return broken_lesson("grad_scaler", attribute, wrong)


@pytest.mark.parametrize("attribute", ["finish_step", "add_scaled"])
def test_broken_scaling_is_found(worker_pool: WorkerPool, attribute: str) -> None:
    results = worker_pool.run(grad_scaler_broken, attribute)
    assert [status for status, _ in results] == [1, 1]
    assert "check failed on ranks [0, 1]" in results[0][1]


# --- comm_hooks.py. ----------


def bytes_in_messages(name: str, model: torch.nn.Module) -> int:
    """Work out how many bytes a hook has to all-reduce in one step.

    PowerSGD sends n x r and r x m in place of n x m, if that is less than half of it
    (Vogels et al., 2019, algorithm 1).
    """
    values, r = 0, 4
    for parameter in model.parameters():
        n, m = parameter.shape[0], parameter.numel() // parameter.shape[0]
        is_cut = name == "powerSGD_hook" and (n + m) * min(n, m, r) * 2 < n * m
        values += (n + m) * min(n, m, r) if is_cut else n * m
    return values * (2 if name in ("fp16_compress_hook", "mean_in_bf16") else 4)


def arrive_as(name: str) -> list[float]:
    """Send three gradients through a hook: a large, a small, and one near 1."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    if hook := script("comm_hooks").HOOKS[name][0]:
        ddp_model.register_comm_hook(dist.group.WORLD, hook)
    # The gradient of w * x is x, on every rank.
    ddp_model(torch.tensor([[1e5, 1e-8, 1.001]])).sum().backward()
    return ddp_model.module.weight.grad.flatten().tolist()


def hook_results(steps: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Train with each hook; return bytes, the formula's, weights, gradient error."""
    hooks = script("comm_hooks")
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(97, 123, (200, 65), generator=generator)
    found: dict[str, Any] = {}
    for name in hooks.HOOKS:
        ddp_model, sent = hooks.train_with(name, text, steps, CPU)
        weights = torch.cat([p.detach().flatten() for p in ddp_model.parameters()])
        _, error = hooks.loss_and_error(ddp_model, text[:24])
        formula = bytes_in_messages(name, ddp_model.module)
        found[name] = (sent, formula, weights, error)
    names = ("no hook", "fp16_compress_hook", "mean_in_bf16")
    return found, {name: arrive_as(name) for name in names}


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_send_what_the_formula_says(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(hook_results, 12, world_size=world_size)
    assert len(results) == world_size
    for found, arrived in results:
        assert len(found) == 4
        whole = found["no hook"][1]
        assert [entry[1] / whole for entry in found.values()][:3] == [1, 0.5, 0.5]
        assert found["powerSGD_hook"][1] < whole / 10
        for name, (sent, formula, weights, _) in found.items():
            assert torch.equal(weights, results[0][0][name][2])
            if sent:
                expected = formula * 2 * (world_size - 1) / world_size
                assert sent == pytest.approx(expected, rel=0.1)
        errors = [entry[3] for entry in found.values()]
        assert errors[0] < 1e-5 < errors[1] < 2**-10
        assert errors[1] < errors[2] < 2**-7 < errors[3] < 1
        assert arrived["no hook"] == pytest.approx([1e5, 1e-8, 1.001], rel=1e-6)
        assert arrived["fp16_compress_hook"][:2] == [float("inf"), 0]
        assert arrived["fp16_compress_hook"][2] == pytest.approx(1.001, abs=5e-4)
        assert arrived["mean_in_bf16"] == pytest.approx([1e5, 1e-8, 1.0], rel=2**-7)
        assert arrived["mean_in_bf16"][2] == 1.0


def register_bf16_hook(is_renamed: bool) -> tuple[str, list[float]]:
    """Register PyTorch's bf16 hook; return why DDP refuses it, and a gradient."""

    def another_name(state: Any, bucket: dist.GradBucket) -> Gradients:
        return bf16_compress_hook(state, bucket)

    ddp_model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    hook, refused = another_name if is_renamed else bf16_compress_hook, ""
    try:
        ddp_model.register_comm_hook(dist.group.WORLD, hook)
    except TypeError as error:
        refused = str(error)
    ddp_model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return refused, ddp_model.module.weight.grad.flatten().tolist()


def test_bf16_hook_runs_on_gloo_under_another_name(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(register_bf16_hook, True) == [("", [1.5, 1.5])] * 2
    refusals = [refused for refused, _ in worker_pool.run(register_bf16_hook, False)]
    # A build with CUDA accepts it: the hook's name is all that DDP looks at.
    words = "BF16 all reduce communication hook required"
    assert [not text or words in text for text in refusals] == [True, True]


def only_sums(group: Any, bucket: dist.GradBucket) -> Gradients:
    """Forget to divide."""
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def hook_that_only_sums() -> tuple[float, int, str]:
    """Put it among the hooks; return the error that is found, and the lesson's end."""
    hooks = script("comm_hooks")
    entries = {"no hook": hooks.HOOKS["no hook"], "only_sums": (only_sums, 1.0, 2**-7)}
    text = torch.arange(13_000).remainder(256).view(200, 65)
    with mock.patch.object(hooks, "HOOKS", entries):
        ddp_model, _ = hooks.train_with("only_sums", text, 1, CPU)
        error = hooks.loss_and_error(ddp_model, text[:8])[1]
    return error, *broken_lesson("comm_hooks", "HOOKS", entries)


def test_hook_that_forgets_to_divide_is_found(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(hook_that_only_sums)
    errors = [error for error, _, _ in results]
    assert errors == pytest.approx([1.0, 1.0], rel=0.01)
    assert [status for _, status, _ in results] == [1, 1]
    assert "check failed on ranks [0, 1], not so: 2 trainings" in results[0][2]
