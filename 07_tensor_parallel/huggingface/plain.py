"""Split a Hugging Face model's attention and MLPs over ranks, by a plan of seven lines.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/huggingface/plain.py
Expect: the losses of one process, with about half of its weights on each rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from qwen import small_model
from ranks import check, join, leave, read_options, say
from tiny_qwen import read_batches

PLAN = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def build_split(mesh: DeviceMesh) -> Any:
    """Build the model whole on each rank, then keep this rank's shards of it."""
    # Or AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32).train().
    model: Any = small_model()
    return parallelize_module(model.to(mesh.device_type), mesh, PLAN)


def train_on(model: Any, batches: list[Tensor]) -> list[float]:
    """Take a step on each batch; return the losses."""
    # A GPU's default, foreach, refuses plain weights beside DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for tokens in batches:  # the same on all ranks
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_on_this_rank(model: Any) -> int:
    """Count a rank's weights: its shards, and what is whole on each."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(tensor.numel() for tensor in local)


def main() -> None:
    """Train split and alone, on the same batches."""
    read_options()
    device = join(2, 2)  # the model has two heads of keys and values
    mesh = init_device_mesh(device.type, (2,))
    batches = [b.to(device) for b in read_batches(None, None, 4, 4, 64)]
    alone: Any = small_model()
    model, alone = build_split(mesh), alone.to(device)
    ours, whole = (values_on_this_rank(m) for m in (model, alone))
    say(f"a rank has {ours:,} of {whole:,} weights")
    for step, loss in enumerate(losses := train_on(model, batches), start=1):
        say(f"step {step} | loss {loss:.3f}")
    apart = torch.dist(torch.tensor(losses), torch.tensor(train_on(alone, batches)))
    check(apart < 1e-5, "the losses of one process")
    leave()


if __name__ == "__main__":
    main()
