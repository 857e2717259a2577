"""Train the GPT on several ranks with ZeRO stage 2: all that DeepSpeed takes.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/minimal.py
Expect: the losses of chapter 03's minimal.py.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from deepspeed_setup import leave
from model import GPT, GPTConfig

# It may be a JSON file: initialize(config="ds.json", ...). For a --deepspeed_config of
# your script call deepspeed.add_config_arguments(parser) and initialize(args=args, ...)
# without config. Declare --local_rank too: the launcher `deepspeed` passes it.
CONFIG = {
    # Samples for one rank at a time. The DataLoader decides; nothing compares this with
    # its batch_size. It is multiplied with the number of ranks, and with
    # "gradient_accumulation_steps" if you give it: that makes the "train_batch_size".
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 0.0,  # off, as in chapter 03; unless you say so it is 1.0
    # An optimizer such as SGD also needs "zero_allow_untested_optimizer": True.
    # Begin with stage 1. If it does not fit, take 2, then 3, which may send more.
    "zero_optimization": {"stage": 2},
    # This trains in fp32, in stage 2 with 4 + 16/n bytes a parameter: a whole weight,
    # and shards of gradient, master weight and two moments. The next line would cast
    # weights, but no inputs: float ones need .to(torch.bfloat16); with fp16, .half().
    # "bf16": {"enabled": True},
    # For a GPU without bf16; a CPU may refuse it. It scales the loss, first by 2 ** 16,
    # and skips a step whose gradients overflow. A "loss_scale" other than 0 is fixed.
    # "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
}


def main() -> None:
    """Train for one epoch on one device a rank."""
    # Without a GPU, DeepSpeed would first compile C++ for minutes. GPUs do not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # The import has chosen the accelerator: a GPU if there is one, unless
    # DS_ACCELERATOR=cpu. (Without both it warned that it takes the CPU.) This takes its
    # backend. DeepSpeed will call all_gather_into_tensor and others by names that torch
    # 2.13 calls deprecated; they still work.
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    # Yours, with your parameter groups (none all frozen), and nothing to compile. Or,
    # as stage_1.py, name one in CONFIG. Under bf16 either steps fp32 master weights.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # Moves the model to this rank's device and wraps the optimizer. As DDP does, it
    # copies rank 0's weights to all ranks, but no buffers, such as BatchNorm's.
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    sampler = DistributedSampler(train_set, drop_last=True)  # set_epoch(n) for epoch n
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        loss = engine(inputs.to(engine.device), labels.to(engine.device))
        engine.backward(loss)  # averages the gradients over the ranks
        # Clips; steps the weights whose optimizer state is here; zeroes the gradients.
        # In stages 1 and 2 the ranks then give each other the new weights.
        engine.step()
        dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
        if step % 4 == 0 and dist.get_rank() == 0:
            print(f"step {step:2} | loss {mean.item():.3f}")
    # Each rank has a part of the state, so every rank calls this, and to resume
    # engine.load_checkpoint("saved/minimal"). For a model.pt, later, in one process:
    # from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    # torch.save(get_fp32_state_dict_from_zero_checkpoint("saved/minimal"), "model.pt")
    # More in checkpoints/README.md.
    engine.save_checkpoint("saved/minimal")


if __name__ == "__main__":
    main()
    # With a GPU for each rank dist.destroy_process_group() is enough (not run). On CPUs
    # the engine holds on to the group, whose threads might abort as Python ends.
    leave()
