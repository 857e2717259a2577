"""Chapter 03, mixed precision: autocast, scaled losses, and gradients sent in bf16."""

import contextlib
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lessons import run_lesson
from pages import words_of
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


def nearly_right(dtype: torch.dtype, factor: float) -> Callable[..., torch.Tensor]:
    """Return what takes a mean that is a little too large, in one dtype."""

    def mean(start: Any, shards: Any, of: torch.dtype, *more: Any) -> torch.Tensor:
        right = script("autocast").__dict__["right"](start, shards, of, *more)
        return right * (factor if of == dtype else 1)

    return mean


def autocast_broken(fault: str) -> tuple[int, str]:
    """Run autocast.py with one of its functions replaced."""
    autocast = script("autocast")
    autocast.right = autocast.by_one_process
    if fault == "no autocast":
        return broken_lesson("autocast", "forward_backward", without_autocast)
    if fault == "all moved":
        return broken_lesson("autocast", "moved_by_a_step", lambda model: 1.0)
    wrong = {
        "a sum": sum_of_one_process,
        # Ten times what rounding may change: 1e-6 in float32, and of 8 bits the last.
        "float32": nearly_right(torch.float32, 1 + 1e-5),
        "bf16": nearly_right(torch.bfloat16, 1 + 10 * 2**-7),
    }
    return broken_lesson("autocast", "by_one_process", wrong[fault])


@pytest.mark.parametrize(
    "fault", ["no autocast", "all moved", "a sum", "float32", "bf16"]
)
def test_broken_autocast_is_found(worker_pool: WorkerPool, fault: str) -> None:
    results = worker_pool.run(autocast_broken, fault)
    assert [status for status, _ in results] == [1, 1]
    assert "check failed on ranks [0, 1], not so: 3 ways" in results[0][1]


# --- grad_scaler.py. ----------


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
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


def loss_after(optimizer_class: type, is_early: bool, steps: int = 100) -> float:
    """Learn a plane, with scaled losses, clipped before they are unscaled or after."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1), torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    scaler: Any = torch.amp.GradScaler("cpu", 2.0**16)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean()).backward()
        if not is_early:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return (model(x) - y).square().mean().item()


def test_adam_hides_that_gradients_were_clipped_too_early() -> None:
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    at_first = loss_after(sgd, False, steps=0)
    assert loss_after(sgd, False) < 0.1 * at_first
    assert loss_after(sgd, True) > 0.99 * at_first
    assert loss_after(adam, False) < 0.7 * at_first
    assert loss_after(adam, True) < 0.7 * at_first


def model_and_shard() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the lesson's model, and what this rank is given."""
    lesson = script("grad_scaler")
    torch.manual_seed(0)
    length, world_size = lesson.BLOCK_SIZE, dist.get_world_size()
    model = lesson.GPT(lesson.GPTConfig(length, width=64))
    tokens = torch.randint(256, (world_size * lesson.BATCH_SIZE, length + 1))
    return model, tokens.chunk(world_size)[dist.get_rank()]


def moved_by_adam(max_norm: float, is_early: bool) -> float:
    """Take the lesson's step with Adam; return how far the weights moved."""
    lesson = script("grad_scaler")
    model, shard = model_and_shard()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    ddp_model: Any = DistributedDataParallel(model)
    scaler: Any = torch.amp.GradScaler("cpu", lesson.SCALE)
    lesson.add_scaled(ddp_model, shard, scaler, torch.float16)
    if is_early:
        torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=1e-3)
    with mock.patch.object(lesson, "MAX_NORM", max_norm):
        lesson.finish_step(ddp_model, optimizer, scaler)
    after = torch.nn.utils.parameters_to_vector(ddp_model.parameters())
    return (after - before).norm().item()


def lost_to_early_clipping() -> tuple[list[float], float]:
    """Compare Adam's steps, clipped early, with right ones; tell Adam's eps too."""
    norms = (script("grad_scaler").MAX_NORM, 10.0)
    parts = [moved_by_adam(norm, True) / moved_by_adam(norm, False) for norm in norms]
    return parts, torch.optim.Adam([torch.zeros(1)]).defaults["eps"]


