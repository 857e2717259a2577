"""Find misspelt keys in a DeepSpeed config, which DeepSpeed overlooks without a word.

Run: python 05_deepspeed_zero/huggingface/check_config.py --config=FILE
Expect: the first unknown key and what may have been meant, with a non-zero status, or
    that there is none.
"""

import argparse
import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ranks import fail, read_options

# The top-level keys that DeepSpeed 0.19.8 reads, documented or not, and those that it
# has removed: for these it raises an error of its own, which says what to use instead.
# https://www.deepspeed.ai/docs/config-json/
KEYS = """
activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
communication_data_type compile compression_training csv_monitor curriculum_learning
data_efficiency data_parallel_size data_types dataloader_drop_last datastates_ckpt
disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
gradient_predivide_factor graph_harvesting hybrid_engine log_level
managed_gradient_accumulation memory_breakdown nebula optimizer pipeline
prescale_gradients progressive_layer_drop quantize_training scheduler
seq_parallel_communication_data_type sequence_parallel_size sparse_attention
sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast
train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
vocabulary_size wall_clock_breakdown wandb weight_quantization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
KNOWN_KEYS = set(KEYS.split())


def unknown_key(config: Any) -> str:
    """Name a key that DeepSpeed does not know, and what may have been meant, or ''.

    Or say what is no JSON object where one has to be. At the top level DeepSpeed
    overlooks an unknown key: `zero_optimisation` trains at stage 0. In the section
    `zero_optimization` it refuses one, in four lines.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    names = [*fields, *(f.alias for f in fields.values() if f.alias)]
    sections: list[tuple[str, Any, Iterable[str]]] = [("", config, KNOWN_KEYS)]
    if isinstance(config, dict) and "zero_optimization" in config:
        sections += [("zero_optimization: ", config["zero_optimization"], names)]
    for section, keys, known in sections:
        if not isinstance(keys, dict):
            return f"{section}{json.dumps(keys)[:40]} is no JSON object, {{...}}"
        for key in keys:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                return f"{section}unknown key {key!r}{meant}"
    return ""


def main(options: argparse.Namespace) -> None:
    """Check a file."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for one
    try:
        config = json.loads(options.config.read_text())
    except (OSError, ValueError) as error:
        fail(f"--config {options.config}: {error}")
    if problem := unknown_key(config):
        fail(f"{options.config}: {problem}")
    print(f"{options.config}: DeepSpeed knows all of its {len(config)} keys")


if __name__ == "__main__":
    main(read_options(config={"type": Path, "required": True, "metavar": "FILE"}))
