"""Chapter 05, memory: what a rank keeps and its peak, counted and worked out."""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch import ROOT, deepspeed, python, torchrun
from lessons import in_the_pool, run_lesson
from pages import words_of
from scripts import load_chapter
from worker_pool import WorkerPool

ROOM = "05_deepspeed_zero/memory"
WIDTH, LAYERS, RANKS = 256, 2, 3
OPTIONS = SimpleNamespace(
    width=WIDTH,
    layers=LAYERS,
    precision="bf16",
    grad_accum_dtype="",
    default_buckets=False,
    tokens=64,
)
ACCUMULATE = "bf16, fp32 accumulation"
WAYS = {"bf16": {}, "fp32": {"precision": "fp32"}}
WAYS[ACCUMULATE] = {"grad_accum_dtype": "fp32"}


def module(name: str) -> ModuleType:
    return load_chapter(ROOM)[name]


def model_sizes() -> list[int]:
    """Return the number of values in each tensor of the model that is measured."""
    config = module("sized_qwen").sized_config(WIDTH, LAYERS)
    return module("will_it_fit").tensor_sizes_of(config)


# --- What runs on each rank. ----------


def set_up() -> torch.device:
    """Do what a script does before it joins, and forget an earlier job's group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    device = module("deepspeed_setup").prepare({})
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(groups)
    return device


def count(*names: str) -> dict[str, Any]:
    """Count a step in all stages, in each of WAYS that is named."""
    device, counted = set_up(), module("counted_step")
    found: dict[str, Any] = {}
    for name in names:
        options = SimpleNamespace(**{**vars(OPTIONS), **WAYS[name]})
        exact = counted.warm_up(options.precision, WIDTH, device)
        stages = range(1 if name == ACCUMULATE else 0, 4)
        results = [counted.count_step(stage, device, options) for stage in stages]
        found[name] = results
        found[f"{name}: right"] = counted.is_as_worked_out(results, exact)
    return found


def count_at_last_gradient(
    stage: int, offload: bool, micro_batches: int = 1, frozen: str = ""
) -> int:
    """Count all bytes then, the host's too if the optimizer state is offloaded.

    Parameters whose name contains `frozen`, if it is given, are not trained.
    """
    device, sized, live = set_up(), module("sized_qwen"), module("live_tensors")
    gc.collect()
    before = live.live_storages([])
    few = sized.buckets_for(sum(model_sizes()), WIDTH)
    few |= {"offload_optimizer": {"device": "cpu"}} if offload else {}
    more: Any = {"gradient_accumulation_steps": micro_batches}
    more |= {"zero_force_ds_cpu_optimizer": False} if offload else {}
    model = sized.new_model(WIDTH, LAYERS)
    for name, p in model.named_parameters():
        p.requires_grad = not frozen or frozen not in name
    engine = sized.make_engine(model, stage, "bf16", few, **more)
    inputs, kept = sized.one_sample(dist.get_rank(), device), []
    for _ in range(2 * micro_batches - 1):
        sized.step_once(engine, inputs)
    engine.module.get_input_embeddings().weight.register_post_accumulate_grad_hook(
        lambda _: kept.append(sum(live.bytes_by_kind(engine, before).values()))
    )
    sized.step_once(engine, inputs)
    engine.destroy()
    assert len(kept) == 1
    return kept[0]


def accumulate_in_stage_0() -> str:
    """Return what DeepSpeed says to fp32 accumulation where nothing is sharded."""
    device = set_up()
    options = SimpleNamespace(**{**vars(OPTIONS), "grad_accum_dtype": "fp32"})
    try:
        module("counted_step").count_step(0, device, options)
    except NotImplementedError as error:
        return str(error)
    return ""


def build_with_and_without() -> tuple[str, list[int]]:
    """Run zero_init.py; return what it says, and how much this process grew, twice."""
    set_up()
    script = module("zero_init")
    grown = []
    for partition in (True, False):
        taken = touched_since_then(torch.device("cpu"))
        model = script.build_layers(partition)
        grown.append(taken())
        del model
    return run_lesson(ROOM, "zero_init"), grown


def checkpoint_activations() -> str:
    """Run activation_checkpointing.py, with a smaller model; return what it says."""
    script, output = module("activation_checkpointing"), io.StringIO()
    options = SimpleNamespace(width=128, layers=3, samples=1)
    with in_the_pool(script), contextlib.redirect_stdout(output):
        script.main(options)
    return output.getvalue()


def touched_since_then(device: torch.device) -> Callable[[], int]:
    """Return what tells by how much this process has been larger than it is now."""
    live = module("live_tensors")
    if not live.return_freed_memory() or not os.access(
        "/proc/self/clear_refs", os.W_OK
    ):
        pytest.skip("only Linux tells how large a process has been")
    before = live.process_bytes(device)
    Path("/proc/self/clear_refs").write_text("5")

    def taken() -> int:
        (line,) = re.findall(
            r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()
        )
        return 1024 * int(line) - before

    return taken


def step_of_ddp(width: int, **lean: bool) -> float:
    """Train with DDP and autocast; return the most bytes a parameter in a step.

    Args:
        width: of 24 square matrices.
        lean: AdamW's `fused`, and with it DDP's `gradient_as_bucket_view`.
    """
    taken = touched_since_then(torch.device("cpu"))
    chain = [torch.nn.Linear(width, width, bias=False) for _ in range(24)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*chain), gradient_as_bucket_view=bool(lean)
    )
    # A GPU's default is foreach, a CPU's is not.
    settings: Any = lean or {"foreach": True}
    adam = torch.optim.AdamW(model.parameters(), **settings)
    for _ in range(3):  # DDP makes its buckets anew after the first
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, width)).float().square().mean()
        loss.backward()
        # What was larger before is forgotten; `taken` still knows how it began.
        Path("/proc/self/clear_refs").write_text("5")
        adam.step()
    return taken() / (24 * width * width)


def steps_of_ddp() -> list[float]:
    """Return the peak with DDP's and a GPU's defaults, and the lean one."""
    for lean in ({}, {"fused": True}):
        step_of_ddp(64, **lean)  # the first Adam imports much
    return [step_of_ddp(512), step_of_ddp(512, fused=True)]


def buffer_under_deepspeed() -> list[tuple[torch.dtype, int]]:
    """Return a buffer's type and size in each stage, training in bf16."""
    device, sized, found = set_up(), module("sized_qwen"), []
    for stage in range(4):
        model = sized.new_model(128, 1)
        model.register_buffer("mask", torch.zeros(1000))
        few = sized.buckets_for(10_000, 128)
        engine = sized.make_engine(model, stage, "bf16", few)
        buffer = engine.module.get_buffer("mask")
        assert buffer.device.type == device.type
        found.append((buffer.dtype, buffer.numel()))
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Return warm workers of this file's own: DeepSpeed remembers how many ranks."""
    with WorkerPool(RANKS) as workers:
        yield workers


@pytest.fixture(scope="module")
def counted(pool: WorkerPool) -> list[dict[str, Any]]:
    """Return what each of RANKS ranks has counted in bf16 and in fp32."""
    by_rank = pool.run(count, "bf16", "fp32", world_size=RANKS)
    assert len(by_rank) == RANKS
    return by_rank


@pytest.fixture(scope="module")
def accumulated(pool: WorkerPool) -> list[dict[str, Any]]:
    """Return what each of RANKS ranks has counted with fp32 accumulation."""
    by_rank = pool.run(count, ACCUMULATE, world_size=RANKS)
    assert len(by_rank) == RANKS
    return by_rank


def bytes_of(found: dict[str, Any], way: str, kind: str) -> list[float]:
    """Return the bytes a parameter of one kind, or of "peak", in stages 0 to 3."""
    results = found[way]
    assert [one["stage"] for one in results][-3:] == [1, 2, 3]
    counts = [{**one["kept"], "peak": one["peak"]}[kind] for one in results]
    return [n / one["parameters"] for n, one in zip(counts, results, strict=True)]


# --- What is kept. ----------


