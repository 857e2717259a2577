"""Memory per rank in each ZeRO stage: counted, and compared with the paper's formula.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/memory/memory_per_rank.py
Expect: for stages 0 to 3 the MB of weights, gradients and optimizer state on rank 0,
    beside the paper's formula and what DeepSpeed adds to it, and the peak of the step;
    with --default-buckets, stages 1 to 3 larger than stage 0.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from counted_step import (
    LIVE_KINDS,
    count_step,
    is_as_worked_out,
    refuse_too_large,
    warm_up,
)
from deepspeed_setup import SETUP_OPTIONS, join, leave, prepare
from ranks import check, fail, gather, number, read_options, say, start_ranks

HEADS = ("weights", "grads", "optim", "gather", "bucket", "kept", "paper", "adds")
HEADS += ("peak", "process")


def row(result: dict[str, Any]) -> str:
    """Return a stage's line: what rank 0 has of each kind, in MB of a million bytes."""
    kept = result["kept"]
    amounts = [kept[kind] for kind in ("parameters", "gradients", "optimizer")]
    amounts += [kept["gathered"], kept["buckets"]]
    amounts += [sum(kept[kind] for kind in LIVE_KINDS)]
    amounts += [sum(result[column].values()) for column in ("paper", "added")]
    amounts += [result["peak"], kept["process"]]
    cells = "".join(f"{amount / 1e6:8.1f}" for amount in amounts)
    return f"{result['stage']:5}{cells}"


def main(options: argparse.Namespace) -> None:
    """Count a step in all stages, print rank 0's, compare every rank's."""
    if options.json and not options.json.resolve().parent.is_dir():
        fail(f"--json {options.json}: there is no folder {options.json.parent}")
    device = prepare({})
    refuse_too_large(options.width, options.layers, device)
    join()
    exact = warm_up(options.precision, options.width, device)
    # DeepSpeed refuses fp32 accumulation in stage 0.
    stages = range(1 if options.grad_accum_dtype else 0, 4)
    own = [count_step(stage, device, options) for stage in stages]
    parameters, world_size = own[0]["parameters"], dist.get_world_size()
    say(f"{options.precision} | {parameters:,} parameters, {world_size} rank(s), in MB")
    heads = "".join(f"{head:>8}" for head in HEADS)
    say("\n".join([f"stage{heads}", *map(row, own)]))
    by_rank = gather(own)
    check(*is_as_worked_out([one for of in by_rank for one in of], exact))
    if options.json and dist.get_rank() == 0:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known[str(world_size)] = own
        options.json.write_text(json.dumps(known) + "\n")
    leave()


if __name__ == "__main__":
    start_ranks(
        main,
        1,
        read_options(
            width={"type": number(128, 65536), "default": 512},
            layers={"type": number(1, 99), "default": 4},
            tokens={"type": number(2, 256), "default": 64},
            precision={"choices": ("bf16", "fp32"), "default": "bf16"},
            grad_accum_dtype={"choices": ("fp32",), "default": ""},
            default_buckets={"action": "store_true"},
            json={"type": Path, "help": "file to add rank 0's counts to"},
            **SETUP_OPTIONS,
        ),
    )
