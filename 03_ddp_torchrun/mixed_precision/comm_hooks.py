"""Compress what DDP sends: gradients in half precision, or two thin matrices for one.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/mixed_precision/comm_hooks.py
Expect: the kilobytes that a rank sends in a step with each hook, how far a gradient is
    from that of one process, and the loss.
"""

import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig
from ranks import check, join, leave, number, read_options, same_on_all_ranks, say
from sent_bytes import sent_by_a_rank

BATCH_SIZE = 8


def mean_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket):
    """Average a bucket over all ranks with half of the bytes, on any backend."""
    # DDP calls this when a bucket and those before it are full, and copies the result
    # into it later.
    halves = bucket.buffer().to(torch.bfloat16) / group.size()
    work: Any = dist.all_reduce(halves, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].to(torch.float32))


# Each with the part of the bytes that it may send, and how far a gradient may be off:
# fp16 keeps 11 bits of a number, and bf16 keeps 8.
HOOKS: dict[str, tuple[Any, float, float]] = {
    "no hook": (None, 1.0, 1e-5),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, 0.51, 2**-10),
    "mean_in_bf16": (mean_in_bf16, 0.51, 2**-7),
    "powerSGD_hook": (powerSGD_hook.powerSGD_hook, 0.12, 1.0),
}


def train_with(name: str, text: torch.Tensor, steps: int, device: torch.device):
    """Train; return the model, and the bytes that a rank sent in the last step."""
    torch.manual_seed(0)
    ddp_model = DDP(GPT(GPTConfig(block_size=64, width=64)).to(device))
    hook, state = HOOKS[name][0], dist.group.WORLD
    if (
        name == "powerSGD_hook"
    ):  # it keeps 4 columns of each matrix, and what it left out
        state = powerSGD_hook.PowerSGDState(state, 4, start_powerSGD_iter=10)
    if hook:
        ddp_model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        batch = text[torch.randint(len(text), (BATCH_SIZE,), generator=draw)].to(device)
        optimizer.zero_grad()
        ddp_model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()

    for _ in range(steps - 1):
        step()
    return ddp_model, sent_by_a_rank(step) or 0


def loss_and_error(ddp_model: DDP, batch: torch.Tensor) -> tuple[float, float]:
    """Return a loss, and how far the hook's gradient is from that of one process."""
    parameters = list(ddp_model.module.parameters())
    loss = ddp_model.module(batch[:, :-1], batch[:, 1:])
    alone = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    shard = batch.chunk(dist.get_world_size())[dist.get_rank()]
    ddp_model.zero_grad()
    ddp_model(shard[:, :-1], shard[:, 1:]).backward()
    ours = torch.cat([p.grad.flatten() for p in parameters])
    return loss.item(), ((ours - alone).abs().max() / alone.abs().max()).item()


def main() -> None:
    """Train with each hook, and compare what it sends and what comes of it."""
    steps = read_options(steps={"type": number(11, 500), "default": 20}).steps
    device, is_right, rows = join(at_least=2, at_most=6), [], []
    source = bytearray(Path(pydoc_data.topics.__file__).read_bytes())
    text = torch.frombuffer(source, dtype=torch.uint8).long().unfold(0, 65, 64)
    unseen, text = text[:60].to(device), text[60:]  # 2 to 6 ranks share 60 evenly
    say(f"{steps} steps each     kB sent  gradient off by   loss  against no hook")
    for name, (_, most_sent, most_off) in HOOKS.items():
        ddp_model, sent = train_with(name, text, steps, device)
        loss, off_by = loss_and_error(ddp_model, unseen)
        rows.append((sent, loss))
        change = loss - rows[0][1]
        say(f"{name:18}{sent / 1e3:9.1f}{off_by:17.0e}{loss:7.3f}{change:+17.3f}")
        is_right += [sent <= most_sent * rows[0][0], off_by < most_off]
        is_right += [same_on_all_ranks(ddp_model.parameters()), abs(change) < 0.5]
    check(all(is_right), f"{len(rows)} trainings with their bytes and their gradients")
    leave()


if __name__ == "__main__":
    main()
