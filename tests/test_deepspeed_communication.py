"""Chapter 05: what a rank sends in each stage, and that the losses are those of DDP."""

import contextlib
import functools
import io
import itertools
import logging
import math
import re
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from pages import words_of
from scripts import load_chapter
from worker_pool import RankError, WorkerPool
from zero_ranks import Pools, forget_earlier_group, run_zero_lesson

CHAPTER = "05_deepspeed_zero"
ROOM = f"{CHAPTER}/communication"
SMALL_MODEL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_MODEL |= {"intermediate_size": 768}
CPU = torch.device("cpu")


# --- What is sent. ----------


def count_small(mistake: str = "") -> str:
    """Be a rank of communication_volume.py with a smaller model, or with a mistake."""
    module = load_chapter(ROOM)["communication_volume"]
    count_step, model = module.count_step, module.MODEL | SMALL_MODEL

    def miscount(stage: int, *more: Any) -> dict[str, Any]:
        found = count_step(stage, *more)
        if dist.get_rank() == 1 and stage == 3:
            calls, total = found["logged"]["all_gather"]
            found["logged"]["all_gather"] = calls - (mistake == "a call"), total
            found["sent"] *= {"TCP": 1.2, "no gloo": math.nan}.get(mistake, 1)
        return found

    variants = [(3, {})] if mistake else module.VARIANTS
    with (
        mock.patch.object(module, "MODEL", model),
        mock.patch.object(module, "VARIANTS", variants),
        mock.patch.object(module, "count_step", miscount),
    ):
        return run_zero_lesson(ROOM, "communication_volume")


