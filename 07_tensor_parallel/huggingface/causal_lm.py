"""Train a Hugging Face causal language model whose layers are split over ranks.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/huggingface/causal_lm.py
Expect: the losses of one process. --model=NAME_OR_PATH --text=FILE trains your own.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from transformers.utils.logging import disable_progress_bar

from parallel_causal_lm import build_on_meta, load_split, save_gathered
from ranks import check, fail, gather, join, leave, number, read_options, say
from tiny_qwen import load_alone, load_tokenizer, read_batches, write_checkpoint

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "NAME_OR_PATH", "help": "a checkpoint in safetensors"},
    "text": {"type": Path, "help": "a file or folder of your own"},
    "save": {"metavar": "FOLDER", "help": "where to save what was trained"},
    "bf16": {"action": "store_true", "help": "gather weights and compute in bf16"},
    "tensor": {"type": number(1, 64), "default": 2, "help": "ranks that split layers"},
}


def compute_gradients(model: Any, tokens: Tensor) -> float:
    """Run forward and backward on (B, T); return the loss, averaged over ranks."""
    with loss_parallel():  # no rank has a token's logits of the whole vocabulary
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    mean = torch.tensor(loss.item(), device=tokens.device)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def train_on(model: Any, batches: list[Tensor]) -> list[float]:
    """Take a step on each batch; return the losses."""
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches:
        losses.append(compute_gradients(model, tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def largest_difference(model: Any, alone: Any, mine: Tensor, tokens: Tensor) -> float:
    """Return the largest relative error of any parameter's gradient."""
    errors = []
    compute_gradients(model, mine)
    compute_gradients(alone, tokens)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        errors.append(torch.dist(p.grad.full_tensor(), q.grad) / q.grad.norm())
        p.grad = q.grad = None
    return torch.stack(errors).max().item()  # max() would drop a NaN


def main(options: argparse.Namespace) -> None:
    """Load, train and save a split model; compare with one process."""
    name, n, T = options.model or "", options.tensor, 64
    if name and not options.save:
        fail("--model needs --save=FOLDER, too")
    if os.path.isfile(options.save or ""):
        fail(f"--save={options.save}: this is a file")
    world_size = int(os.environ.get("WORLD_SIZE", str(n)))
    shape = world_size // n, n
    if world_size % n or T % n:
        fail(f"--tensor={n} does not divide the number of ranks, or {T} tokens")
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as own:
        write_checkpoint(own)  # every rank its own
        try:
            build_on_meta(name or own, n)
            tokenizer = load_tokenizer(name) if name else None
            words = read_batches(options.text, tokenizer, 4, 4 * shape[0], T)
        except (OSError, ValueError) as error:
            fail(str(error).splitlines()[0])
        device = join(at_least=2)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        mesh._flatten("both")  # or clipping takes two all-reduces, and warns
        batches = [tokens.to(device) for tokens in words]
        # Ranks that share a layer take the same samples.
        mine = [b.chunk(shape[0])[mesh["data"].get_local_rank()] for b in batches]
        model = load_split(name or own, mesh, torch.bfloat16 if options.bf16 else None)
        for step, loss in enumerate(losses := train_on(model, mine), start=1):
            say(f"step {step} | loss {loss:.3f}")
        saved = options.save or gather(f"{own}/saved")[0]
        save_gathered(model, saved)
        if tokenizer and dist.get_rank() == 0:
            tokenizer.save_pretrained(saved)
        if not name:  # each rank has memory for all of it
            due = train_on(load_alone(own, device), batches)
            apart = torch.dist(torch.tensor(losses), torch.tensor(due))
            again = load_alone(saved, device)
            error = largest_difference(model, again, mine[0], batches[0])
            claim = "losses of one process; gradients of the saved model on one process"
            near = 0.05 if options.bf16 else 1e-5
            check(apart < near and error < near, claim)
    leave()


if __name__ == "__main__":
    main(read_options(**OPTIONS))
