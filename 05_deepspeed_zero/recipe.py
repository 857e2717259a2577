"""Start your own project from this file: ZeRO in bf16, with what a training run needs.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/recipe.py --checkpoints=FOLDER
Expect: the loss on held-out text falls. Run again, it resumes from the last checkpoint;
    from the first one, it comes to the same loss, to the last bit.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_setup import SETUP_OPTIONS, join, latest_tag, leave, prepare, save_shards
from pretrained import MODEL_OPTIONS, model_and_tokens
from ranks import check, fail, read_options, say, start_ranks
from text import global_batch

STEPS, SAVE_EVERY, BLOCK_SIZE = 20, 10, 64
CONFIG: dict[str, Any] = {
    # Multiplied with each other and the number of ranks: the global batch size.
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    # `prepare` adds "torch_adam": True; without it DeepSpeed compiles an Adam first.
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    # Warm-up begins with two steps at a learning rate of 0; then it is logarithmic.
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": STEPS, "warmup_num_steps": 4},
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    # Logs collectives. Believe its counts and bytes, not its latencies.
    "comms_logger": {"enabled": False},
}


def train_and_save(engine: Any, tokens: torch.Tensor, folder: Path | None) -> None:
    """Train from the engine's step to the last; save to a folder if one is given."""
    for step in range(engine.global_steps, STEPS):
        batch = global_batch(tokens, step, engine.train_batch_size(), BLOCK_SIZE)
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # dropout
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()].to(engine.device)
        for inputs in rows.chunk(engine.gradient_accumulation_steps()):
            loss = engine(input_ids=inputs, labels=inputs).loss
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # changes the weights after the last of them only
        if folder and engine.global_steps % SAVE_EVERY == 0:
            save_shards(engine, folder, tag := f"step_{engine.global_steps}")
            say(f"saved {tag}")


@torch.no_grad()
def evaluate(engine: Any, tokens: torch.Tensor) -> float:
    """Return the mean loss on text; each rank reads samples of its own."""
    world_size = dist.get_world_size()
    batch = global_batch(tokens, 0, 16 * world_size, BLOCK_SIZE)
    inputs = batch.chunk(world_size)[dist.get_rank()].to(engine.device)
    training = [module for module in engine.modules() if module.training]
    engine.eval()
    loss = engine(input_ids=inputs, labels=inputs).loss
    for module in training:  # a frozen part may have been in eval() before
        module.training = True
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def main(options: argparse.Namespace) -> None:
    """Train or resume, evaluate, and resume once more from the first checkpoint."""
    # DeepSpeed's are only the calls of `engine` and `deepspeed`. Of deepspeed_setup.py
    # are `prepare`, `latest_tag`, `join`, `save_shards` and `leave`; of ranks.py `say`,
    # `fail` and `check`; `evaluate` is in this file.
    device = prepare(CONFIG)  # before DeepSpeed is imported
    folder = options.checkpoints
    # What cannot be loaded is refused in one line, before the ranks meet.
    tag = latest_tag(folder)
    if (folder / tag / "zero").is_dir():
        fail(f"{folder / tag} is a universal checkpoint, which this file cannot resume")
    # Of pretrained.py, as text.py's `global_batch`: put your model and batches here.
    model, tokens = model_and_tokens(options, CONFIG, device, needed=20 * BLOCK_SIZE)
    held_out, tokens = tokens[: len(tokens) // 20], tokens[len(tokens) // 20 :]
    join()
    import deepspeed

    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    if tag:
        engine.load_checkpoint(folder, tag)
    loss = evaluate(engine, held_out)
    say(f"from step {engine.global_steps} | held-out loss {loss:.4f}")
    train_and_save(engine, tokens, folder)
    loss = evaluate(engine, held_out)
    say(f"to step   {engine.global_steps} | held-out loss {loss:.4f}")
    if CONFIG["comms_logger"]["enabled"]:
        deepspeed.comm.log_summary()
    # A project of your own ends here. This proves that a checkpoint holds all it needs.
    engine.load_checkpoint(folder, tag=f"step_{SAVE_EVERY}")
    is_same = engine.global_steps == SAVE_EVERY
    train_and_save(engine, tokens, None)
    is_same &= evaluate(engine, held_out) == loss
    check(is_same, f"resumed at step {SAVE_EVERY}: the same loss, to the last bit")
    leave()


if __name__ == "__main__":
    folder = {"type": Path, "required": True, "metavar": "FOLDER"}
    options = read_options(checkpoints=folder, **MODEL_OPTIONS, **SETUP_OPTIONS)
    start_ranks(main, 1, options)