# Times the parameters: with one micro-batch, then with two.
NEEDED = [2, 2, 3, 3, 2, 2, 3, 2 * 2 + 1, 2, 2 * 1 + 1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_deepspeed_sends_3_where_the_paper_sends_2(
    ranks: int, zero_pools: Pools
) -> None:
    said = zero_pools(ranks).run(count_small, world_size=ranks)
    assert len(said) == ranks and set(said[1:]) == {""}
    rows = re.findall(r"^(?:stage|  with).* ([\d.]+) +([\d.]+)$", said[0], re.M)
    needed = [float(one) for one, _ in rows]
    assert needed[:10] == NEEDED
    # Small tensors are gathered once a step, and not twice for each micro-batch.
    assert needed[10:] == pytest.approx([2.72, 5.17], abs=0.01)
    # A reduce costs 1 + 1 / n on gloo, a reduce-scatter 2.
    more = [0, 0, 0, 0, 1, 1, 0, 0, 1, 2]
    by_gloo = [n + k / ranks for n, k in zip(NEEDED, more, strict=True)]
    sent = [float(one) for _, one in rows]
    assert sent == pytest.approx([*by_gloo, needed[10] + 1, needed[11] + 2], rel=0.05)
    assert re.findall(r"^stage (\d).* (\d) +[\d.]+ +[\d.]+$", said[0], re.M) == [
        *[("0", "2"), ("1", "2"), ("1", "2"), ("2", "2"), ("2", "2"), ("3", "3")]
    ]
    agree = "3 counts agree in 12 steps, TCP's less gloo's extra"
    assert said[0].endswith(f"check: on {ranks} ranks {agree}\n")


def test_stage_3_sends_its_formula_and_what_gloo_adds(zero_pools: Pools) -> None:
    said, _ = zero_pools(2).run(count_small, "none", world_size=2)
    rows = re.findall(r"^(?:stage|  with).* ([\d.]+) +([\d.]+)$", said, re.M)
    needed = [float(one) for one, _ in rows]
    # As above; on gloo each micro-batch's reduce-scatter is an all-reduce.
    assert needed == pytest.approx([2.72, 5.17], abs=0.01)
    sent = [float(one) for _, one in rows]
    assert sent == pytest.approx([needed[0] + 1, needed[1] + 2], rel=0.05)
    assert "check: on 2 ranks 3 counts agree in 12 steps" in said
    # With another backend nobody knows what TCP has sent; the other counts are right.
    said, _ = zero_pools(2).run(count_small, "no gloo", world_size=2)
    assert " nan\n" in said
    assert "check: on 2 ranks 3 counts agree in 12 steps" in said


def test_an_all_reduce_alone_has_to_be_sent_twice() -> None:
    # Thakur, Rabenseifner and Gropp, 2005: an all-reduce is a reduce-scatter and an
    # all-gather, (n - 1) / n of the message each. No other collective is two.
    traffic = load_chapter(ROOM)["traffic"]
    calls = {call for call, _ in traffic.COLLECTIVES.values()}
    once = dict.fromkeys(["all_gather", "reduce_scatter", "reduce", "broadcast"], 1)
    assert {call: traffic.times_sent(call) for call in calls} == {
        "all_reduce": 2,
        **once,
    }


def test_volume_is_the_papers_and_what_deepspeed_adds_to_it() -> None:
    module = load_chapter(ROOM)["communication_volume"]
    # Rajbhandari et al., 2020, section 7: an all-reduce is 1 + 1. Stages 1 and 2 reduce
    # to the owner and gather new weights, 1 + 1; stage 3 gathers twice, and reduces.
    assert module.PAPER == (1 + 1, 1 + 1, 1 + 1, 1 + 1 + 1)
    with torch.device("meta"):
        config = module.Qwen2Config(**module.MODEL, tie_word_embeddings=True)
        model = module.Qwen2ForCausalLM(config)
    sizes = [p.numel() for p in model.parameters()]
    matrices = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1536
    embedding, small = 256 * 512, 2 * (512 + 2 * 256 + 2 * 512) + 512  # biases, norms
    total = 2 * matrices + embedding + small
    assert (sizes[0], sum(sizes)) == (embedding, total) == (131_072, 6_427_136)
    pairs = itertools.product(module.VARIANTS[:-1], (1, 2))
    found = [module.volume(stage, bool(own), m, sizes) for (stage, own), m in pairs]
    assert found == NEEDED and len(found) == 10
    # Each micro-batch gathers all matrices twice, the embedding for both of its uses,
    # and reduces all gradients; norms and biases are gathered once a step.
    assert module.VARIANTS[-1] == (3, {})
    for m in (1, 2):
        sent = m * (2 * (2 * matrices + 2 * embedding) + total) + small
        assert module.volume(3, False, m, sizes) == pytest.approx(sent / total)


def test_what_deepspeeds_logger_counts_is_the_whole_message() -> None:
    from deepspeed.comm.comm import comms_logger

    traffic = load_chapter(ROOM)["traffic"]
    # By name and bytes: how many calls, and latencies. Of an all-gather DeepSpeed notes
    # what one of three ranks gives.
    raw = {
        "all_reduce": {400: [2, []], 40: [1, []]},
        "all_gather_into_tensor": {100: [3, []]},
        "reduce_scatter_tensor": {300: [5, []]},
    }
    with (
        mock.patch.object(comms_logger, "get_raw_data", return_value=raw),
        mock.patch.object(comms_logger, "reset_data"),
        mock.patch.object(dist, "get_world_size", return_value=3),
    ):
        found = traffic.logged_calls()
    assert found == {
        "all_reduce": (3, 840),
        "all_gather": (3, 3 * 3 * 100),
        "reduce_scatter": (5, 1500),
    }
    # An all-reduce counts as 2, the others as 1; gloo sends a reduce-scatter twice.
    needs = 2 * 840 + 900 + 1500
    assert traffic.bytes_due(found, 3, by_gloo=True) == needs + 1500
    assert traffic.bytes_due(found, 3) == needs


def order_in_backward(stage: int) -> list[str]:
    """List this rank's gradients and reductions in the order of one backward pass."""
    forget_earlier_group()
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 400 * 400},
    }
    load_chapter(CHAPTER)["deepspeed_setup"].prepare(config)
    layers = [torch.nn.Linear(400, 400, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    engine = deepspeed.initialize(model=model, config=config)[0]
    said: list[str] = []
    for p in model.parameters():
        p.register_hook(lambda _: said.append("gradient"))
    plain = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.numel() >= 400 * 400:
            said.append("all-reduce")
        return plain(tensor, *args, **options)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        engine.backward(engine(torch.randn(1, 400)).square().mean())
    engine.step()
    engine.destroy()
    return said


def test_stage_0_reduces_after_backward_and_stage_2_during_it(
    zero_pools: Pools,
) -> None:
    # DDP reduces during it, as chapter 02's timeline tests.
    by_rank = zero_pools(2).run(order_in_backward, 0, world_size=2)
    assert len(by_rank) == 2
    for said in by_rank:
        assert said == ["gradient"] * 4 + ["all-reduce"]
    by_rank = zero_pools(2).run(order_in_backward, 2, world_size=2)
    assert len(by_rank) == 2
    for said in by_rank:
        assert said[-1] == "all-reduce" and said.count("gradient") == 4
        assert said.index("all-reduce") < len(said) - 1 - said[::-1].index("gradient")


REUSE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def gathered_in_stage_3() -> dict[tuple[bool, int], float]:
    """Count what stage 3 gathers, in multiples of the weights, by default and without.

    The key tells whether weights may stay until backward, and the micro-batches.
    """
    forget_earlier_group()
    import deepspeed

    found, counter_of = {}, load_chapter(ROOM)["traffic"].CollectiveCounter
    for may_stay, parts in itertools.product((True, False), (1, 2)):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": parts,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3} | ({} if may_stay else REUSE),
        }
        load_chapter(CHAPTER)["deepspeed_setup"].prepare(config)
        layers = [torch.nn.Linear(400, 400, bias=False) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        engine = deepspeed.initialize(model=model, config=config)[0]
        gathered: list[int] = []
        for _ in range(3):  # the last: it learns in which order it needs the weights
            with counter_of() as counter:
                for _ in range(parts):
                    engine.backward(engine(torch.randn(1, 400)).square().mean())
                    engine.step()
            gathered = counter.calls["all_gather"]
        engine.destroy()
        found[may_stay, parts] = sum(gathered) / (4 * 4 * 400 * 400)
    return found


def test_stage_3_gathers_once_if_the_weights_may_stay_until_backward(
    zero_pools: Pools,
) -> None:
    by_rank = zero_pools(2).run(gathered_in_stage_3, world_size=2)
    assert len(by_rank) == 2
    once, twice = {(True, 1): 1, (True, 2): 2}, {(False, 1): 2, (False, 2): 4}
    assert by_rank == [once | twice] * 2


def collectives_of_a_step() -> dict[tuple[int, bool], dict[str, int]]:
    """Return by stage, and whether it reduces to the owner, what a step sends.

    The unit is all weights; what sends less, as the norm's all-reduce, is left out.
    """
    forget_earlier_group()
    import deepspeed

    found, counter_of = {}, load_chapter(ROOM)["traffic"].CollectiveCounter
    for stage, to_owner in itertools.product((0, 1, 2, 3), (False, True)):
        zero = {"stage": stage, "use_multi_rank_bucket_allreduce": not to_owner}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": zero | {"stage3_param_persistence_threshold": 0},
        }
        load_chapter(CHAPTER)["deepspeed_setup"].prepare(config)
        layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(2)]
        model = torch.nn.Sequential(*layers)
        engine = deepspeed.initialize(model=model, config=config)[0]
        with counter_of() as counter:
            engine.backward(engine(torch.randn(1, 64)).square().mean())
            engine.step()
        engine.destroy()
        sent = {name: sum(calls) for name, calls in counter.calls.items()}
        whole = 2 * 4 * 64 * 64
        found[stage, to_owner] = {k: n // whole for k, n in sent.items() if n >= whole}
    return found


def test_stages_1_and_2_reduce_to_the_owner_if_told_and_never_scatter(
    zero_pools: Pools,
) -> None:
    by_rank = zero_pools(2).run(collectives_of_a_step, world_size=2)
    due: dict[tuple[int, bool], dict[str, int]] = {}
    for told in (False, True):
        due[0, told] = {"all_reduce": 1}
        due[3, told] = {"all_gather": 2, "reduce_scatter": 1}
        for stage in (1, 2):
            due[stage, told] = {"reduce" if told else "all_reduce": 1, "all_gather": 1}
    assert by_rank == [due] * 2 and len(due) == 8
    page = words_of(CHAPTER)
    assert "](communication/README.md) DeepSpeed calls `reduce`: 1 + 1" in page


@pytest.mark.parametrize(
    "mistake", ["a call", pytest.param("TCP", marks=pytest.mark.slow)]
)
def test_counts_that_differ_on_one_rank_are_found(
    mistake: str, zero_pools: Pools
) -> None:
    with pytest.raises(RankError) as error:
        zero_pools(2).run(count_small, mistake, world_size=2)
    assert "SystemExit: 1" in error.value.traceback


def call_and_log(calls: int) -> tuple[int, int, list[float], float]:
    """All-reduce some times; return bytes, calls and latencies as logged; and the time.

    Times are in ms.
    """
    forget_earlier_group()
    import deepspeed
    from deepspeed.comm.comm import comms_logger

    setup = load_chapter(ROOM)["deepspeed_setup"]
    setup.prepare({"optimizer": {"params": {}}})
    deepspeed.init_distributed("gloo")
    deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False)
    message = torch.ones(1_000_003)
    deepspeed.comm.all_reduce(message)
    comms_logger.reset_data()
    started = time.perf_counter()
    for _ in range(calls):
        deepspeed.comm.all_reduce(message)
    seconds = time.perf_counter() - started
    (by_bytes,) = comms_logger.get_raw_data().values()
    ((sent_bytes, (counted, latencies, *_)),) = by_bytes.items()
    deepspeed.comm.configure(enabled=False)
    return sent_bytes, counted, latencies, 1000 * seconds


