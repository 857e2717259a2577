"""Find the mistakes: a layer of two experts on two ranks, with three.

Run: python 09_one_mesh/exercises/broken_experts.py
Expect: for each of two ranks the first thing that is wrong, and status 1; once layer
    and step are right, a `check:`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from check_broken_experts import check_experts
from mixture import AllToAll


class TwoExperts(nn.Module):
    """Two experts, one on each rank, of which each token uses one."""

    def __init__(self, router: nn.Linear, expert: nn.Linear) -> None:
        """Take the router, the same on both ranks, and this rank's expert."""
        super().__init__()
        self.router, self.expert = router, expert

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's (N, D) tokens to (N, D), the residual included."""
        weight, chosen = self.router(x).softmax(1).max(1)  # (N,)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=2)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = counts.tolist(), arriving.tolist()
        rows = AllToAll.apply(x[order], received, sent)
        rows = AllToAll.apply(self.expert(rows), received, sent)
        return x + weight[:, None] * rows


def train_experts(
    layer: TwoExperts, x: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Step once for the mean loss of both ranks' samples."""
    optimizer.zero_grad()
    F.mse_loss(layer(x), labels).backward()
    for p in layer.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    optimizer.step()


if __name__ == "__main__":
    check_experts((TwoExperts, train_experts))
