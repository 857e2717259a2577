"""Peak memory of a rank, by kind, in bytes.

State: the ZeRO paper, arXiv 1910.02054. Activations: Korthikanti et al., 2205.05198,
adapted to flash attention and to a gated MLP. What FSDP gathers and what recomputation
keeps: torchtitan's parallelize_llama.py of December 2024.
"""

from jobs import Job, Layout

# Reserved by PyTorch's allocator over what is counted here: fitted, fit_constants.py.
ALLOCATOR = 1.146
# bf16 weights and gradients; fp32 master weights and two moments. FSDP keeps 4 + 4 + 8:
# the same sum.
WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12
# Copies of the fp32 logits when their backward begins: log-softmax, its gradient, and
# the gradient of the logits. With loss_parallel a fourth (torch, parallel/loss.py).
LOGITS, LOGITS_PARALLEL = 3, 4


def state(parameters: float, sharding: str, ranks: int) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state: the ZeRO paper."""
    stage = ("none", "zero-1", "zero-2", "fsdp").index(sharding)
    return {
        "weights": WEIGHT * parameters / (ranks if stage >= 3 else 1),
        "gradients": GRADIENT * parameters / (ranks if stage >= 2 else 1),
        "optimizer": OPTIMIZER * parameters / (ranks if stage >= 1 else 1),
    }


def kept_by_block(job: Job, recompute: str, t: int) -> float:
    """Return the bytes that a block keeps for backward, for each token, on t ranks.

    With sequence parallelism all is a t-th, but for the gathered input of query and of
    the MLP (2 x 2 D bytes). "full" keeps the block's input, "selective" as torchtitan
    does: the input, what attention returns, and every second matrix product.
    """
    m, d = job.model, job.model.width
    if recompute == "full":
        # Sequence parallelism is of 2022; the GPTs' runs are of 2021.
        return 2 * d if m.is_gpt else 2 * d / t
    if m.is_gpt:  # 34 s b h + 5 a s^2 b; "selective" computes the scores again
        scores = 0 if recompute == "selective" else 5 * m.heads * job.sequence
        return (10 + 24 / t) * d + scores / t
    attention = 2 * d + 4 * m.heads  # and a sum of exponentials for each head
    if recompute == "selective":
        products = d + m.kv_width + m.inner + d  # of query, value, gate and down
        return (2 * d + attention + 2 * products) / t
    products = d + 2 * m.kv_width + d + 2 * m.inner
    mlp = 2 * m.inner * (1 if job.compiled else 2)  # what down reads, and silu
    return (2 * d + attention + 2 * products + mlp) / t + 2 * 2 * d


def stage_bytes(job: Job, layout: Layout, is_last: bool) -> dict[str, float]:
    """Return the bytes on a rank of the first stage, or of the last."""
    m, t, p = job.model, layout.tensor, layout.pipeline
    tokens, blocks = layout.tokens(job), layout.blocks(job)
    ends = m.embedding() * (p == 1 or not is_last) + m.head() * is_last
    parameters = (blocks * m.block() + ends) / t
    kinds = state(parameters, layout.sharding, layout.shards)
    # 1F1B: as many micro-batches are in flight as stages follow, this one included.
    # Interleaved stages wait longer for backward. The first rank keeps p + (p - 1) / v
    # (2205.05198, section 4), the last as much less than p.
    v = layout.interleaved
    more = -(p - 1) / v if is_last else (p - 1) / v * (v > 1)
    in_flight = min(p + more, layout.micro_batches(job))
    kept = blocks * kept_by_block(job, layout.recompute, t)
    kinds["activations"] = in_flight * tokens * kept
    gathered = gradients = 0.0
    if layout.sharding == "fsdp" and p == 1:
        # A block and the next one; the ends are gathered for the whole pass.
        gathered, gradients = 2 * (2 * m.block() + ends) / t, (2 + 4) * m.block() / t
    elif layout.sharding == "fsdp":  # gathered once a step; gradients wait, in fp32
        gathered, gradients = 2 * parameters, 4 * parameters
    logits = LOGITS if t == 1 else LOGITS_PARALLEL
    at_loss = is_last * tokens * (4 * logits * m.vocabulary / t + 2 * m.width)
    again = tokens * kept_by_block(job, "none", t) * (layout.recompute != "none")
    if p > 1:
        kinds["temporaries"] = gathered + gradients + max(at_loss, again)
    else:
        kinds["temporaries"] = gathered + max(at_loss, again + gradients)
    kinds["allocator"] = (ALLOCATOR - 1) * sum(kinds.values())
    return kinds


def peak_bytes(job: Job, layout: Layout) -> dict[str, float]:
    """Return the bytes by kind on the rank that needs most."""
    last = stage_bytes(job, layout, is_last=True)
    if layout.pipeline == 1:
        return last
    first = stage_bytes(job, layout, is_last=False)
    return max(first, last, key=lambda kinds: sum(kinds.values()))
