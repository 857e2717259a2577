"""Train the GPT on several ranks, one stage each: all that PyTorch's pipeline takes.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/minimal.py
Expect: the losses of chapter 03's minimal.py, and one of held-out text.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig

MAX_NORM = float("inf")  # 1.0 is usual; chapter 03's minimal.py does not clip


class Part(nn.Module):
    """The layers of one stage, under their names in the whole model."""

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        """Keep some blocks; on the first stage the embeddings, on the last the head."""
        super().__init__()
        self.token_embedding = model.token_embedding if index == 0 else None
        self.position_embedding = model.position_embedding if index == 0 else None
        own = torch.arange(len(model.blocks)).tensor_split(stages)[index].tolist()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in own})
        self.final_norm = model.final_norm if index == stages - 1 else nn.Identity()
        self.head = model.head if index == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T) tokens or (B, T, D) activations to what the next stage takes."""
        if self.token_embedding and self.position_embedding:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(places)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.final_norm(x))


def losses_of(run: Any, stage: Any, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Call a schedule's step or eval; on the last stage, return all losses."""
    tokens = [inputs.to(stage.device)] if stage.is_first else []
    target = labels.to(stage.device) if stage.is_last else None
    run(*tokens, target=target, losses=(losses := []), return_outputs=False)
    return losses


def main() -> None:
    """Train for one epoch, the stage of this rank's number on one device."""
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)  # the same weights on all ranks
    model = GPT(GPTConfig())
    if stages > len(model.blocks):
        raise SystemExit(f"{len(model.blocks)} block(s) cannot make {stages} stages")
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    part, last = Part(model, rank, stages).to(device), stages - 1
    torch.manual_seed(rank)  # dropout: other masks on each stage
    ends = dist.new_group(sorted({0, last}))  # every rank calls this
    stage = PipelineStage(part, rank, stages, device)
    pipeline = Schedule1F1B(
        stage,
        n_microbatches=8,  # equal ones, at least as many as stages
        loss_fn=lambda out, labels: cross_entropy(out.flatten(0, 1), labels.flatten()),
    )  # it also divides the gradients by 8
    optimizer = torch.optim.AdamW(part.parameters(), lr=2e-3)  # this stage's
    train_set, test_set = (WindowDataset(t, 128, 1024) for t in load_text(None, 128))
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0)  # the same on all
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)
    twin = part.head.weight if model.config.tied and rank == last > 0 else None
    counted: Any = [p for p in part.parameters() if p.requires_grad and p is not twin]
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        losses = losses_of(pipeline.step, stage, inputs, labels)
        if model.config.tied and rank in (0, last):  # one matrix: both need the sum
            tied = (part.token_embedding or part.head).weight
            dist.all_reduce(tied.grad, group=ends)
        # clip_grad_norm_ would take the norm of this stage alone, and the twin twice.
        squares = get_total_norm([p.grad for p in counted]).double().square()
        dist.all_reduce(squares)
        clip_grads_with_norm_(part.parameters(), MAX_NORM, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0 and rank == last:
            print(f"step {step:2} | loss {torch.stack(losses).mean().item():.3f}")
    part.eval()
    with torch.no_grad():
        _, inputs, labels = next(iter(DataLoader(test_set, batch_size=64)))
        losses = losses_of(pipeline.eval, stage, inputs, labels)
    if rank == last:
        print(f"held out | loss {torch.stack(losses).mean().item():.3f}")
    weights = {name: value.cpu() for name, value in part.state_dict().items()}
    parts = [{}] * stages if rank == 0 else None
    dist.gather_object(weights, parts)
    if parts:
        torch.save({name: part[name] for part in parts for name in part}, "model.pt")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
