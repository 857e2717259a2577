"""A divided model is saved in shards, and read by other ranks, stages and programs.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/checkpoints.py --folder=saved
Needs: requirements.txt. It takes a GPU for every rank if there is one.
Expect: losses that go on after a restart as if nothing had happened, and one file that
    transformers alone can read; `--resume` with another number of ranks goes on too.
Before: 05_deepspeed_zero/losses.py
Next: 05_deepspeed_zero/README.md
"""

import contextlib
import io
import json
import os
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
    print_once,
    refuse,
    stage_parser,
)

BLOCK_SIZE = 64
SAMPLES = 12  # in a step of all ranks together, for 1, 2, 3 or 4 of them
LIMIT = 1e-4  # of the loss; the same ranks and stage must give the same bits
RECORD = "record.json"  # ours: what was saved, and what an unbroken run goes on to


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


def what_is_wrong(folder: Path) -> str:
    """Compare the shards with the record, before any rank opens one; '' if all is well.

    DeepSpeed reads a shard with pickle, which runs code: only load what you trust.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return f"no checkpoint in {folder}; without --resume this script writes one"
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


def save_and_resume(
    folder: Path, stage: int, tokens: torch.Tensor, steps: int, device: torch.device
) -> str:
    """Save half-way, train on; then do the second half again from the file."""
    half = steps // 2
    engine = new_engine(stage, device)
    train_steps(engine, tokens, range(half), device)
    # Every rank must call this: each writes its own shard.
    engine.save_checkpoint(str(folder), tag="half")
    unbroken = train_steps(engine, tokens, range(half, steps), device)
    engine.destroy()
    if dist.get_rank() == 0:
        paths = sorted((folder / "half").iterdir())
        files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
        record = {
            "ranks": dist.get_world_size(),
            "stage": stage,
            "steps": [half, steps],
        }
        record |= {"losses": unbroken, "files": files}
        (folder / RECORD).write_text(json.dumps(record, indent=1))
        for name, number in files.items():
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


def main() -> None:
    """Save and resume, or go on from what another run has saved."""
    parser = stage_parser("Save a model in shards and read them again.")
    parser.add_argument("--folder", type=Path, required=True, help="for the shards")
    parser.add_argument(
        "--stage", type=int, choices=(1, 2, 3), default=1, help="ZeRO's"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the folder")
    args = parser.parse_args()
    if args.model or args.text or args.fused or args.steps < 2:
        refuse("takes --folder, --stage, --resume, and --steps of 2 or more")
    device, _ = find_place()
    if args.resume and (problem := what_is_wrong(args.folder)):
        refuse(problem)
    ranks, record = int(os.environ["WORLD_SIZE"]), {}
    if SAMPLES % ranks:
        refuse(f"{SAMPLES} samples cannot be shared out evenly to {ranks} ranks")
    if args.resume:
        record = json.loads((args.folder / RECORD).read_text())
        # Stages 1 and 2 read each other's shards. DeepSpeed 0.19 has no way from them
        # to stage 3 or back that keeps Adam's states.
        if (record["stage"] == 3) != (args.stage == 3):
            refuse(
                f"{args.folder} was saved in stage {record['stage']}, which stage "
                f"{args.stage} cannot read; the weights alone are in "
                f"{args.folder / 'whole'}"
            )
    tokens = to_tokens(read_text(None), None, BLOCK_SIZE)
    join_group(device)
    if args.resume:
        # With as many ranks as before, each finds its own shard.
        fits = ranks == record["ranks"]
        tag = "half" if fits else to_universal(args.folder)
        engine = new_engine(args.stage, device, universal=not fits)
        engine.load_checkpoint(str(args.folder), tag=tag)
        losses = train_steps(engine, tokens, range(*record["steps"]), device)
        print_once(f"saved on {record['ranks']} rank(s) in stage {record['stage']}")
        print_once(f"goes on with {ranks} rank(s) in stage {args.stage}, from '{tag}'")
        print_once(
            "without a break " + " ".join(f"{loss:.4f}" for loss in record["losses"])
        )
        print_once("goes on with    " + " ".join(f"{loss:.4f}" for loss in losses))
        pairs = zip(losses, record["losses"], strict=True)
        apart = max(abs(one - other) for one, other in pairs)
        if not apart < LIMIT:
            raise RuntimeError(f"the losses are {apart} apart (limit {LIMIT})")
        print_once(f"check: {len(losses)} losses, at most {apart:.0e} apart")
    else:
        args.folder.mkdir(parents=True, exist_ok=True)
        result = save_and_resume(args.folder, args.stage, tokens, args.steps, device)
        if dist.get_rank() == 0:
            record = json.loads((args.folder / RECORD).read_text())
            first = record["losses"][0]
            result += "\ncheck: " + consolidate(
                args.folder, tokens, first, args.steps // 2
            )
        print_once(f"check: {result}")
    leave_group()


if __name__ == "__main__":
    main()
