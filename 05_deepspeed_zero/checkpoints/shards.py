"""An engine to save and to resume, and a folder whose checkpoint is always whole."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qwen import small_model
from ranks import gather
from text import global_batch, read_tokens

CONFIG: dict[str, Any] = {
    "train_batch_size": 12,  # of all ranks together, for 1, 2, 3 or 4 of them
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
}
BLOCK_SIZE = 64
STEPS, SAVED_AT = 10, 5
RECORD = "record.json"  # what was saved, and what an uninterrupted run goes on to


def new_engine(stage: int, universal: bool = False) -> Any:
    """Hand a new model to DeepSpeed; every rank must call this."""
    import deepspeed

    model = small_model()
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    more = {"zero_optimization": {"stage": stage}}
    config = CONFIG | more | {"checkpoint": {"load_universal": universal}}
    return deepspeed.initialize(model=model, model_parameters=weights, config=config)[0]


def local_loss(model: Any, step: int) -> torch.Tensor:
    """Compute the loss of this rank's samples of a step."""
    batch = global_batch(read_tokens(), step, CONFIG["train_batch_size"], BLOCK_SIZE)
    inputs = batch.chunk(dist.get_world_size())[dist.get_rank()].to(model.device)
    return model(input_ids=inputs, labels=inputs).loss


def train_steps(engine: Any, steps: range) -> list[float]:
    """Take some steps; return the mean loss over all ranks of each."""
    losses = []
    for step in steps:
        loss = local_loss(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(statistics.fmean(gather(loss.item())))
    return losses


@torch.no_grad()
def mean_loss(model: Any, step: int) -> float:
    """Return the mean loss over all ranks of a step without taking it."""
    return statistics.fmean(gather(local_loss(model, step).item()))


def publish(folder: Path, record: dict[str, Any]) -> dict[str, int]:
    """Replace older shards by new ones, which are all written; return their bytes.

    Until then the older ones stay; between the two renames they are in "previous".
    """
    new, current, old = (folder / n for n in ("unfinished", "half", "previous"))
    files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
    (new / RECORD).write_text(json.dumps(record | {"files": files}))
    if current.exists():
        shutil.rmtree(old, ignore_errors=True)
        current.rename(old)
    new.rename(current)
    # What DeepSpeed reads where it is told no tag.
    (folder / "latest").write_text(current.name)
    shutil.rmtree(old, ignore_errors=True)
    return files


def find_problem(folder: Path, stage: int) -> str:
    """Compare the shards with the record, before any rank opens one; '' if all is well.

    DeepSpeed reads a shard with pickle, which can run code: load only what you trust.
    """
    try:
        record = json.loads((folder / "half" / RECORD).read_text())
    except (OSError, ValueError):
        return f"no checkpoint in {folder}; save_and_resume.py writes one"
    # Stages 1 and 2 read each other's shards, and stage 3 its own. DeepSpeed 0.19 has
    # no way from one to the other that keeps the optimizer state.
    if (record["stage"] == 3) != (stage == 3):
        return (
            f"the shards in {folder} are of stage {record['stage']}, which stage "
            f"{stage} cannot read; the weights alone are in {folder / 'whole'}"
        )
    for name, expected in record["files"].items():
        path = folder / "half" / name
        found = path.stat().st_size if path.is_file() else 0
        if found != expected:
            return (
                f"{path} has {found:,} bytes and was saved with {expected:,}; nothing "
                "was loaded or changed"
            )
    return ""