def test_adam_hides_early_clipping_only_of_gradients_far_above_its_eps(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(lost_to_early_clipping)
    assert len(results) == 2
    for (as_on_the_page, with_large_gradients), eps in results:
        assert as_on_the_page < 1 / 50
        assert with_large_gradients > 0.8
        assert eps == 1e-8
    said = "hides it only while gradients stay far above its `eps` (1e-8)"
    assert said in words_of(ROOM)


def logit_gradients() -> tuple[float, float, float]:
    """Return the logits' median gradient, its zeros in fp16, and the weights' zeros."""
    lesson, found = script("grad_scaler"), []
    for dtype in (torch.float32, torch.float16):
        model, shard = model_and_shard()
        ddp_model: Any = DistributedDataParallel(model)
        ddp_model.module.head.register_full_backward_hook(
            lambda layer, to_input, of_output: found.append(of_output[0].clone())
        )
        unscaled = torch.amp.GradScaler("cpu", 1.0)
        lesson.add_scaled(ddp_model, shard, unscaled, dtype)
    exact, rounded = found
    assert rounded.dtype == torch.float16 and rounded.shape[-1] == 256
    weights = (lesson.gradient_of(ddp_model) == 0).float().mean()
    zeros = (rounded == 0).float().mean()
    return exact.abs().median().item(), zeros.item(), weights.item()


def test_fp16_rounds_most_logit_gradients_of_two_ranks_to_zero(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(logit_gradients)
    assert len(results) == 2
    for median, zeros, zeros_of_weights in results:
        assert median == pytest.approx(2 / 2**19 / 256, rel=0.2)
        # Not all but the right byte's, which would be 255 of 256.
        assert 0.9 < zeros < 0.97
        assert zeros_of_weights < 0.1
    said = "2 / 524,288 / 256 = 1.5e-8. More than nine of ten become zero."
    assert said in words_of(ROOM)


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


def grad_scaler_broken(fault: str) -> tuple[int, str]:
    """Run grad_scaler.py with one of its functions replaced."""
    lesson = script("grad_scaler")
    add, alone, step = lesson.add_scaled, lesson.one_process, lesson.scaled_step

    def bf16_a_fifth_larger(*arguments: Any) -> None:
        factor = 1.2 if arguments[-1] == torch.bfloat16 else 1
        with mock.patch.object(lesson, "STEP_TOKENS", lesson.STEP_TOKENS / factor):
            add(*arguments)

    def thousandfold_if_clipped_early(start: Any, shard: Any, case: str) -> Any:
        norm, *more = step(start, shard, case)
        return norm * (1000 if "early" in case else 1), *more

    def with_equal_weights(*given: Any) -> Any:
        return *step(*given)[:2], True

    def with_one_scale(*given: Any) -> Any:
        norm, scales, is_same = step(*given)
        return norm, [lesson.SCALE] * len(scales), is_same

    name, wrong = {
        "not unscaled": ("finish_step", no_unscaling),
        "not scaled": ("add_scaled", no_scaling),
        "bf16 off by 0.2": ("add_scaled", bf16_a_fifth_larger),
        "far": ("one_process", lambda *given: alone(*given) * (1 + 1e-5)),
        "early norm": ("scaled_step", thousandfold_if_clipped_early),
        "equal": ("scaled_step", with_equal_weights),
        "one scale": ("scaled_step", with_one_scale),
        "nothing": ("scaled_step", step),
    }[fault]
    # Fewer tokens, since half of the time is fp16 on a CPU.
    with mock.patch.multiple(lesson, BLOCK_SIZE=16, BATCH_SIZE=4):
        return broken_lesson("grad_scaler", name, wrong)


@pytest.mark.parametrize(
    "fault",
    [
        *("not unscaled", "not scaled", "bf16 off by 0.2", "far", "early norm"),
        *("equal", "one scale", "nothing"),
    ],
)
def test_broken_scaling_is_found(worker_pool: WorkerPool, fault: str) -> None:
    results = worker_pool.run(grad_scaler_broken, fault)
    is_wrong = fault != "nothing"
    assert [status for status, _ in results] == [int(is_wrong)] * 2
    assert ("check failed on ranks [0, 1]" in results[0][1]) == is_wrong


# --- comm_hooks.py. ----------


def bytes_in_messages(name: str, model: torch.nn.Module, r: int = 4) -> int:
    """Work out how many bytes a hook has to all-reduce in one step.

    PowerSGD sends n x r and r x m in place of n x m, if that is less than half of it
    (Vogels et al., 2019, algorithm 1).
    """
    values = 0
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


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
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


def sent_by_matrix_rank(r: int) -> tuple[int, int, int]:
    """Train with PowerSGD; return bytes, the formula's, and those of whole 64 x 64."""
    hooks = script("comm_hooks")
    state = hooks.powerSGD_hook.PowerSGDState

    def with_rank(group: Any, _: int, **settings: Any) -> Any:
        return state(group, r, **settings)

    text = torch.arange(13_000).remainder(256).view(200, 65)
    with mock.patch.object(hooks.powerSGD_hook, "PowerSGDState", with_rank):
        ddp_model, sent = hooks.train_with("powerSGD_hook", text, 12, CPU)
    squares = [p for p in ddp_model.parameters() if p.shape == (64, 64)]
    whole = 4 * sum(p.numel() for p in squares)
    return sent, bytes_in_messages("powerSGD_hook", ddp_model.module, r), whole


def test_powersgd_sends_a_matrix_whole_unless_it_saves_more_than_half(
    worker_pool: WorkerPool,
) -> None:
    for r in (4, 16):
        results = worker_pool.run(sent_by_matrix_rank, r)
        assert len(results) == 2
        for sent, formula, whole in results:
            assert whole >= 4 * 64 * 64
            # Two thin matrices of rank 16 are half of 64 x 64, and no less.
            assert (formula > whole) is (r == 16)
            if sent:
                assert sent == pytest.approx(formula, rel=0.1)


def non_finite_after_overflow(name: str) -> list[bool]:
    """Overflow in the fourth step of seven; in which are gradients not finite?"""
    powers = script("comm_hooks").powerSGD_hook
    layer: Any = torch.nn.Linear(64, 64, bias=False)
    ddp_model = DistributedDataParallel(layer)
    if name == "powerSGD_hook":
        state = powers.PowerSGDState(dist.group.WORLD, 4, start_powerSGD_iter=2)
        ddp_model.register_comm_hook(state, powers.powerSGD_hook)
    found = []
    for factor in (*[1.0] * 3, float("inf"), *[1.0] * 3):
        ddp_model.zero_grad()
        (ddp_model(torch.ones(2, 64)).square().sum() * factor).backward()
        found.append(not layer.weight.grad.isfinite().all())
    return found


def test_an_overflow_stays_in_the_memory_of_powersgd(worker_pool: WorkerPool) -> None:
    for name, after in (("no hook", False), ("powerSGD_hook", True)):
        results = worker_pool.run(non_finite_after_overflow, name)
        assert results == [[False] * 3 + [True] + [after] * 3] * 2
    said = "One overflow, as `GradScaler` provokes, stays in its memory: every later"
    assert f"{said} step is skipped." in words_of(ROOM)


# What a rank sends, how far a gradient is off and the loss, all just inside of what the
# page says: half of the bytes, of fp16's 11 bits the last, of bf16's 8 the last.
INSIDE: dict[str, list[float]] = {
    "no hook": [1000, 0.9e-5, 3.0],
    "fp16_compress_hook": [505, 0.9 * 2**-10, 3.4],
    "mean_in_bf16": [505, 0.9 * 2**-7, 2.6],
    "powerSGD_hook": [115, 0.9, 3.4],
}
OUTSIDE = [
    *(("no hook", 1, 1.1e-5), ("fp16_compress_hook", 0, 520)),
    *(("fp16_compress_hook", 1, 1.1 * 2**-10), ("mean_in_bf16", 0, 520)),
    *(("mean_in_bf16", 1, 1.1 * 2**-7), ("powerSGD_hook", 0, 130)),
    *(("powerSGD_hook", 1, 1.1), ("powerSGD_hook", 2, 3.6)),
]


def judged() -> list[int]:
    """Run comm_hooks.py on known results; return how it ends, right and with faults."""
    hooks, ends = script("comm_hooks"), []
    for fault in (None, *OUTSIDE, "another model on each rank"):
        found = {name: list(numbers) for name, numbers in INSIDE.items()}
        if isinstance(fault, tuple):
            found[fault[0]][fault[1]] = fault[2]
        model = torch.nn.Linear(1, 1, bias=False)
        is_another = isinstance(fault, str) and dist.get_rank()
        torch.nn.init.constant_(model.weight, 2.0 if is_another else 1.0)
        results = [(model, sent) for sent, *_ in found.values()]
        losses = [(loss, off_by) for _, off_by, loss in found.values()]
        with (
            mock.patch.object(
                hooks,
                "train_with",
                side_effect=results,
            ),
            mock.patch.object(hooks, "loss_and_error", side_effect=losses),
        ):
            ends.append(broken_lesson("comm_hooks", "BATCH_SIZE", 8)[0])
    return ends


def test_each_hook_is_held_to_its_bytes_and_its_bits(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(judged) == [[0] + [1] * 9] * 2


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


class LateAndEarly(torch.nn.Module):
    """Two weights; the gradient of the one that is used last is ready first."""

    def __init__(self) -> None:
        """Begin with ones."""
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, is_b_first: bool) -> torch.Tensor:
        """Return a product."""
        late, early = (self.a, self.b) if is_b_first else (self.b, self.a)
        return early * late.exp()


def order_of_hooks() -> list[list[str]]:
    """Let gradients of two buckets be ready in turn, then in the other order."""
    model, noted, orders = LateAndEarly(), list[str](), []
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: noted.append(names[p]))

    def hook(group: Any, bucket: dist.GradBucket) -> Gradients:
        noted.append("hook " + "".join(names[p] for p in bucket.parameters()))
        return allreduce_hook(group, bucket)

    ddp_model = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    ddp_model.register_comm_hook(dist.group.WORLD, hook)
    for is_b_first in (True, True, False):  # DDP makes its buckets in the first
        ddp_model(is_b_first).sum().backward()
        orders.append(noted.copy())
        noted.clear()
    return orders[1:]


def test_a_full_bucket_waits_for_those_before_it(worker_pool: WorkerPool) -> None:
    due = [["b", "hook b", "a", "hook a"], ["a", "b", "hook b", "hook a"]]
    assert worker_pool.run(order_of_hooks) == [due] * 2
    said = "DDP calls this when a bucket and those before it are full"
    assert said in words_of(ROOM)
