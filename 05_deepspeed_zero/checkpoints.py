"""A divided model is saved in shards, and read by other ranks, stages and programs.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/checkpoints.py --folder=saved
Needs: requirements.txt. It takes a GPU for every rank if there is one.
Expect: losses that go on after a restart as if nothing had happened, and one file that
    transformers alone can read; `--resume` with another number of ranks goes on too.
Before: 05_deepspeed_zero/losses.py
Next: 05_deepspeed_zero/same_result.py
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data import global_batch, own_rows, read_text, to_tokens
from proof import mean_over_ranks
from qwen import Qwen2ForCausalLM, small_model
from start import (
    choose_parts,
    find_place,
    join_group,
    leave_group,
    positive_int,
    print_once,
    refuse,
)

BLOCK_SIZE = 64
SAMPLES = 12  # in a step of all ranks together, for 1, 2, 3 or 4 of them
LIMIT = 1e-4  # of the loss; the same ranks and stage must give the same bits
RECORD = "half/record.json"  # what was saved, and what an unbroken run goes on to


def new_engine(stage: int, device: torch.device, universal: bool = False) -> Any:
    """Hand a new model to DeepSpeed."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    choose_parts(config, device, fused=False)
    import deepspeed

    model = small_model()
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    return deepspeed.initialize(model=model, model_parameters=weights, config=config)[0]


def train_steps(
    engine: Any, tokens: torch.Tensor, steps: range, device: torch.device
) -> list[float]:
    """Take some steps; return the mean loss over all ranks of each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        batch = global_batch(tokens, step, SAMPLES, BLOCK_SIZE)
        inputs = own_rows(batch, rank, world_size).to(device)
        loss = engine(input_ids=inputs, labels=inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
    return losses


def what_is_wrong(folder: Path, stage: int) -> str:
    """Compare the shards with the record, before any rank opens one; '' if all is well.

    DeepSpeed reads a shard with pickle, which runs code: only load what you trust.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return f"no checkpoint in {folder}; without --resume this script writes one"
    # Stages 1 and 2 read each other's shards, and stage 3 its own. DeepSpeed 0.19 has
    # no way from one to the other that keeps Adam's states.
    if (record["stage"] == 3) != (stage == 3):
        return (
            f"the shards in {folder} are of stage {record['stage']}, which stage "
            f"{stage} cannot read; the weights alone are in {folder / 'whole'}"
        )
    for name, expected in record["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != expected:
            return (
                f"{path} has {found:,} bytes and was saved with {expected:,}; nothing "
                "was loaded or changed"
            )
    return ""


def to_universal(folder: Path) -> str:
    """Cut the shards into one folder a tensor, which any number of ranks can read."""
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        # inject_missing_state: our model has no tensor parallelism to describe.
        command += ["--inject_missing_state", "--input_folder", str(folder / "half")]
        command += ["--output_folder", str(folder / "universal")]
        subprocess.run(command, check=True, capture_output=True)
    dist.barrier()
    return "universal"


def publish(folder: Path, record: dict[str, Any]) -> dict[str, int]:
    """Put shards that are all written in the place of older ones; return their bytes.

    Until then the older ones stay, and between the two renames they are in "previous".
    """
    new, current, old = (folder / n for n in ("unfinished", "half", "previous"))
    files = {f"half/{path.name}": path.stat().st_size for path in sorted(new.iterdir())}
    (new / Path(RECORD).name).write_text(json.dumps(record | {"files": files}))
    if current.exists():
        shutil.rmtree(old, ignore_errors=True)
        current.rename(old)
    new.rename(current)
    # What DeepSpeed reads where it is told no tag.
    (folder / "latest").write_text("half")
    shutil.rmtree(old, ignore_errors=True)
    return files


def save_and_resume(
    folder: Path, stage: int, tokens: torch.Tensor, steps: int, device: torch.device
) -> str:
    """Save half-way, train on; then do the second half again from the file."""
    half = steps // 2
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "unfinished", ignore_errors=True)
    dist.barrier()
    engine = new_engine(stage, device)
    train_steps(engine, tokens, range(half), device)
    # Every rank must call this: each writes its own shard.
    engine.save_checkpoint(str(folder), tag="unfinished", save_latest=False)
    unbroken = train_steps(engine, tokens, range(half, steps), device)
    engine.destroy()
    if dist.get_rank() == 0:
        record: dict[str, Any] = {"ranks": dist.get_world_size(), "stage": stage}
        record |= {"steps": [half, steps], "losses": unbroken}
        for name, number in publish(folder, record).items():
            print_once(f"{number:9,} bytes in {name}")
    dist.barrier()
    engine = new_engine(stage, device)
    engine.load_checkpoint(str(folder), tag="half")
    resumed = train_steps(engine, tokens, range(half, steps), device)
    print_once("without a break " + " ".join(f"{loss:.4f}" for loss in unbroken))
    print_once("after a restart " + " ".join(f"{loss:.4f}" for loss in resumed))
    if resumed != unbroken:
        raise RuntimeError("the restarted run takes another way")
    engine.destroy()
    return f"{len(resumed)} losses after the restart are the same to the last bit"


