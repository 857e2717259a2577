"""Chapter 03, the rules about what DDP exchanges, and when."""

import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from launch import clean_environment, free_port, run
from scripts import load_chapter
from worker_pool import WorkerPool

CHAPTER = "03_ddp_torchrun"
SCRIPTS = (
    *("accumulation", "uneven_inputs", "initial_weights", "rank_zero"),
    "comm_hooks",
)
CPU = torch.device("cpu")


def script(name: str) -> Any:
    """Import one of the chapter's scripts."""
    return load_chapter(CHAPTER)[name]


def flat(tensors: Any) -> torch.Tensor:
    """Join tensors into one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def small_ddp_model(**settings: Any) -> DistributedDataParallel:
    """Wrap a layer whose sums have no rounding to speak of."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    return DistributedDataParallel(layer, **settings)


def quiet(text: str) -> None:
    """Print nothing."""


# --- Accumulation. ----------


def own_batches(rank: int, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw a rank's micro-batches in double precision."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [
        (
            torch.randn(samples, 4, generator=generator, dtype=torch.float64),
            torch.randn(samples, 2, generator=generator, dtype=torch.float64),
        )
        for samples in sizes
    ]


def gradient_by(way: str, sizes: list[list[int]]) -> tuple[torch.Tensor, int]:
    """Take a step with one of the script's functions; return gradient and exchanges."""
    ddp_model = small_ddp_model()
    exchanged = script("sent_bytes").note_exchanges(ddp_model)
    rank = dist.get_rank()
    getattr(script("accumulation"), way)(ddp_model, own_batches(rank, sizes[rank]))
    return flat(p.grad for p in ddp_model.parameters()), len(exchanged)


def gradient_alone(sizes: list[list[int]]) -> torch.Tensor:
    """Return the gradient of the mean loss over all samples of all ranks."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    pairs = [pair for rank, own in enumerate(sizes) for pair in own_batches(rank, own)]
    inputs, labels = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    F.mse_loss(layer(inputs), labels).backward()
    return flat(p.grad for p in layer.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("way", "exchanges", "times"),
    [
        ("exchange_once", 1, 1),
        ("always_exchange", 3, 1),
        ("no_sync_too_late", 3, 1),
        ("forget_to_divide", 1, 3),
    ],
)
def test_no_sync_saves_only_around_the_forward_pass_too(
    worker_pool: WorkerPool, world_size: int, way: str, exchanges: int, times: int
) -> None:
    sizes = [[5, 5, 5]] * world_size
    results = worker_pool.run(gradient_by, way, sizes, world_size=world_size)
    alone = gradient_alone(sizes)
    assert len(results) == world_size
    for gradient, count in results:
        assert count == exchanges
        assert (gradient - times * alone).abs().max() < 1e-12


def test_unequal_micro_batches_need_weights(worker_pool: WorkerPool) -> None:
    sizes = [[1, 4], [6, 2]]
    alone = gradient_alone(sizes)
    weighed = worker_pool.run(gradient_by, "weigh_by_samples", sizes)
    plain = worker_pool.run(gradient_by, "exchange_once", sizes)
    assert len(weighed) == len(plain) == 2
    for (right, count), (wrong, _) in zip(weighed, plain, strict=True):
        assert count == 1
        assert (right - alone).abs().max() < 1e-12
        assert (wrong - alone).abs().max() > 0.01


def accumulation_faults(broken: bool) -> list[str]:
    """Run the script's own check, with ways that claim to be others if broken."""
    accumulation = script("accumulation")
    ways = accumulation.EQUAL
    if broken:
        ways = {
            "saves nothing": accumulation.Way(
                accumulation.no_sync_too_late, True, True
            ),
            "is wrong": accumulation.Way(accumulation.forget_to_divide, True, True),
        }
    _, faults = accumulation.try_ways(CPU, ways, lambda rank: [2] * 3, 1)
    return faults


def test_accumulation_check_counts_bytes_and_finds_what_is_broken(
    worker_pool: WorkerPool,
) -> None:
    assert worker_pool.run(accumulation_faults, False, world_size=3) == [[], [], []]
    results = worker_pool.run(accumulation_faults, True)
    assert len(results) == 2
    for faults in results:
        assert faults[0] == "saves nothing: 3 exchanges"
        assert "is wrong: the gradient is off" in faults[1]


# --- Uneven inputs. ----------


