"""One training step of an engine, counted: what it keeps, its peak, and the formula's.

Units are bytes on this rank. A result can be written as JSON.
"""

import gc
import os
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist

from added import Run, bucket_bytes, bytes_added
from live_tensors import (
    LIVE_KINDS,
    bytes_by_kind,
    live_storages,
    own_storages,
    process_bytes,
    return_freed_memory,
)
from paper import KINDS, paper_bytes
from peak import peak_bytes
from peak_counter import PeakCounter
from ranks import fail
from sized_qwen import (
    buckets_for,
    fit_into,
    make_engine,
    new_model,
    one_sample,
    step_once,
)

PHASES = ("forward", "backward", "step")
BINS = 60  # in which the history of a phase is kept: the largest count in each
# How far a kept amount may be from the formula, and a peak from what was worked out.
KEPT_LIMIT, PEAK_LIMIT = 0.01, 0.02
# How far the size of the process may be from what was counted: parts, and bytes.
PROCESS_LIMIT, SLACK = 0.05, 5_000_000


def refuse_too_large(width: int, layers: int, device: torch.device) -> None:
    """End in one line if a rank has no room for such a model; nothing is allocated."""
    if width % 128:
        fail(f"--width must be a multiple of 128, not {width}")
    if device.type == "cpu":
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        room = psutil.virtual_memory().available // local_world_size
    else:
        room = torch.accelerator.get_memory_info(device)[0]
    try:
        fit_into(room, width, layers)
    except ValueError as error:
        fail(str(error))


def warm_up(precision: str, width: int, device: torch.device) -> bool:
    """Train one step of a small model; every rank must call this.

    What a library sets up at its first step ever is no part of a model.

    Returns:
        Whether the size of the process tells what it has allocated.
    """
    exact = device.type != "cpu" or return_freed_memory()
    engine = make_engine(new_model(width, 1), 0, precision, {})
    with PeakCounter() as counter:
        counter.start()
        step_once(engine, one_sample(dist.get_rank(), device))
    engine.destroy()
    del engine
    gc.collect()
    # The many objects that imports have made hold no tensor. They are looked through no
    # more, which is most of the time that counting takes.
    gc.freeze()
    return exact


def count_step(stage: int, device: torch.device, options: Any) -> dict[str, Any]:
    """Train two steps and count in the second; every rank must call this.

    What is kept is counted as the last gradient is computed: weights, optimizer state
    and gradients are all there. The peak is that of the rest of the step.

    Args:
        stage: the ZeRO stage.
        device: where to train.
        options: those of memory_per_rank.py.
    """
    gc.collect()
    time.sleep(0.1)  # gloo's threads free what they sent a little later
    before, process_before = live_storages([]), process_bytes(device)
    model = new_model(options.width, options.layers)
    sizes = [p.numel() for p in model.parameters()]
    settings = {} if options.default_buckets else buckets_for(sum(sizes), options.width)
    precision, accumulate = options.precision, options.grad_accum_dtype
    more = {"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {}
    engine = make_engine(model, stage, precision, settings, **more)
    del model
    counter, kept = PeakCounter(), {}

    def count_kept(_: torch.Tensor) -> None:
        time.sleep(0.1)
        kept["process"] = process_bytes(device) - process_before
        kept.update(bytes_by_kind(engine, before))
        counter.peak = counter.now

    inputs = one_sample(dist.get_rank(), device, options.tokens)
    train_step(engine, inputs, [])  # Adam allocates its moments in the first step
    # Backward ends at the embedding, the first thing that forward went through.
    embedding = engine.module.get_input_embeddings().weight
    hook = embedding.register_post_accumulate_grad_hook(count_kept)
    with counter:
        counter.start(own_storages(engine, before).values())
        begins: list[int] = []
        train_step(engine, inputs, begins, counter)
    hook.remove()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = Run(sizes, stage, rank, world_size, precision, accumulate)
    if stage == 3:
        run = run._replace(threshold=engine.zero_param_persistence_threshold())
    run = run._replace(bucket=engine.zero_reduce_bucket_size())
    adam = "single" if device.type == "cpu" else "foreach"  # PyTorch's choice
    in_step = peak_bytes(kept, run, adam)
    engine.destroy()
    return {
        "rank": rank,
        "stage": stage,
        "default_buckets": options.default_buckets,
        "precision": precision,
        "parameters": sum(sizes),
        "kept": kept,
        "paper": paper_bytes(sum(sizes), stage, world_size, precision),
        "added": bytes_added(run),
        "bucket": bucket_bytes(run),
        "peak": counter.peak,
        "worked_out": max(in_step, sum(kept[kind] for kind in LIVE_KINDS)),
        "history": by_phase(counter.history, [*begins, counter.operations + 1]),
    }


def train_step(
    engine: Any, inputs: torch.Tensor, begins: list[int], counter: Any = None
) -> None:
    """Train one step; note in `begins` after how many operations each phase begins."""
    now = (lambda: counter.operations) if counter else int
    begins.append(now())
    loss = engine(input_ids=inputs, labels=inputs).loss
    begins.append(now())
    engine.backward(loss)
    begins.append(now())
    engine.step()


def by_phase(history: list[tuple[int, int]], begins: list[int]) -> dict[str, list[int]]:
    """Return the largest count in each of BINS equal parts of each of PHASES.

    Args:
        history: operations so far and bytes, after every change.
        begins: the operations before each phase, and those before the next step.
    """
    found, now, changes = {}, 0, iter([*history, (begins[-1], 0)])
    when, count = next(changes)
    for phase, begin, end in zip(PHASES, begins[:-1], begins[1:], strict=True):
        found[phase] = []
        for part in range(1, BINS + 1):
            most = now
            while when < begin + (end - begin) * part / BINS:
                now, most = count, max(most, count)
                when, count = next(changes)
            found[phase].append(most)
    return found


def is_as_worked_out(results: list[dict[str, Any]], exact: bool) -> tuple[bool, str]:
    """Compare the counts of all ranks with the formula, and with the process.

    Args:
        results: of `count_step`, of all ranks.
        exact: whether the size of the process tells what it has allocated.
    """
    far = far_peak = other = process = 0.0
    is_right = True
    for one in results:
        kept, whole = one["kept"], sum(one["kept"][kind] for kind in LIVE_KINDS)
        # With a bucket larger than the model, all gradients are still in the bucket.
        for kind in (
            KINDS if not one["default_buckets"] else ("parameters", "optimizer")
        ):
            expected = one["paper"][kind] + one["added"][kind]
            far = max(far, abs(kept[kind] / expected - 1))
        is_right = is_right and kept["buckets"] == one["bucket"]
        off = one["peak"] / one["worked_out"] - 1
        # In stage 1 the other ranks free more before they copy (peak.py).
        is_less = one["stage"] == 1 and one["rank"] > 0
        far_peak = max(far_peak, off if is_less else abs(off))
        other = max(other, (kept["other"] - SLACK / 10) / whole)
        process = max(process, (abs(kept["process"] - whole) - SLACK) / whole)
        # On the CPU a large bucket that nobody has touched is not taken.
        exact = exact and not one["default_buckets"]
    is_right = is_right and max(far, other) <= KEPT_LIMIT and far_peak <= PEAK_LIMIT
    text = (
        f"{len(results)} counts {far:.1%} from paper + adds (limit {KEPT_LIMIT:.0%}), "
        f"peaks {far_peak:.1%} ({PEAK_LIMIT:.0%})"
    )
    if exact:
        is_right = is_right and process <= PROCESS_LIMIT
        text += f", process within {PROCESS_LIMIT:.0%}"
    return is_right, text
