"""What context_parallel.py compares: a GPT in one process, and what its ring costs.

Shapes: B samples of T tokens; the model's width is D.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from ranks import gather

B, T = 2, 250  # 4 ranks get 62 or 63 tokens: 250 divides neither by 4 nor by 8
CONFIG = GPTConfig(block_size=T, width=64)


def gradients_of_one_process(
    device: torch.device,
) -> tuple[GPT, Tensor, Tensor, list[Any]]:
    """Return a GPT, inputs and labels (B, T), and its loss followed by all gradients.

    They are the same on every rank.
    """
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device, torch.float64)
    tokens = torch.randint(256, (B, T + 1)).to(device)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    (loss := model(inputs, labels)).backward()
    return model, inputs, labels, [loss, *(p.grad for p in model.parameters())]


class Counted(TorchDispatchMode):
    """Counts the bytes that this rank sends, and the results of each matrix product."""

    sent, products = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call what was to be called."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.send.default:
            self.sent += args[0][0].nbytes
        if func is torch.ops.aten.bmm.default:  # of attention; linear layers have mm
            self.products += (result.numel(),)
        return result

    def activations_sent(self) -> float:
        """Return what was sent for a layer, in activations (B, T, D) of float64."""
        return self.sent / CONFIG.layers / (B * T * CONFIG.width * 8)


def work_of_all_ranks(products: Sequence[int]) -> list[list[float]]:
    """Return each rank's scores of the first layer, step by step of the ring.

    1 means that T / n queries meet as many keys, and all products are computed. Every
    rank calls this with the results of its matrix products.
    """
    n = dist.get_world_size()
    whole = B * CONFIG.heads * (T / n) ** 2
    # In each step one product is for the scores, and one for the output.
    return gather([scores / whole for scores in products[: 2 * n : 2]])


def slowest_to_mean(work: list[list[float]]) -> float:
    """Return the time of the slowest rank in each step, as a multiple of the mean."""
    slowest = sum(max(in_step) for in_step in zip(*work, strict=True))
    return slowest * len(work) / sum(map(sum, work))