def gradients_in_join(divide_by_initial: bool, with_hook: bool) -> list[float]:
    """Train on 2 batches of ones on rank 0, and 3 of twos on rank 1."""
    ddp_model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    if with_hook:
        ddp_model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    gradients = []
    with ddp_model.join(divide_by_initial_world_size=divide_by_initial):
        for _ in range(2 + dist.get_rank()):
            ddp_model.zero_grad()
            ddp_model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
            gradients += flat(p.grad for p in ddp_model.parameters()).tolist()
    return gradients


@pytest.mark.parametrize(
    ("divide_by_initial", "with_hook", "last"),
    # A hook divides by what it likes: join does not reach into it.
    [(True, False, 1.0), (False, False, 2.0), (True, True, 1.0), (False, True, 1.0)],
)
def test_join_divides_by_all_ranks_or_by_those_still_there(
    worker_pool: WorkerPool, divide_by_initial: bool, with_hook: bool, last: float
) -> None:
    results = worker_pool.run(gradients_in_join, divide_by_initial, with_hook)
    assert results == [[1.5, 1.5], [1.5, 1.5, last]]


def uneven_results() -> tuple[list[str], list[str], list[str]]:
    """Run the parts of the script; return its faults, epochs and last words."""
    uneven = script("uneven_inputs")
    faults: list[str] = []
    for divide_by_initial in (True, False):
        uneven.show_join(CPU, divide_by_initial, faults)
    epochs = [
        uneven.show_next_epoch(CPU, train, momentum, faults)
        for train, momentum in uneven.SECOND_EPOCHS
    ]
    return faults, epochs, uneven.show_ends(CPU, faults)


