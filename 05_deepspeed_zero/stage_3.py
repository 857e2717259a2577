"""ZeRO stage 3: as stage 2, and weights are partitioned too, tensor by tensor.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/stage_3.py
Expect: each rank's optimizer holds half of the parameters; only tensors of up to 1,000
    values stay whole; the loss falls as before; the weights that one process comes to.
"""

import argparse
import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_setup import SETUP_OPTIONS, join, leave, prepare, undo_step_of_zeros
from engine_checks import (
    describe_ranks,
    mean_over_ranks,
    partitioned_evenly,
    same_as_one_process,
    whole_weights,
)
from model import GPT, GPTConfig
from ranks import check, number, read_options, same_on_all_ranks, say, start_ranks
from text import global_batch, next_token_loss, read_tokens

CONFIG: dict[str, Any] = {
    # Samples for one rank at a time. The name says GPU and means rank.
    "train_micro_batch_size_per_gpu": 4,
    # Weights and gradients in bf16; the optimizer keeps fp32 master weights.
    "bf16": {"enabled": True},
    "optimizer": {
        # DeepSpeed's "Adam" is AdamW: weight decay apart from the gradient.
        "type": "Adam",
        # torch_adam takes PyTorch's own, so that nothing has to be compiled.
        "params": {"lr": 2e-3, "weight_decay": 0.01, "torch_adam": True},
    },
    # Also what DeepSpeed does if you say nothing; 0 turns clipping off.
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1_000},
}
# Of a width that two ranks cannot halve, so that one sees DeepSpeed's padding.
SIZES = GPTConfig(block_size=32, width=65, heads=5)


def main(options: argparse.Namespace) -> None:
    """Hand a model to DeepSpeed, train, and compare with one process."""
    CONFIG["bf16"]["enabled"] = options.precision == "bf16"
    device = prepare(CONFIG)  # before DeepSpeed is imported
    join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = CONFIG["train_micro_batch_size_per_gpu"] * world_size
    # A sample is T tokens to read, and the one that follows the last.
    sizes = {"samples": samples, "block_size": SIZES.block_size + 1}
    batch_of = partial(global_batch, read_tokens(), **sizes)
    torch.manual_seed(0)
    model: Any = GPT(SIZES)  # DeepSpeed's type hint is too narrow
    untrained = copy.deepcopy(model)

    import deepspeed

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    undo_step_of_zeros(engine)  # in stage 0 DeepSpeed has taken one
    say("\n".join(describe_ranks(engine)))
    losses = []
    for step in range(options.steps):
        tokens = batch_of(step).chunk(world_size)[rank].to(device)
        loss = next_token_loss(engine, tokens)
        engine.backward(loss)  # the gradients are averaged over the ranks in here
        engine.step()  # in stages 1 to 3 a rank steps for its partition only
        losses.append(mean_over_ranks(loss))
        if step in {0, options.steps - 1}:
            say(f"step {step + 1:2} | mean loss over the ranks {losses[-1]:.4f}")
    check(*partitioned_evenly(engine))
    bits = "the same weights on each, to the last bit"
    check(same_on_all_ranks(whole_weights(engine)), bits)
    check(*same_as_one_process(engine, untrained, batch_of, losses))
    leave()


if __name__ == "__main__":
    steps = {"type": number(1, 10**9), "default": 10, "help": "optimizer steps"}
    precision = {"choices": ["bf16", "fp32"], "default": "bf16"}
    options = read_options(steps=steps, precision=precision, **SETUP_OPTIONS)
    start_ranks(main, 1, options)
