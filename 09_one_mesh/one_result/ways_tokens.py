"""Ways in which tokens travel: along a sequence cut over the ranks, or to experts."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from context_parallel import add_up_gradients, loss_of_shard
from expert_block import ExpertBlock
from mixture import Mixture, MixtureOfExperts, mean_gradients
from model import GPT
from ring_attention import zigzag
from training import CONFIG, Trained
from ways_data_parallel import named_weights, with_adamw
from ways_split import from_all_ranks

EXPERTS = 4


def context(settings: Any) -> Trained:
    """Cut the samples along their tokens; keys and values go round a ring."""
    model, n = GPT(CONFIG), dist.get_world_size()
    shards = zigzag(CONFIG.block_size, n)

    def forward(inputs: Tensor, labels: Tensor) -> Tensor:
        return loss_of_shard(model, inputs, labels, shards)

    trained = with_adamw(forward, model, settings, lambda: add_up_gradients(model))
    add_gradients = trained.backward
    # A rank has a term of the loss. The mean of n times the terms is their sum.
    trained.backward = lambda inputs, labels: n * add_gradients(inputs, labels)
    return trained


def with_experts(mixture: Callable[..., Mixture]) -> GPT:
    """Build a GPT of whose blocks each has a mixture in which nobody is dropped."""
    model, factor = GPT(CONFIG), EXPERTS  # room for all tokens in each expert
    model.blocks = nn.ModuleList(
        ExpertBlock(CONFIG, mixture(CONFIG.width, EXPERTS, capacity_factor=factor))
        for _ in range(CONFIG.layers)
    )
    return model


def experts_alone(settings: Any) -> Trained:
    """Hold all experts in one process."""
    model = with_experts(Mixture)
    return with_adamw(model, model, settings)


def experts(settings: Any) -> Trained:
    """Hold an n-th of the experts; tokens travel to theirs by all-to-all."""
    model = with_experts(MixtureOfExperts)
    myself: Any = dist.new_subgroups(group_size=1)[0]  # no other rank has our experts
    trained = with_adamw(
        model, model, settings, lambda: mean_gradients(model, copies=myself)
    )
    trained.whole = lambda: from_all_ranks(named_weights(model))
    return trained