def test_the_papers_table_is_reproduced() -> None:
    # 7.5 billion parameters in mixed precision on 64 ranks: figure 1 of the paper.
    kept = [
        sum(module("paper").paper_bytes(7.5e9, stage, 64, "bf16").values()) / 1e9
        for stage in range(4)
    ]
    assert [round(gigabytes, 1) for gigabytes in kept] == [120.0, 31.4, 16.6, 1.9]
    result = python(ROOT / ROOM / "paper.py", "--parameters=7.5e9", "--ranks=64")
    assert result.returncode == 0, result.output
    assert re.findall(r"^ +\d.* ([\d.]+)$", result.stdout, re.M) == [
        *("120.0", "31.4", "16.6", "1.9"),
    ]


def test_examples_of_the_chapter_are_the_paper_s_formula() -> None:
    # Kept bytes a parameter, stages 0 to 3: written out again, so that a change of the
    # formula and of the page together is noticed.
    def kept(billions: float, stage: int, n: int) -> float:
        each = (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage]
        ours = module("paper").paper_bytes(billions * 1e9, stage, n, "bf16")
        assert sum(ours.values()) == pytest.approx(each * billions * 1e9)
        return each * billions

    page = (ROOT / "05_deepspeed_zero" / "README.md").read_text("utf-8")
    words = " ".join(page.split())
    assert f" 7 billion parameters take {kept(7, 0, 8):.0f} GB, " in words
    sums = re.findall(r"`7 \* (\S[^`]*) = (\S+)`", words)
    assert "On 8 ranks each keeps `7 * {} = {}`, `".format(*sums[0]) in words
    assert [given for _, given in sums] == [f"{kept(7, i, 8):g}" for i in (1, 2, 3)]
    assert [f"{7 * eval(each):g}" for each, _ in sums] == [given for _, given in sums]
    # By hand a shard of gradients is in fp32: 2 + 4/n + 12/n, on two ranks stage 1's.
    assert 2 + 4 / 2 + 12 / 2 == kept(1, 1, 2) > kept(1, 2, 2)
    assert "on two ranks 2, as much as whole bf16 gradients." in words
    for stage, each in enumerate(
        ["16", "4 + 12/n", "2 + 14/n, or 2 + 16/n if *m* > 1", "16/n"]
    ):
        assert re.search(rf"^\| {stage} \| {re.escape(each)} \|", page, re.M), each


def test_lowest_stage_of_the_chapter_s_example_depends_on_the_tokens() -> None:
    fit = module("will_it_fit")

    def needs(tokens: int, offload: str) -> list[float]:
        job = fit.job_of_shape("7B", tokens=tokens, offload=offload)
        stages = range(1 if offload == "optimizer" else 0, 4)
        return [fit.rank_bytes(job, stage, 4)["need"] / 1e9 for stage in stages]

    assert len(needs(2048, "none")) == 4 and min(needs(2048, "none")) > 40
    one, two, three = needs(2048, "optimizer")
    assert three < two < 40 < one
    one, two, three = needs(4096, "optimizer")
    assert three < 40 < two < one
    job = fit.job_of_shape("7B", tokens=2048)
    activations = fit.rank_bytes(job, 2, 4)["activations"] / 1e9
    words = words_of("05_deepspeed_zero")
    example = 'and 2048 tokens at a time, whose activations ("act.") take'
    assert f"{example} {activations:.0f} GB. No stage fits: [offload]" in words
    tight = f"With 4096 tokens even stage 3's {three:.2f} GB leave little for CUDA"
    assert f"Stage 2 is enough. {tight}" in words
    # With few activations, as under checkpointing, stage 3 fits without it.
    *others, third = needs(300, "none")
    assert third < 40 < min(others)
    # The 16 GB are without activation checkpointing; with it stage 2 has room again.
    assert two - 2 * activations < 40
    # The weights that stage 3 keeps whole: a small model takes more than in stage 2.
    job = fit.job_of_shape("1.5B")
    second, third = (fit.rank_bytes(job, stage, 2) for stage in (2, 3))
    assert third["gathered"] / 1e9 == pytest.approx(2, rel=1e-3)
    assert third["need"] > second["need"]
    page = (ROOT / "05_deepspeed_zero/memory/README.md").read_text()
    page = page.partition("will_it_fit.py --shape=1.5B")[2].partition("```")[0]
    needs_of = re.findall(r"^    [23] +[\d,]+ .* (\d+\.\d\d)   yes", page, re.M)
    assert [f"{found['need'] / 1e9:.2f}" for found in (second, third)] == needs_of
    assert "small model may take [more than in stage 2](memory" in words


def estimated(total: int, largest: int) -> tuple[list[int], str]:
    """Return what DeepSpeed counts on the meta device and off it, and what it says."""
    from deepspeed.runtime.zero import stage3

    with torch.device("meta"):
        small = torch.nn.Sequential(*(torch.nn.Linear(20, 10) for _ in range(3)))
    counts, output = [stage3.model_to_params(small)[0]], io.StringIO()  # as _all_live
    counts.append(stage3.model_to_params(small.to_empty(device="cpu"))[0])
    with contextlib.redirect_stdout(output):
        stage3.estimate_zero3_model_states_mem_needs_all_cold(total, largest, 4)
    return counts, output.getvalue()


def test_deepspeed_s_estimate_leaves_out_activations_and_buckets(
    pool: WorkerPool,
) -> None:
    fit = module("will_it_fit")
    job = fit.job_of_shape("7B", tokens=2048, offload="optimizer")
    found = fit.rank_bytes(job, 3, 4)
    total, largest = sum(job.sizes), 152064 * 3584  # the embedding table
    (counts, said), *_ = pool.run(estimated, total, largest, world_size=RANKS)
    # On the meta device all tensors have the address 0: the last one alone is counted.
    assert counts == [10, 3 * 210]
    row = r"\| +(\S+)GB \| offload_param=none, offload_optimizer=\S*cpu"
    given, _ = re.findall(row, said)
    # The weights' shard, and 4 bytes for each value of the largest layer.
    assert float(given) == round((2 * total / 4 + 4 * largest) / 2**30, 2)
    assert found["parameters"] == pytest.approx(2 * total / 4, rel=1e-3)
    left_out = found["activations"] + found["buckets"]
    assert left_out == pytest.approx(16.9e9, rel=1e-2)
    name = "`estimate_zero3_model_states_mem_needs_all_live`"
    of_all = f"Of stage 3's {found['need'] / 1e9:.2f} GB DeepSpeed's {name} counts"
    assert f"{of_all} {given} GiB: no activations" in words_of("05_deepspeed_zero")


def test_in_float32_the_weights_are_their_own_master() -> None:
    # 4 bytes each for the weight, its gradient and Adam's two moments: 16 again, and
    # only the moments are optimizer state (section 3.1 counts 12 in mixed precision).
    ours, n = module("paper").paper_bytes, 4
    states = [(1, 1, 1), (1, 1, n), (1, n, n), (n, n, n)]  # by how many divided
    assert len(states) == 4
    for stage, divisors in enumerate(states):
        of_kinds = zip((4, 4, 8), divisors, strict=True)
        expected = [100 * each / divisor for each, divisor in of_kinds]
        assert [*ours(100, stage, n, "fp32").values()] == expected
        of_kinds = zip((2, 2, 12), divisors, strict=True)
        expected = [100 * each / divisor for each, divisor in of_kinds]
        assert [*ours(100, stage, n, "bf16").values()] == expected


# Three tensors on three ranks. DeepSpeed aligns what it divides to twice the number of
# ranks (`nccl_start_alignment_factor` in zero/stage_1_and_2.py), here 20 values to 24.
def added_by(stage: int, rank: int = 0, *words: Any, **more: Any) -> dict[str, float]:
    sizes, precision = more.pop("sizes", [10, 7, 3]), words[0] if words else "bf16"
    run = module("added").Run(sizes, stage, rank, 3, precision, **more)
    return module("added").bytes_added(run)


def test_what_deepspeed_adds_on_three_ranks_by_hand() -> None:
    near, share = pytest.approx, 20 / 3
    for precision in ("bf16", "fp32"):
        assert set(added_by(0, 0, precision).values()) == {0}
    for precision, weight, states in (("bf16", 2, 12), ("fp32", 4, 8)):
        for stage in (1, 2):
            found = added_by(stage, 0, precision)
            assert found["parameters"] == weight * (24 - 20)
            # Master weights also in fp32, where the paper's formula has none.
            assert found["optimizer"] == near(12 * 8 - states * share)
        found = added_by(3, 0, precision, threshold=3)
        # Each by itself: 4 + 3 + 1 values of 10, 7 and 3.
        assert found["parameters"] == near(weight * (8 - share))
        assert found["optimizer"] == near(12 * 8 - states * share)
        assert found["gathered"] == weight * 3
    # Stage 2: the shards are values 0 to 7, 8 to 15, 16 to 23, and each tensor that a
    # shard has a part of leaves its whole gradient.
    for sizes, whole in (([10, 7, 3], [10, 17, 10]), ([8, 9, 3], [8, 9, 12])):
        found = [added_by(2, rank, sizes=sizes)["gradients"] for rank in range(3)]
        assert found == near([2 * (values - share) for values in whole])
    assert added_by(1)["gradients"] == 0


