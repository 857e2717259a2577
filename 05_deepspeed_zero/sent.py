"""What a rank sends in each ZeRO stage: DeepSpeed's own count, checked by two others.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/sent.py
Needs: requirements.txt. It takes a GPU for every rank if there is one; what really went
    out is counted with gloo on Linux.
Expect: for each stage the collectives of one step, their number and bytes, and how many
    times the parameters a rank sent, beside the paper's 2, 2, 2 and 3. DeepSpeed's
    defaults send 3 in stages 1 and 2, and with --micro-batches 2 more again in stages 2
    and 3. A `check:` that all counts agree on all ranks.
Before: 05_deepspeed_zero/held.py
Next: 05_deepspeed_zero/offload.py
"""

import argparse
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paper import values_sent
from proof import tensor_sizes
from sized_qwen import buckets_for, make_engine, new_model, one_sample, step_once
from start import (
    choose_parts,
    find_place,
    join_group,
    leave_group,
    positive_int,
    print_once,
    refuse,
)
from traffic import (
    CollectiveCounter,
    tcp_bytes_sent,
    times_sent,
    times_sent_by_gloo,
)

# Each stage as it comes, and two of them with the setting that sends less.
TO_OWNER = {"use_multi_rank_bucket_allreduce": False}
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (1, TO_OWNER),
    (2, {}),
    (2, TO_OWNER),
    (3, {}),
]
# DeepSpeed's logger has longer names for two of them.
SHORT_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
TCP_LIMIT = 0.05  # gloo adds a few bytes to each message, and cuts small ones unevenly


def logged_calls(world_size: int) -> dict[str, tuple[int, int]]:
    """Return calls and bytes of each collective, by DeepSpeed's logger.

    Of an all-gather the logger counts what one rank gives. Here it is the whole tensor,
    as for all others. The logger's times are left alone: on the CPU they are wrong.
    """
    from deepspeed.comm.comm import comms_logger

    found = {}
    for name, by_bytes in comms_logger.get_raw_data().items():
        short = SHORT_NAMES.get(name, name)
        calls = sum(entry[0] for entry in by_bytes.values())
        count = sum(message * entry[0] for message, entry in by_bytes.items())
        found[short] = (calls, count * (world_size if short == "all_gather" else 1))
    comms_logger.reset_data()
    return found


