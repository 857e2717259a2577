"""Train the GPT on several ranks, one stage each: all that PyTorch's pipeline takes.

Run: torchrun --nproc-per-node=2 08_pipeline_parallel/minimal.py
Expect: the losses of chapter 03's minimal.py, and one of held-out text.
"""

import functools
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from model import GPT, GPTConfig

MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 8  # at least as many as stages, all equal
MAX_NORM = float("inf")  # 1.0 is usual; chapter 03's minimal.py does not clip


class Part(nn.Module):
    """Yours: the layers of one stage, under their names in the whole model."""

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        """Keep some blocks; on the first stage the embeddings, on the last the head."""
        super().__init__()
        # Parts by tracing (minimal_gpipe.py) leave the gradients of tied weights apart.
        self.token_embedding = model.token_embedding if index == 0 else None
        self.position_embedding = model.position_embedding if index == 0 else None
        own = torch.arange(len(model.blocks)).tensor_split(stages)[index].tolist()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in own})
        self.final_norm = model.final_norm if index == stages - 1 else nn.Identity()
        self.head = model.head if index == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T) tokens or (B, T, D) activations to what the next stage takes."""
        if self.token_embedding and self.position_embedding:
            x = self.token_embedding(x) + self.position_embedding.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.final_norm(x))


def micro_batch_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Yours: the mean of one micro-batch; gradients are averaged over micro-batches."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def losses_of(run: Any, stage: Any, inputs: Any, labels: Any, **every: Any) -> list:
    """Call a schedule's step or eval; on the last stage, return all losses."""
    for name, value in every.items():
        every[name] = value.to(stage.device) if isinstance(value, Tensor) else value
    tokens = [inputs.to(stage.device)] if stage.is_first else []
    target = labels.to(stage.device) if stage.is_last else None
    run(*tokens, target=target, losses=(losses := []), return_outputs=False, **every)
    return losses


def holders_of(parts: list, model: Any) -> dict[Tensor, Any]:
    """Return the stages of each parameter; refuse two mistakes of a `Part`."""
    owned, named, holders = set(model.parameters()), {}, {}
    for i, one in enumerate(parts):
        for name, p in one.named_parameters():
            # It copies or makes a layer, whose weight is tied to none then; or it
            # counts layers from 0 on each stage, and one name has two values.
            if p not in owned or named.setdefault(name, p) is not p:
                raise SystemExit(f"stage {i}: {name} is a copy, or two have this name")
            holders[p] = (*holders.get(p, ()), i)
    return holders


# Only for models whose forward writes buffers, as BatchNorm's (then on every stage).
def learn_shapes(part: Any, *call: Any) -> None:
    """Make the first call, which runs garbage too; undo what it moves."""
    kept = [buffer.clone() for buffer in part.buffers()]
    losses_of(*call)
    for buffer, before in zip(part.buffers(), kept, strict=True):
        buffer.copy_(before)
    part.zero_grad()


def sum_tied_gradients(tied: dict[Tensor, Any]) -> None:
    """Give all stages of a tied weight the sum of their gradients."""
    for p, group in tied.items():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)


# clip_grad_norm_ would take this stage's norm alone, and a tied weight twice.
def clip_by_whole_norm(part: Any, own: list, device: torch.device) -> None:
    """Clip by all stages' norm; `own` are this stage's, a tied weight on one alone."""
    norm = get_total_norm([p.grad for p in own if p.grad is not None])
    squares = norm.to(device).double().square()
    dist.all_reduce(squares)
    clip_grads_with_norm_(part.parameters(), MAX_NORM, squares.sqrt())


def main(optimizer_of: Any = None, file: str = "model.pt") -> None:
    """Train for one epoch, the stage of this rank's number on one device."""
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)  # the same weights on all ranks
    # Too large for one rank? Build it under torch.device("meta"), without memory, after
    # torch.__future__.set_swap_module_params_on_conversion(True), which lets parts keep
    # their Parameter objects. Replace part.to(device) by part.to_empty(device=device),
    # then load the part's weights from a file, and fill buffers that the file lacks.
    model = GPT(GPTConfig())  # yours
    if stages > len(model.blocks):  # yours
        raise SystemExit(f"{len(model.blocks)} block(s) cannot make {stages} stages")
    parts: list[Any] = [Part(model, i, stages) for i in range(stages)]
    holders, part, last = holders_of(parts, model), parts[rank], stages - 1
    device = torch.device("cpu")  # unless each local rank can have a GPU of its own
    gpus = torch.accelerator.device_count() - torch.mps.device_count()  # not Apple's
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator() or device
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(rank)  # dropout: other masks on each stage, so draw no data by it
    # A group for each set of stages that share weights; every rank makes all of them.
    new_group = functools.cache(dist.new_group)
    tied = {p: new_group(among) for p, among in holders.items() if len(among) > 1}
    tied = {p: group for p, group in tied.items() if rank in holders[p]}
    own = [p for p in part.parameters() if holders[p][0] == rank]
    # One to train, one to evaluate: a stage that changes between them learns the shapes
    # of its messages anew each time.
    part.to(device)
    stage, other = (PipelineStage(part, rank, stages, device) for _ in range(2))
    pipeline, evaluation = (
        Schedule1F1B(one, MICRO_BATCHES, micro_batch_loss) for one in (stage, other)
    )
    # For parameter groups go by names in `model`: in parts a tied weight has two names.
    optimizer = (optimizer_of or torch.optim.AdamW)(part.parameters(), lr=2e-3)
    train, test = (WindowDataset(t, 128, 1024) for t in load_text(None, 128))  # yours
    batch_size = MICRO_BATCHES * MICRO_BATCH_SIZE
    sampler = DistributedSampler(train, num_replicas=1, rank=0)  # the same on all
    loader = DataLoader(train, batch_size, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):  # yours
        if step == 1:
            learn_shapes(part, pipeline.step, stage, inputs, labels)
        losses = losses_of(pipeline.step, stage, inputs, labels)
        sum_tied_gradients(tied)
        clip_by_whole_norm(part, own, device)
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0 and rank == last:
            print(f"step {step:2} | loss {torch.stack(losses).mean().item():.3f}")
    part.eval()
    with torch.no_grad():
        batches = DataLoader(test, batch_size, drop_last=True)
        _, inputs, labels = next(iter(batches))  # yours
        losses = losses_of(evaluation.eval, other, inputs, labels)
    if rank == last:
        print(f"held out | loss {torch.stack(losses).mean().item():.3f}")
    weights = {name: value.cpu() for name, value in part.state_dict().items()}
    dist.gather_object(weights, saved := [{}] * stages if rank == 0 else None)
    if saved:
        torch.save({name: one[name] for one in saved for name in one}, file)


if __name__ == "__main__":
    main()
    gc.collect()  # now the model is gone, even one in a reference cycle
    dist.destroy_process_group()
