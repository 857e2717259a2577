"""Memory of a ZeRO stage by the allocator, held against chapter 05's calculator.

Run: torchrun --standalone --nproc-per-node=1 tests/gpu/cases/zero_memory.py --stage=2
Expect: `figures:` in GB, what is allocated after a step and at its peak, beside what
    the calculator works out; a `check:` that the peak is no more than its need.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

MEMORY = Path(__file__).resolve().parents[3] / "05_deepspeed_zero" / "memory"
sys.path.insert(0, str(MEMORY))  # a case is no lesson: it reaches into a chapter

# In a tenth of a second a shape that has all that Qwen2 has, 134 M parameters.
SMALL = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
    num_attention_heads=12, num_key_value_heads=4, vocab_size=32000,
    tie_word_embeddings=True,
)  # fmt: skip
TOKENS, STEPS = 2048, 3


def main() -> None:
    """Train a few steps in bf16 with random weights, and read the allocator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--shape", default="")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cuda"
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    from peak import Job, rank_bytes  # type: ignore
    from will_it_fit import job_of_shape, tensor_sizes_of  # type: ignore

    if options.shape:
        job = job_of_shape(options.shape, tokens=TOKENS)
    else:
        config = AutoConfig.for_model("qwen2", **SMALL)
        job = Job(tensor_sizes_of(config), config, tokens=TOKENS)
    deepspeed.init_distributed()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(job.config, dtype=torch.bfloat16)
    zero = {"stage": options.stage, "reduce_bucket_size": job.bucket}
    adam = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": adam,
            "zero_optimization": zero,
        },
    )
    inputs = torch.randint(0, job.config.vocab_size, (1, TOKENS), device=device)
    for step in range(STEPS):
        if step == STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(input_ids=inputs, labels=inputs).loss)
        engine.step()
    kept = torch.cuda.memory_allocated() / 1e9
    peak = torch.cuda.max_memory_allocated() / 1e9
    worked_out = rank_bytes(job, options.stage, torch.distributed.get_world_size())
    need, step_peak = worked_out["need"] / 1e9, worked_out["step"] / 1e9
    figures = {"kept": kept, "peak": peak, "need": need, "step": step_peak}
    print(f"figures: {json.dumps({k: round(v, 3) for k, v in figures.items()})}")
    if not 0.6 * need < peak < 1.05 * need:
        sys.exit(f"check failed: a peak of {peak:.2f} GB, worked out {need:.2f} GB")
    print(f"check: a peak of {peak:.2f} GB, of the {need:.2f} GB that were worked out")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
