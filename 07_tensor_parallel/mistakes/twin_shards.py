"""Draw each rank's shard from the same seed.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/twin_shards.py
Expect: no error; the shards are equal and stay so, as if the layer were half as wide.
"""

import torch
import torch.distributed as dist

WIDTH = 4


def main() -> None:
    """Train an MLP that is cut by columns, then by rows."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(256, 2)
    target = (2 * x).sin().sum(dim=1, keepdim=True)
    # WRONG: what is alike and gets the same gradient stays alike. Draw the whole and
    # keep a part, or give each rank a seed of its own for its shards.
    # Write: columns = torch.randn(2, WIDTH).chunk(world_size, dim=1)[rank].clone()
    columns = torch.randn(2, WIDTH // world_size)
    weights = [columns.requires_grad_(), torch.ones(len(columns.T), 1) / WIDTH]
    weights[1].requires_grad_()
    loss = torch.zeros(())
    for _ in range(300):
        y = (x @ weights[0]).tanh() @ weights[1]
        # In place, unseen by autograd: @ does not keep its result for backward.
        dist.all_reduce(y.detach())
        loss = (y - target).square().mean()
        grads = torch.autograd.grad(loss, weights)
        for weight, grad in zip(weights, grads, strict=True):
            weight.data -= 0.1 * grad
    dist.broadcast(of_rank_0 := columns.detach().clone(), src=0)
    print(f"loss {loss.item():.2f} of {target.var():.2f}")
    apart = torch.dist(columns.detach(), of_rank_0)
    print(f"columns of rank {rank} are {apart:.1f} away from rank 0's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
