"""The GPT on a mesh: its stages, the plan for its matrices, and what a step sends.

Shapes: B samples of a micro-batch, T tokens, D width, V vocabulary.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig

EMBEDDING = RowwiseParallel(input_layouts=Replicate())  # chapter 07's plan
NORM = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
PLAN = {
    "token_embedding": EMBEDDING,
    "position_embedding": EMBEDDING,
    "blocks.*.*_norm": NORM,
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.mlp_in": ColwiseParallel(),
    "blocks.*.*_out": RowwiseParallel(),
    "final_norm": NORM,
    "head": ColwiseParallel(output_layouts=Replicate()),
}
# What PyTorch's dispatcher calls the collectives of DTensor, FSDP and pipelining.
KINDS = {
    "all_reduce": "all-reduce",
    "allreduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "recv_": "receive",
}
NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}
# FSDP warns of logits that are a view; nobody changes them in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
Calls = dict[tuple[str, str], tuple[int, int]]


class Stage(GPT):
    """Consecutive layers of a GPT, in float64; the parameters keep their names."""

    def __init__(self, config: GPTConfig, index: int, stages: int) -> None:
        """Draw the whole model, as one process does, and keep stage `index` of it."""
        super().__init__(config)
        self.is_first, self.is_last = index == 0, index == stages - 1
        own = torch.arange(config.layers).tensor_split(stages)[index].tolist()
        self.blocks = nn.ModuleDict({str(i): self.blocks[i] for i in own})
        if not self.is_first:
            del self.token_embedding, self.position_embedding
        if not self.is_last:
            del self.final_norm, self.head
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Map tokens (B, T) or activations (B, T, D) to activations or (B, T, V)."""
        if self.is_first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(places)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.final_norm(x)) if self.is_last else x


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss in nats of (B, T, V) logits and (B, T) labels."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained_alone(model: GPT, tokens: Tensor, max_norm: float) -> Tensor:
    """Take a step with each batch as one process does; return the losses.

    `tokens` are (steps, samples, T + 1). The last step's gradients stay.
    """
    adam, losses = torch.optim.AdamW(model.parameters()), []
    for batch in tokens:
        adam.zero_grad()
        loss = mean_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adam.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def gathered(cut: Any) -> Tensor:
    """Return the whole of a DTensor on (data, tensor), on all ranks of the stage.

    The cut that FSDP made last is undone first.
    """
    return cut.redistribute(placements=[Replicate(), cut.placements[1]]).full_tensor()


class CallsByAxis(TorchDispatchMode):
    """While it is active, notes the collectives that this rank takes part in.

    `calls[axis, kind]` is how many they were, and the bytes of their whole messages.
    The axis of a group that belongs to none is "other"; a rank alone sends nothing.
    """

    def __init__(self, *meshes: DeviceMesh) -> None:
        """Learn the names of the groups along the axes."""
        super().__init__()
        self.calls: Calls = {}
        self.axis_of: dict[str, str] = {}
        self.alone: set[str] = set()
        for mesh in meshes:
            for axis in mesh.mesh_dim_names or ():
                group = mesh.get_group(axis)
                self.axis_of[str(group.group_name)] = axis
                self.alone |= {axis} if group.size() == 1 else set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let an operator run, and note it if it is a collective."""
        if DTensor in types:  # comes again, as the operators on its shards
            return NotImplemented
        result, name = func(*args, **(kwargs or {})), str(func.overloadpacket.__name__)
        if "c10d" in func.namespace and name not in NO_COLLECTIVES:
            # Of DTensor a group's name, of FSDP and pipelining the group itself.
            boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
            found = [str(ProcessGroup.unbox(one).group_name) for one in boxed[:1]]
            found += [a for a in args if isinstance(a, str)]
            axis = next((self.axis_of[f] for f in found if f in self.axis_of), "other")
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            key = axis, KINDS.get(name, name)
            if axis not in self.alone:
                number, nbytes = self.calls.get(key, (0, 0))
                whole = max(tensor.nbytes for tensor in tensors)
                self.calls[key] = number + 1, nbytes + whole
        return result


def expected_calls(part: Any, mesh: DeviceMesh, micro_batches: int, B: int) -> Calls:
    """Return what `CallsByAxis` should note in a step of train.py on this rank.

    `part` is its stage, in float64; `mesh` has the axes data, pipeline and tensor.
    """
    config, n = part.config, micro_batches
    T, D, V = config.block_size, config.width, config.vocabulary
    L, first, last = len(part.blocks), part.is_first, part.is_last
    activation = 8 * B * T * D
    # Matrices are cut by the tensor axis, norms are whole.
    matrices = 12 * L * D * D + first * (V + T) * D + last * V * D
    weights = 8 * (matrices // mesh["tensor"].size() + (4 * L + 2 * last) * D)
    # One message for each block, and one for what else the stage has.
    by_fsdp = L + (first or last), weights
    # The norms of 10 parameters of a block, of 2 embeddings, of final norm and head.
    norms = 8 * (10 * L + 2 * first + 3 * last)
    messages = n * (2 - first - last)
    reduced = n * (4 * L + first + last)
    calls = {
        ("data", "all-gather"): by_fsdp,
        ("data", "reduce-scatter"): by_fsdp,
        ("pipeline", "send"): (messages, messages * activation),
        ("pipeline", "receive"): (messages, messages * activation),
        # Of activations, and of the positions' embeddings, (T, D).
        ("tensor", "all-reduce"): (
            reduced + n * first,
            reduced * activation + n * first * 8 * T * D,
        ),
        ("tensor", "all-gather"): (n * last, n * last * 8 * B * T * V),
        ("data x tensor", "all-reduce"): (1, norms),
        ("pipeline", "all-reduce"): (1, 8),
    }
    data, pipeline, tensor = mesh.shape
    ranks = {"data": data, "pipeline": pipeline, "tensor": tensor}
    ranks["data x tensor"] = data * tensor
    return {k: made for k, made in calls.items() if made[0] > 0 and ranks[k[0]] > 1}


def lines_of(part: Any, calls: Calls) -> str:
    """Return what a rank holds and sends, in a line for each axis and collective."""
    own = sum(p.to_local().numel() for p in part.parameters())
    lines = [
        f"rank {dist.get_rank()} | blocks {' '.join(part.blocks)} | {own:,} numbers"
    ]
    weight = part.blocks[min(part.blocks)].query.weight
    here = f"{tuple(weight.to_local().shape)} of {tuple(weight.shape)}"
    lines += [f"    query.weight {here}: {weight.placements}"]
    for (axis, kind), (number, nbytes) in sorted(calls.items()):
        lines.append(f"    {axis:13} | {number:2} {kind:14} | {nbytes:9,} bytes")
    return "\n".join(lines)
