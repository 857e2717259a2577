"""Fine-tune a Hugging Face causal language model in shards.

Run: torchrun --nproc-per-node=2 06_fsdp/huggingface/causal_lm.py
Expect: the losses of one process, before and after the model is saved. --bf16 computes
    in bf16. --model=NAME_OR_PATH --text=FILE trains your own, and compares nothing.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.utils.logging import disable_progress_bar

from ranks import check, fail, gather, join, leave, read_options, say
from shard_causal_lm import build_on_meta, load_in_shards, save_whole
from tiny_qwen import load_alone, load_tokenizer, read_batches, write_checkpoint

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "NAME_OR_PATH", "help": "a checkpoint in safetensors"},
    "text": {"type": Path, "help": "a file or folder of your own"},
    "save": {"metavar": "FOLDER", "help": "where to save what was trained"},
    "bf16": {"action": "store_true", "help": "gather weights and compute in bf16"},
}


def finetune(model: Any, batches: list[Tensor]) -> list[float]:
    """Take a step on each batch (B, T); return the losses, averaged over ranks."""
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches:
        # It shifts the labels itself, and computes the loss in float32.
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def main(options: argparse.Namespace) -> None:
    """Load, train and save in shards; compare with one process, and what it loads."""
    if options.model and not options.save:
        fail("--model needs --save=FOLDER, too")
    name = options.model or ""
    # A name on the hub has one slash at most, and does not begin with it.
    is_path = name.startswith((".", "/")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        fail(f"--model={name}: there is no such folder")
    samples, tokenizer = 6 * int(os.environ.get("WORLD_SIZE", "1")), None
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as own:
        # Every rank has its own. In a group rank 0 alone would write, and what saving
        # imports (deepspeed, say) would keep the group.
        write_checkpoint(own)
        try:
            build_on_meta(name or own)
            tokenizer = load_tokenizer(name) if name else None
            words = read_batches(options.text, tokenizer, 4, samples, 64)
        except (OSError, ValueError) as error:
            fail(str(error).splitlines()[0])
        device = join(at_least=2)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        batches = [tokens.to(device) for tokens in words]
        mine = [tokens.chunk(world_size)[rank] for tokens in batches]
        lower = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        policy = lower if options.bf16 else MixedPrecisionPolicy()
        model = load_in_shards(name or own, device, policy)
        losses = finetune(model, mine)
        for step, loss in enumerate(losses, start=1):
            say(f"step {step} | loss {loss:.3f}")
        saved = options.save or gather(f"{own}/saved")[0]
        save_whole(model, saved)
        if tokenizer and rank == 0:
            tokenizer.save_pretrained(saved)
        if not name:  # each rank has memory for all of it
            losses += finetune(model, mine[:1])
            due = finetune(load_alone(own, device), batches)
            due += finetune(load_alone(saved, device), batches[:1])
            pairs = torch.tensor([losses, due])
            apart = (pairs[0] - pairs[1]).abs().max()  # max() would drop a NaN
            claim = "the losses of one process, and of the saved model on one process"
            check(apart < (0.02 if options.bf16 else 1e-5), claim)
    leave()


if __name__ == "__main__":
    main(read_options(**OPTIONS))
