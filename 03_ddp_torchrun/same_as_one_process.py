"""Do several ranks train the model that one process would? Carry away this one file."""

import copy

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map


def plain_step(model, optimizer, loss_of, batch):
    """Train on a batch and return its mean loss; your own step may accumulate."""
    optimizer.zero_grad()
    (loss := loss_of(model, batch)).backward()
    getattr(model, "finish_gradient_sync", lambda: None)()  # DDP needs no such call
    optimizer.step()
    return loss


def states(model, wrapped, batches, loss_of, train_step, lr):
    """Train by SGD (Adam hides a wrong factor); yield loss and tensors step by step."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr), torch.zeros(())
    for batch in [None, *batches]:
        if batch is not None:
            loss = train_step(wrapped, optimizer, loss_of, batch).detach().clone()
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        named = [("loss", loss), *model.named_parameters(), *model.named_buffers()]
        cut = "_checkpoint_wrapped_module."  # activation checkpointing adds it
        whole = [(n, getattr(t, "full_tensor", t.detach)()) for n, t in named]
        yield {n.replace(cut, ""): t.detach().cpu().cdouble().clone() for n, t in whole}


def same_as_one_process(
    build, loss_of, wrap, batches, train_step=plain_step, shards=None, lr=0.1
):
    """Train on all ranks and as one process; return whether it is the same, and a line.

    Each rank passes whole batches, or its `shards`. No dropout, BatchNorm, clipping.
    """
    model, rank, world_size = build(), dist.get_rank(), dist.get_world_size()
    alone, first, within, due = copy.deepcopy(model), {}, 0.0, {}
    assert all(p.itemsize != 2 for p in model.parameters()), "16 bits: build().float()"
    for tensor in [*alone.parameters(), *alone.buffers()]:  # as rank 0 has built it
        dist.broadcast(values := tensor.detach().contiguous(), src=0)
        tensor.data.copy_(values)
    if not shards and any(len(t) % world_size for t in tree_leaves(batches)):
        raise ValueError(f"{world_size} ranks cannot share a batch evenly: use shards=")
    shards = shards or tree_map(lambda t: t.chunk(world_size)[rank], batches)
    right = states(alone, alone, batches, loss_of, plain_step, lr)
    ours = states(model, wrap(model), shards, loss_of, train_step, lr)
    for step, (due, now) in enumerate(zip(right, ours, strict=True)):
        first, far = first or due, torch.dist
        off = [n for n in due if not torch.allclose(now[n], due[n], 1e-5, 1e-6)]
        moved = {n: (far(now[n], first[n]) / far(due[n], first[n])).item() for n in off}
        dist.all_gather_object(found := [{}] * world_size, moved)
        if name := next((n for n in due if any(n in m for m in found)), ""):
            times = {r: round(m[name], 3) for r, m in enumerate(found) if name in m}
            when = f"after step {step}" if step else "before training"
            return False, f"differs {when}: {name} moved {times} times as far"
        within = max(within, *(far(now[n], due[n]).item() for n in due))
    dist.all_gather_object(far_off := [0.0] * world_size, within)
    moved = max(torch.dist(due[n], first[n]) for n, _ in alone.named_parameters())
    same = "same as one process" if moved > 1e-4 else "tells nothing"
    same += f": {len(batches)} steps, loss and {len(due) - 1} tensors"
    return bool(moved > 1e-4), f"{same} within {max(far_off):.0e}, moved {moved:.0e}"
