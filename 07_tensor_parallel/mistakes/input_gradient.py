"""Forget to all-reduce the gradient of what all ranks read.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/input_gradient.py
Expect: no error, and a loss that falls; but the weight that every rank has a copy of,
    `first`, is no longer the same on both.
"""

import torch
import torch.distributed as dist


class CopyToRanks(torch.autograd.Function):
    """Send nothing in forward; all-reduce the gradient in backward."""

    @staticmethod
    def forward(ctx, x):
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grad_outputs):
        """Return the sum of the ranks' terms."""
        total = grad_outputs[0].clone()
        dist.all_reduce(total)
        return total


def main() -> None:
    """Train `first`, which is whole, below a matrix cut by columns, then by rows."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, first, a, b = (torch.randn(s) / 3 for s in [(64, 4), (4, 8), (8, 16), (16, 1)])
    target = x.sum(dim=1, keepdim=True).sin()
    columns, rows = a.chunk(world_size, 1)[rank], b.chunk(world_size, 0)[rank]
    weights = [w.clone().requires_grad_() for w in (first, columns, rows)]
    losses = []
    for _ in range(200):
        hidden = (x @ weights[0]).tanh()
        # WRONG: from its columns a rank computes a term of the gradient of `hidden`,
        # and `first` below it needs the sum.
        # Write: y = (CopyToRanks.apply(hidden) @ weights[1]).relu() @ weights[2]
        y = (hidden @ weights[1]).relu() @ weights[2]
        # (In your code: SumOverRanks.) detach() shares y's memory; autograd isn't told.
        # A term's gradient is the sum's, and @ (unlike tanh) does not keep its result.
        dist.all_reduce(y.detach())
        loss = (y - target).square().mean()
        grads = torch.autograd.grad(loss, weights)
        for weight, grad in zip(weights, grads, strict=True):
            weight.data -= 0.3 * grad
        losses.append(loss.item())
    dist.broadcast(of_rank_0 := weights[0].detach().clone(), src=0)
    apart = torch.dist(weights[0].detach(), of_rank_0)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"first is {apart:.1f} away from rank 0's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
