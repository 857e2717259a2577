"""Resume with another number of ranks, or in another stage, from saved shards.

Run: torchrun --nproc-per-node=1 05_deepspeed_zero/checkpoints/resume_elsewhere.py
Expect: DeepSpeed's universal checkpoint is made of the shards that save_and_resume.py
    has left, and the losses are those of the uninterrupted run, within rounding.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from deepspeed_setup import (
    RECORD,
    SETUP_OPTIONS,
    find_damage,
    join,
    leave,
    newest_tag,
    prepare,
)
from ranks import check, fail, read_options, say, start_ranks
from shards import CONFIG, SAVED_AT, STEPS, new_engine, train_steps

LIMIT = 2e-2  # of a loss of 3 to 4; bf16 has two or three digits


def find_problem(folder: Path, stage: int) -> str:
    """Compare the shards with the record, before any rank opens one; '' if sizes agree.

    DeepSpeed reads a shard with pickle, which can run code: load only what you trust.
    """
    shards = folder / newest_tag(folder)
    try:
        files = json.loads((shards / RECORD).read_text())["files"]
    except (OSError, ValueError):  # not there, or cut short
        return f"no checkpoint in {folder}; save_and_resume.py writes one"
    # Stages 1 and 2 read each other's shards, if they have the same
    # round_robin_gradients, and stage 3 its own. DeepSpeed 0.19 has
    # no way from one to the other that keeps the optimizer state.
    is_stage_3 = "mp_rank_00_model_states.pt" not in files  # where weights are whole
    if is_stage_3 != (stage == 3):
        saved = "stage 3" if is_stage_3 else "stage 1 or 2"
        return (
            f"the shards in {shards} are of {saved}, which stage {stage} cannot read; "
            f"the weights alone are in {folder / 'whole'}"
        )
    fault = find_damage(shards, files)
    return f"{fault}; nothing was loaded or changed" if fault else ""


def to_universal(folder: Path, tag: str) -> str:
    """Convert shards into a folder for each tensor, which any number of ranks reads."""
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        # inject_missing_state: our model has no tensor parallelism to describe.
        command += ["--inject_missing_state", "--input_folder", str(folder / tag)]
        command += ["--output_folder", str(folder / "universal")]
        # More worker processes are worth their start for large models only.
        command += ["--num_extract_workers=1", "--num_merge_workers=1"]
        subprocess.run(command, check=True, capture_output=True)
    dist.barrier()
    return "universal"


def main(options: argparse.Namespace) -> None:
    """Train without a break, and then from shards that other ranks may have saved."""
    folder, stage = options.folder, options.stage
    prepare(CONFIG)
    if problem := find_problem(folder, stage):
        fail(problem)
    join()
    engine = new_engine(stage)
    uninterrupted = train_steps(engine, range(STEPS))[SAVED_AT:]
    engine.destroy()
    tag = newest_tag(folder)
    saved_by = json.loads((folder / tag / RECORD).read_text())["ranks"]
    ranks = dist.get_world_size()
    # Where as many ranks resume, each finds its own shard.
    if ranks != saved_by:
        tag = to_universal(folder, tag)
    engine = new_engine(stage, universal=tag == "universal")
    state = engine.load_checkpoint(str(folder), tag=tag)[1]
    losses = train_steps(engine, range(SAVED_AT, STEPS))
    engine.destroy()
    say(f"saved by {saved_by} rank(s) in stage {state['stage']}")
    say(f"resumed by {ranks} rank(s) in stage {stage}, from '{tag}'")
    say("uninterrupted " + " ".join(f"{loss:.4f}" for loss in uninterrupted))
    say("resumed       " + " ".join(f"{loss:.4f}" for loss in losses))
    pairs = zip(losses, uninterrupted, strict=True)
    apart = [abs(one - other) for one, other in pairs]
    is_same = all(one < LIMIT for one in apart)
    check(is_same, f"{len(losses)} losses, at most {max(apart):.0e} apart")
    leave()


if __name__ == "__main__":
    folder = {"type": Path, "default": Path("saved/shards"), "help": "of the shards"}
    stage = {"type": int, "choices": (1, 2, 3), "default": 2, "help": "ZeRO's"}
    start_ranks(main, 1, read_options(folder=folder, stage=stage, **SETUP_OPTIONS))
