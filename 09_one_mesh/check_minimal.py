"""Does minimal.py train the model that one process would? Ask that of a model of yours.

Run: torchrun --nproc-per-node=4 09_one_mesh/check_minimal.py
Expect: a `check:` that counts the tensors compared after each of three steps, or a line
    that names the first one that differs.
"""

import logging
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from minimal import TENSOR, shard_twice
from model import GPT, GPTConfig
from ranks import check, fail, join, leave
from same_as_one_process import same_as_one_process


def next_byte_loss(model: Any, batch: list[Tensor]) -> Tensor:
    """Return the mean loss of a batch of inputs and labels, (B, T) each."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def step_on_two_axes(
    model: Any, optimizer: Any, loss_of: Any, batch: list[Tensor]
) -> Tensor:
    """Step as minimal.py does, without clipping, as the one process does."""
    optimizer.zero_grad()
    with tp.loss_parallel():
        loss: Any = loss_of(model, batch)
        loss.backward()
    optimizer.step()
    return getattr(loss, "full_tensor", loss.detach)()  # of whole logits it is plain


def compare_two_axes(device: torch.device) -> tuple[bool, str]:
    """Train both ways; return whether it is the same, and a line."""
    shape = dist.get_world_size() // TENSOR, TENSOR
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)  # the same on all ranks
    bytes_read = torch.randint(256, (3, 4 * shape[0], 33), device=device)  # 3 batches
    batches = [[batch[:, :-1], batch[:, 1:]] for batch in bytes_read]
    place = mesh.get_local_rank("data")  # ranks that share matrices share samples
    mine = tree_map(lambda part: part.chunk(shape[0])[place], batches)
    wrap = partial(shard_twice, mesh=mesh, policy=MixedPrecisionPolicy())
    return same_as_one_process(
        lambda: GPT(GPTConfig(block_size=32)).to(device),
        next_byte_loss,
        wrap,
        batches,
        step_on_two_axes,
        shards=mine,
    )


def main() -> None:
    """Join, compare, check, leave."""
    if int(os.environ.get("WORLD_SIZE", TENSOR)) % TENSOR:
        fail(f"give a multiple of {TENSOR} ranks, as --nproc-per-node={2 * TENSOR}")
    device = join()
    # It warns of what whole tensors cost, which only this comparison wants.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")
    check(*compare_two_axes(device))
    leave()


if __name__ == "__main__":
    main()
