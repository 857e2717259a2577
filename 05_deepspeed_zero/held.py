"""What a rank holds in each ZeRO stage: counted, and held against the paper.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/held.py
Needs: requirements.txt. It takes a GPU for every rank if there is one.
Expect: for float32 and for bfloat16, the bytes of parameters, gradients and optimizer
    states in stages 0 to 3, beside the paper's formula and the size of the process, and
    the most that a step takes; a `check:` that they agree. --default-buckets shows
    stages 1 to 3 larger than stage 0.
Before: 05_deepspeed_zero/stage_3.py
Next: 05_deepspeed_zero/sent.py, what the ranks send for it.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agreement import conclusion, conclusion_for_defaults
from live_tensors import (
    LIVE_KINDS,
    PeakCounter,
    bytes_by_kind,
    live_storages,
    own_storages,
    process_bytes,
    return_freed_memory,
)
from paper import KINDS, PRECISIONS, bytes_held, values_added
from peak import most_in_step
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


def measure_held(
    args: argparse.Namespace, stage: int, precision: str, device: torch.device
) -> dict[str, Any]:
    """Train two steps and count in the second, as its last gradient is computed.

    Then all parameters, states and gradients are there. What is left of the step takes
    more for a moment, which is counted as well. Every rank must call this.
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
    peak = PeakCounter()

    def count(_: torch.Tensor) -> None:
        time.sleep(0.1)
        bytes_taken = process_bytes(device) - process_before
        moments.append({**bytes_by_kind(engine, before), "process": bytes_taken})
        peak.start(own_storages(engine, before).values())

    inputs = one_sample(dist.get_rank(), device)
    step_once(engine, inputs)  # Adam makes its states in the first step
    # Backward ends at the embedding, the first thing that forward went through.
    embedding = engine.module.get_input_embeddings().weight
    hook = embedding.register_post_accumulate_grad_hook(count)
    with peak:
        step_once(engine, inputs)
    hook.remove()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = tensor_sizes(engine)
    threshold = engine.zero_param_persistence_threshold() if stage == 3 else 0
    held, paper = moments[-1], bytes_held(parameters, stage, world_size, precision)
    more = values_added(sizes, stage, rank, world_size, threshold)
    adam = "single" if device.type == "cpu" else "foreach"  # PyTorch's choice
    most = most_in_step(held, sizes, stage, rank, world_size, precision, adam)
    engine.destroy()
    return {
        "rank": rank,
        "precision": precision,
        "stage": stage,
        "parameters": parameters,
        "held": held,
        "paper": paper,
        "extra": more,
        "most": peak.most,
        "worked_out": max(most, sum(held[kind] for kind in LIVE_KINDS)),
    }


COLUMNS = (*KINDS, "gathered", "buckets")


def table(results: list[dict[str, Any]]) -> list[str]:
    """Return rank 0's lines: what it holds in MB of a million bytes, by stage."""
    heads = ["params", "grads", "states", "fetched", "buckets", "in all", "paper"]
    heads += ["most", "other", "process"]
    lines = ["stage" + "".join(f"{head:>8}" for head in heads)]
    for result in results:
        held, numbers = result["held"], [result["held"][kind] for kind in COLUMNS]
        # What has no name is nearly nothing, and part of all that is counted.
        numbers += [sum(numbers) + held["other"], sum(result["paper"].values())]
        numbers += [result["most"], held["other"], held["process"]]
        row = "".join(f"{number / 1e6:8.1f}" for number in numbers)
        lines.append(f"{result['stage']:5}{row}")
    return lines


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
