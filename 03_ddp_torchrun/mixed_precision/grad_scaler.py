"""Scale the loss in fp16, or small gradients become zero; and skip a step on all ranks.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/mixed_precision/grad_scaler.py
Expect: what a gradient loses in fp16, in fp16 with a scaled loss, and in bf16; what is
    left of it if it is clipped too early; who skips a step if rank 0 overflows.
"""

import contextlib
import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig
from ranks import check, gather, join, leave, same_on_all_ranks, say

BLOCK_SIZE, BATCH_SIZE, SCALE, MAX_NORM = 64, 8, 2**16, 1e-3
# The loss is the mean over a step of half a million tokens: each of its micro-batches
# adds a small part, and the gradient of a logit is a number such as 1e-8.
STEP_TOKENS = 2**19
FP16 = torch.float16
WAYS = {"fp16": (FP16, 1), "fp16, scaled": (FP16, SCALE), "bf16": (torch.bfloat16, 1)}
STEPS = (
    "in the right order",
    "clipped too early",
    "rank 0 overflows",
    "alone: overflows",
)


def add_scaled(model, tokens: torch.Tensor, scaler: GradScaler, dtype: torch.dtype):
    """Add the gradients of one micro-batch, times the scale."""
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    micro_batches = STEP_TOKENS / (dist.get_world_size() * BATCH_SIZE * BLOCK_SIZE)
    scaler.scale(loss / micro_batches).backward()  # DDP averages scaled gradients


def finish_step(model: nn.Module, optimizer, scaler: GradScaler) -> None:
    """Take the step, or skip it: these calls belong in this order."""
    scaler.unscale_(optimizer)  # before anything else looks at the gradients
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)  # skipped if a gradient is infinite or NaN
    scaler.update()  # halves the scale then, and doubles it after 2000 good steps


def gradient_of(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector."""
    return torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


def one_process(start: GPT, shards, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Compute the ranks' gradients here, one after the other, and their mean."""
    model, scaler = copy.deepcopy(start), GradScaler(shards[0].device.type, scale)
    for shard in shards:
        add_scaled(model, shard, scaler, dtype)
    return gradient_of(model) / scale / len(shards)


def scaled_step(start: GPT, shard: torch.Tensor, case: str):
    """Take a step; return the gradient's norm, the ranks' scales, and if all agree."""
    ddp_model, scaler = DDP(copy.deepcopy(start)), GradScaler(shard.device.type, SCALE)
    if "overflows" in case and dist.get_rank() == 0:
        ddp_model.module.head.weight.register_hook(lambda gradient: gradient * math.inf)
    with ddp_model.no_sync() if "alone" in case else contextlib.nullcontext():
        add_scaled(ddp_model, shard, scaler, FP16)
    if "early" in case:
        nn.utils.clip_grad_norm_(ddp_model.parameters(), MAX_NORM)
    finish_step(ddp_model, torch.optim.SGD(ddp_model.parameters(), lr=1.0), scaler)
    is_same = same_on_all_ranks(ddp_model.parameters())
    return gradient_of(ddp_model).norm().item(), gather(scaler.get_scale()), is_same


def main() -> None:
    """Compute a gradient in each precision, take a step in each way, and compare."""
    device, is_right = join(at_least=2), []
    torch.manual_seed(0)
    start = GPT(GPTConfig(BLOCK_SIZE, width=64)).to(device)
    tokens = torch.randint(256, (dist.get_world_size() * BATCH_SIZE, BLOCK_SIZE + 1))
    shards = tokens.to(device).chunk(dist.get_world_size())
    shard, exact = shards[dist.get_rank()], one_process(start, shards, torch.float32, 1)
    say("a gradient                   zero  off by")
    for name, (dtype, scale) in WAYS.items():
        ddp_model, scaler = DDP(copy.deepcopy(start)), GradScaler(device.type, scale)
        add_scaled(ddp_model, shard, scaler, dtype)
        ours, alone = gradient_of(ddp_model), one_process(start, shards, dtype, scale)
        differences = ((ours / scale - other).abs().max() for other in (alone, exact))
        far, off_by = (difference / exact.abs().max() for difference in differences)
        say(f"{name:24}{(ours == 0).float().mean().item():9.2%}{off_by:8.0e}")
        is_right.append(far < 1e-6 and (off_by > 0.1) == (name == "fp16"))
    say("a step in fp16, scaled      norm  scale of each rank  equal weights")
    rows = [scaled_step(start, shard, case) for case in STEPS]
    for case, (norm, scales, is_same) in zip(STEPS, rows, strict=True):
        say(f"{case:24}{norm:8.0e}  {scales!s:18}  {is_same}")
    norms, scales, equal = zip(*rows, strict=True)
    is_right.append(norms[0] > MAX_NORM / 2 and norms[1] < 2 * MAX_NORM / SCALE)
    is_right.append([scale[-1] / SCALE for scale in scales] == [1, 1, 0.5, 1])
    is_right.append(equal == (True, True, True, False))
    check(all(is_right), f"{len(WAYS)} gradients of one process, {len(rows)} steps")
    leave()


if __name__ == "__main__":
    main()
