"""Weights come from rank 0 once, when DDP wraps the model; buffers again and again.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/rules/initial_weights.py
Expect: different models where rank 0 loads a checkpoint after wrapping, one where it
    loads it before; then whose buffers the ranks have after each kind of forward pass.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import check, gather, join, leave, same_on_all_ranks, say


def load_after_wrapping(model: nn.Module, checkpoint: dict) -> DDP:
    """Wrong: DDP has copied rank 0's weights, and never compares them again."""
    ddp_model = DDP(model)
    if dist.get_rank() == 0:
        model.load_state_dict(checkpoint)
    return ddp_model


def load_before_wrapping(model: nn.Module, checkpoint: dict) -> DDP:
    """Right: wrapping, by default, copies rank 0's weights and buffers to all."""
    if dist.get_rank() == 0:
        model.load_state_dict(checkpoint)
    return DDP(model)


def draw_layer(seed: int) -> nn.Linear:
    """Draw a layer, with a buffer that can say which rank it comes from."""
    torch.manual_seed(seed)
    layer = nn.Linear(4, 1)
    layer.register_buffer("origin", torch.tensor(seed))
    return layer


def take_steps(model: nn.Module, inputs: torch.Tensor) -> None:
    """Take five steps; DDP averages gradients, and does not compare weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()


def origins(ddp_model: DDP, inputs: torch.Tensor) -> list[int]:
    """Put the rank into the buffer, go forward, return what each rank then has."""
    origin = ddp_model.module.get_buffer("origin").fill_(dist.get_rank())
    ddp_model(inputs)
    return gather(int(origin))


def main() -> None:
    """Load in both ways and train, as one process does; then go forward in four."""
    device = join(at_least=2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = torch.arange(16.0 * world_size, device=device).sin().view(-1, 4)
    own, alone = inputs.chunk(world_size)[rank], draw_layer(seed=100).to(device)
    for load in (load_after_wrapping, load_before_wrapping):
        ddp_model = load(
            draw_layer(seed=rank).to(device), draw_layer(seed=100).state_dict()
        )
        take_steps(ddp_model, own)
        is_same = same_on_all_ranks(ddp_model.parameters())
        say(f"{load.__name__:20} | after 5 steps all ranks hold one model: {is_same}")
    take_steps(alone, inputs)

    say("whose buffers the ranks have after a forward pass")
    whose = {"in training": origins(ddp_model, own)}
    ddp_model.eval()
    whose["in eval"] = origins(ddp_model, own)
    with torch.no_grad():
        whose["in eval, under no_grad"] = origins(ddp_model, own)
    ddp_model.train()
    whose["in training, after no_grad"] = origins(ddp_model, own)
    for name, ranks in whose.items():
        say(f"  {name:26} | {ranks}")
    check(
        is_same
        and torch.allclose(ddp_model.module.weight, alone.weight, atol=1e-6)
        and [len(set(ranks)) for ranks in whose.values()] == [1, 1, 1, world_size],
        "loaded before wrapping, 5 steps end with the weights of one process",
    )
    leave()


if __name__ == "__main__":
    main()
