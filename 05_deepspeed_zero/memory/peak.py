"""Peak memory of a rank, worked out: of the optimizer step, and of all of training.

After the last gradient a step allocates before it frees. Gradients are copied into a
flat buffer, to be sent or for Adam, and Adam allocates temporaries. Found by reading
DeepSpeed 0.19.8 and PyTorch 2.13.0; memory_per_rank.py compares it with what it counts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from added import (
    Run,
    bucket_bytes,
    bytes_added,
    bytes_for_each,
    fullest_rank,
    own_tensors,
)
from paper import KINDS, paper_bytes

# Float32 temporaries of Adam, for each value that it steps: PyTorch's as it is on a
# GPU, all tensors at once; PyTorch's as it is on a CPU, one tensor after the other; and
# DeepSpeed's own, which is one compiled function.
ADAMS = {"foreach": 1, "single": 2, "deepspeed": 0}
# Stage 0 copies this many values together to send them, whatever the config says.
STAGE_0_BUCKET = 500_000_000
SUB_GROUP = 1_000_000_000  # sub_group_size: stage 3 steps so many values at a time


def values_sent_together(sizes: list[int]) -> int:
    """Return the values in the longest flat buffer that stage 0 sends gradients in."""
    longest = flat = 0
    for n in sizes:
        flat += n
        longest = max(longest, flat)
        flat = 0 if flat > STAGE_0_BUCKET else flat
    return longest


def peak_bytes(kept: Mapping[str, float], run: Run, adam: str) -> float:
    """Return the most bytes that a rank allocates from its last gradient to the next.

    In stage 1 ranks after the first may have up to a tenth less: they have freed other
    gradients before they copy their own.

    Args:
        kept: bytes of KINDS and of the buckets at the last gradient.
        run: what is trained, and where.
        adam: one of ADAMS.
    """
    weights, gradients, states = (kept[kind] for kind in KINDS)
    each = bytes_for_each(run.precision, run.stage, run.accumulate)
    total, stage = sum(run.sizes), run.stage
    # Adam reads gradients in float32. From bf16 they are copied.
    cast = 0 if run.precision == "fp32" or run.accumulate else 4
    if stage == 0:
        # The last tensor's temporaries are freed when the next one's are there.
        single = adam == "single"
        temporaries = 3 * max(run.sizes) if single else ADAMS[adam] * total
        flat = each.gradient * values_sent_together(run.sizes)
        on_top = [flat, cast * total + 4 * temporaries]
        return weights + gradients + states + max(on_top)
    stepped = states / each.states  # the values of this rank's shard
    if stage == 1 and run.accumulate:
        # Adam steps on the gradients where they are. They are sent as a bf16 copy.
        on_top = [2 * total, 4 * ADAMS[adam] * stepped]
        return weights + gradients + states + max(on_top)
    if stage == 3:
        # The shard's gradients stay. A part at a time is copied for Adam.
        stepped = min(stepped, SUB_GROUP)
        staying = gradients + kept["buckets"]
        on_top = [staying + (each.gradient + cast) * stepped]
    else:
        # Gradients that belong to other ranks are freed, and so are the buckets.
        own = each.gradient * sum(own_tensors(run.sizes, run.rank, run.world_size))
        own = each.gradient * stepped if run.accumulate else own
        staying = 0.0
        on_top = [own + (each.gradient + cast) * stepped]
        if stage == 1:
            # Before that its own are copied, when a bucket's are in the bucket.
            on_top.append(max(gradients, kept["buckets"]) + own)
    on_top.append(staying + 4 * (1 + ADAMS[adam]) * stepped)
    return weights + states + max(on_top)


class Job(NamedTuple):
    """What is to be trained, and how; DeepSpeed's defaults where it has some."""

    sizes: list[int]  # values in each tensor of the model
    config: Any
    precision: str = "bf16"
    grad_accum_dtype: str = ""  # or "fp32"
    offload: str = "none"  # or "optimizer", or "all": optimizer state and weights
    tokens: int = 2048  # of all samples that a rank takes at a time
    bucket: int = 500_000_000  # reduce_bucket_size
    live: int = 1_000_000_000  # stage3_max_live_parameters and _max_reuse_distance
    adam: str = "foreach"  # one of ADAMS
    threshold: int = 100_000  # stage3_param_persistence_threshold
    micro_batches: int = 1  # whose gradients a step adds up
    frozen: tuple[int, ...] = ()  # values in each tensor that is not trained
    activations: int | None = None  # bytes, if they have been counted
    buffers: int = 0  # bytes of what the model keeps and does not train, as a mask


