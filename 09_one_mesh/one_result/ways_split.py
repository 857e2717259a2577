"""Ways in which ranks split the layers: matrices, tokens between them, or stages.

Shapes: B samples, T tokens, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from model import GPT
from parallel_gpt import ParallelGPT
from ranks import gather
from training import CONFIG, Trained
from ways_data_parallel import named_weights, with_adamw

MICRO_BATCHES = 4
TOKENS, WHOLE = Shard(1), Replicate()  # how (B, T, D) lies on the ranks
SEQUENCE_PLAN: dict[str, Any] = {
    "token_embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
    "position_embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=Shard(0)),
    "blocks.*.attention_norm": SequenceParallel(),
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "blocks.*.attention_out": RowwiseParallel(output_layouts=TOKENS),
    "blocks.*.mlp_norm": SequenceParallel(),
    "blocks.*.mlp_in": ColwiseParallel(input_layouts=TOKENS),
    "blocks.*.mlp_out": RowwiseParallel(output_layouts=TOKENS),
    "final_norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=TOKENS, output_layouts=WHOLE),
}
GATHER_PLAN: dict[str, Any] = {  # once, and not by each of query, key and value
    "blocks.*.attention_norm": PrepareModuleOutput(
        output_layouts=TOKENS, desired_output_layouts=WHOLE, use_local_output=False
    )
}


def tensor(settings: Any) -> Trained:
    """Split every matrix by hand, with chapter 07's layers."""
    model = ParallelGPT(CONFIG)
    trained = with_adamw(model, model, settings)
    trained.whole = lambda: joined_shards(model)
    return trained


def joined_shards(model: nn.Module) -> dict[str, Tensor]:
    """Put the ranks' shards of each weight together; every rank calls this."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in named_weights(GPT(CONFIG)).items()}
    whole = {}
    for name, mine in named_weights(model).items():
        split = [d for d in range(mine.dim()) if mine.shape[d] < shapes[name][d]]
        whole[name] = torch.cat(gather(mine), split[0]) if split else mine
    return whole


def tensor_and_sequence(settings: Any) -> Trained:
    """Split every matrix by DTensor, and between them the tokens."""
    model = GPT(CONFIG)
    split_over(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return with_adamw(model, model, settings)


def split_over(model: Any, mesh: DeviceMesh) -> None:
    """Make all parameters of a GPT, or of a stage, DTensors on one dimension."""
    names = {name.split(".")[0] for name, _ in model.named_children()}
    for plan in (SEQUENCE_PLAN, GATHER_PLAN):
        own = {path: plan[path] for path in plan if path.split(".")[0] in names}
        parallelize_module(model, mesh, own)
    if {"head", "token_embedding"} <= names:  # of one matrix it has made two
        model.head.weight = model.token_embedding.weight


def fsdp_and_tensor(settings: Any) -> Trained:
    """Shard by FSDP2 what is split by tensor and sequence: 2 x 2 ranks."""
    names, model = ("data", "tensor"), GPT(CONFIG)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    split_over(model, mesh["tensor"])
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh["data"])
    return with_adamw(model, model, settings)


class StageOfGPT(nn.Module):
    """The layers of one of n stages; parameters keep their names."""

    def __init__(self, model: GPT, index: int, n: int) -> None:
        """Take an n-th of the blocks; and the embeddings, or the head."""
        super().__init__()
        numbers = torch.arange(len(model.blocks)).tensor_split(n)[index].tolist()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in numbers})
        self.is_first, self.is_last = index == 0, index == n - 1
        if self.is_first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
        if self.is_last:
            self.final_norm, self.head = model.final_norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T) tokens or (B, T, D) to what the next stage takes, or to logits."""
        if self.is_first:
            places = torch.arange(x.shape[1])
            x = self.token_embedding(x) + self.position_embedding(places)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.final_norm(x)) if self.is_last else x

    def tied_weight(self) -> Any:
        """Return the matrix that the other end of the pipeline has too."""
        return (self.token_embedding if self.is_first else self.head).weight


def pipeline(schedule: Any, settings: Any, divisor: int = MICRO_BATCHES) -> Trained:
    """Put half of the layers on each of two ranks, by one of PyTorch's schedules."""
    part = StageOfGPT(GPT(CONFIG), dist.get_rank(), 2)
    return in_stages(part, schedule, settings, divisor)


def on_three_axes(settings: Any) -> Trained:
    """Split stages by tensor and sequence, and shard that by FSDP2: 2 x 2 x 2 ranks."""
    names = ("data", "pipeline", "tensor")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    part = StageOfGPT(GPT(CONFIG), mesh.get_local_rank("pipeline"), 2)
    split_over(part, mesh["tensor"])
    for module in [*part.blocks.values(), part]:
        fully_shard(module, mesh=mesh["data"])
    return in_stages(part, Schedule1F1B, settings, group=mesh.get_group("pipeline"))


def in_stages(
    part: StageOfGPT,
    schedule: Any,
    settings: Any,
    divisor: int = MICRO_BATCHES,
    group: Any = None,
) -> Trained:
    """Train one of two stages; `group` holds the ranks with both."""

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        # Its part of the batch's mean, so that gradients add up to the mean's.
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / divisor

    cpu = torch.device("cpu")
    stage = PipelineStage(part, int(part.is_last), 2, cpu, group=group)
    # PyTorch would divide the gradients by itself, those of a tied matrix twice.
    step_of = schedule(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)

    def backward(inputs: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        tokens, target = ([], labels) if part.is_last else ([inputs], None)
        step_of.step(*tokens, target=target, losses=losses, return_outputs=False)
        # One matrix on two stages: its gradient is the sum of both.
        grad = part.tied_weight().grad
        dist.all_reduce(getattr(grad, "_local_tensor", grad), group=group)
        loss = torch.stack(losses).mean() * divisor if losses else torch.zeros(())
        dist.broadcast(loss, group=group, group_src=1)
        return loss

    trained = with_adamw(part, part, settings)
    trained.backward = backward
    trained.whole = lambda: from_all_ranks(named_weights(part))
    return trained


def from_all_ranks(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that any rank holds, by name; every rank calls this."""
    return {name: p for held in gather(own) for name, p in held.items()}