def consolidate(folder: Path, tokens: torch.Tensor, expected: float, step: int) -> str:
    """Join the shards to plain weights, and use them with transformers alone."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # Both libraries report their progress here, line by line.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        weights: Any = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="half")
        whole = small_model(seed=1)
        whole.load_state_dict(weights)
        whole.save_pretrained(folder / "whole")
        alone: Any = Qwen2ForCausalLM.from_pretrained(folder / "whole")
    inputs = global_batch(tokens, step, SAMPLES, BLOCK_SIZE)
    with torch.no_grad():
        apart = abs(alone(input_ids=inputs, labels=inputs).loss.item() - expected)
    if not apart < LIMIT:
        raise RuntimeError(f"the joined weights give a loss that is {apart} apart")
    return f"joined weights in transformers alone, loss {apart:.0e} apart"


def go_on(
    folder: Path,
    record: dict[str, Any],
    stage: int,
    tokens: torch.Tensor,
    device: torch.device,
) -> str:
    """Do the second half again, from shards that other ranks may have saved."""
    ranks = dist.get_world_size()
    # With as many ranks as before, each finds its own shard.
    fits = ranks == record["ranks"]
    tag = "half" if fits else to_universal(folder)
    engine = new_engine(stage, device, universal=not fits)
    engine.load_checkpoint(str(folder), tag=tag)
    unbroken = record["losses"]
    losses = train_steps(engine, tokens, range(*record["steps"]), device)
    engine.destroy()
    print_once(f"saved on {record['ranks']} rank(s) in stage {record['stage']}")
    print_once(f"goes on with {ranks} rank(s) in stage {stage}, from '{tag}'")
    print_once("without a break " + " ".join(f"{loss:.4f}" for loss in unbroken))
    print_once("goes on with    " + " ".join(f"{loss:.4f}" for loss in losses))
    apart = max(abs(a - b) for a, b in zip(losses, unbroken, strict=True))
    if not apart < LIMIT:
        raise RuntimeError(f"the losses are {apart} apart (limit {LIMIT})")
    return f"{len(losses)} losses, at most {apart:.0e} apart"


def main() -> None:
    """Save and resume, or go on from what another run has saved."""
    parser = argparse.ArgumentParser(description="Save a model in shards, read them.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="for the shards")
    add("--stage", type=int, choices=(1, 2, 3), default=1, help="ZeRO's")
    add("--steps", type=positive_int, default=10, help="2 or more, saved half-way")
    add("--resume", action="store_true", help="go on from the folder")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 2:
        refuse("--steps must be 2 or more")
    device, _ = find_place()
    if args.resume and (problem := what_is_wrong(args.folder, args.stage)):
        refuse(problem)
    if SAMPLES % (ranks := int(os.environ["WORLD_SIZE"])):
        refuse(f"{SAMPLES} samples cannot be shared out evenly to {ranks} ranks")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--folder {args.folder}: {error.strerror}")
    tokens = to_tokens(read_text(None), None, BLOCK_SIZE)
    join_group(device)
    if args.resume:
        record = json.loads((args.folder / RECORD).read_text())
        result = go_on(args.folder, record, args.stage, tokens, device)
    else:
        result = save_and_resume(args.folder, args.stage, tokens, args.steps, device)
        if dist.get_rank() == 0:
            record = json.loads((args.folder / RECORD).read_text())
            loss, step = record["losses"][0], record["steps"][0]
            result += f"\ncheck: {consolidate(args.folder, tokens, loss, step)}"
    print_once(f"check: {result}")
    leave_group()


if __name__ == "__main__":
    main()