def test_what_fp32_accumulation_adds_on_three_ranks_by_hand() -> None:
    near, accumulate = pytest.approx, dict[str, Any](accumulate="fp32")
    # Stage 1: 4 bytes for all values, beside the 2 of bf16.
    assert added_by(1, **accumulate)["gradients"] == 4 * 20
    # Stage 3: 4 bytes in place of 2, for 8 values.
    assert added_by(3, **accumulate)["gradients"] == near(4 * 8 - 2 * 20 / 3)
    # Stage 2: a shard of 8 values in fp32; a tensor larger than the bucket in bf16 too.
    for bucket, alone in ((10, 0), (9, 10)):
        found = added_by(2, bucket=bucket, **accumulate)["gradients"]
        assert found == near(4 * 8 + 2 * alone - 2 * 20 / 3)
    # The bucket holds gradients of the weights' dtype. Stage 0 has none, nor has stage
    # 1 if it accumulates in fp32.
    in_bucket, make = module("added").bucket_bytes, module("added").Run
    for stage, precision, how, each in (
        *((0, "bf16", "", 0), (1, "bf16", "", 2), (1, "bf16", "fp32", 0)),
        *((2, "bf16", "fp32", 2), (3, "bf16", "", 2), (2, "fp32", "", 4)),
    ):
        run = make([20], stage, 0, 3, precision, how, bucket=100)
        assert in_bucket(run) == 100 * each, (stage, precision, how)


@pytest.mark.slow
def test_every_rank_keeps_what_the_paper_says(counted: Any) -> None:
    # Written out here from the paper, so as not to ask the room's own formula.
    n, near = RANKS, pytest.approx
    checked = 0
    for found in counted:
        states = bytes_of(found, "bf16", "optimizer")
        assert states == near([12, 12 / n, 12 / n, 12 / n], rel=0.01)
        weights = bytes_of(found, "bf16", "parameters")
        assert weights == near([2, 2, 2, 2 / n], rel=0.01)
        gradients = bytes_of(found, "bf16", "gradients")
        assert gradients[:2] + gradients[3:] == near([2, 2, 2 / n], rel=0.01)
        checked += 1
    assert checked == RANKS


@pytest.mark.slow
def test_paper_and_what_deepspeed_adds_are_what_is_counted(
    counted: Any, accumulated: Any
) -> None:
    checked = 0
    for two, one in zip(counted, accumulated, strict=True):
        found = two | one
        for way in WAYS:
            is_right, text = found[f"{way}: right"]
            assert is_right, text
            assert " counts 0.0% from paper + adds (limit 1%), peaks 0.0% " in text
            for one in found[way]:
                # Adam counts its steps for each tensor, in 4 bytes.
                for kind in ("parameters", "gradients", "optimizer"):
                    expected = one["paper"][kind] + one["added"][kind]
                    assert one["kept"][kind] == pytest.approx(expected, abs=200)
                    checked += 1
    assert checked == RANKS * 11 * 3


@pytest.mark.slow
def test_deepspeed_keeps_master_weights_in_float32_too(counted: Any) -> None:
    checked = 0
    for found in counted:
        # Adam's two moments alone are 8 bytes; with master weights it is 12.
        states = bytes_of(found, "fp32", "optimizer")
        assert states[0] == pytest.approx(8, rel=0.01)
        assert states[1:] == [pytest.approx(12 / RANKS, rel=0.01)] * 3
        # That is no part of the paper's column.
        for one in found["fp32"]:
            share = RANKS if one["stage"] else 1
            assert one["paper"]["optimizer"] == 8 * one["parameters"] / share
            checked += 1
    assert checked == 4 * RANKS


@pytest.mark.slow
def test_gradients_accumulated_in_float32_take_more(accumulated: Any) -> None:
    checked = 0
    for found in accumulated:
        # In stage 1 a buffer for all of them, beside what backward computes in bf16.
        gradients = bytes_of(found, ACCUMULATE, "gradients")
        assert gradients[0] == pytest.approx(2 + 4, rel=0.01)
        assert gradients[2] == pytest.approx(4 / RANKS, rel=0.01)
        checked += 1
    assert checked == RANKS


@pytest.mark.slow
def test_float32_accumulation_is_refused_in_stage_0(pool: WorkerPool) -> None:
    said = pool.run(accumulate_in_stage_0, world_size=RANKS)
    assert len(said) == RANKS
    for text in said:
        assert text.startswith("unsupported mix of model_dtype=torch.bfloat16")


@pytest.mark.slow
def test_a_tensor_cut_in_two_leaves_its_gradient_on_both_ranks(counted: Any) -> None:
    n = sum(model_sizes())
    whole = sum(bytes_of(found, "bf16", "gradients")[2] for found in counted) * n
    # A cut between each two ranks: as many of the largest tensor may be kept twice.
    cuts = RANKS - 1
    assert 2 * n < whole <= 2 * n + cuts * 2 * (3 * WIDTH * WIDTH)


def gradients_in_buckets() -> dict[str, float]:
    """Count the gradients of stage 2 where no tensor is larger than a bucket."""
    device, counted = set_up(), module("counted_step")
    counted.warm_up("bf16", WIDTH, device)

    def large_enough(*_: int) -> dict[str, int]:
        return {"reduce_bucket_size": max(model_sizes())}

    found = {}
    with mock.patch.object(counted, "buckets_for", large_enough):
        for dtype in ("", "fp32"):
            options = SimpleNamespace(**{**vars(OPTIONS), "grad_accum_dtype": dtype})
            found[dtype] = counted.count_step(2, device, options)["kept"]["gradients"]
    return found


@pytest.mark.slow
def test_accumulated_in_float32_the_cut_tensor_is_not_whole(pool: WorkerPool) -> None:
    n = sum(model_sizes())
    by_rank = pool.run(gradients_in_buckets, world_size=RANKS)
    kept = [sum(found[dtype] for found in by_rank) for dtype in ("", "fp32")]
    assert len(by_rank) == RANKS
    # The buffer of a rank's partition is all that there is.
    assert (kept[0] > 2.2 * n, kept[1]) == (True, pytest.approx(4 * n, rel=1e-3)), kept


@pytest.mark.slow
def test_small_tensors_stay_on_every_rank_in_stage_3(counted: Any) -> None:
    # At width 256 these are all of attention, the norms and the embedding.
    small = sum(n for n in model_sizes() if n <= 100_000) / sum(model_sizes())
    checked = 0
    for found in counted:
        gathered = bytes_of(found, "bf16", "gathered")
        assert gathered == [0, 0, 0, pytest.approx(2 * small, rel=0.02)]
        checked += 1
    assert checked == RANKS


def kept_whole(threshold: int) -> list[int]:
    """Return the sizes that DeepSpeed marks to stay whole on every rank."""
    from deepspeed.runtime.zero import parameter_offload

    sizes = [threshold - 1, threshold, threshold + 1]
    tensors = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    for tensor in tensors:
        tensor.ds_numel = tensor.numel()  # type: ignore
    of: Any = SimpleNamespace(module=torch.nn.ParameterList(tensors))
    mark = parameter_offload.DeepSpeedZeRoOffload.mark_persistent_parameters
    # It would ask for the rank, which DeepSpeed knows only when it is initialised.
    with mock.patch.object(parameter_offload, "print_rank_0"):
        return [tensor.numel() for tensor in mark(of, threshold, sum(sizes))]


def test_a_tensor_of_the_threshold_s_size_stays_whole_too(pool: WorkerPool) -> None:
    (sizes,) = pool.run(kept_whole, 100_000, world_size=1)
    assert sizes == [99_999, 100_000]