def test_latencies_of_comms_logger_are_running_totals(zero_pools: Pools) -> None:
    by_rank = zero_pools(2).run(call_and_log, 20, world_size=2)
    assert len(by_rank) == 2
    for sent_bytes, counted, latencies, took in by_rank:
        assert (sent_bytes, counted, len(latencies)) == (4 * 1_000_003, 20, 20)
        # Each has all calls before it in it: the timer is never reset.
        assert latencies == sorted(latencies)
        assert latencies[-1] - latencies[0] < took < sum(latencies) / 3


def bytes_as_logged() -> dict[str, list[int]]:
    """Log calls on a tensor that has 4,000 bytes for each rank; return their bytes.

    Two calls that the logger does not know end the process.
    """
    forget_earlier_group()
    import deepspeed
    from deepspeed import comm
    from deepspeed.comm.comm import comms_logger

    setup = load_chapter(ROOM)["deepspeed_setup"]
    setup.prepare({"optimizer": {"params": {}}})
    deepspeed.init_distributed("gloo")
    part, ranks = torch.ones(1000), torch.distributed.get_world_size()
    whole = torch.ones(1000 * ranks)
    comm.configure(enabled=True, prof_all=True, verbose=False)
    comms_logger.reset_data()
    comm.all_gather_into_tensor(whole, part)
    comm.all_gather([torch.ones(1000) for _ in range(ranks)], part)
    comm.reduce_scatter_tensor(part, whole)
    comm.all_reduce(whole)
    comm.broadcast(whole, 0)
    comm.broadcast_object_list([part], 0)
    exits = {
        "all_gather_object": functools.partial(comm.all_gather_object, [None] * ranks),
        "monitored_barrier": lambda _: comm.monitored_barrier(),
    }
    for name, call in exits.items():
        # It calls exit, which would close this worker's standard input.
        with mock.patch.object(sys, "stdin", None), pytest.raises(SystemExit) as ended:
            call(part)
        assert ended.value.code == 0, name
    assert len(exits) == 2
    found = {name: list(sizes) for name, sizes in comms_logger.get_raw_data().items()}
    comms_logger.reset_data()
    comm.configure(enabled=False)
    return found


