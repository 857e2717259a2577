"""What the three stages by hand share: a model, a loop, a count, a comparison."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ranks import check, gather, join, leave, same_on_all_ranks, say

STEPS, WIDTH = 5, 64
# Takes a model, and whether to train it in bf16 with fp32 master weights. Returns the
# model as it is trained, its optimizer, and what to call between backward and step.
Way = Callable[[nn.Module, bool], tuple[Any, torch.optim.Optimizer, Callable[[], Any]]]


def build_model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Make the same model on every rank: each byte is to predict the next."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
    head.weight = embedding.weight  # tied, as in a GPT
    mlp = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(embedding, *mlp, head).to(device, dtype)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks; every rank calls this."""
    used = gather([p.grad is not None for p in model.parameters()])
    for p, by_rank in zip(model.parameters(), zip(*used, strict=True), strict=True):
        if any(by_rank):  # all ranks have to make the same calls
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def train_batches(
    model: Any, optimizer: Any, finish: Any, batches: Iterable[Tensor]
) -> None:
    """Take a step on each batch of tokens (B, T + 1); leave the last gradients."""
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        finish()
        optimizer.step()


def bytes_kept(model: Any, optimizer: Any, parameters: int) -> dict[str, float]:
    """Return the bytes for each of a model's parameters that this rank keeps."""
    weights, shards = list(model.parameters()), getattr(optimizer, "shards", {})
    local = getattr(optimizer, "local", optimizer)
    kinds = {
        # Stage 3 has memory for whole parameters, too; between steps it is freed.
        "weights": [*weights, *(part.flat for part in getattr(model, "parts", []))],
        "gradients": [t.grad for t in [*weights, *shards.values()]],
        # Of the moments alone: AdamW's counter of steps is one number.
        "optimizer state": [t for s in local.state.values() for t in s.values()],
    }
    kinds["optimizer state"] += [t for p, t in shards.items() if t.dtype != p.dtype]
    kept = {}
    for kind, tensors in kinds.items():
        storages = [t.untyped_storage() for t in tensors if t is not None and t.dim()]
        unique = {storage.data_ptr(): storage.nbytes() for storage in storages}
        kept[kind] = sum(unique.values()) / parameters
    return kept


def whole_parameters(model: Any) -> dict[str, Tensor]:
    """Return the whole parameters by name; every rank calls this."""
    if hasattr(model, "full_parameters"):
        return model.full_parameters()
    return {name: p.detach() for name, p in model.named_parameters()}


def main(way: Way) -> None:
    """Compare with one process in float64; count a rank's bytes in bf16."""
    device = join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)  # to compare, any tokens will do
    shape = STEPS, 4 * world_size, 33
    batches = torch.randint(256, shape, generator=draw).to(device)
    shards = [batch.chunk(world_size)[rank] for batch in batches]

    alone = build_model(device, torch.float64)  # so that rounding cannot hide a mistake
    adam = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    train_batches(alone, adam, lambda: None, batches)
    expected = dict(alone.named_parameters())
    sharded, optimizer, finish = way(build_model(device, torch.float64), False)
    train_batches(sharded, optimizer, finish, shards)
    ours = whole_parameters(sharded)
    far = [(ours[name] - expected[name]).abs().max() for name in expected]
    apart = torch.stack(far).max().item()  # max() would drop a NaN

    mixed, optimizer, finish = way(build_model(device, torch.float32), True)
    train_batches(mixed, optimizer, finish, shards[:1])
    count = sum(p.numel() for p in alone.parameters())
    say("bytes for each parameter in bf16, between two steps")
    for other, kept in enumerate(gather(bytes_kept(mixed, optimizer, count))):
        kinds = " | ".join(f"{kind} {kept[kind]:.2f}" for kind in kept)
        say(f"  rank {other} | {kinds} | together {sum(kept.values()):.2f}")
    is_right = same_on_all_ranks(ours.values()) and apart < 1e-11
    check(
        is_right, f"after {STEPS} steps {world_size} ranks hold one process's weights"
    )
    leave()
