"""Mixed precision under FSDP: what is gathered, reduced and kept in which dtype.

Run: torchrun --nproc-per-node=2 06_fsdp/settings/mixed_precision.py
Expect: autocast sends as much as float32; a policy gathers half. What is kept is
    float32 in all five.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from counters import CollectiveLog
from model import GPT, GPTConfig
from ranks import check, join, leave, say

BF16, FLOAT32 = torch.bfloat16, torch.float32
# It also takes output_dtype, in which a unit returns what it has computed.
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FLOAT32)
# What is compared below. In "the same, loss outside" the logits leave bf16 first.
WAYS = {
    "float32": MixedPrecisionPolicy(),
    "autocast": MixedPrecisionPolicy(),
    "policy, bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "policy, bf16 and float32": POLICY,
    "the same, loss outside": POLICY,
}


def shard_with_policy(
    model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> Any:
    """Shard a GPT whose blocks and root gather and reduce in the policy's dtypes."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def mean_loss_by(model: Any, inputs: Tensor, labels: Tensor, way: str) -> Tensor:
    """Return the mean loss: computed by the model, or outside it in float32."""
    if way == "the same, loss outside":
        logits = model(inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with torch.autocast(inputs.device.type, BF16, enabled=way == "autocast"):
        return model(inputs, labels)


def main() -> None:
    """Compute a gradient in each way; count messages, compare with one process."""
    device = join(at_least=2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    torch.manual_seed(0)
    alone = GPT(GPTConfig()).to(device)
    tokens = torch.randint(256, (4 * world_size, 65), device=device)
    count = sum(p.numel() for p in alone.parameters())
    plain = copy.deepcopy(alone)
    plain(tokens[:, :-1], tokens[:, 1:]).backward()
    due = torch.cat([torch.as_tensor(p.grad).flatten() for p in plain.parameters()])
    gathered, errors, kept = {}, {}, set()
    for way, policy in WAYS.items():
        model = shard_with_policy(copy.deepcopy(alone), mesh, policy)
        mine = tokens.chunk(world_size)[rank]
        with CollectiveLog() as log:
            loss = mean_loss_by(model, mine[:, :-1], mine[:, 1:], way)
            loss.backward()
        say(f"{way} | the loss is {loss.dtype}: {loss.item():.6f}")
        for name, dtype in dict.fromkeys(call[:2] for call in log.calls):
            sent = [c.nbytes for c in log.calls if c[:2] == (name, dtype)]
            each = sum(sent) / count
            say(f"  {len(sent)} x {name:14} | {dtype} | {each:.2f} bytes a parameter")
        gathered[way] = sum(c.nbytes for c in log.calls if c.name == "all-gather")
        kept |= {t.dtype for p in model.parameters() for t in (p, p.grad)}
        grads = [p.grad.full_tensor().flatten() for p in model.parameters()]
        errors[way] = (torch.dist(torch.cat(grads), due) / due.norm()).item()
        say(f"  the gradient is off by {errors[way]:.0e}")
    exact, autocast, *halves = gathered.values()
    is_right = kept == {FLOAT32} and {exact, autocast} == {2 * half for half in halves}
    is_right &= errors["float32"] < 1e-5 and all(e < 0.05 for e in errors.values())
    check(is_right, "shards and gradients are float32, bf16 is gathered in half of it")
    leave()


if __name__ == "__main__":
    main()
