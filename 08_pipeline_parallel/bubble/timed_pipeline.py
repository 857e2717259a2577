"""The same for the stages and the schedules of torch.distributed.pipelining."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from model import GPT
from part import Part, even_cut
from timed_stages import BY_HAND, CONFIG, Clock, Span, record_by_hand, run_twice


class TimedPipelineStage(PipelineStage):
    """PyTorch's stage: the waits are in the calls that its schedules make."""

    clock: Clock

    def forward_one_chunk(self, fwd_chunk_id: int, *inputs: Any, **kwargs: Any) -> Any:
        """Be the forward pass of a micro-batch."""
        with self.clock.call("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *inputs, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward=True, last_backward=False
    ) -> None:
        """Be its backward pass, or the first half of it."""
        with self.clock.call("IB"[full_backward], self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward=False) -> None:
        """Be the second half of its backward pass."""
        with self.clock.call("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss in nats of (B, T, V) logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def record_torch(
    name: str, on_rank: list[int], micro_batches: int, unit: float
) -> list[Span]:
    """Return this rank's spans by a schedule of PyTorch; every rank calls this.

    `on_rank` are the numbers of the stages that this rank holds, one or two. Of two,
    each has half of the layers and takes half of the unit.
    """
    clock, device = Clock(), torch.device("cpu")
    count = dist.get_world_size() * len(on_rank)
    cut, model = even_cut(CONFIG.layers, count), GPT(CONFIG)
    stages = []
    for i in on_rank:
        stages.append(TimedPipelineStage(Part(model, i, cut), i, count, device))
        stages[-1].clock = clock
    schedule = get_schedule_class(name)(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=micro_batches,
        loss_fn=token_loss,
    )
    tokens = torch.zeros(micro_batches, CONFIG.block_size, dtype=torch.int64)
    inputs = [tokens] if 0 in on_rank else []
    labels = tokens if count - 1 in on_rank else None

    def step() -> None:
        schedule.step(*inputs, target=labels, losses=[], return_outputs=False)

    return run_twice(step, clock, unit / len(on_rank))


def record(name: str, parts: int, micro_batches: int, unit: float) -> list[Span]:
    """Return this rank's spans of a step; every rank calls this.

    `name` is a schedule of this chapter or of PyTorch, `parts` how many stages a
    rank holds, `unit` how many seconds a forward pass of all its layers takes.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name in BY_HAND:
        return record_by_hand(BY_HAND[name], micro_batches, unit)
    second = 2 * ranks - 1 - rank if name == "ZBVZeroBubble" else ranks + rank
    return record_torch(name, [rank, second][:parts], micro_batches, unit)
