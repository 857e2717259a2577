"""Train the GPT on several ranks with ZeRO stage 2: all that DeepSpeed takes.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/minimal.py
Expect: the losses of chapter 03's minimal.py.
"""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from data import WindowDataset, load_text
from deepspeed_setup import leave
from model import GPT, GPTConfig

CONFIG: dict[str, Any] = {
    # Samples for one rank at a time. Times "gradient_accumulation_steps" and ranks it
    # is "train_batch_size": of these three give two, DeepSpeed works out the third.
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 0.0,  # off, as in chapter 03; unless you say so it is 1.0
    # An optimizer such as SGD also needs "zero_allow_untested_optimizer": True.
    "zero_optimization": {"stage": 2},  # or 1 or 3
    # This trains in fp32. "bf16": {"enabled": True} would cast the weights, but no
    # inputs: float ones then need .to(torch.bfloat16). For a GPU without bf16 there is
    # "fp16", which scales the loss, and skips a step whose gradients overflow.
}


def main() -> None:
    """Train for one epoch on one device a rank."""
    # Without a GPU, DeepSpeed would first compile C++ for minutes. GPUs do not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()  # in place of init_process_group
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # In place of DDP, and of chapter 03's set_device_index. A config that is in a file
    # is passed as config="ds.json".
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    train_set = WindowDataset(load_text(None, 128)[0], block_size=128, samples=1024)
    sampler = DistributedSampler(train_set, drop_last=True)  # set_epoch(n) for epoch n
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    for step, (_, inputs, labels) in enumerate(loader, start=1):
        loss = engine(inputs.to(engine.device), labels.to(engine.device))
        engine.backward(loss)  # in place of loss.backward(); averages over the ranks
        # In place of optimizer.step() and zero_grad(): clips, steps this rank's shard,
        # clears the gradients. Stages 1 and 2 then gather the new weights.
        engine.step()
        dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
        if step % 4 == 0 and dist.get_rank() == 0:
            print(f"step {step:2} | loss {mean.item():.3f}")
    engine.save_checkpoint("saved/minimal")  # every rank calls this


if __name__ == "__main__":
    main()
    # With a GPU for each rank dist.destroy_process_group() is enough (not run). On CPUs
    # the engine holds on to the group, whose threads might abort as Python ends.
    leave()
