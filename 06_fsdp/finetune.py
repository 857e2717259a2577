"""Fine-tune a file of weights in shards: what a real FSDP2 job puts together.

Run: torchrun --nproc-per-node=2 06_fsdp/finetune.py, after minimal.py
Expect: resumed from its sharded checkpoint, the losses of the run that went on.
"""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig
from ranks import check, fail, gather, join, leave, say
from stateful import Training

FILE, STEPS = Path("model.pt"), 8


def load_in_shards(device: torch.device) -> Any:
    """Build a GPT in shards, and fill them from rank 0's file of whole weights."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):
        model: Any = GPT(GPTConfig())
    # Activation checkpointing writes no file: forward keeps no activations inside a
    # block, and backward computes them again.
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper.checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    weights = torch.load(FILE, mmap=True) if dist.get_rank() == 0 else {}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    return model


def start(device: torch.device) -> Training:
    """Load, and build the optimizer and the schedule, which also counts the steps."""
    model = load_in_shards(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, optimizer, schedule=LinearLR(optimizer, 0.1, total_iters=4))


def finetune_step(run: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    """Take a step on this rank's samples; return its loss, in float32."""
    logits = run.model(inputs).float()  # the policy computed them in bf16
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.others["schedule"].step()
    return loss.detach()


def finetune(run: Training, batches: list[Any], folder: str) -> list[float]:
    """Take the steps that are left, save at half of them; return the mean losses."""
    losses = []
    for step in range(run.others["schedule"].last_epoch, len(batches)):
        loss = finetune_step(run, *batches[step])
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
        say(f"step {step + 1} | loss {losses[-1]:.3f}")
        if step + 1 == len(batches) // 2:
            dcp.save({"run": run}, checkpoint_id=folder)
    return losses


def main() -> None:
    """Train, and again from the checkpoint; compare with the file and with itself."""
    if not is_zipfile(FILE):  # as `torch.save` writes it, to the end
        fail(f"there is no whole {FILE}: run 06_fsdp/minimal.py first")
    device = join()
    samples = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    sampler = DistributedSampler(samples, seed=1, drop_last=True)
    loader = DataLoader(samples, batch_size=32, sampler=sampler, drop_last=True)
    batches = [(x.to(device), y.to(device)) for _, x, y in islice(loader, STEPS)]
    run, file = start(device), torch.load(FILE, mmap=True)
    shards = run.model.state_dict().items()  # gathered one by one, on every rank
    equal = [torch.equal(p.full_tensor().cpu(), file[name]) for name, p in shards]
    with tempfile.TemporaryDirectory() as own:
        folder = gather(own)[0]  # rank 0's: one that all can reach
        losses = finetune(run, batches, folder)
        say("resuming from the checkpoint")
        resumed = start(device)
        dcp.load({"run": resumed}, checkpoint_id=folder)
        is_same = finetune(resumed, batches, folder) == losses[len(batches) // 2 :]
    claim = f"{len(equal)} weights of the file; resumed, the same losses"
    check(is_same and all(equal), claim)
    leave()


if __name__ == "__main__":
    main()