def test_of_an_all_gather_comms_logger_takes_one_ranks_part(zero_pools: Pools) -> None:
    parts = ("all_gather_into_tensor", "all_gather")
    wholes = ("reduce_scatter_tensor", "all_reduce", "broadcast")
    due = {name: [4000] for name in parts} | {name: [8000] for name in wholes}
    due["broadcast_object_list"] = [0]
    assert zero_pools(2).run(bytes_as_logged, world_size=2) == [due] * 2


def logged_with_every_switch() -> tuple[list[str], str, str]:
    """Log two calls with `verbose` and `debug`; return names, lines and the summary."""
    forget_earlier_group()
    import deepspeed
    from deepspeed.comm.comm import comms_logger
    from deepspeed.utils import logger

    setup = load_chapter(ROOM)["deepspeed_setup"]
    setup.prepare({"optimizer": {"params": {}}})
    deepspeed.init_distributed("gloo")
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    comms_logger.reset_data()
    try:
        deepspeed.comm.configure(enabled=True, prof_all=True, verbose=True, debug=True)

        def here() -> None:
            deepspeed.comm.all_reduce(torch.ones(256))

        def there() -> None:
            deepspeed.comm.all_reduce(torch.ones(256))

        here()
        there()
        names, each = list(comms_logger.get_raw_data()), lines.getvalue()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            deepspeed.comm.log_summary()
        summary = printed.getvalue() + lines.getvalue().removeprefix(each)
    finally:
        deepspeed.comm.configure(enabled=False, verbose=False, debug=False)
        comms_logger.reset_data()
        logger.removeHandler(handler)
        logger.setLevel(level)
    return names, each, summary


