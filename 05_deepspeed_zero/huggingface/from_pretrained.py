"""Load a checkpoint straight into the shards of stage 3: `HfDeepSpeedConfig`.

Run: torchrun --nproc-per-node=2 05_deepspeed_zero/huggingface/from_pretrained.py
Expect: each rank keeps its shards only. While it loads, rank 0 has the whole checkpoint
    in its memory, and the others have one tensor at a time.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_setup import join, leave, prepare
from peak_counter import PeakCounter
from ranks import check, gather, say

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def write_checkpoint(folder: str) -> dict[str, torch.Tensor]:
    """Save a Qwen2 of 28 million parameters in bf16; every rank returns its weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # Neither token exists in a text of bytes.
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return dict(model.named_parameters())


def load(folder: str) -> tuple[Any, int]:
    """Load the checkpoint into shards; return the model and this rank's peak bytes."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    # from_pretrained asks whether such an object is alive: keep it until it is done.
    alive = HfDeepSpeedConfig(CONFIG)
    with PeakCounter() as counter:
        counter.start()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    del alive
    return model.train(), counter.peak  # from_pretrained has called eval()


def main() -> None:
    """Load into shards; compare each rank's memory, and the weights."""
    import deepspeed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = prepare(CONFIG)
    join(at_least=2)
    with tempfile.TemporaryDirectory() as own_folder:
        folder = gather(own_folder)[0]
        expected = write_checkpoint(folder)
        whole = sum(p.nbytes for p in {id(t): t for t in expected.values()}.values())
        say(f"the checkpoint's weights take {whole / 1e6:.1f} MB")
        model, peak = load(folder)
        dist.barrier()  # rank 0's folder is gone when it goes on
    kept = sum(p.ds_tensor.nbytes for p in model.parameters())
    for rank, (mine, most) in enumerate(gather((kept, peak))):
        say(f"rank {rank} | keeps {mine / 1e6:5.1f} MB | peak {most / 1e6:5.1f} MB")
    is_right = model.training and kept < 1.01 * whole / dist.get_world_size()
    is_right &= peak < 0.8 * whole or dist.get_rank() == 0
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            is_right &= torch.equal(parameter, expected[name].to(device))
    check(is_right, f"{len(names)} tensors in shards, with the checkpoint's weights")
    leave()


if __name__ == "__main__":
    main()
