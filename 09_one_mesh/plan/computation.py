"""The seconds of computation of a micro-batch, by pass and term, on the slowest stage.

Operations over a part of the peak, and bytes over the rate of the device's memory.
Backward is twice forward, in flash attention 2.5 times, in element-wise operations a
little less; recomputation runs forward again, in the backward pass.
"""

from typing import NamedTuple

from jobs import Job, Layout


class Constants(NamedTuple):
    """What is fitted to half of the published rows, by fit_constants.py."""

    products: float  # of the peak, in large matrix products
    links: float  # of the link's rate, in collectives
    fp8: float  # times the rate of bf16


FITTED = Constants(products=0.600, links=1.0, fp8=1.494)
# Backward multiplies five matrices where forward multiplies two: arXiv 2307.08691.
FLASH_BACKWARD = 2.5
# Bytes moved for each logit. Forward: written 2; to fp32 2 + 4; log-softmax 4 + 4.
# Backward: gradients of the loss 4, of log-softmax 4 + 4 + 4, to bf16 4 + 2; read by
# two products 2 + 2.
LOGIT, LOGIT_BACKWARD = 16, 26


def traffic(job: Job, t: int) -> float:
    """Return the bytes that a block's element-wise operations move, for a token.

    Each reads its inputs and writes its outputs once. Forward only; backward is twice.
    """
    m, d = job.model, job.model.width
    if m.is_gpt:  # norms 8 D, bias and dropout 14 D, whole on each rank; gelu, copies
        return 22 * d + (28 * d + 9 * m.heads * job.sequence) / t  # softmax, dropout
    rotated = d + m.kv_width
    if job.compiled:  # two norms fused with sums; rotary embedding; gate
        return (16 * d + 4 * rotated + 6 * m.inner) / t
    # Norm: to float, square, mean, scale, back, weight; rotary: to float, turn, back.
    return (2 * (36 + 6) * d + 20 * rotated + 10 * m.inner) / t


def cast_traffic(job: Job, t: int) -> tuple[float, float]:
    """Return the bytes that a block's casts to fp8 move in each pass, for a token.

    Each reads a tensor for its largest value, reads it again, and writes it: 5 bytes an
    element. In forward the inputs of all matrices; in backward the gradients of their
    outputs.
    """
    m, d = job.model, job.model.width
    inputs, gradients = 3 * d + m.inner, 3 * d + 2 * m.kv_width + 2 * m.inner
    return 5 * inputs / t, 5 * gradients / t


def block_seconds(
    job: Job, layout: Layout, constants: Constants
) -> list[dict[str, float]]:
    """Return the seconds by term of a block's forward pass and of its backward pass."""
    m, t, tokens = job.model, layout.tensor, layout.tokens(job)
    rate = job.cluster.flops * constants.products
    is_full, is_again = layout.recompute == "full", layout.recompute != "none"
    matrices = m.matrices()
    again = is_full * m.block_operations()
    if layout.recompute == "selective" and not m.is_gpt:  # every second product
        again = 2 * (matrices["key"] + matrices["out"] + matrices["gate"])
    products = m.block_operations(), 2 * m.block_operations() + again
    # Not balanced, the last of c ranks has (2 - 1/c) times the mean of the scores.
    late = 1 if job.balanced or m.is_gpt else 2 - 1 / layout.context
    attention = 1.0, (2 + is_again if m.is_gpt else FLASH_BACKWARD + is_full)
    flash = rate if m.is_gpt else job.cluster.flops * job.cluster.flash
    casts = cast_traffic(job, t) if job.fp8 else (0.0, 0.0)
    moved = traffic(job, t) + casts[0]
    bytes_moved = moved, 2 * traffic(job, t) + casts[1] + is_again * moved
    scores = late * m.attention_operations(job.sequence) / t
    precision = constants.fp8 if job.fp8 else 1.0
    return [
        {
            "products": tokens * products[i] / t / rate / precision,
            "attention": tokens * scores * attention[i] / flash,
            "element-wise": tokens * bytes_moved[i] / job.cluster.hbm,
        }
        for i in (0, 1)
    ]


def computation(
    job: Job, layout: Layout, constants: Constants
) -> list[dict[str, float]]:
    """Return a micro-batch's seconds by term: forward pass, then backward pass."""
    m, p, tokens = job.model, layout.pipeline, layout.tokens(job) / layout.tensor
    rate = job.cluster.flops * constants.products
    blocks = block_seconds(job, layout, constants)
    heads = [tokens * passes * m.head_operations() / rate for passes in (1, 2)]
    # The longest stage: of whole blocks, or the last, which has the head.
    longest, last = layout.blocks(job), m.layers // p
    of_block = sum(sum(block.values()) for block in blocks)
    with_head = last * of_block + sum(heads) >= longest * of_block or p == 1
    n = last if with_head else longest
    found = []
    for block, head, moved in zip(blocks, heads, (LOGIT, LOGIT_BACKWARD), strict=True):
        seconds = {term: n * each for term, each in block.items()}
        seconds["products"] += with_head * head
        logits = tokens * moved * m.vocabulary / job.cluster.hbm
        seconds["element-wise"] += with_head * logits
        found.append(seconds)
    return found