def test_the_formulas_keep_whole_what_deepspeed_keeps_whole() -> None:
    # `param.ds_numel <= param_threshold` in mark_persistent_parameters, which the test
    # above runs. In bf16 a weight takes 2 bytes.
    sizes, whole = [99_999, 100_000, 100_001], 99_999 + 100_000
    added = module("added").bytes_added(module("added").Run(sizes, 3, 0, 2, "bf16"))
    assert added["gathered"] == 2 * whole
    # What is whole is all-gathered once a step. The rest is gathered for forward and
    # for backward, and its gradients are reduced. A tied matrix of the threshold's
    # size is whole too, and gathered no third time.
    volume = load_chapter("05_deepspeed_zero/communication")["communication_volume"]
    for first in ([100_001], [100_000]):
        tied = first[0] if first[0] > 100_000 else 0
        all_sizes = [*first, *sizes]
        small = sum(n for n in all_sizes if n != 100_001)
        total = sum(all_sizes)
        due = 2 * (total - small + tied) + total + small
        assert volume.volume(3, False, 1, all_sizes) == due / total


@pytest.mark.slow
def test_process_grows_by_what_is_counted(counted: Any) -> None:
    kinds, checked = module("live_tensors").LIVE_KINDS, 0
    for found in counted:
        for one in (*found["bf16"][:2], *found["fp32"][:2]):
            whole = sum(one["kept"][kind] for kind in kinds)
            assert abs(one["kept"]["process"] - whole) < 0.05 * whole + 5e6
            checked += 1
    assert checked == 4 * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_formula_holds_on_other_numbers_of_ranks(ranks: int) -> None:
    with WorkerPool(ranks) as workers:
        by_rank = workers.run(count, *WAYS, world_size=ranks)
    assert len(by_rank) == ranks
    for found in by_rank:
        ways = [key for key in found if key.endswith(": right")]
        assert len(ways) == 3
        assert [found[way] for way in ways if not found[way][0]] == []


@pytest.mark.slow
def test_default_buckets_make_every_higher_stage_larger() -> None:
    script = ROOT / ROOM / "memory_per_rank.py"
    words = ["--width", 128, "--layers", 1, "--default-buckets"]
    result = deepspeed(script, *words)
    assert result.returncode == 0, result.output
    rows = re.findall(r"^ +([0-3])((?: +[\d.]+){10})$", result.stdout, re.M)
    columns = [[float(cell) for cell in cells.split()] for _, cells in rows]
    assert len(columns) == 4
    kept = [cells[5] for cells in columns]
    assert min(kept[1:]) > 1000 > 10 > kept[0]
    assert [cells[4] for cells in columns] == [0, 1000, 1000, 1000]
    # On the CPU, memory that nobody has touched is not taken.
    assert max(cells[9] for cells in columns) < 20


# --- The peak. ----------


@pytest.mark.parametrize(
    ("way", "stage", "expected"),
    [
        # Everything, and all gradients once more in the flat buffer that is sent.
        ("fp32", 0, 16 + 4),
        # Nothing has been freed yet, and the shard's gradients are copied.
        ("fp32", 1, 4 + 4 + (12 + 4) / RANKS),
        # The weights; and of the shard the optimizer state, its gradients, and twice as
        # much for PyTorch's Adam, whose gradients are in float32.
        ("fp32", 2, 4 + (12 + 4 + 8) / RANKS),
        ("bf16", 1, 2 + (12 + 4 + 8) / RANKS),
        ("bf16", 2, 2 + (12 + 4 + 8) / RANKS),
        # Stage 3 keeps the gradients that it has copied for Adam.
        ("fp32", 3, (4 + 4 + 12 + 4 + 8) / RANKS),
        ("bf16", 3, (2 + 2 + 12 + 4 + 8) / RANKS),
    ],
)
def test_a_step_takes_more_than_it_keeps(
    counted: Any, way: str, stage: int, expected: float
) -> None:
    peak = bytes_of(counted[0], way, "peak")[stage]
    assert peak == pytest.approx(expected, rel=0.03)
    result = counted[0][way][stage]
    kept = sum(result["kept"][kind] for kind in module("live_tensors").LIVE_KINDS)
    assert result["peak"] > 1.05 * kept


def test_stage_0_in_bfloat16_makes_all_gradients_float32_for_adam(counted: Any) -> None:
    n, largest = sum(model_sizes()), max(model_sizes())
    # Adam goes from tensor to tensor, and has the temporaries of three of them.
    expected = 16 + 4 + 3 * 4 * largest / n
    checked = 0
    for found in counted:
        assert bytes_of(found, "bf16", "peak")[0] == pytest.approx(expected, rel=0.01)
        checked += 1
    assert checked == RANKS