def measure_traffic(
    args: argparse.Namespace, stage: int, more: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Train three steps and count in the third. Every rank must call this.

    A step is as many micro-batches as `args` says; the last one changes the weights.

    In its first two steps stage 3 finds out in which order it will need the parameters.
    """
    model = new_model(args.width, args.layers)
    parameters = sum(p.numel() for p in model.parameters())
    settings: dict[str, Any] = {**buckets_for(parameters, args.width), **more}
    logger = {"enabled": True, "verbose": False, "prof_all": True}
    parts = args.micro_batches
    several = {"comms_logger": logger, "gradient_accumulation_steps": parts}
    engine = make_engine(model, stage, "fp32", settings, **several)
    inputs, world_size = one_sample(dist.get_rank(), device), dist.get_world_size()
    for _ in range(2 * parts):
        step_once(engine, inputs)
    logged_calls(world_size)
    # Only gloo's messages go over TCP. After a barrier none is still under way.
    dist.barrier()
    before = tcp_bytes_sent() if dist.get_backend() == "gloo" else None
    with CollectiveCounter() as counter:
        for _ in range(parts):
            step_once(engine, inputs)
    dist.barrier()
    after = tcp_bytes_sent()
    threshold = engine.zero_param_persistence_threshold()
    small = sum(n for n in tensor_sizes(engine) if n < threshold)
    embedding = 256 * args.width
    engine.destroy()
    return {
        "stage": stage,
        "small": small,
        "at_both_ends": 2 * embedding if embedding >= threshold else 0,
        "to_owner": bool(more),
        "parts": parts,
        "bytes": 4 * parameters,
        "logged": logged_calls(world_size),
        "counted": {k: (len(v), sum(v)) for k, v in counter.calls.items()},
        "sent": None if before is None or after is None else after - before,
    }


class Multiples(NamedTuple):
    """How many times the parameters a rank sends, where (n - 1) / n counts as 1.

    `by_calls` is what the collectives need, `by_gloo` what gloo should make of them,
    `by_tcp` what went out, in the mean over all ranks, or None.
    """

    by_calls: float
    by_gloo: float
    by_tcp: float | None


def multiples(results: list[dict[str, Any]]) -> Multiples:
    """Work out what one variant sends from the results of all ranks."""
    world_size, whole = len(results), results[0]["bytes"]
    counted = {call: count for call, (_, count) in results[0]["counted"].items()}
    by_calls = sum(times_sent(call) * count for call, count in counted.items())
    by_gloo = sum(
        times_sent_by_gloo(call, world_size) * count for call, count in counted.items()
    )
    sent = [result["sent"] for result in results]
    by_tcp = None if None in sent else sum(sent) / (world_size - 1) / whole
    return Multiples(by_calls / whole, by_gloo / whole, by_tcp)


def variant_lines(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines for one variant; `results` are all ranks'."""
    first, many = results[0], multiples(results)
    lines = [f"stage {first['stage']}"]
    if first["to_owner"]:
        lines[0] += ", use_multi_rank_bucket_allreduce: false"
    for call, (calls, count) in first["logged"].items():
        lines.append(f"  {call:14} {calls:4} calls {count / 1e6:8.1f} MB")
    line = f"  these need {many.by_calls:.2f} times the parameters"
    if many.by_tcp is not None:
        line += f", gloo sent {many.by_tcp:.2f}"
    if first["parts"] == 1:  # the paper's step has one micro-batch
        line += f"; the paper: {values_sent(first['stage'])}"
    return [*lines, line]


def compare_counts(everything: list[list[dict[str, Any]]]) -> str:
    """Hold the counts of all ranks against one another; every rank does the same.

    Args:
        everything: for each variant, the results of all ranks.

    Raises:
        RuntimeError: two counts differ, or are not what the stage should send.
    """
    compared, different, by_tcp, worst = 0, 0, 0, 0.0
    for results in everything:
        first, many = results[0], multiples(results)
        for result in results:
            compared += len(result["counted"])
            # Not only the same on this rank: collectives are calls of all ranks.
            same = result["logged"] == result["counted"] == first["counted"]
            different += not (same and result["counted"])
        # Gradients that are divided go to their owner in each micro-batch.
        exchanges = first["parts"] if first["stage"] >= 2 else 1
        # Stages 1 and 2 have an all-reduce, where the paper has a reduce-scatter, and
        # then an all-gather of the weights.
        expected = exchanges * (1 if first["to_owner"] else 2) + (first["stage"] > 0)
        if first["stage"] == 3:
            # Small tensors stay on every rank and are gathered only after the step. The
            # embedding is the output matrix too: it is gathered for either end.
            each = first["at_both_ends"] - 2 * first["small"]
            more = exchanges * each + first["small"]
            expected = 3 * exchanges + 4 * more / first["bytes"]
        different += abs(many.by_calls / expected - 1) > 0.01
        if many.by_tcp is not None:
            by_tcp += 1
            worst = max(worst, abs(many.by_tcp / many.by_gloo - 1))
    text = (
        f"{compared} counts by DeepSpeed and PyTorch on {len(everything[0])} ranks, "
        f"{different} wrong"
    )
    if by_tcp:
        text += f"; TCP agrees within {TCP_LIMIT:.0%} in {by_tcp} of {len(everything)}"
    if different or worst > TCP_LIMIT:
        raise RuntimeError(f"the counts do not agree: {text}, or {worst:.1%} apart")
    return text


def main() -> None:
    """Measure all variants, print what they send, check that the counts agree."""
    parser = argparse.ArgumentParser(description="Count what a rank sends.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--width", type=positive_int, default=512, help="a multiple of 128")
    add("--layers", type=positive_int, default=2, help="transformer blocks")
    add("--micro-batches", type=positive_int, default=1, help="in a step")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.width % 128:
        refuse(f"--width must be a multiple of 128, not {args.width}")
    device, reason = find_place()
    if int(os.environ["WORLD_SIZE"]) < 2:
        refuse("one rank sends nothing; deepspeed --num_gpus=2 starts two")
    join_group(device)
    print_once(f"device: {device.type} with {dist.get_backend()} ({reason})")
    choose_parts({"optimizer": {"params": {}}}, device, False)
    everything = []
    for stage, more in VARIANTS:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, measure_traffic(args, stage, more, device))
        everything.append(by_rank)
        print_once("\n".join(variant_lines(by_rank)))
    print_once(f"check: {compare_counts(everything)}")
    leave_group()


if __name__ == "__main__":
    main()