def test_verbose_is_a_line_for_each_call_and_debug_names_the_caller(
    zero_pools: Pools,
) -> None:
    zero, one = zero_pools(2).run(logged_with_every_switch, world_size=2)
    names = [f"all_reduce | [Caller Func: {caller}]" for caller in ("here", "there")]
    assert zero[0] == one[0] == names
    calls = [line for line in zero[1].splitlines() if "comm op: all_reduce" in line]
    assert len(calls) == 2
    assert all("msg size: 1.0 KB" in line for line in calls)
    # Rank 0 alone prints.
    assert one[1] == ""
    assert "Comm. Op" in zero[2] and "all_reduce" in zero[2]


def may_skip_sync() -> dict[int, str]:
    """Return by stage what an engine answers to `no_sync`."""
    forget_earlier_group()
    import deepspeed

    modules, answers = load_chapter(CHAPTER), {}
    for stage in range(4):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
        }
        modules["deepspeed_setup"].prepare(config)
        engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
        try:
            with engine.no_sync():
                answers[stage] = ""
        except AssertionError as error:
            answers[stage] = str(error)
        engine.destroy()
    return answers


def test_gradients_that_are_sharded_cannot_wait_for_the_last_micro_batch(
    zero_pools: Pools,
) -> None:
    by_rank = zero_pools(2).run(may_skip_sync, world_size=2)
    assert len(by_rank) == 2
    for answers in by_rank:
        assert [stage for stage, answer in answers.items() if not answer] == [0, 1]
        for stage in (2, 3):
            assert "no_sync context manager is incompatible" in answers[stage]


def coalesced_step(
    stage: int, is_coalesced: bool, bf16: bool = False
) -> tuple[dict[str, int], float]:
    """Take a step of three micro-batches; return the bytes sent, and the norm."""
    forget_earlier_group()
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    load_chapter(CHAPTER)["deepspeed_setup"].prepare(config)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    inputs = (torch.randn(3, 1, 64) * (dist.get_rank() + 1)).to(model.weight.dtype)
    with load_chapter(ROOM)["traffic"].CollectiveCounter() as counter:
        if is_coalesced:
            with engine.coalesce_grad_reduction():
                for micro_batch in inputs:
                    engine.backward(engine(micro_batch).square().sum())
                with pytest.raises(AssertionError, match="step"):
                    engine.step()
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        else:
            for micro_batch in inputs:
                engine.backward(engine(micro_batch).square().sum())
                engine.step()
    norm, steps = float(engine.get_global_grad_norm()), [engine.global_steps]
    for boundary in (True, None) if is_coalesced else ():  # it stays until told
        engine.set_gradient_accumulation_boundary(boundary)
        for micro_batch in inputs:
            engine.backward(engine(micro_batch).square().sum())
            engine.step()
            steps.append(engine.global_steps)
    engine.destroy()
    # It steps after each micro-batch. Then, as the coalesced step has counted for one
    # of its three, after the second of three.
    assert steps == ([1, 2, 3, 4, 4, 5, 5] if is_coalesced else [1])
    return {name: sum(calls) for name, calls in counter.calls.items()}, norm


@pytest.mark.parametrize("stage", [2, 3])
def test_coalesced_gradients_are_sent_once_a_step(
    zero_pools: Pools, stage: int
) -> None:
    run, nbytes = zero_pools(2).run, 4 * 64 * 64
    call = {2: "all_reduce", 3: "reduce_scatter"}[stage]
    (one_by_one, norm), _ = run(coalesced_step, stage, False, world_size=2)
    (coalesced, same), _ = run(coalesced_step, stage, True, world_size=2)
    few = 100  # bytes: the norm, too, is all-reduced
    assert 3 * nbytes <= one_by_one[call] < 3 * nbytes + few
    assert nbytes <= coalesced[call] < nbytes + few
    assert norm > 1 and same == pytest.approx(norm, rel=1e-5)
    # In bf16 the mean of sums is rounded otherwise than the sum of means.
    norms = [run(coalesced_step, stage, way, True)[0][1] for way in (False, True)]
    assert norms == pytest.approx([norm] * 2, rel=0.02)
    assert norms[0] != pytest.approx(norms[1], rel=1e-5)