def activation_bytes(job: Job) -> int:
    """Estimate what the forward pass keeps for the backward pass, on one rank.

    Counted from the code of transformers' Qwen2 with PyTorch's fused attention. In each
    layer: two norms keep their input in float32, its normalised form and the result;
    attention keeps query, key, value and twice its output; the MLP keeps four tensors
    of its own width. The loss keeps the logits, and their logarithms in float32. All
    this is without activation checkpointing.
    """
    if job.activations is not None:
        return job.activations
    c, wide = job.config, 2 if job.precision == "bf16" else 4
    width, inner = c.hidden_size, getattr(c, "intermediate_size", 4 * c.hidden_size)
    layer = 2 * width * (4 + 2 * wide) + wide * (5 * width + 4 * inner)
    logits = c.vocab_size * (wide + 4)
    return job.tokens * (c.num_hidden_layers * layer + logits)


def rank_bytes(job: Job, stage: int, world_size: int) -> dict[str, float]:
    """Return what training takes on the rank with the largest tensors: bytes by kind.

    "step" is the peak after the last gradient; with offload it is not worked out.
    "need" is the one number that must fit: the larger of "step" and of all kinds
    together, as if the last gradient came while all activations are there. In stage 1
    "step" may be a few percent too much. "host" is offloaded; "count" is the number of
    values that Adam steps.

    Raises:
        ValueError: this combination does not exist in DeepSpeed.
    """
    first = {"none": 0, "optimizer": 1, "all": 3}[job.offload]
    if stage < first:
        raise ValueError(f"--offload={job.offload} exists from stage {first} on")
    if job.grad_accum_dtype and (stage == 0 or job.precision == "fp32"):
        raise ValueError("--grad-accum-dtype is for bf16, from stage 1 on")
    if job.grad_accum_dtype and job.offload != "none":
        raise ValueError("--grad-accum-dtype with --offload is not worked out")
    accumulate, total = job.grad_accum_dtype, sum(job.sizes)
    rank = fullest_rank(job.sizes, world_size)
    run = Run(job.sizes, stage, rank, world_size, job.precision, accumulate)
    run = run._replace(threshold=job.threshold, bucket=job.bucket)
    each = bytes_for_each(job.precision, stage, accumulate)
    paper, added = (
        paper_bytes(total, stage, world_size, job.precision),
        bytes_added(run),
    )
    found: dict[str, float] = {kind: paper[kind] + added[kind] for kind in KINDS}
    count = round(found["optimizer"] / each.states)
    found["buckets"] = bucket_bytes(run)
    # A frozen tensor is a weight and nothing else. Only stage 3 divides it.
    divided = world_size if stage == 3 else 1
    found["parameters"] += each.weight * sum(-(-n // divided) for n in job.frozen)
    found["parameters"] += job.buffers  # whole on every rank
    small = each.weight * sum(n for n in job.frozen if n <= job.threshold)
    whole = each.weight * (total + sum(job.frozen))
    gathered = min(added["gathered"] + small + job.live * each.weight, whole)
    found["gathered"] = gathered if stage == 3 and world_size > 1 else 0
    found["activations"] = activation_bytes(job)
    step, host = peak_bytes(found, run, job.adam), 0.0
    if stage == 2 and job.micro_batches > 1 and not accumulate:
        # The sum over the earlier ones, until the last one's is added to it.
        own = sum(own_tensors(job.sizes, rank, world_size))
        found["gradients"] += each.gradient * own
    if job.offload != "none":
        # Beside the state the host has two buffers for the shard's gradients, one in
        # float32 and one in the model's precision. From stage 2 on they are collected
        # there, and the accelerator has its buckets only.
        host = found["optimizer"] + (4 + each.gradient) * total / world_size
        if stage < 3:  # a gradient on its way, in a buffer at both ends
            found["buckets"] += each.weight * max(job.sizes)
            host += each.weight * max(job.sizes)
        step = found["optimizer"] = 0
        found["gradients"] *= stage < 2
    if job.offload == "all":
        host += found["parameters"] - job.buffers
        found["parameters"] = job.buffers
    need = max(sum(found.values()), step)
    return {**found, "step": step, "need": need, "host": host, "count": count}


def fewest_ranks(job: Job, stage: int, memory: float) -> int | None:
    """Return the fewest ranks, up to 1024, that need no more than `memory` each.

    All are tried, for on more ranks each may need more: in stage 3 from one to two,
    if most weights are frozen, and in stages 1 and 2 if few tensors are most of them.
    """
    fits = (n for n in range(1, 1025) if rank_bytes(job, stage, n)["need"] <= memory)
    return next(fits, None)
