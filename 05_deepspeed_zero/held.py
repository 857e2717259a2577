"""What a rank holds in each ZeRO stage: counted, and held against the paper.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/held.py
Needs: requirements.txt. It takes a GPU for every rank if there is one.
Expect: for float32 and for bfloat16, the bytes of parameters, gradients and optimizer
    states in stages 0 to 3, beside the paper's formula and the size of the process; a
    `check:` that they agree. --default-buckets shows stage 1 to 3 larger than stage 0.
Before: 05_deepspeed_zero/stage_3.py
Next: 05_deepspeed_zero/sent.py, what the ranks send for it.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from live_tensors import (
    LIVE_KINDS,
    bytes_by_kind,
    live_storages,
    process_bytes,
    return_freed_memory,
)
from paper import KINDS, PRECISIONS, bytes_for_each, bytes_held, values_added
from proof import tensor_sizes
from qwen import free_bytes
from sized_qwen import (
    buckets_for,
    fit_into,
    make_engine,
    new_model,
    one_sample,
    step_once,
)
from start import (
    choose_parts,
    find_place,
    join_group,
    leave_group,
    positive_int,
    print_once,
    ranks_on_this_machine,
    refuse,
)

HELD_LIMIT = 0.01  # how far from the formula, once what explains it is taken off
PROCESS_LIMIT = 0.05  # how far the size of the process may be from what was counted
SLACK = 5_000_000  # bytes that a process may differ by whatever is counted
DEFAULT_BUCKET = 500_000_000  # values, DeepSpeed's default reduce_bucket_size


def measure_held(
    args: argparse.Namespace, stage: int, precision: str, device: torch.device
) -> dict[str, Any]:
    """Train two steps and count in the second, as its last gradient is computed.

    That is when most is held: all parameters, states and gradients are there, and the
    ranks have not all met yet. Every rank must call this.
    """
    gc.collect()
    time.sleep(0.1)  # Gloo's threads let go of what they sent a little later
    before, process_before = live_storages([]), process_bytes(device)
    model = new_model(args.width, args.layers)
    parameters = sum(p.numel() for p in model.parameters())
    settings = {} if args.default_buckets else buckets_for(parameters, args.width)
    engine = make_engine(model, stage, precision, settings)
    del model
    moments: list[dict[str, int]] = []

    def count(_: torch.Tensor) -> None:
        time.sleep(0.1)
        bytes_taken = process_bytes(device) - process_before
        moments.append({**bytes_by_kind(engine, before), "process": bytes_taken})

    inputs = one_sample(dist.get_rank(), device)
    step_once(engine, inputs)  # Adam makes its states in the first step
    # Backward ends at the embedding, the first thing that forward went through.
    embedding = engine.module.get_input_embeddings().weight
    hook = embedding.register_post_accumulate_grad_hook(count)
    step_once(engine, inputs)
    hook.remove()
    sizes, world_size = tensor_sizes(engine), dist.get_world_size()
    threshold = engine.zero_param_persistence_threshold() if stage == 3 else 0
    held, paper = moments[-1], bytes_held(parameters, stage, world_size, precision)
    more = values_added(sizes, stage, dist.get_rank(), world_size, threshold)
    engine.destroy()
    return {
        "precision": precision,
        "stage": stage,
        "parameters": parameters,
        "held": held,
        "paper": paper,
        "extra": more,
    }


def distance(result: dict[str, Any], kinds: Iterable[str]) -> float:
    """Return how far, in parts of the whole, a count is from formula plus additions."""
    each = bytes_for_each(result["precision"], result["stage"])
    worst = 0.0
    for kind, number in zip(KINDS, each, strict=True):
        expected = result["paper"][kind] + number * result["extra"][kind]
        if kind in kinds:
            worst = max(worst, abs(result["held"][kind] / expected - 1))
    return worst


COLUMNS = (*KINDS, "gathered", "buckets", "other")


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return rank 0's lines: what it holds in MB of a million bytes, by stage."""
    heads = ("params", "grads", "states", *COLUMNS[3:], "in all", "paper", "process")
    lines = ["stage" + "".join(f"{head:>9}" for head in heads)]
    for result in results:
        held = result["held"]
        total, paper = sum(held[k] for k in COLUMNS), sum(result["paper"].values())
        numbers = [*(held[kind] for kind in COLUMNS), total, paper, held["process"]]
        row = "".join(f"{number / 1e6:9.1f}" for number in numbers)
        lines.append(f"{result['stage']:5}{row}")
    return lines


