"""Every rank saves its shard; resumed from the shards, training takes the same steps.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/checkpoints/save_and_resume.py
Expect: the shards' bytes; losses that are those of an uninterrupted run to the last
    bit; and one consolidated file, which transformers reads without DeepSpeed.
"""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from deepspeed_setup import (
    RECORD,
    SETUP_OPTIONS,
    join,
    leave,
    newest_tag,
    prepare,
    save_shards,
)
from ranks import check, read_options, say, start_ranks
from shards import CONFIG, SAVED_AT, STEPS, mean_loss, new_engine, train_steps


def consolidate(folder: Path, tag: str, config: Any) -> None:
    """Merge the shards into whole fp32 weights, and save them for transformers."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # Both libraries report their progress here, line by line.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        weights: Any = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
        model = Qwen2ForCausalLM(config)
        model.load_state_dict(weights)
        model.save_pretrained(folder / "whole")


def main(options: argparse.Namespace) -> None:
    """Save half-way and train on; then do the second half again from the shards."""
    device, folder, stage = prepare(CONFIG), options.folder, options.stage
    # Two names in turn: an older checkpoint stays until this one is whole.
    tag = "half_2" if newest_tag(folder) == "half_1" else "half_1"
    join()
    engine = new_engine(stage)
    train_steps(engine, range(SAVED_AT))
    save_shards(engine, folder, tag, stage=stage)
    uninterrupted = train_steps(engine, range(SAVED_AT, STEPS))
    engine.destroy()
    if dist.get_rank() == 0:
        record = json.loads((folder / tag / RECORD).read_text())
        for name, count in sorted(record["files"].items()):
            say(f"{count:9,} bytes in {name}")
        consolidate(folder, tag, engine.module.config)
    dist.barrier()

    engine = new_engine(stage)
    engine.load_checkpoint(str(folder), tag=tag)
    resumed = train_steps(engine, range(SAVED_AT, STEPS))
    engine.destroy()
    say("uninterrupted " + " ".join(f"{loss:.4f}" for loss in uninterrupted))
    say("resumed       " + " ".join(f"{loss:.4f}" for loss in resumed))
    check(resumed == uninterrupted, f"{len(resumed)} losses, the same to the last bit")
    # The engine computes in bf16, with the fp32 master weights rounded to it.
    whole = folder / "whole"
    alone: Any = Qwen2ForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    alone = alone.to(device)
    apart = abs(mean_loss(alone, SAVED_AT) - uninterrupted[0])
    check(apart == 0, "the consolidated weights give transformers alone the same loss")
    leave()


if __name__ == "__main__":
    folder = {"type": Path, "default": Path("saved/shards"), "help": "for the shards"}
    stage = {"type": int, "choices": (1, 2, 3), "default": 1, "help": "ZeRO's"}
    start_ranks(main, 2, read_options(folder=folder, stage=stage, **SETUP_OPTIONS))