@pytest.mark.parametrize("world_size", [2, 3])
def test_join_equals_one_process_but_not_the_optimizers(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(uneven_results, world_size=world_size)
    assert len(results) == world_size
    for faults, epochs, (hang, thrown) in results:
        assert faults == []
        assert [line.split("|")[-1].strip() for line in epochs] == [
            "1, 1",
            f"1, {world_size}",
            "1, 1",
        ]
        # Which of the ranks gives up first, and in what, is not fixed.
        assert "imed out" in hang or "losed" in hang or "closure" in hang
        assert "Rank 0 exhausted all inputs." in thrown
        assert "Throwing across all ranks." in thrown


def faults_without_the_right_divisor() -> list[str]:
    """Let the one process of the comparison divide the other way."""
    uneven, faults = script("uneven_inputs"), []
    alone = uneven.steps_alone
    uneven.steps_alone = lambda device, divide: alone(device, not divide)
    try:
        uneven.show_join(CPU, True, faults)
    finally:
        uneven.steps_alone = alone
    return faults


def test_uneven_check_finds_another_divisor(worker_pool: WorkerPool) -> None:
    results = worker_pool.run(faults_without_the_right_divisor)
    assert len(results) == 2
    for faults in results:
        assert any("from one process" in fault for fault in faults)


# --- Initial weights. ----------


def initial_results() -> tuple[dict[str, int], dict[str, float], Any, Any]:
    """Run all cases of the script."""
    initial = script("initial_weights")
    models = {name: case(CPU) for name, (case, _) in initial.CASES.items()}
    same, learns = (
        initial.built_before_and_after(CPU),
        initial.layer_after_optimizer(CPU),
    )
    return models, initial.origins_after_forward(CPU), same, learns


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_copied_once_and_buffers_often(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(initial_results, world_size=world_size)
    assert len(results) == world_size
    for rank, (models, origins, same, learns) in enumerate(results):
        assert list(models.values()) == [world_size, 1, world_size, 2, world_size]
        assert same == (True, True)
        assert learns == (True, False)
        assert {name: origin == 0 for name, origin in origins.items()} == {
            "training": True,
            "eval": True,
            "no_grad, first": True,
            "no_grad, second": rank == 0,
            "training, first after no_grad": rank == 0,
            "no_sync, first": True,
            "no_sync, second": rank == 0,
            "ddp_model.module": rank == 0,
            "forward_sync_buffers=False": rank == 0,
        }


def layer_replaced_too_late() -> tuple[list[float], str]:
    """Replace a wrapped layer; return its gradient and the second pass's error."""
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    ddp_model = DistributedDataParallel(torch.nn.Sequential(*layers))
    torch.manual_seed(0)
    ddp_model.module[1] = torch.nn.Linear(2, 1)
    inputs = torch.full((1, 2), dist.get_rank() + 1.0)
    ddp_model(inputs).sum().backward()
    gradient = flat(p.grad for p in ddp_model.module[1].parameters()).tolist()
    try:
        ddp_model(inputs)
    except RuntimeError as error:
        return gradient, str(error)
    return gradient, ""


def test_layer_replaced_after_wrapping_is_an_error_in_the_second_pass(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(layer_replaced_too_late)
    assert results[0][0] != results[1][0]
    assert len(results) == 2
    for _, text in results:
        assert "Expected to have finished reduction in the prior iteration" in text


def buffer_after_wrapping(setting: str) -> tuple[float, list[str]]:
    """Wrap with a setting off; return the rank's buffer and the warnings."""
    import warnings

    module = script("initial_weights").fresh_model(CPU)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings: dict[str, Any] = {setting: False}
        DistributedDataParallel(module, **settings)
    return module.origin.item(), [str(one.message) for one in caught]


def test_broadcast_buffers_is_deprecated_and_not_the_same(
    worker_pool: WorkerPool,
) -> None:
    old = worker_pool.run(buffer_after_wrapping, "broadcast_buffers")
    new = worker_pool.run(buffer_after_wrapping, "forward_sync_buffers")
    assert [origin for origin, _ in old] == [0, 1]
    assert [origin for origin, _ in new] == [0, 0]
    assert "`broadcast_buffers` is deprecated" in " ".join(old[1][1])
    assert "deprecated" not in " ".join(new[1][1])


# --- Rank zero. ----------


def alone_results() -> dict[str, str]:
    """Let rank zero alone make each of the script's calls."""
    rank_zero = script("rank_zero")
    return {
        name: rank_zero.try_alone(call) for name, (call, _) in rank_zero.ALONE.items()
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_zero_alone_waits_for_the_others_unless_nothing_is_exchanged(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(alone_results, world_size=world_size)
    assert len(results) == world_size
    others = ", ".join(str(rank) for rank in range(1, world_size))
    for texts in results:
        assert len(texts) == 4
        for name in ("validate_together(...)", "ddp_model(...)"):
            assert "imed out" in texts[name] or "timeout" in texts[name]
        assert f"Ranks {others} failed to pass" in texts["monitored_barrier(...)"]
        assert texts["ddp_model.module(...)"] == ""


def crossing_results() -> tuple[float, list[float], float, float]:
    """Cross a validation with a training step; then validate as one should."""
    rank_zero = script("rank_zero")
    crossed, gradient = rank_zero.cross_with_training()
    model = rank_zero.Norm()
    right = rank_zero.validate_alone(model, CPU)
    return crossed, gradient, rank_zero.validate_together(model, CPU), right


def test_validation_on_rank_zero_mixes_with_gradients(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(crossing_results)
    assert len(results) == 2
    # Rank 0 adds its loss summed over 6 samples, and their number; rank 1 half of 1, 1.
    inputs = torch.linspace(-1, 1, 12)[::2]
    total = (inputs - (3 * inputs + 1)).square().sum().item()
    for crossed, gradient, by_all, alone in results:
        assert gradient == pytest.approx([total + 0.5, 6.5])
        assert crossed == pytest.approx((total + 0.5) / 6.5)
        assert by_all == pytest.approx(alone, rel=1e-6)


def wait_for_file(folder: str) -> tuple[bool, bool]:
    """Look for rank zero's file before and after the barrier."""
    return script("rank_zero").read_what_rank_zero_writes(folder)


def test_barrier_stands_between_writing_and_reading(
    worker_pool: WorkerPool, tmp_path: Any
) -> None:
    results = worker_pool.run(wait_for_file, str(tmp_path), world_size=3)
    assert results == [(False, True)] * 3


def test_ddp_dies_at_the_debug_level_detail_on_gloo() -> None:
    # As long as this holds, the README sends its readers to monitored_barrier.
    program = (
        "import torch.distributed as dist, torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "print('joined', flush=True)\n"
        "DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "print('wrapped', flush=True)\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    port = {"MASTER_PORT": str(free_port())}
    environment = clean_environment(TORCH_DISTRIBUTED_DEBUG="DETAIL", **place, **port)
    result = run([sys.executable, "-c", program], env=environment, timeout=60)
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout.splitlines() == ["joined"]


# --- Communication hooks. ----------


def hook_results(steps: int) -> tuple[dict[str, Any], str, dict[str, list[float]]]:
    """Train with each hook; return bytes, gradient error, loss and models of each."""
    hooks = script("comm_hooks")
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(97, 123, (60_000,), generator=generator, dtype=torch.uint8)
    found: dict[str, Any] = {}
    for name, (hook, _) in hooks.HOOKS.items():
        ddp_model, sent, _ = hooks.train_with(hook, text, steps, CPU)
        models = script("all_ranks").count_models(ddp_model.module)
        error = hooks.gradient_off_by(ddp_model, text, CPU)
        found[name] = (sent, hooks.bytes_in_messages(hook, ddp_model.module), models)
        found[name] += (error,)
    arrived = {
        name: hooks.gradients_that_arrive(hooks.HOOKS[name][0], CPU)
        for name in ("no hook", "fp16_compress_hook", "mean_in_bf16")
    }
    return found, hooks.try_bf16_compress_hook(CPU), arrived


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_send_what_the_formula_says(
    worker_pool: WorkerPool, world_size: int
) -> None:
    results = worker_pool.run(hook_results, 12, world_size=world_size, timeout=60)
    assert len(results) == world_size
    for found, refused, arrived in results:
        assert len(found) == 4
        whole = found["no hook"][1]
        assert [entry[1] / whole for entry in found.values()][:3] == [1, 0.5, 0.5]
        assert found["powerSGD_hook"][1] < whole / 10
        for sent, formula, models, _ in found.values():
            assert models == 1
            if sent is not None:
                expected = formula * 2 * (world_size - 1) / world_size
                assert sent == pytest.approx(expected, rel=0.1)
        errors = [entry[3] for entry in found.values()]
        assert errors[0] < 1e-5 < errors[1] < 2**-10
        assert errors[1] < errors[2] < 2**-7 < errors[3] < 1
        # A build with CUDA accepts it: the hook's name is all that DDP looks at.
        assert not refused or "BF16 all reduce communication hook required" in refused
        assert arrived["no hook"] == pytest.approx([1e5, 1e-8, 1.001], rel=1e-6)
        assert arrived["fp16_compress_hook"][:2] == [float("inf"), 0]
        assert arrived["fp16_compress_hook"][2] == pytest.approx(1.001, abs=5e-4)
        assert arrived["mean_in_bf16"] == pytest.approx([1e5, 1e-8, 1.0], rel=2**-7)
        assert arrived["mean_in_bf16"][2] == 1.0


def gradient_by_renamed_hook() -> list[float]:
    """Hide PyTorch's bf16 hook behind another name, which DDP then accepts."""

    def another_name(
        state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return bf16_compress_hook(state, bucket)

    ddp_model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    ddp_model.register_comm_hook(dist.group.WORLD, another_name)
    ddp_model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    return flat(p.grad for p in ddp_model.parameters()).tolist()


def test_bf16_hook_runs_on_gloo_under_another_name(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(gradient_by_renamed_hook) == [[1.5, 1.5]] * 2


def error_of_a_hook_that_only_sums() -> float:
    """Forget to divide in a hook; return what the script's comparison finds."""
    hooks = script("comm_hooks")
    text = torch.arange(20_000).to(torch.uint8)

    def only_sums(
        group: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    ddp_model, _, _ = hooks.train_with(only_sums, text, 1, CPU)
    return hooks.gradient_off_by(ddp_model, text, CPU)


def test_hook_that_forgets_to_divide_is_found(worker_pool: WorkerPool) -> None:
    errors = worker_pool.run(error_of_a_hook_that_only_sums)
    assert errors == pytest.approx([1.0, 1.0], rel=0.01)


# --- What a user can type. ----------


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("environment", "words", "said"),
    [
        ({}, [], "start it with torchrun --nproc-per-node=2"),
        ({"WORLD_SIZE": "1"}, [], "rank"),
        ({"WORLD_SIZE": "2"}, ["--no-such=1"], "unrecognized arguments: --no-such=1"),
    ],
)
def test_mistake_gets_one_line(
    name: str,
    environment: dict[str, str],
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main: Callable[[], None] = script(name).main
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    if environment:
        world_size = environment["WORLD_SIZE"]
        for variable, value in (
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", world_size),
            ("LOCAL_WORLD_SIZE", world_size),
        ):
            monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"{name}.py: ")
    assert said in line


@pytest.mark.parametrize(
    "word", ["--micro-batches=1", "--rounds=0", "--micro-batches=x"]
)
def test_accumulation_refuses_what_cannot_work(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accumulation.py", word])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "2")
    with pytest.raises(SystemExit) as ended:
        script("accumulation").main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
