"""Train a GPT on a mesh of data, pipeline and tensor ranks; compare with one process.

Run: torchrun --nproc-per-node=8 09_one_mesh/train.py
Expect: what a rank of the first stage and one of the last send along each axis; loss,
    gradients and weights of one process. With --data=1, or another axis, 4 ranks do.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import gpt_on_mesh
from gpt_on_mesh import PLAN, CallsByAxis, Stage, gathered, mean_loss
from model import GPT, GPTConfig
from ranks import check, fail, gather, join, leave, number, read_options, say

B, MICRO_BATCHES, STEPS, MAX_NORM = 2, 4, 3, 0.5
CONFIG = GPTConfig(block_size=32, width=64, layers=4, tied=False)
AXES = ("data", "pipeline", "tensor")


def cut_three_times(mesh: DeviceMesh, device: torch.device) -> tuple[Stage, Any]:
    """Return this rank's part of the GPT, and what runs it; every rank calls this."""
    # Pipeline: keep the layers of one stage.
    index, stages = mesh.get_local_rank("pipeline"), mesh["pipeline"].size()
    part = Stage(CONFIG, index, stages).to(device)
    # Tensor: cut their matrices. All else, buffers too, becomes whole DTensors.
    plan = {name: PLAN[name] for name in PLAN if hasattr(part, name.split(".")[0])}
    parallelize_module(part, mesh["tensor"], plan)
    distribute_module(part, mesh["tensor"])
    # Data: shard what is left of each parameter. What a forward pass has gathered stays
    # until the end of the step, or every micro-batch would gather it again.
    for module in (*part.blocks.values(), part):
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
    stage = PipelineStage(part, index, stages, device, group=mesh.get_group("pipeline"))
    return part, Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mean_loss)


def clip_by_norm_of_all(part: Any, mesh: DeviceMesh) -> None:
    """Scale the gradients by the norm of the whole model's; every rank calls this."""
    norm: Any = get_total_norm([p.grad for p in part.parameters()])
    # A DTensor, which adds up over data and tensor; it knows of no other stage.
    squares = norm.full_tensor().square()
    dist.all_reduce(squares, group=mesh.get_group("pipeline"))
    clip_grads_with_norm_(part.parameters(), MAX_NORM, squares.sqrt())


def mesh_step(part: Any, schedule: Any, adam: Any, mesh: Any, batch: Tensor) -> Tensor:
    """Take a step with (samples, T + 1) of all ranks; return this rank's loss, or 0."""
    adam.zero_grad()
    # Ranks of one place on the data axis see the same samples.
    mine = batch.chunk(mesh["data"].size())[mesh.get_local_rank("data")]
    inputs = [mine[:, :-1]] if part.is_first else []
    labels, losses = mine[:, 1:] if part.is_last else None, []
    schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
    clip_by_norm_of_all(part, mesh)
    adam.step()
    return torch.stack(losses).mean() if losses else torch.zeros(()).double()


def main() -> None:
    """Train on the mesh and, on each rank, as one process does; compare."""
    lengths = {axis: {"type": number(1, 4), "default": 2} for axis in AXES}
    options = read_options(**lengths)
    shape = options.data, options.pipeline, options.tensor
    if 3 in shape or shape.count(1) > 1:
        fail("two axes or three have 2 or 4 ranks, the third may have 1")
    device = join(math.prod(shape), math.prod(shape))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    # The ranks of a stage as one axis: then the norm takes one message, and not two.
    stage_mesh = mesh["data", "tensor"]._flatten("data x tensor")
    torch.manual_seed(0)
    alone = GPT(CONFIG).to(device, torch.float64)
    torch.manual_seed(0)
    part, schedule = cut_three_times(mesh, device)
    adam = torch.optim.AdamW(part.parameters())  # now: of the shards
    tokens = torch.randint(256, (STEPS, shape[0] * MICRO_BATCHES * B, 33)).to(device)
    losses, noted = [], [CallsByAxis(mesh, stage_mesh) for _ in tokens]
    for batch, calls in zip(tokens, noted, strict=True):
        with calls:
            losses.append(mesh_step(part, schedule, adam, mesh, batch))
    loss = torch.stack(losses).to(device)
    dist.all_reduce(loss)  # the ranks of the last stage have one
    loss_alone = gpt_on_mesh.trained_alone(alone, tokens, MAX_NORM)
    pairs = [(loss / (shape[0] * shape[2]), loss_alone)]
    for name, p in part.named_parameters():
        right = alone.get_parameter(name)
        pairs += [(gathered(p), right), (gathered(p.grad), right.grad)]
    apart = torch.tensor([torch.dist(*pair).item() for pair in pairs]).max()  # or NaN

    calls = noted[-1].calls
    lines = gather(gpt_on_mesh.lines_of(part, calls))
    say("\n".join(lines[:: max(1, len(lines) - 1)]))  # of the first and the last rank
    is_formula = calls == gpt_on_mesh.expected_calls(part, mesh, MICRO_BATCHES, B)
    claim = f"loss, weights, gradients within {apart:.0e}; calls as by formula"
    check(apart < 1e-10 and is_formula, claim)
    leave()


if __name__ == "__main__":
    main()