def weights_and_buffers_after_initialize() -> list[tuple[float, float, float]]:
    """Return by stage, then under DDP, a weight, a buffer, and that after two passes.

    The first two begin as this rank's number.
    """
    forget_earlier_group()
    import deepspeed

    inputs, found = torch.full((2, 4), 4.0 * dist.get_rank()), []
    for stage in (*range(4), None):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": stage},
        }
        model = torch.nn.BatchNorm1d(4)
        torch.nn.init.constant_(model.weight, dist.get_rank())
        torch.nn.init.constant_(model.get_buffer("running_mean"), dist.get_rank())
        wrapped: Any = None
        if stage is None:
            wrapped = DistributedDataParallel(model)
        else:
            load_chapter(CHAPTER)["deepspeed_setup"].prepare(config)
            wrapped = deepspeed.initialize(model=model, config=config)[0]
        with deepspeed.zero.GatheredParameters(model.weight, enabled=stage == 3):
            weight = model.weight[0].item()
        mean = model.get_buffer("running_mean")[0].item()
        for _ in range(2):
            wrapped(inputs)
        found.append((weight, mean, model.get_buffer("running_mean")[0].item()))
        if stage is not None:
            wrapped.destroy()
    return found


def test_initialize_copies_rank_zero_s_weights_and_no_buffers(
    zero_pools: Pools,
) -> None:
    by_rank = zero_pools(2).run(weights_and_buffers_after_initialize, world_size=2)
    starts = [[found[:2] for found in one[:-1]] for one in by_rank]
    assert starts == [[(0.0, 0.0)] * 4, [(0.0, 1.0)] * 4]
    # After two passes: a tenth of a batch's mean, 4 on rank 1, is added to nine tenths
    # of what was there: of its own 1, or under DDP of rank 0's, which stays 0.
    apart = [pytest.approx(0.9 * (0.9 * 1 + 0.4) + 0.4)] * 4
    passed = [[found[2] for found in one] for one in by_rank]
    assert passed == [[0.0] * 5, [*apart, pytest.approx(0.4)]]


def ends_with_a_frozen_group() -> list[str]:
    """Give each stage a parameter group that is frozen; return the errors."""
    forget_earlier_group()
    import deepspeed

    said = []
    for stage in range(4):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
        }
        load_chapter(CHAPTER)["deepspeed_setup"].prepare(config)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[0].requires_grad_(False)
        groups = [{"params": list(layer.parameters())} for layer in model]
        try:
            engine: Any = deepspeed.initialize(
                model=model, optimizer=torch.optim.AdamW(groups), config=config
            )[0]
        except IndexError as error:
            said.append(str(error))
        else:
            said.append("")
            engine.destroy()
    return said


def test_stages_1_and_2_take_no_group_that_is_all_frozen(zero_pools: Pools) -> None:
    wrong = "list index out of range"
    by_rank = zero_pools(2).run(ends_with_a_frozen_group, world_size=2)
    assert by_rank == [["", wrong, wrong, ""]] * 2
    assert "with your parameter groups (none all frozen)" in words_of(CHAPTER)


def start_on_two_hosts_without_pdsh() -> str:
    """Return what the deepspeed command says of a hostfile of two, without `pdsh`."""
    forget_earlier_group()
    from deepspeed.launcher import multinode_runner, runner

    with tempfile.NamedTemporaryFile("w") as hosts:
        hosts.write("node0 slots=2\nnode1 slots=2\n")
        hosts.flush()
        words = [f"--hostfile={hosts.name}", "--no_ssh_check", "--master_addr=node0"]
        with mock.patch.object(multinode_runner.shutil, "which", return_value=None):
            try:
                runner.main([*words, "script.py"])
            except RuntimeError as error:
                return str(error)
    return ""


def test_deepspeed_reaches_other_machines_by_pdsh(zero_pools: Pools) -> None:
    said = zero_pools(2).run(start_on_two_hosts_without_pdsh, world_size=2)
    assert said == ["launcher 'pdsh' not installed."] * 2