def test_autocast_keeps_bfloat16_copies_of_weights_in_forward() -> None:
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    copies: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 64 * 64:
            copies.append(tensor)
        return tensor

    x = torch.ones(5, 64, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        torch.nn.Sequential(*layers)(x)
    assert [tensor.dtype for tensor in copies] == [torch.bfloat16] * 3
    ours = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert not ours & {tensor.untyped_storage().data_ptr() for tensor in copies}
    assert "nothing in the step, but in forward 2 for bf16 copies" in words_of(ROOM)


@pytest.mark.slow
def test_ddp_in_autocast_takes_no_less_in_a_step() -> None:
    # In fp32: weights, gradients, moments; by default the buckets, and temporaries.
    expected = [4 + 4 + 8 + 4 + 4, 4 + 4 + 8]
    # In fresh processes: what others have freed would count, or hide what is new.
    with WorkerPool(2) as fresh:
        results = fresh.run(steps_of_ddp)
    assert results == [pytest.approx(expected, abs=1)] * 2
    page = words_of(ROOM)
    assert (
        "DDP in autocast adds 4 to its 16 for buckets and 4 for `foreach`; with" in page
    )


def test_history_tells_the_peak_and_begins_where_it_ends(counted: Any) -> None:
    checked = 0
    for found in counted:
        for one in found["bf16"]:
            forward, backward, step = one["history"].values()
            assert [len(forward), len(backward), len(step)] == [60] * 3
            assert max(step) == one["peak"] or max(backward) >= one["peak"]
            # Between steps there are weights and optimizer state, and few others.
            kept = one["kept"]["parameters"] + one["kept"]["optimizer"]
            assert min(forward[0], step[-1]) >= 0.99 * kept
            checked += 1
    assert checked == 4 * RANKS


def test_page_shows_the_peaks_that_were_counted() -> None:
    page = (ROOT / ROOM / "README.md").read_text("utf-8")
    counted = json.loads((ROOT / "assets/05_memory_over_time.json").read_text())
    rows = re.findall(r"^\| stage (\d) \|.* \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert [stage for stage, *_ in rows] == list("0123") and len(rows) == 4
    for stage, *shown in rows:
        peaks = [
            one["peak"] / one["parameters"]
            for ranks in "24"
            for one in counted[ranks]
            if one["stage"] == int(stage)
        ]
        assert shown == [f"{number:.1f}" for number in peaks]


@pytest.mark.slow
@pytest.mark.parametrize(("foreach", "each"), [(False, 8), (True, 4)])
def test_adam_allocates_temporaries(foreach: bool, each: int) -> None:
    live = module("live_tensors")
    weight = torch.zeros(2_000_000, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], foreach=foreach)
    adam.step()
    counter = module("peak_counter").PeakCounter()
    counter.start(live.live_storages([weight.grad]).values())
    kept = counter.now
    assert kept >= 4 * 8_000_000  # the weight, its gradient, two moments
    taken = touched_since_then(weight.device)
    with counter:
        adam.step()
    assert counter.now == kept
    assert counter.peak - kept == pytest.approx(each * 2_000_000, rel=0.001)
    with counter:
        resized = torch.empty(10)
        resized.untyped_storage().resize_(4000)
    assert counter.now == kept + 40  # for the counter it is as large as it was
    # The kernel knows nothing of tensors.
    assert taken() == pytest.approx(each * 2_000_000, abs=3_000_000)
    names = {False: "single", True: "foreach"}
    assert module("peak").ADAMS[names[foreach]] * 4 == each


def test_what_is_sent_or_stepped_at_a_time_has_a_limit() -> None:
    peak = module("peak")
    millions = [10**6 * n for n in (400, 200, 300, 100)]
    assert peak.values_sent_together(millions) == 600 * 10**6
    assert peak.values_sent_together(millions[2:]) == 400 * 10**6
    # 72 billion values on 4 ranks: of 18 billion each steps a billion at a time.
    kept = {"parameters": 36e9, "gradients": 36e9, "optimizer": 216e9, "buckets": 1e9}
    run = module("added").Run([72 * 10**9], 3, 0, 4, "bf16")
    adams = {"deepspeed": 2 + 4, "foreach": 4 + 4, "single": 4 + 8}
    for adam, each in adams.items():
        found = peak.peak_bytes(kept, run, adam)
        assert found == 289e9 + each * 1e9
    assert adams.keys() == peak.ADAMS.keys() and len(adams) == 3


def test_peaks_of_a_hundred_values_by_hand() -> None:
    # One rank, tensors of 60 and 40 values, Adam's two moments. As DeepSpeed 0.19.8 and
    # PyTorch 2.13.0 allocate them, in bytes.
    peak, run = module("peak"), module("added").Run([60, 40], 0, 0, 1, "fp32")
    # Stage 0 in fp32, one tensor after the other: two temporaries of the larger one,
    # and the first of the next, which is there before they go.
    kept = {"parameters": 400, "gradients": 400, "optimizer": 800, "buckets": 0}
    assert peak.peak_bytes(kept, run, "single") == 1600 + 3 * 4 * 60
    # Stage 1 in bf16: this rank's gradients are copied beside the bucket.
    kept = {"parameters": 200, "gradients": 200, "optimizer": 1200, "buckets": 1000}
    run = run._replace(stage=1, precision="bf16")
    assert peak.peak_bytes(kept, run, "deepspeed") == 1400 + 1000 + 2 * 100
    # Gradients accumulated in fp32 are sent as a copy of 2 bytes a value.
    kept |= {"gradients": 600, "buckets": 0}
    run = run._replace(accumulate="fp32")
    assert peak.peak_bytes(kept, run, "deepspeed") == 2000 + 2 * 100
    # Stage 2, rank 0 of three: 8 of 20 values. They are in fp32 already, and of the
    # tensor of 10 it has no more than its shard. `foreach` takes 4 bytes a value, when
    # the copy for Adam is there.
    kept = {"parameters": 40, "gradients": 32, "optimizer": 12 * 8, "buckets": 1000}
    run = module("added").Run([10, 7, 3], 2, 0, 3, "bf16", "fp32")
    assert peak.peak_bytes(kept, run, "foreach") == 40 + 96 + 4 * 8 + 4 * 8
    # In bf16 it has all of that tensor's gradient, and Adam's is a copy of 4 bytes.
    run = run._replace(accumulate="")
    assert peak.peak_bytes(kept, run, "foreach") == 40 + 96 + 2 * 10 + (2 + 4) * 8


# --- The calculator. ----------


def defaults_of_deepspeed() -> dict[str, int]:
    """Return what DeepSpeed takes for settings that the calculator knows."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**{})
    return {
        "bucket": zero.reduce_bucket_size,
        "live": zero.max_live_parameters,
        "threshold": zero.param_persistence_threshold,
        "sub_group": zero.sub_group_size,
    }


@pytest.mark.slow
def test_calculator_s_defaults_are_deepspeed_s(pool: WorkerPool) -> None:
    (found,) = pool.run(defaults_of_deepspeed, world_size=1)
    peak, added = module("peak"), module("added")
    ours = {"live": peak.Job._field_defaults["live"], "sub_group": peak.SUB_GROUP}
    for kind in (peak.Job, added.Run):
        both = {name: kind._field_defaults[name] for name in ("bucket", "threshold")}
        assert found == both | ours
    page = words_of(ROOM)
    assert "(`stage3_param_persistence_threshold`, 100,000 values)" in page
    assert "at most a billion, `sub_group_size`)" in page
    assert "`reduce_bucket_size` is 500 million **values**" in page
    assert (found["threshold"], found["sub_group"], found["bucket"]) == (
        *(100_000, 10**9),
        5 * 10**8,
    )


def test_calculator_gives_the_known_counts_of_qwen2() -> None:
    fit = module("will_it_fit")
    job = fit.job_of_shape("1.5B")
    assert sum(job.sizes) == 1_543_714_304
    counts = [fit.rank_bytes(job, stage, 2)["count"] for stage in range(4)]
    assert counts == [1_543_714_304, 771_857_152, 771_857_152, 771_857_152]
    assert sum(fit.job_of_shape("7B").sizes) == 7_615_616_512
    # As the model cards count them: 1.54, 7.61 and 72.71 billion.
    assert sum(fit.job_of_shape("70B").sizes) == 72_706_203_648
    # 2 + 2 + 12 bytes, and 2 + 2 + 12 / 2.
    states = [fit.rank_bytes(job, stage, 2)["optimizer"] for stage in (0, 1)]
    assert states == [12 * 1_543_714_304, 6 * 1_543_714_304]


def test_need_is_one_number_and_counts_everything() -> None:
    fit = module("will_it_fit")
    job = fit.job_of_shape("7B")
    found = fit.rank_bytes(job, 3, 1024)
    paper = 16 * 7_615_616_512 / 1024
    # A bucket of 500 million values, and a billion of gathered weights, in bf16.
    before_activations = found["need"] - found["activations"]
    assert before_activations == pytest.approx(paper + 1e9 + 2e9, rel=0.01)
    assert round(paper / 1e9, 2) == 0.12 and round(before_activations / 1e9, 1) == 3.1
    checked = 0
    for stage in range(4):
        for ranks in (1, 2, 64):
            found = fit.rank_bytes(job, stage, ranks)
            together = sum(found[kind] for kind in fit.KINDS)
            assert found["need"] == max(together, found["step"])
            checked += 1
    assert checked == 12


def test_calculator_gathers_what_its_settings_say() -> None:
    fit, peak = module("will_it_fit"), module("peak")
    gpt2 = fit.AutoConfig.for_model("gpt2", n_embd=64, n_head=4, n_layer=2)
    job = peak.Job([600, 400], gpt2)

    def gathered(ranks: int = 2, **settings: Any) -> float:
        return peak.rank_bytes(job._replace(**settings), 3, ranks)["gathered"]

    # All of a small model, 2 bytes a value; on one rank nothing is gathered.
    assert (gathered(), gathered(ranks=1)) == (2 * 1000, 0)
    assert gathered(live=100, threshold=0) == 2 * 100
    assert gathered(live=100, threshold=400) == 2 * (100 + 400)
    # Its MLP is four times as wide, though the config has no number for that.
    wide = peak.activation_bytes(job._replace(tokens=1))
    logits = gpt2.vocab_size * (2 + 4)
    assert wide - logits == 2 * (2 * 64 * (4 + 2 * 2) + 2 * (5 * 64 + 4 * 4 * 64))
    refused = [
        (1, {"grad_accum_dtype": "fp32", "precision": "fp32"}, "is for bf16"),
        (0, {"grad_accum_dtype": "fp32"}, "from stage 1 on"),
        (2, {"grad_accum_dtype": "fp32", "offload": "optimizer"}, "is not worked out"),
        (2, {"offload": "all"}, "from stage 3 on"),
    ]
    assert len(refused) == 4
    for stage, settings, text in refused:
        with pytest.raises(ValueError, match=text):
            peak.rank_bytes(job._replace(**settings), stage, 2)


def test_what_is_offloaded_is_on_the_host_with_two_buffers_for_gradients() -> None:
    fit, share = module("will_it_fit"), 7_615_616_512 / 64
    # In bytes for each value of a rank: master weight and two moments in fp32, weights
    # if all is offloaded, and gradients twice, in fp32 and in bf16 (DeepSpeed 0.19.8).
    for offload, weights in (("optimizer", 0), ("all", 2)):
        job = fit.job_of_shape("7B")._replace(offload=offload)
        found = fit.rank_bytes(job, 3, 64)
        host = (4 + 4 + 4) + weights + (4 + 2)
        assert found["host"] / share == pytest.approx(host, rel=1e-3)
        assert found["optimizer"] == found["gradients"] == 0
        assert found["parameters"] / share == pytest.approx(2 - weights, rel=1e-3)


def test_calculator_speaks_for_the_rank_that_needs_the_most() -> None:
    fit, peak = module("will_it_fit"), module("peak")
    # The shards are values 0 to 7, 8 to 15, 16 to 23, and those of each tensor that
    # they have a part of: 8, 9 and 12 values (see above), so the last rank's gradients.
    assert [module("added").fullest_rank([8, 9, 3], n) for n in (1, 3)] == [0, 2]
    assert module("added").fullest_rank([10, 7, 3], 3) == 1
    drawn, added, counted = random.Random(0), module("added"), 0
    for ranks in range(1, 12):
        sizes = [drawn.randint(1, 30) for _ in range(drawn.randint(1, 9))]
        own = [sum(added.own_tensors(sizes, rank, ranks)) for rank in range(ranks)]
        assert own[added.fullest_rank(sizes, ranks)] == max(own)
        counted += 1
    assert counted == 11
    job = fit.job_of_shape("7B")
    run = module("added").Run(job.sizes, 2, 0, 16, "bf16")
    gradients = [
        peak.paper_bytes(sum(job.sizes), 2, 16, "bf16")["gradients"]
        + peak.bytes_added(run._replace(rank=rank))["gradients"]
        for rank in range(16)
    ]
    found = fit.rank_bytes(job, 2, 16)["gradients"]
    assert gradients[0] < max(gradients) == found


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_what_is_offloaded_is_what_is_counted(pool: WorkerPool, stage: int) -> None:
    config = module("sized_qwen").sized_config(WIDTH, LAYERS)
    sizes, few = (
        model_sizes(),
        module("sized_qwen").buckets_for(sum(model_sizes()), WIDTH),
    )
    job = module("peak").Job(sizes, config, offload="optimizer", live=0)
    job = job._replace(bucket=few["reduce_bucket_size"])
    found = module("peak").rank_bytes(job, stage, RANKS)
    kinds = ("parameters", "gradients", "buckets", "gathered", "host")
    counted = pool.run(count_at_last_gradient, stage, True, world_size=RANKS)
    assert max(counted) == pytest.approx(sum(found[kind] for kind in kinds), rel=0.01)


@pytest.mark.parametrize("stage", [2, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_only_stage_2_keeps_a_sum_of_gradients_beside_the_last_ones(
    pool: WorkerPool, stage: int
) -> None:
    sizes, sized = model_sizes(), module("sized_qwen")
    few = sized.buckets_for(sum(sizes), WIDTH)["reduce_bucket_size"]
    config = sized.sized_config(WIDTH, LAYERS)
    job = module("peak").Job(sizes, config, bucket=few, live=0, micro_batches=2)
    one, two = (
        module("peak").rank_bytes(job._replace(micro_batches=m), stage, RANKS)
        for m in (1, 2)
    )
    share = 2 * sum(sizes) / RANKS
    more = two["gradients"] - one["gradients"]
    assert more == (one["gradients"] if stage == 2 else 0) and more < 1.5 * share
    assert two["step"] == one["step"]
    kinds = ("parameters", "gradients", "optimizer", "buckets", "gathered")
    counted = pool.run(count_at_last_gradient, stage, False, 2, world_size=RANKS)
    assert max(counted) == pytest.approx(sum(two[kind] for kind in kinds), rel=0.01)


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3))]
)
def test_frozen_weights_are_nothing_but_weights(pool: WorkerPool, stage: int) -> None:
    sized, config = module("sized_qwen"), module("sized_qwen").sized_config
    with torch.device("meta"):
        model = sized.Qwen2ForCausalLM(config(WIDTH, LAYERS))
    named = {name: p.numel() for name, p in model.named_parameters()}
    frozen = tuple(n for name, n in named.items() if "layers.1." in name)
    trained = [n for name, n in named.items() if "layers.1." not in name]
    assert len(frozen) == len(trained) - 2 == 12
    few = sized.buckets_for(sum(named.values()), WIDTH)["reduce_bucket_size"]
    job = module("peak").Job(trained, config(WIDTH, LAYERS), bucket=few, live=0)
    job = job._replace(frozen=frozen)
    found = module("peak").rank_bytes(job, stage, RANKS)
    run = functools.partial(pool.run, world_size=RANKS)
    counted = run(count_at_last_gradient, stage, False, 1, "layers.1.")
    kinds = ("parameters", "gradients", "optimizer", "buckets", "gathered")
    worked_out = sum(found[kind] for kind in kinds)
    assert max(counted) == pytest.approx(worked_out, rel=0.01)
    # They are no small part of it: 2 bytes a value, divided in stage 3 only.
    assert 2 * sum(frozen) / (RANKS if stage == 3 else 1) > 0.08 * worked_out


def test_qwen2_on_two_cards_of_32_gb_fits_from_stage_1_on() -> None:
    fit = module("will_it_fit")
    for tokens, answer in {2048: ["no", "yes", "yes", "yes"], 8192: ["no"] * 4}.items():
        job = fit.job_of_shape("1.5B", tokens=tokens)
        unit, lines = fit.breakdown(job, 2, 32e9)
        assert [line.split()[-2] for line in lines[1:]] == answer and unit == "GB"


def test_a_small_job_is_shown_in_megabytes() -> None:
    fit = module("will_it_fit")
    for bucket, unit, state in ((5e6, "MB", "120.00"), (500_000_000, "GB", "0.12")):
        job = fit.Job([10_000_000], None, bucket=bucket, activations=0)
        found, lines = fit.breakdown(job, 1, 32e9)
        assert found == unit and [line.split()[4] for line in lines[1:]] == [state] * 4


def test_whether_it_fits_is_decided_by_the_larger_peak() -> None:
    fit = module("will_it_fit")
    job = fit.job_of_shape("7B")
    found = fit.rank_bytes(job, 2, 2)
    together = sum(found[kind] for kind in fit.KINDS)
    step = found["step"]
    assert together < step == pytest.approx(12 * 7_615_616_512, rel=0.001)
    assert fit.fewest_ranks(job, 2, (together + step) / 2) == 3
    assert fit.fewest_ranks(job, 2, step) == 2
    assert fit.fewest_ranks(job._replace(adam="single"), 2, step) == 3
    # Of stage 1 on cards of 80 GB, three are enough: any number, not a power of two.
    needs = [fit.rank_bytes(job, 1, ranks)["need"] / 1e9 for ranks in (2, 3)]
    assert needs[1] < 80 < needs[0] and fit.fewest_ranks(job, 1, 80e9) == 3


def test_more_ranks_may_need_more_each() -> None:
    fit = module("will_it_fit")
    # Two tables, of which a shard on 12 ranks may touch both, and on 16 none does.
    tables = fit.Job([128_000_000] * 2, None, bucket=5_000_000, activations=0)
    needs = [fit.rank_bytes(tables, 1, ranks)["need"] for ranks in range(1, 40)]
    few = fit.fewest_ranks(tables, 1, min(needs))
    assert few == needs.index(min(needs)) + 1 < 39 and max(needs[few:]) > needs[few - 1]
    # Adapters: one rank has no weights to gather, two gather nearly the whole model.
    frozen = (4_000_000,) * 80
    lora = fit.Job([8192] * 160, None, frozen=frozen, bucket=5_000_000, activations=0)
    one, two = (fit.rank_bytes(lora, 3, ranks)["need"] for ranks in (1, 2))
    assert one < 0.8 * two and fit.fewest_ranks(lora, 3, one) == 1


@pytest.mark.parametrize(
    ("fixture", "way"),
    [
        ("counted", "bf16"),
        ("counted", "fp32"),
        pytest.param("accumulated", ACCUMULATE, marks=pytest.mark.slow),
    ],
)
def test_calculator_agrees_with_what_is_measured(
    request: pytest.FixtureRequest, fixture: str, way: str
) -> None:
    counted: Any = request.getfixturevalue(fixture)
    fit, sized = module("will_it_fit"), module("sized_qwen")
    sizes = model_sizes()
    few = sized.buckets_for(sum(sizes), WIDTH)
    job = fit.Job(
        sizes,
        sized.sized_config(WIDTH, LAYERS),
        precision=way[:4],
        grad_accum_dtype="fp32" if way == ACCUMULATE else "",
        bucket=few["reduce_bucket_size"],
        live=0,
        adam="single",
    )
    checked = 0
    kinds = [kind for kind in fit.KINDS if kind != "activations"]
    for ranks in zip(*(found[way] for found in counted), strict=True):
        stage = ranks[0]["stage"]
        worked_out = fit.rank_bytes(job, stage, RANKS)
        # On the rank that has most, which in stage 2 is not the first one here.
        kept = [sum(one["kept"][kind] for kind in kinds) for one in ranks]
        assert sum(worked_out[k] for k in kinds) == pytest.approx(max(kept), rel=1e-3)
        assert stage != 2 or kept[0] < 0.98 * max(kept)
        peak = max(one["peak"] for one in ranks) / worked_out["step"]
        # In stage 1 the rank with the largest tensors may have freed others before.
        assert (0.97 if stage == 1 else 0.999) < peak < 1.001
        checked += 1
    assert checked == (3 if way == ACCUMULATE else 4)


@pytest.mark.parametrize(("precision", "wide"), [("fp32", 4), ("bf16", 2)])
def test_estimate_of_activations_is_that_of_its_tensors(
    precision: str, wide: int
) -> None:
    # Of transformers' Qwen2, in multiples of the width, of the MLP's and of the
    # vocabulary; the test below compares the sum with what autograd keeps.
    width, inner, vocabulary, layers, tokens = 8, 24, 50, 3, 7
    norm = [(width, 4), (width, wide), (width, wide)]  # input in fp32, normed, result
    attention = [(width, wide)] * 3 + [(width, wide)] * 2  # q, k, v; twice the output
    mlp = [(inner, wide)] * 4  # gate, its silu, up, their product
    kept = layers * [*norm, *norm, *attention, *mlp]
    kept += [(vocabulary, wide), (vocabulary, 4)]  # logits, and their logarithms
    config = SimpleNamespace(
        hidden_size=width,
        intermediate_size=inner,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
    )
    job = module("peak").Job([1], config, precision, tokens=tokens)
    expected = tokens * sum(values * each for values, each in kept)
    assert module("peak").activation_bytes(job) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_estimate_of_activations_is_near_what_autograd_keeps(precision: str) -> None:
    fit, sized = module("will_it_fit"), module("sized_qwen")
    model = sized.new_model(WIDTH, LAYERS)
    model = model.bfloat16() if precision == "bf16" else model
    inputs = torch.randint(256, (2, 64))
    kept, _ = module("activation_checkpointing").count_bytes(model, inputs)
    job = fit.Job([1], sized.sized_config(WIDTH, LAYERS), precision, tokens=2 * 64)
    assert module("peak").activation_bytes(job) == pytest.approx(kept, rel=0.1)


def test_calculator_reads_a_config_that_save_pretrained_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = module("will_it_fit")
    module("sized_qwen").sized_config(WIDTH, LAYERS).save_pretrained(tmp_path)
    settings = dict(fit.Job._field_defaults) | {"offload": "all"}
    words = {"model": str(tmp_path), "shape": None, "module": None, "ranks": 2}
    fit.main(SimpleNamespace(**words, memory=80, **settings))
    printed = capsys.readouterr().out
    assert f"{sum(model_sizes()):,} parameters on 2 rank(s)" in printed
    assert printed.count("--offload=all exists from stage 3 on") == 3


OWN_MODEL = """
import torch
from torch import nn

def build():
    body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    body.requires_grad_({trained})
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    return model, lambda: model(torch.zeros(8, 3, 32, 32)).square().mean()
"""


@pytest.mark.parametrize(("precision", "wide"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("trained", [True, False])
def test_own_model_is_counted_without_memory(
    tmp_path: Path, precision: str, wide: int, trained: bool
) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL.format(trained=trained))
    place = f"{tmp_path / 'own.py'}:build"
    job = module("will_it_fit").job_of_module(place, precision, bucket=7)
    assert torch.get_default_dtype() == torch.float32
    body, head = [3 * 16 * 9, 16, 16, 16], [16 * 900 * 10, 10]
    assert (job.sizes, job.frozen) == (
        (body + head, ()) if trained else (head, tuple(body))
    )
    assert (job.precision, job.bucket) == (precision, 7)
    # A trained convolution keeps the input, the norm its input with the mean and the
    # deviation of 16 channels, ReLU and the head the same output; square the result.
    image, plane = 8 * 3 * 32 * 32, 8 * 16 * 30 * 30
    values = plane + 80 + (image + plane + 16 + 16 if trained else 0)
    rank = module("peak").rank_bytes(job, 2, 2)
    assert rank["activations"] == pytest.approx(values * wide, rel=1e-3)
    # Running mean and variance, and how often.
    assert job.buffers == 2 * 16 * 4 + 8
    whole = wide * (sum(head) + sum(body)) + job.buffers
    assert rank["parameters"] == pytest.approx(whole, abs=2 * wide)
    # No machine has the memory for this one.
    (tmp_path / "huge.py").write_text(
        "import torch\ndef build():\n    model = torch.nn.Linear(10**7, 10**7)\n"
        "    return model, lambda: model(torch.zeros(9, 10**7)).sum()\n"
    )
    huge = module("will_it_fit").job_of_module(f"{tmp_path / 'huge.py'}:build")
    assert huge.sizes == [10**14, 10**7] and huge.activations == 9 * 10**7 * 2
    # An LSTM's backward needs at least its four gates and its state.
    (tmp_path / "lstm.py").write_text(
        "import torch\ndef build():\n    model = torch.nn.LSTM(64, 64)\n"
        "    return model, lambda: model(torch.zeros(32, 8, 64))[0].sum()\n"
    )
    place = f"{tmp_path / 'lstm.py'}:build"
    lstm = module("will_it_fit").job_of_module(place, precision).activations
    assert 5 <= lstm / (32 * 8 * 64 * wide) <= 10
    assert torch.backends.mkldnn.enabled


def test_buffers_are_whole_and_in_float32_on_every_rank(pool: WorkerPool) -> None:
    by_rank = pool.run(buffer_under_deepspeed, world_size=RANKS)
    assert by_rank == [[(torch.float32, 1000)] * 4] * RANKS
    peak = module("peak")
    job = peak.Job([1000], None, bucket=7, activations=0)
    for stage in range(4):
        found = peak.rank_bytes(job, stage, RANKS)
        more = peak.rank_bytes(job._replace(buffers=4000), stage, RANKS)
        for kind in ("parameters", "step", "need"):
            assert more[kind] == found[kind] + 4000
    job = job._replace(offload="all", buffers=4000)
    more = peak.rank_bytes(job, 3, RANKS)
    assert more["parameters"] == 4000
    assert more["host"] == peak.rank_bytes(job._replace(buffers=0), 3, RANKS)["host"]


def test_own_model_s_activations_are_what_is_counted(tmp_path: Path) -> None:
    folder = repr(str(ROOT / ROOM))
    (tmp_path / "own.py").write_text(
        f"import sys; sys.path.insert(0, {folder})\nimport torch, sized_qwen as s\n"
        f"def build():\n    m = s.new_model({WIDTH}, {LAYERS})\n"
        "    def loss():\n        i = torch.zeros(2, 64, dtype=torch.long)\n"
        "        return m(input_ids=i, labels=i).loss\n"
        "    return m, loss\n"
    )
    job = module("will_it_fit").job_of_module(f"{tmp_path / 'own.py'}:build")
    model = module("sized_qwen").new_model(WIDTH, LAYERS).bfloat16()
    inputs = torch.randint(256, (2, 64))
    kept, _ = module("activation_checkpointing").count_bytes(model, inputs)
    assert job.activations == pytest.approx(kept, rel=1e-3)
    assert job.sizes == model_sizes()


def test_what_is_no_model_of_one_s_own_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, own = module("will_it_fit"), tmp_path / "own.py"
    own.write_text(
        OWN_MODEL.format(trained=True)
        + "build_less = lambda: 1\nlossless = lambda: (build()[0], lambda: None)\n"
        "def outside():\n    model, x = build()[0], torch.zeros(8, 3, 32, 32)\n"
        "    return model, lambda: model(x).sum()\n"
        "def item():\n    model, loss = build()\n"
        "    return model, lambda: loss() * loss().item()\n"
        "def nonzero():\n    model, loss = build()\n"
        "    return model, lambda: loss() + torch.ones(3).nonzero().sum()\n"
        "def cut_off():\n    model, loss = build()\n"
        "    return model, torch.no_grad()(loss)\n"
    )
    own.with_name("frozen.py").write_text(
        OWN_MODEL.format(trained=False) + "def head():\n    model, loss = build()\n"
        "    return model.requires_grad_(False), loss\n"
    )
    settings = dict(fit.Job._field_defaults) | {"shape": None, "tokens": None}
    refused = {
        f"{own}:bild": "KeyError: 'bild'",
        f"{own}:build_less": "TypeError: cannot unpack",
        f"{own}:lossless": "the second function returns no loss",
        f"{own}:cut_off": "the second function returns no loss",
        f"{own}:item": "its code depends on values, as .item() or nonzero(): aten._l",
        f"{own}:nonzero": "its code depends on values, as .item() or nonzero(): aten.n",
        f"{own}:outside": "Please convert all Tensors to FakeTensors",
        f"{own.with_name('none.py')}:build": "FileNotFoundError",
        f"{own.with_name('frozen.py')}:head": "none of the model's parameters",
    }
    assert len(refused) == 9
    for place, what in refused.items():
        words = {"module": place, "model": None, "ranks": 2, "memory": 80}
        with pytest.raises(SystemExit) as error:
            fit.main(SimpleNamespace(**words, **settings))
        torch.set_default_dtype(torch.float32)
        said = f"{error.value}{capsys.readouterr().err}"
        hint = "half_frozen, inputs made in the loss" in said
        assert what in said and place in said and hint == ("its code" not in what)


def test_stage_0_is_brought_down_by_no_number_of_ranks() -> None:
    fit, worlds = module("will_it_fit"), [2**power for power in range(11)]
    checked = 0
    for shape in fit.SHAPES:
        job = fit.job_of_shape(shape)
        for stage in range(4):
            needs = [fit.rank_bytes(job, stage, n)["need"] / 1e9 for n in worlds]
            row = [round(need, 1) for need in needs]
            assert row == sorted(row, reverse=True)
            assert (row[0] == row[-1]) == (stage == 0)
            assert shape != "70B" or (row[-1] > 80) == (stage < 3)
            checked += 1
    assert checked == 12


# --- Never the whole model; fewer activations. ----------


@pytest.mark.slow
def test_zero_init_never_holds_the_whole_model(pool: WorkerPool) -> None:
    by_rank = pool.run(build_with_and_without, world_size=RANKS)
    assert len(by_rank) == RANKS
    script = module("zero_init")
    whole = 2 * script.LAYERS * (script.WIDTH + 1) * script.WIDTH
    for said, (divided, plain) in by_rank:
        # The kernel knows nothing of tensors.
        assert plain > 0.95 * whole
        assert divided < whole / RANKS + 5 * whole / script.LAYERS + 5e6
        if said:
            rows = dict(re.findall(r"^(with zero.Init|without) +([\d.]+) ", said, re.M))
            peaks = [float(rows[name]) * 1e6 for name in ("with zero.Init", "without")]
            assert peaks[1] >= 0.99 * whole > 2 * peaks[0]
    words = by_rank[0][0].splitlines()[-1]
    assert re.fullmatch(r"check: no rank had more than \d+% of .* same 3 losses", words)


def test_activation_checkpointing_keeps_less_and_changes_no_gradient(
    pool: WorkerPool,
) -> None:
    (said,) = pool.run(checkpoint_activations, world_size=1)
    rows = re.findall(r"^(?:all kept|checkpointed) +(\S+) +(\S+) +\d+$", said, re.M)
    (kept, peak), (kept_less, peak_less) = [map(float, row) for row in rows]
    assert kept_less < kept / 3 and peak_less < peak
    assert re.search(r"^check: .* times fewer, and the same gradients$", said, re.M)


# --- What counts. ----------


def test_views_are_counted_once_and_gradients_are_found() -> None:
    live = module("live_tensors")
    before = live.live_storages([])
    whole = torch.zeros(1000, requires_grad=True)
    parts = [whole.detach()[:500], whole.detach().view(10, 100)]
    whole.sum().backward()
    gradient = whole.grad
    assert gradient is not None
    after = live.live_storages([gradient])
    new = {place: one.nbytes() for place, one in after.items() if place not in before}
    assert new[whole.untyped_storage().data_ptr()] == 4000
    assert new[gradient.untyped_storage().data_ptr()] == 4000
    assert sum(new.values()) == 8000
    assert len(parts) == 2
    with module("peak_counter").PeakCounter() as counter:
        counter.start()
        one = [torch.ones(5), torch.ones(5, device="meta")]
    # On the meta device there is no memory.
    assert (counter.now, len(one)) == (20, 2)


def test_memory_that_another_tensor_had_before_is_counted() -> None:
    live = module("live_tensors")
    left_over = torch.ones(2000)
    before = live.live_storages([])
    del left_over
    # The allocator would give the address that was just freed to one of these.
    model = torch.nn.ParameterList(torch.ones(2000) for _ in range(50))
    optimizer = SimpleNamespace(param_groups=[], state={})
    engine = SimpleNamespace(module=model, optimizer=optimizer)
    counted = live.bytes_by_kind(engine, before)
    assert counted.pop("parameters") == 50 * 8000
    assert set(counted.values()) == {0}


def test_history_is_cut_into_phases() -> None:
    by_phase = module("counted_step").by_phase
    # Ten bytes are there; five come in forward, in its last operation, and go again.
    history = [(0, 10), (119, 15), (130, 12), (200, 10), (299, 30), (300, 10)]
    found = by_phase(history, [0, 120, 240, 361])
    assert list(found) == ["forward", "backward", "step"]
    assert found["forward"] == [10] * 59 + [15]
    assert found["backward"] == [15] * 6 + [12] * 35 + [10] * 19
    assert max(found["step"]) == 30 and found["step"][-1] == 10
    assert found["step"].count(30) == 1


# --- What cannot work. ----------


def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    fit, count = module("will_it_fit"), module("memory_per_rank")
    settings = dict(fit.Job._field_defaults)
    words = {"model": str(tmp_path), "shape": None, "module": None}
    t5 = tmp_path / "t5"
    t5.mkdir()
    (t5 / "config.json").write_text('{"model_type": "t5"}')
    refused: dict[str, Callable[[], object]] = {
        f"--model {tmp_path}: no causal model there: ": lambda: fit.main(
            SimpleNamespace(**words, **settings)
        ),
        f"--model {t5}: no causal model there: ": lambda: fit.main(
            SimpleNamespace(**words | {"model": str(t5)}, **settings)
        ),
        "--json no/x.json: there is no folder no": lambda: count.main(
            SimpleNamespace(json=Path("no/x.json"))
        ),
        "--width must be a multiple of 128, not 200": lambda: count.refuse_too_large(
            200, 2, torch.device("cpu")
        ),
    }
    for line, call in refused.items():
        with pytest.raises(SystemExit) as ended:
            call()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.count("\n") == 1
        assert error.partition(": ")[2].startswith(line)
    assert len(refused) == 4


@pytest.mark.slow
def test_a_model_too_large_to_be_counted_is_named_before_it_is_made() -> None:
    sized = module("sized_qwen")
    count = sized.parameters_of(256, 2)
    assert count == sum(p.numel() for p in sized.new_model(256, 2).parameters())
    sized.fit_into(32 * count, 256, 2)
    complaint = f"has {count:,} parameters: .* try --width=128,"
    with pytest.raises(ValueError, match=complaint):
        sized.fit_into(32 * count - 1, 256, 2)
    # Nobody has so much memory; nothing of it may be taken to find that out.
    script = ROOT / ROOM / "memory_per_rank.py"
    result = torchrun(script, "--width=65536", "--layers=99", nproc=1)
    assert result.returncode != 0
    said = [
        line for line in result.stderr.splitlines() if "memory_per_rank.py: " in line
    ]
    assert "--width=65536 --layers=99 has 5,102,463,942,656 parameters" in said[0]
    assert "device:" not in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"shape": "7B", "module": "x.py:f"}, "give one of --module, --shape"),
        ({"shape": "7B", "model": "x"}, "give one of --model, --shape"),
        ({"tokens": 9, "module": "x.py:f"}, "--tokens is of --shape and --model"),
    ],
)
def test_options_that_would_count_for_nothing_are_refused(
    words: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = module("will_it_fit")
    settings = dict(fit.Job._field_defaults) | {"tokens": None, "ranks": 2}
    nothing = {"shape": None, "model": None, "module": None, "memory": 80}
    with pytest.raises(SystemExit):
        fit.main(SimpleNamespace(**settings | nothing | words))
    assert said in capsys.readouterr().err
