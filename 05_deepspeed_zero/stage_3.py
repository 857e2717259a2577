"""ZeRO stage 3: as stage 2, and a rank keeps the weights of its share only.

Run: deepspeed --num_gpus=2 05_deepspeed_zero/stage_3.py
Needs: requirements.txt. It takes a GPU for every rank if there is one.
Expect: each rank's optimizer counts half of the parameters, divided tensor by tensor;
    the loss falls as before; a `check:` that one process comes to the same weights.
Before: 05_deepspeed_zero/stage_2.py
Next: 05_deepspeed_zero/held.py
"""

import copy
from typing import Any

import torch.distributed as dist

from config_keys import refuse_unknown_keys
from data import global_batch, own_rows
from proof import LARGEST_COPY, check_engine, describe_ranks, mean_over_ranks
from qwen import count_parameters, model_and_tokens
from start import (
    choose_parts,
    find_place,
    join_group,
    leave_group,
    print_once,
    seconds_since_start,
    stage_parser,
)

CONFIG: dict[str, Any] = {
    # Samples for one rank at a time. The name says GPU and means rank.
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {
        # DeepSpeed's "Adam" is AdamW: weight decay apart from the gradient.
        "type": "Adam",
        # torch_adam takes PyTorch's own, so that nothing has to be compiled.
        "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True},
    },
    # Also what DeepSpeed does if you say nothing; 0 turns clipping off.
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}
BLOCK_SIZE = 64  # tokens in a sample


def main() -> None:
    """Load, join the group, hand the model to DeepSpeed, train, prove."""
    args = stage_parser("Train Qwen2 with one stage of ZeRO.").parse_args()
    device, reason = find_place()
    refuse_unknown_keys(CONFIG)
    stage = CONFIG["zero_optimization"]["stage"]
    model, tokens = model_and_tokens(args, stage, device, BLOCK_SIZE)
    join_group(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print_once(f"device: {device.type} with {dist.get_backend()} ({reason})")
    print_once(choose_parts(CONFIG, device, args.fused))
    is_small = count_parameters(model) <= LARGEST_COPY
    untrained = copy.deepcopy(model).to(device) if is_small else None

    # Imported here because DeepSpeed settles on a device when it is imported.
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    print_once("\n".join(describe_ranks(engine)))  # every rank must call it
    samples = engine.train_micro_batch_size_per_gpu() * world_size
    losses = []
    for step in range(args.steps):
        batch = global_batch(tokens, step, samples, BLOCK_SIZE)
        inputs = own_rows(batch, rank, world_size).to(device)
        # The labels are the inputs: the model itself shifts them by one token.
        loss = engine(input_ids=inputs, labels=inputs).loss
        engine.backward(loss)  # the gradients of all ranks meet in here
        engine.step()  # in stages 1 to 3 a rank steps for its share only
        losses.append(mean_over_ranks(loss))
        if step == 0:
            print_once(
                f"first step {seconds_since_start():.1f} s after this rank's start"
            )
        if step in {0, args.steps - 1}:
            print_once(f"step {step + 1:2} | mean loss over the ranks {losses[-1]:.4f}")
    print_once(f"check: {check_engine(engine, untrained, tokens, BLOCK_SIZE, losses)}")
    leave_group()


if __name__ == "__main__":
    main()
