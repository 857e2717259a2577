"""Train the GPT of train.py so that a crash costs a few steps and changes nothing.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/train_elastic.py --snapshot=gpt.pt
Needs: this folder and requirements.txt. A GPU for every rank is used if there is one.
Expect: what train.py prints. Kill it and type the command again: it goes on from the
    last snapshot and ends with the weights of a run that was never interrupted.
Before: 03_ddp_torchrun/comm_hooks.py
Next: 03_ddp_torchrun/crashes.py, which kills this script again and again.
"""

import argparse
import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported late, by an optimizer or DDP, this would hold the group beyond its end, and
# the process might abort when it ends: chapter 03, "What people get wrong".
import torch.distributed.nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from data import WindowDataset, load_text
from elastic_batches import ElasticBatches, samples_report
from model import GPT, GPTConfig
from options import fail, parse_args, positive_int, try_out
from proof import check_run, mean_over_ranks, validate
from resume import (
    Progress,
    agree_on_step,
    check_restarts,
    find_snapshot,
    lasting_settings,
    settle_buckets,
)
from train import choose_device, lr_factor


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what train.py does not have."""
    add = parser.add_argument
    add("--snapshot-every", type=positive_int, default=20, help="steps between two")
    add("--dropout", type=float, default=0.0, help="share of values set to 0")
    add("--fail-at", type=positive_int, help="the last rank fails once, at this step")


def elastic_step(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[list[torch.Tensor]],
    samples_per_step: int,
    amp: bool = False,
) -> torch.Tensor:
    """Take one optimizer step; every rank calls this with batches of its own.

    Args:
        forward: the model as it is called: `ddp_model`, or that compiled.
        ddp_model: the model as it is synchronised.
        optimizer: holds the parameters of `ddp_model`.
        micro_batches: (indices, inputs, labels), the last two (B, T); their gradients
            add up to that of one batch as large as all of them.
        samples_per_step: of all ranks together, who need not have equally many.
        amp: compute in bfloat16 where autocast finds that safe; backward follows.

    Returns:
        This rank's part of the loss; the mean over ranks is the loss of the step.
    """
    device = next(ddp_model.parameters()).device
    mean_loss = torch.zeros((), device=device)
    for number, (_, inputs, labels) in enumerate(micro_batches, start=1):
        # Ranks exchange gradients during the last backward only. no_sync must already
        # be in force in the forward pass, which is where DDP looks at it.
        is_last = number == len(micro_batches)
        with contextlib.nullcontext() if is_last else ddp_model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = forward(inputs.to(device), labels.to(device))
            # DDP divides the sum over ranks by their number. With this weight the
            # result is the mean over samples, however they were dealt.
            loss = loss * (len(inputs) * dist.get_world_size() / samples_per_step)
            loss.backward()
        mean_loss += loss.detach()
    # Every rank now holds the same mean gradient, so all of them clip it alike.
    torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss


@record  # a rank that fails leaves its traceback for torchrun to show
def main() -> None:
    """Check the input, find the snapshot, join the group, train, save, prove."""
    # Ctrl-C ends a rank at once and in silence; no file is ever half written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = parse_args(add_more=add_options)
    # The launcher tells each process who it is. Without one, it is a world of one rank.
    launched, launcher = "RANK" in os.environ, os.getppid()
    if launched and "MASTER_ADDR" not in os.environ:
        fail(
            "RANK is set but MASTER_ADDR is not; start this with torchrun, or unset it"
        )
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    is_rank_zero = rank == 0
    first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    device, reason = choose_device(local_rank, local_world_size)
    try:
        check_restarts()
        config = GPTConfig(
            args.block_size, args.width, args.layers, args.heads, dropout=args.dropout
        )
        train_text, held_out_text = load_text(args.text, args.block_size)
        settings = lasting_settings(args)
        found = find_snapshot(args.snapshot, config, settings)
    except (OSError, ValueError) as error:
        fail(str(error))
    dataset = WindowDataset(train_text, args.block_size, args.samples)
    held_out = WindowDataset(held_out_text, args.block_size, samples=256)
    samples_per_step = args.batch_size * args.grad_accum_steps * world_size
    if found:  # the batch stays what it was, whoever is there to share it
        samples_per_step = found.training["samples_per_step"]
    steps_per_epoch = len(dataset) // samples_per_step
    if steps_per_epoch == 0 or samples_per_step < world_size:
        fail(
            f"a step of {world_size} rank(s) takes {samples_per_step} samples, an "
            f"epoch has {len(dataset)}: use fewer ranks or a smaller --batch-size"
        )
    if args.amp or args.compile:
        try_out(args, device)
    backend = dist.get_default_backend_for_device(device)
    if launched:
        # A rank that waits longer than this for the others ends with an error.
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def say(text: str) -> None:
        """Print from rank zero only, above the progress bar if there is one."""
        if is_rank_zero:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    say(f"device: {device.type} with {backend} ({reason})")
    say(f"ranks: {world_size}, threads for each: {torch.get_num_threads()}")
    step = found.training["step"] if found else 0
    if disagreement := agree_on_step(step, device):
        fail(disagreement)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = (found.model if found else GPT(config)).to(device)
    say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")
    say(f"text: {len(train_text):,} bytes, and {len(held_out_text):,} held out")
    # One bucket of up to 25 MB: so small a model is sent as one message, when backward
    # is done, and its gradients live in that bucket instead of being copied there.
    ddp_model = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [local_rank],
        bucket_cap_mb=25,
        gradient_as_bucket_view=True,
    )
    forward = torch.compile(ddp_model) if args.compile else ddp_model
    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    settle_buckets(ddp_model, *(part.to(device) for part in held_out.batch([0])))
    total_steps = args.max_epochs * steps_per_epoch
    total_steps = min(total_steps, args.max_steps or total_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps)
    )
    sampler = ElasticBatches(len(dataset), samples_per_step, args.batch_size, args.seed)
    # Every loader draws a random number when it starts. A generator of its own keeps it
    # from those of dropout, which shall not depend on how often the run was started.
    loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
    seen = torch.zeros(len(dataset), dtype=torch.int32, device=device)
    progress = Progress(
        model, optimizer, schedule, seen, samples_per_step, settings, args.text
    )
    torch.manual_seed(args.seed + rank)  # no two ranks drop out the same values
    if found:
        say(progress.restore(found, args.snapshot))
    has_bar = is_rank_zero and sys.stdout.isatty()
    bar = tqdm(total=total_steps, initial=step, disable=not has_bar, unit="step")
    for epoch in range(
        step // steps_per_epoch, math.ceil(total_steps / steps_per_epoch)
    ):
        sampler.set_position(epoch, step % steps_per_epoch)
        batches = iter(loader)
        epoch_end = min((epoch + 1) * steps_per_epoch, total_steps)
        steps = epoch_end - epoch * steps_per_epoch
        losses: list[torch.Tensor] = []  # this rank's parts, since the last report
        started = time.perf_counter()
        while step < epoch_end:
            if launched and os.getppid() != launcher:
                fail("the launcher has died; ending rather than running on unseen")
            micro_batches = list(itertools.islice(batches, sampler.batches_per_step))
            for indices, _, _ in micro_batches:
                seen[indices] += 1
            if step == args.fail_at and first_try and rank == world_size - 1:
                raise RuntimeError(f"rank {rank} fails at step {step}, as it was told")
            loss = elastic_step(
                forward, ddp_model, optimizer, micro_batches, samples_per_step, args.amp
            )
            losses.append(loss)
            schedule.step()
            progress.step = step = step + 1
            bar.update()
            if step % max(1, steps // 2) == 0:
                loss_mean = mean_over_ranks(torch.stack(losses).mean())
                tokens = len(losses) * samples_per_step * args.block_size
                rate = tokens / (time.perf_counter() - started)
                losses, started = [], time.perf_counter()
                say(
                    f"epoch {epoch} | step {step:3} of {total_steps} | mean loss "
                    f"{loss_mean:.3f} | {rate:,.0f} tokens/s"
                )
            if step == epoch_end:
                say(f"epoch {epoch} | {samples_report(seen, steps, samples_per_step)}")
                seen.zero_()
            if args.snapshot and step % args.snapshot_every == 0:
                progress.save(args.snapshot)
    bar.close()
    ddp_model.eval()  # dropout is for training alone
    loss_after = validate(model, held_out, device)
    bits = loss_after / math.log(2)
    say(f"validation: {loss_after:.2f} nats per byte ({bits:.2f} bits per byte)")
    if args.snapshot:
        progress.save(args.snapshot, loss_after)
        say(f"snapshot: {args.snapshot}")
    # Two samples for each rank, the same ones again where there are too few.
    samples = held_out.batch([i % len(held_out) for i in range(2 * world_size)])
    result = check_run(ddp_model, *(part.to(device) for part in samples))
    say(f"check: {result}")
    del ddp_model, forward  # DDP holds on to the group, which has to go last
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
