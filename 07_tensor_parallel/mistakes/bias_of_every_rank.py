"""Add a bias on every rank before the sum over ranks.

Run: torchrun --nproc-per-node=2 07_tensor_parallel/mistakes/bias_of_every_rank.py
Expect: no error, and the loss falls to 0; the bias that is learnt is half of the right
    one, which another number of ranks will find out.
"""

import torch
import torch.distributed as dist


def main() -> None:
    """Learn y = x.sum() + 3 with a weight cut by rows, and a bias."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    target = x.sum(dim=1, keepdim=True) + 3
    mine = x.chunk(world_size, dim=1)[rank]
    rows = torch.zeros(mine.shape[1], 1, requires_grad=True)
    bias, loss = torch.zeros(1, requires_grad=True), torch.zeros(())
    for _ in range(100):
        # WRONG: each rank brings the bias into the sum: it counts world_size times.
        # Write: term, added = mine @ rows, bias
        term, added = mine @ rows + bias, 0.0
        # In place, unseen by autograd: + does not keep its result for backward.
        dist.all_reduce(term.detach())
        loss = (term + added - target).square().mean()
        grads = torch.autograd.grad(loss, (rows, bias))
        for weight, grad in zip((rows, bias), grads, strict=True):
            weight.data -= 0.1 * grad
    print(f"loss {loss.item():.3f}, bias {bias.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
