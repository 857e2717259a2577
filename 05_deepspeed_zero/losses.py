"""All stages of ZeRO and plain DDP draw one loss curve: only memory and traffic change.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/losses.py
Needs: requirements.txt. It takes a GPU for every rank if there is one.
Expect: ten rows, five ways of training with one and with two micro-batches a step, and
    the same losses in all of them; a `check:` of the largest difference.
Before: 05_deepspeed_zero/will_it_fit.py
Next: 05_deepspeed_zero/draw_losses.py
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import global_batch, own_rows, read_text, to_tokens
from proof import mean_over_ranks
from qwen import small_model
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
SAMPLES = 8  # of one rank in one step, in as many micro-batches as the row says
LIMIT = 1e-5  # of the loss, which is 5.4 at first
SETTINGS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}


def micro_batches(
    tokens: torch.Tensor, step: int, grad_accum_steps: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return this rank's samples of a step, in equal parts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = global_batch(tokens, step, SAMPLES * world_size, BLOCK_SIZE)
    return own_rows(batch, rank, world_size).to(device).chunk(grad_accum_steps)


def train_with_ddp(
    tokens: torch.Tensor, steps: int, grad_accum_steps: int, device: torch.device
) -> list[float]:
    """Train as chapter 03 does; return the mean loss over all ranks of each step."""
    model: Any = small_model()
    model = DistributedDataParallel(model.to(device))
    adam = torch.optim.AdamW(model.parameters(), **SETTINGS)
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        parts = micro_batches(tokens, step, grad_accum_steps, device)
        for number, inputs in enumerate(parts, start=1):
            # The ranks exchange gradients during the last backward only.
            is_last = number == len(parts)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(input_ids=inputs, labels=inputs).loss / len(parts)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        adam.step()
        adam.zero_grad()
        losses.append(mean_over_ranks(total))
    return losses


def train_with_zero(
    stage: int,
    tokens: torch.Tensor,
    steps: int,
    grad_accum_steps: int,
    device: torch.device,
) -> list[float]:
    """Train with a stage of ZeRO; return the mean loss over all ranks of each step."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // grad_accum_steps,
        "gradient_accumulation_steps": grad_accum_steps,
        "optimizer": {"type": "Adam", "params": {**SETTINGS, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    choose_parts(config, device, fused=False)
    import deepspeed

    model = small_model()
    weights: Any = model.parameters()  # DeepSpeed's annotation is too narrow
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=weights, config=config
    )
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for inputs in micro_batches(tokens, step, grad_accum_steps, device):
            loss = engine(input_ids=inputs, labels=inputs).loss
            # The engine divides the loss by the number of micro-batches by itself, and
            # step() does nothing until it has seen that many.
            engine.backward(loss)
            engine.step()
            total += loss.detach() / grad_accum_steps
        losses.append(mean_over_ranks(total))
    engine.destroy()
    return losses


def main() -> None:
    """Train in all ways, in one process group, and compare with the first."""
    parser = argparse.ArgumentParser(description="Compare DDP and all stages of ZeRO.")
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("--steps", type=positive_int, default=10, help="optimizer steps")
    add("--text", type=Path, help="a text file of your own")
    add("--save", type=Path, help="write the losses to this JSON file")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device, reason = find_place()
    try:
        tokens = to_tokens(read_text(args.text), None, BLOCK_SIZE)
    except ValueError as error:
        refuse(str(error))
    if args.save and not args.save.parent.is_dir():
        refuse(f"--save {args.save}: there is no folder {args.save.parent}")
    join_group(device)
    print_once(f"device: {device.type} with {dist.get_backend()} ({reason})")
    print_once(f"{dist.get_world_size()} rank(s), {SAMPLES} samples each in every step")
    print_once(
        "                               first   middle     last   apart from DDP"
    )
    curves: dict[str, list[float]] = {}
    largest = 0.0
    for grad_accum_steps in (1, 2):
        for stage in (None, 0, 1, 2, 3):
            if stage is None:
                name = "DDP"
                curve = train_with_ddp(tokens, args.steps, grad_accum_steps, device)
            else:
                name = f"ZeRO stage {stage}"
                curve = train_with_zero(
                    stage, tokens, args.steps, grad_accum_steps, device
                )
            name += f", {grad_accum_steps} micro-batch" + "es" * (grad_accum_steps > 1)
            curves[name] = curve
            # All are held against the first: DDP with one micro-batch.
            pairs = zip(curve, curves["DDP, 1 micro-batch"], strict=True)
            apart = max(abs(one - other) for one, other in pairs)
            largest = max(largest, apart)
            shown = [curve[0], curve[len(curve) // 2], curve[-1]]
            print_once(
                f"{name:29}" + "".join(f"{x:9.5f}" for x in shown) + f"   {apart:.0e}"
            )
    result = (
        f"{len(curves)} curves of {args.steps} steps, at most {largest:.0e} apart "
        f"(limit {LIMIT:.0e})"
    )
    if not largest < LIMIT:
        raise RuntimeError(f"the curves do not lie on top of each other: {result}")
    if args.save and dist.get_rank() == 0:
        record = {"ranks": dist.get_world_size(), "losses": curves}
        args.save.write_text(json.dumps(record, indent=1) + "\n")
    print_once(f"check: {result}")
    leave_group()


if __name__ == "__main__":
    main()