def count_collectives() -> dict[str, tuple[list[int], int]]:
    """Return the messages and TCP bytes of some collectives of 3,000,000 bytes."""
    traffic, world_size = load_chapter(ROOM)["traffic"], dist.get_world_size()
    message = torch.ones(750_000)
    with traffic.CollectiveCounter() as counter:  # it does not see functional ones
        functional.all_reduce(message, "sum", list(range(world_size))).sum()
    assert counter.calls == {}
    shard = torch.ones(750_000 // world_size)
    with traffic.CollectiveCounter() as counter, dist._coalescing_manager():
        dist.reduce_scatter_single(shard.clone(), message)
    # What a rank ends with, and not the whole message.
    assert counter.calls == {"reduce_scatter_tensor_coalesced_": [shard.nbytes]}
    calls = {
        "all_reduce": lambda: dist.all_reduce(message),
        "all_gather": lambda: dist.all_gather_single(message, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, message),
        "reduce": lambda: dist.reduce(message, dst=0),
        "broadcast": lambda: dist.broadcast(message, src=0),
    }
    found = {}
    for name, call in calls.items():
        before = traffic.tcp_bytes_sent()
        with traffic.CollectiveCounter() as counter:
            call()
        sent = torch.tensor(float(traffic.tcp_bytes_sent() - before))
        dist.all_reduce(sent)
        found[name] = (counter.calls[name], int(sent))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gloo_reduce_scatter_sends_as_much_as_an_all_reduce(
    worker_pool: WorkerPool, world_size: int
) -> None:
    times: dict[str, float] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2}
    times |= {"reduce": 1 + 1 / world_size, "broadcast": 1}
    by_gloo = load_chapter(ROOM)["traffic"].times_sent_by_gloo
    assert {name: by_gloo(name, world_size) for name in times} == times
    results = worker_pool.run(count_collectives, world_size=world_size)
    assert len(results) == world_size
    for found in results:
        assert list(found) == list(times)
        assert len(times) == 5
        for name in times:
            messages, sent = found[name]
            assert messages == [3_000_000]
            once = (world_size - 1) * 3_000_000
            assert sent / once == pytest.approx(times[name], rel=0.02), name


# --- Nothing else changes. ----------


SETTINGS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}
SAMPLES, BLOCK = 8, 64  # of one rank in one step


def losses_of(stage: int | None, steps: int, parts: int) -> list[float]:
    """Train with a stage or with DDP; return the mean loss over all ranks of a step."""
    modules = load_chapter(CHAPTER)
    text, mean_over_ranks = modules["text"], modules["engine_checks"].mean_over_ranks
    tokens = text.read_tokens()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model: Any = modules["qwen"].small_model()
    adam, losses = None, []
    if stage is None:
        model = DistributedDataParallel(model)
        adam = torch.optim.AdamW(model.parameters(), **SETTINGS)
    else:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": SAMPLES // parts,
            "gradient_accumulation_steps": parts,
            "optimizer": {"type": "Adam", "params": dict(SETTINGS)},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        }
        modules["deepspeed_setup"].prepare(config)
        model = deepspeed.initialize(model=model, config=config)[0]
    for step in range(steps):
        batch = text.global_batch(tokens, step, SAMPLES * world_size, BLOCK)
        total = torch.zeros(())
        for number, inputs in enumerate(batch.chunk(world_size)[rank].chunk(parts)):
            if adam is None:
                loss = model(input_ids=inputs, labels=inputs).loss
                model.backward(loss)  # divides by the number of micro-batches itself
                model.step()  # does nothing until it has seen that many
                total += loss.detach() / parts
                continue
            is_last = number == parts - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(input_ids=inputs, labels=inputs).loss / parts
                loss.backward()
            total += loss.detach()
        if adam is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            adam.step()
            adam.zero_grad()
        losses.append(mean_over_ranks(total))
    if stage is not None:
        model.destroy()
    return losses


def all_curves(steps: int) -> dict[tuple[int | None, int], list[float]]:
    """Train in ten ways."""
    forget_earlier_group()
    return {
        (stage, parts): losses_of(stage, steps, parts)
        for parts in (1, 2)
        for stage in (None, 0, 1, 2, 3)
    }


@pytest.mark.slow
def test_ddp_and_all_stages_have_the_same_losses(zero_pools: Pools) -> None:
    by_rank = zero_pools(2).run(all_curves, 6, world_size=2)
    assert len(by_rank) == 2
    for curves in by_rank:
        first = curves[None, 1]
        assert len(curves) == 10 and len(first) == 6
        assert 5.2 < first[0] < 5.6 and first[-1] < first[0] - 1
        for curve in curves.values():
            pairs = zip(curve, first, strict=True)
            assert max(abs(one - other) for one, other in pairs) < 1e-5