def conclusion(results: list[dict[str, Any]], exact: bool) -> str:
    """Hold all ranks' counts against formula and process; every rank does the same.

    Raises:
        RuntimeError: something is further off than its limit.
    """
    far = max(distance(result, KINDS) for result in results)
    other = process = 0.0
    for result in results:
        held, whole = result["held"], sum(result["held"][kind] for kind in LIVE_KINDS)
        other = max(other, (held["other"] - SLACK / 10) / whole)
        process = max(process, (abs(held["process"] - whole) - SLACK) / whole)
    text = (
        f"{len(results)} counts are the formula's and what DeepSpeed adds to it, "
        f"{far:.1%} apart (limit {HELD_LIMIT:.0%})"
    )
    if exact:
        text += f"; the process agrees within {PROCESS_LIMIT:.0%}, give or take 5 MB"
    if far > HELD_LIMIT or other > HELD_LIMIT or (exact and process > PROCESS_LIMIT):
        raise RuntimeError(
            f"of {len(results)} counts one is {far:.1%} from the formula, {other:.1%} "
            f"unnamed or {process:.1%} from the process"
        )
    return text


def conclusion_for_defaults(results: list[dict[str, Any]]) -> str:
    """Check that the default buckets are there and outweigh all that ZeRO saves.

    Raises:
        RuntimeError: they are not, or do not.
    """
    wrong, whole = 0, []
    for result in results:
        held, stage = result["held"], result["stage"]
        each = bytes_for_each(result["precision"], stage).gradient
        # The gradients are still in the bucket: so large a bucket is never full.
        wrong += distance(result, ("parameters", "optimizer")) > HELD_LIMIT
        wrong += held["buckets"] != (each * DEFAULT_BUCKET if stage else 0)
        whole.append(sum(held[kind] for kind in LIVE_KINDS))
    larger = [count for count, r in zip(whole, results, strict=True) if r["stage"]]
    text = (
        f"{len(larger)} of {len(results)} counts hold a bucket of {DEFAULT_BUCKET:,} "
        f"values; {sum(count > max(whole[::4]) for count in larger)} are above stage 0"
    )
    if wrong or len(larger) != len(results) * 3 // 4:
        raise RuntimeError(f"not what was expected: {text}, {wrong} wrong")
    return text


def main() -> None:
    """Measure all stages in both precisions, print rank 0's, check every rank's."""
    parser = argparse.ArgumentParser(description="Count what a rank holds.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--width", type=positive_int, default=512, help="a multiple of 128")
    add("--layers", type=positive_int, default=4, help="transformer blocks")
    add("--precision", choices=PRECISIONS, nargs="+", default=PRECISIONS)
    add("--default-buckets", action="store_true", help="leave DeepSpeed's settings")
    add("--json", type=Path, help="file to add this world size to")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.width % 128:
        refuse(f"--width must be a multiple of 128, not {args.width}")
    if args.json and not args.json.resolve().parent.is_dir():
        refuse(f"--json {args.json}: there is no folder {args.json.parent}")
    device, reason = find_place()
    try:
        room = free_bytes(device, ranks_on_this_machine())
        fit_into(room, args.width, args.layers)
    except ValueError as error:
        refuse(str(error))
    join_group(device)
    print_once(f"device: {device.type} with {dist.get_backend()} ({reason})")
    choose_parts({"optimizer": {"params": {}}}, device, False)
    exact = device.type != "cpu" or return_freed_memory()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for precision in args.precision:
        # What a library sets up at its first step ever is no part of a model.
        engine = make_engine(new_model(args.width, 1), 0, precision, {})
        step_once(engine, one_sample(rank, device))
        engine.destroy()
        del engine
    results = []
    for precision in args.precision:
        own = [measure_held(args, stage, precision, device) for stage in range(4)]
        results += own
        print_once(
            f"{precision} | {own[0]['parameters']:,} parameters, {world_size} rank(s)"
        )
        print_once("\n".join(table(own)))
    by_rank: list[Any] = [None] * world_size
    dist.all_gather_object(by_rank, results)
    everything = [result for one in by_rank for result in one]
    if args.default_buckets:
        print_once(f"check: {conclusion_for_defaults(everything)}")
    else:
        print_once(f"check: {conclusion(everything, exact)}")
    if args.json and rank == 0:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        known[str(world_size)] = by_rank
        args.json.write_text(json.dumps(known, indent=1) + "\n")
    leave_group()


if __name__ == "__main__":
    main()
