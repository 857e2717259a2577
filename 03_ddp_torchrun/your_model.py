"""Do two ranks train your own model as one process would? With DDP, and with a sum.

Run: torchrun --nproc-per-node=2 03_ddp_torchrun/your_model.py
Expect: yes for DDP; for gradients that are summed, where they go wrong and how far.
"""

import torch
import torch.distributed as dist
from torch import nn

from ranks import check, join, leave, say
from same_as_one_process import same_as_one_process


def build():
    """Make the model: from x, (B, 1), to what is to become its sine."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model, batch):
    """Return the mean loss over a batch of x and y."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sum_over_ranks(model):
    """Let backward all-reduce each gradient, and forget to divide it."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


def main() -> None:
    """Ask twice, with three global batches."""
    device = join(at_least=2, at_most=6)
    with device:  # tensors are made there
        batches = [(x, x.sin()) for x in torch.linspace(-3, 3, 180).view(3, 60, 1)]
        ways = nn.parallel.DistributedDataParallel, sum_over_ranks
        ddp, by_hand = (same_as_one_process(build, loss_of, w, batches) for w in ways)
    say(f"DDP | {ddp[1]}\nsum | {by_hand[1]}")
    check(ddp[0] and not by_hand[0], "DDP trains as one process does, a sum does not")
    leave()


if __name__ == "__main__":
    main()
