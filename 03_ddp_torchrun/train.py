"""Train one small GPT with several processes, each on its own share of the text.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/train.py
Needs: this folder and requirements.txt. A GPU for every rank is used if there is one.
Expect: the loss on unseen text falls from 5.5 to below 2 nats per byte in a minute on
    two cores; then a few lines of almost-Python, and a `check:` that all ranks pass.
Before: 02_ddp_mp/train.py, the same in small, without a launcher.
Next: 03_ddp_torchrun/generate.py, which reads the snapshot in one process.
"""

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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from options import fail, parse_args, try_out
from proof import check_run, epoch_report, mean_over_ranks, validate
from snapshot import check_destination, save_snapshot


def choose_device(local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Give each rank an accelerator of its own, or every rank the CPU; say why."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu"), "no accelerator found"
    kind, found = accelerator.type, torch.accelerator.device_count()
    if dist.get_default_backend_for_device(kind) == "gloo":
        return torch.device("cpu"), f"no backend connects {kind} devices"
    if found < local_world_size:
        return torch.device("cpu"), f"{found} {kind} for {local_world_size} local ranks"
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank), f"{found} {kind}, one for each local rank"


def lr_factor(step: int, total_steps: int) -> float:
    """Rise in a line over a tenth of the steps, then fall on a cosine to a tenth."""
    warmup_steps = max(1, total_steps // 10)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train_step(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[list[torch.Tensor]],
    amp: bool = False,
) -> torch.Tensor:
    """Take one optimizer step; every rank calls this with batches of its own.

    Args:
        forward: the model as it is called: `ddp_model`, or that compiled.
        ddp_model: the model as it is synchronised.
        optimizer: holds the parameters of `ddp_model`.
        micro_batches: (indices, inputs, labels), the last two (B, T); their gradients
            add up to that of one batch as large as all of them.
        amp: compute in bfloat16 where autocast finds that safe; backward follows.

    Returns:
        This rank's own mean loss, which is not the mean over ranks.
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
            loss = loss / len(micro_batches)
            loss.backward()
        mean_loss += loss.detach()
    # Every rank now holds the same mean gradient, so all of them clip it alike.
    torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss


def main() -> None:
    """Check the input, join the group, train, save, prove."""
    # Ctrl-C ends a rank at once and in silence; no file is ever half written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = parse_args()
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
    device, reason = choose_device(local_rank, local_world_size)
    try:
        config = GPTConfig(args.block_size, args.width, args.layers, args.heads)
        train_text, held_out_text = load_text(args.text, args.block_size)
        if args.snapshot and is_rank_zero:
            check_destination(args.snapshot, config)
    except (OSError, ValueError) as error:
        fail(str(error))
    dataset = WindowDataset(train_text, args.block_size, args.samples)
    held_out = WindowDataset(held_out_text, args.block_size, samples=256)
    samples_per_step = args.batch_size * args.grad_accum_steps * world_size
    steps_per_epoch = len(dataset) // samples_per_step
    if steps_per_epoch == 0:
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
    if not launched:
        say("started without a launcher; torchrun --nproc-per-node=2 starts two ranks")
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = GPT(config).to(device)
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
    total_steps = args.max_epochs * steps_per_epoch
    total_steps = min(total_steps, args.max_steps or total_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total_steps)
    )
    # The sampler deals one shuffled deck to all ranks; the loader makes batches of it.
    sampler = DistributedSampler(
        dataset, world_size, rank, shuffle=True, seed=args.seed, drop_last=True
    )
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    loss_before = validate(model, held_out, device)
    has_bar = is_rank_zero and sys.stdout.isatty()
    bar = tqdm(total=total_steps, disable=not has_bar, unit="step")
    step = 0
    for epoch in range(math.ceil(total_steps / steps_per_epoch)):
        sampler.set_epoch(epoch)  # without this line every epoch has the same order
        batches = iter(loader)
        steps = min(steps_per_epoch, total_steps - step)
        losses = torch.zeros(steps, device=device)  # this rank's own, one a step
        seen: list[int] = []
        report_every = max(1, steps // 2)
        started = time.perf_counter()
        for i in range(steps):
            if launched and os.getppid() != launcher:
                fail("the launcher has died; ending rather than running on unseen")
            micro_batches = list(itertools.islice(batches, args.grad_accum_steps))
            for indices, _, _ in micro_batches:
                seen += indices.tolist()
            losses[i] = train_step(
                forward, ddp_model, optimizer, micro_batches, args.amp
            )
            schedule.step()
            step += 1
            bar.update()
            if (i + 1) % report_every == 0:
                loss_mean = mean_over_ranks(losses[i + 1 - report_every : i + 1].mean())
                tokens = report_every * samples_per_step * args.block_size
                rate = tokens / (time.perf_counter() - started)
                started = time.perf_counter()
                say(
                    f"epoch {epoch} | step {step:3} of {total_steps} | mean loss "
                    f"{loss_mean:.3f} | {rate:,.0f} tokens/s"
                )
        report = epoch_report(args.batch_size, args.grad_accum_steps, seen, losses)
        say("\n".join(f"epoch {epoch} | {line}" for line in report))
    bar.close()
    loss_after = validate(model, held_out, device)
    say(
        f"validation: {loss_before:.2f} nats per byte before, {loss_after:.2f} after "
        f"({loss_after / math.log(2):.2f} bits per byte)"
    )
    if is_rank_zero:
        say(model.generate(b"    def ", length=200, temperature=0.8, seed=args.seed))
    if args.snapshot and is_rank_zero:
        # The plain model's weights: DDP would put "module." before every name.
        weights = ddp_model.module.state_dict()
        save_snapshot(args.snapshot, weights, config, loss_after, args.text)
        say(f"snapshot: {args.snapshot}")
    # Two samples for each rank, the same ones again where there are too few.
    samples = held_out.batch([i % len(held_out) for i in range(2 * world_size)])
    result = check_run(ddp_model, *(part.to(device) for part in samples))
    say(f"check: {result}")
    del ddp_model, forward  # DDP holds on to the group, which has to go last
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
