"""Selective activation checkpointing: keep what is dear to compute, not the rest.

Carry away this one file: checkpoint_wrapper(block, context_fn=keep_half_of_products).
"""

from itertools import count
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

aten: Any = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}  # without and with a bias
KEPT = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    # Of tensor parallelism (chapter 07): recomputing would send it again.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,  # type: ignore
}


# Before fully_shard, for each i: model.blocks[i] = checkpoint_wrapper(
#     model.blocks[i], context_fn=keep_half_of_products)
def keep_half_of_products() -> Any:
    """Keep attention, messages and every second matrix product, as torchtitan does."""
    products = count()  # anew in each block; the policy is asked in forward only

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in KEPT or (operator in PRODUCTS and next(products) % 2 == 0):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
