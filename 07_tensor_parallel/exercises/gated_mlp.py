"""Write it: the gated MLP of Llama and Qwen, of which each rank holds a part.

Run: python 07_tensor_parallel/exercises/gated_mlp.py
Expect: a line for each of two ranks that says what is still wrong with its result, with
    its gradients, or with what it keeps and sends; once nothing is, a `check:`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from check_gated_mlp import check_gated_mlp
from parallel_layers import CopyToRanks, SumOverRanks, shard_of  # noqa: F401 (for your answer)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, split over the ranks; yours to rewrite.

    Each rank is to keep the part of the three matrices that `shard_of` cuts, as the
    parameters `gate`, `up` and `down`, and to send one message in forward and one in
    backward. Now every rank keeps all of it and sends nothing.
    """

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Keep what this rank computes with.

        Args:
            gate: (H, D) as nn.Linear stores it; like the next two, whole on every rank.
            up: (H, D).
            down: (D, H).
        """
        super().__init__()
        self.gate, self.up, self.down = map(nn.Parameter, (gate, up, down))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D), both the same on every rank."""
        hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(hidden, self.down)


if __name__ == "__main__":
    check_gated_mlp(GatedMLP)
