"""Train a GPT that is split over the ranks: chapter 03's file, tensor-parallel.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/train.py
Expect: the loss falls from 5.5 to below 2 nats per byte in a minute on two cores. With
    --checkpoint=gpt.pt, the same command resumes a run that was killed.
"""

import argparse
import math
import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import checkpoint
import data
import ranks
from minimal import PLAN, split_over_ranks
from model import GPT, GPTConfig
from ranks import gather, number, say

COUNT = {"type": number(1, 10**9)}
SIZES = [field for field in fields(GPTConfig) if field.name != "tied"]
OPTIONS = {
    **{f.name: {"type": type(f.default), "default": f.default} for f in SIZES},
    "batch_size": {**COUNT, "default": 32, "help": "samples in a rank's micro-batch"},
    "grad_accum_steps": {**COUNT, "default": 1, "help": "micro-batches in a step"},
    "samples": {**COUNT, "default": 4096, "help": "samples in an epoch"},
    "max_epochs": {**COUNT, "default": 4, "help": "passes over the samples"},
    "max_steps": {**COUNT, "default": 10**9, "help": "stop after so many steps"},
    "lr": {"type": number(1e-9, 10.0), "default": 3e-3, "help": "its highest value"},
    "seed": {"type": number(0, 2**32), "default": 0, "help": "weights, order, dropout"},
    "workers": {"type": number(0, 256), "default": 0, "help": "loading data, per rank"},
    "amp": {"action": "store_true", "help": "forward pass in bfloat16, by autocast"},
    "compile": {"action": "store_true", "help": "torch.compile the model"},
    "text": {"type": Path, "help": "a file or folder of your own"},
    "checkpoint": {"type": Path, "help": "file to resume from and to save to"},
    "snapshot": {"type": Path, "dest": "checkpoint", "help": "the same"},
    "checkpoint_every": {**COUNT, "default": 20, "help": "steps"},
    "log_to": {"type": checkpoint.log_folder, "help": "for TensorBoard, or a table"},
    "local_rank": {"type": int, "help": argparse.SUPPRESS},  # the old launcher's
}


def lr_factor(step: int, total_steps: int) -> float:
    """Warm up over a tenth of the steps, then fall on a cosine to a tenth."""
    warmup_steps = max(1, total_steps // 10)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def add_gradients(
    forward: Any, model: GPT, micro_batches: list, global_batch_size: int, amp: bool
) -> Tensor:
    """Run a step's forward and backward passes; return this rank's sum of losses.

    `forward` is `model`, perhaps compiled. A micro-batch is (indices, inputs,
    labels), the last two (B, T). Every rank calls this with the same ones; then all
    hold DTensors of the gradient of the mean loss over `global_batch_size` samples.
    """
    device = next(model.parameters()).device
    loss_sum = torch.zeros((), device=device)
    for _, *tokens in micro_batches:
        inputs, labels = (part.to(device, non_blocking=True) for part in tokens)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = forward(inputs, labels) * len(inputs)
        (loss / global_batch_size).backward()
        loss_sum += loss.detach()
    return loss_sum


@record  # a rank that fails leaves its traceback for torchrun to show
def main(options: argparse.Namespace) -> None:
    """Refuse what cannot work, join, build, resume, train, evaluate, check, leave."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = GPTConfig(**{f.name: vars(options)[f.name] for f in SIZES})
        if config.heads % world_size:
            said = f"{world_size} ranks cannot share {config.heads} heads evenly"
            raise ValueError(f"{said}; give --heads, or torchrun --nproc-per-node")
        train_set, held_out = data.load_sets(options)
        start = checkpoint.find_start(config, options, 1, len(train_set))
        if options.compile:  # tried on one number before the ranks meet
            torch.compile(torch.exp)(torch.ones(1))
    except (OSError, ValueError, RuntimeError) as error:
        ranks.fail(str(error).splitlines()[0])
    global_batch = start.global_batch_size
    epoch_steps = len(train_set) // global_batch
    total_steps = min(options.max_epochs * epoch_steps, options.max_steps)
    device = ranks.join()
    checkpoint.agree_on_step(start.step)
    say(f"ranks: {world_size}, threads for each: {torch.get_num_threads()}")
    torch.manual_seed(options.seed)  # the same initial weights on every rank
    model = GPT(config).to(device)
    say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")
    say(f"text: {len(train_set.text):,} bytes, and {len(held_out.text):,} held out")
    # All ranks share each layer; a rank is alone in the group that shards the samples.
    mesh = init_device_mesh(
        device.type, (1, world_size), mesh_dim_names=("data", "tensor")
    )
    group = mesh["data"].get_group()
    split_over_ranks(model, mesh["tensor"], PLAN)
    forward = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = LambdaLR(optimizer, partial(lr_factor, total_steps=total_steps))
    loader = data.StepLoader(train_set, global_batch, options, device, group)
    tally = data.Tally(train_set, loader.sampler)
    run = checkpoint.TrainingState(model, optimizer, schedule, tally, options)
    torch.manual_seed(options.seed + 1)  # dropout is the same on every rank
    if options.checkpoint:
        say(run.restore(start))
        run.note_signals()
    log = checkpoint.open_log(options.log_to, run.step)
    loss_before = data.evaluate(model, held_out, group=group)
    bar = tqdm(total=total_steps, initial=run.step, disable=dist.get_rank() > 0 or None)

    while run.step < total_steps:
        epoch, first = divmod(run.step, epoch_steps)
        steps = min(epoch_steps, total_steps - epoch * epoch_steps)
        tally.start()
        for step, batches in enumerate(loader.steps(epoch, first, steps), first + 1):
            loss = add_gradients(forward, model, batches, global_batch, options.amp)
            # All ranks clip alike: each knows the norm of the whole gradient.
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.count(batches, loss)
            bar.update()
            if step % max(1, steps // 2) == 0:
                loss, rate = tally.recent()
                bar.clear()
                mfu = model.utilisation(rate / world_size, device)
                done = f"step {run.step:3} of {total_steps} | mean loss {loss:.3f}"
                say(f"epoch {epoch} | {done} | {rate:,.0f} tokens/s{mfu}")
                lr = schedule.get_last_lr()[0]
                log(run.step, loss=loss, lr=lr, tokens_per_second=rate)
            if step == steps:
                say("\n".join(f"epoch {epoch} | {line}" for line in tally.end(steps)))
            # Every so many steps; and the last time if a signal said to stop.
            if options.checkpoint and run.save_when_due():
                return ranks.leave()

    bar.close()
    loss_after = data.evaluate(model, held_out, group=group)
    after = f"{loss_after:.2f} after ({loss_after / math.log(2):.2f} bits per byte)"
    say(f"validation: {loss_before:.2f} nats per byte before, {after}")
    # Gathered: DTensors are slow where each call has another shape, as here.
    alone = GPT(config).to(device)
    alone.load_state_dict(checkpoint.gathered(model.state_dict()))
    say(alone.generate(b"    def ", 200, temperature=0.8, seed=options.seed))
    if options.checkpoint:
        run.save(loss_after)
        say(f"checkpoint: {options.checkpoint}")
    error = data.gradient_error(model, alone, held_out, group)
    error = torch.tensor(gather(error)).max()  # max() would drop a NaN
    is_right = ranks.same_on_all_ranks(alone.parameters()) and error < 1e-5
    bits = f"{world_size} rank(s) gather the same bits"
    ranks.check(is_right, f"{bits}, and a gradient within {error:.0e} of one process's")
    ranks.leave()


if __name__ == "__main__":
    ranks.start_ranks(main, 1, ranks.read_options(**OPTIONS))
