"""Train a GPT whose layers are on several ranks: chapter 03's train.py in a pipeline.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/train.py
Expect: the losses of one process with the same global batch size. --schedule chooses
    the order; --checkpoint=gpt.pt resumes a run, also one of chapter 03 without --amp.
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
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import checkpoint
import data
import ranks
import staged_gpt
from ranks import gather, number, say
from staged_gpt import GPT, GPTConfig, StagedGPT

COUNT = {"type": number(1, 10**9)}
SIZES = [field for field in fields(GPTConfig) if field.name != "tied"]
OPTIONS = {
    **{f.name: {"type": type(f.default), "default": f.default} for f in SIZES},
    "batch_size": {**COUNT, "default": 16, "help": "samples in a micro-batch"},
    "grad_accum_steps": {**COUNT, "default": 4, "help": "micro-batches in a step"},
    "schedule": {"choices": staged_gpt.PLACES, "default": "1F1B"},
    "samples": {**COUNT, "default": 4096, "help": "samples in an epoch"},
    "max_epochs": {**COUNT, "default": 4, "help": "passes over the samples"},
    "max_steps": {**COUNT, "default": 10**9, "help": "stop after so many steps"},
    "lr": {"type": number(1e-9, 10.0), "default": 3e-3, "help": "its highest value"},
    "seed": {"type": number(0, 2**32), "default": 0, "help": "weights, order, dropout"},
    "workers": {"type": number(0, 256), "default": 0, "help": "loading data, per rank"},
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


def add_gradients(pipeline: Any, model: StagedGPT, micro_batches: list) -> Tensor:
    """Run a step's forward and backward passes; return the sum of losses.

    A micro-batch is (indices, inputs, labels), the last two (B, T), all of one size.
    Every rank calls this with the same ones, once a step; then each holds its layers'
    gradient of the mean loss.
    """
    device = next(model.parameters()).device
    _, *tokens = zip(*micro_batches, strict=True)
    inputs, labels = (torch.cat(part).to(device) for part in tokens)
    losses: list[Tensor] = []  # on the rank with the last stage, one a micro-batch
    # It cuts the batch into micro-batches itself.
    pipeline.step(
        *([inputs] if model.is_first else []),
        target=labels if model.is_last else None,
        losses=losses,
        return_outputs=False,
    )
    staged_gpt.add_tied_gradients(model, model.ends)
    loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
    dist.broadcast(loss, model.owners[-1])
    return loss * len(inputs)


@record  # a rank that fails leaves its traceback for torchrun to show
def main(options: argparse.Namespace) -> None:
    """Refuse what cannot work, join, build, resume, train, evaluate, check, leave."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = GPTConfig(**{f.name: vars(options)[f.name] for f in SIZES})
        train_set, held_out = data.load_sets(options)
        options.amp = False  # a checkpoint says so
        start = checkpoint.find_start(config, options, 1, len(train_set))
        staged_gpt.check_cut(options, start.global_batch_size, world_size)
    except (OSError, ValueError, RuntimeError) as error:
        ranks.fail(str(error).splitlines()[0])
    global_batch = start.global_batch_size
    epoch_steps = len(train_set) // global_batch
    total_steps = min(options.max_epochs * epoch_steps, options.max_steps)
    device = ranks.join()
    checkpoint.agree_on_step(start.step)
    say(f"ranks: {world_size}, threads for each: {torch.get_num_threads()}")
    torch.manual_seed(options.seed)  # the same initial weights on every rank
    whole = GPT(config)
    model = StagedGPT(whole, options.schedule).to(device)
    say(f"model: {sum(p.numel() for p in whole.parameters()):,} parameters")
    say(f"text: {len(train_set.text):,} bytes, and {len(held_out.text):,} held out")
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = LambdaLR(optimizer, partial(lr_factor, total_steps=total_steps))
    staged_gpt.save_whole_state(model, optimizer)
    own: Any = dist.new_subgroups(group_size=1)[0]  # stages see the same samples
    loader = data.StepLoader(train_set, global_batch, options, device, own)
    stages = [
        PipelineStage(part, int(i), len(model.owners), device)
        for i, part in model.parts.items()
    ]
    n = loader.sampler.micro_batches
    pipeline = get_schedule_class(options.schedule)(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=n,
        loss_fn=lambda *both: staged_gpt.token_loss(*both) / n,
        # Each of a rank's stages would divide its gradients, a part of a tied
        # matrix's twice.
        scale_grads=False,
    )
    tally = data.Tally(train_set, loader.sampler)
    run = checkpoint.TrainingState(model, optimizer, schedule, tally, options)
    torch.manual_seed(options.seed + dist.get_rank())  # dropout differs between ranks
    if options.checkpoint:
        say(run.restore(start))
        run.note_signals()
    log = checkpoint.open_log(options.log_to, run.step)
    loss_before = data.evaluate(model, held_out, group=own)
    bar = tqdm(total=total_steps, initial=run.step, disable=dist.get_rank() > 0 or None)

    while run.step < total_steps:
        epoch, first = divmod(run.step, epoch_steps)
        steps = min(epoch_steps, total_steps - epoch * epoch_steps)
        tally.start()
        for step, batches in enumerate(loader.steps(epoch, first, steps), first + 1):
            loss = add_gradients(pipeline, model, batches)
            # All ranks clip alike: each knows the norm of the whole gradient.
            staged_gpt.clip_grad_norm(model, max_norm=1.0)
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
    loss_after = data.evaluate(model, held_out, group=own)
    after = f"{loss_after:.2f} after ({loss_after / math.log(2):.2f} bits per byte)"
    say(f"validation: {loss_before:.2f} nats per byte before, {after}")
    say(model.generate(b"    def ", 200, temperature=0.8, seed=options.seed))
    if options.checkpoint:
        run.save(loss_after)
        say(f"checkpoint: {options.checkpoint}")
    step = partial(add_gradients, pipeline, model)
    error = staged_gpt.largest_error(model, step, held_out, global_batch)
    error = torch.tensor(gather(error)).max()  # max() would drop a NaN
    held = f"{len(stages)} stage(s) on each of {world_size} rank(s)"
    ranks.check(error < 1e-5, f"{held}, a gradient within {error:.0e} of one process's")
    ranks.leave()


if __name__ == "__main__":
    ranks.start_ranks(main, 1, ranks.read_options(**OPTIONS))
